"""Ways to bend an argument, by its kind. Each says whether the call must refuse the result.

`REFUSE`: nothing sensible can be meant. `EITHER`: the call may take it (and then must give a finite
answer) or say no. `ACCEPT`: it is another spelling of the good value and must work.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

REFUSE, EITHER, ACCEPT = "refuse", "either", "accept"


class Corruption(NamedTuple):
    name: str
    bend: Callable[[Any, np.random.Generator], Any]
    must: str = REFUSE


class Traced(NamedTuple):
    """The call is to happen inside `jax.jit`, with this value traced."""

    value: Any


class Table:
    """Stands for a table or series of another library: an array through `__array__` only."""

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.values if dtype is None else self.values.astype(dtype)


class Broken(Table):
    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise RuntimeError("no values here")


class Sparse:
    """Stands for a sparse matrix: NumPy would wrap it in an array of one object."""

    def __init__(self, values: Any) -> None:
        self.shape = np.shape(values)

    def toarray(self) -> np.ndarray:
        return np.zeros(self.shape)


def poke(value: Any) -> Callable[[Any, np.random.Generator], Any]:
    """One entry somewhere replaced."""

    def bend(good: Any, rng: np.random.Generator) -> np.ndarray:
        array = np.array(good, np.result_type(np.asarray(good), np.asarray(value)))
        array.flat[rng.integers(array.size)] = value
        return array

    return bend


def as_(dtype: Any) -> Callable[[Any, np.random.Generator], Any]:
    return lambda good, rng: np.asarray(good).astype(dtype)


def give(value: Any) -> Callable[[Any, np.random.Generator], Any]:
    return lambda good, rng: value


def masked(good: Any, rng: np.random.Generator) -> Any:
    mask = np.zeros(np.shape(good), bool)
    mask.flat[rng.integers(mask.size)] = True
    return np.ma.array(np.asarray(good), mask=mask)


def ragged(good: Any, rng: np.random.Generator) -> Any:
    rows = np.asarray(good).tolist()
    return [*rows, [[1.0, 2.0, 3.0], [1.0]]]


def deleted(good: Any, rng: np.random.Generator) -> Any:
    array = jnp.array(good)
    array.delete()
    return array


NOT_ARRAYS = [
    Corruption("none", give(None)),
    Corruption("text", give("cat")),
    Corruption("bytes", give(b"cat")),
    Corruption("dict", give({"a": 1})),
    Corruption("set", give({1, 2})),
    Corruption("function", give(operator.add)),
    Corruption("generator", lambda good, rng: (v for v in np.ravel(good))),
    Corruption("class", give(int)),
    Corruption("strings", lambda good, rng: np.asarray(good).astype(str)),
    Corruption("objects", lambda good, rng: np.full(np.shape(good), None)),
    Corruption("complex", lambda good, rng: np.asarray(good) + 1j),
    Corruption("complex on device", lambda good, rng: jnp.asarray(good) + 1j),
    Corruption("durations", lambda good, rng: np.zeros(np.shape(good), "m8[s]")),
    Corruption("dates", lambda good, rng: np.zeros(np.shape(good), "M8[s]")),
    Corruption("records", lambda good, rng: np.zeros(np.shape(good), [("a", float)])),
    Corruption("masked", masked),
    Corruption("list of masked", lambda good, rng: [*masked(good, rng), np.ma.masked]),
    Corruption("ragged", ragged),
    Corruption("sparse", lambda good, rng: Sparse(good)),
    Corruption("broken table", lambda good, rng: Broken(good)),
    Corruption("table of objects", lambda good, rng: Table(np.full(np.shape(good), "a", object))),
    Corruption("beyond 64 bits", lambda good, rng: np.full(np.shape(good), 2**70, object)),
    Corruption("random keys", lambda good, rng: jax.random.split(jax.random.key(0), 6)),
    Corruption("deleted", deleted),
    Corruption("traced", lambda good, rng: Traced(np.asarray(good))),
    Corruption("empty", lambda good, rng: np.asarray(good)[:0]),
    Corruption("extra axis", lambda good, rng: np.asarray(good)[None]),
]
SPELLINGS = [
    Corruption("list", lambda good, rng: np.asarray(good).tolist(), ACCEPT),
    Corruption("table", lambda good, rng: Table(good), ACCEPT),
    Corruption("unmasked", lambda good, rng: np.ma.array(np.asarray(good)), ACCEPT),
    Corruption("on device", lambda good, rng: jnp.asarray(good), ACCEPT),
    Corruption(
        "bytes swapped",
        lambda good, rng: np.asarray(good).astype(np.asarray(good).dtype.newbyteorder(">")),
        ACCEPT,
    ),
]
NOT_FINITE = [
    Corruption("nan", poke(np.nan)),
    Corruption("inf", poke(np.inf)),
    Corruption("-inf", poke(-np.inf)),
]
FLOATS = [
    Corruption(
        "too large for any dtype", lambda good, rng: np.asarray(good) * np.longdouble("1e400")
    ),
    Corruption("huge", poke(1e300), EITHER),
    Corruption("tiny", lambda good, rng: np.asarray(good) * 1e-300, EITHER),
    Corruption("float16", as_(np.float16), EITHER),
    Corruption("bfloat16", lambda good, rng: jnp.asarray(good, jnp.bfloat16), EITHER),
    Corruption("extended", as_(np.longdouble), ACCEPT),
    Corruption("int8", as_(np.int8), EITHER),
    Corruption("bool", as_(bool), EITHER),
    Corruption("one row", lambda good, rng: np.asarray(good)[0]),
    Corruption("no axis", give(np.float64(3.0))),
]
ROWS = [
    Corruption("row missing", lambda good, rng: np.asarray(good)[1:]),
    Corruption("row more", lambda good, rng: np.concatenate([good, good[:1]])),
]
WIDTH = [
    Corruption("column more", lambda good, rng: np.concatenate([good, good[:, :1]], axis=1)),
    Corruption("no columns", lambda good, rng: np.asarray(good)[:, :0]),
]
INTEGERS = [
    Corruption("2**32", poke(2**32)),
    Corruption("2**64 - 1", lambda good, rng: poke(2**64 - 1)(np.asarray(good, np.uint64), rng)),
    Corruption("-1", poke(-1)),
    Corruption("99", poke(99)),
    Corruption("halves", lambda good, rng: np.asarray(good) + 0.5),
    Corruption("flags", lambda good, rng: np.asarray(good) > 0),
    Corruption("nan", lambda good, rng: np.full(np.shape(good), np.nan)),
    Corruption("int8", as_(np.int8), ACCEPT),
    Corruption("uint64", as_(np.uint64), ACCEPT),
]
NUMBERS = [
    Corruption("nan", give(np.nan)),
    Corruption("inf", give(np.inf)),
    Corruption("negative", give(-1.0)),
    Corruption("text", lambda good, rng: str(good)),
    Corruption("flag", give(True)),
    Corruption("complex", lambda good, rng: complex(good)),
    Corruption("list", lambda good, rng: [good]),
    Corruption("vector", lambda good, rng: np.full(2, good)),
    Corruption("10**400", give(10**400)),
    Corruption("object", give(object())),
    Corruption("masked", give(np.ma.masked)),
    Corruption("duration", give(np.timedelta64(3, "s"))),
    Corruption("traced", lambda good, rng: Traced(good)),
]
NUMBER_SPELLINGS = [
    Corruption("0-d", lambda good, rng: np.asarray(good), ACCEPT),
    Corruption("0-d on device", lambda good, rng: jnp.asarray(good), ACCEPT),
    Corruption("NumPy", lambda good, rng: np.asarray(good)[()], ACCEPT),
]
NAMES = [
    Corruption("other name", give("x")),
    Corruption("empty name", give("")),
    Corruption("bytes", lambda good, rng: good.encode()),
    Corruption("number", give(3)),
    Corruption("list", lambda good, rng: [good]),
    Corruption("dict", give({})),
]
FLAGS = [
    Corruption("yes", give("yes")),
    Corruption("1", give(1)),
    Corruption("none", give(None)),
    Corruption("list", give([True])),
    Corruption("vector", give(np.array([True, False]))),
    Corruption("NumPy", lambda good, rng: np.bool_(good), ACCEPT),
]
THINGS = [
    Corruption("none", give(None)),
    Corruption("text", give("resnet")),
    Corruption("number", give(3)),
    Corruption("its class", lambda good, rng: type(good)),
    Corruption("list", lambda good, rng: [good]),
    Corruption("object", give(object())),
]
MESHES = [
    Corruption("gpu", give(["gpu"])),
    Corruption("gpu twice", give(["gpu", "gpu"])),
    Corruption("text", give("gpu")),
    Corruption("empty", give([])),
    Corruption("none inside", give([None])),
    Corruption("number", give(1)),
    Corruption("bare", lambda good, rng: good[0]),
    Corruption("twice", lambda good, rng: [good[0], good[0]]),
    Corruption("mixed", lambda good, rng: [good[0], "cpu"]),
    Corruption("set", lambda good, rng: {good[0]}),
    Corruption("strings", give(np.array(["cpu"]))),
    Corruption("mesh", lambda good, rng: jax.sharding.Mesh(np.array(good), ("a",)), ACCEPT),
    Corruption("tuple", lambda good, rng: tuple(good), ACCEPT),
]
KEYS = [
    Corruption("seed", give(0)),
    Corruption("text", give("key")),
    Corruption("floats", give(jnp.zeros(2))),
    Corruption("several", lambda good, rng: jax.random.split(good, 3)),
    Corruption("host", give(np.array([0, 1], np.uint32))),
    Corruption("traced", lambda good, rng: Traced(good)),
    Corruption("old style", lambda good, rng: jax.random.key_data(good), ACCEPT),
]
PATHS = [
    Corruption("none", give(None)),
    Corruption("number", give(3)),
    Corruption("empty", give("")),
    Corruption("bytes", give(b"there")),
    Corruption("zero byte", give("the\0re")),
    Corruption("list", lambda good, rng: [good]),
]
PROGRESS = [Corruption(str(v), give(v)) for v in ("yes", 3, None, 0.5)]
TREES = [
    Corruption("none", give(None)),
    Corruption("text", give("w")),
    Corruption("other structure", give({"other": np.zeros(2)})),
    Corruption("nan", poke(np.nan)),
    Corruption("complex", lambda good, rng: np.asarray(good) + 1j),
    Corruption("traced", lambda good, rng: Traced(np.asarray(good))),
    Corruption("on host", lambda good, rng: np.asarray(good), ACCEPT),
]


def without(corruptions: list[Corruption], *names: str) -> list[Corruption]:
    return [c for c in corruptions if c.name not in names]


def declared(corruptions: list[Corruption], must: str, *names: str) -> list[Corruption]:
    """The same with another promise for some."""
    return [c._replace(must=must) if c.name in names else c for c in corruptions]


COUNT_ONLY = [Corruption("half", give(2.5)), Corruption("whole float", give(2.0))]
TOO_LARGE = [Corruption("10**30", give(10**30))]
ZERO = [Corruption("zero", give(0))]

KINDS: dict[str, list[Corruption]] = {
    "features": NOT_ARRAYS + SPELLINGS + NOT_FINITE + FLOATS + ROWS + WIDTH,
    "queries": NOT_ARRAYS + SPELLINGS + NOT_FINITE + FLOATS + WIDTH,
    "numbers": NOT_ARRAYS + SPELLINGS + NOT_FINITE + FLOATS + ROWS + WIDTH,
    "matrix": NOT_ARRAYS + SPELLINGS + NOT_FINITE + FLOATS + ROWS + WIDTH,
    "labels": NOT_ARRAYS + SPELLINGS + INTEGERS + ROWS,
    "indices": NOT_ARRAYS
    + SPELLINGS
    + INTEGERS
    + [
        Corruption("repeated", lambda good, rng: np.concatenate([good, good])),
        Corruption("bare", give(3)),
        Corruption("every point", lambda good, rng: np.arange(6), EITHER),
    ],
    "weights": without(NOT_ARRAYS, "none")
    + SPELLINGS
    + NOT_FINITE
    + ROWS
    + [
        Corruption("negative", poke(-1.0)),
        Corruption("column", lambda good, rng: np.asarray(good)[:, None]),
        Corruption("sum overflows", lambda good, rng: np.full(np.shape(good), 1.7e308), ACCEPT),
        Corruption("sum underflows", lambda good, rng: np.full(np.shape(good), 1e-320), ACCEPT),
        Corruption("zeros", lambda good, rng: np.zeros(np.shape(good)), EITHER),
    ],
    "positive": NUMBERS + NUMBER_SPELLINGS + ZERO,
    "fraction": NUMBERS + NUMBER_SPELLINGS + ZERO,
    "count": NUMBERS + NUMBER_SPELLINGS + COUNT_ONLY + TOO_LARGE + ZERO,
    "rank": NUMBERS + COUNT_ONLY + TOO_LARGE,
    "name": NAMES,
    "flag": FLAGS,
    "flag or none": without(FLAGS, "none"),
    "thing": THINGS,
    "option": without(THINGS, "none"),
    "mesh": MESHES,
    "key": KEYS,
    "path": PATHS,
    "progress": PROGRESS,
    "tree": TREES,
    "points": NOT_ARRAYS + SPELLINGS + NOT_FINITE + without(FLOATS, "one row") + ROWS,
    "scores": NOT_ARRAYS + SPELLINGS + NOT_FINITE + FLOATS + ROWS,
    "share": NUMBERS + NUMBER_SPELLINGS,
    "norm": NUMBERS + NUMBER_SPELLINGS,
    "dtype": declared(NAMES, EITHER, "bytes"),
    "edits": declared(THINGS, ACCEPT, "list"),
    "fresh tree": without(TREES, "other structure"),
}
MORE = {
    "maybe indices": without(KINDS["indices"], "none", "flags", "halves"),
    "maybe features": without(KINDS["features"], "none"),
    "maybe queries": without(KINDS["queries"], "none"),
    "maybe numbers": without(KINDS["numbers"], "none"),
    "store points": without(KINDS["points"], "row missing", "row more"),
    "held matrix": declared(KINDS["matrix"], EITHER, "list", "table"),
}
KINDS |= MORE
