"""The file that one rank writes: its name, where each piece lies in it, and the record of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpishard.checkpoint.format.tensor_file import Tensor, TensorFile
from mpishard.sharding.regions import Region

__all__ = ["FileRecord", "PieceRecord", "RankFile", "file_name", "tensor_key"]


def file_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank{rank:05d}.safetensors"


def tensor_key(kind: str, region: Region) -> str:
    """Return the name of a piece in the header of its file."""
    box = ", ".join([f"{low}:{high}" for low, high in region.box])
    return f"{kind}@{region.name}[{box}][{region.start}:{region.stop}]"


@dataclass(frozen=True, slots=True)
class PieceRecord:
    """Place of a region's values, 1-D: in ``file`` from byte ``offset`` on."""

    file: str
    offset: int
    region: Region


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Length of a file in bytes, and the CRC-32 of each block of `BLOCK_BYTES`."""

    nbytes: int
    checksums: tuple[int, ...]


class RankFile:
    """The file of one rank, laid out before anything is written.

    Parameters
    ----------
    rank : int
        The rank.
    pieces : mapping of str to sequence of (Region, Tensor)
        Kind -> regions and their 1-D values, in host memory or lazy.

    Raises
    ------
    ValueError
        For a region that is given twice.
    CheckpointError
        For a dtype that a file cannot hold.
    """

    def __init__(self, rank: int, pieces: Mapping[str, Sequence[tuple[Region, Tensor]]]) -> None:
        self.name = file_name(rank)
        self._kinds = {
            kind: [(tensor_key(kind, region), region) for region, _ in given]
            for kind, given in pieces.items()
        }
        tensors: dict[str, Tensor] = {}
        for kind, given in pieces.items():
            for (key, region), (_, array) in zip(self._kinds[kind], given, strict=True):
                if key in tensors:
                    raise ValueError(f"{kind}: {region} is given twice")
                tensors[key] = array
        self._dtypes = {
            kind: sorted({array.dtype for _, array in given}, key=str)
            for kind, given in pieces.items()
        }
        self.is_empty = not tensors
        """Whether the rank has nothing to write."""
        # Small ones first, side by side: they are what ranks read of each other's files, and then
        # share the few blocks that each of those ranks must verify.
        ordered = dict(sorted(tensors.items(), key=lambda item: item[1].nbytes))
        self._file = TensorFile(ordered, {"format": "np"})
        self.nbytes = 0 if self.is_empty else self._file.nbytes
        """Length of the file in bytes; 0 if there is none."""

    def write(self, directory: Path, check: Callable[[], None] | None = None) -> None:
        """Write the file, if there is anything to write; ``check`` as for `TensorFile.write`.

        Raises
        ------
        OSError
            If it cannot be written.
        """
        if not self.is_empty:
            self._file.write(directory / self.name, check)

    def record(self) -> dict[str, Any]:
        """Return the JSON that `mpishard.checkpoint.format.manifest.assemble` takes.

        The file must have been written.
        """
        offsets = self._file.offsets
        kinds = {
            kind: {
                "dtypes": [dtype.name for dtype in self._dtypes[kind]],
                "pieces": [
                    [offsets[key], region.name, region.box, region.start, region.stop]
                    for key, region in given
                ],
            }
            for kind, given in self._kinds.items()
        }
        return {
            "file": self.name, "bytes": self.nbytes, "crc32": self._file.checksums, "kinds": kinds,
        }  # fmt: skip
