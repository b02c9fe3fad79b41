"""Every Python block of every page runs, top to bottom in one namespace, and prints what it says.

What a page's author needs to know:

* A fence ``python`` is run; blocks of a page share their names, and the folder that they run in.
* A fence ``output`` right behind it is what the block prints. ``...`` stands for anything. A block
  that is meant to fail ends, in its output, with ``ErrorClass: message``, as Python shows it.
* ``<!-- not run: why -->`` before a fence leaves it out; ``<!-- needs: module -->`` where that
  module is not installed.
* Call sites and tracebacks name a block ``example.py``, with the lines counted in the block.

README's blocks are whole programs: ``tests/test_readme.py`` runs them alone and under MPI.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
from cupy_stand_in.kernels import compiler

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.glob("*.md"))
# A page with fewer blocks than this has lost some, or the pattern below has stopped finding them.
AT_LEAST = {
    "bring-your-own-model": 6,
    "checkpoints": 4,
    "collectives": 12,
    "meshes": 10,
    "pipeline-schedules": 5,
    "shards-and-units": 5,
    "sharp-bits": 8,
    "strategies": 2,
    "traces": 1,
    "tensor-parallel": 4,
    "training-loop": 8,
    "tutorial": 5,
    "troubleshooting": 20,
    "write-a-backend": 12,
}

_FENCE = re.compile(
    r"^(?:<!-- (?P<mark>not run|needs): (?P<why>.*?) -->\n)?"
    r"```python\n(?P<code>.*?)^```$"
    r"(?:\n+```output\n(?P<output>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)


@dataclass
class Block:
    """A fence of Python: its line in the page, what it prints, and whether it is left out."""

    line: int
    code: str
    output: str | None
    mark: str | None
    why: str


def blocks_of(text: str) -> list[Block]:
    """The Python fences of a page, in order."""
    return [
        Block(
            text.count("\n", 0, found.start("code")),
            found["code"],
            found["output"],
            found["mark"],
            found["why"] or "",
        )
        for found in _FENCE.finditer(text)
    ]


def matches(expected: str, actual: str) -> bool:
    """Whether ``actual`` is ``expected``, in which ``...`` stands for anything."""
    parts = [re.escape(part) for part in expected.strip().split("...")]
    return re.fullmatch(".*?".join(parts), actual.strip(), re.DOTALL) is not None


def run(block: Block, module: ModuleType) -> str:
    """What the block prints, and the exception that ends it, if its output says that one does."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(block.code, "example.py", "exec"), module.__dict__)
        except Exception as error:
            name = type(error).__name__
            if block.output is None or f"{name}: " not in block.output:
                error.add_note(f"in the block of line {block.line}")
                raise
            printed.write(f"{name}: {error}\n")
    return printed.getvalue()


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Where the names of a page live; its programs write in a folder of their own."""
    for variable in ("PMI_SIZE", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    made = ModuleType("__main__")
    # Classes of a page find their module where dataclasses and pickle look for it.
    monkeypatch.setitem(sys.modules, "__main__", made)
    with mock.patch.dict(os.environ):  # what a page sets, the next does not see
        yield made


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_run_and_print_what_they_say(page, module):
    blocks = blocks_of(page.read_text())
    assert len(blocks) >= AT_LEAST.get(page.stem, 0)
    for block in blocks:
        if block.mark == "needs" and importlib.util.find_spec(block.why) is None:
            pytest.skip(f"line {block.line} needs {block.why}")
        if "cupy_stand_in" in block.code and compiler() is None:
            pytest.skip(
                f"line {block.line} needs a C++ compiler, by which the stand-in runs kernels"
            )
        if block.mark == "not run":
            assert len(block.why) > 10, f"line {block.line}: why is it not run?"
            continue
        printed = run(block, module)
        if block.output is None:
            assert printed == "", f"line {block.line} prints, and the page does not say what"
        else:
            assert matches(block.output, printed), (
                f"line {block.line} of {page.name} prints\n{printed}\nand the page says\n"
                f"{block.output}"
            )


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_every_fence_is_found_and_every_link_leads_somewhere(page):
    text = page.read_text()
    assert len(blocks_of(text)) == text.count("```python"), "a fence that the pattern misses"
    assert text.count("```output") == sum(b.output is not None for b in blocks_of(text))
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []
    named = re.findall(r"`((?:tests|scripts|docs|examples|benchmarks)/[\w/.-]+)", text)
    assert [name for name in named if not (ROOT / name.rstrip(".")).exists()] == []


def imported(source: str) -> list[str]:
    """The packages that a program imports at its top, in order; none if it is no program."""
    try:
        statements = ast.parse(source).body
    except SyntaxError:
        return []
    names = []
    for each in statements:
        if isinstance(each, ast.Import):
            names += [alias.name for alias in each.names]
        elif isinstance(each, ast.ImportFrom):
            names.append(each.module or "")
    return [name.partition(".")[0] for name in names]


def test_printed_programs_import_mpishard_before_numpy():
    """mpishard warns if NumPy is loaded before it, with kernels that are slower here."""
    programs = {
        page: [b.code for b in blocks_of(page.read_text())]
        for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "README.md"]
    }
    programs |= {path: [path.read_text()] for path in (ROOT / "examples").glob("*.py")}
    late = {
        page.name
        for page, sources in programs.items()
        for names in map(imported, sources)
        if "mpishard" in names
        and {"numpy", "torch", "sklearn", "autograd", "jax"} & {*names[: names.index("mpishard")]}
    }
    assert late == set()


def test_a_wrong_output_is_noticed(module):
    (block,) = blocks_of("```python\nprint(1, 'and', 2)\n```\n\n```output\n1 ... 2\n```\n")
    printed = run(block, module)
    assert matches(block.output, printed)
    assert not matches("1 ... 3", printed)
    assert not matches("1 and", printed)
    with pytest.raises(ZeroDivisionError):
        run(Block(1, "1 / 0", "ValueError: no", None, ""), module)
    assert run(Block(1, "1 / 0", "ZeroDivisionError: ...", None, ""), module).startswith("ZeroDiv")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_fits_its_column_and_outputs_hold_whole_numbers(page):
    """The column shows 100 characters. Outputs wrap, and errors may hold any number."""
    for block in blocks_of(page.read_text()):
        assert max(map(len, block.code.split("\n"))) <= 100, f"line {block.line}"
        cut = [line for line in (block.output or "").split("\n") if re.search(r"\d\.\.\.", line)]
        assert [line for line in cut if "Error: " not in line] == [], f"line {block.line}"


def test_the_site_begins_with_installation_and_tutorial():
    site = (ROOT / "mkdocs.yml").read_text()
    pages = re.findall(r"^ +- (?:\w+: )?(\S+\.md)$", site, re.MULTILINE)
    assert pages[:3] == ["index.md", "install.md", "tutorial.md"]
    assert "scheme: slate" in site
    style = (DOCS / "stylesheets" / "extra.css").read_text()
    assert "class: output" in site  # the mark that the style sheet wraps long lines by
    assert re.search(r"pre\.output > code \{[^}]*white-space: pre-wrap", style)


def test_the_first_page_leads_to_every_page():
    first = (DOCS / "index.md").read_text()
    assert [page.name for page in PAGES if f"({page.name})" not in first] == ["index.md"]
