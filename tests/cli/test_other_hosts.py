"""Agents of other hosts, all on this machine: their reports, their orders, and their files."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from mpishard.cli.run import host_agent, rank_agent
from mpishard.cli.run.hosts import Hosts
from mpishard.cli.run.rank_processes import RankProcesses, can_be_watched
from mpishard.communication.contract import status
from mpishard.communication.contract.status import PAGE_BYTES, StatusPage, records_in, shared_page

pytestmark = pytest.mark.skipif(not can_be_watched(), reason="needs Linux 5.3")

WITH_PAGE = """
import os, sys, time
from pathlib import Path
from mpishard.communication.contract.status import StatusPage
StatusPage(3, 4).publish(Path(os.environ["MPISHARD_JOB_FOLDER"]))
print(os.environ["MPISHARD_JOB_FOLDER"], flush=True)
time.sleep(60)
"""


def until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


class Job:
    """A job with the files of `mpishard run` in one folder, and of the other host in another."""

    def __init__(self, tmp_path, timeout=10.0):
        self.folder, self.other = tmp_path / "here", tmp_path / "there"
        self.folder.mkdir()
        self.other.mkdir()
        self.hosts = Hosts("mpishard-job-test", self.folder, [], timeout)
        self.processes = RankProcesses(self.folder, 4, self.hosts)
        self.words = self.hosts.variable.split("/")
        self.agents = []

    def start(self, *program, rank=3):
        variable = "/".join([*self.words[:4], "another machine", "127.0.0.1"])
        environment = os.environ | {"A_RANK": f"{rank}", "MPISHARD_RUN": variable}
        agent = subprocess.Popen(
            [sys.executable, "-I", "-S", rank_agent.__file__, "A_RANK", "", *program],
            env=environment | {"TMPDIR": str(self.other), "MPISHARD_JOB_FOLDER": "/nowhere"},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.agents.append(agent)
        return agent

    def look_until(self, condition):
        def holds():
            self.processes.look()
            return condition(self.processes)

        until(holds)

    def end(self):
        for agent in self.agents:
            agent.kill()
            agent.communicate()
        self.hosts.end()


@pytest.fixture
def job(tmp_path):
    made = Job(tmp_path)
    yield made
    made.end()


@pytest.mark.spawned
def test_a_rank_of_another_host_is_followed_to_its_end(job):
    agent = job.start(sys.executable, "-c", WITH_PAGE)
    (folder,) = (job.other / os.path.basename(agent.stdout.readline().strip()),)  # noqa: PTH119
    job.look_until(lambda all_of: 3 in all_of.ranks)
    process = job.processes.ranks[3]
    assert process.is_running()
    process.send(signal.SIGSTOP)
    until(lambda: job.hosts.receive() is not None and is_stopped(job.folder))
    process.send(signal.SIGKILL)
    before = time.monotonic()
    job.look_until(lambda all_of: all_of.ended)
    assert (process.exit_code, process.is_running()) == (-9, False)
    assert before - 1 < process.ended_at < time.monotonic()
    (record,) = records_in(job.folder)
    assert (record.rank, record.is_alive) == (3, False)
    assert job.hosts.lost() == ""
    assert folder.is_dir()
    assert job.hosts.end() == ""
    assert not folder.exists()


def is_stopped(folder):
    return [record.is_stopped for record in records_in(folder)] == [True]


@pytest.mark.spawned
def test_ranks_end_if_mpishard_run_is_gone(job):
    agent = job.start(sys.executable, "-c", WITH_PAGE)
    agent.stdout.readline()
    job.look_until(lambda all_of: 3 in all_of.ranks)
    for connection in job.hosts.sockets:
        connection.close()
    assert agent.wait(20) == -signal.SIGKILL
    until(lambda: not list(job.other.iterdir()))


@pytest.mark.spawned
def test_a_rank_gets_the_pages_of_the_other_hosts(job):
    StatusPage(0, 4).publish(job.folder)
    agent = job.start("/bin/sh", "-c", "touch $MPISHARD_JOB_FOLDER/wanted; exec sleep 60")
    job.look_until(lambda _: list(job.other.glob("*/rank-0-*")))
    (folder,) = job.other.iterdir()
    until(lambda: not (folder / "wanted").exists())
    (record,) = records_in(folder)
    assert (record.rank, record.is_alive) == (0, True)
    assert agent.poll() is None


def connect(job, **hello):
    connection = socket.create_connection(("127.0.0.1", int(job.words[1])))
    connection.sendall(json.dumps(hello).encode() + b"\n")
    return connection


@pytest.mark.parametrize(
    "hello", [{}, {"token": "a guess", "host": "node2"}, {"token": 1}, {"pages": {}}]
)
def test_a_program_without_the_token_is_refused(job, hello):
    with connect(job, **hello) as connection:
        until(lambda: job.hosts.receive() or len(job.hosts.sockets) == 1)
        connection.settimeout(10)
        assert connection.recv(100) == b""


def test_a_silent_host_and_a_closed_connection_are_lost(tmp_path):
    job = Job(tmp_path, timeout=0.3)
    with connect(job, token=job.words[2], host="node2") as connection:
        notes = [["2", "started", "1", "2"], ["3", "started", "3", "4"]]
        connection.sendall(json.dumps({"notes": notes}).encode() + b"\n")
        job.look_until(lambda all_of: len(all_of.ranks) == 2)
        assert job.hosts.lost() == ""
        time.sleep(0.4)
        assert job.hosts.lost() == "host node2 (ranks 2, 3) has not been heard of for 0 s"
        assert all(process.is_running() for process in job.processes.running)
        connection.sendall(json.dumps({"notes": [["3", "ended", "-9", "0"]]}).encode() + b"\n")
    job.look_until(lambda all_of: all_of.ended)
    assert "node2 (rank 2) has closed its connection" in job.hosts.lost()
    assert not any(process.is_running() for process in job.processes.running)
    job.end()


@pytest.mark.parametrize("over", [True, False])
def test_an_agent_that_was_killed_after_its_ranks_is_lost_at_the_end(tmp_path, over):
    job = Job(tmp_path)
    with connect(job, token=job.words[2], host="node2") as connection:
        notes = [["2", "started", "1", "2"], ["2", "ended", "-9", "0"]]
        connection.sendall(json.dumps({"notes": notes}).encode() + b"\n")
        job.look_until(lambda all_of: all_of.ended)
        if over:
            connection.sendall(b'{"over": true}\n')
    until(lambda: job.hosts.receive() or len(job.hosts.sockets) == 1)
    assert job.hosts.lost() == ""
    found = job.hosts.end()
    assert (found == "") == over
    assert over or found.startswith("host node2 (rank 2) has closed its connection")


def test_the_layout_of_a_page_is_known_to_the_agent():
    assert (host_agent._HEAD_BYTES, host_agent._COUNT.start) == (status._FIRST_ROW, status._COUNT)


def test_the_state_of_a_process_is_that_of_its_host(tmp_path):
    page = StatusPage(0, 2).publish(tmp_path)
    for letter, state in {"R": (True, False), "T": (True, True), "X": (False, False)}.items():
        page.write_bytes(shared_page(page.read_bytes(), letter))
        (record,) = records_in(tmp_path)
        assert (record.is_alive, record.is_stopped) == state
    assert len(page.read_bytes()) == PAGE_BYTES


@pytest.mark.spawned
def test_ranks_that_nobody_watches_leave_nothing_either(tmp_path):
    job = Job(tmp_path, timeout=0.2)
    job.hosts.end()
    agent = job.start("/bin/sh", "-c", "sleep 1; exit 4")
    assert agent.wait(20) == 4
    until(lambda: not list(job.other.iterdir()))
    agent.communicate()
