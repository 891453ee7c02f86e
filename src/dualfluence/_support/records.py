"""Small records (dataclasses, named tuples) as JSON and back, every field checked by its annotation."""

import types
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """Records as dictionaries, tuples as lists, numbers of arrays as numbers."""
    names = _field_names(type(value))
    if names is not None:
        return {name: to_plain(getattr(value, name)) for name in names}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def from_plain(cls: type[T], value: Any, what: str) -> T:
    """A record of class `cls`; a `ValueError` names the field whose value has the wrong type."""
    hints, names = get_type_hints(cls), _field_names(cls)
    if names is None or not isinstance(value, dict) or set(value) != set(names):
        raise ValueError(f"{what} does not have the fields of {cls.__name__}")
    return cls(**{name: _typed(hints[name], value[name], f"{what}.{name}") for name in names})


def _field_names(cls: type) -> tuple[str, ...] | None:
    if is_dataclass(cls):
        return tuple(field.name for field in fields(cls))
    return getattr(cls, "_fields", None)


def _typed(hint: Any, value: Any, what: str) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        if value is None and type(None) in get_args(hint):
            return None
        (hint,) = (each for each in get_args(hint) if each is not type(None))
    if get_origin(hint) is tuple and isinstance(value, list):
        return tuple(_typed(get_args(hint)[0], item, what) for item in value)
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if hint in (int, bool, str) and type(value) is hint:
        return value
    if isinstance(hint, type) and _field_names(hint) is not None:
        return from_plain(hint, value, what)
    raise ValueError(f"{what} is {value!r}")
