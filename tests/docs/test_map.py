"""The maps in docs/architecture.md are those of the tree as it is."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import draw_strategies
import make_map
import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mpishard"
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def rooms_of(fence: str) -> dict[str, set[str]]:
    """Chapter -> the files that the map names in it."""
    rooms: dict[str, set[str]] = {}
    inside: list[str] = []
    for line in fence.strip("\n").splitlines():
        if re.match(r" [a-z]", line):
            inside = line.split("   ")[0].strip().split(" . ")
            rooms |= {room: set() for room in inside}
        for room in inside:
            rooms[room] |= set(re.findall(r"[\w/]+\.py", line))
    return rooms


def test_the_list_and_the_drawing_of_the_rooms_are_those_of_the_contract() -> None:
    assert make_map.page() == PAGE, "python scripts/make_map.py writes the page anew"
    assert make_map.drawing() == make_map.PICTURE.read_text(), "python scripts/make_map.py"
    assert make_map.listing().count("\n| `") == sum(map(len, make_map.layers())) > 20


def test_an_arrow_that_no_import_follows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_map, "FLOWS", (("data", "models", "nothing"),))
    with pytest.raises(ValueError, match="data does not import models"):
        make_map.drawing()


def test_the_chapters_of_communication_stand_in_their_order_with_all_their_files() -> None:
    fence = PAGE.partition("## The chapters of communication")[2].split("```")[1]
    drawn = {name.removesuffix(".py"): files for name, files in rooms_of(fence).items()}
    room = PACKAGE / "communication"
    there = {
        path.stem: {file.name for file in path.glob("*.py")} - {"__init__.py"} or {path.name}
        for path in room.iterdir()
        if not path.name.startswith("__") and (path.is_file() or any(path.glob("*.py")))
    }
    assert drawn == there
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = [
        c["layers"]
        for c in linter["contracts"]
        if c.get("containers") == ["mpishard.communication"]
    ]
    order = list(drawn)
    places = [[order.index(name) for name in layer.split(" | ")] for layer in reversed(layers)]
    assert sorted(map(sorted, places)) == list(map(sorted, places))


def test_every_file_on_the_walks_is_there() -> None:
    walks = PAGE.partition("## Life of an all-reduce")[2].partition("## The flat vector")[0]
    files = set(re.findall(r"`([a-z_]+/\w+\.py)`", walks))
    assert len(files) > 20
    rooms = PACKAGE, PACKAGE / "communication"
    assert not [name for name in files if not any((room / name).is_file() for room in rooms)]


def test_every_function_on_the_walk_of_an_all_reduce_is_in_its_file() -> None:
    walk = PAGE.partition("## Life of an all-reduce")[2].partition("Variants")[0]
    cells = [row.split("|")[2] for row in walk.splitlines() if re.match(r"\| \d", row)]
    steps = [step for cell in cells for step in re.findall(r"`(\w+/\w+\.py)`: ([^;]*)", cell)]
    named = [(file, name) for file, names in steps for name in re.findall(r"`([\w.]+)`", names)]
    assert len(named) > 15
    for file, name in named:
        source = (PACKAGE / "communication" / file).read_text()
        for part in name.split("."):
            assert re.search(rf"(def|class) {part}\b", source), f"{file}: {name}"


def test_the_picture_of_the_strategies_is_that_of_their_ledgers() -> None:
    for columns, picture in draw_strategies.PICTURES.items():
        assert draw_strategies.drawing(columns) == picture.read_text(), (
            "python scripts/draw_strategies.py"
        )
