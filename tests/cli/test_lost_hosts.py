"""The search for lost hosts, by the remote shell or SLURM."""

import signal
import socket
from pathlib import Path

import pytest

from mpishard.cli.run import restarts
from mpishard.cli.run.launcher import Host, Launcher, MPILibrary
from mpishard.cli.run.restarts import allocated_hosts, find_lost_hosts

MPICH = Launcher(Path("/opt/mpiexec"), MPILibrary("MPICH Version: 5.0.2"))
OPEN_MPI = Launcher(Path("/opt/mpiexec"), MPILibrary("Open MPI v5.0.11"))
SLURM = Launcher(Path("/opt/srun"), MPILibrary("MPICH Version: 5.0.2"))

# Of the arguments the last but one is the host.
SHELL = """#!/bin/sh
echo "$@" >> {asked}
while [ $# -gt 2 ]; do shift; done
case "$1" in far*) exit 255 ;; slow*) exec /bin/sleep 60 ;; esac
[ "$2" = true ]
"""

VARIABLES = (
    "HYDRA_LAUNCHER_EXEC", "PRTE_MCA_plm_ssh_agent", "PRTE_MCA_plm_rsh_agent",
    "OMPI_MCA_plm_rsh_agent",
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_name_server(monkeypatch):
    """The hosts of these tests have no address, even if this machine asks a name server."""
    asked = socket.getaddrinfo

    def answer(name, *rest, **options):
        if name.endswith(".test"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return asked(name, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", answer)


@pytest.fixture
def shell(programs, tmp_path, monkeypatch):
    """Put a simulated ssh of that name on PATH; return the file with its arguments."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def add(name):
        asked = tmp_path / f"{name}.asked"
        asked.touch()
        programs(name, "").write_text(SHELL.format(asked=asked))
        return asked

    return add


def hosts(*names):
    return [Host(name, 2) for name in names]


@pytest.mark.parametrize("launcher", [MPICH, OPEN_MPI])
def test_hosts_that_ssh_does_not_reach_are_lost(shell, launcher):
    asked = shell("ssh")
    names = ("near.test", "far1.test", "localhost", socket.gethostname(), "127.0.0.1", "far2.test")
    assert find_lost_hosts(launcher, hosts(*names), []) == ["far1.test", "far2.test"]
    # This machine is not asked, and nobody for a password.
    found = asked.read_text().splitlines()
    assert sorted(line.split()[-2] for line in found) == ["far1.test", "far2.test", "near.test"]
    assert all("BatchMode=yes" in line for line in found)


def test_without_ssh_all_others_are_lost(programs):
    assert find_lost_hosts(MPICH, hosts("near.test", "localhost"), []) == ["near.test"]
    assert find_lost_hosts(MPICH, [], []) == []


@pytest.mark.parametrize(
    ("launcher", "variable", "value"),
    [
        (MPICH, "HYDRA_LAUNCHER_EXEC", "myssh"),
        (OPEN_MPI, "PRTE_MCA_plm_ssh_agent", "myssh -q : rsh"),
        (OPEN_MPI, "OMPI_MCA_plm_rsh_agent", "myssh"),
    ],
)
def test_hosts_are_tested_by_the_remote_shell_of_the_launcher(
    shell, monkeypatch, launcher, variable, value
):
    asked = shell("myssh")
    monkeypatch.setenv(variable, value)
    assert find_lost_hosts(launcher, hosts("near.test", "far.test"), []) == ["far.test"]
    options = "-q " if "-q" in value else ""
    assert f"{options}near.test true" in asked.read_text().splitlines()


def test_a_host_that_does_not_answer_in_time_is_lost(shell, monkeypatch):
    shell("ssh")
    monkeypatch.setattr(restarts, "_ANSWER_SECONDS", 0.1)
    assert find_lost_hosts(MPICH, hosts("slow.test"), []) == ["slow.test"]


def test_a_signal_ends_the_tests_of_hosts(shell, monkeypatch):
    shell("ssh")
    monkeypatch.setattr(restarts, "_ANSWER_SECONDS", 1e9)
    find_lost_hosts(MPICH, hosts("slow.test"), [signal.SIGINT])


def test_slurm_decides_which_nodes_are_lost(programs):
    states = {
        "n1": "alloc", "n2": "down*", "n3": "mix", "n4": "drng", "n5": "idle*", "n6": "fail",
        "n7": "alloc-", "n8": "idle~", "n9": "drain",
    }  # fmt: skip
    programs("sinfo", "\n".join(f"{name} {state}" for name, state in states.items()))
    lost = find_lost_hosts(SLURM, hosts(*states, "unknown"), [])
    assert lost == ["n2", "n5", "n6", "n8", "n9", "unknown"]


def test_no_node_is_lost_if_slurm_does_not_answer(programs):
    assert find_lost_hosts(SLURM, hosts("n1"), []) == []
    programs("sinfo", "slurm_load_partitions: Unable to contact slurm controller", code=1)
    assert find_lost_hosts(SLURM, hosts("n1"), []) == []
    assert allocated_hosts(4) == []


def test_the_nodes_of_an_allocation(programs):
    programs("scontrol", "n1\nn2\nn3")
    assert allocated_hosts(6) == [Host(f"n{i}", 2) for i in (1, 2, 3)]
    assert allocated_hosts(7) == [Host(f"n{i}", 3) for i in (1, 2, 3)]
