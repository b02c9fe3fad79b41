"""A verification: its settings, which all its processes read, and the samples of each step."""

from __future__ import annotations

import pickle
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mpishard.base import Array, to_host
from mpishard.cli.verify.problem import SIZES, Problem
from mpishard.communication import AXES
from mpishard.data import take
from mpishard.distributed import STRATEGY_OPTIONS

# Limit of the files with all ranks' gradients of their own samples: of a large model not all steps.
_GRADIENT_BYTES = 256 * 2**20
_MICRO_BATCHES = 4


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
    sizes : tuple of int
        Of the pipeline, tensor and data axes.
    world_size, steps, seed : int
        Ranks, updates, and the factory's argument.
    precision : {"bfloat16"}, optional
        Precision in which the ranks compute a float32 model; the reference is float64.
    backend : {"mpi", "memory"}
        Whether the ranks are processes or threads.
    tolerance : float, optional
        Largest relative error that is allowed; None: the error that roundings explain.
    batch_size : int
        Samples of the global batch. This and what follows is read from the factory's result.
    has_one_batch : bool
        Whether all steps have the same batch, as a line search needs.
    mesh : str
        Mesh and options in words; empty if all ranks are replicas without options.
    rule : str
        Name of the rule.
    """

    folder: Path
    target: str
    strategy: str
    sizes: tuple[int, int, int]
    world_size: int
    steps: int
    seed: int = 0
    precision: str | None = None
    backend: Literal["mpi", "memory"] = "memory"
    tolerance: float | None = None
    batch_size: int = 0
    has_one_batch: bool = False
    mesh: str = ""
    rule: str = ""

    @property
    def data_size(self) -> int:
        """Number of ranks, or of groups of ranks, that divide a batch among them."""
        return self.sizes[-1]

    def options(self, problem: Problem) -> dict[str, Any]:
        """Return the options of `as_distributed`: sizes, and those of ``problem`` that fit."""
        taken = STRATEGY_OPTIONS.get(self.strategy, ())
        found = {name: value for name, value in problem.options.items() if name in taken}
        if "micro_batch_count" in taken and problem.is_layered:
            found.setdefault("micro_batch_count", _MICRO_BATCHES)
        return found | {n: size for n, size in zip(SIZES, self.sizes, strict=True) if n in taken}

    def describe(self, problem: Problem) -> str:
        """Return mesh and options in words; nothing if all ranks are replicas without options."""
        given = {n: v for n, v in self.options(problem).items() if n not in SIZES}
        if not given and self.sizes[:2] == (1, 1):
            return ""
        words = [" x ".join(f"{size} {axis}" for axis, size in zip(AXES, self.sizes, strict=True))]
        for name, value in given.items():
            is_plain = isinstance(value, str | int)
            words.append(f"{name}={value if is_plain else type(value).__name__}")
        return f" ({', '.join(words)})"

    def write(self, value: object, name: str = "job") -> None:
        """Write the job, or a result of it, to the folder, for `read`."""
        # Pickle, because only processes of this command read the file.
        (self.folder / name).write_bytes(pickle.dumps(value))

    @staticmethod
    def read(folder: Path, name: str = "job") -> Any:
        """Return a value that was written to ``folder``; None if there is none."""
        path = folder / name  # temporary, and this user's
        return pickle.loads(path.read_bytes()) if path.exists() else None  # noqa: S301

    def batch(self, step: int, samples: int) -> npt.NDArray[np.int64]:
        """Return the samples of a step's global batch."""
        # A function of seed and step, so that every process draws the same samples. A line search
        # needs one function in all steps, so one batch.
        generator = np.random.default_rng([self.seed, 0 if self.has_one_batch else step])
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

    def read_share(self, problem: Problem, step: int, data_rank: int) -> tuple[Array, Array, int]:
        """Return a data rank's inputs and targets, and their start in the batch."""
        indices = self.batch(step, len(problem.x))
        mine = self.share(step, len(indices), data_rank)
        return take(problem.x, indices[mine]), take(problem.y, indices[mine]), mine.start

    def checksum(self, *arrays: Array) -> int:
        """Return a checksum, to compare the samples of a rank with those of training alone."""
        value = 0
        # The shape counts too: the same bytes in another shape are other samples.
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
