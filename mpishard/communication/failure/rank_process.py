"""Which process of a job is a rank: the one that its launcher started, and none that this starts.

What a rank starts (a worker of multiprocessing, a script that plots) inherits the launcher's
variables, and would be taken for the rank: its exception would end the job, and its ``init`` speak
to the launcher in the rank's name. So the first process that imports mpishard leaves its process
id in the environment.
"""

from __future__ import annotations

import os
import stat

from mpishard import settings
from mpishard.errors import MPIUnavailableError

__all__ = ["claim_rank", "helper_error", "is_helper"]


def claim_rank() -> None:
    """Let this process be the rank, where a launcher started several and no rank started it."""
    if (settings.launched_world_size() or 1) > 1 and not is_helper():
        words = (os.getpid(), _launcher_socket(), *settings.launch_identity())
        settings.write_rank_process(" ".join(map(str, words)))


def is_helper() -> bool:
    """Whether a rank started this process, or forked it.

    A rank may start a job of its own: what that job's launcher starts are ranks, and have another
    identity or another connection.
    """
    words = settings.rank_process().split(" ")
    if len(words) < 2 or words[0] == str(os.getpid()):
        return False
    connection = str(_launcher_socket())
    return words[2:] == list(settings.launch_identity()) and connection in ("0", words[1])


def helper_error() -> MPIUnavailableError:
    """The error for MPI asked for in a process that a rank started."""
    return MPIUnavailableError(
        f"this is a helper process of rank {settings.launched_rank()}: that rank's process "
        f"({settings.rank_process().partition(' ')[0]}) started it, and no launcher did, so that "
        "it is no rank and has no place in the world. Let the rank call the collectives; for one "
        'rank of its own use init("memory"), for ranks of its own mpishard.run_in_threads or '
        "mpishard run. Where this process is to be the rank, and the other is not, import "
        "mpishard here alone"
    )


def _launcher_socket() -> int:
    """The kernel's number of the connection to Hydra; 0 where this process has none."""
    descriptor = settings.pmi_descriptor()
    if descriptor is None:
        return 0
    try:
        about = os.fstat(descriptor)
    except OSError:
        return 0
    return about.st_ino if stat.S_ISSOCK(about.st_mode) else 0
