"""Causes of a failed job, recognised in the output of the MPI library and the system."""

from __future__ import annotations

import re
import shlex
import socket
from collections.abc import Sequence
from typing import NamedTuple

from mpishard.cli.doctor.finding import pip_install, shortened
from mpishard.cli.doctor.shm import NEEDED_BYTES, free_bytes, larger_folder
from mpishard.cli.probe import Answer

__all__ = ["Cause", "why_it_failed"]


class Cause(NamedTuple):
    """The reason for a failure, and the command that fixes it."""

    text: str
    mend: str


_NO_MEMORY = re.compile(r"shm_open|/dev/shm|Shared memory error|No space left on device|Bus error")
_CRASHED = re.compile(r"\(signal (7|11)\)|exited on\s+signal (7|11)\b|Segmentation fault")
_HOST = socket.gethostname()

_KNOWN = {
    r"attempt to run as root|--allow-run-as-root": Cause(
        "Open MPI's launcher refuses to run as root",
        "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
    ),
    r"Invalid MPI (plugin|type)|cannot find mpi plugin": Cause(
        "srun does not have the plugin that it was told to use", "unset SLURM_MPI_TYPE"
    ),
    r"Requested nodes are busy|step creation temporarily disabled|Unable to create step": Cause(
        "SLURM has no cores left for another job step: this shell is a step that holds them",
        "export SLURM_OVERLAP=1",
    ),
    r"world of one[\s\S]*srun --mpi": Cause(
        "each rank found itself alone: srun needs a plugin that works with this MPI library",
        "export SLURM_MPI_TYPE=pmi2  # or pmix, for Open MPI; `srun --mpi=list` names them",
    ),
    r"sees a world of one": Cause(
        "each rank found itself alone, because the launcher does not work with this MPI library",
        pip_install("--force-reinstall", "mpi4py", "mpich"),
    ),
    r"getaddrinfo|gethostbyname|Name or service not known|[Cc]ould not resolve|name resolution": (
        Cause(
            f"the name of this machine, {_HOST}, has no address",
            f"echo '127.0.0.1 {_HOST}' | sudo tee -a /etc/hosts",
        )
    ),
    r"Permission denied \(publickey|Host key verification failed|ssh: connect to host": Cause(
        "the launcher cannot log in on a machine of the job", f"ssh-copy-id {_HOST}"
    ),
}


def why_it_failed(answer: Answer, command: Sequence[str]) -> Cause:
    """Return the likeliest cause; if none is known, the job's own message and its command.

    Parameters
    ----------
    answer : Answer
        The end of the job, and its output.
    command : sequence of str
        The command that started it.
    """
    said = answer.out + answer.err
    free = free_bytes()
    is_small = free is not None and free < NEEDED_BYTES
    if _NO_MEMORY.search(said) or (is_small and _CRASHED.search(said)):
        return Cause(
            "the MPI library exchanges data of a machine's ranks in /dev/shm, and found no room "
            "there, or may not write",
            larger_folder(),
        )
    for pattern, cause in _KNOWN.items():
        if re.search(pattern, said):
            return cause
    text = answer.reason
    if answer.code is not None:
        # The line that tells most is an error, not the launcher's frame around it.
        lines = [line.strip(" =-\t") for line in (answer.err + answer.out).splitlines()]
        errors = [n for n in lines if re.search(r"\b\w*Error\b|\berror\b|ERROR|signal \d", n)]
        text = errors[-1] if errors else text
    return Cause(shortened(text), shlex.join(command))
