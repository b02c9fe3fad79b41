"""Files and bytes for a model that lies whole in one process."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from mpishard.arrays import Array, copy_into, to_host
from mpishard.checkpoint.snapshot import load, save
from mpishard.contracts import ICheckpointableModel, PathLike
from mpishard.sharding import ParameterEntry

__all__ = ["PlainModelFiles", "named_arrays", "named_arrays_of", "packed_vector"]


class PlainModelFiles(ICheckpointableModel):
    """Serialisation of a flat vector that a subclass gives as `_flat_vector`."""

    @abstractmethod
    def _flat_vector(self) -> Array:
        """The vector itself, shape (n,), not a copy."""

    @abstractmethod
    def checkpoint_parameters(self) -> Sequence[ParameterEntry]:
        """Name, shape and start of each parameter."""

    def serialize(self) -> bytes:
        """The named parameters in safetensors format."""
        return safetensors.numpy.save(
            named_arrays(self.checkpoint_parameters(), to_host(self._flat_vector()))
        )

    def deserialize(self, data: bytes) -> None:
        """Take parameters from what `serialize` gave, also of a sharded model."""
        vector = self._flat_vector()
        records = self.checkpoint_parameters()
        copy_into(vector, packed_vector(named_arrays_of(data), records, vector.dtype))

    def save_model(self, path: PathLike) -> None:
        """Write the parameters to a checkpoint directory.

        Raises
        ------
        ValueError
            For a blank path.
        OSError
            Where it cannot be written, a PermissionError where that is why; what was there is
            as it was.
        """
        save(path, self)

    def load_model(self, path: PathLike) -> None:
        """Take parameters from a checkpoint of any world size and strategy; needs no MPI.

        Raises
        ------
        ValueError
            For a blank path.
        FileNotFoundError
            Where nothing is there.
        CheckpointError
            Where it is torn or of another model, an OSError; nothing has changed then.
        """
        load(path, self)

    @property
    def checkpoint_backend(self) -> None:
        """None: one process writes and reads."""
        return

    @property
    def checkpoint_dtype(self) -> np.dtype[Any]:
        """The dtype of what is written."""
        dtype: np.dtype[Any] = self._flat_vector().dtype
        return dtype

    def arrays_to_write(self) -> Mapping[str, Sequence[tuple[int, Array]]]:
        """The whole vector."""
        return {"parameters": [(0, self._flat_vector())]}

    def arrays_to_read(self) -> Mapping[str, Sequence[tuple[int, Array]]]:
        """The whole vector, to be overwritten."""
        return self.arrays_to_write()

    def checkpoint_metadata(self) -> Mapping[str, Any]:
        """Nothing beside the parameters."""
        return {}

    def restored(self, metadata: Mapping[str, Any]) -> None:
        """Nothing is cached, so nothing is left to do."""


def named_arrays(records: Sequence[ParameterEntry], vector: Array) -> dict[str, Array]:
    """Views of a flat vector by name, shaped."""
    result = {}
    for record in records:
        stop = record.start + int(np.prod(record.shape, dtype=np.int64))
        result[record.name] = vector[record.start : stop].reshape(record.shape)
    return result


def named_arrays_of(data: bytes) -> dict[str, Array]:
    """The named arrays in what ``serialize`` gave.

    Raises
    ------
    TypeError
        For what are no bytes.
    ValueError
        Where it is something else, or torn.
    """
    if not isinstance(data, bytes | bytearray):
        raise TypeError(f"deserialize needs bytes, got {type(data).__name__}")
    try:
        return safetensors.numpy.load(bytes(data))
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"these {len(data)} bytes are not what serialize() gave: {error}"
        ) from None


def packed_vector(
    arrays: Mapping[str, Array], records: Sequence[ParameterEntry], dtype: np.dtype[Any]
) -> Array:
    """The flat vector of named arrays.

    Raises
    ------
    ValueError
        Where names or shapes differ from the records'.
    """
    expected = {record.name: tuple(record.shape) for record in records}
    given = {name: tuple(array.shape) for name, array in arrays.items()}
    wrong = sorted(n for n in expected | given if expected.get(n) != given.get(n))
    if wrong:
        name = wrong[0]
        raise ValueError(
            f"{len(wrong)} parameters do not fit the model, first {name!r}: expected shape "
            f"{expected.get(name, 'none')}, got {given.get(name, 'none')}"
        )
    vector = np.empty(sum(array.size for array in arrays.values()), dtype)
    for name, view in named_arrays(records, vector).items():
        view[...] = arrays[name]
    return vector
