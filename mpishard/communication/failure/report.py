"""What a rank says of an exception that nobody caught, before it ends the job."""

from __future__ import annotations

from mpishard.communication.failure.tracebacks import short_traceback
from mpishard.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    MpishardError,
    NonFiniteLossError,
    NoSampleError,
    PeerError,
)

__all__ = ["failure_report"]

_OF_ALL_RANKS: tuple[tuple[type[MpishardError], str], ...] = (
    (CollectiveMismatchError, "the ranks' calls differ"),
    (CollectiveTimeoutError, "a rank did not arrive in time"),
    (NonFiniteLossError, "the loss or its gradient is not finite"),
    (NoSampleError, "no rank has a sample that counts"),
)
"""Errors that every rank raises: the one that is first to say so need not have caused them."""


_LONGEST = 100_000
"""Characters of an exception's text, and of its traceback, that are reported."""


def failure_report(
    error: BaseException, name: str, rank: int | None, where: str, then: str = "the job ends"
) -> str:
    """Why the job ends, by the rank that reports it.

    Parameters
    ----------
    error : BaseException
        What was raised on this rank.
    name : str
        What reports call this rank, such as ``rank 0 of 4``.
    rank : int or None
        Its number, where it is known.
    where : str
        Where it was raised, as ``in or after collective 3, ..``.
    then : str
        What comes of it.

    Returns
    -------
    str
        A line of whose failure it is, the error, and the traceback.
    """
    # What mpishard says may be long, and need not be said a second time below its traceback.
    trace = _cut(short_traceback(error, is_told=isinstance(error, MpishardError)))
    return (
        f"mpishard: {_subject(error, name)} {where}; {then}\n"
        f"{type(error).__name__}: {_text(error)}\n"
        f"--- traceback of rank {'?' if rank is None else rank} ---\n{trace}"
    )


def _text(error: BaseException) -> str:
    try:
        return _cut(str(error))
    except Exception as another:  # noqa: BLE001 - a user's own, and the job is to end
        return f"(its text cannot be shown: {type(another).__name__})"


def _cut(text: str) -> str:
    """``text``, without its middle if it is so long that launchers take seconds to pass it on."""
    left_out = len(text) - _LONGEST
    if left_out <= 0:
        return text
    half = _LONGEST // 2
    return f"{text[:half]}\n... {left_out} characters are left out here ...\n{text[-half:]}"


def _subject(error: BaseException, name: str) -> str:
    if isinstance(error, PeerError):
        peer = f"rank {error.rank}" if error.rank >= 0 else "a thread that is no rank"
        return f"{peer} failed or left, reported by {name}"
    for kind, what in _OF_ALL_RANKS:
        if isinstance(error, kind):
            return f"{what}, reported by {name}"
    return f"{name} failed"
