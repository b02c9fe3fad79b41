"""Ranks are found among a launcher's descendants, and their ends are seen in order."""

import os
import signal
import subprocess
import sys
import time

import pytest

from mpishard.cli.rank_processes import RankProcess, RankProcesses
from mpishard.communication.call_file import CallFile

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


def test_a_rank_that_srun_started_is_known_by_its_call_log(tmp_path):
    CallFile.create(tmp_path / "rank-1.calls", 1, 2)
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
