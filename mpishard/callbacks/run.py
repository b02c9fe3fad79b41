"""A run and its callbacks: the figures of a step, and requests to stop, save and log."""

from __future__ import annotations

import inspect
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, SupportsFloat

from mpishard.base import Array, ShardingError
from mpishard.communication import CommunicationBackend, all_texts, who
from mpishard.contracts import UserModel

_log = logging.getLogger("mpishard")

# By id, because callbacks need not be hashable.
_users: dict[int, int] = {}  # the rank that uses a callback with a state, by the callback's id

HOOKS = ("on_start", "on_step", "on_evaluate", "on_checkpoint", "on_stop")
"""The methods that a callback may have."""


@dataclass(frozen=True, slots=True)
class Record:
    """The figures of a run after its last step; the same on every rank, except times and memory.

    Attributes
    ----------
    step : int
        Number of updates made, those before a resumed checkpoint included.
    epoch : int or None
        Epoch of the last update, from 0; None if the loop does not report it.
    loss : float
        Mean loss over all ranks' samples before the last update; NaN before the first one.
    samples : float
        Weight of that loss: number of samples, or tokens, of all ranks together.
    learning_rate, gradient_norm : float or None
        Learning rate of the last update, and norm of its mean gradient before clipping.
    seconds : float
        Seconds since this run began, on this rank.
    step_seconds : float
        Seconds of the last step, on this rank.
    memory : int or None
        Bytes in the memory ledger of this rank; None if the loop does not report them.
    score : float or None
        In ``on_evaluate``: the validation loss or, without validation data, the mean training
        loss of the epoch. Otherwise None.
    validation : mapping of str to float
        In ``on_evaluate``: ``loss`` on the validation data and, for classes, ``accuracy``.
    checkpoint : Path or None
        In ``on_checkpoint``: the folder of the checkpoint. Otherwise None.
    """

    step: int = 0
    epoch: int | None = None
    loss: float = math.nan
    samples: float = 0.0
    learning_rate: float | None = None
    gradient_norm: float | None = None
    seconds: float = 0.0
    step_seconds: float = 0.0
    memory: int | None = None
    score: float | None = None
    validation: Mapping[str, float] = field(default_factory=dict)
    checkpoint: Path | None = None


@dataclass(slots=True)
class Requests:
    """Requests of this rank that were not sent yet, and requests of all ranks that were not read.

    Both are ``[stop, save]``, above 0 if requested. They travel as summands of an all-reduce.
    """

    # Numbers, because they travel in the vector of a step's totals.
    own: list[float] = field(default_factory=lambda: [0.0, 0.0])
    received: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def exchanged(self, sums: Array) -> None:
        """Record the sums of the requests that all ranks have sent."""
        self.own[:] = 0.0, 0.0
        # Added up, because requests may be sent several times before the run reads them.
        self.received[:] = [old + float(new) for old, new in zip(self.received, sums, strict=True)]

    def take(self) -> tuple[bool, bool]:
        """Return whether any rank has requested to stop, and to save; then clear both."""
        stops, saves = self.received
        self.received[:] = 0.0, 0.0
        return stops > 0, saves > 0


def check_callbacks(callbacks: object) -> tuple[object, ...]:
    """Return the callbacks as a tuple.

    Raises
    ------
    TypeError
        For anything but a list or tuple of objects with at least one of `HOOKS`, each with the
        arguments (run, record), and no other method that begins with ``on_``.
    """
    if not isinstance(callbacks, list | tuple):
        raise TypeError(f"callbacks must be a list, got {type(callbacks).__name__}")
    known = ", ".join(HOOKS)
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, type):
            raise TypeError(f"callbacks must be objects, got the class {callback.__name__}")
        # A misspelled method would never be called, without an error.
        found = [each for each in dir(callback) if each.startswith("on_")]
        strange = [each for each in found if each not in HOOKS]
        if strange:
            raise TypeError(f"the callback {name} has {strange[0]}, which nothing calls; {known}")
        if not any(callable(getattr(callback, each)) for each in found):
            raise TypeError(f"the callback {name} has none of the methods {known}")
        for each in found:
            _check_arguments(name, each, getattr(callback, each))
    return tuple(callbacks)


def _check_arguments(name: str, hook: str, method: Any) -> None:
    """Refuse a method of a callback that cannot be called with (run, record)."""
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # not callable, or of a compiled class: the call will tell
        return
    try:
        signature.bind(None, None)
    except TypeError:
        raise TypeError(
            f"{hook} of the callback {name} must take (run, record), got {signature}"
        ) from None


def names_of(callbacks: Sequence[object]) -> list[str]:
    """Return the class name of each callback, with a number from the second of a class on."""
    # A checkpoint saves states by these names, so that two of a class need two.
    kinds = [type(callback).__name__ for callback in callbacks]
    counts = [kinds[:place].count(kind) for place, kind in enumerate(kinds)]
    return [
        f"{kind} {count + 1}" if count else kind for kind, count in zip(kinds, counts, strict=True)
    ]


class Run:
    """A run of training, which calls its callbacks and receives their requests.

    Each method of a callback is called as ``callback.on_step(run, record)``. Callbacks that are
    context managers are entered before ``on_start`` and left at the end, however the run ends.

    Parameters
    ----------
    callbacks : sequence of object
        The callbacks from `check_callbacks`, in the order in which they are called.
    backend : CommunicationBackend
        The ranks that train together.
    model : object
        The sharded model; None if the loop does not give it.
    total_steps : int, optional
        Number of updates at the end of the run, if it is known.
    unit : str
        Unit of `Record.samples`.
    can_save : bool
        Whether `save` has an effect.

    Attributes
    ----------
    announcement, ending : str
        The length of the run in words, and the reason of an early end; may be empty.
    logged : dict
        The values of `log` since the last call of the callbacks.
    """

    def __init__(
        self,
        callbacks: Sequence[object],
        backend: CommunicationBackend,
        *,
        model: UserModel = None,
        total_steps: int | None = None,
        unit: str = "samples",
        can_save: bool = True,
    ) -> None:
        self.backend = backend
        self.model = model
        self.total_steps = total_steps
        self.unit = unit
        self.announcement = self.ending = ""
        self.logged: dict[str, SupportsFloat | str] = {}
        self.requests = Requests()
        self._can_save = can_save
        self._reason = self._calling = ""
        self._callbacks = callbacks
        # Looked up once: most callbacks have few of the methods.
        self._methods: dict[str, list[tuple[str, Callable[[Run, Record], None]]]] = {
            hook: [
                (name, getattr(callback, hook))
                for name, callback in zip(names_of(callbacks), callbacks, strict=True)
                if hasattr(callback, hook)
            ]
            for hook in HOOKS
        }

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self.backend.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.backend.world_size

    def stop(self, reason: str = "") -> None:
        """End the run on all ranks, after the same step: the next one at the latest.

        It is enough if one rank calls it. Rank 0 logs the ``reason``.
        """
        self.requests.own[0] = 1.0
        # The first reason counts, with the name of the callback that gave it.
        self._reason = self._reason or ": ".join(filter(None, [self._calling, reason]))

    def save(self) -> None:
        """Save a checkpoint on all ranks, after the same step: the next one at the latest.

        Raises
        ------
        ValueError
            If the run saves no checkpoints.
        """
        # A request that nothing can fulfil would be ignored in silence.
        if not self._can_save:
            raise ValueError("run.save() needs checkpoint, the folder to write to")
        self.requests.own[1] = 1.0

    def log(self, **values: SupportsFloat | str) -> None:
        """Add numbers or texts to the figures that the callbacks after this one write.

        Writers write those of rank 0.

        Raises
        ------
        ValueError
            For ``step``, which names the row of all figures, and arrays of several elements.
        """
        # Arrays of one element, such as losses of PyTorch, are numbers.
        for name, value in values.items():
            if math.prod(shape := getattr(value, "shape", ())) != 1:
                raise ValueError(
                    f"run.log({name}=...) takes a number or a text, got an array of shape "
                    f"{tuple(shape)}"
                )
        if "step" in values:
            raise ValueError("run.log() takes any name but step, which names the row of figures")
        self.logged.update(values)

    # ---------------------------------------------------------------------------------- for loops

    @property
    def listens_to_steps(self) -> bool:
        """Whether a callback has ``on_step``. If not, a loop need not measure its steps."""
        return bool(self._methods["on_step"])

    def enter(self, stack: ExitStack) -> None:
        """Enter the callbacks that are context managers; ``stack`` leaves them.

        Raises
        ------
        ShardingError
            For a callback with a state that another thread-rank uses at this time.
        """
        for name, callback in zip(names_of(self._callbacks), self._callbacks, strict=True):
            if hasattr(callback, "state_dict"):
                # Atomic, so that two thread-ranks cannot both become the user.
                rank = _users.setdefault(id(callback), self.rank)
                if rank != self.rank:
                    raise ShardingError(
                        f"the callback {name} is one object for the thread-ranks {rank} and "
                        f"{self.rank}, and its state would count every step on each: make the "
                        "callbacks inside main(backend), so that each rank has its own"
                    )
                stack.callback(_users.pop, id(callback), None)
            if isinstance(callback, AbstractContextManager):
                stack.enter_context(callback)

    def call(self, hook: str, record: Record) -> None:
        """Call one of `HOOKS` of each callback.

        An exception is raised with a note that names the callback.
        """
        for name, method in self._methods[hook]:
            # For the reason of a stop that this callback requests.
            self._calling = name
            try:
                method(self, record)
            except Exception as error:
                error.add_note(
                    f"raised in {hook} of the callback {name} on rank {self.rank}, after step "
                    f"{record.step}"
                )
                raise
        self._calling = ""
        # Last, because the writers come after all callbacks that log.
        self.logged.clear()

    def stopped(self, step: int) -> None:
        """Report why callbacks end the run early, after ``step``. Collective.

        All ranks call it, when they have agreed to stop.
        """
        # As JSON, because texts travel as lines, and a reason may have several.
        own = json.dumps([self.rank, self._reason]) if self._reason else ""
        ranks: dict[str, list[int]] = {}
        # Each reason is reported once, with the ranks that gave it.
        for text in all_texts(self.backend, own):
            rank, reason = json.loads(text)
            ranks.setdefault(reason, []).append(rank)
        reasons = "; ".join(
            reason if len(of) == self.world_size else f"{who(of)}, {reason}"
            for reason, of in ranks.items()
        )
        total = "" if self.total_steps is None else f" of {self.total_steps}"
        if self.rank == 0:
            _log.info("stopped after step %d%s%s", step, total, f": {reasons}" * bool(reasons))
