"""Calls with which the engine communicates, and the engine without one of them.

A *site* is an expression that communicates, or that waits for what communicates. Its mutant is the
function around it, compiled anew with the call replaced by what `forgotten` has in its place, and
put where the function was: no module is imported twice, so classes stay what they are.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import mpishard

PACKAGE = Path(mpishard.__file__).parent
ROOMS = ("callbacks", "mirror", "models", "optimizers", "training")

COLLECTIVES = {
    "allocate_arena", "allocate_shared", "progress", "receive", "receive_async", "send",
    "send_async", "shrink", "split",
    *(
        name + twin
        for name in ("all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather",
                     "reduce_scatter", "scatter")
        for twin in ("", "_async")
    ),
}  # fmt: skip
"""Methods of a backend."""

FUNCTIONS = {
    "agree",
    "differences",
    "gather_texts",
    "same_outcome",
    "share_path",
    "share_text",
    "synchronize",
}
"""Functions on a backend, and the one that waits for a GPU's copies."""

# Methods that are one of the engine's own collectives, with the names that what has them goes by;
# None: any name.
METHODS: dict[str, set[str] | None] = {
    "await_reductions": {"gradients", "_inner"},
    "wait": None,
    "wait_until_over": None,
    "_finish_oldest": {"self"},
    "distribute_constants": {"program"},
    "fence": None,
    "fill": {"parameters", "_inner"},
    "finish": {"gradients", "store", "reduced", "_inner", "reduction", "arrivals"},
    "publish": {"parameters", "_inner", "self"},
    "reduce": {"gradients", "_gradients", "_inner"},
    "gather_in_place": None,
    "reduce_in_place": None,
    "reduce_into": None,
    "refresh": {"parameters", "_inner", "self"},
    "share_changed_state": {"program"},
    "sum_over_owners": {"context"},
    "synchronize": {"replicas"},
}


@dataclass(frozen=True)
class Site:
    """One call, or one reference to a collective that is called elsewhere.

    Attributes
    ----------
    path : Path
        The module.
    index : int
        Which of the module's sites, in the order of `ast.walk`.
    line : int
        Where it begins.
    name : str
        What is called.
    text : str
        The expression.
    function : str
        The function that it stands in, by its path within the module.
    """

    path: Path
    index: int
    line: int
    name: str
    text: str
    function: str

    @property
    def place(self) -> str:
        """File and line, as editors read them."""
        return f"{self.path.relative_to(PACKAGE.parent)}:{self.line}"


@functools.cache
def find_sites() -> tuple[Site, ...]:
    """All sites, file by file."""
    found = []
    for room in ROOMS:
        for path in sorted((PACKAGE / room).rglob("*.py")):
            tree = ast.parse(path.read_text())
            names = dict(_functions(tree))
            for index, (node, name) in enumerate(_site_nodes(tree)):
                line, text = node.lineno, " ".join(ast.unparse(node).split())
                found.append(Site(path, index, line, name, text, names.get(node, "")))
    outside = [site.place for site in found if not site.function]
    if outside:
        raise LookupError(f"these stand in no function, where no mutant can be made: {outside}")
    return tuple(sorted(found, key=lambda site: (site.path, site.line)))


@contextlib.contextmanager
def without(site: Site, forgotten: Any) -> Iterator[None]:
    """In the block the site does not communicate: ``forgotten`` has its replacement."""
    with _replaced(site.path, [site], lambda node, _: _as_forgotten(node), forgotten):
        yield


@contextlib.contextmanager
def watched(sites: Sequence[Site]) -> Iterator[set[Site]]:
    """Yield a set, to which each site that is reached in the block is added."""
    reached: set[Site] = set()

    class Watch:
        @staticmethod
        def note(index: int, value: Any) -> Any:
            reached.add(numbered[index])
            return value

    numbered = dict(enumerate(sites))
    numbers = {site: number for number, site in numbered.items()}

    def noting(node: ast.expr, site: Site) -> ast.expr:
        return _call("note", [ast.Constant(numbers[site]), node])

    with contextlib.ExitStack() as stack:
        for path in {site.path for site in sites}:
            of_file = [site for site in sites if site.path == path]
            stack.enter_context(_replaced(path, of_file, noting, Watch))
        yield reached


# ----------------------------------------------------------------------------------------- finding


def _functions(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Every node within a function, and the outermost function that it stands in."""

    def visit(node: ast.AST, outer: tuple[str, ...]) -> Iterator[tuple[ast.AST, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from visit(child, (*outer, child.name))
            elif isinstance(child, ast.FunctionDef):
                name = ".".join((*outer, child.name))
                for statement in child.body:  # what is in a decorator runs once, at import
                    yield from ((inner, name) for inner in ast.walk(statement))

    return visit(tree, ())


def _site_nodes(tree: ast.AST) -> list[tuple[ast.expr, str]]:
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    found: list[tuple[ast.expr, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := _called(node.func)):
            found.append((node, name))
        elif isinstance(node, ast.Attribute) and id(node) not in called and _of_backend(node):
            found.append((node, node.attr))
    return found


def _called(function: ast.expr) -> str | None:
    if isinstance(function, ast.Name):
        return function.id if function.id in FUNCTIONS else None
    if not isinstance(function, ast.Attribute):
        return None
    if _of_backend(function):
        return function.attr
    if function.attr in METHODS:
        owners = METHODS[function.attr]
        if owners is None or _last_name(function.value) in owners:
            return function.attr
    return None


# What ranks that talk go by, beside names that end with "backend".
GROUPS = {
    "world",
    "replica",
    "model",
    "samples",
    "sample_group",
    "group",
    "ranks",
    "pipeline",
    "tensor",
    "data",
    "axis",
    "_axis",
    "owners",
    "across",
    "_across",
    "_tie_groups",
}


def _of_backend(node: ast.Attribute) -> bool:
    name = _last_name(node.value)
    return node.attr in COLLECTIVES and (name.endswith("backend") or name in GROUPS)


def _last_name(node: ast.expr) -> str:
    """The name of the object that has the method: "backend" of ``self.parameters.backend``."""
    if isinstance(node, ast.Subscript):
        return _last_name(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


# ---------------------------------------------------------------------------------------- replacing


def _as_forgotten(node: ast.expr) -> ast.expr:
    if isinstance(node, ast.Attribute):
        return _call("reference", [node.value, ast.Constant(node.attr)])
    assert isinstance(node, ast.Call)
    if isinstance(node.func, ast.Name):
        return _call(node.func.id, node.args, node.keywords)
    assert isinstance(node.func, ast.Attribute)
    return _call(node.func.attr, [node.func.value, *node.args], node.keywords)


def _call(name: str, args: list[ast.expr], keywords: Sequence[ast.keyword] = ()) -> ast.Call:
    function = ast.Attribute(ast.Name("__instead__", ast.Load()), name, ast.Load())
    return ast.Call(function, args, list(keywords))


class _Replacer(ast.NodeTransformer):
    def __init__(self, replacements: dict[int, Any]) -> None:
        self._replacements = replacements

    def visit(self, node: ast.AST) -> Any:
        self.generic_visit(node)
        make = self._replacements.get(id(node))
        return node if make is None else ast.copy_location(make(node), node)


@contextlib.contextmanager
def _replaced(path: Path, sites: Sequence[Site], make: Any, instead: Any) -> Iterator[None]:
    tree = ast.parse(path.read_text())
    nodes = [node for node, _ in _site_nodes(tree)]
    changes = {id(nodes[site.index]): lambda node, site=site: make(node, site) for site in sites}
    changed = ast.fix_missing_locations(_Replacer(changes).visit(tree))
    codes = list(_codes(compile(changed, str(path), "exec")))
    relative = path.relative_to(PACKAGE.parent).with_suffix("")
    module = importlib.import_module(".".join(relative.parts))
    before = []
    module.__instead__ = instead  # type: ignore[attr-defined]
    try:
        for name in sorted({site.function for site in sites}):
            for function in _functions_named(module, name):
                old = function.__code__
                where = old.co_qualname, old.co_firstlineno
                (new,) = (c for c in codes if (c.co_qualname, c.co_firstlineno) == where)
                before.append((function, old))
                function.__code__ = new
        yield
    finally:
        for function, old in before:
            function.__code__ = old


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def _functions_named(module: Any, name: str) -> list[FunctionType]:
    """The function of this name, behind decorators; of a property its getter and its setter."""
    thing = module
    for part in name.split("."):
        thing = vars(thing)[part]
    if isinstance(thing, property):
        return [function for function in (thing.fget, thing.fset) if function is not None]
    if isinstance(thing, staticmethod | classmethod):
        thing = thing.__func__
    while hasattr(thing, "__wrapped__"):
        thing = thing.__wrapped__
    assert isinstance(thing, FunctionType)
    return [thing]
