"""Small networks with their dense Gauss-Newton matrices, Hessians and gradients in NumPy."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import dualfluence as dfl
from users import ordinary

C = 3


@ordinary
def dense(p, x):
    h = jnp.tanh(x @ p["w1"] + p["b1"])
    return h @ p["w2"] + p["b2"]


@ordinary
def conv(p, x):
    numbers = ("NHWC", "HWIO", "NHWC")
    h = jax.lax.conv_general_dilated(x, p["k"], (1, 1), "VALID", dimension_numbers=numbers)
    return jnp.tanh(h + p["b"]).reshape(x.shape[0], -1) @ p["w"]


def tied(p, x):
    return jnp.tanh(jnp.tanh(x @ p["w"]) @ p["w"]) @ p["o"]


@ordinary
def embedding(p, x):
    return jnp.tanh(p["e"][x].mean(1)) @ p["w"] + p["b"]


@ordinary
def bias(p, x):
    """A bias by itself: no dense layer before it shares its gradient."""
    return jnp.tanh(x + p["b"]) @ p["w"]


def _draw(rng, *shape):
    return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[0]))


SHAPES: dict[str, tuple[Any, dict[str, tuple[int, ...]], Any]] = {
    "dense": (dense, {"w1": (4, 5), "b1": (5,), "w2": (5, C), "b2": (C,)}, (4,)),
    "conv": (conv, {"k": (2, 2, 2, 3), "b": (3,), "w": (12, C)}, (3, 3, 2)),
    "tied": (tied, {"w": (5, 5), "o": (5, C)}, (5,)),
    "embedding": (embedding, {"e": (6, 4), "w": (4, C), "b": (C,)}, "tokens"),
    "bias": (bias, {"b": (4,), "w": (4, C)}, (4,)),
}


@dataclass(frozen=True)
class Case:
    """`gauss_newton` and `hessian` have no ridge; `grads` are of single losses, without weights."""

    apply: Any
    params: Any
    model: dfl.Linearized
    x: Any
    y: np.ndarray
    xq: Any
    yq: np.ndarray
    ridge: float

    @property
    def n(self):
        return len(self.y)

    def jacobian(self, x):
        """`(n, c, p)` by automatic differentiation of the flat function."""
        flat, unravel = ravel_pytree(self.params)
        return np.asarray(jax.jacrev(lambda t: self.apply(unravel(t), x))(flat))

    def probs(self, x):
        f = np.asarray(self.apply(self.params, x))
        e = np.exp(f - f.max(1, keepdims=True))
        return e / e.sum(1, keepdims=True)

    def grads(self, x, y):
        return np.einsum("nc,ncp->np", self.probs(x) - np.eye(C)[y], self.jacobian(x))

    def loss_hessians(self):
        p = self.probs(self.x)
        return np.einsum("nc,cd->ncd", p, np.eye(C)) - np.einsum("nc,nd->ncd", p, p)

    def gauss_newton(self):
        J = self.jacobian(self.x)
        return np.einsum("ncp,ncd,ndr->pr", J, self.loss_hessians(), J) / self.n

    def hessian(self):
        flat, unravel = ravel_pytree(self.params)

        def mean_loss(t):
            log_p = jax.nn.log_softmax(self.apply(unravel(t), self.x))
            return -jnp.mean(log_p[jnp.arange(self.n), self.y])

        return np.asarray(jax.hessian(mean_loss)(flat))

    def scores(self, inverse):
        """`∇ℓ_q · inverse · ∇ℓ_i / n`."""
        return self.grads(self.xq, self.yq) @ inverse @ self.grads(self.x, self.y).T / self.n

    def attribute(self, solver, **options):
        return dfl.primal.attribute(
            self.model,
            self.params,
            self.x,
            self.y,
            self.xq,
            self.yq,
            loss=dfl.SoftmaxCrossEntropy(),
            solver=solver,
            **{"ridge": self.ridge, "linearised": False} | options,
        )


def make(name="dense", *, n=40, q=3, ridge=0.05, seed=0):
    """Enough points that the eigenvalues of every factor are distinct."""
    apply, shapes, inputs = SHAPES[name]
    rng = np.random.default_rng(seed)
    params = {k: _draw(rng, *shape) for k, shape in shapes.items()}
    if inputs == "tokens":
        x = jnp.asarray(rng.choice(6, (n + q, 4), p=np.arange(1, 7) / 21))
    else:
        x = jnp.asarray(rng.normal(size=(n + q, *inputs)))
    y = rng.integers(0, C, n + q)
    model = dfl.linearize(apply, params)
    return Case(apply, params, model, x[:n], y[:n], x[n:], y[n:], ridge)
