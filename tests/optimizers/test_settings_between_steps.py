"""Settings of a rule that change between steps, and attributes that are not settings."""

from __future__ import annotations

import numpy as np
import pytest

import mpishard as ms
from mpishard.errors import ShardingError
from mpishard.optimizers import SGD, AdamW, Constant
from mpishard.optimizers.rules.compiled import Body
from mpishard.optimizers.rules.rule import Optimizer
from mpishard.testing.worlds import in_worlds

X = np.random.default_rng(0).standard_normal((6, 3))
Y = X[:, :1]
NEW = {
    "learning_rate": 1e-4,
    "weight_decay": 0.5,
    "parameter_options": {"*": {"weight_decay": 0.5}},
}


def wrap(backend, rule, strategy="fsdp"):
    model = ms.as_distributed(ms.nn.MLP([3, 4, 1], seed=1, dtype="float64"), backend, strategy)
    return model, ms.as_distributed(rule, backend, strategy)


@pytest.mark.parametrize("name", NEW)
@in_worlds(1, 2)
def test_a_setting_changed_between_steps_is_used_in_the_next(backend, name):
    plain, alone = ms.nn.MLP([3, 4, 1], seed=1, dtype="float64"), AdamW(0.1)
    rule = AdamW(0.1)
    model, optimizer = wrap(backend, rule)
    for values in ({}, {name: NEW[name]}):
        before = plain.get_parameters().copy()
        for each in (alone, rule):
            for key, value in values.items():
                setattr(each, key, value)
        alone.step(plain, X, Y)
        optimizer.step(model, X, Y)
    after = model.get_parameters()
    np.testing.assert_allclose(after, plain.get_parameters(), rtol=1e-9)
    # The second update is not the one that the first settings would have made.
    other, unchanged = ms.nn.MLP([3, 4, 1], seed=1, dtype="float64"), AdamW(0.1)
    for _ in range(2):
        unchanged.step(other, X, Y)
    assert np.abs(other.get_parameters() - after).max() > 0.1 * np.abs(after - before).max()


def test_settings_are_checked_where_they_are_set():
    rule = SGD(0.1, weight_decay=0.2)
    for name, value, error in [
        ("learning_rate", -1, ValueError),
        ("learning_rate", "fast", TypeError),
        ("weight_decay", -1, ValueError),
        ("parameter_options", {"*": {"nonsense": 1}}, ValueError),
    ]:
        with pytest.raises(error, match=name.split("_")[0]):
            setattr(rule, name, value)
    assert (rule.learning_rate, rule.weight_decay) == (Constant(0.1), 0.2)
    assert rule.parameter_options == {}
    with pytest.raises(TypeError, match="item assignment"):
        rule.parameter_options["*"] = {"frozen": True}


@in_worlds(1, 2)
def test_frozen_parameters_stay_those_of_the_state(backend):
    rule = AdamW(0.1)
    model, optimizer = wrap(backend, rule)
    optimizer.step(model, X, Y)
    before, sequence = model.get_parameters(), backend._sequence
    for pattern, message in [("*.bias", r"freeze \['linear0.bias'"), ("*.bais", "matches none")]:
        rule.parameter_options = {pattern: {"frozen": True}}
        with pytest.raises(ValueError, match=message):
            optimizer.step(model, X, Y)
    assert backend._sequence == sequence
    optimizer.reset()
    rule.parameter_options = {"*.bias": {"frozen": True}}
    optimizer.step(model, X, Y)
    biases = [e for e in model.parameter_entries if e.name.endswith("bias")]
    for entry in biases:
        now = model.get_parameters()[entry.start : entry.stop]
        np.testing.assert_array_equal(now, before[entry.start : entry.stop])


@pytest.mark.parametrize("name", ["weight_decay", "parameter_options"])
@in_worlds(2)
def test_one_rank_alone_changes_a_setting(backend, name):
    rule = AdamW(0.1)
    model, optimizer = wrap(backend, rule, "ddp")
    optimizer.step(model, X, Y)
    if backend.rank:
        setattr(rule, name, NEW[name])
    with pytest.raises(ShardingError, match="the settings of the update differ between ranks"):
        optimizer.step(model, X, Y)


class Recording(Optimizer):
    """A rule that overrides `update` alone, with a setting and a record."""

    def __init__(self, rate, damping):
        super().__init__(rate)
        self.damping = damping
        self.seen = []

    def body(self, learning_rate, weight_decay, context):
        return Body(self._descend, (self.damping * learning_rate * context.gradient_scale,))

    def _descend(self, p, g, factor):
        self.seen.append(p.size)
        p -= factor * g


@in_worlds(3)
def test_attributes_that_are_no_settings_may_differ(backend):
    rule = Recording(0.1, 0.5)
    model, optimizer = wrap(backend, rule)
    optimizer.step(model, X, Y)
    rule.seen += [0] * backend.rank
    data = ms.OptimizationInputData(model=model, x_train=X, y_train=Y, batch_size=3, progress=False)
    assert optimizer.optimize(data).iterations == 2
    assert not {"seen", "rate"} & rule.get_options().keys()
    assert rule.fingerprint()["damping"] == 0.5
    assert {"learning_rate", "weight_decay", "clip_value"} < rule.get_options().keys()


@in_worlds(2)
def test_settings_of_a_user_s_rule_must_be_equal(backend):
    model, optimizer = wrap(backend, Recording(0.1, 0.5 + backend.rank))
    with pytest.raises(ValueError, match=r"damping is 0.5, 1.5"):
        optimizer.step(model, X, Y)
