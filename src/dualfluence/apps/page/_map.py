"""The map: each training point at its first two principal components of the kernel."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from ..._support.compile import in_own_precision
from ...fitted._fitted import Fitted

BLOCK = 8
"""Number of vectors that are iterated; those after the second make the first two converge faster."""

ROUNDS, FEW = 60, 10
"""Iterations with a kernel in memory, and with one that is not. The map is only a picture, so its axes
need not be exact."""

Product = Callable[[np.ndarray], np.ndarray]


@in_own_precision
def kernel_map(fitted: Fitted) -> tuple[np.ndarray, np.ndarray]:
    r"""Coordinates $(n, 2)$ in the kernel's feature space, and the share of its variance on each axis.

    The Gram matrix is $\operatorname{tr} K_{ij}/c$, centred: $HGH = U\Lambda U^\top$, coordinates
    $U\Lambda^{1/2}$. Found by subspace iteration, $O(n^2)$ a round; signs are fixed, so that the same
    model gives the same picture. For a kernel that is not in memory, a fixed random combination of
    outputs replaces the trace, and there are fewer rounds.
    """
    product, trace = _gram(fitted.without_spare_rows())
    n = fitted.data.num_points
    V = np.linalg.qr(np.random.default_rng(0).normal(size=(n, min(BLOCK, n))))[0]
    for _ in range(ROUNDS if fitted.kernel_op.narrow.has_entries else FEW):
        V = np.linalg.qr(_centred(product(_centred(V))))[0]
    small = V.T @ _centred(product(_centred(V)))
    values, turn = np.linalg.eigh((small + small.T) / 2)
    values, U = np.maximum(values[::-1], 0), (V @ turn)[:, ::-1]
    values, U = np.pad(values, (0, 2))[:2], np.pad(U, ((0, 0), (0, 2)))[:, :2]
    signs = np.sign(U[np.abs(U).argmax(axis=0), np.arange(2)])
    total = max(trace, np.finfo(float).tiny)
    return U * np.where(signs == 0, 1, signs) * np.sqrt(values), values / total


def _gram(fitted: Fitted) -> tuple[Product, float]:
    """Products with the Gram matrix, and the trace of it once it is centred."""
    op = fitted.kernel_op.narrow
    n, c = op.num_points, op.num_outputs
    if op.has_entries:
        K = np.asarray(op.entries(), float)
        G = K if op.is_kronecker else np.einsum("iaja->ij", K.reshape(n, c, n, c)) / c
        return (lambda V: G @ V), float(np.trace(G) - G.sum() / n)

    # Each product is a pass through the network: one combination of outputs stands for all of them.
    v = np.random.default_rng(0).choice([-1.0, 1.0], c) / np.sqrt(c)

    def product(V: np.ndarray) -> np.ndarray:
        spread = jnp.asarray(v[None, :, None] * V[:, None, :], fitted.offset.dtype)
        return np.einsum("a,iak->ik", v, np.asarray(op.mm(spread), float))

    diagonal = np.asarray(fitted.layout.points(fitted.kernel_diagonal), float)
    ones = np.ones((n, 1))
    return product, float(diagonal.sum() / c - (ones.T @ product(ones)).item() / n)


def _centred(V: np.ndarray) -> np.ndarray:
    return V - V.mean(axis=0)
