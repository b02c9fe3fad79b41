"""The report of a rank on an uncaught exception, with a short traceback."""

from __future__ import annotations

import os
import re
import traceback
from itertools import groupby, pairwise
from traceback import FrameSummary
from types import FrameType
from typing import Literal

from mpishard.base import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    MpishardError,
    NonFiniteLossError,
    NoSampleError,
    PeerError,
    settings,
)
from mpishard.communication.contract.status import PACKAGE

OnFailure = Literal["abort", "shrink"]
"""The fate of the other ranks if one fails: they end with it, or go on without it."""

_OF_ALL_RANKS: tuple[tuple[type[MpishardError], str], ...] = (
    (CollectiveMismatchError, "the ranks' calls differ"),
    (CollectiveTimeoutError, "a rank did not arrive in time"),
    (NonFiniteLossError, "the loss or its gradient is not finite"),
    (NoSampleError, "no rank has a sample that counts"),
)
"""Errors that every rank raises: the rank that reports first need not have caused them."""


_LONGEST = 100_000
"""Characters of an exception's text, and of its traceback, that are reported."""


def check_on_failure(on_failure: object) -> None:
    """Refuse a value that is no `OnFailure`, with `ValueError`."""
    if not isinstance(on_failure, str) or on_failure not in ("abort", "shrink"):
        raise ValueError(f"on_failure must be 'abort' or 'shrink', got {on_failure!r}")


def failure_report(error: BaseException, name: str, where: str, then: str = "the job ends") -> str:
    """Return the report of a rank on the exception that ends the job.

    Parameters
    ----------
    error : BaseException
        The exception of this rank.
    name : str
        The name of this rank in reports, such as ``rank 0 of 4``.
    where : str
        The place of the error, such as ``in or after collective 3, ..``.
    then : str
        The consequence.

    Returns
    -------
    str
        A line that names the rank that failed, the error, and the traceback.
    """
    of_all = [what for kind, what in _OF_ALL_RANKS if isinstance(error, kind)]
    subject = f"{of_all[0]}, reported by {name}" if of_all else f"{name} failed"
    if isinstance(error, PeerError):
        peer = f"rank {error.rank}" if error.rank >= 0 else "a thread that is no rank"
        subject = f"{peer} failed or left, reported by {name}"
    # A message of mpishard may be long, so the traceback does not end with it a second time.
    trace = _cut(short_traceback(error, is_shown=isinstance(error, MpishardError)))
    return (
        f"mpishard: {subject} {where}; {then}\n"
        f"{type(error).__name__}: {_text(error)}\n"
        f"--- traceback of {name} ---\n{trace}"
    )


def _text(error: BaseException) -> str:
    try:
        return _cut(str(error))
    except Exception as another:  # noqa: BLE001 - a user's __str__ must not stop the end of the job
        return f"(its text cannot be shown: {type(another).__name__})"


def _cut(text: str) -> str:
    """Return ``text`` without its middle if it is so long that a launcher passes it on slowly."""
    left_out = len(text) - _LONGEST
    if left_out <= 0:
        return text
    half = _LONGEST // 2
    return f"{text[:half]}\n... {left_out} characters are left out here ...\n{text[-half:]}"


# --------------------------------------------------------------------------------- tracebacks

_TESTING = PACKAGE + "testing" + os.sep
_LEFT_OUT = re.compile(r'  File "<left out>", line (\d+), in \n')


def short_traceback(error: BaseException, *, is_shown: bool = False) -> str:
    """Return the traceback of ``error`` and its causes, without the frames inside mpishard.

    The last frame stays, wherever it is. ``MPISHARD_LOG=debug`` keeps all frames. If ``is_shown``,
    the message stands above the traceback, which has ``(as above)`` in its place, and its notes.
    """
    shown = traceback.TracebackException.from_exception(error)
    if not settings.is_debugging():
        _shorten(shown)
    text = "".join(shown.format()).rstrip()
    if is_shown:
        whole = "".join(shown.format_exception_only()).rstrip()
        brief = [f"{type(error).__name__}: (as above)", *getattr(error, "__notes__", ())]
        text = text.removesuffix(whole) + "\n".join(brief)
    return _LEFT_OUT.sub(
        lambda found: f"  ... {found[1]} frame{'s' * (found[1] != '1')} inside mpishard\n", text
    )


def _is_internal(filename: str) -> bool:
    """Return whether a file is this package's own. Its test suites count as users' files."""
    return filename.startswith(PACKAGE) and not filename.startswith(_TESTING)


def user_place(frame: FrameType | None) -> str:
    """Return the line of the user's code that ``frame`` is at or was called from; may be empty."""
    while frame is not None and _is_internal(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_qualname}"


def drop_internal_frames(error: BaseException) -> None:
    """Remove the frames inside mpishard from the tracebacks of ``error`` and its causes.

    The last frame stays, wherever it is. ``MPISHARD_LOG=debug`` keeps all frames.
    """
    if settings.is_debugging():
        return
    chain = [error]
    for member in chain:  # the chain grows in this loop
        entries, entry = [], member.__traceback__
        while entry is not None:
            if entry.tb_next is None or not _is_internal(entry.tb_frame.f_code.co_filename):
                entries.append(entry)
            entry = entry.tb_next
        for entry, following in pairwise(entries):
            entry.tb_next = following
        member.__traceback__ = entries[0] if entries else None
        causes = (member.__cause__, member.__context__)
        # By identity: exceptions may be equal, and causes may form a circle.
        chain += [c for c in causes if c is not None and all(c is not other for other in chain)]


def _shorten(shown: traceback.TracebackException) -> None:
    """Replace the frames inside mpishard by their number."""
    stack = []
    for is_left_out, group in groupby(shown.stack[:-1], lambda frame: _is_internal(frame.filename)):
        frames = list(group)
        stack += [FrameSummary("<left out>", len(frames), "")] if is_left_out else frames
    shown.stack = traceback.StackSummary.from_list(stack + shown.stack[-1:])
    for other in (shown.__cause__, shown.__context__, *(shown.exceptions or ())):
        if other is not None:
            _shorten(other)
