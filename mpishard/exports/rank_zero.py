"""The file of a model that may lie on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mpishard.arguments import check_path
from mpishard.arrays import Array, to_host
from mpishard.checkpoint.format import disk
from mpishard.checkpoint.format.consensus import together
from mpishard.contracts import PathLike
from mpishard.models import ShardedModelBase
from mpishard.nn import Model

Content = Callable[[Any, Iterator[Array]], Iterable[memoryview | bytes]]
"""A model's structure, and its parameters in the order of its table, to the parts of a file."""


def write_model(path: PathLike, model: Any, content: Content) -> None:
    """Write the ``content`` of a model to ``path``; what was there is replaced at once.

    One unit of a sharded model is whole at a time (all on a mesh), and rank 0 writes. Collective
    then.

    Raises
    ------
    TypeError, ValueError, OSError
        For a path that is none, or blank; if ``content`` refuses the model; if the file cannot be
        written. On every rank.
    """
    check_path("path", path)

    def write(structure: Any, chunks: Iterator[Array]) -> None:
        if not Path(path).parent.is_dir():
            raise FileNotFoundError(f"there is no folder {Path(path).parent} to write to")
        if Path(path).is_dir():
            raise IsADirectoryError(f"{path} is a folder; give the path of a file")
        disk.replace_file(Path(path), content(structure, _parameters(structure, chunks)))

    if not isinstance(model, ShardedModelBase):
        write(model, _chunks(model))
        return
    chunks = _chunks(model)
    with together(model.backend):
        try:
            if model.backend.rank == 0:
                write(model.wrapped_model, chunks)
        finally:  # to gather a unit is collective, whatever becomes of the file
            for _ in chunks:
                pass


def _chunks(model: Any) -> Iterator[Array]:
    yield from model.get_parameter_chunks()


def _parameters(model: Model, chunks: Iterator[Array]) -> Iterator[Array]:
    """Yield each parameter, flat, of chunks that hold one or several."""
    held = np.empty(0, model.dtype)
    for entry in model.parameter_table.entries:
        while held.size < entry.size:
            following = to_host(next(chunks)).reshape(-1)
            held = np.concatenate([held, following]) if held.size else following
        yield held[: entry.size]
        held = held[entry.size :]
