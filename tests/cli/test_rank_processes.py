"""Ranks are found among a launcher's descendants, and their ends are seen in order."""

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
import time

import pytest

from mpishard.cli.rank_processes import RankProcess, RankProcesses, held_pipes
from mpishard.communication.contract.status import StatusPage
from mpishard.communication.failure import marks

pytestmark = [
    pytest.mark.spawned,
    pytest.mark.skipif(
        not RankProcesses.can_be_watched(), reason="the system does not tell when processes end"
    ),
]

# A launcher, a proxy below it, and below that three ranks that wait to be told how to end; rank 0
# has a child that inherits its number.
LAUNCHER = """
import os, subprocess, sys
if os.fork():
    os.wait()
    sys.exit()
rank = ["sh", "-c", 'if [ $A_RANK = 0 ]; then sleep 60 & fi; read how; eval "$how"']
pipes = [os.pipe() for _ in range(3)]
ranks = [
    subprocess.Popen(rank, stdin=pipes[r][0], env=os.environ | {"A_RANK": str(r)})
    for r in range(3)
]
print(*(r.pid for r in ranks), flush=True)
for line in sys.stdin:
    r, _, how = line.partition(" ")
    os.write(pipes[int(r)][1], how.encode())
    if "wait" in sys.argv:
        ranks[int(r)].wait()
"""


@pytest.fixture
def launch():
    started = []

    def start(*options):
        launcher = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, *options],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        started.append(launcher)
        return launcher, [int(pid) for pid in launcher.stdout.readline().split()]

    yield start
    for launcher in started:
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.stdin.close()
        launcher.stdout.close()
        launcher.wait()


def tell(launcher, *orders):
    for order in orders:
        launcher.stdin.write(f"{order}\n")
    launcher.stdin.flush()


def look_until_all_are_seen(processes):
    """A process that has just been started has no environment yet for a moment."""
    deadline = time.monotonic() + 10
    while not processes.all_seen and time.monotonic() < deadline:
        processes.look()
        time.sleep(0.01)
    assert processes.all_seen


def is_open(handle):
    try:
        os.fstat(handle)
    except OSError:
        return False
    return True


def wait_until(processes, count):
    deadline = time.monotonic() + 10
    while len(processes.ended) < count and time.monotonic() < deadline:
        processes.wait(1)


@pytest.mark.parametrize("options", [["wait"], []], ids=["reaped at once", "reaped late"])
def test_order_and_status(launch, tmp_path, options):
    launcher, pids = launch(*options)
    processes = RankProcesses(launcher.pid, "A_RANK", tmp_path, 3)
    look_until_all_are_seen(processes)
    assert {rank: p.pid for rank, p in processes.ranks.items()} == dict(enumerate(pids))
    for count, order in enumerate(("2 kill -9 $$", "0 exit 7", "1 exit 0"), start=1):
        tell(launcher, order)
        wait_until(processes, count)
    processes.wait_for_all()
    assert [(p.rank, p.exit_code) for p in processes.ended] == [(2, -9), (0, 7), (1, 0)]
    assert all(p.has_ended for p in processes.ended)
    processes.close()


def test_ends_that_nobody_looked_at_are_in_order_too(launch, tmp_path):
    launcher, _ = launch("wait")
    processes = RankProcesses(launcher.pid, "A_RANK", tmp_path, 3)
    look_until_all_are_seen(processes)
    tell(launcher, "1 exit 1", "2 exit 2", "0 exit 3")
    last = processes.ranks[0].pid
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{last}") and time.monotonic() < deadline:  # noqa: PTH110
        time.sleep(0.01)
    processes.wait_for_all()
    assert [p.rank for p in processes.ended] == [1, 2, 0]
    processes.close()


@pytest.mark.parametrize("holds", [True, False], ids=["held pipes", "none"])
def test_the_first_to_close_its_pipe_is_the_first(launch, tmp_path, holds):
    """As of a rank that is still ending when another one, which was ended for it, has ended."""
    pipes = held_pipes(tmp_path, 3) if holds else {}
    launcher, _ = launch("wait")
    processes = RankProcesses(launcher.pid, "A_RANK", tmp_path, 3, pipes)
    look_until_all_are_seen(processes)
    with contextlib.ExitStack() as stack:
        held = {
            rank: stack.enter_context((tmp_path / f"{marks.HELD}{rank}").open("wb", buffering=0))
            for rank in (0, 1, 2)
            if holds
        }
        processes.wait(0)
        assert not processes.ended
        if holds:
            for rank in (2, 1, 0):
                held[rank].close()
        tell(launcher, "0 exit 3")
        wait_until(processes, 1)
        assert [p.rank for p in processes.ended] == [0]
        tell(launcher, "1 kill -9 $$", "2 kill -9 $$")
        processes.wait_for_all()
    assert [p.rank for p in processes.ended] == ([2, 1, 0] if holds else [0, 1, 2])
    processes.close()
    assert not any(is_open(handle) for handle in pipes)


def hold(folder, rank):
    return (folder / f"{marks.HELD}{rank}").open("wb", buffering=0)


def test_the_last_time_that_a_pipe_is_closed_counts(launch, tmp_path):
    """A rank may be a shell that runs one script after the other, or may exec."""
    launcher, _ = launch("wait")
    processes = RankProcesses(launcher.pid, "A_RANK", tmp_path, 3, held_pipes(tmp_path, 3))
    look_until_all_are_seen(processes)
    for rank in (0, 1, 2):
        hold(tmp_path, rank).close()
        processes.wait(0)
    held = [hold(tmp_path, rank) for rank in range(3)]
    processes.wait(0)
    for rank in (1, 2, 0):
        held[rank].close()
    tell(launcher, "0 exit 3", "1 kill -9 $$", "2 kill -9 $$")
    wait_until(processes, 3)
    assert [p.rank for p in processes.ended] == [1, 2, 0]
    processes.close()


def test_what_a_rank_without_a_pipe_came_before_it_stays_behind(launch, tmp_path):
    """Rank 1 holds none: it ended before it imported mpishard."""
    launcher, _ = launch("wait")
    processes = RankProcesses(launcher.pid, "A_RANK", tmp_path, 3, held_pipes(tmp_path, 3))
    look_until_all_are_seen(processes)
    held = {rank: hold(tmp_path, rank) for rank in (0, 2)}
    processes.wait(0)
    held[2].close()
    held[0].close()
    tell(launcher, "1 exit 1", "0 kill -9 $$", "2 kill -9 $$")
    wait_until(processes, 3)
    assert [p.rank for p in processes.ended] == [1, 2, 0]
    processes.close()


def test_no_pipes_where_so_many_files_may_not_be_open(tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    assert not held_pipes(tmp_path, 100)
    assert not list(tmp_path.iterdir())
    pipes = held_pipes(tmp_path, 3)
    assert len(pipes) == 3
    for handle in pipes:
        os.close(handle)
    assert not held_pipes(tmp_path, 3)  # they are there
    assert len(os.listdir(tmp_path)) == 3  # noqa: PTH208


def test_what_a_rank_forks_closes_no_files_of_its_own(tmp_path):
    """Those that its child opens get the numbers of what that has let go."""
    pipes = held_pipes(tmp_path, 2)
    script = """
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
import mpishard
def forked(body):
    if not (child := os.fork()):
        os._exit(body())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
def grandchild():
    return any(os.path.realpath(f"/proc/self/fd/{n}") != os.devnull for n in files)
def child():
    files.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(9))
    return forked(grandchild)
files = []
print(forked(child))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60,
        env=os.environ | {"PMI_RANK": "1", "PMI_SIZE": "2", "MPISHARD_JOB_FOLDER": str(tmp_path)},
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("0\n", "")
    for handle in pipes:
        os.close(handle)


def test_a_rank_holds_its_pipe_as_long_as_it_runs(tmp_path):
    """From ``import mpishard`` on, and not the processes that it forks."""
    pipes = held_pipes(tmp_path, 2)
    handle = next(handle for handle, rank in pipes.items() if rank == 1)
    script = (
        "import os, mpishard\n"
        "if not os.fork(): import time; time.sleep(60)\n"
        "held = [int(n) for n in os.listdir('/proc/self/fd') if 'held-1' in os.path.realpath(\n"
        "    f'/proc/self/fd/{n}')]\n"
        "print(*held, flush=True); input()\n"
    )
    waiting = select.poll()
    waiting.register(handle, select.POLLHUP)
    with subprocess.Popen(
        [sys.executable, "-c", script],
        env=os.environ | {"PMI_RANK": "1", "PMI_SIZE": "2", "MPISHARD_JOB_FOLDER": str(tmp_path)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            held = [int(word) for word in process.stdout.readline().split()]
            assert len(held) == 1
            assert held[0] > 100  # files of high numbers are closed before launchers' connections
            assert not waiting.poll(0)
            process.kill()
            assert waiting.poll(10_000)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    for each in pipes:
        os.close(each)


def test_the_system_closes_files_of_high_numbers_first():
    """What a launcher hears of an end by has a lower number than the pipe that a rank holds."""
    low, high = os.pipe(), os.pipe()
    script = "import fcntl, os, sys; low, high = map(int, sys.argv[1:]); "
    script += "fcntl.fcntl(high, fcntl.F_DUPFD, 512); os.close(high); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script, str(low[1]), str(high[1])], pass_fds=(low[1], high[1]),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process, select.epoll() as waiting:  # fmt: skip
        for reader, writer in (low, high):
            os.close(writer)
            waiting.register(reader, select.EPOLLHUP)
        process.stdout.readline()
        process.kill()
        process.wait()
        assert [handle for handle, _ in waiting.poll(10)] == [high[0], low[0]]
    os.close(low[0])
    os.close(high[0])


def test_a_rank_that_srun_started_is_known_by_its_status_page(tmp_path):
    StatusPage(1, 2).publish(tmp_path)
    processes = RankProcesses(os.getpid(), "NO_SUCH_VARIABLE", tmp_path, 2)
    processes.look()
    assert {rank: p.pid for rank, p in processes.ranks.items()} == {1: os.getpid()}
    assert not processes.ended
    processes.close()


def test_catches():
    me, handler = RankProcess(0, os.getpid()), signal.getsignal(signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        assert me.catches(signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        assert not me.catches(signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, handler)
