"""Find the heat conductivity at each place of a plate from noisy pictures of spreading heat.

An inverse problem: the unknown is the coefficient field a of the diffusion equation

    du/dt = div(a grad u)    on the unit square, insulated,

and for many experiments the heat at time 0 is known, and the pictures of a coarse, noisy camera
at two later times. The loss solves the equation in plain NumPy, and HIPS autograd
differentiates through all time steps. Experiments are the samples, so ranks share them:

    python examples/fit_autograd.py
    python examples/fit_autograd.py -n 3                 # three ranks, as threads
    mpirun -n 2 python examples/fit_autograd.py          # two ranks, as processes
"""

import argparse
from pathlib import Path

import mpishard as ms
import autograd.numpy as anp  # noqa: TID253
import numpy as np

CELLS = 20  # along each side
TIME_STEPS = 30  # to each picture
TIME_STEP = 0.08  # in units of h^2, h the width of a cell: stable where a < 3.1
NOISE = 0.01  # of the camera, where the hottest spot is 1
SMOOTHNESS = 2e-6  # weight of the penalty on steep fields
EVERY = 2  # the camera sees one cell of each 2 x 2 block

DIFFERENCE = np.diff(np.eye(CELLS), axis=0)


def heat_after(log_field, u, steps):
    """Return the temperatures after ``steps`` time steps, shape (B, cells, cells)."""
    # The conductivity between two cells is the geometric mean of theirs.
    across = anp.exp((log_field[1:] + log_field[:-1]) / 2)
    along = anp.exp((log_field[:, 1:] + log_field[:, :-1]) / 2)
    for _ in range(steps):
        outflow = DIFFERENCE.T @ (across * (DIFFERENCE @ u))
        outflow = outflow + (along * (u @ DIFFERENCE.T)) @ DIFFERENCE
        u = u - TIME_STEP * outflow
    return u


def pictures(parameters, heated):
    """Return the camera's pictures of each experiment, shape (B, 2, seen, seen)."""
    first = heat_after(parameters["log_field"], heated, TIME_STEPS)
    second = heat_after(parameters["log_field"], first, TIME_STEPS)
    return anp.stack([u[:, ::EVERY, ::EVERY] for u in (first, second)], axis=1)


def loss(parameters, heated, seen):
    """Return the mean squared misfit over the experiments plus a penalty on steep fields."""
    field = parameters["log_field"]
    steepness = anp.sum(anp.diff(field, axis=0) ** 2) + anp.sum(anp.diff(field, axis=1) ** 2)
    return anp.mean((pictures(parameters, heated) - seen) ** 2) + SMOOTHNESS * steepness


def true_log_field():
    """Return a plate with one part that conducts better and one that conducts worse."""
    s, t = np.meshgrid(*2 * [(np.arange(CELLS) + 0.5) / CELLS], indexing="ij")
    better = np.exp(-(((s - 0.3) / 0.16) ** 2 + ((t - 0.35) / 0.2) ** 2))
    worse = np.exp(-(((s - 0.68) / 0.2) ** 2 + ((t - 0.7) / 0.13) ** 2))
    return 0.9 * better - 1.6 * worse


def measure(experiments, seed=0):
    """Return initial heat and noisy pictures: the same data set on every rank."""
    generator = np.random.default_rng(seed)
    places = np.arange(CELLS) + 0.5
    spots = generator.uniform(0, CELLS, (experiments, 4, 2, 1))
    bumps = np.exp(-(((places - spots) / 2) ** 2))  # shape (experiments, 4 spots, 2, cells)
    heated = np.einsum("bks,bkt->bst", bumps[:, :, 0], bumps[:, :, 1])
    heated /= heated.max(axis=(1, 2), keepdims=True)
    seen = pictures({"log_field": true_log_field()}, heated)
    return heated, seen + NOISE * generator.standard_normal(seen.shape)


def relative_error(log_field):
    """Return the Euclidean distance of the field a from the true one, relative to its norm."""
    truth = np.exp(true_log_field())
    return float(np.linalg.norm(np.exp(log_field) - truth) / np.linalg.norm(truth))


def main(backend, arguments):
    heated, seen = measure(arguments.experiments)
    start = {"log_field": np.zeros((CELLS, CELLS))}  # a uniform plate
    model = ms.as_distributed(
        ms.adapters.AutogradModel(loss, start, predict=pictures), backend, arguments.strategy
    )
    rate = ms.optimizers.Cosine(0.05, arguments.steps, minimum=0.002)
    optimizer = ms.as_distributed(ms.optimizers.AdamW(rate), backend, arguments.strategy)
    batch = min(32, arguments.experiments)
    result = optimizer.optimize(
        ms.OptimizationInputData(
            model=model,
            x_train=heated,
            y_train=seen,
            batch_size=batch,
            epochs=1 + arguments.steps * batch // arguments.experiments,
            max_steps=arguments.steps,
            throughput_unit="experiments",
        )
    )
    start, found = start["log_field"], model.gather_full_parameters().reshape(CELLS, CELLS)
    backend.print(
        f"{arguments.experiments} experiments on {backend.world_size} rank(s), "
        f"{result.iterations} steps: the field is recovered to {relative_error(found):.1%}, "
        f"from {relative_error(start):.1%}"
    )
    if backend.rank == 0:
        plot(arguments.output / "field.png", found, seen[0], result.loss_history)
    return relative_error(found)


def plot(path, found, seen, losses):
    """Draw the true and the recovered field, one experiment's pictures, and the loss."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: pip install 'mpishard[plot]'")
        return
    figure = Figure(figsize=(10.5, 2.9), dpi=110, layout="constrained")
    axes = figure.subplots(1, 4, width_ratios=[1, 1, 1, 1.2])
    fields = [np.exp(true_log_field()), np.exp(found)]
    titles = ["true conductivity", f"recovered, {relative_error(found):.1%} off"]
    for each, field, title in zip(axes, fields, titles, strict=False):
        image = each.imshow(field, vmin=0.2, vmax=2.3, cmap="viridis")
        each.set_title(title, fontsize=10)
    figure.colorbar(image, ax=axes[:2], shrink=0.85)
    axes[2].imshow(seen[0], cmap="inferno")
    axes[2].set_title("a picture of the camera", fontsize=10)
    for each in axes[:3]:
        each.set(xticks=[], yticks=[])
    axes[3].semilogy(np.arange(1, len(losses) + 1), losses, color="#3b6fb6", linewidth=1)
    axes[3].set_title("loss", fontsize=10)
    axes[3].set_xlabel("step")
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
    parser.add_argument("--experiments", type=positive, default=128)
    parser.add_argument("--steps", type=positive, default=200)
    parser.add_argument("--output", type=Path, default=Path("runs/fit_autograd"))
    arguments = parser.parse_args()
    ms.launch(main, arguments, world_size=arguments.n)
