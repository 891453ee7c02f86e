"""The two products with the Jacobian of a function, also if a `custom_vjp` forbids forward mode."""

from collections.abc import Callable
from typing import Any

import jax

from ._program import mentions

Product = Callable[[Any], Any]


def jacobian_products(fn: Callable[[Any], Any], theta: Any) -> tuple[Product, Product]:
    r"""$t \mapsto Jt$ and $v \mapsto J^T v$ of `fn` at `theta`, with one forward pass for both."""
    if not mentions(jax.make_jaxpr(fn)(theta), "custom_vjp_call"):
        _, push = jax.linearize(fn, theta)
        back = jax.linear_transpose(push, theta)
        return push, lambda v: back(v)[0]
    outputs, pull = jax.vjp(fn, theta)
    return lambda t: _transposed(pull, outputs, t), lambda v: pull(v)[0]


def push(fn: Callable[[Any], Any], theta: Any, tangent: Any) -> Any:
    """$J$ times `tangent`. If a custom reverse rule forbids forward mode, it is computed as $(J^T)^T$."""
    if not mentions(jax.make_jaxpr(fn)(theta), "custom_vjp_call"):
        return jax.jvp(fn, (theta,), (tangent,))[1]
    outputs, pull = jax.vjp(fn, theta)
    return _transposed(pull, outputs, tangent)


def _transposed(pull: Product, outputs: Any, tangent: Any) -> Any:
    try:
        return jax.linear_transpose(lambda v: pull(v)[0], outputs)(tangent)[0]
    except Exception as error:  # whatever JAX raises for whichever operation is not linear
        raise ValueError(
            "linearize: apply_fn has a custom_vjp whose backward rule is not linear in the "
            "cotangent (gradient clipping is such a rule), so it has no Jacobian. Use the "
            f"function without that rule. JAX says: {error}"
        ) from error
