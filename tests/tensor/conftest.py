"""A rank's part of a whole array, by an independent formula, for split layers."""

from contextlib import contextmanager

import numpy as np
import pytest


@pytest.fixture
def time_slice():
    """``time_slice(backend)(array)``: this rank's slice of dim 1."""

    def of(backend):
        return lambda array: np.split(array, backend.world_size, axis=1)[backend.rank]

    return of


@pytest.fixture
def columns():
    """``columns(split, backend)(array)``: this rank's elements of the last dim."""

    def of(split, backend):
        def take(array):
            ranges = split.ranges(backend.rank)
            return np.concatenate([array[..., low:high] for low, high in ranges], axis=-1)

        return take

    return of


class Sent:
    """Bytes sent by all ranks, and this rank's calls by kind, once the block is left."""

    nbytes: int
    calls: dict[str, int]


@pytest.fixture
def sent_by_all():
    """``with sent_by_all(backend) as sent``: what is sent inside the block. Collective."""

    @contextmanager
    def measure(backend):
        sent = Sent()
        backend.traffic.reset()
        yield sent
        sent.calls = dict(backend.traffic.calls)
        own = np.array([backend.traffic.total_bytes])
        sent.nbytes = int(backend.all_reduce(own)[0])

    return measure


class Unsent:
    """What a collective that was forgotten gives."""

    def __init__(self, result):
        self.result = result

    def wait(self):
        return self.result


@pytest.fixture
def forgetting():
    """``with forgetting(backend)``: reductions of floating arrays are left out, on all ranks.

    All of them, or the one of a number. A rank then has what it had itself: an all-reduce leaves
    the array, a reduce-scatter gives the rank's part of it. The checks must see it.
    """

    @contextmanager
    def forget(backend, number=None):
        reduce, scatter, forgotten = backend.all_reduce_async, backend.reduce_scatter_async, []
        calls = []

        def is_forgotten(array):
            calls.append(array.dtype.kind == "f")
            if not calls[-1] or number not in (None, sum(calls)):
                return False
            forgotten.append(array)
            return True

        def all_reduce_async(array, *arguments, out=None, subject=0):
            if not is_forgotten(array):
                return reduce(array, *arguments, out=out, subject=subject)
            return Unsent(array if out is None else array.copy())

        def reduce_scatter_async(array, *arguments, out=None, subject=0):
            if not is_forgotten(array):
                return scatter(array, *arguments, out=out, subject=subject)
            own = np.array_split(array, backend.world_size)[backend.rank].copy()
            if out is not None:
                out[...] = own
            return Unsent(own)

        def all_reduce(array, *arguments, **options):
            return all_reduce_async(array, *arguments, **options).wait()

        backend.all_reduce = all_reduce
        backend.all_reduce_async = all_reduce_async
        backend.reduce_scatter_async = reduce_scatter_async
        backend.reduce_scatter = lambda array: reduce_scatter_async(array).wait()
        try:
            yield
        finally:
            for name in (
                "all_reduce",
                "all_reduce_async",
                "reduce_scatter_async",
                "reduce_scatter",
            ):
                delattr(backend, name)
        assert forgotten, "there was no such reduction to forget"

    return forget
