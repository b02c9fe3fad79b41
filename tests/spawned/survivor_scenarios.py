"""Programs of the ranks of tests/spawned/test_survivors.py, which imports this file, too.

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

import numpy as np

import mpishard as ms
from mpishard.errors import NotInitializedError, PeerError

STEPS, EVERY = 12, 3


class Rows:
    """Rows of a data set. It counts batches; number ``at``, from 1, causes a fault."""

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
    preempted.
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
    """Rank 1 is killed while the others are in several kinds of calls; then every world raises."""
    import pytest

    backend = ms.init(on_failure="shrink")
    pair = backend.split(int(backend.rank == 1))
    shared = backend.allocate_shared(8, np.float64)
    if backend.rank == 1:
        for other in (0, 2):  # not a barrier, in which another may still be when this one is killed
            backend.receive(other, 1)
        os.kill(os.getpid(), signal.SIGKILL)
    backend.send(np.ones(1), 1)
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
    noticed = Path(os.environ["TMPDIR"], "noticed")
    if backend.rank == 0:
        noticed.touch()
    deadline = time.monotonic() + 20
    while not noticed.exists() and time.monotonic() < deadline:
        time.sleep(0.01)  # else rank 0 would learn of it from rank 2
    assert noticed.exists()
    survivor = backend.shrink()
    assert (survivor.rank, survivor.world_size) == (backend.rank // 2, 2)
    assert ms.init() is survivor
    for old in (backend, pair):
        with pytest.raises(NotInitializedError, match="has lost ranks and has ended"):
            old.barrier()
    if shared is not None:
        shared[:] = survivor.rank  # is still there
    assert survivor.all_gather(np.arange(survivor.rank + 1)).tolist() == [0, 0, 1]
    assert survivor.split(0).all_reduce(np.ones(50_000))[-1] == 2
    print("finished on", survivor.rank, flush=True)


def go_on(backend):
    """Continue with the remaining ranks whenever a rank is lost."""
    try:
        backend.barrier()
    except PeerError:
        backend = backend.shrink()
    backend.barrier()
    print("finished in a world of", backend.world_size, flush=True)


def among_messages(*_):
    """Two ranks exchange messages; one is killed while the other waits for its first."""
    import pytest

    backend = ms.init(on_failure="shrink")
    backend.check_collectives = False  # data come first, with no header before
    if backend.rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerError, match="rank 1 of 2 is gone"):
        backend.all_reduce(np.ones(500_000))
    assert backend.shrink().all_reduce(np.ones(500_000))[0] == 1
    print("finished", flush=True)


def lost_in_shrink(*_):
    """Rank 1 is lost; then rank 3 is lost while the others make the smaller world."""
    backend = ms.init(on_failure="shrink")
    if backend.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if backend.rank == 3:
        assert callable(ms.MPICommunicationBackend._make_group)  # a part of every new world
        ms.MPICommunicationBackend._make_group = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    go_on(backend)


def uncaught(*_):
    """Catch nothing: the job ends with a code."""
    backend = ms.init(on_failure="shrink")
    if backend.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    backend.barrier()


def unasked(*_):
    """Run without on_failure="shrink" under a launcher that allows it."""
    backend = ms.init()
    backend.barrier()
    if backend.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    backend.barrier()


def exits(*_):
    """Exit with a code, which MPI reports to no other rank."""
    backend = ms.init(on_failure="shrink")
    if backend.rank == 1:
        os._exit(3)
    backend.barrier()


def leaves(*_):
    """Rank 1 ends before the others, which continue without it."""
    backend = ms.init(on_failure="shrink")
    if backend.rank == 1:
        sys.exit(0)
    go_on(backend)


def sums_by_nccl(*_):
    """Kill rank 1 when all are in NCCL, which would wait for it for ever."""
    from cupy_stand_in import installed

    with installed(device_count=3) as cupy:
        nccl, world = sys.modules["cupy.cuda.nccl"], ms.init("nccl", on_failure="shrink")
        world.all_reduce(cupy.ones(20_000))
        nccl.hangs = True
        work = world.all_reduce_async(cupy.ones(20_000))
        while nccl.calls[-1][0] != "recv" or work.done:
            world.progress()
        try:
            world.barrier()  # rank 1 may be gone before another rank has come to the end of this
            if world.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            work.wait()
        except PeerError as error:
            survivor = world.shrink()
            nccl.hangs = False
            total = survivor.all_reduce(cupy.ones(20_000))
            aborted = sum(call[0] == "abort" for call in nccl.calls)
            print(f"lost {error.rank}, aborted {aborted}, {type(survivor).__name__}: {total[0]}")
            survivor.shutdown()


def sleeps(*_):
    """A rank that sleeps is not lost: the time limit ends the job."""
    backend = ms.init(on_failure="shrink")
    if backend.rank == 1:
        time.sleep(60)
    backend.barrier()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
