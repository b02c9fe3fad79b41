"""Findings about a job of two ranks that communicate through mpishard."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from mpishard import settings
from mpishard.cli.doctor.finding import Finding, note, ok, problem
from mpishard.cli.doctor.mpi import MPIInstallation, why_it_failed
from mpishard.cli.doctor.shm import larger_folder
from mpishard.cli.probe import ask
from mpishard.cli.wording import bytes_text, milliseconds

__all__ = ["SIZES", "SOURCES", "look_at_a_job"]

SIZES = (8, 2**20, 64 * 2**20)
"""Bytes that are all-reduced."""

SOURCES = ("memfd", "file")
"""Sources of memory that ranks share, each tried alone."""

_LIMIT_SECONDS = 30

# A rank that waits for one that never comes gives up before the doctor does.
_VARIABLES = {"MPISHARD_TIMEOUT": "20", "MPISHARD_WARN_AFTER": "0", "MPISHARD_TRACE": ""}


def look_at_a_job(mpi: MPIInstallation) -> Iterator[Finding]:
    """Yield whether two ranks start and get right sums, how fast, and where they share memory."""
    name = "job.round_trip"
    if mpi.launcher is None:
        yield ok(name, "not tried: there is no MPI, or no launcher of it", None)
        return
    try:
        settings.check()
    except ValueError:
        yield ok(name, "not tried: ranks refuse the settings, see above", None)
        return
    command = mpi.launcher.command(2, [sys.executable, "-m", "mpishard.cli.doctor.rank"])
    answer = ask(command, _LIMIT_SECONDS, _VARIABLES)
    found = answer.found
    if answer.code != 0 or found is None:
        cause = why_it_failed(answer, command)
        how = "do not communicate" if found is None else "communicate, and do not end well"
        yield problem(name, f"two ranks {how}: {cause.text}", answer.code, cause.mend)
        return
    text = f"two ranks of {mpi.library} start, agree on sums and end"
    yield ok(name, text, {key: found[key] for key in ("world_size", "nodes")})
    yield ok("job.barrier", milliseconds(found["barrier"]), found["barrier"])
    messages, arena = found["messages"], {str(SIZES[-1]): found["arena"]}
    text = f"by messages: {_speeds(messages)}"
    if found["arena"] is not None:
        text += f"; in the arena: {_speeds(arena)}"
    yield ok("job.all_reduce", text, {"messages": messages, "arena": arena})
    yield _arena(found["sources"])


def _speeds(seconds: dict[str, float]) -> str:
    texts = []
    for size, time in seconds.items():
        rate = f" ({int(size) / time / 1e9:.2g} GB/s)" if int(size) >= SIZES[1] else ""
        texts.append(f"{bytes_text(int(size))} {milliseconds(time)}{rate}")
    return ", ".join(texts)


def _arena(works_with: dict[str, Any]) -> Finding:
    works = [source for source in SOURCES if works_with[source]]
    tried = settings.arena_sources()
    taken = next((source for source in tried if source in works), None)
    value = {"taken": taken, "works": works}
    text = f"of {', '.join(SOURCES)} these work: {', '.join(works) or 'none'}"
    if taken is not None:
        return ok("job.arena", f"memory from {taken}; {text}", value)
    slow = "ranks of a machine send messages, which is several times slower"
    if not works:
        return note("job.arena", f"{text}: {slow}", value, larger_folder())
    chosen = f"MPISHARD_ARENA is {tried[0] if tried else 'off'}, and {slow}; {text}"
    return note("job.arena", chosen, value, "unset MPISHARD_ARENA")
