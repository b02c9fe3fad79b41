"""One module reads the environment, so that the page of settings can list all variables."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import mpishard

PACKAGE = Path(mpishard.__file__).parent
THE_ONE = "base/settings.py"
PROGRAMS_OF_THEIR_OWN = {"cli/run/rank_agent.py", "cli/run/host_agent.py"}
"""Runs before each rank, without the package: its argument names a variable of the launcher."""

OF_THE_ENVIRONMENT = {
    "environ", "environb", "getenv", "getenvb", "get_exec_path", "putenv", "unsetenv",
    "expandvars",
}  # fmt: skip


def looks_at_the_environment(source: str) -> list[int]:
    """Lines that name one of the ways to the environment, as an attribute or by import."""
    lines: list[int] = []
    if not any(name in source for name in OF_THE_ENVIRONMENT):  # much faster than to parse
        return lines
    for node in ast.walk(ast.parse(source)):
        names = {node.attr} if isinstance(node, ast.Attribute) else set()
        if isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
        if names & OF_THE_ENVIRONMENT:
            lines.append(node.lineno)
    return lines


@pytest.mark.parametrize(
    "source", ["import os\nos.environ['A']", "\nfrom os import getenv", "\nx.os.environ.get('A')"]
)
def test_the_check_finds_each_access_to_the_environment(source: str) -> None:
    assert looks_at_the_environment(source) == [2]


def test_the_environment_is_read_and_set_in_settings_alone() -> None:
    files = {
        path.relative_to(PACKAGE).as_posix(): looks_at_the_environment(path.read_text())
        for path in PACKAGE.rglob("*.py")
    }
    assert {name for name, lines in files.items() if lines} == {THE_ONE} | PROGRAMS_OF_THEIR_OWN
