r"""Ways to forget on networks that were trained by SGD, for comparison by `measures`.

Networks of one shape and many seeds train in one program: parameters, keys and weights are stacked along
a leading axis. The objective is that of `from_trained` with `θ₀ = 0`, as weight decay has it:
$\frac{1}{|D|}\sum_{i\in D}\ell_i + \frac{\lambda}{2}\|\theta\|^2$.
"""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree

from dualfluence import primal
from dualfluence._support.compile import filter_jit
from dualfluence.dual._fidelity import FidelityWarning
from dualfluence.fitted._fitted import Fitted
from dualfluence.fitted._from_trained import from_trained
from dualfluence.fitted._update import Update
from dualfluence.kernels._linearized import Linearized, linearize
from dualfluence.losses import AbstractLoss
from dualfluence.metrics import distance
from dualfluence.problem._edits import Remove

from .measures import Judged, Setting

STEPS = {"ours, one step": 1, "ours, two steps": 2}

READ_OUT = "ours, linear read-out"
"""Outputs of the linearisation after two steps, in place of the network at the new parameters."""

PARAMETER, DAMPED = "parameter space", "parameter space, exact Hessian"

METHODS = (*STEPS, READ_OUT, PARAMETER, DAMPED, "gradient ascent", "fine-tuning", "no unlearning")

ONE_BY_ONE = (*STEPS, READ_OUT, PARAMETER, DAMPED)
"""Methods that take one network at a time."""


@dataclass(frozen=True, eq=False)
class Networks:
    """A network shape, its training set and its training.

    - `apply_fn`: outputs `(n, c)` from parameters and features.
    - `x`, `y`: all training points; forgotten ones get weight zero.
    - `ridge`: `λ`, the weight decay.
    - `epochs`, `batch`, `rate`, `momentum`: of SGD, whose rate falls to zero along a cosine.
    """

    apply_fn: Callable[..., Any]
    x: Any
    y: np.ndarray
    loss: AbstractLoss
    ridge: float
    epochs: int = 200
    batch: int = 30
    rate: float = 0.1
    momentum: float = 0.9

    def weights(self, gone: np.ndarray | None = None) -> Float[np.ndarray, " n"]:
        """One for each point that stays."""
        weights = np.ones(len(self.y), np.float32)
        weights[[] if gone is None else gone] = 0
        return weights


def train(
    nets: Networks, params: PyTree, keys: Key[Array, " s"], weights: Float[np.ndarray, "*s n"]
) -> PyTree:
    """Stacked networks after SGD from stacked `params`, `weights` shared or one row for each network."""
    rows = jnp.broadcast_to(jnp.asarray(weights), (keys.shape[0], len(nets.y)))
    dtype = jax.tree.leaves(params)[0].dtype
    x = jnp.asarray(nets.x, dtype)
    outputs = jax.eval_shape(nets.apply_fn, jax.tree.map(lambda leaf: leaf[0], params), x)
    targets = nets.loss.prepare_targets(jnp.asarray(nets.y), outputs.shape[1], dtype)
    batch = min(nets.batch, len(nets.y))
    rate, ridge, momentum = jnp.asarray([nets.rate, nets.ridge, nets.momentum], dtype)
    one = _Sgd(nets.apply_fn, nets.loss, nets.epochs, batch, rate, ridge, momentum, x, targets)
    return _train(one, params, keys, rows)


@filter_jit
def _train(one: "_Sgd", params: PyTree, keys: Key[Array, " s"], weights: Array) -> PyTree:
    return jax.vmap(one)(params, keys, weights)


class _Sgd(eqx.Module):
    """SGD of one network. Batches have all points; the mean over those that stay is kept in expectation."""

    apply_fn: Callable[..., Any] = eqx.field(static=True)
    loss: AbstractLoss
    epochs: int = eqx.field(static=True)
    batch: int = eqx.field(static=True)
    rate: Float[Array, ""]
    ridge: Float[Array, ""]
    momentum: Float[Array, ""]
    x: Array
    targets: Array

    def __call__(self, params: PyTree, key: Key[Array, ""], weights: Float[Array, " n"]) -> PyTree:
        """The parameters after training from `params`."""
        num_points = self.x.shape[0]
        batches = num_points // self.batch
        weights = (weights * num_points / jnp.sum(weights)).astype(self.x.dtype)

        def objective(p: PyTree, rows: Array) -> Array:
            values = self.loss.value(self.apply_fn(p, self.x[rows]), self.targets[rows])
            squares = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(p))
            return jnp.mean(weights[rows] * values) + 0.5 * self.ridge * squares

        def step(carry: PyTree, what: tuple[Array, Array]) -> tuple[PyTree, None]:
            (p, velocity), (rows, now) = carry, what
            slope = jax.grad(objective)(p, rows)
            velocity = jax.tree.map(lambda v, g: self.momentum * v + g, velocity, slope)
            return (jax.tree.map(lambda a, v: a - now * v, p, velocity), velocity), None

        def epoch(carry: PyTree, what: tuple[Array, Array]) -> tuple[PyTree, None]:
            order = jax.random.permutation(what[0], num_points)[: batches * self.batch]
            return jax.lax.scan(step, carry, (order.reshape(batches, self.batch), what[1]))

        done = jnp.arange(self.epochs * batches) / (self.epochs * batches)
        rates = (0.5 * self.rate * (1 + jnp.cos(jnp.pi * done))).astype(self.x.dtype)
        plan = (jax.random.split(key, self.epochs), rates.reshape(self.epochs, batches))
        start = (params, jax.tree.map(jnp.zeros_like, params))
        return jax.lax.scan(epoch, start, plan)[0][0]


def forget_by_gradients(
    nets: Networks,
    params: PyTree,
    keys: Key[Array, " s"],
    gone: np.ndarray,
    method: str,
    rate: float,
) -> PyTree:
    """Stacked networks after SGD on the retained points (a tenth of the training), or after ascent on
    the forgotten ones.

    Ascent takes ten steps of the whole forgotten set, without ridge or momentum.
    """
    if method == "fine-tuning":
        short = replace(nets, epochs=max(1, nets.epochs // 10), rate=rate)
        return train(short, params, keys, nets.weights(gone))
    ascent = {"epochs": 10, "batch": len(gone), "rate": -rate, "ridge": 0.0, "momentum": 0.0}
    lost = replace(nets, x=np.asarray(nets.x)[gone], y=nets.y[gone], **ascent)
    return train(lost, params, keys, lost.weights())


class Forgot(NamedTuple):
    """One network after a method: parameters, outputs at training and test points, seconds, facts."""

    params: PyTree
    train: Float[np.ndarray, "n c"]
    test: Float[np.ndarray, "q c"]
    seconds: float
    facts: dict[str, float]


def forget_one(
    nets: Networks, params: PyTree, setting: Setting, damping: float = 0.0
) -> dict[str, Forgot]:
    """One network after each method of `ONE_BY_ONE`.

    Neither our method nor parameter space has a certificate here, because the network is not linear.
    `damping` is added to the exact Hessian, which is indefinite without it.
    """
    start, model = time.perf_counter(), _around_zero(nets, params)
    with warnings.catch_warnings():
        # What the warning would say is returned as numbers.
        warnings.simplefilter("ignore", FidelityWarning)
        options: dict[str, Any] = {"loss": nets.loss, "ridge": nets.ridge, "progress": False}
        fitted = from_trained(model, params, nets.x, nets.y, **options)
    taken = time.perf_counter() - start
    edited = {name: _timed(lambda k=k: _edited(fitted, setting, k)) for name, k in STEPS.items()}
    found = {
        name: _by_ours(nets, fitted, update, setting, taken + seconds)
        for name, (update, seconds) in edited.items()
    }
    update, seconds = edited["ours, two steps"]
    found[READ_OUT] = _by_read_out(nets, update, setting, taken + seconds)
    found[PARAMETER] = _in_parameter_space(nets, params, setting, primal.CG(rtol=1e-6))
    found[DAMPED] = _in_parameter_space(nets, params, setting, _exact(damping))
    return found


def _edited(fitted: Fitted, setting: Setting, steps: int) -> Update[Fitted]:
    return fitted.edit(Remove(setting.forgotten), steps=steps, progress=False)


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


def _by_ours(
    nets: Networks, fitted: Fitted, edited: Update[Fitted], setting: Setting, taken: float
) -> Forgot:
    new, seconds = _timed(lambda: jax.block_until_ready(edited.params()))
    fidelity: Any = fitted.fidelity
    # Not the gap of outputs: the tangent at θ₀ = 0, where nothing moves, plays no part here.
    facts = {"gradient_norm": fidelity.gradient_norm, "parameter_gap": fidelity.parameter_gap}
    return Forgot(new, *outputs_of(nets, new, setting), taken + seconds, facts)


def _by_read_out(nets: Networks, edited: Update[Fitted], setting: Setting, taken: float) -> Forgot:
    def read() -> list[np.ndarray]:
        after = edited.commit()
        return [np.asarray(after.predict(x)) for x in (nets.x, setting.x_test)]

    (train, test), seconds = _timed(read)
    return Forgot(edited.params(), train, test, taken + seconds, {})


def _in_parameter_space(
    nets: Networks, params: PyTree, setting: Setting, solver: primal.CG
) -> Forgot:
    start, gone = time.perf_counter(), Remove(setting.forgotten)
    options: dict[str, Any] = {"loss": nets.loss, "ridge": nets.ridge, "solver": solver}
    options |= {"linearised": False, "on_failure": "report"}
    model = _around_zero(nets, params)
    update = primal.influence(model, params, nets.x, nets.y, gone, **options)
    new = jax.block_until_ready(update.params())
    seconds, facts = time.perf_counter() - start, {"converged": float(update.stats.converged)}
    return Forgot(new, *outputs_of(nets, new, setting), seconds, facts)


def _exact(damping: float) -> primal.CG:
    return primal.CG(hessian="exact", rtol=1e-6, damping=damping)


def _around_zero(nets: Networks, params: PyTree) -> Linearized:
    """Weight decay pulls towards zero."""
    return linearize(nets.apply_fn, jax.tree.map(jnp.zeros_like, params))


def outputs_of(
    nets: Networks, params: PyTree, setting: Setting
) -> tuple[Float[np.ndarray, "n c"], Float[np.ndarray, "q c"]]:
    """The network's outputs at training and test points."""
    train, test = (np.asarray(_apply(nets.apply_fn, params, x)) for x in (nets.x, setting.x_test))
    return train, test


@filter_jit
def _apply(apply_fn: Callable[..., Any], params: PyTree, x: Any) -> Float[Array, "n c"]:
    return apply_fn(params, x)


def judge(
    nets: Networks,
    found: list[PyTree],
    before: list[PyTree],
    exact: list[PyTree],
    setting: Setting,
    seconds: float = 0.0,
) -> list[Judged]:
    """Networks after a method, compared with `exact`: networks retrained with the same starts and
    orders of batches."""
    return [
        Judged(*outputs_of(nets, new, setting), _relative(new, old, want), seconds)
        for new, old, want in zip(found, before, exact, strict=True)
    ]


def _relative(new: PyTree, old: PyTree, want: PyTree) -> float:
    return distance(new, want) / distance(old, want)


def judge_hessian(
    nets: Networks,
    before: list[PyTree],
    exact: list[PyTree],
    setting: Setting,
    damping: float,
) -> list[Judged]:
    """Networks after a step with the exact Hessian, for the choice of its damping."""
    steps = [_in_parameter_space(nets, old, setting, _exact(damping)) for old in before]
    return judge(nets, [step.params for step in steps], before, exact, setting)


def forget_one_by_one(
    nets: Networks,
    before: list[PyTree],
    exact: list[PyTree],
    setting: Setting,
    damping: float = 0.0,
) -> tuple[dict[str, list[Judged]], dict[str, dict[str, float]]]:
    """Networks after each method of `ONE_BY_ONE`, and for each method the medians of its facts."""
    runs = [forget_one(nets, params, setting, damping) for params in before]
    judged = {
        name: [
            Judged(
                run[name].train,
                run[name].test,
                _relative(run[name].params, old, want),
                run[name].seconds,
            )
            for run, old, want in zip(runs, before, exact, strict=True)
        ]
        for name in ONE_BY_ONE
    }
    facts = {
        name: {
            k: float(np.median([run[name].facts[k] for run in runs])) for k in runs[0][name].facts
        }
        for name in ONE_BY_ONE
    }
    return judged, facts


def stack(trees: list[PyTree]) -> PyTree:
    """Many trees as one tree with a leading axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def unstack(tree: PyTree) -> list[PyTree]:
    """The trees of one tree with a leading axis."""
    count = jax.tree.leaves(tree)[0].shape[0]
    return [jax.tree.map(lambda leaf, i=i: leaf[i], tree) for i in range(count)]
