"""How ranks talk: the contract, threads in memory, MPI."""

from mpishard.communication.backend import CommunicationBackend
from mpishard.communication.call import Call
from mpishard.communication.manager import CommunicationManager
from mpishard.communication.memory import InMemoryCommunicationBackend
from mpishard.communication.mesh import ProcessMesh
from mpishard.communication.mpi import MPICommunicationBackend
from mpishard.communication.point_to_point import refuse_other_message
from mpishard.communication.reduction import ReductionOperation
from mpishard.communication.start import init
from mpishard.communication.threads import run_in_threads
from mpishard.communication.work import Waitable, Work

__all__ = [
    "Call",
    "CommunicationBackend",
    "CommunicationManager",
    "InMemoryCommunicationBackend",
    "MPICommunicationBackend",
    "ProcessMesh",
    "ReductionOperation",
    "Waitable",
    "Work",
    "init",
    "refuse_other_message",
    "run_in_threads",
]
