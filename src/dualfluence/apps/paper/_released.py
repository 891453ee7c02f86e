"""The published methods, rewritten to run as their authors run them: eager, with JAX's conjugate gradients.

Use the compiled methods of this library to compare algorithms, and these to compare runtimes. Each call
hands new closures to `jax.scipy.sparse.linalg.cg` outside of `jit`, so each call traces and compiles
its loop again; curvature comes from forward-over-reverse differentiation of the loss; `K` is a
four-axis array; matrix products are left to JAX's default precision by the caller. Written from the
paper's section 4.1 and its equations.

This is not the authors' code. At every request theirs also copies the slices of `K` from the host to the
device, and runs a forward pass over the training points; this rewrite finds both on the device. Its
seconds are therefore a lower bound.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.sparse.linalg import cg
from jaxtyping import Array, PyTree

from ...fitted._fitted import Fitted
from ...kernels._linearized import Linearized

BATCH = 100
"""Points per Hessian-vector product in parameter space; memory is proportional to it."""


@eqx.filter_jit
def _pull_back(model: Linearized, x: Array, v: Array) -> PyTree:
    """`Jᵀv`, compiled with JAX's own settings."""
    return model.vjp(x, v)


def released_dual(
    base: Fitted, params: PyTree, gone: np.ndarray, steps: int, rtol: float
) -> PyTree:
    """Eq. 12 by eager CG on the sliced kernel; returns the new parameters."""
    op = base.kernel_op
    assert op.has_entries
    assert not op.is_kronecker
    n, c = op.num_points, op.num_outputs
    kept = jnp.setdiff1d(jnp.arange(n), jnp.asarray(gone))
    forgotten = jnp.asarray(gone)
    K = op.entries().reshape(n, c, n, c)
    K_rr, K_rf = (K[kept][:, :, columns] for columns in (kept, forgotten))
    f, y = base.outputs, jnp.asarray(base.data.targets)
    ridge, share = base.ridge, kept.shape[0] / n

    def mean_loss(f: Array, y: Array) -> Array:
        return jnp.mean(base.loss.value(f, y))

    alpha = -jax.grad(mean_loss)(f, y) / ridge
    delta_f = -alpha[forgotten]

    def times(block: Array, v: Array) -> Array:
        return jnp.einsum("iajb,jb->ia", block, v)

    def curved(v: Array) -> Array:
        gradient = jax.grad(lambda f: mean_loss(f, y[kept]))
        return jax.jvp(gradient, (f[kept],), (v,))[1]

    def hess_mv(k_v: Array) -> Array:
        return share * (times(K_rr, curved(k_v)) + ridge * k_v)

    pull = times(K_rf, jax.grad(mean_loss)(f[forgotten], y[forgotten]))
    k_alpha = times(K_rf, alpha[forgotten]) + times(K_rr, alpha[kept])
    rhs = (1 - share) * (pull + ridge * k_alpha) - hess_mv(times(K_rf, delta_f))
    solution, _ = cg(lambda v: hess_mv(times(K_rr, v)), rhs, tol=rtol, maxiter=steps)
    delta = jnp.zeros_like(alpha).at[kept].set(solution).at[forgotten].set(delta_f)
    step = _pull_back(base.network, base.x, delta)
    return jax.tree.map(jnp.add, params, step)


def released_parameter_space(
    base: Fitted, params: PyTree, gone: np.ndarray, steps: int, rtol: float
) -> PyTree:
    """Eq. 4 for a linearised model by eager CG on the parameters."""
    model, loss, ridge = base.network, base.loss, base.ridge
    x, y = base.x, jnp.asarray(base.data.targets)
    n = x.shape[0]
    kept = jnp.setdiff1d(jnp.arange(n), jnp.asarray(gone))

    def outputs(theta: PyTree, x: Array) -> Array:
        moved = jax.tree.map(jnp.subtract, theta, model.params)
        apply: Callable[[PyTree], Array] = lambda t: model.apply_fn(t, x)  # noqa: E731
        value, change = jax.jvp(apply, (model.params,), (moved,))
        return value + change

    def total(theta: PyTree, x: Array, y: Array, mask: Array) -> Array:
        pulls = jax.tree.map(lambda a, b: jnp.sum((a - b) ** 2), theta, model.params)
        ridge_term = 0.5 * ridge * sum(jax.tree.leaves(pulls))
        return jnp.sum(mask * loss.value(outputs(theta, x), y)) + jnp.sum(mask) * ridge_term

    def batches(rows: Array) -> tuple[Array, Array, Array]:
        missing = -rows.shape[0] % BATCH
        padded = jnp.concatenate([rows, jnp.zeros(missing, rows.dtype)])
        mask = jnp.arange(padded.shape[0]) < rows.shape[0]
        cut = lambda a: a.reshape(-1, BATCH, *a.shape[1:])  # noqa: E731
        return cut(x[padded]), cut(y[padded]), cut(mask.astype(x.dtype))

    def summed(rows: Any, term: Callable[..., PyTree]) -> PyTree:
        zero = jax.tree.map(jnp.zeros_like, params)
        add = lambda sums, row: (jax.tree.map(jnp.add, sums, term(*row)), None)  # noqa: E731
        return jax.tree.map(lambda a: a / n, jax.lax.scan(add, zero, rows)[0])

    retained, forgotten = batches(kept), batches(jnp.asarray(gone))

    def hess_mv(v: PyTree) -> PyTree:
        return summed(
            retained, lambda *row: jax.jvp(lambda t: jax.grad(total)(t, *row), (params,), (v,))[1]
        )

    rhs = summed(forgotten, lambda *row: jax.grad(total)(params, *row))
    step, _ = cg(hess_mv, rhs, tol=rtol, maxiter=steps)
    return jax.tree.map(jnp.add, params, step)
