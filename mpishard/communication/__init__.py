"""How ranks talk: the contract, threads in memory, MPI."""

from mpishard.communication.backend import CommunicationBackend
from mpishard.communication.manager import CommunicationManager
from mpishard.communication.memory import InMemoryCommunicationBackend
from mpishard.communication.mesh import ProcessMesh
from mpishard.communication.mpi import MPICommunicationBackend
from mpishard.communication.reduction import ReductionOperation
from mpishard.communication.start import init
from mpishard.communication.threads import run_in_threads
from mpishard.communication.work import Work

__all__ = [
    "CommunicationBackend",
    "CommunicationManager",
    "InMemoryCommunicationBackend",
    "MPICommunicationBackend",
    "ProcessMesh",
    "ReductionOperation",
    "Work",
    "init",
    "run_in_threads",
]
