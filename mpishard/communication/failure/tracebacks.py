"""Tracebacks for users: their own frames, and of this package only the last."""

from __future__ import annotations

import os
import re
import traceback
from pathlib import Path
from types import TracebackType

from mpishard import settings

__all__ = ["drop_internal_frames", "is_internal", "short_traceback"]

_PACKAGE = str(Path(__file__).resolve().parents[2]) + os.sep
_TESTING = _PACKAGE + "testing" + os.sep
_LEFT_OUT = re.compile(r'  File "<left out>", line (\d+), in frames\n')


def short_traceback(error: BaseException, *, is_told: bool = False) -> str:
    """The traceback of ``error`` and of what caused it, without the frames inside mpishard.

    The last frame stays, wherever it is. ``MPISHARD_LOG=debug`` keeps all. Where the message of
    ``error`` ``is_told`` above, ``(as above)`` stands in its place; its notes are kept.
    """
    shown = traceback.TracebackException.from_exception(error)
    if not settings.is_debugging():
        _shorten(shown)
    text = "".join(shown.format()).rstrip()
    if is_told:
        whole = "".join(shown.format_exception_only()).rstrip()
        brief = [f"{type(error).__name__}: (as above)", *getattr(error, "__notes__", ())]
        text = text.removesuffix(whole) + "\n".join(brief)
    return _LEFT_OUT.sub(
        lambda found: f"  ... {found[1]} frame{'s' * (found[1] != '1')} inside mpishard\n", text
    )


def is_internal(filename: str) -> bool:
    """Whether a file is this package's own; its test suites call it as users do."""
    return filename.startswith(_PACKAGE) and not filename.startswith(_TESTING)


def drop_internal_frames(error: BaseException) -> None:
    """Take the frames inside mpishard from the traceback of ``error`` and of what caused it.

    The last frame stays, wherever it is. ``MPISHARD_LOG=debug`` keeps all.
    """
    if settings.is_debugging():
        return
    chain, seen = [error], {id(error)}
    for member in chain:  # grows meanwhile
        member.__traceback__ = _without_internal(member.__traceback__)
        for other in (member.__cause__, member.__context__):
            if other is not None and id(other) not in seen:
                seen.add(id(other))
                chain.append(other)


def _without_internal(trace: TracebackType | None) -> TracebackType | None:
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    kept: TracebackType | None = None
    for entry in reversed(entries):
        frame = entry.tb_frame
        if kept is None or not is_internal(frame.f_code.co_filename):
            kept = TracebackType(kept, frame, entry.tb_lasti, entry.tb_lineno)
    return kept


def _shorten(shown: traceback.TracebackException) -> None:
    kept: list[traceback.FrameSummary] = []
    left_out = 0
    for number, frame in enumerate(shown.stack, 1):
        if is_internal(frame.filename) and number < len(shown.stack):
            left_out += 1
            continue
        if left_out:
            kept.append(_count(left_out))
            left_out = 0
        kept.append(frame)
    shown.stack = traceback.StackSummary.from_list(kept)
    for other in (shown.__cause__, shown.__context__, *(shown.exceptions or ())):
        if other is not None:
            _shorten(other)


def _count(left_out: int) -> traceback.FrameSummary:
    return traceback.FrameSummary("<left out>", left_out, "frames", lookup_line=False, line="")
