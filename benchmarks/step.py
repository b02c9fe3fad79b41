"""Time of a training step against what bounds it from below, measured in the same run.

    mpishard run -n 2 benchmarks/step.py
    mpishard run -n 2 benchmarks/step.py --model gpt --width 256

Prints medians: the step of each strategy on this many ranks; the same rank's forward, backward and
update without any communication, all ranks at once; and their ratio.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np

import mpishard as ms


def build(arguments: argparse.Namespace) -> tuple[ms.nn.Model, np.ndarray, np.ndarray]:
    """A model with one rank's batch."""
    generator = np.random.default_rng(0)
    if arguments.model == "gpt":
        model = ms.nn.GPT(
            vocabulary_size=256, context_length=128, width=arguments.width, heads=4, layers=4
        )
        tokens = generator.integers(0, 256, (8, 129))
        return model, tokens[:, :-1], tokens[:, 1:]
    sizes = [arguments.width] * 9
    x = generator.standard_normal((64, arguments.width), dtype=np.float32)
    return ms.nn.MLP(sizes, dtype="float32"), x, x


def seconds(backend: ms.CommunicationBackend, step: Callable[[], object], repeats: int) -> float:
    """Median time of ``step``, all ranks beginning together."""
    for _ in range(3):
        step()
    times = []
    for _ in range(repeats):
        backend.barrier()
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return median(times)


def alone(arguments: argparse.Namespace) -> Callable[[], object]:
    """The step in a world of one: the same engine with nobody to talk to."""
    model, x, y = build(arguments)
    backend = ms.InMemoryCommunicationBackend(0, 1, f"alone-{id(model)}")
    backend.initialize()
    sharded = ms.as_distributed(model, backend, "ddp")
    optimizer = ms.as_distributed(ms.optimizers.AdamW(), backend, "ddp")
    return lambda: optimizer.step(sharded, x, y)


def main(backend: ms.CommunicationBackend, arguments: argparse.Namespace) -> None:
    """Measure on every rank; rank 0 prints."""
    bound = seconds(backend, alone(arguments), arguments.repeats)
    model, x, y = build(arguments)
    backend.print(
        f"{arguments.model}, width {arguments.width}, {model.parameter_count:,} parameters, "
        f"{backend.world_size} ranks, median of {arguments.repeats}\n"
        f"{'without communication':24} {bound * 1e3:8.2f} ms"
    )
    for strategy in ms.DistributedStrategy:
        model, x, y = build(arguments)
        sharded = ms.as_distributed(model, backend, strategy)
        optimizer = ms.as_distributed(ms.optimizers.AdamW(), backend, strategy)
        backend.traffic.reset()
        took = seconds(backend, partial(optimizer.step, sharded, x, y), arguments.repeats)
        sent = backend.traffic.total_bytes / (arguments.repeats + 3)
        backend.print(
            f"{strategy.value:24} {took * 1e3:8.2f} ms   ratio {took / bound:5.2f}   "
            f"{sent / 1e6:8.2f} MB sent by rank 0 per step"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["mlp", "gpt"], default="mlp")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=15)
    ms.launch(main, parser.parse_args())
