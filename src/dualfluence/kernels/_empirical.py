"""The exact empirical NTK of any JAX function, in tiles that fit into a byte budget.

Features of a batch of points are kept and used again from tile to tile.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import ceil, isqrt
from typing import Any, Literal

import jax
import numpy as np
from jax.lax import PrecisionLike
from jaxtyping import Array, PyTree

from .._support.compile import HIGHEST, PRECISION, NotFinite
from .._support.memory import even_size, fill_kernel, tile_budget
from .._support.options import ProgressFn, check_count
from .._support.points import count_points
from .._support.show import Shown
from .._support.types import ApplyFn, Inputs, KernelArray, Leaves, Trainable
from ._prepare import TERMS_AT_ONCE, Features, Prepared, as_inputs, prepare_kernel
from ._recipe import KernelReport, Method

SYMMETRIC_TILES = 5
"""Tiles per side that a large symmetric kernel is cut into: 60 % of the square is computed."""

TALL = 3
"""Quarters of the memory for features that the rows of a tile get if the features of its columns are
not kept."""

WORTH_CUTTING = 2048
"""Rows (points times outputs) from which a symmetric kernel is cut to save its lower half."""


@dataclass(frozen=True)
class Tiles:
    """`shape` of a tile, `chunk` of points differentiated at once, `keep` all features or not."""

    shape: tuple[int, int]
    chunk: int
    keep: bool


def choose_tiles(
    prepared: Prepared, n1: int, n2: int | None, *, budget: int, traced: bool
) -> Tiles:
    """The largest tiles whose features, products and backward passes fit into `budget`.

    Half of the budget is for features: of all points if they fit, else of one tile's rows and columns.
    The other half is for the products, and before that for the backward passes.
    """
    recipe = prepared.recipe
    symmetric = n2 is None
    columns = n1 if n2 is None else n2
    per_point, workspace = prepared.feature_bytes, prepared.workspace_bytes
    half = budget // 2
    if 2 * per_point > half or workspace > half:
        raise ValueError(
            f"empirical kernel: tile_bytes={budget} is too small for one pair of points, which"
            f" needs {2 * max(2 * per_point, workspace)}. Raise tile_bytes, choose fewer"
            " `trainable` parameters, or use ntk_mv, which holds no Jacobian."
        )
    outputs = 1 if traced else recipe.num_outputs**2
    copies = min(len(recipe.groups) + 1, TERMS_AT_ONCE) + 2
    entry = outputs * np.dtype(recipe.dtype).itemsize * copies
    side = max(1, isqrt(half // entry))
    keep = (n1 if symmetric else n1 + columns) * per_point <= half
    rows, cols = min(side, n1), min(side, columns)
    if not keep and symmetric:
        rows = min(rows, half // (2 * per_point))
    elif not keep:
        # Columns' features are made anew for every tile of rows: tall tiles, and few of them.
        most = half // per_point
        rows = max(1, min(n1, TALL * most // 4, half // entry))
        cols = max(1, min(columns, most - rows, half // (entry * rows)))
    if symmetric and n1 * recipe.num_outputs >= WORTH_CUTTING:
        rows = min(rows, ceil(n1 / SYMMETRIC_TILES))
    rows, cols = even_size(n1, rows), even_size(columns, cols)
    return Tiles((rows, rows if symmetric else cols), max(1, half // max(workspace, 1)), keep)


def even_parts(n: int, size: int) -> list[slice]:
    """`n` rows in parts of at most `size`, as equal as possible."""
    step = even_size(n, size)
    return [slice(i, min(i + step, n)) for i in range(0, n, step)]


class FeatureStore:
    """Provides the features of tiles. It keeps all features, or those of the rows while it computes
    those of the columns."""

    def __init__(
        self,
        prepared: Prepared,
        leaves: Leaves,
        rest: Leaves,
        x1: Inputs,
        x2: Inputs | None,
        tiles: Tiles,
        *,
        traced: bool,
    ) -> None:
        self._prepared, self._leaves, self._rest = prepared, leaves, rest
        self._x1, self._x2 = x1, x1 if x2 is None else x2
        self._tiles, self._traced = tiles, traced
        self.index1 = np.arange(count_points(x1))
        self.index2 = None if x2 is None else np.arange(count_points(x2))
        self._flags: list[tuple[str, np.ndarray, Array, Array]] = []
        self._row: tuple[int, Features] | None = None
        self._kept: tuple[Features, Features] | None = None
        if tiles.keep:
            f1 = self._make("x1", x1, self.index1)
            if self.index2 is None or x2 is x1:
                self._kept = (f1, f1)
            else:
                self._kept = (f1, self._make("x2", x2, self.index2))

    def _make(self, name: str, x: Inputs, index: np.ndarray) -> Features:
        made = self._prepared.features(self._leaves, self._rest, x, self._tiles.chunk)
        self._flags.append((name, index, made.outputs, made.finite))
        return made

    def _at(self, name: str, x: Inputs, index: np.ndarray) -> Features:
        return self._make(name, jax.tree.map(lambda a: a[index], x), index)

    def block(self, i: Array, j: Array) -> Array:
        """The tile of the points `i` of `x1` and `j` of `x2`."""
        if self._kept is not None:
            if len(i) == len(self.index1) and len(j) == count_points(self._x2):
                return self._prepared.tile(*self._kept, traced=self._traced)
            return self._prepared.tile_at(*self._kept, i, j, traced=self._traced)
        rows, cols = np.asarray(i), np.asarray(j)
        if self._row is None or self._row[0] != rows[0]:
            self._row = None
            self._row = (int(rows[0]), self._at("x1", self._x1, rows))
        f1 = self._row[1]
        same = self.index2 is None and rows[0] == cols[0]
        f2 = f1 if same else self._at("x2" if self.index2 is not None else "x1", self._x2, cols)
        return self._prepared.tile(f1, f2, traced=self._traced)

    def check_finite(self) -> None:
        """Raise an error that names the points if outputs or derivatives were not finite."""
        for flags in self._flags:
            require_finite(*flags)


def require_finite(name: str, index: np.ndarray, outputs: Array, finite: Array) -> None:
    """Raise an error that names the points if their outputs or derivatives are not finite."""
    good = {"outputs": np.isfinite(np.asarray(outputs)).all(1), "derivatives": finite}
    for what, flags in good.items():
        bad = np.unique(index[~np.asarray(flags)])
        if bad.size:
            raise NotFinite(
                f"empirical kernel: {what} of apply_fn are not finite at {bad.size} points"
                f" of {name}: {bad[:8].tolist()}. Check those inputs and the parameters for"
                " NaN, infinities and overflow."
            )


@dataclass(frozen=True, repr=False)
class EmpiricalKernel(Shown):
    """`value`, the kernel, `(n1, c, n2, c)`, and `report`, the rule used for every parameter."""

    value: KernelArray
    report: KernelReport


def empirical_kernel(
    apply_fn: ApplyFn,
    params: PyTree,
    x1: Inputs,
    x2: Inputs | None = None,
    *,
    trainable: Trainable = None,
    method: Method = "auto",
    tile_bytes: int | None = None,
    precision: PrecisionLike = HIGHEST,
    flat: bool = False,
    out: Literal["device", "host"] = "device",
    progress: bool | ProgressFn = True,
) -> EmpiricalKernel:
    r"""The exact empirical NTK of `apply_fn` at `params`.

    $$K_{ia,jb} = \Big\langle \frac{\partial f_a(x_i)}{\partial\theta},
    \frac{\partial f_b(x_j)}{\partial\theta} \Big\rangle$$

    Works on any function that JAX differentiates. The backward pass is traced and cut one step before
    the gradient of each parameter. There the gradient is a product $A \otimes G$; then $\langle
    A_i\otimes G_{ia}, A_j\otimes G_{jb}\rangle = (A_i\cdot A_j)(G_{ia}\cdot G_{jb})$ takes two small
    products instead of a Jacobian. For parameters without such a product (inside a scan, used
    nonlinearly) the whole Jacobian is formed; `report` names them. Both are exact. Memory is
    `tile_bytes` plus the result. Half-precision parameters and inputs are converted to float32.
    `apply_fn` is traced once per input shape, and again if anything it closes over changes (closure
    variables, globals, attributes of `self`).

    **Arguments:**

    - `apply_fn`: `apply_fn(params, x) -> (n, c)`, each point's outputs independent of the others.
    - `params`: any pytree. Integer leaves and leaves that are not arrays are held fixed.
    - `x1`, `x2`: inputs, points on axis 0; `x2=None` is `x1` again, at about half the work.
    - `trainable`: the leaves to differentiate: a function of a leaf's path, such as
      `lambda path: path.startswith("head/")`, or a pytree (or prefix) of bools.
    - `method`: `"auto"` takes the cheaper form for each parameter; `"structured"` takes factors
      wherever there are any; `"jacobian"`, never.
    - `tile_bytes`: working memory; by default 256 MiB, on an accelerator up to an eighth of the kernel.
    - `precision`: of matrix products; `HIGHEST` is true float32 on every device.
    - `flat`: return `(n1·c, n2·c)`, rows point by point, without holding the kernel twice.
    - `out`: `"device"` or `"host"` (a NumPy array, for kernels larger than device memory).
    - `progress`: `True`, `False`, or a function called as `progress(done, total, label)`.

    **Returns:** `EmpiricalKernel` with `value`, shape `(n1, c, n2, c)`, and `report`.
    """
    options = {"trainable": trainable, "method": method, "precision": precision}
    run = {"tile_bytes": tile_bytes, "flat": flat, "out": out, "progress": progress}
    return _kernel(apply_fn, params, x1, x2, options, run, traced=False)


def traced_kernel(
    apply_fn: ApplyFn,
    params: PyTree,
    x1: Inputs,
    x2: Inputs | None = None,
    *,
    trainable: Trainable = None,
    method: Method = "auto",
    tile_bytes: int | None = None,
    precision: PrecisionLike = HIGHEST,
    out: Literal["device", "host"] = "device",
    progress: bool | ProgressFn = True,
) -> KernelArray:
    r"""The mean over outputs $\Sigma_{ij} = \frac1c \sum_a K_{ia,ja}$ of the empirical NTK.

    $\Sigma \otimes I_c$ is the nearest kernel of that form to $K$ (in the Frobenius norm), exact in the
    limit of infinite width. Compared with the whole kernel, the products cost a factor $c$ less and the
    result takes $c^2$ times less memory. Arguments as for `empirical_kernel`.

    **Returns:** the traced kernel, shape `(n1, n2)`.
    """
    options = {"trainable": trainable, "method": method, "precision": precision}
    run = {"tile_bytes": tile_bytes, "out": out, "progress": progress}
    return _kernel(apply_fn, params, x1, x2, options, run, traced=True).value


def kernel_block(
    apply_fn: ApplyFn,
    params: PyTree,
    x1: Inputs,
    x2: Inputs,
    *,
    trainable: Trainable = None,
    method: Method = "auto",
    precision: PrecisionLike = HIGHEST,
) -> Array:
    """One block of the empirical NTK as a pure function, for use inside `jax.jit`.

    It computes the same as `empirical_kernel`, without tiles, progress or checks of values. Memory
    grows with the block, and non-finite derivatives are returned without an error. Differentiable in
    `params`. Inside `jax.shard_map` use `check_vma=False`: the traced operations carry no mesh-axis
    types.

    **Returns:** the block, shape `(n1, c, n2, c)`.
    """
    x1, x2 = as_inputs(x1, x2)
    prepared, leaves, rest = prepare_kernel(apply_fn, params, x1, trainable, method, precision)
    prepared.check_apart(leaves, rest, x1)
    f1 = prepared.features(leaves, rest, x1, count_points(x1))
    f2 = prepared.features(leaves, rest, x2, count_points(x2))
    return prepared.tile(f1, f2, traced=False)


def kernel_rows(
    apply_fn: ApplyFn,
    params: PyTree,
    x: Inputs,
    size: int,
    *,
    trainable: Trainable = None,
    method: Method = "auto",
    precision: PrecisionLike = HIGHEST,
) -> Iterator[tuple[int, Array]]:
    """Blocks of `size` rows of the kernel of `x` with itself, `(size, c, n, c)`. Each comes in a pair, after
    the number of its first row.

    A ReLU whose input is zero up to rounding may be on in a batch of one size and off in another. Here
    a point has the same derivatives in its row and in its column. Therefore the blocks together are
    symmetric and have no negative eigenvalue beyond rounding. The last block starts early instead of
    being short; with fewer points than `size` there is one block of all points.
    """
    x, _ = as_inputs(x, None)
    size = min(check_count("kernel_rows: size", size), count_points(x))
    # Not around a `yield`: it would hold for the caller too.
    highest = partial(jax.default_matmul_precision, PRECISION)
    with highest():
        prepared, leaves, rest = prepare_kernel(apply_fn, params, x, trainable, method, precision)
        prepared.check_apart(leaves, rest, x)
        n, c, dtype = count_points(x), prepared.recipe.num_outputs, prepared.recipe.dtype
        budget = tile_budget(size * n * c**2 * np.dtype(dtype).itemsize)
        tiles = choose_tiles(prepared, n, None, budget=budget, traced=False)
        store = FeatureStore(prepared, leaves, rest, x, x, tiles, traced=False)
    rows, columns = min(tiles.shape[0], size), tiles.shape[1]
    # Features that are made again for every tile are made in batches of one size.
    tile = (rows, columns if tiles.keep else rows)
    run = {"tail": (c,), "dtype": dtype, "tile": tile, "progress": False}
    for i in range(0, n, size):
        start = min(i, n - size)
        here = np.arange(start, start + size)
        with highest():
            block = fill_kernel(store.block, here, store.index1, **run)
        yield start, block
    store.check_finite()


def kernel_report(
    apply_fn: ApplyFn,
    params: PyTree,
    x: Inputs,
    *,
    trainable: Trainable = None,
    method: Method = "auto",
) -> KernelReport:
    """How every parameter of `apply_fn` enters its kernel; `print` it.

    Only shapes are computed: `params` and `x` may be `jax.ShapeDtypeStruct`s.
    """
    x, _ = as_inputs(x, None)
    return prepare_kernel(apply_fn, params, x, trainable, method, HIGHEST)[0].report


def _kernel(
    apply_fn: ApplyFn,
    params: PyTree,
    x1: Inputs,
    x2: Inputs,
    options: dict[str, Any],
    run: dict[str, Any],
    *,
    traced: bool,
) -> EmpiricalKernel:
    x1, x2 = as_inputs(x1, x2)
    prepared, leaves, rest = prepare_kernel(apply_fn, params, x1, **options)
    prepared.check_apart(leaves, rest, x1)
    sizes = (count_points(x1), None if x2 is None else count_points(x2))
    entries = sizes[0] * (sizes[1] or sizes[0]) * (1 if traced else prepared.recipe.num_outputs**2)
    budget = run["tile_bytes"] or tile_budget(entries * np.dtype(prepared.recipe.dtype).itemsize)
    tiles = choose_tiles(prepared, *sizes, budget=budget, traced=traced)
    store = FeatureStore(prepared, leaves, rest, x1, x2, tiles, traced=traced)
    value = fill_kernel(
        store.block,
        store.index1,
        store.index2,
        tail=() if traced else (prepared.recipe.num_outputs,),
        dtype=prepared.recipe.dtype,
        tile=tiles.shape,
        flat=run.get("flat", False),
        out=run["out"],
        progress=run["progress"],
    )
    store.check_finite()
    return EmpiricalKernel(value, prepared.report)
