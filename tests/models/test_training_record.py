"""Figures of a model's training in its metadata and its checkpoints; importance of features."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest

import mpishard as ms
from mpishard import nn
from mpishard.errors import CheckpointError
from mpishard.models.engine.update import TrainingRecord
from mpishard.optimizers import SGD
from mpishard.testing.worlds import in_worlds
from mpishard.training import OptimizationInputData

X = np.random.default_rng(0).standard_normal((11, 3))
Y = X @ np.array([[1.0], [-2.0], [0.5]])
FIGURES = ("Steps", "Samples", "TrainingSeconds", "LastLoss", "BestLoss", "ValidationScore")


def wrap(backend: Any, strategy: str = "fsdp") -> tuple[Any, Any]:
    return (
        ms.as_distributed(nn.LinearRegression(3), backend, strategy),
        ms.as_distributed(SGD(0.05), backend, strategy),
    )


def figures(model: Any) -> dict[str, Any]:
    properties = model.get_model_metadata().properties
    return {name: properties[name] for name in FIGURES if name in properties}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline"])
@in_worlds(2, 3)
def test_metadata_have_figures_of_all_jobs(backend: Any, shared_path: Any, strategy: str) -> None:
    model, optimizer = wrap(backend, strategy)
    assert figures(model) == {}  # before a step nothing is known
    data = OptimizationInputData(
        model=model, x_train=X, y_train=Y, x_validation=X[:4], y_validation=Y[:4], batch_size=4,
        epochs=2, progress=False,
    )  # fmt: skip
    result = optimizer.optimize(data)
    found, date = figures(model), model.get_model_metadata().training_date
    assert found["TrainingSeconds"] > 0
    assert {**found, "TrainingSeconds": 0} == {
        "Steps": 6,
        "Samples": 22.0,
        "TrainingSeconds": 0,
        "LastLoss": result.loss_history[-1],
        "BestLoss": min(result.loss_history),
        "ValidationScore": result.validation_history[-1][1],
    }
    assert timedelta() <= datetime.now(UTC) - date < timedelta(minutes=1)
    model.save_model(shared_path / "saved")
    other, rule = wrap(backend)
    other.load_model(shared_path / "saved")
    kept = figures(other)
    assert {**kept, "TrainingSeconds": 0} == {**found, "TrainingSeconds": 0}
    assert kept["TrainingSeconds"] > 0
    copied = other.deep_copy()
    mine = other.batch_indices(5)
    rule.step(other, X[:5][mine], Y[:5][mine])
    assert (figures(other)["Steps"], figures(other)["Samples"]) == (7, 27.0)
    assert figures(other)["TrainingSeconds"] > kept["TrainingSeconds"]
    assert figures(copied) == kept


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "hybrid"])
@in_worlds(3)
def test_the_importance_of_features_is_gathered(backend: Any, strategy: str) -> None:
    model, _ = wrap(backend, strategy)
    model.set_parameters(np.array([1.0, -2.0, 0.5, 7.0]))
    importance = model.get_model_metadata().feature_importance
    assert list(importance.values()) == [1.0, 2.0, 0.5]
    assert importance == model.get_feature_importance()


def test_a_checkpoint_without_figures_or_with_forged_ones(tmp_path: Any) -> None:
    with ms.InMemoryCommunicationBackend(0, 1, "record") as backend:
        model, optimizer = wrap(backend)
        optimizer.step(model, X, Y)
        files = model.checkpointed()
        files.check_metadata({"steps": 3})
        with pytest.raises(ValueError, match=r"metadata\.model\.training\.best_loss must be a n"):
            files.check_metadata({"training": {**asdict(TrainingRecord()), "best_loss": "low"}})
        plain = nn.LinearRegression(3)
        plain.save_model(tmp_path / "plain")  # which knows of no training
        model.load_model(tmp_path / "plain")
        assert model.engine.record == TrainingRecord()
        with pytest.raises(CheckpointError):
            nn.LinearRegression(4).load_model(tmp_path / "plain")
