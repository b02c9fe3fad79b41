"""Measurements on ranks: figures are complete and consistent; no test depends on a time."""

import argparse
import importlib
import json
import runpy
import subprocess
from pathlib import Path

import pytest

from mpishard.pipeline import SCHEDULE_NAMES
from mpishard.testing.worlds import in_worlds

EXAMPLES = Path(__file__).parents[2] / "examples"


def title_of(printed, end):
    return " ".join(printed.split(end)[0].split())


# --------------------------------------------------------------------------------------- the frame


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("speedup", ["--way", "dual"], "invalid choice: 'dual'"),
        ("speedup", ["--steps", "0"], "argument --steps: must be 1 or more, got 0"),
        ("hosts", ["--netns", "x", "--links", "1 baud"], "invalid choice: '1 baud'"),
        ("checkpoint", ["--size", "5 parsecs"], "a size is a number with B, KiB, MiB or GiB"),
        ("checks", ["--strategy", "zero9"], "invalid choice: 'zero9'"),
        ("collectives", ["--sizes", "0"], "a size is a number with B, KiB, MiB or GiB"),
    ],
)
def test_wrong_options_end_with_2(script, capsys, name, words, message):
    with pytest.raises(SystemExit) as ended:
        script(name, *words)
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert message in " ".join(printed.err.split())
    assert printed.out == ""


# ------------------------------------------------------------------------------------ collectives


def test_busy_processes_run_beside_the_ranks_and_end_with_them(script, monkeypatch, tmp_path):
    started = []
    start = subprocess.Popen

    def popen(*arguments, **options):
        started.append(start(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    path = tmp_path / "c.json"
    few = ["--collective", "barrier", "--repeats", 1, "--json", path]
    script("collectives", *few, "--busy", 2)
    assert [process.poll() for process in started] == [-9, -9]
    found = json.loads(path.read_text())
    assert (found["world_size"], found["collectives"][0]["way"]) == (2, "ours")


@in_worlds(2)
def test_gloo_is_measured_on_mpi_ranks_with_pytorch(backend):
    collectives = importlib.import_module("collectives")
    kinds = ["all_reduce", "reduce_scatter", "all_gather", "barrier"]
    rows = collectives.PeerBenchmark(kinds, [24, 4004], repeats=1).run(backend)
    measured = {(row.collective, row.nbytes) for row in rows if row.way == "gloo"}
    try:
        import torch  # noqa: F401
    except ImportError:
        assert not measured
        return
    whole = {("all_reduce", 24), ("all_reduce", 4004), ("barrier", 0)}
    whole |= {(kind, 24) for kind in ("reduce_scatter", "all_gather")}  # 1001 elements are odd
    assert measured == (whole if type(backend).__name__ == "MPICommunicationBackend" else set())


# ----------------------------------------------------------------------------------------- checks


def test_checks(script, capsys, tmp_path):
    path = tmp_path / "checks.json"
    script("checks", "--steps", 1, "--json", path)
    found = json.loads(path.read_text())["checks"]
    title = title_of(capsys.readouterr().out, " a collective ")
    assert title.startswith("GPT, 4 layers of width 128, fsdp, 2 ranks: ")
    assert title.endswith(f"a step, {found['collectives']} collectives in it")
    assert found["limit"] == 0.02
    assert found["record_share"] > 0
    assert found["header_share"] > 0
    assert [len(times) for times in found["steps"].values()] == [1, 1, 1]


@in_worlds(1, 2)
def test_checks_leave_the_backend_as_it_was(backend):
    benchmark = importlib.import_module("checks").ChecksBenchmark
    page = backend.status
    result = benchmark("ddp", layers=1, width=8, heads=2, context=4, steps=2).run(backend)
    assert backend.status is page
    assert backend.check_collectives
    before = page.count
    backend.barrier()
    assert page.count == before + 1
    assert result.collectives > 0
    assert all(seconds > 0 for seconds in result.record_seconds)


def test_checks_are_measured_on_the_example_s_model():
    settings = runpy.run_path(str(EXAMPLES / "train_gpt.py"))["DEFAULTS"]
    benchmark = importlib.import_module("checks").ChecksBenchmark()
    for name in ("layers", "width", "heads", "context", "batch"):
        assert getattr(benchmark, name) == settings[name], name


# ---------------------------------------------------------------------------------------- speedup


def no_constant(name):
    raise AssertionError(f"{name} is no JSON")


def test_speedup(script, capsys, tmp_path):
    path = tmp_path / "speedup.json"
    sizes = ["--width", 16, "--layers", 2, "--batch", 2, "--micro-batches", 2, "--steps", 1]
    script("speedup", "--way", "all", *sizes, "--json", path)
    printed = capsys.readouterr().out
    title = title_of(printed, "──")
    assert title.startswith("GPT, 2 layers of width 16, ")
    assert "2 sequences of 128 tokens on 2 ranks together, 2 micro-batches, 1 step" in title
    assert not title.endswith("steps")
    found = json.loads(path.read_text(), parse_constant=no_constant)
    rows = {row["way"]: row for row in found["speedup"]}
    assert list(rows) == ["one rank", "tensor", *SCHEDULE_NAMES]
    for way, row in rows.items():
        assert f"\n{way} " in printed
        assert (row["balance"] is None) == (way in ("one rank", "tensor"))
        assert (row["bytes_sent"] == 0) == (way == "one rank")


@in_worlds(1)
def test_one_rank_alone_has_no_speedup(backend):
    with pytest.raises(ValueError, match="start two or more, as -n 2"):
        importlib.import_module("speedup").main(backend, None)


# ------------------------------------------------------------------------------------------ hosts


def test_steps_between_hosts(monkeypatch, tmp_path):
    job, hosts = importlib.import_module("hosts_job"), importlib.import_module("hosts")
    monkeypatch.setattr(job, "sent_bytes", lambda: 0)
    arguments = argparse.Namespace(
        ways=["alone", "fsdp"], steps=1, warmup=1, nice=0, json=tmp_path / "job.json"
    )
    importlib.import_module("harness").measure(job.main, arguments)
    found = json.loads(arguments.json.read_text(), parse_constant=no_constant)
    assert {*found["seconds"]} == {*found["processor"]} == {"alone", "fsdp"}
    assert found["bytes"] == {"alone": 0, "fsdp": 0}
    seconds = {"alone": 0.1, "fsdp": 0.3, "PyTorch alone": 0.4, "FSDP2": 0.8}
    rows = hosts.rows_of("1 Gbit/s", 1, seconds, {"fsdp": 25e6})
    # 25 MB take 0.2 s, more than our computing and less than PyTorch's.
    assert [(row["way"], row["limit"]) for row in rows] == [("fsdp", 0.2), ("FSDP2", 0.4)]
