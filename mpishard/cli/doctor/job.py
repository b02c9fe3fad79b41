"""What ``mpishard doctor`` finds when it starts two ranks that talk through mpishard."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from mpishard import settings
from mpishard.cli.doctor.causes import why_it_failed
from mpishard.cli.doctor.finding import Finding, Verdict
from mpishard.cli.doctor.mpi import MPIInstallation
from mpishard.cli.doctor.probe import ask
from mpishard.cli.doctor.shm import larger_folder
from mpishard.cli.wording import bytes_text, milliseconds

__all__ = ["SIZES", "SOURCES", "look_at_a_job"]

SIZES = (8, 2**20, 64 * 2**20)
"""Bytes that are all-reduced."""

SOURCES = ("memfd", "file")
"""Where memory that ranks share may come from, each tried alone."""

_LIMIT_SECONDS = 30

# A rank that waits for one that never comes gives up before the doctor does.
_VARIABLES = {"MPISHARD_TIMEOUT": "20", "MPISHARD_WARN_AFTER": "0", "MPISHARD_TRACE": ""}


def look_at_a_job(mpi: MPIInstallation) -> Iterator[Finding]:
    """Whether two ranks start, agree on sums, and how fast; where their shared memory is from."""
    name = "job.round_trip"
    if mpi.launcher is None:
        yield Finding(name, Verdict.OK, "not tried: there is no MPI, or no launcher of it", None)
        return
    try:
        settings.check()
    except ValueError:
        yield Finding(name, Verdict.OK, "not tried: ranks refuse the settings, see above", None)
        return
    command = mpi.launcher.command(2, [sys.executable, "-m", "mpishard.cli.doctor.rank"])
    answer = ask(command, _LIMIT_SECONDS, _VARIABLES)
    found = answer.found
    if answer.code != 0 or found is None:
        cause = why_it_failed(answer, command)
        how = "do not talk to each other" if found is None else "talk, and do not end well"
        yield Finding(
            name, Verdict.PROBLEM, f"two ranks {how}: {cause.text}", answer.code, cause.mend
        )
        return
    text = f"two ranks of {mpi.library} start, agree on sums and end"
    value = {"world_size": found["world_size"], "nodes": found["nodes"]}
    yield Finding(name, Verdict.OK, text, value)
    barrier = found["barrier"]
    yield Finding("job.barrier", Verdict.OK, milliseconds(barrier), barrier)
    yield _speed(found)
    yield _arena(found)


def _speed(found: dict[str, Any]) -> Finding:
    """How fast sums of private arrays, and of arrays in the arena, come about."""
    parts = []
    for nbytes in SIZES:
        seconds = found["messages"][str(nbytes)]
        parts.append(f"{bytes_text(nbytes)} {_speed_text(nbytes, seconds)}")
    text = f"by messages: {', '.join(parts)}"
    if found["arena"] is not None:
        text += f"; in the arena: {bytes_text(SIZES[-1])} {_speed_text(SIZES[-1], found['arena'])}"
    value = {"messages": found["messages"], "arena": {str(SIZES[-1]): found["arena"]}}
    return Finding("job.all_reduce", Verdict.OK, text, value)


def _speed_text(nbytes: int, seconds: float) -> str:
    rate = f" ({nbytes / seconds / 1e9:.2g} GB/s)" if nbytes >= SIZES[1] else ""
    return f"{milliseconds(seconds)}{rate}"


def _arena(found: dict[str, Any]) -> Finding:
    works = [source for source in SOURCES if found["sources"][source]]
    tried = settings.arena_sources()
    taken = next((source for source in tried if source in works), None)
    value = {"taken": taken, "works": works}
    text = f"of {', '.join(SOURCES)}, what works is {', '.join(works) or 'none'}"
    if taken is not None:
        return Finding("job.arena", Verdict.OK, f"memory from {taken}; {text}", value)
    slow = "ranks of a machine send messages, which is several times slower"
    if works:
        chosen = f"MPISHARD_ARENA is {tried[0] if tried else 'off'}, and {slow}; {text}"
        return Finding("job.arena", Verdict.NOTE, chosen, value, "unset MPISHARD_ARENA")
    return Finding("job.arena", Verdict.NOTE, f"{text}: {slow}", value, larger_folder())
