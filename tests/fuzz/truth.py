r"""Retraining in 80-bit arithmetic, with a bound on its own error. NumPy only, nothing of ours.

$$L(\theta) = \sum_i w_i\,\ell(f_i, y_i) + \tfrac\lambda2\|\delta\|^2,\qquad f = f_0 + \Phi\delta,\quad
  \delta = \theta-\theta_0 .$$

Newton in the space of features `Φ` with `np.longdouble`. `L` is λ-strongly convex, so wherever the
iteration ends, `‖δ − δ*‖ ≤ (‖∇L‖ + its rounding)/λ`: that is `Truth.error`, and it needs no faith in the
iteration. `np.linalg` has no longdouble, so the factorisation is written out here.
"""

from dataclasses import dataclass

import numpy as np

LD = np.longdouble
EPS = np.finfo(LD).eps
MAX_STEPS = 1000
MAX_HALVINGS = 60
ARMIJO = LD("1e-4")
NEAR = LD("1e-13")
"""Below this part of `L`, a decrease is rounding: the gradient decides instead."""


@dataclass(frozen=True)
class Objective:
    """`Φ` `(n, c, p)`, `f₀`, `y` `(n, c)`, sample weights `s` `(n,)`, all longdouble; `w = s/Σs`."""

    phi: np.ndarray
    f0: np.ndarray
    y: np.ndarray
    samples: np.ndarray
    ridge: float
    loss: "Loss"

    @property
    def weights(self) -> np.ndarray:
        return self.samples / self.samples.sum()


@dataclass(frozen=True)
class Truth:
    """The optimum `delta` with `‖delta − δ*‖ ≤ error`, and the sizes that say how hard it is.

    - `unit`: first-order size of what one unit of rounding does to `δ`, see `rounding_unit`.
    - `largest`: the largest number that the dual iteration must represent at the optimum.
    - `uncancelled`: `√Σ K_ii α_i²`, what `‖δ‖` would be if no two points pulled against each other.
    """

    delta: np.ndarray
    error: float
    norm: float
    unit: float
    largest: float
    uncancelled: float
    steps: int


class Loss:
    """Value `(n,)`, gradient and its rounding size `(n, c)`, Hessian `(n, c, c)` of a loss."""

    def value(self, f, y):
        raise NotImplementedError

    def grad(self, f, y):
        raise NotImplementedError

    def size(self, f, y):
        """What the rounding of `grad` at exact `f` is relative to."""
        return np.abs(self.grad(f, y))

    def hess(self, f, y):
        raise NotImplementedError


class Squared(Loss):
    def value(self, f, y):
        return ((f - y) ** 2).sum(1) / 2

    def grad(self, f, y):
        return f - y

    def hess(self, f, y):
        return np.broadcast_to(np.eye(f.shape[1], dtype=LD), (*f.shape, f.shape[1]))


class Softmax(Loss):
    """`p − y` as `p(1−y) − y(1−p)` with `1 − p` the sum of the others: no cancellation at hard labels."""

    @staticmethod
    def _probs(f):
        e = np.exp(f - f.max(1, keepdims=True))
        p = e / e.sum(1, keepdims=True)
        others = p @ (1 - np.eye(f.shape[1], dtype=LD))
        return p, others

    def value(self, f, y):
        top = f.max(1, keepdims=True)
        tail = np.log(np.exp(f - top).sum(1))
        # Σy·(top − f) + tail, plus top·(1 − Σy) for targets that sum to one only up to rounding.
        return tail + (y * (top - f)).sum(1) + top[:, 0] * (1 - y.sum(1))

    def grad(self, f, y):
        p, others = self._probs(f)
        return p * (1 - y) - y * others

    def size(self, f, y):
        p, others = self._probs(f)
        return p * np.abs(1 - y) + y * others

    def hess(self, f, y):
        p, others = self._probs(f)
        H = -p[:, :, None] * p[:, None, :]
        k = np.arange(f.shape[1])
        H[:, k, k] = p * others
        return H


class Logistic(Loss):
    @staticmethod
    def _sigmoids(f):
        e = np.exp(-np.abs(f))
        low, high = e / (1 + e), 1 / (1 + e)
        return np.where(f >= 0, high, low), np.where(f >= 0, low, high)

    def value(self, f, y):
        soft = np.log1p(np.exp(-np.abs(f)))
        return (soft + np.where(f >= 0, (1 - y) * f, -y * f)).sum(1)

    def grad(self, f, y):
        on, off = self._sigmoids(f)
        return on * (1 - y) - y * off

    def size(self, f, y):
        on, off = self._sigmoids(f)
        return on * (1 - y) + y * off

    def hess(self, f, y):
        on, off = self._sigmoids(f)
        return _diagonal(on * off)


class LogCosh(Loss):
    """`Σ log cosh(f − y)`."""

    def value(self, f, y):
        r = np.abs(f - y)
        return (r + np.log1p(np.exp(-2 * r)) - np.log(LD(2))).sum(1)

    def grad(self, f, y):
        return np.tanh(f - y)

    def hess(self, f, y):
        e = np.exp(-2 * np.abs(f - y))
        return _diagonal(4 * e / (1 + e) ** 2)


class Radial(Loss):
    """`√(1 + |f − y|²)`: outputs are coupled, and the curvature falls away with distance."""

    def value(self, f, y):
        return np.sqrt(1 + ((f - y) ** 2).sum(1))

    def grad(self, f, y):
        return (f - y) / self.value(f, y)[:, None]

    def hess(self, f, y):
        r, s = f - y, self.value(f, y)
        H = -r[:, :, None] * r[:, None, :]
        square, k = r**2, np.arange(f.shape[1])
        H[:, k, k] = 1 + square @ (1 - np.eye(f.shape[1], dtype=LD))
        return H / s[:, None, None] ** 3


LOSSES: dict[str, Loss] = {
    "squared": Squared(),
    "softmax": Softmax(),
    "logistic": Logistic(),
    "logcosh": LogCosh(),
    "radial": Radial(),
}


def _diagonal(values):
    return values[:, :, None] * np.eye(values.shape[1], dtype=LD)


def cholesky(A: np.ndarray) -> np.ndarray:
    """Lower `L` with `LLᵀ = A` in longdouble, column by column; raises on a pivot that is not positive."""
    L = np.array(A, dtype=LD)
    for j in range(len(L)):
        if not L[j, j] > 0:
            raise np.linalg.LinAlgError(f"pivot {j} is {L[j, j]}")
        L[j:, j] /= np.sqrt(L[j, j])
        L[j + 1 :, j + 1 :] -= np.outer(L[j + 1 :, j], L[j + 1 :, j])
    return np.tril(L)


def solve_lower(L: np.ndarray, b: np.ndarray, transposed: bool = False) -> np.ndarray:
    """`L⁻¹b` or `L⁻ᵀb`."""
    x = np.array(b, dtype=LD)
    order = range(len(L) - 1, -1, -1) if transposed else range(len(L))
    for j in order:
        x[j] /= L[j, j]
        if transposed:
            x[:j] -= L[j, :j] * x[j]
        else:
            x[j + 1 :] -= L[j + 1 :, j] * x[j]
    return x


class _System:
    """The objective on its rows of positive weight, flattened."""

    def __init__(self, o: Objective):
        keep = o.samples > 0
        self.w = (o.weights[keep])[:, None]
        self.y, self.f0 = o.y[keep], o.f0[keep]
        self.shape = self.y.shape
        self.phi = o.phi[keep].reshape(-1, o.phi.shape[2])
        self.abs_phi = np.abs(self.phi)
        self.diagonal = (self.phi**2).sum(1)
        self.ridge, self.loss = LD(o.ridge), o.loss

    def outputs(self, delta):
        return self.f0 + (self.phi @ delta).reshape(self.shape)

    def value(self, delta):
        f = self.outputs(delta)
        return (self.w[:, 0] * self.loss.value(f, self.y)).sum() + self.ridge / 2 * (delta @ delta)

    def grad(self, delta):
        g = (self.w * self.loss.grad(self.outputs(delta), self.y)).reshape(-1)
        return self.phi.T @ g + self.ridge * delta

    def grad_error(self, delta):
        """First-order bound on the rounding of `grad`, entry by entry, sums at their worst."""
        rows, p = self.phi.shape
        f = self.outputs(delta)
        delta_f = (self.abs_phi @ np.abs(delta)).reshape(self.shape) * (p + 2) + 2 * np.abs(f)
        hess = np.abs(self.loss.hess(f, self.y))
        delta_g = (hess @ delta_f[:, :, None])[:, :, 0] + 16 * self.loss.size(f, self.y)
        delta_g = self.w * (delta_g + (rows + 2) * np.abs(self.loss.grad(f, self.y)))
        error = self.abs_phi.T @ delta_g.reshape(-1) + 4 * self.ridge * np.abs(delta)
        return EPS * np.sqrt(error @ error)

    def newton(self, delta, G):
        H = (self.w[:, :, None] * self.loss.hess(self.outputs(delta), self.y)) @ self.phi.reshape(
            *self.shape, -1
        )
        H = self.phi.T @ H.reshape(self.phi.shape)
        H = (H + H.T) / 2
        shift, top = self.ridge, np.abs(np.diagonal(H)).max(initial=LD(0))
        for _ in range(20):
            try:
                L = cholesky(H + shift * np.eye(len(H), dtype=LD))
                return -solve_lower(L, solve_lower(L, G), transposed=True)
            except np.linalg.LinAlgError:
                # Below the rounding of H: a larger shift still gives a direction of descent.
                shift = max(4 * shift, EPS * top)
        return -G / (top + self.ridge)

    def rounding_unit(self, delta):
        r"""Size over λ of what one rounding of each number does to the gradient, root sum square.

        The dual iteration rounds `f_i` by `|f_i| + √K_ii·√(Σ K_jj α_j²)` units, `g` by its own size, and
        `λα`; the error `e` of the residual reaches the gradient as `√Σ K_ii e_i²`.
        """
        f, diagonal = self.outputs(delta), self.diagonal.reshape(self.shape)
        g = self.w * self.loss.grad(f, self.y)
        reach = np.sqrt((diagonal * g**2).sum()) / self.ridge
        delta_f = np.abs(f) + np.sqrt(diagonal) * reach
        curved = (np.abs(self.loss.hess(f, self.y)) @ delta_f[:, :, None])[:, :, 0]
        delta_rho = self.w * (curved + self.loss.size(f, self.y)) + np.abs(g)
        return np.sqrt((diagonal * delta_rho**2).sum()) / self.ridge, reach


def retrain(objective: Objective, *starts: np.ndarray) -> Truth:
    """The optimum from the best of `0` and `starts`; where it started does not matter, see `error`."""
    with np.errstate(under="ignore", over="ignore", invalid="ignore"):
        return _retrain(_System(objective), objective, starts)


def _retrain(s: _System, o: Objective, starts) -> Truth:
    zero = np.zeros(o.phi.shape[2], LD)
    candidates = [zero] + [v for v in starts if np.isfinite(v).all()]
    values = [s.value(v) for v in candidates]
    finite = [i for i, v in enumerate(values) if np.isfinite(v)]
    delta = candidates[min(finite, key=lambda i: values[i])]
    G = s.grad(delta)
    best, best_norm, failures, steps = delta, np.sqrt(G @ G), 0, 0
    while steps < MAX_STEPS:
        if best_norm <= s.grad_error(best) / 4 or failures == 3:
            break
        steps += 1
        delta, near = _step(s, delta, G)
        G = s.grad(delta)
        norm = np.sqrt(G @ G)
        failures = failures + 1 if near and not norm < best_norm / 2 else 0
        if norm < best_norm:
            best, best_norm = delta, norm
    unit, reach = s.rounding_unit(best)
    f, g = s.outputs(best), s.w * s.loss.grad(s.outputs(best), s.y)
    alpha = np.abs(g).max(initial=LD(0)) / s.ridge
    largest = max(np.abs(f).max(), alpha, s.diagonal.max(), reach**2, s.value(best))
    return Truth(
        delta=best,
        error=float((best_norm + s.grad_error(best)) / s.ridge),
        norm=float(np.sqrt(best @ best)),
        unit=float(unit),
        largest=float(largest),
        uncancelled=float(reach),
        steps=steps,
    )


def _step(s: _System, delta, G):
    """Armijo on `L` while its decrease can be seen, then full steps; and whether it was one of these."""
    d = s.newton(delta, G)
    slope, start, t = G @ d, s.value(delta), LD(1)
    if -slope <= NEAR * abs(start):
        return delta + d, True
    for _ in range(MAX_HALVINGS):
        if s.value(delta + t * d) <= start + ARMIJO * t * slope:
            break
        t /= 2
    return delta + t * d, False


def pulled_back(phi: np.ndarray, alpha: np.ndarray) -> tuple[np.ndarray, float]:
    """`Φᵀα` in longdouble, and a bound on its rounding."""
    flat, a = phi.reshape(-1, phi.shape[2]), np.asarray(alpha, LD).reshape(-1)
    error = EPS * (len(a) + 2) * (np.abs(flat).T @ np.abs(a))
    return flat.T @ a, float(np.sqrt(error @ error))
