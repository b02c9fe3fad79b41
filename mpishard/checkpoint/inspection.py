"""Looking into checkpoints without a model, ranks or MPI."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpishard.checkpoint.manifest import PARAMETERS
from mpishard.checkpoint.reader import CheckpointReader
from mpishard.checkpoint.writer import write_checkpoint
from mpishard.sharding.regions import Region

__all__ = ["CheckpointReport", "check", "consolidate", "load_arrays"]


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """What `check` found in a whole checkpoint.

    Parameters
    ----------
    path : Path
        The directory.
    parameter_count : int
        Elements of all parameters.
    shapes : mapping of str to tuple
        Shape of each parameter, in order.
    kinds : mapping of str to str
        dtype of each array per parameter: "parameters", an optimizer's state.
    files : mapping of str to int
        Bytes of each file.
    metadata : mapping
        What was saved beside the arrays.
    """

    path: Path
    parameter_count: int
    shapes: Mapping[str, tuple[int, ...]]
    kinds: Mapping[str, str]
    files: Mapping[str, int]
    metadata: Mapping[str, Any]

    def __str__(self) -> str:
        vectors = ", ".join(f"{kind} ({dtype})" for kind, dtype in self.kinds.items())
        return (
            f"{self.path} is whole: {self.parameter_count:,} elements in {len(self.shapes)} "
            f"parameters; {vectors}; {len(self.files)} files, {sum(self.files.values()):,} bytes"
        )


def check(path: str | os.PathLike[str]) -> CheckpointReport:
    """Read all of a checkpoint, compare its checksums, and say what it holds.

    Raises
    ------
    FileNotFoundError
        Where there is no checkpoint.
    CheckpointError
        Where it is torn, corrupt or of a newer version.
    """
    with CheckpointReader(path) as reader:
        reader.verify()
        return CheckpointReport(
            path=reader.path,
            parameter_count=reader.length,
            shapes={entry.name: entry.shape for entry in reader.parameters},
            kinds={kind: dtype.name for kind, dtype in reader.kinds.items()},
            files=reader.file_sizes,
            metadata=reader.metadata,
        )


def load_arrays(path: str | os.PathLike[str]) -> dict[str, np.ndarray[Any, Any]]:
    """The parameters of a checkpoint, by name.

    Returns
    -------
    dict of str to array
        New NumPy arrays in the parameters' shapes, in the model's order.

    Raises
    ------
    FileNotFoundError, CheckpointError
        As `CheckpointReader`.
    """
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    with CheckpointReader(path) as reader:
        for entry in reader.parameters:
            arrays[entry.name] = reader.read_whole(PARAMETERS, entry)
    return arrays


def consolidate(path: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Write the checkpoint ``path`` as ``target`` with all arrays in one file.

    The arrays are held in memory meanwhile. ``target`` may be ``path``.

    Raises
    ------
    FileNotFoundError, CheckpointError
        As `CheckpointReader` and `write_checkpoint`; nothing is then changed.
    """
    with CheckpointReader(path) as reader:
        reader.verify()
        arrays = {
            kind: [
                (Region.whole(entry.name, entry.shape), reader.read_whole(kind, entry).reshape(-1))
                for entry in reader.held(kind)
            ]
            for kind in reader.kinds
        }
    write_checkpoint(target, None, reader.parameters, reader.dtype, arrays, reader.metadata)
