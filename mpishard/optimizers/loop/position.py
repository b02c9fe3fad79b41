"""Where a run stands in a checkpoint, and whether another run can go on from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpishard.checkpoint import CheckpointReader
from mpishard.checkpoint.format.consensus import together
from mpishard.checkpoint.format.manifest import MANIFEST
from mpishard.checkpoint.format.metadata import (
    ANYTHING,
    COUNT,
    NUMBER,
    OBJECT,
    TEXT,
    Kind,
    require_form,
)
from mpishard.communication import CommunicationBackend
from mpishard.errors import CheckpointError
from mpishard.optimizers.loop.data import OptimizationInputData
from mpishard.optimizers.loop.stopping import BestParameters
from mpishard.optimizers.loop.user_state import UserState

__all__ = ["LOOP", "check_position", "order_of_samples"]

LOOP = "training_loop"
"""Where a checkpoint's metadata hold the position of the run."""


def order_of_samples(data: OptimizationInputData, lengths: Sequence[int]) -> dict[str, Any]:
    """The choices that the order of a run's samples depends on, as JSON knows them."""
    return {
        "local_data": data.local_data,
        "samples": list(lengths) if data.local_data else len(data.x_train),
        "batch_size": data.batch_size,
        "seed": data.seed,
        "shuffle": data.shuffle,
        "drop_last": data.drop_last,
    }


def check_position(
    path: Path, backend: CommunicationBackend, order: Mapping[str, Any], user_state: UserState
) -> bool:
    """Refuse a checkpoint that a run with this order of samples cannot go on from. Collective.

    Nothing is loaded.

    Returns
    -------
    bool
        Whether the best parameters so far are in the checkpoint.

    Raises
    ------
    ValueError
        Where there is no position of a training loop, the order of samples would differ, each
        rank brought its own data and there are more or fewer ranks now, or the user's own state
        is another.
    FileNotFoundError, CheckpointError
        As `CheckpointReader`.
    """
    with together(backend):
        reader = CheckpointReader(path)
        position = _position_in(reader)
        if position is None:
            raise ValueError(
                f"{path} holds no position of a training loop; load it with model.load_model, and "
                "train without resume"
            )
        saved = position["order"]
        if order["local_data"] and isinstance(saved.get("samples"), list):
            before, now = len(saved["samples"]), len(order["samples"])
            if before != now:
                raise ValueError(
                    f"the run was saved by {before} ranks that each brought data of their own "
                    f"(local_data), and there are {now} now: nobody could say whose samples are "
                    f"still to come in its epoch. Resume it with {before} ranks, or load it with "
                    "model.load_model and train without resume"
                )
        differing = [
            f"{name} was {saved.get(name)} and is {value}"
            for name, value in order.items()
            if saved.get(name) != value
        ]
        if differing:
            raise ValueError(
                "the run cannot go on where it was, because the order of samples would differ: "
                + "; ".join(differing)
                + ". For a new run choose another folder, or pass resume=False"
            )
        user_state.check(position["user_state"])
    return BestParameters.KIND in reader.kinds


_STEP = Kind("a whole number, or null", lambda value: value is None or COUNT.holds(value))
_FORM = {
    "step": COUNT,
    "epoch_sums": (NUMBER, NUMBER),
    "fitness_history": [NUMBER],
    "validation_history": [(NUMBER, NUMBER)],
    "stopping": {"best_score": NUMBER, "best_step": _STEP, "reference": NUMBER, "waited": COUNT},
    "order": OBJECT,
    "user_state": {"names": [TEXT], "ranks": [OBJECT]},
}


def _position_in(reader: CheckpointReader) -> Mapping[str, Any] | None:
    """The position of a training loop in a checkpoint, which a run can go on from."""
    try:
        require_form(reader.metadata, {"user": {f"{LOOP}?": _FORM}}, "metadata")
        position: Mapping[str, Any] | None = reader.metadata["user"].get(LOOP)
        if position is not None:
            state = position["user_state"]
            form = [dict.fromkeys(state["names"], ANYTHING)]
            require_form(state["ranks"], form, f"metadata.user.{LOOP}.user_state.ranks")
    except ValueError as error:
        raise CheckpointError(f"cannot use {reader.path / MANIFEST}: {error}") from None
    return position
