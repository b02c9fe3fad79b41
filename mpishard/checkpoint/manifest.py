"""The table of contents of a checkpoint: which file holds which region of which tensor."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np

from mpishard.checkpoint.coverage import check_coverage
from mpishard.communication.call import DTYPES
from mpishard.errors import CheckpointError
from mpishard.sharding.regions import Region
from mpishard.sharding.table import ParameterEntry

__all__ = ["PARAMETERS", "FileRecord", "KindRecord", "Manifest", "PieceRecord"]

PARAMETERS = "parameters"
"""The kind that every checkpoint has."""

_OPTIMIZER = "optimizer/"

_FORMAT = "mpishard checkpoint"
_VERSION = 2
_DTYPES: dict[str, np.dtype[Any]] = {dtype.name: dtype for dtype in DTYPES}


@dataclass(frozen=True, slots=True)
class PieceRecord:
    """A region's values, 1-D, are the tensor ``key`` of ``file``."""

    file: str
    key: str
    region: Region


@dataclass(frozen=True, slots=True)
class KindRecord:
    """One array for each parameter: their dtype, and the pieces of each by the parameter's name."""

    dtype: np.dtype[Any]
    pieces: Mapping[str, tuple[PieceRecord, ...]]

    @classmethod
    def of(cls, dtype: np.dtype[Any], pieces: Iterable[PieceRecord]) -> KindRecord:
        """Pieces of any parameters, in any order."""
        found: dict[str, list[PieceRecord]] = {}
        for piece in pieces:
            found.setdefault(piece.region.name, []).append(piece)
        return cls(dtype, {name: tuple(given) for name, given in found.items()})


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
        The arrays, by kind.
    files : mapping of str to FileRecord
        The files beside the manifest, by name.
    metadata : mapping
        What else was saved, as JSON knows it.

    Raises
    ------
    CheckpointError
        Where the parameters leave gaps, the pieces of a kind do not hold each element of each
        parameter exactly once (of an optimizer's kind: none of frozen parameters), or a piece lies
        in a file that is not listed.
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
            if any(size < 0 for size in entry.shape):
                raise CheckpointError(f"parameter {entry.name!r} has the shape {entry.shape}")
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
        for kind in self.arrays:
            self._check_pieces(kind)

    def _check_pieces(self, kind: str) -> None:
        pieces = self.arrays[kind].pieces
        held = {entry.name: entry for entry in self.held(kind)}
        for name in pieces:
            if name not in held:
                raise CheckpointError(
                    f"{kind}: {pieces[name][0].file} holds a piece of {name!r}, which is no "
                    "parameter, or a frozen one"
                )
        for name, entry in held.items():
            given = [(piece.file, piece.region) for piece in pieces.get(name, ())]
            check_coverage(kind, name, entry.shape, given)
            for file, _ in given:
                if file not in self.files:
                    raise CheckpointError(f"{kind}: {file} is not among the files")

    def held(self, kind: str) -> list[ParameterEntry]:
        """The parameters of which there is a kind: all; those with an optimizer's state."""
        has_all = not kind.startswith(_OPTIMIZER)
        return [entry for entry in self.parameters if has_all or entry.trainable]

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
                        {
                            "file": p.file,
                            "key": p.key,
                            "tensor": p.region.name,
                            "box": p.region.box,
                            "start": p.region.start,
                            "stop": p.region.stop,
                        }
                        for given in record.pieces.values()
                        for p in given
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
        # On one line, which C writes: with thousands of pieces that is ten times as fast.
        return json.dumps(document, default=_plain) + "\n"

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
                str(kind): KindRecord.of(
                    _DTYPES[record["dtype"]], [_piece_of(piece) for piece in record["pieces"]]
                )
                for kind, record in document["arrays"].items()
            },
            files={
                str(name): FileRecord(int(file["bytes"]), int(file["crc32"]))
                for name, file in document["files"].items()
            },
            metadata=dict(document["metadata"]),
        )


def _piece_of(document: Mapping[str, Any]) -> PieceRecord:
    box = tuple((int(low), int(high)) for low, high in document["box"])
    region = Region(str(document["tensor"]), box, int(document["start"]), int(document["stop"]))
    return PieceRecord(str(document["file"]), str(document["key"]), region)


def _plain(value: Any) -> Any:
    """NumPy scalars and arrays as JSON knows them."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"metadata must be JSON; it holds a {type(value).__qualname__}: {value!r}")
