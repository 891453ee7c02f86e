"""Checks of what users hand in. Each message says what was expected, what came and what to try."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

OVERFLOW = "The model overflows at these queries: scale them as the training features were."


def check_finite(name: str, value: Any, *, hint: str = "Clean or drop these points first.") -> None:
    """Raise if a floating array holds NaN or inf, naming the first bad place."""
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    xp: Any = jnp if isinstance(array, jax.Array) else np
    if not jnp.issubdtype(array.dtype, jnp.inexact) or bool(xp.isfinite(array).all()):
        return
    bad = np.argwhere(~np.isfinite(np.asarray(array)))
    first = tuple(int(i) for i in bad[0])
    raise ValueError(
        f"{name}: every entry must be finite, got {np.asarray(array)[first]} at index {first} "
        f"({len(bad)} bad of {array.size}). {hint}"
    )


def check_ridge(ridge: float) -> float:
    """Raise unless the ridge λ is a positive finite number."""
    value = float(ridge)
    if not (np.isfinite(value) and value > 0):
        raise ValueError(
            f"ridge: λ must be a positive finite number, got {value}. The dual equation divides "
            "by λ and its certificate rests on λ-strong convexity; try 1e-2."
        )
    return value


def check_indices(name: str, indices: Any) -> np.ndarray:
    """Integer positions as a sorted-as-given NumPy vector: one axis, not empty, no repeats."""
    array = np.asarray(indices)
    if array.ndim != 1:
        raise ValueError(f"{name}: indices must be one axis of positions, got shape {array.shape}.")
    if array.size == 0:
        raise ValueError(f"{name}: indices are empty; give at least one training position.")
    if array.dtype == bool:
        raise TypeError(
            f"{name}: indices must be integers, got a boolean mask. Use np.flatnonzero(mask)."
        )
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name}: indices must be integers, got dtype {array.dtype}.")
    unique, counts = np.unique(array, return_counts=True)
    if unique.size != array.size:
        again = int(unique[counts > 1][0])
        raise ValueError(f"{name}: indices must not repeat, {again} comes {counts.max()} times.")
    return array.astype(np.int64)


def check_range(name: str, indices: np.ndarray, num_points: int) -> None:
    """Raise unless every index lies in `[0, num_points)`."""
    bad = indices[(indices < 0) | (indices >= num_points)]
    if bad.size:
        raise ValueError(
            f"{name}: indices must be in [0, {num_points}), got {int(bad[0])}. They index the "
            "training set, not the queries."
        )


def check_rows(name: str, value: Any, num_rows: int, what: str) -> None:
    """Raise unless axis 0 of `value` has `num_rows` entries, one per `what`."""
    if value.ndim == 0 or value.shape[0] != num_rows:
        raise ValueError(
            f"{name}: expected {num_rows} rows, one per {what}, got shape {tuple(value.shape)}."
        )


def check_numbers(name: str, value: Any) -> None:
    """Raise if `value` holds strings or other things that are no numbers."""
    array = value if hasattr(value, "dtype") else np.asarray(value)
    if not (jnp.issubdtype(array.dtype, jnp.number) or array.dtype == bool):
        raise TypeError(
            f"{name}: expected numbers, got dtype {array.dtype}. Encode names as class indices or "
            "one-hot rows first."
        )


def as_dtype(name: str, value: Any, dtype: Any) -> jax.Array:
    """`value` in the dtype of what was trained on; an error if integers cannot hold it."""
    check_numbers(name, value)
    array = jnp.asarray(value)
    if jnp.issubdtype(array.dtype, jnp.complexfloating) and array.dtype != dtype:
        raise TypeError(f"{name}: expected real numbers, got {array.dtype}.")
    cast = array.astype(dtype)
    if not jnp.issubdtype(dtype, jnp.inexact) and not bool((cast == array).all()):
        raise ValueError(
            f"{name}: the model was fitted on {jnp.dtype(dtype)}, which cannot hold these {array.dtype} "
            "values. Fit it on floating-point numbers, e.g. x.astype(float)."
        )
    return cast


def check_fraction(name: str, value: float | None) -> None:
    """Raise unless `value` is `None` or a number between 0 and 1."""
    if value is not None and not 0 < value < 1:
        raise ValueError(f"{name} must lie between 0 and 1, got {value}.")


def check_solver(what: str, solver: Any, kinds: tuple[type, ...]) -> None:
    """Raise unless `solver` is `None` or one of these."""
    if solver is not None and not isinstance(solver, kinds):
        raise TypeError(
            f"{what}: solver must be an object such as Auto(), CG() or Cholesky(), got {solver!r}."
        )


def check_queries(xq: Any, x: jax.Array) -> jax.Array:
    """Queries as an array with the trailing shape and dtype of the training features `x`."""
    array = as_dtype("queries", xq, x.dtype)
    if array.ndim == 0 or array.shape[1:] != x.shape[1:]:
        want = ", ".join(("q", *map(str, x.shape[1:])))
        raise ValueError(f"queries: expected shape ({want}), got {tuple(array.shape)}.")
    if array.shape[0] == 0:
        raise ValueError("queries: need at least one row, got none.")
    check_finite("queries", array)
    return array
