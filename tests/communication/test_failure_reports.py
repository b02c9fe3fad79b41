"""What is said of a failure: by a rank of an MPI job, and by run_in_threads."""

import pytest

from mpishard.communication.failure_report import failure_report
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
def test_what_every_rank_raises_is_no_failure_of_the_one_that_reports_it(error, words):
    report = failure_report(error, "rank 2 of 4", 2, "in or after collective 3")
    assert report.startswith(f"mpishard: {words} in or after collective 3; the job ends\n")


def test_a_message_of_mpishard_s_stands_once_in_a_report():
    try:
        raise CollectiveMismatchError("they differ:\n  rank 0: barrier()") from KeyError("why")
    except CollectiveMismatchError as caught:
        caught.add_note("a note")
        report = failure_report(caught, "rank 0 of 2", 0, "in collective 3")
    assert report.count("they differ:\n  rank 0: barrier()") == 1
    assert "KeyError: 'why'" in report
    assert report.endswith("\nCollectiveMismatchError: (as above)\na note")
    other = failure_report(ValueError("boom"), "rank 0 of 2", 0, "in collective 3")
    assert other.endswith("\nValueError: boom")
