"""The parts of the MPI backend that need no MPI."""

import inspect
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpishard.base import settings
from mpishard.communication.contract import backoff as backoff_module
from mpishard.communication.contract.arena import Arena
from mpishard.communication.contract.backend import CommunicationBackend
from mpishard.communication.contract.backoff import Backoff
from mpishard.communication.contract.call import DTYPES, Call, CollectiveKind
from mpishard.communication.contract.reduction import ReductionOperation, TreeReducer
from mpishard.communication.mpi.headers import INLINE_BYTES, Headers, make_row
from mpishard.communication.mpi.job import _cores_per_rank
from mpishard.communication.mpi.messages import ScratchPool
from mpishard.testing.reductions import ADVERSARIAL_VALUES, tree_reduce


def test_scratch_buffers_are_reused_and_never_shared():
    pool = ScratchPool()
    first, second = pool.take(100), pool.take(100)
    assert not np.may_share_memory(first, second)
    pool.give(first)
    assert pool.nbytes == 100
    assert pool.take(50) is first
    assert pool.nbytes == 0
    pool.give(first)
    assert pool.take(1000).size == 1000
    assert pool.take(100) is not first, "a buffer that was too small is let go"


@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 4), max_size=4).map(tuple),
    root=st.integers(-1, 5),
    operation=st.sampled_from([None, *ReductionOperation]),
)
def test_a_header_is_read_as_it_was_written(dtype, shape, root, operation):
    arrays = [np.full(shape, rank, np.int64).astype(dtype) for rank in range(3)]
    calls = [
        Call.describe(CollectiveKind.ALL_GATHER, array, operation=operation, root=root, sequence=7)
        for array in arrays
    ]
    rows = [make_row(c, a) for c, a in zip(calls, arrays, strict=True)]
    headers = Headers(rows, calls[1], 1)
    assert headers.identical
    assert headers.all_inline == (arrays[0].nbytes <= INLINE_BYTES)
    calls[2].sequence += 1
    rows[2] = make_row(calls[2], arrays[2])
    headers = Headers(rows, calls[1], 1)
    assert not headers.identical
    assert list(headers.calls[:2]) == calls[:2]
    assert headers.calls[2].sequence == 8
    if headers.all_inline:
        for rank, array in enumerate(arrays):
            assert headers.inline(rank).tobytes() == array.tobytes()


@given(
    world=st.integers(1, 9),
    name=st.sampled_from(["float16", "bfloat16", "float32", "float64"]),
    operation=st.sampled_from(list(ReductionOperation)),
    seed=st.integers(0, 1000),
)
def test_the_reducer_gives_the_bits_of_the_simple_tree(world, name, operation, seed):
    dtype = next(d for d in DTYPES if d.name == name)
    generator = np.random.default_rng(seed)
    length = int(generator.integers(0, 40))
    with np.errstate(all="ignore"):
        arrays = [generator.choice(ADVERSARIAL_VALUES, length).astype(dtype) for _ in range(world)]
    out = arrays[-1].copy()
    expected = tree_reduce(arrays, operation)
    TreeReducer().reduce([*arrays[:-1], out], operation, out)
    nan = np.isnan(expected)
    assert (np.isnan(out) == nan).all()
    assert out[~nan].tobytes() == expected[~nan].tobytes()


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([(0, 1)], 2),
        ([(0, 1), (0, 1)], 1),  # not bound
        ([(0,), (1,)], 1),  # bound by the launcher
        ([(0, 1, 2, 3), (0, 1, 2, 3)], 2),
        ([(0, 1)] * 8, 0.25),
        ([(0, 1), (1, 2)], 1.5),
    ],
)
def test_cores_per_rank(ranks, expected):
    assert _cores_per_rank(ranks[0], ranks) == expected


class TestBackoff:
    @pytest.mark.parametrize("yields", [False, True])
    def test_peers_are_checked_during_a_wait(self, yields):
        looks = []
        backoff = Backoff(yields, lambda: looks.append(time.monotonic()))
        started = time.monotonic()
        for _ in range(2_000_000):
            backoff.pause()
            if len(looks) == 3:
                break
        assert looks[-1] - started > 0.1
        assert len(looks) == 3

    def test_peers_are_checked_soon_if_each_yield_takes_long(self, monkeypatch):
        """On a busy machine a check after 512 yields would come after 5 s."""
        monkeypatch.setattr(backoff_module, "yield_processor", lambda: time.sleep(0.01))
        looks = []
        backoff = Backoff(True, lambda: looks.append(time.monotonic()))
        started = time.monotonic()
        while not looks:
            backoff.pause()
        assert time.monotonic() - started < 1

    @pytest.mark.parametrize("yields", [False, True])
    def test_a_long_wait_takes_little_processor_time(self, yields):
        """A rank polls for at most 2 ms; then the core is free for others."""
        backoff = Backoff(yields, lambda: None)
        started, processor = time.monotonic(), time.thread_time()
        while time.monotonic() - started < 0.2:
            backoff.pause()
        assert time.thread_time() - processor < 0.1

    def test_a_rank_dozes_after_one_long_yield(self, monkeypatch):
        """Other programs use the core: a short sleep gives it up for less time than a yield."""
        yields = []
        monkeypatch.setattr(
            backoff_module, "yield_processor", lambda: (yields.append(1), time.sleep(0.003))
        )
        backoff = Backoff(True, lambda: None)
        for _ in range(50):
            backoff.pause()
        assert len(yields) == 1

    def test_a_check_may_end_the_wait_by_raising(self):
        def give_up():
            raise TimeoutError

        def wait():
            backoff = Backoff(True, give_up)
            for _ in range(2_000_000):
                backoff.pause()

        with pytest.raises(TimeoutError):
            wait()


class TestSettings:
    def test_seconds(self, monkeypatch):
        monkeypatch.delenv("MPISHARD_TIMEOUT", raising=False)
        assert settings.collective_timeout() == 300
        monkeypatch.setenv("MPISHARD_TIMEOUT", "1.5")
        assert settings.collective_timeout() == 1.5
        for text in ("soon", "-1", "inf", "nan"):
            monkeypatch.setenv("MPISHARD_TIMEOUT", text)
            with pytest.raises(ValueError, match="MPISHARD_TIMEOUT must be a number of seconds"):
                settings.collective_timeout()


def test_every_blocking_method_has_a_twin():
    """Methods that make worlds or memory have none, because MPI blocks in them."""
    makers = {CollectiveKind.SPLIT, CollectiveKind.ALLOCATE_SHARED}
    # Those of an `Arena`, which never block.
    of_arenas = {kind for kind in CollectiveKind if hasattr(Arena, kind.label)}
    kinds = {kind for kind in CollectiveKind if kind not in makers | of_arenas}
    blocking = {kind.label for kind in kinds} | {"send", "receive"}
    names = {name for name in dir(CommunicationBackend) if name.endswith("_async")}
    assert names == {f"{name}_async" for name in blocking}
    for name in blocking:
        method = getattr(CommunicationBackend, name)
        twin = getattr(CommunicationBackend, f"{name}_async")
        wanted = inspect.signature(method).parameters
        assert list(inspect.signature(twin).parameters)[: len(wanted)] == list(wanted), name
        assert inspect.signature(twin).return_annotation in ("Work", "Transfer")
