"""Checks before training that find mistakes which would otherwise show after hours, or never."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from mpishard.base import Array
from mpishard.callbacks import names_of
from mpishard.communication import differences, same_outcome
from mpishard.contracts import ILossFunction
from mpishard.data import Dataset, count_samples, origin_of, take
from mpishard.models import Program, ShardedModelBase, program_of
from mpishard.optimizers import ShardedOptimizerBase
from mpishard.sharding import ShardingConfiguration, refuse_with_leaves, shared_choices
from mpishard.training.data import OptimizationInputData
from mpishard.training.saving import folder_of

_PARTS = ("train", "validation", "test")
# Choices that decide which collectives a rank calls: with other ones it would wait for ever.
_SETTINGS = (
    "epochs", "max_steps", "validate_every", "patience", "tolerance", "keep_best",
    "training_statistics", "predictions", "checkpoint_every", "checkpoint", "keep_last",
    "keep_every", "checkpoint_async", "resume", "digest_every",
)  # fmt: skip


def refuse_early(
    model: object, config: ShardingConfiguration, data: OptimizationInputData, data_size: int
) -> dict[str, list[int]]:
    """Refuse data and choices that the model, sharded or plain, cannot work with. Collective.

    ``data_size`` is the number of ranks, or groups of ranks, that share a batch.

    Returns
    -------
    dict
        "train", "validation", "test" -> every rank's number of samples, 0 without such data.

    Raises
    ------
    TypeError, ValueError, CheckpointError
        On every rank, if one rank finds a reason.
    """
    backend = config.communication_backend
    with same_outcome(backend):
        loss: ILossFunction | None
        if isinstance(model, ShardedModelBase):
            program, loss, plain = model.engine.program, model.engine.loss, model.wrapped_model
            leaves = model.gradient_leaves
        else:  # `program_of` does not change a plain model
            program, plain, leaves = program_of(model, config), model, config.gradient_leaves
            loss = getattr(model, "default_loss_function", None)
        for part in _PARTS:
            if getattr(data, f"x_{part}") is not None:
                # Validation and test data, too, which are first used after hours of training.
                _check_first(program, loss, data, part)
        # A loss of NaN is never the best: such a run would keep nothing, and never stop early.
        compares = data.patience is not None or data.keeps_best
        if compares and loss is None and not program.has_own_loss:
            raise ValueError(
                f"patience and keep_best compare losses, but {type(plain).__name__} computes none: "
                "give it compute_loss_and_gradients, or a default_loss_function"
            )
        if data.local_data and leaves is not None:
            refuse_with_leaves(
                leaves,
                "local_data=True",
                "give every rank the same data set, or gradient_leaves=None",
            )
        # The share of each rank in a batch is fixed, and must not be 0.
        if data.local_data and data.batch_size < data_size:
            raise ValueError(
                f"batch_size {data.batch_size} is smaller than the number of ranks, {data_size}: "
                "with local_data each rank needs at least one sample of a batch"
            )
        # A folder that cannot be written is refused now, and not after the first thousand steps.
        if data.checkpoint is not None and backend.rank == 0:
            folder_of(data).target(0)
    # Every rank learns all lengths, because a local data set's order depends on all of them.
    given = [getattr(data, f"x_{part}") for part in _PARTS]
    lengths = np.array([[0 if x is None else count_samples(x) for x in given]])
    everyone = dict(zip(_PARTS, backend.all_gather(lengths).T.tolist(), strict=True))
    for part, x in zip(_PARTS, given, strict=True):
        if x is not None and not any(everyone[part]):
            raise ValueError(f"x_{part} holds no samples on any of {backend.world_size} ranks")
    return everyone


def _check_first(
    program: Program, loss: ILossFunction | None, data: OptimizationInputData, part: str
) -> None:
    """Refuse a data set if its first sample does not fit the model."""
    x, y = getattr(data, f"x_{part}"), getattr(data, f"y_{part}")
    # One sample; an empty data set, which one rank may have, is indexed by nothing.
    indices = np.zeros(min(1, count_samples(x)), np.int64)
    first = (
        _take_first(x, f"x_{part}", indices),
        None if y is None else _take_first(y, f"y_{part}", indices),
    )
    program.check_pair(*first, loss)
    if data.predictions and loss is None and len(indices):
        # A black box may have no predict. Its predict needs no store of parameters.
        program.predict(None, first[0])  # type: ignore[arg-type]


def _take_first(samples: Dataset, name: str, indices: npt.NDArray[np.int64]) -> Array:
    try:
        taken: Array = take(samples, indices)
    except Exception as error:
        error.add_note(
            f"{name} ({origin_of(samples)}) was indexed by an array of integers, {indices!r}, and "
            "must return an array of as many samples; a data set that takes one number can be "
            "stacked: numpy.stack([samples[i] for i in indices])"
        )
        raise
    if getattr(taken, "ndim", 1) == 0 or len(taken) != len(indices):
        raise ValueError(
            f"{name} gave an array of shape {taken.shape} for the index array {indices}; the "
            "first dim must be the samples. "
            f"{origin_of(samples)} is indexed by an array of integers"
        )
    return taken


def require_agreement(
    optimizer: ShardedOptimizerBase,
    model: ShardedModelBase,
    data: OptimizationInputData,
    order: Mapping[str, object],
) -> None:
    """Refuse a run whose length, order, data or rule differs between ranks. Collective.

    Raises
    ------
    ValueError
        On every rank, naming each rank's choices. Without ``local_data`` every rank evaluates its
        part of one data set; if one rank's data set has another length, the loss is wrong.
    """
    lengths = {}
    if not data.local_data:
        for part in ("x_validation", "x_test"):  # the targets have as many: see `checked`
            x = getattr(data, part)
            lengths[f"{part} samples"] = None if x is None else count_samples(x)
    # One object of JSON, and so one all-gather for all choices.
    mine = {
        **order,
        **lengths,
        **{name: _comparable(getattr(data, name)) for name in _SETTINGS},
        **shared_choices(model.sharding_configuration),
        "metrics": data.metrics is not None,
        "user_state": sorted(data.user_state or ()),
        "callbacks": names_of(data.callbacks),
        "validation": data.x_validation is not None,
        "test": data.x_test is not None,
        **optimizer.wrapped_optimizer.fingerprint(),
    }
    differing = differences(model.backend, mine)
    if differing:
        hint = ""
        # The commonest cause: each rank has loaded its own part of the data.
        if "samples is " in differing:
            hint = ". If every rank brings samples of its own, pass local_data=True"
        raise ValueError(f"every rank must ask for the same training; by rank, {differing}{hint}")


def _comparable(value: object) -> bool | float | str | None:
    if isinstance(value, str | os.PathLike):  # a path is the same bytes in every rank's locale
        return os.fsencode(value).decode(errors="backslashreplace")
    return value if isinstance(value, bool | int | float | None) else str(value)
