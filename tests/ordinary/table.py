"""The table: which names need a row, what a row is, and the ordinary input that it gets."""

import ast
import contextlib
import functools
import importlib
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import dualfluence as dfl

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "_ext"))
from public import public_names, public_namespaces

SIZES, WIDTHS = (1, 2, 3, 5, 17, 33, 100), (1, 2, 3)
SLICE = ((1, 1), (2, 2), (3, 3), (5, 1), (17, 2), (33, 1), (100, 3))
"""Of the default run: every `n` and every `c`. Row `k` gets entry `k`, in turn."""

SHARED = ((5, 2), (33, 1))
"""The same for rows that compile much: those of one case share their programs."""

MEMBERS = (types.FunctionType, property, functools.cached_property, classmethod, staticmethod)
"""What a user calls or reads; fields hold what was given and need no row."""


def names_to_call() -> set[str]:
    """`fit`, `Fitted.edit`, `primal.CG.inverse`: public functions, classes and their members, once each."""
    found, seen = set(), set()
    for namespace in public_namespaces():
        module = importlib.import_module(namespace)
        room = namespace.removeprefix("dualfluence").removeprefix(".")
        for name, value in public_names(module).items():
            if id(value) in seen or not callable(value):
                continue
            seen.add(id(value))
            full = f"{room}.{name}" if room else name
            found.add(full)
            if inspect.isclass(value):
                found |= {f"{full}.{member}" for member in members(value)}
    return found


def members(kind: type) -> set[str]:
    """Public methods and properties, those of our own base classes too."""
    ours = [base for base in kind.__mro__ if base.__module__.startswith("dualfluence")]
    found = {name: value for base in reversed(ours) for name, value in vars(base).items()}
    return {n for n, v in found.items() if not n.startswith("_") and is_member(v)}


def is_member(value: object) -> bool:
    """Equinox wraps the methods of its modules."""
    plain = getattr(value, "method", value)
    return isinstance(plain, MEMBERS) or isinstance(value, MEMBERS)


@dataclass(frozen=True)
class Row:
    """`check(case)` calls every name in `names` and compares what comes back."""

    names: tuple[str, ...]
    check: Callable[["Case"], None]
    once: bool = False
    shared: bool = False
    quick: bool = True

    def sizes(self, extent: str, k: int) -> list[tuple[int, int]]:
        """Where row `k` is tried: `"slice"` once, `"turn 3"` once elsewhere, `"full"` everywhere."""
        if extent == "full" and not self.once:
            return [(n, c) for n in SIZES for c in WIDTHS]
        if extent == "slice" and not self.quick:
            return []
        turn = 0 if extent in ("slice", "full") else int(extent.split()[1])
        cycle = SHARED if self.shared and turn == 0 else SLICE
        return [cycle[(k + turn) % len(cycle)]]


ROWS: list[Row] = []


def row(*names: str, **how: bool) -> Callable:
    """A row for these names; several lines before one check are one row.

    `once`: neither `n` nor `c` means anything. `shared`: it compiles much. `quick=False`: not in the
    default run, which has another row for each of these names.
    """

    def add(check: Callable[["Case"], None]) -> Callable[["Case"], None]:
        last = ROWS.pop() if ROWS and ROWS[-1].check is check else Row((), check)
        ROWS.append(replace(last, names=(*names, *last.names), **how))
        return check

    return add


def mentioned() -> set[str]:
    """Identifiers in the code of all rows: a name that is not among them is called nowhere."""
    files = sorted(Path(__file__).parent.glob("rows_*.py"))
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    found = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return found | {node.id for node in nodes if isinstance(node, ast.Name)}


def each(room: str, kinds: str, members: str) -> tuple[str, ...]:
    """`room.Kind.member` for every kind and member in these words, and the kinds."""
    kinds_of = [f"{room}.{kind}" if room else kind for kind in kinds.split()]
    return tuple(kinds_of) + tuple(f"{k}.{m}" for k in kinds_of for m in members.split())


@dataclass(frozen=True)
class Case:
    """`n` points, `c` outputs, one dtype, and what rows of this case share.

    The network is `tanh(x W₁) W₂ + b`, whose Jacobian a reader can check (`jacobian`).
    """

    n: int
    c: int
    bits: int
    folder: Path

    d, h, q, ridge = 4, 5, 3, 0.1

    @property
    def dtype(self):
        return np.dtype(f"float{self.bits}")

    @property
    def rtol(self) -> float:
        """Of one product or solve at `ridge`: condition numbers are at most some thousand."""
        return {32: 2e-3, 64: 1e-7}[self.bits]

    def array(self, *shape: int, seed: int = 0):
        values = np.random.default_rng([seed, *shape]).normal(size=shape)
        return jnp.asarray(values, self.dtype)

    @functools.cached_property
    def x(self):
        return self.array(self.n, self.d, seed=1)

    @functools.cached_property
    def xq(self):
        return self.array(self.q, self.d, seed=2)

    @functools.cached_property
    def y(self):
        return self.array(self.n, self.c, seed=3)

    @functools.cached_property
    def yq(self):
        return self.array(self.q, self.c, seed=4)

    @functools.cached_property
    def labels(self):
        return np.arange(self.n) % self.c

    @functools.cached_property
    def query_labels(self):
        return np.arange(self.q) % self.c

    @functools.cached_property
    def params(self):
        sizes = {"W1": (self.d, self.h), "W2": (self.h, self.c), "b": (self.c,)}
        return {k: 0.6 * self.array(*s, seed=5 + i) for i, (k, s) in enumerate(sizes.items())}

    @functools.cached_property
    def other(self):
        """Other parameters, as after some training."""
        return {k: v + 0.05 * self.array(*v.shape, seed=9) for k, v in self.params.items()}

    @functools.cached_property
    def model(self):
        return dfl.linearize(network, self.params)

    @functools.cached_property
    def theta(self):
        """`θ₀` as one vector, leaves in the order of their names."""
        return flat(self.params)

    @functools.cached_property
    def J(self):
        return jacobian(self.params, self.x)

    @functools.cached_property
    def Jq(self):
        return jacobian(self.params, self.xq)

    @functools.cached_property
    def f0(self):
        return outputs(self.params, self.x)

    @functools.cached_property
    def f0q(self):
        return outputs(self.params, self.xq)

    @functools.cached_property
    def K(self):
        return np.einsum("iap,jbp->iajb", self.J, self.J)

    @functools.cached_property
    def Kq(self):
        return np.einsum("iap,jbp->iajb", self.Jq, self.J)

    @functools.cached_property
    def weights(self):
        return np.full(self.n, 1 / self.n)

    @functools.cached_property
    def fitted(self):
        """By squared error, with every default."""
        return dfl.fit(self.model, self.x, self.y, loss=dfl.SquaredError(), ridge=self.ridge)

    @functools.cached_property
    def classifier(self):
        """By cross-entropy: softmax, for one output logistic."""
        return dfl.fit(self.model, self.x, self.classes, loss=self.loss, ridge=self.ridge)

    @property
    def loss(self):
        return dfl.Logistic() if self.c == 1 else dfl.SoftmaxCrossEntropy()

    @functools.cached_property
    def classes(self):
        """Targets of `loss`: class labels, for one output zeros and ones."""
        return np.arange(self.n)[:, None] % 2 if self.c == 1 else self.labels

    @functools.cached_property
    def query_classes(self):
        return np.arange(self.q)[:, None] % 2 if self.c == 1 else self.query_labels

    @functools.cached_property
    def probabilities(self):
        """`classes` as rows of numbers, for NumPy."""
        return np.asarray(self.classes, float) if self.c == 1 else np.eye(self.c)[self.labels]

    @functools.cached_property
    def query_probabilities(self):
        chosen = np.asarray(self.query_classes)
        return chosen.astype(float) if self.c == 1 else np.eye(self.c)[chosen]

    @property
    def loss_name(self) -> str:
        """In `oracles.LOSSES`."""
        return "logistic" if self.c == 1 else "softmax"

    def close(self, got, want, scale: float = 1.0, what: str = "") -> None:
        """Equal to rounding of this dtype, next to the largest number there is."""
        got, want = np.asarray(got, float), np.asarray(want, float)
        assert got.shape == want.shape, f"{what} shape {got.shape}, expected {want.shape}"
        size = float(np.abs(want).max(initial=0.0))
        rtol = self.rtol * scale
        np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol * max(size, 1e-3), err_msg=what)

    def typed(self, value) -> None:
        """Finite, and in the dtype that the input had."""
        array = np.asarray(value)
        np.testing.assert_equal(array.dtype, self.dtype)
        assert np.isfinite(array).all(), "not finite"


def network(params, x):
    return jnp.tanh(x @ params["W1"]) @ params["W2"] + params["b"]


def flat(params) -> np.ndarray:
    """A tree of parameters as one vector in float64."""
    return np.concatenate([np.asarray(params[k], float).ravel() for k in ("W1", "W2", "b")])


def outputs(params, x) -> np.ndarray:
    """The network in NumPy."""
    W1, W2, b = (np.asarray(params[k], float) for k in ("W1", "W2", "b"))
    return np.tanh(np.asarray(x, float) @ W1) @ W2 + b


def jacobian(params, x) -> np.ndarray:
    """`∂f_a(x_i)/∂θ` by the chain rule, `(n, c, p)`."""
    W1, W2, b = (np.asarray(params[k], float) for k in ("W1", "W2", "b"))
    x = np.asarray(x, float)
    hidden, eye = np.tanh(x @ W1), np.eye(len(b))
    first = np.einsum("nd,nh,ha->nadh", x, 1 - hidden**2, W2)
    second = np.einsum("nh,ab->nahb", hidden, eye)
    third = np.broadcast_to(eye, (len(x), *eye.shape))
    return np.concatenate([p.reshape(len(x), len(b), -1) for p in (first, second, third)], axis=2)


@contextlib.contextmanager
def raises(kind: type[Exception], words: str) -> Iterator[None]:
    """Exactly this class, with these words in its message."""
    found: Exception | None = None
    try:
        yield
    except kind as error:
        found = error
    np.testing.assert_equal(type(found), kind)
    assert re.search(words, str(found)), f"message without {words!r}: {found}"
