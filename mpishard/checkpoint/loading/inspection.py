"""Descriptions and checks of checkpoints without a model, ranks or MPI."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mpishard.base import Array, CheckpointError, Metadata
from mpishard.checkpoint.format.manifest import MANIFEST, PARAMETERS, Manifest
from mpishard.checkpoint.format.tensor_file import FileRecord
from mpishard.checkpoint.loading.mapped_file import MappedFile
from mpishard.checkpoint.loading.reader import CheckpointReader, find_checkpoint
from mpishard.checkpoint.loading.restore import open_whole


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """Content of a checkpoint, as `check` and `describe` found it.

    Parameters
    ----------
    path : Path
        The directory.
    parameter_count : int
        Number of elements of all parameters.
    shapes : mapping of str to tuple
        Shape of each parameter, in order.
    kinds : mapping of str to str
        Dtype of each kind of array: "parameters", and those of an optimizer's state.
    files : mapping of str to int
        Length of each file in bytes.
    metadata : mapping
        Values that were saved besides the arrays.
    """

    path: Path
    parameter_count: int
    shapes: Mapping[str, tuple[int, ...]]
    kinds: Mapping[str, str]
    files: Mapping[str, int]
    metadata: Metadata

    def __str__(self) -> str:
        vectors = ", ".join(f"{kind} ({dtype})" for kind, dtype in self.kinds.items())
        return (
            f"{self.path} is whole: {self.parameter_count:,} elements in {len(self.shapes)} "
            f"parameters; {vectors}; {len(self.files)} files, {sum(self.files.values()):,} bytes"
        )


def check(path: str | os.PathLike[str]) -> CheckpointReport:
    """Read a whole checkpoint, compare its checksums, and return a report.

    Raises
    ------
    FileNotFoundError
        If there is no checkpoint.
    CheckpointError
        If the checkpoint is incomplete, damaged or of another version.
    """
    with CheckpointReader(path) as reader:
        reader.verify()
        return _report(reader)


def describe(path: str | os.PathLike[str]) -> CheckpointReport:
    """Return a report of a checkpoint, after a check of only the lengths of its files.

    Raises
    ------
    FileNotFoundError, CheckpointError
        As for `CheckpointReader`.
    """
    with CheckpointReader(path) as reader:
        return _report(reader)


def _report(reader: CheckpointReader) -> CheckpointReport:
    return CheckpointReport(
        path=reader.path,
        parameter_count=reader.length,
        shapes={entry.name: entry.shape for entry in reader.parameters},
        kinds={kind: dtype.name for kind, dtype in reader.kinds.items()},
        files=reader.file_sizes,
        metadata=reader.metadata,
    )


@dataclass(frozen=True, slots=True)
class CheckpointProblem:
    """Damaged part of a checkpoint.

    Parameters
    ----------
    file : str
        Name of the file.
    tensors : tuple of str
        Tensors in this part: ``"parameters of <name>"``, ``"optimizer/<state> of <name>"``.
    reason : str
        Description of the damage.
    """

    file: str
    tensors: tuple[str, ...]
    reason: str


def find_problems(
    path: str | os.PathLike[str], progress: Callable[[int, int], object] | None = None
) -> list[CheckpointProblem]:
    """Read a whole checkpoint, compare its checksums, and list every problem.

    Parameters
    ----------
    path : path
        The directory, or a folder of checkpoints, of which the newest is read.
    progress : callable, optional
        Function that is called with the number of bytes read, and the total of all files.

    Returns
    -------
    list of CheckpointProblem
        The problems; an empty list if every byte is verified.

    Raises
    ------
    TypeError, ValueError
        If the path is not a path or is blank.
    FileNotFoundError
        If there is no checkpoint.
    CheckpointError
        If the path is a file.
    """
    return problems_in(find_checkpoint(path), progress)


def problems_in(
    directory: Path, progress: Callable[[int, int], object] | None = None
) -> list[CheckpointProblem]:
    """Return what `find_problems` returns, for one directory, which may lack its manifest."""
    try:
        # The manifest is written last. If it is missing, the save was interrupted.
        # A broken link is there: it is reported as a manifest that cannot be read.
        if not os.path.lexists(directory / MANIFEST):
            return [CheckpointProblem(MANIFEST, (), "it is missing")]
        manifest = Manifest.read(directory)
    except OSError as error:  # This includes CheckpointError.
        return [CheckpointProblem(MANIFEST, (), str(error))]
    total = sum(record.nbytes for record in manifest.files.values())
    tables = manifest.tables()
    problems, done, listed = [], 0, manifest.tensors_by_file()
    for name, record in manifest.files.items():
        for low, high, reason in _read_through(
            directory / name, record, listed[name], tables[name]
        ):
            if reason:
                problems.append(CheckpointProblem(name, manifest.within(name, low, high), reason))
            done += high - low
            if progress is not None:
                progress(done, total)
    return problems


def _read_through(
    file: Path, record: FileRecord, tensors: Mapping[str, tuple[int, int]], table: int | None
) -> Iterator[tuple[int, int, str]]:
    """Yield (start, stop, problem) of ranges of bytes, in order; "" if there is no problem."""
    try:
        # A file of another length is not read.
        tear = record.tear(file)
        if tear:
            yield 0, record.nbytes, f"it {tear}"
            return
        # `MappedFile.verify` would stop at the first fault, and here each is listed.
        mapped = MappedFile(file, record, tensors, table)
    except (OSError, ValueError) as error:
        yield 0, record.nbytes, f"it cannot be read: {error}"
        return
    for block in range(mapped.block_count):
        low, high = mapped.bounds(block)
        try:
            fault = mapped.block_fault(block)
        except OSError as error:
            fault = f"bytes {low} to {high} cannot be read: {error}"
        yield low, high, fault
        # The header is in the first block. If that is damaged, a comparison tells nothing more.
        if block == 0 and not fault:
            yield 0, 0, mapped.header_fault()
    mapped.close()


def load_arrays(path: str | os.PathLike[str]) -> dict[str, Array]:
    """Return the parameters of a checkpoint, by name.

    Returns
    -------
    dict of str to array
        New NumPy arrays in the parameters' shapes, in the model's order.

    Raises
    ------
    FileNotFoundError, CheckpointError
        As for `CheckpointReader`, and if an optimizer was saved without its model.
    """

    def read(reader: CheckpointReader) -> dict[str, Array]:
        if PARAMETERS not in reader.kinds:
            kinds = sorted(reader.kinds)
            raise CheckpointError(f"{reader.path} holds {kinds}, and no {PARAMETERS}")
        return {e.name: reader.read_whole(PARAMETERS, e) for e in reader.parameters}

    # A save may replace the checkpoint while it is read, so that it may have to be opened again.
    reader, arrays = open_whole(lambda: path, None, read)
    reader.close()
    return arrays
