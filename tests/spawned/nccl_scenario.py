"""A job whose ranks wait in NCCL, for ever."""

import os
import sys

import numpy as np
from cupy_stand_in import installed
from cupy_stand_in.nccl import Communicator

import mpishard as ms

abort = Communicator.abort


def aloud(communicator):
    os.write(2, f"rank {communicator.rank_id()} aborts NCCL\n".encode())
    abort(communicator)


Communicator.abort = aloud


def main(backend):
    import cupy

    sys.modules["cupy.cuda.nccl"].hangs = True
    backend.all_reduce(cupy.ones(20_000, np.float64))


with installed(device_count=2):
    ms.launch(main, backend="nccl")
