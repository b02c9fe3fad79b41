"""The example backend over pipes: conformance, and how its ranks end."""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import os
import pickle
import runpy
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from mpishard import run_in_threads
from mpishard.communication.contract.call import DTYPES, Call, CollectiveKind
from mpishard.errors import CollectiveTimeoutError, CommunicationError, PeerError
from mpishard.testing import CommunicationConformance

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "pipe_backend.py"
is_full = bool(os.environ.get("MPISHARD_TEST_FULL"))
ALL = [dtype.name for dtype in DTYPES]
SOME = ALL if is_full else ["int16", "float16", "bfloat16", "float64", "complex64"]
REST = ALL if is_full else [name for name in ALL if name not in SOME]
SECONDS = 150.0  # that ranks wait for each other: machines are noisy
CHECKS = len(CommunicationConformance.names())


@pytest.fixture
def pipes(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The example, as a module that new processes can import, too."""
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    monkeypatch.syspath_prepend(str(HERE))
    yield importlib.import_module("pipe_backend")
    for process in multiprocessing.active_children():
        process.kill()  # one that a test has stopped does not notice the end


@pytest.fixture
def ranks(pipes: ModuleType) -> ModuleType:
    return importlib.import_module("pipe_ranks")


def on_threads(
    pipes: ModuleType,
    world_size: int,
    body: Callable[[Any], Any],
    timeout: float = 20.0,
) -> list[Any]:
    """``body(backend)`` on threads that talk through pipes: a result or an error of each."""
    ends: list[dict[int, Any]] = [{} for _ in range(world_size)]
    for a, b in itertools.combinations(range(world_size), 2):
        ends[a][b], ends[b][a] = multiprocessing.Pipe()

    class Backend(pipes.PipeBackend):  # type: ignore[misc,name-defined]
        _rank_is_process = False

    def one_rank(rank: int) -> Any:
        try:
            pipe_ends = pipes.Pipes(rank, ends[rank], timeout)
            with Backend(pipe_ends, range(world_size)) as backend:
                return body(backend)
        except Exception as error:
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(one_rank, range(world_size)))


# ------------------------------------------------------------------------------------ processes


def only_peer_errors(found: list[Any], rank: int, *words: str) -> None:
    """Assert that every survivor has passed all checks and then got an error about ``rank``."""
    for checks, error in found:
        assert checks == CHECKS
        assert isinstance(error, PeerError)
        assert error.rank == rank
        for word in words:
            assert word in str(error)


@pytest.mark.spawned
@pytest.mark.timeout(200)
def test_one_rank_and_an_exception_of_a_rank(pipes: ModuleType, ranks: ModuleType) -> None:
    with pytest.raises(OSError, match=f"no space left on device after {CHECKS} checks") as raised:
        pipes.run_in_processes(1, ranks.run_conformance, ALL, 1, "raises", timeout=SECONDS)
    (note,) = raised.value.__notes__
    assert note.startswith("raised on rank 0:\nTraceback")
    assert "in run_conformance" in note


@pytest.mark.spawned
@pytest.mark.timeout(200)
def test_two_ranks_of_which_one_leaves(pipes: ModuleType, ranks: ModuleType) -> None:
    found = pipes.run_in_processes(
        2, ranks.run_conformance, REST, 1 + is_full, "leaves", timeout=SECONDS
    )
    assert found.pop() == CHECKS
    only_peer_errors(found, 1, "rank 1 left after collective ", " of world")


@pytest.mark.spawned
@pytest.mark.timeout(200)
@pytest.mark.parametrize("world_size", [3, 4] if is_full else [3])
def test_more_ranks_of_which_one_is_killed(
    pipes: ModuleType, ranks: ModuleType, world_size: int, tmp_path: Path
) -> None:
    last = world_size - 1
    with pytest.raises(RuntimeError, match=f"rank {last} ended with code -{signal.SIGKILL:d}"):
        pipes.run_in_processes(
            world_size, ranks.tell, str(tmp_path), SOME, 1 + is_full, "dies", timeout=SECONDS
        )
    texts = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert texts.keys() == {str(rank) for rank in range(last)}
    for text in texts.values():
        assert text.startswith(f"({CHECKS}, PeerError('rank {last} ended without a word")


@pytest.mark.spawned
@pytest.mark.timeout(200)
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="a system whose processes do not stop")
def test_a_send_to_a_stopped_process_times_out(
    pipes: ModuleType, ranks: ModuleType, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match="rank 1 ended with code"):
        pipes.run_in_processes(2, ranks.stop, str(tmp_path), timeout=SECONDS)
    said = (tmp_path / "0").read_text()
    assert said.startswith("rank 0 waited 1 s in collective 1, all_to_all(float64[6553600])")
    assert said.endswith("nothing came from ranks [1]")


@pytest.mark.spawned
@pytest.mark.timeout(200)
@pytest.mark.skipif(not is_full, reason="its parts are tested above; --full")
def test_the_script_prints_its_results(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, pipes: ModuleType
) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "-n", "3"])
    pipes.main()
    first, checks, last = capsys.readouterr().out.splitlines()
    assert first == "3 processes, 3 pipes"
    assert checks == f"passed, twice each: {' '.join(CommunicationConformance.names())}"
    assert last == "FSDP, 20 steps: the same parameters as on threads, to the bit"


def test_zero_ranks_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "-n", "0"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "argument -n: needs an integer >= 1, got 0" in capsys.readouterr().err


# -------------------------------------------------------------------------------------- threads


def test_training_has_the_bits_of_the_built_in_backend(pipes: ModuleType) -> None:
    ours = on_threads(pipes, 3, pipes.train)
    theirs = run_in_threads(3, pipes.train)
    assert np.array(ours).tobytes() == np.array(theirs).tobytes()


def test_a_failure_is_reported_with_its_origin(pipes: ModuleType) -> None:
    def body(backend: Any) -> None:
        pair = backend.split(backend.rank // 2)
        if backend.rank == 3:
            raise OSError("no space left on device")
        if backend.rank == 2:
            pair.barrier()  # its peer fails, and it hands that on
        backend.receive((backend.rank + 1) % 2, 1)  # the one that is waited for lives

    *others, origin = on_threads(pipes, 4, body)
    assert isinstance(origin, OSError)
    for error in others:
        assert isinstance(error, PeerError)
        assert error.rank == 3
        assert str(error).startswith("rank 3 failed after collective 1, with Traceback (most ")
        assert "OSError: no space left on device" in str(error)


def test_a_group_that_a_rank_has_left_raises_and_the_world_continues(pipes: ModuleType) -> None:
    def body(backend: Any) -> Any:
        group = backend.split(0)
        message = None
        if backend.rank == 1:
            group.shutdown()
            with pytest.raises(CommunicationError, match="has ended; its pipes are closed"):
                group.initialize()
        else:
            try:
                group.barrier()
            except PeerError as error:
                message = str(error)
        backend.barrier()
        return message

    text = "rank 1 left after collective 0 of group 1 (ranks 0-2)"
    assert on_threads(pipes, 3, body) == [text, None, text]


def test_each_queued_receive_raises_if_its_sender_has_left(pipes: ModuleType) -> None:
    def body(backend: Any) -> None:
        backend.barrier()
        if backend.rank == 1:
            return
        works = [backend.receive_async(1, 1, dtype=float) for _ in range(2)]
        for work in works:
            with pytest.raises(PeerError, match="rank 1 left after collective 1 of world"):
                work.wait()

    assert on_threads(pipes, 2, body, timeout=2.0) == [None, None]


def test_groups_end_with_their_world(pipes: ModuleType) -> None:
    def body(backend: Any) -> None:
        group = backend.split(0)
        backend.shutdown()
        group.barrier()

    for error in on_threads(pipes, 2, body):
        assert type(error).__name__ == "NotInitializedError"


def test_waits_end_by_the_time_limit(pipes: ModuleType) -> None:
    def body(backend: Any) -> Any:
        if backend.rank == 1:
            backend._pipes.timeout = 0.2
            with pytest.raises(CollectiveTimeoutError, match=r"for a message .* from ranks \[0\]"):
                backend.receive(0, 1, tag=3)
            backend._pipes.timeout = 0  # for ever
        backend.send(np.ones(1), 1 - backend.rank, tag=np.int64(0))  # as good as 0
        return backend.receive(1 - backend.rank, 1)[0]

    assert on_threads(pipes, 2, body) == [1.0, 1.0]


def test_arrays_of_other_libraries_are_refused_before_anything_is_sent(pipes: ModuleType) -> None:
    class OnDevice:
        """An array like CuPy's, which refuses to be converted to one of NumPy."""

        def __array__(self, *_: Any, **__: Any) -> Any:
            raise TypeError("implicit conversion to a NumPy array is not allowed")

    def body(backend: Any) -> Any:
        with pytest.raises(TypeError, match="not allowed"):
            backend._to_all(OnDevice())
        return backend.all_reduce(np.ones(2))[0]

    assert on_threads(pipes, 2, body) == [2.0, 2.0]


def test_the_contents_of_a_message_travel() -> None:
    call = Call.describe(CollectiveKind.GATHER, np.ones((2, 3), "bfloat16"), root=1, sequence=7)
    call.filename, call.line, call.method = "a file\nof two lines.py", 12, "FSDPModel.predict"
    assert Call.from_bytes(call.to_bytes()) == call
    error = PeerError("rank 3 left", 3)
    error.add_note("raised on rank 0")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.rank, copy.__notes__) == ("rank 3 left", 3, ["raised on rank 0"])


# ------------------------------------------------------------------------------------- mutations


CARELESS = {
    # What is forgotten: the text, what stands in its place, the check that must notice.
    "the tree's order": ("reduce(flat, ", "reduce(flat[1:] + flat[:1], ", "check_tree_order"),
    "to compare calls": ("self._verify(", "list(", "check_mismatches"),
    "which collective": (", call.sequence)", ")", "check_async_orders"),
    "the others' need": ("backend.progress()", "work.advance()", "check_async_orders"),
    "keys": ("members = sorted(", "members = list(", "check_split"),
    "to look": ("        refuse_other_message(", "        len(", "check_point_to_point"),
    "dtypes": ("np.empty(kind[1], kind[0])", "np.empty(kind[1])", "check_broadcast"),
}


def variant(old: str, new: str) -> ModuleType:
    """Return the example with ``old`` replaced by ``new``."""
    text = EXAMPLE.read_text()
    assert old in text
    module = ModuleType("variant")
    exec(compile(text.replace(old, new), str(EXAMPLE), "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("forgotten", CARELESS)
def test_the_suite_detects_each_missing_part(pipes: ModuleType, forgotten: str) -> None:
    old, new, name = CARELESS[forgotten]
    check = getattr(CommunicationConformance([np.dtype("int16"), np.dtype("float64")]), name)
    assert on_threads(pipes, 4, check) == [None] * 4
    found = on_threads(variant(old, new), 4, check, timeout=1.0)
    assert any(isinstance(error, Exception) for error in found)
