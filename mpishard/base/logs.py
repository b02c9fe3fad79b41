"""Log messages of the package: rank 0 writes for all ranks."""

from __future__ import annotations

import logging

from mpishard.base import settings

_logger = logging.getLogger("mpishard")
# Without any handler, logging itself would print warnings to stderr.
_silence = logging.NullHandler()


def set_up_logging(rank: int, *, is_process: bool) -> None:
    """Set up the package's logger with the level of MPISHARD_LOG, or that set by the user.

    Without either the level is ``info``. Most messages are logged on rank 0 only, so thread-ranks
    can share one logger. Processes of other ranks log nothing. At level ``debug`` each process
    writes ``mpishard-rank<r>.log`` instead.

    Parameters
    ----------
    rank : int
        The rank that starts.
    is_process : bool
        Whether the rank is this process, and not a thread of it.
    """
    level = settings.log_level()
    if level is not None:
        _logger.setLevel(level.upper())
    # A user who has set up logging has chosen the level, too.
    elif _logger.level == logging.NOTSET and not _logger.hasHandlers():
        _logger.setLevel(logging.INFO)
    if _silence in _logger.handlers and rank == 0:  # was another rank before ranks were lost
        _logger.removeHandler(_silence)
        _logger.propagate = True
    if level == "debug" and is_process:
        # With `delay` a rank that logs nothing leaves no empty file.
        handler: logging.Handler = logging.FileHandler(f"mpishard-rank{rank}.log", delay=True)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        _logger.addHandler(handler)
    elif is_process and rank != 0:
        # Handlers of the root logger would write each line once for every rank.
        _logger.addHandler(_silence)
        _logger.propagate = False
    elif not _logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("mpishard: %(message)s"))
        _logger.addHandler(handler)
