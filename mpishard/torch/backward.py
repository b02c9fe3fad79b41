"""Backward passes of a sharded module: gradients from autograd to the store, and `.grad`."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np
import torch

from mpishard.base import Array, CollectiveMismatchError, ShardingError
from mpishard.communication import ReductionOperation, called_as
from mpishard.models import (
    ArrivalPlan,
    Arrivals,
    BackwardPass,
    GradientStore,
    ReplicatedGradients,
    ScatteredGradients,
)
from mpishard.observe import span
from mpishard.sharding import ParameterEntry, Piece
from mpishard.torch.buffers import Buffers
from mpishard.torch.data import training_of
from mpishard.torch.gathering import GatheredUnits
from mpishard.torch.gradients import keep, plain
from mpishard.torch.parameters import Changes, OwnedParameter


def _joined(gradients: list[torch.Tensor]) -> Array:
    """Return gradients as one vector."""
    if len(gradients) > 1:
        return torch._C._nn.flatten_dense_tensors(gradients).numpy()  # type: ignore[no-any-return]
    return gradients[0].numpy().reshape(-1)  # type: ignore[no-any-return]


def _counts_all() -> bool:
    """Return True if Python counts a reference to a tensor that PyTorch's C++ has."""
    tensor, holder = torch.zeros(1), torch.zeros(1, requires_grad=True)
    before = sys.getrefcount(tensor)
    holder.grad = tensor
    return sys.getrefcount(tensor) > before


_COUNTS_ALL = _counts_all()


class BackwardPasses:
    """Transfer of gradients from autograd to the store, until the end of ``backward()``.

    `receive` takes each gradient and writes it to the store, which reduces each unit when it and
    all later units are complete. At the end of the pass the other units are reduced, and each
    part's ``grad`` becomes a view of the store. Gradients add up until a part's ``grad`` is set to
    None.

    If ``backward()`` raises on every rank after the same units, the loop can continue after
    ``zero_grad()``.

    Parameters
    ----------
    gradients : GradientStore
        Store that holds and reduces the gradients.
    entries : tuple of ParameterEntry
        Entries of the flat vector.
    parts : sequence of OwnedParameter
        The trained parameters.
    buffers : Buffers
        Buffers that are sent to all ranks after a pass that has changed them.
    gathered : GatheredUnits, optional
        Gathered parameters, which are released after a pass.
    changes : Changes
        Changes of parameters, such as those in forward, which ranks compare after a pass.
    scale : float
        Factor of each rank's gradients in their sum over ranks.

    Attributes
    ----------
    syncs : bool
        True if passes reduce gradients; False inside `no_sync`.
    scale : float
        As above.
    part_of_step : ExitStack
        Open span of the trace: forward, backward or update.
    """

    def __init__(
        self,
        gradients: GradientStore,
        entries: tuple[ParameterEntry, ...],
        parts: Sequence[OwnedParameter],
        buffers: Buffers,
        gathered: GatheredUnits | None,
        changes: Changes,
        scale: float,
    ) -> None:
        self.syncs = True
        self.scale = scale
        self.part_of_step = ExitStack()
        self._gradients = gradients
        self._layout = gradients.layout
        self._backend = gradients.backend
        self._plan = ArrivalPlan(self._layout.units, entries, self._layout.frozen)
        self._parts = parts
        self._buffers = buffers
        self._gathered = gathered
        self._changes = changes
        self._has_local = False  # True if the store has gradients that are not reduced yet.
        self._is_reduced = False
        self._arrivals: Arrivals | None = None
        # A weak reference to the callback that ends a pass. Only autograd holds the callback, so
        # that the reference is dead after a pass that raised.
        self._ending: Callable[[], object] = lambda: None
        self._views: dict[int, torch.Tensor] = {}
        # The tensor that each part has had as its gradient. It is used again, because a new one
        # costs more than the sum of a small gradient over ranks.
        self._given: dict[int, torch.Tensor] = {}
        # Gradients that the user has assigned in place of the store's. This pass adds to them.
        self._assigned: list[tuple[OwnedParameter, torch.Tensor]] = []
        self._training = training_of(self._backend)
        # One flag for each part that has a gradient, and a last one for changed buffers.
        self._flags = np.zeros(len(parts) + 1, np.uint8)

    def receive(self, place: int, gradient: torch.Tensor | None) -> None:
        """Take the gradient of a parameter from autograd. ``place`` is its index in the parts.

        A rank without a gradient for the parameter takes part in the pass all the same.
        """
        if self._arrivals is not None and self._ending() is None:  # The last pass raised.
            self._drop_raised()
        if self._arrivals is None:
            self._begin()
        if gradient is not None:
            assert self._arrivals is not None
            self._flags[place] = 1
            self._arrivals.receive(self._parts[place].index, gradient)

    def _begin(self) -> None:
        """Begin a backward pass, which has reached its first parameter."""
        # A weak reference to a bound method would be dead at once. This object lives until autograd
        # has called it, or has dropped it after an error.
        ending = functools.partial(self._end)
        self._ending = weakref.ref(ending)
        torch.autograd.Variable._execution_engine.queue_callback(ending)
        self.part_of_step.enter_context(span("backward"))
        gradients = self._gradients
        live = [part.tensor.grad is not None for part in self._parts]
        self._flags[:-1] = live
        for part, is_live in zip(self._parts, live, strict=True):
            part.has_assigned_gradient &= is_live  # else cleared by zero_grad()
        for place, part in enumerate(self._parts) if any(live) else ():
            gradient = part.tensor.grad
            if live[place] and plain(gradient).data_ptr() != self._view(part).data_ptr():
                self._assigned.append((part, gradient))
                live[place] = False
        self._leave_to_user()
        is_first = not any(live)
        if is_first and self._has_local:
            gradients.abandon()  # The user cleared gradients of no_sync() before their reduction.
            self._forget_views()
        gradients.begin(BackwardPass(is_first, is_last=self.syncs, defer=not self.syncs))
        if not is_first:
            self._go_on(live)
        self._arrivals = Arrivals(self._plan, gradients, self.scale, _joined)

    def _leave_to_user(self) -> None:
        """Give gradients of earlier passes, which the user still has, memory of their own."""
        # A tensor is used again only if it is as it was made, and nobody else has it.
        can_stay = _COUNTS_ALL and self.syncs and not self._has_local
        with torch._C.DisableTorchFunctionSubclass():  # It costs time for each attribute.
            for place in list(self._given):
                given, part = self._given[place], self._parts[place]
                present = part.tensor.grad
                is_as_made = can_stay and given.is_set_to(self._view(part))
                is_as_made = is_as_made and not given.requires_grad
                # Three references are those of this function, of the dict and of the call. From
                # Python 3.14 on a call with `given` itself would have none of its own.
                is_ours = given is present or sys.getrefcount(self._given[place]) == 3
                if is_as_made and is_ours:
                    continue
                reference = weakref.ref(given)
                del given, self._given[place]
                users = reference()
                if users is not None and users is not present:
                    keep(users)  # This pass overwrites the memory.

    def _forget_views(self) -> None:
        """Discard tensors in the store's memory."""
        self._views.clear()
        self._given.clear()

    def _go_on(self, live: Sequence[bool]) -> None:
        """Prepare the store so that gradients are added to those of earlier passes.

        A gradient that is already reduced must count only once in the next sum over ranks.
        ``live`` is True for each part that has such a gradient.
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
        # A part whose gradient was set to None may still have values of earlier passes.
        for part in [p for p, is_live in zip(self._parts, live, strict=True) if not is_live]:
            unit = part.unit
            if isinstance(gradients, ReplicatedGradients) or self._has_local:
                full = gradients.gradient(unit)
                full[part.entry.start - unit.start : part.entry.stop - unit.start] = 0
            if not isinstance(gradients, ReplicatedGradients):
                (owned,) = gradients.owned([part.piece])
                owned[...] = 0

    def _has_raised(self) -> bool:
        """True if the last backward pass raised."""
        return self._arrivals is not None and self._ending() is None

    def _drop_raised(self) -> None:
        """Discard the pass that raised. Collective, unless it was inside `no_sync`."""
        assert self._arrivals is not None
        assigned = [part for part, _ in self._assigned]
        if any(part.tensor.grad is not None for part in self._parts if part not in assigned):
            raise ShardingError(
                "the last backward() raised, and the gradients hold a part of it: call "
                "optimizer.zero_grad() before the next backward()"
            )
        if self._gradients.sends_now:
            try:
                self._gradients.await_reductions()
                # Ranks that reduced other units, or did not raise, call another collective here,
                # which is detected. After this barrier no rank reads another's gradients.
                self._backend.barrier(subject=self._layout.subject)
            except CollectiveMismatchError as error:
                error.add_note(
                    f"The last backward() of rank {self._backend.rank} raised, and not every other "
                    "rank's did after the same gradients. A loop can only leave a batch out on "
                    "every rank: let the exception end the job, or agree before backward()"
                )
                raise
        self._gradients.abandon()
        self._forget_views()
        self._assigned.clear()
        self._has_local = self._is_reduced = False
        self._arrivals = None
        self.part_of_step.close()

    def trained_pieces(self) -> list[Piece]:
        """Return this rank's pieces of units that have trained parameters."""
        return [p for p in self._layout.pieces() if p.unit.index not in self._layout.frozen]

    @called_as("backward()")
    def _end(self) -> None:
        """End the backward pass, as autograd's callback. Collective, unless inside `no_sync`."""
        assert self._arrivals is not None
        self._arrivals.finish()
        self._arrivals = None
        self._gradients.await_reductions()
        self._has_local = not self.syncs
        self._is_reduced = self.syncs
        if self.syncs:
            self._flags[-1] = self._buffers.have_changed()
            changed = self._changes.flags()
            message = np.concatenate([self._flags, changed, self._training.marks()])
            # A parameter that any rank used has a gradient on all ranks. After this all-reduce no
            # rank reads another's gradients.
            self._backend.all_reduce(message, ReductionOperation.MAX, subject=self._layout.subject)
            ends = np.cumsum([self._flags.size, changed.size])
            self._flags, changed, of_loaders = np.split(message, ends)
        if self._gathered is not None:
            self._gathered.release()
        # One that each rank has whole must count once in the next sum over ranks, as in `_go_on`.
        is_whole = isinstance(self._gradients, ReplicatedGradients)
        is_whole = is_whole and not isinstance(self._gradients, ScatteredGradients)
        share = 1 / self._backend.world_size if self._has_local and is_whole else 1
        for part, gradient in self._assigned:
            self._view(part).add_(plain(gradient).detach(), alpha=share)
        self._assigned.clear()
        has_gradient = self._flags.tolist()
        for place, part in enumerate(self._parts):
            gradient = self._given.get(place) if has_gradient[place] else None
            if has_gradient[place] and gradient is None:
                gradient = part.as_gradient(self._view(part), is_local=self._has_local)
                self._given[place] = gradient
            part.tensor.grad = gradient
        # Last, because they refuse changes, buffers or batches, and gradients are complete then.
        if self.syncs:
            self._changes.compare(changed)
        if self.syncs and self._flags[-1]:
            self._buffers.broadcast(self._backend)
        if self.syncs:
            self._training.end_backward(of_loaders)
        self.part_of_step.close()

    def _view(self, part: OwnedParameter) -> torch.Tensor:
        """Return the gradient of a part, as a tensor in the store's memory."""
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
        """Refuse the operation ``purpose`` if the gradients are not reduced over all ranks.

        ``name`` is the module's class, for the message.

        Raises
        ------
        ShardingError
            If a backward pass is under way or has raised, or the last one was inside `no_sync`.
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
