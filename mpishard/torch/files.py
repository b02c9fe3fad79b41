"""Checkpoints of a PyTorch program, which fit every number of ranks and every strategy."""

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
from mpishard.torch.optimizer import (
    is_elementwise,
    numbered_parts,
    parts_of,
    states_of_numbers,
)
from mpishard.torch.parameters import Part
from mpishard.torch.placed import from_text, to_text
from mpishard.torch.sharded import ShardedModule, module_of

_STATE, _STEP, _USER = "torch", "step", "user"  # keys of the metadata beside the arrays


def save(
    path: str | os.PathLike[str],
    model: Any,
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    step: int = 0,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Save a sharded model, and what trains it. Collective.

    The checkpoint is one of `mpishard.checkpoint`: each rank writes its part, and any number of
    ranks, under any strategy, loads it. Parameters have the module's names. Buffers, and frozen
    parameters of another dtype, are rank 0's. Under ``mpishard verify`` nothing is written.

    Parameters
    ----------
    path : path
        The directory to make or replace, on a file system that all ranks see.
    model : torch.nn.Module
        Sharded.
    optimizer : torch.optim.Optimizer, optional
        Of `mpishard.torch.optimizer`.
    scheduler : object, optional
        With ``state_dict()``, as those of ``torch.optim.lr_scheduler``. Rank 0's.
    step : int
        Number of updates, which `load` returns.
    metadata : mapping, optional
        What JSON can hold. Rank 0's.

    Raises
    ------
    ShardingError
        For a model that is not sharded.
    ValueError, TypeError, CheckpointError
        As `mpishard.checkpoint.save`.
    """
    owner = module_of(model)
    owner.placed.require_placed()
    beside: dict[str, Any] = {"buffers": owner.placed.buffers.saved(with_parameters=True)}
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
    if settings.verification() is None:  # else a check would replace the training's checkpoint
        checkpoint.save(path, _ModelView(owner), view, metadata=document)


def load(
    path: str | os.PathLike[str], model: Any, optimizer: Any = None, scheduler: Any = None
) -> dict[str, Any]:
    """Restore a sharded model, and what trains it, from a checkpoint of `save`. Collective.

    Parameters
    ----------
    path : path
        The checkpoint, or a folder of them, of which the newest that verifies is restored.
    model, optimizer, scheduler
        As for `save`; the checkpoint may hold more.

    Returns
    -------
    dict
        The ``metadata`` given to `save`, and its ``"step"``.

    Raises
    ------
    ShardingError
        For a model that is not sharded.
    FileNotFoundError
        If there is no checkpoint.
    CheckpointError
        If it is torn, does not fit, or was not saved by `save`. All ranks raise it.
    """
    owner = module_of(model)
    view = None if optimizer is None else _OptimizerView(owner, optimizer)
    if view is not None:
        # A torch optimizer makes its states at the first step: the checkpoint tells their names.
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
    """The parameters of a sharded module, as `mpishard.checkpoint` saves and loads them."""

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
        """Nothing in them hinders."""

    def restored(self, metadata: Mapping[str, Any]) -> None:
        self._owner.parameters.refresh()
        if self._owner.gathered is not None:
            self._owner.gathered.forget()


class _OptimizerView:
    """The state of a torch optimizer, as `mpishard.checkpoint` saves and loads it.

    Arrays in the shape of a parameter are saved by its regions; the rest is `settings`.
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
        """`finish` does it."""

    def _keys(self) -> list[str]:
        """The names of states in the shape of a parameter."""
        return list(
            dict.fromkeys(
                key
                for part in self._parts
                for key, value in self._optimizer.state.get(part.tensor, {}).items()
                if is_elementwise(key, value, part.tensor.shape, self._of_numbers)
            )
        )

    def arrays_to_write(self) -> checkpoint.Pieces:
        arrays = {key: list(self._written(key)) for key in self._keys()}
        return {self._prefix + key: self._owner.placement.cut(a) for key, a in arrays.items()}

    def _written(self, key: str) -> Iterator[tuple[int, Array]]:
        """Start and values of this rank's part of a state; zeros if a parameter has none."""
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
                # All ranks must have the same kinds; a parameter without gradient so far has no
                # state.
                yield start, np.zeros(stop - start, owner.layout.dtype)
            else:
                flat = value.detach().reshape(-1).numpy()
                yield start, flat[start - part.start : stop - part.start]

    def expect(self, kinds: Mapping[str, np.dtype[Any]]) -> None:
        """Make room for the states that a checkpoint holds."""
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
        """Groups with the names of their parameters, and the states of other shapes, by name."""
        rest = {
            part.entry.name: {
                # None marks states that are among the arrays.
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
        """Take the arrays that were read, and the settings of the groups."""
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
        # By PyTorch's own way past the hook, for these are parts already.
        self._optimizer._mpishard_is_divided = True
        try:
            self._optimizer.load_state_dict({"state": state, "param_groups": groups})
        finally:
            self._optimizer._mpishard_is_divided = False
