"""Global self-attention with infinitely many heads."""

from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .._support.compile import HIGHEST
from ._gap import coincide
from ._spec import AbstractLayer, Band, Records, Spec
from ._states import ImagePairs, settle
from ._windows import at_first, at_second, same_pixel, take_diagonal


@dataclass(frozen=True)
class GlobalSelfAttention(AbstractLayer):
    r"""Attention between all pixels of an image (Hron et al. 2020), no positional embedding.

    `scaling="linear"` (tied keys and queries): for images 1 and 2, with
    $G_1 = \zeta(W_qW_k\,K_{11})$ and $G_2$ from $K_{22}$ in the same way, where $\zeta$ is the
    softmax over the attended pixels, ReLU or the identity (`mechanism`), and $v = (W_oW_v)^2$,
    $K' = v\,G_1KG_2^\top + b^2$ and $\Theta' = v\,G_1\Theta G_2^\top + 2(K'-b^2) + b^2$.
    `scaling="sqrt"` has a limit in closed form for `mechanism="identity"` only:
    $K' = v'\langle K,K\rangle K + b^2$ with $v' = (W_qW_kW_oW_v)^2$.

    Works on all pairs of pixels: cost $O(P^3)$ per pair of images of $P$ pixels.
    """

    W_key_std: float = 1.0
    W_value_std: float = 1.0
    W_query_std: float = 1.0
    W_out_std: float = 1.0
    b_std: float | None = None
    mechanism: Literal["softmax", "relu", "identity"] = "softmax"
    scaling: Literal["linear", "sqrt"] = "linear"
    width: int | None = None

    def __post_init__(self) -> None:
        if self.mechanism not in ("softmax", "relu", "identity"):
            raise ValueError(
                "GlobalSelfAttention: mechanism must be 'softmax', 'relu' or 'identity', "
                f"got {self.mechanism!r}."
            )
        if self.scaling not in ("linear", "sqrt"):
            raise ValueError(
                f"GlobalSelfAttention: scaling must be 'linear' or 'sqrt', got {self.scaling!r}."
            )
        if self.scaling == "sqrt" and self.mechanism != "identity":
            raise ValueError(
                "GlobalSelfAttention: square-root scaling has a closed form only for "
                "mechanism='identity'; use scaling='linear'."
            )

    def out_spec(self, spec: Spec) -> Spec:
        if not spec.is_image:
            raise ValueError(f"{self}: expected images (n, height, width, channels), got vectors.")
        return Spec(spec.shape, self.width or 0, gaussian=True, fresh=True)

    def need(self, band: Band, spec: Spec) -> Band:
        return None

    def _attend(self, cov: Array) -> Array:
        logits = self.W_query_std * self.W_key_std * cov
        if self.mechanism == "softmax":
            return jax.nn.softmax(logits, axis=1)
        return jax.nn.relu(logits) if self.mechanism == "relu" else logits

    def record(self, state: ImagePairs, band: Band) -> tuple[Array, ...]:
        weights = self._attend(_matrix(state.cov))
        cov, _ = self._transform(state, weights, weights)
        return take_diagonal(_grid(cov, state.spec.shape), None), weights

    def _transform(self, state: ImagePairs, G1: Array, G2: Array) -> tuple[Array, Array | None]:
        b2, ov = (self.b_std or 0.0) ** 2, (self.W_out_std * self.W_value_std) ** 2
        K = _matrix(state.cov)
        T = None if state.ntk is None else _matrix(state.ntk)
        if self.scaling == "linear":
            K_mixed = ov * _mix(G1, K, G2)
            T_mixed = 0.0 if T is None else ov * _mix(G1, T, G2)
            return K_mixed + b2, T_mixed + 2 * K_mixed + b2
        v = ov * (self.W_query_std * self.W_key_std) ** 2
        norm = jnp.sum(K * K, axis=(0, 1), keepdims=True)
        T = jnp.zeros_like(K) if T is None else T
        ntk = 2 * jnp.sum(K * T, axis=(0, 1), keepdims=True) * K + norm * (T + 4 * K)
        return v * norm * K + b2, v * ntk + b2

    def pairs(self, state: ImagePairs, rec1: Records, rec2: Records, band: Band) -> ImagePairs:
        cov, ntk = self._transform(state, rec1[1], rec2[1])
        shape = state.spec.shape
        cov = _grid(cov, shape)
        distance = at_first(rec1[0]) + at_second(rec2[0], None) - 2 * cov
        apart = take_diagonal(state.distance, None)
        equal = jnp.all(coincide(apart, state.q1, state.q2), axis=(0, 1))
        same = same_pixel(shape, None)
        same = same & equal.reshape((1,) * (distance.ndim - equal.ndim) + equal.shape)
        distance = jnp.where(same, 0, jnp.maximum(distance, 0))
        ntk = None if ntk is None else _grid(ntk, shape)
        new = replace(state, q1=rec1[0], q2=rec2[0], distance=distance, ntk=ntk, pixels=None)
        return settle(replace(new, spec=self.out_spec(state.spec)))

    def init(self, key: Array, spec: Spec, width: int) -> tuple[PyTree, Spec]:
        raise NotImplementedError(
            "GlobalSelfAttention: the finite network is not available (its limit needs the "
            "number of heads to grow too); the kernels are."
        )

    def apply(self, params: PyTree, x: Array) -> Array:
        raise NotImplementedError("GlobalSelfAttention: the finite network is not available.")


def _matrix(pairs: Array) -> Array:
    """`(H, H, W, W, n1, n2)` as `(P, P, n1, n2)`."""
    h, _, w = pairs.shape[:3]
    return jnp.swapaxes(pairs, 1, 2).reshape(h * w, h * w, *pairs.shape[4:])


def _grid(matrix: Array, shape: tuple[int, ...]) -> Array:
    h, w = shape
    return jnp.swapaxes(matrix.reshape(h, w, h, w, *matrix.shape[2:]), 1, 2)


def _mix(G1: Array, A: Array, G2: Array) -> Array:
    """$G_1 A G_2^T$ for every pair; the weights are broadcast over the samples of the other side."""
    n1, n2 = A.shape[2:]
    G1, G2 = (jnp.broadcast_to(G, (*G.shape[:2], n1, n2)) for G in (G1, G2))
    left = jnp.einsum("panm,abnm->pbnm", G1, A, precision=HIGHEST)
    return jnp.einsum("pbnm,qbnm->pqnm", left, G2, precision=HIGHEST)
