"""Bytes and files for an optimizer whose state lives on several ranks."""

from __future__ import annotations

import logging
import zlib
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from mpishard.arrays import Array
from mpishard.checkpoint.loading.restore import load_states
from mpishard.checkpoint.saving.snapshot import save_states
from mpishard.contracts import ICheckpointableModel, IShardedOptimizer, PathLike
from mpishard.errors import ShardingError
from mpishard.models import ShardedModelBase
from mpishard.optimizers.rules.rule import Optimizer
from mpishard.optimizers.sharded.state_bytes import StateBytes, gather_state
from mpishard.optimizers.sharded.state_view import StateView
from mpishard.sharding import ParameterEntry

__all__ = ["ShardedOptimizerFiles"]

_log = logging.getLogger("mpishard")


class ShardedOptimizerFiles(ICheckpointableModel, IShardedOptimizer):
    """Serialisation of a rule's state: layout-free, and collective throughout.

    What one strategy writes at one world size, any other reads at any other. `save_state` and
    `load_state` do with a stream what `serialize` and `deserialize` do with bytes; each rank has
    a stream of its own.
    """

    _optimizer: Optimizer
    _model: ShardedModelBase | None
    _state: dict[str, Array]
    _steps: int
    _frozen: frozenset[str]
    _awaiting: StateBytes | None

    @property
    def _bound_model(self) -> ShardedModelBase:
        if self._model is None:
            raise ShardingError(
                f"this {type(self).__name__} has no state yet: it is made at the first step, or "
                "by bind(model)"
            )
        self.bind(self._model)
        return self._model

    @abstractmethod
    def bind(self, model: ShardedModelBase) -> None:
        """Make state for ``model``."""

    def serialize(self) -> bytes:
        """Settings, step count and state by parameter name, the same on every rank. Collective.

        Every rank holds the whole state for it: `save_model` does not need that.

        Raises
        ------
        ShardingError
            Before there is a state.
        """
        model = self._bound_model
        engine = model.engine
        tensors = gather_state(
            self.backend, self._state, engine.pieces.to_write(engine.program),
            engine.placement,
            _not_among(self._frozen, model),
        )  # fmt: skip
        rule = self._optimizer
        return StateBytes(type(rule).__name__, rule.fingerprint(), self._steps, tensors).to_bytes()

    def deserialize(self, data: bytes) -> None:
        """Take state and step count from what `serialize` gave, anywhere. Collective.

        Settings stay this optimizer's; where they were others, rank 0 says so. Before the first
        step the state waits for its model.

        Raises
        ------
        TypeError, ValueError
            For what is no state, or that of another rule or model, before anything is
            communicated; on every rank where the ranks were given different bytes.
        """
        saved = StateBytes.from_bytes(data)
        rule = self._optimizer
        saved.require_rule(type(rule).__name__, rule.needed_state())
        if self._model is not None:
            self._require_fit(saved, self._model, self._frozen)
        marks = self.backend.all_gather(np.array([zlib.crc32(data)]))
        if (marks != marks[0]).any():
            raise ValueError(
                f"deserialize: the bytes differ between ranks (checksums {marks.tolist()}); every "
                "rank must pass the same"
            )
        self._awaiting = saved
        if self._model is not None:
            self._take_awaited(self._model)

    def _require_fit(
        self, saved: StateBytes, model: ShardedModelBase, frozen: frozenset[str]
    ) -> None:
        entries = _not_among(frozen, model)
        saved.require_parameters(entries, self._optimizer.needed_state(), model.dtype)

    def _take_awaited(self, model: ShardedModelBase) -> None:
        """Fill the state with what `deserialize` was given. Communicates nothing."""
        saved, self._awaiting = self._awaiting, None
        if saved is not None:
            engine = model.engine
            saved.fill(self._state, engine.pieces.updated, engine.placement)
            self._go_on(model, saved.steps, saved.settings)

    def _go_on(self, model: ShardedModelBase, steps: int, settings: Mapping[str, Any]) -> None:
        """Go on from a saved step, and say which settings are others now."""
        changed = [
            f"{name} was {settings.get(name)} and is {value}"
            for name, value in self._optimizer.fingerprint().items()
            if settings.get(name) != value
        ]
        if changed and self.rank == 0:
            _log.warning("the optimizer goes on with other settings: %s", "; ".join(changed))
        self._steps = steps
        # Of the model's steps others may have made some.
        model.engine.step_number = max(model.engine.step_number, steps)

    def checkpoint_view(self, model: ShardedModelBase) -> StateView:
        """The state of ``model`` in the form that checkpoints read and write."""
        self.bind(model)
        return StateView(
            model.engine, type(self._optimizer).__name__, self._state,
            {"settings": self._optimizer.fingerprint(), "optimizer_steps": self._steps},
            lambda steps, settings: self._go_on(model, steps, settings),
        )  # fmt: skip

    def save_model(self, path: PathLike) -> None:
        """Write the state alone to a checkpoint directory. Collective; nothing is gathered.

        `mpishard.checkpoint.save` writes model and optimizer together.

        Raises
        ------
        ShardingError
            Before there is a state.
        ValueError, CheckpointError
            As `mpishard.checkpoint.save`.
        """
        model = self._bound_model
        save_states(path, model, {"optimizer": self.checkpoint_view(model)})

    def load_model(self, path: PathLike) -> None:
        """Take the state from a checkpoint of any world size and strategy. Collective.

        Raises
        ------
        ShardingError
            Before `bind` or a step have said which model's state it is.
        FileNotFoundError
            Where nothing is there.
        CheckpointError
            Where it is torn, or of another rule or model; nothing has changed then.
        """
        model = self._bound_model
        load_states(path, model, {"optimizer": self.checkpoint_view(model)})


def _not_among(frozen: frozenset[str], model: ShardedModelBase) -> list[ParameterEntry]:
    return [entry for entry in model.parameter_entries if entry.name not in frozen]
