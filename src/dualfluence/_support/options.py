"""Options of calls: checks of single numbers, names, flags, keys, functions and paths, and `progress`,
which reports the time left of work that takes more than two seconds."""

import operator
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from .checks import check_concrete, check_number
from .types import Numbers

ProgressFn = Callable[[int, int, str], None]
"""Called as `progress(done, total, label)`."""

QUIET_SECONDS = 2.0
REDRAW_SECONDS = 0.2


class Ticker:
    """Counts finished units of work and reports how much time is left.

    **Arguments:**

    - `total`: number of units.
    - `label`: what the work is, e.g. `"kernel tiles"`.
    - `progress`: `True` writes one line to standard error once the work has taken two seconds
      (only on a terminal), `False` is silent, a function is called after every unit.
    """

    def __init__(self, total: int, label: str, progress: bool | ProgressFn = True) -> None:
        self.total, self.label, self.done = total, label, 0
        self._callback = progress if callable(progress) else None
        self._draws = progress is True and sys.stderr.isatty()
        self._start = time.monotonic()
        self._drawn = 0.0

    def tick(self, units: int = 1) -> None:
        """Record `units` more finished units."""
        self.done += units
        if self._callback is not None:
            self._callback(self.done, self.total, self.label)
        now = time.monotonic()
        late = now - self._start > QUIET_SECONDS and now - self._drawn > REDRAW_SECONDS
        if self._draws and late:
            self._drawn = now
            left = (now - self._start) / self.done * (self.total - self.done)
            line = f"{self.label}: {self.done}/{self.total}, {left:.0f} s left"
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> "Ticker":
        return self

    def __exit__(self, *exc: object) -> None:
        if self._drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


T = TypeVar("T")

LARGEST_COUNT = 2**53
"""The largest count. A larger one must be a mistake, and products of such counts leave the range of
floats."""


def maybe(check: Callable[..., T], name: str, value: object, **options: object) -> T | None:
    """`None` for an option that was not given, else the result of `check`."""
    return None if value is None else check(name, value, **options)


def check_positive(name: str, value: Numbers, *, what: str = "number") -> float:
    """A positive finite number."""
    number = check_number(name, value)
    if not 0 < number < np.inf:
        raise ValueError(f"{name} must be a positive {what} below infinity, got {number}.")
    return number


def check_count(name: str, value: Any, *, least: int = 1, most: int = LARGEST_COUNT) -> int:
    """A whole number in `[least, most]`; NumPy's integers and arrays of one integer count."""
    if type(value) is not int:
        check_concrete(name, value)
        if isinstance(value, (bool, np.bool_)) or np.ma.isMaskedArray(value):
            value = repr(value)
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, at least {least}, got {value}.") from None
    if not least <= count <= most:
        limit = f", at least {least}" if count < least else f", at most {most}"
        raise ValueError(f"{name} must be a whole number{limit}, got {_short(count)}.")
    return count


def check_worker(what: str, worker: object) -> tuple[int, int]:
    """`(i, N)`: the share `i` of `N`, counted from zero."""
    if not isinstance(worker, (tuple, list)) or len(worker) != 2:
        raise TypeError(
            f"{what}: worker must be a pair (i, N), the share i of N counted from 0, got {worker!r}."
        )
    shares = check_count(f"{what}: number of workers", worker[1])
    if isinstance(worker[0], int) and not 0 <= worker[0] < shares:
        raise ValueError(
            f"{what}: worker (i, N) counts i from 0 to N − 1, got ({worker[0]}, {shares})."
        )
    return check_count(f"{what}: worker", worker[0], least=0, most=shares - 1), shares


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """The value, which must be one of these names."""
    if isinstance(value, str) and value in choices:
        return value
    want = " or ".join(map(repr, choices)) if len(choices) == 2 else f"one of {choices}"
    error = ValueError if isinstance(value, str) else TypeError
    raise error(f"{name} must be {want}, got {value!r}.")


def check_on_failure(what: str, value: object) -> None:
    """Raise unless `on_failure` is `"raise"` or `"report"`."""
    check_choice(f"{what}: on_failure", value, ("raise", "report"))


def check_flag(name: str, value: object) -> bool:
    """`True` or `False`; NumPy's booleans count too, other values do not."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {value!r}.")
    return bool(value)


def check_progress(what: str, value: object) -> None:
    """Raise unless `progress` is a flag or a function."""
    if not isinstance(value, bool) and not callable(value):
        raise TypeError(
            f"{what}: progress must be True, False or a function (done, total, label), got {value!r}."
        )


def check_function(name: str, value: object, form: str) -> None:
    """Raise unless `value` is a function (or an object that can be called); `form` describes its
    arguments."""
    if not callable(value) or isinstance(value, type):
        given = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
        raise TypeError(f"{name} must be a function {form}, got {given}.")


def check_instance(name: str, value: object, kinds: type | tuple[type, ...], example: str) -> None:
    """Raise unless `value` is an object of these classes, not one of the classes themselves."""
    if isinstance(value, kinds):
        return
    if isinstance(value, type) and issubclass(value, kinds):
        given = f"the class {value.__name__}. Make an object of it: {value.__name__}(...)"
    else:
        given = f"{value!r}" if isinstance(value, (str, int, float)) else type(value).__name__
    raise TypeError(f"{name} must be {example}, got {given}.")


def check_loss(what: str, loss: object, kind: type) -> None:
    """Raise unless `loss` is one of the library's."""
    if isinstance(loss, kind):
        return
    example = "a dualfluence loss such as SoftmaxCrossEntropy()"
    if not isinstance(loss, type):
        example += " (wrap your own convex function in Convex(fn))"
    check_instance(f"{what}: loss", loss, kind, example)


def check_solver(what: str, solver: object, kinds: tuple[type, ...]) -> None:
    """Raise unless `solver` is `None` or one of these."""
    if solver is not None and not isinstance(solver, kinds):
        raise TypeError(
            f"{what}: solver must be an object such as Auto(), CG() or Cholesky(), got {solver!r}."
        )


def check_key(name: str, key: Numbers) -> PRNGKeyArray:
    """A single random key: `jax.random.key(0)`, or one of `jax.random.PRNGKey`."""
    check_concrete(name, key)
    if isinstance(key, jax.Array):
        typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        if (typed and key.ndim == 0) or (key.dtype == jnp.uint32 and key.shape == (2,)):
            return key
    shape = f" of shape {np.shape(key)}" if hasattr(key, "dtype") else ""
    raise TypeError(
        f"{name} must be one random key, e.g. jax.random.key(0), got {type(key).__name__}{shape}."
    )


def check_path(name: str, path: object) -> Path:
    """A path that a file system can hold."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{name}: path must be a string or a Path, got {type(path).__name__}.")
    text = os.fspath(path)
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise ValueError(f"{name}: path must name a file or folder, got {text!r}.")
    return Path(text)


def _short(count: int) -> str:
    return str(count) if abs(count) <= LARGEST_COUNT else f"about 2**{count.bit_length() - 1}"


class Clock:
    """Wall time until a result is ready."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def stop(self, result: Any) -> float:
        jax.block_until_ready(result)
        return time.perf_counter() - self._start
