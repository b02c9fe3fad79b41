"""Findings about several hosts: ssh, equal versions, clocks, networks, ports, and a job on them.

Each host, and this machine, runs the program of ``remote.py`` and answers twice: with its facts,
and with the hosts that it cannot reach. The comparisons are here.
"""

from __future__ import annotations

import json
import queue
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Self

from mpishard.base import settings
from mpishard.cli.doctor.finding import Finding, shortened
from mpishard.cli.doctor.host import NEEDED_BYTES, REMOVE_LEFTOVERS
from mpishard.cli.doctor.job import measure_hosts
from mpishard.cli.machine import installed_version
from mpishard.cli.probe import Answer
from mpishard.cli.run.hostfile import expanded_hosts
from mpishard.cli.run.launcher import Host, MPIFamily, MPIInstallation, parse_hosts
from mpishard.cli.run.networks import (
    Network,
    address_of,
    is_this_machine,
    network_to,
    network_variables,
)
from mpishard.cli.run.restarts import remote_shell
from mpishard.cli.run.shared_memory import SHARED_MEMORY
from mpishard.cli.wording import bytes_text, counted, milliseconds

_FACTS_SECONDS, _PORTS_SECONDS, _END_SECONDS = 40.0, 15.0, 3.0
_LARGEST_OFFSET = 1.0
"""Seconds; it contains the time in which an answer travels."""

Facts = Mapping[str, Any]


def names_of(text: str) -> list[str]:
    """Return the names in the value of ``--hosts``, or in its file.

    Raises
    ------
    ValueError
        If a name, a number or a line of the file is wrong.
    """
    expanded = expanded_hosts(text)
    numbers = [entry.partition(":")[2] for entry in expanded.split(",")]
    slots = sum(int(number) if number.isdecimal() else 1 for number in numbers)
    return [host.name for host in parse_hosts(expanded, max(slots, len(numbers)))]


def examine_hosts(
    names: Sequence[str], mpi: MPIInstallation, quick: bool = False
) -> Iterator[Finding]:
    """Yield the findings about hosts. Those that do not answer are left out of the comparisons.

    If ``quick`` no job is started.
    """
    shell = ["ssh"] if mpi.launcher is None else remote_shell(mpi.launcher)
    own = next((name for name in names if is_this_machine(name)), socket.gethostname())
    remotes = [_Remote(name, shell, own) for name in dict.fromkeys([own, *names])]
    with ExitStack() as stack:
        for remote in remotes:
            stack.enter_context(remote)
        deadline = time.monotonic() + _FACTS_SECONDS
        facts = {}
        for remote in remotes:
            if (found := remote.answer(deadline)) is not None:
                facts[remote.name] = {**found, "received_at": remote.received_at}
        silent = [remote for remote in remotes if remote.name not in facts]
        yield from (_silence(remote, own) for remote in silent)
        if not silent:
            text = f"{', '.join(name for name in facts if name != own) or own} can be logged in to"
            yield Finding("hosts.ssh", text, list(facts))
        network, ports = network_to(names), []
        if len(facts) > 1:  # one host agrees with itself
            yield from _comparisons(facts, own, network, mpi)
            answering = [remote for remote in remotes if remote.name in facts]
            ports = list(_ports(answering, facts, own, network))
            yield from ports
        yield from _memory(facts, own)
    is_ready = not silent and all(port.fix is None for port in ports)
    if mpi.launcher is not None and is_ready and not quick:
        hosts = [Host(name, 1) for name in names]
        variables = network_variables(mpi.launcher, names, settings.environment())
        yield _network(names, network, *measure_hosts(mpi.launcher, hosts, variables))


class _Remote:
    """The program of remote.py on a host, within the block."""

    def __init__(self, name: str, shell: Sequence[str], own: str) -> None:
        self.name = name
        self.received_at = 0.0
        """Time of the last answer, of `time.time`."""
        # As launchers do, because ssh passes no variable on.
        known = settings.environment()
        variables = [f"{variable}={known[variable]}" for variable in settings.forwarded_variables()]
        words = ["/usr/bin/env", *variables, sys.executable, "-m", "mpishard.cli.doctor.remote"]
        # A shell on the host reads the command again.
        self._command = words if name == own else [*shell, name, shlex.join(words)]
        self._lines: queue.Queue[tuple[float, str]] = queue.Queue()

    def __enter__(self) -> Self:
        self._errors = tempfile.TemporaryFile("w+", errors="replace")
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", 'exec "$@"', "sh", *self._command],  # whose code is 127 without ssh
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(_END_SECONDS)  # a child of ssh may hold its output open
        if self._process.stdout is not None and not self._reader.is_alive():
            self._process.stdout.close()
        self._errors.close()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._lines.put((time.time(), line))
        self._lines.put((time.time(), ""))

    def tell(self, found: object) -> None:
        """Send one line."""
        if self._process.stdin is not None:
            with suppress(OSError):  # it has ended: answer() says so
                self._process.stdin.write(f"{json.dumps(found)}\n")
                self._process.stdin.flush()

    def answer(self, deadline: float) -> Any:
        """Return its next answer; None if it ends before, or the time is over."""
        with suppress(queue.Empty):
            while True:
                self.received_at, line = self._lines.get(
                    timeout=max(0.0, deadline - time.monotonic())
                )
                found = Answer(0, line, "", 0).found
                if found is not None or not line:
                    return found
        return None

    def reason(self) -> Answer:
        """Return the reason of its silence."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self._errors.seek(0)
        return Answer(self._process.poll(), "", self._errors.read(), _FACTS_SECONDS)


# --------------------------------------------------------------------------------- each on its own


def _on(name: str, own: str, command: str) -> str:
    """Return the command line that runs ``command`` on a host."""
    return command if name == own else f"ssh {name} {shlex.quote(command)}"


_SSH_FAILURES = (
    ("could not resolve", "echo 'ADDRESS {name}' | sudo tee -a /etc/hosts  # its address"),
    ("host key verification failed", "ssh-keyscan {name} >> ~/.ssh/known_hosts"),
    ("permission denied", "ssh-copy-id {name}  # after ssh-keygen, if you have no key"),
    ("refused", "sudo systemctl enable --now ssh  # on {name}"),
)
_UNREACHABLE = "ping -c 3 {name}  # does it run, and is it in this network?"


def _silence(remote: _Remote, own: str) -> Finding:
    """Say why a host has not answered."""
    answer, name = remote.reason(), remote.name
    reason = shortened(answer.reason)
    if answer.code == 255 and name != own:  # that of ssh itself
        fixes = (fix for words, fix in _SSH_FAILURES if words in answer.err.lower())
        fix = next(fixes, _UNREACHABLE).format(name=name)
        text = f"{name} cannot be logged in to without a password: {reason}"
        return Finding("hosts.ssh", text, name, fix, is_problem=True)
    if answer.code is None:
        text = f"{name} has not answered within {_FACTS_SECONDS:g} s"
        fix = _UNREACHABLE.format(name=name)
        return Finding("hosts.ssh", text, name, fix, is_problem=True)
    text = f"{name} does not run mpishard in {sys.executable}: {reason}"
    if "No module named" in answer.err:
        version = installed_version("mpishard")
        command = f"{shlex.quote(sys.executable)} -m pip install 'mpishard[mpi]=={version}'"
        return Finding("hosts.python", text, name, _on(name, own, command), is_problem=True)
    return Finding("hosts.python", text, name, _copied(name), is_problem=True)


def _copied(name: str) -> str:
    """Return the command that gives a host the packages of this one."""
    folder = shlex.quote(f"{sys.prefix}/")
    return f"rsync -a --delete {folder} {name}:{folder}  # or use a shared file system"


def _memory(facts: Mapping[str, Facts], own: str) -> Iterator[Finding]:
    """Yield /dev/shm, and the files of dead jobs in it."""
    free = {name: found["memory"] for name, found in facts.items()}
    small = [name for name, size in free.items() if size is not None and size < NEEDED_BYTES]
    for name in small:
        text = f"{SHARED_MEMORY} of {name} has {bytes_text(free[name])} free: MPI needs "
        text += f"{bytes_text(NEEDED_BYTES)}, or crashes"
        command = f"sudo mount -o remount,rw,size=2g,mode=1777 {SHARED_MEMORY}"
        yield Finding("hosts.memory", text, free, _on(name, own, command), is_problem=True)
    if not small:
        least = min((size for size in free.values() if size is not None), default=None)
        yield Finding("hosts.memory", f"{SHARED_MEMORY} has {bytes_text(least)} or more free", free)
    left = {name: found["leftovers"] for name, found in facts.items() if found["leftovers"]}
    for name, files in left.items():
        text = f"{counted(len(files), 'file')} of killed jobs in {SHARED_MEMORY} of {name}"
        yield Finding("hosts.leftovers", text, files, _on(name, own, REMOVE_LEFTOVERS))
    if not left:
        yield Finding("hosts.leftovers", f"no killed job has left files in {SHARED_MEMORY}", [])


# --------------------------------------------------------------------------------- between hosts


def _comparisons(
    facts: Mapping[str, Facts], own: str, network: Network | None, mpi: MPIInstallation
) -> Iterator[Finding]:
    """Yield versions, clocks and equal addresses."""
    versions = {name: found["versions"] for name, found in facts.items()}
    differing = [name for name in versions if versions[name] != versions.get(own)]
    for name in differing:
        unlike = [
            f"{what} {versions[name][what]}, and {version} on {own}"
            for what, version in versions.get(own, {}).items()
            if versions[name][what] != version
        ]
        text = f"{name} has {'; '.join(unlike)}"
        yield Finding("hosts.versions", text, versions, _copied(name), is_problem=True)
    if not differing and own in versions:
        same = ", ".join(f"{what} {version}" for what, version in versions[own].items())
        text = f"{same.replace('MPI MPICH', 'MPICH').replace('MPI Open', 'Open')} on all"
        yield Finding("hosts.versions", text, versions)
    yield from _clocks(facts, own)
    holders = defaultdict(list)
    for name, found in facts.items():
        for interface, address in found["interfaces"].items():
            holders[interface, address].append(name)
    shared = {f"{i} {a}": held for (i, a), held in holders.items() if len(held) > 1}
    if not shared:
        yield Finding("hosts.addresses", "no two hosts have one and the same address", {})
        return
    listed = "; ".join(f"{key} on {', '.join(held)}" for key, held in shared.items())
    text, fix = f"one and the same address on several hosts: {listed}", None
    if mpi.library is not None and mpi.library.family is MPIFamily.OPEN_MPI:
        chosen = any("btl_tcp_if" in name for name in settings.environment())
        if network is not None:
            text += f". mpishard run avoids it with {network.subnet}; Open MPI's own mpiexec hangs"
            variable = f"OMPI_MCA_btl_tcp_if_include={network.subnet}"
        else:
            text += ": Open MPI hangs"
            names = ",".join(dict.fromkeys(key.partition(" ")[0] for key in shared))
            variable = f"OMPI_MCA_btl_tcp_if_exclude=lo,{names}"
        fix = None if chosen else f"export {variable}"
    yield Finding("hosts.addresses", text, shared, fix, is_problem=network is None)


def _clocks(facts: Mapping[str, Facts], own: str) -> Iterator[Finding]:
    offsets = {name: round(each["time"] - each["received_at"], 3) for name, each in facts.items()}
    wrong = {name: offset for name, offset in offsets.items() if abs(offset) > _LARGEST_OFFSET}
    for name, offset in wrong.items():
        text = f"the clock of {name} is {abs(offset):.1f} s {'ahead' if offset > 0 else 'behind'}: "
        text += "times of files and logs mislead"
        command = "sudo timedatectl set-ntp true"
        yield Finding("hosts.clocks", text, offsets, _on(name, own, command))
    if not wrong:
        yield Finding("hosts.clocks", f"equal within {_LARGEST_OFFSET:g} s", offsets)


def _ports(
    remotes: Sequence[_Remote], facts: Mapping[str, Facts], own: str, network: Network | None
) -> Iterator[Finding]:
    """Yield the hosts that cannot connect to a port of another one."""
    ends = {}
    for name, found in facts.items():
        address = address_of(name)
        # Debian's /etc/hosts has 127.0.1.1 for the name of the machine itself.
        if name == own and network is not None:
            address = address_of(found["interfaces"].get(network.interface, ""))
        if address is not None and not address.is_loopback:
            ends[name] = (str(address), found["port"])
    for name in facts.keys() - ends.keys():
        text = f"{own} knows no address of {name}: its ports are not tested"
        fix = f"echo 'ADDRESS {name}' | sudo tee -a /etc/hosts  # its address"
        yield Finding("hosts.ports", text, name, fix)
    for remote in remotes:
        remote.tell({name: end for name, end in ends.items() if name != remote.name})
    deadline, closed = time.monotonic() + _PORTS_SECONDS, {}
    for remote in remotes:
        for name, reason in (remote.answer(deadline) or {}).items():
            closed[f"{remote.name} to {name}"] = reason
            to, port = ends[name]
            text = f"{remote.name} cannot connect to {name} ({to}, port {port}): {reason}"
            source = ends.get(remote.name, (remote.name,))[0]
            fix = _on(name, own, _opened(facts[name], source))
            yield Finding("hosts.ports", text, closed, fix, is_problem=True)
    if not closed:
        yield Finding("hosts.ports", "each host connects to a free port of each other one", {})


def _opened(facts: Facts, source: str) -> str:
    """Return the command with which a host accepts all connections of ``source``."""
    commands = {
        "ufw": f"sudo ufw allow from {source}",
        "firewall-cmd": f"sudo firewall-cmd --zone=trusted --add-source={source}",
        "nft": f"sudo nft insert rule inet filter input ip saddr {source} accept",
        "iptables": f"sudo iptables -I INPUT -s {source} -j ACCEPT",
    }
    return commands[next(iter(facts["firewalls"]), "iptables")]


def _network(
    names: Sequence[str], network: Network | None, found: Any, cause: str, fix: str
) -> Finding:
    """Say how fast the ranks of a job on the hosts communicate, or why they do not."""
    if found is None:
        text = f"ranks on {', '.join(names)} do not communicate: {cause}"
        return Finding("hosts.network", text, None, fix, is_problem=True)
    by = "" if network is None else f" by {network.interface} ({network.subnet})"
    first, *others = names
    pairs = [
        f"{first} and {name}{by}: round trip {milliseconds(seconds)}, {rate / 1e6:.0f} MB/s"
        for name, (seconds, rate) in zip(others, found, strict=True)
    ]
    text = "; ".join(pairs) or f"{first}: one rank computes right sums"
    return Finding("hosts.network", text, dict(zip(others, found, strict=True)))
