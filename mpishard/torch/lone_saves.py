"""Checkpoints that rank 0 would write alone, found in the source of the user's program.

``state_dict()`` of an optimizer is collective if ranks have parts of the state. Under
``if rank == 0:`` it ends a job at its first checkpoint, which may be hours later. The first step
therefore looks at the program's files, and warns.
"""

from __future__ import annotations

import ast
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

_log = logging.getLogger("mpishard")

_IS_RANK = re.compile(
    r"rank|master|is_main|main_process|is_chief|is_root|is_leader|gpu_id", re.IGNORECASE
)
_IS_OPTIMIZER = re.compile(r"opt(?!ion)", re.IGNORECASE)
_IS_MODEL = re.compile(r"opt(?!ion)|model|net|module", re.IGNORECASE)
_CALL = "state_dict"
_MOST_FILES = 50
_NOT_OF_USERS = (str(Path(__file__).resolve().parents[1]), str(Path(os.__file__).resolve().parent))


def warn_of_lone_saves(*, gathers: bool) -> None:
    """Warn of each line that calls a collective ``state_dict()`` on one rank, as far as is seen.

    Parameters
    ----------
    gathers : bool
        Whether ``state_dict()`` of a module is collective, too.
    """
    for path in _files():
        try:
            source = path.read_text()
            found = lone_saves(ast.parse(source), gathers=gathers) if _CALL in source else []
        # Before 3.11.8 and 3.12.2 Python raises a SystemError, and a RecursionError for a source
        # of no depth, if two threads parse at once.
        except (OSError, SyntaxError, ValueError, RecursionError, SystemError):
            continue
        for line, text in found:
            _log.warning(
                "%s:%d: %s is collective here, and this line seems to call it on one rank, which "
                "would end the job there. Call it on every rank, and save on rank 0:\n"
                "    state = %s\n    if mst.rank() == 0: torch.save(state, path)\n"
                "or give mst.save(path, model, optimizer) to every rank",
                path,
                line,
                text,
                text,
            )


def _files() -> Iterator[Path]:
    """Yield the files of the program: those of this call's frames, and those beside the script."""
    found = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found.append(frame.f_code.co_filename)
        frame = frame.f_back
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is not None and not _is_installed(script):
        folder = str(Path(script).resolve().parent)
        modules = [getattr(module, "__file__", None) for module in [*sys.modules.values()]]
        found += [name for name in modules if name is not None and name.startswith(folder)]
    own = [
        name for name in dict.fromkeys(found) if name.endswith(".py") and not _is_installed(name)
    ]
    yield from map(Path, own[:_MOST_FILES])


def _is_installed(name: str) -> bool:
    """Return True for a file of this package, of Python, or of an installed package."""
    return name.startswith(_NOT_OF_USERS) or "-packages/" in name


def lone_saves(tree: ast.Module, *, gathers: bool) -> list[tuple[int, str]]:
    """Return line and text of each ``state_dict()`` under a condition on the rank.

    Also of one in a function of the file that is called under such a condition.
    """
    pattern = _IS_MODEL if gathers else _IS_OPTIMIZER
    calls = {
        function.name: found[0]
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and (found := _states(function, pattern))
    }
    lone: dict[int, str] = {}
    for branch in ast.walk(tree):
        if not (isinstance(branch, ast.If) and _selects_one(branch.test)):
            continue
        for statement in branch.body:
            lone.update(_states(statement, pattern))
            lone.update(
                calls[_called(node)]
                for node in ast.walk(statement)
                if isinstance(node, ast.Call) and _called(node) in calls
            )
    return sorted(lone.items())


def _states(tree: ast.AST, pattern: re.Pattern[str]) -> list[tuple[int, str]]:
    """Return line and text of each ``x.state_dict()`` whose x has a name of the pattern."""
    return [
        (node.lineno, ast.unparse(node))
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "state_dict"
        and pattern.search(ast.unparse(node.func.value))
    ]


def _called(node: ast.Call) -> str:
    """Return the name of the function or method that is called; empty if it has none."""
    function = node.func
    return getattr(function, "id", getattr(function, "attr", ""))


def _selects_one(test: ast.expr) -> bool:
    """Return True for a condition that is true on one rank, such as ``rank == 0`` or ``master``."""
    if isinstance(test, ast.BoolOp):
        return any(_selects_one(part) for part in test.values)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        # ``not rank`` is true on rank 0, and ``not master`` on all other ranks.
        return "rank" in ast.unparse(test.operand).lower()
    if isinstance(test, ast.Compare):
        is_equal = isinstance(test.ops[0], ast.Eq | ast.Is)
        sides = ast.unparse(test)
        return is_equal and bool(_IS_RANK.search(sides)) and "-1" not in sides
    if isinstance(test, ast.Call | ast.Name | ast.Attribute):
        named = ast.unparse(test.func if isinstance(test, ast.Call) else test)
        # ``if rank:`` is true on all ranks but one.
        return bool(_IS_RANK.search(named)) and not named.lower().endswith("rank")
    return False
