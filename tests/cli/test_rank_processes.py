"""The supervisor's view of the ranks' processes, from the notes of their agents."""

import os
import signal
import socket
import subprocess

import pytest

from mpishard.cli.run.rank_processes import RankProcess, RankProcesses, can_be_watched

pytestmark = pytest.mark.skipif(not can_be_watched(), reason="needs Linux 5.3")


@pytest.fixture
def note(tmp_path):
    def write(text):
        with (tmp_path / f"agents-{socket.gethostname()}").open("a") as file:
            file.write(text)

    return write


def test_nothing_is_known_before_an_agent_has_started(tmp_path):
    processes = RankProcesses(tmp_path, 2)
    assert processes.look() == processes.running == processes.ended == []
    assert not processes.all_seen


def test_ranks_are_in_the_order_of_their_ends(tmp_path, note):
    processes = RankProcesses(tmp_path, 3)
    note("1 started 71 81\n0 started 70 80\n2 sta")
    assert [(rank.rank, rank.pid, rank.agent) for rank in processes.look()] == [
        (1, 81, 71),
        (0, 80, 70),
    ]
    assert not processes.all_seen
    note("rted 72 82\n1 ended -9 5.25\n0 ended 0 5.125\n")
    assert [rank.rank for rank in processes.look()] == [2]
    assert processes.all_seen
    assert [(rank.rank, rank.exit_code) for rank in processes.ended] == [(0, 0), (1, -9)]
    assert [rank.rank for rank in processes.running] == [2]
    note("2 orphaned 60 5.5\n")
    assert processes.look() == []
    assert [(rank.rank, rank.orphaned_by) for rank in processes.orphaned] == [(2, 60)]
    assert processes.running == []
    assert len(processes.ended) == 2


def test_ranks_of_other_machines_are_left_out(tmp_path):
    (tmp_path / "agents-elsewhere").write_text("0 started 70 80\n")
    assert RankProcesses(tmp_path, 1).look() == []


def test_ranks_that_were_killed_with_their_agents_are_not_waited_for(tmp_path, note):
    gone = subprocess.Popen(["true"])
    gone.wait()
    zombie = subprocess.Popen(["true"])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    note(f"0 started {gone.pid} {gone.pid}\n1 started {zombie.pid} {gone.pid}\n")
    processes = RankProcesses(tmp_path, 2)
    processes.look()
    assert not any(rank.is_running() for rank in processes.running)
    processes.wait_for_all()
    assert len(processes.running) == 2
    assert processes.ended == []
    zombie.wait()


def test_catches():
    me, handler = RankProcess(0, os.getpid(), 0), signal.getsignal(signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        assert me.catches(signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        assert not me.catches(signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, handler)
