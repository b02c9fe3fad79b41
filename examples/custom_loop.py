"""A training loop written by hand: batches, schedule, accumulation, progress, evaluation.

A small network learns to tell two spirals apart. The same training runs twice: with each rank's
part of a batch at once, and in accumulated micro-batches, as for batches that do not fit into
memory. Both give the same parameters, up to rounding, on any number of ranks:

    python examples/custom_loop.py
    python examples/custom_loop.py -n 3                 # three ranks, as threads
    mpirun -n 2 python examples/custom_loop.py          # two ranks, as processes
"""

import argparse
from pathlib import Path

import mpishard as ms
import numpy as np

BATCH = 200
TEST = 400


def spirals(samples, seed=0):
    """Return points of two spirals, shape (samples, 2), and their labels, shape (samples,)."""
    generator = np.random.default_rng(seed)
    label = generator.integers(0, 2, samples)
    turn = np.sqrt(generator.uniform(0.03, 1, samples))
    angle = 2.5 * np.pi * turn + np.pi * label
    points = turn[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return points + 0.015 * generator.standard_normal(points.shape), label


def train(backend, arguments, micro_batches):
    """Train once; return the wrapped model and the loss of each step. Collective."""
    x, y = spirals(2000 + TEST)
    x, y = x[TEST:], y[TEST:]
    plain = ms.nn.MLP([2, 64, 64, 2], loss=ms.nn.CrossEntropy(), seed=1)
    model = ms.as_distributed(plain, backend, arguments.strategy)
    rate = ms.optimizers.Cosine(0.02, arguments.steps, minimum=1e-4)
    optimizer = ms.as_distributed(ms.optimizers.AdamW(rate), backend, arguments.strategy)
    order = np.random.default_rng(7)  # one seed on every rank: the ranks agree on batches
    losses = []
    progress = ms.callbacks.ProgressLine()  # metrics files and early stopping would go here, too
    with ms.callbacks.running([progress], backend, total_steps=arguments.steps) as hooks:
        for _ in range(arguments.steps):
            batch = order.choice(len(x), BATCH, replace=False)
            mine = batch[ms.ShardLayout(BATCH, backend.world_size).slice(backend.rank)]
            *first, last = np.array_split(mine, micro_batches)
            with model.accumulate():
                for part in first:
                    optimizer.step(model, x[part], y[part])  # adds the gradient, and no update
            losses.append(optimizer.step(model, x[last], y[last]))  # mean over the whole batch
            if hooks.step(losses[-1], samples=BATCH):
                break
    return model, losses


def main(backend, arguments):
    model, losses = train(backend, arguments, micro_batches=1)
    added, losses_added = train(backend, arguments, micro_batches=4)
    apart = np.abs(model.gather_full_parameters() - added.gather_full_parameters()).max()
    x, y = spirals(2000 + TEST)
    accuracy = np.mean(added.predict(x[:TEST]).argmax(axis=1) == y[:TEST])
    backend.print(
        f"{arguments.steps} steps on {backend.world_size} rank(s): {accuracy:.1%} of {TEST} new "
        f"points are right; 4 micro-batches or 1, the parameters are {apart:.0e} apart"
    )
    with added.unsharded(root=0) as plain:
        if plain is not None:
            plot(arguments.output / "loop.png", plain, losses, losses_added)
    return losses_added[-1], accuracy, apart


def plot(path, plain, losses, losses_added):
    """Draw both loss curves and the network's prediction for each point of the plane."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: pip install 'mpishard[plot]'")
        return
    figure = Figure(figsize=(9, 3.4), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.5, 1])
    steps = np.arange(1, len(losses) + 1)
    left.semilogy(steps, losses, color="#3b6fb6", linewidth=1, label="whole batches")
    some = slice(None, None, max(1, len(losses) // 40))
    left.semilogy(
        steps[some],
        losses_added[some],
        "o",
        color="#d1495b",
        markersize=3.5,
        label="4 micro-batches that add up",
    )
    left.set(xlabel="step", ylabel="loss [nats per point]")
    left.legend(frameon=False)
    axis = np.linspace(-1.15, 1.15, 120)
    plane = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
    scores = plain.predict(plane)
    right.contourf(
        axis,
        axis,
        (scores[:, 1] - scores[:, 0]).reshape(120, 120),
        levels=[-1e9, 0, 1e9],
        colors=["#c9d8ee", "#f3ccd1"],
    )
    x, y = spirals(2000 + TEST)
    for label, colour in ((0, "#3b6fb6"), (1, "#d1495b")):
        right.scatter(*x[:TEST][y[:TEST] == label].T, s=5, color=colour)
    right.set(xticks=[], yticks=[], aspect="equal", title=f"{TEST} new points")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    print(path)


def positive(text):
    """Parse an integer >= 1 from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"needs an integer >= 1, got {text}")
    return int(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "-n", type=positive, default=None, metavar="N", help="number of thread-ranks"
    )
    parser.add_argument(
        "--strategy", choices=[s.value for s in ms.DistributedStrategy], default="fsdp"
    )
    parser.add_argument("--steps", type=positive, default=800)
    parser.add_argument("--output", type=Path, default=Path("runs/custom_loop"))
    arguments = parser.parse_args()
    ms.launch(main, arguments, world_size=arguments.n)
