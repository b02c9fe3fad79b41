"""Options of single parameters, by name."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from mpishard.arguments import as_flag, as_number
from mpishard.optimizers.rules.schedules import Schedule, as_schedule, rate_at, rates
from mpishard.sharding import ParameterEntry, Piece

__all__ = [
    "OptionRange",
    "ParameterOptions",
    "Segment",
    "named_parameters",
    "no_decay_on_biases_and_norms",
    "option_ranges",
    "segment_options",
    "segments_of",
]

ParameterOptions = Mapping[str, Mapping[str, Any]]
"""Glob pattern of parameter names -> what differs there, by the names of `KNOWN`."""

KNOWN = ("weight_decay", "learning_rate_scale", "learning_rate", "frozen")
"""The options: two numbers, a number or schedule, and True or False."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of one parameter that lies in one owned piece: ``[start, stop)`` of the piece.

    Where worlds of other sizes must find the same norms it is what lies in one cell of the flat
    vector, the ``cell``-th of the parameter.
    """

    name: str
    start: int
    stop: int
    cell: int = 0


@dataclass(frozen=True, slots=True)
class OptionRange:
    """A run ``[start, stop)`` of an owned piece whose parameters share their options."""

    start: int
    stop: int
    weight_decay: float
    learning_rate_scale: float = 1.0
    learning_rate: Schedule | None = None

    def rate(self, step: int, common_rate: float) -> float:
        """The rate of update ``step``, from 0, where ``common_rate`` is that of the others."""
        own = common_rate if self.learning_rate is None else rate_at(self.learning_rate, step)
        return own * self.learning_rate_scale


def segments_of(entries: Sequence[ParameterEntry], piece: Piece) -> tuple[Segment, ...]:
    """The intersections of the parameters with one owned piece, in order."""
    return tuple(
        Segment(e.name, max(e.start, piece.start) - piece.start,
                min(e.stop, piece.stop) - piece.start)
        for e in entries
        if e.start < piece.stop and piece.start < e.stop
    )  # fmt: skip


def checked_options(options: ParameterOptions) -> dict[str, dict[str, Any]]:
    """A copy of the options, the rates in it as schedules, or an error for what no rule knows.

    Raises
    ------
    TypeError
        For options that are no mapping, or a value of another type.
    ValueError
        For an unknown option, a value outside its range, or options beside ``frozen``.
    """
    checked = {}
    for pattern, values in options.items():
        place = f"parameter_options[{pattern!r}]"
        if not isinstance(values, Mapping):
            raise TypeError(
                f'{place} must be a mapping such as {{"weight_decay": 0}}, got {values!r}'
            )
        checked[pattern] = {name: _checked(place, name, value) for name, value in values.items()}
        if values.get("frozen") and len(values) > 1:
            others = ", ".join(name for name in values if name != "frozen")
            raise ValueError(f"{place} is frozen, and so has no use for {others}; drop one of both")
    return checked


def _checked(place: str, name: str, value: Any) -> Any:
    if name not in KNOWN:
        raise ValueError(f"{place} has {name!r}; known are {', '.join(KNOWN)}")
    place = f"{place}[{name!r}]"
    if name == "frozen":
        return as_flag(place, value)
    if name == "learning_rate":
        return as_schedule(value, place)
    if not 0 <= as_number(place, value) < float("inf"):
        raise ValueError(f"{place} must be 0 or more, got {value}")
    return float(value)


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


def frozen_names(options: ParameterOptions, names: Sequence[str]) -> frozenset[str]:
    """Those of ``names`` that the options freeze; later patterns win over earlier ones.

    Raises
    ------
    ValueError
        Where nothing would be left to train.
    """
    frozen = frozenset(name for name in names if _options_of(name, options).get("frozen"))
    if names and len(frozen) == len(set(names)):
        raise ValueError(
            f"parameter_options freeze all {len(frozen)} parameters, and nothing is left to train; "
            'a later pattern with {"frozen": False} lets some be trained'
        )
    return frozen


def option_ranges(
    segments: Sequence[Segment], weight_decay: float, options: ParameterOptions
) -> list[OptionRange]:
    """What holds where in a piece; neighbours with equal options are one range."""
    ranges: list[OptionRange] = []
    for found in segment_options(segments, weight_decay, options):
        last = ranges[-1] if ranges else None
        if last is not None and replace(last, stop=found.stop) == replace(found, start=last.start):
            ranges[-1] = replace(last, stop=found.stop)
        else:
            ranges.append(found)
    return ranges


def segment_options(
    segments: Sequence[Segment], weight_decay: float, options: ParameterOptions
) -> list[OptionRange]:
    """What holds in each segment. Later patterns win over earlier ones."""
    common = {"weight_decay": weight_decay}
    return [
        OptionRange(
            segment.start,
            segment.stop,
            **(common | {k: v for k, v in _options_of(segment.name, options).items()
                         if k != "frozen"}),
        )
        for segment in segments
    ]  # fmt: skip


def _options_of(name: str, options: ParameterOptions) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pattern, values in options.items():
        if fnmatchcase(name, pattern):
            found.update(values)
    return found


def described(options: ParameterOptions) -> str:
    """The options as text that is the same in every process: schedules as ``rates`` says."""
    return repr(
        {
            pattern: {name: rates(v) if callable(v) else v for name, v in values.items()}
            for pattern, values in options.items()
        }
    )


def named_parameters(model: Any) -> tuple[ParameterEntry, ...] | None:
    """Name, shape and place of each parameter of a model; None for one that does not tell."""
    if hasattr(model, "parameter_entries"):
        return tuple(model.parameter_entries)
    if hasattr(model, "checkpoint_parameters"):
        return tuple(model.checkpoint_parameters())
    return None


def no_decay_on_biases_and_norms(model: Any) -> dict[str, dict[str, float]]:
    """Options that spare a model's biases, and scales and shifts of norms, the weight decay.

    They are the parameters of fewer than two dims, of which decay makes nothing simpler. Join the
    result with other options: ``{**no_decay_on_biases_and_norms(model), "head.*": {...}}``.

    Parameters
    ----------
    model : object
        A model that names its parameters, plain or sharded.

    Returns
    -------
    dict
        Parameter name -> ``{"weight_decay": 0.0}``; empty where all have two dims or more.

    Raises
    ------
    TypeError
        For a model that does not name its parameters.
    ValueError
        Where no parameter would decay, as with a model that is one vector.

    Examples
    --------
    >>> from mpishard import nn, optimizers
    >>> model = nn.MLP([3, 8, 1])
    >>> optimizers.no_decay_on_biases_and_norms(model)
    {'linear0.bias': {'weight_decay': 0.0}, 'linear1.bias': {'weight_decay': 0.0}}
    """
    entries = named_parameters(model)
    if entries is None:
        raise TypeError(
            f"{type(model).__name__} does not name its parameters; write parameter_options by hand"
        )
    flat = [entry.name for entry in entries if len(entry.shape) < 2]
    if len(flat) == len(entries):
        raise ValueError(
            f"all {len(entries)} parameters of {type(model).__name__} have fewer than two dims, so "
            "that none would decay; set weight_decay=0, or write parameter_options by hand"
        )
    return {glob.escape(name): {"weight_decay": 0.0} for name in flat}
