"""How ranks talk: the contract, threads in memory, MPI."""

from mpishard.communication.contract.arena import Arena
from mpishard.communication.contract.backend import CommunicationBackend, refuse_other_message
from mpishard.communication.contract.call import Call
from mpishard.communication.contract.reduction import ReductionOperation
from mpishard.communication.contract.work import Waitable, Work
from mpishard.communication.init import init
from mpishard.communication.manager import CommunicationManager
from mpishard.communication.mesh import ProcessMesh
from mpishard.communication.mpi.backend import MPICommunicationBackend
from mpishard.communication.threads.backend import InMemoryCommunicationBackend
from mpishard.communication.threads.run import run_in_threads

__all__ = [
    "Arena",
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
