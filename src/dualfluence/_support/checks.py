"""The gate for arrays: all that users hand in passes here before JAX sees it.

Each message says what was expected, what came and what to try. Arrays of the host are checked on the
host, in 64 bits: JAX would wrap integers and drop imaginary parts, masks and units without a word.
Single numbers, names and functions pass through `options`.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike

from .compile import jit
from .types import AnyArray, Inputs, Numbers

OVERFLOW = "The model overflows at these queries: scale them like the training features."
INT64 = np.iinfo(np.int64)


def as_array(name: str, value: Numbers) -> np.ndarray | jax.Array:
    """Real numbers or flags as an array, on the host unless they are on a device already.

    Refused: what is no array of numbers (strings, objects, dates, ragged lists), complex numbers,
    masked entries, sparse matrices, and values that JAX is tracing.
    """
    if isinstance(value, jax.Array):
        return _device_array(name, value)
    _check_container(name, value)
    array = _host_array(name, value)
    if array.dtype.kind not in "fiub":
        check_numbers(name, array)
    if array.dtype.itemsize > 8:  # extended precision, which JAX does not know
        return array.astype(np.float64)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def as_jax(name: str, value: Numbers) -> jax.Array:
    """`as_array` on the device; an error if 32-bit JAX cannot hold what came."""
    array = as_array(name, value)
    if isinstance(array, jax.Array):
        return array
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if array.dtype.kind in "iu" and dtype != array.dtype and array.size:
        limits = np.iinfo(dtype)
        if array.min() < limits.min or array.max() > limits.max:
            raise ValueError(
                f"{name}: expected integers of 32 bits, got {array.min()} to {array.max()}. Use "
                "floating-point numbers, or jax.config.update('jax_enable_x64', True)."
            )
    return as_dtype(name, array, dtype)


def as_dtype(name: str, value: Numbers, dtype: DTypeLike) -> jax.Array:
    """`value` in this dtype, e.g. the dtype of the training data; an error if the dtype cannot hold the
    value."""
    array = as_array(name, value)
    dtype = jnp.dtype(jax.dtypes.canonicalize_dtype(dtype))
    if array.dtype == dtype:
        return jnp.asarray(array)
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(dtype)
    if not jnp.issubdtype(dtype, jnp.inexact):
        _check_same(name, array, cast)
    elif isinstance(array, np.ndarray) and _may_overflow(array.dtype, dtype):
        check_finite(name, array)
        check_finite(name, cast, hint=f"It overflows {dtype}: scale it, or use a wider dtype.")
    return jnp.asarray(cast)


def check_concrete(name: str, value: object) -> None:
    """Raise if JAX is tracing `value`."""
    if isinstance(value, Tracer):
        raise TypeError(
            f"{name}: expected an array with values, got one that JAX is tracing. Fits, edits "
            "and read-outs compile their own programs: call them outside of jit, grad and vmap."
        )


def check_numbers(name: str, value: Any) -> None:
    """Raise if `value` holds complex numbers, strings or other things that are no real numbers."""
    array = value if hasattr(value, "dtype") else np.asarray(value)
    dtype = array.dtype
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            f"{name}: expected real numbers, got {dtype}. Give real and imaginary parts as "
            "separate features or targets."
        )
    kind = _kind(dtype)
    # NumPy counts durations among the integers.
    if kind == "b" or (jnp.issubdtype(dtype, jnp.number) and kind != "m"):
        return
    if kind == "O" and array.size and all(type(v) is int for v in array.flat):
        raise ValueError(f"{name}: expected integers of at most 64 bits, got {max(array.flat)}.")
    raise TypeError(f"{name}: expected numbers, got dtype {dtype}{_what_to_try(array)}")


def check_finite(
    name: str, value: Numbers, *, hint: str = "Clean or drop these points first."
) -> None:
    """Raise if a floating array holds NaN or inf, naming the first bad place."""
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.inexact) or all_finite(name, array):
        return
    bad = np.argwhere(~np.isfinite(np.asarray(array)))
    first = tuple(int(i) for i in bad[0])
    raise ValueError(
        f"{name}: every entry must be finite, got {np.asarray(array)[first]} at index {first} "
        f"({len(bad)} bad of {array.size}). {hint}"
    )


def all_finite(name: str, array: np.ndarray | jax.Array) -> bool:
    """Whether no entry is NaN or inf."""
    if isinstance(array, np.ndarray):
        return bool(np.isfinite(array).all())
    good = _finite(array)
    # Inside of jit all that is computed is traced, also from arrays that have values.
    check_concrete(name, good)
    return bool(good)


def check_indices(name: str, indices: Numbers) -> np.ndarray:
    """Integer positions as a NumPy vector in the order given: one axis, not empty, no repeats."""
    array = np.asarray(as_array(f"{name} indices", indices))
    if array.ndim != 1:
        raise ValueError(
            f"{name}: indices must be one axis of positions, got shape {array.shape}. For one point "
            "give a list, e.g. [3]."
        )
    if array.size == 0:
        raise ValueError(f"{name}: indices are empty; give at least one training position.")
    if array.dtype == bool:
        raise TypeError(
            f"{name}: indices must be integers, got a boolean mask. Use np.flatnonzero(mask)."
        )
    if array.dtype.kind not in "iu" and not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name}: indices must be integers, got dtype {array.dtype}.")
    if array.size > 1:
        _check_distinct(name, array)
    if array.dtype.kind == "u" and int(array.max()) > INT64.max:
        raise ValueError(
            f"{name}: indices are positions of points, and {int(array.max())} is too large."
        )
    return array.astype(np.int64)


def _check_distinct(name: str, indices: np.ndarray) -> None:
    ordered = np.sort(indices)
    again = ordered[1:][ordered[1:] == ordered[:-1]]
    if again.size:
        times = np.count_nonzero(indices == again[0])
        raise ValueError(f"{name}: indices must not repeat, {int(again[0])} comes {times} times.")


def check_range(name: str, indices: np.ndarray, num_points: int) -> None:
    """Raise unless every index lies in `[0, num_points)`."""
    bad = indices[(indices < 0) | (indices >= num_points)]
    if bad.size:
        raise ValueError(
            f"{name}: indices must be in [0, {num_points}), got {int(bad[0])}. They index the "
            "training set, not the queries."
        )


def check_rows(name: str, value: AnyArray, num_rows: int, what: str) -> None:
    """Raise unless axis 0 of `value` has `num_rows` entries, one for each thing that `what` names."""
    if value.ndim == 0 or value.shape[0] != num_rows:
        raise ValueError(
            f"{name}: expected {num_rows} rows, one per {what}, got shape {tuple(value.shape)}."
        )


def as_weights(name: str, weights: Numbers, num_points: int, what: str) -> np.ndarray:
    """Sample weights in float64: one per point, finite, not negative. All may be zero."""
    # At least one axis: a bare number is the weight of a single point.
    array = np.atleast_1d(np.asarray(as_array(f"{name} weights", weights))).astype(np.float64)
    check_rows(f"{name} weights", array, num_points, what)
    if array.ndim != 1:
        raise ValueError(
            f"{name}: weights must be a vector, one per point, got shape {array.shape}."
        )
    check_finite(f"{name} weights", array)
    if (array < 0).any():
        raise ValueError(
            f"{name}: weights must be a vector of non-negative numbers, got {array.min()}."
        )
    return array


def training_weights(name: str, weights: Numbers | None, num_points: int) -> np.ndarray:
    """Sample weights of a training set, 1 by default; some weight must be left."""
    if weights is None:
        return np.ones(num_points)
    array = as_weights(name, weights, num_points, "point of x")
    if not array.any():
        raise ValueError(f"{name}: weights must be non-negative with a positive sum, got zeros.")
    return array


def as_features(name: str, x: Numbers) -> jax.Array:
    """Finite features on the device, points on axis 0, at least one."""
    array = as_jax(name, x)
    check_points(name, array)
    return array


def check_points(name: str, array: AnyArray) -> None:
    """Raise unless there is a point on axis 0 and every entry is finite."""
    check_not_empty(name, array)
    check_finite(name, array)


def check_not_empty(name: str, array: Any) -> None:
    """Raise unless there is a point with features on axis 0."""
    if array.ndim == 0 or array.shape[0] == 0:
        raise ValueError(f"{name} needs at least one point on axis 0, got shape {array.shape}.")
    if array.size == 0:
        raise ValueError(f"{name}: expected features that are not empty, got shape {array.shape}.")


def check_queries(
    xq: Inputs, x: jax.Array, name: str = "queries", *, form: Any = None
) -> jax.Array:
    """Queries as an array with the trailing shape and dtype of the training features `x`.

    If `form` (a `points.Form`) is given, the queries are a tree of arrays and are packed like `x`.
    """
    if form is not None:
        return form.pack(name, xq)
    array = as_dtype(name, xq, x.dtype)
    if array.ndim == 0 or array.shape[1:] != x.shape[1:]:
        want = ", ".join(("q", *map(str, x.shape[1:])))
        raise ValueError(f"{name}: expected shape ({want}), got {tuple(array.shape)}.")
    if array.shape[0] == 0:
        raise ValueError(f"{name}: need at least one row, got none.")
    check_finite(name, array)
    return array


def check_number(name: str, value: Numbers) -> float:
    """One real number as a float; NaN and infinities pass."""
    if type(value) is float:
        return value
    array = as_array(name, value)
    if array.ndim != 0:
        raise TypeError(f"{name}: expected one number, got an array of shape {array.shape}.")
    if array.dtype == bool:
        raise TypeError(f"{name}: expected a number, got the flag {bool(array)}.")
    return float(array)


def check_fraction(name: str, value: Numbers | None) -> None:
    """Raise unless `value` is `None` or a number between 0 and 1."""
    if value is not None and not 0 < check_number(name, value) < 1:
        raise ValueError(f"{name} must lie between 0 and 1, got {value}.")


def check_ridge(ridge: Numbers, dtype: DTypeLike | None = None) -> float:
    """Raise unless the ridge λ is a positive finite number, also in the dtype of the computation."""
    value = check_number("ridge", ridge)
    if not (np.isfinite(value) and value > 0):
        raise ValueError(
            f"ridge: λ must be a positive finite number, got {value}. The dual equation divides "
            "by λ and its certificate rests on λ-strong convexity; try 1e-2."
        )
    limits = jnp.finfo(np.float64 if dtype is None else dtype)
    if not float(limits.tiny) <= value <= float(limits.max):
        raise ValueError(
            f"ridge: λ must lie in the range of {limits.dtype}, {float(limits.tiny):.3g} to "
            f"{float(limits.max):.3g}, got {value}. Scale the loss, or use a wider dtype."
        )
    return value


def _device_array(name: str, value: jax.Array) -> jax.Array:
    check_concrete(name, value)
    if value.is_deleted():
        raise ValueError(f"{name}: this array was deleted or donated. Keep a copy to use it again.")
    if _kind(value.dtype) not in "fiub":
        check_numbers(name, value)
    return value


def _check_container(name: str, value: object) -> None:
    """Raise for inputs that `np.asarray` would change silently: masks that it drops, matrices that it
    wraps."""
    if type(value) is np.ndarray:
        return
    if isinstance(value, Mapping):
        raise TypeError(
            f"{name}: expected one array of numbers, got a {type(value).__name__}. A tree of "
            "arrays is possible as features of a network, in fit, from_trained and similar "
            "calls, and then in every later call about that model."
        )
    masked = np.ma.MaskedArray
    parts = value if isinstance(value, (list, tuple)) else (value,)
    for part in parts:
        if isinstance(part, masked) and np.ma.is_masked(part):
            raise ValueError(
                f"{name}: expected numbers without a mask, got {np.ma.count_masked(part)} masked "
                "entries. Drop these points or fill them in, e.g. by masked.filled(0)."
            )
    if hasattr(value, "toarray") or hasattr(value, "todense"):
        raise TypeError(
            f"{name}: expected a dense array, got the sparse {type(value).__name__}. Use .toarray() "
            "or .todense() if it fits in memory."
        )


def _host_array(name: str, value: Numbers) -> np.ndarray:
    try:
        return np.asarray(value)
    except jax.errors.TracerArrayConversionError:
        for leaf in jax.tree.leaves(value):
            check_concrete(name, leaf)
        raise TypeError(f"{name}: got values that JAX is tracing; call outside of jit.") from None
    except Exception as error:
        raise ValueError(
            f"{name}: expected an array of numbers, got a {type(value).__name__} that cannot be "
            f"converted ({error}). Rows must have equal lengths."
        ) from error


@jit
def _finite(array: jax.Array) -> jax.Array:
    """It is one program, so a large kernel is read once and no array of flags is stored."""
    return jnp.isfinite(array).all()


def _kind(dtype: object) -> str:
    """NumPy's letter for a kind of dtype; random keys have none."""
    return getattr(dtype, "kind", "?")


def _what_to_try(array: Any) -> str:
    kind = _kind(array.dtype)
    if kind in "mM":
        return ". Turn times into numbers, e.g. by t / np.timedelta64(1, 's')."
    if kind == "O":
        first = next(iter(array.flat), None)
        return (
            f" (first a {type(first).__name__}). Try np.asarray(values, dtype=float), or "
            ".to_numpy(dtype=float) for a table, after filling what is missing."
        )
    return ". Encode names as class indices or one-hot rows first, texts by a tokenizer (adapters.tokenised)."


def _may_overflow(wide: np.dtype, narrow: np.dtype) -> bool:
    wider = jnp.issubdtype(wide, jnp.inexact) and jnp.finfo(wide).max > jnp.finfo(narrow).max
    return bool(wider) or (wide.kind in "iu" and narrow.itemsize == 2)


def _check_same(name: str, array: AnyArray, cast: AnyArray) -> None:
    """Raise unless an integer dtype holds these values."""
    # Back in the dtype that came, where integers that wrapped differ from what they were.
    same = (cast.astype(array.dtype) == array).all()
    check_concrete(name, same)
    if bool(same) and _signs_agree(array, cast):
        return
    raise ValueError(
        f"{name}: the model was fitted on {cast.dtype}, which cannot hold these {array.dtype} "
        "values. Fit it on floating-point numbers, e.g. x.astype(float)."
    )


def _signs_agree(array: AnyArray, cast: AnyArray) -> bool:
    """A negative number converted to unsigned and back is itself again, although its sign was lost."""
    if array.dtype == bool or cast.dtype == bool:
        return True
    return bool(((cast < 0) == (array < 0)).all())
