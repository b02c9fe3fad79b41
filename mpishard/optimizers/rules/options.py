"""Options of single parameters by name."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from types import MappingProxyType
from typing import Any

from mpishard.base import as_amount, as_flag, require_type
from mpishard.optimizers.rules.pieces import Segment
from mpishard.optimizers.rules.schedules import (
    Schedule,
    as_schedule,
    rates,
)
from mpishard.sharding import ParameterEntry

ParameterOptions = Mapping[str, Mapping[str, float | Schedule]]
"""Glob pattern of parameter names -> the options that differ there, by the names of `KNOWN`."""

KNOWN: dict[str, Callable[[str, Any], object]] = {
    "weight_decay": as_amount, "learning_rate_scale": as_amount, "learning_rate": as_schedule,
    "frozen": as_flag,
}  # fmt: skip
"""The options, and their checks: two numbers, a number or schedule, and True or False."""


@dataclass(frozen=True, slots=True)
class SegmentOptions:
    """The options of ``[start, stop)`` of an owned piece: one segment, or neighbours that agree."""

    start: int
    stop: int
    weight_decay: float
    learning_rate_scale: float = 1.0
    learning_rate: Schedule | None = None


class CheckedOptions(Mapping[str, Mapping[str, Any]]):
    """Parameter options that were checked: a read-only mapping with rates as schedules.

    Raises
    ------
    TypeError
        For options that are no mapping, or a value of another type.
    ValueError
        For an unknown option, a value outside its range, or options beside ``frozen``.
    """

    def __init__(self, options: ParameterOptions) -> None:
        # Copied, because a change to the user's mapping would not be checked.
        self._options: dict[str, dict[str, Any]] = {}
        require_type("parameter_options", options, Mapping)
        for pattern, values in options.items():
            place = f"parameter_options[{pattern!r}]"
            if not isinstance(values, Mapping):
                raise TypeError(
                    f'{place} must be a mapping such as {{"weight_decay": 0}}, got {values!r}'
                )
            self._options[pattern] = {}
            for name, value in values.items():
                if name not in KNOWN:
                    raise ValueError(f"{place} has {name!r}; known are {', '.join(KNOWN)}")
                self._options[pattern][name] = KNOWN[name](f"{place}[{name!r}]", value)
            # A decay or rate of a frozen parameter would have no effect, without an error.
            if values.get("frozen") and len(values) > 1:
                others = ", ".join(name for name in values if name != "frozen")
                raise ValueError(
                    f"{place} freezes parameters, so {others} would have no effect; leave out "
                    "one of the two"
                )

    def __getitem__(self, pattern: str) -> Mapping[str, Any]:
        return MappingProxyType(self._options[pattern])

    def __iter__(self) -> Iterator[str]:
        return iter(self._options)

    def __len__(self) -> int:
        return len(self._options)

    def __repr__(self) -> str:
        return repr(self._options)

    @cached_property
    def description(self) -> str:
        """The options as text that is the same in every process: schedules as `rates`."""
        return repr(
            {
                pattern: {name: rates(v) if callable(v) else v for name, v in values.items()}
                for pattern, values in self._options.items()
            }
        )

    def check_patterns(self, names: Sequence[str]) -> None:
        """Refuse a pattern that matches no parameter: it is a misspelling.

        Raises
        ------
        ValueError
            Naming the pattern and some of the existing names.
        """
        for pattern in self._options:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(
                    f"parameter_options pattern {pattern!r} matches none of the model's "
                    "parameters: " + ", ".join(names[:8]) + (" ..." if len(names) > 8 else "")
                )

    def frozen_among(self, names: Sequence[str]) -> frozenset[str]:
        """Return the parameters that the options freeze.

        Raises
        ------
        ValueError
            If nothing would be left to train.
        """
        frozen = frozenset(name for name in names if self._of(name).get("frozen"))
        # A run that trains nothing would look like any other.
        if names and len(frozen) == len(set(names)):
            raise ValueError(
                f"parameter_options freeze all {len(frozen)} parameters, so nothing can be "
                'trained; a later pattern with {"frozen": False} unfreezes some'
            )
        return frozen

    def untrained(self, entries: Sequence[ParameterEntry]) -> frozenset[str]:
        """Return the names of a model's parameters that are not trained, or that they freeze.

        Raises
        ------
        ValueError
            As `check_patterns` and `frozen_among`.
        """
        # A model without names has nothing that a pattern could match.
        if entries:
            self.check_patterns([entry.name for entry in entries])
        frozen = self.frozen_among([entry.name for entry in entries if entry.trainable])
        return frozen | {entry.name for entry in entries if not entry.trainable}

    def by_segment(
        self, segments: Sequence[Segment], weight_decay: float, *, merges: bool = True
    ) -> list[SegmentOptions]:
        """Return the options of the segments; neighbours with equal options share one object.

        With ``merges=False`` each segment has its own.
        """
        found: list[SegmentOptions] = []
        for segment in segments:
            # Frozen parameters are handled by the model: `frozen` is no option here.
            own = {k: v for k, v in self._of(segment.name).items() if k != "frozen"}
            # Merged because a rule runs once for each: a model has hundreds of segments, and most
            # have no options of their own.
            new = SegmentOptions(
                segment.start, segment.stop, **{"weight_decay": weight_decay} | own
            )
            if (
                merges
                and found
                and replace(new, start=found[-1].start) == replace(found[-1], stop=new.stop)
            ):
                found[-1] = replace(found[-1], stop=new.stop)
            else:
                found.append(new)
        return found

    def _of(self, name: str) -> dict[str, Any]:
        """Return the options of one parameter: later patterns win over earlier ones."""
        found: dict[str, Any] = {}
        for pattern, values in self._options.items():
            if fnmatchcase(name, pattern):
                found.update(values)
        return found


def named_parameters(model: object) -> tuple[ParameterEntry, ...] | None:
    """Return each parameter's name, shape and place; None if the model does not name them."""
    if hasattr(model, "parameter_entries"):
        return tuple(model.parameter_entries)
    if hasattr(model, "checkpoint_parameters"):
        return tuple(model.checkpoint_parameters())
    return None


def no_decay_on_biases_and_norms(model: object) -> dict[str, dict[str, float]]:
    """Return options that exempt biases, and scales and shifts of norms, from weight decay.

    These are the parameters of fewer than two dims, which decay does not simplify. Join the
    result with other options: ``{**no_decay_on_biases_and_norms(model), "head.*": {...}}``.

    Parameters
    ----------
    model : object
        A model that names its parameters, plain or sharded.

    Returns
    -------
    dict
        Parameter name -> ``{"weight_decay": 0.0}``; empty if all have two dims or more.

    Raises
    ------
    TypeError
        For a model that does not name its parameters.
    ValueError
        If no parameter would decay, as with a model that is one vector.

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
    # Keys are patterns, and a name may hold a * or a bracket.
    return {glob.escape(name): {"weight_decay": 0.0} for name in flat}
