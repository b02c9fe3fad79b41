"""Sources of tensors for a conversion: checkpoints and safetensors files."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import safetensors

from mpishard.base import Array, CheckpointError, Document, DType, Metadata, check_path
from mpishard.checkpoint.exchange.plain import CHOICES_HEADER
from mpishard.checkpoint.format.content import unspelled
from mpishard.checkpoint.format.manifest import MOST_DIMS, PARAMETERS
from mpishard.checkpoint.format.tensor_file import DTYPES_OF_FILES, LazyTensor
from mpishard.checkpoint.loading.reader import CheckpointReader
from mpishard.sharding import ParameterEntry, Region

CHECKPOINT_HEADER = "mpishard.checkpoint"
"""Key of a checkpoint's kinds and metadata, as JSON, in a file's metadata."""

INDEX = ".safetensors.index.json"
"""End of the name of a sharded directory's index file."""

NOTHING_BESIDE: Mapping[str, Any] = {"model": {}, "optimizer": None, "user": {}}
"""Metadata of a checkpoint that is made only of tensors."""

_SINGLE = "model.safetensors"
_BLOCK_BYTES = 16 << 20
_LONGEST_INDEX = 1 << 28  # Maximum bytes of an index.
_NAMED = 5  # Maximum number of names in a message.


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Tensors by kind and name, whose blocks are read when they are needed.

    Parameters
    ----------
    path : Path
        The file or directory.
    is_checkpoint : bool
        True for a checkpoint, False for safetensors files of any origin.
    tensors : mapping of str to mapping of str to LazyTensor
        Kind -> parameter's name -> tensor. One of the kinds is "parameters".
    metadata : mapping
        A checkpoint's metadata of its model, optimizer and so on.
    frozen : frozenset of str
        Names of the parameters that were not trained.
    """

    path: Path
    is_checkpoint: bool
    tensors: Mapping[str, Mapping[str, LazyTensor]]
    metadata: Metadata = field(default_factory=lambda: dict(NOTHING_BESIDE))
    frozen: frozenset[str] = frozenset()


@contextmanager
def open_source(path: str | os.PathLike[str]) -> Iterator[TensorSource]:
    """Open the tensors at ``path``, in any form, for a ``with`` statement.

    Parameters
    ----------
    path : path
        A checkpoint or a folder of checkpoints, a safetensors file, or a directory of such files
        with an index, as Hugging Face's libraries write it.

    Raises
    ------
    TypeError, ValueError
        If the path is not a path or is blank.
    FileNotFoundError
        If there are no tensors of such a form.
    CheckpointError
        If the files are malformed or incomplete.
    """
    check_path("the path to read", path)
    place = Path(path)
    with ExitStack() as stack:
        if place.is_file():
            yield _file_source(place, stack)
            return
        indexes = sorted(place.glob(f"*{INDEX}")) if place.is_dir() else []
        # With several indexes it is not known which model is wanted.
        if len(indexes) > 1:
            names = ", ".join(index.name for index in indexes)
            raise CheckpointError(f"{place} holds several indexes: {names}; one is needed")
        if indexes:
            yield _sharded_source(place, indexes[0], stack)
        elif (place / _SINGLE).is_file():
            yield _file_source(place / _SINGLE, stack)
        else:
            yield _checkpoint_source(stack.enter_context(CheckpointReader(place)))


def _checkpoint_source(reader: CheckpointReader) -> TensorSource:
    def lazy(kind: str, entry: ParameterEntry, dtype: DType) -> LazyTensor:
        def blocks() -> Iterator[Array]:
            whole = Region.whole(entry.name, entry.shape)
            step = max(1, _BLOCK_BYTES // dtype.itemsize)
            for start in range(0, whole.length, step):
                part = Region(entry.name, whole.box, start, min(start + step, whole.length))
                block = np.empty(part.length, dtype)
                reader.read(kind, part, block)
                yield block

        return LazyTensor(dtype, entry.shape, blocks)

    tensors = {
        kind: {entry.name: lazy(kind, entry, dtype) for entry in reader.parameters_of(kind)}
        for kind, dtype in reader.kinds.items()
    }
    if PARAMETERS not in tensors:
        raise CheckpointError(f"{reader.path} holds {sorted(tensors)}, and no {PARAMETERS}")
    frozen = frozenset(entry.name for entry in reader.parameters if not entry.trainable)
    return TensorSource(reader.path, True, tensors, {**NOTHING_BESIDE, **reader.metadata}, frozen)


def _file_source(file: Path, stack: ExitStack) -> TensorSource:
    opened = _open(file, stack)
    words = opened.metadata() or {}
    tensors = {name: _tensor_of(opened, file, name) for name in opened.offset_keys()}
    if CHECKPOINT_HEADER in words:
        # `consolidate` or `convert` made the file of a checkpoint. The names of its tensors begin
        # with their kinds.
        known = _json_object(file, CHECKPOINT_HEADER, words[CHECKPOINT_HEADER])
        kinds, metadata, frozen = (known.get(key) for key in ("kinds", "metadata", "frozen"))
        if not (
            _is_names(kinds)
            and _is_names(frozen)
            and isinstance(metadata, dict)
            and isinstance(metadata.get("user"), dict)
        ):
            raise CheckpointError(f"{file}: its header's {CHECKPOINT_HEADER!r} is malformed")
        metadata = {**NOTHING_BESIDE, **unspelled(metadata)}
        by_kind: dict[str, dict[str, LazyTensor]] = {PARAMETERS: {}, **{kind: {} for kind in kinds}}
        for key, tensor in tensors.items():
            kind = next((kind for kind in kinds if key.startswith(f"{kind}/")), PARAMETERS)
            by_kind[kind][key if kind == PARAMETERS else key.removeprefix(f"{kind}/")] = tensor
        return TensorSource(file, False, by_kind, metadata, frozenset(frozen))
    metadata = dict(NOTHING_BESIDE)
    if CHOICES_HEADER in words:
        choices = _json_object(file, CHOICES_HEADER, words[CHOICES_HEADER])
        metadata["model"] = {"choices": choices}
    return TensorSource(file, False, {PARAMETERS: tensors}, metadata)


def _is_names(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _sharded_source(directory: Path, index: Path, stack: ExitStack) -> TensorSource:
    # The size is checked before the file is read, as a wrong file of many GB would fill the memory.
    if index.stat().st_size > _LONGEST_INDEX:
        raise CheckpointError(f"{index} has more than {_LONGEST_INDEX} bytes")
    document = _json_object(index, "the index", index.read_bytes())
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict) or not _is_names(list(weight_map.values())):
        raise CheckpointError(f"{index} has no weight_map of names to files")
    for name, file in weight_map.items():
        # The index may be from an untrusted source. It must not name files outside its directory.
        if Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{index}: {name!r} is said to be in {file!r}, which is not the name of a "
                "safetensors file beside the index"
            )
    missing = sorted(f for f in set(weight_map.values()) if not (directory / f).is_file())
    if missing:
        raise CheckpointError(f"{directory} lacks {_listed(missing)}, which {index.name} names")
    found: dict[str, LazyTensor] = {}
    for file in dict.fromkeys(weight_map.values()):
        opened = _open(directory / file, stack)
        here = set(opened.offset_keys())
        mapped = {name for name, place in weight_map.items() if place == file}
        # Tensors that are not in the index would be left out silently.
        if here - mapped:
            raise CheckpointError(
                f"{directory / file} holds {_listed(sorted(here - mapped))}, which {index.name} "
                "lists in another file or not at all"
            )
        if mapped - here:
            raise CheckpointError(
                f"{directory / file} does not hold {_listed(sorted(mapped - here))}, which "
                f"{index.name} lists there"
            )
        found |= {name: _tensor_of(opened, directory / file, name) for name in mapped}
    return TensorSource(directory, False, {PARAMETERS: {name: found[name] for name in weight_map}})


def _open(file: Path, stack: ExitStack) -> Any:
    try:
        return stack.enter_context(safetensors.safe_open(file, "np"))
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{file} is not a complete safetensors file: {error}") from error


def _tensor_of(opened: Any, file: Path, name: str) -> LazyTensor:
    part = opened.get_slice(name)
    if part.get_dtype() not in DTYPES_OF_FILES:
        raise CheckpointError(
            f"{file}: {name!r} has dtype {part.get_dtype()}; {', '.join(DTYPES_OF_FILES)} are read"
        )
    dtype, shape = DTYPES_OF_FILES[part.get_dtype()], tuple(part.get_shape())
    if len(shape) > MOST_DIMS:
        raise CheckpointError(f"{file}: {name!r} has {len(shape)} dims; {MOST_DIMS} are the most")

    def blocks() -> Iterator[Array]:
        if not shape:
            yield opened.get_tensor(name).reshape(1)
            return
        # safetensors reads slices of the first dim, so that a block has whole rows.
        row = math.prod(shape[1:]) * dtype.itemsize
        step = max(1, _BLOCK_BYTES // max(1, row))
        for start in range(0, shape[0] if row else 0, step):
            yield part[start : min(start + step, shape[0])].reshape(-1)

    return LazyTensor(dtype, shape, blocks)


def _json_object(file: Path, what: str, text: str | bytes) -> Document:
    # The JSON reader keeps only the last of two equal names, so that a tensor would be lost.
    def distinct(pairs: list[tuple[str, Any]]) -> Document:
        found = dict(pairs)
        if len(found) < len(pairs):
            counts = Counter(name for name, _ in pairs)
            twice = sorted(name for name, count in counts.items() if count > 1)
            raise ValueError(f"these names occur twice: {_listed(twice)}")
        return found

    try:
        found = json.loads(text, object_pairs_hook=distinct)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: {what} is malformed: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file}: {what} is a JSON {type(found).__name__}, not an object")
    return found


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(map(repr, names[:_NAMED])) + (f" and {more} more" if more > 0 else "")
