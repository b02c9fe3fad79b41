"""What a rank says of an exception that nobody caught, before it ends the job."""

from __future__ import annotations

from typing import Literal

from mpishard.communication.failure.tracebacks import short_traceback
from mpishard.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    MpishardError,
    NonFiniteLossError,
    NoSampleError,
    PeerError,
)

__all__ = ["OnFailure", "check_on_failure", "failure_report"]

OnFailure = Literal["abort", "shrink"]
"""The fate of the other ranks if one fails: they end with it, or go on without it."""

_OF_ALL_RANKS: tuple[tuple[type[MpishardError], str], ...] = (
    (CollectiveMismatchError, "the ranks' calls differ"),
    (CollectiveTimeoutError, "a rank did not arrive in time"),
    (NonFiniteLossError, "the loss or its gradient is not finite"),
    (NoSampleError, "no rank has a sample that counts"),
)
"""Errors that every rank raises: the one that is first to say so need not have caused them."""


def check_on_failure(on_failure: str) -> None:
    """Refuse a value that is no `OnFailure`, with `ValueError`."""
    if on_failure not in ("abort", "shrink"):
        raise ValueError(f"on_failure must be 'abort' or 'shrink', got {on_failure!r}")


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
    trace = short_traceback(error, is_told=isinstance(error, MpishardError))
    return (
        f"mpishard: {_subject(error, name)} {where}; {then}\n"
        f"{type(error).__name__}: {_text(error)}\n"
        f"--- traceback of rank {'?' if rank is None else rank} ---\n{trace}"
    )


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as another:  # noqa: BLE001 - a user's own, and the job is to end
        return f"(its text cannot be shown: {type(another).__name__})"


def _subject(error: BaseException, name: str) -> str:
    if isinstance(error, PeerError):
        peer = f"rank {error.rank}" if error.rank >= 0 else "a thread that is no rank"
        return f"{peer} failed or left, reported by {name}"
    for kind, what in _OF_ALL_RANKS:
        if isinstance(error, kind):
            return f"{what}, reported by {name}"
    return f"{name} failed"
