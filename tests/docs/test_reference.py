"""The reference has every public name; scripts/docs.sh, which is slower, has mkdocs build it."""

import importlib
import importlib.util
import inspect
import pkgutil
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import mpishard

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
# What mkdocstrings is told to show: of each, `names_of`.
NAMES = [n for p in PAGES for n in re.findall(r"^::: (\S+)$", p.read_text(), re.MULTILINE)]
HAS_TORCH = importlib.util.find_spec("torch") is not None
SHOWN = [name for name in NAMES if name != "mpishard.torch" or HAS_TORCH]


def names_of(room):
    """What mkdocstrings shows of a room: __all__, or what is defined there."""
    own = [
        name
        for name, value in vars(room).items()
        if getattr(value, "__module__", "") == room.__name__ or name.isupper()
    ]
    return getattr(room, "__all__", [name for name in own if not name.startswith("_")])


def is_documented(room, name):
    """Whether mkdocstrings finds a docstring: of a constant, the string behind it."""
    value = getattr(room, name)
    if (inspect.isclass(value) or inspect.isroutine(value)) and value.__name__ == name:
        return bool(inspect.getdoc(value))
    files = Path(room.__file__)
    texts = files.parent.rglob("*.py") if files.name == "__init__.py" else [files]
    pattern = re.compile(rf'^{name}\b[^\n]* = [^\n]*\n(?:[ )\]}}][^\n]*\n)*"""', re.MULTILINE)
    return any(pattern.search(text.read_text()) for text in texts)


def test_every_room_has_a_page():
    rooms = {
        f"mpishard.{found.name}" for found in pkgutil.iter_modules(mpishard.__path__) if found.ispkg
    }
    # The pages of errors and settings show what base has for users.
    assert rooms - set(NAMES) == {"mpishard.base", "mpishard.cli"}


@pytest.mark.parametrize("name", SHOWN)
def test_every_name_of_a_room_is_shown(name):
    room = importlib.import_module(name)
    assert [name for name in names_of(room) if not is_documented(room, name)] == []


def test_every_name_of_the_package_is_in_a_room():
    rooms = [importlib.import_module(name) for name in SHOWN]
    shown = {id(getattr(room, name)) for room in rooms for name in names_of(room)}
    shown |= {id(room) for room in rooms}
    assert [n for n in mpishard.__all__ if id(getattr(mpishard, n)) not in shown] == []


def test_every_page_is_in_the_menu():
    menu = (ROOT / "mkdocs.yml").read_text()
    pages = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")]
    assert [str(page) for page in pages if f" {page}\n" not in menu] == []


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(("option", "code"), [("--help", 0), ("--serv", 2)])
def test_the_script_says_how_it_is_used(option, code):
    ended = subprocess.run(
        ["bash", str(ROOT / "scripts" / "docs.sh"), option],
        capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    assert ended.returncode == code, ended.stderr
    assert "usage: scripts/docs.sh [--serve]" in ended.stdout + ended.stderr
