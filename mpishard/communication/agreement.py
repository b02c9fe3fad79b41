"""Agreement of ranks, so that all succeed or all raise; exchange of texts and paths."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mpishard.base import CheckpointError, CommunicationError
from mpishard.communication.contract.backend import CommunicationBackend

Value = TypeVar("Value")

# Messages contain paths. Python represents bytes of a path that it cannot decode by surrogates.
_SURROGATES = "surrogatepass"

_MOST_SHOWN = 8
"""Maximum number of differences in a message, as models of many layers may differ in all."""

# Types of errors that other ranks raise, too. For an error of another type they raise a
# CheckpointError, because a user's class may need arguments that are not its message.
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


@contextmanager
def same_outcome(backend: CommunicationBackend | None, subject: int = 0) -> Iterator[None]:
    """Leave the body of the ``with`` statement on every rank, or raise on every rank. Collective.

    A rank whose body raised an error raises it again. The other ranks raise an error of the same
    type as that of the first rank that failed; the message names every rank that failed. This takes
    one all-gather, which sends only headers if no rank failed. Ranks must agree on ``subject``, the
    number of a model: see `CommunicationBackend.number_model`.
    """
    failure: Exception | None = None
    try:
        yield
    except CommunicationError:  # Every rank raises it, and no collective can follow.
        raise
    except Exception as error:  # noqa: BLE001 - raised again after the exchange
        failure = error
    _exchange(backend, [], failure, subject)


def agree(
    backend: CommunicationBackend | None, prepare: Callable[[], Value], subject: int = 0
) -> list[Value]:
    """Return the ranks' values of ``prepare()``, or raise on every rank. Collective.

    Parameters
    ----------
    backend : CommunicationBackend or None
        The ranks; None for one process.
    prepare : callable
        Returns a value of JSON. It may raise, with the effect that `same_outcome` describes.
    subject : int, optional
        As in `same_outcome`.

    Returns
    -------
    list
        The values, in the order of ranks.
    """
    failure: Exception | None = None
    values: list[Value] = []
    try:
        values = [prepare()]
    except CommunicationError:
        raise
    except Exception as error:  # noqa: BLE001 - raised again after the exchange
        failure = error
    return _exchange(backend, values, failure, subject)


def _exchange(
    backend: CommunicationBackend | None,
    values: list[Value],
    failure: Exception | None,
    subject: int,
) -> list[Value]:
    """Return the value of each rank that has one; raise on every rank if one has a failure."""
    if backend is not None:
        failed = [backend.rank, type(failure).__name__, str(failure)]
        everyone = _gather_values(backend, values if failure is None else failed, subject)
        # Failures have three fields and values one, so the length of a row tells them apart without
        # a flag.
        failures = [each for each in everyone if len(each) == len(failed)]
        # A rank that failed does not raise here, but below: its own error, with the traceback.
        if failures and failure is None:
            message = "; ".join(f"rank {rank}: {words}" for rank, _, words in failures)
            raise _KINDS.get(failures[0][1], CheckpointError)(message)
        values = [value for value, *_ in everyone]
    if failure is not None:
        raise failure
    return values


def share_text(backend: CommunicationBackend | None, text: str) -> str:
    """Return rank 0's ``text`` on every rank. Collective."""
    if backend is None:
        return text
    # Only the root passes an array: the others do not know the length of the text.
    shared = backend.broadcast(_encode(text) if backend.rank == 0 else None)
    return shared.tobytes().decode(errors=_SURROGATES)


def share_path(backend: CommunicationBackend | None, path: Path | None) -> Path | None:
    """Return rank 0's ``path``, or None, on every rank. Collective."""
    return path_from(share_text(backend, path_text(path)))


def path_text(path: Path | None) -> str:
    """Return a text that represents ``path``, or None, also on ranks with another locale.

    It has a character for each byte of the path on the file system.
    """
    return "" if path is None else os.fsencode(path).decode("latin-1")


def path_from(text: str) -> Path | None:
    """Return the path, or None, from the text of `path_text`."""
    return Path(os.fsdecode(text.encode("latin-1"))) if text else None


def all_texts(backend: CommunicationBackend | None, text: str, subject: int = 0) -> list[str]:
    """Return the ranks' texts, in the order of ranks, without the empty ones. Collective.

    If all texts are empty, only headers are sent. ``subject`` as in `same_outcome`.
    """
    if backend is None:
        return [text] if text else []
    return _gather_values(backend, text, subject)


def gather_texts(backend: CommunicationBackend | None, text: str) -> list[str]:
    """Return every rank's ``text``, a line without breaks, on rank 0; [] elsewhere. Collective."""
    return GatheredTexts(backend, text).wait()


class GatheredTexts:
    """`gather_texts` under way. The constructor is collective."""

    def __init__(self, backend: CommunicationBackend | None, text: str, subject: int = 0) -> None:
        self._own = text
        self._work = None
        if backend is not None:
            self._work = backend.gather_async(_encode(text + "\n"), subject=subject)

    @property
    def done(self) -> bool:
        """True if `wait` would return at once. Progress is made during other collectives."""
        return self._work is None or self._work.done

    def wait(self) -> list[str]:
        """Return the texts on rank 0, and [] elsewhere."""
        if self._work is None:
            return [self._own]
        lines = self._work.wait()
        return [] if lines is None else lines.tobytes().decode().splitlines()


def differences(backend: CommunicationBackend, mine: Mapping[str, object], subject: int = 0) -> str:
    """Describe the differences between the ranks' JSON objects. Collective.

    The result is "" if the objects are equal, which takes one small all-gather. ``subject`` as in
    `same_outcome`.
    """
    # A checksum has a fixed size and travels in the header of the collective, which costs no second
    # wait. A collision would accept a difference; its chance is 2**-32.
    mark = zlib.crc32(json.dumps(mine).encode())
    marks = backend.all_gather(np.array([mark]), subject=subject)
    # The objects are sent only if their checksums differ, which is rare.
    if (marks == marks[0]).all():
        return ""
    everyone = [each for (each,) in _gather_values(backend, [mine])]
    names = dict.fromkeys(name for other in everyone for name in other)
    found = [
        f"{name} is {', '.join(str(other.get(name)) for other in everyone)}"
        for name in names
        if any(other.get(name) != everyone[0].get(name) for other in everyone)
    ]
    if len(found) > _MOST_SHOWN:
        found[_MOST_SHOWN:] = [f"and {len(found) - _MOST_SHOWN} more differ"]
    return "; ".join(found)


def _gather_values(backend: CommunicationBackend, value: object, subject: int = 0) -> list[Any]:
    """Return the ranks' JSON values, in the order of ranks, without those that are empty."""
    # JSON and not pickle, which would run code of another rank to read a value.
    # An empty value takes no bytes, so that an all-gather of empty values sends only headers.
    line = json.dumps(value) + "\n" if value else ""
    lines = backend.all_gather(_encode(line), subject=subject).tobytes().decode().splitlines()
    return [json.loads(line) for line in lines]


def _encode(text: str) -> npt.NDArray[np.uint8]:
    return np.frombuffer(text.encode(errors=_SURROGATES), np.uint8).copy()
