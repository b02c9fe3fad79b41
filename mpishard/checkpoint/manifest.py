"""The table of contents of a checkpoint: which file holds which range of which vector."""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np

from mpishard.communication.call import DTYPES
from mpishard.errors import CheckpointError
from mpishard.sharding.table import ParameterEntry

__all__ = ["PARAMETERS", "FileRecord", "KindRecord", "Manifest", "PieceRecord"]

PARAMETERS = "parameters"
_OPTIMIZER = "optimizer/"
"""The kind that every checkpoint has."""

_FORMAT = "mpishard checkpoint"
_VERSION = 1
_DTYPES: dict[str, np.dtype[Any]] = {dtype.name: dtype for dtype in DTYPES}


@dataclass(frozen=True, slots=True)
class PieceRecord:
    """The elements ``[start, stop)`` of a vector are the tensor ``key`` of ``file``."""

    file: str
    key: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class KindRecord:
    """One vector: its dtype, and its pieces by rising start."""

    dtype: np.dtype[Any]
    pieces: tuple[PieceRecord, ...]

    def overlapping(self, start: int, stop: int) -> Iterator[PieceRecord]:
        """The pieces that share an element with ``[start, stop)``, in order."""
        first = bisect.bisect_right(self.pieces, start, key=lambda piece: piece.stop)
        for piece in self.pieces[first:]:
            if max(piece.start, start) >= stop:
                return
            yield piece


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Length in bytes and CRC-32 of a file."""

    nbytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint holds and where.

    Parameters
    ----------
    identity : str
        Drawn at random for each save, and repeated in each file's header, so that files of two
        saves are never mixed.
    dtype : dtype
        Of the parameters.
    parameters : tuple of ParameterEntry
        The parameters along the flat vector.
    arrays : mapping of str to KindRecord
        The vectors, by kind.
    files : mapping of str to FileRecord
        The files beside the manifest, by name.
    metadata : mapping
        What else was saved, as JSON knows it.

    Raises
    ------
    CheckpointError
        Where the parameters leave gaps, the pieces of a kind do not cover the flat vector
        exactly once (of an optimizer's kind, that without frozen parameters), or a piece lies in a
        file that is not listed.
    """

    identity: str
    dtype: np.dtype[Any]
    parameters: tuple[ParameterEntry, ...]
    arrays: Mapping[str, KindRecord]
    files: Mapping[str, FileRecord]
    metadata: Mapping[str, Any]

    def __post_init__(self) -> None:
        position = 0
        for entry in self.parameters:
            if entry.start != position:
                raise CheckpointError(
                    f"parameter {entry.name!r} starts at element {entry.start}; the one before "
                    f"it ends at {position}"
                )
            position = entry.stop
        # An optimizer's state alone says that there is no model with it.
        if PARAMETERS not in self.arrays and self.metadata.get("model", "") is not None:
            raise CheckpointError(f"there are no {PARAMETERS} among the arrays {[*self.arrays]}")
        if PARAMETERS in self.arrays and self.arrays[PARAMETERS].dtype != self.dtype:
            raise CheckpointError(
                f"the model's dtype is {self.dtype.name}, its parameters came as "
                f"{self.arrays[PARAMETERS].dtype.name}"
            )
        for kind, record in self.arrays.items():
            frozen = self.frozen_pieces if kind.startswith(_OPTIMIZER) else ()
            _check_coverage(kind, record.pieces + frozen, self.length)
            for piece in record.pieces:
                if piece.file not in self.files:
                    raise CheckpointError(f"{kind}: {piece.file} is not among the files")

    @property
    def frozen_pieces(self) -> tuple[PieceRecord, ...]:
        """What no optimizer has state of, as pieces that lie nowhere."""
        return tuple(
            PieceRecord("", e.name, e.start, e.stop) for e in self.parameters if not e.trainable
        )

    @property
    def length(self) -> int:
        """Length of the flat vector."""
        return self.parameters[-1].stop if self.parameters else 0

    def to_json(self) -> str:
        """The text of ``manifest.json``."""
        document = {
            "format": _FORMAT,
            "version": _VERSION,
            "identity": self.identity,
            "dtype": self.dtype.name,
            "length": self.length,
            PARAMETERS: [
                {"name": e.name, "shape": list(e.shape), "start": e.start}
                | ({} if e.trainable else {"frozen": True})
                for e in self.parameters
            ],
            "arrays": {
                kind: {
                    "dtype": record.dtype.name,
                    "pieces": [
                        {"file": p.file, "key": p.key, "start": p.start, "stop": p.stop}
                        for p in record.pieces
                    ],
                }
                for kind, record in self.arrays.items()
            },
            "files": {
                name: {"bytes": file.nbytes, "crc32": file.crc32}
                for name, file in self.files.items()
            },
            "metadata": self.metadata,
        }
        return json.dumps(document, indent=1, default=_plain) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """The manifest that `to_json` wrote.

        Raises
        ------
        CheckpointError
            Where the text is no manifest, is torn, or comes from a newer version.
        """
        try:
            document = json.loads(text)
        except ValueError as error:
            raise CheckpointError(f"it is not JSON: {error}") from error
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            raise CheckpointError(f"it does not say that its format is {_FORMAT!r}")
        if document.get("version") != _VERSION:
            raise CheckpointError(
                f"it has version {document.get('version')!r}; this mpishard reads version "
                f"{_VERSION}, and a newer one may read it"
            )
        try:
            manifest = cls._from_document(document)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"it is malformed: {type(error).__name__}: {error}") from error
        if manifest.length != document["length"]:
            raise CheckpointError(
                f"its parameters have {manifest.length} elements, and it says {document['length']}"
            )
        return manifest

    @classmethod
    def _from_document(cls, document: Mapping[str, Any]) -> Manifest:
        for name in document["files"]:
            if PurePath(name).name != name:
                raise ValueError(f"{name!r} is not the name of a file beside the manifest")
        return cls(
            identity=str(document["identity"]),
            dtype=_DTYPES[document["dtype"]],
            parameters=tuple(
                ParameterEntry(
                    str(e["name"]),
                    tuple(int(dim) for dim in e["shape"]),
                    int(e["start"]),
                    trainable=not e.get("frozen", False),
                )
                for e in document[PARAMETERS]
            ),
            arrays={
                str(kind): KindRecord(
                    _DTYPES[record["dtype"]],
                    tuple(
                        PieceRecord(str(p["file"]), str(p["key"]), int(p["start"]), int(p["stop"]))
                        for p in record["pieces"]
                    ),
                )
                for kind, record in document["arrays"].items()
            },
            files={
                str(name): FileRecord(int(file["bytes"]), int(file["crc32"]))
                for name, file in document["files"].items()
            },
            metadata=dict(document["metadata"]),
        )


def _check_coverage(kind: str, pieces: Sequence[PieceRecord], length: int) -> None:
    position = 0
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if piece.start > position:
            raise CheckpointError(f"{kind}: nothing holds elements {position} to {piece.start}")
        if piece.start < position:
            raise CheckpointError(
                f"{kind}: elements {piece.start} to {min(position, piece.stop)} are held twice, "
                f"the second time by {piece.file or f'the frozen parameter {piece.key!r}'}"
            )
        position = piece.stop
    if position < length:
        raise CheckpointError(f"{kind}: nothing holds elements {position} to {length}")
    if position > length:
        raise CheckpointError(f"{kind}: there are {position} elements, {length} were expected")


def _plain(value: Any) -> Any:
    """NumPy scalars and arrays as JSON knows them."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"metadata must be JSON; it holds a {type(value).__qualname__}: {value!r}")
