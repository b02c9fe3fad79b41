"""Ranks compare their rules and frozen parameters once, before they make a state."""

from __future__ import annotations

import numpy as np
import pytest

import mpishard as ms
from mpishard.observe.ledger import MemoryCategory
from mpishard.testing.worlds import in_worlds

X = np.random.default_rng(0).standard_normal((6, 3))
Y = X[:, :1]
SGD = ms.optimizers.SGD

DIFFERENT = {
    "rate": (lambda rank: SGD(0.1 / (rank + 1)), r"learning_rate is \[0.1, .*\], \[0.05, "),
    "schedule": (lambda rank: SGD(lambda step: 0.1 + rank), "learning_rate is"),
    "momentum": (lambda rank: SGD(0.1, 0.5 * rank), "momentum is 0.0, 0.5"),
    "frozen": (
        lambda rank: SGD(parameter_options={"linear0.bias": {"frozen": True}} if rank else {}),
        r"frozen is \[\], \['linear0.bias'\]",
    ),
    "rule": (lambda rank: ms.optimizers.Adam() if rank else SGD(), "rule is SGD, Adam"),
}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("what", DIFFERENT)
@in_worlds(2)
def test_rules_that_differ(backend, strategy, what):
    make, message = DIFFERENT[what]
    model = ms.as_distributed(ms.nn.MLP([3, 4, 1]), backend, strategy)
    optimizer = ms.as_distributed(make(backend.rank), backend, strategy)
    before = model.get_parameters()
    for call in (
        lambda: optimizer.step(model, X, Y),
        lambda: optimizer.apply_gradients(before, model),
    ):
        with pytest.raises(ValueError, match=f"the same optimizer; by rank, .*{message}"):
            call()
        assert not optimizer.state
        assert model.memory.held(MemoryCategory.OPTIMIZER_STATE) == 0
    np.testing.assert_array_equal(model.get_parameters(), before)
    other = ms.as_distributed(SGD(0.1), backend, strategy)
    other.step(model, X, Y)  # nothing is frozen, and the ranks are in step


class Scaled(SGD):
    """A rule with a setting whose repr is the address of an object."""

    def __init__(self):
        super().__init__(0.1)
        self.scale = object()


@in_worlds(2)
def test_only_the_first_step_compares_rules(backend):
    model = ms.as_distributed(ms.nn.MLP([3, 4, 1]), backend, "ddp")
    optimizer = ms.as_distributed(Scaled(), backend, "ddp")
    sequence = [backend._sequence]
    for _ in range(3):
        optimizer.step(model, X, Y)
        sequence.append(backend._sequence)
    first, second, third = np.diff(sequence)
    assert (first - 1, second) == (third, third)


@in_worlds(2)
def test_replicas_that_drift_may_have_different_rules(backend):
    config = ms.ShardingConfiguration(backend, auto_sync_gradients=False)
    model = ms.as_distributed(ms.nn.MLP([3, 4, 1]), config, "ddp")
    optimizer = ms.as_distributed(SGD(0.1 / (backend.rank + 1)), config, "ddp")
    sequence = backend._sequence
    optimizer.step(model, X, Y)
    assert backend._sequence == sequence
