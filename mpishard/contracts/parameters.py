"""Models as flat vectors of parameters."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Self

from mpishard.base import Array, array_namespace


class IParameterSource(ABC):
    """A source of parameters: a flat vector, shape (parameter_count,), that can be read."""

    @property
    @abstractmethod
    def parameter_count(self) -> int:
        """Length of the flat vector, frozen parameters included."""

    @abstractmethod
    def get_parameters(self) -> Array:
        """Return a copy of the flat vector."""

    def get_parameter_chunks(self) -> Iterator[Array]:
        """Yield the parameters in order, in chunks, so that no second whole vector is needed.

        The raveled chunks, end to end, are the flat vector. Each chunk belongs to the caller. The
        model chooses their bounds; by default there is one chunk.
        """
        yield self.get_parameters()


class IParameterizable(IParameterSource):
    """A flat vector of parameters that can be read and replaced."""

    @abstractmethod
    def set_parameters(self, parameters: Array) -> None:
        """Set the parameters to a copy of a flat vector.

        Raises
        ------
        TypeError
            For an argument that is no array.
        ValueError
            If the length is not ``parameter_count``; nothing has changed then.
        """

    def set_parameter_chunks(self, chunks: Iterable[Array]) -> None:
        """Set the parameters to the values of chunks such as `get_parameter_chunks` yields.

        Raises
        ------
        TypeError
            For a chunk that is no array.
        ValueError
            If the chunks together do not have ``parameter_count`` elements; nothing has
            changed then.
        """
        # All chunks are checked before any parameter is set.
        parts = [(array_namespace(chunk), chunk.reshape(-1)) for chunk in chunks]
        if not parts:
            raise ValueError(f"expected {self.parameter_count} parameters, got no chunk")
        self.set_parameters(parts[0][0].concatenate([part for _, part in parts]))

    def with_parameters(self, parameters: Array) -> Self:
        """Return a new model with these parameters; errors are those of `set_parameters`."""
        model = copy.deepcopy(self)
        model.set_parameters(parameters)
        return model

    @property
    def supports_parameter_initialization(self) -> bool:
        """Whether the model has parameters, which need first values."""
        return self.parameter_count > 0

    def sanitize_parameters(self, parameters: Array) -> Array:
        """Return ``parameters`` in the form that this model needs; by default unchanged."""
        return parameters


PathLike = str | Path
"""A path in the file system."""

_LENGTH_BYTES = 8
_PART_BYTES = 1 << 26


class IModelSerializer(ABC):
    """A model that can be written as bytes and as files."""

    @abstractmethod
    def serialize(self) -> bytes:
        """Return the model's parameters as bytes."""

    @abstractmethod
    def deserialize(self, data: bytes) -> None:
        """Set the parameters to those in the bytes of `serialize`."""

    @abstractmethod
    def save_model(self, path: PathLike) -> None:
        """Write the model to ``path``, a directory."""

    @abstractmethod
    def load_model(self, path: PathLike) -> None:
        """Set the parameters to those in ``path``, a directory of `save_model`."""


class ICheckpointableModel(IModelSerializer):
    """A model that can be written to streams.

    A state is written as its length, 8 bytes, least significant first, and the bytes of
    ``serialize``. So one stream may have several states and other data, one after the other.
    """

    def save_state(self, stream: BinaryIO) -> None:
        """Write the model to a binary stream, from the stream's position on.

        Raises
        ------
        TypeError
            For an object that cannot be written to.
        """
        if not hasattr(stream, "write"):
            raise TypeError(f"save_state needs a binary stream, got {type(stream).__name__}")
        data = self.serialize()
        # The length comes first, because other data may follow in the same stream.
        stream.write(len(data).to_bytes(_LENGTH_BYTES, "little"))
        stream.write(data)

    def load_state(self, stream: BinaryIO) -> None:
        """Set the parameters to a state of `save_state`, and read no byte behind that state.

        Raises
        ------
        TypeError
            For an object that cannot be read from.
        ValueError
            If the stream ends too early or has other data; nothing has changed then.
        """
        if not hasattr(stream, "read"):
            raise TypeError(f"load_state needs a binary stream, got {type(stream).__name__}")
        length = int.from_bytes(_exactly(stream, _LENGTH_BYTES), "little")
        self.deserialize(_exactly(stream, length))


def _exactly(stream: BinaryIO, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        # Read in parts, because the wrong length in another file must not allocate its memory.
        part = stream.read(min(length - len(data), _PART_BYTES))
        if not part:
            raise ValueError(
                f"the stream ended after {len(data)} of {length} bytes: it has no complete state "
                "of save_state() at its position"
            )
        data += part
    return bytes(data)
