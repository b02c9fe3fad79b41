"""State of a run besides model and optimizer: the best parameters, and the user's own objects."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mpishard.base import Array, CheckpointError, Metadata
from mpishard.checkpoint import CheckpointState, Pieces, PlainModelFiles, check_keys, choices_in
from mpishard.communication import CommunicationBackend, gather_texts, same_outcome
from mpishard.models import ShardedModelBase
from mpishard.observe import MemoryCategory

_ARRAY = "numpy array"


class BestParameters(CheckpointState):
    """The parameters of the best evaluation: this rank's pieces of them.

    Each rank keeps its shard, 1/N of the parameters under every strategy; nothing is gathered.
    With them go the choices of the plain model, such as running means. Checkpoints hold both as a
    state of its own.

    Parameters
    ----------
    model : ShardedModelBase
        The model.
    """

    KIND = "training/best_parameters"

    def __init__(self, model: ShardedModelBase) -> None:
        self._engine, self._plain = model.engine, model.wrapped_model
        self._choices: dict[str, object] = {}
        self._pieces = model.engine.layout.pieces()
        self._kept: Array | None = None

    @property
    def _vector(self) -> Array:
        if self._kept is None:  # a run without an evaluation needs no memory for a vector
            length = sum(piece.length for piece in self._pieces)
            self._kept = self._engine.layout.allocate(MemoryCategory.BEST_PARAMETERS, length)
        return self._kept

    def keep(self) -> None:
        """Copy this rank's shard of the parameters. Communicates nothing."""
        kept = self._vector  # made even if this rank owns nothing: all ranks write the same kinds
        owned = self._engine.parameters.owned(self._pieces)
        for piece, values in zip(self._pieces, owned, strict=True):
            kept[piece.in_shard] = values
        if isinstance(self._plain, PlainModelFiles):
            # Parameters are of use only with the choices, such as active features, of their
            # training.
            self._choices = self._plain.choices()

    def put_back(self) -> None:
        """Put the kept parameters back into the model. Collective."""
        engine = self._engine
        if isinstance(self._plain, PlainModelFiles):
            self._plain.take_choices(self._choices)
        owned = engine.parameters.owned(self._pieces)
        for piece, target in zip(self._pieces, owned, strict=True):
            target[...] = self._vector[piece.in_shard]
        # Ranks with copies of these pieces have the last parameters still.
        engine.parameters.publish(self._pieces)
        engine.changed()

    def arrays_to_write(self) -> Pieces:
        """Return the rank's pieces, of replicas a part; no kind before anything was kept."""
        return {} if self._kept is None else self._regions(written=True)

    def arrays_to_read(self) -> Pieces:
        """Return the rank's pieces, to be filled."""
        return self._regions()

    def _regions(self, *, written: bool = False) -> Pieces:
        pieces = self._pieces if self._engine.replica.is_writer or not written else ()
        parts = [(p.start, self._vector[p.in_shard]) for p in pieces]
        return {self.KIND: self._engine.placement.cut(parts, written=written)}

    def checkpoint_metadata(self) -> Mapping[str, object]:
        """Return the choices; the position of the loop has the best score and step."""
        return {"choices": self._choices} if self._choices else {}

    def restored(self, metadata: Mapping[str, object]) -> None:
        """Take the choices; nothing of the parameters is cached."""
        self._choices = choices_in(metadata)


class Stateful(Protocol):
    """An object of the script whose state a checkpoint saves, as JSON."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any, /) -> object: ...


def check_user_state(parts: object) -> None:
    """Refuse objects without a state that could be saved.

    Raises
    ------
    TypeError
        For anything but a mapping of names to generators, or to objects with ``state_dict`` and
        ``load_state_dict``.
    """
    wanted = (
        "user_state must map names to numpy.random.Generator objects, or to objects with "
        "state_dict() and load_state_dict(state)"
    )
    if not isinstance(parts, Mapping):
        raise TypeError(f"{wanted}, got {type(parts).__name__}")
    for name, part in parts.items():
        if not isinstance(name, str):
            raise TypeError(f"{wanted}; {name!r} is no name")
        if isinstance(part, np.random.Generator):
            continue
        if not all(callable(getattr(part, m, None)) for m in ("state_dict", "load_state_dict")):
            raise TypeError(f"{wanted}; {name!r} is a {type(part).__name__}")


class UserState:
    """The parts of a run's state that are the user's own.

    If they are alike on all ranks, one state is saved, and every rank of any later world takes
    it. If they differ, each rank's is saved, for a world of as many ranks.

    Parameters
    ----------
    parts : mapping of str to object
        As `check_user_state` accepts them. Every rank has the same names.
    backend : CommunicationBackend
        The ranks.

    Raises
    ------
    TypeError, ValueError
        On every rank, if JSON cannot hold the state of a part.
    """

    def __init__(
        self, parts: Mapping[str, np.random.Generator | Stateful], backend: CommunicationBackend
    ) -> None:
        # In one order on all ranks, because the user's dicts may have different orders.
        self._parts = dict(sorted(parts.items()))
        self._backend = backend
        self.position()  # fails here, if at all

    def position(self) -> dict[str, object]:
        """Return the part that a checkpoint saves, for JSON, complete on rank 0. Collective."""
        if not self._parts:
            return {"names": [], "ranks": []}
        with same_outcome(self._backend):
            states: dict[str, object] = {}
            for name, part in self._parts.items():
                if isinstance(part, np.random.Generator):
                    states[name] = _to_json(part.bit_generator.state)
                else:
                    states[name] = part.state_dict()
                try:
                    # One by one, for the name in the message.
                    json.dumps(states[name])
                except (TypeError, ValueError) as error:
                    raise type(error)(
                        f"the state of the user_state {name!r}: {error}. A checkpoint saves it as "
                        "JSON: use lists in place of arrays (array.tolist()), and Python's numbers"
                    ) from error
            text = json.dumps(states)
            check_keys("user_state", states)
        # To rank 0 alone, which writes the metadata.
        texts = gather_texts(self._backend, text)
        if len(set(texts)) == 1:  # equal states fit a world of any size
            texts = texts[:1]
        return {"names": list(self._parts), "ranks": [json.loads(text) for text in texts]}

    def check(self, saved: Metadata) -> None:
        """Refuse a saved `position` that does not fit. Communicates nothing.

        Raises
        ------
        ValueError
            If other names were saved, or differing states of another number of ranks.
        """
        names, states = saved["names"], saved["ranks"]
        # A generator that is left out would draw other numbers from here on.
        if names != list(self._parts):
            raise ValueError(
                f"the run was saved with the user_state {_listed(names)}, but has "
                f"{_listed(list(self._parts))} now: pass the same user_state and callbacks"
            )
        if len(states) > 1 and len(states) != self._backend.world_size:
            raise ValueError(
                f"the user_state {_listed(names)} differed between {len(states)} ranks when the "
                f"run was saved, and there are {self._backend.world_size} ranks now: resume it "
                f"with {len(states)} ranks, or use a state that is equal on all ranks"
            )

    def restore(self, saved: Metadata, path: Path) -> None:
        """Continue from a `position` that was read from ``path``. Communicates nothing.

        Raises
        ------
        CheckpointError
            If a generator of random numbers refuses its state.
        """
        states: Sequence[Mapping[str, Any]] = saved["ranks"]
        if states:
            mine = states[self._backend.rank if len(states) > 1 else 0]
            for name, part in self._parts.items():
                if isinstance(part, np.random.Generator):
                    try:
                        part.bit_generator.state = _from_json(mine[name])
                    # NumPy raises various exceptions for such a state.
                    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
                        raise CheckpointError(
                            f"{path}: the user_state {name!r} is no state of a "
                            f"{type(part.bit_generator).__name__}: {type(error).__name__}: {error}"
                        ) from error
                else:
                    part.load_state_dict(mine[name])


def _to_json(state: object) -> object:
    """Return the state of a bit generator for JSON."""
    if isinstance(state, Mapping):
        return {name: _to_json(value) for name, value in state.items()}
    if isinstance(state, np.ndarray):
        # Philox and MT19937 keep arrays of numbers in their states.
        return {_ARRAY: state.tolist(), "dtype": state.dtype.name}
    return state.item() if isinstance(state, np.generic) else state


def _from_json(state: object) -> Any:
    if not isinstance(state, Mapping):
        return state
    if _ARRAY in state:
        return np.array(state[_ARRAY], state["dtype"])
    return {name: _from_json(value) for name, value in state.items()}


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "none"
