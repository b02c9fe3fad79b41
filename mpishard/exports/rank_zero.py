"""Writing of a plain or sharded model to one file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mpishard.base import Array, check_path, to_host
from mpishard.checkpoint import disk
from mpishard.communication import same_outcome
from mpishard.contracts import PathLike, UserModel
from mpishard.models import ShardedModelBase
from mpishard.nn import Model

Encoder = Callable[[Any, Iterator[Array]], Iterable[memoryview | bytes]]
"""Function of a model's structure and its parameters, in table order: it yields a file's parts."""


def write_model(path: PathLike, model: UserModel, encode: Encoder) -> None:
    """Write a model to ``path``. Collective if the model is sharded.

    A file at ``path`` is replaced atomically. Rank 0 writes. It gathers one unit of a sharded model
    at a time (of a model on a mesh, all units).

    Raises
    ------
    TypeError, ValueError, OSError
        If the path is not a path or is blank, ``encode`` refuses the model, or the file cannot be
        written. Every rank raises it.
    """
    check_path("path", path)

    def write(structure: Any, chunks: Iterator[Array]) -> None:
        if not Path(path).parent.is_dir():
            raise FileNotFoundError(f"there is no folder {Path(path).parent} to write to")
        if Path(path).is_dir():
            raise IsADirectoryError(f"{path} is a folder; give the path of a file")
        disk.replace_file(Path(path), encode(structure, _parameters(structure, chunks)))

    if not isinstance(model, ShardedModelBase):
        write(model, _chunks(model))
        return
    chunks = _chunks(model)
    with same_outcome(model.backend):
        try:
            if model.backend.rank == 0:
                write(model.wrapped_model, chunks)
        finally:
            # Gathering is collective: every rank gathers all units, even if rank 0 could not write.
            for _ in chunks:
                pass


def _chunks(model: UserModel) -> Iterator[Array]:
    is_sharded = isinstance(model, ShardedModelBase)
    yield from model.engine.gather_chunks() if is_sharded else model.get_parameter_chunks()


def _parameters(model: Model, chunks: Iterator[Array]) -> Iterator[Array]:
    """Yield each parameter as a vector, from chunks that may end anywhere."""
    chunk = np.empty(0, model.dtype)
    for entry in model.parameter_table.entries:
        # A unit has several parameters, and on a mesh a chunk is all of them.
        while chunk.size < entry.size:
            following = to_host(next(chunks)).reshape(-1)
            chunk = np.concatenate([chunk, following]) if chunk.size else following
        yield chunk[: entry.size]
        chunk = chunk[entry.size :]
