"""``mpishard run``: arguments that users of mpirun type, and the program that runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mpishard.cli import app, main
from mpishard.cli.machine import usable_cores
from mpishard.cli.run.job import python_arguments
from mpishard.cli.wording import echo


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with scripts of these names."""
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "train_gpt.py", "app/__main__.py", "parts/a.py", "package/job.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    return tmp_path


@pytest.mark.parametrize(
    ("words", "is_module", "arguments"),
    [
        (["train.py", "--lr", "3"], False, ["train.py", "--lr", "3"]),
        (["python", "train.py", "-x"], False, ["train.py", "-x"]),
        (["python3.11", "-W", "error", "train.py"], False, ["-W", "error", "train.py"]),
        (["python3", "-m", "package.job"], False, ["-m", "package.job"]),
        ([f"{Path(sys.executable).parent}/python", "train.py"], False, ["train.py"]),
        (["package.job", "-n", "3"], True, ["-m", "package.job", "-n", "3"]),
        (["json.tool"], True, ["-m", "json.tool"]),
        (["app"], False, ["app"]),
    ],
)
def test_the_intended_program_is_run(
    words: list[str], is_module: bool, arguments: list[str]
) -> None:
    assert python_arguments(words, is_module) == arguments


@pytest.mark.parametrize(
    ("words", "is_module", "message"),
    [
        (["trian.py"], False, "there is no script trian.py; did you mean train.py"),
        (["train"], False, "there is no script train; did you mean train.py"),
        (["nowhere/zzz.py"], False, "there is no script nowhere/zzz.py$"),
        (["python", "trian.py"], False, "there is no script trian.py; did you mean train.py"),
        (["python"], False, "there is no script after python"),
        (["parts"], False, r"parts is a folder without __main__.py; did you mean parts/a.py\?"),
        (["no_such.module"], True, "-m no_such.module: there is no module no_such, here or on"),
        (["/opt/other/bin/python3", "train.py"], False,
         r"ranks run in \S+, not in /opt/other/bin/python3: leave it out, or start"),
    ],
)  # fmt: skip
def test_missing_scripts_are_refused_with_similar_names(
    words: list[str], is_module: bool, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        python_arguments(words, is_module)


def refused(*words: str) -> str:
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == 2, ended.output
    return " ".join(ended.stderr.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rnu", "-n", "2"], "plot, watch; did you mean run?"),
        (["frobnicate"], "no command 'frobnicate'; the commands of mpishard are run, doctor"),
        (
            ["bench", "stp"],
            "no command 'stp'; the commands of bench are collectives, step, machine; did you mean",
        ),
        (["checkpoint", "list"], "did you mean inspect FOLDER?"),
        (["inspect", "runs/1"], "did you mean checkpoint inspect?"),
        (["run", "--max-restart", "3", "train.py"], "--max-ranks, --max-restarts"),
        (["run", "train.py"], "give the number of ranks before the script: -n 4 SCRIPT"),
        (["run", "train.py", "-n", "2"], "-n stands after the script, which receives it: give the"),
        (["run", "-np", "0", "train.py"], "a job has at least one rank, got -n 0"),
        (["trace", "run", "-np", "2", "trian.py"], "did you mean train.py?"),
    ],
)
def test_commands_and_flags(words: list[str], message: str) -> None:
    assert message in refused(*words)


@pytest.mark.parametrize("words", [["train.py"], ["-m", "train"], ["--log-dir", "logs", "t.py"]])
def test_a_working_directory_that_was_removed(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    (tmp_path / "run").rmdir()
    assert "the working directory was removed: run `cd" in refused("run", "-n", "2", *words)


@pytest.mark.parametrize(
    "command", [[], ["run"], ["verify"], ["plot"], ["bench", "step"], ["trace", "run"]]
)
def test_the_help_has_a_short_name(command: list[str]) -> None:
    ended = CliRunner().invoke(app, [*command, "-h"])
    assert ended.exit_code == 0
    assert ended.output.startswith("Usage: ")
    assert not re.search("<(int|str|float|path)[> ]", ended.output)


@pytest.mark.parametrize("command", [[], ["plan"], ["bench"], ["trace"], ["checkpoint"]])
def test_summaries_are_not_cut(command: list[str]) -> None:
    lines = CliRunner().invoke(app, [*command, "--help"]).output.splitlines()
    assert not [line for line in lines[1:] if line.endswith("...")]
    assert max(map(len, lines)) <= 80


def test_lines_on_a_terminal_end_between_words_and_outside_of_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"  two ranks, started with {'x' * 50} OMP_NUM_THREADS=1; then `mpishard run -n 2 a.py`"
    echo(text)
    assert capsys.readouterr().out == f"{text}\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    echo(text)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == ["  OMP_NUM_THREADS=1; then `mpishard run -n 2 a.py`"]
    monkeypatch.setenv("COLUMNS", "40")
    echo(text)
    assert "  `mpishard run -n 2 a.py`" in capsys.readouterr().out.splitlines()
    # typer writes "Error: " before a refusal, which is within the width.
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(sys, "argv", ["mpishard", "inspect"])
    with pytest.raises(SystemExit):
        main()
    error = capsys.readouterr().err.partition("Error:")[2].splitlines()
    assert len(f"Error:{error[0]}") <= 40, error


def test_a_mistyped_number_starts_no_million_ranks(monkeypatch: Any) -> None:
    pytest.importorskip("mpi4py")
    for name in ("SLURM_JOB_ID", "SLURM_JOBID"):
        monkeypatch.delenv(name, raising=False)
    many = 8 * usable_cores() + 1
    assert "--oversubscribe allows that" in refused("run", "-n", str(many), "train.py")
    said = refused("verify", "-n", str(many), "file.py:factory")
    assert "ranks for each of" in said
    assert said.rstrip().endswith("give fewer"), "verify has no such option"
    started: list[int] = []
    monkeypatch.setattr(
        "mpishard.cli.run.job.RunJob.run",
        lambda self: started.append(self.ranks) or 0,
    )
    for words in (["-n", str(many - 1)], ["-n", str(many), "--oversubscribe"]):
        ended = CliRunner().invoke(app, ["run", *words, "train.py"])
        assert ended.exit_code == 0, ended.output
    assert started == [many - 1, many]


@pytest.mark.parametrize("words", [["run", "-n", "2"], ["trace", "run", "-n", "2"], ["verify"]])
def test_each_command_explains_a_system_that_allows_no_more_processes(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("mpishard.cli.run.launcher.ask", refuse)
    monkeypatch.setattr(sys, "argv", ["mpishard", *words, "train.py"])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 1
    assert said.startswith(f"mpishard {words[0]}: the system allows no more processes ([Errno 11]")
    assert "raise the limit (`ulimit -u`)" in said
