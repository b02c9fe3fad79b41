"""The map in docs/architecture.md is one of the tree as it is."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mpishard"


def rooms_of_the_map() -> dict[str, set[str]]:
    """Room -> the files that the map names in it; words that every room uses are rooms, too."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    rooms: dict[str, set[str]] = {}
    inside: list[str] = []
    for line in page.split("```")[1].strip("\n").splitlines():
        if re.match(r" [a-z]", line):
            inside = line.split("   ")[0].strip().split(" . ")
            rooms |= {room: set() for room in inside}
        for room in inside:
            rooms[room] |= set(re.findall(r"\w+\.py", line))
    return rooms


def test_every_room_is_on_the_map() -> None:
    paths = [path for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()]
    assert rooms_of_the_map().keys() == {p.stem for p in paths if not p.name.startswith("__")}


def test_every_file_on_the_map_is_in_its_room() -> None:
    rooms = rooms_of_the_map()
    assert sum(len(files) for files in rooms.values()) > 80
    absent = [f"{r}/{n}" for r, files in rooms.items() for n in files
              if not (PACKAGE / r / n).is_file()]  # fmt: skip
    assert not absent
