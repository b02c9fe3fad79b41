"""Checkpoints of a PyTorch program, which any number of ranks loads under any strategy."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mpishard import checkpoint, settings
from mpishard.arguments import as_integer
from mpishard.arrays import Array
from mpishard.communication import CommunicationBackend
from mpishard.errors import CheckpointError
from mpishard.sharding import ParameterEntry
from mpishard.torch.buffers import from_text, to_text
from mpishard.torch.optimizer import (
    is_elementwise,
    numbered_parts,
    parts_of,
    states_of_numbers,
)
from mpishard.torch.parameters import Part
from mpishard.torch.sharded import ShardedModule, module_of

_STATE, _STEP, _USER = "torch", "step", "user"  # Keys of the checkpoint's metadata.


def save(
    path: str | os.PathLike[str],
    model: Any,
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    step: int = 0,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Save a sharded model, with its optimizer and scheduler. Collective.

    The checkpoint is one of `mpishard.checkpoint`: each rank writes its part, and any number of
    ranks, under any strategy, loads it. Parameters have the module's names. Buffers, and frozen
    parameters of another dtype, are rank 0's. Under ``mpishard verify`` nothing is written.

    Parameters
    ----------
    path : path
        Directory to make or replace, on a file system that all ranks see.
    model : torch.nn.Module
        Sharded model.
    optimizer : torch.optim.Optimizer, optional
        Optimizer that `mpishard.torch.optimizer` has made.
    scheduler : object, optional
        Object with ``state_dict()``, such as one of ``torch.optim.lr_scheduler``. That of rank 0 is
        saved.
    step : int
        Number of updates, which `load` returns.
    metadata : mapping, optional
        Values that JSON can represent. Those of rank 0 are saved.

    Raises
    ------
    ShardingError
        If the model is not sharded, or a parameter is no longer in the store's memory.
    TypeError
        If `mpishard.torch.optimizer` has not made the optimizer.
    ValueError
        If the optimizer updates another model.
    ValueError, TypeError, CheckpointError
        As for `mpishard.checkpoint.save`.
    """
    owner = module_of(model)
    owner.placed.require_placed()
    beside: dict[str, Any] = {"buffers": owner.placed.buffers.saved()}
    view = None
    if optimizer is not None:
        view = _OptimizerView(owner, optimizer)
        beside["optimizer"] = view.settings()
    if scheduler is not None:
        beside["scheduler"] = scheduler.state_dict()
    document = {
        _STEP: as_integer("step", step),
        # Only rank 0's metadata is saved.
        _STATE: to_text(beside) if owner.backend.rank == 0 else "",
        _USER: dict(metadata or {}),
    }
    # `mpishard verify` runs the user's script, whose checkpoints it must not replace.
    if settings.verification() is None:
        checkpoint.save(path, _ModelView(owner), view, metadata=document)


def load(
    path: str | os.PathLike[str], model: Any, optimizer: Any = None, scheduler: Any = None
) -> dict[str, Any]:
    """Restore a sharded model, with its optimizer and scheduler, from `save`. Collective.

    Parameters
    ----------
    path : path
        The checkpoint, or a folder of checkpoints, of which the newest that verifies is restored.
    model, optimizer, scheduler
        As for `save`. The checkpoint may have an optimizer or scheduler that is not restored.

    Returns
    -------
    dict
        The ``metadata`` given to `save`, and its ``"step"``.

    Raises
    ------
    ShardingError
        If the model is not sharded.
    FileNotFoundError
        If there is no checkpoint.
    CheckpointError
        If the checkpoint is damaged, does not fit, or was not saved by `save`. All ranks raise it.
    """
    owner = module_of(model)
    view = None if optimizer is None else _OptimizerView(owner, optimizer)
    if view is not None:
        # An optimizer of PyTorch makes its states at its first step. Until then only the checkpoint
        # has their names and dtypes.
        with checkpoint.CheckpointReader(path) as reader:
            view.expect(reader.kinds)
    document = checkpoint.load(path, _ModelView(owner), view)
    if _STATE not in document:
        raise CheckpointError(
            f"the checkpoint {path} was not saved by mpishard.torch.save: its parameters are "
            "loaded, and it holds neither buffers nor the state of an optimizer of PyTorch"
        )
    beside = from_text(document[_STATE])
    buffers = owner.placed.buffers
    try:
        buffers.check(beside["buffers"])
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None
    buffers.take(beside["buffers"])
    if view is not None:
        view.finish(beside["optimizer"])
    if scheduler is not None:
        if "scheduler" not in beside:
            raise CheckpointError(f"the checkpoint {path} was saved without a scheduler")
        scheduler.load_state_dict(beside["scheduler"])
    return {**document[_USER], "step": document[_STEP]}


class _ModelView:
    """Parameters of a sharded module, in the form that `mpishard.checkpoint` saves and loads."""

    def __init__(self, owner: ShardedModule) -> None:
        self._owner = owner
        owner.let_go()

    @property
    def checkpoint_backend(self) -> CommunicationBackend:
        return self._owner.backend

    @property
    def checkpoint_dtype(self) -> np.dtype[Any]:
        return self._owner.layout.dtype

    def checkpoint_parameters(self) -> Sequence[ParameterEntry]:
        return self._owner.entries

    def arrays_to_write(self) -> checkpoint.Pieces:
        return self._regions(self._owner.layout.pieces())

    def arrays_to_read(self) -> checkpoint.Pieces:
        return self._regions(self._owner.parameters.held)

    def _regions(self, pieces: Sequence[Any]) -> checkpoint.Pieces:
        owned = self._owner.parameters.owned(pieces)
        parts = [(piece.start, values) for piece, values in zip(pieces, owned, strict=True)]
        return {"parameters": self._owner.placement.cut(parts)}

    def checkpoint_metadata(self) -> Mapping[str, Any]:
        owner = self._owner
        return {"strategy": owner.strategy, "world_size": owner.backend.world_size}

    def check_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Accept any metadata, because parameters fit every strategy and world size."""

    def restored(self, metadata: Mapping[str, Any]) -> None:
        self._owner.parameters.refresh()
        if self._owner.gathered is not None:
            self._owner.gathered.forget()


class _OptimizerView:
    """State of a torch optimizer, in the form that `mpishard.checkpoint` saves and loads.

    States that have a value for each element of a parameter are saved as arrays, by regions. All
    other states are in `settings`.
    """

    def __init__(self, owner: ShardedModule, optimizer: Any) -> None:
        self._owner = owner
        self._optimizer = optimizer
        parts = parts_of(optimizer)
        rule = getattr(optimizer, "rule", None)
        name = type(optimizer).__name__ if rule is None else f"mpishard.{type(rule).__name__}"
        self._prefix = f"optimizer/{name}/"
        self._parts: list[Part] = [part for _, part in numbered_parts(parts, optimizer)]
        strange = [part.entry.name for part in self._parts if part.owner is not owner]
        if strange:
            raise ValueError(
                f"the optimizer updates {strange[0]!r} of another model; save each model with an "
                "optimizer of its own"
            )
        self._read: dict[str, dict[int, Any]] = {}
        self._of_numbers = states_of_numbers(optimizer)

    def checkpoint_view(self, model: Any) -> Any:
        return self

    def checkpoint_metadata(self) -> Mapping[str, Any]:
        return {}

    def restored(self, metadata: Mapping[str, Any]) -> None:
        """Do nothing, because `finish` restores the optimizer."""

    def arrays_to_write(self) -> checkpoint.Pieces:
        # States that have a value for each element of a parameter.
        keys = dict.fromkeys(
            key
            for part in self._parts
            for key, value in self._optimizer.state.get(part.tensor, {}).items()
            if is_elementwise(key, value, part.tensor.shape, self._of_numbers)
        )
        cut = self._owner.placement.cut
        return {self._prefix + key: cut(list(self._written(key))) for key in keys}

    def _written(self, key: str) -> Iterator[tuple[int, Array]]:
        """Yield start and values of this rank's parts of a state; zeros if a parameter has none."""
        owner = self._owner
        pieces = owner.layout.pieces()
        for part in owner.parts:
            piece = pieces[part.unit.index]
            start = max(piece.start, part.entry.start)
            stop = min(piece.stop, part.entry.stop)
            if start >= stop:
                continue
            value = self._optimizer.state.get(part.tensor, {}).get(key)
            if value is None:
                # A parameter has no state before its first gradient, but every element of every
                # kind of array must be in the checkpoint.
                yield start, np.zeros(stop - start, owner.layout.dtype)
            else:
                flat = value.detach().reshape(-1).numpy()
                yield start, flat[start - part.start : stop - part.start]

    def expect(self, kinds: Mapping[str, np.dtype[Any]]) -> None:
        """Allocate this rank's parts of the states that a checkpoint has."""
        for kind, dtype in kinds.items():
            if kind.startswith(self._prefix):
                self._read[kind.removeprefix(self._prefix)] = {
                    part.index: torch.from_numpy(np.zeros(part.stop - part.start, dtype))
                    for part in self._owner.parts
                }

    def arrays_to_read(self) -> checkpoint.Pieces:
        return {
            self._prefix + key: self._owner.placement.cut(
                [(p.start, values[p.index].numpy()) for p in self._owner.parts]
            )
            for key, values in self._read.items()
        }

    def settings(self) -> dict[str, Any]:
        """Return the groups, with names of parameters, and the states that are not arrays."""
        rest = {
            part.entry.name: {
                # None marks states that are saved as arrays.
                key: None
                if is_elementwise(key, value, part.tensor.shape, self._of_numbers)
                else value
                for key, value in self._optimizer.state[part.tensor].items()
            }
            for part in self._parts
            if part.tensor in self._optimizer.state
        }
        return {"groups": self._groups(), "rest": rest}

    def _groups(self) -> list[dict[str, Any]]:
        parts = iter(self._parts)
        return [
            {**group, "params": [next(parts).entry.name for _ in group["params"]]}
            for group in self._optimizer.param_groups
        ]

    def finish(self, settings: Mapping[str, Any]) -> None:
        """Load the arrays that were read, and ``settings``, into the optimizer."""
        saved = [group["params"] for group in settings["groups"]]
        here = [group["params"] for group in self._groups()]
        if saved != here:
            raise CheckpointError(
                f"the parameter groups differ: the saved optimizer has groups of "
                f"{[len(g) for g in saved]} parameters, this one of {[len(g) for g in here]}"
            )
        state = {}
        for number, part in enumerate(self._parts):
            rest = settings["rest"].get(part.entry.name)
            if rest is None:
                continue
            state[number] = {
                key: self._read[key][part.index].view(part.tensor.shape) if value is None else value
                for key, value in rest.items()
            }
        numbers = iter(range(len(self._parts)))
        groups = [
            {**group, "params": [next(numbers) for _ in group["params"]]}
            for group in settings["groups"]
        ]
        # The states are this rank's parts already: the hook `slice_states` must not cut them again.
        self._optimizer._mpishard_is_divided = True
        try:
            self._optimizer.load_state_dict({"state": state, "param_groups": groups})
        finally:
            self._optimizer._mpishard_is_divided = False
