"""``mpishard doctor --hosts`` on two hosts, and the network that ``mpishard run`` chooses."""

import json

import pytest
from test_jobs import LIMIT, MPICH, by_mpi

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(120)]


def findings(hosts, python, names):
    command = (python, "-m", "mpishard", "doctor", "--json", "--hosts", names)
    code, out = hosts.run(1, *command, limit=LIMIT)
    found = json.loads(out)["findings"]
    return code, {each["name"]: each for each in found if each["name"].startswith("hosts.")}


@by_mpi
def test_two_hosts_that_are_well(hosts, python):
    code, found = findings(hosts, python, "node1,node2")
    assert code == 0, found
    # docker0 has one address on both, with which Open MPI's own launcher hangs.
    assert found.pop("hosts.addresses")["verdict"] == ("note" if "openmpi" in python else "ok")
    assert {each["verdict"] for each in found.values()} == {"ok"}
    seconds, rate = found["hosts.network"]["value"]["node2"]
    assert 0 < seconds < 1
    assert rate > 1e6
    assert "node1 and node2 by eth0 (10." in found["hosts.network"]["text"]


def test_a_host_without_sshd(hosts):
    hosts.call("kill", 2)
    code, found = findings(hosts, MPICH, "node1,node2")
    assert code == 1
    assert found["hosts.ssh"]["fix"] == "sudo systemctl enable --now ssh  # on node2"
    assert "hosts.network" not in found
