"""The file of a model that may lie on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mpishard.arguments import check_path
from mpishard.checkpoint.format import disk
from mpishard.checkpoint.format.consensus import together
from mpishard.contracts import PathLike
from mpishard.models import ShardedModelBase

__all__ = ["write_model"]


def write_model(
    path: PathLike, model: Any, content: Callable[[Any], Iterable[memoryview | bytes]]
) -> None:
    """Write the ``content`` of the plain model to ``path``; what was there is replaced at once.

    Of a sharded model rank 0 alone gathers the parameters and writes. Collective then.

    Raises
    ------
    TypeError, ValueError, OSError
        For a path that is none, or blank; if ``content`` refuses the model; if the file cannot be
        written. On every rank.
    """
    check_path("path", path)

    def write(plain: Any) -> None:
        if not Path(path).parent.is_dir():
            raise FileNotFoundError(f"there is no folder {Path(path).parent} to write to")
        if Path(path).is_dir():
            raise IsADirectoryError(f"{path} is a folder; give the path of a file")
        disk.replace_file(Path(path), b"".join(content(plain)))

    if not isinstance(model, ShardedModelBase):
        write(model)
        return
    with model.unsharded(root=0) as plain, together(model.backend):
        if plain is not None:
            write(plain)
