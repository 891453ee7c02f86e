"""Second stage: prepare what a fit needs before its first step: checked data, `K`, base outputs and a
preconditioner. For an edit: rows for the points that it adds."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array

from .._plan import DEFAULT_RANK, check_fits
from .._support.checks import (
    as_array,
    check_finite,
    check_ridge,
    check_rows,
    training_weights,
)
from .._support.compile import HIGHEST
from .._support.memory import memory_budget
from .._support.options import ProgressFn, check_loss, check_progress
from .._support.points import enter_points
from .._support.types import AnyArray, Inputs, Numbers
from ..dual._fidelity import random_like
from ..dual._model import Trained, Widening
from ..dual._newton import op_diagonal, op_mv
from ..kernels._linearized import Linearized
from ..losses import AbstractLoss
from ..models._low_rank import nystrom
from ..models._passes import check_network
from ..models._sharded import ShardedSource
from ..models._sources import AbstractSource
from ..operators import AbstractKernelOperator, widen
from ..operators._base import Device, as_mesh, rows_for
from ..problem._objective import State, TrainingSet
from ..solvers import (
    CG,
    AbstractDualSolver,
    AbstractPreconditioner,
    NoPreconditioner,
    Refined,
    SpectralPreconditioner,
    spectral_preconditioner,
)
from ._options import KernelOptions, Sketch

POWER_STEPS = 1
"""Passes over `K` that sharpen the sketch. With twice this number, CG saves an iteration or two, and the
fit takes one more block product."""


PROBES = 16
KERNEL_SLACK = 1e-2
"""Largest relative error of a kernel that is handed in: it may be stored in half precision."""


class Setup(NamedTuple):
    """Training set, kernel operator, base outputs on the rows of the operator, and notes for the
    stats."""

    data: TrainingSet
    op: AbstractKernelOperator
    offset: Array
    notes: tuple[str, ...]


def prepare(
    what: str,
    source: AbstractSource,
    x: Inputs,
    y: Numbers,
    loss: AbstractLoss,
    ridge: float | None,
    weights: Numbers | None,
    kernel: KernelOptions,
    progress: bool | ProgressFn,
) -> Setup:
    """Make the checked training set, kernel operator and base outputs.

    `ridge` has been checked except for the range of the dtype, which is checked here. It is `None` if
    the ridge is still to be chosen.
    """
    check_loss(what, loss, AbstractLoss)
    check_progress(what, progress)
    targets = as_array("y", y)
    features = enter_features(what, source, x, targets)
    n = features.shape[0]
    check_rows("y", targets, n, "point of x")
    samples = training_weights(what, weights, n)
    c = kernel.num_outputs
    if source.network is not None:
        c = check_network(source.network, features, c)
        _check_linear(what, source.network, features)
    elif kernel.operator is not None:
        c = kernel.operator.num_outputs
    base = source.base_outputs(features, c)
    if base is not None:
        check_finite("outputs of apply_fn", base)
    dtype = base.dtype if base is not None else jnp.result_type(float)
    # Before K, which may take hours, and after the network, from which c is known.
    targets = loss.prepare_targets(y, c, dtype)
    if c is None:
        c = targets.shape[1] if targets.ndim == 2 else 1
    _check_values(what, loss, c, targets, dtype)
    op, notes = make_operator(what, source, features, c, kernel, dtype, progress)
    if ridge is not None:
        check_ridge(ridge, op.narrow.dtype)
    if base is None:
        base = jnp.zeros((n, c), op.dtype)
    if base.dtype != dtype or op.dtype != dtype:
        base = base.astype(op.dtype)
        targets = loss.prepare_targets(y, c, op.dtype)
    data = TrainingSet(features, targets, samples, form=source.form)
    return Setup(data, op, op.layout.place(base, "last"), (*notes, *source.notes))


def make_operator(
    what: str,
    source: AbstractSource,
    x: Array,
    num_outputs: int,
    kernel: KernelOptions,
    dtype: DTypeLike,
    progress: bool | ProgressFn,
) -> tuple[AbstractKernelOperator, tuple[str, ...]]:
    """`K` as the options say, checked, and notes about it."""
    op, notes = kernel.operator, ()
    if op is None:
        form, notes = choose_form(source, kernel.form, x.shape[0], num_outputs, dtype)
        op = source.operator(x, num_outputs, form=form, progress=progress)
    else:
        check_given(what, source, x, num_outputs, op)
    notes = (f"kernel {op.check()}", *notes)
    if kernel.precision is not None:
        op, error = _at_precision(op, kernel.precision)
        name = kernel.precision.name
        notes += (f"products in {name} precision, off by {error:.1e} of their norm",)
    if kernel.refine and op.dtype != jnp.float64 and not widens(source, op):
        op = widen(op)
        notes += (f"{op.narrow.dtype} kernel, residuals and dual variables in float64",)
    return op, notes


def widens(source: AbstractSource, op: AbstractKernelOperator) -> bool:
    """Whether a model with this source and kernel can later be continued in float64."""
    if not source.can_widen:
        return False
    stored = op.has_entries or op.layout.sharding is not None
    exact = stored and op.product_precision == HIGHEST
    return exact or op.follows_points


def widening(options: KernelOptions) -> Widening:
    """How `K` is handled if float32 is not enough, given the caller's options for `K`."""
    if options.refine is not None:
        return "at once" if options.refine else "never"
    return "computed anew" if options.operator is None else "as stored"


def start_norm(source: AbstractSource) -> float:
    """`‖θ₀‖` in the norm of the ridge; without `θ₀`, the norm of the parameters at which `J` is taken; 0
    without a network."""
    return 0.0 if source.network is None else float(source.network.size)


def enter_features(what: str, source: AbstractSource, x: Inputs, targets: AnyArray) -> Array:
    """Training features; if `x` is `None`, positions in a precomputed kernel."""
    if x is not None:
        return enter_points("x", x, source.form)
    if source.network is not None:
        raise ValueError(f"{what}: x is None, but a network needs its training features.")
    check_rows("y", targets, max(1, len(targets) if targets.ndim else 1), "point")
    num_points = targets.shape[0]
    if source.num_positions not in (None, num_points):
        raise ValueError(
            f"{what}: the kernel has {source.num_positions} rows, but y has {num_points}. Without x, "
            "every row is a point; a kernel of several outputs has shape (n, c, n, c), and for a "
            "part of a pool give positions as x."
        )
    return jnp.arange(num_points)


def _check_values(
    what: str, loss: AbstractLoss, num_outputs: int, targets: Array, dtype: DTypeLike
) -> None:
    """Raise unless the loss works for these shapes and gives one real number per point."""
    n = targets.shape[0]
    outputs = jax.ShapeDtypeStruct((n, num_outputs), dtype)
    about = f"outputs of shape {outputs.shape} and targets of shape {targets.shape}"
    try:
        out = jax.eval_shape(loss.value, outputs, targets)
    except Exception as error:
        raise ValueError(
            f"{what}: the loss fails for {about}: {type(error).__name__}: {error}"
        ) from error
    if getattr(out, "shape", None) != (n,) or not jnp.issubdtype(out.dtype, jnp.floating):
        raise ValueError(
            f"{what}: the loss must give one real number per point, for {about} it gives {out}. A "
            "function in Convex takes one point's outputs and target and returns a scalar."
        )


def check_given(
    what: str, source: AbstractSource, x: Array, num_outputs: int, op: AbstractKernelOperator
) -> None:
    """Raise unless a kernel that was handed in belongs to this model. Its diagonal is compared at a few
    points."""
    n = x.shape[0]
    if (op.layout.num_points, op.num_outputs) != (n, num_outputs):
        raise ValueError(
            f"{what}: kernel is an operator for {op.layout.num_points} points with {op.num_outputs} "
            f"outputs, but there are {n} points with {num_outputs}."
        )
    on_devices = op.layout.sharding is not None or source.layout(x).sharding is not None
    if op.rank is not None or on_devices:
        return  # an approximation has another diagonal; rows on a mesh are not picked one by one
    where = np.unique(np.linspace(0, n - 1, PROBES).astype(int))
    own = source.operator(x[where], num_outputs, form="auto", progress=False).diagonal()
    given = op_diagonal(op.narrow)[where]
    size = float(jnp.max(jnp.abs(own)))
    worst = float(jnp.max(jnp.abs(own - given.astype(own.dtype))))
    if worst > KERNEL_SLACK * size:
        raise ValueError(
            f"{what}: kernel is not the kernel of this model and these points: its diagonal at "
            f"{where.size} of them differs by {worst:.3g} where the model's is {size:.3g}. Was it built "
            "from other parameters, or are the points in another order?"
        )


def _at_precision(
    op: AbstractKernelOperator, precision: jax.lax.Precision
) -> tuple[AbstractKernelOperator, float]:
    cheap = op.with_precision(precision)
    probe = np.random.default_rng(0).normal(size=(op.layout.num_points, op.num_outputs))
    v = op.layout.place(probe.astype(op.dtype))
    exact = op_mv(op, v)
    return cheap, float(jnp.linalg.norm(op_mv(cheap, v) - exact) / jnp.linalg.norm(exact))


def rounding_unit(source: AbstractSource, op: AbstractKernelOperator) -> float | None:
    """The rounding unit of products and outputs, if it is coarser than that of their dtype.

    It is coarser for a network with low-precision arithmetic or for products at a lower precision. It is
    measured on one product, as the ratio of the error `|δ(Kv)_i|` to `√K_ii ‖√K v‖`.
    """
    own, precision = source.narrow_eps, op.narrow.product_precision
    if precision in (None, HIGHEST):
        return own
    narrow = op.narrow
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (narrow.num_points, narrow.num_outputs))
    v = narrow.layout.place(signs.astype(narrow.dtype))
    exact = op_mv(narrow.with_precision(HIGHEST), v)
    root = jnp.sqrt(jnp.maximum(op_diagonal(narrow), jnp.finfo(narrow.dtype).tiny))
    off = jnp.abs(op_mv(narrow, v) - exact) / (root * jnp.linalg.norm(root * v))
    return max(own or 0.0, float(jnp.max(off)))


def place_source(
    what: str,
    source: AbstractSource,
    mesh: Mesh | Sequence[Device] | None,
    op: AbstractKernelOperator | None,
) -> AbstractSource:
    """The source with its rows on `mesh`, or on the devices that hold the rows of a given operator."""
    if op is None:
        return source if mesh is None else ShardedSource(source, as_mesh(mesh))
    sharding = op.layout.sharding
    own = sharding.mesh if sharding is not None and isinstance(sharding.mesh, Mesh) else None
    if mesh is not None and as_mesh(mesh) != own:
        where = "one device" if own is None else f"{own.size} devices of its own"
        raise ValueError(
            f"{what}: mesh and kernel contradict each other: the operator's rows are on {where}. Leave "
            "mesh out; kernel_operator(..., mesh=...) makes one on other devices."
        )
    return source if own is None else ShardedSource(source, own)


def choose_form(
    source: AbstractSource, form: str, num_points: int, num_outputs: int, dtype: DTypeLike
) -> tuple[str, tuple[str, ...]]:
    if source.has_features:
        return form, ()
    size = num_points * num_outputs
    devices = source.num_devices
    itemsize = jnp.dtype(dtype).itemsize
    needed, budget = size * size * itemsize, devices * memory_budget()
    if form == "dense" and source.network is not None:
        check_fits(needed, devices, "a dense kernel")
    if source.network is None and form != "matrix-free":
        check_fits(num_points * num_points * itemsize, devices, "the kernel of these points")
    if form != "auto" or source.network is None:
        return form, ()
    if needed <= budget:
        return "dense", ()
    note = f"matrix-free: a dense K of {needed / 2**30:.1f} GiB is over {budget / 2**30:.1f} GiB"
    return "matrix-free", (note,)


def _check_linear(what: str, model: Linearized, x: Array) -> None:
    """For `anchor="zero"`: `f(θ) − f(0) = Jθ` on a few points and a random `θ`, or an error."""
    model.apply_shape(x)
    if model.anchor != "zero":
        return
    model = model.plain(x)
    theta, frozen = model.split(model.params)
    probe, few = random_like(theta, seed=0), x[:4]
    actual = model(eqx.combine(probe, frozen), few) - model.base_outputs(few)
    # Scaled first, so that squares of large numbers do not overflow.
    scale = float(jnp.maximum(jnp.max(jnp.abs(actual)), 1e-30))
    gap = scale * float(jnp.linalg.norm((actual - model.jvp(few, probe)) / scale))
    # Not `gap > ...`: a model that overflows has a gap of NaN or infinity.
    if not (np.isfinite(scale) and gap <= 1e-3 * scale * float(jnp.linalg.norm(actual / scale))):
        raise ValueError(
            f"{what}: anchor='zero' (ridge on ‖θ‖²) needs a model that is linear in its parameters, but "
            f"f(θ) − f(0) differs from Jθ by {gap:.3g}. Use anchor='params' for a nonlinear network."
        )


def make_preconditioner(
    source: AbstractSource,
    x: Array,
    op: AbstractKernelOperator,
    solver: AbstractDualSolver,
    sketch: Sketch,
) -> tuple[AbstractPreconditioner, int, tuple[str, ...]]:
    """A sketch of `K` for CG: by two passes over the entries of `K`, or, if `K` has no entries, by
    columns at landmarks. Returns the preconditioner, the number of products with `K`, and notes."""
    op, rank = op.narrow, sketch.rank
    solver = solver.inner if isinstance(solver, Refined) else solver
    size = op.num_points * op.num_outputs
    on_devices = op.layout.sharding is not None
    if rank is None:
        # Over devices there are no landmark columns, and a `K` without entries makes a block product of
        # `rank` single ones: only a caller who asks for that gets it.
        dear = op.follows_points and on_devices
        rank = min(DEFAULT_RANK, size // 8) if isinstance(solver, CG) and not dear else 0
    # Direct solvers read no preconditioner, and few unknowns need none.
    if rank == 0:
        return NoPreconditioner(), 0, ()
    # More columns than unknowns are dependent, and would be all rounding after orthonormalising.
    if rank > size:
        raise ValueError(f"sketch: rank must be in [0, n·c] = [0, {size}], got {rank}.")
    # A fixed key: the same fit twice gives the same numbers.
    key = jax.random.key(0) if sketch.key is None else sketch.key
    if op.follows_points and not on_devices:
        # A block product costs as much as `rank` products here; landmark columns are entries.
        features = nystrom(source, x, rank, op.num_outputs, key).features(x)
        note = f"preconditioner: {features.shape[2]} columns of K at landmarks"
        return SpectralPreconditioner(features), 0, (note,)
    note = f"preconditioner: rank {rank} from {POWER_STEPS + 1} block products with K"
    made = spectral_preconditioner(op, rank, key, POWER_STEPS)
    return made, POWER_STEPS + 1, (note,)


def extended(model: Trained, data: TrainingSet, progress: bool | ProgressFn) -> Trained:
    """`model` with rows for the points that `data` appends: `α = 0`, weight 0 before the edit.

    New points go into spare rows. Without enough spare rows, the kernel grows by more rows than needed
    now. On a mesh the new rows form a border instead.
    """
    old, new = model.data.num_points, data.num_points
    if old == new:
        return model
    x, targets = np.asarray(data.x), np.asarray(data.targets)
    x_new = jax.device_put(x[old:])
    on_mesh = model.layout.sharding is not None
    rows = new if on_mesh else rows_for(new, model.kernel_op.num_points)
    spare = np.repeat(x[-1:], rows - new, axis=0)
    all_x = jax.device_put(np.concatenate([x, spare]))
    op = model.source.extend(model.kernel_op, all_x, old, new, progress)
    layout = op.layout.holding(new)
    alpha = layout.grow(model.state.alpha, op.num_points)
    state = State(alpha, op_mv(op, alpha))
    k_alpha = jax.device_put(np.asarray(layout.points(state.k_alpha))[old:])
    # `f − Kα`: the base outputs, or the trained network's less its dual part.
    offset = np.concatenate([model.layout.points(model.offset), model.predict(x_new) - k_alpha])
    before = TrainingSet(
        data.x,
        jax.device_put(np.concatenate([model.data.targets, targets[old:]])),
        np.pad(model.data.sample_weights, (0, new - old)),
        model.data.purged,
        data.form,
    )
    return replace(
        model,
        data=before,
        kernel_op=op,
        state=state,
        offset=layout.place(offset, "last"),
        kernel_diagonal=op_diagonal(op),
        preconditioner=model.preconditioner.on_rows(lambda L: layout.grow(L, op.num_points)),
    )
