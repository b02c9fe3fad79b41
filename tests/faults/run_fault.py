"""One rank of a job with a fault: ``run_fault.py NAME CULPRIT [SECONDS BEFORE IT]``.

``run_fault.py --threads NAME RANKS CULPRIT`` runs all ranks as threads, and prints deviations.
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from catalogue import FAULTS
from jobs import thread_deviations

import mpishard
from mpishard.communication.mpi import library

NAMES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")


def main():
    if sys.argv[1] == "--threads":
        wrong = thread_deviations(FAULTS[sys.argv[2]], int(sys.argv[3]), int(sys.argv[4]))
        print("\n".join(wrong))
        os._exit(bool(wrong))  # a rank that sleeps would be waited for
    fault, culprit = FAULTS[sys.argv[1]], int(sys.argv[2])
    library.START_SECONDS = 1.0  # of patience beyond the limit: the ranks of a test start together
    rank = next(int(os.environ[name]) for name in NAMES if name in os.environ)
    if rank == culprit and len(sys.argv) > 3:
        time.sleep(float(sys.argv[3]))
    fault.body(rank if fault.before_init else mpishard.init(), culprit)
    print("finished on rank", rank, flush=True)


if __name__ == "__main__":
    main()
