"""Reads of any region of a checkpoint, whatever regions were written."""

from __future__ import annotations

import math
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

import numpy as np

from mpishard.base import (
    Array,
    CheckpointError,
    DType,
    Metadata,
    array_namespace,
    check_path,
    nearest,
)
from mpishard.checkpoint.format.coverage import check_region
from mpishard.checkpoint.format.folder import LATEST, newest_of, previous_of
from mpishard.checkpoint.format.manifest import MANIFEST, Manifest
from mpishard.checkpoint.format.tensor_file import PieceRecord
from mpishard.checkpoint.loading.mapped_file import MappedFile
from mpishard.sharding import (
    FLAT,
    Box,
    ParameterEntry,
    Region,
    box_shape,
    box_within,
    boxes_of,
    by_parameter,
    join_dims,
    overlapping,
    shared_box,
)

_start = attrgetter("region.start")
_BLOCK = 1 << 22  # Number of elements that are copied at a time.


@dataclass(frozen=True, slots=True)
class SharedRegion:
    """Common part of a stored region and a requested region.

    Parameters
    ----------
    shared : Box
        Box of the common elements.
    source, target : Box
        Boxes of the two regions that contain the elements.
    source_start : int
        Start of ``source`` in the stored values.
    target_part : slice
        Range of ``target`` in the requested values.
    """

    shared: Box
    source: Box
    source_start: int
    target: Box
    target_part: slice

    @property
    def source_span(self) -> slice:
        """Range of the stored values from the first common element to the last."""
        # Row-major indices, in the source box, of the first and the last common element.
        first = last = 0
        for (low, high), (start, stop) in zip(self.shared, self.source, strict=True):
            first = first * (stop - start) + low - start
            last = last * (stop - start) + high - 1 - start
        return slice(self.source_start + first, self.source_start + last + 1)

    def copy(self, values: Array, out: Array) -> None:
        """Copy the elements from the stored values to the requested ones.

        Parameters
        ----------
        values : array
            Values of the stored region, 1-D.
        out : Array
            Values of the requested region, 1-D, in host or GPU memory.
        """
        sizes = box_shape(self.source)
        stored = values[self.source_start : self.source_start + math.prod(sizes)].reshape(sizes)
        source = stored[box_within(self.shared, self.source)]
        wanted = out[self.target_part].reshape(box_shape(self.target))
        target, xp = wanted[box_within(self.shared, self.target)], array_namespace(out)
        # A copy to a GPU needs as much memory again: that of a block, or of a longer row.
        rows = max(1, _BLOCK // math.prod(source.shape[1:]))
        for first in range(0, len(source), rows):
            target[first : first + rows] = xp.asarray(source[first : first + rows])


def shared_regions(source: Region, target: Region) -> Iterator[SharedRegion]:
    """Yield the common parts of two regions of one tensor."""
    if source.box == target.box:  # In the most common case both are ranges of the same box.
        low, high = max(source.start, target.start), min(source.stop, target.stop)
        if low < high:
            stored, wanted = ((source.start, source.stop),), ((target.start, target.stop),)
            yield SharedRegion(((low, high),), stored, 0, wanted, slice(0, target.length))
        return
    if shared_box(source.box, target.box) is None:
        return
    # Joined dims make longer rows, and therefore fewer boxes to copy.
    source_box, target_box = join_dims([source.box, target.box])
    wanted_boxes = list(boxes_of(Region(target.name, target_box, target.start, target.stop)))
    for box, part in boxes_of(Region(source.name, source_box, source.start, source.stop)):
        for other, other_part in wanted_boxes:
            shared = shared_box(box, other)
            if shared is not None:
                yield SharedRegion(shared, box, part.start, other, other_part)


_NAMED = 10  # Maximum number of differences, or names of files, in a message.


class CheckpointReader:
    """Checkpoint that is open for reading. Nothing is collective: each rank opens its own.

    The constructor reads the manifest and compares the files' lengths. Arrays stay on disk until
    `read`. The reader is a context manager; without a ``with`` statement call `close`.

    Parameters
    ----------
    path : path
        The directory of a checkpoint, or a folder of checkpoints, of which the newest is opened. If
        a save was killed between its two renames, the checkpoint that it would have replaced is
        opened.

    Raises
    ------
    TypeError, ValueError
        If the path is not a path or is blank.
    FileNotFoundError
        If there is no checkpoint. The message lists the files that are there.
    CheckpointError
        If the checkpoint is incomplete, damaged or of another version.

    Attributes
    ----------
    path : Path
        The directory that is read.
    identity : str
        Random name of the save that wrote the checkpoint.
    parameters : tuple of ParameterEntry
        The parameters along the flat vector.
    dtype : dtype
        Dtype of the parameters.
    length : int
        Number of elements of all parameters.
    kinds : dict of str to dtype
        Dtype of each kind of arrays.
    metadata : mapping
        Values that were saved besides the arrays.
    file_sizes : dict of str to int
        Length of each file in bytes, by name.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = find_checkpoint(path)
        manifest = self.path / MANIFEST
        try:
            self._manifest = Manifest.read(self.path)
        except CheckpointError as error:
            raise CheckpointError(f"cannot use {manifest}: {error}") from error
        found = self._manifest
        self.identity = found.identity
        self.parameters = found.parameters
        self.dtype = found.dtype
        self.length = found.length
        self.kinds = {kind: record.dtype for kind, record in found.arrays.items()}
        self.metadata = _of_today(found.metadata)
        self.file_sizes = {name: file.nbytes for name, file in found.files.items()}
        self._entries = {entry.name: entry for entry in found.parameters}
        # Pieces of the flat vector in its order, for bisection. They do not overlap.
        self._flat = {
            kind: sorted(record.pieces.get(FLAT, ()), key=_start)
            for kind, record in found.arrays.items()
        }
        self._tensors = found.tensors_by_file()
        self._tables = found.tables()
        # Files are opened on first use, because a rank needs only those with its regions.
        self._files: dict[str, MappedFile] = {}
        # Lengths are compared before memory is allocated for the content.
        self._check_sizes()

    def __repr__(self) -> str:
        kinds = ", ".join(f"{kind} of {dtype}" for kind, dtype in self.kinds.items())
        return f"CheckpointReader({self.path}: {self.length} elements; {kinds})"

    def parameters_of(self, kind: str) -> list[ParameterEntry]:
        """Return the parameters of a kind: all, or for an optimizer's kind those not frozen."""
        return self._manifest.parameters_of(kind)

    def read(self, kind: str, region: Region, out: Array) -> None:
        """Fill ``out`` with a region of an array of a kind, such as a parameter's values.

        Only the blocks of each piece from the region's first element to its last are read. Their
        checksums are compared on first use.

        Parameters
        ----------
        kind : str
            One of `kinds`.
        region : Region
            The region. It need not be one that was written.
        out : Array
            Array of shape (region.length,) and the kind's dtype, in host or GPU memory.

        Raises
        ------
        ValueError
            As for `check_readable`.
        CheckpointError
            If a file cannot be read, or has changed since it was written.
        """
        self.check_readable(kind, region, out)
        # Some pieces may be of single parameters, also in a region of the flat vector.
        for part, values_of_part in self.readable(kind, [(region, out)], self.parameters):
            for shared, values in self.verified(kind, part):
                shared.copy(values, values_of_part)

    def verified(self, kind: str, region: Region) -> Iterator[tuple[SharedRegion, Array]]:
        """Compare the checksums of what `read` would copy, and yield it, piece by piece.

        Yields
        ------
        shared : SharedRegion
            The common part of a piece and the region.
        values : array
            The values of the piece.

        Raises
        ------
        CheckpointError
            As for `read`.
        """
        dtype = self._manifest.arrays[kind].dtype
        for piece in self._pieces(kind, region):
            # Files of pieces that share nothing with the region stay closed.
            for shared in shared_regions(piece.region, region):
                file = self._open(piece.file)
                what = f"{kind} of {self._names(region)}"
                yield shared, file.values(piece, dtype, shared.source_span, what)

    def _pieces(self, kind: str, region: Region) -> Iterator[PieceRecord]:
        """Yield stored pieces of a region's tensor; for a parameter, also its part of flat ones."""
        record = self._manifest.arrays[kind]
        flat, start, stop = self._flat[kind], region.start, region.stop
        if region.name != FLAT:
            yield from record.pieces.get(region.name, ())
            entry = self._entries[region.name]
            start, stop = entry.start, entry.stop
        first = max(0, bisect_right(flat, start, key=_start) - 1)
        for piece in flat[first : bisect_left(flat, stop, key=_start)]:
            low, high = max(start, piece.region.start), min(stop, piece.region.stop)
            if region.name == FLAT:
                yield piece
            elif low < high:
                offset = piece.offset + (low - piece.region.start) * record.dtype.itemsize
                yield PieceRecord(piece.file, offset, entry.region(low, high))

    def _names(self, region: Region) -> str:
        """Return the parameters of a region, for messages."""
        if region.name != FLAT:
            return region.name
        within = overlapping(self.parameters, region.start, region.stop)
        first, last = within[0].name, within[-1].name
        return first if first == last else f"{first} to {last}"

    def readable(
        self,
        kind: str,
        pieces: Sequence[tuple[Region, Array]],
        parameters: Sequence[ParameterEntry],
    ) -> Sequence[tuple[Region, Array]]:
        """Return pieces of a model with ``parameters``, in regions that `read` can find.

        A region of the flat vector stays if the checkpoint has the same vector, in ranges.
        Otherwise it is cut at the bounds of parameters.
        """
        stored = self._manifest.arrays.get(kind)
        is_flat = stored is not None and stored.pieces.keys() == {FLAT}
        if is_flat and self.parameters == tuple(parameters):
            return pieces
        return [*by_parameter(pieces, parameters)]

    def read_whole(self, kind: str, entry: ParameterEntry) -> Array:
        """Return a new array of a parameter's shape, filled by `read`."""
        flat = np.empty(entry.size, self._manifest.arrays[kind].dtype)
        if flat.size:
            self.read(kind, Region.whole(entry.name, entry.shape), flat)
        return flat.reshape(entry.shape)

    def check_readable(self, kind: str, region: Region, out: Array) -> None:
        """Refuse arguments that `read` refuses, without reading.

        Raises
        ------
        ValueError
            If the checkpoint has no such kind or parameter, or no array of this kind because the
            parameter was frozen. If the region is not a part of the parameter, or ``out`` has
            another shape or dtype.
        """
        if kind not in self._manifest.arrays:
            raise ValueError(f"{self.path} holds {sorted(self._manifest.arrays)}, and no {kind!r}")
        if out.shape != (region.length,):
            raise ValueError(
                f"{kind}: out must have shape ({region.length},) for {region}, got {out.shape}"
            )
        dtype = self._manifest.arrays[kind].dtype
        if out.dtype != dtype:
            raise ValueError(
                f"{kind}: the checkpoint {self.path} has dtype {dtype.name}, out has "
                f"{out.dtype.name}"
            )
        if region.name not in self._entries and region.name != FLAT:
            raise ValueError(f"{self.path} holds no parameter {region.name!r}")
        is_flat = region.name == FLAT
        shape = (self.length,) if is_flat else self._entries[region.name].shape
        try:
            check_region(region, shape)
        except ValueError as error:
            raise ValueError(f"{kind}: {error}") from None
        within = (
            overlapping(self.parameters, region.start, region.stop)
            if is_flat
            else [self._entries[region.name]]
        )
        frozen = [entry.name for entry in within if not self._manifest.has(kind, entry)]
        if frozen:
            raise ValueError(
                f"{self.path} holds no {kind} of {frozen[0]}, which was frozen when it was saved"
            )

    def not_saved(self, parameters: Sequence[ParameterEntry]) -> frozenset[str]:
        """Return the names of frozen parameters that the checkpoint leaves to the model.

        Earlier releases saved no frozen parameter of a PyTorch module.
        """
        if not all(entry.trainable for entry in self.parameters):
            return frozenset()
        missing = (e.name for e in parameters if not e.trainable and e.name not in self._entries)
        return frozenset(missing)

    def require(self, parameters: Sequence[ParameterEntry], dtype: DType) -> None:
        """Refuse a model that the checkpoint does not fit.

        Parameters
        ----------
        parameters : sequence of ParameterEntry
            The model's parameters.
        dtype : dtype
            The model's dtype.

        Raises
        ------
        CheckpointError
            If names, shapes or dtype differ. The message lists the differences.
        """
        # By name: the order may differ, because regions are found by the names of their parameters.
        saved = {entry.name: entry.shape for entry in self.parameters}
        wanted = {entry.name: entry.shape for entry in parameters}
        # The dtype comes first, because it concerns every parameter.
        pairs: list[tuple[str, Any, Any]] = [("dtype", self.dtype.name, np.dtype(dtype).name)]
        pairs += [(name, saved.get(name), wanted.get(name)) for name in saved | wanted]
        differences = []
        for name, stored, own in pairs:
            if own is None:
                differences.append(f"{name}: {stored} in the checkpoint, not in the model")
            elif stored is None:
                differences.append(f"{name}: {own} in the model, not in the checkpoint")
            elif stored != own:
                differences.append(f"{name}: {stored} in the checkpoint, {own} in the model")
        if differences:
            more = len(differences) - _NAMED
            lines = differences[:_NAMED] + ([f"and {more} more"] if more > 0 else [])
            raise CheckpointError(
                f"the checkpoint {self.path} does not fit the model:\n  " + "\n  ".join(lines)
            )

    def verify(self, part: int = 0, parts: int = 1) -> None:
        """Read every file and compare its checksums.

        Parameters
        ----------
        part, parts : int
            Share of each file's blocks to read, part ``part`` of ``parts``, so that ranks can
            divide the work.

        Raises
        ------
        CheckpointError
            If a file has changed since it was written. The message names the first changed block of
            each such file.
        """
        self._check_sizes()
        changed = []
        # The check continues after an error, so that the message names all damaged files.
        for name in self._manifest.files:
            file = self._open(name)
            count = file.block_count
            try:
                # Ranks divide blocks and not files, because files may differ in size.
                file.verify(part * count // parts, (part + 1) * count // parts)
                if part == 0:
                    file.check_header()
            except CheckpointError as error:
                changed.append(str(error))
        if changed:
            raise CheckpointError("; ".join(changed))

    def close(self) -> None:
        """Close the files. A later `read` opens them again."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_sizes(self) -> None:
        torn = self._manifest.torn_files(self.path)
        if torn:
            raise CheckpointError(f"{self.path} is torn: {'; '.join(torn)}")

    def _open(self, name: str) -> MappedFile:
        if name not in self._files:
            try:
                self._files[name] = MappedFile(
                    self.path / name,
                    self._manifest.files[name],
                    self._tensors[name],
                    self._tables[name],
                    self.was_replaced,
                )
            except (OSError, ValueError) as error:
                raise CheckpointError(f"cannot read {self.path / name}: {error}") from error
        return self._files[name]

    def was_replaced(self) -> bool:
        """Return True if another checkpoint, or none, is at `path` now.

        A save to the same path may replace files while they are read. That is not damage.
        """
        # A manifest that cannot be read counts, too: a save may be between its two renames.
        try:
            return Manifest.read(self.path).identity != self.identity
        except (OSError, ValueError):
            return True


def _of_today(metadata: Mapping[str, object]) -> Metadata:
    """Return metadata in today's form.

    Earlier releases had the state of a PyTorch loop in the user's part.
    """
    # The keys must be exactly these, because a user's own metadata may have some of them.
    model, user = metadata.get("model"), metadata.get("user")
    if not (isinstance(model, Mapping) and model.keys() == {"strategy", "world_size"}):
        return metadata
    if not (isinstance(user, Mapping) and user.keys() == {"step", "torch", "user"}):
        return metadata
    rest = {"step": user["step"], "user": user["user"]}
    return {**metadata, "model": {**model, "beside": user["torch"]}, "user": rest}


def find_single(path: str | os.PathLike[str]) -> Path | None:
    """Return the directory of the single checkpoint ``path``, or None if there is none.

    The path may then be a folder of checkpoints.

    Raises
    ------
    TypeError, ValueError
        If the path is not a path or is blank.
    CheckpointError
        If it is a file.
    """
    check_path("the path of a checkpoint", path)
    target = Path(path).resolve()
    # Between the two renames of a save the former checkpoint is at `previous_of`, and a killed save
    # leaves it there. The target is tried twice, as a save may put its checkpoint there meanwhile.
    for directory in (target, previous_of(target), target):
        if (directory / MANIFEST).is_file():
            return directory
        if directory.is_file():
            raise CheckpointError(
                f"{directory} is a file; a checkpoint is a directory, which `mpishard checkpoint "
                "convert` makes of a safetensors file"
            )
    return None


def find_checkpoint(path: str | os.PathLike[str]) -> Path:
    """Return the directory of the checkpoint ``path``, or of the newest in the folder ``path``.

    Raises
    ------
    TypeError, ValueError, FileNotFoundError, CheckpointError
        As for `CheckpointReader`.
    """
    found = find_single(path)
    target = Path(path).resolve()
    if found is None:
        found = newest_of(target)
    if found is not None:
        return found
    if target.is_dir():
        place, what = target, f"{target} holds no {MANIFEST}"
    else:
        place, what = target.parent, f"there is no checkpoint {target}"
    if not place.is_dir():
        raise FileNotFoundError(f"{what}; {place} does not exist")
    names = sorted(entry.name for entry in place.iterdir() if not entry.name.startswith("."))
    near = _checkpoints_near(place)
    if near:
        meant = [each for each in near if target.name in each.parts] or near
        listed = ", ".join(map(str, meant[:_NAMED])) + (", ..." if len(meant) > _NAMED else "")
        raise FileNotFoundError(f"{what}; did you mean {listed}?")
    if place is not target:  # the files beside a path that is misspelled explain nothing
        hint = nearest(target.name, names)
        raise FileNotFoundError(f"{what}, and none in the folder {place} either{hint}")
    listed = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
    raise FileNotFoundError(f"{what}, and no checkpoint; it holds {listed or 'nothing'}")


def _checkpoints_near(place: Path) -> list[Path]:
    """Return the folders of checkpoints in ``place``, in its runs, and in those of its ``runs``."""
    # Few patterns, because ``place`` may be a home folder.
    patterns = ("", "*/", "*/checkpoint/", "runs/*/", "runs/*/checkpoint/")
    found = (latest.parent for pattern in patterns for latest in place.glob(pattern + LATEST))
    return sorted(dict.fromkeys(found))
