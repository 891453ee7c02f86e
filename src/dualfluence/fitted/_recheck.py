r"""What a file claims about its model, computed again from the model and `K`.

A checksum finds accidents. Whoever changes a file can also write a new checksum, so `load` believes no
number that it can compute: outputs at `α = 0`, `Kα`, the diagonal of `K`, the residual and with it the
certificate, and the gap of a network that its user trained. If a number in the file agrees to rounding,
it stays bit for bit. Outputs at `α = 0` from another machine stay as well, because the digest of a desk
covers them; how far they differ from ours counts as rounding of the model from then on.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._support.checks import OVERFLOW, check_finite
from .._support.points import tree_norm
from ..dual._fidelity import see
from ..dual._model import Reference
from ..dual._newton import check_finite_norm, inspect_jit, op_diagonal, op_mv
from ..kernels._linearized import Linearized
from ..models._passes import outputs_at
from ..problem._certificate import ROUNDING_FACTOR, reach
from ..problem._objective import State
from ._fitted import Fitted

CLAIMED = (
    "the gap in the certificate, and that the network is linear, are claims of the file: the points that "
    "they were computed at have been purged"
)
UNCERTIFIED = "the network is not linear in its parameters, as the file says it is: no certificate"


def computed_again(fitted: Fitted, initial: Linearized | None, slack: float) -> Fitted:
    """Compute again everything that the model's file states, and return the model; raise `ValueError` if
    the results differ from the file.

    **Arguments:**

    - `initial`: the network with the parameters `θ₀` that the ridge pulls towards.
    - `slack`: by how much the outputs may differ, as a share of their size.
    """
    fitted = replace(fitted, kernel_diagonal=op_diagonal(fitted.kernel_op))
    own = _own_offset(fitted)
    if own is not None:
        fitted = _with_coarser(fitted, own, slack)
    fitted = _with_own_product(fitted, slack)
    if fitted.reference is not None:
        assert initial is not None
        fitted = _with_own_reference(fitted, fitted.reference, initial)
    at = (fitted.kernel_op, fitted.problem(), fitted.state, fitted.kernel_diagonal)
    certificate = inspect_jit(*at).norms.certificate(fitted.ridge)
    check_finite_norm(certificate.gradient_norm + certificate.rounding, "load")
    return replace(fitted, certificate=fitted._widened(certificate))


def _with_coarser(fitted: Fitted, own: Array, slack: float) -> Fitted:
    """The file's outputs at `α = 0`, which digests cover, with what ours differ by counted as rounding."""
    apart, size, largest = jnp.abs(own - fitted.offset), *_sizes(fitted)
    _check_near("outputs at α = 0", apart, slack * largest)
    eps = fitted.problem().eps
    if bool((apart <= ROUNDING_FACTOR * eps * size).all()):
        return fitted
    coarser = float(jnp.max(apart / jnp.maximum(size, jnp.finfo(size.dtype).tiny)))
    note = (
        f"the file's outputs at α = 0 are not to rounding those computed here: off by {coarser:.1e}"
    )
    return _noted(replace(fitted, epsilon=max(eps, coarser)), note)


def _with_own_product(fitted: Fitted, slack: float) -> Fitted:
    """`Kα` of the file where it is ours to rounding, else ours."""
    state, (size, largest) = fitted.state, _sizes(fitted)
    product = op_mv(fitted.kernel_op, state.alpha)
    check_finite("load: K α", product, hint=OVERFLOW)
    apart = jnp.abs(product - state.k_alpha)
    _check_near("products with K", apart, slack * largest)
    if bool((apart <= ROUNDING_FACTOR * fitted.problem().eps * size).all()):
        return fitted
    return replace(fitted, state=State(state.alpha, product))


def _sizes(fitted: Fitted) -> tuple[Float[Array, "n c"], float]:
    """What rounding of each output is in proportion to, as in a certificate, and the largest output."""
    root, state = jnp.sqrt(jnp.maximum(fitted.kernel_diagonal, 0)), fitted.state
    outputs, reached = jnp.abs(fitted.offset + state.k_alpha), reach(root, state.alpha)
    size = outputs + jnp.abs(state.k_alpha) + root * (reached + state.drift)
    return size, float(jnp.max(outputs) + jnp.max(root) * reached)


def _check_near(what: str, apart: Array, limit: float) -> None:
    worst = float(jnp.max(apart))
    if not worst <= limit:
        raise ValueError(
            f"load: this model is not the one that was saved: its {what} differ from the stored ones by "
            f"{worst:.3g} at some training point. Build it from the same parameters."
        )


def _own_offset(fitted: Fitted) -> Array | None:
    """`f − Kα` of this model, or `None` where a purge has left nothing to compute it from."""
    ref, data, dtype = fitted.reference, fitted.data, fitted.offset.dtype
    if ref is None:
        base = fitted.source.base_outputs(data.x, fitted.num_outputs)
        return jnp.zeros_like(fitted.offset) if base is None else base.astype(dtype)
    if data.purged is not None and not ref.linearised:
        return None  # a purge moved the reference: the network there is not its linearisation
    alpha = jnp.pad(ref.alpha, ((0, data.num_points - len(ref.alpha)), (0, 0)))
    outputs = outputs_at(fitted._network, ref.params, data.x, ref.linearised).astype(dtype)
    return outputs - op_mv(fitted.kernel_op, alpha.astype(dtype))


def _with_own_reference(fitted: Fitted, ref: Reference, initial: Linearized) -> Fitted:
    """The gap and the linearity of a network trained by the user, where its points are still there."""
    if fitted.data.purged is not None:
        return _noted(replace(fitted, reference=replace(ref, claimed=True)), CLAIMED)
    x = fitted.data.x[: len(ref.alpha)]
    trained = see(initial, ref.params, x, ref.linearised)
    pulled = fitted.source.pull_back(x, ref.alpha)
    own = float(tree_norm(jax.tree.map(jnp.subtract, trained.change, pulled)))
    ref = replace(ref, gap=max(ref.gap, own))
    if ref.certified and not (ref.linearised or trained.is_linear):
        return _noted(replace(fitted, reference=replace(ref, certified=False)), UNCERTIFIED)
    return replace(fitted, reference=ref)


def _noted(fitted: Fitted, note: str) -> Fitted:
    notes = fitted.stats.notes
    return (
        fitted
        if note in notes
        else replace(fitted, stats=fitted.stats._replace(notes=(*notes, note)))
    )
