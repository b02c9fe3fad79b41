"""What would only fail, or go wrong, after hours of training is refused at its beginning."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishard.checkpoint.consensus import gather_texts, share_text, together
from mpishard.checkpoint.writer import target_of
from mpishard.data import take
from mpishard.models import ShardedModelBase
from mpishard.optimizers.data import OptimizationInputData

if TYPE_CHECKING:
    from mpishard.optimizers.sharded import ShardedOptimizerBase

__all__ = ["refuse_early", "require_agreement"]

_PARTS = ("train", "validation", "test")
_SETTINGS = (
    "epochs", "max_steps", "validate_every", "patience", "tolerance", "keep_best",
    "training_statistics", "predictions", "checkpoint_every", "checkpoint", "resume",
)  # fmt: skip


def refuse_early(model: ShardedModelBase, data: OptimizationInputData) -> dict[str, list[int]]:
    """Refuse data and choices that the model cannot work with. Collective.

    Returns
    -------
    dict
        "train", "validation", "test" -> every rank's number of samples, 0 without such data.

    Raises
    ------
    TypeError, ValueError, CheckpointError
        On every rank, where one of them has a reason.
    """
    with together(model.backend):
        for part in _PARTS:
            if getattr(data, f"x_{part}") is not None:
                _check_first(model, data, part)
        if data.patience is not None or data.keeps_best:
            _check_comparable(model)
        if data.local_data and data.batch_size < model.world_size:
            raise ValueError(
                f"batch_size {data.batch_size} is smaller than the number of ranks, "
                f"{model.world_size}: where each brings its own data, each needs a share of a batch"
            )
        if data.checkpoint is not None and model.rank == 0:
            target_of(data.checkpoint)
    given = [getattr(data, f"x_{part}") for part in _PARTS]
    lengths = np.array([[0 if x is None else len(x) for x in given]])
    everyone = dict(zip(_PARTS, model.backend.all_gather(lengths).T.tolist(), strict=True))
    for part, x in zip(_PARTS, given, strict=True):
        if x is not None and not any(everyone[part]):
            raise ValueError(f"x_{part} holds no samples on any of {model.world_size} ranks")
    return everyone


def _check_first(model: ShardedModelBase, data: OptimizationInputData, part: str) -> None:
    """Refuse a data set whose first sample does not fit the model."""
    engine = model.engine
    x, y = getattr(data, f"x_{part}"), getattr(data, f"y_{part}")
    indices = np.zeros(min(1, len(x)), np.int64)
    first = take(x, indices), take(y, indices)
    for letter, sample in zip("xy", first, strict=True):
        if len(sample) != len(indices):
            raise ValueError(
                f"{letter}_{part} gave an array of shape {sample.shape} for the index array "
                f"{indices}; the first dim must be the samples"
            )
    engine.program.check_pair(*first, engine.loss)
    if data.predictions and engine.loss is None and len(indices):
        engine.predict(first[0])  # a black box may have no predict


def _check_comparable(model: ShardedModelBase) -> None:
    """Refuse to look for the best where evaluations cannot be compared."""
    if not model.engine.program.knows_loss(model.engine.loss):
        raise ValueError(
            f"patience and keep_best compare losses, and {type(model.wrapped_model).__name__} "
            "tells none: give it compute_loss_and_gradients, or a default_loss_function"
        )
    if not model.sharding_configuration.auto_sync_gradients:
        raise ValueError(
            "patience and keep_best need one solution, and with auto_sync_gradients=False each "
            "rank has its own; train without them, or with auto_sync_gradients=True"
        )


def require_agreement(
    optimizer: ShardedOptimizerBase,
    model: ShardedModelBase,
    data: OptimizationInputData,
    order: Mapping[str, Any],
) -> None:
    """Refuse a run whose length, order or rule differs between ranks. Collective.

    Raises
    ------
    ValueError
        On every rank, with what each of them asks for.
    """
    mine = {
        **order,
        **{name: _plain(getattr(data, name)) for name in _SETTINGS},
        "validation": data.x_validation is not None,
        "test": data.x_test is not None,
        **optimizer.wrapped_optimizer.fingerprint(),
    }
    texts = gather_texts(model.backend, json.dumps(mine))  # on rank 0
    everyone = [json.loads(text) for text in texts]
    differing = [
        f"{name} is {', '.join(str(other.get(name)) for other in everyone)}"
        for name in mine
        if any(other.get(name) != everyone[0][name] for other in everyone)
    ]
    message = share_text(model.backend, "; ".join(differing))
    if message:
        raise ValueError(f"every rank must ask for the same training; by rank, {message}")


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | None) else str(value)
