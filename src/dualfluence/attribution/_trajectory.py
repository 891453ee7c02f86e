"""Attribution of a real network from the checkpoints of its training."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from .._support.archive import digest_of_all
from .._support.checks import all_finite, check_finite
from .._support.compile import jit
from .._support.options import ProgressFn, Ticker, check_choice, check_worker
from .._support.show import Shown
from .._support.types import AnyPath, ApplyFn, Inputs, Numbers, Trainable
from ..kernels._linearized import Linearized, as_network, linearize
from ..kernels._params import opened
from ..losses import AbstractLoss, TokenCrossEntropy
from ..operators._base import Device, as_mesh
from ._attribution import Attribution
from ._checkpoint import PROJECTED_RANK, checkpoint_scores
from ._mesh import check_mesh, mesh_scores
from ._pieces import Pieces
from ._points import QUESTIONS, check_point, scores_of_points
from ._probes import Probes, key_of
from ._request import (
    Data,
    Options,
    check_data,
    check_outputs_finite,
    fingerprint,
    result_of,
)
from ._token_runs import as_sequences, probes_of, token_shares

KAPPA = 3.0
r"""`κ` in `λ_t = 1/(κ η s_t)`.

Gradient descent for a time `τ = ηs` on a fixed curvature `h` closes a share `1 − e^{−hτ}` of the
gap, a ridge `λ` a share `h/(h + λ)`. They cross one half together at `κ = 1/ln 2`. The curvature of
a classifier falls as it learns, so that the mean over the past is about twice that of the
checkpoint itself: together, about 3. Twice or half of it costs little.
"""

INDEPENDENT = 3.0
"""Number of independent scores to which the checkpoints of one run are equivalent, in `combine="shrunk"`.

Neighbours resemble each other, so fewer than there are. A third or three times as many cost little."""

COMBINE = ("shrunk", "mean")

METHODS = ("outputs", "projected")


@dataclass(frozen=True, eq=False, repr=False)
class Trajectory(Shown):
    r"""The checkpoints of one training run, with the number of steps and the learning rate of each.

    Training that stopped after `s` steps of size `η` corresponds to a ridge `λ = 1/(κηs)`. At each
    checkpoint the network is linearised and every point scored by its first-order effect with that
    ridge; at each checkpoint the scores of a query are divided by their root mean square; then scores are
    added over checkpoints and runs.

    **Fields:**

    - `apply_fn`: `apply_fn(params, x) -> (n, c)`, in inference mode: dropout off, batch norm fixed; or
      a model of `adapters`, whose `read` gives the checkpoints. For sequences of tokens it returns
      `(n, T, V)`.
    - `checkpoints`: parameter pytrees, or a function that loads the k-th, so that they may be on disk.
      Checkpoints of the first quarter of training are the most useful. About twenty checkpoints are
      good, at first one every half epoch.
    - `steps`: optimiser steps before each, increasing.
    - `learning_rate`, `momentum`: of plain SGD; for a schedule, `learning_rate` may be a
      sequence: the mean over the steps up to each checkpoint.
    - `preconditioner`: for Adam and similar optimisers. Parameter pytrees (or a function of k) that
      hold the diagonal `P` of the update `−ηP∇L`, for Adam `1/(√v̂ + ε)`; the kernel becomes `JPJᵀ`.
      `adapters.adam_record` reads it from the state of Optax or PyTorch.
    - `weight_decay`: the weight decay of training, plain L2 for SGD and decoupled (AdamW) with a
      preconditioner. It is added to the ridge `1/(κηs)`.
    - `kappa`: `κ`; `KAPPA` explains the default 3.
    - `trainable`: as in `linearize`.
    """

    apply_fn: ApplyFn
    checkpoints: Sequence[PyTree] | Callable[[int], PyTree]
    steps: Numbers
    learning_rate: Numbers
    momentum: float = 0.0
    preconditioner: PyTree = None
    weight_decay: float = 0.0
    kappa: float = KAPPA
    trainable: Trainable = None

    def __post_init__(self) -> None:
        self._unwrap()
        steps = np.asarray(self.steps)
        if steps.ndim != 1 or steps.size == 0 or not np.issubdtype(steps.dtype, np.integer):
            raise ValueError(
                f"Trajectory: steps must be whole numbers, one per checkpoint, got {self.steps}."
            )
        if steps[0] < 1 or (np.diff(steps) <= 0).any():
            raise ValueError(
                f"Trajectory: steps must be positive and increasing, got {steps.tolist()}. They count "
                "optimiser steps before each checkpoint."
            )
        rates = np.asarray(self.learning_rate, float)
        if rates.shape not in ((), steps.shape) or not (np.isfinite(rates) & (rates > 0)).all():
            raise ValueError(
                "Trajectory: learning_rate must be a positive number, or one per checkpoint, got "
                f"{self.learning_rate}."
            )
        if not 0 <= self.momentum < 1:
            raise ValueError(f"Trajectory: momentum must be in [0, 1), got {self.momentum}.")
        if not (np.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise ValueError(
                f"Trajectory: weight_decay must be a number of at least 0, got {self.weight_decay}."
            )
        if not (np.isfinite(self.kappa) and self.kappa > 0):
            raise ValueError(f"Trajectory: kappa must be a positive number, got {self.kappa}.")
        held = self.preconditioner
        if held is not None and not callable(held) and len(held) != steps.size:
            raise ValueError(
                f"Trajectory: {steps.size} checkpoints but {len(held)} preconditioners. Give one for each, "
                "a tree like the parameters, or a function of k; adapters.adam_record makes them."
            )
        if not callable(self.checkpoints):
            if len(self.checkpoints) != steps.size:
                raise ValueError(
                    f"Trajectory: {len(self.checkpoints)} checkpoints but {steps.size} steps."
                )
            for k, params in enumerate(self.checkpoints):
                check_checkpoint(k, params, self.checkpoints[0])

    def _unwrap(self) -> None:
        """A model of `adapters` or `linearize` says itself which parameters count."""
        given: Any = self.apply_fn
        if getattr(as_network(given), "scale", None) is not None:
            raise ValueError(
                "Trajectory: the model has a scale. A scale describes a penalty in training, but the ridge "
                "of a Trajectory imitates training that stopped early. Give the model without the scale, "
                "and the diagonal of the optimiser as preconditioner."
            )
        apply_fn, trainable = opened("Trajectory", given, self.trainable)
        object.__setattr__(self, "trainable", trainable)
        object.__setattr__(self, "apply_fn", apply_fn)

    @property
    def num_checkpoints(self) -> int:
        return len(np.asarray(self.steps))

    def ridge(self, k: int) -> float:
        """`λ_t = 1/(κ η s_t)` plus the weight decay, `η` the learning rate over one minus the momentum."""
        return 1 / (self.kappa * self._time(k)) + self.weight_decay

    def checkpoint(self, k: int) -> PyTree:
        """The k-th parameters, checked."""
        params = self.checkpoints(k) if callable(self.checkpoints) else self.checkpoints[k]
        check_checkpoint(k, params, params)
        return params

    def _time(self, k: int) -> float:
        """Steps before the k-th checkpoint times the learning rate over one minus the momentum."""
        rate = np.broadcast_to(np.asarray(self.learning_rate, float), (self.num_checkpoints,))[k]
        return float(rate * np.asarray(self.steps)[k] / (1 - self.momentum))

    def model(self, k: int) -> Linearized:
        """The network linearised at the k-th checkpoint, in the metric of the optimiser."""
        model = self._with_diagonal(k)
        return model if model.scale is None else model.in_scale()

    def _with_diagonal(self, k: int) -> Linearized:
        """The network linearised at the k-th checkpoint; its `scale` is the optimiser's diagonal."""
        params = self.checkpoint(k)
        if self.preconditioner is None:
            return linearize(self.apply_fn, params, trainable=self.trainable)
        held = self.preconditioner
        diagonal = held(k) if callable(held) else held[k]
        _check_same_tree(f"preconditioner {k}", diagonal, params)
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(diagonal)]
        if not all(bool((np.isfinite(leaf) & (leaf >= 0)).all()) for leaf in leaves):
            raise ValueError(
                f"Trajectory: preconditioner {k} must be finite and at least 0 in every entry: the diagonal "
                "of the optimiser's step, for Adam 1/(√v̂ + ε)."
            )
        model = linearize(self.apply_fn, params, trainable=self.trainable)
        rows = zip(jax.tree.leaves(diagonal), jax.tree.leaves(params), model.trainable, strict=True)
        scale = tuple(jnp.asarray(d).astype(p.dtype) for d, p, used in rows if used)
        return replace(model, scale=scale)

    def attribute(
        self, x: Inputs, y: Numbers, xq: Inputs, yq: Numbers | None = None, **options: Any
    ) -> Attribution:
        """Scores of every training point for every query; see `attribute_runs`."""
        return attribute_runs([self], x, y, xq, yq, **options)


def attribute_runs(
    trajectories: Sequence[Trajectory],
    x: Inputs,
    y: Numbers,
    xq: Inputs,
    yq: Numbers | None = None,
    *,
    loss: AbstractLoss | None = None,
    of: str | Callable[[Array, Array], Array] = "loss",
    question: str = "subset",
    probes: str | int | Probes | None = "auto",
    method: str = "outputs",
    leverage: bool = False,
    combine: str = "shrunk",
    rank: int = PROJECTED_RANK,
    tokens: bool = False,
    folder: AnyPath | None = None,
    worker: tuple[int, int] | None = None,
    mesh: Mesh | Sequence[Device] | None = None,
    progress: bool | ProgressFn = True,
) -> Attribution:
    """Scores of a network's training points from the checkpoints of one or several runs.

    There is one kernel at a time: memory holds one system and its Cholesky factor. With `m` probes these
    are `2(n·m)²` numbers, in the exact form `2(n·c)²`.

    **Arguments:**

    - `trajectories`: one per run; more runs give better scores.
    - `x`, `y`: the training set, in the order of the scores; `xq`, `yq`: queries.
    - `loss`: the loss of training; by default softmax cross-entropy, and `TokenCrossEntropy` if the
      network returns `(n, T, V)`.
    - `of`: what is measured, as in `Fitted.attribute`.
    - `question`: `"subset"` gives scores to be summed over a subset of points: the sums rank subsets by
      how much leaving them out changes a newly trained network. These scores are means over checkpoints.
      `"point"` is what
      leaving out one point does to these very runs, in the unit of the measured quantity; it goes
      backwards through the checkpoints, and the last checkpoint must be the end of training. The best
      scores for one question are not the best for the other. `kappa`, `combine`, `leverage`, `method`,
      `worker` and `mesh` belong to `"subset"`.
    - `probes`: how many and which directions of each point's outputs are kept: `LeadingProbes(m)`,
      `RandomProbes(m, seed)`, a number (leading ones up to 64 outputs, else random ones), or `None` for
      all of them, which is exact. `"auto"` is exact if the factor fits in memory and would take at most
      a second per checkpoint at the rates of `plan`; otherwise it takes three probes, or as many as fit.
      The notes of the result say what was chosen and left out, and how much the draw of random probes
      matters.
    - `method`: `"outputs"` or `"projected"`. The latter projects gradients at random to `rank` numbers, so
      the system has size `rank` whatever `n` is. It needs no probes, except for sequences: there it takes
      random probes too, and each costs only its backward passes.
    - `leverage`: leave-one-out in closed form instead of first order, at twice the cost.
    - `combine`: `"mean"` of all checkpoints and runs, or `"shrunk"`, which draws entries towards zero if
      checkpoints and runs disagree on them. Entries on which they disagree may be due to the random
      start of the network; see `shrunk` in this module.
    - `tokens`: for sequences, also the part of every training token, `result.tokens` of shape `(q, n, T)`:
      one forward derivative for each pair of query and sequence.
    - `folder`: where scores of finished checkpoints are kept; a killed run continues from there with
      the same result, bit for bit.
    - `worker`: `(i, N)` scores the share `i` of `N`, counted from 0: every `N`-th checkpoint, into a
      `folder` that all shares have in common. The result is the mean of that share. The same call
      without `worker` then checks and combines all of them, and scores what is missing.
    - `mesh`: devices (or a `jax.sharding.Mesh`) that share the rows of the system and of its factor. Under
      `jax.distributed`, call this in every process with the same data.

    **Returns:** `Attribution`, without a unit unless `question="point"`; positive means that leaving the
    point out raises the query's loss.
    """
    start = time.perf_counter()
    runs = list(trajectories)
    if not runs or not all(isinstance(run, Trajectory) for run in runs):
        raise TypeError("attribute_runs: give one Trajectory or more in a list.")
    if method not in METHODS:
        raise ValueError(f"Trajectory: method must be one of {', '.join(METHODS)}, got {method!r}.")
    if combine not in COMBINE:
        raise ValueError(
            f"Trajectory: combine must be one of {', '.join(COMBINE)}, got {combine!r}."
        )
    check_choice("Trajectory: question", question, QUESTIONS)
    devices = None if mesh is None else as_mesh(mesh)
    if question == "point":
        check_point(method, leverage, tokens, worker, devices)
    if devices is not None:
        check_mesh(folder, method, devices)
    runs, loss = as_sequences(runs, lambda: runs[0].checkpoint(0), x, y, xq, yq, loss)
    data = check_data(runs[0], x, y, xq, yq, loss, of)
    use, why = probes_of(probes, data, loss, method, leverage, tokens, devices)
    options = Options(loss, method, use, leverage, combine, rank, devices, tokens, question)
    if question == "point":
        if isinstance(loss, TokenCrossEntropy):
            raise ValueError(
                'Trajectory: question="point" is not available for sequences of tokens.'
            )
        pieces = Pieces(folder, fingerprint(data, options))
        values, beside = scores_of_points(runs, data, loss, use, pieces, _digest_run, progress)
        seconds = time.perf_counter() - start
        return result_of(values, runs, data, options, why, beside, seconds)
    every = [(r, k) for r, run in enumerate(runs) for k in range(run.num_checkpoints)]
    work = _share(every, worker, folder)
    pieces = Pieces(folder, fingerprint(data, options))
    sums, beside, count = None, [], len(work)
    with Ticker(count, "checkpoints", progress) as ticker:
        for r, k in work:
            run = runs[r]
            piece = pieces.get(
                f"run-{r:03d}-checkpoint-{k:03d}",
                lambda run=run, r=r, k=k: _normalised(run, r, k, data, options),
                lambda run=run, k=k: _digest_run(run, k),
            )
            sums, said = _added(sums, jnp.asarray(piece), data.x.shape[0])
            beside.append(np.asarray(said, float))
            ticker.tick()
    assert sums is not None
    mean, squares, parts = (np.asarray(a, float) / count for a in sums)
    values = mean
    if combine == "shrunk":
        values = shrunk(mean, squares - mean**2, INDEPENDENT * len(runs))
    seconds = time.perf_counter() - start
    result = result_of(values, runs, data, options, why, np.mean(beside, axis=(0, 1)), seconds)
    if tokens:
        result = replace(result, tokens=token_shares(parts, mean, values))
    if worker is None:
        return result
    said = (
        f"share {worker[0]} of {worker[1]}: {count} checkpoints; call without worker to combine all"
    )
    return replace(result, notes=(*result.notes, said))


def _share(
    work: list[tuple[int, int]], worker: tuple[int, int] | None, folder: AnyPath | None
) -> list[tuple[int, int]]:
    """The runs and checkpoints of one worker, or all of them."""
    if worker is None:
        return work
    number, shares = check_worker("Trajectory", worker)
    if folder is None:
        raise ValueError(
            "Trajectory: worker=(i, N) needs folder=..., where all shares leave their scores."
        )
    if shares > len(work):
        raise ValueError(
            f"Trajectory: {shares} workers for {len(work)} checkpoints leave some without any. Take at "
            f"most {len(work)}."
        )
    return work[number::shares]


def shrunk(mean: np.ndarray, variance: np.ndarray, independent: float) -> np.ndarray:
    """`m·m²/(m² + v/k)`: the mean of `k` noisy values times the share of its square that is not noise.

    Scores of other checkpoints and runs differ by the draw of the network; a point's true effect stays.
    """
    square, noise = mean**2, np.maximum(variance, 0) / independent
    return mean * square / np.where(square > 0, square + noise, 1)


BESIDE = 2
"""Columns before the scores of a checkpoint: what probes left out, and how far two halves of them agree."""


@partial(jit, static_argnames="n")
def _added(sums: Any, piece: Array, n: int) -> tuple[tuple[Array, Array, Array], Array]:
    """Sums of scores, of their squares and of the parts of tokens, on the device; and the columns that
    describe the probes."""
    scores = piece[:, BESIDE : BESIDE + n]
    all_three = scores, scores**2, piece[:, BESIDE + n :]
    sums = all_three if sums is None else jax.tree.map(jnp.add, sums, all_three)
    return sums, piece[:, :BESIDE]


def _normalised(run: Trajectory, r: int, k: int, data: Data, options: Options) -> Array:
    """`S_t` with root mean square one for every query, after columns with numbers that describe its
    probes."""
    key = key_of(options.probes, r, k)
    given = (run.model(k).reading(data.form), data.x, data.targets, data.xq, data.quantity)
    how: dict[str, Any] = {"loss": options.loss, "ridge": run.ridge(k), "key": key}
    how |= {"probes": options.probes, "leverage": options.leverage}
    if options.mesh is not None:
        scored = mesh_scores(*given, mesh=options.mesh, **how)
    else:
        projected = options.rank if options.method == "projected" else None
        scored = checkpoint_scores(*given, projected=projected, tokens=options.tokens, **how)
    name = f"Trajectory, checkpoint {k}"
    if not all_finite(name, scored.values):
        check_outputs_finite(name, given[0], data)
    check_finite(
        name,
        scored.values,
        hint="The factorisation failed: use float64 parameters, or checkpoints with fewer steps.",
    )
    return _one_size(*scored)


@jit
def _one_size(
    values: Array, left_out: Array | None, agreement: Array | None, tokens: Array | None
) -> Array:
    size = jnp.sqrt(jnp.mean(values**2, axis=1, keepdims=True))
    beside = [
        jnp.broadcast_to(jnp.asarray(one, values.dtype), values.shape[:1])[:, None]
        for one in (0 if left_out is None else left_out, 1 if agreement is None else agreement)
    ]
    if tokens is not None:  # behind the scores, scaled by the same number
        values = jnp.concatenate([values, tokens.reshape(values.shape[0], -1)], axis=1)
    # A query that no point moves at this checkpoint has nothing to add.
    return jnp.concatenate([*beside, values / jnp.where(size > 0, size, 1)], axis=1)


def check_checkpoint(k: int, params: PyTree, like: PyTree) -> None:
    """Raise unless the k-th checkpoint has the tree of the first and finite numbers."""
    _check_same_tree(f"checkpoint {k}", params, like)
    for path, leaf in jax.tree.leaves_with_path(params):
        array = np.asarray(leaf) if hasattr(leaf, "dtype") else None
        if array is not None and jnp.issubdtype(array.dtype, jnp.inexact):
            check_finite(
                f"Trajectory, checkpoint {k}, params{jax.tree_util.keystr(path)}",
                array,
                hint="Training diverged, or the file is damaged.",
            )


def _check_same_tree(name: str, params: PyTree, like: PyTree) -> None:
    if jax.tree.structure(params) != jax.tree.structure(like):
        raise ValueError(
            f"Trajectory: {name} has another tree, {jax.tree.structure(params)}, than the parameters, "
            f"{jax.tree.structure(like)}. Everything must belong to one network."
        )
    for (path, leaf), (_, other) in zip(
        jax.tree.leaves_with_path(params), jax.tree.leaves_with_path(like), strict=True
    ):
        if np.shape(leaf) != np.shape(other):
            raise ValueError(
                f"Trajectory: {name}, params{jax.tree_util.keystr(path)} has shape {np.shape(leaf)}, "
                f"expected {np.shape(other)}."
            )


def _digest_run(run: Trajectory, k: int) -> str:
    held = run.preconditioner
    diagonal = None if held is None else held(k) if callable(held) else held[k]
    return digest_of_all((run.checkpoint(k), diagonal)) + f" λ={run.ridge(k)!r}"
