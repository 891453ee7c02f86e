"""The empirical NTK by its definition: the whole Jacobian, contracted."""

import jax
import jax.numpy as jnp
import numpy as np


def jacobian_kernel(apply_fn, params, x1, x2=None):
    """`(n1, c, n2, c)` from `jax.jacrev` over all floating-point leaves of `params`."""
    leaves, treedef = jax.tree.flatten(params)
    free = [k for k, leaf in enumerate(leaves) if _is_float(leaf)]

    def outputs(values, x):
        full = list(leaves)
        for k, value in zip(free, values, strict=True):
            full[k] = value
        return apply_fn(jax.tree.unflatten(treedef, full), x)

    def rows(x):
        jacobians = jax.jit(jax.jacrev(outputs))([leaves[k] for k in free], x)
        return np.concatenate([np.reshape(j, (*j.shape[:2], -1)) for j in jacobians], axis=2)

    r1 = rows(x1)
    r2 = r1 if x2 is None else rows(x2)
    return np.einsum("iap,jbp->iajb", r1, r2)


def _is_float(leaf):
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
