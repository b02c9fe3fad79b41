"""A training that continues if a rank is lost: killed, out of memory, or by an exception.

A network learns a sum of waves, with a checkpoint every few steps. In the middle one rank is lost.
The others notice it, form a smaller world and continue from the newest checkpoint, in the same
processes. Up to rounding, the final loss is that of a training without the loss of a rank:

    python examples/outlive_a_rank.py                                   # three ranks, as threads
    mpishard run -n 3 --on-failure shrink examples/outlive_a_rank.py    # as processes of Open MPI
    mpishard run -n 3 --on-failure shrink examples/outlive_a_rank.py --lose ""    # nothing is lost

You may also kill any rank from outside. A script needs only two things for this:
``on_failure="shrink"`` for `launch`, and a folder of checkpoints for `optimize`.
"""

import argparse
import os
import signal
import threading
from pathlib import Path

import mpishard as ms
import numpy as np

SAMPLES, BATCH = 1024, 128


class Waves:
    """Samples of a function of two variables; a rank reads batches of them."""

    def __init__(self, lose_at=None):
        self.x = np.random.default_rng(0).uniform(-1, 1, (SAMPLES, 2))
        self.y = np.sin(3 * self.x[:, :1]) * np.cos(2 * self.x[:, 1:])
        self.lose_at, self.read = lose_at, 0

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        self.read += 1
        if self.read == self.lose_at:
            lose_this_rank()
        return self.x[index]


def lose_this_rank():
    """End this process as the system does when memory is full; a thread can only raise."""
    if threading.current_thread() is threading.main_thread():
        os.kill(os.getpid(), signal.SIGKILL)
    raise MemoryError("this rank is lost")


def main(backend, arguments, own):
    if not hasattr(own, "waves"):  # only once: after a shrink, ranks have other numbers
        own.waves = Waves(arguments.at if str(backend.rank) == arguments.lose else None)
    plain = ms.nn.MLP([2, 64, 64, 1], activation="tanh", seed=1)
    model = ms.as_distributed(plain, backend, "fsdp")
    optimizer = ms.as_distributed(ms.optimizers.AdamW(3e-3), backend, "fsdp")
    data = ms.OptimizationInputData(
        model=model,
        x_train=own.waves,
        y_train=own.waves.y,
        batch_size=BATCH,
        epochs=1000,
        max_steps=arguments.steps,
        checkpoint=arguments.output / "checkpoints",
        checkpoint_every=arguments.every,
        progress=False,
    )
    result = optimizer.optimize(data)
    backend.print(
        f"loss {result.fitness_history[-1]:.6f} after {arguments.steps} steps, "
        f"on {backend.world_size} rank(s) at last"
    )
    return result.fitness_history[-1], backend.world_size


def positive(text):
    """Parse an integer >= 1 from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"needs an integer >= 1, got {text}")
    return int(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=positive, default=3, metavar="N", help="number of thread-ranks")
    parser.add_argument("--steps", type=positive, default=300)
    parser.add_argument("--every", type=positive, default=50, help="steps between checkpoints")
    parser.add_argument("--lose", default="1", metavar="RANK", help='rank to lose; "" for none')
    parser.add_argument("--at", type=positive, default=180, help="batch at which it is lost")
    parser.add_argument("--output", type=Path, default=Path("runs/outlive_a_rank"))
    arguments = parser.parse_args()
    ms.launch(main, arguments, threading.local(), world_size=arguments.n, on_failure="shrink")
