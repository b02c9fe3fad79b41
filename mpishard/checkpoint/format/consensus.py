"""All ranks succeed, or all raise; and the exchange of texts and paths between ranks."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mpishard.arrays import Array
from mpishard.communication.contract.backend import CommunicationBackend
from mpishard.errors import CheckpointError, CommunicationError

# Messages name paths; Python holds bytes of a path that it cannot decode as surrogates.
_SURROGATES = "surrogatepass"

_MOST_SHOWN = 8
"""Differences in one message: models of many layers may differ in all of them."""

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        CheckpointError,
        FileNotFoundError,
        OSError,
        PermissionError,
        TypeError,
        ValueError,
    )
}


@dataclass
class Statements:
    """The text that a rank passes to the others by `together`, and the texts of all ranks."""

    own: str = ""
    """To be set in the body; nothing is sent for an empty one."""
    everyone: list[str] = field(default_factory=list)
    """After the body: the ranks' texts in the order of ranks, without the empty ones."""


@contextmanager
def together(backend: CommunicationBackend | None) -> Iterator[Statements]:
    """Leave the body on every rank, or raise on every rank. Collective: one all-gather.

    A rank whose body raised raises that again. The others raise an error of the same kind as that
    of the first rank that failed; the message names every rank that failed. If no rank failed and
    none set a text, only headers travel.
    """
    failure: Exception | None = None
    statements = Statements()
    try:
        yield statements
    except CommunicationError:  # every rank raises it, and no collective can follow
        raise
    except Exception as error:  # noqa: BLE001 - raised again below, when the others know of it
        failure = error
    if backend is None:
        statements.everyone = [statements.own] if statements.own else []
    else:
        told: Any = statements.own
        if failure is not None:
            told = [backend.rank, type(failure).__name__, str(failure)]
        everyone = _gather_values(backend, told)
        failures = [each for each in everyone if not isinstance(each, str)]
        # A rank that failed raises its own error below, with its traceback.
        if failures and failure is None:
            message = "; ".join(f"rank {rank}: {words}" for rank, _, words in failures)
            raise _KINDS.get(failures[0][1], CheckpointError)(message)
        statements.everyone = everyone
    if failure is not None:
        raise failure


def share_text(backend: CommunicationBackend | None, text: str) -> str:
    """Return rank 0's ``text`` on every rank. Collective."""
    if backend is None:
        return text
    shared = backend.broadcast(_encode(text) if backend.rank == 0 else None)
    return shared.tobytes().decode(errors=_SURROGATES)  # type: ignore[no-any-return]


def share_path(backend: CommunicationBackend | None, path: Path | None) -> Path | None:
    """Return rank 0's ``path``, or None, on every rank. Collective."""
    return path_from(share_text(backend, path_text(path)))


def path_text(path: Path | None) -> str:
    """Return a text that stands for ``path``, or for None, on ranks with another locale.

    It has a character for each byte that the file system knows.
    """
    return "" if path is None else os.fsencode(path).decode("latin-1")


def path_from(text: str) -> Path | None:
    """Return the path, or None, that `path_text` was given."""
    return Path(os.fsdecode(text.encode("latin-1"))) if text else None


def all_texts(backend: CommunicationBackend | None, text: str) -> list[str]:
    """Return the ranks' texts, in the order of ranks, without the empty ones. Collective.

    If all are empty only headers travel.
    """
    if backend is None:
        return [text] if text else []
    return _gather_values(backend, text)


def begin_all_gather(backend: CommunicationBackend | None, array: Array) -> Callable[[], Array]:
    """Issue `all_gather`; the function returned waits for the others and returns the result."""
    if backend is None:
        return lambda: array
    return backend.all_gather_async(array).wait


def gather_texts(backend: CommunicationBackend | None, text: str) -> list[str]:
    """Return every rank's ``text``, one line each, on rank 0; elsewhere nothing. Collective."""
    return GatheredTexts(backend, text).wait()


class GatheredTexts:
    """`gather_texts` under way. Making one is collective."""

    def __init__(self, backend: CommunicationBackend | None, text: str) -> None:
        self._own = text
        self._work = None if backend is None else backend.gather_async(_encode(text + "\n"))

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once. Other collectives drive it."""
        return self._work is None or self._work.done

    def wait(self) -> list[str]:
        """Return the texts on rank 0, elsewhere nothing."""
        if self._work is None:
            return [self._own]
        lines = self._work.wait()
        return [] if lines is None else lines.tobytes().decode().splitlines()


def differences(backend: CommunicationBackend, mine: Mapping[str, Any]) -> str:
    """Return the differences between the ranks' JSON objects, by rank, in words. Collective.

    The result is "" for equal ones, which cost one small all-gather.
    """
    text = json.dumps(mine)
    marks = backend.all_gather(np.array([zlib.crc32(text.encode())]))
    # A checksum of each first: the texts, which are rarely needed, travel only if these differ.
    if (marks == marks[0]).all():
        return ""
    everyone = [json.loads(line) for line in gather_texts(backend, text)]  # on rank 0
    names = dict.fromkeys(name for other in everyone for name in other)
    found = [
        f"{name} is {', '.join(str(other.get(name)) for other in everyone)}"
        for name in names
        if any(other.get(name) != everyone[0].get(name) for other in everyone)
    ]
    if len(found) > _MOST_SHOWN:
        found[_MOST_SHOWN:] = [f"and {len(found) - _MOST_SHOWN} more differ"]
    return share_text(backend, "; ".join(found))


def _gather_values(backend: CommunicationBackend, value: Any) -> list[Any]:
    """Return the ranks' JSON values, in the order of ranks, without those that are empty."""
    # Nothing at all for an empty value: an all-gather of no bytes is only headers.
    line = json.dumps(value) + "\n" if value else ""
    lines = backend.all_gather(_encode(line)).tobytes().decode().splitlines()
    return [json.loads(line) for line in lines]


def _encode(text: str) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(text.encode(errors=_SURROGATES), np.uint8).copy()
