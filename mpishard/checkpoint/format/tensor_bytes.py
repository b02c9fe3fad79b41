"""Named arrays as bytes in safetensors format, with JSON in their header."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from mpishard.sharding.table import check_name

__all__ = ["bytes_of", "metadata_of", "tensors_and_document", "tensors_of"]


def bytes_of(
    tensors: Mapping[str, np.ndarray[Any, Any]], metadata: Mapping[str, str] | None
) -> bytes:
    """Return named arrays in safetensors format, with ``metadata`` in the header.

    Raises
    ------
    ValueError
        For a name under which the array could not be read again.
    """
    for name in tensors:
        check_name(name, "tensor")
    return safetensors.numpy.save(dict(tensors), None if metadata is None else dict(metadata))


def tensors_of(data: Any, whose: str = "") -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays in the bytes of ``serialize``; errors name it as ``whose``.

    Raises
    ------
    TypeError
        If they are no bytes.
    ValueError
        If they are something else, or torn.
    """
    if not isinstance(data, bytes | bytearray):
        raise TypeError(f"deserialize needs bytes, got {type(data).__name__}")
    try:
        return safetensors.numpy.load(bytes(data))
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"these {len(data)} bytes are not what {whose}serialize() gave: {error}"
        ) from None


def metadata_of(data: bytes) -> dict[str, str]:
    """Return the metadata in the header of bytes that `tensors_of` has read; empty if none.

    The library reads headers of files only; the format begins with the header's length.
    """
    length = int.from_bytes(data[:8], "little")
    return dict(json.loads(data[8 : 8 + length]).get("__metadata__") or {})


def tensors_and_document(
    data: Any, key: str, whose: str
) -> tuple[dict[str, np.ndarray[Any, Any]], Any]:
    """Return the arrays, and the JSON under ``key`` of the metadata; raise as `tensors_of`."""
    tensors = tensors_of(data, whose)
    text = metadata_of(data).get(key)
    if text is None:
        raise ValueError(
            f"these {len(data)} bytes are not what {whose}serialize() gave: their header has no "
            f"{key!r}"
        )
    return tensors, json.loads(text)
