"""Checks of single features fail with the feature broken on all ranks alike.

`test_mutations.py` does so for what every step needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpishard import nn
from mpishard.communication import run_in_threads
from mpishard.models.engine.engine import Engine
from mpishard.models.engine.replicas import Replicas
from mpishard.models.engine.update import Round
from mpishard.models.stores import replicated_gradients, sharded_gradients
from mpishard.models.stores.replicated_gradients import ReplicatedGradients
from mpishard.models.stores.sharded_gradients import ShardedGradients
from mpishard.optimizers import LAMB
from mpishard.optimizers.sharded.state import ModelState
from mpishard.sharding import ShardingConfiguration

pytestmark = pytest.mark.usefixtures("messages_only")

Patch = pytest.MonkeyPatch
STEPS = 2


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12)


def wrapped(backend: Any, problems: Any, strategy: str, plain: Any, rule: Any = None) -> Any:
    model_class, optimizer_class = problems.STRATEGIES[strategy]
    config = ShardingConfiguration(backend, 0.1, minimum_parameter_group_size=1)
    return model_class(plain, config), optimizer_class(rule or problems.RULES["sgd"](), config)


# ------------------------------------------------------------------------------------- the checks


def compresses(problems: Any, strategy: str) -> None:
    """The result is the sum of rounded gradients, and half of the bytes travel."""
    gradients = [
        problems.MODELS["mlp"](0).compute_gradients(*part) * len(part[0])
        for part in _parts(problems)
    ]
    rounded = sum(g.astype(ml_dtypes.bfloat16).astype("f4") for g in gradients)
    if strategy == "ddp":  # where the sum travels, too
        rounded = rounded.astype(ml_dtypes.bfloat16).astype("f4")

    def body(backend: Any) -> None:
        model, _ = wrapped(backend, problems, strategy, problems.MODELS["mlp"](0))
        model.sharding_configuration.enable_gradient_compression = True
        start = model.get_parameters()
        model.train(*_parts(problems)[backend.rank])
        moved = (start - model.get_parameters()) / 0.1 * 13
        np.testing.assert_allclose(moved, rounded, rtol=0, atol=1e-5 * np.abs(rounded).max())

    run_in_threads(3, body)


def _parts(problems: Any) -> Any:
    x, y = problems.batch("mlp", 3)
    return [(x[s], y[s]) for s in (slice(2), slice(2, 4), slice(4, None))]


def freezes(problems: Any, strategy: str) -> None:
    entries = problems.MODELS["mlp"](0).parameter_table.entries
    mask = np.ones(entries[-1].stop)
    for entry in entries:
        if entry.name.startswith("linear1.") or entry.name == "linear0.bias":
            mask[entry.start : entry.stop] = 0

    def update(theta: Any, g: Any, state: Any, step: int) -> Any:
        g = g * mask
        g *= min(1.0, 0.05 / np.linalg.norm(g))
        return theta + mask * (problems.TEXTBOOK["adamw"](theta, g, state, step) - theta)

    expected = problems.train_sequentially("mlp", update, steps=STEPS)
    frozen = {"linear1.*": {"frozen": True}, "linear0.bias": {"frozen": True}}
    options = {"clip_global_norm": 0.05, "parameter_options": frozen}

    def body(backend: Any) -> None:
        actual = problems.train_sharded(backend, "mlp", strategy, "adamw", 1, STEPS, options)
        problems.assert_equal(actual, expected)

    run_in_threads(3, body)


def drifts(problems: Any, strategy: str) -> None:
    """One local step and synchronising is one synchronised step, on uneven parts."""

    def body(backend: Any) -> None:
        model, _ = wrapped(backend, problems, strategy, problems.MODELS["mlp"](0))
        model.sharding_configuration.auto_sync_gradients = False
        alone = problems.MODELS["mlp"](0)
        for _ in range(STEPS):
            model.train(*_parts(problems)[backend.rank])
            model.synchronize_gradients()
            alone.train(*problems.batch("mlp", 3), learning_rate=0.1)
            close(model.get_parameters(), alone.get_parameters())

    run_in_threads(3, body)


def as_alone(problems: Any, strategy: str, make: Callable[[], Any], rule: Any) -> None:
    """Three ranks end with the parameters of one."""

    def body(backend: Any) -> Any:
        model, optimizer = wrapped(backend, problems, strategy, make(), rule())
        for step in range(STEPS):
            optimizer.step(model, *problems.local_batch(backend, "mlp", step))
        return model.get_parameters()

    (alone,) = run_in_threads(1, body)
    for parameters in run_in_threads(3, body):
        close(parameters, alone)


def drops_out(problems: Any, strategy: str) -> None:
    def make() -> Any:
        layers = {"a": nn.Linear(5, 8), "drop": nn.Dropout(0.5), "b": nn.Linear(8, 2)}
        return nn.Model(nn.Sequential(layers), nn.MSE(), input_shape=(5,), seed=1)

    as_alone(problems, strategy, make, problems.RULES["sgd"])


def scales_by_layer(problems: Any, strategy: str) -> None:
    def rule() -> Any:
        return LAMB(0.01, weight_decay=0.1, clip_global_norm=0.05)

    as_alone(problems, strategy, lambda: problems.MODELS["mlp"](0), rule)


# ------------------------------------------------------------------------------------- the mutants


def encode_skipped(patch: Patch) -> None:
    """The gradient is not copied into the buffer that travels."""
    for module in (replicated_gradients, sharded_gradients):
        patch.setattr(module, "encode", lambda gradient, compressed: compressed.fill(0))


def not_compressed(patch: Patch) -> None:
    """Gradients travel as they are."""
    for store in (ReplicatedGradients, ShardedGradients):
        patch.setattr(store, "_make_buffers", lambda self: None)


def sum_rounded_again(patch: Patch) -> None:
    """The sum is rounded, too, although it need not travel."""
    original = ShardedGradients._finish_oldest

    def mutant(self: Any) -> None:
        reduction = self.in_flight[0]
        reduction.work.wait()
        if reduction.result is not reduction.target:
            reduction.result[...] = reduction.result.astype(ml_dtypes.bfloat16)
        original(self)

    patch.setattr(ShardedGradients, "_finish_oldest", mutant)


def frozen_is_trained(patch: Patch) -> None:
    original = Engine.freeze
    patch.setattr(Engine, "freeze", lambda self, names: original(self, frozenset()))
    patch.setattr(ModelState, "require_same_frozen", lambda self: None)


def norm_counts_what_is_frozen(patch: Patch) -> None:
    original = Engine.freeze

    def mutant(self: Any, names: frozenset[str]) -> None:
        original(self, names)
        self.pieces = replace(self.pieces, counted=self.pieces.published)

    patch.setattr(Engine, "freeze", mutant)


def mean_without_weights(patch: Patch) -> None:
    original = Replicas.drift
    patch.setattr(Replicas, "drift", lambda self, weight: original(self, 1.0))


def synchronising_dropped(patch: Patch) -> None:
    patch.setattr(Replicas, "synchronize", lambda self: False)


def sum_for_mean(patch: Patch) -> None:
    original = Replicas.synchronize

    def mutant(self: Any) -> bool:
        changed = original(self)
        for vector in self._parameters.owned(self._parameters.layout.pieces(sharded=False)):
            vector[...] *= self._parameters.backend.world_size
        return changed

    patch.setattr(Replicas, "synchronize", mutant)


def weights_not_forgotten(patch: Patch) -> None:
    """Old drift counts again at the next synchronisation."""
    original = Replicas.synchronize

    def mutant(self: Any) -> bool:
        before = self.weight
        changed = original(self)
        self.weight = before * self._parameters.backend.rank
        return changed

    patch.setattr(Replicas, "synchronize", mutant)


def masks_of_this_rank_alone(patch: Patch) -> None:
    """Every rank takes its first sample for the batch's."""
    patch.setattr(Round, "sample_start", lambda self, samples: 0)


def masks_of_the_neighbour(patch: Patch) -> None:
    original = Round.sample_start

    def mutant(self: Any, samples: int) -> int:
        return original(self, samples) + (self._backend.world_size > 1)

    patch.setattr(Round, "sample_start", mutant)


def norms_of_this_rank_s_pieces(patch: Patch) -> None:
    original = LAMB.update_all

    def mutant(self: Any, ranges: Any, context: Any) -> None:
        object.__setattr__(context, "sum_over_owners", lambda squares: squares)
        original(self, ranges, context)

    patch.setattr(LAMB, "update_all", mutant)


MUTANTS: list[tuple[Callable[[Patch], None], Callable[[Any, str], None], str]] = [
    (encode_skipped, compresses, "ddp"),
    (encode_skipped, compresses, "zero1"),
    (encode_skipped, compresses, "zero2"),
    (not_compressed, compresses, "zero1"),
    (not_compressed, compresses, "fsdp"),
    (sum_rounded_again, compresses, "zero2"),
    (frozen_is_trained, freezes, "ddp"),
    (frozen_is_trained, freezes, "fsdp"),
    (norm_counts_what_is_frozen, freezes, "zero1"),
    (norm_counts_what_is_frozen, freezes, "zero2"),
    (mean_without_weights, drifts, "ddp"),
    (synchronising_dropped, drifts, "ddp"),
    (sum_for_mean, drifts, "ddp"),
    (weights_not_forgotten, drifts, "ddp"),
    (masks_of_this_rank_alone, drops_out, "ddp"),
    (masks_of_this_rank_alone, drops_out, "fsdp"),
    (masks_of_the_neighbour, drops_out, "zero2"),
    (norms_of_this_rank_s_pieces, scales_by_layer, "zero1"),
    (norms_of_this_rank_s_pieces, scales_by_layer, "fsdp"),
]


@pytest.mark.parametrize(
    ("mutant", "check", "strategy"),
    [pytest.param(*row, id=f"{row[0].__name__}-{row[2]}") for row in MUTANTS],
)
def test_the_feature_check_finds_its_fault(
    problems: Any, monkeypatch: Patch, mutant: Any, check: Any, strategy: str
) -> None:
    check(problems, strategy)
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check(problems, strategy)
