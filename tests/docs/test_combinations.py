"""docs/combinations.md shows the choices that the code accepts and refuses, and with which words.

By default a sample of its cells is tried, and with --full each; cells of PyTorch and JAX only if
these are installed, as in scripts/test_frameworks.sh.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from combinations import CHOICES, MODELS, STRATEGIES, Choice, attempt, can_make
from make_combinations import MAIN, PAGE, Reasons, cells, filled, outcomes, page, text_of

import mpishard as ms
from mpishard.sharding import refusals

IS_FULL = bool(os.environ.get("MPISHARD_TEST_FULL"))
TEXT = PAGE.read_text()


def lines_of(name: str) -> list[str]:
    return (
        TEXT.partition(f"<!-- made: {name} -->\n\n")[2].partition("\n\n<!-- end -->")[0].split("\n")
    )


def read_cells() -> dict[tuple[str, str, str], str]:
    """Every cell of the page, by table, row and column."""
    found = {}
    for table, names, columns in (
        ("models", list(MODELS), list(STRATEGIES)),
        ("strategies", list(CHOICES), list(STRATEGIES)),
        ("kinds", list(CHOICES), list(MODELS)),
        ("pairs", list(CHOICES), list(CHOICES)),
    ):
        for name, line in zip(names, lines_of(table)[2:], strict=False):
            texts = [text.strip() for text in line.split("|")[2:-1]]
            found |= {(table, name, c): t for c, t in zip(columns, texts, strict=False)}
    return found


SHOWN = read_cells()
REASONS = [line.partition(". ")[2] for line in lines_of("reasons")]


def sample() -> list[tuple[str, str, str]]:
    return [cell for cell in cells() if SHOWN.get(cell, "") != ""][:: 1 if IS_FULL else 7]


@pytest.mark.parametrize("cell", sample(), ids="-".join)
def test_a_cell_is_the_outcome_of_its_trials(cell: tuple[str, str, str]) -> None:
    for model in MODELS:
        if model in cell and not can_make(model):
            pytest.skip(f"needs {model}")
    found = outcomes(cell)
    assert text_of(found, Reasons(REASONS)) == SHOWN[cell]


def test_the_script_writes_the_page() -> None:
    if not (IS_FULL and all(map(can_make, MODELS))):
        pytest.skip("needs --full, torch and jax")
    assert filled(TEXT, page(list(cells()))) == TEXT


def test_every_cell_stands_on_the_page() -> None:
    # A choice that no strategy takes is in one table alone.
    taken = {name for name in CHOICES for s in STRATEGIES if SHOWN["strategies", name, s] == "yes"}
    for table, row, column in cells():
        if table in ("models", "strategies") or {row, column} & {*CHOICES} <= taken:
            assert (table, row, column) in SHOWN
        if table == "pairs" and {row, column} <= taken:
            assert SHOWN[table, row, column] == SHOWN[table, column, row]


# ------------------------------------------------------------------------------ three and more


def combines(strategy: str, model: str, *choices: str) -> bool:
    """Whether the page says that these one or two choices combine."""
    cells = [("strategies", name, strategy) for name in choices]
    cells += [("kinds", name, model) for name in choices]
    cells += [("pairs", *pair) for pair in combinations(choices, 2)]
    return all(SHOWN.get(cell, "").startswith(("yes", "no effect")) for cell in cells)


def several() -> list[tuple[str, ...]]:
    """Strategy, model and choices of no table: three for layers, and two for other models."""

    def every() -> Iterator[tuple[str, ...]]:
        for strategy in STRATEGIES:
            for model in filter(can_make, MODELS):
                for choices in combinations(CHOICES, 3 if model == MAIN else 2):
                    if all(combines(strategy, model, *pair) for pair in combinations(choices, 2)):
                        yield strategy, model, *choices

    return list(every())


@pytest.mark.parametrize("choices", several()[:: 1 if IS_FULL else 60], ids="-".join)
def test_three_choices_combine_if_every_two_do(choices: tuple[str, ...]) -> None:
    assert attempt(*choices).is_accepted


# ------------------------------------------------------------------------------------ the rules


def test_fewer_than_eight_rules_refuse_combinations() -> None:
    rules = [
        name
        for name, made in vars(refusals).items()
        if inspect.isfunction(made) and made.__module__ == refusals.__name__
    ]
    assert len(rules) < 8


def after_a_message(rule: Any, config: Any, strategy: str) -> Any:
    config.communication_backend.all_reduce(np.ones(1))
    raise ValueError


@pytest.mark.parametrize(
    ("wraps", "message"),
    [
        (lambda rule, *of: ms.as_distributed(ms.optimizers.SGD(1), *of), "parameters differ by"),
        (lambda rule, *of: rule + 1, "a raw error"),
        (after_a_message, "refused after it had communicated"),
    ],
)
def test_a_trial_finds_what_is_wrong(
    wraps: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CHOICES, "wrong", Choice(code="", kind="", wraps=wraps))
    with pytest.raises(AssertionError, match=message):
        attempt("ddp", "function", "wrong")
