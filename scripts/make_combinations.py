"""Makes the tables of docs/combinations.md from trials: tests/helpers/combinations.py has these.

.venv-frameworks/bin/python scripts/make_combinations.py writes the page. It needs PyTorch and JAX,
for which scripts/test_frameworks.sh makes that environment, and a minute or two.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

import combinations as trials  # noqa: E402

PAGE = ROOT / "docs" / "combinations.md"
MAIN = "layers"
NO_EFFECT = "no effect"
Cell = tuple[str, str, str]
"""The table, and the names of the row and the column."""

_WRAPPERS = r"(?:LocalSGD|GradientCompression|AsyncSGD)Optimizer"
_CLASSES = (
    r"(?:DDP|ZeRO\d|FSDP|\w+Parallel|HybridSharded)(?:Model|Optimizer)"
    r"|MLP|(?:Torch|Jax|Function)Model|LeastSquares"
)
_STRATEGIES = rf"(?<=')(?:{'|'.join(trials.STRATEGIES)})(?=')(?!' with axes)"

attempt = cache(trials.attempt)
LETTERS = dict(zip(trials.CHOICES, "ABCDEFGHIJKLMNOPQRSTUVWXYZ", strict=False))


def cells() -> Iterator[Cell]:
    """All cells of all tables, row by row; those of the last table stand below its diagonal."""
    for model in trials.MODELS:
        for strategy in trials.STRATEGIES:
            yield "models", model, strategy
    for choice in trials.CHOICES:
        for strategy in trials.STRATEGIES:
            yield "strategies", choice, strategy
    for choice in trials.CHOICES:
        for model in trials.MODELS:
            yield "kinds", choice, model
    names = list(trials.CHOICES)
    for row in names:
        for column in names[: names.index(row)]:
            if trials.CHOICES[row].kind != trials.CHOICES[column].kind:
                yield "pairs", row, column


def outcomes(cell: Cell) -> dict[str, trials.Outcome]:
    """Strategy -> outcome of a cell's trial, for the strategies that take each choice alone."""
    table, row, column = cell
    if table == "models":
        return {column: attempt(column, row)}
    if table == "strategies":
        return {column: attempt(column, MAIN, row)}
    model, choices = (column, (row,)) if table == "kinds" else (MAIN, (column, row))
    return {
        strategy: attempt(strategy, model, *choices)
        for strategy in trials.STRATEGIES
        if all(attempt(strategy, MAIN, choice).is_accepted for choice in choices)
    }


class Reasons:
    """The numbered reasons, with "..." for the names of strategies, models and optimizers."""

    def __init__(self, known: Sequence[str] = ()) -> None:
        self.texts = list(known)

    def number(self, outcome: trials.Outcome) -> str:
        """Return the number of an outcome's reason."""
        assert outcome.reason is not None
        text = outcome.reason
        wrappers = re.findall(_WRAPPERS, text)
        for names in (_CLASSES, _STRATEGIES, r"(?<=of )\d+(?= ranks)"):
            text = re.sub(names, "...", text)
        if len(wrappers) == 1:  # a sentence that names all three says what to use instead
            text = text.replace(wrappers[0], "...")
        if text not in self.texts:
            self.texts.append(text)
        return str(1 + self.texts.index(text))

    def lines(self) -> list[str]:
        return [f"{n}. {text}" for n, text in enumerate(self.texts, 1)]


def text_of(found: dict[str, trials.Outcome], reasons: Reasons) -> str:
    """Return a cell: "yes", the number of a reason, or both, with the strategies that differ."""
    if not found:
        return ""
    texts = {}
    for strategy, outcome in found.items():
        texts[strategy] = "yes"
        if outcome.reason is not None:
            number = reasons.number(outcome)
            texts[strategy] = f"{NO_EFFECT}, {number}" if outcome.is_accepted else number
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    by_text: dict[str, list[str]] = {}
    for strategy, text in texts.items():
        by_text.setdefault(text, []).append(strategy)
    return "; ".join(f"{text} ({', '.join(names)})" for text, names in by_text.items())


def page(cells: Sequence[Cell]) -> dict[str, list[str]]:
    """Return the lines of each table, and of the reasons, if ``cells`` are tried."""
    reasons = Reasons()
    texts = {cell: text_of(outcomes(cell), reasons) for cell in cells}
    strategies, models = list(trials.STRATEGIES), list(trials.MODELS)
    names = list(trials.CHOICES)
    labels = {name: f"{LETTERS[name]}: `{trials.CHOICES[name].code}`" for name in names}
    # Choices that no strategy takes stand in one table alone.
    taken = [n for n in names if any(texts["strategies", n, s] == "yes" for s in strategies)]
    pairs = [
        [texts.get(("pairs", r, c)) or texts.get(("pairs", c, r)) or "" for c in taken]
        for r in taken
    ]
    return {
        "models": table(
            strategies,
            [[trials.MODELS[m], *(texts["models", m, s] for s in strategies)] for m in models],
        ),
        "strategies": table(
            strategies,
            [[labels[n], *(texts["strategies", n, s] for s in strategies)] for n in names],
        ),
        "kinds": table(
            [trials.MODELS[m] for m in models],
            [[labels[n], *(texts["kinds", n, m] for m in models)] for n in taken],
        ),
        "pairs": table(
            [LETTERS[n] for n in taken],
            [[labels[name], *row] for name, row in zip(taken, pairs, strict=True)],
        ),
        "reasons": reasons.lines(),
    }


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [["", *columns], ["---"] * (1 + len(columns)), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def filled(text: str, made: dict[str, list[str]]) -> str:
    """Return the page with these lines between the marks of each table."""
    for name, lines in made.items():
        mark = rf"(<!-- made: {name} -->\n\n).*?(\n\n<!-- end -->)"
        text, count = re.subn(
            mark,
            lambda found, lines=lines: found[1] + "\n".join(lines) + found[2],
            text,
            flags=re.DOTALL,
        )
        assert count == 1, f"docs/combinations.md has {count} places for {name}"
    return text


if __name__ == "__main__":
    missing = [model for model in trials.MODELS if not trials.can_make(model)]
    if missing:
        sys.exit(f"needs {' and '.join(missing)}: use the Python of .venv-frameworks")
    PAGE.write_text(filled(PAGE.read_text(), page(list(cells()))))
