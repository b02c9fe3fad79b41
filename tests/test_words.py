"""Messages that name the fault, objects in one line, and words that the package does not use."""

from __future__ import annotations

import importlib
import logging
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpishard as ms
from mpishard import nn
from mpishard.base import compilation
from mpishard.errors import ShardingError
from mpishard.observe import plot_loss_curve
from mpishard.optimizers import SGD, Adam
from mpishard.pipeline import OneForwardOneBackwardSchedule, simulate
from mpishard.testing.worlds import in_worlds
from mpishard.training import OptimizationInputData

X, Y = np.ones((8, 4)), np.ones((8, 2))


def wrap(backend: Any, plain: Any = None, strategy: str = "fsdp") -> Any:
    return ms.as_distributed(plain or nn.MLP([4, 3, 2]), backend, strategy)


# ------------------------------------------------------------------------------------ names meant


@pytest.mark.parametrize(
    ("rule", "given", "message"),
    [
        (Adam, {"lr": 1e-3}, r"Adam has no setting 'lr'; did you mean learning_rate\?"),
        (Adam, {"betas": (0.9, 0.99)}, r"'betas'; did you mean beta1 and beta2\?"),
        (Adam, {"epsilom": 1e-3}, r"'epsilom'; did you mean epsilon\?"),
        (SGD, {"betas": (0.9, 0.99)}, r"SGD has no setting 'betas'$"),
    ],
)
def test_settings_of_other_libraries_are_answered_with_our_names(
    rule: Any, given: Any, message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        rule(**given)


def test_a_picture_does_not_overwrite_the_metrics(tmp_path: Any) -> None:
    pytest.importorskip("matplotlib")
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "loss": 2.0}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl is the PNG to write.* as training"):
        plot_loss_curve(metrics)
    assert plot_loss_curve(training=metrics).axes[0].lines
    assert metrics.read_text() == '{"step": 1, "loss": 2.0}\n'


# ------------------------------------------------------------------------------ ranks that differ


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda rank: nn.MLP([4, 3, 2], dtype=["float64", "float32"][rank]), "dtype is float64, "),
        (lambda rank: nn.MLP([4, 3, 2], activation=["relu", "tanh"][rank]), "layer 1 is ReLU, Ta"),
        (lambda rank: nn.MLP([4, 3 + rank, 2]), r"parameter linear0\.bias is \(3,\) from 12, \(4,"),
    ],
)
@in_worlds(2)
def test_the_part_of_the_model_that_differs_is_named_by_rank(
    backend: Any, make: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=rf"must wrap the same model .*; by rank, .*{message}"):
        wrap(backend, make(backend.rank))


@in_worlds(2)
def test_strategies_and_learning_rates_that_differ_are_named_by_rank(backend: Any) -> None:
    with pytest.raises(ValueError, match="by rank, strategy is DDP, FSDP"):
        wrap(backend, strategy=["ddp", "fsdp"][backend.rank])
    model = wrap(backend)
    model.sharding_configuration.learning_rate = 0.5 + backend.rank
    with pytest.raises(ShardingError, match=r"step 1: .* by rank, learning_rate is 0\.5, 1\.5\. N"):
        model.train(X, Y)
    with pytest.raises(ValueError, match=r"rates differ between ranks: \[0\.5, 1\.5\]"):
        model.apply_gradients(np.zeros(model.parameter_count), 0.5 + backend.rank)


def test_models_that_differ_in_many_parts_name_the_first() -> None:
    def main(backend: Any) -> None:
        with pytest.raises(ValueError, match=r"linear0.weight.*; and 76 more differ$"):
            wrap(backend, nn.MLP([4, *[3 + backend.rank] * 20, 2]))

    ms.run_in_threads(2, main)


def test_a_model_and_an_optimizer_of_two_environments_are_refused() -> None:
    with (
        ms.InMemoryCommunicationBackend(0, 1, "one") as one,
        ms.InMemoryCommunicationBackend(0, 1, "other") as other,
    ):
        optimizer = ms.as_distributed(SGD(), other)
        with pytest.raises(
            ShardingError, match=r"environment 'one'\), is not .* 'other'\); use one"
        ):
            optimizer.step(wrap(one), X, Y)


# ----------------------------------------------------------------------------------------- losses


class PerSample(nn.MSE):
    """A loss that was meant for each sample."""

    def forward(self, prediction: Any, target: Any, training: bool = True) -> Any:
        _, weight, saved = super().forward(prediction, target, training)
        return ((prediction - target) ** 2).mean(1), weight, saved


class Box:
    """A black box that knows its gradient and no loss."""

    def __init__(self) -> None:
        self.theta = np.zeros(5)

    def get_parameters(self) -> Any:
        return self.theta.copy()

    def set_parameters(self, parameters: Any) -> None:
        self.theta[:] = parameters

    def compute_gradients(self, x: Any, y: Any) -> Any:
        return np.ones(5)


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_a_loss_for_each_sample_is_refused(strategy: str) -> None:
    message = r"loss of (PerSample|FunctionModel) must be one number, .*array of shape \(8,\)"

    def main(backend: Any) -> None:
        function = ms.FunctionModel(lambda theta, x, y: (np.ones(len(x)), theta), np.zeros(3))
        for plain in (nn.MLP([4, 3, 2], loss=PerSample()), function):
            with pytest.raises(ValueError, match=message):
                wrap(backend, plain, strategy).train(X, Y)

    ms.run_in_threads(1, main)
    with pytest.raises(ValueError, match=message):
        nn.MLP([4, 3, 2], loss=PerSample()).train(X, Y)


@in_worlds(2)
def test_a_run_without_a_loss_is_logged_once(backend: Any, caplog: Any) -> None:
    optimizer = ms.as_distributed(SGD(), backend, "ddp")
    data = OptimizationInputData(model=Box(), x_train=X, y_train=Y, max_steps=3, progress=False)
    # Not at_level: of two thread-ranks the last to leave it would keep the other's level for ever.
    caplog.set_level(logging.WARNING, "mpishard")
    assert np.isnan(optimizer.optimize(data).loss_history).all()
    backend.barrier()
    if backend.rank == 0:
        said = [r for r in caplog.records if "Box computes no loss" in r.getMessage()]
        assert len(said) == 1


# -------------------------------------------------------------------------------- in one line each


def test_objects_are_described_in_one_line() -> None:
    with ms.InMemoryCommunicationBackend(0, 1, "words") as backend:
        name = "InMemoryCommunicationBackend(rank 0 of 1, environment 'words')"
        config = ms.ShardingConfiguration(backend, gradient_leaves=2)
        optimizer = ms.as_distributed(Adam(0.5), backend)
        assert repr(backend) == name
        assert repr(config) == f"ShardingConfiguration({name}, gradient_leaves=2)"
        assert repr(optimizer) == "FSDPOptimizer(Adam, learning rate 0.5, 1 rank, 0 updates)"
        data = OptimizationInputData(
            model=wrap(backend), x_train=X, y_train=Y, x_test=X, y_test=Y, progress=False
        )
        model = "FSDPModel(MLP, 1 rank)"
        assert repr(data) == (
            f"OptimizationInputData(model={model}, 8 samples to train, 8 samples to test, "
            "progress=False)"
        )
        result = optimizer.optimize(data)
        assert repr(result).startswith(f"OptimizationResult({model}, 1 step, best loss ")
        assert repr(optimizer).endswith("1 rank, 1 update)")
        assert repr(result.model.memory).startswith("MemoryLedger(parameters 184 B, ")
    timeline = simulate(OneForwardOneBackwardSchedule(), num_stages=4, num_micro_batches=8)
    assert repr(timeline) == (
        "Timeline(1F1B, 4 ranks, 8 micro-batches, makespan 33, bubble 27.3 %)"
    )


# ---------------------------------------------------------------------------------- long silences


def add_one(values: Any) -> None:
    """A loop for numba."""
    for index in range(values.size):
        values[index] += 1


def test_a_compilation_is_logged_and_slow_loading_is_not(
    tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    numba = pytest.importorskip("numba")
    caching = importlib.import_module("numba.core.caching")
    load = caching.FunctionCache.load_overload

    def load_slowly(*arguments: Any) -> Any:
        time.sleep(0.5)
        return load(*arguments)

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(caching.FunctionCache, "load_overload", load_slowly)
    signature = numba.void(numba.float64[::1])
    for lines in (1, 0):  # compiled, and loaded
        compilation._say_that_it_compiles.cache_clear()
        caplog.clear()
        with caplog.at_level(logging.INFO, "mpishard"):
            compilation.compile_loop(add_one, signature)(np.ones(3))
        assert [r.getMessage()[:21] for r in caplog.records] == ["numba compiles loops,"] * lines


@pytest.mark.spawned
def test_a_lone_thread_rank_gets_an_error_that_names_run_in_threads() -> None:
    program = """
import mpishard as ms
config = ms.ShardingConfiguration(ms.InMemoryCommunicationBackend(rank=0, world_size=4))
ms.FSDPModel(ms.nn.MLP([4, 3, 2]), config)
"""
    began = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=25, check=False
    )
    assert time.monotonic() - began < 20
    assert re.search(
        r"CollectiveTimeoutError: rank 0 is alone in this process, .* ranks \[1, 2, 3\] did not "
        r"arrive; .*mpishard\.run_in_threads\(4, main\) starts them all",
        ended.stderr,
    ), ended.stderr


# ---------------------------------------------------------------------------- words that are gone

# Each word that the package no longer uses, and the word in its place. Sorted, one on a line.
GONE = {
    "HeldLayer": "LocalLayer",
    "HeldLayers": "LocalLayers",
    "HeldParameters": "LocalShard",
    "OptionRange": "SegmentOptions",
    "Overlap": "SharedRegion",
    "OwnedRange": "PieceViews",
    "ParameterCells": "FixedSegments",
    "Regions": "Arena",
    "SegmentKind": "PatternKind",
    "UNSAID": "UNPRINTED",
    "Wishes": "Requests",
    "_check_place": "_check_index",
    "_is_told": "_is_ordered",
    "_let_go": "_free",
    "_look_round": "_check_peers",
    "_option_ranges": "_options_of",
    "_tell_of_break": "_notify_of_break",
    "bells": "conditions",
    "cells_of": "common_pieces",
    "checkpoint_backend": "checkpointed().backend",
    "checkpoint_dtype": "checkpointed().dtype",
    "checkpoint_subject": "checkpointed().subject",
    "count_in": "index_pieces",
    "cut_at_cells": "cut_into_common_pieces",
    "deal_beside": "distribute_state",
    "deal_constants": "distribute_constants",
    "find_segments": "find_patterns",
    "gradient_places": "gradient_targets",
    "heir": "successor",
    "heirs": "successor_ranks",
    "held_alike": "replicated_ranges",
    "held_gradient": "gradient_identity",
    "held_log_folder": "locked_log_folder",
    "held_whole": "whole_layers",
    "is_dealt": "is_sent",
    "look_at_a_job": "examine_job",
    "look_at_gpus": "examine_gpus",
    "look_at_host": "examine_host",
    "look_at_mpi": "examine_mpi",
    "look_at_numpy": "examine_numpy",
    "look_behind": "skip_frames_of",
    "numbered_parts": "numbered_parameters",
    "part_of": "owned_parameter",
    "parting": "divergence",
    "place_of": "origin_of",
    "places_of": "rows_of",
    "read_together": "deferred_checks",
    "require_room": "require_space",
    "say_what_is_ignored": "log_ignored_offload",
    "say_what_is_slow": "warn_of_slow_products",
    "say_what_may_differ": "warn_of_other_bits",
    "stir": "progress_mpi",
    "unheeded": "unobeyed",
    "written_here": "pieces_to_write",
    "written_part": "range_to_write",
}


def test_words_that_are_gone_do_not_come_back() -> None:
    assert list(GONE) == sorted(GONE)
    pattern = re.compile(rf"(?<!\w)({'|'.join(GONE)})(?!\w)")
    found = [
        f"{path.name}: {word}, use {GONE[word]}"
        for path in sorted(Path(ms.__file__).parent.rglob("*.py"))
        for word in pattern.findall(path.read_text(encoding="utf-8"))
    ]
    assert not found
