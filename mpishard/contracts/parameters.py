"""Models as flat vectors of parameters."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Self

from mpishard.arrays import Array, array_namespace


class IParameterSource(ABC):
    """Something that parameters can be read from: a flat vector, shape (parameter_count,)."""

    @property
    @abstractmethod
    def parameter_count(self) -> int:
        """Length of the flat vector, frozen parameters included."""

    @abstractmethod
    def get_parameters(self) -> Array:
        """A copy of the flat vector."""

    def get_parameter_chunks(self) -> Iterator[Array]:
        """Yield the parameters in order, part by part, so that no second whole need be held.

        End to end, raveled, the chunks are the flat vector. Each belongs to the caller. Where
        the parts are is the model's choice; unless it knows better, there is one.
        """
        yield self.get_parameters()


class IParameterizable(IParameterSource):
    """A flat vector of parameters that can be read and replaced."""

    @abstractmethod
    def set_parameters(self, parameters: Array) -> None:
        """Take the values of a flat vector, a copy.

        Raises
        ------
        TypeError
            For an argument that is no array.
        ValueError
            If the length is not ``parameter_count``; nothing has changed then.
        """

    def set_parameter_chunks(self, chunks: Iterable[Array]) -> None:
        """Take the values of chunks as `get_parameter_chunks` yields them.

        Raises
        ------
        TypeError
            For a chunk that is no array.
        ValueError
            If the chunks together do not have ``parameter_count`` elements; nothing has
            changed then.
        """
        parts = [(array_namespace(chunk), chunk.reshape(-1)) for chunk in chunks]
        if not parts:
            raise ValueError(f"expected {self.parameter_count} parameters, got no chunk")
        self.set_parameters(parts[0][0].concatenate([part for _, part in parts]))

    def with_parameters(self, parameters: Array) -> Self:
        """A new model with these parameters; errors are those of `set_parameters`."""
        model = copy.deepcopy(self)
        model.set_parameters(parameters)
        return model

    @property
    def supports_parameter_initialization(self) -> bool:
        """True if there are parameters to give first values to."""
        return self.parameter_count > 0

    def sanitize_parameters(self, parameters: Array) -> Array:
        """``parameters`` as this model would have them: as they are, unless it knows better."""
        return parameters


PathLike = str | Path
"""A path in the file system."""

_LENGTH_BYTES = 8
_PART_BYTES = 1 << 26


class IModelSerializer(ABC):
    """Bytes and files."""

    @abstractmethod
    def serialize(self) -> bytes:
        """The model's parameters as bytes."""

    @abstractmethod
    def deserialize(self, data: bytes) -> None:
        """Take parameters from bytes of `serialize`."""

    @abstractmethod
    def save_model(self, path: PathLike) -> None:
        """Write the model to ``path``, a directory."""

    @abstractmethod
    def load_model(self, path: PathLike) -> None:
        """Take parameters from ``path``."""


class ICheckpointableModel(IModelSerializer):
    """Streams.

    A state is written as its length, 8 bytes, least significant first, and what ``serialize``
    gives: states may follow each other, and other data, in one stream.
    """

    def save_state(self, stream: BinaryIO) -> None:
        """Write the model to a binary stream, from where the stream stands.

        Raises
        ------
        TypeError
            For what cannot be written to.
        """
        if not hasattr(stream, "write"):
            raise TypeError(f"save_state needs a binary stream, got {type(stream).__name__}")
        data = self.serialize()
        # The length first, because other data may follow in the same stream.
        stream.write(len(data).to_bytes(_LENGTH_BYTES, "little"))
        stream.write(data)

    def load_state(self, stream: BinaryIO) -> None:
        """Take a model that `save_state` wrote from a stream's position on, and no byte more.

        Raises
        ------
        TypeError
            For what cannot be read from.
        ValueError
            If the stream ends too early or holds something else; nothing has changed then.
        """
        if not hasattr(stream, "read"):
            raise TypeError(f"load_state needs a binary stream, got {type(stream).__name__}")
        length = int.from_bytes(_exactly(stream, _LENGTH_BYTES), "little")
        self.deserialize(_exactly(stream, length))


def _exactly(stream: BinaryIO, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        # In parts: a length that is none, of another file, must not ask for memory.
        part = stream.read(min(length - len(data), _PART_BYTES))
        if not part:
            raise ValueError(
                f"the stream ended after {len(data)} of {length} bytes: it is not, or not all of, "
                "what save_state() wrote"
            )
        data += part
    return bytes(data)
