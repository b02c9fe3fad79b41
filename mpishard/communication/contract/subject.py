"""The model and the unit that a collective belongs to, as a number that the ranks compare."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence

# A header has 31 bits for both. 4095 units are more than most models have, and 2**19 numbers make
# it unlikely that two models get the same one.
_UNIT_BITS = 12
_MODEL_BITS = 31 - _UNIT_BITS
_NAMES_KEPT = 4096


def unit_subject(model: int, unit: int) -> int:
    """Return the number for unit ``unit``, counted from 0, of the model with the number ``model``.

    The header of a call has room for 4095 units. Beyond these, numbers are used again.
    """
    return model | (unit % ((1 << _UNIT_BITS) - 1) + 1)


class Subjects:
    """Numbers and names of the models that a rank has made, for `Call.subject`.

    Collectives of two models match in kind, dtype and shape if the models have the same size. Ranks
    that use the models in another order would then mix their data. So each call also has the number
    of its model, and of the unit.
    """

    def __init__(self) -> None:
        self._names: dict[int, tuple[str, Sequence[str]]] = {}
        self._same = Counter[tuple[str, str]]()  # models of one name that one line has made
        # The collective before the last model of each world, and the models made since.
        self._last: dict[str, tuple[int, int]] = {}

    def add(self, group: str, sequence: int, name: str, place: str, units: Sequence[str]) -> int:
        """Return the number of a new model, which is made after collective ``sequence``.

        Parameters
        ----------
        group : str
            The world of the model, by its name in traces.
        sequence : int
            The number of the last collective of that world. A rank may copy a model without the
            other ranks. So models are not simply counted, and the number follows from the
            collective, which is the same on all ranks that make the model.
        name, place : str
            The name of the model in messages, and the line that makes it.
        units : sequence of str
            The names of its units.
        """
        before, count = self._last.get(group, (-1, 0))
        count = count + 1 if before == sequence else 0
        self._last[group] = sequence, count
        # Of what all ranks of the world know alike. Python's own hash of strings differs by
        # process.
        mark = zlib.crc32(f"{group} {sequence} {count}".encode())
        number = (mark % ((1 << _MODEL_BITS) - 1) + 1) << _UNIT_BITS
        self._same[name, place] += 1
        if self._same[name, place] > 1:  # for instance in a loop
            name += f" number {self._same[name, place]}"
        self._names[number] = f"{name} (made at {place})" if place else name, units
        # A program that makes models in a loop must not grow; the oldest name is lost in messages
        # only.
        if len(self._names) > _NAMES_KEPT:
            del self._names[next(iter(self._names))]
        return number

    def text(self, subject: int) -> str:
        """Return the name of the model and the unit with this number; empty for 0."""
        if not subject:
            return ""
        unit = subject & ((1 << _UNIT_BITS) - 1)
        model, names = self._names.get(subject - unit, ("a model that this rank has not made", ()))
        if not unit:
            return model
        name = f" ({names[unit - 1]})" if unit <= len(names) else ""
        return f"unit {unit - 1}{name} of {model}"
