"""The hosts themselves: they reach each other, and nothing of them is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from namespaces import Hosts

pytestmark = pytest.mark.hosts


def test_hosts_reach_each_other_by_ssh_and_have_their_own_memory(hosts):
    code, out = hosts.run(1, "ssh", "node2", "hostname; touch /dev/shm/mine; ls /dev/shm")
    assert (code, out.split()) == (0, ["node2", "mine"])
    assert hosts.files(1) == []
    assert hosts.files(2) == ["mine"]


_RUN = """
import sys, time
sys.path[:0] = sys.argv[1:]
from namespaces import Hosts
with Hosts(1) as hosts:
    print(hosts.folder, flush=True)
    time.sleep(600)
"""


def test_the_next_run_removes_the_hosts_of_a_killed_one(hosts):
    folders = [Path(__file__).parent, Path(__file__).parents[1] / "helpers"]
    killed = subprocess.Popen(
        [sys.executable, "-c", _RUN, *map(str, folders)], stdout=subprocess.PIPE, text=True
    )
    folder = Path(killed.stdout.readline().strip())
    init = int((folder / "init1").read_text())
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert Path(f"/proc/{init}").exists()
    with Hosts(1):
        assert not folder.exists()
        deadline = time.monotonic() + 10
        while Path(f"/proc/{init}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        names = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
        assert folder.name not in names
        assert hosts.folder.name in names  # another run goes on
