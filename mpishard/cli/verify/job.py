"""What ``mpishard verify`` does, said once for all processes that take part."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mpishard.arrays import Array, to_host
from mpishard.cli.verify.mesh import MeshChoice
from mpishard.data import take

__all__ = ["VerifyJob", "checksum", "relative_error"]

_SETTINGS = "job.json"
_GRADIENT_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class VerifyJob:
    """Which training is done twice, and what is exchanged in ``folder``.

    Parameters
    ----------
    folder : Path
        Where the processes leave what the others read.
    target : str
        See `load_factory`.
    strategy, optimizer : str
        How the ranks train.
    world_size, steps, batch_size, seed : int
        Ranks, updates, samples of the global batch, and the factory's argument.
    learning_rate : float
        Of the optimizer.
    dtype : str, optional
        What the model's must be.
    mesh : MeshChoice, optional
        Where the ranks stand; by default each has samples of its own.
    """

    folder: Path
    target: str
    strategy: str
    optimizer: str
    world_size: int
    steps: int
    batch_size: int
    seed: int
    learning_rate: float
    dtype: str | None = None
    mesh: MeshChoice = field(default=MeshChoice((1, 1, -1)))

    @property
    def data_size(self) -> int:
        """Among how many ranks, or groups of ranks, a batch is dealt."""
        pipeline, tensor, _ = self.mesh.sizes
        return self.world_size // (pipeline * tensor)

    def write(self) -> None:
        """Leave the settings for `read`."""
        settings = asdict(self) | {"folder": None}
        (self.folder / _SETTINGS).write_text(json.dumps(settings), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> VerifyJob:
        """The job that was written to ``folder``."""
        settings = json.loads((folder / _SETTINGS).read_text(encoding="utf-8"))
        mesh = settings["mesh"]
        choice = MeshChoice(tuple(mesh["sizes"]), mesh["options"], tuple(mesh["schedules"]))
        return cls(**settings | {"folder": folder, "mesh": choice})

    def batch(self, step: int, samples: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The samples of a step's global batch."""
        generator = np.random.default_rng([self.seed, step])
        return generator.choice(samples, min(samples, self.batch_size), replace=False)

    def share(self, step: int, size: int, data_rank: int) -> slice:
        """A part of a batch of ``size``: no two alike, and every third step one is empty."""
        weights = 1.0 + (np.arange(self.data_size) + step) % self.data_size
        if step % 3 == 2 and self.data_size > 1:
            weights[step % self.data_size] = 0
        ends = np.round(np.cumsum([0, *weights]) / weights.sum() * size).astype(int)
        return slice(int(ends[data_rank]), int(ends[data_rank + 1]))

    def read_share(self, problem: Any, step: int, data_rank: int) -> tuple[Array, Array, int]:
        """A data rank's inputs and targets, and where in the batch they begin."""
        indices = self.batch(step, problem.samples)
        mine = self.share(step, len(indices), data_rank)
        return take(problem.x, indices[mine]), take(problem.y, indices[mine]), mine.start

    def gradient_steps(self, parameters: Array) -> int:
        """Steps whose gradients of single parts are compared: as many as files may be large."""
        one = self.data_size * parameters.nbytes
        return max(1, min(self.steps, int(_GRADIENT_BYTES // one)))


def checksum(*arrays: Array) -> int:
    """A number that differs where the arrays do."""
    value = 0
    for array in arrays:
        host = np.ascontiguousarray(to_host(array))
        value = zlib.crc32(f"{host.dtype}{host.shape}".encode(), value)
        value = zlib.crc32(host.tobytes(), value)
    return value


def relative_error(actual: Array, expected: Array, floor: float = 1.0) -> float:
    """Largest difference, relative to the largest expected element where that is above ``floor``.

    Infinite where the shapes differ, or one is not finite.
    """
    if np.shape(actual) != np.shape(expected):
        return np.inf
    if np.size(expected) == 0:
        return 0.0
    difference = np.max(np.abs(np.subtract(actual, expected, dtype=np.float64)))
    scale = max(floor, float(np.max(np.abs(expected))))
    if scale == 0:  # of a gradient that is 0
        scale = 1.0
    return float(difference / scale) if np.isfinite(difference) else np.inf
