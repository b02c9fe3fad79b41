"""Why a job of ``mpishard doctor`` failed, told from what the MPI library and the system said."""

from __future__ import annotations

import re
import shlex
import socket
from collections.abc import Sequence
from typing import NamedTuple

from mpishard.cli.doctor.finding import some
from mpishard.cli.doctor.probe import Answer
from mpishard.cli.doctor.shm import NEEDED_BYTES, free_bytes, larger_folder

__all__ = ["Cause", "why_it_failed"]


class Cause(NamedTuple):
    """What was behind a failure, and the line that mends it."""

    text: str
    mend: str


_NO_MEMORY = re.compile(r"shm_open|/dev/shm|Shared memory error|No space left on device|Bus error")
_CRASHED = re.compile(r"\(signal (7|11)\)|exited on\s+signal (7|11)\b|Segmentation fault")

_NAME = socket.gethostname()

_KNOWN = (
    (
        r"attempt to run as root|--allow-run-as-root",
        Cause(
            "Open MPI's launcher refuses to run as root",
            "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
        ),
    ),
    (
        r"Invalid MPI (plugin|type)|cannot find mpi plugin",
        Cause("srun has not the plugin that it was told to use", "unset SLURM_MPI_TYPE"),
    ),
    (
        r"Requested nodes are busy|step creation temporarily disabled|Unable to create step",
        Cause(
            "SLURM has no cores left for another job step: this shell is a step that holds them",
            "export SLURM_OVERLAP=1",
        ),
    ),
    (
        r"sees a world of one",
        Cause(
            "each rank found itself alone, for the launcher does not speak to this MPI library",
            "mpishard doctor --quick  # under SLURM, what it says of the plugin",
        ),
    ),
    (
        r"getaddrinfo|gethostbyname|Name or service not known|[Cc]ould not resolve|name resolution",
        Cause(
            f"the name of this machine, {_NAME}, has no address",
            f"echo '127.0.0.1 {_NAME}' | sudo tee -a /etc/hosts",
        ),
    ),
    (
        r"Permission denied \(publickey|Host key verification failed|ssh: connect to host",
        Cause("the launcher cannot log in on a machine of the job", "ssh-copy-id <machine>"),
    ),
)


def why_it_failed(answer: Answer, command: Sequence[str]) -> Cause:
    """The likeliest cause; where none is known, the job's own words and how to see them all.

    Parameters
    ----------
    answer : Answer
        How the job ended.
    command : sequence of str
        What had started it.
    """
    said = answer.out + answer.err
    free = free_bytes()
    is_small = free is not None and free < NEEDED_BYTES
    if _NO_MEMORY.search(said) or (is_small and _CRASHED.search(said)):
        return Cause(
            "the MPI library keeps in /dev/shm what ranks of a machine exchange, and found no "
            "room there, or may not write",
            larger_folder(),
        )
    for pattern, cause in _KNOWN:
        if re.search(pattern, said):
            return cause
    return Cause(some(_last_words(answer)), shlex.join(command))


def _last_words(answer: Answer) -> str:
    """The line that tells most: an exception or an error, and not the launcher's frame of it."""
    if answer.code is None:
        return answer.reason
    lines = [line.strip(" =-\t") for line in (answer.err + answer.out).splitlines()]
    errors = [line for line in lines if re.search(r"\b\w*Error\b|\berror\b|ERROR|signal \d", line)]
    return errors[-1] if errors else answer.reason
