"""The machines of ``--hosts``, and how many ranks each takes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Host", "parse_hosts"]


_LABEL = r"[A-Za-z0-9_][A-Za-z0-9_-]{0,62}"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?")
_LONGEST_NAME = 253


@dataclass(frozen=True, slots=True)
class Host:
    """A machine that takes up to ``slots`` ranks, before the next one is filled."""

    name: str
    slots: int


def parse_hosts(text: str, world_size: int) -> list[Host]:
    """The machines of ``a,b:slots``; those without a number share evenly what is left.

    Raises
    ------
    ValueError
        If a name or number is none, or the ranks do not fit the machines.
    """
    if not text:
        return []
    entries = [entry.strip().partition(":") for entry in text.split(",")]
    if any(not name for name, _, _ in entries):
        raise ValueError(f"--hosts has an empty name: {text!r}")
    if len(entries) > world_size:
        raise ValueError(f"--hosts names {len(entries)} machines for {world_size} ranks")
    for name, colon, number in entries:
        if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
            raise ValueError(
                f"--hosts takes names or addresses of machines: labels of 1 to 63 letters, digits, "
                f"- and _ with dots between them, {_LONGEST_NAME} characters at most, the first "
                f"no -; got {name!r}"
            )
        if colon and not (number.isdecimal() and int(number)):
            raise ValueError(
                f"--hosts takes NAME or NAME:SLOTS, with 1 slot or more; got {name}:{number}"
            )
    given = sum(int(number) for _, _, number in entries if number)
    rest = [name for name, _, number in entries if not number]
    if given + len(rest) > world_size and rest:
        raise ValueError(
            f"--hosts {text} leaves no rank of {world_size} for {', '.join(rest)}: "
            f"the others take {given}"
        )
    if given < world_size and not rest:
        raise ValueError(f"--hosts {text} has {given} slots for {world_size} ranks")
    share = -(-(world_size - given) // len(rest)) if rest else 0
    return [Host(name, int(number) if number else share) for name, _, number in entries]


def slots_are_even(hosts: Sequence[Host]) -> bool:
    """Whether all machines take the same number of ranks."""
    return len({host.slots for host in hosts}) == 1
