"""Draws the rooms of the package and lists them in docs/architecture.md.

python scripts/make_map.py writes docs/images/rooms.svg and the list between the marks of the page.
The rooms and their order are those of the import contract in pyproject.toml; what a room is comes
from the first sentence of its docstring. An arrow is drawn only if such an import exists.
"""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mpishard"
PAGE = ROOT / "docs" / "architecture.md"
PICTURE = ROOT / "docs" / "images" / "rooms.svg"
MARKS = "<!-- rooms: scripts/make_map.py writes them -->", "<!-- end of the rooms -->"

FLOWS = (
    ("distributed", "models", "a plain model and a strategy"),
    ("optimizers", "models", "a batch; then the rule and the gradient"),
    ("optimizers", "data", "a rank's batches"),
    ("models", "nn", "parameters and activations of a layer"),
    ("models", "communication", "units to gather, gradients to sum"),
    ("optimizers", "checkpoint", "pieces of parameters and state, to save"),
    ("callbacks", "observe", "figures of each step"),
)
"""Who calls, who is called, and what is passed."""

_ROW, _GAP, _NAME, _LANE, _LEGEND, _WIDTH = 26, 4, 250, 26, 470, 760


def layers() -> list[list[str]]:
    """The rooms of each layer of the contract, the topmost first."""
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (found,) = (c["layers"] for c in linter["contracts"] if c["containers"] == ["mpishard"])
    return [[name.strip("() ") for name in layer.split("|")] for layer in found]


def sources(room: str) -> list[Path]:
    """The files of a room, its docstring's first."""
    folder = PACKAGE / room
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{room}.py"]


def summary(room: str) -> str:
    """The first sentence of a room's docstring."""
    text = ast.get_docstring(ast.parse(sources(room)[0].read_text())) or ""
    return re.split(r"(?<=\.)\s", " ".join(text.split()), maxsplit=1)[0].replace("``", "`")


def imports(room: str) -> set[str]:
    """The other rooms that a room imports from."""
    text = "".join(path.read_text() for path in sources(room))
    found = re.findall(r"(?:from|import) mpishard\.(\w+)", text)
    for names in re.findall(r"from mpishard import ([\w, ]+)", text):
        found += names.split(", ")
    return set(found) - {room}


def listing() -> str:
    """The rooms from the ground up, each with its sentence."""
    rows = [f"| `{room}` | {summary(room)} |" for layer in reversed(layers()) for room in layer]
    return "\n".join(["| room | what it is |", "|---|---|", *rows])


def drawing() -> str:
    """The rooms as an SVG picture, the ground floor at the bottom, with arrows for what flows."""
    rows = layers()
    middle = {room: index * (_ROW + _GAP) + _ROW // 2
              for index, layer in enumerate(rows) for room in layer}  # fmt: skip
    height = len(rows) * (_ROW + _GAP)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
            'font-family="sans-serif" font-size="13">'
        ),
        (
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="#246"/></marker></defs>'
        ),
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
    ]
    for index, layer in enumerate(rows):
        share = (_NAME - _GAP * (len(layer) - 1)) // len(layer)
        for place, room in enumerate(layer):
            left, top = place * (share + _GAP), index * (_ROW + _GAP)
            parts.append(
                f'<rect x="{left}" y="{top}" width="{share}" height="{_ROW}" rx="4" '
                f'fill="#dfe9f5"/><text x="{left + share / 2:g}" y="{top + 18}" '
                f'text-anchor="middle">{escape(room)}</text>'
            )
    for lane, (caller, called, what) in enumerate(FLOWS):
        if called not in imports(caller):
            raise ValueError(f"{caller} does not import {called}: change FLOWS in {__file__}")
        first, last = (middle[room] + _offset(room, lane) for room in (caller, called))
        at, text = _NAME + 24 + lane * _LANE, 12 + lane * _ROW
        parts.append(
            f'<path d="M{_NAME + 2} {first:g}H{at}V{last:g}H{_NAME + 2}" fill="none" stroke="#246" '
            'marker-end="url(#tip)"/>'
            f"{_number(lane + 1, at, (first + last) / 2)}{_number(lane + 1, _LEGEND, text)}"
            f'<text x="{_LEGEND + 16}" y="{text + 5}">{escape(what)}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def _offset(room: str, lane: int) -> float:
    """How far below the middle of a room an arrow starts or ends, so that arrows do not meet."""
    lanes = [at for at, (caller, called, _) in enumerate(FLOWS) if room in (caller, called)]
    return (lanes.index(lane) - (len(lanes) - 1) / 2) * (_ROW / (len(lanes) + 1))


def _number(number: int, x: float, y: float) -> str:
    return (
        f'<circle cx="{x:g}" cy="{y:g}" r="8" fill="#246"/><text x="{x:g}" y="{y + 4:g}" '
        f'fill="white" font-size="11" text-anchor="middle">{number}</text>'
    )


def page() -> str:
    """Return the page with the list of today."""
    before, rest = PAGE.read_text().split(MARKS[0])
    return f"{before}{MARKS[0]}\n\n{listing()}\n\n{MARKS[1]}{rest.partition(MARKS[1])[2]}"


def main() -> None:
    """Write the picture and the page."""
    PICTURE.write_text(drawing())
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
