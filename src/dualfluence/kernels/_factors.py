r"""Finds, in a backward pass, the last product that makes the gradient of each parameter.

The gradient of a weight is linear in the cotangent, and its last step is an outer product $\partial f_c
/ \partial W = \sum_s A_s \otimes G_{c,s}$ of a factor that does not depend on the cotangent ($A$:
activations, patches, indices) and one that does ($G$). Stopping one step before the end gives the two
factors, without any knowledge of the forward function.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Env = Mapping[int, Any]
"""Values of the slots of a program."""

AxisOrder = tuple[Any, ...]
"""The changes of axes between a product and the gradient of the leaf, step by step. Two products with
the same steps may be added; `primal` follows the steps to find the position of each entry in the
leaf."""

Scalars = tuple[tuple[int, int], ...]
"""Slots of single numbers, each with the power 1 or -1 at which it multiplies a gradient."""


@dataclass(frozen=True)
class GradientFactor:
    r"""A gradient $\sum_s A_{b,s} \otimes G_{b,s}$; sizes are `(b, s, m, n)` for one point.

    - `scalars`: slots that multiply (`+1`) or divide (`-1`) it; `sign` is its sign.
    - `axis_order`: the permutation from the axes of the product to those of the leaf; products with
      equal axis orders may be added.
    """

    sizes: tuple[int, int, int, int]
    scalars: Scalars
    sign: int
    axis_order: AxisOrder
    right_slot: int

    kind = "abstract"

    @abstractmethod
    def left(self, env: Env) -> Any:
        """$A$, shape `(b, s, m)`, or integer indices `(b, s)` standing for one-hot rows."""

    @abstractmethod
    def right(self, env: Env) -> Any:
        """$G$ for one cotangent, shape `(b, s, n)`."""

    @property
    def slots(self) -> set[int]:
        return {self.right_slot, *(s for s, _ in self.scalars)}

    def pair(self, env: Env) -> tuple[Any, Any]:
        """Both factors, multiplied with the scalars."""
        left, right = self.left(env), self.right(env)
        if not self.scalars and self.sign == 1:
            return left, right
        scale = scale_product(env, self.scalars, self.sign, right.dtype)
        if jnp.issubdtype(left.dtype, jnp.integer):
            return left, right * scale
        return left * scale.astype(left.dtype), right


def scale_product(env: Env, scalars: Scalars, sign: int, dtype: Any) -> Any:
    """The product of `scalars`, each a slot with power 1 or -1."""
    total = jnp.asarray(sign, dtype)
    for slot, power in scalars:
        value = jnp.reshape(jnp.asarray(env[slot]), ()).astype(dtype)
        total = total * value if power > 0 else total / value
    return total


@dataclass(frozen=True)
class DotFactor(GradientFactor):
    """Both factors are the operands of a `dot_general`."""

    left_slot: int
    left_dims: tuple[tuple[int, ...], tuple[int, ...]]
    right_dims: tuple[tuple[int, ...], tuple[int, ...]] | None

    kind = "dot"

    @property
    def slots(self) -> set[int]:
        return super().slots | {self.left_slot}

    def left(self, env: Env) -> Any:
        return _batch_sum_free(env[self.left_slot], *self.left_dims)

    def right(self, env: Env) -> Any:
        if self.right_dims is None:
            return jnp.reshape(env[self.right_slot], (1, 1, -1))
        return _batch_sum_free(env[self.right_slot], *self.right_dims)


@dataclass(frozen=True)
class ConvFactor(GradientFactor):
    """$A$ holds the input patches under each output position, $G$ the output cotangents."""

    left_slot: int
    params: Any

    kind = "conv"

    @property
    def slots(self) -> set[int]:
        return super().slots | {self.left_slot}

    def left(self, env: Env) -> Any:
        p, groups = self.params, self.sizes[0]
        spec = p["dimension_numbers"]
        lhs = jnp.transpose(
            env[self.left_slot], (spec.lhs_spec[1], spec.lhs_spec[0], *spec.lhs_spec[2:])
        )
        patches = _patches(
            lhs, p, self.params["taps"], self.params["window"]
        )  # (taps, sum, in, *s)
        patches = jnp.reshape(patches, (*patches.shape[:2], groups, -1, prod(patches.shape[3:])))
        return jnp.reshape(jnp.transpose(patches, (2, 1, 4, 0, 3)), self.sizes[:3])

    def right(self, env: Env) -> Any:
        spec = self.params["dimension_numbers"].rhs_spec
        rhs = jnp.transpose(env[self.right_slot], (spec[0], spec[1], *spec[2:]))
        rhs = jnp.reshape(rhs, (self.sizes[0], self.sizes[3], self.sizes[1]))
        return jnp.swapaxes(rhs, 1, 2)


@dataclass(frozen=True)
class LookupFactor(GradientFactor):
    """$A$ is one-hot rows, stored as indices; rows with an index out of range have no gradient."""

    left_slot: int
    component: int
    clips: bool

    kind = "lookup"

    @property
    def slots(self) -> set[int]:
        return super().slots | {self.left_slot}

    def left(self, env: Env) -> Any:
        idx = env[self.left_slot]
        found = jnp.reshape(idx[..., self.component], self.sizes[:2])
        if self.clips:
            return jnp.clip(found, 0, self.sizes[2] - 1)
        # An index has one entry per axis. JAX drops a row whose index is not zero on the other axes,
        # because it would stick out there: -1 marks such a row as out of range.
        strays = jnp.reshape(jnp.any(idx != 0, axis=-1, where=self._others(idx)), found.shape)
        return jnp.where(strays, -1, found)

    def _others(self, idx: Any) -> Any:
        return jnp.arange(idx.shape[-1]) != self.component

    def right(self, env: Env) -> Any:
        # A dropped row has no gradient: its cotangent must not reach the kernel.
        idx = self.left(env)[..., None]
        rows = jnp.reshape(env[self.right_slot], (*self.sizes[:2], self.sizes[3]))
        inside = (idx >= 0) & (idx < self.sizes[2])
        return jnp.where(inside, rows, jnp.zeros_like(rows))


def _batch_sum_free(x: Any, batch: tuple[int, ...], summed: tuple[int, ...]) -> Any:
    free = [d for d in range(x.ndim) if d not in batch and d not in summed]
    shape = x.shape
    x = jnp.transpose(x, (*batch, *summed, *free))
    return jnp.reshape(x, tuple(prod(shape[d] for d in dims) for dims in (batch, summed, free)))


def _patches(x: Any, p: Any, taps: tuple[int, ...], window: tuple[int, ...]) -> Any:
    """Strided windows of `(a, b, *spatial)`: shape `(taps, a, b, *window)`."""
    # JAX writes a weight's gradient as a convolution of inputs with cotangents: its outputs are the
    # taps of the filter and its window goes over output positions. So the taps step by its strides,
    # and positions by its dilation.
    steps, spread = p["window_strides"], p["rhs_dilation"]
    config = [(0, 0, 0), (0, 0, 0)]
    for d, length in enumerate(x.shape[2:]):
        low, hole = p["padding"][d][0], p["lhs_dilation"][d] - 1
        dilated = length + max(length - 1, 0) * hole
        # Exactly as far as the last window reaches; a negative padding cuts off what none reads.
        needed = (taps[d] - 1) * steps[d] + (window[d] - 1) * spread[d] + 1
        config.append((low, needed - dilated - low, hole))
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), config)

    def at(tap: tuple[int, ...]) -> Any:
        start = [t * s for t, s in zip(tap, steps, strict=True)]
        limit = [a + (w - 1) * r + 1 for a, w, r in zip(start, window, spread, strict=True)]
        return jax.lax.slice(x, (0, 0, *start), (*x.shape[:2], *limit), (1, 1, *spread))

    return jnp.stack([at(tap) for tap in np.ndindex(*taps)])


@dataclass(frozen=True)
class SharedFactor(GradientFactor):
    """Several uses of one parameter: their sums over `s` are concatenated, so cross terms are kept."""

    parts: tuple[GradientFactor, ...]

    kind = "shared"

    @property
    def slots(self) -> set[int]:
        return set().union(*(part.slots for part in self.parts))

    def left(self, env: Env) -> Any:
        return jnp.concatenate([part.pair(env)[0] for part in self.parts], axis=1)

    def right(self, env: Env) -> Any:
        return jnp.concatenate([part.pair(env)[1] for part in self.parts], axis=1)


def merge_uses(terms: tuple[GradientFactor, ...]) -> GradientFactor | None:
    """One factor for the sum of `terms`, or `None` if their axis orders differ."""
    first = terms[0]
    b, _, m, n = first.sizes
    alike = all(
        (t.kind, t.axis_order, t.sizes[0], t.sizes[2:]) == (first.kind, first.axis_order, b, (m, n))
        for t in terms
    )
    if not alike:
        return None
    if len(terms) == 1:
        return first
    sizes = (b, sum(t.sizes[1] for t in terms), m, n)
    return SharedFactor(sizes, (), 1, first.axis_order, first.right_slot, terms)
