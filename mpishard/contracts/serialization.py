"""Models as bytes, files and streams."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import BinaryIO

__all__ = ["ICheckpointableModel", "IModelSerializer", "PathLike"]

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
        """Take parameters from what `serialize` gave."""

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
        stream.write(len(data).to_bytes(_LENGTH_BYTES, "little"))
        stream.write(data)

    def load_state(self, stream: BinaryIO) -> None:
        """Take from a stream, from where it stands, what `save_state` wrote, and no byte more.

        Raises
        ------
        TypeError
            For what cannot be read from.
        ValueError
            Where the stream ends too early or holds something else; nothing has changed then.
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
