"""Log messages of the package: rank 0 writes for all ranks."""

from __future__ import annotations

import logging

from mpishard import settings

_logger = logging.getLogger("mpishard")
_silence = logging.NullHandler()


def set_up_logging(rank: int, *, is_process: bool) -> None:
    """Make the package's logger ready, as MPISHARD_LOG says; a level set by the user stays.

    If neither says anything, the level is ``info``.

    Callers log on rank 0 alone, so thread-ranks can share one logger. A process that is another
    rank keeps silent; at level ``debug`` each process writes ``mpishard-rank<r>.log``.

    Parameters
    ----------
    rank : int
        The rank that starts.
    is_process : bool
        Whether this process is that rank; else a thread of it is.
    """
    level = settings.log_level()
    if level is not None:
        _logger.setLevel(level.upper())
    elif _logger.level == logging.NOTSET and not _logger.hasHandlers():
        _logger.setLevel(logging.INFO)
    if _silence in _logger.handlers and rank == 0:  # it was another rank in a larger world
        _logger.removeHandler(_silence)
        _logger.propagate = True
    if level == "debug" and is_process:
        handler: logging.Handler = logging.FileHandler(f"mpishard-rank{rank}.log", delay=True)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        _logger.addHandler(handler)
    elif is_process and rank != 0:
        _logger.addHandler(_silence)
        _logger.propagate = False
    elif not _logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("mpishard: %(message)s"))
        _logger.addHandler(handler)
