"""Checks of values on a GPU, whose results the host reads by one copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from mpishard.base import Array, read_numbers

# A context variable, because thread-ranks check their own batches at the same time.
_waiting: ContextVar[list[tuple[Array, Callable[[], Any]]] | None] = ContextVar(
    "_waiting", default=None
)


def refuse_if_any(wrong: Array, refuse: Callable[[], object]) -> None:
    """Call ``refuse``, which raises, unless ``wrong`` is 0.

    The host waits for the GPU here, or at the end of a block of `deferred_checks`.

    Parameters
    ----------
    wrong : Array
        Number of values that are refused: an array of one element on a GPU.
    refuse : callable
        Finds the first of them, and raises the error that names it.
    """
    checks = _waiting.get()
    if checks is not None:
        checks.append((wrong, refuse))
    elif any(read_numbers([wrong])):
        refuse()


@contextmanager
def deferred_checks() -> Iterator[None]:
    """Defer the block's checks to its end: read all results by one copy, raise the first error."""
    checks: list[tuple[Array, Callable[[], Any]]] = []
    token = _waiting.set(checks)
    try:
        yield
    finally:
        # Before the reads, so that a check within `refuse` raises at once.
        _waiting.reset(token)
    numbers = read_numbers([wrong for wrong, _ in checks])
    for number, (_, refuse) in zip(numbers, checks, strict=True):
        if number:
            refuse()
