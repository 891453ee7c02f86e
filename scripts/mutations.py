"""Small bugs that can be planted in a Python source: where, and what stands there instead.

Used by `mutants.py`. Only what a program computes is changed: no texts, annotations, decorators, errors
that are raised, names of fields, progress lines or the words of `__repr__`.
"""

import ast
import dataclasses
from collections.abc import Iterator

ARITHMETIC = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"),
              ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "+"), ast.Pow: ("**", "*"),
              ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&")}  # fmt: skip
COMPARISONS = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
               ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"),
               ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
               ast.NotIn: ("not in", "in")}  # fmt: skip
WORDS = {"__repr__", "__str__", "_repr_html_", "__doc__"}
"""Functions that make words alone."""
LABELS = {
    "progress",
    "label",
    "desc",
    "description",
    "message",
    "note",
    "notes",
    "title",
    "stacklevel",
    "maxsize",
    "strict",
}
"""Arguments that are shown or guard, not computed with: sizes of caches, equal lengths of what is zipped."""
SYMMETRIC = {"min", "max", "minimum", "maximum", "vdot", "union1d", "hypot", "logaddexp"}
"""Functions of two arguments in any order."""
SPOKEN = {"warn", "debug", "info", "echo", "print", "append_note", "note", "tick", "advance"}
"""Calls whose loss or arguments change what is said, not what is computed."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change: bytes `start` to `stop` of `file` become `new`."""

    file: str
    start: int
    stop: int
    old: str
    new: str
    kind: str
    line: int
    function: str

    @property
    def change(self) -> str:
        return f"{' '.join(self.old.split())} -> {' '.join(self.new.split())}"

    def plant(self, source: bytes) -> bytes:
        assert source[self.start : self.stop].decode() == self.old, "the source has changed"
        return source[: self.start] + self.new.encode() + source[self.stop :]


class Places:
    """Byte offsets of the nodes of a source."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self.lines = [0]
        for line in source.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))

    def start(self, node: ast.AST) -> int:
        return self.lines[node.lineno - 1] + node.col_offset

    def stop(self, node: ast.AST) -> int:
        return self.lines[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.AST) -> str:
        return self.source[self.start(node) : self.stop(node)].decode()


class Finder(ast.NodeVisitor):
    """Collects mutants; `scope` is the function that a node is in."""

    def __init__(self, file: str, source: bytes) -> None:
        self.file, self.at = file, Places(source)
        self.scope: list[str] = []
        self.found: list[Mutant] = []

    def add(self, start: int, stop: int, new: str, kind: str) -> None:
        old = self.at.source[start:stop].decode()
        line = self.at.source[:start].count(b"\n") + 1
        where = ".".join(self.scope)
        self.found.append(Mutant(self.file, start, stop, old, new, kind, line, where))

    def replace(self, node: ast.AST, new: str, kind: str) -> None:
        self.add(self.at.start(node), self.at.stop(node), new, kind)

    def token(self, left: ast.AST, right: ast.AST, pair: tuple[str, str], kind: str) -> None:
        """The operator between two operands, which may stand in parentheses."""
        start, stop = self.at.stop(left), self.at.start(right)
        place = self.at.source[start:stop].find(pair[0].encode())
        if place >= 0:
            self.add(start + place, start + place + len(pair[0]), pair[1], kind)

    # What is left alone.

    def visit_Raise(self, node): ...
    def visit_JoinedStr(self, node): ...
    def visit_Import(self, node): ...
    def visit_ImportFrom(self, node): ...
    def visit_Global(self, node): ...

    def visit_Assert(self, node):
        self.visit(node.test)

    def visit_AnnAssign(self, node):
        if node.value is not None:
            self.visit(node.value)

    def visit_function(self, node):
        if node.name in WORDS:
            return
        self.scope.append(node.name)
        plain, defaults = [*node.args.posonlyargs, *node.args.args], node.args.defaults
        pairs = list(zip(plain[len(plain) - len(defaults) :], defaults, strict=True))
        for arg, default in [
            *pairs,
            *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True),
        ]:
            if default is not None and arg.arg not in LABELS:
                self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self.scope.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_function

    def visit_ClassDef(self, node):
        self.scope.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self.scope.pop()

    def visit_Lambda(self, node):
        self.visit(node.body)

    def visit_keyword(self, node):
        if node.arg not in LABELS:
            self.visit(node.value)

    # What is changed.

    def visit_BinOp(self, node):
        texts = any(isinstance(side, ast.JoinedStr | ast.Constant) and not _is_number(side)
                    for side in (node.left, node.right))  # fmt: skip
        if not texts:
            if pair := ARITHMETIC.get(type(node.op)):
                self.token(node.left, node.right, pair, "operator")
            self.generic_visit(node)

    def visit_Compare(self, node):
        if len(node.ops) == 1 and not (
            isinstance(node.left, ast.Name) and node.left.id in ("__name__", "TYPE_CHECKING")
        ):
            self.token(node.left, node.comparators[0], COMPARISONS[type(node.ops[0])], "comparison")
        self.generic_visit(node)

    def visit_BoolOp(self, node):
        pair = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        self.token(node.values[0], node.values[1], pair, "and/or")
        self.generic_visit(node)

    def visit_UnaryOp(self, node):
        if isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
            self.replace(node, self.at.text(node.operand), "sign")
        self.generic_visit(node)

    def visit_Constant(self, node):
        if isinstance(node.value, bool):
            self.replace(node, str(not node.value), "constant")
        elif _is_number(node) and node.value == node.value:
            new = node.value + 1 if isinstance(node.value, int) else 2 * node.value or 1.0
            self.replace(node, f"({new!r})", "constant")

    def condition(self, node):
        test = node.test
        if not (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"):
            self.replace(test, f"(not ({self.at.text(test)}))", "condition")
            self.generic_visit(node)

    visit_If = visit_IfExp = visit_While = condition

    def visit_Expr(self, node):
        if isinstance(node.value, ast.Constant):
            return
        if isinstance(node.value, ast.Call) and _called(node.value) not in SPOKEN:
            self.replace(node, "pass", "dropped call")
        self.generic_visit(node)

    def visit_Return(self, node):
        if isinstance(node.value, ast.BinOp):
            self.replace(node.value, f"-({self.at.text(node.value)})", "sign")
        self.generic_visit(node)

    def visit_Call(self, node):
        if _called(node) in SPOKEN:
            return
        plain = [
            arg for arg in node.args[:2] if not isinstance(arg, ast.Starred | ast.GeneratorExp)
        ]
        one, two = (self.at.text(arg) for arg in plain) if len(plain) == 2 else ("", "")
        fixed = SYMMETRIC | {"isinstance", "getattr", "hasattr", "setattr"}
        if one != two and _called(node) not in fixed:
            between = self.at.source[self.at.stop(plain[0]) : self.at.start(plain[1])].decode()
            start, stop = self.at.start(plain[0]), self.at.stop(plain[1])
            self.add(start, stop, f"{two}{between}{one}", "swapped arguments")
        self.generic_visit(node)


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def mutants(file: str, source: bytes) -> list[Mutant]:
    """Every mutant of a source; a few are not Python (`parses`)."""
    finder = Finder(file, source)
    finder.visit(ast.parse(source))
    return finder.found


def parses(source: bytes) -> bool:
    """Whether this is still Python."""
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function with its name as in `Mutant.function`."""

    def below(node: ast.AST, names: tuple[str, ...]):
        for child in ast.iter_child_nodes(node):
            inner = names
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = (*names, child.name)
                if not isinstance(child, ast.ClassDef):
                    yield ".".join(inner), child
            yield from below(child, inner)

    yield from below(tree, ())


SEEN = "__planted_seen__"
"""Name, among Python's builtins, of the set of functions that have run."""


def watched(file: str, source: str) -> str:
    """The source with a line in every function that says that it ran."""
    tree, lines = ast.parse(source), source.split("\n")
    inserts: list[tuple[int, str]] = []
    for name, node in functions(tree):
        body = node.body
        said = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
        first = body[1] if said and len(body) > 1 else body[0]
        line = min([first.lineno, *(d.lineno for d in getattr(first, "decorator_list", []))])
        if first.lineno != node.lineno and not (said and len(body) == 1):
            mark = f"{' ' * first.col_offset}_planted_seen.add({f'{file}::{name}'!r})"
            inserts.append((line - 1, mark))
    heads = [n for n in tree.body if isinstance(n, ast.ImportFrom) and n.module == "__future__"]
    if ast.get_docstring(tree, clean=False) is not None:
        heads.append(tree.body[0])
    top = max((node.end_lineno for node in heads), default=0)
    start = "import builtins as _b; " + f"_planted_seen = _b.__dict__.setdefault({SEEN!r}, set())"
    for place, text in sorted([*inserts, (top, start)], key=lambda pair: -pair[0]):
        lines.insert(place, text)
    return "\n".join(lines)
