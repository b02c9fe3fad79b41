"""``mpishard bench``: figures are complete and consistent; no test depends on a time."""

import itertools
import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest
from typer.testing import CliRunner

from mpishard import run_in_threads
from mpishard.cli import app
from mpishard.cli.bench.collectives import CollectiveBenchmark, CollectiveResult
from mpishard.cli.bench.machine import MachineBenchmark, _groups
from mpishard.cli.bench.step import StepBenchmark, training_step
from mpishard.cli.outputs import write_json
from mpishard.cli.wording import bytes_text, counted, milliseconds, parse_bytes
from mpishard.communication import InMemoryCommunicationBackend
from mpishard.planning import Link, Machine, PassRate, ProductRate
from mpishard.testing.worlds import in_worlds

SMALL = [
    "--width",
    "16",
    "--layers",
    "3",
    "--batch",
    "4",
    "--steps",
    "2",
    "--warmup",
    "1",
    "--unit-size",
    "200",
]
FEW = ["--sizes", "8B,1KiB", "--repeats", "2"]


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


@pytest.mark.parametrize(("model", "parameters"), [("mlp", 3 * (16 * 16 + 16)), ("gpt", None)])
def test_step(monkeypatch, tmp_path, model, parameters):
    monkeypatch.setenv("MPISHARD_ARENA", "off")  # what is read in place is not sent
    path = tmp_path / "new" / "step.json"
    ended = bench("step", "--model", model, *SMALL, "--world-size", 2, "--json", path)
    assert ended.exit_code == 0, ended.output
    found = json.loads(path.read_text())
    assert found["world_size"] == 2
    assert found["machine"]["cores"] >= 1
    rows = {row["strategy"]: row for row in found["steps"]}
    assert list(rows) == ["alone", "ddp", "zero1", "zero2", "fsdp"]
    size = 4 * rows["ddp"]["parameters"]
    assert parameters is None or size == 4 * parameters
    for row in rows.values():
        assert len(row["seconds"]) == 2
        assert min(row["seconds"]) > 0
        assert row["resting_bytes"] is None
    # Summed over the ranks: 2 (N - 1) S, and as much of the totals.
    assert rows["alone"]["bytes_sent"] == 0
    totals = 7 * 8  # the one small all-reduce of a step
    for strategy in ("ddp", "zero1", "zero2"):
        assert rows[strategy]["bytes_sent"] == 2 * (size + totals)
    assert rows["fsdp"]["bytes_sent"] > rows["ddp"]["bytes_sent"]
    assert "ddp" in ended.stdout


def test_tokens_are_the_length_of_sequences(monkeypatch):
    made = []

    def record(config, model, strategy, x, y):
        made.append((model.context_length, x.shape, y.shape))
        return training_step(config, model, strategy, x, y)

    monkeypatch.setattr("mpishard.cli.bench.step.training_step", record)
    for tokens in ([], ["--tokens", 3]):
        ended = bench("step", "--model", "gpt", *SMALL, *tokens, "--strategy", "alone")
        assert ended.exit_code == 0, ended.output
    assert made == [(128, (4, 128), (4, 128)), (3, (4, 3), (4, 3))]


@pytest.mark.skipif(sys.platform != "linux", reason="PSS is Linux's")
def test_memory_and_checks_in_turn(tmp_path):
    path = tmp_path / "step.json"
    options = ["--strategy", "fsdp", "--checks", "both", "--memory", "--world-size", 2]
    ended = bench("step", *SMALL, *options, "--json", path)
    assert ended.exit_code == 0, ended.output
    rows = json.loads(path.read_text())["steps"]
    assert [row["strategy"] for row in rows] == ["fsdp", "fsdp without checks"]
    for row in rows:
        assert 1e6 < row["resting_bytes"] <= row["peak_bytes"]


def test_collectives(tmp_path):
    path = tmp_path / "c.json"
    ended = bench("collectives", *FEW, "--world-size", 3, "--json", path)
    assert ended.exit_code == 0, ended.output
    rows = json.loads(path.read_text())["collectives"]
    for kind, sizes in {"all_reduce": {8, 1024}, "all_gather": {8, 1024}, "barrier": {0}}.items():
        mine = [row for row in rows if row["collective"] == kind and row["way"] == "ours"]
        assert {row["nbytes"] for row in mine} == sizes
    assert all(len(row["seconds"]) == 2 and min(row["seconds"]) >= 0 for row in rows)


def test_ratios_are_those_of_one_repeat():
    """A disturbance of a repeat affects both ways; calls in place are compared with each other."""
    times = {
        "ours": (1, 8, 300),
        "ours, in place": (9, 9, 9),
        "MPI": (1, 4, 100),
        "MPI, in place": (3, 3, 3),
    }
    rows = [CollectiveResult("all_reduce", way, 2**20, t) for way, t in times.items()]
    ratios = CollectiveBenchmark([], []).table(rows, 2).columns[6]
    assert list(ratios.cells) == ["2.00", "3.00", "1.00", "0.75"]


def test_numbers_that_json_does_not_know_are_refused(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"a": [float("nan")]})


def test_plural_forms():
    words = [
        counted(1, "layer"),
        counted(2, "layer"),
        counted(1, "micro-batch"),
        counted(0, "micro-batch"),
    ]
    assert words == ["1 layer", "2 layers", "1 micro-batch", "0 micro-batches"]


@in_worlds(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_ways_give_the_sum(backend, dtype):
    kinds = ["all_reduce", "reduce_scatter", "all_gather", "barrier"]
    rows = CollectiveBenchmark(kinds, [24, 4000], dtype, repeats=1).run(backend)
    measured = list(dict.fromkeys((row.collective, row.nbytes) for row in rows))
    assert measured[:2] == [("all_reduce", 24), ("all_reduce", 4000)]
    assert len(measured) == 7
    ways = {row.way for row in rows if (row.collective, row.nbytes) == measured[0]}
    assert {"ours", "memcpy"} <= ways
    over_mpi = type(backend).__name__ == "MPICommunicationBackend"
    assert ways >= {"MPI", "MPI, in place"} if over_mpi else not ways & {"MPI", "MPI, in place"}
    # Every rank has the same times: those of the slowest.
    times = np.array([row.seconds for row in rows]).reshape(-1)
    assert (backend.all_gather(times[None]) == times).all()


@in_worlds(2)
def test_a_step_counts_the_bytes_of_all_ranks(backend, monkeypatch):
    monkeypatch.setenv("MPISHARD_ARENA", "off")
    (row,) = StepBenchmark("mlp", 8, 2, 4, steps=1, warmup=1).run_one(backend, "ddp")
    assert row.parameters == 2 * (8 * 8 + 8)
    sent = backend.all_gather(np.array([row.bytes_sent]))
    assert (sent == row.bytes_sent).all()
    assert row.bytes_sent >= 2 * 4 * row.parameters


@in_worlds(2)
def test_a_step_in_bfloat16_sends_half_of_what_is_gathered(backend, monkeypatch):
    monkeypatch.setenv("MPISHARD_ARENA", "off")
    sent = {}
    for precision in (None, "bfloat16"):
        benchmark = StepBenchmark("mlp", 8, 2, 4, steps=1, warmup=1, precision=precision)
        (row,) = benchmark.run_one(backend, "zero1")
        sent[precision] = row.bytes_sent
    assert sent[None] - sent["bfloat16"] == 2 * row.parameters


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["step", "--strategy", "zero9"], "zero1, zero2, zero3, fsdp; got 'zero9'"),
        (["step", "--model", "cnn"], "'cnn' is not one of 'mlp', 'gpt'"),
        (
            ["step", "--model", "gpt", "--width", "20"],
            "got 20 = 2 * 8 + 4",
        ),
        (["step", "--steps", "0"], "Invalid value for '--steps'"),
        (["step", "-n", "2", "--world-size", "2"], "give one of them"),
        (["collectives", "--collective", "gossip"], "one of all_reduce, reduce_scatter"),
        (["collectives", "--sizes", "8B,12 parsecs"], "got '12 parsecs'"),
        (["collectives", "--sizes", "0"], "got '0'"),
        (["collectives", "--dtype", "bool"], "'bool' is not one of 'float32'"),
    ],
)
def test_refuses(arguments, message):
    ended = bench(*arguments)
    assert ended.exit_code == 2
    assert message in " ".join(ended.stderr.replace("│", " ").split())
    assert ended.stdout == ""


@pytest.mark.parametrize(
    ("name", "message"),
    [("file/a.json", "file is a file, and no folder"), ("folder", "folder is a folder")],
)
def test_refuses_a_file_that_cannot_be_written_before_it_measures(tmp_path, name, message):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    ended = bench("collectives", *FEW, "--world-size", 1, "--json", tmp_path / name)
    assert ended.exit_code == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith(f"mpishard bench: --json: {tmp_path}")
    assert message in ended.stderr


@pytest.mark.parametrize("words", [["collectives", *FEW], ["step", *SMALL]])
def test_refuses_a_setting_that_ranks_would_refuse(monkeypatch, words):
    monkeypatch.setenv("MPISHARD_TIMEOUT", "soon")
    ended = bench(*words, "--world-size", 1)
    assert (ended.exit_code, ended.stdout) == (2, "")
    assert ended.stderr.startswith("mpishard bench: MPISHARD_TIMEOUT must be ")


def test_refuses_a_rank_that_would_start_ranks(monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "2")
    ended = bench("step", "-n", "2")
    assert ended.exit_code == 2
    assert "PMI_SIZE is set" in ended.stderr


@pytest.mark.timeout(60)
@pytest.mark.spawned
def test_starts_its_ranks(tmp_path):
    pytest.importorskip("mpi4py")
    path = tmp_path / "a b.json"
    options = ["--strategy", "ddp", "--strategy", "alone", "--checks", "off", "--json", str(path)]
    ended = subprocess.run(
        [sys.executable, "-m", "mpishard", "bench", "step", "-n", "2", *SMALL, *options],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=os.environ | {"MPISHARD_NUMBA": "off"},  # which takes each rank a second to load
        timeout=50,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(path.read_text())
    assert found["world_size"] == 2
    assert [row["strategy"] for row in found["steps"]] == ["ddp", "alone"]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8", 8),
        ("8B", 8),
        (" 64KiB", 65536),
        ("1.5MiB", 1572864),
        ("2 kb", 2000),
        ("5GB", 5 * 10**9),
    ],
)
def test_parse_bytes(text, nbytes):
    assert parse_bytes(text) == nbytes


def test_texts():
    assert [bytes_text(n) for n in (0, 1023, 1024, 64 << 20, None)] == [
        "0 B", "1023 B", "1 KiB", "64 MiB", "",
    ]  # fmt: skip
    times = (2.34e-6, 0.0123, 1.5, 66.712, 150, 7300)
    assert [milliseconds(s) for s in times] == [
        "2.3 us", "12.30 ms", "1500.0 ms", "66.7 s", "2.5 min", "2.0 h",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather"])
def test_a_collective_with_a_wrong_result_is_not_timed(monkeypatch, kind):
    original = getattr(InMemoryCommunicationBackend, f"_steps_{kind}")

    def wrong(self, *arguments):
        out = yield from original(self, *arguments)
        out[-1] += 1
        return out

    monkeypatch.setattr(InMemoryCommunicationBackend, f"_steps_{kind}", wrong)
    benchmark = CollectiveBenchmark([kind], [64], repeats=1)
    with pytest.raises(ArithmeticError, match=r"ours gives .* and not"):
        run_in_threads(2, benchmark.run)


def test_ranks_that_exchange_messages():
    nodes = (0, 0, 0, 1, 1, 2, 2)
    assert _groups(nodes, within=True) == [(0, 1)]
    assert _groups(nodes, within=False) == [(0, 3, 5), (1, 4, 6)]
    assert _groups((0, 1), within=True) == _groups((0, 0), within=False) == []


@pytest.mark.timeout(60)
def test_links_between_hosts_are_those_of_the_slowest_rank(monkeypatch):
    """Ranks without a partner would halve the time if it were a mean."""
    monkeypatch.setenv("MPISHARD_VIRTUAL_NODES", "3")
    monkeypatch.setattr("mpishard.cli.bench.machine._MESSAGE", 1 << 12)
    monkeypatch.setattr("mpishard.cli.bench.machine._BACKGROUND", 1 << 12)

    def link(backend):
        benchmark = MachineBenchmark(1)
        slow = lambda: time.sleep(0.02 if backend.rank == 3 else 0)  # noqa: E731
        return benchmark._exchange_seconds(backend, slow), benchmark._link(backend, within=False)

    results = run_in_threads(4, link)
    assert all(seconds >= 0.02 for seconds, _ in results)
    assert len({found for _, found in results}) == 1
    assert results[0][1].latency > 0


def test_machine_writes_a_file_that_plans_read(tmp_path, monkeypatch):
    small = {"_SIZES": (4, 16), "_FEW": (2,), "_LARGE": 256, "_COLD": 4096, "_MESSAGE": 64}
    for name, value in small.items():
        monkeypatch.setattr(f"mpishard.cli.bench.machine.{name}", value)
    path = tmp_path / "machine.json"
    # By hand: a network, and passes of an own class. One host measures neither.
    rates = (ProductRate("float32", 4, 4, 4, 1.0),)
    passes = (PassRate("MyLayer", "float32", 1e-9), PassRate("GELU", "float32", 7.0))
    Machine("mine", 1, rates, (1.0,), Link(0, 1), Link(1e-5, 3e9), passes).write(path)
    ended = bench("machine", "--world-size", 2, "--repeats", 1, "--json", path)
    assert ended.exit_code == 0, ended.output
    assert "kept what was not measured now: network, passes of MyLayer" in ended.stderr
    machine = Machine.load(path)
    assert machine.ranks_per_node == len(machine.memory) == 2
    assert machine.network == Link(1e-5, 3e9)
    assert machine.pass_rate("MyLayer", "float32") == passes[0]
    assert 0 < machine.pass_rate("GELU", "float32").forward < 7
    shapes = {(p.rows, p.columns, p.inner) for p in machine.products if p.precision == "float32"}
    assert shapes == set(itertools.product((2, 4, 16), (4, 16), (2, 4, 16)))
    names = {each.name for each in machine.passes}
    assert {"GELU", "LayerNorm", "CausalAttention", "CrossEntropy", "AdamW"} <= names
    assert all(len(line) <= 80 for line in ended.stdout.splitlines())
