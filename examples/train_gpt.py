"""Train a byte-level GPT on the English text that ships with CPython.

Runs alone, on threads, or under MPI, with the same results:

    mpishard run -n 2 examples/train_gpt.py
    mpirun -n 2 python examples/train_gpt.py
    srun --mpi=pmi2 -n 2 python examples/train_gpt.py
    python examples/train_gpt.py --backend memory -n 4
    python examples/train_gpt.py --resume runs/NAME        # at any world size

If a run was interrupted, the same command resumes it; --new starts another. With other
parallelism, for example on four ranks, as two pipeline stages of two tensor slices each:

    mpishard run -n 4 examples/train_gpt.py --strategy hybrid \
        --pipeline-parallel-size 2 --tensor-parallel-size 2 --micro-batches 8
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data import topics
from typing import Any, NoReturn

import mpishard as ms
import numpy as np
from mpishard.observe import plot_loss_curve, read_metrics
from mpishard.pipeline import SCHEDULE_NAMES, ActivationCheckpointConfig

# Settings of a run, stored in settings.json so that --resume builds the same model.
DEFAULTS = {
    "layers": 4,
    "width": 128,
    "heads": 4,
    "context": 128,
    "initial_std": 0.06,
    "batch": 16,
    "steps": 1500,
    "learning_rate": 3e-3,
    "warm_up": 100,
    "weight_decay": 0.1,
    "clip": 1.0,
    "seed": 0,
    "dtype": "float32",
    "precision": None,
    "validate_every": 150,
    "checkpoint_every": 300,
    "sample_bytes": 400,
}
# Options of the parallelism and the strategies that accept them; stored, but free to change.
SPREAD = {
    "pipeline_parallel_size": ["hybrid"],
    "tensor_parallel_size": ["hybrid"],
    "data_parallel_size": ["hybrid"],
    "micro_batches": ["pipeline", "hybrid"],
    "schedule": ["pipeline", "hybrid"],
    "sequence_parallel": ["tensor", "hybrid"],
    "recompute": ["tensor", "pipeline", "hybrid"],
}
CHOICES = {"dtype": ["float32", "float64"], "precision": ["float32", "bfloat16"]}
AT_LEAST = {"warm_up": 0, "weight_decay": 0, "seed": 0}  # the others must be positive
PROMPT = "The "
LAST_FILE = "sample.txt"  # its presence marks a finished run


def number(name: str) -> Callable[[str], int | float]:
    """Return the parser of a setting: a number of its default's type and range."""
    kind = type(DEFAULTS.get(name, 1))

    def read(text: str) -> int | float:
        value = kind(text)
        if not (value > 0 or value == AT_LEAST.get(name)) or value == math.inf:
            raise argparse.ArgumentTypeError(
                f"needs a number {'>= 0' if name in AT_LEAST else '> 0'}, got {text}"
            )
        return value

    read.__name__ = kind.__name__  # argparse prints this name if the parser raises ValueError
    return read


def parse_arguments() -> argparse.Namespace:
    """Parse the command line; refuse options that do not fit together."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=["auto", "mpi", "memory"], default="auto")
    parser.add_argument(
        "-n",
        type=number("ranks"),
        default=None,
        metavar="N",
        help="number of thread-ranks without a launcher (default 1)",
    )
    parser.add_argument("--name", help="results go to runs/NAME (default: gpt- and the time)")
    parser.add_argument(
        "--new",
        action="store_true",
        help="start a new run even if one with these settings was interrupted",
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="runs/NAME",
        help="resume that run with its settings, on any ranks; --steps may grow",
    )
    add_spread(parser.add_argument_group("parallelism"))
    for name, value in DEFAULTS.items():
        kind = {"choices": CHOICES[name]} if name in CHOICES else {"type": number(name)}
        default = "that of --dtype" if value is None else value
        parser.add_argument(option(name), **kind, help=f"default {default}")
    arguments = parser.parse_args()
    if arguments.resume is not None:
        changed = [k for k in DEFAULTS if k != "steps" and getattr(arguments, k) is not None]
        if changed or arguments.name:
            parser.error(f"--resume takes the run's own settings; remove {changed or '--name'}")
        if arguments.new:
            parser.error("--resume goes on with a run, and --new begins one")
        if not (arguments.resume / "settings.json").is_file():
            parser.error(f"--resume: there is no run in {arguments.resume}")
    if arguments.precision == (arguments.dtype or DEFAULTS["dtype"]):
        arguments.precision = None
    arguments.goes_on = arguments.resume is None and not arguments.new
    if arguments.goes_on:
        arguments.resume = interrupted_run(arguments)
    spread = spread_of(arguments)
    for name in spread.keys() & SPREAD.keys():
        if spread["strategy"] not in SPREAD[name]:
            parser.error(
                f"{option(name)} is for --strategy {' or '.join(SPREAD[name])}, and this is "
                f"{spread['strategy']}"
            )
    settings = settings_of(arguments)
    if settings["width"] % settings["heads"]:
        parser.error(f"--heads {settings['heads']} must divide --width {settings['width']}")
    longest = len(load_text()[1]) - 2
    if settings["context"] > longest:
        parser.error(f"--context {settings['context']}: the text to validate holds {longest}")
    return arguments


def option(name: str) -> str:
    """Return the command-line option of a setting."""
    return f"--{name.replace('_', '-')}"


def add_spread(group: Any) -> None:
    """Add the options of the parallelism."""
    kinds = [strategy.value for strategy in ms.DistributedStrategy]
    group.add_argument("--strategy", choices=kinds, help="default fsdp")
    for name, what in (
        ("pipeline_parallel_size", "stages of consecutive layers; default 1"),
        ("tensor_parallel_size", "ranks that share each layer; default 1"),
        ("data_parallel_size", "replicas, each with its own samples; default: remaining ranks"),
        ("micro_batches", "parts of a batch that pass through the stages; default 4"),
    ):
        group.add_argument(option(name), type=number(name), metavar="N", help=what)
    group.add_argument(
        "--schedule", choices=SCHEDULE_NAMES, help="order of the stages' operations; default 1f1b"
    )
    group.add_argument(
        "--sequence-parallel",
        action="store_true",
        default=None,
        help="also divide norms and dropout over the tensor axis",
    )
    group.add_argument(
        "--recompute",
        choices=["full", "selective"],
        help="recompute activations in backward instead of keeping them: all, or the cheap ones",
    )


def settings_of(arguments: argparse.Namespace) -> dict:
    """Return the defaults, updated by the resumed run's settings and by the command line."""
    given = {k: getattr(arguments, k) for k in DEFAULTS if getattr(arguments, k) is not None}
    return DEFAULTS | stored(arguments)["settings"] | given


def spread_of(arguments: argparse.Namespace) -> dict:
    """Return the resumed run's parallelism (unless another strategy is given) and given options."""
    names = ("strategy", *SPREAD)
    given = {k: getattr(arguments, k) for k in names if getattr(arguments, k) is not None}
    before = {} if "strategy" in given else stored(arguments)["spread"]
    return {"strategy": "fsdp"} | before | given


def stored(arguments: argparse.Namespace) -> dict:
    """Return the stored settings of the resumed run; empty for a new run."""
    if arguments.resume is None:
        return {"settings": {}, "spread": {}}
    return json.loads((arguments.resume / "settings.json").read_text())


def interrupted_run(arguments: argparse.Namespace) -> Path | None:
    """Return the last unfinished run with these settings."""
    wanted = settings_of(arguments)
    runs = Path("runs")
    begun = sorted(runs.glob("gpt-*")) if arguments.name is None else [runs / arguments.name]
    for directory in reversed(begun):
        kept = directory / "settings.json"
        if (directory / LAST_FILE).exists() or not kept.is_file():
            continue
        if DEFAULTS | json.loads(kept.read_text())["settings"] == wanted:
            return directory
    return None


def load_text() -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes for training, and the last tenth for validation."""
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    tokens = np.frombuffer(text.encode(), np.uint8)
    cut = len(tokens) - len(tokens) // 10
    return tokens[:cut], tokens[cut:]


def bigram_loss(train: np.ndarray, validation: np.ndarray) -> float:
    """Return the nats per byte of an add-one bigram model, as a baseline."""
    counts = np.ones((256, 256))
    np.add.at(counts, (train[:-1], train[1:]), 1)
    log_probabilities = np.log(counts / counts.sum(axis=1, keepdims=True))
    return float(-log_probabilities[validation[:-1], validation[1:]].mean())


def run_directory(backend: ms.CommunicationBackend, arguments: argparse.Namespace) -> Path:
    """Return the directory of this run, the same on every rank."""
    if arguments.resume is not None:
        return arguments.resume
    name = arguments.name
    if name is None:
        now = int(backend.broadcast(np.array([int(time.time())]))[0])  # rank 0's clock
        name = time.strftime("gpt-%Y%m%d-%H%M%S", time.localtime(now))
    directory = Path("runs") / name
    taken = backend.all_reduce(np.array([int(directory.exists())]), ms.ReductionOperation.MAX)
    if taken[0]:
        refuse(backend, f"{directory} is there already; --resume {directory} goes on with it")
    return directory


def refuse(backend: ms.CommunicationBackend, message: str) -> NoReturn:
    """End every rank; rank 0 prints the reason."""
    if backend.rank == 0:
        print(f"train_gpt.py: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def options_of(backend: ms.CommunicationBackend, spread: dict, settings: dict) -> dict[str, Any]:
    """Return the options for `as_distributed`; end all ranks if they do not fit the world."""
    strategy, ranks = spread["strategy"], backend.world_size
    sizes = {name: spread[name] for name in list(SPREAD)[:3] if name in spread}
    needed = math.prod(sizes.values())
    if ranks % needed or ("data_parallel_size" in sizes and ranks != needed):
        product = " x ".join(f"{option(name)} {size}" for name, size in sizes.items())
        multiple = "" if "data_parallel_size" in sizes else " or a multiple"
        refuse(
            backend,
            f"{product} takes {needed} ranks{multiple}, and there are {ranks}: "
            f"`mpishard run -n {needed}` starts as many, -n {needed} as "
            "threads; or give other sizes",
        )
    slices = ranks if strategy == "tensor" else sizes.get("tensor_parallel_size", 1)
    if "sequence_parallel" in spread and settings["context"] % slices:
        refuse(
            backend,
            f"--sequence-parallel cuts --context {settings['context']} into {slices} equal "
            "slices, which must divide it",
        )
    options: dict[str, Any] = dict(sizes)
    if strategy == "pipeline" or sizes.get("pipeline_parallel_size", 1) > 1:
        options |= {"micro_batch_count": 4, "schedule": "1f1b"}
    if "micro_batches" in spread:
        options["micro_batch_count"] = spread["micro_batches"]
    options |= {k: spread[k] for k in ("schedule", "sequence_parallel") if k in spread}
    if "recompute" in spread:
        options["checkpoint_config"] = ActivationCheckpointConfig(
            enabled=True, checkpoint_every_n_layers="sqrt", recompute_strategy=spread["recompute"]
        )
    return options


def report_memory(model: ms.ShardedModelBase) -> None:
    """Print the memory of each rank. Collective."""
    kinds = ("parameters", "gradients", "optimizer_state")
    held = model.memory.as_dict()
    rows = model.backend.all_gather(np.array([[held.get(kind, 0) for kind in kinds]]))
    for rank, row in enumerate(rows):
        model.backend.print(
            f"rank {rank}{place_of(model, rank)} holds: "
            + ", ".join(
                f"{kind.replace('_', ' ')} {n / 1e6:.2f} MB"
                for kind, n in zip(kinds, row, strict=True)
            )
        )


def place_of(model: ms.ShardedModelBase, rank: int) -> str:
    """Return the position of a rank on the mesh, if there is one."""
    if not hasattr(model, "mesh"):
        return ""
    stage, part, replica = model.mesh.coordinates_of(rank)
    return f" (pipeline {stage}, tensor {part}, data {replica})"


def gpt(settings: dict) -> ms.nn.GPT:
    """Return the model, without parameters yet."""
    return ms.nn.GPT(
        vocabulary_size=256,
        context_length=settings["context"],
        width=settings["width"],
        heads=settings["heads"],
        layers=settings["layers"],
        initial_std=settings["initial_std"],
        seed=settings["seed"],
        dtype=settings["dtype"],
    )


def update_rule(settings: dict) -> ms.optimizers.AdamW:
    """Return AdamW with the schedule."""
    rate = settings["learning_rate"]
    decay_steps = max(1, settings["steps"] - settings["warm_up"])
    return ms.optimizers.AdamW(
        ms.optimizers.WarmUp(
            settings["warm_up"], ms.optimizers.Cosine(rate, decay_steps, minimum=rate / 20)
        ),
        beta2=0.99,
        weight_decay=settings["weight_decay"],
        clip_global_norm=settings["clip"],
        parameter_options={"*norm*": {"weight_decay": 0}, "*.bias": {"weight_decay": 0}},
    )


def build(
    backend: ms.CommunicationBackend, spread: dict, settings: dict
) -> tuple[ms.ShardedModelBase, ms.ShardedOptimizerBase]:
    """Return the wrapped model and optimizer. Collective."""
    options = options_of(backend, spread, settings)
    options["precision"] = settings["precision"]
    strategy = spread["strategy"]
    return (
        ms.as_distributed(gpt(settings), backend, strategy, **options),
        ms.as_distributed(update_rule(settings), backend, strategy, **options),
    )


def training(settings: dict) -> dict[str, Any]:
    """Return the data to train on and to validate with, and the order to take them in."""
    train, validation = load_text()
    context, windows = settings["context"], ms.data.TokenWindows
    inputs = windows(train[:-1], context)
    return {
        "x_train": inputs,
        "y_train": windows(train[1:], context),
        "x_validation": windows(validation[:-1], context, stride=context),
        "y_validation": windows(validation[1:], context, stride=context),
        "batch_size": settings["batch"],
        "epochs": 1 + settings["steps"] * settings["batch"] // len(inputs),
        "max_steps": settings["steps"],
        "seed": settings["seed"],
        "validate_every": settings["validate_every"],
    }


def main(backend: ms.CommunicationBackend, arguments: argparse.Namespace) -> None:
    """Run the training on each rank."""
    settings, spread = settings_of(arguments), spread_of(arguments)
    directory = run_directory(backend, arguments)
    if arguments.goes_on and arguments.resume is not None:
        backend.print(f"{directory} was interrupted, and goes on; --new begins a new run")
    model, optimizer = build(backend, spread, settings)
    train, validation = load_text()
    baseline = bigram_loss(train, validation)
    backend.print(
        f"{len(train):,} bytes to train on, {len(validation):,} to validate; "
        f"an add-one bigram model reaches {baseline:.3f} nats per byte"
    )
    if backend.rank == 0:
        directory.mkdir(parents=True, exist_ok=True)
        kept = {"settings": settings, "spread": spread}
        (directory / "settings.json").write_text(json.dumps(kept, indent=2) + "\n")
    result = optimizer.optimize(
        ms.OptimizationInputData(
            model=model,
            **training(settings),
            checkpoint=directory / "checkpoint",
            checkpoint_every=settings["checkpoint_every"],
            resume=None if arguments.goes_on or arguments.resume is None else True,
            metrics=directory / "metrics.jsonl",
            throughput_unit="tokens",
        )
    )
    if backend.rank == 0:
        plot(directory, baseline)
    sample(model, directory, settings)
    summarize(model, spread["strategy"], result, baseline)
    backend.print(directory)


def summarize(
    model: ms.ShardedModelBase, strategy: str, result: ms.OptimizationResult, baseline: float
) -> None:
    """Print the size of the run and its results. Collective."""
    say = model.backend.print
    mesh = f", {model.mesh.describe()}" if hasattr(model, "mesh") else ""
    say(f"{model.parameter_count:,} parameters, {strategy} on {model.world_size} rank(s){mesh}")
    report_memory(model)
    loss = result.validation_history[-1][1]
    say(
        f"{result.iterations} steps, of which this run made {len(result.loss_history)} in "
        f"{result.seconds:.1f} s, {result.weight / max(result.seconds, 1e-9):,.0f} tokens/s\n"
        f"validation loss {loss:.3f} nats per byte (bigram model: {baseline:.3f})"
    )


def sample(model: ms.ShardedModelBase, directory: Path, settings: dict) -> None:
    """Generate text on the ranks that store the model's layers. Collective."""
    prompt = np.frombuffer(PROMPT.encode(), np.uint8).astype(np.int64)
    # The context window slides by an eighth at a time and is then computed again.
    slide = max(1, model.wrapped_model.context_length // 8)
    generated = model.generate(
        prompt, settings["sample_bytes"], temperature=0.8, seed=settings["seed"], slide=slide
    )
    text = bytes(int(token) for token in generated).decode(errors="replace")
    if model.backend.rank == 0:
        (directory / LAST_FILE).write_text(text + "\n")
    model.backend.print("sample:", " ".join(text.split())[:200])


def plot(directory: Path, baseline: float) -> None:
    """Draw the loss curve on rank 0."""
    rows = read_metrics(directory / "metrics.jsonl")
    try:
        plot_loss_curve(
            directory / "loss.png",
            [(row["step"], row["loss"]) for row in rows if "loss" in row],
            [(row["step"], row["validation_loss"]) for row in rows if "validation_loss" in row],
            baseline=("add-one bigram model", baseline),
            title="GPT on the text of CPython's help topics",
            unit="nats per byte",
        )
    except ImportError as error:
        print(f"no loss curve: {error}", flush=True)


if __name__ == "__main__":
    arguments = parse_arguments()
    ms.launch(main, arguments, backend=arguments.backend, world_size=arguments.n)
