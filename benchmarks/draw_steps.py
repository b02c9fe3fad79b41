"""Draws the times of a step beside PyTorch and JAX: docs/images/steps.svg.

python benchmarks/draw_steps.py reads the newest file in benchmarks/results/processors. The colours
follow the dark mode of the reader's system.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

from report import Result, kept

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "steps.svg"

MODELS = {"mlp": "MLP, 8 layers of 1024 x 1024", "gpt": "GPT, 4 layers of width 256"}
BARS = {
    "ours 2": "mpishard, FSDP, 2 ranks",
    "threads": "PyTorch, 1 process, 2 threads",
    "ddp": "PyTorch DDP, 2 processes",
    "fsdp2": "PyTorch FSDP2, 2 processes",
    "jax": "JAX, 1 process, 2 threads",
}
_LEFT, _LENGTH, _ROW, _TOP = 210, 190, 24, 34
_PANEL = _TOP + len(BARS) * _ROW + 16
_STYLE = """
text { font-family: sans-serif; font-size: 13px; fill: #1f2328; }
.ours { fill: #2f6fb0; } .peer { fill: #9aa4af; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .ours { fill: #5b9bdd; } .peer { fill: #6b7580; }
}
"""


def newest() -> Result:
    """The results that were measured last."""
    return max(kept(), key=lambda result: result["date"])


def drawing() -> str:
    """Return the picture: a panel for each model, a bar for each library that was measured."""
    samples = newest()["samples"]
    width, height = _LEFT + _LENGTH + 60, len(MODELS) * _PANEL
    what = "Time of a training step of mpishard, PyTorch and JAX on the same processor"
    # Words in it are about as large as those of a page, also on a phone.
    view = f'width="{width}" viewBox="0 0 {width} {height}" role="img" aria-label="{what}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {view}>', f"<style>{_STYLE}</style>"]
    for place, (model, title) in enumerate(MODELS.items()):
        top = place * _PANEL
        parts.append(f'<text x="4" y="{top + 20}" font-weight="bold">{title}</text>')
        times = {
            text: median(values) * 1e3
            for name, text in BARS.items()
            if (values := samples.get(f"{model} {name}"))
        }
        for row, (text, found) in enumerate(times.items()):
            y, length = top + _TOP + row * _ROW, _LENGTH * found / max(times.values())
            kind = "peer" if row else "ours"
            parts += [
                f'<text x="4" y="{y + 13}">{text}</text>',
                f'<rect x="{_LEFT}" y="{y}" width="{length:.0f}" height="17" class="{kind}"/>',
                f'<text x="{_LEFT + length + 6:.0f}" y="{y + 13}">{found:.0f} ms</text>',
            ]
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    PICTURE.write_text(drawing(), encoding="utf-8")
