r"""The effect of leaving single points out of one training run, backwards through its checkpoints.

Near a run the parameters of a run without point `i` are off by `u`, with `du/dt = P(J_iᵀg_i − Hu)`, where `t`
counts steps times learning rate and `P` is the optimiser's diagonal. A query sees `v_qᵀJ_q u` at the end. The
adjoint `a` of each query runs backwards, by one implicit Euler step `δ` for each
segment between checkpoints:

$$a \leftarrow (I + \delta HP)^{-1}a, \qquad S_{qi} \mathrel{+}= \delta\, g_i^\top J_i P a_q,$$

$$(I + \delta HP)^{-1}a = a - J^\top R\,(\tfrac1\delta I + R^\top JPJ^\top R)^{-1}R^\top JPa .$$

The matrix is the system of a checkpoint with the ridge `1/δ` where `δ` is the length of the segment. Weight
decay `d` adds `d` to this ridge and divides by `1 + δd`. No `κ` is chosen: the segments are those of the run.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from .._support.archive import digest_of_all
from .._support.compile import HIGHEST, PRECISION, filter_jit
from .._support.memory import even_size, memory_budget
from .._support.points import common_dtype
from ..kernels._linearized import Linearized
from ..kernels._products import cut, map_rows
from ..losses import AbstractLoss
from ..problem._quantity import Quantity
from ._pieces import Pieces
from ._probes import Probes
from ._solves import factor, solve_both
from ._terms import directed_terms
from ._view import View

ADJOINT_SHARE = 0.05
"""Share of the kernel's memory budget for one direction of parameters per query."""

ADJOINT_COPIES = 6
"""Arrays of that size at once: the adjoint, what is pulled back twice, and what the compiler keeps."""


class Moment(NamedTuple):
    """A checkpoint as the adjoint sees it.

    - `model`: the network at its parameters, with the optimiser's diagonal as `scale`.
    - `duration`: steps times learning rate since the checkpoint before.
    - `decay`: weight decay.
    - `key`: of random probes.
    """

    model: Linearized
    duration: float
    decay: float
    key: Array


def swept(
    moments: Sequence[tuple[str, Callable[[], Moment], Callable[[], str]]],
    data: Any,
    loss: AbstractLoss,
    probes: Probes | None,
    pieces: Pieces,
    tick: Callable[[], None],
) -> tuple[np.ndarray, float]:
    """Scores `(q, n)` of one run, and the mean share of curvature that probes left out.

    `moments` are name, checkpoint and digest of every checkpoint, in order. A piece holds what a segment adds
    and the adjoint at its start, and belongs to this checkpoint and all later ones.
    """
    n, last = data.x.shape[0], moments[-1][1]()
    at_once = queries_at_once(last.model, data.xq.shape[0])
    values, left_out = [], []
    for first in range(0, data.xq.shape[0], at_once):
        here = replace(
            data,
            xq=data.xq[first : first + at_once],
            quantity=replace(data.quantity, targets=data.quantity.targets[first : first + at_once]),
        )
        a, total, later = start_of(replace(last.model, scale=None), here.xq, here.quantity), 0.0, ""
        for name, moment, digest in reversed(moments):
            later = digest_of_all((digest() + later,)) if pieces.kept else ""

            segment = partial(_piece, moment, a, here, loss, probes)
            piece = pieces.get(f"{name}-queries-{first:06d}", segment, lambda d=later: d)
            piece = jnp.asarray(piece)
            left_out.append(float(piece[0, 0]))
            total, a = total + piece[:, 1 : n + 1], piece[:, n + 1 :]
            tick()
        values.append(np.asarray(total, float))
    return np.concatenate(values), float(np.mean(left_out))


def _piece(moment: Callable[[], Moment], a: Array, *given: Any) -> Array:
    found, a, left_out = step_back(moment(), a, *given)
    return jnp.concatenate([jnp.full((len(a), 1), left_out), found, a], axis=1)


def durations(times: Any) -> np.ndarray:
    """Lengths of the segments that end at the checkpoints, from the time at each."""
    lengths = np.diff(np.asarray(times, float), prepend=0.0)
    if not (lengths > 0).all():
        raise ValueError(
            "Trajectory: steps times the mean learning rate must grow from checkpoint to checkpoint, got "
            f"{np.asarray(times).tolist()}. learning_rate is the mean over all steps up to a checkpoint."
        )
    return lengths


def queries_at_once(model: Linearized, num_queries: int) -> int:
    """Queries whose adjoints fit in memory together."""
    theta = model.split(model.params)[0]
    each = ADJOINT_COPIES * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(theta))
    return even_size(num_queries, max(1, int(ADJOINT_SHARE * memory_budget() // max(each, 1))))


@filter_jit
def start_of(model: Linearized, xq: Array, quantity: Quantity) -> Float[Array, "q p"]:
    """`J_qᵀv_q` of every query."""
    theta, outputs = model._outputs()

    def gradient(row: tuple[Array, Array]) -> Array:
        point, target = row
        with jax.default_matmul_precision(PRECISION):
            f, back = jax.vjp(lambda t: outputs(t, point[None]), theta)
        v = quantity.grad(f, target[None])
        with jax.default_matmul_precision(PRECISION):
            return ravel_pytree(back(v.astype(f.dtype))[0])[0]

    return jax.lax.map(gradient, (xq, quantity.targets))


def step_back(
    moment: Moment, a: Float[Array, "q p"], data: Any, loss: AbstractLoss, probes: Probes | None
) -> tuple[Float[Array, "q n"], Float[Array, "q p"], Array]:
    """What one segment adds to the scores, the adjoint at its start, and what probes left out."""
    x, seen, raw = data.x, moment.model.in_scale(), replace(moment.model, scale=None)
    given = (x, data.targets, data.xq, data.quantity)
    terms = directed_terms(seen, *given, loss, probes, moment.key)
    # Float64 points make float64 outputs of float32 parameters.
    a = a.astype(common_dtype(a.dtype, terms.g.dtype))
    delta, decay = (jnp.asarray(v, a.dtype) for v in (moment.duration, moment.decay))
    chol = factor(View(seen, x, terms.P).system(), 1 / delta + decay)
    metric = _flat_scale(moment.model)
    size = even_size(x.shape[0], max(1, raw.batch(x) // a.shape[0]))
    y = solve_both(chol, pushed(raw, metric, x, terms.P, a, size))
    a = (a - pulled(raw, x, terms.P, y, size)) / (1 + delta * decay)
    values = delta * pushed(raw, metric, x, terms.g[:, :, None], a, size).T
    return values, a, terms.left_out


def _flat_scale(model: Linearized) -> Array | None:
    """The optimiser's diagonal as one vector, in the order of the adjoint."""
    if model.scale is None:
        return None
    leaves = jax.tree.leaves(model.split(model.params)[0])
    rows = zip(model.scale, leaves, strict=True)
    return jnp.concatenate(
        [jnp.broadcast_to(1 if d is None else d, p.shape).ravel() for d, p in rows]
    )


@filter_jit
def pushed(
    model: Linearized,
    metric: Float[Array, " p"] | None,
    x: Array,
    U: Float[Array, "n c r"],
    a: Float[Array, "q p"],
    size: int,
) -> Float[Array, "nr q"]:
    """`UᵀJPa`: outputs' changes along directions of parameters, folded."""
    theta, outputs = model._outputs()
    unravel = ravel_pytree(theta)[1]
    tangents = jax.vmap(unravel)(a if metric is None else a * metric[None].astype(a.dtype))
    tangents = jax.tree.map(lambda t, p: t.astype(p.dtype), tangents, theta)

    def rows(batch: tuple[Array, Array]) -> Array:
        xb, Ub = batch
        push = jax.linearize(lambda t: outputs(t, xb), theta)[1]
        changes = jax.vmap(push)(tangents)
        return jnp.einsum("qnc,ncr->nrq", changes, Ub.astype(changes.dtype), precision=HIGHEST)

    with jax.default_matmul_precision(PRECISION):
        return map_rows(rows, (x, U), size).reshape(-1, a.shape[0])


@filter_jit
def pulled(
    model: Linearized, x: Array, P: Float[Array, "n c r"], y: Float[Array, "nr q"], size: int
) -> Float[Array, "q p"]:
    """`JᵀPy` of every column of `y`, summed over points."""
    theta, outputs = model._outputs()
    weights = y.reshape(P.shape[0], P.shape[2], -1)

    def add(total: Array, batch: tuple[Array, Array, Array]) -> tuple[Array, None]:
        xb, Pb, yb = batch
        f, back = jax.vjp(lambda t: outputs(t, xb), theta)
        v = jnp.einsum("ncr,nrq->qnc", Pb, yb, precision=HIGHEST).astype(f.dtype)
        pulled_back = jax.vmap(lambda each: ravel_pytree(back(each)[0])[0])(v)
        return total + pulled_back.astype(total.dtype), None

    start = jnp.zeros((y.shape[1], ravel_pytree(theta)[0].size), y.dtype)
    batches = (cut(x, size), cut(P, size), cut(weights, size, zeros=True))
    with jax.default_matmul_precision(PRECISION):
        return jax.lax.scan(add, start, batches)[0]
