"""The pair kernel between two layers: of vectors, or of images pixel by pixel."""

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._support.compile import HIGHEST
from ._gap import Joint, joint_from_distance, joint_from_minus, safe_divide, safe_sqrt
from ._spec import Band, Spec
from ._windows import at_first, at_second

CLOSE = {4: 2e-3, 8: 1e-4}
"""Squared angle (over the squared spread of the data) below which an input pair is recomputed
from the difference of its points: there a matrix product would lose the angle's last digits."""

CLOSE_PER_ROW = 4
"""Up to this number of close pairs per point, they are selected one by one; with more, all pairs are
recomputed."""


@dataclass(frozen=True)
class VectorPairs:
    """Covariances of vectors: `joint` of shape `(n1, n2)`; `ntk=None` stands for 0."""

    joint: Joint
    ntk: Array | None
    spec: Spec
    is_self: bool = False


@dataclass(frozen=True)
class ImagePairs:
    r"""Squared distances $E(u_p-v_q)^2$ of pixel pairs, axes as in `_windows`.

    Convolutions act linearly on it and it is 0 exactly at equal patches, where a covariance would lose
    digits by cancellation. `q1`, `q2`: variances `(H, W, n1, 1)` and `(H, W, 1, n2)`.
    """

    q1: Array
    q2: Array
    distance: Array
    ntk: Array | None
    band: Band
    spec: Spec
    is_self: bool = False
    pixels: tuple[Array, Array] | None = None  # the inputs themselves, before any layer

    @property
    def first(self) -> Array:
        return at_first(self.q1)

    @property
    def second(self) -> Array:
        return at_second(self.q2, self.band)

    @property
    def joint(self) -> Joint:
        r1, r2 = at_first(safe_sqrt(self.q1)), at_second(safe_sqrt(self.q2), self.band)
        return joint_from_distance(r1, r2, self.distance)

    @property
    def cov(self) -> Array:
        return (self.first + self.second - self.distance) / 2


Pairs = VectorPairs | ImagePairs


def settle(state: ImagePairs) -> ImagePairs:
    """Store the values; otherwise window sums would recompute an activation for every tap."""
    if state.ntk is None:
        return replace(state, distance=lax.optimization_barrier(state.distance))
    distance, ntk = lax.optimization_barrier((state.distance, state.ntk))
    return replace(state, distance=distance, ntk=ntk)


def vectors_with_themselves(q: Array, spec: Spec) -> VectorPairs:
    """The self kernel of the inputs, from their variances `(n, 1)`."""
    return VectorPairs(joint_from_minus(q, q, jnp.zeros_like(q)), None, spec, True)


def cross_vectors(x1: Array, x2: Array, q1: Array, q2: Array, spec: Spec) -> VectorPairs:
    r"""Input covariances of `(n1, d)` and `(n2, d)`.

    $s - K = \tfrac12 s\|\hat x_1 - \hat x_2\|^2$ with unit vectors. The squared distance comes
    from a product of centred unit vectors; the few pairs that are close to parallel or opposite
    are then recomputed from the difference itself.
    """
    unit1, unit2 = _unit(x1), _unit(x2)
    center = jnp.mean(unit2, axis=0, keepdims=True)
    a, b = unit1 - center, unit2 - center
    spread = jnp.sum(a * a, axis=1)[:, None] + jnp.sum(b * b, axis=1)[None, :]
    minus = spread / 2 - jnp.matmul(a, b.T, precision=HIGHEST)
    parallel = minus < 1
    near = jnp.clip(jnp.minimum(minus, 2 - minus), 0, 1)
    close = (near < CLOSE[x1.dtype.itemsize] * jnp.minimum(spread, 1) ** 2) & (q1 * q2 != 0)
    near = _refine(near, parallel, close, (x1, unit1), (x2, unit2))
    r1, r2 = safe_sqrt(q1), safe_sqrt(q2)
    s = r1 * r2
    joint = Joint(q1, q2, r1, r2, s * jnp.where(parallel, 1 - near, near - 1), s * near)
    return VectorPairs(joint, None, spec)


def _unit(x: Array) -> Array:
    # Dividing by the largest entry first keeps squares of tiny and huge inputs finite.
    largest = lax.stop_gradient(jnp.max(jnp.abs(x), axis=1, keepdims=True, initial=0))
    x = safe_divide(x, largest)
    return safe_divide(x, safe_sqrt(jnp.sum(x * x, axis=1, keepdims=True)))


def _refine(
    near: Array,
    parallel: Array,
    close: Array,
    points1: tuple[Array, Array],
    points2: tuple[Array, Array],
) -> Array:
    rows = jnp.arange(near.shape[0])
    most = jnp.max(jnp.sum(close, axis=1))

    def exact(first: tuple[Array, Array], second: tuple[Array, Array], same_side: Array) -> Array:
        (x, u), (y, v) = first, second
        half = jnp.sum((u - jnp.where(same_side, 1, -1)[..., None] * v) ** 2, axis=-1) / 2
        # Two batches may round the norms of equal points differently.
        return jnp.where(jnp.all(x == y, axis=-1), 0, half)

    def next_in_each_row(carry: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
        near, close = carry
        j = jnp.argmax(close, axis=1)
        value = exact(points1, (points2[0][j], points2[1][j]), parallel[rows, j])
        value = jnp.where(close[rows, j], value, near[rows, j])
        return (near.at[rows, j].set(value), close.at[rows, j].set(False)), None

    def few(_: None) -> Array:
        return lax.scan(next_in_each_row, (near, close), length=CLOSE_PER_ROW)[0][0]

    def many(_: None) -> Array:
        def row(args: tuple[Array, Array, Array]) -> Array:
            return exact((args[0][None], args[1][None]), points2, args[2])

        rows = lax.map(row, (*points1, parallel))
        return jnp.where(close, rows, near)

    def some(_: None) -> Array:
        return lax.cond(most <= CLOSE_PER_ROW, few, many, None)

    return lax.cond(most > 0, some, lambda _: near, None)


def images(
    x1: Array, x2: Array, q1: Array, q2: Array, band: Band, spec: Spec, is_self: bool
) -> ImagePairs:
    """Input kernel of `(C, H, W, n1, 1)` and `(C, H, W, 1, n2)`, or of both `(.., n, 1)`."""
    distance = pixel_distances(x1, x2, band)
    return ImagePairs(q1, q2, distance, None, band, spec, is_self, (x1, x2))


def pixel_distances(x1: Array, x2: Array, band: Band) -> Array:
    """Squared distances of pixels, averaged over channels; outside the image pixels are 0."""

    def add(total: Array, pixels: tuple[Array, Array]) -> tuple[Array, None]:
        return total + (at_first(pixels[0]) - at_second(pixels[1], band)) ** 2, None

    total = (at_first(x1[0]) - at_second(x2[0], band)) ** 2
    if x1.shape[0] <= 4:
        for c in range(1, x1.shape[0]):
            total, _ = add(total, (x1[c], x2[c]))
    else:
        total, _ = lax.scan(add, total, (x1[1:], x2[1:]))
    return total / x1.shape[0]
