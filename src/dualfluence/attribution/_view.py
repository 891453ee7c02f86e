r"""Kernels of a network folded along directions of outputs of its training points."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from .._support.compile import PRECISION
from .._support.memory import even_size, memory_budget
from ..kernels import empirical_kernel
from ..kernels._along import kernel_along
from ..kernels._linearized import Linearized
from ._terms import Folded

BLOCK_SHARE = 0.1
"""Share of the kernel's memory budget for one block of rows of a rectangular kernel."""

WORK_SHARE = 0.4
"""Share of the same for the tiles of a kernel on an accelerator. Gradients that an optimiser's diagonal
keeps whole then fit at once (5,000 points, 109,000 parameters, three directions: 6.5 GB)."""

QUERIES_AT_ONCE = 512
"""Queries of one block. Doubled, their kernel takes twice the memory, and nothing is faster."""


class View:
    """Kernels of a network whose training points are seen along directions `P`."""

    def __init__(self, model: Linearized, x: Array, P: Float[Array, "n c r"]) -> None:
        self._folded, self._params = Folded(model.apply_fn), model.params
        self._mask = jax.tree.unflatten(jax.tree.structure(model.params), model.trainable)
        self._train, self.num_directions = (x, P), P.shape[2]
        self._options = {"trainable": self._mask, "tile_bytes": _work_space()}

    def system(self) -> Float[Array, "nr nr"]:
        """`PᵀKP`; tiles below the diagonal are those above, turned."""
        options = {"flat": True, "progress": False, **self._options}
        with jax.default_matmul_precision(PRECISION):
            return empirical_kernel(self._folded, self._params, self._train, **options).value

    def along(self, points: Array, u: Float[Array, "k c"]) -> Float[Array, "k nr"]:
        """`u_iᵀK_in P` of some points."""
        return self._between(points, u, *self._train).reshape(points.shape[0], -1)

    def pairs(self, a: Array, u: Array, b: Array, w: Array) -> Float[Array, "k l"]:
        """`u_iᵀK_ij w_j` of two sets of points."""
        return self._between(a, u, b, self._first(w))[:, :, 0]

    def from_queries(self, xq: Array, v: Float[Array, "q c"]) -> Float[Array, "nr q"]:
        """`PᵀK_nq v_q`, a block of queries at a time."""
        parts, total = [], xq.shape[0]
        size = even_size(total, QUERIES_AT_ONCE)
        for i in range(0, total, size):
            start = min(i, total - size)  # full blocks only: one shape, one compilation
            here = slice(start, start + size)
            parts.append(self.along(xq[here], v[here])[i - start :])
        return jnp.concatenate(parts).T

    def _first(self, u: Float[Array, "k c"]) -> Float[Array, "k c r"]:
        """One direction, in an array of as many as `P` has."""
        return jnp.zeros((*u.shape, self.num_directions), u.dtype).at[:, :, 0].set(u)

    def _between(self, a: Array, u: Array, b: Array, directions: Array) -> Array:
        unit = jnp.zeros((a.shape[0], self.num_directions), u.dtype).at[:, 0].set(1)
        with jax.default_matmul_precision(PRECISION):
            return kernel_along(
                self._folded,
                self._params,
                (a, self._first(u)),
                unit,
                (b, directions),
                **self._options,
            )


def _work_space() -> int | None:
    """Bytes for the tiles of a kernel; on a CPU the usual ones, which stay in its caches."""
    return None if jax.default_backend() == "cpu" else int(WORK_SHARE * memory_budget())


def rows_at_once(n: int, r: int, dtype: DTypeLike) -> int:
    """Rows of a kernel with `r` numbers for each of `n` points that are computed at once."""
    each = 3 * n * r * jnp.dtype(dtype).itemsize
    return int(min(n, max(1, BLOCK_SHARE * memory_budget() // each)))
