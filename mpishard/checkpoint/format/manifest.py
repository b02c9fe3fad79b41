"""Table of contents of a checkpoint: its files, and the regions of tensors in them."""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpishard.base import CheckpointError, DType, Metadata
from mpishard.checkpoint.format import disk
from mpishard.checkpoint.format.content import (
    COUNT,
    OBJECT,
    TEXT,
    require_form,
    spelled,
    unspelled,
)
from mpishard.checkpoint.format.coverage import check_coverage, check_region
from mpishard.checkpoint.format.tensor_file import (
    BLOCK_BYTES,
    TABLE,
    FileRecord,
    PieceRecord,
    table_checksum,
    tensor_key,
)
from mpishard.communication import DTYPES
from mpishard.sharding import FLAT, ParameterEntry, Region, overlapping

MANIFEST = "manifest.json"
"""Name of the file in a checkpoint's directory that is written last."""

PARAMETERS = "parameters"
"""Kind of the model's parameters, which every checkpoint of a model has."""

_OPTIMIZER = "optimizer/"

MOST_DIMS = 32
"""Maximum number of dims of a tensor. NumPy allows 64, and 32 before version 2."""

_FORMAT = "mpishard checkpoint"
_VERSION = 4
_READ_VERSIONS = (3, 4)  # Version 3 had no ranges of the flat vector.
_LONGEST = 1 << 28  # Maximum bytes of a manifest.
_MOST_BYTES = 1 << 63  # Bytes of an array, and all counts, must be below this number.
_FILE = re.compile(r"rank\d{5,}\.safetensors")
_DTYPES: dict[str, DType] = {dtype.name: dtype for dtype in DTYPES}


@dataclass(frozen=True, slots=True)
class KindRecord:
    """Arrays of one kind, one for each parameter: their dtype, and their pieces by parameter.

    Pieces of the flat vector, which have elements of several parameters, are under `FLAT`.
    """

    dtype: DType
    pieces: Mapping[str, tuple[PieceRecord, ...]]

    @classmethod
    def of(cls, dtype: DType, pieces: Iterable[PieceRecord]) -> KindRecord:
        """Return the record of pieces of any parameters, in any order."""
        found: dict[str, list[PieceRecord]] = {}
        for piece in pieces:
            found.setdefault(piece.region.name, []).append(piece)
        return cls(dtype, {name: tuple(given) for name, given in found.items()})


@dataclass(frozen=True, slots=True)
class Manifest:
    """Content of a checkpoint, and the place of each piece.

    Parameters
    ----------
    identity : str
        Random name of the save.
    sequence : int
        Number of the save, among those in the same folder. The newest has the highest number.
    dtype : dtype
        Dtype of the parameters.
    parameters : tuple of ParameterEntry
        The parameters along the flat vector.
    arrays : mapping of str to KindRecord
        The arrays, by kind.
    files : mapping of str to FileRecord
        The files beside the manifest, by name.
    metadata : mapping
        Other saved values, as JSON.

    Raises
    ------
    CheckpointError
        If the parameters leave gaps, or are larger than an array can be. If the pieces of a kind
        do not have each element of each parameter exactly once (for an optimizer's kinds: of each
        parameter that is not frozen). If a piece is in a file that is not listed, or beyond the end
        of its file.
    """

    identity: str
    sequence: int
    dtype: DType
    parameters: tuple[ParameterEntry, ...]
    arrays: Mapping[str, KindRecord]
    files: Mapping[str, FileRecord]
    metadata: Metadata

    def __post_init__(self) -> None:
        if not 0 < self.sequence < _MOST_BYTES:
            raise CheckpointError(f"its save number is {self.sequence}, which is not in [1, 2^63)")
        position, names = 0, set()
        for entry in self.parameters:
            if entry.name in names:
                raise CheckpointError(f"it has two parameters named {entry.name!r}")
            names.add(entry.name)
            _check_shape(entry)
            # Starts without gaps make the flat vector the same in every layout that reads it.
            if entry.start != position:
                raise CheckpointError(
                    f"parameter {entry.name!r} starts at element {entry.start}; the one before "
                    f"it ends at {position}"
                )
            position = entry.stop
        # The metadata of an optimizer that was saved without its model have None for the model.
        if PARAMETERS not in self.arrays and self.metadata.get("model", "") is not None:
            raise CheckpointError(f"there are no {PARAMETERS} among the arrays {[*self.arrays]}")
        if PARAMETERS in self.arrays and self.arrays[PARAMETERS].dtype != self.dtype:
            raise CheckpointError(
                f"the model's dtype is {self.dtype.name}, its parameters came as "
                f"{self.arrays[PARAMETERS].dtype.name}"
            )
        for name, file in self.files.items():
            # A forged manifest must not name files outside its directory.
            if not _FILE.fullmatch(name):
                raise CheckpointError(f"{name!r} is not the name of a file beside the manifest")
            if len(file.checksums) != -(-file.nbytes // BLOCK_BYTES):
                raise CheckpointError(
                    f"{name} of {file.nbytes} bytes has {len(file.checksums)} checksums"
                )
        for kind in self.arrays:
            self._check_pieces(kind)

    def _check_pieces(self, kind: str) -> None:
        pieces = self.arrays[kind].pieces
        entries = {entry.name: entry for entry in self.parameters_of(kind)}
        for piece in pieces.get(FLAT, ()):
            try:
                check_region(piece.region, (self.length,))
            except ValueError as error:
                raise CheckpointError(f"{kind}: {error}") from None
            if piece.region.box != ((0, self.length),):
                raise CheckpointError(f"{kind}: {piece.region} is not a range of the flat vector")
        flat = sorted((p.region.start, p.region.stop) for p in pieces.get(FLAT, ()))
        # The check is made before a reader allocates or writes anything, so that a model is never
        # partly loaded. Pieces of the flat vector alone are not cut into thousands of regions.
        if not (
            pieces.keys() <= {FLAT}
            and _merged_ranges(flat)
            == _merged_ranges((e.start, e.stop) for e in entries.values() if e.size)
        ):
            found = self._regions_by_parameter(kind)
            for name, regions in found.items():
                if name not in entries:
                    raise CheckpointError(
                        f"{kind}: {regions[0][0]} holds a piece of {name!r}, which is not "
                        "a parameter, or is frozen"
                    )
            for name, entry in entries.items():
                check_coverage(kind, name, entry.shape, found.get(name, ()))
        for piece in (piece for given in pieces.values() for piece in given):
            if piece.file not in self.files:
                raise CheckpointError(f"{kind}: {piece.file} is not among the files")
            nbytes = self.files[piece.file].nbytes
            stop = piece.offset + piece.region.length * self.arrays[kind].dtype.itemsize
            if not 0 <= piece.offset <= stop <= nbytes:
                raise CheckpointError(
                    f"{kind}: {piece.region} is said to be bytes {piece.offset} to {stop} of "
                    f"{piece.file}, which has {nbytes}"
                )

    def _regions_by_parameter(self, kind: str) -> dict[str, list[tuple[str, Region]]]:
        """Return file and region of each piece by parameter; those of the flat vector are cut."""
        found: dict[str, list[tuple[str, Region]]] = {}
        for name, given in self.arrays[kind].pieces.items():
            for piece in given:
                region = piece.region
                if name != FLAT:
                    found.setdefault(name, []).append((piece.file, region))
                    continue
                for entry in overlapping(self.parameters, region.start, region.stop):
                    low, high = max(entry.start, region.start), min(entry.stop, region.stop)
                    if low < high:
                        part = entry.region(low, high)
                        found.setdefault(entry.name, []).append((piece.file, part))
        return found

    def parameters_of(self, kind: str) -> list[ParameterEntry]:
        """Return the parameters of a kind: all, or for an optimizer's kind those not frozen."""
        return [entry for entry in self.parameters if self.has(kind, entry)]

    def has(self, kind: str, entry: ParameterEntry) -> bool:
        """Return True if the parameter is one of `parameters_of`."""
        return entry.trainable or not kind.startswith(_OPTIMIZER)

    @property
    def length(self) -> int:
        """Length of the flat vector."""
        return self.parameters[-1].stop if self.parameters else 0

    def tensors_by_file(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Return for each file the byte range (start, stop) of each tensor, by `tensor_key`."""
        tensors: dict[str, dict[str, tuple[int, int]]] = {name: {} for name in self.files}
        for kind, record in self.arrays.items():
            for given in record.pieces.values():
                for piece in given:
                    stop = piece.offset + piece.region.length * record.dtype.itemsize
                    key = tensor_key(kind, piece.region)
                    tensors[piece.file][key] = piece.offset, stop
        return tensors

    def tables(self) -> dict[str, int | None]:
        """Return for each file the `table_checksum` that it has if ranges of the flat vector."""
        given = (record.pieces.get(FLAT, ()) for record in self.arrays.values())
        flat = {piece.file for pieces in given for piece in pieces}
        table = table_checksum(self.parameters)
        return {name: table if name in flat else None for name in self.files}

    def within(self, file: str, low: int, high: int) -> tuple[str, ...]:
        """Return the tensors of the bytes [low, high) of a file: ``"parameters of <name>"``."""
        found: dict[str, None] = {}
        for kind, record in self.arrays.items():
            size = record.dtype.itemsize
            for piece in (piece for given in record.pieces.values() for piece in given):
                region = piece.region
                first = max(region.start, region.start + (low - piece.offset) // size)
                stop = min(region.stop, region.start - (piece.offset - high) // size)
                if piece.file == file and first < stop:
                    names = (
                        [e.name for e in overlapping(self.parameters, first, stop)]
                        if region.name == FLAT
                        else [region.name]
                    )
                    found.update(dict.fromkeys(f"{kind} of {name}" for name in names))
        return tuple(found)

    def torn_files(self, directory: Path) -> list[str]:
        """Return a text for each file in ``directory`` that is missing or of another length."""
        tears = {name: record.tear(directory / name) for name, record in self.files.items()}
        return [f"{name} {tear}" for name, tear in tears.items() if tear]

    def to_bytes(self) -> bytes:
        """Return the content of ``manifest.json``.

        Raises
        ------
        CheckpointError
            If the content is longer than `read` accepts.
        """
        document = {
            "identity": self.identity,
            "sequence": self.sequence,
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
                            "offset": p.offset,
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
                name: {"bytes": file.nbytes, "crc32": list(file.checksums)}
                for name, file in self.files.items()
            },
            "metadata": spelled(self.metadata),
        }
        # Without an indent Python's C encoder is used, which is ten times as fast with thousands of
        # pieces.
        text = json.dumps(document, allow_nan=False).encode()
        head = f'{{"format": "{_FORMAT}", "version": {_VERSION}, "crc32": {zlib.crc32(text)},\n'
        content = b'%b"content": %b}\n' % (head.encode(), text)
        if len(content) > _LONGEST:
            raise CheckpointError(
                f"the manifest takes {len(content)} bytes, and {_LONGEST} are the most that is "
                "read again: save less metadata, or on fewer ranks"
            )
        return content

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Return the manifest of the checkpoint in ``directory``.

        Raises
        ------
        OSError
            If the file cannot be read.
        CheckpointError
            As for `from_json`, and if it is not a regular file, or too long for a manifest.
        """
        file = directory / MANIFEST
        # A read of a pipe could wait for ever, and a read of /dev/zero would never end.
        if not file.is_file():
            raise CheckpointError("it is not a regular file")
        nbytes = file.stat().st_size
        if nbytes > _LONGEST:
            raise CheckpointError(f"it has {nbytes} bytes; {_LONGEST} are the most")
        try:
            return cls.from_json(file.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise CheckpointError(f"it is not JSON: {error}") from None

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Return the manifest from the text of `to_bytes`.

        Raises
        ------
        CheckpointError
            If the text is not a manifest, is incomplete or changed, or has another version.
        """
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"it is not JSON: {type(error).__name__}: {error}") from None
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            raise CheckpointError(f"its format is not {_FORMAT!r}")
        if document.get("version") not in _READ_VERSIONS:
            raise CheckpointError(
                f"it has version {document.get('version')!r}; this mpishard reads versions "
                f"{' and '.join(map(str, _READ_VERSIONS))}"
            )
        try:
            content = document["content"]
            # The parsed content is encoded again, which gives the text that was written. Its place
            # in the file therefore need not be found.
            if zlib.crc32(json.dumps(content).encode()) != document["crc32"]:
                raise CheckpointError("its content does not have the checksum that it names")
            manifest = cls._from_document(content)
            length = content["length"]
        except (
            AttributeError,
            KeyError,
            OverflowError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            reason = f"{type(error).__name__}: {error}"
            try:
                # If there is a key whose value has another form, the reason names it.
                require_form(document, {"crc32": COUNT, "content": _CONTENT}, "manifest")
            except ValueError as malformed:
                reason = str(malformed)
            raise CheckpointError(f"it is malformed: {reason}") from None
        if manifest.length != length:
            raise CheckpointError(
                f"its parameters have {manifest.length} elements, and it says {length}"
            )
        return manifest

    @classmethod
    def _from_document(cls, document: Metadata) -> Manifest:
        return cls(
            identity=str(document["identity"]),
            sequence=int(document["sequence"]),
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
                    _DTYPES[record["dtype"]],
                    [_piece_of(*(piece[key] for key in _PIECE)) for piece in record["pieces"]],
                )
                for kind, record in document["arrays"].items()
            },
            files={
                str(name): FileRecord(int(file["bytes"]), tuple(int(crc) for crc in file["crc32"]))
                for name, file in document["files"].items()
            },
            metadata=unspelled(document["metadata"] | {}),  # `| {}` raises unless it is an object.
        )


# These forms only explain a failure. With thousands of pieces a check would slow down every read.
_PIECE = {
    "file": TEXT,
    "offset": COUNT,
    "tensor": TEXT,
    "box": [(COUNT, COUNT)],
    "start": COUNT,
    "stop": COUNT,
}
_CONTENT = {
    "identity": TEXT,
    "sequence": COUNT,
    "dtype": TEXT,
    "length": COUNT,
    PARAMETERS: [{"name": TEXT, "shape": [COUNT], "start": COUNT}],
    "arrays": {"*": {"dtype": TEXT, "pieces": [_PIECE]}},
    "files": {"*": {"bytes": COUNT, "crc32": [COUNT]}},
    "metadata": OBJECT,
}


def _merged_ranges(ranges: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Return sorted ranges ``(start, stop)``, of which one that begins at a stop is joined."""
    joined: list[list[int]] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1][1] = stop
        else:
            joined.append([start, stop])
    return joined


def _check_shape(entry: ParameterEntry) -> None:
    """Refuse shapes that no array can have, before an array is allocated."""
    # NumPy applies its limit to the product of the dims that are not 0.
    nbytes = 8 * math.prod(max(1, size) for size in entry.shape)
    if any(size < 0 for size in entry.shape) or len(entry.shape) > MOST_DIMS:
        raise CheckpointError(
            f"parameter {entry.name!r} has the shape {entry.shape}; {MOST_DIMS} dims of 0 or more "
            "are the most"
        )
    if nbytes >= _MOST_BYTES:
        raise CheckpointError(f"parameter {entry.name!r} of shape {entry.shape} is too large")


def _piece_of(file: str, offset: int, tensor: str, box: Any, start: int, stop: int) -> PieceRecord:
    """Return the record of a piece from JSON, whose types need not be right."""
    ranges = tuple((int(low), int(high)) for low, high in box)
    return PieceRecord(str(file), int(offset), Region(str(tensor), ranges, int(start), int(stop)))


def write_manifest(
    directory: Path,
    sequence: int,
    parameters: Sequence[ParameterEntry],
    dtype: DType,
    metadata: Metadata,
    records: Iterable[Mapping[str, Any]],
) -> None:
    """Write the manifest of the files that the ranks wrote, and sync it to the disk.

    Parameters
    ----------
    directory : Path
        Temporary directory of the files, from `mpishard.checkpoint.format.folder.temporary_of`.
    sequence, parameters, dtype, metadata
        As for `Manifest`.
    records : iterable of mapping
        Result of `RankFile.record` on each rank, as JSON.

    Raises
    ------
    CheckpointError
        If the pieces of a kind differ in dtype, or as for `Manifest`. Nothing is written then.
    OSError
        If the file cannot be written.
    """
    files: dict[str, FileRecord] = {}
    dtypes: dict[str, set[str]] = {}
    pieces: dict[str, list[PieceRecord]] = {}
    table = table_checksum(parameters)
    for record in records:
        name = record["file"]
        # Otherwise a range of the rank's flat vector would have other parameters on rank 0.
        if record["bytes"] and record[TABLE] != table:
            raise CheckpointError(
                f"the rank that wrote {name} has other parameters than rank 0, or another order"
            )
        if record["bytes"]:
            files[name] = FileRecord(record["bytes"], tuple(record["crc32"]))
        for kind, given in record["kinds"].items():
            dtypes.setdefault(kind, set()).update(given["dtypes"])
            of_kind = [_piece_of(name, *piece) for piece in given["pieces"]]
            pieces.setdefault(kind, []).extend(of_kind)
    for kind, names in dtypes.items():
        if len(names) > 1:
            raise CheckpointError(f"{kind}: pieces have the dtypes {sorted(names)}; one is allowed")
    # A kind without pieces, as for a model without parameters, gets the model's dtype.
    own = np.dtype(dtype)
    arrays = {
        kind: KindRecord.of(np.dtype(next(iter(dtypes[kind] or {own.name}))), given)
        for kind, given in pieces.items()
    }
    # The identity is the random part of the directory's name. It differs from save to save, so that
    # a reader can detect a replaced checkpoint.
    identity = directory.name.rsplit(".", 2)[1]
    manifest = Manifest(identity, sequence, own, tuple(parameters), arrays, files, metadata)
    disk.write_file(directory / MANIFEST, [manifest.to_bytes()])
