"""Read handwritten digits: a multi-layer perceptron and a small convolutional net.

The data are the 1797 images of 8 x 8 pixels in scikit-learn; a fifth of them is held out.

    python examples/train_digits.py
    python examples/train_digits.py -n 3                 # three ranks, as threads
    mpirun -n 2 python examples/train_digits.py          # two ranks, as processes
"""

import argparse
from pathlib import Path

import mpishard as ms
import numpy as np
from mpishard import nn
from sklearn.datasets import load_digits

BATCH = 64


def data():
    """Return images (samples, 8, 8) in [0, 1], digits, and the mask of held-out samples."""
    images, digits = load_digits(return_X_y=True)
    held_out = np.random.default_rng(0).permutation(len(digits)) < len(digits) // 5
    return (images / 16).reshape(-1, 8, 8), digits, held_out


def perceptron():
    """Build a perceptron with two hidden layers on the flattened pixels."""
    chain = nn.Sequential(
        nn.Linear(64, 256),
        nn.ReLU(),
        nn.Dropout(0.4),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Dropout(0.4),
        nn.Linear(256, 10),
    )
    return nn.Model(chain, nn.CrossEntropy(), input_shape=(64,), seed=0)


def convolutional():
    """Build a net of two convolutions with pooling between them."""
    chain = nn.Sequential(
        nn.Conv2D(1, 16, kernel=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2D(2),
        nn.Conv2D(16, 32, kernel=3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(32 * 4 * 4, 10),
    )
    return nn.Model(chain, nn.CrossEntropy(), input_shape=(1, 8, 8), seed=0)


NETS = {"perceptron": perceptron, "convolutional": convolutional}


def train(backend, arguments, build):
    """Train one net; return its history and its digits for held-out images. Collective."""
    images, digits, held_out = data()
    plain = build()
    x = images.reshape(-1, *plain.get_layer_info(0).input_shape)
    model = ms.as_distributed(plain, backend, arguments.strategy)
    steps = arguments.epochs * -(-int((~held_out).sum()) // BATCH)
    optimizer = ms.as_distributed(
        ms.optimizers.AdamW(ms.optimizers.Cosine(3e-3, steps), weight_decay=0.05),
        backend,
        arguments.strategy,
    )
    result = optimizer.optimize(
        ms.OptimizationInputData(
            model=model,
            x_train=x[~held_out],
            y_train=digits[~held_out],
            x_validation=x[held_out],
            y_validation=digits[held_out],
            batch_size=BATCH,
            epochs=arguments.epochs,
            progress=False,
        )
    )
    return result, model.predict(x[held_out]).argmax(axis=1)


def main(backend, arguments):
    _, digits, held_out = data()
    read, results, right = {}, {}, {}
    for name, build in NETS.items():
        results[name], read[name] = train(backend, arguments, build)
        right[name] = np.mean(read[name] == digits[held_out])
        backend.print(
            f"{name}: {results[name].model.parameter_count:,} parameters on {backend.world_size} "
            f"rank(s), {right[name]:.1%} of {held_out.sum()} held-out digits right"
        )
    if backend.rank == 0:
        plot(arguments.output / "digits.png", results, read)
    return right


def plot(path, results, read):
    """Draw the losses and the confusion matrix of each net."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: pip install 'mpishard[plot]'")
        return
    _, digits, held_out = data()
    digits = digits[held_out]
    figure = Figure(figsize=(10.5, 3.5), dpi=110, layout="constrained")
    left, *others = figure.subplots(1, 3, width_ratios=[1.25, 1, 1])
    for (name, result), colour in zip(results.items(), ("#3b6fb6", "#d1495b"), strict=True):
        epochs = np.arange(1, len(result.fitness_history) + 1)
        left.semilogy(epochs, result.fitness_history, color=colour, label=f"{name}, training")
        left.semilogy(
            epochs,
            [loss for _, loss in result.validation_history][-len(epochs) :],
            "--",
            color=colour,
            label="held out",
        )
    left.set(xlabel="epoch", ylabel="loss [nats per image]")
    left.legend(frameon=False, fontsize=8)
    for axes, (name, found) in zip(others, read.items(), strict=True):
        table = np.zeros((10, 10), int)
        np.add.at(table, (digits, found), 1)
        axes.imshow(np.sqrt(table), cmap="Blues")
        for true, taken in np.argwhere(table):
            axes.text(
                taken,
                true,
                table[true, taken],
                ha="center",
                va="center",
                fontsize=7,
                color="white" if true == taken else "#d1495b",
            )
        right = np.mean(found == digits)
        axes.set(
            title=f"{name}: {right:.1%}",
            xlabel="read",
            ylabel="digit",
            xticks=range(10),
            yticks=range(10),
        )
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
    parser.add_argument("--epochs", type=positive, default=25)
    parser.add_argument("--output", type=Path, default=Path("runs/digits"))
    arguments = parser.parse_args()
    ms.launch(main, arguments, world_size=arguments.n)
