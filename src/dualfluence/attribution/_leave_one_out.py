r"""Leaving out every point in turn, from one factorisation.

Without point `i` the weights of the others grow by `1/(1 − w_i)`. Multiplied by `1 − w_i`, the Newton
step (★) has the matrix of the full set in all rows except the rows of `i`:

$$(\lambda_i I + WK)\,\Delta\alpha = b^{(i)} + E_i\tau_i,\qquad \lambda_i = (1-w_i)\lambda,\quad
  b^{(i)} = -(g + \lambda_i\alpha),\quad \Delta\alpha_i = -\alpha_i .$$

The last equation fixes `τ_i`, a small system of size `c`. Every form below solves these equations. The
first-order effect is the same without renormalisation and leverage: `b = 0`, `τ_i = g_i`.
"""

import abc
from collections.abc import Callable, Iterator
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._support.compile import HIGHEST, filter_jit
from .._support.memory import total_memory
from .._support.types import AnyArray
from ..dual._model import TrainedModel, problem_on_device
from ..dual._reweighted import reweighted
from ..linalg import AbstractInverse, each, solve_each
from ..losses import AbstractFactor, DiagonalFactor, SoftmaxFactor
from ..operators import DenseOperator, KroneckerOperator, LowRankOperator
from ..solvers import AbstractPreconditioner
from ..solvers._preconditioner import Apply
from ._system import cholesky_inverse, spectral_inverse, system_cholesky

MAX_FACTORS = 8
"""Distinct weights up to which each gets a Cholesky factor; beyond, one eigendecomposition."""

FACTOR_SHARE = 0.75
"""Share of the memory that `K`, `B`, its factor and the factor's inverse may take together."""

DIRECT_PRECONDITIONER = 8192
"""Size up to which batches of CG are preconditioned by a factor of the fit's own system."""


class Steps(NamedTuple):
    """The effect of leaving out each of `k` points.

    - `reading`: `Δα`, shape `(n, c, k)`; for a low-rank kernel `ΦᵀΔα`, shape `(r, k)`.
    - `own`: change of the left-out point's own outputs, shape `(k, c)`.
    - `distance_bound`: the certified distance for each point, if the form measures it.
    """

    reading: Array
    own: Array
    distance_bound: np.ndarray | None = None


class Terms(eqx.Module):
    """The fit's gradient, dual variables and curvature, in the objective's weights."""

    alpha: Float[Array, "n c"]
    loss_grad: Float[Array, "n c"]
    factor: AbstractFactor

    def right_side(self, ridge: Float[Array, " k"]) -> Float[Array, "n c k"]:
        """`b = −(g + λ_i α)`, one column per left-out point."""
        return -(self.loss_grad[:, :, None] + self.alpha[:, :, None] * ridge[None, None, :])


Part = tuple[Int[np.ndarray, " k"], Callable[[AnyArray], Steps]]


class AbstractLeaveOneOut(eqx.Module):
    """Solves the leave-one-out systems of one fit."""

    terms: Terms
    ridges: np.ndarray
    first_order: bool

    @abc.abstractmethod
    def parts(self, points: np.ndarray) -> Iterator[Part]:
        """Points that share a factorisation, with the function that leaves out a block of them."""

    @property
    @abc.abstractmethod
    def describe(self) -> str:
        """How the systems are solved, for reports."""

    def by_ridge(self, points: np.ndarray) -> Iterator[tuple[np.ndarray, float]]:
        for ridge in np.unique(self.ridges[points]):
            yield points[self.ridges[points] == ridge], float(ridge)


class DenseForm(AbstractLeaveOneOut):
    """Dense `K`: one factorisation of `B` for all points of equal weight."""

    op: DenseOperator

    @property
    def describe(self) -> str:
        return f"{_factor_words(self.ridges)} for n·c = {self.op.matrix.shape[0]}"

    def parts(self, points: np.ndarray) -> Iterator[Part]:
        K, c = self.op.matrix, self.op.c
        terms = eqx.tree_at(lambda t: t.factor, self.terms, self.terms.factor.narrow())

        def make(inverse: AbstractInverse) -> Callable[[AnyArray], Steps]:
            return lambda block: Steps(
                *_dense_steps(
                    K, c, terms, inverse, jnp.asarray(block), self._ridge(block), self.first_order
                )
            )

        if np.unique(self.ridges[points]).size > MAX_FACTORS:
            yield points, make(spectral_inverse(K, c, terms.factor))
            return
        for part, ridge in self.by_ridge(points):
            inverse = cholesky_inverse(K, c, terms.factor, ridge, whole=not self.first_order)
            yield part, make(inverse)

    def _ridge(self, block: AnyArray) -> Array:
        return jnp.asarray(self.ridges[np.asarray(block)], self.terms.alpha.dtype)


class KroneckerDiagonalForm(AbstractLeaveOneOut):
    """`Σ ⊗ I` with curvature that does not mix outputs: one system of size `n` per output."""

    op: KroneckerOperator

    @property
    def describe(self) -> str:
        return f"{_factor_words(self.ridges)} of size n = {self.op.matrix.shape[0]}, per output"

    def parts(self, points: np.ndarray) -> Iterator[Part]:
        if np.unique(self.ridges[points]).size > MAX_FACTORS:
            yield points, self._solver(None)
            return
        for part, ridge in self.by_ridge(points):
            yield part, self._solver(ridge)

    def _solver(self, ridge: float | None) -> Callable[[AnyArray], Steps]:
        S, factor = self.op.matrix, self.terms.factor
        assert isinstance(factor, DiagonalFactor)
        outputs = [DiagonalFactor(factor.scale[:, a : a + 1]) for a in range(factor.scale.shape[1])]
        if ridge is None:
            inverses = [spectral_inverse(S, 1, f) for f in outputs]
        else:
            whole = not self.first_order
            inverses = [cholesky_inverse(S, 1, f, ridge, whole=whole) for f in outputs]

        def steps(block: AnyArray) -> Steps:
            ridges = jnp.asarray(self.ridges[np.asarray(block)], self.terms.alpha.dtype)
            each = []
            for a in range(self.op.c):
                b = a if len(outputs) > 1 else 0
                column = Terms(
                    self.terms.alpha[:, a : a + 1], self.terms.loss_grad[:, a : a + 1], outputs[b]
                )
                where = jnp.asarray(block)
                each.append(
                    _dense_steps(S, 1, column, inverses[b], where, ridges, self.first_order)
                )
            deltas, owns = zip(*each, strict=True)
            return Steps(jnp.concatenate(deltas, axis=1), jnp.concatenate(owns, axis=1))

        return steps


class KroneckerSoftmaxForm(AbstractLeaveOneOut):
    """`Σ ⊗ I` with softmax curvature: `c + 1` Cholesky factors of size `n`."""

    op: KroneckerOperator

    @property
    def describe(self) -> str:
        return f"{self.op.c + 1} Cholesky factors of size n = {self.op.matrix.shape[0]}"

    def parts(self, points: np.ndarray) -> Iterator[Part]:
        S, terms = self.op.matrix, self.terms
        for part, ridge in self.by_ridge(points):
            held = _softmax_factors(S, terms, jnp.asarray(ridge, S.dtype), self.first_order)
            yield (
                part,
                lambda block, held=held: Steps(
                    *_softmax_steps(S, terms, held, jnp.asarray(block), self.first_order)
                ),
            )


class LowRankForm(AbstractLeaveOneOut):
    """`ΦΦᵀ`: one eigendecomposition of `ΦᵀWΦ`, of the rank's size, for any weights."""

    op: LowRankOperator

    @property
    def describe(self) -> str:
        return f"eigendecomposition of size {self.op.features.shape[2]}, the rank"

    def parts(self, points: np.ndarray) -> Iterator[Part]:
        features = self.op.features.astype(self.terms.alpha.dtype)
        values, vectors = _feature_spectrum(features, self.terms.factor)

        def steps(block: AnyArray) -> Steps:
            ridge = jnp.asarray(self.ridges[np.asarray(block)], features.dtype)
            args = (features, self.terms, values, vectors, jnp.asarray(block), ridge)
            return Steps(*_low_rank_steps(*args, self.first_order))

        yield points, steps


class BatchedForm(AbstractLeaveOneOut):
    """Any `K`: preconditioned CG on blocks of leave-one-out systems."""

    fitted: TrainedModel = eqx.field(static=True)
    until: float | None = eqx.field(static=True)

    @property
    def describe(self) -> str:
        steps = "one step each" if self.until is None else f"to a distance of {self.until:g}"
        return f"preconditioned CG on blocks of left-out points, {steps}"

    def parts(self, points: np.ndarray) -> Iterator[Part]:
        fitted, pre = self.fitted, shared_inverse(self.fitted)

        def steps(block: AnyArray) -> Steps:
            block = np.asarray(block)
            weights = np.repeat(fitted.data.sample_weights[:, None], block.size, axis=1)
            weights[block, np.arange(block.size)] = 0
            many = reweighted(fitted, weights, until=self.until, preconditioner=pre)
            delta = many.alpha - fitted.state.alpha[:, :, None]
            k_delta = many.k_alpha - fitted.state.k_alpha[:, :, None]
            own = k_delta[block, :, np.arange(block.size)]
            return Steps(delta, own, many.distance_bound)

        yield points, steps


def leave_one_out(
    fitted: TrainedModel, *, first_order: bool = False, until: float | None = None
) -> AbstractLeaveOneOut:
    """The form for this kernel and loss; `until` asks for iterated, certified answers."""
    op, dtype = fitted.kernel_op.narrow, fitted.state.alpha.dtype
    problem = problem_on_device(fitted)
    terms = Terms(fitted.state.alpha, problem.loss_grad(fitted.state), problem.factor(fitted.state))
    weights = np.asarray(fitted.data.weights)
    ridges = fitted.ridge * (np.ones_like(weights) if first_order else 1 - weights)
    batched = BatchedForm(terms, ridges, False, fitted, until)
    if until is not None:
        return batched
    if isinstance(op, LowRankOperator):
        return LowRankForm(terms, ridges, first_order, op)
    if isinstance(op, DenseOperator | KroneckerOperator) and op.dtype != dtype:
        op = eqx.tree_at(lambda o: o.matrix, op, op.matrix.astype(dtype))
    if isinstance(op, KroneckerOperator) and isinstance(terms.factor, DiagonalFactor):
        return KroneckerDiagonalForm(terms, ridges, first_order, op)
    few = np.unique(ridges[weights > 0]).size <= MAX_FACTORS
    if isinstance(op, KroneckerOperator) and isinstance(terms.factor, SoftmaxFactor) and few:
        return KroneckerSoftmaxForm(terms, ridges, first_order, op)
    if isinstance(op, DenseOperator) and 4 * op.num_bytes <= FACTOR_SHARE * total_memory():
        return DenseForm(terms, ridges, first_order, op)
    if first_order:
        raise ValueError(
            "attribute: first_order=True needs a factorisation, which is not available for a "
            f"{type(op).__name__} of this size or with this loss. Leave first_order out: each point is then "
            "one linear solve."
        )
    return batched


class SharedInverse(AbstractPreconditioner):
    """`B⁻¹` of the fit itself: one point more or less changes `B` by a matrix of rank `c`.

    For leave-one-out systems CG then takes a few iterations. Do not use it for edits of many points.
    """

    chol: Float[Array, "m m"]

    def inverse(self, factor: AbstractFactor, ridge: Float[Array, ""]) -> Apply:
        def apply(v: Float[Array, "n c"]) -> Float[Array, "n c"]:
            flat = jax.scipy.linalg.cho_solve((self.chol, True), v.reshape(-1))
            return flat.reshape(v.shape)

        return apply


def shared_inverse(fitted: TrainedModel) -> SharedInverse | None:
    """A preconditioner for leave-one-out systems, where `K` is small enough to factor."""
    op = fitted.kernel_op.narrow
    size = op.num_points * op.num_outputs
    if not op.has_entries or size > DIRECT_PRECONDITIONER:
        return None
    K = op.dense().astype(fitted.state.alpha.dtype)
    factor = problem_on_device(fitted).factor(fitted.state)
    chol = system_cholesky(K, op.num_outputs, factor, jnp.asarray(fitted.ridge, K.dtype))
    # Factored in the precision of the model, and applied in that of the linear solves.
    return SharedInverse(chol.astype(op.dtype))


def _factor_words(ridges: np.ndarray) -> str:
    distinct = np.unique(ridges).size
    if distinct > MAX_FACTORS:
        return f"one eigendecomposition for {distinct} distinct weights"
    return "one Cholesky factor" if distinct == 1 else f"{distinct} Cholesky factors"


@filter_jit
def _dense_steps(
    K: Float[Array, "m m"],
    c: int,
    terms: Terms,
    inverse: AbstractInverse,
    points: Int[Array, " k"],
    ridge: Float[Array, " k"],
    first_order: bool,
) -> tuple[Float[Array, "n c k"], Float[Array, "k c"]]:
    r"""`Δα = (b − Rz)/λ_i` with `z = B⁻¹RᵀKb` on all rows except the rows of the left-out point.

    A block of an inverse gives the inverse without that block: `C − C_{:,i} C_{ii}⁻¹ C_{i,:}`.
    """
    n, k, factor = K.shape[0] // c, points.size, terms.factor
    g = terms.loss_grad[points]
    # Rows for columns, which are the same: they lie together. A product and a sum are one pass over
    # them, where einsum would copy them first.
    rows = K.reshape(n, c, -1)[points]
    k_g = jnp.sum(rows * g[:, :, None], axis=1).T.reshape(n, c, k)
    own_row = jnp.zeros((n, c, k), K.dtype).at[points, :, jnp.arange(k)].set(g)
    if first_order:
        b, h = own_row, factor.rmv(k_g)
    else:
        right = terms.right_side(ridge)
        # Two products serve every column: K b is linear in λ_i.
        pair = jnp.stack([-terms.loss_grad.reshape(-1), -terms.alpha.reshape(-1)], axis=1)
        k_pair = jnp.dot(K, pair, precision=HIGHEST).reshape(n, c, 2)
        k_right = k_pair[:, :, :1] + k_pair[:, :, 1:] * ridge[None, None, :]
        b, h = right + own_row, factor.rmv(k_right + k_g)
    r = h.shape[1]
    half = inverse.half(h.reshape(-1, k), ridge)
    if not first_order:
        X = inverse.columns(points, r, ridge)
        gram = jnp.einsum("kam,kbm->kab", X, X, precision=HIGHEST)
        at_point = jnp.sum(X * half.T[:, None, :], axis=2)
        share = solve_each(gram, at_point)
        half = half - jnp.sum(X * share[:, :, None], axis=1).T
    z = inverse.back(half, ridge).reshape(n, r, k)
    delta = (b - factor.mv(z)) / ridge[None, None, :]
    own = jnp.sum(rows * delta.reshape(-1, k).T[:, None, :], axis=2)
    return delta, own


class _SoftmaxFactors(eqx.Module):
    chols: Float[Array, "c n n"]
    chol_total: Float[Array, "n n"]
    blocks: Float[Array, "n c c"]
    ridge: Float[Array, ""]


@filter_jit
def _softmax_factors(
    S: Float[Array, "n n"], terms: Terms, ridge: Float[Array, ""], first_order: bool
) -> _SoftmaxFactors:
    r"""Factors of multi-class Laplace, and the diagonal blocks of `Q = (λK⁻¹ + W)⁻¹`.

    `Q = (K − KNK)/λ` with `N = (E − E𝟙(Σ_a E_a)⁻¹𝟙ᵀE)/λ` (Rasmussen & Williams, section 3.5).
    """
    factor = terms.factor
    assert isinstance(factor, SoftmaxFactor)
    n, c = terms.alpha.shape
    roots, eye = (factor.root_weights * factor.root_probs).T, jnp.eye(n, dtype=S.dtype)
    chols = jax.lax.map(
        lambda root: jnp.linalg.cholesky(ridge * eye + root[:, None] * S * root[None, :]), roots
    )

    def add(total: Array, pair: tuple[Array, Array]) -> tuple[Array, None]:
        half = jax.scipy.linalg.solve_triangular(pair[0], jnp.diag(pair[1]), lower=True)
        return total + ridge * jnp.dot(half.T, half, precision=HIGHEST), None

    gone = (factor.root_weights[:, 0] == 0).astype(S.dtype)
    total, _ = jax.lax.scan(add, jnp.diag(gone), (chols, roots))
    chol_total = jnp.linalg.cholesky(total)
    if first_order:
        return _SoftmaxFactors(chols, chol_total, jnp.zeros((n, c, c), S.dtype), ridge)

    def project(pair: tuple[Array, Array]) -> tuple[Array, Array]:
        chol, root = pair
        F = jax.scipy.linalg.solve_triangular(chol, root[:, None] * S, lower=True)
        e_s = jax.scipy.linalg.solve_triangular(chol, F, lower=True, trans=1)
        G = jax.scipy.linalg.solve_triangular(chol_total, ridge * root[:, None] * e_s, lower=True)
        return jnp.sum(F**2, axis=0), G

    squares, G = jax.lax.map(project, (chols, roots))
    cross = jnp.einsum("aki,bki->iab", G, G, precision=HIGHEST) / ridge
    diagonal = (jnp.diagonal(S)[:, None] - squares.T)[:, :, None] * jnp.eye(c, dtype=S.dtype)[None]
    return _SoftmaxFactors(chols, chol_total, (diagonal + cross) / ridge, ridge)


def _softmax_inverse(
    S: Array, factor: SoftmaxFactor, held: _SoftmaxFactors, b: Array, k_b: Array
) -> Array:
    """`(λI + WK)⁻¹ b` for columns `b` of shape `(n, c, k)`."""
    roots, n = (factor.root_weights * factor.root_probs).T[:, :, None], S.shape[0]

    def times_e(v: Array) -> Array:
        def solve(chol: Array, u: Array) -> Array:
            return jax.scipy.linalg.cho_solve((chol, True), u)

        right = roots * jnp.swapaxes(v, 0, 1)
        return held.ridge * (roots * each(solve, right[0].size * n, held.chols, right)).swapaxes(
            0, 1
        )

    e = times_e(k_b / held.ridge)
    mean = jax.scipy.linalg.cho_solve((held.chol_total, True), jnp.sum(e, axis=1))
    correction = times_e(jnp.broadcast_to(mean[:, None], e.shape))
    return (b - e + correction) / held.ridge


@filter_jit
def _softmax_steps(
    S: Float[Array, "n n"],
    terms: Terms,
    held: _SoftmaxFactors,
    points: Int[Array, " k"],
    first_order: bool,
) -> tuple[Float[Array, "n c k"], Float[Array, "k c"]]:
    factor, (n, c), k = terms.factor, terms.alpha.shape, points.size
    assert isinstance(factor, SoftmaxFactor)
    tau, base = terms.loss_grad[points], jnp.zeros((n, c, 1), S.dtype)
    if not first_order:
        b = terms.right_side(held.ridge[None])
        k_b = jnp.dot(S, b[:, :, 0], precision=HIGHEST)[:, :, None]
        base = _softmax_inverse(S, factor, held, b, k_b)
        small = jnp.eye(c, dtype=S.dtype)[None] - factor.hess_mv(held.blocks)
        short = -terms.alpha - base[:, :, 0]
        tau = held.ridge * solve_each(small[points], short[points])
    rows = jnp.zeros((n, c, k), S.dtype).at[points, :, jnp.arange(k)].set(tau)
    k_rows = S[:, None, points] * tau.T[None]
    delta = base + _softmax_inverse(S, factor, held, rows, k_rows)
    return delta, jnp.einsum("kn,nck->kc", S[points], delta, precision=HIGHEST)


@filter_jit
def _feature_spectrum(
    features: Float[Array, "n c r"], factor: AbstractFactor
) -> tuple[Array, Array]:
    A = factor.rmv(features).reshape(-1, features.shape[2])
    return jnp.linalg.eigh(jnp.dot(A.T, A, precision=HIGHEST))


@filter_jit
def _low_rank_steps(
    features: Float[Array, "n c r"],
    terms: Terms,
    values: Float[Array, " r"],
    vectors: Float[Array, "r r"],
    points: Int[Array, " k"],
    ridge: Float[Array, " k"],
    first_order: bool,
) -> tuple[Float[Array, "r k"], Float[Array, "k c"]]:
    """`ΦᵀΔα = (λ_i I + ΦᵀWΦ)⁻¹(Φᵀb + Φ_iᵀτ_i)`."""
    here = features[points]
    psi = jnp.dot(here, vectors, precision=HIGHEST)
    tau, along = terms.loss_grad[points], jnp.zeros((values.size, points.size), values.dtype)
    scale = 1 / (jnp.maximum(values, 0)[:, None] + ridge[None, :])
    if not first_order:
        pair = jnp.stack([-terms.loss_grad, -terms.alpha], axis=2)
        push = jnp.einsum("ncr,ncs->rs", features, pair, precision=HIGHEST)
        push = jnp.dot(vectors.T, push, precision=HIGHEST)
        along = push[:, :1] + push[:, 1:] * ridge[None, :]
        b = terms.right_side(ridge)[points, :, jnp.arange(points.size)]
        outputs = jnp.einsum("kcr,rk->kc", psi, scale * along, precision=HIGHEST)
        base = (b - _hess_at(terms, points, outputs)) / ridge[:, None]
        Q = jnp.einsum("kar,rk,kbr->kab", psi, scale, psi, precision=HIGHEST)
        small = jnp.eye(Q.shape[1], dtype=Q.dtype)[None] - _hess_at(terms, points, Q)
        short = -terms.alpha[points] - base
        tau = ridge[:, None] * solve_each(small, short)
    along = along + jnp.einsum("kcr,kc->rk", psi, tau, precision=HIGHEST)
    reading = jnp.dot(vectors, scale * along, precision=HIGHEST)
    return reading, jnp.einsum("kcr,rk->kc", here, reading, precision=HIGHEST)


def _hess_at(terms: Terms, points: Array, v: Array) -> Array:
    """`W_i v_i` at some points."""
    rows = jnp.zeros((terms.alpha.shape[0], *v.shape[1:]), v.dtype).at[points].set(v)
    return terms.factor.hess_mv(rows)[points]
