"""Mistakes that only a comparison of ranks finds are refused on all of them."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import mpishard as ms
from mpishard.errors import NonFiniteLossError, ShardingError
from mpishard.nn import MLP
from mpishard.testing.worlds import in_worlds

X, Y = np.ones((3, 5)), np.ones((3, 2))
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "tensor", "pipeline", "hybrid")
ONE_BATCH = ("tensor", "pipeline")  # whose two ranks compute one batch
OWN_BATCH = tuple(strategy for strategy in STRATEGIES if strategy not in ONE_BATCH)
RATE = {"apply_gradients": (0.1,)}

# fmt: off
TOGETHER = [
    *[("A", f"{name}: vectors differ", ValueError, f"{name}: the vectors differ between ranks",
       lambda g, name=name: getattr(g.model, name)(
           g.ones + g.backend.rank, *RATE.get(name, ())))
      for name in ("set_parameters", "with_parameters", "apply_gradients")],
    ("A", "apply_gradients of an optimizer: vectors differ", ValueError, "the vectors differ",
     lambda g: g.optimizer.apply_gradients(g.ones + g.backend.rank, g.model)),
    ("1.5", "deserialize: bytes differ", ValueError, "the vectors differ",
     lambda g: g.model.deserialize(
         MLP([5, 3, 2], seed=g.backend.rank, activation="tanh").serialize())),
    ("1.1", "set_active_feature_indices: differ", ValueError, r"same features; .*\[0\]; \[1\]",
     lambda g: g.features.set_active_feature_indices([g.backend.rank])),
    ("1.5", "models differ", ValueError, "every rank must wrap the same model",
     lambda g: g.wrap(MLP([5, 2 + g.backend.rank]))),
    ("A", "no rank has a sample", ValueError, "no rank has a sample",
     lambda g: g.optimizer.step(g.model, X[:0], Y[:0])),
    ("A", "a loss that is no number", NonFiniteLossError, r"step \d+: the loss of ranks \[1\]",
     lambda g: g.optimizer.step(g.model, np.where(g.backend.rank, np.nan, X), Y), OWN_BATCH),
    ("A", "a loss that is no number, of both", NonFiniteLossError,
     r"the loss of (data )?ranks \[[01]",
     lambda g: g.optimizer.step(g.model, X * np.nan, Y)),
    ("A", "batches differ", ValueError, r"must be given the same: rank 0: 3 .*, rank 1: 3 ",
     lambda g: g.optimizer.step(g.model, X + g.backend.rank, Y), ONE_BATCH),
    ("A", "a given gradient that is no number", NonFiniteLossError, "the given gradient is not",
     lambda g: g.optimizer.apply_gradients(g.ones * np.nan, g.model)),
    ("1.2", "optimize: settings differ", ValueError, "same training; by rank, seed is 0, 1",
     lambda g: g.optimize(seed=g.backend.rank)),
    ("1.2", "optimize: metrics on one rank", ValueError, "by rank, metrics is True, False",
     lambda g: g.optimize(metrics=None if g.backend.rank else "metrics.jsonl")),
    ("1.2", "optimize: data that do not fit", ValueError, "last dim is 5",
     lambda g: g.optimize(x_test=X[:, :4], y_test=Y)),
    *[("1.5", f"load_model of {who}: nothing there", FileNotFoundError, "there is no checkpoint",
       lambda g, who=who: getattr(g, who).load_model(g.path / "nothing"))
      for who in ("model", "optimizer")],
    ("1.2", "optimize: resume from nothing", FileNotFoundError, "there is no checkpoint",
     lambda g: g.optimize(resume=g.path / "nothing")),
    ("A", "checkpoint.load: an optimizer on one rank", ValueError,
     "same states; by rank: model, optimizer; model$",
     lambda g: ms.checkpoint.load(g.path / "other", g.model, None if g.backend.rank else
                                  g.optimizer)),
    ("1.1", "load_model: a file", OSError, "is a file; a checkpoint is a directory",
     lambda g: g.model.load_model(g.path / "file")),
    ("1.1", "load_model: corrupt", OSError, "manifest",
     lambda g: g.model.load_model(g.path / "torn")),
    ("1.1", "load_model: another model's", OSError, "linear",
     lambda g: g.model.load_model(g.path / "other")),
    ("A", "save_model: in the place of other files", OSError, "holds mine.txt",
     lambda g: g.model.save_model(g.path / "precious")),
    ("1.1", "save_model: below a file", OSError, "file",
     lambda g: g.model.save_model(g.path / "file" / "model")),
]
# fmt: on


@pytest.mark.parametrize("strategy", STRATEGIES)
@in_worlds(2)
def test_mistakes_that_a_comparison_of_ranks_finds(mistakes, backend, shared_path, strategy):
    if backend.rank == 0:
        (shared_path / "file").write_text("no checkpoint")
        (shared_path / "precious").mkdir()
        (shared_path / "precious" / "mine.txt").write_text("not to be lost")
        for name in ("torn", "other"):
            MLP([5, 4, 2]).save_model(shared_path / name)
        (shared_path / "torn" / "manifest.json").write_text("{")
    backend.barrier()
    g = mistakes.Rank(backend, strategy, shared_path)
    for condition, *row in mistakes.rows_of(TOGETHER, strategy):
        with mistakes.named(condition):
            mistakes.refused(g, *row)
            mistakes.goes_on(g)
    assert (shared_path / "precious" / "mine.txt").read_text() == "not to be lost"


@in_worlds(2)
def test_ranks_in_different_rounds(mistakes, backend, shared_path):
    g = mistakes.Rank(backend, "fsdp", shared_path)
    before = g.model.local_parameter_shard
    inside = g.model.accumulate() if backend.rank else contextlib.nullcontext()
    with pytest.raises(ShardingError, match="accumulated different numbers of batches"), inside:
        g.optimizer.step(g.model, X, Y)
    assert g.model.local_parameter_shard.tobytes() == before.tobytes()
