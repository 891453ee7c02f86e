"""Estimators that `attribution_lds.py` compares with: SOURCE, EK-FAC, replay and a linear datamodel.

All give scores `(q, n)` with the sign of the library: positive if leaving the point out raises the loss.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from dualfluence._support.compile import PRECISION, filter_jit
from dualfluence.kernels._linearized import linearize
from dualfluence.linalg import spectrum_each
from dualfluence.losses import AbstractLoss, SoftmaxCrossEntropy
from dualfluence.models._passes import gradient_products, point_gradients
from dualfluence.primal._curvature import Curvature
from dualfluence.primal._kronecker import (
    Block,
    _Batches,
    _moments,
    _second_moments,
    _whole_block,
)
from dualfluence.primal._places import EXACT_LIMIT, Places, find_places
from dualfluence.primal._start import curvature_at, training_start


class Segment(NamedTuple):
    """A part of training in which curvature and gradients count as constant.

    - `checkpoints`: parameters that stand for it.
    - `time`: the sum of its learning rates, over one minus the momentum.
    - `decay`: decoupled weight decay.
    - `preconditioners`: the diagonal of the optimiser's step at each checkpoint, for Adam `1/(√v̂ + ε)`.
    """

    checkpoints: Sequence[PyTree]
    time: float
    decay: float = 0.0
    preconditioners: Sequence[PyTree] | None = None


def source(
    apply_fn: Callable[..., Array],
    segments: Sequence[Segment],
    x: Array,
    y: Array,
    xq: Array,
    yq: Array,
    *,
    loss: AbstractLoss | None = None,
) -> np.ndarray:
    r"""SOURCE (Bae et al. 2024): differentiation through training as a few segments of constant curvature.

    In segment $l$ of time $\tau$ with mean curvature $H$ by EK-FAC and mean gradients $\bar g_i$, training
    moves by $\dot\theta = -P(H\theta + g) - d\,\theta$. With $k = \tilde p\lambda + d$ in the eigenbasis,
    $$a_{l-1} = e^{-\tau k}a_l,\qquad S_{qi} \mathrel{+}= \frac1n\,\bar g_i^\top\,
    \tilde p\,\frac{1 - e^{-\tau k}}{k}\,a_l,$$
    from the gradient $a_L$ of the query's loss at the end backwards. The paper has $P = 1$ and $d = 0$. For
    Adam we take $\tilde p$, the diagonal of $P$ in the eigenbasis: an approximation like EK-FAC's own.
    """
    loss = SoftmaxCrossEntropy() if loss is None else loss
    last = segments[-1].checkpoints[-1]
    model, end = _at(apply_fn, last, xq, yq, loss)
    a = point_gradients(model, end.rows.x[0], _gradients(end, loss))
    total = 0.0
    for segment in reversed(segments):
        found = [_at(apply_fn, params, x, y, loss) for params in segment.checkpoints]
        places = find_places(found[0][1].model, found[0][1].rows.x[0])
        blocks = _mean_blocks([curvature for _, curvature in found], places)
        diagonal = _mean(segment.preconditioners or [jax.tree.map(jnp.ones_like, last)])
        gain, keep = _multipliers(places, blocks, diagonal, segment.time, segment.decay)
        moved = _multiplied(places, blocks, gain, last, a)
        for network, curvature in found:
            g = _gradients(curvature, loss) / x.shape[0]
            products = gradient_products(network, curvature.rows.x[0], g, moved)
            total += np.asarray(products, float) / len(found)
        a = _multiplied(places, blocks, keep, last, a)
    return np.asarray(total)


def ekfac(
    apply_fn: Callable[..., Array],
    params: PyTree,
    ridges: Sequence[float],
    x: Array,
    y: Array,
    xq: Array,
    yq: Array,
) -> list[np.ndarray]:
    """Scores of `primal.attribute` with `EKFAC` for several ridges, from one pass for the blocks."""
    loss = SoftmaxCrossEntropy()
    network, curvature = _at(apply_fn, params, x, y, loss)
    _, end = _at(apply_fn, params, xq, yq, loss)
    places = find_places(curvature.model, curvature.rows.x[0])
    blocks = _mean_blocks([curvature], places)
    g = _gradients(curvature, loss) / x.shape[0]
    v = point_gradients(network, end.rows.x[0], _gradients(end, loss))
    found = []
    for ridge in ridges:
        solved = _multiplied(places, blocks, [1 / (b.values + ridge) for b in blocks], params, v)
        found.append(np.asarray(gradient_products(network, curvature.rows.x[0], g, solved), float))
    return found


def _at(apply_fn: Any, params: PyTree, x: Array, y: Array, loss: AbstractLoss) -> Any:
    """The network at these parameters, and the curvature of the mean loss with all points in one batch."""
    network = linearize(apply_fn, params)
    start = training_start("SOURCE", network, params, x, y, None, loss)
    curvature, _ = curvature_at("SOURCE", start, start.data, 0.0, len(x), False)
    return start.model, curvature


def _gradients(curvature: Curvature, loss: AbstractLoss) -> Array:
    return loss.grad(curvature.rows.outputs[0], curvature.rows.targets[0])


def _mean(trees: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *trees)


def _mean_blocks(curvatures: list[Curvature], places: Places) -> list[Block]:
    """EK-FAC of the mean over checkpoints: mean factors, then mean second moments in their basis."""
    lefts, rights, whole = _mean([_factors_at(c, places) for c in curvatures])
    bases = [
        (None if a.ndim == 2 else spectrum_each(a)[1], spectrum_each(s)[1])
        for a, s in zip(lefts, rights, strict=True)
    ]
    values = _mean([_values_at(c, places, bases) for c in curvatures])
    found = [Block(a, s, jnp.maximum(v, 0)) for (a, s), v in zip(bases, values, strict=True)]
    return found + [_whole_block(moment) for moment in whole]


@filter_jit
def _factors_at(curvature: Curvature, places: Places) -> PyTree:
    with jax.default_matmul_precision(PRECISION):
        return _Batches(curvature, places).total(lambda p, *parts: _moments(p, EXACT_LIMIT, *parts))


@filter_jit
def _values_at(curvature: Curvature, places: Places, bases: list[Any]) -> PyTree:
    with jax.default_matmul_precision(PRECISION):
        return _Batches(curvature, places).total(
            lambda p, *parts: _second_moments(p, bases, *parts)
        )


def _multipliers(
    places: Places, blocks: list[Block], diagonal: PyTree, time: float, decay: float
) -> tuple[list[Array], list[Array]]:
    """`p̃(1 − e^{−τk})/k` and `e^{−τk}` for every block."""
    gain, keep = [], []
    for block, p in zip(blocks, _parts(places, jax.tree.leaves(diagonal)), strict=True):
        left = None if block.left is None else block.left**2
        right = None if block.right is None else block.right**2
        p = Block(left, right, block.values).turn(p)
        z = time * (p * block.values + decay)
        safe = jnp.where(z > 0, z, 1)
        gain.append(p * time * jnp.where(z > 0, -jnp.expm1(-safe) / safe, 1))
        keep.append(jnp.exp(-z))
    return gain, keep


def _parts(places: Places, leaves: Sequence[Array]) -> list[Array]:
    """Leaves as the blocks hold them."""
    whole = [jnp.reshape(leaves[k], (1, 1, size)) for k, _, size in places.whole]
    return [place.gather(leaves) for place in places.places] + whole


@filter_jit
def _multiplied(
    places: Places, blocks: list[Block], by: list[Array], like: PyTree, rows: Float[Array, "k p"]
) -> Float[Array, "k p"]:
    """Rows of flat parameters, multiplied in the eigenbases."""
    leaves, treedef = jax.tree.flatten(like)
    _, unravel = ravel_pytree(like)

    def one(row: Array) -> Array:
        out = list(leaves)
        parts = _parts(places, jax.tree.leaves(unravel(row)))
        new = [b.turn_back(b.turn(v) * m) for b, v, m in zip(blocks, parts, by, strict=True)]
        for place, block in zip(places.places, new[: len(places.places)], strict=True):
            for k, flat in place.scatter(block):
                out[k] = flat.reshape(leaves[k].shape)
        for (k, _, _), block in zip(places.whole, new[len(places.places) :], strict=True):
            out[k] = block.reshape(leaves[k].shape)
        return ravel_pytree(jax.tree.unflatten(treedef, out))[0]

    with jax.default_matmul_precision(PRECISION):
        return jax.lax.map(one, rows)


def make_replay(
    outcome: Callable[..., Array], *, at_once: int = 50
) -> Callable[..., Float[np.ndarray, "q n"]]:
    """The metagradient: minus the derivative of `outcome(weights, *rest) -> (q,)` in the weights.

    `outcome` trains and measures. Training runs forwards once and backwards once for each query, `at_once`
    queries together.
    """

    @jax.jit
    def scores(weights: Array, *rest: Any) -> Array:
        values, back = jax.vjp(lambda w: outcome(w, *rest), weights)
        eye = jnp.eye(values.shape[0], dtype=values.dtype)
        return -jax.lax.map(lambda u: back(u)[0], eye, batch_size=min(at_once, len(eye)))

    def checked(weights: Array, *rest: Any) -> np.ndarray:
        found = np.asarray(scores(weights, *rest), float)
        if not np.isfinite(found).all():
            raise FloatingPointError("replay: the derivative of training is not finite.")
        return found

    return checked


RIDGES = 10.0 ** np.arange(-3, 4.01, 0.5)
"""Of the datamodel, over the mean eigenvalue of `XᵀX`."""


class Datamodel(NamedTuple):
    """Scores `(q, n)`, the ridge that was chosen (one of `RIDGES`), and the share of variance that left-out
    retrainings have in common with their predictions."""

    scores: np.ndarray
    ridge: float
    explained: float


def datamodel(masks: np.ndarray, targets: np.ndarray, blocks: np.ndarray) -> Datamodel:
    """Ridge regression of the measured loss on which points were kept (Ilyas et al. 2022).

    Every block of retrainings, such as those of one seed, has an intercept of its own. The ridge, one for
    all queries, has the least squared error in leave-one-out cross-validation, by its closed form.

    **Arguments:**

    - `masks`: `(m, n)`; `targets`: `(m, q)`; `blocks`: `(m,)`, numbers of blocks.
    """
    X, Y, leverage = masks.astype(float), targets.astype(float), np.empty(len(masks))
    for b in np.unique(blocks):
        rows = blocks == b
        if rows.sum() < 2:
            raise ValueError(f"datamodel: block {b} has one retraining; two or more are needed.")
        X[rows] -= X[rows].mean(axis=0)
        Y[rows] -= Y[rows].mean(axis=0)
        leverage[rows] = 1 / rows.sum()
    few = X.shape[0] < X.shape[1]
    squares, vectors = np.linalg.eigh(X @ X.T if few else X.T @ X)
    used = squares > squares[-1] * 1e-10
    squares, vectors = squares[used], vectors[:, used]
    U = vectors if few else X @ vectors / np.sqrt(squares)
    along, mean, sizes = U.T @ Y, squares.mean(), np.sum(Y**2, axis=0)
    sizes = np.where(sizes > 0, sizes, 1)

    def error(ridge: float) -> float:
        share = squares / (squares + ridge * mean)
        left = Y - U @ (share[:, None] * along)
        left /= np.maximum(1 - leverage - U**2 @ share, 1e-12)[:, None]
        return float(np.mean(np.sum(left**2, axis=0) / sizes))

    errors = [error(ridge) for ridge in RIDGES]
    best = int(np.argmin(errors))
    moved = along / (squares + RIDGES[best] * mean)[:, None]
    V_s = X.T @ U if few else vectors * np.sqrt(squares)
    return Datamodel(-(V_s @ moved).T, float(RIDGES[best]), 1 - errors[best])
