"""Ground truth: models trained on many subsets at once, in slices that a killed run keeps."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from ..._support.archive import digest_of_all
from ..._support.checks import check_finite
from ..._support.compile import in_own_precision
from ..._support.options import ProgressFn, Ticker
from ..._support.show import Shown
from ..._support.types import AnyPath, Inputs, Numbers
from ...dual._model import TrainedModel
from ...dual._reweighted import columns_at_once, reweighted
from ...problem._quantity import as_quantity
from .._pieces import Pieces

RELATIVE = 1e-4
"""Certified distance to the optimum, over `‖θ − θ₀‖`, at which a linearised model counts as trained."""


@dataclass(frozen=True, eq=False, repr=False)
class Truth(Shown):
    """Targets of models trained on subsets.

    - `masks`: `(s, n)`, true where a point was trained on.
    - `repeats`: `(r, s, q)`, one model per seed and subset.
    - `seeds`: of the repeats; empty if training has no randomness.
    """

    masks: Bool[np.ndarray, "s n"]
    repeats: Float[np.ndarray, "r s q"]
    seeds: tuple[int, ...] = ()

    @property
    def targets(self) -> Float[np.ndarray, "s q"]:
        """Mean over the repeats."""
        return self.repeats.mean(axis=0)


def random_masks(n: int, num_subsets: int, *, seed: int, fraction: float = 0.5) -> np.ndarray:
    """Random subsets of equal size, `(s, n)`."""
    size = round(fraction * n)
    if not 0 < size < n or num_subsets < 1:
        raise ValueError(
            f"random_masks: need subsets of at least 1 and less than {n} points, got {num_subsets} "
            f"subsets of {size}."
        )
    rng = np.random.default_rng(seed)
    masks = np.zeros((num_subsets, n), bool)
    for row in masks:
        row[rng.permutation(n)[:size]] = True
    return masks


@in_own_precision
def retrain_linearised(
    fitted: TrainedModel,
    masks: Numbers,
    xq: Inputs,
    yq: Numbers | None = None,
    *,
    of: str | Callable[[Array, Array], Array] = "loss",
    relative: float = RELATIVE,
    folder: AnyPath | None = None,
    progress: bool | ProgressFn = True,
) -> Truth:
    """The linearised (or infinitely wide) model retrained on subsets, in data space, many at once.

    **Arguments:**

    - `masks`: `(s, n)`, the points that each model keeps.
    - `of`: what is measured at the queries, as in `Fitted.attribute`.
    - `relative`: tolerance on the certified distance over `‖θ − θ₀‖`; `retrain_linearised` raises an
      error if a model misses it.
    - `folder`: keeps finished slices; a killed run continues with the same result.
    """
    fitted = fitted.without_spare_rows()
    kept = _check_masks("retrain_linearised", masks, fitted.data.num_points)
    xq = fitted.data.queries(xq)
    c, dtype = fitted.num_outputs, fitted.offset.dtype
    quantity = as_quantity(of, fitted.loss, yq, xq.shape[0], c, dtype)
    samples = np.asarray(fitted.data.sample_weights)
    print_of = digest_of_all(
        (fitted.data.x, fitted.data.targets, samples, xq, quantity.targets, kept)
    )
    pieces = Pieces(folder, json.dumps([print_of, quantity.name, fitted.ridge, relative]))
    outputs = fitted.predict(xq)

    def train(rows: slice) -> np.ndarray:
        many = reweighted(
            fitted, (samples * kept[rows]).T, relative=relative, what="retrain_linearised"
        )
        if not many.converged.all():
            raise RuntimeError(
                f"retrain_linearised: {int((~many.converged).sum())} models of {rows} missed the "
                f"tolerance {relative:g}. Loosen it, raise the ridge or use float64."
            )
        delta = many.alpha - fitted.state.alpha[:, :, None]
        # One pass per model through the network beats forming K_qn for few models.
        change = [fitted._cross_mv(xq, delta[:, :, j]) for j in range(delta.shape[2])]
        value = jax.vmap(lambda d: quantity.value(outputs + d, quantity.targets))
        return np.asarray(value(jnp.stack(change)))

    size = min(kept.shape[0], columns_at_once(fitted))
    targets = _sliced(pieces, kept.shape[0], size, train, "linearised models", progress)
    return Truth(kept, targets[None])


def retrain_networks(
    train: Callable[[Array, Array], PyTree],
    measure: Callable[[PyTree], Array],
    masks: Numbers,
    *,
    seeds: Sequence[int],
    name: str = "",
    slice_size: int = 64,
    folder: AnyPath | None = None,
    progress: bool | ProgressFn = True,
) -> Truth:
    """Any pure JAX training, run on every subset with every seed, many models in one `vmap`.

    **Arguments:**

    - `train`: `train(key, indices) -> params`, traceable; `indices` are the kept points.
    - `measure`: `measure(params) -> (q,)`, e.g. the loss at each query.
    - `masks`: `(s, n)` with equally many kept points in each row, so that shapes agree.
    - `seeds`: one repeat per seed. All subsets of a repeat share `key(seed)` (common random numbers):
      only the data differ between them, so a lucky start cannot look like a good subset.
    - `name`: of the experiment. The library cannot tell whether `train` and `measure` have changed, so it
      relies on the name: a folder holds slices of one name only.
    - `slice_size`: models trained at once; results are reproducible bit for bit only with the same value.
    - `folder`: keeps finished slices.
    """
    kept = _check_masks("retrain_networks", masks, None)
    sizes = kept.sum(axis=1)
    if np.unique(sizes).size != 1:
        raise ValueError(
            f"retrain_networks: subsets must have one size to be trained together, got from "
            f"{sizes.min()} to {sizes.max()} points."
        )
    seeds = tuple(int(seed) for seed in seeds)
    if not seeds or len(set(seeds)) != len(seeds):
        raise ValueError(f"retrain_networks: seeds must be distinct, at least one, got {seeds}.")
    if slice_size < 1:
        raise ValueError(f"retrain_networks: slice_size must be at least 1, got {slice_size}.")
    indices = np.stack([np.flatnonzero(row) for row in kept])
    one = jax.jit(jax.vmap(lambda key, rows: measure(train(key, rows))))
    jobs = [(seed, j) for seed in seeds for j in range(kept.shape[0])]

    def run(rows: slice) -> np.ndarray:
        part = jobs[rows]
        # The last slice repeats its last model: one shape, one compilation.
        part = part + [part[-1]] * (min(slice_size, len(jobs)) - len(part))
        keys = jnp.stack([jax.random.key(s) for s, _ in part])
        values = np.asarray(one(keys, jnp.asarray(indices[[j for _, j in part]])))
        if values.ndim != 2:
            raise ValueError(f"retrain_networks: measure must return (q,), got {values.shape[1:]}.")
        check_finite("retrain_networks: targets", values, hint="Training diverged.")
        return values[: rows.stop - rows.start]

    pieces = Pieces(
        folder, json.dumps([name, digest_of_all(kept), list(seeds), slice_size, "shared"])
    )
    flat = _sliced(pieces, len(jobs), slice_size, run, "models", progress)
    return Truth(kept, flat.reshape(len(seeds), kept.shape[0], -1), seeds)


def _sliced(
    pieces: Pieces,
    total: int,
    size: int,
    run: Callable[[slice], np.ndarray],
    label: str,
    progress: bool | ProgressFn,
) -> np.ndarray:
    parts = []
    with Ticker(total, label, progress) as ticker:
        for i in range(0, total, size):
            rows = slice(i, min(i + size, total))
            parts.append(pieces.get(f"slice-{i:06d}", lambda rows=rows: run(rows)))
            ticker.tick(rows.stop - rows.start)
    return np.concatenate(parts)


def _check_masks(name: str, masks: Numbers, num_points: int | None) -> np.ndarray:
    array = np.asarray(masks)
    if array.ndim != 2 or array.dtype != bool or (num_points or array.shape[1]) != array.shape[1]:
        want = "n" if num_points is None else num_points
        raise ValueError(
            f"{name}: masks must be booleans of shape (s, {want}), got {array.dtype} {array.shape}."
        )
    if not array.any(axis=1).all():
        raise ValueError(f"{name}: every subset needs at least one point.")
    return array
