"""Communication between ranks: one contract, and backends of threads, MPI processes and GPUs.

Begin with `contract`, the collectives that every backend has, and `init`, which gives a process its
backend. `agreement` lets all ranks succeed or all raise. `mesh` arranges ranks in axes; `manager`
is a backend for code that is not passed one. The chapters are, each importing only from those
before it: `tracing`, `contract`, `failure`, `threads`, `mpi`, `nccl`, and then these four files.
Other rooms import the names below, and docs/architecture.md follows one call, and one failure,
through the files.
"""

from mpishard.communication.contract.arena import Arena
from mpishard.communication.contract.backend import CommunicationBackend
from mpishard.communication.contract.call import Call, refuse_other_message
from mpishard.communication.contract.reduction import ReductionOperation
from mpishard.communication.contract.work import Waitable, Work
from mpishard.communication.init import init
from mpishard.communication.manager import CommunicationManager
from mpishard.communication.mesh import ProcessMesh
from mpishard.communication.mpi.backend import MPICommunicationBackend
from mpishard.communication.nccl.backend import NCCLCommunicationBackend
from mpishard.communication.threads.backend import InMemoryCommunicationBackend
from mpishard.communication.threads.run import run_in_threads

__all__ = [
    "Arena", "Call", "CommunicationBackend", "CommunicationManager", "InMemoryCommunicationBackend",
    "MPICommunicationBackend", "NCCLCommunicationBackend", "ProcessMesh", "ReductionOperation",
    "Waitable", "Work", "init", "refuse_other_message", "run_in_threads",
]  # fmt: skip
