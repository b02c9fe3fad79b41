"""Conversion of checkpoints to files of other programs, and of such files to checkpoints."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from mpishard.base import Array, CheckpointError, as_count, as_flag, check_path
from mpishard.checkpoint.exchange.plain import CHOICES_HEADER, choices_in
from mpishard.checkpoint.exchange.sources import CHECKPOINT_HEADER, INDEX, TensorSource, open_source
from mpishard.checkpoint.format import disk
from mpishard.checkpoint.format.content import spelled
from mpishard.checkpoint.format.folder import Target
from mpishard.checkpoint.format.manifest import PARAMETERS, write_manifest
from mpishard.checkpoint.format.tensor_file import LazyTensor, RankFile, TensorFile, table_checksum
from mpishard.checkpoint.saving.free_space import require_space
from mpishard.sharding import ParameterEntry, Region

MAXIMUM_SHARD_BYTES = 5 * 10**9
"""Default maximum of the bytes of tensors in one file of a sharded directory."""

ProgressCallback = Callable[[int, int], object]
"""Function that is called with the number of bytes done, and the total of all tensors."""

_SUFFIX = ".safetensors"
# Suffixes of files in other formats. A target with such a name is not meant to be a directory.
_OTHER_FILES = {
    ".bin", ".ckpt", ".gguf", ".h5", ".hdf5", ".json", ".msgpack", ".npy", ".npz", ".onnx",
    ".pickle", ".pkl", ".pt", ".pth", ".tar", ".zip",
}  # fmt: skip
_ROOM = 1 << 20  # Free bytes needed for headers and a manifest, beside the tensors.
# Hugging Face's loaders refuse files without this key. The tensors are the same in every framework.
_FORMAT = {"format": "pt"}


class CheckpointForm(StrEnum):
    """Form of tensors on disk."""

    CHECKPOINT = "checkpoint"
    """A directory that `load` reads: safetensors files and ``manifest.json``."""
    SAFETENSORS = "safetensors"
    """One safetensors file with the parameters by name, in their global shapes."""
    HF = "hf"
    """A directory of safetensors files, with ``model.safetensors.index.json``."""


def consolidate(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    optimizer: bool = False,
    progress: ProgressCallback | None = None,
) -> Path:
    """Write a checkpoint as one safetensors file: the parameters by name, in their global shapes.

    The checkpoint is read and written a few MiB at a time, and each block's checksum is compared.
    The header keeps the checkpoint's metadata. If ``optimizer`` is True, `convert` can make the
    same checkpoint of the file again.

    Parameters
    ----------
    path : path
        The checkpoint, or a folder of checkpoints, of which the newest is taken.
    target : path
        File to make.
    optimizer : bool
        If True, other kinds of arrays are written, too, as ``<kind>/<parameter>``. An optimizer's
        states are ``optimizer/<state>/<parameter>``.
    progress : callable, optional
        Function that is called with the number of bytes written, and the total of all tensors.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    TypeError, ValueError
        If a path is not a path or is blank, or the target does not end with ".safetensors".
    FileExistsError
        If there is something at ``target``.
    FileNotFoundError, CheckpointError
        As for `CheckpointReader`, and if there is not enough room. Nothing is left behind then.
    """
    # All arguments are checked before the source is opened.
    is_full = as_flag("optimizer", optimizer)
    place = _fresh(target)
    if place.path.suffix != _SUFFIX:
        raise ValueError(f"the target is a file, whose name must end with {_SUFFIX}; got {target}")
    with open_source(path) as source:
        if not source.is_checkpoint:
            raise CheckpointError(f"{source.path} is not a checkpoint; convert reads other forms")
        chosen = source if is_full else _without_states(source)
        return _write(place, _observed(chosen, progress), CheckpointForm.SAFETENSORS)


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    form: CheckpointForm | str | None = None,
    *,
    maximum_shard_bytes: int = MAXIMUM_SHARD_BYTES,
    progress: ProgressCallback | None = None,
) -> Path:
    """Write parameters in another form: a checkpoint, one safetensors file, or several.

    A checkpoint made from other files has only parameters, with their names, and loads into any
    model that has these parameters. A checkpoint made from a checkpoint has all of its content, in
    one file. Tensors are read and written a few MiB at a time.

    Parameters
    ----------
    source : path
        A checkpoint or a folder of checkpoints, a safetensors file, or a directory of such files
        with an index, as Hugging Face's libraries write it.
    target : path
        File or directory to make.
    form : CheckpointForm or str, optional
        "checkpoint", "safetensors" or "hf". The default is "safetensors" if ``target`` ends with
        ".safetensors". Otherwise it is "hf" for a checkpoint, and "checkpoint" for other files.
    maximum_shard_bytes : int
        Maximum bytes of the tensors in one file of "hf". A larger tensor has a file of its own.
    progress : callable, optional
        Function that is called with the number of bytes written, and the total of all tensors.

    Returns
    -------
    Path
        The target.

    Raises
    ------
    TypeError, ValueError
        If a path is not a path or is blank, or the form is unknown. Also if no form is given, and
        the target has the suffix of another format, such as ``model.pt``.
    FileExistsError
        If there is something at ``target``.
    FileNotFoundError
        If there is nothing to read.
    CheckpointError
        If the source is malformed, incomplete, or has data that the target cannot represent, or if
        there is not enough room. Nothing is left behind then.
    """
    wanted = None if form is None else CheckpointForm(form)
    as_count("maximum_shard_bytes", maximum_shard_bytes)
    place = _fresh(target)
    with open_source(source) as found:
        if wanted is None:
            others = CheckpointForm.HF if found.is_checkpoint else CheckpointForm.CHECKPOINT
            is_file = place.path.suffix == _SUFFIX
            if place.path.suffix.lower() in _OTHER_FILES:
                raise ValueError(
                    f"{place.path.suffix} files are not written, and {target} would be a directory:"
                    f" name a file that ends with {_SUFFIX}, or a directory, whose form is "
                    '"checkpoint" or "hf"'
                )
            wanted = CheckpointForm.SAFETENSORS if is_file else others
        chosen = found if wanted is CheckpointForm.CHECKPOINT else _without_states(found)
        return _write(place, _observed(chosen, progress), wanted, maximum_shard_bytes)


def _fresh(target: str | os.PathLike[str]) -> Target:
    check_path("the path to write", target)
    _require_nothing_at(target)
    return Target(target)


def _require_nothing_at(target: str | os.PathLike[str]) -> None:
    if os.path.lexists(target):
        raise FileExistsError(f"{target} already exists: remove it, or choose another name")


def _without_states(source: TensorSource) -> TensorSource:
    metadata = {key: source.metadata[key] for key in ("model", "user")} | {"optimizer": None}
    parameters = {PARAMETERS: source.tensors[PARAMETERS]}
    return replace(source, tensors=parameters, metadata=metadata)


def _observed(source: TensorSource, progress: ProgressCallback | None) -> TensorSource:
    """Return the same source, whose tensors call ``progress`` when they are read."""
    if progress is None:
        return source
    total = _size(source)
    done = 0

    # A tensor is read when it is written, so that the bytes read are the progress of the file.
    def observed(tensor: LazyTensor) -> Iterator[Array]:
        nonlocal done
        for block in tensor.blocks():
            yield block
            done += block.nbytes
            progress(done, total)

    def watched(tensor: LazyTensor) -> LazyTensor:
        return replace(tensor, blocks=lambda: observed(tensor))

    tensors = {
        kind: {name: watched(tensor) for name, tensor in given.items()}
        for kind, given in source.tensors.items()
    }
    return replace(source, tensors=tensors)


def _size(source: TensorSource) -> int:
    return sum(tensor.nbytes for given in source.tensors.values() for tensor in given.values())


def _write(
    place: Target,
    source: TensorSource,
    form: CheckpointForm,
    maximum_shard_bytes: int = MAXIMUM_SHARD_BYTES,
) -> Path:
    # Beside the target, because a rename is atomic only within one file system.
    directory = place.make_temporary()
    try:
        require_space(directory, _size(source) + _ROOM)
        if form is CheckpointForm.SAFETENSORS:
            file = directory / "whole.safetensors"
            _whole_file(source).write(file)
            # A file may have been made meanwhile, and a rename would silently replace it.
            _require_nothing_at(place.path)
            disk.rename(file, place.path)
            disk.sync_directory(place.path.parent)
            disk.remove_tree(directory)
        else:
            if form is CheckpointForm.HF:
                _write_shards(source, directory, maximum_shard_bytes)
            else:
                _write_checkpoint(source, directory)
            place.put(directory)
    except BaseException:
        disk.remove_tree(directory)
        raise
    return place.path


def _whole_file(source: TensorSource) -> TensorFile:
    tensors: dict[str, LazyTensor] = {}
    kinds = [kind for kind in source.tensors if kind != PARAMETERS]
    for name in source.tensors[PARAMETERS]:
        if any(name.startswith(f"{kind}/") for kind in kinds):
            raise CheckpointError(
                f"{source.path}: the parameter name {name!r} begins like the names of another "
                f"kind of tensor ({', '.join(kinds)}), so one file cannot contain both. Leave out "
                "the optimizer, or rename the parameter"
            )
    for kind, given in source.tensors.items():
        for name, tensor in given.items():
            key = name if kind == PARAMETERS else f"{kind}/{name}"
            if key in tensors:
                raise CheckpointError(f"{source.path}: two tensors would have the name {key!r}")
            tensors[key] = tensor
    known = {
        "kinds": kinds,
        "metadata": spelled(source.metadata),
        "frozen": sorted(source.frozen),
    }
    words = _FORMAT | {CHECKPOINT_HEADER: json.dumps(known, allow_nan=False)}
    choices = choices_in(source.metadata.get("model") or {})
    if choices:
        # The bytes of a model's `serialize` have this key, too, so that `deserialize` can read the
        # file.
        words[CHOICES_HEADER] = json.dumps(choices, sort_keys=True)
    return TensorFile(tensors, words)


def _write_shards(source: TensorSource, directory: Path, maximum_bytes: int) -> None:
    parameters = source.tensors[PARAMETERS]
    shards: list[dict[str, LazyTensor]] = [{}]
    filled = 0
    for name, tensor in parameters.items():
        # A tensor is never cut. A tensor that is larger than the maximum has a file of its own.
        if shards[-1] and filled + tensor.nbytes > maximum_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    weight_map: dict[str, str] = {}
    # Each name contains the number of files, so that all shards are chosen before one is written.
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}{_SUFFIX}"
        TensorFile(shard, _FORMAT).write(directory / name)
        weight_map |= dict.fromkeys(shard, name)
    total = sum(tensor.nbytes for tensor in parameters.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    disk.write_file(directory / f"model{INDEX}", [json.dumps(index, indent=2).encode() + b"\n"])


def _write_checkpoint(source: TensorSource, directory: Path) -> None:
    entries: list[ParameterEntry] = []
    for name, tensor in source.tensors[PARAMETERS].items():
        start = entries[-1].stop if entries else 0
        entries.append(
            ParameterEntry(name, tensor.shape, start, trainable=name not in source.frozen)
        )
    if not entries:
        raise CheckpointError(f"{source.path} holds no tensors")
    pieces: dict[str, list[tuple[Region, Any]]] = {}
    for kind, given in source.tensors.items():
        first: dict[str, str] = {}  # Dtype -> name of the first tensor that has it.
        for name, tensor in given.items():
            first.setdefault(tensor.dtype.name, name)
        if len(first) > 1:
            named = ", ".join(f"{name!r} has {dtype}" for dtype, name in first.items())
            raise CheckpointError(
                f"{source.path}: {named}; the {kind} of a checkpoint have one dtype, as those of "
                "a model"
            )
        pieces[kind] = [
            (Region.whole(name, tensor.shape), replace(tensor, shape=(tensor.size,)))
            for name, tensor in given.items()
            # A region has at least one element, so that an empty tensor has none.
            if tensor.size
        ]
    # One file, as one rank would have saved it. Any number of ranks can load it.
    file = RankFile(0, pieces, table_checksum(entries))
    file.write(directory)
    dtype = source.tensors[PARAMETERS][entries[0].name].dtype
    write_manifest(directory, 1, entries, dtype, source.metadata, [file.record()])
