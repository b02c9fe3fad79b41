"""A verification: its settings, which all its processes read, and the user's model and data."""

from __future__ import annotations

import importlib
import inspect
import pickle
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np

from mpishard.arrays import Array, to_host
from mpishard.cli.wording import counted
from mpishard.communication.mesh import AXES, mesh_sizes
from mpishard.contracts import ILossFunction, IShardedModel
from mpishard.data import check_dataset, take
from mpishard.distributed import STRATEGY_OPTIONS, DistributedStrategy
from mpishard.optimizers import (
    AsyncSGDOptimizer,
    ElasticOptimizer,
    GradientCompressionOptimizer,
    LocalSGDOptimizer,
)
from mpishard.pipeline import SCHEDULE_NAMES, ActivationCheckpointConfig, RecomputeStrategy
from mpishard.sharding import ParameterEntry

# Limit of the files with all ranks' gradients of their own samples: of a large model not all steps.
_GRADIENT_BYTES = 256 * 2**20
_MICRO_BATCHES = 4
_SEGMENT = 2  # layers of a segment of recomputation: even a small model has several segments

MESH_FLAGS = {
    "--pipeline-parallel-size": "pipeline_parallel_size",
    "--tensor-parallel-size": "tensor_parallel_size",
    "--data-parallel-size": "data_parallel_size",
    "--micro-batches": "micro_batch_count",
    "--schedule": "schedule",
    "--sequence-parallel": "sequence_parallel",
    "--recompute": "checkpoint_config",
    "--data-parallel-strategy": "data_parallel_strategy",
}
"""Flags of the command, and the option of `as_distributed` that each of them sets."""

STRATEGIES = tuple(s.value for s in DistributedStrategy if s != DistributedStrategy.NONE)
"""Choices of ``--strategy``."""

DATA_STRATEGIES = tuple(name for name in STRATEGIES if name not in STRATEGY_OPTIONS)
"""Choices of ``--data-parallel-strategy``."""

_OF_REPLICAS = (*DATA_STRATEGIES, "hybrid")

# With a period of one step, and with all elements of a gradient, nothing differs from the strategy.
WRAPPERS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "local-sgd": (partial(LocalSGDOptimizer, synchronization_period=1), _OF_REPLICAS),
    "async": (AsyncSGDOptimizer, _OF_REPLICAS),
    "elastic": (ElasticOptimizer, DATA_STRATEGIES),
    "compression": (
        partial(GradientCompressionOptimizer, compression_ratio=1.0, method="top-k"),
        _OF_REPLICAS,
    ),
}
"""Choices of ``--wrapper``: what makes the optimizer, and the strategies that it goes with."""


@dataclass(frozen=True, slots=True)
class MeshChoice:
    """The mesh of the ranks, and the schedules that are compared.

    Parameters
    ----------
    sizes : tuple of int
        Of the pipeline, tensor and data axes.
    options : mapping
        Of `as_distributed`, except the schedule.
    schedules : tuple of str
        One comparison each; the one name "" if there is none to choose.
    """

    sizes: tuple[int, int, int]
    options: Mapping[str, Any]
    schedules: tuple[str, ...]

    @classmethod
    def of(cls, strategy: str, ranks: int, flags: Mapping[str, Any]) -> MeshChoice:
        """Return the mesh that the flags ask for. A missing flag, None and False ask for nothing.

        Raises
        ------
        ValueError
            For a flag that the strategy does not take, and sizes that do not make up the ranks.
        """
        given = {flag: value for flag, value in flags.items() if value not in (None, False)}
        for flag in given:
            takers = [s for s, names in STRATEGY_OPTIONS.items() if MESH_FLAGS[flag] in names]
            if strategy not in takers:
                raise ValueError(f"{flag} is for --strategy {' and '.join(takers)}; got {strategy}")
        schedules: tuple[str, ...] = ("",)
        if "schedule" in STRATEGY_OPTIONS.get(strategy, ()):
            name = given.pop("--schedule", "gpipe")
            schedules = SCHEDULE_NAMES if name == "all" else (name,)
            given.setdefault("--micro-batches", _MICRO_BATCHES)
        options = {MESH_FLAGS[flag]: value for flag, value in given.items()}
        if "--recompute" in given:
            options["checkpoint_config"] = ActivationCheckpointConfig(
                enabled=True,
                checkpoint_every_n_layers=_SEGMENT,
                recompute_strategy=RecomputeStrategy(given["--recompute"]),
            )
        pipeline = ranks if strategy == "pipeline" else options.get("pipeline_parallel_size", 1)
        tensor = ranks if strategy == "tensor" else options.get("tensor_parallel_size", 1)
        try:
            mesh = mesh_sizes(ranks, pipeline, tensor, options.get("data_parallel_size", -1))
        except ValueError as error:
            raise ValueError(f"-n {ranks}: {error}") from None
        return cls(mesh, options, schedules)

    def describe(self, schedule: str) -> str:
        """Return mesh and schedule, in words; nothing if all ranks are replicas."""
        if not self.options and self.sizes[:2] == (1, 1):
            return ""
        words = [" x ".join(f"{size} {axis}" for axis, size in zip(AXES, self.sizes, strict=True))]
        if schedule:
            words += [schedule, counted(self.options["micro_batch_count"], "micro-batch")]
        for option, text in (
            ("data_parallel_strategy", "{} over data"),
            ("sequence_parallel", "sequence parallel"),
            ("checkpoint_config", "{.recompute_strategy.value} recomputation"),
        ):
            if option in self.options:
                words.append(text.format(self.options[option]))
        return f" ({', '.join(words)})"


@dataclass(frozen=True, slots=True)
class VerifyJob:
    """Settings of a training that runs alone and on ranks. Its files are in ``folder``.

    Parameters
    ----------
    folder : Path
        Folder of the files by which the processes exchange settings and results.
    target : str
        See `load_factory`.
    strategy : str
        The strategy of the ranks.
    mesh : MeshChoice
        The mesh of the ranks.
    optimizer : str
        One of `RULES`.
    world_size, steps, batch_size, seed : int
        Ranks, updates, samples of the global batch, and the factory's argument.
    learning_rate : float
        Of the optimizer.
    dtype : str, optional
        The dtype that the model must have; None allows all.
    precision : {"bfloat16"}, optional
        Precision in which the ranks compute a float32 model; the reference is float64.
    delay : int
        Steps by which each gradient is applied later, with the wrapper ``"async"``.
    wrapper : str, optional
        Optimizer in the strategy's place, one of `WRAPPERS`, with settings under which it equals
        training alone.
    backend : {"mpi", "memory"}
        Whether the ranks are processes or threads.
    tolerance : float, optional
        Largest relative error that is allowed; None: the error that roundings explain.
    """

    folder: Path
    target: str
    strategy: str
    mesh: MeshChoice
    optimizer: str
    world_size: int
    steps: int
    batch_size: int
    seed: int
    learning_rate: float
    dtype: str | None = None
    precision: str | None = None
    delay: int = 0
    wrapper: str | None = None
    backend: Literal["mpi", "memory"] = "memory"
    tolerance: float | None = None

    @property
    def dtype_alone(self) -> str | None:
        """Dtype of the model that trains alone."""
        return self.dtype if self.precision is None else "float64"

    @property
    def data_size(self) -> int:
        """Number of ranks, or groups of ranks, among which a batch is dealt."""
        return self.mesh.sizes[-1]

    @property
    def replica_count(self) -> int:
        """Number of replicas between which a wrapper sends something; 0 without such a wrapper.

        With other strategies than ``"ddp"`` there are as few as the data axis allows.
        """
        if self.wrapper in (None, "elastic"):
            return 0
        if self.strategy == "ddp":
            return self.world_size
        return next((n for n in range(2, self.data_size + 1) if self.data_size % n == 0), 1)

    @property
    def replica_size(self) -> int | None:
        """Ranks of each replica; None if each rank is one, or there are none."""
        is_sharded = self.replica_count and self.strategy != "ddp"
        return self.world_size // self.replica_count if is_sharded else None

    def write(self, value: object, name: str = "job") -> None:
        """Write the job, or a result of it, to the folder, for `read`."""
        (self.folder / name).write_bytes(pickle.dumps(value))

    @staticmethod
    def read(folder: Path, name: str = "job") -> Any:
        """Return a value that was written to ``folder``; None if there is none."""
        path = folder / name  # temporary, and this user's
        return pickle.loads(path.read_bytes()) if path.exists() else None  # noqa: S301

    def batch(self, step: int, samples: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the samples of a step's global batch."""
        # A function of seed and step, so that every process draws the same samples. A line search
        # needs one function in all steps, so one batch.
        generator = np.random.default_rng([self.seed, step if self.optimizer != "lbfgs" else 0])
        return generator.choice(samples, min(samples, self.batch_size), replace=False)

    def share(self, step: int, size: int, data_rank: int) -> slice:
        """Return a part of a batch: no two parts are alike, and every third step one is empty."""
        # Equal shares would hide a mean of means. Only an empty one shows whether a rank without
        # samples leaves out a collective.
        weights = 1.0 + (np.arange(self.data_size) + step) % self.data_size
        if step % 3 == 2 and self.data_size > 1:
            weights[step % self.data_size] = 0
        ends = np.round(np.cumsum([0, *weights]) / weights.sum() * size).astype(int)
        return slice(int(ends[data_rank]), int(ends[data_rank + 1]))

    def read_share(self, problem: Any, step: int, data_rank: int) -> tuple[Array, Array, int]:
        """Return a data rank's inputs and targets, and their start in the batch."""
        indices = self.batch(step, len(problem.x))
        mine = self.share(step, len(indices), data_rank)
        return take(problem.x, indices[mine]), take(problem.y, indices[mine]), mine.start

    def checksum(self, *arrays: Array) -> int:
        """Return a checksum, to compare the samples of a rank with those of training alone."""
        value = 0
        for array in arrays:
            host = np.ascontiguousarray(to_host(array))
            if self.precision is not None and host.dtype.kind == "f":
                host = host.astype("float32")  # alone they are float64
            value = zlib.crc32(f"{host.dtype}{host.shape}".encode(), value)
            value = zlib.crc32(host.tobytes(), value)
        return value

    def gradient_steps(self, parameters: Array) -> int:
        """Return the number of steps whose gradients of single parts fit into the files."""
        one = self.data_size * int(parameters.nbytes)
        return max(1, min(self.steps, _GRADIENT_BYTES // one))


_MODULE_NAME = "mpishard_verified"
_RETURNS = "factory(seed) is a function that returns (model, x, y) or (model, x, y, loss)"

Factory = Callable[..., Any]


class TargetError(ValueError):
    """Raised if the target is no factory of a model and data."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A plain model, the same data on every rank, and a loss if the model has none of its own."""

    model: Any
    x: Any
    y: Any
    loss: ILossFunction | None = None

    def entries(self, length: int) -> tuple[ParameterEntry, ...]:
        """Return names, shapes and places of the parameters, if the model knows them."""
        table = getattr(self.model, "parameter_table", None)
        named = getattr(self.model, "parameter_entries", getattr(table, "entries", None))
        return tuple(named) if named else (ParameterEntry("parameters", (length,), 0),)


def load_factory(target: str) -> Factory:
    """Return the factory that ``package.module:factory`` or ``path/file.py:factory`` names.

    Raises
    ------
    TargetError
        If there is none.
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name.isidentifier():
        places = "package.module:factory or file.py:factory"
        raise TargetError(f"TARGET must be {places}, got {target!r}\n{_RETURNS}")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    factory = getattr(module, name, None)
    if factory is None:
        there = [n for n, v in vars(module).items() if inspect.isfunction(v) and n[0] != "_"]
        text = f"its functions are {', '.join(there)}" if there else "it has no function at all"
        raise TargetError(f"{place} has no {name!r}\n{text}")
    if not callable(factory):
        kind = type(factory).__name__
        raise TargetError(f"{name!r} of {place} is of type {kind}, not a function\n{_RETURNS}")
    return factory  # type: ignore[no-any-return]


def _load_module(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))  # as python -m has it
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # something that the module itself imports
        text = f"{Path.cwd()} and on Python's path; a file is given as file.py:NAME"
        raise TargetError(f"there is no module {error.name!r}\nlooked for it in {text}") from None


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TargetError(f"there is no file {path}\nlooked for it from {Path.cwd()}")
    sys.path.insert(0, str(path.resolve().parent))  # as python FILE has it
    module = ModuleType(_MODULE_NAME)
    module.__file__ = str(path)
    # As an import does: dataclasses and pickle look up the module of a class by its name.
    sys.modules[_MODULE_NAME] = module
    SourceFileLoader(_MODULE_NAME, str(path)).exec_module(module)
    return module


def build_problem(factory: Factory, seed: int, dtype: str | None) -> Problem:
    """Return the result of ``factory(seed)``, or of ``factory(seed, dtype=dtype)`` if it takes one.

    Raises
    ------
    TargetError
        If that is no model with data, or a model of another dtype.
    """
    signature, factory_name = inspect.signature(factory), getattr(factory, "__name__", "factory")
    named = {"dtype": dtype} if dtype and "dtype" in signature.parameters else {}
    try:
        signature.bind(seed, **named)
    except TypeError:
        text = f"{factory_name}({', '.join(signature.parameters)}) must take a seed"
        raise TargetError(f"{text}\n{_RETURNS}") from None
    given = factory(seed, **named)
    for fault in _faults(given, dtype):
        raise TargetError(fault)
    return Problem(*given)


def _faults(given: Any, dtype: str | None) -> Iterator[str]:
    """Yield the faults of a factory's result. After the first one the rest may fail, too."""
    if not isinstance(given, tuple) or len(given) not in (3, 4):
        kind = f"a tuple of {len(given)}" if isinstance(given, tuple) else type(given).__name__
        yield f"factory(seed) must return (model, x, y) or (model, x, y, loss)\nit returned {kind}"
    model, x, y, *losses = given
    name = type(model).__name__
    if isinstance(model, IShardedModel):
        text = "return the plain model: verify wraps it"
        yield f"the model of factory(seed) is sharded already, as {name}\n{text}"
    missing = [m for m in ("get_parameters", "set_parameters") if not hasattr(model, m)]
    if not any(hasattr(model, m) for m in ("compute_gradients", "compute_loss_and_gradients")):
        missing.append("compute_gradients")
    if missing:
        text = "docs/bring-your-own-model.md describes the members of a model"
        yield f"the model of factory(seed), a {name}, has no {' and no '.join(missing)}\n{text}"
    vector = model.get_parameters()
    found = getattr(vector, "dtype", type(vector).__name__)
    if not isinstance(vector, np.ndarray) or vector.ndim != 1 or vector.dtype.kind != "f":
        text = f"it returned {found} of shape {getattr(vector, 'shape', '?')}"
        yield f"get_parameters() of {name} must return a 1-D NumPy vector of floats\n{text}"
    try:
        sizes = check_dataset(x, "x"), check_dataset(y, "y")
    except (TypeError, ValueError) as error:
        raise TargetError(f"the data of factory(seed) cannot be trained on\n{error}") from None
    if sizes[0] != sizes[1]:
        text = f"x has {sizes[0]} and y has {sizes[1]}"
        yield f"x and y of factory(seed) must have the same number of samples\n{text}"
    if losses and not isinstance(losses[0], ILossFunction | None):
        text = f"it is a {type(losses[0]).__name__}; a function belongs in the model"
        yield f"the loss of factory(seed) must be a loss of mpishard.nn\n{text}"
    if dtype is not None and found != dtype:
        text = "write def factory(seed, dtype): and build model and data in that dtype"
        yield f"--dtype {dtype}: the model of factory(seed) has {found} parameters\n{text}"
