"""The GPT example with a small model: every way to start it, world sizes, resume."""

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpishard.observe import read_metrics

SCRIPT = Path(__file__).parents[2] / "examples" / "train_gpt.py"
SMALL = ["--layers", "2", "--width", "16", "--heads", "2", "--context", "24", "--batch", "29",
         "--warm-up", "3", "--steps", "10", "--validate-every", "10",
         "--checkpoint-every", "5", "--sample-bytes", "40"]  # fmt: skip
HYBRID = ("--strategy", "hybrid", "--pipeline-parallel-size", "2", "--tensor-parallel-size", "2")
MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
FILES = {"checkpoint", "loss.png", "metrics.jsonl", "sample.txt", "settings.json"}

pytestmark = [pytest.mark.spawned, pytest.mark.timeout(180)]


def run(
    directory: Path, *arguments: str, ranks: int = 0, has_extras: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run the script in ``directory``; under mpiexec if ``ranks`` is given.

    Without its extras, numba and matplotlib, which take a second each to load, it draws nothing,
    and losses in float32 have other last digits.
    """
    if ranks and MPIEXEC is None:
        pytest.skip("no mpiexec beside this Python: pip install 'mpishard[mpi]'")
    launcher = [str(MPIEXEC), "-n", str(ranks)] if ranks else []
    environment = dict(os.environ)
    if not has_extras:
        hidden = directory / "hidden" / "matplotlib.py"
        hidden.parent.mkdir(exist_ok=True)
        hidden.write_text("raise ImportError('no matplotlib here')\n")
        environment |= {"MPISHARD_NUMBA": "off", "PYTHONPATH": str(hidden.parent)}
    return subprocess.run(
        [*launcher, sys.executable, str(SCRIPT), *arguments],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def losses(directory: Path, name: str) -> list[float]:
    rows = read_metrics(directory / "runs" / name / "metrics.jsonl")
    return [row.get("loss", row.get("validation_loss")) for row in rows]


def trained(
    directory: Path, name: str, *arguments: str, has_extras: bool = False, **options: Any
) -> list[float]:
    ended = run(directory, "--name", name, *SMALL, *arguments, has_extras=has_extras, **options)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == f"runs/{name}"
    picture = set() if has_extras else {"loss.png"}
    assert {p.name for p in (directory / "runs" / name).iterdir()} == FILES - picture
    assert len((directory / "runs" / name / "sample.txt").read_text()) > 40  # and the prompt
    assert ("no loss curve: " in ended.stdout) is not has_extras
    assert "an add-one bigram model reaches 2.3" in ended.stdout
    return losses(directory, name)


def test_losses_do_not_depend_on_world_strategy_or_backend(tmp_path: Path) -> None:
    double = ("--dtype", "float64")
    expected = trained(tmp_path, "alone", *double, "--strategy", "ddp", has_extras=True)
    assert len(expected) == 11
    pipeline = (
        "--strategy",
        "pipeline",
        "--schedule",
        "zb-v",
        "--micro-batches",
        "3",
        "--recompute",
        "full",
    )
    runs = [
        ("mpi2", (), 2),
        ("hybrid", (*HYBRID, "--backend", "memory", "-n", "4", "--sequence-parallel"), 0),
    ]
    if os.environ.get("MPISHARD_TEST_FULL"):
        runs += [
            ("pipeline", (*pipeline, "--backend", "memory", "-n", "2"), 0),
            ("memory3", ("--strategy", "ddp", "--backend", "memory", "-n", "3"), 0),
            ("fsdp3", ("--backend", "memory", "-n", "3"), 0),
            ("mpi3ddp", ("--strategy", "ddp"), 3),
            ("pipeline_mpi", pipeline, 2),
        ]
    for name, arguments, ranks in runs:
        found = trained(tmp_path, name, *double, *arguments, ranks=ranks)
        assert np.abs(np.subtract(found, expected)).max() < 1e-10
    ddp = ("--strategy", "ddp", "--backend", "memory", "-n", "3")
    single = trained(tmp_path, "float32", *ddp)
    assert np.abs(np.subtract(single, expected)).max() < 0.02


def test_seeds_differ_and_a_run_is_not_overwritten(tmp_path: Path) -> None:
    short = ("--steps", "1", "--warm-up", "1")
    one, two = (trained(tmp_path, f"seed{s}", "--seed", str(s), *short)[0] for s in (1, 2))
    assert abs(one - two) > 1e-4
    ended = run(tmp_path, "--name", "seed1", *SMALL)
    assert ended.returncode != 0
    assert "runs/seed1 is there already; --resume runs/seed1 goes on with it" in ended.stderr


def kill_after_first_checkpoint(directory: Path, *arguments: str) -> None:
    """Start a run and end it with SIGKILL when it has written a checkpoint."""
    started = subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments],
        cwd=directory,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"MPISHARD_NUMBA": "off"},
    )
    deadline = time.monotonic() + 60
    while not list(directory.glob("runs/*/checkpoint/latest")):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    started.kill()
    assert started.wait() == -signal.SIGKILL


def test_a_killed_run_goes_on_at_another_world_size(tmp_path: Path) -> None:
    long = (*SMALL, "--dtype", "float64", "--steps", "30", "--validate-every", "15")
    whole = trained(tmp_path, "whole", *long)
    (tmp_path / "killed").mkdir()
    kill_after_first_checkpoint(
        tmp_path / "killed", "--name", "run", *long, "--backend", "memory", "-n", "3"
    )
    ended = run(tmp_path / "killed", "--name", "run", *long, ranks=2)
    assert ended.returncode == 0, ended.stderr
    assert "runs/run was interrupted, and goes on; --new begins a new run" in ended.stdout
    assert "30 steps, of which this run made" in ended.stdout
    assert "this run made 30 " not in ended.stdout
    rows = read_metrics(tmp_path / "killed" / "runs" / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 31))
    assert np.abs(np.subtract(losses(tmp_path / "killed", "run"), whole)).max() < 1e-10


def test_a_finished_run_can_be_prolonged(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    trained(tmp_path, "short", *HYBRID, "-n", "4")
    sizes = ("--tensor-parallel-size", "1", "--data-parallel-size", "1")
    for steps, arguments, message in [
        ("15", (*sizes, "-n", "2"), "2 pipeline x 1 tensor x 1 data"),
        ("20", ("--strategy", "zero2", "-n", "3"), "zero2 on 3 rank(s)"),
    ]:
        ended = run(tmp_path, "--resume", "runs/short", "--steps", steps, *arguments)
        assert ended.returncode == 0, ended.stderr
        assert f"{steps} steps, of which this run made 5 " in ended.stdout
        assert message in ended.stdout
    kept = json.loads((tmp_path / "runs" / "short" / "settings.json").read_text())
    assert kept["settings"]["steps"] == 20
    assert kept["spread"] == {"strategy": "zero2"}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "argv", [str(SCRIPT), "--resume", "runs/short", "--micro-batches", "2"]
    )
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert "--micro-batches is for --strategy pipeline or hybrid" in capsys.readouterr().err


@pytest.mark.parametrize(("given", "taken"), [("float32", None), ("bfloat16", "bfloat16")])
def test_the_dtype_of_the_model_is_no_mixed_precision(
    tmp_path: Path, given: str, taken: str | None, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--precision", given])
    example = runpy.run_path(str(SCRIPT))
    assert example["parse_arguments"]().precision == taken


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--strategy", "nonsense"), "invalid choice: 'nonsense'"),
        (("--stepz", "3"), "unrecognized arguments"),
        (("--resume", "runs/none", "--new"), "goes on with a run, and --new begins one"),
        (("--resume", "runs/none"), "there is no run in runs/none"),
        (("--heads", "3"), "3"),
        (("-n", "0"), "argument -n: needs a number > 0, got 0"),
        (
            (*HYBRID, "-n", "3"),
            "--pipeline-parallel-size 2 x --tensor-parallel-size 2 takes 4 ranks or a multiple",
        ),
        (
            ("--strategy", "tensor", "--sequence-parallel", "-n", "5"),
            "--sequence-parallel cuts --context 24 into 5 equal slices",
        ),
    ],
)
def test_mistakes_are_refused(
    tmp_path: Path, arguments: tuple[str, ...], message: str, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    small = [] if "--resume" in arguments else SMALL
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *small, *arguments])
    with pytest.raises((SystemExit, ValueError)) as raised:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert getattr(raised.value, "code", None) != 0
    assert message in f"{raised.value}{capsys.readouterr().err}"
    assert not (tmp_path / "runs").exists()
