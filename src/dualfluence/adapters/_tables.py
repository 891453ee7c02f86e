"""Tables, lists and labels as people have them: to arrays, or an error that names the column."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float

from .._support.checks import as_array, check_finite

MOST_NAMES = 100
"""Distinct names in a column of a table that become columns of their own."""

MOST_DENSE = 5e7
"""Numbers up to which a sparse matrix is spelled out: 400 MB."""


def is_table(x: Any) -> bool:
    """Whether `x` is a data frame: named columns that turn into arrays."""
    return hasattr(x, "columns") and hasattr(x, "to_numpy")


def is_text(x: Any) -> bool:
    """Whether `x` holds strings."""
    if is_table(x) or hasattr(x, "toarray"):
        return False
    array = x if hasattr(x, "dtype") else np.asarray(x, object)
    if getattr(array.dtype, "kind", "O") in "US":
        return True
    values = np.asarray(x, object).ravel()
    return bool(values.size) and isinstance(values[0], str)


def table_reader(x: Any, what: str) -> Callable[[Any, str], Float[np.ndarray, "n d"]]:
    """A function from a table with the columns of `x` to numbers; names become columns of 0 and 1."""
    columns = {name: _column(x[name], f"{what}: column {name!r}") for name in x.columns}
    names = {
        name: np.unique(values) for name, values in columns.items() if values.dtype.kind == "U"
    }
    for name, values in names.items():
        if len(values) > MOST_NAMES:
            raise ValueError(
                f"{what}: column {name!r} has {len(values)} different texts, expected numbers or at most "
                f"{MOST_NAMES} names. Drop it, or give texts as x with encoder=."
            )

    def read(table: Any, where: str) -> np.ndarray:
        missing = [name for name in columns if name not in list(table.columns)]
        if missing:
            raise ValueError(f"{where}: expected the columns of x, but {missing} are missing.")
        parts = []
        for name in columns:
            values = _column(table[name], f"{where}: column {name!r}")
            if name in names:
                parts.append(values.astype(str)[:, None] == names[name][None])
            elif values.dtype.kind == "U":
                raise ValueError(f"{where}: column {name!r} holds text, in x it holds numbers.")
            else:
                parts.append(values[:, None])
        return np.concatenate([p.astype(float) for p in parts], axis=1)

    return read


def _column(values: Any, what: str) -> np.ndarray:
    """Numbers in float64, or names as strings."""
    array = np.asarray(values)
    if array.dtype.kind in "biuf":
        check_finite(what, array, hint=FILL)
        return array.astype(float)
    gone = missing(array)
    if gone.size:
        raise ValueError(f"{what}: {_first(gone, array.size)} missing. {FILL}")
    if all(isinstance(v, str) for v in array.ravel()):
        return array.astype(str)
    try:
        return array.astype(float)
    except (TypeError, ValueError):
        raise TypeError(
            f"{what}: expected numbers or names, got dtype {array.dtype}. Turn it into numbers, or drop it."
        ) from None


FILL = "Fill or drop these rows first."


def as_matrix(x: Any, what: str) -> Float[np.ndarray, "n d"]:
    """One row of numbers per point; pictures and the like lose their shape."""
    if hasattr(x, "toarray"):
        if float(np.prod(x.shape)) > MOST_DENSE:
            raise ValueError(
                f"{what}: the sparse matrix of shape {x.shape} does not fit in memory as a dense array. "
                "Project it first, e.g. by scikit-learn's TruncatedSVD."
            )
        x = x.toarray()
    if is_text(x):
        raise TypeError(
            f"{what}: expected numbers, got strings. For text give encoder=, a function from a list of "
            "texts to an array (n, d): that of a language model, or dualfluence.adapters.HashedText()."
        )
    array = np.asarray(as_array(what, x), float)
    if array.ndim == 0 or array.size == 0:
        raise ValueError(f"{what}: expected one row per point, got shape {array.shape}.")
    array = array.reshape(len(array), -1)
    check_finite(what, array, hint=FILL)
    return array


def as_labels(y: Any, what: str) -> np.ndarray:
    """One label or number per point, without missing ones, as one NumPy array."""
    if isinstance(y, str) or np.ndim(y) == 0:
        raise TypeError(f"{what}: expected one label per point, got {y!r:.60}.")
    array = np.asarray(y)
    written = array.dtype.kind == "U" and not isinstance(y, list | tuple)
    if array.dtype.kind == "U" and not written:
        array = np.asarray(y, object)  # NumPy turns numbers among names into names
    if array.dtype.kind not in "biuf" or array.dtype.kind == "f":
        gone = np.union1d(missing(array), _without_name(array, ("", "nan") if written else ("",)))
        if gone.size:
            raise ValueError(f"{what}: {_first(gone, len(array))} missing. {FILL}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        check_finite(what, array, hint=FILL)
    if array.dtype.kind == "O":
        kinds = {type(v) for v in array.ravel()}
        if len(kinds) > 1 and str in kinds:
            names = sorted(k.__name__ for k in kinds)
            raise TypeError(f"{what}: expected labels of one type, got {', '.join(names)}.")
        array = np.array(array.tolist())
    return array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array


def missing(array: np.ndarray) -> np.ndarray:
    """Positions of `None`, NaN and other marks of what is not there."""
    if array.dtype.kind == "f":
        return np.unique(np.argwhere(np.isnan(array))[:, 0]) if array.size else np.zeros(0, int)
    if array.dtype.kind in "mM":
        return np.flatnonzero(np.isnat(array))
    if array.dtype.kind != "O":
        return np.zeros(0, int)
    flat = array.reshape(len(array), -1)
    gone = [any(_is_missing(v) for v in row) for row in flat]
    return np.flatnonzero(gone)


def _without_name(array: np.ndarray, marks: tuple[str, ...]) -> np.ndarray:
    """Positions of labels that are no names: blank ones, and "nan" where NumPy has written NaN as text."""
    if array.dtype.kind not in "UO" or array.ndim != 1:
        return np.zeros(0, int)
    gone = [isinstance(v, str) and v.strip() in marks for v in array]
    return np.flatnonzero(gone)


def _is_missing(value: Any) -> bool:
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, (float, np.floating)) and bool(np.isnan(value))


def _first(gone: np.ndarray, total: int) -> str:
    shown = ", ".join(map(str, gone[:5])) + (", …" if len(gone) > 5 else "")
    verb = "is" if len(gone) == 1 else "are"
    return f"{len(gone)} of {total} (at {shown}) {verb}"
