"""Which hosts of a job cannot be reached any more, asked for as its launcher would reach them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from mpishard import settings
from mpishard.cli.run.hosts import Host
from mpishard.cli.run.launcher import Launcher

__all__ = ["allocated_hosts", "find_lost_hosts"]

_ANSWER_SECONDS = 15.0
_GLANCE_SECONDS = 0.05

_STATE = re.compile(r"([a-z_]+)(\W*)")
_USABLE = ("alloc", "mix", "idle", "comp", "drng", "plnd", "resv")
_AWAY = "*~#%!"
"""What SLURM writes behind the state of a node that does not respond, or has no power."""


def find_lost_hosts(
    launcher: Launcher, hosts: Sequence[Host], received: Sequence[signal.Signals]
) -> list[str]:
    """The names of those of ``hosts`` that ``launcher`` could not start a rank on.

    Inside SLURM they are the nodes that ``sinfo`` has down, failed or not responding, and none
    if it does not answer. Elsewhere they are those on which ``ssh HOST true`` fails, or does not
    end within 15 seconds; this machine is reached without.

    Parameters
    ----------
    launcher : Launcher
        What starts the ranks.
    hosts : sequence of Host
        The machines.
    received : sequence of Signals
        Where one is in it, also one that comes meanwhile, nobody needs the answer.
    """
    names = [host.name for host in hosts]
    if not names:
        return []
    if launcher.is_slurm:
        command = ["sinfo", "--noheader", "--Node", f"--nodes={','.join(names)}", "-o", "%N %t"]
        ((code, text),) = _ask([command], received)
        states = dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line)
        return (
            []
            if code != 0
            else [name for name in names if not _is_usable(states.get(name, "").strip())]
        )
    others = [name for name in names if not _is_this_machine(name)]
    answers = _ask([_remote(launcher, name) for name in others], received)
    return [name for name, (code, _) in zip(others, answers, strict=True) if code != 0]


def allocated_hosts(ranks: int) -> list[Host]:
    """The nodes of the SLURM allocation, each with its share of ``ranks``; none if unknown."""
    ((code, text),) = _ask([["scontrol", "show", "hostnames"]], ())
    names = [] if code != 0 else text.split()
    return [Host(name, -(-ranks // len(names))) for name in names]


def _remote(launcher: Launcher, name: str) -> list[str]:
    shell = shlex.split(settings.remote_shell(launcher.is_hydra))
    if Path(shell[0]).name == "ssh":
        shell += ["-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
    return [*shell, name, "true"]


def _is_usable(state: str) -> bool:
    found = _STATE.fullmatch(state)
    return found is not None and found[1] in _USABLE and not set(found[2]) & set(_AWAY)


def _is_this_machine(name: str) -> bool:
    """Whether the name is one of this machine: it has one of its addresses."""
    if name in ("localhost", socket.gethostname()):
        return True
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(
            name, 0, type=socket.SOCK_DGRAM
        ):
            with suppress(OSError), socket.socket(family, kind, protocol) as end:
                end.bind(address)
                return True
    return False


def _ask(
    commands: Sequence[Sequence[str]], received: Sequence[signal.Signals]
) -> list[tuple[int | None, str]]:
    """What all of ``commands``, run at once, end with and print; None: not found or not in time."""
    with ExitStack() as held:
        outputs = [held.enter_context(tempfile.TemporaryFile()) for _ in commands]
        asked = [
            held.enter_context(_ended_at_last(command, output))
            for command, output in zip(commands, outputs, strict=True)
        ]
        end = time.monotonic() + _ANSWER_SECONDS
        while any(process is not None and process.poll() is None for process in asked):
            if received or time.monotonic() > end:
                break
            time.sleep(_GLANCE_SECONDS)
        answers = []
        for process, output in zip(asked, outputs, strict=True):
            output.seek(0)
            code = None if process is None else process.returncode
            answers.append((code, output.read().decode(errors="replace")))
        return answers


@contextmanager
def _ended_at_last(
    command: Sequence[str], output: IO[bytes]
) -> Iterator[subprocess.Popen[bytes] | None]:
    """A process of ``command`` that does not outlive the block; None if there is no program."""
    if shutil.which(command[0]) is None:
        yield None
        return
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # without a terminal to ask for a password
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
