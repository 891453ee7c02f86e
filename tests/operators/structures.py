"""The one list of structures of `K`: each with a model, its points, and what it does not do.

A new structure gets a line in `STRUCTURES`; the tests that read this list then ask it everything.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import dualfluence as dfl
from dualfluence import operators as ops
from dualfluence.operators._base import on_mesh

N, C, P = 6, 2, 4
X = np.random.default_rng(0).normal(size=(N + 2, 3))
"""Points; the last two are for edits that append."""


class Toeplitz(ops.AbstractKernelOperator):
    """A stranger's own operator with the abstract methods alone: `K[i, j] = column[|i − j|] ⊗ I`."""

    column: jax.Array
    c: int = eqx.field(static=True)

    @property
    def num_outputs(self) -> int:
        return self.c

    @property
    def num_points(self) -> int:
        return self.column.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.column.size * self.column.dtype.itemsize

    @property
    def dtype(self) -> Any:
        return self.column.dtype

    def mv(self, v):
        n = self.num_points
        circle = jnp.concatenate([self.column, self.column[:0:-1]])
        spectrum = jnp.fft.rfft(circle)[:, None]
        padded = jnp.fft.rfft(v, n=circle.size, axis=0)
        return jnp.fft.irfft(spectrum * padded, n=circle.size, axis=0)[:n].astype(v.dtype)

    def diagonal(self):
        return jnp.broadcast_to(self.column[0], (self.num_points, self.c))

    def dense(self):
        i = jnp.arange(self.num_points)
        return jnp.kron(self.column[jnp.abs(i[:, None] - i[None])], jnp.eye(self.c))


def on_a_line(x1, x2):
    """The kernel of the stranger's operator: `0.5^|i − j|` for points on a line."""
    x1, x2 = np.asarray(x1), np.asarray(x2)
    return jnp.asarray(0.5 ** np.abs(x1[:, :1] - x2[:, 0]))


def network(dtype=jnp.float64):
    """Linear in its parameters, so that `K` is known in closed form, with outputs that interact."""
    mixing = jnp.asarray(np.random.default_rng(1).normal(size=(3, C, P)), dtype)

    def apply(theta, x):
        return jnp.einsum("nd,dcp,p->nc", jnp.tanh(x), mixing, theta, precision="highest")

    return dfl.linearize(apply, jnp.zeros(P, dtype))


def features(dtype=np.float64):
    mixing = np.random.default_rng(1).normal(size=(3, C, P)).astype(dtype)
    return np.einsum("nd,dcp->ncp", np.tanh(X.astype(dtype)), mixing)


def smooth(x1, x2):
    """A kernel of shape `(n1, n2)`: the same for every output."""
    gaps = np.asarray(x1)[:, None] - np.asarray(x2)
    return jnp.exp(-0.5 * jnp.sum(jnp.asarray(gaps) ** 2, axis=2))


@dataclass(frozen=True)
class Case:
    """A structure of `K` on the first `N` points.

    - `model`, `points`: what the kernel is of; two points more than `K` has.
    - `op`: the structure.
    - `lacks`: methods that raise `UnsupportedStructure`.
    - `refuses`: edits and solvers that raise it, or the `ValueError` of a factor on a mesh.
    """

    model: Any
    points: np.ndarray
    op: ops.AbstractKernelOperator
    lacks: frozenset[str] = field(default_factory=frozenset)
    refuses: frozenset[str] = field(default_factory=frozenset)

    @property
    def x(self):
        return jnp.asarray(self.points[:N])


def _layout():
    return on_mesh(N, jax.devices()[:2])


def _dense(dtype=jnp.float64):
    return dfl.kernel_operator(network(dtype), jnp.asarray(X[:N], dtype), kernel="dense")


def _case(model, op, lacks="", refuses="", points=X):
    return Case(model, points, op, frozenset(lacks.split()), frozenset(refuses.split()))


def _stored(folder):
    built = dfl.store.build(network(), jnp.asarray(X[:N]), folder / "k", tile=3, progress=False)
    return built.operator()


def _bordered():
    x = jnp.asarray(X[:N])
    small = dfl.kernel_operator(network(), x[:4], kernel="dense")
    columns = network().kernel(x, x[4:], progress=False)
    return ops.BorderedOperator.around(small, columns).with_columns(columns, 4, N)


def _mixed():
    return ops.widen(_dense(jnp.float32))


ROWS = "at_points with_features"
"""What a matrix with entries does not do."""

STRUCTURES: dict[str, Callable[[Any], Case]] = {
    "dense": lambda _: _case(network(), _dense(), ROWS),
    "kronecker": lambda _: _case(
        smooth,
        dfl.kernel_operator(smooth, jnp.asarray(X[:N]), kernel=dfl.KernelOptions(num_outputs=C)),
        ROWS,
    ),
    "low rank": lambda _: _case(
        network(),
        ops.LowRankOperator(jnp.asarray(features()[:N])),
        "entries with_precision spread at_points with_columns",
        "add replace",
    ),
    "matrix-free": lambda _: _case(
        network(),
        ops.MatrixFreeOperator(network(), jnp.asarray(X[:N]), C),
        "entries wide_mv with_precision with_columns with_features",
    ),
    "sharded": lambda _: _case(
        network(),
        _dense().spread(_layout()),
        "dense entries take spread at_points with_columns with_features cut",
        "cholesky",
    ),
    "sharded matrix-free": lambda _: _case(
        network(),
        ops.MatrixFreeOperator(network(), jnp.asarray(X[:N]), C).spread(_layout()),
        "dense entries take wide_mv with_precision spread with_columns with_features cut",
        "cholesky",
    ),
    "bordered": lambda _: _case(
        network(), _bordered(), "entries take spread at_points with_features"
    ),
    "mixed": lambda _: _case(network(jnp.float32), _mixed(), "entries at_points with_features"),
    "stored": lambda folder: _case(
        network(),
        _stored(folder),
        "entries take with_precision spread at_points with_columns with_features cut",
    ),
    "a stranger's": lambda _: _case(
        on_a_line,
        Toeplitz(jnp.asarray(0.5 ** np.arange(N)), C),
        "entries take wide_mv with_precision spread at_points with_columns with_features cut",
        points=np.arange(N + 2.0)[:, None],
    ),
}


def known(case: Case) -> np.ndarray:
    """`K` of all points, from the model's closed form alone: `(N + 2, C, N + 2, C)`."""
    if case.model is smooth or case.model is on_a_line:
        sigma = np.asarray(case.model(case.points, case.points))
        return np.einsum("ij,ab->iajb", sigma, np.eye(C))
    phi = features(np.asarray(case.model.params).dtype)
    return np.einsum("iap,jbp->iajb", phi, phi).astype(np.float64)
