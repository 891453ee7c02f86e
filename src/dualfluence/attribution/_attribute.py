"""Effects of leaving points or groups out, streamed over queries and points."""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from .._support.checks import OVERFLOW, check_finite, check_indices, check_range
from .._support.compile import HIGHEST, filter_jit
from .._support.memory import even_size, memory_budget
from .._support.options import ProgressFn, Ticker
from .._support.points import shown
from .._support.types import AnyPath, Inputs, Numbers
from ..dual._model import TrainedModel
from ..dual._reweighted import columns_at_once, reweighted
from ..operators._base import Layout
from ..problem._quantity import Quantity, as_quantity
from ._attribution import Attribution, GroupAttribution
from ._leave_one_out import Steps, leave_one_out
from ._leave_one_out_mesh import leave_one_out_on_mesh
from ._spread_system import own_copy, summed_along, summed_over_points

BLOCK_SHARE = 0.1
"""Share of the kernel's memory budget for a block of queries or of left-out points."""

FAR_FROM_OPTIMUM = 1e-3
"""Certified distance over `‖θ − θ₀‖` past which the result says that the model is not at its optimum. One
point of a thousand moves it by about as much."""

COPIES = 8
"""Arrays as large as a block's dual variables that a step holds at its peak."""


def attribute(
    fitted: TrainedModel,
    xq: Inputs,
    yq: Numbers | None = None,
    *,
    of: str | Callable[[Array, Array], Array] = "loss",
    first_order: bool = False,
    refine: float | None = None,
    block_size: int | None = None,
    out: AnyPath | None = None,
    progress: bool | ProgressFn = True,
) -> Attribution:
    """See `Fitted.attribute`."""
    start, fitted = time.perf_counter(), fitted.without_spare_rows()
    _check_options(first_order, refine, block_size)
    xq = fitted.data.queries(xq)
    quantity = _quantity(fitted, of, yq, xq.shape[0])
    outputs = _here(fitted, fitted.predict(xq))
    until = fitted._remaining(refine, "attribute: refine")
    make = leave_one_out_on_mesh if fitted.layout.sharding is not None else leave_one_out
    form = make(fitted, first_order=first_order, until=until)
    points = np.flatnonzero(fitted.data.sample_weights > 0)
    if points.size < 2:
        raise ValueError("attribute: only one point has a weight; nothing is left without it.")
    n, dtype = fitted.data.num_points, np.dtype(fitted.state.alpha.dtype)
    own, bounds, without = np.zeros(n, dtype), np.zeros(n), np.array(fitted.outputs)
    train = _quantity_at_train(fitted, of, quantity)
    rows = _query_rows(fitted, block_size)
    read = _reader(fitted, xq, outputs, quantity, rows, first_order)
    with _Values(out, (xq.shape[0], n), dtype) as values, _ticker(points, progress) as ticker:
        for part, solve in form.parts(points):
            for block in _blocks(part, _point_columns(fitted, block_size)):
                padded = _padded(block, part, fitted, block_size)
                steps = solve(padded)
                for where, change in read(steps):
                    values.array[where, block] = change[:, : block.size]
                own[block] = train(steps, padded, first_order)[: block.size]
                without[block] += np.asarray(steps.own)[: block.size]
                if steps.distance_bound is not None:
                    bounds[block] = steps.distance_bound[: block.size]
                ticker.tick(block.size)
        check_finite("attribute", own, hint=OVERFLOW)
    stats = {
        "seconds": time.perf_counter() - start,
        "form": form.describe,
        "first_order": first_order,
    }
    return Attribution(
        values=values.result,
        of=quantity.name,
        direction=quantity.direction,
        own=own,
        outputs_without=without,
        distance_bound=bounds if refine is not None else None,
        notes=_notes(fitted, form.describe, first_order, refine, points, bounds),
        stats=stats,
        x=shown(fitted.data.x, fitted.data.form),
        y=np.asarray(fitted.data.targets),
        xq=shown(xq, fitted.data.form),
        yq=None if yq is None else np.asarray(yq),
    )


def attribute_groups(
    fitted: TrainedModel,
    groups: Mapping[Hashable, Numbers] | Sequence[Numbers],
    xq: Inputs,
    yq: Numbers | None = None,
    *,
    of: str | Callable[[Array, Array], Array] = "loss",
    refine: float | None = None,
    interactions: bool = False,
    progress: bool | ProgressFn = True,
) -> GroupAttribution:
    """See `Fitted.attribute_groups`."""
    _check_options(False, refine, None)
    fitted = fitted.without_spare_rows()
    names, members = _checked_groups(groups, fitted)
    xq = fitted.data.queries(xq)
    quantity = _quantity(fitted, of, yq, xq.shape[0])
    pairs = [(i, j) for i in range(len(names)) for j in range(i)] if interactions else []
    sets = members + [np.union1d(members[i], members[j]) for i, j in pairs]
    changes, bounds = _leave_sets_out(fitted, sets, xq, quantity, refine, progress)
    g = len(names)
    values = changes[:, :g]
    both = None
    if interactions:
        both = np.zeros((xq.shape[0], g, g), values.dtype)
        for column, (i, j) in enumerate(pairs, start=g):
            both[:, i, j] = both[:, j, i] = changes[:, column] - values[:, i] - values[:, j]
    single = attribute(fitted, xq, yq, of=of, refine=refine, progress=progress).values
    return GroupAttribution(
        names=tuple(map(str, names)),
        sizes=tuple(m.size for m in members),
        values=values,
        sums=np.stack([single[:, m].sum(axis=1) for m in members], axis=1),
        of=quantity.name,
        direction=quantity.direction,
        distance_bound=bounds[:g],
        interactions=both,
        notes=(
            "one Newton step each" if refine is None else f"iterated to a distance of {refine:g}",
        ),
    )


def _leave_sets_out(
    fitted: TrainedModel,
    sets: list[np.ndarray],
    xq: Array,
    quantity: Quantity,
    refine: float | None,
    progress: bool | ProgressFn,
) -> tuple[np.ndarray, np.ndarray]:
    """Change of the quantity at every query for each set of points left out, and the bounds."""
    weights = np.repeat(np.asarray(fitted.data.sample_weights)[:, None], len(sets), axis=1)
    for column, members in enumerate(sets):
        weights[members, column] = 0
    outputs = _here(fitted, fitted.predict(xq))
    read = _reader(fitted, xq, outputs, quantity, _query_rows(fitted, None), False)
    changes = np.zeros((xq.shape[0], len(sets)), np.dtype(fitted.state.alpha.dtype))
    bounds = np.zeros(len(sets))
    with Ticker(len(sets), "groups left out", progress) as ticker:
        for block in _blocks(np.arange(len(sets)), columns_at_once(fitted)):
            many = reweighted(
                fitted, weights[:, block], until=fitted._remaining(refine, "attribute: refine")
            )
            delta = many.alpha - fitted.state.alpha[:, :, None]
            reading = _low_rank_reading(fitted, delta)
            for where, change in read(Steps(reading, reading)):
                changes[where, block] = change
            bounds[block] = many.distance_bound
            ticker.tick(block.size)
    return changes, bounds


def _low_rank_reading(fitted: TrainedModel, delta: Float[Array, "n c k"]) -> Array:
    if not fitted.source.has_features:
        return delta
    features = fitted.source.features(fitted.data.x).astype(delta.dtype)
    return jnp.einsum("ncr,nck->rk", features, delta, precision=HIGHEST)


def _check_options(first_order: bool, refine: float | None, block_size: int | None) -> None:
    if refine is not None and not (np.isfinite(refine) and refine > 0):
        raise ValueError(f"attribute: refine must be a positive distance, got {refine}.")
    if first_order and refine is not None:
        raise ValueError("attribute: first_order=True and refine=... exclude each other.")
    if block_size is not None and block_size < 1:
        raise ValueError(f"attribute: block_size must be at least 1, got {block_size}.")


def _checked_groups(groups: Any, fitted: TrainedModel) -> tuple[list[Hashable], list[np.ndarray]]:
    named = dict(groups) if isinstance(groups, Mapping) else dict(enumerate(groups))
    if not named:
        raise ValueError("attribute_groups: give at least one group of positions.")
    members = []
    for name, indices in named.items():
        array = check_indices(f"attribute_groups, group {name!r}", indices)
        check_range(f"attribute_groups, group {name!r}", array, fitted.data.num_points)
        left = np.delete(np.asarray(fitted.data.sample_weights), array)
        if not left.sum() > 0:
            raise ValueError(
                f"attribute_groups: group {name!r} is the whole training set; nothing is left."
            )
        members.append(array)
    return list(named), members


def _quantity(fitted: TrainedModel, of: Any, yq: Numbers | None, num_queries: int) -> Quantity:
    return as_quantity(of, fitted.loss, yq, num_queries, fitted.num_outputs, fitted.offset.dtype)


def _quantity_at_train(
    fitted: TrainedModel, of: Any, like: Quantity
) -> Callable[[Steps, np.ndarray, bool], np.ndarray]:
    """The same quantity at the training points, for the effect of each on itself."""
    targets = None if like.targets.shape[1:] == (0,) else fitted.data.targets
    quantity = _quantity(fitted, of, targets, fitted.data.num_points)
    outputs = _here(fitted, fitted.outputs)

    def change(steps: Steps, block: np.ndarray, first_order: bool) -> np.ndarray:
        f, y, delta = outputs[block], quantity.targets[block], steps.own
        if first_order:
            return np.asarray(jnp.sum(quantity.grad(f, y) * delta, axis=1))
        return np.asarray(quantity.value(f + delta, y) - quantity.value(f, y))

    return change


def _reader(
    fitted: TrainedModel,
    xq: Array,
    outputs: Float[Array, "q c"],
    quantity: Quantity,
    rows: int,
    first_order: bool,
) -> Callable[[Steps], Iterator[tuple[slice, np.ndarray]]]:
    """From a block of steps to changes of the quantity, one block of queries after the other."""
    source, q, dtype = fitted.source, xq.shape[0], fitted.state.alpha.dtype
    layout, c = fitted.layout, fitted.num_outputs
    rows = even_size(q, rows)  # equal blocks: no last one to compile for
    held: dict[int, Array] = {}

    def kernel(where: slice) -> Array:
        part = xq[where]
        if layout.sharding is not None and first_order:
            v = quantity.grad(outputs[where], quantity.targets[where])
            return source.rows_along(fitted.data.x, part, v, layout)
        if layout.sharding is not None:
            return source.rows_block(fitted.data.x, part, c, layout)
        if source.has_features:
            return source.features(part)
        if not first_order:
            return source.block(part, fitted.data.x, False)
        v = quantity.grad(outputs[where], quantity.targets[where])
        return source.along(part, v, fitted.data.x)

    def cross(where: slice) -> Array:
        if where.start in held:
            return held[where.start]
        block = kernel(where).astype(dtype)
        # Kept for the next block of points if the queries are one block, which is the usual case.
        if rows >= q:
            held[where.start] = block
        return block

    def read(steps: Steps) -> Iterator[tuple[slice, np.ndarray]]:
        for i in range(0, q, rows):
            where = slice(i, min(i + rows, q))
            given = quantity, cross(where), steps.reading, outputs[where], quantity.targets[where]
            if layout.sharding is not None:
                change = _change_on_mesh(*given, layout, first_order)
            else:
                change = (_first_order_change if first_order else _value_change)(*given)
            change = np.asarray(change)
            check_finite("attribute", change, hint=OVERFLOW)
            yield where, change

    return read


def _here(fitted: TrainedModel, values: Array) -> Array:
    """Values that every device of a mesh has, on a device of this process."""
    return values if fitted.layout.sharding is None else own_copy(values)


def _change_on_mesh(
    quantity: Quantity,
    cross: Array,
    reading: Array,
    f: Array,
    y: Array,
    layout: Layout,
    first_order: bool,
) -> Float[Array, "q k"]:
    if first_order:
        return own_copy(summed_along(cross, reading, layout))
    return _changed(quantity, own_copy(summed_over_points(cross, reading, layout)), f, y)


def _delta_outputs(cross: Array, reading: Array) -> Float[Array, "q c k"]:
    if cross.ndim == 2:
        return jnp.einsum("qn,nck->qck", cross, reading, precision=HIGHEST)
    if cross.ndim == 3:
        return jnp.einsum("qcr,rk->qck", cross, reading, precision=HIGHEST)
    return jnp.einsum("qanb,nbk->qak", cross, reading, precision=HIGHEST)


@filter_jit
def _value_change(
    quantity: Quantity, cross: Array, reading: Array, f: Array, y: Array
) -> Float[Array, "q k"]:
    return _changed(quantity, _delta_outputs(cross, reading), f, y)


@filter_jit
def _changed(
    quantity: Quantity, delta: Float[Array, "q c k"], f: Array, y: Array
) -> Float[Array, "q k"]:
    after = jax.vmap(lambda d: quantity.value(f + d, y), in_axes=2, out_axes=1)(delta)
    return after - quantity.value(f, y)[:, None]


@filter_jit
def _first_order_change(
    quantity: Quantity, cross: Array, reading: Array, f: Array, y: Array
) -> Float[Array, "q k"]:
    """`v_qᵀ K_qn Δα`; a kernel without features is folded with `v_q` already, `(q, n, c)`."""
    if reading.ndim == 2:
        cross = jnp.einsum("qc,qcr->qr", quantity.grad(f, y), cross, precision=HIGHEST)
    flat = cross.reshape(cross.shape[0], -1)
    return jnp.dot(flat, reading.reshape(flat.shape[1], -1), precision=HIGHEST)


def _query_rows(fitted: TrainedModel, block_size: int | None) -> int:
    n, c = fitted.state.alpha.shape
    each = n * c * c * fitted.state.alpha.dtype.itemsize
    return block_size or int(max(1, BLOCK_SHARE * memory_budget() // each))


def _point_columns(fitted: TrainedModel, block_size: int | None) -> int:
    n, c = fitted.state.alpha.shape
    each = COPIES * n * c * fitted.state.alpha.dtype.itemsize
    return block_size or int(max(1, 4 * BLOCK_SHARE * memory_budget() // each))


def _blocks(points: np.ndarray, size: int) -> Iterator[np.ndarray]:
    for i in range(0, points.size, size):
        yield points[i : i + size]


def _padded(
    block: np.ndarray, part: np.ndarray, fitted: TrainedModel, block_size: int | None
) -> np.ndarray:
    """A block filled up with copies of its last point, so that the programs of one request serve later
    ones.

    If the size followed from how many points are left, every removal would bring new programs. It is
    the number of rows, halved as long as the part still fits: at most twice the columns needed.
    """
    rows = fitted.data.num_points
    while part.size <= rows // 2:
        rows //= 2
    full = min(rows, _point_columns(fitted, block_size))
    return np.concatenate([block, np.repeat(block[-1:], full - block.size)])


def _ticker(points: np.ndarray, progress: bool | ProgressFn) -> Ticker:
    return Ticker(points.size, "points left out", progress)


def _notes(
    fitted: TrainedModel,
    form: str,
    first_order: bool,
    refine: float | None,
    points: np.ndarray,
    bounds: np.ndarray,
) -> tuple[str, ...]:
    notes = [form]
    own = fitted.certificate
    far = own.gradient_norm / max(own.ridge * own.parameter_norm, sys.float_info.min)
    if far > FAR_FROM_OPTIMUM and not first_order:
        notes.append(
            f"the model is up to {far:.1g} of ‖θ − θ₀‖ from its optimum, and every effect "
            "includes this distance; use edit(until=...) or retrain first"
        )
    if first_order:
        notes.append("first order: leverage and the renormalised mean are ignored")
    elif refine is None:
        notes.append("one Newton step per left-out point, exact for squared error")
    if refine is not None and (short := int((bounds > refine).sum())):
        notes.append(f"{short} points stopped at the rounding floor, short of {refine:g}")
    missing = fitted.data.num_points - points.size
    if missing:
        notes.append(f"{missing} points have weight zero and no effect")
    return tuple(notes)


class _Values:
    """The `(q, n)` result: in memory, or in a file that appears under its name once it is whole."""

    def __init__(self, out: AnyPath | None, shape: tuple[int, int], dtype: DTypeLike) -> None:
        self._path = None if out is None else Path(out)
        self.result: np.ndarray = np.zeros((0, 0), dtype)
        if self._path is None:
            self.array = np.zeros(shape, dtype)
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        handle, self._name = tempfile.mkstemp(
            prefix=f".{self._path.name}.", suffix=".tmp", dir=self._path.parent
        )
        os.close(handle)
        self.array = np.lib.format.open_memmap(self._name, "w+", dtype=dtype, shape=shape)

    def __enter__(self) -> "_Values":
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        if self._path is None:
            self.result = self.array
            return
        if kind is not None:
            Path(self._name).unlink(missing_ok=True)
            return
        assert isinstance(self.array, np.memmap)
        self.array.flush()
        del self.array
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(self._name, 0o666 & ~umask)
        os.replace(self._name, self._path)
        self.result = np.load(self._path, mmap_mode="r")
