"""Callbacks in a training loop of the user's own."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import SupportsFloat

from mpishard.base import Preempted, as_count, require_type, settings
from mpishard.callbacks.preemption import Preemption
from mpishard.callbacks.run import Record, Run, check_callbacks
from mpishard.communication import CommunicationBackend
from mpishard.contracts import PathLike

_log = logging.getLogger("mpishard")


class LoopHooks:
    """The calls of a loop to its callbacks; `running` makes this object.

    Parameters
    ----------
    run : Run
        Calls the callbacks.
    preemption : Preemption
        Receives the order to save and end.
    step : int
        Number of updates made before.

    Attributes
    ----------
    saves : bool
        Whether the loop is to save now, on all ranks: because a callback has asked for it in or
        after the last `step`, and `checkpoint` was not called since; or because the job is to save
        and end.
    stops : bool
        Whether the loop is to end now, on all ranks.
    """

    def __init__(self, run: Run, preemption: Preemption, step: int) -> None:
        self.run = run
        self.saves = self.stops = self.is_preempted = False
        self.record = Record(step)
        self._preemption = preemption
        self._began = self._stepped = time.perf_counter()

    def step(
        self,
        loss: SupportsFloat = math.nan,
        *,
        samples: float = 0.0,
        epoch: int | None = None,
        learning_rate: float | None = None,
        gradient_norm: SupportsFloat | None = None,
        **values: SupportsFloat | str,
    ) -> bool:
        """Report an update; return whether the loop is to end. Collective.

        The ranks exchange a few bytes, so that all of them end, or save, after the same step.

        Parameters
        ----------
        loss : float
            Mean loss of the step.
        samples : float
            Number of samples, or tokens, of all ranks in this step.
        epoch, learning_rate, gradient_norm
            As in `Record`.
        **values
            Values that are logged with the step, as by `Run.log`.
        """
        # Before the callbacks, whose time is not that of the step.
        now = time.perf_counter()
        # A request counts until the next step.
        self.saves = False
        self.record = Record(
            self.record.step + 1,
            epoch,
            _number(loss),
            float(samples),
            learning_rate,
            None if gradient_norm is None else _number(gradient_norm),
            now - self._began,
            now - self._stepped,
        )
        self._stepped = now
        # Before `on_step`, in which writers write what is logged.
        self.run.log(**values)
        self.run.call("on_step", self.record)
        return self._agree()

    def evaluate(self, loss: SupportsFloat, **others: float) -> bool:
        """Report the validation loss; return whether the loop is to end. Collective.

        ``others``, such as ``accuracy``, are written beside it.
        """
        validation = {"loss": _number(loss), **others}
        record = replace(self.record, score=validation["loss"], validation=validation)
        self.run.call("on_evaluate", record)
        return self._agree()

    def checkpoint(self, path: PathLike) -> None:
        """Report a checkpoint that was written to ``path``."""
        self.saves = False
        self.run.call("on_checkpoint", replace(self.record, checkpoint=Path(path)))

    def _agree(self) -> bool:
        own = self.run.requests.own
        is_preempted, stops, saves = self._preemption.is_asked_or(own[0] > 0, own[1] > 0)
        # They are sent: the next exchange must not count them again.
        own[:] = 0.0, 0.0
        self.saves = self.saves or saves or is_preempted
        # Reported once. The flags are equal on all ranks, so that all of them report.
        if stops and not self.stops:
            self.run.stopped(self.record.step)
        self.is_preempted = self.is_preempted or is_preempted
        self.stops = self.stops or stops or is_preempted
        return self.stops


def _number(value: SupportsFloat) -> float:
    # PyTorch warns if float() is called on a loss with a graph; item() gives no warning.
    return float(value.item() if hasattr(value, "item") else value)


@contextmanager
def running(
    callbacks: Sequence[object],
    backend: CommunicationBackend,
    *,
    total_steps: int | None = None,
    step: int = 0,
    unit: str = "samples",
) -> Iterator[LoopHooks]:
    """Call callbacks in a loop of your own. Collective at its begin, its steps and its end.

    SIGTERM and SIGUSR1 to any rank end the loop after the same step on all ranks:
    `LoopHooks.step` returns True, `LoopHooks.saves` is True, and the block ends with `Preempted`
    (exit code 75).

    Parameters
    ----------
    callbacks : list
        Objects with some of ``on_start, on_step, on_evaluate, on_checkpoint, on_stop``; the same
        on every rank.
    backend : CommunicationBackend
        The ranks that train together.
    total_steps : int, optional
        Number of updates at the end of the loop, if known.
    step : int
        Number of updates before a loop that goes on from a checkpoint.
    unit : str
        Unit of the steps' ``samples``.

    Raises
    ------
    TypeError, ValueError
        For an object that is no callback, no backend, no unit, or no number of steps.
    Preempted
        At the end, if the job was ordered to save and end.

    Examples
    --------
    >>> import mpishard as ms
    >>> class Limit:
    ...     def on_step(self, run, record):
    ...         if record.loss < 0.3:
    ...             run.stop("low enough")
    >>> def main(backend):
    ...     with running([Limit()], backend) as hooks:
    ...         for step in range(1, 100):
    ...             if hooks.step(loss=1 / step):
    ...                 return step
    >>> ms.run_in_threads(2, main)
    [4, 4]
    """
    require_type("backend", backend, CommunicationBackend)
    require_type("unit", unit, str)
    total_steps = None if total_steps is None else as_count("total_steps", total_steps, 0)
    step = as_count("step", step, 0)
    run = Run(check_callbacks(callbacks), backend, total_steps=total_steps, unit=unit)
    with ExitStack() as stack:
        run.enter(stack)
        hooks = LoopHooks(run, stack.enter_context(Preemption(backend)), step)
        run.call("on_start", hooks.record)
        yield hooks
        # Not after an error, of which context managers learn in their __exit__.
        run.call("on_stop", hooks.record)
        # Raised only here, so that the loop could save before.
        if hooks.is_preempted:
            reached = hooks.record.step
            message = f"preempted after step {reached}"
            if backend.rank == 0:
                _log.warning("%s", message)
            raise Preempted(message, reached, settings.EXIT_PREEMPTED)
