"""Results that all ranks compare with, computed by one of them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., object])


def computed_once(function: Function) -> Function:
    """Keep what a function of its arguments returns: nobody may change it.

    Of thread-ranks that ask together one computes it, and the others wait.
    """
    kept, lock = functools.cache(function), threading.Lock()

    @functools.wraps(function)
    def once(*args, **options):
        with lock:
            return kept(*args, **options)

    return once
