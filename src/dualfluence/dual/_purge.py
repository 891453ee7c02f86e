"""Forgetting removed points for good: what holds their rows, and what stands there instead.

A purged row becomes a copy of a point that stays, with weight zero and `α = 0`. So positions keep their
meaning, shapes and compiled programs stay, every network and kernel can evaluate the row (zeros might
divide by zero), and `K` on these rows is still a kernel.
"""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..models._low_rank import AbstractLowRankSource, NystromSource
from ..models._sources import (
    AbstractSource,
    JacobianSource,
    KernelSource,
    NetworkSource,
    PrecomputedKernel,
    make_jacobian,
)
from ..operators import (
    AbstractKernelOperator,
    DenseOperator,
    KroneckerOperator,
    LowRankOperator,
    MatrixFreeOperator,
    MixedOperator,
    take_block,
)
from ..problem._edits import TrainingSet

NEGLIGIBLE = 1e3
"""Dual variables of a removed point up to this many units in the last place count as zero."""


def stand_ins(data: TrainingSet) -> np.ndarray:
    """For each row the row that it shows after a purge: itself, or the first point with a weight."""
    kept = data.sample_weights > 0
    return np.where(kept, np.arange(kept.size), np.argmax(kept)).astype(np.int32)


def purged_data(data: TrainingSet, rows: np.ndarray) -> TrainingSet:
    gone = np.flatnonzero(data.sample_weights == 0)
    return TrainingSet(data.x[rows], data.targets[rows], data.sample_weights, gone)


def purged_operator(op: AbstractKernelOperator, x: Array, rows: np.ndarray) -> Any:
    """`K` between the rows that are left, in the same structure; `x` are the purged features."""
    if isinstance(op, MixedOperator):
        return MixedOperator(purged_operator(op.op, x, rows))
    if isinstance(op, (DenseOperator, KroneckerOperator)):
        return take_block(op, rows)
    if isinstance(op, MatrixFreeOperator):
        return replace(op, x=x)
    if isinstance(op, LowRankOperator):
        return LowRankOperator(op.features[rows])
    if op.layout.sharding is not None:
        raise ValueError(
            "purge: rows on a mesh cannot be purged. Save, load, purge, then go back with on(mesh)."
        )
    raise ValueError(
        f"purge: a {type(op).__name__} keeps entries of removed points where purge cannot reach them "
        "(on disk). Build a new store of the remaining points, fit them, and delete the old one."
    )


def purged_source(source: AbstractSource, data: TrainingSet, purged: TrainingSet) -> AbstractSource:
    """The source without what it holds of removed points."""
    if isinstance(source, JacobianSource):
        return JacobianSource(source.model, make_jacobian(source.model, purged.x))
    if isinstance(source, AbstractLowRankSource):
        if isinstance(source, NystromSource):
            _check_landmarks(source.landmarks, data)
        return replace(source, base=purged_source(source.base, data, purged))
    pool = getattr(source.kernel, "__self__", None) if isinstance(source, KernelSource) else None
    if isinstance(source, KernelSource) and isinstance(pool, PrecomputedKernel):
        return replace(source, kernel=_purged_pool(pool, data, purged).kernel)
    if isinstance(source, (NetworkSource, KernelSource)):
        return source
    raise ValueError(
        f"purge: a {type(source).__name__} may hold removed points. Fit again without."
    )


def check_settled(alpha: Float[Array, "n c"], diagonal: Float[Array, "n c"], gone: Any) -> None:
    """Raise unless the model no longer moves with the removed points: their `α` is rounding."""
    share = jnp.maximum(diagonal, 0) * alpha**2
    part = float(jnp.sqrt(jnp.sum(share[gone]) / jnp.maximum(jnp.sum(share), 1e-300)))
    if part > NEGLIGIBLE * float(jnp.finfo(alpha.dtype).eps):
        raise ValueError(
            f"purge: removed points still carry {part:.2g} of the model, because the edit that removed "
            "them stopped early. Finish it first: fitted.edit([], until=...).commit()."
        )


def _purged_pool(
    pool: PrecomputedKernel, data: TrainingSet, purged: TrainingSet
) -> PrecomputedKernel:
    """The kernel matrix of all positions with removed ones overwritten by their stand-ins."""
    positions = np.arange(pool.matrix.shape[0])
    positions[np.asarray(data.x)] = np.asarray(purged.x)
    kept = np.asarray(data.x)[data.sample_weights > 0]
    positions[kept] = kept  # a position that a remaining point uses as well stays
    return PrecomputedKernel(pool.kernel(positions, positions))


def _check_landmarks(landmarks: Array, data: TrainingSet) -> None:
    kept, marks = data.sample_weights > 0, np.asarray(landmarks)
    marks, x = marks.reshape(len(marks), -1), np.asarray(data.x).reshape(kept.size, -1)
    for mark in marks:
        same = (x == mark).all(axis=1)
        if same.any() and not (same & kept).any():
            raise ValueError(
                f"purge: point {int(np.argmax(same))} is a landmark of this low-rank model, which is "
                "made of it. Draw landmarks from the remaining points (low_rank) and fit again."
            )
