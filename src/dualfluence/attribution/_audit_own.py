"""The audit's own model: ridge regression on the features of a kernel, every point left out exactly."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float

from .._support.checks import check_finite
from .._support.compile import double
from .._support.types import Inputs, Numbers
from ..infinite import Dense, Relu, serial
from ..models._sources import AbstractSource
from ._audit import Evidence
from ._near import Distances, linear
from ._ridge import Ridge, fit_ridge

MAX_RANK = 1500
"""Landmarks of the kernel, exact with as many points. Doubled, it takes four to eight times as long."""

TRIED_ON = 800
"""Points on which the views of the features are compared."""


TILE = 256
"""Points of a side of a tile of the wide kernel: one shape, so that one program serves any number."""


class WideNetwork:
    """The kernel of an infinitely wide network with two hidden layers."""

    def __init__(self) -> None:
        layer = Dense(W_std=1.5, b_std=0.1)
        self.network = serial(layer, Relu(), layer, Relu(), layer)

    def kernel(self, x1: Inputs, x2: Inputs) -> np.ndarray:
        """`K(x1, x2)`, a tile at a time; the last ones are filled up with copies."""
        left, right = _tiles(x1), _tiles(x2)
        rows = [
            [np.asarray(self.network.kernel(a, b, progress=False)) for b in right] for a in left
        ]
        return np.block(rows)[: len(x1), : len(x2)]


def _tiles(x: Inputs) -> list[np.ndarray]:
    x = np.asarray(x)
    spare = -len(x) % TILE
    filled = np.concatenate([x, np.repeat(x[-1:], spare, axis=0)])
    return np.split(filled, len(filled) // TILE)


def whole(x: Float[np.ndarray, "n d"]) -> Callable[[np.ndarray], np.ndarray]:
    """All features on one scale: right for pixels, embeddings and counts of words."""
    size = float(_sizes(x.reshape(-1, 1))[0])
    return lambda points: points / size


def by_column(x: Float[np.ndarray, "n d"]) -> Callable[[np.ndarray], np.ndarray]:
    """Every feature on its own scale: right for columns of a table."""
    centre = x.mean(axis=0)
    size = _sizes(x - centre)
    return lambda points: (points - centre) / size


def _sizes(x: Float[np.ndarray, "n d"]) -> Float[np.ndarray, " d"]:
    """Root mean squares of columns, 1 where a column is 0; squares neither overflow nor vanish."""
    largest = np.abs(x).max(axis=0)
    largest = np.where(largest > 0, largest, 1.0)
    size = largest * np.sqrt(np.mean((x / largest) ** 2, axis=0))
    return np.where(size > 0, size, 1.0)


VIEWS = {"on one scale": whole, "each on its own scale": by_column}


def from_features(
    x: Float[np.ndarray, "n d"],
    targets: np.ndarray,
    classes: np.ndarray | None,
    xq: np.ndarray | None,
    test_targets: np.ndarray | None,
) -> Evidence:
    """Evidence from plain features: the scaling with the smaller leave-one-out error, then the wide
    kernel."""
    wanted = _wanted(targets, classes)
    rows = np.linspace(0, len(x) - 1, min(len(x), TRIED_ON)).astype(int)
    network, errors = WideNetwork(), {}
    for name, make in VIEWS.items():
        view = make(x)
        part = view(x[rows])
        errors[name] = fit_ridge(_features(part, network.kernel)(part), wanted[rows]).error
    best = min(errors, key=lambda name: errors[name])
    view = VIEWS[best](x)
    seen, asked = view(x), None if xq is None else view(xq)
    features = _features(seen, network.kernel)
    rank = min(len(x), MAX_RANK)
    notes = (
        f"infinitely wide network, {rank} features of its kernel, squared error, features {best}",
    )
    parts = features(seen), None if asked is None else features(asked)
    near = linear(seen, None), None if asked is None else linear(seen, asked)
    return from_ridge(
        fit_ridge(parts[0], wanted), parts[1], targets, classes, test_targets, near, notes
    )


def from_kernel(
    source: AbstractSource,
    x: Inputs,
    targets: np.ndarray,
    classes: np.ndarray | None,
    xq: Inputs,
    test_targets: np.ndarray | None,
) -> Evidence:
    """Evidence from a kernel `(n1, n2)` that the user gave."""
    wanted = _wanted(targets, classes)
    features = _features(x, lambda a, b: source.block(a, b, False))
    near = (
        kernel_distances(source, x, None),
        None if xq is None else kernel_distances(source, x, xq),
    )
    notes = (f"the given kernel, {min(len(x), MAX_RANK)} features of it, squared error",)
    asked = None if xq is None else features(xq)
    return from_ridge(
        fit_ridge(features(x), wanted), asked, targets, classes, test_targets, near, notes
    )


def from_ridge(
    ridge: Ridge,
    asked: np.ndarray | None,
    targets: np.ndarray,
    classes: np.ndarray | None,
    test_targets: np.ndarray | None,
    near: tuple[Distances, Distances | None],
    notes: tuple[str, ...],
) -> Evidence:
    """Evidence from a ridge regression: everything that an audit looks at is in closed form."""
    everywhere = ridge.features if asked is None else np.concatenate([ridge.features, asked])
    return Evidence(
        classes=classes,
        targets=targets,
        outputs=ridge.outputs,
        left_out=ridge.left_out,
        effect=ridge.effect,
        near=near[0],
        active=np.ones(len(targets), bool),
        without=lambda points: ridge.without(points, everywhere),
        test_targets=test_targets,
        test_outputs=None if asked is None else ridge.predict(asked),
        test_near=near[1],
        notes=(*notes, f"penalty {ridge.penalty:.3g}, the one of least leave-one-out error", EXACT),
    )


EXACT = "every point left out exactly"


def kernel_distances(source: AbstractSource, x: Inputs, xq: Inputs) -> Distances:
    """Distances of the kernel itself, summed over outputs."""
    asked = x if xq is None else xq

    def block(rows: slice) -> np.ndarray:
        with double():
            return over_outputs(source.block(asked[rows], x, False))

    own = _diagonal(source, asked)
    return Distances(block, own, own if xq is None else _diagonal(source, x), xq is None)


def over_outputs(block: Numbers) -> np.ndarray:
    """`(n1, n2)`: the trace over outputs of a block `(n1, c, n2, c)`."""
    array = np.asarray(block, float)
    return array if array.ndim == 2 else np.einsum("iaja->ij", array)


def _diagonal(source: AbstractSource, x: Inputs, rows: int = 64) -> np.ndarray:
    with double():
        parts = [
            np.diagonal(over_outputs(source.block(x[i : i + rows], x[i : i + rows], False)))
            for i in range(0, len(x), rows)
        ]
    return np.concatenate(parts)


def _features(
    x: Inputs, kernel: Callable[[Inputs, Inputs], Numbers]
) -> Callable[[Inputs], np.ndarray]:
    """`φ` with `K(x, x') ≈ φ(x)·φ(x')` after Nyström, exact for up to `MAX_RANK` points."""

    def entries(x1: Inputs, x2: Inputs) -> np.ndarray:
        with double():
            found = over_outputs(kernel(x1, x2))
        check_finite("audit: kernel", found, hint="Look for points that are not finite.")
        return found

    chosen = np.random.default_rng(0).permutation(len(x))[:MAX_RANK]
    landmarks = x[np.sort(chosen)]
    values, vectors = np.linalg.eigh(entries(landmarks, landmarks))
    kept = values > max(len(values) * np.finfo(float).eps * values[-1], 0)
    if not kept.any():
        raise ValueError(
            "audit: the kernel is 0 at the points, so that nothing tells them apart. Look at the points and "
            "at the kernel."
        )
    roots = vectors[:, kept] / np.sqrt(values[kept])
    return lambda points: entries(points, landmarks) @ roots


def _wanted(targets: np.ndarray, classes: np.ndarray | None) -> np.ndarray:
    return targets if classes is None else np.eye(len(classes))[targets]
