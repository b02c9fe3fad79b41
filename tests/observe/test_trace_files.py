"""Traces of a job read back, merged and added up: ranks' files written here, event by event."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpishard.communication.tracing.recorder import TraceFile, rank_file
from mpishard.observe import merge_traces, open_trace, summarize_trace
from mpishard.observe.trace_summary import union

STEP, COMPUTE, WAIT, COMMUNICATION = 1, 2, 3, 4
ROWS = {STEP: "step", COMPUTE: "compute", WAIT: "wait", COMMUNICATION: "communication"}

Event = tuple[int, str, float, float, dict[str, Any]]


def write(
    folder: Path,
    rank: int,
    events: Sequence[Event],
    reason: str = "finished",
    dropped: int = 0,
    **about: Any,
) -> Path:
    """A rank's file; times of events (row, name, start, end, arguments) are in microseconds."""
    path = rank_file(folder, rank)
    known = {
        "format": "mpishard trace", "version": 1, "job": "a1", "rank": rank, "world_size": 2,
        "node": 0, "host": "here", "origin_us": 1000.0, "clock_offset_us": 0.0,
        "clock_uncertainty_us": 0.0,
    }  # fmt: skip
    file = TraceFile(path, known | about, 0)
    for row, name, start, end, arguments in events:
        file.write(row, name, ROWS[row], int(start * 1000), int(end * 1000), arguments)
    file.close(reason=reason, events=len(events), dropped=dropped)
    return path


def call(sequence: int, group: str = "world", **more: Any) -> dict[str, Any]:
    return {"bytes": 8, "group": group, "sequence": sequence, **more}


def message(number: int, tag: int = 0) -> dict[str, Any]:
    known = {"group": "world", "source": 0, "destination": 1, "tag": tag}
    return {**known, "number": number, "bytes": 16}


def merged(folder: Path) -> list[dict[str, Any]]:
    merge_traces(open_trace(folder), folder / "trace.json")
    events: list[dict[str, Any]] = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return events


# ------------------------------------------------------------------------------------- merging


def test_ranks_are_aligned_on_one_time_line(tmp_path: Path) -> None:
    """A rank's events are moved by its start, and by its node's best measured clock."""
    event = (COMPUTE, "forward", 10.0, 20.0, {})
    write(tmp_path, 0, [event], world_size=4)
    write(tmp_path, 1, [event], world_size=4, origin_us=1007.0)
    clocks = {"node": 1, "world_size": 4}
    write(
        tmp_path,
        2,
        [event],
        origin_us=91000.0,
        clock_offset_us=-89000.0,
        clock_uncertainty_us=900.0,
        **clocks,
    )
    write(
        tmp_path,
        3,
        [event],
        origin_us=91002.5,
        clock_offset_us=-90010.0,
        clock_uncertainty_us=4.0,
        **clocks,
    )
    starts = {e["pid"]: e["ts"] for e in merged(tmp_path) if e["ph"] == "X"}
    # Rank 2 began at 91000 - 90010 = 990 on rank 0's clock, 10 before it: rank 3 measured best.
    assert starts == {0: 20.0, 1: 27.0, 2: 10.0, 3: 12.5}
    found = summarize_trace(open_trace(tmp_path / "trace.json"))
    assert repr(found) == repr(summarize_trace(open_trace(tmp_path)))
    assert found.uncertainty == pytest.approx(4e-6)
    assert [rank.node for rank in found.ranks] == [0, 0, 1, 1]


def test_arrows_go_from_sender_to_receiver(tmp_path: Path) -> None:
    sent = [(COMMUNICATION, "send", at, at + 1, message(n)) for n, at in ((0, 5.0), (1, 50.0))]
    other = (COMMUNICATION, "send", 6.0, 7.0, message(0, tag=4))  # never received
    write(tmp_path, 0, [*sent, other])
    # The second comes before it was sent: it was sent before the trace began.
    received = [
        (COMMUNICATION, "receive", at, at + 8, message(n)) for n, at in ((0, 2.0), (1, 30.0))
    ]
    failed = (COMMUNICATION, "receive", 60.0, 70.0, {"group": "world", "error": "PeerError"})
    write(tmp_path, 1, [*received, failed])
    arrows = [e for e in merged(tmp_path) if e["ph"] in "sf"]
    assert arrows == [
        {"name": "message", "cat": "message", "ph": "s", "id": 1, "pid": 0, "tid": 4, "ts": 5.0},
        {
            "name": "message",
            "cat": "message",
            "ph": "f",
            "id": 1,
            "pid": 1,
            "tid": 4,
            "ts": 9.999,
            "bp": "e",
        },
    ]


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_killed_rank_leaves_whole_lines(tmp_path: Path, kept: int) -> None:
    events = [(COMPUTE, "forward", 10.0 * n, 10.0 * n + 5, {}) for n in range(2)]
    write(tmp_path, 0, events)
    path = write(tmp_path, 1, events)
    lines = path.read_text().splitlines(keepends=True)
    first = next(n for n, line in enumerate(lines) if '"X"' in line)
    torn = "".join(lines[: first + kept]) + lines[first + kept][:9]
    path.write_text(torn)
    job = open_trace(tmp_path)
    assert sum(e["ph"] == "X" for e in job.events() if e["pid"] == 1) == kept
    ending = job.endings[1]
    assert ending.is_early
    assert ending.reason == "its file has no end: the process was killed, or still runs"
    assert ending.until == [0.0, 5.0, 15.0][kept]
    assert not job.endings[0].is_early
    merge_traces(job, tmp_path / "trace.json")
    again = open_trace(tmp_path / "trace.json")
    assert sum(e["ph"] == "X" for e in again.events()) == 2 + kept
    assert again.endings == job.endings


def test_an_error_and_dropped_events_are_recorded(tmp_path: Path) -> None:
    write(tmp_path, 0, [])
    write(tmp_path, 1, [(STEP, "step 1", 3.0, 4.0, {"step": 1})], "ValueError: boom", 17)
    merged(tmp_path)
    job = open_trace(tmp_path / "trace.json")
    list(job.events())
    ending = job.endings[1]
    assert (ending.reason, ending.dropped, ending.until) == ("ValueError: boom", 17, 4.0)


def damage(path: Path, line: int, text: str) -> None:
    lines = path.read_text().splitlines(keepends=True)
    lines[line - 1] = text
    path.write_text("".join(lines))


@pytest.mark.parametrize(
    ("harm", "error", "message"),
    [
        (lambda f: rank_file(f, 1).unlink(), FileNotFoundError,
         r"has traces of 1 of the job's 2 ranks, and not rank_1.json; if nodes have disks"),
        (lambda f: [rank_file(f, r).unlink() for r in (0, 1)], FileNotFoundError,
         r"no trace of a rank \(rank_<r>.json\) is in .*; `mpishard trace run`, MPISHARD_TRACE"),
        (lambda f: write(f, 1, [], job="b2"), ValueError,
         r"has traces of 2 jobs \(job a1: ranks \[0\]; job b2: ranks \[1\]\); remove those of old"),
        (lambda f: write(f, 1, [], version=7), ValueError,
         "rank_1.json has version 7, and this mpishard reads 1"),
        (lambda f: rank_file(f, 1).rename(rank_file(f, 3)), ValueError,
         "rank_3.json is the trace of rank 1; it was renamed"),
        (lambda f: (merged(f), (f / "trace.json").rename(rank_file(f, 9))), ValueError,
         "rank_9.json is the trace of all ranks; it was renamed"),
        (lambda f: rank_file(f, 1).write_text('{"displayTimeUnit":"ms","oth'), ValueError,
         "rank_1.json does not begin as a trace of mpishard does; it is torn, or another"),
        (lambda f: rank_file(f, 0).write_text('[{"ph":"X"}]'), ValueError,
         "rank_0.json does not begin as a trace of mpishard does"),
        (lambda f: damage(rank_file(f, 1), 3, ',{"name":\n'), ValueError,
         "rank_1.json, line 3 is damaged, and others follow it"),
    ],
    ids=["missing", "none", "jobs", "version", "renamed", "merged", "torn", "other", "damaged"],
)  # fmt: skip
def test_damaged_traces_are_refused(tmp_path: Path, harm: Any, error: Any, message: str) -> None:
    for rank in (0, 1):
        write(tmp_path, rank, [(COMPUTE, "forward", 0.0, 1.0, {})])
    harm(tmp_path)
    (tmp_path / "merged.json").write_text("older")
    with pytest.raises(error, match=message):
        merge_traces(open_trace(tmp_path), tmp_path / "merged.json")
    assert (tmp_path / "merged.json").read_text() == "older"
    assert not list(tmp_path.glob(".*"))


def test_paths_without_a_job_are_refused(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path, rank, [])
    with pytest.raises(FileNotFoundError, match=r"there is no file or folder .*nowhere"):
        open_trace(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"rank_1.json is the trace of rank 1 alone; give its fol"):
        open_trace(rank_file(tmp_path, 1))
    merged(tmp_path)
    path = tmp_path / "trace.json"
    path.write_text(path.read_text()[:-30])
    with pytest.raises(ValueError, match=r"trace.json is torn: its end is missing; merge it again"):
        summarize_trace(open_trace(path))


# ------------------------------------------------------------------------------------- figures


def two_ranks(folder: Path) -> None:
    """Two steps of 100 us. Rank 0 waits for rank 1, which computes longer."""
    for rank, (forward, come, wait) in enumerate([(40, 30, 20), (60, 55, 0)]):
        events: list[Event] = [(COMPUTE, "before all steps", 0.0, 100.0, {})]
        for step in (1, 2):
            at = 100.0 * step + 10 * rank
            events += [
                (COMMUNICATION, "all_reduce", at + come, at + forward + wait, call(step)),
                (WAIT, "all_reduce", at + come, at + come + 2, call(step)),
                (COMPUTE, "part of forward", at + 5, at + 10, {}),
                (COMPUTE, "forward", at, at + forward, {}),
                (WAIT, "all_reduce", at + forward, at + forward + wait, call(step)),
                (COMPUTE, "update", at + 60, at + 90, {}),
                (STEP, f"step {step}", at, at + 100, {"step": step}),
            ]
        write(folder, rank, events)


def test_shares_of_a_step(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    found = summarize_trace(open_trace(tmp_path))
    zero, one = found.ranks
    micro = 1e-6
    assert zero.seconds == pytest.approx(200 * micro)
    # Of 100 us: waits 2 + 20; computes 40 + 30, less the 2 in forward in which it called.
    assert zero.waiting == pytest.approx(2 * 22 * micro)
    assert zero.computing == pytest.approx(2 * 68 * micro)
    assert zero.idle == pytest.approx(2 * 10 * micro)
    assert zero.in_flight == pytest.approx(2 * 30 * micro)
    assert zero.hidden == pytest.approx(2 * 8 * micro)
    assert (one.computing, one.waiting) == (pytest.approx(176e-6), pytest.approx(4e-6))
    assert (zero.steps, zero.last, one.last) == (2, 0.0, 1.0)
    assert found.step_seconds == pytest.approx(100 * micro)
    # Work of the passes: 38 and 58; the longest span of them: 60.
    assert found.bubble == pytest.approx(1 - 48 / 60)
    (total,) = found.calls
    assert (total.kind, total.group, total.calls, total.nbytes) == ("all_reduce", "world", 4, 32)
    assert total.in_flight == pytest.approx((2 * 30 + 2 * 5) * micro)
    assert total.waiting == pytest.approx((2 * 22 + 2 * 2) * micro)
    assert total.median_wait == pytest.approx(12 * micro)


def test_passes_that_accumulate_are_one_step_and_a_new_model_counts_anew(tmp_path: Path) -> None:
    numbers = [1, 1, 2, 1]  # two passes of step 1, a step 2, and step 1 of another model
    for rank in (0, 1):
        events: list[Event] = []
        for place, number in enumerate(numbers):
            at = 100.0 * place
            events += [
                (COMPUTE, "backward_input", at + 20 * rank, at + 80, {"micro_batch": place}),
                (STEP, f"step {number}", at, at + 90, {"step": number}),
            ]
        # A rank that died has fewer steps.
        write(tmp_path, rank, events[: len(events) - 2 * rank])
    found = summarize_trace(open_trace(tmp_path))
    # Of the first, both passes: (160 + 120) / 2 of work in 180; the second: 70 in 80.
    assert found.bubble == pytest.approx(np.median([1 - 140 / 180, 1 - 70 / 80]))
    assert found.step_seconds == pytest.approx(np.median([180e-6, 90e-6]))


def test_without_steps_the_whole_trace_counts(tmp_path: Path) -> None:
    write(tmp_path, 0, [(WAIT, "barrier", 10.0, 20.0, call(1)), (COMPUTE, "load", 40.0, 70.0, {})])
    write(tmp_path, 1, [])
    found = summarize_trace(open_trace(tmp_path))
    (zero, one), micro = found.ranks, 1e-6
    assert (zero.seconds, zero.idle) == (pytest.approx(60 * micro), pytest.approx(20 * micro))
    assert (one.seconds, one.computing, one.last) == (0, 0, 0)
    assert np.isnan([found.step_seconds, found.bubble]).all()


def test_calls_are_counted_by_axis_and_by_split(tmp_path: Path) -> None:
    groups = {"world/3.0": "world/3", "world/3.1": "world/3", "world/3.1/2.0": "world/3.1/2"}
    events: list[Event] = [
        (COMMUNICATION, "barrier", 10.0 * n, 10.0 * n + 1, call(1, group))
        for n, group in enumerate(groups)
    ]
    events.append((COMMUNICATION, "barrier", 50.0, 51.0, call(1, "world/9.4", axis="tensor")))
    events.append((COMMUNICATION, "receive", 60.0, 61.0, message(0)))
    events.append((WAIT, "receive", 60.0, 61.0, message(0)))
    for rank in (0, 1):
        write(tmp_path, rank, events)
    found = {(c.kind, c.group): c for c in summarize_trace(open_trace(tmp_path)).calls}
    assert {key: c.calls for key, c in found.items()} == {
        ("barrier", "world/3"): 4,
        ("barrier", "world/3.1/2"): 2,
        ("barrier", "tensor"): 2,
        ("receive", "world"): 2,
    }
    assert found["receive", "world"].median_wait == pytest.approx(1e-6)
    assert found["receive", "world"].nbytes == 32


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9))))
def test_union(drawn: list[tuple[int, int]]) -> None:
    spans = [(float(start), float(start + length)) for start, length in drawn]
    covered = union(spans)
    assert covered.shape == (len(covered), 2)
    assert (covered[1:, 0] > covered[:-1, 1]).all()
    for half in np.arange(0.5, 40):
        inside = any(start < half < end for start, end in spans)
        assert inside == bool(((covered[:, 0] < half) & (half < covered[:, 1])).any())
