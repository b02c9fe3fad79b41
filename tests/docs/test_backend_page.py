"""docs/write-a-backend.md names what a backend has to give, and what the suite holds it to."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

from mpishard.communication import CommunicationBackend
from mpishard.testing import CommunicationConformance

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "write-a-backend.md").read_text()
EXAMPLE = (ROOT / "examples" / "pipe_backend.py").read_text()


class Bare(CommunicationBackend):
    """A backend that adds nothing."""


Bare.__abstractmethods__ = frozenset()
INHERITED = {*dir(CommunicationBackend), *vars(Bare(0, 1))} - {*dir(object)}


def names_of(table: str) -> list[str]:
    """The names in the first column of the table whose head begins with ``table``."""
    rows = re.search(rf"^\| {table} \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    assert rows is not None, table
    cells = [row.split("|")[1] for row in rows[1].splitlines()]
    return [name for cell in cells for name in re.findall(r"`(\w+)", cell)]


def test_every_check_stands_in_the_table_in_its_order():
    assert names_of("check") == CommunicationConformance.names(), (
        "docs/write-a-backend.md says what each check holds: add a row for a new one"
    )


def test_what_a_subclass_must_give_is_what_is_abstract():
    assert sorted(names_of("a subclass must give")) == sorted(
        CommunicationBackend.__abstractmethods__
    )


def test_what_is_abstract_says_what_it_has_to_do():
    for name in CommunicationBackend.__abstractmethods__:
        assert getattr(CommunicationBackend, name).__doc__, name


def test_what_a_subclass_may_give_and_use_is_there():
    assert set(names_of("a subclass may give") + names_of("a subclass uses")) - INHERITED == set()


def test_the_example_uses_nothing_private_that_the_page_does_not_name():
    named = {
        n
        for t in ("a subclass must give", "a subclass may give", "a subclass uses")
        for n in names_of(t)
    }
    used = {n.attr for n in ast.walk(ast.parse(EXAMPLE)) if isinstance(n, ast.Attribute)}
    assert "_reducer" in used
    assert {n for n in used & INHERITED if n.startswith("_")} - named == set()


def test_what_is_quoted_is_in_the_example():
    quotes = re.findall(
        r"<!-- not run: from examples/pipe_backend.py -->\n```python\n(.*?)```", PAGE, re.DOTALL
    )
    assert len(quotes) >= 5
    for quote in quotes:
        assert quote in EXAMPLE, textwrap.shorten(quote, 200)
