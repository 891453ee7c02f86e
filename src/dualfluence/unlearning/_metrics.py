r"""How well a method forgets: KLOM, membership inference, distance to retraining.

Each compares what an unlearning method gives with what retraining gives, over models that differ in their
seeds. Retraining against retraining, with other seeds, is the floor of every measure.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from .. import primal
from ..dual._fitted import Fitted
from ..dual._newton import op_mv
from ..problem._edits import Remove, TrainingSet, apply_edits
from ..problem._objective import State

CLIP = 100.0
"""Margins are clipped to ±this."""

BINS = 20
"""Bins of equal width over the joint range."""

FLOOR = 1e-5
"""Smallest share of a bin of the retrained models. Halved, bins that they miss weigh `log 2` more."""

ASCENT_STEPS, DESCENT_STEPS = 10, 50
"""Steps of the two baselines by gradients."""


def margins(
    outputs: Float[np.ndarray, "q c"], labels: Int[np.ndarray, " q"]
) -> Float[np.ndarray, " q"]:
    """`z_y − logsumexp(z_≠y)`; for one output `±z`, labels 0 and 1."""
    if outputs.shape[1] == 1:
        return np.where(labels > 0, 1, -1) * outputs[:, 0]
    own = outputs[np.arange(len(labels)), labels]
    others = np.where(np.arange(outputs.shape[1])[None, :] == labels[:, None], -np.inf, outputs)
    top = others.max(axis=1)
    return own - top - np.log(np.exp(others - top[:, None]).sum(axis=1))


def klom(
    unlearned: Float[np.ndarray, "..."], retrained: Float[np.ndarray, "..."]
) -> Float[np.ndarray, " q"]:
    """`KL(unlearned ‖ retrained)` of margins, point by point (Georgiev et al., 2024).

    20 equal bins over the joint range after clipping to ±100, the retrained histogram floored at 1e-5.
    """
    if unlearned.ndim != 2 or unlearned.shape[1:] != retrained.shape[1:]:
        raise ValueError(
            f"klom: expected margins (models, points) of the same points, got {unlearned.shape} and "
            f"{retrained.shape}."
        )
    first, second = (np.clip(each, -CLIP, CLIP) for each in (unlearned, retrained))
    return np.array([_klom_of(first[:, j], second[:, j]) for j in range(first.shape[1])])


def _klom_of(first: np.ndarray, second: np.ndarray) -> float:
    low, high = min(first.min(), second.min()), max(first.max(), second.max())
    if low == high:
        return 0.0
    edges = np.linspace(low, high, BINS + 1)
    p, q = (np.histogram(each, edges)[0] / each.size for each in (first, second))
    q, inside = np.maximum(q, FLOOR), p > 0
    return float(np.sum(p[inside] * np.log(p[inside] / q[inside])))


def membership_auc(members: Any, others: Any) -> float:
    """Chance that a score of `members` exceeds one of `others`, ties counted half; ½ tells nothing."""
    a, b = np.ravel(members), np.ravel(others)
    if a.size == 0 or b.size == 0:
        raise ValueError("membership_auc: both groups need at least one score.")
    order = np.sort(b)
    below = np.searchsorted(order, a, "left") + np.searchsorted(order, a, "right")
    return float(below.mean() / (2 * b.size))


class Forgetting(NamedTuple):
    """One method's measures: KLOM at quantiles, AUC, distance over the size of the change."""

    method: str
    klom_forgotten: tuple[float, float]
    klom_retained: tuple[float, float]
    klom_test: tuple[float, float]
    membership_auc: float
    distance: float


@dataclass(frozen=True, eq=False)
class Setting:
    """Points to judge by: what is forgotten, what stays, what was never seen."""

    forgotten: np.ndarray
    x_test: Any
    y: np.ndarray
    y_test: np.ndarray


METHODS = ("ours", "parameter space", "gradient ascent", "fine-tuning", "no unlearning")


def unlearn(fitted: Fitted, gone: np.ndarray, method: str) -> Fitted:
    """The model after forgetting `gone` by a method; every one of them on the same linearised model."""
    if method == "ours":
        return fitted.edit(Remove(gone), progress=False).commit()
    if method == "retraining":
        return fitted.retrain(Remove(gone), progress=False).commit()
    if method == "gradient ascent":
        return _by_gradients(fitted, gone, ascent=True)
    if method == "fine-tuning":
        return _by_gradients(fitted, gone, ascent=False)
    if method == "no unlearning":
        return fitted
    raise ValueError(f"unlearn: no method {method!r}; parameter space has outputs only.")


def _by_gradients(fitted: Fitted, gone: np.ndarray, *, ascent: bool) -> Fitted:
    """Steps up the loss of what goes, or down the objective of what stays, at the largest stable rate."""
    data = apply_edits([Remove(gone)], fitted.data, fitted.loss, fitted.num_outputs)
    if ascent:
        weights = np.zeros_like(data.sample_weights)
        weights[gone] = 1.0
        data = TrainingSet(data.x, data.targets, weights, form=data.form)
    problem, op, alpha = fitted.problem(data), fitted.kernel_op, fitted.state.alpha
    # The curvature of every loss here is at most one: trace(WK) + λ bounds it, and 2/that is stable.
    top = float(jnp.max(jnp.sum(fitted.kernel_diagonal, axis=1)))
    rate = 1.0 / (top + fitted.ridge)
    for _ in range(ASCENT_STEPS if ascent else DESCENT_STEPS):
        state = State(alpha, op_mv(op, alpha))
        step = problem.loss_grad(state) if ascent else -problem.residual(state)
        alpha = alpha + rate * step
    return replace(fitted, data=data, state=State(alpha, op_mv(op, alpha)))


def judged_outputs(
    fitted: Fitted, setting: Setting, method: str
) -> tuple[Float[np.ndarray, "n c"], Float[np.ndarray, "q c"], float]:
    """Outputs at training and test points after a method, and its distance to retraining.

    The distance is over that of retraining to the model before.
    """
    gone = setting.forgotten
    exact = fitted.retrain(Remove(gone), progress=False)
    size = _distance(fitted, exact.state.alpha, fitted.state.alpha)
    if method == "parameter space":
        update = primal.influence(
            fitted.network,
            fitted.params(),
            fitted.data.features,
            setting.y,
            Remove(gone),
            loss=fitted.loss,
            ridge=fitted.ridge,
            on_failure="report",
        )
        train, test = (np.asarray(update.predict(x)) for x in (fitted.x, setting.x_test))
        gap = fitted.network.distance(update.params(), exact.params())
        return train, test, gap / size
    model = unlearn(fitted, gone, method)
    train = np.asarray(fitted.layout.points(fitted.offset + model.state.k_alpha))
    gap = _distance(fitted, model.state.alpha, exact.state.alpha)
    return train, np.asarray(model.predict(setting.x_test)), gap / size


def measure_forgetting(
    method: str,
    found: list[tuple[np.ndarray, np.ndarray, float]],
    reference: list[tuple[np.ndarray, np.ndarray, float]],
    setting: Setting,
) -> Forgetting:
    """A method's outputs over models against those of retraining with other seeds."""
    kept = np.setdiff1d(np.arange(len(setting.y)), setting.forgotten)
    train, test = _margins_of(found, setting)
    other_train, other_test = _margins_of(reference, setting)
    scores = klom(train, other_train)

    def quantiles(values: np.ndarray) -> tuple[float, float]:
        return float(np.quantile(values, 0.5)), float(np.quantile(values, 0.95))

    auc = np.mean(
        [membership_auc(a[setting.forgotten], b) for a, b in zip(train, test, strict=True)]
    )
    return Forgetting(
        method,
        quantiles(scores[setting.forgotten]),
        quantiles(scores[kept]),
        quantiles(klom(test, other_test)),
        float(auc),
        float(np.median([each[2] for each in found])),
    )


def forgetting_table(rows: list[Forgetting]) -> str:
    """The measures of all methods as a table in Markdown; KLOM as median and 95 % quantile."""
    lines = [
        "| method | KLOM forgotten | KLOM retained | KLOM test | membership AUC | distance |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [f"{low:.2g}, {high:.2g}" for low, high in row[1:4]]
        cells += [f"{row.membership_auc:.3f}", f"{row.distance:.2g}"]
        lines.append(f"| {row.method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _margins_of(found: list[Any], setting: Setting) -> tuple[np.ndarray, np.ndarray]:
    train = np.stack([margins(each[0], setting.y) for each in found])
    return train, np.stack([margins(each[1], setting.y_test) for each in found])


def _distance(fitted: Fitted, a: Any, b: Any) -> float:
    """`‖Jᵀ(a − b)‖`."""
    change = a - b
    return float(np.sqrt(max(float(jnp.sum(change * op_mv(fitted.kernel_op, change))), 0.0)))
