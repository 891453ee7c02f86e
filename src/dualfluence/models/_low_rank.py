r"""Kernels of low rank, `K ≈ ΦΦᵀ`: random features of the gradient, and Nyström."""

import math
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, PyTree, Shaped

from .._support.compile import HIGHEST, filter_jit, jit
from .._support.options import ProgressFn, check_choice, check_count, check_key, maybe
from .._support.points import enter_points
from .._support.types import Inputs
from ..kernels._linearized import Linearized
from ..operators import AbstractKernelOperator, LowRankOperator
from ._passes import check_network, pull_back
from ._sources import AbstractSource, as_source, take_rows


class AbstractLowRankSource(AbstractSource):
    """A model with features `φ(x)` of shape `(n, c, r)`: `K(x1, x2) = φ(x1) φ(x2)ᵀ`.

    fits and edits solve systems of the size of the rank. Exact for the model `f₀(x) + φ(x)w` with the
    ridge on `‖w‖²`. That model is near the one with the full kernel if the rank is high enough for its
    spectrum.
    """

    base: eqx.AbstractVar[AbstractSource]

    @property
    def has_features(self) -> bool:
        return True

    def purged(self, x: Array, kept: np.ndarray, stand_ins: Array) -> AbstractSource:
        return replace(self, base=self.base.purged(x, kept, stand_ins))

    @property
    def network(self) -> Linearized | None:
        return self.base.network

    def base_outputs(self, x: Array, num_outputs: int | None) -> Float[Array, "n c"] | None:
        return self.base.base_outputs(x, num_outputs)

    def block(self, x1: Inputs, x2: Inputs | None, progress: bool | ProgressFn) -> Array:
        left = self.features(jnp.asarray(x1))
        right = left if x2 is None else self.features(jnp.asarray(x2))
        return jnp.einsum("iar,jbr->iajb", left, right, precision=HIGHEST)

    def operator(
        self, x: Array, num_outputs: int, *, form: str, progress: bool | ProgressFn
    ) -> AbstractKernelOperator:
        return LowRankOperator(self.features(x))

    def coefficients(self, x: Array, v: Float[Array, "n c"]) -> Float[Array, " r"]:
        """`w = φ(x)ᵀ v`."""
        return jnp.einsum("iar,ia->r", self.features(x), v, precision=HIGHEST)

    def cross_mv(
        self, xq: Array, x: Array, v: Float[Array, "n c"], progress: bool | ProgressFn = True
    ) -> Float[Array, "q c"]:
        return jnp.dot(self.features(xq), self.coefficients(x, v), precision=HIGHEST)

    def extend(
        self,
        op: AbstractKernelOperator,
        x: Array,
        start: int,
        stop: int,
        progress: bool | ProgressFn,
    ) -> AbstractKernelOperator:
        new = self.features(take_rows(x, start, stop))
        return op.with_features(new, start, x.shape[0])


class RandomFeatureSource(AbstractLowRankSource):
    r"""$\phi(x) = J(x)P$ with Gaussian $P$, $E[PP^\top] = I$, so that $E[\phi\phi^\top] = K$.

    `P` is never stored: its columns are drawn again from `key` whenever they are needed.
    """

    base: AbstractSource
    key: PRNGKeyArray
    rank: int = eqx.field(static=True)

    def features(self, x: Array) -> Float[Array, "n c r"]:
        assert self.network is not None
        return _random_features(self.network, x, self.key, self.rank)

    def pull_back(self, x: Array, v: Float[Array, "n c"]) -> PyTree:
        """`P φ(x)ᵀ v`: the parameters whose linearised outputs are this model's."""
        assert self.network is not None
        return _project(self.network, self.coefficients(x, v), self.key)


class NystromSource(AbstractLowRankSource):
    r"""$K \approx K_{xm} K_{mm}^{+} K_{mx}$ from landmarks $m$: $\phi(x) = K_{xm}T$, $TT^\top = K_{mm}^+$.

    Exact at the landmarks. `‖w‖` is `‖θ − θ₀‖`, and `θ − θ₀` lies in the span of their gradients.
    """

    base: AbstractSource
    landmarks: Shaped[Array, "m ..."]
    transform: Float[Array, "mc r"]
    c: int = eqx.field(static=True)

    def features(self, x: Array) -> Float[Array, "n c r"]:
        block = _four_axes(self.base.block(x, self.landmarks, False), self.c)
        return _times(block.reshape(x.shape[0], self.c, -1), self.transform)

    def purged(self, x: Array, kept: np.ndarray, stand_ins: Array) -> AbstractSource:
        _check_landmarks(self.landmarks, x, kept)
        return super().purged(x, kept, stand_ins)

    def pull_back(self, x: Array, v: Float[Array, "n c"]) -> PyTree:
        assert self.network is not None
        at_landmarks = jnp.dot(self.transform, self.coefficients(x, v), precision=HIGHEST)
        return pull_back(self.network, self.landmarks, at_landmarks.reshape(-1, self.c))


def low_rank(
    model: object,
    x: Inputs,
    rank: int,
    *,
    method: str = "nystrom",
    num_outputs: int | None = None,
    key: PRNGKeyArray | None = None,
) -> AbstractLowRankSource:
    r"""A model of rank `rank` in place of `model`, for the same calls of `fit` and `edit`.

    It takes `n·c·rank` numbers of memory, and a solve costs `n·c·rank²`, compared with `(n·c)²` and
    `(n·c)³` for a dense kernel.

    **Arguments:**

    - `model`, `x`: as for `fit`; landmarks are drawn from the points `x`.
    - `rank`: number of features. Nyström draws `rank/c` (rounded up) landmarks from the points `x`, and
      each landmark gives `c` features.
    - `method`: `"nystrom"` projects on the gradients of landmarks and fits well when the spectrum falls
      fast; `"random-features"` projects gradients on random directions. It is unbiased, its entries are
      off by about `1/√rank`, and it needs only Jacobian products, no kernel entries.
    - `num_outputs`: `c`, for kernels of shape `(n1, n2)`.
    - `key`: randomness of landmarks or directions.
    """
    rank = check_count("low_rank: rank", rank)
    check_choice("low_rank: method", method, ("nystrom", "random-features"))
    num_outputs = maybe(check_count, "low_rank: num_outputs", num_outputs)
    chosen_key = jax.random.key(0) if key is None else check_key("low_rank: key", key)
    source = as_source(model, x)
    points = enter_points("low_rank: x", x, source.form)
    if source.network is not None:
        num_outputs = check_network(source.network, points, num_outputs)
    if method == "random-features":
        if source.network is None:
            raise TypeError("low_rank: random features of the gradient need a linearised network.")
        return RandomFeatureSource(source, chosen_key, rank)
    return nystrom(source, points, rank, num_outputs, chosen_key)


def nystrom(
    source: AbstractSource, x: Array, rank: int, num_outputs: int | None, key: PRNGKeyArray
) -> NystromSource:
    """Landmarks drawn without replacement, `rank/c` of them."""
    c = num_outputs or 1
    if source.network is not None:
        c = source.network.apply_shape(x)[1]
    count = min(math.ceil(rank / c), x.shape[0])
    chosen = np.sort(np.asarray(jax.random.permutation(key, x.shape[0])[:count]))
    landmarks = x[chosen]
    square = _four_axes(source.block(landmarks, landmarks, False), c).reshape(count * c, -1)
    return NystromSource(source, landmarks, _inverse_root(square), c)


@jit
def _inverse_root(K: Float[Array, "m m"]) -> Float[Array, "m m"]:
    """`T` with `TTᵀ = K⁺`; eigenvalues below rounding count as zero."""
    values, vectors = jnp.linalg.eigh(0.5 * (K + K.T))
    floor = K.shape[0] * jnp.finfo(K.dtype).eps * values[-1]
    roots = jnp.where(values > floor, 1 / jnp.sqrt(jnp.maximum(values, floor)), 0)
    return vectors * roots[None]


@jit
def _times(block: Float[Array, "n c m"], transform: Float[Array, "m r"]) -> Array:
    return jnp.dot(block, transform, precision=HIGHEST)


def _four_axes(block: Array, c: int) -> Float[Array, "n c m c"]:
    """A Kronecker block written out for all its outputs."""
    if block.ndim == 4:
        return block
    return jnp.einsum("nm,ab->namb", block, jnp.eye(c, dtype=block.dtype), precision=HIGHEST)


def _check_landmarks(landmarks: Array, x: Array, kept: np.ndarray) -> None:
    marks = np.asarray(landmarks).reshape(len(landmarks), -1)
    rows = np.asarray(x).reshape(kept.size, -1)
    for mark in marks:
        same = (rows == mark).all(axis=1)
        if same.any() and not (same & kept).any():
            raise ValueError(
                f"purge: point {int(np.argmax(same))} is a landmark of this low-rank model, "
                "which is built from it. Draw landmarks from the remaining points (low_rank) "
                "and fit again."
            )


def _direction(model: Linearized, key: PRNGKeyArray, rank: int) -> PyTree:
    """One column of `P`."""
    theta = model.split(model.params)[0]
    leaves, treedef = jax.tree.flatten(theta)
    keys = jax.random.split(key, len(leaves))
    draws = [
        jax.random.normal(k, leaf.shape, leaf.dtype) / math.sqrt(rank)
        for k, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(treedef, draws)


@filter_jit
def _random_features(
    model: Linearized, x: Array, key: PRNGKeyArray, rank: int
) -> Float[Array, "n c r"]:
    columns = jax.lax.map(
        lambda k: model.jvp(x, _direction(model, k, rank)), jax.random.split(key, rank)
    )
    return jnp.moveaxis(columns, 0, 2)


@filter_jit
def _project(model: Linearized, w: Float[Array, " r"], key: PRNGKeyArray) -> PyTree:
    """`P w`."""
    keys = jax.random.split(key, w.shape[0])
    start = jax.tree.map(jnp.zeros_like, model.split(model.params)[0])

    def add(total: PyTree, item: tuple[Array, Array]) -> tuple[PyTree, None]:
        step = _direction(model, item[0], w.shape[0])
        return jax.tree.map(lambda t, s: t + item[1] * s, total, step), None

    return jax.lax.scan(add, start, (keys, w))[0]
