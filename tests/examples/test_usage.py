"""Examples refuse wrong options in a usage line, before they start."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {
    "fit_autograd": "autograd",
    "train_digits": "sklearn",
}


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("fit_autograd", "--steps -3", "argument --steps: needs an integer >= 1, got -3"),
        ("fit_autograd", "--experiments 0", "argument --experiments: needs an integer >= 1, got 0"),
        ("fit_autograd", "-n x", "argument -n: needs an integer >= 1, got x"),
        ("custom_loop", "--steps 0", "argument --steps: needs an integer >= 1, got 0"),
        ("custom_loop", "-n 0", "argument -n: needs an integer >= 1, got 0"),
        ("train_digits", "--epochs 0", "argument --epochs: needs an integer >= 1, got 0"),
        ("train_gpt", "--steps 0", "argument --steps: needs a number > 0, got 0"),
        ("train_gpt", "--warm-up -1", "argument --warm-up: needs a number >= 0, got -1"),
        ("train_gpt", "--learning-rate nan", "--learning-rate: needs a number > 0, got nan"),
        ("train_gpt", "--clip inf", "argument --clip: needs a number > 0, got inf"),
        ("train_gpt", "--batch 2.5", "argument --batch: invalid int value: '2.5'"),
        ("train_gpt", "-n 0", "argument -n: needs a number > 0, got 0"),
        ("train_gpt", "--dtype int8", "argument --dtype: invalid choice: 'int8'"),
        ("train_gpt", "--width 10 --heads 3", "--heads 3 must divide --width 10"),
        (
            "train_gpt",
            "--pipeline-parallel-size 2",
            "--pipeline-parallel-size is for --strategy hybrid, and this is fsdp",
        ),
        (
            "train_gpt",
            "--strategy tensor --micro-batches 2",
            "--micro-batches is for --strategy pipeline or hybrid, and this is tensor",
        ),
        (
            "train_gpt",
            "--strategy hybrid --data-parallel-size -1",
            "argument --data-parallel-size: needs a number > 0, got -1",
        ),
        ("train_gpt", "--context 100000", "--context 100000: the text to validate holds "),
    ],
)
def test_bad_values_end_in_a_usage_line(
    name: str,
    arguments: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed here")
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("usage: ")
    assert message in said.splitlines()[-1]
