"""Measures of an unlearned model: distances of parameters, a baseline, accuracies."""

from collections.abc import Callable
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray, PyTree

from ._support import points as _points
from ._support.checks import (
    as_array,
    check_concrete,
    check_finite,
    check_indices,
    check_number,
    check_numbers,
    check_range,
    check_rows,
)
from ._support.options import check_function, check_key
from ._support.types import Inputs, Numbers


@dataclass(frozen=True)
class UnlearningReport:
    """Accuracy on the points to forget, on the rest of the training set, and on test points."""

    forgotten: float
    retained: float
    test: float


def tree_norm(params: PyTree) -> float:
    """`‖θ‖` over floating leaves."""
    _check_tree("tree_norm: params", params)
    value = float(_points.tree_norm(params))
    if not np.isfinite(value):
        raise ValueError("tree_norm: the parameters have NaN or inf, or their squares overflow.")
    return value


def distance(params_a: PyTree, params_b: PyTree) -> float:
    """`‖θ_a − θ_b‖` over floating leaves."""
    return tree_norm(_differences("distance", params_a, params_b))


def largest_difference(params_a: PyTree, params_b: PyTree) -> float:
    """`max |θ_a − θ_b|` over the entries of floating leaves, the distance in the norm `ℓ∞`."""
    apart = _differences("largest_difference", params_a, params_b)
    value = float(max((jnp.max(jnp.abs(leaf), initial=0) for leaf in apart), default=0.0))
    if not np.isfinite(value):
        raise ValueError("largest_difference: the parameters have NaN or inf.")
    return value


def _differences(what: str, params_a: PyTree, params_b: PyTree) -> list[Array]:
    """`θ_a − θ_b`, leaf by leaf."""
    _check_tree(f"{what}: params_a", params_a)
    _check_tree(f"{what}: params_b", params_b)
    trees = jax.tree.structure(params_a), jax.tree.structure(params_b)
    if trees[0] != trees[1]:
        raise ValueError(f"{what}: trees differ in structure, {trees[0]} and {trees[1]}.")
    leaves_a, leaves_b = _points.float_leaves(params_a), _points.float_leaves(params_b)
    shapes = [a.shape for a in leaves_a], [b.shape for b in leaves_b]
    if shapes[0] != shapes[1]:
        raise ValueError(f"{what}: floating leaves differ in shape, {shapes[0]} and {shapes[1]}.")
    return [_difference(a, b) for a, b in zip(leaves_a, leaves_b, strict=True)]


def _difference(a: Array, b: Array) -> Array:
    """`a − b` in the wider of both dtypes, at least float32: half precision would round it."""
    dtype = _points.common_dtype(jnp.float32, a, b)
    return a.astype(dtype) - b.astype(dtype)


def relative_distance(params_a: PyTree, params_b: PyTree) -> float:
    """`‖θ_a − θ_b‖ / ‖θ_b‖`, the paper's measure with `θ_b` the retrained parameters."""
    size = tree_norm(params_b)
    if size == 0:
        raise ValueError("relative_distance: ‖θ_b‖ is zero; use distance instead.")
    return distance(params_a, params_b) / size


def random_perturbation(key: PRNGKeyArray, params: PyTree, norm: float) -> PyTree:
    """`params` moved by `norm` in a random direction: the paper's baseline.

    The direction is drawn as a Gaussian vector over all floating leaves, i.e. uniformly on the sphere;
    other leaves are kept. A method that does no better than this at its own `‖Δθ‖` has learned nothing
    about the edit.

    **Returns:** the perturbed parameters, a pytree like `params`.
    """
    check_key("random_perturbation: key", key)
    _check_tree("random_perturbation: params", params)
    norm = check_number("random_perturbation: norm", norm)
    if not (np.isfinite(norm) and norm >= 0):
        raise ValueError(f"random_perturbation: norm must be finite and not negative, got {norm}.")
    theta, rest = eqx.partition(jax.tree.map(_as_array, params), eqx.is_inexact_array)
    leaves, treedef = jax.tree.flatten(theta)
    if not leaves:
        raise ValueError("random_perturbation: no floating leaf to perturb.")
    keys = jax.random.split(key, len(leaves))
    noise = [jax.random.normal(k, v.shape, v.dtype) for k, v in zip(keys, leaves, strict=True)]
    scale = norm / _points.tree_norm(noise)
    moved = [
        v + (scale * e.astype(scale.dtype)).astype(v.dtype)
        for v, e in zip(leaves, noise, strict=True)
    ]
    return eqx.combine(jax.tree.unflatten(treedef, moved), rest)


def accuracy(outputs: Numbers, labels: Numbers) -> float:
    """Share of points whose predicted class is the label.

    With several outputs, the largest one is the predicted class (the first one of equals). Labels are
    integers `(n,)` in `[0, c)`, or one row of scores per point, `(n, c)`, such as one-hot targets or
    probabilities. Each row must have a single largest entry.

    With one output, its sign is the predicted class, and zero counts as negative. Labels are -1/+1 or
    0/1, as `(n,)` or `(n, 1)`.
    """
    f = np.asarray(as_array("accuracy outputs", outputs))
    y = np.asarray(as_array("accuracy labels", labels))
    if f.ndim != 2 or f.size == 0:
        raise ValueError(f"accuracy: outputs must have shape (n, c), not empty, got {f.shape}.")
    check_finite("accuracy outputs", f)
    check_rows("accuracy labels", y, f.shape[0], "row of outputs")
    check_finite("accuracy labels", y)
    if f.shape[1] == 1:
        return float(np.mean((f[:, 0] > 0) == _binary(y)))
    return float(np.mean(f.argmax(axis=1) == _classes(y, f.shape[1])))


def unlearning_report(
    predict: Callable[[Inputs], Numbers],
    x: Inputs,
    y: Numbers,
    forgotten: Numbers,
    *,
    x_test: Inputs,
    y_test: Numbers,
) -> UnlearningReport:
    """Accuracy of a model on forgotten, retained and test points.

    The outputs at all training points are computed once and split, so that the next report compiles
    nothing.

    **Arguments:**

    - `predict`: `x -> (n, c)`, e.g. `update.predict`.
    - `x`, `y`: the training set before the edit; labels in a form that `accuracy` accepts.
    - `forgotten`: positions of the removed points.
    - `x_test`, `y_test`: points that were never trained on.
    """
    check_function("unlearning_report: predict", predict, "of x")
    labels = np.asarray(as_array("unlearning_report: y", y))
    gone = check_indices("unlearning_report: forgotten", forgotten)
    outputs = _predicted(predict, x)
    check_rows("y", labels, outputs.shape[0], "point of x")
    check_range("unlearning_report: forgotten", gone, outputs.shape[0])
    kept = np.setdiff1d(np.arange(outputs.shape[0]), gone)
    if kept.size == 0:
        raise ValueError("unlearning_report: every training point is forgotten, none is retained.")
    return UnlearningReport(
        forgotten=accuracy(outputs[gone], labels[gone]),
        retained=accuracy(outputs[kept], labels[kept]),
        test=accuracy(_predicted(predict, x_test), y_test),
    )


def _check_tree(name: str, params: PyTree) -> None:
    """Raise for a tree that has no norm: traced or complex leaves, or no tree of arrays at all."""
    leaves = jax.tree.leaves(params)
    for leaf in leaves:
        check_concrete(name, leaf)
        if eqx.is_inexact_array_like(leaf):
            check_numbers(name, leaf)
    if len(leaves) == 1 and leaves[0] is params and not eqx.is_array_like(params):
        raise TypeError(f"{name}: expected a pytree of arrays, got {type(params).__name__}.")


def _predicted(predict: Callable[[Inputs], Numbers], x: Inputs) -> np.ndarray:
    """Outputs of the user's function; an error of it names the function."""
    try:
        outputs = predict(x)
    except Exception as error:
        raise ValueError(
            f"unlearning_report: predict(x) fails: {type(error).__name__}: {error}"
        ) from error
    array = np.asarray(as_array("unlearning_report: predict(x)", outputs))
    if array.ndim != 2:
        raise ValueError(
            f"unlearning_report: predict(x) must return shape (n, c), got {array.shape}."
        )
    return array


def _as_array(leaf: object) -> object:
    return jnp.asarray(leaf) if eqx.is_inexact_array_like(leaf) else leaf


def _binary(labels: np.ndarray) -> np.ndarray:
    """-1/+1 or 0/1 labels as booleans."""
    if labels.shape not in ((labels.shape[0],), (labels.shape[0], 1)):
        raise ValueError(
            f"accuracy: labels of one output must have shape (n,) or (n, 1), got {labels.shape}."
        )
    values = set(np.unique(labels).tolist())
    if not (values <= {0, 1} or values <= {-1, 1}):
        raise ValueError(
            "accuracy: labels of one output must be all -1/+1 or all 0/1, got "
            f"{sorted(values)[:5]}. Threshold probabilities or real targets first."
        )
    return labels.reshape(-1) > 0


def _classes(labels: np.ndarray, num_outputs: int) -> np.ndarray:
    """Class indices from class indices or from rows of scores."""
    if labels.ndim == 1:
        if not np.issubdtype(labels.dtype, np.integer):
            raise TypeError(
                f"accuracy: class labels must be integers, got dtype {labels.dtype}. For "
                "probabilities give an array of shape (n, c)."
            )
        bad = labels[(labels < 0) | (labels >= num_outputs)]
        if bad.size:
            raise ValueError(f"accuracy: labels must be in [0, {num_outputs}), got {int(bad[0])}.")
        return labels
    if labels.shape[1:] != (num_outputs,):
        raise ValueError(
            f"accuracy: labels must have shape (n,) or (n, {num_outputs}), got {labels.shape}."
        )
    ties = np.flatnonzero((labels == labels.max(axis=1, keepdims=True)).sum(axis=1) > 1)
    if ties.size:
        raise ValueError(
            f"accuracy: labels in row {int(ties[0])} have no single largest entry, so the point has "
            f"no class ({ties.size} such rows)."
        )
    return labels.argmax(axis=1)
