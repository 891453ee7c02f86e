"""Fitting: damped Newton from `α = 0`, or taking over a network that the user trained."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, PRNGKeyArray, PyTree

from ._checks import check_finite, check_ridge, check_rows
from ._edits import TrainingSet
from ._fitted import (
    MAX_STEPS,
    Fidelity,
    Fitted,
    OnFailure,
    check_outcome,
    default_rtol,
    default_tolerance,
    make_problem,
    make_stats,
)
from ._kernel_checks import check_kernel
from ._layout import Device, as_mesh
from ._linearize import Linearized
from ._low_rank import AbstractLowRankSource, nystrom
from ._memory import memory_budget
from ._models import FORMS, AbstractSource, NetworkSource, as_source, pull_back
from ._newton import Clock, Stats, Tolerances, inspect_jit, minimise, op_diagonal, op_mv
from ._placement import ShardedSource
from ._plan import DEFAULT_RANK, check_fits
from ._problem import State
from ._progress import ProgressFn
from ._readout import Reference, outputs_at
from ._trees import tree_norm
from .losses import AbstractLoss
from .operators import (
    AbstractKernelOperator,
    DenseOperator,
    KroneckerOperator,
    LowRankOperator,
    MatrixFreeOperator,
    MixedOperator,
    ShardedMatrixFreeOperator,
    ShardedOperator,
)
from .solvers import (
    CG,
    AbstractDualSolver,
    AbstractPreconditioner,
    Auto,
    NoPreconditioner,
    Refined,
    SpectralPreconditioner,
    resolve,
    spectral_preconditioner,
)

POWER_STEPS = 1
PROBES = 4
KERNEL_SLACK = 1e-2
"""A kernel that is handed in may be stored in half precision."""


def fit(
    model: Any,
    x: Any,
    y: Any,
    *,
    loss: AbstractLoss,
    ridge: float,
    weights: Any = None,
    num_outputs: int | None = None,
    form: str = "auto",
    mesh: Mesh | Sequence[Device] | None = None,
    kernel_op: AbstractKernelOperator | None = None,
    refine: bool = False,
    precision: jax.lax.Precision | None = None,
    solver: AbstractDualSolver | Auto | None = None,
    tolerance: float | None = None,
    rtol: float | None = None,
    max_steps: int = MAX_STEPS,
    rank: int | None = None,
    key: PRNGKeyArray | None = None,
    on_failure: OnFailure = "raise",
    progress: bool | ProgressFn = True,
) -> Fitted:
    r"""Train a linearised (or infinitely wide) network to the optimum of

    $$\sum_i w_i\,\ell(f_i, y_i) + \tfrac{\lambda}{2}\|\theta-\theta_0\|^2,\qquad w_i = s_i/\sum_j s_j,$$

    by damped Newton steps in data space. Tens of products with `K`, where gradient descent takes
    thousands.

    **Arguments:**

    - `model`: from `linearize` or `dualfluence.infinite`, anything with `kernel(x1, x2)`, such a
      function, or a precomputed kernel matrix (then `x` may be `None`).
    - `x`, `y`: training features and targets, points on axis 0.
    - `loss`, `ridge`: `ℓ` and `λ > 0`.
    - `weights`: sample weights `s`, 1 by default.
    - `num_outputs`: `c`, when neither model nor targets tell.
    - `form`: `"dense"` holds `K`, `"matrix-free"` does not, `"auto"` holds it if it fits in memory.
    - `mesh`: devices (or a `jax.sharding.Mesh`) that share the rows of `K` and of every `(n, c)`
      array. Under `jax.distributed`, call this in every process with the same data.
    - `kernel_op`: `K` on these points, if you have it: `store.build(...).operator()` for one on
      disk, `low_rank(...)`, or any operator. `model` then serves base outputs and queries.
    - `refine`: with a float32 kernel, keep dual variables and residuals in float64 and refine the
      float32 solves, here and in edits: float64 accuracy (for `K` as it is stored) at float32's price.
    - `precision`: of products with a dense `K`; `jax.lax.Precision.DEFAULT` allows TF32 or bfloat16
      on accelerators, and the error that makes is in `stats.notes`.
    - `solver`: `Auto()` by default.
    - `tolerance`: on `certificate.relative_bound`; by default near what the dtype allows.
    - `rtol`: relative residual of the last linear solves.
    - `rank`: columns of the preconditioner kept for later edits; 0 for none.
    - `key`: randomness of that preconditioner's sketch.
    - `on_failure`: `"report"` returns a fit that missed its tolerance, marked in `stats`.

    **Returns:** `Fitted`.
    """
    clock = Clock()
    source = _placed(as_source(model), _mesh_of(kernel_op) if mesh is None else mesh)
    setup = _prepare(source, x, y, loss, ridge, weights, num_outputs, form, progress, kernel_op)
    setup = _with_precision(setup, loss, y, refine, precision)
    data, op, offset, notes = setup
    solver = solver or Auto()
    picked = resolve(solver, op)
    preconditioner, sketched = _preconditioner(source, data.x, op, picked.solver, rank, key)
    diagonal = op_diagonal(op)
    problem = make_problem(data, loss, float(ridge), offset, op.layout)
    zero = op.layout.place(np.zeros((data.num_points, offset.shape[1]), offset.dtype))
    start = inspect_jit(op, problem, State(zero, zero), diagonal)
    dtype = offset.dtype
    limit = default_tolerance(dtype) if tolerance is None else tolerance
    point, facts = minimise(
        op,
        problem,
        start,
        diagonal,
        solver=picked.solver,
        preconditioner=preconditioner,
        ridge=float(ridge),
        rtol=default_rtol(dtype) if rtol is None else rtol,
        tolerances=Tolerances(None, limit, max_steps),
        what="fit",
        progress=progress,
    )
    if facts["at_floor"] and not facts["converged"]:
        facts["converged"] = True
        notes += (f"stopped at the rounding floor of {dtype}, short of tolerance {limit:.1e}",)
    facts["products"] += sketched.products
    notes += sketched.notes
    stats = make_stats(facts, clock.stop(point), picked.solver.describe(op), picked.reason, notes)
    check_outcome(stats, on_failure, "fit", facts["certificate"], dtype)
    return Fitted(
        source=source,
        data=data,
        state=point.state,
        reference=None,
        loss=loss,
        ridge=float(ridge),
        kernel_op=op,
        offset=offset,
        kernel_diagonal=diagonal,
        preconditioner=preconditioner,
        certificate=facts["certificate"],
        stats=stats,
    )


def kernel_operator(
    model: Any,
    x: Any,
    *,
    num_outputs: int | None = None,
    form: str = "auto",
    mesh: Mesh | Sequence[Device] | None = None,
    progress: bool | ProgressFn = True,
) -> AbstractKernelOperator:
    """`K` on these points, to be multiplied with or given to `fit(kernel_op=...)`.

    **Arguments:**

    - `model`, `form`: as in `fit`.
    - `num_outputs`: `c` for a kernel without a network; 1 by default.
    - `mesh`: devices that share the rows; each computes its own, and none ever holds more.
    """
    source = _placed(as_source(model), mesh)
    features = jnp.asarray(x)
    check_finite("x", features)
    network = source.network
    c = network.apply_shape(features)[1] if network is not None else num_outputs or 1
    dtype = network.dtype if network is not None else jnp.result_type(float)
    form, _ = _choose_form(source, form, features.shape[0], c, dtype)
    op = source.operator(features, c, form=form, progress=progress)
    check_kernel(op)
    return op


def from_trained(
    model: Linearized,
    trained_params: PyTree,
    x: Any,
    y: Any,
    *,
    loss: AbstractLoss,
    ridge: float,
    weights: Any = None,
    tangent: Literal["initial", "trained"] = "initial",
    linearised: bool = False,
    form: str = "auto",
    mesh: Mesh | Sequence[Device] | None = None,
    rank: int | None = None,
    key: PRNGKeyArray | None = None,
    progress: bool | ProgressFn = True,
) -> Fitted:
    r"""Take over a network that was trained elsewhere on
    $\sum_i w_i\ell(f_i,y_i)+\frac{\lambda}{2}\|\theta-\theta_0\|^2$.

    Outputs and gradients come from the network itself and `α = −g/λ`, as at a stationary point.
    Nothing is trained here; how far the network is from stationary and from its linearisation is
    in `fidelity`. Edits then move `θ` by `JᵀΔα` from the trained parameters.

    **Arguments:**

    - `model`: `linearize(apply_fn, θ₀)` with the parameters that the ridge pulls towards.
    - `trained_params`: `θ`, a pytree like `θ₀`.
    - `tangent`: Jacobian at `θ₀` (as the paper does) or at `θ`, where `θ − θ₀ = Jᵀα` holds exactly at
      any stationary point of the nonlinear objective.
    - `linearised`: the network that was trained is the linearisation itself.
    - other arguments: as in `fit`.
    """
    if not isinstance(model, Linearized):
        raise TypeError("from_trained: model must come from linearize; a kernel has no parameters.")
    if jax.tree.structure(trained_params) != jax.tree.structure(model.params):
        raise ValueError(
            "from_trained: trained_params must have the tree structure of the parameters given to "
            f"linearize, {jax.tree.structure(model.params)}."
        )
    clock = Clock()
    tangent_model = replace(model, params=trained_params) if tangent == "trained" else model
    source = _placed(NetworkSource(tangent_model), mesh)
    data, op, _, notes = _prepare(source, x, y, loss, ridge, weights, None, form, progress)
    theta, theta_0 = model.split(trained_params)[0], model.split(model.params)[0]
    change = jax.tree.map(jnp.subtract, theta, theta_0)
    linear_outputs = outputs_at(model, trained_params, data.x, linearised=True)
    outputs = outputs_at(model, trained_params, data.x, linearised)
    check_finite("from_trained outputs", outputs)
    gradient_model = model if linearised else replace(model, params=trained_params)
    w = jnp.asarray(data.weights, outputs.dtype)[:, None]
    g = w * loss.grad(outputs, data.targets)
    alpha = -g / float(ridge)
    placed = op.layout.place(alpha)
    state = State(placed, op_mv(op, placed))
    offset = op.layout.place(outputs, "last") - state.k_alpha
    fidelity = _fidelity(
        model, gradient_model, data.x, g, alpha, change, outputs, linear_outputs, ridge
    )
    diagonal = op_diagonal(op)
    problem = make_problem(data, loss, float(ridge), offset, op.layout)
    point = inspect_jit(op, problem, state, diagonal)
    picked = resolve(Auto(), op)
    preconditioner, sketched = _preconditioner(source, data.x, op, picked.solver, rank, key)
    stats = Stats(
        steps=0,
        iterations=0,
        products=2 + sketched.products,
        converged=True,
        residual=0.0,
        seconds=clock.stop(point),
        solver="none",
        reason="trained by the user",
        notes=(*notes, *sketched.notes),
    )
    return Fitted(
        source=source,
        data=data,
        state=state,
        reference=Reference(trained_params, op.layout.points(placed), linearised),
        loss=loss,
        ridge=float(ridge),
        kernel_op=op,
        offset=offset,
        kernel_diagonal=diagonal,
        preconditioner=preconditioner,
        certificate=point.norms.certificate(float(ridge)),
        stats=stats,
        fidelity=fidelity,
    )


def _prepare(
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
) -> tuple[TrainingSet, AbstractKernelOperator, Array, tuple[str, ...]]:
    """Checked training set, operator and base outputs."""
    check_ridge(ridge)
    if not isinstance(loss, AbstractLoss):
        raise TypeError(
            "fit: loss must be a dualfluence loss such as SoftmaxCrossEntropy(), got "
            f"{type(loss).__name__}. Wrap your own convex function in Convex(fn)."
        )
    if form not in FORMS:
        raise ValueError(f"fit: form must be one of {FORMS}, got {form!r}.")
    features = jnp.arange(np.shape(y)[0]) if x is None else jnp.asarray(x)
    if features.ndim == 0 or features.shape[0] == 0:
        raise ValueError(f"fit: x needs at least one point on axis 0, got shape {features.shape}.")
    check_finite("x", features)
    check_rows("y", np.asarray(y) if not hasattr(y, "ndim") else y, features.shape[0], "point of x")
    if source.network is not None:
        _check_linear(source.network, features)
    base = source.base_outputs(features, num_outputs)
    if base is not None:
        check_finite("outputs of apply_fn", base)
        num_outputs = base.shape[1]
    dtype = base.dtype if base is not None else jnp.result_type(float)
    targets = loss.prepare_targets(y, num_outputs, dtype)
    if num_outputs is None:
        num_outputs = targets.shape[1] if targets.ndim == 2 else 1
    note: tuple[str, ...] = ()
    if op is None:
        form, note = _choose_form(source, form, features.shape[0], num_outputs, dtype)
        op = source.operator(features, num_outputs, form=form, progress=progress)
    elif (op.layout.num_points, op.num_outputs) != (features.shape[0], num_outputs):
        raise ValueError(
            f"fit: kernel_op is for {op.layout.num_points} points with {op.num_outputs} outputs, but "
            f"there are {features.shape[0]} points with {num_outputs}."
        )
    else:
        _check_same_kernel(source, features, op)
    checked = check_kernel(op)
    if base is None:
        base = jnp.zeros((features.shape[0], num_outputs), op.dtype)
    if base.dtype != dtype or op.dtype != dtype:
        base = base.astype(op.dtype)
        targets = loss.prepare_targets(y, num_outputs, op.dtype)
    samples = np.ones(features.shape[0]) if weights is None else np.asarray(weights, float)
    check_rows("weights", samples, features.shape[0], "point of x")
    check_finite("weights", samples)
    if (samples < 0).any() or not samples.sum() > 0:
        raise ValueError("fit: weights must be non-negative with a positive sum.")
    data = TrainingSet(features, targets, samples)
    return data, op, op.layout.place(base, "last"), (f"kernel {checked}", *note)


def _check_same_kernel(source: AbstractSource, x: Array, op: AbstractKernelOperator) -> None:
    """A kernel that was handed in must be this model's: compare its diagonal at a few points."""
    if isinstance(op, (LowRankOperator, ShardedOperator)) or isinstance(source, ShardedSource):
        return
    own = source.operator(x[:PROBES], op.num_outputs, form="auto", progress=False).diagonal()
    given = op_diagonal(op)[:PROBES]
    worst, size = float(jnp.max(jnp.abs(own - given))), float(jnp.max(jnp.abs(own)))
    if worst > KERNEL_SLACK * size:
        raise ValueError(
            f"fit: kernel_op is not the kernel of this model and these points: its diagonal at the "
            f"first {PROBES} differs by {worst:.3g} where the model's is {size:.3g}. Was it built "
            "from other parameters, or are the points in another order?"
        )


_Setup = tuple[TrainingSet, AbstractKernelOperator, Array, tuple[str, ...]]


def _with_precision(
    setup: _Setup, loss: AbstractLoss, y: Any, refine: bool, precision: jax.lax.Precision | None
) -> _Setup:
    """The same problem with products as asked: cheaper ones measured, refined ones widened."""
    data, op, base, notes = setup
    if precision is not None:
        op, error = _at_precision(op, precision)
        notes += (f"products in {precision.name} precision, off by {error:.1e} of their norm",)
    if refine and op.dtype != jnp.float64:
        op = MixedOperator(op)
        targets = loss.prepare_targets(y, op.num_outputs, op.dtype)
        data = TrainingSet(data.x, targets, data.sample_weights)
        base = base.astype(op.dtype)
        notes += (f"{op.op.dtype} kernel, residuals and dual variables in float64",)
    return data, op, base, notes


def _at_precision(
    op: AbstractKernelOperator, precision: jax.lax.Precision
) -> tuple[AbstractKernelOperator, float]:
    inner = op.op if isinstance(op, ShardedOperator) else op
    if not isinstance(inner, (DenseOperator, KroneckerOperator)):
        raise ValueError(
            f"fit: precision applies to a dense or Kronecker K in memory, not {type(op).__name__}."
        )
    cheap = replace(inner, precision=precision)
    cheap = replace(op, op=cheap) if isinstance(op, ShardedOperator) else cheap
    probe = np.random.default_rng(0).normal(size=(op.layout.num_points, op.num_outputs))
    v = op.layout.place(probe.astype(op.dtype))
    exact = op_mv(op, v)
    return cheap, float(jnp.linalg.norm(op_mv(cheap, v) - exact) / jnp.linalg.norm(exact))


def _mesh_of(op: AbstractKernelOperator | None) -> Mesh | None:
    sharding = None if op is None else op.layout.sharding
    return sharding.mesh if sharding is not None and isinstance(sharding.mesh, Mesh) else None


def _placed(source: AbstractSource, mesh: Mesh | Sequence[Device] | None) -> AbstractSource:
    return source if mesh is None else ShardedSource(source, as_mesh(mesh))


def _choose_form(
    source: AbstractSource, form: str, num_points: int, num_outputs: int, dtype: Any
) -> tuple[str, tuple[str, ...]]:
    if isinstance(source, AbstractLowRankSource):
        return form, ()
    size = num_points * num_outputs
    devices = source.mesh.size if isinstance(source, ShardedSource) else 1
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


class _Sketched(NamedTuple):
    """What a preconditioner cost: products with `K`, and words."""

    products: int = 0
    notes: tuple[str, ...] = ()


def _preconditioner(
    source: AbstractSource,
    x: Array,
    op: AbstractKernelOperator,
    solver: AbstractDualSolver,
    rank: int | None,
    key: PRNGKeyArray | None,
) -> tuple[AbstractPreconditioner, _Sketched]:
    """A sketch of `K` for CG: two passes over entries that there are, else landmark columns."""
    op = op.op if isinstance(op, MixedOperator) else op
    solver = solver.inner if isinstance(solver, Refined) else solver
    size = op.num_points * op.num_outputs
    on_devices = isinstance(op, ShardedMatrixFreeOperator)
    if rank is None:
        rank = min(DEFAULT_RANK, size // 8) if isinstance(solver, CG) and not on_devices else 0
    if rank == 0:
        return NoPreconditioner(), _Sketched()
    if not 0 < rank <= size:
        raise ValueError(f"fit: rank must be in [0, n·c] = [0, {size}], got {rank}.")
    key = jax.random.key(0) if key is None else key
    if isinstance(op, MatrixFreeOperator):
        # A block product costs as much as `rank` products here; landmark columns are entries.
        features = nystrom(source, x, rank, op.num_outputs, key).features(x)
        note = f"preconditioner: {features.shape[2]} columns of K at landmarks"
        return SpectralPreconditioner(features), _Sketched(0, (note,))
    note = f"preconditioner: rank {rank} from {POWER_STEPS + 1} block products with K"
    sketch = spectral_preconditioner(op, rank, key, POWER_STEPS)
    return sketch, _Sketched(POWER_STEPS + 1, (note,))


def _check_linear(model: Linearized, x: Array) -> None:
    """For `anchor="zero"`: `f(θ) − f(0) = Jθ` on a few points and a random `θ`, or an error."""
    model.apply_shape(x)
    if model.anchor != "zero":
        return
    theta, frozen = model.split(model.params)
    leaves, treedef = jax.tree.flatten(theta)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    probe = jax.tree.unflatten(
        treedef,
        [jax.random.normal(k, v.shape, v.dtype) for k, v in zip(keys, leaves, strict=True)],
    )
    few = x[:4]
    actual = model(eqx.combine(probe, frozen), few) - model.base_outputs(few)
    linear = model.jvp(few, probe)
    gap = float(jnp.linalg.norm(actual - linear))
    if gap > 1e-3 * max(float(jnp.linalg.norm(actual)), 1e-30):
        raise ValueError(
            "fit: anchor='zero' (ridge on ‖θ‖²) needs a model that is linear in its parameters, but "
            f"f(θ) − f(0) differs from Jθ by {gap:.3g}. Use anchor='params' for a nonlinear network."
        )


def _fidelity(
    model: Linearized,
    gradient_model: Linearized,
    x: Array,
    g: Array,
    alpha: Array,
    change: PyTree,
    outputs: Array,
    linear_outputs: Array,
    ridge: float,
) -> Fidelity:
    gradient = jax.tree.map(lambda a, b: a + ridge * b, pull_back(gradient_model, x, g), change)
    gap = jax.tree.map(jnp.subtract, change, pull_back(model, x, alpha))
    base = outputs_at(model, model.params, x, linearised=False)
    moved = float(jnp.linalg.norm(linear_outputs - base))
    return Fidelity(
        gradient_norm=float(tree_norm(gradient)),
        parameter_gap=float(tree_norm(gap)) / max(float(tree_norm(change)), 1e-30),
        output_gap=float(jnp.linalg.norm(outputs - linear_outputs)) / max(moved, 1e-30),
    )
