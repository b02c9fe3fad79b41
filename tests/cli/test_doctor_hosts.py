"""``mpishard doctor --hosts``: hosts of a simulated ssh, which runs all on this machine."""

import socket
import sys
import time
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mpishard.cli import app
from mpishard.cli.doctor import hosts as doctor_hosts
from mpishard.cli.doctor.finding import Verdict
from mpishard.cli.doctor.hosts import examine_hosts, names_of
from mpishard.cli.run.launcher import Launcher, MPIInstallation, MPILibrary
from mpishard.cli.run.networks import Network

OK, NOTE, PROBLEM = Verdict
NOTHING = MPIInstallation(None, None, "no MPI")
ETH0 = Network("eth0", IPv4Network("10.64.0.0/24"))
HERE = socket.gethostname()

# Of its arguments the last but one is the host, and the last one the command.
SSH = """#!/bin/sh
while [ $# -gt 2 ]; do shift; done
case "$1" in
    stranger) echo "stranger: Permission denied (publickey)." >&2; exit 255 ;;
    unknown) echo "ssh: Could not resolve hostname unknown: Name or service not known" >&2
        exit 255 ;;
    closed) echo "ssh: connect to host closed port 22: Connection refused" >&2; exit 255 ;;
    far) echo "ssh: connect to host far port 22: No route to host" >&2; exit 255 ;;
    bare) echo "/usr/bin/python3: No module named mpishard" >&2; exit 1 ;;
    empty) echo "env: '/opt/python': No such file or directory" >&2; exit 127 ;;
esac
exec /bin/sh -c "$2"
"""


def by_name(findings):
    found = {finding.name: finding for finding in findings}
    assert all((f.fix is None) == (f.verdict is OK) for f in found.values()), found
    assert all(f.fix is None or "\n" not in f.fix for f in found.values())
    return found


@pytest.fixture
def ssh(programs, monkeypatch):
    programs("ssh", "").write_text(SSH)
    for name in ("HYDRA_LAUNCHER_EXEC", "PRTE_MCA_plm_ssh_agent"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor_hosts, "_FACTS_SECONDS", 60)


def test_a_host_that_answers(ssh, monkeypatch):
    known = {"good": IPv4Address("127.0.0.1"), HERE: IPv4Address("127.0.0.1")}
    monkeypatch.setattr(doctor_hosts, "address_of", known.get)
    found = by_name(examine_hosts(["good"], NOTHING))
    assert found["hosts.ssh"].text == "good can be logged in to"
    assert found["hosts.versions"].verdict is OK
    assert f"Python {sys.version.split()[0]}, mpishard 0" in found["hosts.versions"].text
    assert found["hosts.clocks"].verdict is OK
    # This machine under two names: all its addresses are on both "hosts".
    assert "hosts.addresses" in found
    assert found["hosts.memory"].value.keys() == {HERE, "good"}


@pytest.mark.parametrize(
    ("name", "words", "fix"),
    [
        ("stranger", "Permission denied (publickey).", "ssh-copy-id stranger"),
        ("unknown", "Name or service not known", "echo 'ADDRESS unknown' | sudo tee -a /etc/hosts"),
        ("closed", "Connection refused", "sudo systemctl enable --now ssh  # on closed"),
        ("far", "No route to host", "ping -c 3 far"),
        ("bare", f"does not run mpishard in {sys.executable}: ", f"ssh bare '{sys.executable} -m"),
        ("empty", "No such file or directory", f"rsync -a --delete {sys.prefix}/ empty:"),
    ],
)
def test_a_host_that_does_not_answer(ssh, name, words, fix):
    found = by_name(examine_hosts([name], NOTHING))
    finding = found["hosts.python" if name in ("bare", "empty") else "hosts.ssh"]
    assert finding.verdict is PROBLEM
    assert words in finding.text
    assert name in finding.text
    assert finding.fix.startswith(fix)
    assert found["hosts.memory"].value.keys() == {HERE}
    assert not {"hosts.versions", "hosts.clocks", "hosts.ports"} & found.keys()


def facts(**changes):
    versions = {"Python": "3.13.5", "mpishard": "0.1.0", "MPI": "MPICH 5.0.2"}
    now = time.time()
    return {
        "versions": versions | changes.pop("versions", {}),
        "interfaces": {"eth0": "10.64.0.1", "docker0": "172.17.0.1"},
        "memory": 2**32,
        "leftovers": [],
        "firewalls": ["iptables"],
        "time": now,
        "received_at": now + 0.01,
        "port": 4000,
        **changes,
    }


def compared(other, library="MPICH Version: 5.0.2", network=ETH0):
    library = MPILibrary(library)
    mpi = MPIInstallation(library, Launcher(Path("/opt/bin/mpiexec"), library))
    both = {"node1": facts(), "node2": facts(**other)}
    return by_name(doctor_hosts._comparisons(both, "node1", network, mpi))


def test_versions_that_differ():
    found = compared({"versions": {"MPI": "MPICH 4.3.0"}})["hosts.versions"]
    assert found.verdict is PROBLEM
    assert found.text == "node2 has MPI MPICH 4.3.0, and MPICH 5.0.2 on node1"
    assert found.fix.startswith("rsync -a --delete ")
    assert compared({})["hosts.versions"].text == (
        "Python 3.13.5, mpishard 0.1.0, MPICH 5.0.2 on all"
    )


def test_clocks_that_differ():
    found = compared({"time": time.time() - 70})["hosts.clocks"]
    assert found.verdict is NOTE
    assert found.text.startswith("the clock of node2 is 70.0 s behind")
    assert found.fix == "ssh node2 'sudo timedatectl set-ntp true'"


def test_equal_addresses(monkeypatch):
    for name in ("OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_if_exclude"):
        monkeypatch.delenv(name, raising=False)
    other = {"interfaces": {"eth0": "10.64.0.2", "docker0": "172.17.0.1"}}
    assert compared(other)["hosts.addresses"].verdict is OK
    assert "docker0 172.17.0.1 on node1, node2" in compared(other)["hosts.addresses"].text
    found = compared(other, "Open MPI v5.0.11")["hosts.addresses"]
    assert found.verdict is NOTE
    assert found.fix == "export OMPI_MCA_btl_tcp_if_include=10.64.0.0/24"
    found = compared(other, "Open MPI v5.0.11", None)["hosts.addresses"]
    assert found.verdict is PROBLEM
    assert found.fix == "export OMPI_MCA_btl_tcp_if_exclude=lo,docker0"
    apart = compared({"interfaces": {"eth0": "10.64.0.2"}})["hosts.addresses"]
    assert apart.text == "no two hosts have one and the same address"


class Simulated:
    """A host's answer about its ports."""

    def __init__(self, name, reasons):
        self.name, self.reasons, self.peers = name, reasons, None

    def tell(self, peers):
        self.peers = peers

    def answer(self, _):
        return self.reasons


def ports(monkeypatch, *, firewall="iptables", **reasons):
    known = {"node1": IPv4Address("127.0.1.1"), "node2": IPv4Address("10.64.0.2")}
    known["10.64.0.1"] = IPv4Address("10.64.0.1")
    monkeypatch.setattr(doctor_hosts, "address_of", known.get)
    both = {"node1": facts(), "node2": facts(firewalls=[firewall], port=5000)}
    remotes = [Simulated(name, reasons.get(name, {})) for name in both]
    found = by_name(doctor_hosts._ports(remotes, both, "node1", ETH0))["hosts.ports"]
    assert remotes[0].peers == {"node2": ("10.64.0.2", 5000)}
    assert remotes[1].peers == {"node1": ("10.64.0.1", 4000)}
    return found


@pytest.mark.parametrize(
    ("firewall", "fix"),
    [
        ("ufw", "ssh node2 'sudo ufw allow from 10.64.0.1'"),
        ("iptables", "ssh node2 'sudo iptables -I INPUT -s 10.64.0.1 -j ACCEPT'"),
        (
            "firewall-cmd",
            "ssh node2 'sudo firewall-cmd --zone=trusted --add-source=10.64.0.1'",
        ),
    ],
)
def test_a_closed_port(monkeypatch, firewall, fix):
    found = ports(monkeypatch, firewall=firewall, node1={"node2": "timed out"})
    assert found.verdict is PROBLEM
    assert found.text == "node1 cannot connect to node2 (10.64.0.2, port 5000): timed out"
    assert found.fix == fix
    assert ports(monkeypatch).verdict is OK


def test_little_memory_and_leftovers():
    both = {"a": facts(), "b": facts(memory=2**20, leftovers=["/dev/shm/mpich_shm_1"])}
    found = by_name(doctor_hosts._memory(both, "a"))
    assert found["hosts.memory"].verdict is PROBLEM
    assert found["hosts.memory"].fix.startswith("ssh b 'sudo mount -o remount")
    assert found["hosts.leftovers"].verdict is NOTE
    assert found["hosts.leftovers"].fix == f"ssh b '{doctor_hosts.REMOVE_LEFTOVERS}'"


def test_names(tmp_path):
    (tmp_path / "file").write_text("a slots=4\nb slots=2\n")
    assert names_of(f"@{tmp_path}/file") == ["a", "b"]
    assert names_of("a,b:3,c") == ["a", "b", "c"]
    ended = CliRunner().invoke(app, ["doctor", "--hosts", "a:0"])
    assert ended.exit_code == 2
    assert "got a:0" in ended.stderr
