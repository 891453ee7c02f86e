"""Seeded problems as plain NumPy arrays. Imports nothing of the library under test."""

from dataclasses import dataclass

import numpy as np

LOSS_NAMES = ("squared", "softmax", "logistic")


@dataclass(frozen=True)
class Problem:
    """A model linear in its parameters: `f(x) = f0(x) + J(x) δ`, with `δ = θ − θ₀`.

    An input holds its own Jacobian and offset, `x = [J | f0]`, so that a test can write the model
    for NumPy and for JAX alike as `x[..., :-1] @ theta + x[..., -1]` (see `apply`), exactly.

    **Fields:** `x` `(n, c, p + 1)`, targets `y` `(n, c)`, `sample_weights` `(n,)`, queries `x_q`
    `(q, c, p + 1)` with `y_q` `(q, c)`, `ridge`, and `loss_name`, one of `LOSS_NAMES`.
    """

    x: np.ndarray
    y: np.ndarray
    sample_weights: np.ndarray
    x_q: np.ndarray
    y_q: np.ndarray
    ridge: float
    loss_name: str

    @property
    def J(self) -> np.ndarray:
        return self.x[..., :-1]

    @property
    def f0(self) -> np.ndarray:
        return self.x[..., -1]

    @property
    def J_q(self) -> np.ndarray:
        return self.x_q[..., :-1]

    @property
    def f0_q(self) -> np.ndarray:
        return self.x_q[..., -1]

    @property
    def K(self) -> np.ndarray:
        """Kernel of the training points, `(n, c, n, c)`."""
        return np.einsum("iap,jbp->iajb", self.J, self.J)

    @property
    def K_qn(self) -> np.ndarray:
        """Kernel of queries against training points, `(q, c, n, c)`."""
        return np.einsum("iap,jbp->iajb", self.J_q, self.J)

    @property
    def labels(self) -> np.ndarray:
        """Most probable class of each training point."""
        return self.y.argmax(-1)


def apply(theta, x):
    """The model of a `Problem`, for NumPy and JAX arrays: `(p,), (n, c, p + 1) -> (n, c)`."""
    return x[..., :-1] @ theta + x[..., -1]


def make_targets(rng: np.random.Generator, n: int, c: int, loss_name: str) -> np.ndarray:
    """Targets the loss admits; for the two classification losses hard and soft ones in turn."""
    if loss_name == "squared":
        return rng.normal(size=(n, c))
    soft_rows = np.arange(n) % 2 == 1
    if loss_name == "softmax":
        y = np.eye(c)[rng.integers(0, c, n)]
        y[soft_rows] = rng.dirichlet(np.ones(c), size=int(soft_rows.sum()))
        return y
    if loss_name == "logistic":
        y = rng.integers(0, 2, (n, c)).astype(float)
        y[soft_rows] = rng.uniform(size=(int(soft_rows.sum()), c))
        return y
    raise ValueError(f"loss_name must be one of {LOSS_NAMES}, got {loss_name!r}.")


def _assemble(rng, J, J_q, loss_name, ridge, weighted) -> Problem:
    (n, c, _), q = J.shape, len(J_q)
    f0, f0_q = rng.normal(size=(n, c, 1)), rng.normal(size=(q, c, 1))
    return Problem(
        x=np.concatenate([J, f0], axis=-1),
        y=make_targets(rng, n, c, loss_name),
        sample_weights=rng.uniform(0.2, 3.0, size=n) if weighted else np.ones(n),
        x_q=np.concatenate([J_q, f0_q], axis=-1),
        y_q=make_targets(rng, q, c, loss_name),
        ridge=ridge,
        loss_name=loss_name,
    )


def linear_problem(
    n: int,
    c: int,
    p: int,
    loss_name: str,
    seed: int = 0,
    ridge: float = 0.1,
    *,
    q: int = 3,
    weighted: bool = False,
) -> Problem:
    """Gaussian Jacobians, scaled so that `K` has unit diagonal on average.

    `K` has full rank, as the paper assumes, when `p ≥ n·c` (and is well conditioned when `p` is a
    few times that); smaller `p` gives a singular `K`. `weighted` draws sample weights in
    `[0.2, 3]` instead of ones.
    """
    rng = np.random.default_rng(seed)
    J, J_q = (rng.normal(size=(size, c, p)) / np.sqrt(p) for size in (n, q))
    return _assemble(rng, J, J_q, loss_name, ridge, weighted)


def kronecker_problem(
    n: int,
    c: int,
    d: int,
    loss_name: str,
    seed: int = 0,
    ridge: float = 0.1,
    *,
    q: int = 3,
    weighted: bool = False,
) -> tuple[Problem, np.ndarray, np.ndarray]:
    """One linear readout per output over `d` shared features: `K = Σ ⊗ I_c`, `p = d·c`.

    **Returns:** the problem, `Σ` of shape `(n, n)`, and `Σ` of queries against training points,
    `(q, n)`.
    """
    rng = np.random.default_rng(seed)
    phi, phi_q = (rng.normal(size=(size, d)) / np.sqrt(d) for size in (n, q))
    J, J_q = (
        np.einsum("id,ab->iabd", features, np.eye(c)).reshape(len(features), c, c * d)
        for features in (phi, phi_q)
    )
    problem = _assemble(rng, J, J_q, loss_name, ridge, weighted)
    return problem, phi @ phi.T, phi_q @ phi.T
