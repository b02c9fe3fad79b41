"""Frozen parameters do not change, and have neither gradient nor state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpishard import nn
from mpishard.communication import run_in_threads
from mpishard.errors import ShardingError
from mpishard.observe.ledger import MemoryCategory
from mpishard.testing.worlds import in_worlds

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")
FROZEN = {
    "first layers": ("linear0.", "linear1."),
    "a layer in the middle": ("linear1.",),
    "the last layer": ("linear2.",),
    "biases": ("linear0.bias", "linear1.bias", "linear2.bias"),
}


def names_of(entries: Any, prefixes: tuple[str, ...]) -> frozenset[str]:
    return frozenset(entry.name for entry in entries if entry.name.startswith(prefixes))


def mask_of(entries: Any, names: frozenset[str], length: int) -> Any:
    """1 for trained parameters, 0 for frozen ones."""
    mask = np.ones(length)
    for entry in entries:
        if entry.name in names:
            mask[entry.start : entry.start + entry.size] = 0
    return mask


@pytest.mark.parametrize("what", FROZEN)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("path", ["arena", "messages", "two nodes"], indirect=True)
@in_worlds(1, 3)
def test_the_other_parameters_train_if_some_are_frozen(
    backend: Any, problems: Any, what: str, strategy: str, path: str
) -> None:
    entries = problems.MODELS["mlp"](0).parameter_table.entries
    mask = mask_of(entries, names_of(entries, FROZEN[what]), entries[-1].stop)

    def update(theta: Any, g: Any, state: Any, step: int) -> Any:
        g = g * mask
        g *= min(1.0, 0.05 / np.linalg.norm(g))  # the norm is that of what is trained
        return theta + mask * (problems.adamw(theta, g, state, step) - theta)

    expected = problems.train_sequentially("mlp", update)
    for unit_size in problems.UNIT_SIZES:
        options = {f"{prefix}*": {"frozen": True} for prefix in FROZEN[what]}
        model, optimizer = problems.build(
            backend, "mlp", strategy, "adamw", unit_size,
            {"clip_global_norm": 0.05, "parameter_options": options},
        )  # fmt: skip
        for step in range(5):
            optimizer.step(model, *problems.local_batch(backend, "mlp", step))
        np.testing.assert_allclose(
            model.get_parameters(), expected.parameters[-1], rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("strategy", STRATEGIES)
@in_worlds(1, 3)
def test_a_frozen_unit_has_no_gradient_no_state_and_sends_nothing(
    backend: Any, problems: Any, strategy: str, messages_only: None
) -> None:
    sent, held = [], []
    for prefixes in ((), FROZEN["first layers"]):
        options = {"parameter_options": {f"{prefix}*": {"frozen": True} for prefix in prefixes}}
        model, optimizer = problems.build(backend, "mlp", strategy, "adamw", 1, options)
        backend.traffic.reset()
        optimizer.step(model, *problems.local_batch(backend, "mlp", 0))
        sent.append(backend.all_reduce(np.array([backend.traffic.total_bytes]))[0])
        held.append(
            [
                backend.all_reduce(np.array([model.memory.held(category)]))[0]
                for category in (MemoryCategory.GRADIENTS, MemoryCategory.OPTIMIZER_STATE)
            ]
        )
    n, copies = backend.world_size, 1 if strategy in ("zero1", "ddp") else 0
    frozen = 8 * sum(u.length for u in model.units if u.index in model.engine.program.frozen_units)
    assert frozen > 0
    gradient_copies = n if copies else 1
    assert held[0][0] - held[1][0] == frozen * gradient_copies
    assert held[0][1] - held[1][1] == 2 * frozen * (n if strategy == "ddp" else 1)
    # Of what was sent for it the gradients' half is spared, and with replicas the other half, too;
    # fully sharded units are not even gathered for a backward pass that ends before them.
    assert sent[0] - sent[1] == 2 * (n - 1) * frozen


@in_worlds(2)
def test_state_holds_trained_parameters_only(backend: Any, problems: Any) -> None:
    options = {"parameter_options": {"*.bias": {"frozen": True}}}
    model, optimizer = problems.build(backend, "mlp", "fsdp", "adamw", 10**6, options)
    names = names_of(model.parameter_entries, FROZEN["biases"])
    optimizer.step(model, *problems.local_batch(backend, "mlp", 0))
    trained = sum(e.size for e in model.parameter_entries if e.name not in names)
    state = backend.all_reduce(np.array([optimizer.state["first_moment"].size]))
    assert state[0] == trained


@pytest.mark.parametrize("strategy", STRATEGIES)
@in_worlds(2)
def test_gradients_of_frozen_parameters_are_zero(
    backend: Any, problems: Any, strategy: str
) -> None:
    model, _ = problems.build(backend, "mlp", strategy)
    x, y = problems.batch("mlp", 0)
    before = model.compute_gradients(x, y)
    names = names_of(model.parameter_entries, ("linear1.weight",))
    model.engine.freeze(names)
    mask = mask_of(model.parameter_entries, names, model.parameter_count)
    np.testing.assert_array_equal(model.compute_gradients(x, y), before * mask)
    parameters = model.get_parameters()
    model.apply_gradients(np.ones(model.parameter_count), 1.0)
    np.testing.assert_array_equal(model.get_parameters(), parameters - mask)


@in_worlds(1, 2)
def test_a_layer_may_declare_a_parameter_that_is_not_trained(backend: Any, problems: Any) -> None:
    class Scaled(nn.Linear):
        @property
        def parameters(self) -> Any:
            return {n: _fixed(s) if n == "bias" else s for n, s in super().parameters.items()}

    def _fixed(spec: Any) -> Any:
        return nn.ParameterSpec(spec.shape, spec.initializer, trainable=False)

    chain = nn.Sequential({"a": Scaled(5, 3), "b": nn.Linear(3, 2)})
    plain = nn.Model(chain, nn.MSE(), input_shape=(5,))
    fixed = plain.get_parameters()[15:18]
    config = problems.build(backend, "mlp", "fsdp")[0].sharding_configuration
    model = problems.STRATEGIES["fsdp"][0](plain, config)
    for step in range(2):
        model.train(*problems.local_batch(backend, "mlp", step))
    np.testing.assert_array_equal(model.get_parameters()[15:18], fixed)
    assert model.compute_gradients(*problems.batch("mlp", 0))[15:18].tolist() == [0, 0, 0]


@in_worlds(1, 2)
def test_two_optimizers_may_train_parts_in_turn(backend: Any, problems: Any) -> None:
    model, first = problems.build(
        backend, "mlp", "fsdp", "sgd", 1, {"parameter_options": {"linear0.*": {"frozen": True}}}
    )
    second = problems.STRATEGIES["fsdp"][1](
        problems.RULES["sgd"](parameter_options={"linear[12].*": {"frozen": True}}),
        model.sharding_configuration,
    )
    stop = model.parameter_entries[1].stop
    for step, (optimizer, moved) in enumerate([(first, slice(stop, None)), (second, slice(stop))]):
        before = model.get_parameters()
        optimizer.step(model, *problems.local_batch(backend, "mlp", step))
        changed = model.get_parameters() != before
        assert changed[moved].all()
        assert changed.sum() == changed[moved].size


@in_worlds(2)
def test_freezing_all_parameters_is_refused(backend: Any, problems: Any) -> None:
    model, optimizer = problems.build(
        backend, "mlp", "fsdp", "sgd", 1, {"parameter_options": {"*": {"frozen": True}}}
    )
    with pytest.raises(ValueError, match="frozen"):
        optimizer.step(model, *problems.local_batch(backend, "mlp", 0))
    with pytest.raises(ValueError, match="all 6 parameters are frozen"):
        model.engine.freeze(frozenset(e.name for e in model.parameter_entries))


def test_nothing_is_frozen_in_the_middle_of_a_round(problems: Any) -> None:
    def body(backend: Any) -> None:
        model, optimizer = problems.build(backend, "mlp", "fsdp")
        with model.accumulate():
            optimizer.step(model, *problems.local_batch(backend, "mlp", 0))
            model.engine.freeze(frozenset({"linear0.bias"}))

    with pytest.raises(ShardingError, match="accumulate"):
        run_in_threads(1, body)
