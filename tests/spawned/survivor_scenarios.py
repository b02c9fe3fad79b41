"""What the ranks of tests/spawned/test_survivors.py do; it imports this file, too.

``python survivor_scenarios.py NAME ...`` is one rank of a job. What few scenarios need, they import
themselves: a rank that only communicates then starts in half the time.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from pathlib import Path

import mpishard as ms  # isort: skip - before NumPy, whose BLAS kernels it chooses
import numpy as np

from mpishard.errors import NotInitializedError, PeerError

STEPS, EVERY = 12, 3


class Rows:
    """Rows of a data set; the batch number ``at``, from 1, sets off a fault. Counts them."""

    def __init__(self, rows, at=0, fault=None):
        self.rows, self.at, self.fault, self.read = rows, at, fault, 0

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.read += 1
        if self.read == self.at:
            self.fault()
        return self.rows[index]


def train(backend, folder, x, steps=STEPS, asynchronous=False):
    """Train to ``steps``, from the newest checkpoint in ``folder``; all parameters. Collective."""
    y = x.rows @ np.linspace(-1, 1, 5)[:, None]
    model = ms.as_distributed(ms.nn.MLP([5, 16, 1], seed=3), backend, "fsdp")
    optimizer = ms.ElasticOptimizer(
        ms.optimizers.AdamW(1e-2), model.sharding_configuration, 1, 4, strategy="fsdp"
    )
    optimizer.optimize(
        ms.OptimizationInputData(
            model=model,
            x_train=x,
            y_train=y,
            batch_size=24,
            epochs=10,
            max_steps=steps,
            checkpoint=folder,
            checkpoint_every=EVERY,
            checkpoint_async=asynchronous,
            user_state={"none": np.random.default_rng(0)},  # so that a read happens in its own step
            progress=False,
        )
    )
    return model.gather_full_parameters()


def samples():
    return np.random.default_rng(0).standard_normal((120, 5))


def end_at(count):
    """End this process at its ``count``-th collective from now on, in whichever world."""
    kind = ms.MPICommunicationBackend
    admit, left = kind._admit, [count]

    def count_down(*arguments):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        admit(*arguments)

    kind._admit = count_down


def end_in_save(number):
    """End this process in the thread that writes its part of its ``number``-th checkpoint."""
    from mpishard.checkpoint.format import disk

    real, left = disk.write_file, [number]

    def write(file, parts):
        left[0] -= 1
        if left[0] == 0:
            time.sleep(0.05)  # the others train on, and poll
            os.kill(os.getpid(), signal.SIGKILL)
        real(file, parts)

    disk.write_file = write


def fail():
    raise ValueError("boom on a rank that others outlive")


def training(folder, *plan):
    """``plan`` is RANK:BATCH:COLLECTIVE of ranks to kill there; 0 for one that raises.

    RANK:save:NUMBER of a rank to kill in an asynchronous save; RANK:BATCH:notice of one that is
    told to make room.
    """
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    x = Rows(samples())
    asynchronous = any(":save:" in part for part in plan)
    for part in plan:
        if not part.replace(":", "").isdigit():
            culprit, at, what = part.split(":")
            if int(culprit) == rank and at == "save":
                end_in_save(int(what))
            elif int(culprit) == rank:
                x = Rows(samples(), int(at), lambda: os.kill(os.getpid(), signal.SIGUSR1))
            continue
        culprit, batch, collective = map(int, part.split(":"))
        if culprit == rank:
            fault = functools.partial(end_at, collective) if collective else fail
            x = Rows(samples(), batch, fault)
    worlds = []

    def main(backend):
        worlds.append((backend.rank, backend.world_size))
        return train(backend, Path(folder, "checkpoints"), x, asynchronous=asynchronous)

    parameters = ms.launch(main, on_failure="shrink")
    np.save(Path(folder, f"end-{rank}.npy"), parameters)
    print(f"rank {rank} was {worlds}", flush=True)


def every_call(*_):
    """Rank 1 is killed while the others are in all sorts of calls; then every world refuses."""
    import pytest

    backend = ms.init(on_failure="shrink")
    pair = backend.split(int(backend.rank == 1))
    shared = backend.allocate_shared(8, np.float64)
    backend.barrier()
    if backend.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    # Rank 0 waits for rank 2, in a group that has lost nobody.
    calls = [lambda: pair.receive(1, 4), lambda: pair.all_reduce(np.ones(3))]
    if backend.rank == 2:
        calls = [
            lambda: backend.all_gather_async(np.ones(100_000)).wait(),
            lambda: backend.receive(1, 100_000),
        ]
    for call in [*calls, lambda: backend.split(0), pair.barrier]:
        with pytest.raises(PeerError, match="rank 1 of 3 is gone") as caught:
            call()
        assert caught.value.rank == 1
    told = Path(os.environ["TMPDIR"], "told")
    if backend.rank == 0:
        told.touch()
    deadline = time.monotonic() + 20
    while not told.exists() and time.monotonic() < deadline:
        time.sleep(0.01)  # else rank 0 would hear of it from rank 2
    assert told.exists()
    heir = backend.shrink()
    assert (heir.rank, heir.world_size) == (backend.rank // 2, 2)
    assert ms.init() is heir
    for old in (backend, pair):
        with pytest.raises(NotInitializedError, match="has lost ranks and has ended"):
            old.barrier()
    if shared is not None:
        shared[:] = heir.rank  # is still there
    assert heir.all_gather(np.arange(heir.rank + 1)).tolist() == [0, 0, 1]
    assert heir.split(0).all_reduce(np.ones(50_000))[-1] == 2
    print("came to its end on", heir.rank, flush=True)


def go_on(backend):
    """Go on with those that are left, whenever a rank is found lost."""
    try:
        backend.barrier()
    except PeerError:
        backend = backend.shrink()
    backend.barrier()
    print("came to its end in a world of", backend.world_size, flush=True)


def among_messages(*_):
    """Of two ranks that swap messages, one is killed while the other waits for its first."""
    import pytest

    backend = ms.init(on_failure="shrink")
    backend.check_collectives = False  # data come first, with no header before
    if backend.rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerError, match="rank 1 of 2 is gone"):
        backend.all_reduce(np.ones(500_000))
    assert backend.shrink().all_reduce(np.ones(500_000))[0] == 1
    print("came to its end", flush=True)


def lost_in_shrink(*_):
    """Rank 1 is lost; rank 3 is lost while the others make the world of those that are left."""
    backend = ms.init(on_failure="shrink")
    if backend.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if backend.rank == 3:
        assert callable(ms.MPICommunicationBackend._make_group)  # a part of every new world
        ms.MPICommunicationBackend._make_group = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    go_on(backend)


def uncaught(*_):
    """Nobody takes care of it: the job ends, with a code."""
    backend = ms.init(on_failure="shrink")
    if backend.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    backend.barrier()


def unasked(*_):
    """A script that may go on without a rank, and does not ask for it."""
    backend = ms.init()
    backend.barrier()
    if backend.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    backend.barrier()


def exits(*_):
    """MPI tells nobody of a rank that exits with a code."""
    backend = ms.init(on_failure="shrink")
    if backend.rank == 1:
        os._exit(3)
    backend.barrier()


def leaves(*_):
    """Rank 1 comes to its end before the others, who go on without it."""
    backend = ms.init(on_failure="shrink")
    if backend.rank == 1:
        sys.exit(0)
    go_on(backend)


def sums_by_nccl(*_):
    """Rank 1 is killed when all are in NCCL, which would wait for it for ever."""
    from cupy_stand_in import installed

    with installed(device_count=3) as cupy:
        nccl, world = sys.modules["cupy.cuda.nccl"], ms.init("nccl", on_failure="shrink")
        world.all_reduce(cupy.ones(20_000))
        nccl.hangs = True
        work = world.all_reduce_async(cupy.ones(20_000))
        while nccl.calls[-1][0] != "recv" or work.done:
            world.progress()
        world.barrier()
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            work.wait()
        except PeerError as error:
            heir = world.shrink()
            nccl.hangs = False
            total = heir.all_reduce(cupy.ones(20_000))
            aborted = sum(call[0] == "abort" for call in nccl.calls)
            print(f"lost {error.rank}, aborted {aborted}, {type(heir).__name__}: {total[0]}")
            heir.shutdown()


def sleeps(*_):
    """A rank that sleeps is not lost: the job ends of it, as ever."""
    backend = ms.init(on_failure="shrink")
    if backend.rank == 1:
        time.sleep(60)
    backend.barrier()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
