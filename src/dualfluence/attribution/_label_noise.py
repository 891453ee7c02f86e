r"""How likely each label is wrong, from predictions that have not seen it.

Left-out outputs `f` say what a point's class is, $p(y\mid x) = \mathrm{softmax}(\beta f + b)_y$, and a
matrix of noise $Q_{yk}$ says how class `y` comes to carry the label `k`. Then

$$P(y\ne k\mid x, k) = 1 - \frac{p(k\mid x)\,Q_{kk}}{\sum_y p(y\mid x)\,Q_{yk}} .$$

`β`, `b` and `Q` maximise the likelihood of the labels that came, by expectation maximisation. The rows
of `Q` begin with three imagined labels for each real one, one in twenty of them wrong. Without
these a model that is merely weak would pass for noise.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

IMAGINED = 3.0
"""Imagined labels in `Q` for each real one. With a third of them, ambiguous classes count as wrong; with
three times as many, errors beyond one in ten go unseen. Least log loss of these on five data sets."""

IMAGINED_WRONG = 0.05
"""Share of them that is wrong."""

MAX_ROUNDS = 200
TOLERANCE = 1e-7
"""Gain of the mean log likelihood at which the rounds end."""

SMALL = 1e-6
"""Pull of `β` and `b` for each point, so that classes which are told apart without error stay finite."""

WIDE = 9.0
"""Least variance of wrong targets over that of right ones."""


@dataclass(frozen=True, eq=False)
class Noise:
    """What the labels and the left-out outputs say together.

    - `wrong`: probability that each label is wrong, `(n,)`.
    - `log_odds`: the same as log odds, which still rank where probabilities round to 0 or 1.
    - `suggested`: the likeliest true class or value, `(n,)` or `(n, c)`.
    - `probabilities`: `(n, c)`, of each label that may come, calibrated; `None` for numbers.
    - `scale`, `shift`, `matrix`: `β`, `b` and `Q`, or the width of errors and `None`.
    """

    wrong: Float[np.ndarray, " n"]
    log_odds: Float[np.ndarray, " n"]
    suggested: np.ndarray
    probabilities: Float[np.ndarray, "n c"] | None
    scale: float
    shift: np.ndarray | None
    matrix: np.ndarray | None

    def of_queries(self, outputs: np.ndarray, labels: np.ndarray) -> "Noise":
        """The same for points that the model was never trained on, with what was learned here."""
        assert self.shift is not None
        assert self.matrix is not None
        return _posterior(outputs, labels, self.scale, self.shift, self.matrix)


def label_noise(outputs: Float[np.ndarray, "n c"], labels: Int[np.ndarray, " n"]) -> Noise:
    """Fit the three to left-out outputs and the labels that came."""
    n, c = outputs.shape
    spread = float(np.std(outputs - outputs.mean(axis=1, keepdims=True)))
    beta, shift = 1 / max(spread, np.finfo(float).tiny), np.zeros(c)
    matrix = np.full((c, c), IMAGINED_WRONG / (c - 1))
    np.fill_diagonal(matrix, 1 - IMAGINED_WRONG)
    imagined = matrix * (IMAGINED * n / c)
    last = -np.inf
    for _ in range(MAX_ROUNDS):
        log_p = _log_softmax(beta * outputs + shift)
        joint = log_p + np.log(matrix[:, labels].T)
        total = np.logaddexp.reduce(joint, axis=1)
        likelihood = float(total.mean() + np.sum(imagined * np.log(matrix)) / n)
        if likelihood - last < TOLERANCE:
            break
        last = likelihood
        truth = np.exp(joint - total[:, None])
        counts = imagined.copy()
        np.add.at(counts.T, labels, truth)
        matrix = counts / counts.sum(axis=1, keepdims=True)
        beta, shift = _newton_step(outputs, truth, beta, shift)
    return _posterior(outputs, labels, beta, shift, matrix)


def _newton_step(
    outputs: np.ndarray, truth: np.ndarray, beta: float, shift: np.ndarray
) -> tuple[float, np.ndarray]:
    """Towards the `β, b` of least cross-entropy to `truth`, halved while it would not fall."""
    n, c = outputs.shape
    p = np.exp(_log_softmax(beta * outputs + shift))
    rest, mean = truth - p, np.sum(p * outputs, axis=1)
    gradient = np.append(np.sum(rest * outputs), rest.sum(axis=0)) / n
    hess = np.empty((c + 1, c + 1))
    hess[0, 0] = np.sum(p * outputs**2) - np.sum(mean**2)
    hess[0, 1:] = hess[1:, 0] = np.sum(p * (outputs - mean[:, None]), axis=0)
    hess[1:, 1:] = np.diag(p.sum(axis=0)) - p.T @ p
    move = np.linalg.solve(hess / n + SMALL * np.eye(c + 1), gradient)
    before = float(np.sum(truth * np.log(np.maximum(p, np.finfo(float).tiny))))
    for _ in range(30):
        new = beta + float(move[0]), shift + move[1:]
        if np.sum(truth * _log_softmax(new[0] * outputs + new[1])) >= before:
            return new
        move = move / 2
    return beta, shift


def _posterior(
    outputs: np.ndarray, labels: np.ndarray, beta: float, shift: np.ndarray, matrix: np.ndarray
) -> Noise:
    rows = np.arange(len(labels))
    log_p = _log_softmax(beta * outputs + shift)
    joint = log_p + np.log(matrix[:, labels].T)
    right = joint[rows, labels]
    others = joint.copy()
    others[rows, labels] = -np.inf
    odds = np.logaddexp.reduce(others, axis=1) - right
    return Noise(
        wrong=np.exp(-np.logaddexp(0, -odds)),
        log_odds=odds,
        suggested=others.argmax(axis=1),
        probabilities=np.exp(log_p) @ matrix,
        scale=beta,
        shift=shift,
        matrix=matrix,
    )


def target_noise(outputs: Float[np.ndarray, "n c"], targets: Float[np.ndarray, "n c"]) -> Noise:
    """The same for numbers: errors are of one normal width, or of a wide one where a target is wrong.

    Each output is measured in its own median error first.
    """
    error = targets - outputs
    middle = np.median(np.abs(error), axis=0) / 0.6745
    middle = np.where(middle > 0, middle, np.sqrt(np.mean(error**2, axis=0)))
    middle = np.where(middle > 0, middle, 1.0)
    squares, c, n = np.sum((error / middle) ** 2, axis=1), error.shape[1], len(error)
    narrow, wide, share = 1.0, 4 * WIDE, IMAGINED_WRONG
    odds = np.zeros(n)
    for _ in range(MAX_ROUNDS):
        logs = [np.log(s) - 0.5 * squares / v - 0.5 * c * np.log(v) for s, v in
                ((share, wide), (1 - share, narrow))]  # fmt: skip
        new = logs[0] - logs[1]
        if np.max(np.abs(new - odds)) < 1e-6:
            break
        odds = new
        wrong = np.exp(-np.logaddexp(0, -odds))
        share = float((wrong.sum() + IMAGINED * IMAGINED_WRONG * n) / (n + IMAGINED * n))
        right = 1 - wrong
        narrow = max(float(right @ squares / max(c * right.sum(), 1e-9)), 1e-12)
        wide = max(float(wrong @ squares / max(c * wrong.sum(), 1e-9)), WIDE * narrow)
    wrong = np.exp(-np.logaddexp(0, -odds))
    width = float(np.sqrt(narrow) * np.mean(middle))
    return Noise(wrong, odds, outputs, None, width, None, None)


def _log_softmax(z: np.ndarray) -> np.ndarray:
    return z - np.logaddexp.reduce(z, axis=1, keepdims=True)
