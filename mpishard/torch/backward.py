"""Backward passes of a sharded module: gradients from autograd to the store, and `.grad`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from mpishard.communication import ReductionOperation
from mpishard.communication.contract.status import called_as
from mpishard.errors import CollectiveMismatchError, ShardingError
from mpishard.models.programs.placed_program import Arrivals
from mpishard.models.stores.gradient_store import (
    BackwardPass,
    GradientStore,
    ReplicatedGradients,
    ScatteredGradients,
)
from mpishard.observe.trace import span
from mpishard.sharding import ParameterEntry, Piece
from mpishard.torch.gathering import GatheredUnits
from mpishard.torch.parameters import Part, native_gradient
from mpishard.torch.placed import Buffers, flat_gradient


class BackwardPasses:
    """The way of gradients from autograd to the store, until the end of ``backward()``.

    `receive` takes each gradient and writes it to the store, which reduces each unit when it and
    all later units are complete. When autograd is through, the rest is reduced, and each part's
    ``grad`` is a view of the store. Gradients add up until a part's ``grad`` is set to None.

    If ``backward()`` raises, the loop can go on when its gradients are cleared, provided that it
    raised on every rank after the same units.

    Parameters
    ----------
    gradients : GradientStore
        Where gradients lie and are reduced.
    entries : tuple of ParameterEntry
        Of the flat vector.
    parts : sequence of Part
        The trained parameters.
    buffers : Buffers
        Sent to all ranks when a pass has changed them.
    gathered : GatheredUnits, optional
        Released when a pass has ended.

    Attributes
    ----------
    syncs : bool
        Whether passes reduce; False inside `no_sync`.
    part_of_step : ExitStack
        The part of a step that a trace shows now: forward, backward or update.
    """

    def __init__(
        self,
        gradients: GradientStore,
        entries: tuple[ParameterEntry, ...],
        parts: Sequence[Part],
        buffers: Buffers,
        gathered: GatheredUnits | None,
    ) -> None:
        self.syncs = True
        self.part_of_step = ExitStack()
        self._gradients = gradients
        self._layout = gradients.layout
        self._backend = gradients.backend
        self._entries = entries
        self._parts = parts
        self._buffers = buffers
        self._gathered = gathered
        self._has_local = False  # gradients that are not reduced yet
        self._is_reduced = False
        self._arrivals: Arrivals | None = None
        # Only autograd holds the callback that ends a pass: it is gone if the pass has raised.
        self._ending: Callable[[], Any] = lambda: None
        self._views: dict[int, Any] = {}
        # Gradients that the user has put in place of those in the store: this pass adds to them.
        self._assigned: list[tuple[Part, Any]] = []
        # Which parts have a gradient, and whether buffers have changed.
        self._flags = np.zeros(len(parts) + 1, np.uint8)

    def receive(self, place: int, parameter: Any) -> None:
        """Take the gradient of a parameter, which autograd has."""
        gradient = native_gradient.__get__(parameter)
        native_gradient.__set__(parameter, None)
        if self._has_raised():
            self._drop_raised()
        if self._arrivals is None:
            self._begin()
        assert self._arrivals is not None
        self._flags[place] = 1
        self._arrivals.receive(self._parts[place].index, flat_gradient(gradient))

    def _begin(self) -> None:
        """Open a backward pass, of which the first gradient is here."""
        ending = functools.partial(self._end)
        self._ending = weakref.ref(ending)
        torch.autograd.Variable._execution_engine.queue_callback(ending)
        self.part_of_step.enter_context(span("backward"))
        gradients = self._gradients
        live = [part.tensor.grad is not None for part in self._parts]
        self._flags[:-1] = live
        for place, part in enumerate(self._parts):
            gradient = part.tensor.grad
            if live[place] and gradient.data_ptr() != self._view(part).data_ptr():
                self._assigned.append((part, gradient))
                live[place] = False
        is_first = not any(live)
        if is_first and self._has_local:
            gradients.abandon()  # what no_sync has added was cleared before it was reduced
            self._views.clear()
        gradients.begin(BackwardPass(is_first, is_last=self.syncs, defer=not self.syncs))
        if not is_first:
            self._go_on(live)
        self._arrivals = Arrivals(
            self._layout.units, self._entries, gradients, self._layout.frozen,
            scale=1 / self._backend.world_size,
        )  # fmt: skip

    def _go_on(self, live: Sequence[bool]) -> None:
        """Let gradients be added to those of the passes before.

        The sum over ranks must count a gradient once that is reduced already.
        """
        gradients = self._gradients
        if self._is_reduced and isinstance(gradients, ReplicatedGradients):
            if isinstance(gradients, ScatteredGradients):
                for piece in self.trained_pieces():
                    full = gradients.gradient(piece.unit)
                    full[: piece.start - piece.unit.start] = 0
                    full[piece.stop - piece.unit.start :] = 0
            else:
                gradients.vector[...] *= 1 / self._backend.world_size
        self._is_reduced = False
        # A gradient that was set to None may have left values of the round's earlier passes.
        for part in [p for p, is_live in zip(self._parts, live, strict=True) if not is_live]:
            unit = part.unit
            if isinstance(gradients, ReplicatedGradients) or self._has_local:
                full = gradients.gradient(unit)
                full[part.entry.start - unit.start : part.entry.stop - unit.start] = 0
            if not isinstance(gradients, ReplicatedGradients):
                (owned,) = gradients.owned([part.piece])
                owned[...] = 0

    def _has_raised(self) -> bool:
        """Whether the last backward pass raised."""
        return self._arrivals is not None and self._ending() is None

    def _drop_raised(self) -> None:
        """Drop the pass that raised. Collective, unless it was inside `no_sync`."""
        assert self._arrivals is not None
        assigned = [part for part, _ in self._assigned]
        if any(part.tensor.grad is not None for part in self._parts if part not in assigned):
            raise ShardingError(
                "the last backward() raised, and the gradients hold a part of it: call "
                "optimizer.zero_grad() before the next backward()"
            )
        if self._gradients.sends_now:
            try:
                self._gradients.settle()
                # Ranks that reduced other units, or did not raise, call something else here. It is
                # also the fence after which no rank reads another's gradients.
                self._backend.barrier()
            except CollectiveMismatchError as error:
                error.add_note(
                    f"The last backward() of rank {self._backend.rank} raised, and not every other "
                    "rank's did after the same gradients. A loop can only leave a batch out on "
                    "every rank: let the exception end the job, or agree before backward()"
                )
                raise
        self._gradients.abandon()
        self._views.clear()
        self._assigned.clear()
        self._has_local = self._is_reduced = False
        self._arrivals = None
        self.part_of_step.close()

    def trained_pieces(self) -> list[Piece]:
        """The pieces of this rank in units of which something is trained."""
        return [p for p in self._layout.pieces() if p.unit.index not in self._layout.frozen]

    @called_as("backward()")
    def _end(self) -> None:
        """Callback: the backward pass has ended on this rank."""
        assert self._arrivals is not None
        self._arrivals.finish()
        self._arrivals = None
        self._gradients.settle()
        self._has_local = not self.syncs
        self._is_reduced = self.syncs
        if self.syncs:
            self._flags[-1] = self._buffers.have_changed()
            # A parameter that any rank used has a gradient on all. This is also the fence after
            # which no rank reads another's gradients.
            self._backend.all_reduce(self._flags, ReductionOperation.MAX)
            if self._flags[-1]:
                self._buffers.broadcast(self._backend)
        if self._gathered is not None:
            self._gathered.release()
        for part, gradient in self._assigned:
            self._view(part).add_(gradient.detach())
        self._assigned.clear()
        for place, part in enumerate(self._parts):
            part.tensor.grad = part.as_gradient(self._view(part)) if self._flags[place] else None
        self.part_of_step.close()

    def _view(self, part: Part) -> Any:
        """The gradient of a part, in the store's memory."""
        if self._has_local and not isinstance(self._gradients, ReplicatedGradients):
            unit = part.unit
            full = self._gradients.gradient(unit)
            return torch.from_numpy(full[part.start - unit.start : part.stop - unit.start])
        view = self._views.get(part.index)
        if view is None:
            (array,) = self._gradients.owned([part.piece])
            view = self._views[part.index] = torch.from_numpy(array).view(part.tensor.shape)
        return view

    def require_reduced(self, purpose: str, name: str) -> None:
        """Refuse what needs gradients that all ranks have reduced.

        Raises
        ------
        ShardingError
            In or after a backward pass that has not reduced them, of the module ``name``.
        """
        if self._arrivals is not None:
            way = "has not ended"
            if self._has_raised():
                way = (
                    "raised; call optimizer.zero_grad(), and go on with the next batch if it "
                    "raised on every rank"
                )
            raise ShardingError(
                f"{purpose} needs a complete backward pass, but the last one of this {name} {way}"
            )
        if self._has_local and any(part.tensor.grad is not None for part in self._parts):
            raise ShardingError(
                f"{purpose} needs gradients of all ranks, but the last backward() was inside "
                "no_sync(): leave no_sync() before the last backward() of a step"
            )
