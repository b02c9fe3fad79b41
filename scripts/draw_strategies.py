"""Draws who stores what under four strategies: docs/images/strategies.svg.

python scripts/draw_strategies.py trains a step of each strategy on four thread-ranks that share no
memory, and draws the shares that their memory ledgers count. The colours follow the dark mode of
the reader's system.
"""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import numpy as np

import mpishard as ms

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "strategies.svg"
RANKS = 4
KINDS = ("parameters", "gradients", "optimizer_state")
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")

_CELL, _BAR, _GAP, _LEFT, _TOP, _ROW = 16, 74, 12, 64, 64, 34
_PANEL = 3 * _BAR + 2 * _GAP + 34
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


def panel(strategy: str, left: float) -> list[str]:
    """Return the column of one strategy."""
    found, middle = shares(strategy), left + (3 * _BAR + 2 * _GAP) / 2
    parts = [_text(strategy, middle, 22, 'text-anchor="middle" font-weight="bold"')]
    for place, kind in enumerate(KINDS):
        x = left + place * (_BAR + _GAP)
        parts.append(_text(kind.removeprefix("optimizer_"), x, _TOP - 12, 'class="small"'))
        parts += [bar(kind, rank, found[kind], x, _TOP + rank * _ROW) for rank in range(RANKS)]
    stored = f"each rank stores {sum(found.values()) / len(KINDS):.0%}"
    bottom = _TOP + RANKS * _ROW + 20
    return [*parts, _text(stored, middle, bottom, 'class="small" text-anchor="middle"')]


def drawing() -> str:
    """Return the picture: a column for each strategy, a row for each rank."""
    width, height = _LEFT + len(STRATEGIES) * _PANEL, _TOP + RANKS * _ROW + 30
    what = "Shares of parameters, gradients and optimizer state on four ranks"
    view = f'viewBox="0 0 {width} {height}" role="img" aria-label="{what}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {view}>', f"<style>{_STYLE}</style>"]
    parts += [_text(f"rank {rank}", 4, _TOP + rank * _ROW + 14) for rank in range(RANKS)]
    for column, strategy in enumerate(STRATEGIES):
        parts += panel(strategy, _LEFT + column * _PANEL)
    return "\n".join([*parts, "</svg>\n"])


def _text(words: str, x: float, y: float, attributes: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" {attributes}>{words}</text>'


if __name__ == "__main__":
    PICTURE.write_text(drawing())
