"""The house: which room may use which, read from the imports in the source.

Every import counts, also one inside a function or under `TYPE_CHECKING`. A room uses rooms on earlier
lines of `ORDER`, never one on its own line or later. Of the root's own modules, `_plan` (what a kernel
costs) and `metrics` stand right after `_support`, which is all that they use; `__init__` and `__main__`
come last. The apps have an order among themselves.
"""

import ast
import graphlib
import re
from pathlib import Path

import pytest

import dualfluence

pytestmark = pytest.mark.host

PACKAGE = Path(dualfluence.__file__).parent
ORDER = [
    "",
    "_version",
    "_support",
    "_plan metrics",
    "linalg",
    "losses kernels infinite datasets",
    "operators",
    "problem models solvers",
    "store",
    "dual",
    "attribution",
    "fitted primal",
    "unlearning",
    "adapters",
    "apps",
    "_public",
    "__init__ __main__",
    "",
][1:-1]
APPS = ["compare", "page", "attribute paper", "demo bench serve", "explore", "cli"]
ENTRANCE = {"__init__", "__main__", "_version"}
MAX_ROOT = 3
MOST_ANY = 20
"""`Any` per 1,000 lines, imports included: it tells neither a reader nor a type checker what is expected."""
MEET_OTHERS = ("adapters", "apps")
"""Rooms that handle objects of other libraries, whose types nobody here declares."""
STRUCTURES = ("Operator", "Source", "Wrapper", "Preconditioner")
"""How classes end whose structure is a method with a loud default."""
MAY_ASK_FOR_TYPES = {
    "solvers._cholesky",
    "attribution._leave_one_out",
    "models._sources",
}
"""Where `isinstance` may look at operators and sources: closed forms for certain structures, twice, and
whatever a user hands to `fit`."""


def modules(root=PACKAGE):
    """Name inside the package (`dual._fit`, `dual.__init__`) and source of every module."""
    files = sorted(root.rglob("*.py"))
    return {".".join(f.relative_to(root).with_suffix("").parts): f.read_text() for f in files}


def imports(name, source, known):
    """Modules of the package that this one imports, wherever the statement stands."""
    here = name.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found = [alias.name.split(".") for alias in node.names]
            targets = [parts[1:] for parts in found if parts[0] == "dualfluence"]
        elif isinstance(node, ast.ImportFrom):
            base = (node.module or "").split(".") if node.module else []
            if node.level:
                base = here[: len(here) - node.level + 1] + base
            elif base[:1] == ["dualfluence"]:
                base = base[1:]
            else:
                continue
            targets = [[*base, alias.name] for alias in node.names]
        else:
            continue
        for parts in targets:
            yield _module(parts, known)


def _module(parts, known):
    """The module that a dotted name is in: itself, a package, or what it is defined in."""
    for stop in range(len(parts), 0, -1):
        for name in (".".join(parts[:stop]), ".".join([*parts[:stop], "__init__"])):
            if name in known:
                return name
    return "__init__"


def graph(known):
    edges = {name: set(imports(name, source, known)) - {name} for name, source in known.items()}
    return {name: sorted(found) for name, found in edges.items()}


def rooms_out_of_order(edges, order, depth=0):
    """Imports from one room into another that does not stand before it."""
    place = {room: line for line, rooms in enumerate(order) for room in rooms.split()}
    wrong = []
    for name, found in edges.items():
        for other in found:
            one, two = (m.split(".")[depth] for m in (name, other))
            if one != two and place[two] >= place[one]:
                wrong.append(f"{name} imports {other}")
    return wrong


def cycle(edges):
    """Modules that import each other in a ring, or `None`.

    A package stands for its modules where it is imported as a whole (`from . import x`).
    """
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        return error.args[1]


def type_questions(source):
    """`isinstance` tests on classes named as in `STRUCTURES`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
            names = [n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)]
            yield from (n for n in names if n.endswith(STRUCTURES))


def any_per_thousand(sources):
    """How often the word `Any` stands in 1,000 lines of these sources."""
    text = "".join(sources)
    return 1000 * len(re.findall(r"\bAny\b", text)) / text.count("\n")


def test_rooms_use_only_earlier_rooms():
    assert rooms_out_of_order(graph(modules()), ORDER) == []


def test_parameter_space_knows_nothing_of_dual_variables():
    used = {name: found for name, found in graph(modules()).items() if name.startswith("primal.")}
    assert not [
        m for found in used.values() for m in found if m.split(".")[0] in ("dual", "fitted")
    ]


def test_apps_use_only_earlier_apps():
    edges = graph({n: s for n, s in modules().items() if n.startswith("apps.")})
    inside = {
        name: [other for other in found if other.startswith("apps.")]
        for name, found in edges.items()
        if not name.startswith("apps.__")
    }
    assert rooms_out_of_order(inside, APPS, depth=1) == []


def test_no_modules_import_each_other_in_a_ring():
    assert cycle(graph(modules())) is None


def test_the_root_is_small():
    own = {path.stem for path in PACKAGE.glob("*.py")} - ENTRANCE
    assert len(own) <= MAX_ROOT, sorted(own)


def test_structures_are_asked_by_methods():
    asking = {name for name, source in modules().items() if any(type_questions(source))}
    assert asking <= MAY_ASK_FOR_TYPES


def test_signatures_say_what_they_expect():
    own = {n: s for n, s in modules().items() if n.split(".")[0] not in MEET_OTHERS}
    assert any_per_thousand(own.values()) <= MOST_ANY
    assert any_per_thousand(["def f(x: Any) -> Any:\n", "    return AnyArray\n"]) == 1000


@pytest.mark.parametrize(
    "statement",
    [
        "from ..dual import fit",
        "from ..dual._fit import fit",
        "import dualfluence.fitted._fit",
        "from dualfluence import dual",
        "def f():\n    from ..dual._fit import fit",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..dual import _fit",
    ],
)
def test_a_forbidden_import_is_seen_however_it_is_written(statement):
    known = modules() | {"operators._new": statement}
    assert rooms_out_of_order(graph(known), ORDER) != []


def test_a_ring_and_a_type_question_are_seen():
    one = "def save():\n    from ._b import load"
    ring = {"dual.__init__": "", "dual._a": one, "dual._b": "from ._a import save"}
    assert cycle(graph(ring)) is not None
    assert list(type_questions("isinstance(op, (DenseOperator, int))")) == ["DenseOperator"]
    assert list(type_questions("isinstance(p, NoPreconditioner)")) == ["NoPreconditioner"]


def names_of(source):
    """What a module defines or imports at its top level."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        else:
            stored = (n for n in ast.walk(node) if isinstance(n, ast.Name))
            yield from (n.id for n in stored if isinstance(n.ctx, ast.Store))


def missing_names(source, known):
    """Names that a script imports from the package and that are not there."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dualfluence."):
            path = node.module.removeprefix("dualfluence.")
            inside = known.get(path, known.get(f"{path}.__init__"))
            for alias in node.names:
                submodule = {f"{path}.{alias.name}", f"{path}.{alias.name}.__init__"} & set(known)
                if not submodule and (inside is None or alias.name not in names_of(inside)):
                    yield f"{path}.{alias.name}"


@pytest.mark.parametrize("folder", ["benchmarks", "scripts"])
def test_scripts_import_what_the_package_has(folder):
    """No test runs a benchmark at its size, so that a name that moved would be seen by its next user."""
    known, scripts = modules(), sorted((PACKAGE.parents[1] / folder).rglob("*.py"))
    assert scripts
    assert {
        s.name: found for s in scripts if (found := [*missing_names(s.read_text(), known)])
    } == {}


def test_a_name_that_moved_is_seen():
    found = missing_names("from dualfluence.linalg import folded, lanczos", modules())
    assert list(found) == ["linalg.folded"]
