"""The public conformance suite, on thread-ranks and on MPI processes."""

import numpy as np
import pytest

from mpishard import run_in_threads
from mpishard.communication import ReductionOperation
from mpishard.testing.communication import CommunicationConformance
from mpishard.testing.reference import ADVERSARIAL_VALUES, tree_reduce
from mpishard.testing.worlds import in_worlds


@pytest.mark.parametrize("name", CommunicationConformance.names())
@in_worlds(1, 2, 3, 4, 5, 6, 7, 8)
def test_conformance(backend, name):
    check = getattr(CommunicationConformance(), name)
    for _ in range(2):  # stale buffers and left-over messages show in the second run
        check(backend)


@in_worlds(2, 3, 4)
def test_mpi_and_memory_give_the_same_bits(backend):
    for dtype in (np.float16, np.float32, np.float64):
        for length in (5, 3001):

            def contribution(rank, dtype=dtype, length=length):
                order = np.random.default_rng([rank, 3]).integers(0, 13, length)
                with np.errstate(all="ignore"):
                    return np.array(ADVERSARIAL_VALUES)[order].astype(dtype)

            for operation in ReductionOperation:
                here = backend.all_reduce(contribution(backend.rank), operation)
                in_memory = run_in_threads(
                    backend.world_size,
                    lambda b, o=operation, c=contribution: b.all_reduce(c(b.rank), o),
                )
                for other in in_memory:
                    assert here.tobytes() == other.tobytes()


@in_worlds(2, 3)
def test_the_suite_notices_a_backend_that_lets_mismatches_through(backend):

    class Wrong(type(backend)):
        def _verify(self, calls):
            pass  # lets mismatches through

    broken = backend.split(0)
    broken.__class__ = Wrong
    with pytest.raises(AssertionError, match="was not raised"):
        CommunicationConformance().check_mismatches(broken)


def test_the_reference_tree_is_the_documented_one():
    a = [np.array([x]) for x in (0.1, 0.2, 0.3, 0.4, 0.5)]
    expected = ((a[0] + a[1]) + (a[2] + a[3])) + a[4]
    assert tree_reduce(a, ReductionOperation.SUM).tobytes() == expected.tobytes()
    assert tree_reduce(a, ReductionOperation.AVERAGE).tobytes() == (expected / 5).tobytes()


@in_worlds(2, 3)
def test_long_pieces_go_in_rounds(backend, monkeypatch):
    """The scratch of a reduction is bounded; a small bound here makes many rounds."""
    monkeypatch.setattr("mpishard.communication.mpi_collectives._SCRATCH_BYTES", 100)
    CommunicationConformance().check_all_reduce(backend)
    CommunicationConformance().check_reduce_scatter(backend)
    CommunicationConformance().check_async_orders(backend)
