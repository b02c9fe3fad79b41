"""The program that ``mpishard doctor --hosts`` runs on each host, through ssh.

It prints the facts about the host, and the port on which it listens. It then reads the addresses of
the other hosts, one line of JSON, tries to connect to each, and prints the reasons of failures. It
listens until its input ends.
"""

from __future__ import annotations

import json
import platform
import shutil
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from mpishard.base import MPIUnavailableError
from mpishard.cli.doctor.host import free_bytes
from mpishard.cli.machine import installed_version
from mpishard.cli.probe import answer_line
from mpishard.cli.run.launcher import loaded_library
from mpishard.cli.run.networks import interfaces
from mpishard.cli.run.shared_memory import leftovers

_CONNECT_SECONDS = 4.0
_FIREWALLS = ("ufw", "firewall-cmd", "nft", "iptables")


def facts() -> dict[str, object]:
    """Return the facts about this host that are compared between hosts."""
    try:
        mpi = str(loaded_library())
    except MPIUnavailableError as error:
        mpi = str(error).partition("\n")[0]
    dead = leftovers()
    path = "/usr/sbin:/sbin:/usr/bin:/bin"
    return {
        "versions": {
            "Python": platform.python_version(),
            "mpishard": installed_version("mpishard"),
            "MPI": mpi,
        },
        "interfaces": {name: str(own.ip) for name, own in interfaces().items()},
        "memory": free_bytes(),
        "leftovers": [str(file) for file in dead],
        "firewalls": [name for name in _FIREWALLS if shutil.which(name, path=path)],
        "time": time.time(),
    }


def unreached(peers: Mapping[str, Sequence[object]]) -> dict[str, str]:
    """Return the reason for each of ``peers`` (address and port) that does not answer."""
    reasons: dict[str, str] = {}

    def connect(name: str, address: str, port: int) -> None:
        try:
            socket.create_connection((address, port), _CONNECT_SECONDS).close()
        except OSError as error:
            reasons[name] = error.strerror or str(error)

    threads = [threading.Thread(target=connect, args=(name, *end)) for name, end in peers.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return reasons


def main() -> None:
    """Answer twice, and listen until the input ends."""
    with socket.create_server(("", 0), backlog=1024) as server:
        _answer({**facts(), "port": server.getsockname()[1]})
        line = sys.stdin.readline()
        if line:
            _answer(unreached(json.loads(line)))
            sys.stdin.read()


def _answer(found: object) -> None:
    sys.stdout.write(f"{answer_line(found)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
