"""The record of an optimiser, in the form that `attribution.Trajectory` takes."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

Moments = dict[tuple[str, ...], Any]
"""`v` of every parameter, by the names on the way to it."""


def sgd_record(
    optimizer: Any, steps: Any, *, momentum: float | None = None, weight_decay: float | None = None
) -> dict[str, Any]:
    """`steps`, `learning_rate`, `momentum` and weight decay of an SGD run, for `Trajectory(..., **record)`.

    The learning rate of each checkpoint is the mean over the steps up to it.

    **Arguments:**

    - `optimizer`: an Optax schedule (a function of the step, from 0), a constant, a sequence with the
      learning rate of every step (as `get_last_lr()` of a PyTorch scheduler returns it), or a
      `torch.optim.SGD` with a constant rate, from which momentum and weight decay are read too.
    - `steps`: optimiser steps before each checkpoint.
    - `momentum`, `weight_decay`: the values used in training, 0 by default; not needed with a PyTorch
      optimiser.
    """
    counts, read = [int(step) for step in steps], (0.0, 0.0)
    if hasattr(optimizer, "param_groups"):
        rate, *read = _from_torch(optimizer)
        optimizer = rate
    return {
        "steps": counts,
        "learning_rate": _mean_rates("sgd_record", optimizer, counts),
        "momentum": float(read[0] if momentum is None else momentum),
        "weight_decay": float(read[1] if weight_decay is None else weight_decay),
    }


def adam_record(
    states: Sequence[Any],
    params: PyTree,
    *,
    learning_rate: Any = None,
    b2: float | None = None,
    eps: float | None = None,
    weight_decay: float | None = None,
    names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """What a `Trajectory` needs of a run of Adam or AdamW: steps, rates, `preconditioner`, weight decay.

    The preconditioner is `1/(√v̂ + ε)` with the `v̂` that the optimiser had at each checkpoint.

    **Arguments:**

    - `states`: what the optimiser kept at each checkpoint: Optax's state, or a copy of
      `torch_optimizer.state_dict()`.
    - `params`: parameters as the model takes them (`adapted.params`), for their tree.
    - `learning_rate`: as in `sgd_record`. For PyTorch it is read from the state if it is constant.
    - `b2`, `eps`, `weight_decay`: the values used in training. For PyTorch they are read from the state.
      Optax does not keep them: give every value that differs from `b2=0.999`, `eps=1e-8` and
      `weight_decay=0`. For `optax.adamw` with its default decay, give `weight_decay=1e-4`.
    - `names`: for PyTorch, the names of the optimiser's parameters in its order,
      `[name for name, _ in model.named_parameters()]`.
    """
    states = list(states)
    if not states:
        raise ValueError("adam_record: give the optimiser's state at one checkpoint or more.")
    torch = all(isinstance(s, dict) and {"state", "param_groups"} <= set(s) for s in states)
    if torch:
        read = _torch_options(states[-1])
        learning_rate = read["lr"] if learning_rate is None else learning_rate
        b2, eps = read["betas"][1] if b2 is None else b2, read["eps"] if eps is None else eps
        weight_decay = read["weight_decay"] if weight_decay is None else weight_decay
        found = [_torch_moments(state, names) for state in states]
    else:
        found = [_optax_moments(state) for state in states]
    b2, eps = 0.999 if b2 is None else b2, 1e-8 if eps is None else eps
    if learning_rate is None:
        raise ValueError(
            "adam_record: learning_rate is needed: the schedule, a constant, or the rate of every step."
        )
    steps = [count for count, _ in found]
    return {
        "steps": steps,
        "learning_rate": _mean_rates("adam_record", learning_rate, steps),
        "preconditioner": [_diagonal(count, v, params, b2, eps) for count, v in found],
        "weight_decay": float(weight_decay or 0.0),
    }


def _diagonal(count: int, moments: Moments, params: PyTree, b2: float, eps: float) -> PyTree:
    """`1/(√v̂ + ε)` in the tree of `params`; leaves that the optimiser does not know are ones."""
    used: set[tuple[str, ...]] = set()

    def leaf(path: Any, value: Any) -> Any:
        own = _names(path)
        key = next((own[k:] for k in range(len(own)) if own[k:] in moments), None)
        if key is None:
            return jnp.ones_like(value) if hasattr(value, "dtype") else value
        v = np.asarray(moments[key], float)
        if v.shape != np.shape(value):
            raise ValueError(
                f"adam_record: {'/'.join(own)} has shape {np.shape(value)}, the optimiser's moment {v.shape}."
            )
        used.add(key)
        return jnp.asarray(1 / (np.sqrt(v / (1 - b2**count)) + eps), value.dtype)

    made = jax.tree.map_with_path(leaf, params)
    if left := sorted("/".join(key) for key in set(moments) - used):
        raise ValueError(
            f"adam_record: the optimiser has moments of {', '.join(left[:5])}, which params does not "
            "have. Give the parameters that were trained, in the tree that the model takes."
        )
    return made


def _names(path: Any) -> tuple[str, ...]:
    """A path in a tree as names; nodes that only wrap an array get no name."""
    keys = (getattr(k, "key", getattr(k, "name", getattr(k, "idx", k))) for k in path)
    return tuple(str(key) for key in keys if str(key) not in ("value", "raw_value"))


def _optax_moments(state: Any) -> tuple[int, Moments]:
    """Steps and `v` of every Adam in an Optax state."""
    found = list(_adams(state))
    if not found:
        raise ValueError(
            "adam_record: no state of Adam found: expected what optax.adam(...).init(params) and its updates "
            f"return, with `count` and `nu`, or a state_dict() of PyTorch's, got {type(state).__name__}."
        )
    counts = {int(each.count) for each in found}
    if len(counts) > 1 or counts == {0}:
        raise ValueError(
            "adam_record: all parameters must have the same step count, at least 1; got "
            f"{sorted(counts)}."
        )
    moments = {_names(path): v for each in found for path, v in jax.tree.leaves_with_path(each.nu)}
    return counts.pop(), moments


def _adams(state: Any) -> Iterator[Any]:
    if hasattr(state, "nu") and hasattr(state, "count"):
        yield state
    elif isinstance(state, dict):
        for each in state.values():
            yield from _adams(each)
    elif isinstance(state, (tuple, list)):
        for each in state:
            yield from _adams(each)


def _torch_options(state: dict[str, Any]) -> dict[str, Any]:
    groups = state["param_groups"]
    if any("betas" not in group or "eps" not in group for group in groups):
        raise ValueError("adam_record: expected the state_dict() of torch.optim.Adam or AdamW.")
    keys = ("lr", "betas", "eps", "weight_decay")
    found = {tuple(group[key] for key in keys) for group in groups}
    if len(found) > 1 or any(group.get("amsgrad") for group in groups):
        raise ValueError(
            "adam_record: expected one set of options for all parameters, without amsgrad, got "
            f"{sorted(found)} as {keys}."
        )
    if any(g["weight_decay"] and g.get("decoupled_weight_decay") is False for g in groups):
        raise ValueError(
            "adam_record: torch.optim.Adam adds its weight decay to the gradient, which no "
            "ridge describes. "
            "Train with AdamW."
        )
    if any(g.get("initial_lr", g["lr"]) != g["lr"] for g in groups):
        raise ValueError(
            "adam_record: a scheduler has changed the learning rate. Give learning_rate as a list with the "
            "rate of every step."
        )
    return dict(zip(keys, found.pop(), strict=True))


def _torch_moments(state: dict[str, Any], names: Sequence[str] | None) -> tuple[int, Moments]:
    order = [index for group in state["param_groups"] for index in group["params"]]
    known = [name for group in state["param_groups"] for name in group.get("param_names", [])]
    called = list(names) if names is not None else known
    if len(called) != len(order):
        raise ValueError(
            f"adam_record: names must be those of the optimiser's {len(order)} parameters in its order, got "
            f"{len(called)}. Give names=[name for name, _ in model.named_parameters()]."
        )
    held = state["state"]
    counts = {int(held[index]["step"]) for index in order if index in held}
    if len(counts) != 1:
        raise ValueError(
            f"adam_record: all parameters must have the same step count, got {sorted(counts)}."
        )
    moments = {
        (name,): held[index]["exp_avg_sq"].detach().cpu().numpy()
        for name, index in zip(called, order, strict=True)
        if index in held
    }
    return counts.pop(), moments


def _mean_rates(what: str, source: Any, counts: list[int]) -> list[float]:
    """The mean learning rate over the steps up to each checkpoint."""
    if not callable(source) and np.ndim(source) == 0:
        return [float(source)] * len(counts)
    rates = _rates(what, source, max(counts, default=0))
    return [float(np.mean(rates[:count])) for count in counts]


def _rates(what: str, source: Any, last: int) -> np.ndarray:
    """The learning rate of each of the first `last` steps."""
    if callable(source):
        schedule: Any = source
        return np.asarray([float(schedule(step)) for step in range(last)])
    rates = np.asarray(source, float)
    if rates.ndim != 1 or rates.size < last:
        raise ValueError(
            f"{what}: expected the learning rate of each of {last} steps, got shape {rates.shape}."
        )
    return rates


def _from_torch(optimizer: Any) -> tuple[float, float, float]:
    """Learning rate, momentum and weight decay."""
    groups = optimizer.param_groups
    if any("momentum" not in group for group in groups):
        raise ValueError(
            f"sgd_record: {type(optimizer).__name__} is not SGD. For Adam and AdamW call "
            "adam_record."
        )
    keys = ("lr", "momentum", "weight_decay", "dampening")
    found = {tuple(float(group.get(key, 0.0)) for key in keys) for group in groups}
    if len(found) > 1 or any(dampening for *_, dampening in found):
        raise ValueError(
            "sgd_record: expected one learning rate, momentum and weight decay for all parameters and no "
            f"dampening, got {sorted(found)} as {keys}."
        )
    if any(g.get("initial_lr", g["lr"]) != g["lr"] for g in groups):
        raise ValueError(
            "sgd_record: a scheduler has changed the learning rate of this optimiser. Give the rate of "
            "every step in a sequence, and momentum=..."
        )
    rate, momentum, weight_decay, _ = found.pop()
    return rate, momentum, weight_decay
