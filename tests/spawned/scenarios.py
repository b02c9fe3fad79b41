"""Programs of the processes of a spawned job: ``python scenarios.py NAME``.

Each rank of some hundred jobs imports this: what few scenarios need, they import themselves.
"""

import hashlib
import os
import signal
import sys
import threading
import time
from contextlib import nullcontext, suppress

import numpy as np

import mpishard
from mpishard.base import settings
from mpishard.communication.contract.call import DTYPES
from mpishard.communication.contract.status import StatusReader
from mpishard.communication.mpi import library
from mpishard.errors import PeerError

LONG = np.ones(5000)
SAMPLE = tuple(dtype for dtype in DTYPES if dtype.name in ("bool", "bfloat16", "float64"))


def raising_rank_without_stderr():
    """Close the descriptor, as daemons do; the next file that is opened would get its number."""
    backend = mpishard.init()
    if backend.rank == 1:
        os.close(2)
        raise ValueError("nobody can read this")
    backend.barrier()


def leaving_is_caught():
    backend = mpishard.init()
    if backend.rank == 1:
        return
    for _ in range(2):
        try:
            backend.barrier()
        except PeerError as error:
            print(f"rank {backend.rank} caught, of rank {error.rank}: {error}")


def messages_outlive_the_sender():
    backend = mpishard.init()
    if backend.rank == 1:
        backend.send(np.arange(1_000_000), 0)
    if backend.rank == 0:
        time.sleep(1)
        assert backend.receive(1, 1_000_000)[-1] == 999_999
        print("received")


def messages_nobody_takes():
    backend = mpishard.init()
    backend.send(np.arange(1_000_000), (backend.rank + 1) % backend.world_size)


def exit_3_everywhere():
    """Rank 1 does in a with block."""
    backend = mpishard.init()
    with backend if backend.rank == 1 else nullcontext():
        backend.barrier()
        sys.exit(3)


def hang():
    backend = mpishard.init()
    backend.barrier()
    if backend.rank == 1:
        time.sleep(60)
    backend.all_reduce(LONG)


def hang_in_receive():
    backend = mpishard.init()
    backend.barrier()
    if backend.rank == 0:
        backend.receive(1, 3, tag=5)
    backend.barrier()


def conformance():
    from mpishard.testing.communication import CommunicationConformance

    backend = mpishard.init()
    dtypes = DTYPES if sys.argv[2:] == ["full"] else SAMPLE
    suite = CommunicationConformance(dtypes)
    suite.check_tree_order(backend)
    suite.check_async_orders(backend)
    suite.check_split(backend)
    suite.check_point_to_point(backend)
    backend.print("passed in a world of", backend.world_size)
    print("bits", reduced_bits(backend))


def reduced_bits(backend):
    """Return a digest of all-reduced numbers whose sum depends on the order, short and long."""
    from mpishard.testing.reductions import ADVERSARIAL_VALUES

    numbers = np.array(ADVERSARIAL_VALUES)
    digest = hashlib.sha256()
    for dtype in (np.float16, np.float32, np.float64):
        for length in (5, 3001):
            order = np.random.default_rng([backend.rank, length]).integers(0, len(numbers), length)
            with np.errstate(all="ignore"):
                mine = numbers[order].astype(dtype)
            for operation in mpishard.ReductionOperation:
                digest.update(backend.all_reduce(mine.copy(), operation).tobytes())
    return digest.hexdigest()


def killed_rank_in_the_arena():
    """Kill a rank in a step of a model in shared memory."""
    backend = mpishard.init()
    kept = backend.allocate_shared(10**6, np.float32)
    kept[backend.rank :: backend.world_size] = 1
    model = mpishard.as_distributed(mpishard.nn.MLP([64, 64, 8]), backend)
    model.train(np.ones((4, 64)), np.ones((4, 8)))
    print("trained on rank", backend.rank, flush=True)
    backend.barrier()
    if backend.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    backend.barrier()


def breaks_in_a_micro_batch():
    """Arguments: how, and the sizes of pipeline and tensor axes."""

    class Breaks(mpishard.nn.Linear):  # here, because the other scenarios need no layers
        """A layer that ends rank 1 in its second forward pass: by an exception, or by a signal."""

        passes = 0

        def forward(self, p, x, context):
            self.passes += context.training
            if backend.rank == 1 and self.passes == 2:
                if sys.argv[2] == "raise":
                    raise ValueError("boom in micro-batch 2")
                os.kill(os.getpid(), signal.SIGKILL)
            return super().forward(p, x, context)

    backend = mpishard.init()
    sizes = [int(size) for size in sys.argv[3:]]
    layers = [Breaks(8, 8) for _ in range(backend.world_size)]
    chain = mpishard.nn.Sequential(*layers)
    plain = mpishard.nn.Model(chain, mpishard.nn.MSE(), input_shape=(8,), seed=1)
    model = mpishard.HybridShardedModel(
        plain, mpishard.ShardingConfiguration(backend), *sizes, micro_batch_count=4, schedule="1f1b"
    )
    model.predict(np.ones((4, 8)))
    print("predicted on rank", backend.rank)
    backend.barrier()
    model.train(np.ones((8, 8)), np.ones((8, 8)))
    print("trained", flush=True)


def quits_rank():
    backend = mpishard.init()
    backend.barrier()
    if backend.rank == 1:
        os._exit(0)  # no hook of Python's runs
    backend.barrier()


def stop_this_process(*_):
    os.kill(os.getpid(), signal.SIGSTOP)


def stopped_in_a_collective():
    backend = mpishard.init()
    backend.barrier()
    if backend.rank == 1:
        threading.Timer(0.5, stop_this_process).start()
    else:
        time.sleep(1)
    backend.all_reduce(LONG)


def stopped_before_init():
    library.START_SECONDS = 1.0
    if settings.launched_rank() == 1:
        stop_this_process()
    mpishard.init()


def stopped_in_init():
    library.START_SECONDS = 1.0
    if settings.launched_rank() == 1:
        StatusReader.share = stop_this_process
    mpishard.init()


def many_groups():
    backend = mpishard.init()
    from mpi4py import MPI

    # All communicators that the library has, but for a few.
    taken = []
    with suppress(MPI.Exception):
        while len(taken) < 5000:
            taken.append(MPI.COMM_WORLD.Dup())
    for comm in taken[-40:]:
        comm.Free()
    for number in range(100):
        group = backend.split(0)
        assert group.all_reduce(np.array([number]))[0] == number * backend.world_size
    backend.print("done")


def several_nodes():
    from mpishard.testing.communication import CommunicationConformance

    backend = mpishard.init()
    backend.print("nodes", backend.nodes, "of", backend.node_count)
    nodes = backend.nodes
    assert backend.local_rank == nodes[: backend.rank].count(nodes[backend.rank])
    CommunicationConformance(SAMPLE).check_all_reduce(backend)


def just_init():
    backend = mpishard.init(*sys.argv[2:])
    assert mpishard.init() is backend
    print(backend.describe())


if __name__ == "__main__":
    globals()[sys.argv[1]]()
