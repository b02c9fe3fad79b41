"""Backward passes of a sharded module: gradients from autograd to the store, and `.grad`."""

from __future__ import annotations

import functools
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
from mpishard.torch.gradients import plain
from mpishard.torch.parameters import Changes, OwnedParameter, native_gradient


def _joined(gradients: list[torch.Tensor]) -> Array:
    """Return gradients as one vector."""
    if len(gradients) > 1:
        return torch._C._nn.flatten_dense_tensors(gradients).numpy()  # type: ignore[no-any-return]
    return gradients[0].numpy().reshape(-1)  # type: ignore[no-any-return]


class BackwardPasses:
    """Transfer of gradients from autograd to the store, until the end of ``backward()``.

    `receive` takes each gradient and writes it to the store, which reduces each unit when it and
    all later units are complete. At the end of the pass the other units are reduced, and each
    part's ``grad`` becomes a view of the store, or, if it is the user's, gets the sum in place.
    Gradients add up until a part's ``grad`` is set to None.

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
        # Gradients that are the user's, by place, to which the sum over ranks is added in place.
        # `_waiting` are those for which passes inside `no_sync` have added to the store.
        self._of_user: dict[int, torch.Tensor] = {}
        self._waiting: dict[int, torch.Tensor] = {}
        # True for each part for which the store had a gradient before this pass.
        self._live: list[bool] = []
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
        self._live.clear()
        self._of_user.clear()
        for place, part in enumerate(self._parts):
            part.require_updated()
            gradient = part.present_gradient()
            if self._is_reduced and not part.owner.shards_state:
                # Each rank has the whole sum over ranks, to which this pass adds another one, also
                # if only some ranks have read the gradient.
                gradient = part.hand_out()
            self._flags[place] = gradient is not None
            is_of_user = gradient is not None and gradient is not part.stored_gradient
            if is_of_user:
                self._of_user[place] = gradient
            waits = self._waiting.pop(place, None) is gradient
            self._live.append(gradient is not None and (waits or not is_of_user))
        is_first = not any(self._live)
        if is_first and self._has_local:
            gradients.abandon()  # The user cleared gradients of no_sync() before their reduction.
            self._forget_views()
        gradients.begin(BackwardPass(is_first, is_last=self.syncs, defer=not self.syncs))
        if not is_first:
            self._go_on()
        self._arrivals = Arrivals(self._plan, gradients, self.scale, _joined)

    def _forget_views(self) -> None:
        """Discard tensors in the store's memory."""
        self._views.clear()
        for part in self._parts:
            part.stored_gradient = None

    def _go_on(self) -> None:
        """Prepare the store so that gradients are added to those of earlier passes.

        A gradient that is already reduced must count only once in the next sum over ranks.
        """
        gradients = self._gradients
        if self._is_reduced and isinstance(gradients, ScatteredGradients):
            for piece in self.trained_pieces():
                full = gradients.gradient(piece.unit)
                full[: piece.start - piece.unit.start] = 0
                full[piece.stop - piece.unit.start :] = 0
        self._is_reduced = False
        # A part whose gradient was set to None may still have values of earlier passes.
        for part in [p for p, is_live in zip(self._parts, self._live, strict=True) if not is_live]:
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
        kept = [n for n, part in enumerate(self._parts) if part.present_gradient() is not None]
        if any(place not in self._of_user or self._live[place] for place in kept):
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
        is_local = self._has_local and self._backend.world_size > 1
        has_gradient = self._flags.tolist()
        for place, part in enumerate(self._parts):
            if not has_gradient[place]:
                native_gradient.__set__(part.tensor, None)
            elif place in self._of_user:
                self._add_to_user(place, part, is_local=is_local)
            else:
                part.store_gradient(self._view(part), is_local=is_local)
        self._of_user.clear()
        # Last, because they refuse changes, buffers or batches, and gradients are complete then.
        if self.syncs:
            self._changes.compare(changed)
        if self.syncs and self._flags[-1]:
            self._buffers.broadcast(self._backend)
        if self.syncs:
            self._training.end_backward(of_loaders)
        self.part_of_step.close()

    def _add_to_user(self, place: int, part: OwnedParameter, *, is_local: bool) -> None:
        """Add the gradient of this pass to the user's, in place as PyTorch does.

        If ``is_local`` is True, the sum over ranks is added later.
        """
        gradient = self._of_user[place]
        part.note_local(gradient, is_local=is_local)
        if is_local:
            self._waiting[place] = gradient
        else:
            plain(gradient).detach().add_(self._view(part))
            part.show_assigned(gradient)

    def forget_local(self, gradient: torch.Tensor) -> None:
        """Let the next sum over ranks not have what passes inside `no_sync` added to a gradient."""
        self._waiting = {n: kept for n, kept in self._waiting.items() if kept is not gradient}

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
        if self._has_local and any(part.present_gradient() is not None for part in self._parts):
            raise ShardingError(
                f"{purpose} needs gradients of all ranks, but the last backward() was inside "
                "no_sync(): leave no_sync() before the last backward() of a step"
            )
