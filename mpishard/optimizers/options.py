"""Options of single parameters, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from mpishard.sharding import ParameterEntry, Piece

__all__ = ["OptionRange", "ParameterOptions", "Segment", "option_ranges", "segments_of"]

ParameterOptions = Mapping[str, Mapping[str, float]]
"""Glob pattern of parameter names -> ``{"weight_decay": ..., "learning_rate_scale": ...}``."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of one parameter that lies in one owned piece: ``[start, stop)`` of the piece."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class OptionRange:
    """A run ``[start, stop)`` of an owned piece whose parameters share their options."""

    start: int
    stop: int
    weight_decay: float
    learning_rate_scale: float = 1.0


_FIELDS = ("weight_decay", "learning_rate_scale")


def _fields(span: OptionRange) -> dict[str, float]:
    return {name: getattr(span, name) for name in _FIELDS}


def segments_of(entries: Sequence[ParameterEntry], piece: Piece) -> tuple[Segment, ...]:
    """The intersections of the parameters with one owned piece, in order."""
    return tuple(
        Segment(e.name, max(e.start, piece.start) - piece.start,
                min(e.stop, piece.stop) - piece.start)
        for e in entries
        if e.start < piece.stop and piece.start < e.stop
    )  # fmt: skip


def check_options(options: ParameterOptions) -> None:
    """Refuse options that no rule knows.

    Raises
    ------
    ValueError
        For an unknown option, or a negative value.
    """
    for pattern, values in options.items():
        if not isinstance(values, Mapping):
            raise TypeError(
                f"parameter_options[{pattern!r}] must be a mapping such as "
                f'{{"weight_decay": 0}}, got {values!r}'
            )
        for name, value in values.items():
            if name not in _FIELDS:
                raise ValueError(
                    f"parameter_options[{pattern!r}] has {name!r}; known are {', '.join(_FIELDS)}"
                )
            if not 0 <= value < float("inf"):
                raise ValueError(
                    f"parameter_options[{pattern!r}][{name!r}] must be 0 or more, got {value}"
                )


def check_patterns(options: ParameterOptions, names: Sequence[str]) -> None:
    """Refuse a pattern that matches no parameter: it is a misspelling.

    Raises
    ------
    ValueError
        Naming the pattern and some of the names there are.
    """
    for pattern in options:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"parameter_options pattern {pattern!r} matches none of the model's parameters: "
                + ", ".join(names[:8])
                + (" ..." if len(names) > 8 else "")
            )


def option_ranges(
    segments: Sequence[Segment], weight_decay: float, options: ParameterOptions
) -> list[OptionRange]:
    """What holds where in a piece; neighbours with equal options are one range.

    Later patterns win over earlier ones.
    """
    ranges: list[OptionRange] = []
    for segment in segments:
        found = OptionRange(segment.start, segment.stop, weight_decay)
        for pattern, values in options.items():
            if fnmatchcase(segment.name, pattern):
                found = OptionRange(found.start, found.stop, **(_fields(found) | dict(values)))
        last = ranges[-1] if ranges else None
        if last is not None and replace(last, stop=found.stop) == replace(found, start=last.start):
            ranges[-1] = replace(last, stop=found.stop)
        else:
            ranges.append(found)
    return ranges
