r"""Kernel gradient descent: gradient descent of a linearised network in function space.

$$f \leftarrow f - \eta\,(K g(f) + \lambda(f - f_0))$$

(paper, eq. 14). Here it is computed in the dual variables, $\theta_k = \theta_0 + J^\top a_k$ and $f_k
= f_0 + K a_k$ with

$$a_{k+1} = a_k - \eta\,(g_k + \lambda a_k),$$

which is the same descent at one product with `K` per epoch, and gives parameters and outputs at any
other point as well.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from .._support.checks import (
    as_array,
    as_dtype,
    check_finite,
    check_indices,
    check_number,
    check_range,
    check_ridge,
    check_rows,
    training_weights,
)
from .._support.compile import NotFinite, filter_jit
from .._support.options import Clock, ProgressFn, Ticker, check_count, check_positive, maybe
from .._support.types import AnyArray, Inputs, Numbers
from ..losses import AbstractLoss
from ..models._sources import as_source
from ..operators import AbstractKernelOperator
from ..problem._objective import Problem, State, make_problem
from ._options import KernelArgument, kernel_options
from ._setup import place_source, prepare

CHUNK = 250
POWER_STEPS = 50
GROWTH = 1e6
"""A gradient norm this many times the first one counts as divergence."""


class Descent(eqx.Module):
    """The result of kernel gradient descent, and its course.

    - `outputs`, `query_outputs`: `f` at training and query points.
    - `alpha`: `−g/λ` at these outputs, the paper's dual variables; they are the dual variables of the
      optimum if the descent has converged.
    - `coordinates`: `a` with `θ = θ₀ + Jᵀa` and `f = f₀ + Ka` at the last epoch, exactly.
    - `gradient_norms`: `‖∇L‖` in parameter space before each epoch, and after the last.
    - `recorded_epochs`, `recorded`: epochs and their `coordinates`, if `record_every` was given.
    """

    outputs: Float[Array, "n c"]
    query_outputs: Float[Array, "q c"] | None
    alpha: Float[Array, "n c"]
    coordinates: Float[Array, "n c"]
    gradient_norms: Float[Array, " epochs"]
    recorded_epochs: Int[np.ndarray, " k"]
    recorded: Float[Array, "k n c"] | None
    seconds: float = eqx.field(static=True)


def kernel_gradient_descent(
    model: object,
    x: Inputs,
    y: Numbers,
    *,
    loss: AbstractLoss,
    ridge: float,
    rate: float,
    epochs: int,
    momentum: float = 0.0,
    x_query: Inputs | None = None,
    initial_outputs: Numbers | None = None,
    initial_query_outputs: Numbers | None = None,
    retain: Numbers | None = None,
    kernel: KernelArgument = None,
    record_every: int | None = None,
    progress: bool | ProgressFn = True,
) -> Descent:
    r"""Full-batch gradient descent on $\sum_i w_i\ell(f_i,y_i)+\frac{\lambda}{2}\|\theta-\theta_0\|^2$
    in function space (paper, eq. 14), for finite and infinitely wide networks.

    For a linearised network it is gradient descent on its parameters, step by step. It approaches the
    optimum of `fit` like $(1-\eta\lambda)^k$, which is slow. It is stable for $\eta <
    2/(\lambda+\lambda_{\max}(WK))$. One product with `K` per epoch.

    **Arguments:**

    - `model`, `x`, `y`, `loss`, `ridge`, `kernel`: as in `fit`.
    - `rate`, `epochs`, `momentum`: `v ← μv + ∇L`, `θ ← θ − ηv`.
    - `x_query`: points whose outputs are computed as well.
    - `initial_outputs`, `initial_query_outputs`: `f₀` at training and query points; by default the
      outputs of the network, or zero for a kernel.
    - `retain`: positions of the training points to train on, or one sample weight per point.
    - `record_every`: number of epochs between two records of the dual variables; the start is recorded
      too.

    **Returns:** `Descent`. Raises `FloatingPointError` if it diverges.
    """
    clock = Clock()
    rate, epochs, momentum, record_every = _check_settings(rate, epochs, momentum, record_every)
    what = "kernel_gradient_descent"
    ridge, options = check_ridge(ridge), kernel_options(what, kernel)
    source = place_source(what, as_source(model, x), None, options.operator)
    weights = _sample_weights(retain, as_array("y", y))
    data, op, offset, _ = prepare(what, source, x, y, loss, ridge, weights, options, progress)
    layout = op.layout
    if initial_outputs is not None:
        shape = (data.num_points, offset.shape[1])
        start = _initial("initial_outputs", initial_outputs, shape, offset.dtype)
        offset = layout.place(start, "last")
    queries = None if x_query is None else data.queries(x_query, "x_query")
    base = None
    if queries is not None and initial_query_outputs is not None:
        shape = (queries.shape[0], offset.shape[1])
        base = _initial("initial_query_outputs", initial_query_outputs, shape, offset.dtype)
    problem = make_problem(data, loss, ridge, offset, layout)
    state, norms, recorded = _descend(
        op, problem, rate, momentum, epochs, record_every or CHUNK, progress
    )
    query_outputs = None
    if queries is not None:
        query_outputs = source.cross_mv(queries, data.x, layout.points(state.alpha), progress)
        if base is None:
            base = source.base_outputs(queries, offset.shape[1])
        query_outputs = query_outputs if base is None else query_outputs + jnp.asarray(base)
    marks = np.arange(0, epochs + 1, record_every) if record_every else np.arange(0)
    if record_every and marks[-1] != epochs:
        marks = np.append(marks, epochs)
    return Descent(
        outputs=layout.points(problem.outputs(state)),
        query_outputs=query_outputs,
        alpha=layout.points(-problem.loss_grad(state) / problem.ridge),
        coordinates=layout.points(state.alpha),
        gradient_norms=norms,
        recorded_epochs=marks,
        recorded=jnp.stack([layout.points(a) for a in recorded]) if record_every else None,
        seconds=clock.stop(state),
    )


def _descend(
    op: AbstractKernelOperator,
    problem: Problem,
    rate: float,
    momentum: float,
    epochs: int,
    chunk: int,
    progress: bool | ProgressFn,
) -> tuple[State, Array, list[Array]]:
    zero = jnp.zeros_like(problem.offset)
    state, velocity = State(zero, zero), State(zero, zero)
    eta, mu = (jnp.asarray(v, zero.dtype) for v in (rate, momentum))
    norms, recorded, done = [], [state.alpha], 0
    with Ticker(epochs, "kernel gradient descent", progress) as ticker:
        while done < epochs:
            size = min(chunk, epochs - done)
            state, velocity, part = _chunk(op, problem, state, velocity, eta, mu, size)
            norms.append(part)
            recorded.append(state.alpha)
            _check_progress(op, problem, norms, rate, momentum)
            done += size
            ticker.tick(size)
    last = _gradient_norm(op, problem, state)
    return state, jnp.concatenate([*norms, last[None]]), recorded


@filter_jit
def _chunk(
    op: AbstractKernelOperator,
    problem: Problem,
    state: State,
    velocity: State,
    rate: Float[Array, ""],
    momentum: Float[Array, ""],
    epochs: int,
) -> tuple[State, State, Float[Array, " epochs"]]:
    """Some epochs in one compiled loop; `Ka` is then formed afresh, so that no drift stays."""

    def epoch(carry: tuple[State, State], _: None) -> tuple[tuple[State, State], Array]:
        state, velocity = carry
        g = problem.loss_grad(state)
        rho = g + problem.ridge * state.alpha
        k_rho = op.mv(g) + problem.ridge * state.k_alpha
        norm = jnp.sqrt(jnp.maximum(jnp.sum(rho * k_rho), 0))
        velocity = State(momentum * velocity.alpha + rho, momentum * velocity.k_alpha + k_rho)
        moved = state.moved(-rate * velocity.alpha, -rate * velocity.k_alpha)
        return (moved, velocity), norm

    (state, velocity), norms = jax.lax.scan(epoch, (state, velocity), None, length=epochs)
    return State(state.alpha, op.mv(state.alpha)), velocity, norms


@filter_jit
def _gradient_norm(op: AbstractKernelOperator, problem: Problem, state: State) -> Array:
    rho = problem.residual(state)
    return jnp.sqrt(jnp.maximum(jnp.sum(rho * op.mv(rho)), 0))


@filter_jit
def largest_curvature(op: AbstractKernelOperator, problem: Problem) -> Float[Array, ""]:
    """`λmax(WK)` at the initial outputs, by power iteration on `RᵀKR`."""
    zero = jnp.zeros_like(problem.offset)
    factor = problem.factor(State(zero, zero))
    v = jax.random.normal(jax.random.key(0), zero.shape, zero.dtype)

    def step(v: Array, _: None) -> tuple[Array, Array]:
        w = factor.rmv(op.mv(factor.mv(v)))
        norm = jnp.linalg.norm(w)
        return w / jnp.maximum(norm, jnp.finfo(w.dtype).tiny), norm

    return jax.lax.scan(step, v / jnp.linalg.norm(v), None, length=POWER_STEPS)[1][-1]


def _check_progress(
    op: AbstractKernelOperator, problem: Problem, norms: list[Array], rate: float, momentum: float
) -> None:
    first, last = float(norms[0][0]), float(norms[-1][-1])
    if np.isfinite(last) and last <= GROWTH * max(first, 1e-30):
        return
    if not np.isfinite(first):
        raise NotFinite(
            "kernel_gradient_descent: the gradient overflows before the first epoch. Scale features, "
            "targets and initial outputs to ordinary size, or use float64."
        )
    curvature = float(largest_curvature(op, problem))
    bound = 2 * (1 + momentum) / (float(problem.ridge) + curvature)
    rule = "2/(λ + λmax)" if momentum == 0 else "2(1 + momentum)/(λ + λmax)"
    raise NotFinite(
        f"kernel_gradient_descent: diverged, ‖∇L‖ went from {first:.3g} to {last:.3g}. The rate "
        f"{rate:.3g} is too large: it must stay below {rule} = {bound:.3g}, with λmax = "
        f"{curvature:.3g} the largest eigenvalue of WK at the initial outputs."
    )


def _check_settings(
    rate: Any, epochs: Any, momentum: Any, record_every: Any
) -> tuple[float, int, float, int | None]:
    what = "kernel_gradient_descent"
    speed = check_number(f"{what}: momentum", momentum)
    if not 0 <= speed < 1:
        raise ValueError(f"{what}: momentum must be in [0, 1), got {momentum}.")
    return (
        check_positive(f"{what}: rate", rate),
        check_count(f"{what}: epochs", epochs),
        speed,
        maybe(check_count, f"{what}: record_every", record_every),
    )


def _sample_weights(retain: Numbers | None, targets: AnyArray) -> np.ndarray | None:
    """Positions or one weight per point, as weights."""
    if retain is None:
        return None
    check_rows("y", targets, targets.shape[0] if targets.ndim else 1, "training point")
    num_points = targets.shape[0]
    array = np.asarray(as_array("retain", retain))
    if not jnp.issubdtype(array.dtype, jnp.integer):
        check_rows("retain", array, num_points, "training point")
        return training_weights("retain", array, num_points)
    kept = check_indices("retain", array)
    check_range("retain", kept, num_points)
    return np.isin(np.arange(num_points), kept).astype(float)


def _initial(name: str, outputs: Numbers, shape: tuple[int, int], dtype: DTypeLike) -> Array:
    array = as_dtype(name, outputs, dtype)
    if array.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(array.shape)}.")
    check_finite(name, array)
    return array
