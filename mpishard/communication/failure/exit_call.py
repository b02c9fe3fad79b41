"""Whether a rank ends by ``sys.exit``, and with what: its peers wonder why it left.

Python tells nobody: what runs at exit sees neither the exception nor the code. So the call itself
is noted, and passed on.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import NoReturn

__all__ = ["exit_call", "watch_exit"]

_LONGEST = 120
_noted: list[tuple[int, str]] = []
"""The last call, with the number of collectives that the rank had called before."""
_watching: list[Callable[[], int]] = []


def watch_exit(count: Callable[[], int]) -> None:
    """Note calls of ``sys.exit`` from now on; ``count`` gives the number of collectives so far."""
    if not _watching:
        original = sys.exit

        def noted_exit(status: object = None, /) -> NoReturn:
            if threading.current_thread() is threading.main_thread():
                _noted[:] = [(_watching[0](), _text(status))]
            original(status)  # type: ignore[arg-type]

        sys.exit = noted_exit
    _watching[:] = [count]


def exit_call(count: int) -> str:
    """The call of ``sys.exit`` that ends this rank after ``count`` collectives; empty for none.

    One that was followed by collectives did not end it: somebody caught the exception.
    """
    return next((text for before, text in _noted if before == count), "")


def _text(status: object) -> str:
    given = "" if status is None else repr(status)
    return f"sys.exit({given if len(given) <= _LONGEST else given[:_LONGEST] + '...'})"
