"""Writing a checkpoint: all of it or nothing, by all ranks at once."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from mpishard.arguments import check_path
from mpishard.arrays import to_host
from mpishard.checkpoint.consensus import gather_texts, share_text, together
from mpishard.checkpoint.manifest import FileRecord, KindRecord, Manifest, PieceRecord
from mpishard.checkpoint.protocol import Pieces
from mpishard.communication.backend import CommunicationBackend
from mpishard.errors import CheckpointError
from mpishard.sharding.regions import Region
from mpishard.sharding.table import ParameterEntry

__all__ = ["IDENTITY", "MANIFEST", "crc32_of", "previous_of", "write_checkpoint"]

MANIFEST = "manifest.json"
IDENTITY = "mpishard.identity"
"""Key of a file's header that repeats the manifest's identity."""

_OURS = re.compile(r"manifest\.json|rank\d{5,}\.safetensors|\.nfs.*")
_BLOCK = 1 << 20


def previous_of(target: Path) -> Path:
    """Where the checkpoint that ``target`` replaces waits until it is replaced."""
    return target.with_name(f"{target.name}.previous")


def write_checkpoint(
    path: str | os.PathLike[str],
    backend: CommunicationBackend | None,
    parameters: Sequence[ParameterEntry],
    dtype: np.dtype[Any],
    arrays: Pieces,
    metadata: Mapping[str, Any],
) -> None:
    """Write the checkpoint ``path``, or leave what was there as it was. Collective.

    Every rank writes its pieces into one file of a directory beside ``path``. When all have,
    rank 0 checks that they are complete, writes the manifest, and exchanges the directories by
    renaming. At every moment ``path``, or ``<path>.previous`` between the two renames, is a whole
    checkpoint; `CheckpointReader` knows where to look. What a killed save left behind is removed
    by the next one, so only one job may save to a path at a time.

    Parameters
    ----------
    path : path
        The directory to make or replace, on a file system that all ranks see. Rank 0's counts.
    backend : CommunicationBackend or None
        The ranks that write together; None for a single process.
    parameters : sequence of ParameterEntry
        The parameters along the flat vector. Rank 0's counts.
    dtype : dtype
        Of the parameters.
    arrays : mapping of str to sequence of (Region, Array)
        Kind -> this rank's pieces, as `CheckpointState.arrays_to_write` says.
    metadata : mapping
        What JSON can hold, NumPy scalars too. Rank 0's counts.

    Raises
    ------
    ValueError, TypeError
        For a blank path, or arrays and metadata that cannot be written.
    CheckpointError
        Where ``path`` holds something else, a file cannot be written, or the pieces of all
        ranks do not make up each parameter exactly once. All ranks raise what one of them raises.
    """
    rank = 0 if backend is None else backend.rank
    directory: Path | None = None
    try:
        with together(backend):
            pieces = _host_pieces(arrays)
            if rank == 0:
                target = target_of(path)
                directory = _temporary(target)
        where = Path(share_text(backend, str(directory)))
        with together(backend):
            record = _write_pieces(where, rank, pieces)
        records = gather_texts(backend, json.dumps(record))
        with together(backend):
            if rank == 0:
                manifest = _assemble(where, parameters, dtype, records, metadata)
                _write_durably(where / MANIFEST, manifest.to_json())
                _exchange(where, target)
    except BaseException:
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
        raise


def crc32_of(file: Path) -> int:
    """CRC-32 of a file's content."""
    crc = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return crc


# -------------------------------------------------------------------------------- before writing


def _host_pieces(arrays: Pieces) -> dict[str, list[tuple[Region, np.ndarray[Any, Any]]]]:
    """The pieces in host memory, without the empty ones."""
    pieces: dict[str, list[tuple[Region, np.ndarray[Any, Any]]]] = {}
    for kind, given in arrays.items():
        pieces[kind] = []
        for region, array in given:
            if array.shape != (region.length,):
                raise ValueError(
                    f"{kind}: the piece {region} has shape ({region.length},), got {array.shape}"
                )
            if array.size:
                pieces[kind].append((region, np.ascontiguousarray(to_host(array))))
    return pieces


def target_of(path: str | os.PathLike[str]) -> Path:
    """The directory to replace, refused where something else would be lost with it."""
    check_path("the path of a checkpoint", path)
    target = Path(path).resolve()
    for directory in (target, previous_of(target)):
        if directory.is_dir():
            foreign = sorted(e.name for e in directory.iterdir() if not _OURS.fullmatch(e.name))
            if foreign:
                raise CheckpointError(
                    f"{directory} holds {_listed(foreign)}, which are no part of a checkpoint "
                    "and would be lost: saving replaces the directory. Save to a path of its own"
                )
        elif directory.exists():
            raise CheckpointError(f"{directory} is a file; a checkpoint is a directory")
    return target


def _temporary(target: Path) -> Path:
    """A new directory beside ``target``; those of saves that were killed are removed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix, suffix = f".{target.name}.", ".tmp"
    for entry in target.parent.iterdir():
        token = entry.name.removeprefix(prefix).removesuffix(suffix)
        if entry.name == f"{prefix}{token}{suffix}" and re.fullmatch("[0-9a-f]{16}", token):
            shutil.rmtree(entry, ignore_errors=True)
    directory = target.with_name(f"{prefix}{secrets.token_hex(8)}{suffix}")
    directory.mkdir()
    return directory


def _identity(directory: Path) -> str:
    """The random part of the temporary directory's name."""
    return directory.name.rsplit(".", 2)[1]


# --------------------------------------------------------------------------------- on every rank


def _write_pieces(
    directory: Path, rank: int, pieces: Mapping[str, Sequence[tuple[Region, np.ndarray[Any, Any]]]]
) -> dict[str, Any]:
    """Write this rank's file; return what rank 0 needs to know of it."""
    name = f"rank{rank:05d}.safetensors"
    kinds: dict[str, Any] = {}
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for kind, given in pieces.items():
        places = []
        for region, array in given:
            key = f"{kind}@{region}"
            if key in tensors:
                raise ValueError(f"{kind}: {region} is given twice")
            tensors[key] = array
            places.append([key, region.name, region.box, region.start, region.stop])
        dtypes = {array.dtype for _, array in given}
        kinds[kind] = {"dtypes": [dtype.name for dtype in dtypes], "pieces": places}
    if not tensors:
        return {"kinds": kinds, "file": None}
    if not directory.is_dir():
        raise CheckpointError(
            f"the directory {directory}, which rank 0 made, is not there for rank {rank}; a "
            "checkpoint must be on a file system that all ranks share"
        )
    file = directory / name
    try:
        save_file(tensors, file, metadata={IDENTITY: _identity(directory)})
    except SafetensorError as error:
        raise CheckpointError(f"cannot write {file}: {error}") from error
    _sync(file)
    return {"kinds": kinds, "file": [name, file.stat().st_size, crc32_of(file)]}


# ------------------------------------------------------------------------------------- on rank 0


def _assemble(
    directory: Path,
    parameters: Sequence[ParameterEntry],
    dtype: np.dtype[Any],
    records: Iterable[str],
    metadata: Mapping[str, Any],
) -> Manifest:
    files: dict[str, FileRecord] = {}
    dtypes: dict[str, set[str]] = {}
    pieces: dict[str, list[PieceRecord]] = {}
    for text in records:
        record = json.loads(text)
        name = ""
        if record["file"] is not None:
            name, nbytes, crc32 = record["file"]
            files[name] = FileRecord(nbytes, crc32)
        for kind, given in record["kinds"].items():
            dtypes.setdefault(kind, set()).update(given["dtypes"])
            of_kind = pieces.setdefault(kind, [])
            for key, parameter, box, start, stop in given["pieces"]:
                region = Region(parameter, tuple((low, high) for low, high in box), start, stop)
                of_kind.append(PieceRecord(name, key, region))
    for kind, names in dtypes.items():
        if len(names) > 1:
            raise CheckpointError(f"{kind}: pieces have the dtypes {sorted(names)}; one is allowed")
    return Manifest(
        identity=_identity(directory),
        dtype=np.dtype(dtype),
        parameters=tuple(parameters),
        arrays={
            kind: KindRecord.of(np.dtype(next(iter(dtypes[kind] or {np.dtype(dtype).name}))), given)
            for kind, given in pieces.items()
        },
        files=files,
        metadata=metadata,
    )


def _exchange(directory: Path, target: Path) -> None:
    """Put ``directory`` in the place of ``target``."""
    previous = previous_of(target)
    _sync(directory)
    if target.exists():
        if previous.exists():
            shutil.rmtree(previous)
        target.rename(previous)
        try:
            directory.rename(target)
        except BaseException:
            previous.rename(target)
            raise
    else:
        directory.rename(target)
    _sync(target.parent)
    shutil.rmtree(previous, ignore_errors=True)


def _write_durably(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")
    _sync(file)


def _sync(path: Path) -> None:
    """Have the content of a file or directory reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some file systems cannot sync a directory
            raise
    finally:
        os.close(descriptor)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
