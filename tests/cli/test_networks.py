"""The network that `mpishard run --hosts` chooses."""

from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from pathlib import Path

import pytest

from mpishard.cli.run import networks
from mpishard.cli.run.launcher import Launcher, MPILibrary
from mpishard.cli.run.networks import Network, interfaces, network_to, network_variables

OWN = {
    "docker0": IPv4Interface("172.17.0.1/16"),
    "eth0": IPv4Interface("10.64.0.1/24"),
    "ib0": IPv4Interface("10.65.0.1/24"),
}
ADDRESSES = {
    "node1": "10.64.0.1",
    "node2": "10.64.0.2",
    "fast2": "10.65.0.2",
    "behind": "10.99.0.2",
    "debian": "127.0.1.1",
}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with three networks, and eth0 as its default route."""

    def source(address):
        near = [own.ip for own in OWN.values() if address in own.network]
        return near[0] if near else OWN["eth0"].ip

    known = {name: IPv4Address(address) for name, address in ADDRESSES.items()}
    monkeypatch.setattr(networks, "interfaces", lambda: OWN)
    monkeypatch.setattr(networks, "address_of", known.get)
    monkeypatch.setattr(networks, "_source_towards", source)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("hosts", "interface"),
    [
        (["node1", "node2"], "eth0"),
        (["node2"], "eth0"),
        (["debian", "node2"], "eth0"),  # /etc/hosts of Debian has 127.0.1.1 for the own name
        (["fast2"], "ib0"),
        (["node2", "fast2"], None),
        (["node1", "behind"], None),  # a router is between them
        (["node1", "unknown"], None),
        (["node1"], None),
        (["debian"], None),
        ([], None),
    ],
)
def test_the_network_that_reaches_all_hosts(machine, hosts, interface):
    found = network_to(hosts)
    assert found == (interface and Network(interface, OWN[interface].network))


MPICH = MPILibrary("MPICH Version:      5.0.2")
OPEN_MPI = MPILibrary("Open MPI v5.0.11")


def variables(machine, library, **known):
    launcher = Launcher(machine / "bin" / "mpiexec", library)
    return network_variables(launcher, ["node1", "node2"], known)


def test_the_variable_of_each_library(machine):
    assert variables(machine, MPICH) == {"HYDRA_IFACE": "eth0"}
    assert variables(machine, OPEN_MPI) == {"OMPI_MCA_btl_tcp_if_include": "10.64.0.0/24"}
    assert variables(machine, MPILibrary("Intel(R) MPI Library 2021.9")) == {}
    assert variables(machine, MPILibrary("another")) == {}


def test_the_choice_of_the_user_stays(machine):
    assert variables(machine, MPICH, HYDRA_IFACE="ib0") == {}
    assert variables(machine, OPEN_MPI, OMPI_MCA_btl_tcp_if_include="ib0") == {}
    assert variables(machine, OPEN_MPI, OMPI_MCA_btl_tcp_if_exclude="docker0,lo") == {}


@pytest.mark.parametrize(
    "place", [".openmpi/mca-params.conf", "etc/openmpi-mca-params.conf"], ids=["user", "site"]
)
@pytest.mark.parametrize("is_comment", [False, True])
def test_the_choice_in_a_file_of_open_mpi_stays(machine, place, is_comment):
    file = machine / place
    file.parent.mkdir()
    file.write_text(f"\n{'# ' * is_comment}btl_tcp_if_include = ib0\n")
    assert bool(variables(machine, OPEN_MPI)) == is_comment


@pytest.mark.skipif(not Path("/sys/class/net").exists(), reason="needs Linux")
def test_interfaces_of_this_machine():
    found = interfaces()
    assert set(found) <= {path.name for path in Path("/sys/class/net").iterdir()}
    assert all(own.ip in own.network and not own.ip.is_loopback for own in found.values())


def test_the_system_knows_its_route():
    assert networks.address_of("localhost") == IPv4Address("127.0.0.1")
    assert networks.address_of("no-such-host.invalid") is None
    assert networks._source_towards(IPv4Address("127.0.0.1")) in IPv4Network("127.0.0.0/8")
