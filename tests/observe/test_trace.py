"""Traces while they are recorded: the content of a rank's file, the time of writes, refusals."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from spawned_jobs import ROOT, outside_launchers

import mpishard as ms
from mpishard.base import settings
from mpishard.communication.tracing.recorder import compare_clocks, current_recorder
from mpishard.errors import CommunicationError, PeerError
from mpishard.observe import merge_traces, open_trace, span, step_span, summarize_trace, trace
from mpishard.testing.worlds import in_worlds


def check_format(path: Path) -> list[dict[str, Any]]:
    """The events of a file, which keeps the rules of Chrome's JSON Object Format."""
    document = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert document["displayTimeUnit"] in ("ms", "ns")
    events: list[dict[str, Any]] = document["traceEvents"]
    names = defaultdict(set)
    rows = defaultdict(list)
    arrows = defaultdict(dict)
    for event in events:
        assert isinstance(event["pid"], int), event
        assert isinstance(event["tid"], int), event
        assert event["name"], event
        phase = event["ph"]
        if phase == "M":
            names[event["name"]].add((event["pid"], event["tid"]))
            kind = "sort_index" if event["name"].endswith("sort_index") else "name"
            assert isinstance(event["args"][kind], int if kind == "sort_index" else str)
            continue
        assert event["ts"] >= 0, event
        assert event["cat"], event
        if phase == "X":
            assert event["dur"] >= 0, event
            rows[event["pid"], event["tid"]].append(event)
        else:
            assert phase in "sf", event
            assert arrows[event["id"]].setdefault(phase, event) is event
    assert names["thread_name"] == names["thread_sort_index"] == set(rows)
    assert {pid for pid, _ in names["process_name"]} >= {pid for pid, _ in rows}
    for row in rows.values():
        check_nesting(row)
    for pair in arrows.values():
        assert pair["s"]["ts"] <= pair["f"]["ts"]
        assert pair["f"]["bp"] == "e"
        for end in pair.values():
            assert any(
                e["ts"] <= end["ts"] <= e["ts"] + e["dur"] for e in rows[end["pid"], end["tid"]]
            ), f"{end} is bound to nothing"
    return events


def check_nesting(row: list[dict[str, Any]]) -> None:
    """Of two spans of a row one is in the other, or they do not overlap. In whole nanoseconds."""
    open_until: list[int] = []
    in_nanoseconds = [(round(e["ts"] * 1000), round(e["dur"] * 1000), e) for e in row]
    for start, length, event in sorted(in_nanoseconds, key=lambda e: (e[0], -e[1])):
        while open_until and open_until[-1] <= start:
            open_until.pop()
        assert not open_until or start + length <= open_until[-1], f"{event} overlaps another"
        open_until.append(start + length)


def spans(events: list[dict[str, Any]], rank: int, category: str) -> list[dict[str, Any]]:
    return [e for e in events if e["ph"] == "X" and (e["pid"], e["cat"]) == (rank, category)]


def work(backend: ms.CommunicationBackend) -> None:
    """Collectives of all sorts, messages, worlds of their own, spans in spans."""
    peer = (backend.rank + 1) % backend.world_size
    with step_span(1):
        with span("forward", micro_batch=3, stage="first"), span("layer"):
            gathered = backend.all_gather_async(np.arange(300.0))
            reduced = backend.all_reduce_async(np.ones(3000))
        reduced.wait()
        gathered.wait()
        backend.send(np.arange(5), peer, tag=7)
        backend.send(np.arange(5000), peer, tag=7)
        before = (backend.rank - 1) % backend.world_size
        with pytest.raises(CommunicationError, match="it stays queued"):
            backend.receive(before, 3, tag=7)
        backend.receive(before, 5, tag=7)
        backend.receive(before, 5000, tag=7)
        coming = backend.receive_async(before, 6, tag=7, dtype=np.float64)
        given_up = backend.receive_async(before, 6, tag=7, dtype=np.float64)
        going = backend.send_async(np.arange(6.0), peer, tag=7)
        coming.wait()
        going.wait()
        given_up.cancel()
        pair = backend.split(backend.rank // 2)
        assert pair is not None
        for _ in range(3):
            pair.all_reduce(np.ones(4))
        backend.barrier()
    pair.shutdown()


@pytest.mark.parametrize("path", ["arena", "messages", "two nodes"], indirect=True)
@in_worlds(2, 3, 4)
def test_what_is_recorded(backend: Any, path: str, shared_path: Path) -> None:
    with trace(shared_path, backend):
        work(backend)
    assert backend.recorder is None
    backend.all_reduce(np.ones(2))  # is not recorded any more
    assert current_recorder.get() is None
    check_format(shared_path / f"rank_{backend.rank}.json")
    backend.barrier()
    if backend.rank:
        return
    job = open_trace(shared_path)
    merge_traces(job, shared_path / "merged" / "trace.json")
    assert [e.reason for e in job.endings.values()] == ["finished"] * backend.world_size
    events = check_format(shared_path / "merged" / "trace.json")
    calls: dict[object, list[dict[str, Any]]] = defaultdict(list)
    for rank in range(backend.world_size):
        mine = spans(events, rank, "communication")
        assert Counter(e["name"] for e in mine) == {
            "all_gather": 1,
            "all_reduce": 4,
            "barrier": 1,
            "split": 1,
            "send": 3,
            "receive": 5,
        }
        for event in mine:
            if "sequence" in event["args"]:
                calls[event["args"]["group"], event["args"]["sequence"]].append(event)
        failed = [e for e in mine if "error" in e["args"]]
        assert [(e["name"], e["args"]["error"]) for e in failed] == [
            ("receive", "CommunicationError")
        ] * 2
        gather = next(e for e in mine if e["name"] == "all_gather")
        reduce = next(e for e in mine if e["name"] == "all_reduce")
        assert gather["args"]["bytes"] == 2400
        assert reduce["args"]["site"].startswith("test_trace.py:")
        assert {e["args"]["bytes"] for e in mine if e["name"] == "send"} == {40, 40000, 48}
        (step,) = spans(events, rank, "step")
        assert step["args"] == {"step": 1}
        outer, inner = sorted(spans(events, rank, "compute"), key=lambda e: -e["dur"])
        assert outer["args"] == {"micro_batch": 3, "stage": "first"}
        assert inner["name"] == "layer"
        # Waits are those of the calls, inside the time that the calls took.
        for wait in spans(events, rank, "wait"):
            assert any(
                flight["name"] == wait["name"]
                and flight["ts"] <= wait["ts"] <= flight["ts"] + flight["dur"]
                for flight in mine
            ), wait
    # The same collective has the same name on all ranks that took part.
    assert all(len({e["name"] for e in same}) == 1 for same in calls.values())
    sizes = Counter(len(same) for (group, _), same in calls.items() if group == "world")
    assert sizes == {backend.world_size: 4}
    pairs = {group for group, _ in calls if group != "world"}
    assert len(pairs) == -(-backend.world_size // 2)
    arrows = [e for e in events if e["ph"] == "s"]
    assert len(arrows) == 3 * backend.world_size


@in_worlds(2)
def test_the_call_and_the_wait_are_both_waiting(backend: Any, shared_path: Path) -> None:
    with trace(shared_path, backend):
        if backend.rank == 0:
            backend.receive(1, 1)  # comes late: rank 1 has called before it sent
            backend.all_reduce(np.ones(3000))
        else:
            pending = backend.all_reduce_async(np.ones(3000))
            backend.send(np.ones(1), 0)
            pending.wait()
    if backend.rank == 1:
        events = check_format(shared_path / "rank_1.json")
        (flight,) = (e for e in spans(events, 1, "communication") if e["name"] == "all_reduce")
        call, wait = (e for e in spans(events, 1, "wait") if e["name"] == "all_reduce")
        (send,) = (e for e in spans(events, 1, "wait") if e["name"] == "send")
        assert call["ts"] == flight["ts"]
        assert call["args"] == wait["args"] == flight["args"]
        assert call["ts"] + call["dur"] <= send["ts"] <= send["ts"] + send["dur"] <= wait["ts"]
        assert flight["ts"] + flight["dur"] <= wait["ts"] + wait["dur"]


@in_worlds(1, 2)
def test_training_steps(backend: Any, shared_path: Path) -> None:
    model = ms.as_distributed(ms.nn.MLP([3, 8, 1], seed=0), backend, "fsdp")
    optimizer = ms.as_distributed(ms.optimizers.SGD(0.1), backend, "fsdp")
    with trace(shared_path, backend):
        for _ in range(3):
            optimizer.step(model, np.ones((4, 3)), np.ones((4, 1)))
    events = check_format(shared_path / f"rank_{backend.rank}.json")
    steps = spans(events, backend.rank, "step")
    assert [(e["name"], e["args"]["step"]) for e in steps] == [
        (f"step {n}", n) for n in range(1, 4)
    ]
    for step in steps:
        inside = [
            e["name"]
            for e in spans(events, backend.rank, "compute")
            if step["ts"] <= e["ts"] and e["ts"] + e["dur"] <= step["ts"] + step["dur"]
        ]
        assert inside == ["forward", "backward", "update"]
    backend.barrier()
    if backend.rank == 0:
        found = summarize_trace(open_trace(shared_path))
        assert [rank.steps for rank in found.ranks] == [3] * backend.world_size
        assert 0 < found.step_seconds < found.ranks[0].seconds
        assert 0 <= found.bubble < 1


@in_worlds(2)
def test_operations_of_a_pipeline(backend: Any, shared_path: Path) -> None:
    model = ms.as_distributed(
        ms.nn.MLP([3, 8, 8, 1], seed=0), backend, "pipeline", micro_batch_count=4, schedule="1f1b"
    )
    optimizer = ms.as_distributed(ms.optimizers.SGD(0.1), backend, "pipeline")
    with trace(shared_path, backend):
        optimizer.step(model, np.ones((8, 3)), np.ones((8, 1)))
    events = check_format(shared_path / f"rank_{backend.rank}.json")
    done = Counter(
        (e["name"], e["args"]["stage"], e["args"]["micro_batch"])
        for e in spans(events, backend.rank, "compute")
        if e["name"] != "update"
    )
    # What a rank does with its data replicas, here itself alone, is of that axis.
    axes = {e["args"].get("axis") for e in spans(events, backend.rank, "communication")}
    assert axes == {None, "data"}
    stage = backend.rank
    assert done == {(name, stage, m): 1 for name in ("forward", "backward") for m in range(4)}
    backend.barrier()
    if backend.rank == 0:
        merge_traces(open_trace(shared_path), shared_path / "trace.json")
        arrows = [e for e in check_format(shared_path / "trace.json") if e["ph"] == "f"]
        assert Counter(e["pid"] for e in arrows) == {0: 4, 1: 4}
        assert 0 < summarize_trace(open_trace(shared_path)).bubble < 1


def test_nothing_is_recorded_by_default() -> None:
    assert span("forward") is span("other", micro_batch=1) is step_span(3)
    with ms.InMemoryCommunicationBackend(0, 1, "untraced") as backend:
        pending = backend.barrier_async()
        assert pending._in_flight is None
        pending.wait()


def test_more_than_the_maximum_is_counted_and_not_kept(tmp_path: Path) -> None:
    def body(backend: Any) -> None:
        with trace(tmp_path, backend, maximum_events=5):
            for number in range(30):
                with step_span(number):
                    pass

    ms.run_in_threads(1, body)
    job = open_trace(tmp_path)
    kept = [event["name"] for event in job.events() if event["ph"] == "X"]
    assert kept == [f"step {number}" for number in range(5)]
    assert job.endings[0].dropped == 25


def test_the_buffer_is_written_when_it_is_full(tmp_path: Path) -> None:
    def body(backend: Any) -> int:
        with trace(tmp_path, backend):
            for _ in range(16384):  # without a step, behind which it would be written
                with span("a"):
                    pass
            return len((tmp_path / "rank_0.json").read_text().splitlines())

    assert ms.run_in_threads(1, body)[0] > 16384


@pytest.mark.parametrize("events", [1, 1024])
def test_events_are_on_disk_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: int
) -> None:
    """Events are written after a step, if they are many or a second old."""

    def body(backend: Any) -> list[str]:
        with trace(tmp_path, backend):
            recorder = current_recorder.get()
            assert recorder is not None
            later = 1e9 if events == 1 else 0
            monkeypatch.setattr(recorder, "now", lambda: int(time.perf_counter_ns() + later))
            with step_span(1):
                for _ in range(events):
                    with span("a"):
                        pass
            job = open_trace(tmp_path)  # as if the rank had been killed now
            names = [event["name"] for event in job.events() if event["ph"] == "X"]
            assert "its file has no end" in job.endings[0].reason
            return names

    assert ms.run_in_threads(1, body)[0] == [*["a"] * events, "step 1"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full disk here")
def test_a_full_disk_ends_the_trace_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def body(backend: Any) -> int:
        with trace(tmp_path, backend):
            recorder = current_recorder.get()
            assert recorder is not None
            with step_span(1):
                pass
            recorder.flush()
            recorder.file._stream.close()
            recorder.file._stream = Path("/dev/full").open("w")  # noqa: SIM115
            for step in range(2, 3000):
                with step_span(step):
                    backend.barrier()
            return step

    assert ms.run_in_threads(1, body) == [2999]
    path = tmp_path / "rank_0.json"
    (said,) = caplog.messages
    assert said == (
        f"the trace {path} is cut off: [Errno 28] No space left on device. Training goes on"
    )
    job = open_trace(tmp_path)
    assert "step 1" in [event["name"] for event in job.events()]
    assert "its file has no end" in job.endings[0].reason


def test_a_variable_records_whole_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPISHARD_TRACE", str(tmp_path / "new" / "folder"))
    for world_size in (3, 2):  # what the third rank leaves is of an older job then
        # They are kept, and have left: that ends a trace, and not only that nobody holds them.
        left = ms.run_in_threads(world_size, lambda b: (b.all_reduce(np.ones(2)), b)[1])
        assert len(left) == world_size
        job = open_trace(tmp_path / "new" / "folder")
        assert job.world_size == world_size == len(list((tmp_path / "new" / "folder").iterdir()))
        calls = {(e["pid"], e["name"]) for e in job.events() if e["ph"] == "X"}
        assert calls == {(rank, "all_reduce") for rank in range(world_size)}
        assert {ending.reason for ending in job.endings.values()} == {"finished"}
    monkeypatch.setenv("MPISHARD_TRACE", "")
    assert settings.trace_folder() is None
    a_file = tmp_path / "file"
    a_file.write_text("")
    monkeypatch.setenv("MPISHARD_TRACE", str(a_file))
    with pytest.raises(ValueError, match=r"MPISHARD_TRACE must be a folder, and .*file is a file"):
        settings.check()


def test_a_rank_that_fails_leaves_its_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(backend: Any) -> None:
        backend.barrier()
        if backend.rank == 1:
            time.sleep(0.3)  # the other has called by then
            raise ValueError("boom\nand more")
        backend.all_reduce(np.ones(2))

    monkeypatch.setenv("MPISHARD_TRACE", str(tmp_path))
    with pytest.raises(ValueError, match="boom"):
        ms.run_in_threads(2, body)
    job = open_trace(tmp_path)
    names = [(e["pid"], e["name"]) for e in job.events() if e["ph"] == "X"]
    assert (1, "barrier") in names
    assert (0, "all_reduce") in names
    assert job.endings[1].reason == "ValueError: boom"
    assert job.endings[0].reason.startswith("PeerError: ")
    assert all(ending.is_early for ending in job.endings.values())


def test_a_block_that_fails_leaves_its_events(tmp_path: Path) -> None:
    def body(backend: Any) -> None:
        with trace(tmp_path, backend), span("forward"):
            raise PeerError("given up", 0)

    with pytest.raises(PeerError, match="given up"):
        ms.run_in_threads(1, body)
    (event,) = (e for e in check_format(tmp_path / "rank_0.json") if e["ph"] == "X")
    assert event["args"] == {"error": "PeerError"}
    job = open_trace(tmp_path)
    list(job.events())
    assert job.endings[0].reason == "PeerError: given up"


@pytest.mark.spawned
def test_a_script_alone_that_fails_says_so_in_its_trace(tmp_path: Path) -> None:
    script = "import mpishard; mpishard.init().barrier(); raise ValueError('boom')"
    environment = outside_launchers(MPISHARD_TRACE=str(tmp_path), PYTHONPATH=str(ROOT))
    ended = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, check=False
    )
    assert ended.returncode == 1
    job = open_trace(tmp_path)
    assert {e["name"] for e in job.events() if e["ph"] == "X"} == {"barrier"}
    assert job.endings[0].reason == "ValueError: boom"


def test_refusals(tmp_path: Path) -> None:
    def body(backend: Any) -> None:
        part = backend.split(0)
        assert part is not None
        for error, given, message in (
            (ValueError, {"backend": part}, "whole world, and InMemory.* was split from one"),
            (TypeError, {"backend": 3}, "must be a CommunicationBackend, got int"),
            (ValueError, {"maximum_events": 0}, "maximum_events must be 1 or more, got 0"),
        ):
            with pytest.raises(error, match=message), trace(tmp_path / "no", **given):
                pytest.fail("recorded")
        assert not (tmp_path / "no").exists()
        with trace(tmp_path / "one"):
            with (
                pytest.raises(RuntimeError, match=r"records a trace already, to .*one.rank_0.json"),
                trace(tmp_path / "two"),
            ):
                pytest.fail("recorded")
            with span("still recorded"):
                pass
        (tmp_path / "file").write_text("")
        with pytest.raises(FileExistsError), trace(tmp_path / "file"):
            pytest.fail("recorded")

    ms.run_in_threads(1, body)
    assert not (tmp_path / "two").exists()
    assert "still recorded" in (tmp_path / "one" / "rank_0.json").read_text()


@pytest.mark.parametrize("path", ["arena", "two nodes"], indirect=True)
@in_worlds(2, 4)
def test_clocks_are_compared(backend: Any, path: str, shared_path: Path) -> None:
    """Each rank's clock runs ahead of rank 0's; the error is within the stated uncertainty."""
    ahead = 5_000_000_000 * backend.rank
    compared = [compare_clocks(backend, lambda: time.perf_counter_ns() + ahead) for _ in range(2)]
    jobs = backend.all_gather(np.array([int(clock.job, 16) for clock in compared]))
    assert len(set(jobs.tolist())) == 2
    for clock in compared:
        if backend.nodes[backend.rank] == 0:
            # Ranks of one node read one clock, and do not measure.
            assert (clock.offset, clock.uncertainty) == (0, 0)
        else:
            assert 0 < abs(clock.offset + ahead) <= clock.uncertainty
    with trace(shared_path, backend):
        backend.barrier()
    about = json.loads((shared_path / f"rank_{backend.rank}.json").read_text())["otherData"]
    assert about["node"] == backend.nodes[backend.rank]
    assert (about["clock_uncertainty_us"] > 0) == (about["node"] > 0)
    assert abs(about["clock_offset_us"]) <= about["clock_uncertainty_us"]
