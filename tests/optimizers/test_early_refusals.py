"""Mistakes that would show after hours are refused before the first step, on every rank."""

from __future__ import annotations

import dataclasses
import logging
import os
import types

import numpy as np
import pytest

import mpishard as ms
from mpishard.checkpoint.format import disk
from mpishard.errors import CheckpointError, ShardingError
from mpishard.testing.worlds import in_worlds

X = np.random.default_rng(0).standard_normal((12, 3))
Y = X[:, :1]


def wrap(backend, rule=None, strategy="fsdp"):
    model = ms.as_distributed(ms.nn.MLP([3, 4, 1]), backend, strategy)
    return model, ms.as_distributed(rule or ms.optimizers.SGD(0.1), backend, strategy)


def data(model, **options):
    given = {"x_train": X, "y_train": Y, "batch_size": 4, "progress": False}
    return ms.OptimizationInputData(model=model, **(given | options))


def on_all_ranks(error, message, options, rule=lambda rank: ms.optimizers.SGD(0.1)):
    """Every one of 2 ranks refuses; parameters and the sequence of collectives stay in step."""

    def main(backend):
        model, optimizer = wrap(backend, rule(backend.rank))
        before = model.gather_full_parameters()
        with pytest.raises(error, match=message):
            optimizer.optimize(data(model, **options(backend.rank)))
        assert (model.gather_full_parameters() == before).all()
        assert optimizer.steps == 0

    ms.run_in_threads(2, main)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"x_validation": X[:, :2], "y_validation": Y}, ValueError, "3"),
        ({"x_test": X[:, :2], "y_test": Y}, ValueError, "3"),
        ({"y_train": np.zeros((12, 2))}, ValueError, "2"),
        ({"batch_size": 2.5}, TypeError, "batch_size must be an integer, got 2.5"),
        ({"epochs": 1.5}, TypeError, "epochs must be an integer"),
        ({"max_steps": 0}, ValueError, "max_steps must be 1 or more"),
    ],
)
def test_mistakes_are_refused_on_every_rank(options, error, message):
    on_all_ranks(error, message, lambda rank: options)


def test_a_folder_that_is_a_checkpoint(tmp_path):
    (tmp_path / "manifest.json").write_text("precious")
    on_all_ranks(CheckpointError, "is a single", lambda rank: {"checkpoint": tmp_path})
    assert (tmp_path / "manifest.json").read_text() == "precious"


@pytest.mark.parametrize("is_there", [True, False])
def test_a_folder_in_which_this_user_may_not_write(tmp_path, monkeypatch, is_there):
    folder = tmp_path / "runs" / "run"

    def train(backend, steps):
        model, optimizer = wrap(backend)
        trained = data(model, checkpoint=folder, checkpoint_every=2, max_steps=steps)
        return len(optimizer.optimize(trained).loss_history)

    if is_there:
        ms.run_in_threads(2, train, 2)
    monkeypatch.setattr(disk.os, "access", lambda *_, **__: False)
    place = folder if is_there else tmp_path
    with pytest.raises(CheckpointError, match=f"this user may not make files in {place}\\."):
        ms.run_in_threads(2, train, 4)
    read_only = types.SimpleNamespace(f_flag=os.ST_RDONLY)
    monkeypatch.setattr(disk.os, "statvfs", lambda _: read_only)
    with pytest.raises(CheckpointError, match=f"{place} is on a read-only file system"):
        ms.run_in_threads(2, train, 4)
    if is_there:  # a run that has ended has nothing to save
        assert ms.run_in_threads(2, train, 2) == [0, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (lambda rank: {"seed": rank}, "seed is 0, 1"),
        (lambda rank: {"epochs": 1 + rank}, "epochs is 1, 2"),
        (lambda rank: {"x_train": X[rank:], "y_train": Y[rank:]}, "samples is 12, 11"),
        (lambda rank: {"batch_size": 4 + rank}, "batch_size is 4, 5"),
        (lambda rank: {"x_test": X, "y_test": Y} if rank else {}, "test is False, True"),
    ],
)
def test_ranks_that_ask_for_different_training(options, message):
    on_all_ranks(ValueError, f"same training; by rank, .*{message}", options)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("part", ["validation", "test"])
@in_worlds(2, 3)
def test_evaluation_data_of_another_length_on_one_rank(backend, part, strategy):
    """Each rank would evaluate its part of its own data set, and all report one wrong loss."""
    model, optimizer = wrap(backend, strategy=strategy)
    before = model.gather_full_parameters()
    last = backend.rank == backend.world_size - 1
    length = 7 if last else 11
    asked = data(model, **{f"x_{part}": X[:length], f"y_{part}": Y[:length]})
    lengths = ", ".join(["11"] * (backend.world_size - 1) + ["7"])
    message = f"same training; by rank, x_{part} samples is {lengths}.*local_data=True"
    with pytest.raises(ValueError, match=message):
        optimizer.optimize(asked)
    assert (model.gather_full_parameters() == before).all()
    assert optimizer.steps == 0
    # Data sets of the ranks' own may have any length.
    own = dataclasses.replace(asked, local_data=True)
    assert optimizer.optimize(own).iterations > 0


def test_ranks_with_different_rules():
    def rule(rank):
        return ms.optimizers.SGD(0.1 + rank)

    on_all_ranks(ValueError, r"learning_rate is \[0.1", lambda rank: {}, rule)


def test_a_schedule_without_a_rate_is_refused_before_the_step():
    def main(backend):
        table = [0.1, float("nan")]
        model, optimizer = wrap(backend, ms.optimizers.SGD(table.__getitem__))
        optimizer.step(model, X, Y)
        before, calls = model.gather_full_parameters(), dict(backend.traffic.calls)
        with pytest.raises(ValueError, match="learning rate of nan for step 1"):
            optimizer.step(model, X, Y)
        assert backend.traffic.calls == calls
        assert (model.gather_full_parameters() == before).all()

    ms.run_in_threads(2, main)


def test_other_settings_on_resume_are_named(tmp_path, caplog):
    def main(backend, rate, beta, resume):
        model, optimizer = wrap(backend, ms.optimizers.AdamW(rate, beta))
        options = {"checkpoint": tmp_path / "c", "resume": resume, "epochs": 1 + bool(resume)}
        return optimizer.optimize(data(model, **options)).iterations

    assert ms.run_in_threads(2, main, 1e-3, 0.9, None) == [3, 3]
    with caplog.at_level(logging.WARNING, "mpishard"):
        assert ms.run_in_threads(3, main, 2e-3, 0.5, tmp_path / "c") == [6, 6, 6]
    (record,) = caplog.records
    assert "beta1 was 0.9 and is 0.5" in record.getMessage()
    assert "learning_rate was [0.001" in record.getMessage()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ms.optimizers.AdamW(1e-3, (0.9, 0.99)), TypeError, "beta1 must be a number"),
        (lambda: ms.optimizers.AdamW("fast"), TypeError, "learning_rate must be a number"),
        (lambda: ms.optimizers.SGD(-1), ValueError, "learning_rate must be above 0"),
        (
            lambda: ms.optimizers.SGD(parameter_options={"*.bias": 0}),
            TypeError,
            r"parameter_options\['\*.bias'\] must be a mapping",
        ),
        (lambda: ms.optimizers.SGD().optimize({}), TypeError, "OptimizationInputData, got dict"),
    ],
)
def test_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_the_class_instead_of_an_object():
    def main(backend):
        with pytest.raises(TypeError, match=r"pass SGD\(...\), not the class SGD"):
            ms.as_distributed(ms.optimizers.SGD, backend)

    ms.run_in_threads(1, main)


def test_a_setting_of_the_rule_is_not_set_on_its_wrapper():
    def main(backend):
        _, optimizer = wrap(backend)
        with pytest.raises(
            AttributeError, match=r"optimizer\.wrapped_optimizer\.learning_rate = 2"
        ):
            optimizer.learning_rate = 2.0
        optimizer.wrapped_optimizer.learning_rate = 2.0
        assert optimizer.get_current_learning_rate() == 2

    ms.run_in_threads(1, main)


def test_bytes_that_are_no_model():
    with pytest.raises(ValueError, match="3 bytes are not those of serialize"):
        ms.nn.MLP([3, 1]).deserialize(b"abc")


def test_a_round_of_accumulate_ends_before_training():
    def main(backend):
        model, optimizer = wrap(backend)
        before, sequence = model.get_parameters(), backend._sequence
        with pytest.raises(ShardingError, match=r"optimize inside accumulate\(\)"):  # noqa: SIM117
            with model.accumulate():
                optimizer.optimize(data(model))
        assert backend._sequence == sequence
        with model.accumulate():
            optimizer.step(model, X, Y)
        refused = r"optimize is not allowed during accumulation: .* 1 batches"
        with pytest.raises(ShardingError, match=refused):
            optimizer.optimize(data(model))
        assert (model.get_parameters() == before).all()
        optimizer.step(model, X, Y)
        assert optimizer.optimize(data(model)).iterations == 3

    ms.run_in_threads(2, main)
