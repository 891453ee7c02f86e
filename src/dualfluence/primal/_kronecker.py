r"""K-FAC and EK-FAC (Martens and Grosse; George et al.; Grosse et al. 2023) for any JAX function.

For a place with gradient $\sum_s a_s g_s^\top$, with $g$ for every column of the root of the loss's
Hessian (an exact expectation over the targets that the model predicts; nothing is sampled),

$$A = \sum_i \frac{w_i}{\sum w}\frac1{|s|}\sum_s a_s a_s^\top = Q_A D_A Q_A^\top,\quad
  S = \sum_{i,s} g_s g_s^\top = Q_S D_S Q_S^\top,\quad
  \Lambda = \sum_i \Big(Q_A^\top\big[\sum_s a_s g_s^\top\big]Q_S\Big)^{\circ 2},$$

EK-FAC takes $(Q_A\otimes Q_S)\,\mathrm{diag}(\Lambda)\,(Q_A\otimes Q_S)^\top$ for the block of the
Gauss-Newton matrix, K-FAC $A\otimes S$. Blocks of different places are treated as independent.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from .._support.compile import PRECISION, filter_jit
from .._support.memory import GRADIENT_BYTES
from .._support.types import Json
from ..kernels._params import split_params
from ..kernels._products import cut
from ..linalg import spectrum_each
from ._curvature import Curvature, curvature_roots, flat_rows, relative_residuals
from ._places import EXACT_LIMIT, Places, find_places
from ._solvers import AbstractPrimalInverse, AbstractPrimalSolver, Solved, check_options


class KFAC(AbstractPrimalSolver):
    """Blocks `A ⊗ S`, one for each layer (with its bias and scale), plus `λ + damping` in their eigenbasis.

    Parameters without factors get their exact block, or only its diagonal if they are many; the
    answer's `facts["blocks"]` names the block of every parameter. Always Gauss-Newton.

    **Fields:** `damping`, added to the ridge; `exact_limit`, the largest leaf with an exact block.
    """

    damping: float = eqx.field(static=True, default=0.0)
    exact_limit: int = eqx.field(static=True, default=EXACT_LIMIT)

    def __check_init__(self) -> None:
        check_options("KFAC", self.damping, "gauss-newton", exact_limit=self.exact_limit)

    def inverse(self, curvature: Curvature) -> AbstractPrimalInverse:
        return _prepare(curvature, self, corrected=False)


class EKFAC(AbstractPrimalSolver):
    """Like `KFAC`, but with the true second moments in the eigenbasis instead of products of two
    factors."""

    damping: float = eqx.field(static=True, default=0.0)
    exact_limit: int = eqx.field(static=True, default=EXACT_LIMIT)

    def __check_init__(self) -> None:
        check_options("EKFAC", self.damping, "gauss-newton", exact_limit=self.exact_limit)

    def inverse(self, curvature: Curvature) -> AbstractPrimalInverse:
        return _prepare(curvature, self, corrected=True)


class Block(eqx.Module):
    """An orthonormal basis `left ⊗ right` for the parameters of one `Place`, and the eigenvalues.

    `left` is `None` for one-hot rows, whose factor is diagonal as it stands; a leaf without factors has
    `(1, size, size)` as `right`, or `None` if only its diagonal is kept.
    """

    left: Float[Array, "b m m"] | None
    right: Float[Array, "b n n"] | None
    values: Float[Array, "b m n"]

    def turn(self, v: Array) -> Array:
        """Coordinates in the basis."""
        if self.left is not None:
            v = jnp.einsum("bmk,bmn->bkn", self.left, v)
        return v if self.right is None else jnp.einsum("bnk,bmn->bmk", self.right, v)

    def turn_back(self, v: Array) -> Array:
        if self.left is not None:
            v = jnp.einsum("bmk,bkn->bmn", self.left, v)
        return v if self.right is None else jnp.einsum("bnk,bmk->bmn", self.right, v)


class _BlockInverse(AbstractPrimalInverse):
    curvature: Curvature
    places: Places = eqx.field(static=True)
    blocks: list[Block]
    solver: Any

    def solve(self, b: Float[Array, "k p"]) -> Solved:
        shift = self.curvature.shift(self.solver.damping)
        value = _apply(self, shift, b)
        residuals = relative_residuals(self.curvature, shift, value[:1], b[:1], "gauss-newton")
        kinds = block_kinds(self.places, self.solver.exact_limit)
        largest = max(float(block.values.max()) for block in self.blocks)
        facts: Json = {"blocks": kinds, "largest_eigenvalue": largest}
        loose = [path for path, kind in kinds.items() if kind in ("exact", "diagonal")]
        notes = ("blocks of different places are taken as independent",)
        if loose:
            named = ", ".join(f"{path} ({kinds[path]} block)" for path in loose)
            notes += (f"parameters without Kronecker factors: {named}",)
        return Solved(value, float(residuals.max()), True, 0, 1, facts, notes)


def block_kinds(places: Places, exact_limit: int = EXACT_LIMIT) -> dict[str, str]:
    """For every parameter: `kronecker`, `exact`, `diagonal` or `unused`."""
    kinds = {}
    for place in places.places:
        kinds |= {places.paths[k]: "kronecker" for k in place.leaves}
    for k, slot, size in places.whole:
        used = slot in places.reached and size > 0
        kind = "exact" if size <= exact_limit else "diagonal"
        kinds[places.paths[k]] = kind if used else "unused"
    return kinds


def _prepare(curvature: Curvature, solver: Any, *, corrected: bool) -> _BlockInverse:
    places = find_places(curvature.model, curvature.rows.x[0])
    blocks = _blocks(curvature, places, corrected, solver.exact_limit)
    return _BlockInverse(curvature, places, blocks, solver)


@filter_jit
def _apply(
    inverse: _BlockInverse, shift: Float[Array, ""], b: Float[Array, "k p"]
) -> Float[Array, "k p"]:
    theta = inverse.curvature.model.split(inverse.curvature.model.params)[0]
    leaves, treedef = jax.tree.flatten(theta)
    _, unravel = ravel_pytree(theta)

    def one(row: Array) -> Array:
        given = jax.tree.leaves(unravel(row))
        out = list(given)
        blocks = iter(inverse.blocks)
        for place in inverse.places.places:
            solved = _divide(next(blocks), place.gather(given), shift)
            for k, flat in place.scatter(solved):
                out[k] = flat.reshape(leaves[k].shape)
        for k, _, size in inverse.places.whole:
            solved = _divide(next(blocks), given[k].reshape(1, 1, size), shift)
            out[k] = solved.reshape(leaves[k].shape)
        return ravel_pytree(jax.tree.unflatten(treedef, out))[0]

    with jax.default_matmul_precision(PRECISION):
        return jax.lax.map(one, b)


def _divide(block: Block, v: Array, shift: Array) -> Array:
    return block.turn_back(block.turn(v) / (block.values + shift))


@filter_jit
def _blocks(curvature: Curvature, places: Places, corrected: bool, exact_limit: int) -> list[Block]:
    """All blocks: one pass over the points for the factors, a second for corrected eigenvalues."""
    with jax.default_matmul_precision(PRECISION):
        batches = _Batches(curvature, places)
        lefts, rights, whole = batches.total(lambda p, *parts: _moments(p, exact_limit, *parts))
        bases: list[tuple[Array | None, Array | None]] = [
            (None if a.ndim == 2 else spectrum_each(a)[1], spectrum_each(s)[1])
            for a, s in zip(lefts, rights, strict=True)
        ]
        if corrected:
            values = batches.total(lambda p, *parts: _second_moments(p, bases, *parts))
        else:
            values = [_kron(a, s) for a, s in zip(lefts, rights, strict=True)]
        found = [
            Block(left, right, jnp.maximum(v, 0))
            for (left, right), v in zip(bases, values, strict=True)
        ]
        return found + [_whole_block(moment) for moment in whole]


def _kron(a: Array, s: Array) -> Array:
    a_values = a if a.ndim == 2 else spectrum_each(a)[0]
    return a_values[:, :, None] * spectrum_each(s)[0][:, None, :]


def _whole_block(moment: Array) -> Block:
    if moment.ndim == 1:
        return Block(None, None, moment[None, None])
    values, vectors = jnp.linalg.eigh(moment)
    return Block(None, vectors[None], jnp.maximum(values, 0)[None, None])


Moments = PyTree
"""Sums of products over points: arrays by place and by leaf."""


class _Batches:
    """The training points in batches that fit, each with the columns of its curvature's root."""

    def __init__(self, curvature: Curvature, places: Places) -> None:
        x, targets, weights, outputs = flat_rows(curvature)
        roots = curvature_roots(curvature.loss, outputs, targets, weights)
        mask = jax.tree.unflatten(
            jax.tree.structure(curvature.model.params), curvature.model.trainable
        )
        _, leaves, rest = split_params(curvature.model.params, mask)
        self.inputs, self.places = jax.tree.leaves((leaves, rest)), places
        self.dtype = outputs.dtype
        shares = weights / jnp.sum(weights)
        size = min(_batch_size(places), x.shape[0])
        self.parts = (cut(x, size), cut(roots, size, zeros=True), cut(shares, size, zeros=True))

    def total(self, moment: Callable[..., Moments]) -> Moments:
        """The sum of `moment(places, A, G, whole, share)` over batches."""

        def batch(part: tuple[Array, Array, Array]) -> Moments:
            x, roots, shares = part
            factors = jax.vmap(
                lambda xi, root: self.places.point([*self.inputs, xi], root.T, self.dtype)
            )(x, roots)
            return moment(self.places, *factors, shares)

        first = jax.tree.map(lambda a: a[0], self.parts)
        if self.parts[0].shape[0] == 1:
            return batch(first)
        shapes = jax.eval_shape(batch, first)
        start = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

        def add(total: Moments, part: tuple[Array, Array, Array]) -> tuple[Moments, None]:
            return jax.tree.map(jnp.add, total, batch(part)), None

        return jax.lax.scan(add, start, self.parts)[0]


def _batch_size(places: Places) -> int:
    """Points whose factors, gradients in the eigenbasis and whole gradients fit together."""
    each = sum(size for _, _, size in places.whole)
    for place in places.places:
        b, s, m, n = place.sizes
        each += b * s * (m + n) + (b * m * n if s > 1 else 0)
    return max(1, GRADIENT_BYTES // (8 * places.num_outputs * max(each, 1)))


def _moments(
    places: Places,
    exact_limit: int,
    lefts: list[Array],
    rights: list[Array],
    whole: list[Array],
    shares: Array,
) -> tuple[list[Array], list[Array], list[Array]]:
    """`A`, `S` and the blocks of leaves without factors, for a batch of points."""
    found_a = []
    for place, a in zip(places.places, lefts, strict=True):
        _, s, m, _ = place.sizes
        weight = shares / s
        if place.looks_up:
            found_a.append(_counts(a, weight, m))
        else:
            found_a.append(jnp.einsum("ibsm,ibsk,i->bmk", a, a, weight))
    found_s = [jnp.einsum("irbsn,irbsk->bnk", g, g) for g in rights]
    blocks = [
        jnp.einsum("irp,irq->pq", v, v) if v.shape[2] <= exact_limit else jnp.sum(v**2, (0, 1))
        for v in whole
    ]
    return found_a, found_s, blocks


def _counts(idx: Array, weight: Array, m: int) -> Array:
    """The diagonal of `A` for one-hot rows, `(b, m)`; rows out of range do not count."""
    inside = jnp.where(idx < 0, m, idx)
    spread = jnp.broadcast_to(weight[:, None, None], idx.shape)
    blocks = [
        jnp.zeros(m, weight.dtype)
        .at[inside[:, k].reshape(-1)]
        .add(spread[:, k].reshape(-1), mode="drop")
        for k in range(idx.shape[1])
    ]
    return jnp.stack(blocks)


def _second_moments(
    places: Places,
    bases: list[tuple[Array | None, Array | None]],
    lefts: list[Array],
    rights: list[Array],
    whole: list[Array],
    shares: Array,
) -> list[Array]:
    """`Σ (Q_Aᵀ ∂ Q_S)²` for a batch of points."""
    values = []
    for place, (q_a, q_s), a, g in zip(places.places, bases, lefts, rights, strict=True):
        _, s, m, _ = place.sizes
        g = jnp.einsum("irbsn,bnk->irbsk", g, q_s)
        if place.looks_up:
            values.append(_looked_up(a, g, m))
            continue
        a = jnp.einsum("ibsm,bmk->ibsk", a, q_a)
        if s == 1:  # the square of a product of two numbers: no gradient is formed
            squares = jnp.sum(g[:, :, :, 0] ** 2, axis=1)
            values.append(jnp.einsum("ibm,ibn->bmn", a[:, :, 0] ** 2, squares))
        else:
            grads = jnp.einsum("ibsm,irbsn->irbmn", a, g)
            values.append(jnp.sum(grads**2, axis=(0, 1)))
    return values


def _looked_up(idx: Array, g: Array, m: int) -> Array:
    """Squares of the gradient rows of an embedding, added up over points and cotangents."""
    inside = jnp.where(idx < 0, m, idx)

    def table(rows: Array, at: Array) -> Array:  # (s, n) into (m, n)
        return jnp.zeros((m, rows.shape[1]), rows.dtype).at[at].add(rows, mode="drop")

    def point(at: Array, rows: Array) -> Array:  # (b, s), (r, b, s, n)
        return jnp.sum(jax.vmap(lambda g: jax.vmap(table)(g, at))(rows) ** 2, axis=0)

    return jnp.sum(jax.vmap(point)(inside, g), axis=0)
