r"""Cross-entropy of sequences: a mean over tokens, each a softmax over the vocabulary."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from .._support.checks import as_array, check_finite
from .._support.types import Numbers
from ._losses import AbstractFactor, AbstractLoss, SoftmaxCrossEntropy

IGNORED = -100
"""The target of a token that counts for nothing: padding, or the prompt of a completion."""

_SOFTMAX = SoftmaxCrossEntropy()


class TokenCrossEntropy(AbstractLoss):
    r"""The mean cross-entropy of a sequence's tokens,
    $\ell_i = \frac{1}{|C_i|}\sum_{t \in C_i} (\mathrm{logsumexp}(f_{it}) - f_{it,y_{it}})$.

    Targets are token numbers `(n, T)`. A target of −100 counts for nothing, and `C_i` holds the
    others: so a query may be a whole completion, a span, or a single token. Networks return
    `(n, T, V)`; `attribution` flattens this to `(n, T·V)`, the outputs that the methods here take.

    Position `t` of the targets belongs to position `t` of the outputs. A causal network predicts the
    next token, so its targets are its inputs shifted by one: `tokens[:, 1:]` for inputs `tokens[:, :-1]`.
    """

    def prepare_targets(self, targets: Numbers, num_outputs: int | None, dtype: DTypeLike) -> Array:
        array = np.asarray(as_array("TokenCrossEntropy targets", targets))
        check_finite("TokenCrossEntropy targets", array)
        if not np.issubdtype(array.dtype, np.integer):
            raise TypeError(
                f"TokenCrossEntropy: targets must be integers, token numbers or {IGNORED}, got dtype "
                f"{array.dtype}."
            )
        if array.ndim != 2 or array.shape[1] == 0:
            raise ValueError(
                "TokenCrossEntropy: targets must have shape (n, T), one number per token, got "
                f"{array.shape}."
            )
        T = array.shape[1]
        if num_outputs is not None and num_outputs % T:
            raise ValueError(
                f"TokenCrossEntropy: targets of {T} tokens, but the {num_outputs} outputs of a sequence "
                f"are not {T} times a vocabulary. Inputs, outputs and targets need the same length."
            )
        counted = array != IGNORED
        if not counted.any(axis=1).all():
            first = int(np.argmin(counted.any(axis=1)))
            raise ValueError(
                f"TokenCrossEntropy: sequence {first} has no token that counts, all {T} targets are "
                f"{IGNORED}. Leave it out, or mask less."
            )
        low = int(array[counted].min()) if array.size else 0
        high = int(array[counted].max()) if array.size else 0
        V = high + 1 if num_outputs is None else num_outputs // T
        if low < 0 or high >= V:
            raise ValueError(
                f"TokenCrossEntropy: targets must be in [0, {V}) or {IGNORED}, got "
                f"{low if low < 0 else high}."
            )
        return jnp.asarray(array.astype(np.int32))

    def value(self, outputs: Float[Array, "n c"], targets: Int[Array, "n t"]) -> Float[Array, " n"]:
        f, y, share = _tokens(outputs, targets)
        # A softmax over tokens that count for nothing may be infinite.
        each = jnp.where(share > 0, _SOFTMAX.value(f, y).reshape(share.shape), 0)
        return jnp.sum(share * each, axis=1)

    def grad(self, outputs: Float[Array, "n c"], targets: Int[Array, "n t"]) -> Float[Array, "n c"]:
        f, y, share = _tokens(outputs, targets)
        return (share.reshape(-1, 1) * _SOFTMAX.grad(f, y)).reshape(outputs.shape)

    def grad_noise(
        self, outputs: Float[Array, "n c"], targets: Int[Array, "n t"], noise: Float[Array, "n c"]
    ) -> Float[Array, "n c"]:
        f, y, share = _tokens(outputs, targets)
        each = _SOFTMAX.grad_noise(f, y, noise.reshape(f.shape))
        return (share.reshape(-1, 1) * each).reshape(outputs.shape)

    def hess_factor(
        self,
        outputs: Float[Array, "n c"],
        targets: Int[Array, "n t"],
        weights: Float[Array, " n"],
    ) -> AbstractFactor:
        f, y, share = _tokens(outputs, targets)
        each = (share * weights[:, None]).reshape(-1)
        return TokenFactor(_SOFTMAX.hess_factor(f, y, each), targets.shape[1])


def _tokens(
    outputs: Float[Array, "n c"], targets: Int[Array, "n t"]
) -> tuple[Float[Array, "nt v"], Float[Array, "nt v"], Float[Array, "n t"]]:
    """Outputs and targets with one row per token, and the share of each token in its sequence."""
    counted = targets != IGNORED
    number = jnp.sum(counted, axis=1, keepdims=True).astype(outputs.dtype)
    share = counted.astype(outputs.dtype) / jnp.maximum(number, 1)
    f = outputs.reshape(targets.size, -1)
    y = jax.nn.one_hot(jnp.maximum(targets, 0).reshape(-1), f.shape[1], dtype=outputs.dtype)
    return f, y, share


class TokenFactor(AbstractFactor):
    """The factors of single tokens, `length` of them in the row of a sequence."""

    tokens: AbstractFactor
    length: int = eqx.field(static=True)

    def mv(self, v: Float[Array, "n r ..."]) -> Float[Array, "n c ..."]:
        return self._joined(self.tokens.mv(self._apart(v)), v)

    def rmv(self, v: Float[Array, "n c ..."]) -> Float[Array, "n r ..."]:
        return self._joined(self.tokens.rmv(self._apart(v)), v)

    def hess_diagonal(self) -> Float[Array, "n k"]:
        each = self.tokens.hess_diagonal()
        return each.reshape(each.shape[0] // self.length, -1)

    def narrow(self) -> "TokenFactor":
        return TokenFactor(self.tokens.narrow(), self.length)

    @property
    def min_curvature(self) -> Float[Array, ""]:
        return self.tokens.min_curvature

    def _apart(self, v: Array) -> Array:
        return v.reshape(v.shape[0] * self.length, v.shape[1] // self.length, *v.shape[2:])

    def _joined(self, each: Array, like: Array) -> Array:
        return each.reshape(like.shape[0], self.length * each.shape[1], *like.shape[2:])
