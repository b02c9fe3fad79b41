"""The network that reaches the machines of a job, for MPI libraries that would use any.

A machine has several networks: that of the cluster, one for its administration, and often that of
Docker, whose address is the same on every machine. Open MPI tries them all, and waits for ever if
another machine answers to an address, or none.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from pathlib import Path

from mpishard.cli.run.launcher import Launcher, MPIFamily

_GET_ADDRESS, _GET_MASK = 0x8915, 0x891B  # SIOCGIFADDR and SIOCGIFNETMASK of Linux
_ANY_PORT = 9

_CHOICES = {
    MPIFamily.MPICH: ("HYDRA_IFACE",),
    MPIFamily.OPEN_MPI: ("OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_if_exclude"),
}
"""The variables of a user's own choice. mpishard sets the first one if all are missing."""


@dataclass(frozen=True, slots=True)
class Network:
    """An interface of this machine, and the network that it is connected to."""

    interface: str
    subnet: IPv4Network


def network_variables(
    launcher: Launcher, hosts: Sequence[str], known: Mapping[str, str]
) -> dict[str, str]:
    """Return the variable with which MPI uses the network of ``hosts``.

    It is empty if the user has chosen, or if no single network reaches all of them.

    Parameters
    ----------
    launcher : Launcher
        Starts the ranks.
    hosts : sequence of str
        Names or addresses of the machines.
    known : mapping of str to str
        The job's environment.
    """
    family = launcher.library.family
    choices = _CHOICES.get(family, ()) if family is not None else ()
    if not choices or not hosts or any(name in known for name in choices):
        return {}
    if family is MPIFamily.OPEN_MPI and _is_chosen_in_a_file(launcher):
        return {}
    network = network_to(hosts)
    if network is None:
        return {}
    # The name of the interface may differ between machines. Hydra needs that of this one alone.
    is_named = family is MPIFamily.MPICH
    return {choices[0]: network.interface if is_named else str(network.subnet)}


def _is_chosen_in_a_file(launcher: Launcher) -> bool:
    """Return whether a file of parameters of Open MPI, the user's or the site's, has a choice."""
    site = launcher.program.parent.parent / "etc" / "openmpi-mca-params.conf"
    for file in (Path.home() / ".openmpi" / "mca-params.conf", site):
        try:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        if any(line.lstrip().startswith("btl_tcp_if_") for line in lines):
            return True
    return False


def network_to(hosts: Sequence[str]) -> Network | None:
    """Return the one network that this machine shares with all of ``hosts``; None without one.

    The system is asked for its route to each, and nothing is sent.
    """
    own = interfaces()
    addresses = [address_of(host) for host in hosts]
    if None in addresses:
        return None
    mine = {interface.ip for interface in own.values()}
    others = [a for a in addresses if a and a not in mine and not a.is_loopback]
    sources = {_source_towards(address) for address in others}
    for name, interface in own.items():
        if sources == {interface.ip} and all(other in interface.network for other in others):
            return Network(name, interface.network)
    return None


def interfaces() -> dict[str, IPv4Interface]:
    """Return this machine's interfaces and their addresses, without loopback; Linux alone."""
    found: dict[str, IPv4Interface] = {}
    if sys.platform != "linux":
        return found
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                address, mask = (
                    IPv4Address(fcntl.ioctl(asked.fileno(), number, request)[20:24])
                    for number in (_GET_ADDRESS, _GET_MASK)
                )
            except OSError:  # it has no address
                continue
            if not address.is_loopback:
                found[name] = IPv4Interface(f"{address}/{mask}")
    return found


def address_of(host: str) -> IPv4Address | None:
    """Return the address of a machine; None if this one does not know it."""
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None
    return IPv4Address(found[0][4][0])


def is_known(name: str) -> bool:
    """Return whether this machine knows an address of the name."""
    try:
        return bool(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError):
        return False


def is_this_machine(name: str) -> bool:
    """Return whether the name has an address of this machine."""
    if name in ("localhost", socket.gethostname()):
        return True
    with suppress(OSError, UnicodeError):
        for family, kind, protocol, _, address in socket.getaddrinfo(
            name, 0, type=socket.SOCK_DGRAM
        ):
            with suppress(OSError), socket.socket(family, kind, protocol) as end:
                # A socket can be bound to an address of this machine only.
                end.bind(address)
                return True
    return False


def _source_towards(address: IPv4Address) -> IPv4Address | None:
    """Return the own address from which this machine would send to ``address``."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        try:
            route.connect((str(address), _ANY_PORT))  # of a datagram: sends nothing
        except OSError:
            return None
        return IPv4Address(route.getsockname()[0])
