"""A network description: its infinitely wide kernels, and a finite network of the same layers."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, PyTree

from .._support.compile import jit
from .._support.memory import TILE_BYTES, fill_kernel
from .._support.options import ProgressFn
from .._support.points import common_dtype
from .._support.types import AnyArray, Numbers
from ._branches import Serial, Sum
from ._inputs import as_points, check_finite_points, check_match, input_spec
from ._norm import Dropout
from ._spec import AbstractLayer, Band, Records, Spec
from ._states import Pairs, cross_vectors, images, vectors_with_themselves
from ._weights import Dense

LIVE_ARRAYS = 9
"""Number of arrays of the size of the largest layer that a tile needs at once, rounded up."""

LIVE_PAIRS, LIVE_COLUMNS = 4.5, 9
"""The same for banded images (measured: 4.2, 8.8): of all pairs, and of the columns alone."""

IMAGE_LANES = 16
"""Columns of a tile of images: compilers vectorise over them when they fill whole registers, which is
three to four times faster than any other number of columns."""

VECTOR_TILE = 1024
"""Largest tile side of a network on vectors: small enough that symmetry halves the work."""


@dataclass(frozen=True)
class Network(Serial):
    r"""Layers one after another, with the kernels of the infinitely wide network.

    The kernel of all outputs is $\Sigma\otimes I_c$; `kernel` gives $\Sigma$, of shape
    `(n1, n2)`. `kind="nngp"` is the covariance of the outputs at initialisation, `"ntk"` the
    tangent kernel (Jacot et al. 2018; Arora et al. 2019 for convolutions).

    There are two passes: each point with itself, once per point, and then pairs of points in tiles. On
    images only pairs of pixels that are near enough to each other to matter for the outputs are stored.
    """

    def kernel(
        self,
        x1: Numbers,
        x2: Numbers | None = None,
        *,
        kind: str = "ntk",
        tile_bytes: int = TILE_BYTES,
        progress: bool | ProgressFn = True,
        out: Literal["device", "host"] = "device",
    ) -> Array | np.ndarray:
        """The kernel between all points, in tiles.

        **Arguments:**

        - `x1`, `x2`: vectors `(n, c)` or images `(n, H, W, c)`; `x2=None` means `x1`, a
          symmetric kernel for half the work.
        - `kind`: `"ntk"` or `"nngp"`.
        - `tile_bytes`: working memory, besides the result.
        - `progress`: `True`, `False` or a function of `(done, total, label)`.
        - `out`: `"device"` or `"host"` memory for the result.

        **Returns:** array `(n1, n2)` in the dtype of the inputs (at least float32).
        """
        self._check_kind(kind)
        x1 = as_points(x1, "x1")
        x2 = None if x2 is None else as_points(x2, "x2")
        if x2 is not None:
            check_match(x1, x2)
            dtype = common_dtype(x1.dtype, x2.dtype)
            x1, x2 = x1.astype(dtype), x2.astype(dtype)
            check_finite_points(x2, "x2")
        check_finite_points(x1, "x1")
        shape = x1.shape[1:]
        self._check_ends(input_spec(x1.shape))
        n2 = x1.shape[0] if x2 is None else x2.shape[0]
        tile, block = self.tile_shape(x1.shape, n2, x1.dtype.itemsize, tile_bytes, x2 is None)
        points1 = self._points(x1, tile_bytes)
        points2 = None if x2 is None else self._points(x2, tile_bytes)
        result = fill_kernel(
            partial(_cross, self, kind, shape, block),
            points1,
            points2,
            tail=(),
            dtype=x1.dtype,
            tile=tile,
            out=out,
            label=f"{kind} tiles",
            progress=progress,
        )
        if x2 is None and _has_noise(self):
            return _with_diagonal(result, self.diagonal(x1, kind=kind, tile_bytes=tile_bytes))
        return result

    def kernel_block(
        self, x1: Numbers, x2: Numbers, kind: str = "ntk"
    ) -> Array | tuple[Array, Array]:
        """One tile, `(n1, n2)`: pure, may be traced, jitted and differentiated.

        `kind="both"` gives the pair `(nngp, ntk)` at the cost of the second. Derivatives are finite
        everywhere; at equal points, where the NTK of ReLU networks has a kink, the angle counts as
        constant.
        """
        if kind != "both":
            self._check_kind(kind)
        x1, x2 = as_points(x1, "x1"), as_points(x2, "x2")
        check_match(x1, x2)
        self._check_ends(input_spec(x1.shape))
        dtype = common_dtype(x1.dtype, x2.dtype)
        points1, points2 = (_pack_points(self, x.astype(dtype)) for x in (x1, x2))
        nngp, ntk = _cross_block(self, x1.shape[1:], points1, points2)
        return (nngp, ntk) if kind == "both" else nngp if kind == "nngp" else ntk

    def diagonal(self, x: Numbers, *, kind: str = "ntk", tile_bytes: int = TILE_BYTES) -> Array:
        """The kernel of every point with itself, `(n,)`, without pairs."""
        self._check_kind(kind)
        x = as_points(x, "x")
        check_finite_points(x, "x")
        self._check_ends(input_spec(x.shape))
        size = self._points_per_chunk(x, tile_bytes)
        parts = [_diagonal(self, kind, x[i : i + size]) for i in range(0, x.shape[0], size)]
        return jnp.concatenate(parts)

    def init(
        self, key: Array, spec: Spec | tuple[int, ...], width: int = 512, outputs: int = 1
    ) -> PyTree:
        """Random parameters of a finite network.

        **Arguments:**

        - `key`: PRNG key.
        - `spec`: shape of one input, `(c,)` or `(H, W, c)` (a batch axis may lead).
        - `width`: channels of every Dense and Conv that has no `width`.
        - `outputs`: channels of the last layer, which must be Dense.

        **Returns:** parameters for `apply`, one entry per layer.
        """
        if isinstance(spec, Spec):
            return Serial(self.layers).init(key, spec, width)
        last = self.layers[-1]
        if not isinstance(last, Dense):
            raise ValueError(
                f"init: the network must end in Dense to have {outputs} outputs, ends in {last}."
            )
        shape = spec if len(spec) in (2, 4) else (1, *spec)
        self._check_ends(input_spec(shape))
        body = Serial((*self.layers[:-1], replace(last, width=outputs, s=(last.s[0], 1))))
        return body.init(key, input_spec(shape), width)[0]

    def apply(self, params: PyTree, x: Numbers) -> Array:
        """Outputs `(n, c)` of the finite network."""
        return super().apply(params, jnp.asarray(x))

    def describe(self, input_shape: tuple[int, ...] | None = None) -> str:
        """One line per layer: its name, how its kernel is computed, and on which pixel pairs.

        With `input_shape`, `(c,)` or `(H, W, c)`, also the shapes and displacements.
        """
        lines = [f"{len(self.layers)} layers, infinitely wide"]
        if input_shape is None:
            return "\n".join(lines + [f"  {layer}: {_note(layer)}" for layer in self.layers])
        spec = input_spec((1, *input_shape))
        band = self._band(spec)
        bands = [None] * (len(self.layers) + 1) if band is None else self.bands((0, 0), spec)
        after = zip(self.layers, self.specs(spec)[1:], bands[1:], strict=True)
        for layer, end, need in after:
            where = f", {_extent(end, need)}" if end.is_image else ""
            lines.append(f"  {layer}: {_note(layer)}{where}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return super().__repr__()

    def tile_shape(
        self, shape: tuple[int, ...], n2: int, itemsize: int, tile_bytes: int, symmetric: bool
    ) -> tuple[tuple[int, int], int]:
        """Rows and columns of one tile, and the number of its rows to work on at a time.

        They follow from an estimate of the working memory. Tiles of images fill whole vector registers, if
        necessary with copies of the last point, and are computed a few rows at a time. Tiles of vectors
        are square and computed at once.
        """
        n1 = shape[0]
        units = tile_bytes // (self.pair_entries(shape) * itemsize)
        if len(shape) == 2:
            side = min(math.isqrt(max(1, units // LIVE_ARRAYS)), VECTOR_TILE)
            rows, cols = _even(n1, side), _even(n2, side)
            return (rows, cols), rows
        banded = self._band(input_spec(shape)) is not None
        pair, column = (LIVE_PAIRS, LIVE_COLUMNS) if banded else (LIVE_ARRAYS, 0)
        most = max(1, int(units / (pair + column)))
        side = _power_of_two(min(most, max(IMAGE_LANES, 3 * math.isqrt(int(units / pair)))))
        block = min(side, _power_of_two(int((units / side - column) / pair)))
        # Half-empty registers are still faster than none.
        rows, cols = (side if 2 * n > side else -(-n // block) * block for n in (n1, n2))
        return (rows, rows if symmetric else cols), block

    def pair_entries(self, shape: tuple[int, ...]) -> int:
        """Numbers that the largest layer stores for one pair of points."""
        spec = input_spec(shape)
        band = self._band(spec)
        bands = [None] * (len(self.layers) + 1) if band is None else self.bands((0, 0), spec)
        ends = zip(self.specs(spec), bands, strict=True)
        return max(_count(end, need) for end, need in ends)

    def _band(self, spec: Spec) -> Band:
        """Displacements to store at the input, or all pairs if these are fewer."""
        if not spec.is_image:
            return (0, 0)
        band = self.need((0, 0), spec)
        if band is None:
            return None
        ends = list(zip(self.specs(spec), self.bands((0, 0), spec), strict=True))
        banded = sum(_count(end, need) for end, need in ends)
        return band if banded < sum(_count(end, None) for end, _ in ends) else None

    def _points_per_chunk(self, x: Array, tile_bytes: int) -> int:
        arrays = math.ceil(LIVE_PAIRS + LIVE_COLUMNS)
        per_point = self.pair_entries(x.shape) * arrays + 4 * math.prod(x.shape[1:])
        return min(x.shape[0], max(1, tile_bytes // (per_point * x.dtype.itemsize)))

    def _points(self, x: Array, tile_bytes: int) -> Array:
        size = self._points_per_chunk(x, tile_bytes)
        parts = [_pack_points(self, x[i : i + size]) for i in range(0, x.shape[0], size)]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)

    def _check_kind(self, kind: str) -> None:
        if kind not in ("ntk", "nngp"):
            raise ValueError(f"kind must be 'ntk' or 'nngp', got {kind!r}.")

    def _check_ends(self, spec: Spec) -> None:
        end = self.out_spec(spec)
        if end.is_image:
            raise ValueError(
                f"The network ends with images of {end.shape} pixels, expected outputs (n, c). "
                "Add Flatten() or GlobalAvgPool(), and a Dense() read-out."
            )


def serial(*layers: object) -> Network:
    """A network of `layers`, one after another; the layers of networks among them are inserted."""
    if not layers:
        raise ValueError("serial: expected at least one layer, got none.")
    flat: list[AbstractLayer] = []
    for layer in layers:
        if not isinstance(layer, AbstractLayer):
            raise TypeError(
                f"serial: expected layers, got {layer!r}. Layers are instances: Relu(), not Relu; "
                "wrap any other elementwise function in Activation(function)."
            )
        flat.extend(layer.layers if isinstance(layer, Serial) else [layer])
    return Network(tuple(flat))


def _even(n: int, side: int) -> int:
    """The smallest tile side that needs no more tiles than `side` does: less padding."""
    return -(-n // -(-n // max(1, min(side, n))))


def _power_of_two(n: int) -> int:
    """The largest power of two up to `n`."""
    return 1 << (max(1, n).bit_length() - 1)


def _count(spec: Spec, band: Band) -> int:
    if not spec.is_image:
        return 1
    if band is None:
        return math.prod(spec.shape) ** 2
    return math.prod(n * (2 * b + 1) for n, b in zip(spec.shape, band, strict=True))


def _extent(spec: Spec, band: Band) -> str:
    pixels = "x".join(map(str, spec.shape))
    if band is None:
        return f"{pixels} pixels, all pairs"
    return f"{pixels} pixels, displacements up to {band[0]}x{band[1]}"


def _note(layer: AbstractLayer) -> str:
    if isinstance(layer, Sum):
        inner = {_note(x) for b in layer.branches for x in b.layers}
        return "; ".join(sorted(inner))
    return layer.note


def _has_noise(layer: AbstractLayer) -> bool:
    """Whether a point differs from an equal one (train-time dropout)."""
    if isinstance(layer, Serial):
        return any(_has_noise(x) for x in layer.layers)
    if isinstance(layer, Sum):
        return any(_has_noise(x) for x in layer.branches)
    return isinstance(layer, Dropout) and layer.mode == "train"


def _with_diagonal(result: AnyArray, diagonal: Array) -> AnyArray:
    if isinstance(result, np.ndarray):
        np.fill_diagonal(result, np.asarray(diagonal))
        return result
    i = jnp.arange(result.shape[0])
    return result.at[i, i].set(diagonal)


def _self_stage(net: Network, x: Array) -> tuple[Pairs, Records]:
    """The pass of every point with itself: the kernel at the end and the records of all layers."""
    spec = input_spec(x.shape)
    channels = x.shape[-1]
    if not spec.is_image:
        q = jnp.sum(x * x, axis=1, keepdims=True) / channels
        state: Any = vectors_with_themselves(q, spec)
    else:
        pixels = jnp.moveaxis(x, (3, 0), (0, 3))[..., None]
        q = jnp.sum(pixels * pixels, axis=0) / channels
        state = images(pixels, pixels, q, q, net._band(spec), spec, True)
    end, records = net.self_pass(state, (0, 0))
    return end, (q, records)


@partial(jit, static_argnums=0)
def _pack_points(net: Network, x: Array) -> Array:
    """Inputs and records as one row per point: the values that pairs need, computed once per point."""
    _, records = _self_stage(net, x)
    leaves = [jnp.moveaxis(leaf[..., 0], -1, 0) for leaf in jax.tree.leaves(records)]
    rows = [leaf.reshape(x.shape[0], -1) for leaf in (x, *leaves)]
    return jnp.concatenate(rows, axis=1)


@lru_cache(maxsize=256)
def _layout(net: Network, shape: tuple[int, ...]) -> tuple[Any, tuple[tuple[int, ...], ...]]:
    point = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
    records = jax.eval_shape(lambda x: _self_stage(net, x)[1], point)
    leaves, tree = jax.tree.flatten(records)
    return tree, tuple(leaf.shape[:-2] for leaf in leaves)


def _unpack_points(net: Network, shape: tuple[int, ...], rows: Array) -> tuple[Array, Records]:
    tree, shapes = _layout(net, shape)
    sizes = [math.prod(s) for s in (shape, *shapes)]
    parts = jnp.split(rows, np.cumsum(sizes)[:-1].tolist(), axis=1)
    n = rows.shape[0]
    leaves = [
        jnp.moveaxis(part.reshape(n, *s), 0, -1) for part, s in zip(parts[1:], shapes, strict=True)
    ]
    return parts[0].reshape(n, *shape), jax.tree.unflatten(tree, leaves)


@partial(jit, static_argnums=(0, 1, 2, 3))
def _cross(
    net: Network, kind: str, shape: tuple[int, ...], block: int, rows1: Array, rows2: Array
) -> Array:
    """The pair pass on two batches of packed points, `block` rows at a time."""
    which = 0 if kind == "nngp" else 1
    if rows1.shape[0] == block:
        return _cross_block(net, shape, rows1, rows2)[which]
    blocks = rows1.reshape(-1, block, rows1.shape[1])
    tiles = lax.map(lambda rows: _cross_block(net, shape, rows, rows2)[which], blocks)
    return tiles.reshape(-1, rows2.shape[0])


@partial(jax.jit, static_argnums=(0, 1))
def _cross_block(
    net: Network, shape: tuple[int, ...], rows1: Array, rows2: Array
) -> tuple[Array, Array]:
    (x1, rec1), (x2, rec2) = (_unpack_points(net, shape, rows) for rows in (rows1, rows2))
    q1, rec1 = jax.tree.map(lambda leaf: leaf[..., :, None], rec1)
    q2, rec2 = jax.tree.map(lambda leaf: leaf[..., None, :], rec2)
    spec = input_spec((1, *shape))
    if spec.is_image:
        pixels1 = jnp.moveaxis(x1, (3, 0), (0, 3))[..., :, None]
        pixels2 = jnp.moveaxis(x2, (3, 0), (0, 3))[..., None, :]
        state: Any = images(pixels1, pixels2, q1, q2, net._band(spec), spec, False)
    else:
        state = cross_vectors(x1, x2, q1, q2, spec)
    end = net.cross_pass(state, rec1, rec2, (0, 0))
    return _read(end, "nngp"), _read(end, "ntk")


@partial(jax.jit, static_argnums=(0, 1))
def _diagonal(net: Network, kind: str, x: Array) -> Array:
    return _read(_self_stage(net, x)[0], kind)[:, 0]


def _read(state: Pairs, kind: str) -> Array:
    shape = jnp.broadcast_shapes(state.joint.q1.shape, state.joint.q2.shape)
    ntk = jnp.zeros_like(state.joint.cov) if state.ntk is None else state.ntk
    return jnp.broadcast_to(state.joint.cov if kind == "nngp" else ntk, shape)
