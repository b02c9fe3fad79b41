"""Draws who stores what under four strategies: strategies.svg, and a narrow one for phones.

python scripts/draw_strategies.py trains a step of each strategy on four thread-ranks that share no
memory, and draws the shares that their memory ledgers count, in docs/images. The colours follow the
dark mode of the reader's system.
"""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import numpy as np

import mpishard as ms

_IMAGES = Path(__file__).parents[1] / "docs" / "images"
PICTURES = {2: _IMAGES / "strategies.svg", 1: _IMAGES / "strategies-narrow.svg"}
"""A file for each number of strategies side by side."""
RANKS = 4
KINDS = ("parameters", "gradients", "optimizer_state")
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")

_CELL, _BAR, _GAP, _LEFT, _TOP, _ROW = 16, 74, 12, 64, 60, 24
_WIDTH, _HEIGHT = 3 * _BAR + 2 * _GAP + 34, _TOP + RANKS * _ROW + 10
_STYLE = """
text { font-family: sans-serif; font-size: 13px; fill: #1f2328; }
.small { font-size: 12px; fill: #59636e; }
.parameters { fill: #2f6fb0; } .gradients { fill: #c8762b; } .optimizer_state { fill: #3a8a5f; }
.none { fill: none; stroke: #c4cbd3; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .small { fill: #9aa4af; } .none { stroke: #4a525c; }
  .parameters { fill: #5b9bdd; } .gradients { fill: #e29a55; } .optimizer_state { fill: #5fb98a; }
}
"""


def shares(strategy: str) -> dict[str, float]:
    """Return the share of a vector of each kind that a rank stores after a step."""

    def main(backend: ms.CommunicationBackend) -> dict[str, float]:
        model = ms.as_distributed(ms.nn.MLP([16] * 9, seed=0), backend, strategy)
        optimizer = ms.as_distributed(ms.optimizers.SGD(0.1, 0.9), backend, strategy)
        x = np.random.default_rng(backend.rank).standard_normal((8, 16))
        optimizer.step(model, x, x)
        held, whole = model.memory.as_dict(), model.parameter_count * model.dtype.itemsize
        return {kind: held[kind] / whole for kind in KINDS}

    # With shared memory the ranks of a node store one copy together.
    with mock.patch.dict(os.environ, MPISHARD_ARENA="off"):
        (first, *others) = ms.run_in_threads(RANKS, main)
    if any(other != first for other in others):
        raise ValueError(f"the ranks of {strategy} store different shares")
    return first


def bar(kind: str, rank: int, share: float, left: float, top: float) -> str:
    """Return one vector as a row of cells, one for each rank; ``rank`` stores the full ones."""
    if share not in (1, 1 / RANKS):
        raise ValueError(f"a rank stores {share} of {kind}: this picture has no such bar")
    return "".join(
        f'<rect x="{left + cell * (_CELL + 2):g}" y="{top:g}" width="{_CELL}" height="18" rx="2" '
        f'class="{kind if share == 1 or cell == rank else "none"}"/>'
        for cell in range(RANKS)
    )


def panel(strategy: str, left: float, top: float) -> list[str]:
    """Return the bars of one strategy."""
    found = shares(strategy)
    stored = f"each rank stores {sum(found.values()) / len(KINDS):.0%}"
    title = f'<tspan font-weight="bold">{strategy}</tspan>: {stored}'
    parts, top = [_text(title, left, top + 22)], top + _TOP
    for place, kind in enumerate(KINDS):
        x = left + place * (_BAR + _GAP)
        parts.append(_text(kind.removeprefix("optimizer_"), x, top - 12, 'class="small"'))
        parts += [bar(kind, rank, found[kind], x, top + rank * _ROW) for rank in range(RANKS)]
    return parts


def drawing(columns: int) -> str:
    """Return the picture, with this number of strategies side by side, and a row for each rank."""
    rows = len(STRATEGIES) // columns
    width, height = _LEFT + columns * _WIDTH, rows * _HEIGHT
    what = "Shares of parameters, gradients and optimizer state on four ranks"
    view = f'width="{width}" viewBox="0 0 {width} {height}" role="img" aria-label="{what}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {view}>', f"<style>{_STYLE}</style>"]
    for number, strategy in enumerate(STRATEGIES):
        row, column = divmod(number, columns)
        top = row * _HEIGHT
        if column == 0:
            parts += [
                _text(f"rank {rank}", 4, top + _TOP + rank * _ROW + 14) for rank in range(RANKS)
            ]
        parts += panel(strategy, _LEFT + column * _WIDTH, top)
    return "\n".join([*parts, "</svg>\n"])


def _text(words: str, x: float, y: float, attributes: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" {attributes}>{words}</text>'


if __name__ == "__main__":
    for number, path in PICTURES.items():
        path.write_text(drawing(number))
