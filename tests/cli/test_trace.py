"""``mpishard trace``: output, files and refusals, and a job recorded under mpiexec."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from spawned_jobs import ROOT, outside_launchers
from typer.testing import CliRunner

from mpishard import run_in_threads
from mpishard.cli import app
from mpishard.observe import span, step_span, trace

FAILS = """
import numpy as np
import mpishard
backend = mpishard.init()
backend.barrier()
if backend.rank == 1:
    raise ValueError("boom")
backend.all_reduce(np.ones(5000))
"""


def record(backend, folder, maximum_events=1000):
    with trace(folder, backend, maximum_events=maximum_events):
        for number in (1, 2):
            with step_span(number), span("forward"):
                backend.all_reduce(np.ones(1024))


@pytest.fixture
def folder(tmp_path):
    run_in_threads(2, record, tmp_path)
    return tmp_path


def invoke(*arguments):
    result = CliRunner().invoke(app, ["trace", *(str(a) for a in arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def lines_of(text):
    """The rows of the tables, as lists of cells."""
    return [re.split("  +", line.strip()) for line in text.splitlines()]


def test_merge_writes_one_file(folder, tmp_path):
    result = invoke("merge", folder)
    assert result.exit_code == 0, result.stderr
    path = folder / "trace.json"
    assert result.stdout == f"{path}: 2 ranks; open it in https://ui.perfetto.dev\n"
    assert result.stderr == ""
    events = json.loads(path.read_text())["traceEvents"]
    assert Counter(e["pid"] for e in events if e["name"] == "forward") == {0: 2, 1: 2}
    elsewhere = tmp_path / "a" / "b.json"
    assert invoke("merge", folder, "-o", elsewhere).exit_code == 0
    assert elsewhere.read_text() == path.read_text()


def test_summary_prints_shares_and_calls(folder):
    result = invoke("summary", folder)
    assert result.exit_code == 0, result.stderr
    first = result.stdout.splitlines()[0]
    assert re.fullmatch(
        r"2 ranks on 1 node, \d+\.\d{3} s; a step takes [\d.]+ (us|ms) \(median\); "
        r"bubble of its passes [\d.]+% \(median\)",
        first,
    )
    rows = lines_of(result.stdout)
    ranks = [row for row in rows if row[0] in ("0", "1")]
    assert [row[:3] for row in ranks] == [["0", "0", "2"], ["1", "0", "2"]]
    for row in ranks:
        computing, waiting, idle = (float(cell.rstrip("%")) for cell in row[4:7])
        assert computing + waiting + idle == pytest.approx(100, abs=0.2)
    (call,) = (row for row in rows if row[0] == "all_reduce")
    assert call[1:4] == ["world", "4", "32 KiB"]
    invoke("merge", folder)
    assert invoke("summary", folder / "trace.json").stdout == result.stdout


def test_traces_that_ended_early_or_dropped_events_are_reported(tmp_path):
    run_in_threads(2, record, tmp_path, 3)
    path = tmp_path / "rank_1.json"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    for command in ("merge", "summary"):
        result = invoke(command, tmp_path)
        assert result.exit_code == 0
        notes = result.stderr.splitlines()
        assert re.fullmatch(
            r"rank 0 dropped \d+ events, all that came after 0\.\d{3} s: its trace was full",
            notes[0],
        )
        assert re.fullmatch(
            r"rank 1's trace ends early, at 0\.\d{3} s: its file has no end: the process was "
            "killed, or still runs",
            notes[1],
        )
        assert len(notes) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["merge", "FOLDER/nowhere"], "there is no folder .*nowhere"),
        (["summary", "FOLDER/nowhere"], "there is no file or folder .*nowhere"),
        (["merge", "FOLDER"], "has traces of 1 of the job's 2 ranks, and not rank_1.json"),
        (["summary", "FOLDER"], "has traces of 1 of the job's 2 ranks, and not rank_1.json"),
        (["merge", "FOLDER", "-o", "FOLDER/rank_7.json"], "would look like the trace of a rank"),
        (["summary", "FOLDER/rank_0.json"], "is the trace of rank 0 alone; give its folder"),
        (["run", "-n", "2", "-o", "FOLDER", "nowhere.py"], "there is no script nowhere.py"),
        (["run", "-n", "2", "-o", "", "SCRIPT"], "mpishard trace run: --output must not be blank"),
        (["run", "-n", "2", "-o", "FOLDER/rank_0.json/x", "SCRIPT"], "--output: .*Not a directory"),
    ],
)
def test_refuses(folder, arguments, message, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "rank_1.json").unlink()
    (folder / "script.py").write_text("")
    named = {"SCRIPT": "script.py"}
    result = invoke(*(named.get(a, a.replace("FOLDER", str(folder))) for a in arguments))
    assert result.exit_code == 2
    assert re.search(message, result.stderr)
    assert result.stderr.startswith("mpishard trace")
    assert len(result.stderr.splitlines()) == 1
    assert (folder / "rank_0.json").exists()


def job(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "mpishard", "trace", "run", "-n", "2", *arguments],
        env=outside_launchers(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", MPISHARD_NUMBA="off"),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


@pytest.mark.spawned
def test_a_job_is_recorded_merged_and_added_up(tmp_path):
    pytest.importorskip("mpi4py")
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "rank_0.json").write_text("of an older job")
    (tmp_path / "trace" / "rank_5.json").write_text("of an older job")
    ended = job(str(ROOT / "examples" / "quickstart.py"), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "loss " in ended.stdout
    assert f"{Path('trace', 'trace.json')}: open it in https://ui.perfetto.dev" in ended.stdout
    assert f"MPISHARD_TRACE={tmp_path / 'trace'}" in ended.stderr
    rows = lines_of(ended.stdout)
    assert [row[:3] for row in rows if row[0] in ("0", "1")] == [["0", "0", "80"], ["1", "0", "80"]]
    document = json.loads((tmp_path / "trace" / "trace.json").read_text())
    names = Counter((e["pid"], e["name"]) for e in document["traceEvents"])
    for rank in (0, 1):
        for name in ("forward", "backward", "update"):
            assert names[rank, name] == 80
        # The small ones too, which are done without being issued.
        assert names[rank, "all_reduce"] >= 160
        assert names[rank, "step 80"] == 1


@pytest.mark.spawned
def test_a_job_that_fails_leaves_its_traces(tmp_path):
    pytest.importorskip("mpi4py")
    (tmp_path / "script.py").write_text(FAILS)
    ended = job("-o", "kept", "script.py", cwd=tmp_path)
    assert ended.returncode == 1
    assert "ValueError: boom" in ended.stderr
    assert re.search(
        r"rank 1's trace ends early, at [\d.]+ s: mpishard: rank 1 of 2 failed", ended.stderr
    )
    assert "barrier" in {row[0] for row in lines_of(ended.stdout)}
    assert (tmp_path / "kept" / "trace.json").exists()


@pytest.mark.spawned
def test_a_script_that_records_nothing_ends_with_a_message(tmp_path):
    pytest.importorskip("mpi4py")
    (tmp_path / "script.py").write_text("print('alone')")
    ended = job("script.py", cwd=tmp_path)
    assert ended.returncode == 2
    assert "mpishard trace: no trace of a rank (rank_<r>.json) is in " in ended.stderr
