"""Layers that read pixels together: pooling, Flatten and global pooling."""

import math
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

from ._gap import Joint, joint_from_distance, safe_sqrt
from ._spec import AbstractLayer, Band, Records, Spec
from ._states import ImagePairs, VectorPairs, settle
from ._weights import Padding, check_window, check_window_fits, need_window, padded
from ._windows import (
    at_first,
    at_second,
    inside,
    pad_pairs,
    pad_pixels,
    pads_and_sizes,
    sum_crossed,
    sum_matched,
    sum_pixels,
    take_diagonal,
)


@dataclass(frozen=True)
class _Pool(AbstractLayer):
    window: tuple[int, int] = (2, 2)
    strides: tuple[int, int] | None = None
    padding: Padding = "VALID"
    normalize_edges: bool = False

    def __post_init__(self) -> None:
        check_window(self, self.window, self._strides, self.padding)

    @property
    def _strides(self) -> tuple[int, int]:
        return self.window if self.strides is None else self.strides

    def _scale(self, shape: tuple[int, ...]) -> np.ndarray:
        """Factor of the window sum at every pixel after the pool, `(H', W')`."""
        raise NotImplementedError

    def _counts(self, shape: tuple[int, ...]) -> np.ndarray:
        """True pixels in every window, `(H', W')`."""
        if self.padding != "SAME":
            _, sizes = pads_and_sizes(shape, self.window, self._strides, self.padding)
            return np.full(sizes, float(math.prod(self.window)))
        pads, sizes = pads_and_sizes(shape, self.window, self._strides, self.padding)
        counts = []
        for n, k, s, pad, size in zip(shape, self.window, self._strides, pads, sizes, strict=True):
            start = np.arange(size) * s - pad[0]
            counts.append(np.minimum(start + k, n) - np.maximum(start, 0))
        return np.outer(*counts).astype(float)

    def out_spec(self, spec: Spec) -> Spec:
        check_window_fits(self, spec, self.window, self.padding)
        if any(k > n for k, n in zip(self.window, spec.shape, strict=True)):
            raise ValueError(
                f"{type(self).__name__}: the window {self.window} is larger than the image "
                f"{spec.shape}. Use a smaller window or fewer pooling layers."
            )
        _, sizes = pads_and_sizes(spec.shape, self.window, self._strides, self.padding)
        return replace(spec, shape=sizes)

    def need(self, band: Band, spec: Spec) -> Band:
        reach = (self.window[0] - 1, self.window[1] - 1)
        return need_window(band, spec, self._strides, reach, self.padding)

    def _crossed(self, state: ImagePairs, pairs: Array, band: Band) -> Array:
        pads, _ = pads_and_sizes(state.spec.shape, self.window, self._strides, self.padding)
        wrap = self.padding == "CIRCULAR"
        pairs = pad_pairs(pairs, pads, state.band, wrap)
        mask = inside(state.spec.shape, pads, state.band)
        if not wrap and not mask.all():
            pairs = jnp.where(mask, pairs, 0)
        total = sum_crossed(pairs, self.window, self._strides, state.band, band)
        return total * self._pair_scale(state, band, total.dtype)

    def _pair_scale(self, state: ImagePairs, band: Band, dtype: DTypeLike) -> Array:
        scale = self._scale(state.spec.shape)
        if (scale == scale[0, 0]).all():
            return jnp.asarray(scale[0, 0] ** 2, dtype)
        scale = jnp.asarray(scale, dtype)[..., None, None]
        return at_first(scale) * at_second(scale, band)

    def _bound(self, state: ImagePairs, band: Band) -> Array:
        r"""$E(\bar u-\bar v)^2 \le c^2 w\sum_a E(u_a-v_a)^2$ for $w$ pixels with equal factors $c$.

        0 at equal patches, where the difference of averages cancels.
        """
        distance, _ = padded(replace(state, ntk=None), self.window, self._strides, self.padding)
        total = sum_matched(distance, self.window, self._strides, state.band, band)
        scale = jnp.asarray(self._scale(state.spec.shape), total.dtype)[..., None, None]
        first, second = at_first(scale), at_second(scale, band)
        bound = math.prod(self.window) * first**2 * total
        return jnp.where(first == second, bound, jnp.inf)

    def record(self, state: ImagePairs, band: Band) -> tuple[Array, ...]:
        return (take_diagonal(self._crossed(state, state.cov, band), band),)

    def pairs(self, state: ImagePairs, rec1: Records, rec2: Records, band: Band) -> ImagePairs:
        cov = self._crossed(state, state.cov, band)
        distance = at_first(rec1[0]) + at_second(rec2[0], band) - 2 * cov
        distance = jnp.clip(distance, 0, self._bound(state, band))
        ntk = None if state.ntk is None else self._crossed(state, state.ntk, band)
        spec = self.out_spec(state.spec)
        return settle(ImagePairs(rec1[0], rec2[0], distance, ntk, band, spec, state.is_self))

    def apply(self, params: PyTree, x: Array) -> Array:
        shape = (x.shape[1], x.shape[2])
        pads, _ = pads_and_sizes(shape, self.window, self._strides, self.padding)
        pixels = pad_pixels(jnp.moveaxis(x, 0, 2), pads, self.padding == "CIRCULAR")
        total = sum_pixels(pixels, self.window, self._strides)
        scale = jnp.asarray(self._scale(shape), x.dtype)[..., None, None]
        return jnp.moveaxis(total * scale, 2, 0)


@dataclass(frozen=True)
class AvgPool(_Pool):
    r"""Average over windows: $K'(p,q) = \mathrm{mean}_{a,b}\,K(ps+a, qs+b)$.

    **Arguments:**

    - `window`: height and width; `strides`: by default the size of the window.
    - `padding`: `"VALID"`, `"SAME"` (zeros) or `"CIRCULAR"`.
    - `normalize_edges`: if `"SAME"` padding cuts the window, divide by the number of true pixels and
      not by the size of the window.
    """

    def _scale(self, shape: tuple[int, ...]) -> np.ndarray:
        counts = self._counts(shape)
        return (
            1 / counts if self.normalize_edges else np.full_like(counts, 1 / math.prod(self.window))
        )


@dataclass(frozen=True)
class SumPool(_Pool):
    """Sum over windows; arguments as for `AvgPool`. With `normalize_edges` a window that is cut counts
    like a full one."""

    def _scale(self, shape: tuple[int, ...]) -> np.ndarray:
        counts = self._counts(shape)
        return math.prod(self.window) / counts if self.normalize_edges else np.ones_like(counts)


def _vector_joint(q1: Array, q2: Array, distance: Array) -> Joint:
    return joint_from_distance(safe_sqrt(q1), safe_sqrt(q2), distance)._replace(q1=q1, q2=q2)


def _need_images(layer: AbstractLayer, spec: Spec) -> None:
    if not spec.is_image:
        raise ValueError(f"{layer}: expected images (n, height, width, channels), got vectors.")


@dataclass(frozen=True)
class Flatten(AbstractLayer):
    """Pixels and channels become one axis. The new kernel is the mean, over all pixels, of the kernel
    between equal pixels of both images."""

    def out_spec(self, spec: Spec) -> Spec:
        _need_images(self, spec)
        return Spec((), spec.channels * math.prod(spec.shape))

    def need(self, band: Band, spec: Spec) -> Band:
        return (0, 0)

    def record(self, state: ImagePairs, band: Band) -> tuple[Array, ...]:
        return (jnp.mean(state.q1, axis=(0, 1)),)

    def pairs(self, state: ImagePairs, rec1: Records, rec2: Records, band: Band) -> VectorPairs:
        def read(pairs: Array) -> Array:
            return jnp.mean(take_diagonal(pairs, state.band), axis=(0, 1))

        joint = _vector_joint(rec1[0], rec2[0], read(state.distance))
        ntk = None if state.ntk is None else read(state.ntk)
        return VectorPairs(joint, ntk, self.out_spec(state.spec), state.is_self)

    def apply(self, params: PyTree, x: Array) -> Array:
        return x.reshape(x.shape[0], -1)


@dataclass(frozen=True)
class _GlobalPool(AbstractLayer):
    def _factor(self, shape: tuple[int, ...]) -> float:
        """The sum over pixel pairs is this times their mean."""
        raise NotImplementedError

    def out_spec(self, spec: Spec) -> Spec:
        _need_images(self, spec)
        return replace(spec, shape=())

    def need(self, band: Band, spec: Spec) -> Band:
        return None

    def record(self, state: ImagePairs, band: Band) -> tuple[Array, ...]:
        return (jnp.mean(state.cov, axis=(0, 1, 2, 3)) * self._factor(state.spec.shape),)

    def pairs(self, state: ImagePairs, rec1: Records, rec2: Records, band: Band) -> VectorPairs:
        factor = self._factor(state.spec.shape)
        cov = jnp.mean(state.cov, axis=(0, 1, 2, 3)) * factor
        # Jensen, as for the windows: 0 at equal images.
        bound = jnp.mean(take_diagonal(state.distance, state.band), axis=(0, 1)) * factor
        distance = jnp.clip(rec1[0] + rec2[0] - 2 * cov, 0, bound)
        joint = _vector_joint(rec1[0], rec2[0], distance)
        ntk = None if state.ntk is None else jnp.mean(state.ntk, axis=(0, 1, 2, 3)) * factor
        return VectorPairs(joint, ntk, self.out_spec(state.spec), state.is_self)


@dataclass(frozen=True)
class GlobalAvgPool(_GlobalPool):
    """Mean over all pixels; needs the kernel of all pairs of pixels."""

    def _factor(self, shape: tuple[int, ...]) -> float:
        return 1.0

    def apply(self, params: PyTree, x: Array) -> Array:
        return jnp.mean(x, axis=(1, 2))


@dataclass(frozen=True)
class GlobalSumPool(_GlobalPool):
    """Sum over all pixels; needs the kernel of all pairs of pixels."""

    def _factor(self, shape: tuple[int, ...]) -> float:
        return float(math.prod(shape) ** 2)

    def apply(self, params: PyTree, x: Array) -> Array:
        return jnp.sum(x, axis=(1, 2))
