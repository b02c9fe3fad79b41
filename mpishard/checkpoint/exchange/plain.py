"""Serialisation of a model that is whole in one process, to files and bytes."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mpishard.base import Array, Document, DType, Metadata, copy_into, to_host
from mpishard.checkpoint.format.content import OBJECT, Pieces, require_form
from mpishard.checkpoint.format.tensor_file import bytes_of, metadata_of, tensors_of
from mpishard.checkpoint.loading.restore import load
from mpishard.checkpoint.saving.save import save
from mpishard.contracts import ICheckpointableModel, PathLike
from mpishard.sharding import ParameterEntry, Placement

CHOICES_HEADER = "mpishard.choices"
"""Key of a model's choices, as JSON, in a file's metadata."""


class PlainModelFiles(ICheckpointableModel):
    """Serialisation of a flat vector, which a subclass returns from `_flat_vector`.

    `choices` returns other values that belong to the model; for most models there are none.
    """

    @abstractmethod
    def _flat_vector(self) -> Array:
        """Return the vector itself, shape (n,), not a copy."""

    @abstractmethod
    def checkpoint_parameters(self) -> Sequence[ParameterEntry]:
        """Return name, shape and start of each parameter."""

    def choices(self) -> Document:
        """Return values that are saved besides the parameters, as JSON; {} if all are defaults."""
        return {}

    def check_choices(self, choices: Mapping[str, object]) -> None:
        """Refuse `choices` of another model that do not fit this one.

        Raises
        ------
        ValueError
            If they do not fit. The message names them.
        """
        if choices:
            raise ValueError(
                f"the saved parameters need the settings {sorted(choices)}, which this "
                f"{type(self).__name__} does not have: load them into a model of the class that "
                "saved them"
            )

    def take_choices(self, choices: Mapping[str, object]) -> None:
        """Apply choices that `check_choices` has accepted; without any, return to the defaults."""

    def serialize(self) -> bytes:
        """Return the named parameters in safetensors format, with `choices` in its header."""
        vector = to_host(self._flat_vector())
        return named_bytes(self.checkpoint_parameters(), vector, self.choices())

    def deserialize(self, data: bytes) -> None:
        """Load parameters and choices from the bytes of `serialize`, also those of a sharded model.

        Raises
        ------
        TypeError, ValueError
            If ``data`` is something else, or from another model. Nothing has changed then.
        """
        vector = self._flat_vector()
        arrays, choices = tensors_of(data), choices_of(data)
        # Parameters and choices are checked before anything is written.
        values = packed_vector(arrays, self.checkpoint_parameters(), vector.dtype)
        self.check_choices(choices)
        copy_into(vector, values)
        self.take_choices(choices)

    def save_model(self, path: PathLike) -> None:
        """Write the parameters to a checkpoint directory.

        Raises
        ------
        ValueError
            If the path is blank.
        OSError
            If the checkpoint cannot be written (PermissionError without the permission). An earlier
            checkpoint at ``path`` is unchanged.
        """
        save(path, self)

    def load_model(self, path: PathLike) -> None:
        """Load parameters and choices from a checkpoint of any world size; needs no MPI.

        Raises
        ------
        ValueError
            If the path is blank.
        FileNotFoundError
            If there is no checkpoint.
        CheckpointError
            If the checkpoint is damaged or from another model (an OSError). Nothing has changed
            then.
        """
        load(path, self)

    def checkpointed(self) -> PlainCheckpoint:
        """Return the model in the form that `mpishard.checkpoint` saves and loads."""
        return PlainCheckpoint(self)


@dataclass(frozen=True, slots=True)
class PlainCheckpoint:
    """A plain model in the form that `mpishard.checkpoint` saves and loads.

    Parameters
    ----------
    model : PlainModelFiles
        The model.
    """

    model: PlainModelFiles

    @property
    def backend(self) -> None:
        """None, because one process writes and reads."""
        return

    @property
    def subject(self) -> int:
        """0, because nothing is communicated."""
        return 0

    @property
    def dtype(self) -> DType:
        """The dtype of the parameters."""
        dtype: DType = self.model._flat_vector().dtype
        return dtype

    def parameters(self) -> Sequence[ParameterEntry]:
        """Return name, shape and start of each parameter."""
        return self.model.checkpoint_parameters()

    def arrays_to_write(self) -> Pieces:
        """Return all parameters."""
        # The pieces are views of the model's vector, so that a load writes to the model itself.
        placement = Placement.whole(self.parameters())
        return {"parameters": placement.cut([(0, self.model._flat_vector())])}

    def arrays_to_read(self) -> Pieces:
        """Return all parameters, to be overwritten."""
        return self.arrays_to_write()

    def checkpoint_metadata(self) -> Metadata:
        """Return the model's `choices`."""
        choices = self.model.choices()
        return {"choices": choices} if choices else {}

    def check_metadata(self, metadata: Mapping[str, object]) -> None:
        """Refuse choices of another model."""
        self.model.check_choices(choices_in(metadata))

    def restored(self, metadata: Mapping[str, object]) -> None:
        """Apply the choices."""
        self.model.take_choices(choices_in(metadata))


def choices_in(metadata: Metadata) -> Document:
    """Return the choices in a checkpoint's metadata.

    Raises
    ------
    ValueError
        If the choices are not a JSON object, which no save writes.
    """
    require_form(metadata, {"choices?": OBJECT}, "metadata.model")
    return dict(metadata.get("choices", {}))


def named_bytes(
    records: Sequence[ParameterEntry], vector: Array, choices: Mapping[str, object]
) -> bytes:
    """Return a flat vector in host memory as named arrays in safetensors format, with choices."""
    # The keys are sorted, so that equal choices give equal bytes on all ranks.
    metadata = {CHOICES_HEADER: json.dumps(choices, sort_keys=True)} if choices else None
    return bytes_of({record.name: record.view(vector) for record in records}, metadata)


def choices_of(data: bytes) -> Document:
    """Return the choices in bytes of `named_bytes`, whose arrays `tensors_of` has read."""
    return dict(json.loads(metadata_of(data).get(CHOICES_HEADER, "{}")))


def packed_vector(
    arrays: Mapping[str, Array], records: Sequence[ParameterEntry], dtype: DType
) -> Array:
    """Return the flat vector of named arrays.

    Raises
    ------
    ValueError
        If names or shapes differ from the records'.
    """
    expected = {record.name: tuple(record.shape) for record in records}
    given = {name: tuple(array.shape) for name, array in arrays.items()}
    # Names and shapes are compared before the vector is allocated, which is as large as the model.
    wrong = sorted(n for n in expected | given if expected.get(n) != given.get(n))
    if wrong:
        name = wrong[0]
        raise ValueError(
            f"{len(wrong)} parameters do not fit the model, first {name!r}: expected shape "
            f"{expected.get(name, 'none')}, got {given.get(name, 'none')}"
        )
    vector = np.empty(sum(array.size for array in arrays.values()), dtype)
    for record in records:
        record.view(vector)[...] = arrays[record.name]
    return vector
