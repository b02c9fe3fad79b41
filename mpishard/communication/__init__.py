"""Communication between ranks: one contract, and backends of threads, MPI processes and GPUs.

Begin with `contract`, the collectives that every backend has, and `process`, whose `init` gives a
process its backend. `agreement` lets all ranks succeed or all raise. `mesh` arranges ranks in axes.
The chapters are, each importing only from those before it: `tracing`, `contract`, `failure`,
`threads`, `mpi`, `nccl`, and then these three files. Other rooms import the names below, and
docs/architecture.md follows one call, and one failure, through the files.
"""

# The face for other rooms. The names of `__all__` below are for users, too; the others may change
# without notice.
from mpishard.communication.agreement import (
    GatheredTexts,
    agree,
    all_texts,
    differences,
    gather_texts,
    path_from,
    path_text,
    same_outcome,
    share_path,
    share_text,
)
from mpishard.communication.contract.arena import Arena
from mpishard.communication.contract.backend import CommunicationBackend
from mpishard.communication.contract.call import DTYPES, Call, refuse_other_message
from mpishard.communication.contract.matching import who
from mpishard.communication.contract.reduction import ReductionOperation, TreeReducer
from mpishard.communication.contract.status import (
    PAGE_BYTES,
    RankRecord,
    RankState,
    StatusPage,
    called_as,
    own_page,
    pages_beside,
    records_at,
    records_in,
    shared_page,
    skip_frames_of,
)
from mpishard.communication.contract.subject import unit_subject
from mpishard.communication.contract.work import Steps, Transfer, Waitable, Work
from mpishard.communication.failure.abort import UNPRINTED
from mpishard.communication.failure.report import OnFailure, check_on_failure
from mpishard.communication.failure.stall import verdict
from mpishard.communication.failure.watchdog import is_free, preemption_notice
from mpishard.communication.mesh import AXES, ProcessMesh, mesh_order, mesh_sizes
from mpishard.communication.mpi.backend import MPICommunicationBackend
from mpishard.communication.mpi.library import launcher_name, load_mpi
from mpishard.communication.mpi.node_memory import RowChannel
from mpishard.communication.nccl.backend import NCCLCommunicationBackend
from mpishard.communication.process import (
    BackendName,
    blas_threads,
    check_backend_name,
    init,
    is_launched,
    refuse_worlds_of_one,
)
from mpishard.communication.threads.backend import InMemoryCommunicationBackend
from mpishard.communication.threads.run import current_backend, run_in_threads
from mpishard.communication.tracing.recorder import (
    TRACE_FORMAT,
    TRACE_VERSION,
    Row,
    current_recorder,
    encode,
    first_line,
    last_line,
    rank_file,
    start_recording,
    stop_recording,
)

__all__ = [
    "Arena", "Call", "CommunicationBackend", "InMemoryCommunicationBackend",
    "MPICommunicationBackend", "NCCLCommunicationBackend", "ProcessMesh", "ReductionOperation",
    "Waitable", "Work", "init", "refuse_other_message", "run_in_threads",
]  # fmt: skip
