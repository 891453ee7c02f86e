"""What a fit needs before its first step: checked data, `K`, base outputs, a preconditioner."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, PRNGKeyArray

from .._plan import DEFAULT_RANK, check_fits
from .._support.checks import (
    as_array,
    as_features,
    check_finite,
    check_ridge,
    check_rows,
    training_weights,
)
from .._support.memory import memory_budget
from .._support.options import (
    check_choice,
    check_count,
    check_instance,
    check_key,
    check_loss,
    check_progress,
    maybe,
)
from .._support.progress import ProgressFn
from ..kernels._linearized import Linearized
from ..losses import AbstractLoss
from ..models._checks import check_network
from ..models._low_rank import nystrom
from ..models._sharded import ShardedSource
from ..models._sources import FORMS, AbstractSource
from ..operators import (
    AbstractKernelOperator,
    widen,
)
from ..operators._layout import Device, as_mesh
from ..problem._edits import TrainingSet
from ..solvers import (
    CG,
    AbstractDualSolver,
    AbstractPreconditioner,
    NoPreconditioner,
    Refined,
    SpectralPreconditioner,
    spectral_preconditioner,
)
from ._fidelity import random_like
from ._newton import op_diagonal, op_mv

POWER_STEPS = 1
PROBES = 16
KERNEL_SLACK = 1e-2
"""A kernel that is handed in may be stored in half precision."""


class Setup(NamedTuple):
    """Training set, operator, base outputs on its rows, and words for the stats."""

    data: TrainingSet
    op: AbstractKernelOperator
    offset: Array
    notes: tuple[str, ...]


def prepare(
    source: AbstractSource,
    x: Any,
    y: Any,
    loss: AbstractLoss,
    ridge: float,
    weights: Any,
    num_outputs: int | None,
    form: str,
    progress: bool | ProgressFn,
    op: AbstractKernelOperator | None = None,
) -> Setup:
    """Checked training set, operator and base outputs."""
    check_ridge(ridge)
    check_loss("fit", loss, AbstractLoss)
    check_choice("fit: form", form, FORMS)
    check_progress("fit", progress)
    check_kernel_op(op)
    num_outputs = maybe(check_count, "fit: num_outputs", num_outputs)
    targets = as_array("y", y)
    features = enter_features(source, x, targets)
    check_rows("y", targets, features.shape[0], "point of x")
    samples = training_weights("fit", weights, features.shape[0])
    if source.network is not None:
        num_outputs = check_network(source.network, features, num_outputs)
        _check_linear(source.network, features)
    base = source.base_outputs(features, num_outputs)
    if base is not None:
        check_finite("outputs of apply_fn", base)
    dtype = base.dtype if base is not None else jnp.result_type(float)
    targets = loss.prepare_targets(y, num_outputs, dtype)
    if num_outputs is None:
        num_outputs = targets.shape[1] if targets.ndim == 2 else 1
    _check_values(loss, num_outputs, targets, dtype)
    note: tuple[str, ...] = ()
    if op is None:
        form, note = choose_form(source, form, features.shape[0], num_outputs, dtype)
        op = source.operator(features, num_outputs, form=form, progress=progress)
    elif (op.layout.num_points, op.num_outputs) != (features.shape[0], num_outputs):
        raise ValueError(
            f"fit: kernel_op is for {op.layout.num_points} points with {op.num_outputs} outputs, but "
            f"there are {features.shape[0]} points with {num_outputs}."
        )
    else:
        check_same_kernel(source, features, op)
    check_ridge(ridge, op.dtype)
    checked = op.check()
    if base is None:
        base = jnp.zeros((features.shape[0], num_outputs), op.dtype)
    if base.dtype != dtype or op.dtype != dtype:
        base = base.astype(op.dtype)
        targets = loss.prepare_targets(y, num_outputs, op.dtype)
    data = TrainingSet(features, targets, samples)
    return Setup(
        data, op, op.layout.place(base, "last"), (f"kernel {checked}", *note, *source.notes)
    )


def enter_features(source: AbstractSource, x: Any, targets: Any) -> Array:
    """Training features; without them, the positions of a precomputed kernel."""
    if x is not None:
        return as_features("x", x)
    if source.network is not None:
        raise ValueError("fit: x is None, but a network needs its training features.")
    check_rows("y", targets, max(1, len(targets) if targets.ndim else 1), "point")
    num_points = targets.shape[0]
    if source.num_positions not in (None, num_points):
        raise ValueError(
            f"fit: the kernel has {source.num_positions} rows, but y has {num_points}. Without x, "
            "every row is a point; a kernel of several outputs has shape (n, c, n, c), and for a "
            "part of a pool give positions as x."
        )
    return jnp.arange(num_points)


def check_kernel_op(op: Any) -> None:
    """Raise unless `kernel_op` is `None` or an operator."""
    example = (
        "an operator, from kernel_operator(...) or store.operator() (a low-rank model goes in place "
        "of model)"
    )
    maybe(check_instance, "fit: kernel_op", op, kinds=AbstractKernelOperator, example=example)


def _check_values(loss: AbstractLoss, num_outputs: int, targets: Array, dtype: Any) -> None:
    """Raise unless the loss gives one real number per point."""
    n = targets.shape[0]
    outputs = jax.ShapeDtypeStruct((n, num_outputs), dtype)
    about = f"outputs of shape {outputs.shape} and targets of shape {targets.shape}"
    try:
        out = jax.eval_shape(loss.value, outputs, targets)
    except Exception as error:
        raise ValueError(
            f"fit: the loss fails for {about}: {type(error).__name__}: {error}"
        ) from error
    if getattr(out, "shape", None) != (n,) or not jnp.issubdtype(out.dtype, jnp.floating):
        raise ValueError(
            f"fit: the loss must give one real number per point, for {about} it gives {out}. A "
            "function in Convex takes one point's outputs and target and returns a scalar."
        )


def check_same_kernel(source: AbstractSource, x: Array, op: AbstractKernelOperator) -> None:
    """A kernel that was handed in must be this model's: compare its diagonal at a few points."""
    on_devices = op.layout.sharding is not None or source.layout(x).sharding is not None
    if op.rank is not None or on_devices:
        return  # an approximation has another diagonal; rows on a mesh are not picked one by one
    where = np.unique(np.linspace(0, x.shape[0] - 1, PROBES).astype(int))
    own = source.operator(x[where], op.num_outputs, form="auto", progress=False).diagonal()
    given = op_diagonal(op)[where]
    worst, size = float(jnp.max(jnp.abs(own - given))), float(jnp.max(jnp.abs(own)))
    if worst > KERNEL_SLACK * size:
        raise ValueError(
            f"fit: kernel_op is not the kernel of this model and these points: its diagonal at "
            f"{where.size} of them differs by {worst:.3g} where the model's is {size:.3g}. Was it built "
            "from other parameters, or are the points in another order?"
        )


def with_precision(
    setup: Setup, loss: AbstractLoss, y: Any, refine: bool, precision: jax.lax.Precision | None
) -> Setup:
    """The same problem with products as asked: cheaper ones measured, refined ones widened."""
    data, op, base, notes = setup
    if precision is not None:
        op, error = _at_precision(op, precision)
        notes += (f"products in {precision.name} precision, off by {error:.1e} of their norm",)
    if refine and op.dtype != jnp.float64:
        op = widen(op)
        targets = loss.prepare_targets(y, op.num_outputs, op.dtype)
        data = TrainingSet(data.x, targets, data.sample_weights)
        base = base.astype(op.dtype)
        notes += (f"{op.narrow.dtype} kernel, residuals and dual variables in float64",)
    return Setup(data, op, base, notes)


def _at_precision(
    op: AbstractKernelOperator, precision: jax.lax.Precision
) -> tuple[AbstractKernelOperator, float]:
    cheap = op.with_precision(precision)
    probe = np.random.default_rng(0).normal(size=(op.layout.num_points, op.num_outputs))
    v = op.layout.place(probe.astype(op.dtype))
    exact = op_mv(op, v)
    return cheap, float(jnp.linalg.norm(op_mv(cheap, v) - exact) / jnp.linalg.norm(exact))


def mesh_of(op: AbstractKernelOperator | None) -> Mesh | None:
    check_kernel_op(op)
    sharding = None if op is None else op.layout.sharding
    return sharding.mesh if sharding is not None and isinstance(sharding.mesh, Mesh) else None


def place_source(source: AbstractSource, mesh: Mesh | Sequence[Device] | None) -> AbstractSource:
    return source if mesh is None else ShardedSource(source, as_mesh(mesh))


def choose_form(
    source: AbstractSource, form: str, num_points: int, num_outputs: int, dtype: Any
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


def check_sketch(what: str, rank: Any, key: Any) -> int | None:
    """The rank of the preconditioner, if given; an error unless it and the key can be meant."""
    maybe(check_key, f"{what}: key", key)
    return maybe(check_count, f"{what}: rank", rank, least=0)


class Sketched(NamedTuple):
    """What a preconditioner cost: products with `K`, and words."""

    products: int = 0
    notes: tuple[str, ...] = ()


def make_preconditioner(
    source: AbstractSource,
    x: Array,
    op: AbstractKernelOperator,
    solver: AbstractDualSolver,
    rank: int | None,
    key: PRNGKeyArray | None,
) -> tuple[AbstractPreconditioner, Sketched]:
    """A sketch of `K` for CG: two passes over entries that there are, else landmark columns."""
    op = op.narrow
    solver = solver.inner if isinstance(solver, Refined) else solver
    size = op.num_points * op.num_outputs
    on_devices = op.layout.sharding is not None
    if rank is None:
        dear = op.follows_points and on_devices
        rank = min(DEFAULT_RANK, size // 8) if isinstance(solver, CG) and not dear else 0
    if rank == 0:
        return NoPreconditioner(), Sketched()
    if not 0 < rank <= size:
        raise ValueError(f"fit: rank must be in [0, n·c] = [0, {size}], got {rank}.")
    key = jax.random.key(0) if key is None else key
    if op.follows_points and not on_devices:
        # A block product costs as much as `rank` products here; landmark columns are entries.
        features = nystrom(source, x, rank, op.num_outputs, key).features(x)
        note = f"preconditioner: {features.shape[2]} columns of K at landmarks"
        return SpectralPreconditioner(features), Sketched(0, (note,))
    note = f"preconditioner: rank {rank} from {POWER_STEPS + 1} block products with K"
    sketch = spectral_preconditioner(op, rank, key, POWER_STEPS)
    return sketch, Sketched(POWER_STEPS + 1, (note,))


def _check_linear(model: Linearized, x: Array) -> None:
    """For `anchor="zero"`: `f(θ) − f(0) = Jθ` on a few points and a random `θ`, or an error."""
    model.apply_shape(x)
    if model.anchor != "zero":
        return
    theta, frozen = model.split(model.params)
    probe, few = random_like(theta, seed=0), x[:4]
    actual = model(eqx.combine(probe, frozen), few) - model.base_outputs(few)
    # Scaled first, so that squares of large numbers do not overflow.
    scale = float(jnp.maximum(jnp.max(jnp.abs(actual)), 1e-30))
    gap = scale * float(jnp.linalg.norm((actual - model.jvp(few, probe)) / scale))
    # Not `gap > ...`: a model that overflows has a gap of NaN or infinity.
    if not (np.isfinite(scale) and gap <= 1e-3 * scale * float(jnp.linalg.norm(actual / scale))):
        raise ValueError(
            "fit: anchor='zero' (ridge on ‖θ‖²) needs a model that is linear in its parameters, but "
            f"f(θ) − f(0) differs from Jθ by {gap:.3g}. Use anchor='params' for a nonlinear network."
        )
