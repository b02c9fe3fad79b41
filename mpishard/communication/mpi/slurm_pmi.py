"""A limit of SLURM's plugin pmi2, of which it informs no library.

MPICH 5.0 publishes the address of a rank as 4 KiB, of which its library UCX has set the first few
hundred bytes; the others are the memory behind it. These may be anything, so that the values are
sometimes long: lines of up to 1077 bytes. The plugin says that values may have 1024 bytes, and cuts
lines of that length: it reports "invalid client request", and MPI_Init fails, or hangs. Here
MPICH is told a smaller number, so that it divides its values.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from pathlib import Path

from mpishard.base import settings

_LONGEST_VALUE = 512
_LINE = 4096
_POLL_SECONDS = 1e-3


def limit_values(library: str) -> None:
    """Make MPI_Init of this thread divide what it publishes by srun's plugin pmi2.

    The thread must not hold Python's lock in MPI_Init.

    Parameters
    ----------
    library : str
        The library's version string.
    """
    descriptor = settings.slurm_pmi_descriptor()
    if descriptor is None or "ucx" not in library:
        return
    try:
        Path("/proc/self/syscall").read_text()
    except OSError:  # without it `_pass_on` could not connect the two, and MPI_Init would wait
        return
    slurm = socket.socket(fileno=os.dup(descriptor))
    ours, theirs = socket.socketpair()
    os.dup2(theirs.fileno(), descriptor)
    theirs.close()
    arguments = (ours, slurm, descriptor, threading.get_native_id())
    threading.Thread(target=_pass_on, args=arguments, name="mpishard-pmi", daemon=True).start()


def _pass_on(library: socket.socket, slurm: socket.socket, descriptor: int, thread: int) -> None:
    """Pass on requests and replies, up to the one with the limit; then connect the two directly."""
    with library, slurm:
        while request := library.recv(_LINE):
            slurm.sendall(request)
            reply = slurm.recv(_LINE)
            if reply.startswith(b"cmd=maxes"):
                reply = re.sub(rb"vallen_max=\d+", b"vallen_max=%d" % _LONGEST_VALUE, reply)
                # A read that has begun ends with this reply, also if the descriptor changes hands.
                while not _waits_for(descriptor, thread):
                    time.sleep(_POLL_SECONDS)
                os.dup2(slurm.fileno(), descriptor)
                library.sendall(reply)
                return
            library.sendall(reply)


def _waits_for(descriptor: int, thread: int) -> bool:
    """Return whether a thread of this process is in a system call on ``descriptor``."""
    words = Path(f"/proc/self/task/{thread}/syscall").read_text().split()
    return len(words) > 1 and words[0] != "-1" and int(words[1], 16) == descriptor
