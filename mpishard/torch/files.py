"""Checkpoints of a PyTorch program, which any number of ranks loads under any strategy."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch

from mpishard import checkpoint
from mpishard.base import Array, Document, DType, Metadata, as_integer, settings
from mpishard.communication import CommunicationBackend
from mpishard.sharding import ParameterEntry
from mpishard.torch.beside import (
    beside_in,
    check_state,
    errors_of_loading,
    module_unchanged,
    saved_state,
    take_state,
    to_text,
)
from mpishard.torch.optimizer_state import (
    is_elementwise,
    numbered_parameters,
    owned_parameters,
    states_of_numbers,
)
from mpishard.torch.parameters import OwnedParameter
from mpishard.torch.sharded import ShardedModule, module_of

_SHORT = 1 << 14  # Elements below which a state is copied beside its neighbours to be saved.
_BESIDE, _STEP, _USER = "beside", "step", "user"  # Keys of the checkpoint's metadata.


def save(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    *,
    step: int = 0,
    metadata: Metadata | None = None,
) -> None:
    """Save a sharded model, with its optimizer and scheduler. Collective.

    The checkpoint is one of `mpishard.checkpoint`: each rank writes its part, and any number of
    ranks, under any strategy, loads it. Parameters have the module's names. All else that
    ``state_dict()`` has is rank 0's: buffers, extra state, frozen parameters of another dtype.
    Under ``mpishard verify`` nothing is written.

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
        If `mpishard.torch.optimizer` has not made the optimizer. Also if the state of the module, a
        parameter group or the scheduler has a value that `load` could not read, such as a function.
        All ranks raise it, and the message gives the place.
    ValueError
        If the optimizer updates another model.
    ValueError, TypeError, CheckpointError
        As for `mpishard.checkpoint.save`.
    """
    owner = module_of(model)
    # A parameter that was moved out of the store would be saved with its old values.
    owner.placed.require_placed()
    view = None if optimizer is None else _OptimizerView(owner, optimizer)
    document = {_STEP: as_integer("step", step), _USER: dict(metadata or {})}
    # `mpishard verify` runs the user's script, whose checkpoints it must not replace.
    if settings.verification() is None:
        checkpoint.save(path, _ModelView(owner, view, scheduler), view, metadata=document)


def load(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
) -> Document:
    """Restore a sharded model, with its optimizer and scheduler, from `save`. Collective.

    If it raises, nothing has changed on any rank, unless a disk fails between two reads. To find
    errors early, the state beside arrays is loaded twice. The first time is undone.

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
        If the checkpoint is damaged, does not fit, or was not saved by `save`; or the module, the
        optimizer or the scheduler does not load its state. All ranks raise it.
    """
    owner = module_of(model)
    view = None if optimizer is None else _OptimizerView(owner, optimizer)
    document = checkpoint.load(path, _ModelView(owner, view, scheduler), view)
    return {**document[_USER], "step": document[_STEP]}


class _ModelView:
    """Parameters of a sharded module, in the form that `mpishard.checkpoint` saves and loads.

    Its metadata have, as text, all that the checkpoint has beside arrays.
    """

    def __init__(
        self, owner: ShardedModule, optimizer: _OptimizerView | None, scheduler: Any
    ) -> None:
        self._owner, self._optimizer, self._scheduler = owner, optimizer, scheduler
        # The state beside arrays of the checkpoint that was checked last.
        self._beside: Document = {}
        # Changes that the user made in gathered parameters go to the pieces, which are saved.
        owner.free_gathered()

    def checkpointed(self) -> _ModelView:
        return self

    @property
    def backend(self) -> CommunicationBackend:
        return self._owner.backend

    @property
    def subject(self) -> int:
        return self._owner.layout.subject

    @property
    def dtype(self) -> DType:
        return self._owner.layout.dtype

    def parameters(self) -> Sequence[ParameterEntry]:
        return self._owner.entries

    def arrays_to_write(self) -> checkpoint.Pieces:
        return self._regions(self._owner.layout.pieces())

    def arrays_to_read(self) -> checkpoint.Pieces:
        return self._regions(self._owner.parameters.local_pieces)

    def _regions(self, pieces: Sequence[Any]) -> checkpoint.Pieces:
        owned = self._owner.parameters.owned(pieces)
        parts = [(piece.start, values) for piece, values in zip(pieces, owned, strict=True)]
        return {"parameters": self._owner.placement.cut(parts)}

    def checkpoint_metadata(self) -> Metadata:
        owner = self._owner
        beside = {"model": saved_state(owner.placed)}
        if self._optimizer is not None:
            beside["optimizer"] = self._optimizer.settings()
        if self._scheduler is not None:
            beside["scheduler"] = self._scheduler.state_dict()
        return {
            "strategy": owner.strategy,
            "world_size": owner.backend.world_size,
            # Only rank 0's metadata are saved.
            _BESIDE: to_text(beside) if owner.backend.rank == 0 else "",
        }

    def check_metadata(self, metadata: Metadata) -> None:
        """Load the state beside arrays and undo it, so that errors come before any change."""
        if _BESIDE not in metadata:
            raise ValueError(
                "it was not saved by mpishard.torch.save, and holds neither buffers nor the state "
                "of an optimizer of PyTorch"
            )
        beside = self._beside = beside_in(metadata[_BESIDE])
        check_state(self._owner.placed, beside["model"])
        if self._scheduler is not None and "scheduler" not in beside:
            raise ValueError("it was saved without a scheduler")
        # The user's load_state_dict() may raise. Here it is tried, and undone, before arrays are
        # read.
        with ExitStack() as undone:
            undone.enter_context(module_unchanged(self._owner.placed))
            if self._optimizer is not None:
                undone.enter_context(_attributes_unchanged(self._optimizer.optimizer))
            if self._scheduler is not None:
                undone.enter_context(_scheduler_unchanged(self._scheduler))
            # A copy, because user code may change what it is given.
            self._take(copy.deepcopy(beside))

    def restored(self, metadata: Metadata) -> None:
        # Rounded copies and gathered units are older than the arrays that were read.
        self._owner.parameters.refresh()
        if self._owner.gathered is not None:
            self._owner.gathered.forget()
        self._take(self._beside)

    def _take(self, beside: Metadata) -> None:
        take_state(self._owner.placed, beside["model"])
        if self._optimizer is not None:
            self._optimizer.take(beside["optimizer"])
        if self._scheduler is not None:
            with errors_of_loading(self._scheduler):
                self._scheduler.load_state_dict(beside["scheduler"])


@contextmanager
def _attributes_unchanged(changed: object) -> Iterator[None]:
    """Undo, after the ``with`` statement, assignments to attributes."""
    before = dict(vars(changed))
    try:
        yield
    finally:
        vars(changed).clear()
        vars(changed).update(before)


@contextmanager
def _scheduler_unchanged(scheduler: Any) -> Iterator[None]:
    """Undo, after the ``with`` statement, what the scheduler has loaded."""
    before = copy.deepcopy(scheduler.state_dict())
    with _attributes_unchanged(scheduler):
        try:
            yield
        finally:
            # The attributes of a scheduler may be schedulers and functions with a state.
            with errors_of_loading(scheduler):
                scheduler.load_state_dict(before)


class _OptimizerView:
    """State of a torch optimizer, in the form that `mpishard.checkpoint` saves and loads.

    States that have a value for each element of a parameter are saved as arrays, by regions. All
    other states are in `settings`.
    """

    def __init__(self, owner: ShardedModule, optimizer: torch.optim.Optimizer) -> None:
        self._owner = owner
        self.optimizer = optimizer
        parts = owned_parameters(optimizer)
        rule = getattr(optimizer, "rule", None)
        name = type(optimizer).__name__ if rule is None else f"mpishard.{type(rule).__name__}"
        self._prefix = f"optimizer/{name}/"
        self._parts: list[OwnedParameter] = [
            part for _, part in numbered_parameters(parts, optimizer)
        ]
        strange = [part.entry.name for part in self._parts if part.owner is not owner]
        if strange:
            raise ValueError(
                f"the optimizer updates {strange[0]!r} of another model; save each model with an "
                "optimizer of its own"
            )
        # For each state that was read, the values of all parts end to end.
        self._read: dict[str, Array] = {}
        self._of_numbers = states_of_numbers(optimizer)

    def checkpoint_view(self, model: torch.nn.Module) -> Any:
        return self

    def checkpoint_metadata(self) -> Metadata:
        return {}

    def restored(self, metadata: Mapping[str, object]) -> None:
        """Do nothing, because the model's view restores the optimizer by `take`."""

    def arrays_to_write(self) -> checkpoint.Pieces:
        # States that have a value for each element of a parameter.
        keys = dict.fromkeys(
            key
            for part in self._parts
            for key, value in self.optimizer.state.get(part.tensor, {}).items()
            if is_elementwise(key, value, part.tensor.shape, self._of_numbers)
        )
        cut = self._owner.placement.cut
        return {self._prefix + key: cut(_joined(self._written(key))) for key in keys}

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
            value = self.optimizer.state.get(part.tensor, {}).get(key)
            if value is None:
                # A parameter has no state before its first gradient, but every element of every
                # kind of array must be in the checkpoint.
                yield start, np.zeros(stop - start, owner.layout.dtype)
            else:
                flat = value.detach().reshape(-1).numpy()
                yield start, flat[start - part.start : stop - part.start]

    def expect(self, kinds: Mapping[str, DType]) -> None:
        """Allocate this rank's parts of the states that a checkpoint has.

        An optimizer of PyTorch makes its states at its first step. Until then only the checkpoint
        has their names and dtypes.
        """
        length = sum(part.stop - part.start for part in self._owner.parts)
        self._read = {
            kind.removeprefix(self._prefix): np.zeros(length, dtype)
            for kind, dtype in kinds.items()
            if kind.startswith(self._prefix)
        }

    def arrays_to_read(self) -> checkpoint.Pieces:
        # Parts that are end to end in the flat vector are one piece.
        runs: list[list[int]] = []
        for part in self._owner.parts:
            if runs and runs[-1][1] == part.start:
                runs[-1][1] = part.stop
            else:
                runs.append([part.start, part.stop])
        ends = [*accumulate(stop - start for start, stop in runs)]
        return {
            self._prefix + key: self._owner.placement.cut(
                (start, vector[end - (stop - start) : end])
                for (start, stop), end in zip(runs, ends, strict=True)
            )
            for key, vector in self._read.items()
        }

    def settings(self) -> Document:
        """Return the groups, with names of parameters, and the states that are not arrays."""
        rest = {
            part.entry.name: {
                # None marks states that are saved as arrays.
                key: None
                if is_elementwise(key, value, part.tensor.shape, self._of_numbers)
                else value
                for key, value in self.optimizer.state[part.tensor].items()
            }
            for part in self._parts
            if part.tensor in self.optimizer.state
        }
        return {"param_groups": self._groups(), "state": _columns(rest)}

    def _groups(self) -> list[Document]:
        parts = iter(self._parts)
        return [
            {**group, "params": [next(parts).entry.name for _ in group["params"]]}
            for group in self.optimizer.param_groups
        ]

    def take(self, settings: Metadata) -> None:
        """Load the arrays that were read, and ``settings``, into the optimizer."""
        saved = [group["params"] for group in settings["param_groups"]]
        here = [group["params"] for group in self._groups()]
        if saved != here:
            sizes, own_sizes = ([len(names) for names in groups] for groups in (saved, here))
            if sizes != own_sizes:
                found = f"has groups of {sizes} parameters, this one of {own_sizes}"
            else:
                pairs = zip(chain(*saved), chain(*here), strict=True)
                name, own_name = next(pair for pair in pairs if pair[0] != pair[1])
                found = f"has {name!r} where this one has {own_name!r}"
            raise ValueError(f"the parameter groups differ: the saved optimizer {found}")
        parts = self._owner.parts
        lengths = [part.stop - part.start for part in parts]
        read = {}
        for key, vector in self._read.items():
            states = torch.from_numpy(vector).split(lengths)
            if not self._owner.shards_state:
                shapes = (part.tensor.shape for part in parts)
                states = [v.view(shape) for v, shape in zip(states, shapes, strict=True)]
            read[key] = dict(zip((part.index for part in parts), states, strict=True))
        state = {}
        rest = _rows(settings["state"])
        for number, part in enumerate(self._parts):
            if part.entry.name in rest:
                state[number] = {
                    key: read[key][part.index] if value is None else value
                    for key, value in rest[part.entry.name].items()
                }
        groups, first = [], 0
        for group in settings["param_groups"]:
            # Ranges, because PyTorch searches them for the number of each parameter.
            numbers = range(first, first + len(group["params"]))
            groups.append({**group, "params": numbers})
            first = numbers.stop
        # The states are this rank's parts already: the hook `slice_states` must not cut them again.
        self.optimizer._mpishard_is_divided = True
        try:
            with errors_of_loading(self.optimizer):
                self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        finally:
            self.optimizer._mpishard_is_divided = False


def _joined(parts: Iterable[tuple[int, Array]]) -> Iterator[tuple[int, Array]]:
    """Yield parts of a flat vector, of which short neighbours are copied into one."""
    run: list[Array] = []
    begin = end = 0
    for start, values in parts:
        is_short = values.size < _SHORT
        if run and not (is_short and start == end and values.dtype == run[0].dtype):
            yield begin, np.concatenate(run)
            run = []
        if not is_short:
            yield start, values
            continue
        begin = begin if run else start
        end = start + values.size
        run.append(values)
    if run:
        yield begin, np.concatenate(run)


def _columns(states: Mapping[str, Document]) -> list[Document]:
    """Return states by parameter as columns: the values of equal parameters side by side.

    PyTorch takes a tenth of a millisecond to save a tensor, however small.
    """
    groups: dict[tuple[Any, ...], dict[str, Document]] = {}
    for name, state in states.items():
        alike = tuple((key, _stacks(value)) for key, value in state.items())
        groups.setdefault(alike, {})[name] = state
    return [
        {
            "names": [*group],
            "values": {
                key: torch.stack([state[key] for state in group.values()])
                if form
                else [state[key] for state in group.values()]
                for key, form in alike
            },
        }
        for alike, group in groups.items()
    ]


def _stacks(value: Any) -> tuple[object, ...]:
    """Return a form, which values have in common that make one tensor; empty if they do not."""
    if type(value) is not torch.Tensor or value.layout is not torch.strided:
        return ()
    return value.dtype, value.shape, value.device


def _rows(columns: Sequence[Document]) -> dict[str, Document]:
    """Return the states by parameter from the result of `_columns`."""
    rows: dict[str, Document] = {}
    for group in columns:
        values = {
            key: [v.clone() for v in column] if isinstance(column, torch.Tensor) else column
            for key, column in group["values"].items()
        }
        for number, name in enumerate(group["names"]):
            rows[name] = {key: column[number] for key, column in values.items()}
    return rows
