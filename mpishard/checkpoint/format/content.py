"""Content of a checkpoint: arrays from models, optimizers and training loops, and JSON metadata.

The interfaces of models, optimizers and training loops come first, then the checks and the encoding
of the metadata.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mpishard.base import Array, Document, DType, Metadata
from mpishard.communication import CommunicationBackend
from mpishard.contracts import UserModel
from mpishard.sharding import ParameterEntry, Region

_SPELLING = "$float"  # Only key of an object that represents one of the _NUMBERS.
_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_SHOWN = 60  # Maximum number of characters of a value in a message.
_CONTAINERS = (dict, list, tuple)

Pieces = Mapping[str, Sequence[tuple[Region, Array]]]
"""Mapping of each kind to its pieces: regions of parameters, and their values as 1-D arrays.

A kind is ``"parameters"``, ``"optimizer/<state name>"`` or ``"training/<name>"``. It has an array
of the shape of each parameter. All ranks have the same kinds, even if a rank has no piece of one.
`mpishard.sharding.Placement.cut` makes pieces of a rank's own flat vector.
"""


class CheckpointState(Protocol):
    """Arrays in the shapes of the parameters, and JSON metadata."""

    def arrays_to_write(self) -> Pieces:
        """Return the pieces that this rank writes.

        Together the ranks' pieces of a kind must have each element of each parameter once. If
        arrays are replicated, each rank returns a part, or one rank returns all.
        """
        ...

    def arrays_to_read(self) -> Pieces:
        """Return the pieces to be filled on this rank: writable views, which may overlap."""
        ...

    def checkpoint_metadata(self) -> Metadata:
        """Return other values to restore, such as a step, as JSON. Those of rank 0 are saved."""
        ...

    def restored(self, metadata: Metadata) -> None:
        """Finish the restoration, after the arrays of all ranks are filled. May communicate.

        Parameters
        ----------
        metadata : mapping
            The result of `checkpoint_metadata` when the checkpoint was saved.
        """
        ...


class CheckpointedModel(CheckpointState, Protocol):
    """A model's parameters, and all that a checkpoint needs to know of the model."""

    @property
    def backend(self) -> CommunicationBackend | None:
        """Ranks that save and load together; None for a model of one process."""
        ...

    @property
    def subject(self) -> int:
        """The model's number in collectives, `CommunicationBackend.number_model`; 0 for none."""
        ...

    @property
    def dtype(self) -> DType:
        """Dtype of the parameters."""
        ...

    def parameters(self) -> Sequence[ParameterEntry]:
        """Return the parameters along the flat vector, in order and without gaps."""
        ...

    def check_metadata(self, metadata: Metadata) -> None:
        """Refuse metadata that `restored` could not use, before anything is read.

        Raises
        ------
        ValueError
            If the metadata do not fit the model.
        """
        ...


class Checkpointable(Protocol):
    """Model that can be saved and restored."""

    def checkpointed(self) -> CheckpointedModel:
        """Return the model in the form that checkpoints save and load. Communicates nothing."""
        ...


class CheckpointableOptimizer(Protocol):
    """Optimizer whose state can be saved and restored with its model's parameters."""

    def checkpoint_view(self, model: UserModel) -> CheckpointState:
        """Return the optimizer's state for the parameters of ``model``."""
        ...


def require_checkpointable(model: UserModel, optimizer: Any = None) -> None:
    """Refuse arguments that no rank could save or load. Nothing is communicated.

    Raises
    ------
    TypeError
        If the model or the optimizer is not checkpointable.
    """
    # One member is tested, because isinstance does not work with these protocols.
    if not hasattr(model, "checkpointed"):
        raise TypeError(
            "a checkpoint needs a model of mpishard, plain or sharded (Checkpointable), got "
            f"{type(model).__name__}"
        )
    if optimizer is not None and not hasattr(optimizer, "checkpoint_view"):
        raise TypeError(
            "a checkpoint needs a sharded optimizer (CheckpointableOptimizer), got "
            f"{type(optimizer).__name__}; mpishard.as_distributed makes one"
        )


def states_of(
    model: Checkpointable,
    optimizer: CheckpointableOptimizer | None,
    training: CheckpointState | None = None,
) -> dict[str, CheckpointState]:
    """Return the states that a checkpoint has, by their names in its metadata."""
    # A load restores the states in this order, the parameters first.
    states: dict[str, CheckpointState] = {"model": model.checkpointed()}
    if optimizer is not None:
        states["optimizer"] = optimizer.checkpoint_view(model)
    if training is not None:
        states["training"] = training
    return states


@dataclass(frozen=True, slots=True)
class Kind:
    """Kind of a JSON value, with its name for messages, and a test."""

    name: str
    holds: Callable[[Any], bool]


ANYTHING = Kind("anything", lambda _: True)
# Counts become 64-bit integers, which would overflow without an error.
COUNT = Kind("a whole number from 0 on", lambda v: type(v) is int and 0 <= v < 1 << 63)
# The types are compared exactly, because True is an int. Larger integers have no float.
NUMBER = Kind("a number", lambda v: type(v) is float or (type(v) is int and abs(v) < 1 << 1023))
OBJECT = Kind("an object", lambda v: isinstance(v, Mapping))
TEXT = Kind("a text", lambda v: isinstance(v, str))

_LIST = Kind("a list", lambda v: isinstance(v, list))

Form = Kind | list[Any] | tuple[Any, ...] | Document
"""Form of a JSON value.

It is a `Kind`; ``[form]``, a list of values of this form; ``(form, form)``, a list of two values;
``{"a": form, "b?": form}``, an object that must have the key a, and may have the key b; or
``{"*": form}``, an object with any keys and values of this form.
"""


def require_form(value: Any, form: Form, key: str) -> None:
    """Refuse a JSON value of another form.

    The check is needed because a forged file may have any content and the right checksum.

    Raises
    ------
    ValueError
        If the form differs. The message names the key, such as ``metadata.user.steps[3]``, the form
        and the value.
    """
    if isinstance(form, Kind):
        if not form.holds(value):
            raise ValueError(f"{key} must be {form.name}, got {_shortened(value)}")
    elif isinstance(form, dict):
        require_form(value, OBJECT, key)
        for name, inner in (dict.fromkeys(value, form["*"]) if "*" in form else form).items():
            plain = name.removesuffix("?")
            if plain in value:
                require_form(value[plain], inner, f"{key}.{plain}")
            elif plain == name:
                raise ValueError(f"{key} has no key {name!r}, but {_shortened([*value])}")
    else:
        require_form(value, _LIST, key)
        if isinstance(form, tuple) and len(value) != len(form):
            raise ValueError(f"{key} must be a list of {len(form)}, got {_shortened(value)}")
        forms = form if isinstance(form, tuple) else form * len(value)
        for index, (item, inner) in enumerate(zip(value, forms, strict=True)):
            require_form(item, inner, f"{key}[{index}]")


def _shortened(value: Any) -> str:
    try:
        text = json.dumps(value) if isinstance(value, str) else repr(value)
    except (RecursionError, ValueError):  # Python does not print numbers of more than 4300 digits.
        return f"a {type(value).__name__} that is too large to print"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."


def as_metadata(given: Any) -> Document:
    """Return a copy of a user's metadata, whose values are not checked; {} for None.

    Raises
    ------
    TypeError
        If ``given`` is not a mapping.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(
            f"metadata must map names to values of JSON, such as {{'note': 'first'}}; got {given!r}"
        )
    return dict(given)


def as_json(metadata: Metadata) -> Document:
    """Return a copy of metadata as JSON, with NumPy scalars and arrays as numbers and lists.

    Infinities and NaN stay floats.

    Raises
    ------
    TypeError
        If JSON cannot represent a value, or a key is not a string. JSON would convert the keys 1
        and "1" to the same string.
    ValueError
        If a key is "$float", which represents NaN and infinities, or a container contains itself.
    """
    found = as_metadata(metadata)
    # This comes first, because it refuses containers that contain themselves.
    text = json.dumps(found, default=_plain)
    check_keys("metadata", found)
    # The copy is made of the text, so that it is what a load will return: tuples become lists.
    return dict(json.loads(text))


def spelled(value: Any) -> Any:
    """Return JSON with infinities and NaN as objects, which every reader of JSON accepts.

    RFC 8259, section 6, does not have these numbers. They become ``{"$float": "NaN"}``, with
    ``"Infinity"`` and ``"-Infinity"`` for infinities.
    """
    if isinstance(value, float) and not math.isfinite(value):
        name = "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        return {_SPELLING: name}
    if isinstance(value, Mapping):
        return {key: spelled(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        # Finite floats need no call, which matters for long histories of losses.
        return [
            item if type(item) is float and math.isfinite(item) else spelled(item) for item in value
        ]
    return value


def unspelled(value: Any) -> Any:
    """Return the value from the result of `spelled`."""
    if isinstance(value, dict):
        # A forged file may have another value under this key. It stays as it is.
        if value.keys() == {_SPELLING} and str(value[_SPELLING]) in _NUMBERS:
            return _NUMBERS[value[_SPELLING]]
        return {key: unspelled(item) for key, item in value.items()}
    if isinstance(value, list):
        return [unspelled(item) if isinstance(item, _CONTAINERS) else item for item in value]
    return value


def check_keys(name: str, value: Any, place: str = "") -> None:
    """Refuse keys that JSON would change, at any depth.

    Raises
    ------
    TypeError, ValueError
        As for `as_json`. The message names the argument, ``name``, and the key.
    """
    # An array of objects may contain dicts. Arrays of numbers have no keys.
    if isinstance(value, np.ndarray) and value.dtype == object:
        value = value.tolist()
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                where = f" in {place}" if place else ""
                raise TypeError(
                    f"{name} must have strings for keys, as JSON has; got the key {key!r}{where}"
                )
            if key == _SPELLING:
                raise ValueError(
                    f"{name} must not have the key {key!r}, which stands for NaN and infinities "
                    "in manifest.json; choose another"
                )
            check_keys(name, item, f"{place}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            if isinstance(item, (*_CONTAINERS, np.ndarray)):
                check_keys(name, item, f"{place}[{index}]")


def _plain(value: Any) -> Any:
    """Return NumPy scalars and arrays as numbers and lists."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"metadata must be JSON; it holds a {type(value).__qualname__}: {value!r}")
