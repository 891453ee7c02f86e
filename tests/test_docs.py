"""What is public is documented, and what is shown runs."""

import ast
import contextlib
import doctest
import importlib
import inspect
import io
import re
import sys
from pathlib import Path

import pytest

import dualfluence

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PACKAGE = Path(dualfluence.__file__).parent
sys.path.insert(0, str(DOCS / "_ext"))

import make_numbers  # noqa: E402
import numbers_in_sentences  # noqa: E402
from markdown_docstrings import to_rest  # noqa: E402
from public import public_names, public_namespaces  # noqa: E402

pytestmark = [pytest.mark.host, pytest.mark.ordinary]

DIRECTIVE = re.compile(r"^```\{namespace\} (\S+)\n(.*?)```$", re.DOTALL | re.MULTILINE)
FENCED = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
PAGES = sorted(p for p in DOCS.rglob("*.md") if "_build" not in p.parts)
ILLUSTRATED = {"adapters.md"}
"""Pages whose lines need frameworks and a reader's own model; `tests/adapters` runs such lines."""
LONG = {"clean.md", "inputs.md", "penalty.md", "text.md"}

NAMESPACES = public_namespaces()


def documented():
    """Module -> names in its directives on the reference pages; `None` stands for all the rest."""
    found = {}
    for page in (DOCS / "api").glob("*.md"):
        for module, names in DIRECTIVE.findall(page.read_text()):
            found.setdefault(module, []).extend(names.split() or [None])
    return found


def own_docstring(value):
    """The docstring somebody wrote: not inherited, not made by `dataclass`."""
    doc = value.__doc__ if not inspect.isclass(value) else vars(value).get("__doc__")
    return doc if doc and not doc.startswith(f"{getattr(value, '__name__', '')}(") else None


@pytest.mark.parametrize("module", NAMESPACES)
def test_every_public_name_is_in_the_reference(module):
    names = documented().get(module)
    assert names is not None, f"docs/api has no page for {module}"
    public = set(public_names(importlib.import_module(module)))
    assert names[-1] is None or public <= set(names)
    assert {name for name in names if name} <= public


@pytest.mark.parametrize("module", NAMESPACES)
def test_every_public_name_says_what_it_is(module):
    public = public_names(importlib.import_module(module))
    callables = {name: value for name, value in public.items() if callable(value)}
    assert [name for name, value in callables.items() if not own_docstring(value)] == []


def test_the_rooms_where_a_new_thing_goes_exist():
    rows = re.findall(
        r"^\| [^|]+ \| `(\w+/[a-z_.]*)`", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE
    )
    assert len(rows) >= 10
    missing = [place for place in rows if not (PACKAGE / place).exists()]
    assert [place for place in missing if not (ROOT / place).exists()] == []


def test_tables_of_numbers_are_those_of_their_records():
    assert [
        page for page in make_numbers.PAGES if "<!-- numbers: " not in (ROOT / page).read_text()
    ] == []
    assert make_numbers.main(["--check"]) == 0


def test_a_number_that_differs_from_its_record_is_seen():
    text = (ROOT / "README.md").read_text()
    wrong = text.replace("| 9.1 ms |", "| 9.2 ms |")
    assert wrong != text
    assert make_numbers.renewed(wrong) == text


def test_a_number_in_a_sentence_that_differs_from_its_record_is_seen():
    page = "docs/howto/choose.md"
    text = (ROOT / page).read_text()
    wrong = text.replace("0.85 ms (median", "0.86 ms (median")
    assert wrong != text
    assert numbers_in_sentences.missing({page: text}) == []
    (found,) = numbers_in_sentences.missing({page: wrong})
    assert found.startswith(f"{page}: A deletion of one of 2,000 points takes 0.85 ms")


def run(blocks, name):
    """Python blocks in order in one namespace, as a reader would."""
    scope, out = {"__name__": name}, io.StringIO()
    with contextlib.redirect_stdout(out):
        for number, block in enumerate(blocks, 1):
            exec(compile(block, f"{name}, block {number}", "exec"), scope)
    return out.getvalue()


@pytest.mark.thorough
def test_the_examples_of_the_readme_run():
    blocks = FENCED.findall((ROOT / "README.md").read_text())
    assert len(blocks) >= 3
    printed = run(blocks, "README.md")
    assert re.search(r"one step: .* from retraining, certified", printed)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(p, marks=[pytest.mark.thorough] * (p.name in LONG), id=p.name)
        for p in PAGES
        if FENCED.search(p.read_text()) and p.name not in ILLUSTRATED
    ],
)
def test_the_examples_of_the_pages_run(page):
    run(FENCED.findall(page.read_text()), page.name)


MADE = {"AbstractKernelOperator", "Adapted", "Dataset", "Desk", "Linearized", "PrecomputedKernel",
        "StoredOperator"}  # fmt: skip
"""What calls return to be given to other calls: models, data, operators. Results are for a reader."""


def returned(value):
    """Words in the return annotations of a function, or of the methods of a class."""
    inside = vars(value).values() if inspect.isclass(value) else [value]
    for each in (getattr(v, "fget", v) for v in inside):
        plain = inspect.unwrap(getattr(getattr(each, "__func__", each), "fn", each))
        kind = getattr(plain, "__annotations__", {}).get("return", "")
        yield from re.findall(
            r"\w+", kind if isinstance(kind, str) else getattr(kind, "__name__", "")
        )


def results():
    """Public classes that public calls return, in the rooms that users call by name."""
    asked = {m: public_names(importlib.import_module(m)) for m in NAMESPACES}
    build = ("infinite", "losses", "models", "operators", "problem", "solvers")
    asked = {m: names for m, names in asked.items() if m.rpartition(".")[2] not in build}
    classes = {n for names in asked.values() for n, v in names.items() if inspect.isclass(v)}
    found = {
        w for names in asked.values() for v in names.values() if callable(v) for w in returned(v)
    }
    return found & classes - MADE


def test_every_result_has_an_example():
    page = (DOCS / "howto" / "results.md").read_text()
    found = results()
    assert {"Fitted", "Update", "Audit", "Published", "Store"} <= found
    assert [name for name in sorted(found) if not re.search(rf"\b{name}\b", page)] == []


def docstrings(root=PACKAGE):
    """Every docstring of the package with its place."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for file in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                yield f"{file.relative_to(root)}: {getattr(node, 'name', 'module')}", text


def run_docstring(place, text):
    """Number of examples; raises where one fails."""
    examples = doctest.DocTestParser().get_doctest(text, {}, place, place, 0)
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(examples)
    assert not result.failed, place
    blocks = FENCED.findall(text)
    run(blocks, place)
    return result.attempted + len(blocks)


def test_the_examples_of_docstrings_run():
    for place, text in docstrings():
        run_docstring(place, text)


def test_a_broken_example_is_seen():
    assert (
        run_docstring("here", "Adds.\n\n>>> 1 + 1\n2\n\n```python\nassert 1 + 1 == 2\n```\n") == 2
    )
    with pytest.raises(AssertionError), contextlib.redirect_stdout(io.StringIO()):
        run_docstring("here", ">>> 1 + 1\n3\n")
    with pytest.raises(ZeroDivisionError):
        run_docstring("here", "```python\n1 / 0\n```\n")


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda p: p.name
)
def test_links_lead_to_files(page):
    links = [link for link in LINK.findall(page.read_text()) if link != "report.html"]
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize(
    ("markdown", "rest"),
    [
        ("`x` and `y`s", "``x`` and ``y``\\ s"),
        ("$a$, the `K`", ":math:`a`, the ``K``"),
        ("so\n$$a\n  b$$\nthen", "so\n\n\n.. math::\n\n   a\n   b\n\n\nthen"),
        ("`$HOME`", "``$HOME``"),
        (
            "| a | b |\n|---|---|\n| `x` | y |",
            "\n.. list-table::\n   :header-rows: 1\n\n   * - a\n     - b\n   * - ``x``\n     - y\n\n",
        ),
    ],
)
def test_docstrings_become_restructured_text(markdown, rest):
    assert to_rest(markdown) == rest
