"""Reports of a failure: by a rank of an MPI job, and by `run_in_threads`."""

import time
import traceback

import numpy as np
import pytest

from mpishard import run_in_threads
from mpishard.communication.contract.call import Call, CollectiveKind, MessageWait
from mpishard.communication.contract.status import RankRecord, RankState
from mpishard.communication.failure.report import failure_report
from mpishard.communication.failure.stall import describe_departure
from mpishard.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    NonFiniteLossError,
    NoSampleError,
    PeerError,
)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("boom"), "rank 2 of 4 failed"),
        (CollectiveMismatchError("x"), "the ranks' calls differ, reported by rank 2 of 4"),
        (CollectiveTimeoutError("x"), "a rank did not arrive in time, reported by rank 2 of 4"),
        (PeerError("x", 1), "rank 1 failed or left, reported by rank 2 of 4"),
        (PeerError("x", -1), "a thread that is no rank failed or left, reported by rank 2 of 4"),
        (
            NonFiniteLossError("x"),
            "the loss or its gradient is not finite, reported by rank 2 of 4",
        ),
        (NoSampleError("x"), "no rank has a sample that counts, reported by rank 2 of 4"),
    ],
)
def test_an_error_of_all_ranks_blames_no_single_rank(error, words):
    report = failure_report(error, "rank 2 of 4", "in or after collective 3")
    assert report.startswith(f"mpishard: {words} in or after collective 3; the job ends\n")


def test_a_report_has_the_message_once():
    with pytest.raises(CollectiveMismatchError) as caught:
        raise CollectiveMismatchError("they differ:\n  rank 0: barrier()") from KeyError("why")
    caught.value.add_note("a note")
    report = failure_report(caught.value, "rank 0 of 2", "in collective 3")
    assert report.count("they differ:\n  rank 0: barrier()") == 1
    assert "KeyError: 'why'" in report
    assert report.endswith("\nCollectiveMismatchError: (as above)\na note")
    other = failure_report(ValueError("boom"), "rank 0 of 2", "in collective 3")
    assert other.endswith("\nValueError: boom")


# ------------------------------------------------------------------------------- a rank that left


def barrier(sequence, number, group="", method=""):
    call = Call.describe(CollectiveKind.BARRIER, None, sequence=sequence)
    call.filename, call.line, call.method, call.number = "train.py", 7, method, number
    call.group = group
    return call


def described(records, awaited):
    return describe_departure(1, 4, 0, awaited, records)


LEFT = {"state": RankState.LEAVING, "calls": (barrier(4, 4),)}


def test_a_rank_that_left_without_a_record_is_named():
    call = barrier(5, 5, "group 1 (ranks 0, 1)", "Model.save")
    assert described([], call) == (
        "rank 1 left after collective 4 of group 1 (ranks 0, 1), while rank 0 waits in collective "
        "5, barrier(), of group 1 (ranks 0, 1), called at train.py:7 in Model.save. Model.save is "
        "collective: look for a loop or a branch in which rank 1 calls it less often"
    )
    text = described([], MessageWait(1, 0, is_send=False, group=""))
    assert text.endswith("Look for a loop or a branch that ends earlier on rank 1")


def test_a_circle_is_reported_before_a_rank_that_left():
    world, group = barrier(5, 6), barrier(1, 6, "group 1 (ranks 0, 2)")
    records = [
        # Rank 0 has not said yet that it waits.
        RankRecord(0, RankState.RUNNING, calls=(barrier(4, 5), world)),
        RankRecord(1, **LEFT),
        RankRecord(2, RankState.RUNNING, calls=(barrier(4, 5), group), waits=group, waited=1.0),
    ]
    text = described(records, world)
    assert "rank 2 waits in collective 1, barrier(), of group 1 (ranks 0, 2) at" in text
    assert "call the collectives of different groups in different orders" in text
    assert "look for a loop" not in text


def test_groups_in_another_order_after_other_ranks_left():
    def body(backend):
        group = backend.split(backend.rank // 2)
        if backend.rank == 2:
            group.barrier()  # rank 3 calls the world's: a bug
        elif backend.rank == 3:
            time.sleep(0.1)
            backend.barrier()

    with pytest.raises(PeerError) as caught:
        run_in_threads(4, body)
    text = str(caught.value)
    assert "of group 1 (ranks 2, 3) at" in text
    assert "different groups in different orders" in text


# ----------------------------------------------------------------------------------------- threads


def differing(backend):
    def deeper():
        backend.all_reduce(np.ones(3 + backend.rank))

    deeper()


def functions_of(error):
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def test_a_traceback_has_the_user_s_frames_and_the_last_frame(monkeypatch):
    monkeypatch.delenv("MPISHARD_LOG", raising=False)
    with pytest.raises(CollectiveMismatchError) as caught:
        run_in_threads(2, differing)
    assert functions_of(caught.value)[1:] == [
        "run_in_threads",
        "differing",
        "deeper",
        "check_calls",
    ]
    monkeypatch.setenv("MPISHARD_LOG", "debug")
    with pytest.raises(CollectiveMismatchError) as caught:
        run_in_threads(2, differing)
    assert "_run_rank" in functions_of(caught.value)
    assert "wait" in functions_of(caught.value)


def test_the_cause_of_a_failure_has_a_short_traceback_too(monkeypatch):
    monkeypatch.delenv("MPISHARD_LOG", raising=False)

    def body(backend):
        try:
            backend.all_reduce([1])
        except TypeError as error:
            raise KeyError("theirs") from error

    with pytest.raises(KeyError) as caught:
        run_in_threads(1, body)
    assert functions_of(caught.value)[1:] == ["run_in_threads", "body"]
    inner = functions_of(caught.value.__cause__)
    assert inner[0] == "body"
    assert len(inner) == 2
