"""Public members of the sharded optimizers, and their refusals."""

from __future__ import annotations

import io
import logging

import numpy as np
import pytest

import mpishard as ms
from mpishard.checkpoint import CheckpointReader
from mpishard.contracts import IOptimizer
from mpishard.errors import CheckpointError, NonFiniteLossError, PeerError, ShardingError
from mpishard.optimizers import (
    DDPOptimizer,
    FSDPOptimizer,
    ZeRO1Optimizer,
    ZeRO2Optimizer,
    ZeRO3Optimizer,
)
from mpishard.testing.worlds import in_worlds

WRAPPERS = {
    "ddp": DDPOptimizer, "zero1": ZeRO1Optimizer, "zero2": ZeRO2Optimizer, "zero3": ZeRO3Optimizer,
    "fsdp": FSDPOptimizer,
}  # fmt: skip
generator = np.random.default_rng(0)
X = generator.standard_normal((12, 3))
Y = np.sin(X[:, :2])
SIZES = [3, 4, 2]

by_strategy = pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])


def wrap(backend, strategy="fsdp", rule=None):
    config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=1)
    model = ms.as_distributed(ms.nn.MLP(SIZES, activation="tanh", seed=1), config, strategy)
    return model, ms.as_distributed(rule or ms.optimizers.AdamW(1e-2), config, strategy)


def own(backend):
    """Return this rank's samples, whose number differs from rank to rank."""
    layout = ms.ShardLayout(len(X), backend.world_size + 1)
    stop = len(X) if backend.rank == backend.world_size - 1 else layout.start(backend.rank + 1)
    return slice(layout.start(backend.rank), stop)


def steps(backend, model, optimizer, count=3):
    mine = own(backend)
    for _ in range(count):
        optimizer.step(model, X[mine], Y[mine])


def full_gradient(parameters):
    plain = ms.nn.MLP(SIZES, activation="tanh").with_parameters(parameters)
    return plain.compute_loss_and_gradients(X, Y)[1]


# ------------------------------------------------------------------------------------ construction


class Annealing(IOptimizer):
    """An optimizer that is not gradient based."""

    def optimize(self, input_data):
        raise AssertionError

    def get_options(self):
        return {}

    def reset(self):
        pass


Annealing.__abstractmethods__ = frozenset()


@pytest.mark.parametrize("strategy", WRAPPERS)
@in_worlds(2)
def test_a_wrapped_optimizer_must_be_gradient_based(backend, strategy):
    config = ms.ShardingConfiguration(backend)
    wrapper = WRAPPERS[strategy]
    rule = ms.optimizers.SGD()
    before = backend._sequence
    for make in (wrapper, lambda optimizer, given: ms.as_distributed(optimizer, given, strategy)):
        with pytest.raises(ValueError, match=f"{wrapper.__name__} .* Annealing is not gradient"):
            make(Annealing(), config)
        with pytest.raises(TypeError, match=f"sharded already, as {wrapper.__name__}"):
            make(make(rule, config), config)
    for wrong in (None, 3, ms.nn.MLP(SIZES)):
        with pytest.raises(TypeError, match="wrapped_optimizer must be an optimizer of mpishard"):
            wrapper(wrong, config)
    for wrong in (None, backend):
        with pytest.raises(TypeError, match="config must be a ShardingConfiguration, got"):
            wrapper(rule, wrong)
    assert backend._sequence == before


@in_worlds(1, 3)
def test_properties_and_reset(backend):
    rule = ms.optimizers.AdamW(1e-2)
    model, optimizer = wrap(backend, rule=rule)
    assert optimizer.wrapped_optimizer is rule
    assert (optimizer.rank, optimizer.world_size) == (backend.rank, backend.world_size)
    assert optimizer.sharding_configuration.communication_backend is backend
    assert optimizer.get_options() == rule.get_options()
    steps(backend, model, optimizer)
    first = model.get_parameters()
    optimizer.reset()
    assert (optimizer.steps, optimizer.state) == (0, {})
    with pytest.raises(ShardingError, match="the gradient of the last step is not available"):
        _ = optimizer.last_computed_gradients
    other, _ = wrap(backend)
    steps(backend, other, optimizer)  # any model, and as the first time
    assert other.get_parameters().tobytes() == first.tobytes()


def test_none_is_refused_without_stranding_peers():
    def main(backend):
        model, optimizer = wrap(backend)
        if backend.rank == 1:
            optimizer.optimize(None)
        with pytest.raises(PeerError) as caught:
            optimizer.step(model, X, Y)
        raise caught.value

    with pytest.raises(TypeError, match="must be an OptimizationInputData, got NoneType"):
        ms.run_in_threads(3, main)


# --------------------------------------------------------------------------------------- gradients


@by_strategy
@in_worlds(1, 2, 3)
def test_the_last_gradient_is_the_ranks_part_of_the_mean_over_all_samples(backend, strategy):
    model, optimizer = wrap(backend, strategy, ms.optimizers.SGD(0.1, clip_global_norm=1e-3))
    pieces = model.engine.layout.pieces()
    for _ in range(2):
        expected = full_gradient(model.get_parameters())
        steps(backend, model, optimizer, 1)
        mine = np.concatenate([expected[p.start : p.stop] for p in pieces])
        np.testing.assert_allclose(optimizer.last_computed_gradients, mine, rtol=0, atol=1e-12)
    optimizer.last_computed_gradients[...] = 0  # a copy
    model.gather_full_parameters()
    assert optimizer.last_computed_gradients.any()


@by_strategy
@in_worlds(2)
def test_there_is_no_last_gradient_before_a_step_or_after_something_else(backend, strategy):
    model, optimizer = wrap(backend, strategy)
    missing = pytest.raises(ShardingError, match="the gradient of the last step is not available")
    with missing:
        _ = optimizer.last_computed_gradients
    steps(backend, model, optimizer)
    model.set_parameters(model.get_parameters())
    with missing:
        _ = optimizer.last_computed_gradients
    steps(backend, model, optimizer)
    with model.accumulate():
        optimizer.step(model, X[:2], Y[:2])
        with missing:
            _ = optimizer.last_computed_gradients
    optimizer.step(model, X, Y)
    assert optimizer.last_computed_gradients.size
    with pytest.raises(NonFiniteLossError):
        optimizer.step(model, X * np.nan, Y)
    with missing:
        _ = optimizer.last_computed_gradients


@by_strategy
@pytest.mark.parametrize("rule", [
    lambda: ms.optimizers.SGD(0.1, momentum=0.9), lambda: ms.optimizers.LAMB(0.1),
    lambda: ms.optimizers.AdamW(1e-2, clip_global_norm=0.1),
])  # fmt: skip
@in_worlds(1, 3)
def test_given_gradients_are_applied_as_a_step_would(backend, strategy, rule):
    model, optimizer = wrap(backend, strategy, rule())
    other, reference = wrap(backend, strategy, rule())
    for _ in range(3):
        optimizer.apply_gradients(full_gradient(model.get_parameters()), model)
        steps(backend, other, reference, 1)
    difference = np.abs(model.get_parameters() - other.get_parameters()).max()
    assert difference < 1e-12
    assert optimizer.steps == model.engine.step_number == 3


@by_strategy
@in_worlds(2)
def test_gradients_that_cannot_be_applied(backend, strategy):
    model, optimizer = wrap(backend, strategy)
    before = model.get_parameters()
    gradients = np.ones(model.parameter_count)
    with pytest.raises(ValueError, match=r"expected a vector of shape \(26,\), got \(25,\)"):
        optimizer.apply_gradients(gradients[1:], model)
    with pytest.raises(ValueError, match="the vectors differ between ranks"):
        optimizer.apply_gradients(gradients * backend.rank, model)
    with pytest.raises(NonFiniteLossError, match="the given gradient is not finite"):
        optimizer.apply_gradients(gradients * np.inf, model)
    with pytest.raises(TypeError, match="needs a sharded model, got NoneType"):
        optimizer.apply_gradients(gradients, None)
    assert model.get_parameters().tobytes() == before.tobytes()
    assert optimizer.steps == 0


# ------------------------------------------------------------------------------------------- state


@in_worlds(1, 2, 3)
def test_ddp_state_becomes_rank_0s(backend):
    model, optimizer = wrap(backend, "ddp")
    optimizer.synchronize_optimizer_state()  # before there is any
    steps(backend, model, optimizer)
    expected = {name: vector.copy() for name, vector in optimizer.state.items()}
    if backend.rank > 0:
        for vector in optimizer.state.values():
            vector[...] = backend.rank
        optimizer._state.steps = 77
    optimizer.synchronize_optimizer_state()
    assert optimizer.steps == 3
    for name, vector in optimizer.state.items():
        assert vector.tobytes() == expected[name].tobytes() != bytes(vector.nbytes)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "fsdp"])
@in_worlds(2)
def test_partitioned_state_has_no_second_copy(backend, strategy):
    _, optimizer = wrap(backend, strategy)
    before = backend._sequence
    with pytest.raises(NotImplementedError, match="partitions the optimizer state"):
        optimizer.synchronize_optimizer_state()
    assert backend._sequence == before


@by_strategy
@in_worlds(1, 3)
def test_plain_models_get_the_mean_of_all_parameters(backend, strategy):
    model, optimizer = wrap(backend, strategy)
    plain = ms.nn.MLP(SIZES, seed=backend.rank)
    values = [ms.nn.MLP(SIZES, seed=rank).get_parameters() for rank in range(backend.world_size)]
    optimizer._synchronize_parameters(plain)
    np.testing.assert_allclose(plain.get_parameters(), np.mean(values, axis=0), rtol=1e-14)
    before = backend._sequence
    optimizer._synchronize_parameters(None)
    optimizer._synchronize_parameters(model)
    assert backend._sequence == before


def trained(backend, strategy="fsdp", rule=None):
    model, optimizer = wrap(backend, strategy, rule)
    steps(backend, model, optimizer)
    return optimizer.serialize(), model.get_parameters()


def more(backend, parameters, data, strategy, late=False):
    """Parameters after two further steps with the state in ``data``."""
    model, optimizer = wrap(backend, strategy)
    model.set_parameters(parameters)
    if not late:
        optimizer.bind(model)
    optimizer.deserialize(data)
    for _ in range(2):
        optimizer.apply_gradients(full_gradient(model.get_parameters()), model)
    assert optimizer.steps == model.engine.step_number == 5
    return model.get_parameters()


def uninterrupted(backend):
    model, optimizer = wrap(backend, "ddp")
    for _ in range(5):
        optimizer.apply_gradients(full_gradient(model.get_parameters()), model)
    return model.get_parameters()


@by_strategy
@pytest.mark.parametrize("world_size", [1, 3])
def test_bytes_are_the_same_on_all_ranks_and_load_anywhere(strategy, world_size):
    (data, parameters), *others = ms.run_in_threads(world_size, trained, strategy)
    assert all(other == data for other, _ in others)
    expected = ms.run_in_threads(1, uninterrupted)[0]
    for name, late in zip(WRAPPERS, (False, True, False, True, False), strict=True):
        for again in ms.run_in_threads(2, more, parameters, data, name, late):
            assert np.abs(again - expected).max() < 1e-12


@in_worlds(2)
def test_files_hold_the_state_alone(backend, shared_path):
    data, _ = trained(backend, "fsdp")
    model, optimizer = wrap(backend, "fsdp")
    steps(backend, model, optimizer)
    optimizer.save_model(shared_path / "state")
    ms.checkpoint.save(shared_path / "both", model, optimizer)
    with CheckpointReader(shared_path / "state") as reader:
        assert sorted(reader.kinds) == [
            "optimizer/AdamW/first_moment", "optimizer/AdamW/second_moment",
        ]  # fmt: skip
    for name in ("state", "both"):
        other, fresh = wrap(backend, "ddp")
        before = other.get_parameters()
        fresh.bind(other)
        fresh.load_model(shared_path / name)
        assert fresh.steps == other.engine.step_number == 3
        assert fresh.serialize() == data
        assert other.get_parameters().tobytes() == before.tobytes()
    with pytest.raises(CheckpointError, match="was saved without a model"):
        model.load_model(shared_path / "state")


@in_worlds(2)
def test_state_is_saved_to_and_loaded_from_streams(backend):
    data, _ = trained(backend, "zero1")
    model, optimizer = wrap(backend, "zero1")
    steps(backend, model, optimizer)
    stream = io.BytesIO()
    optimizer.save_state(stream)
    stream.seek(0)
    fresh_model, fresh = wrap(backend, "fsdp")
    fresh.load_state(stream)
    fresh.bind(fresh_model)
    assert fresh.serialize() == data
    with pytest.raises(TypeError, match="save_state needs a binary stream, got int"):
        optimizer.save_state(3)


@in_worlds(2)
def test_bytes_that_do_not_fit_change_nothing(backend):
    data, _ = trained(backend, rule=ms.optimizers.SGD(0.1, momentum=0.9))
    good, _ = trained(backend)
    model, optimizer = wrap(backend)
    steps(backend, model, optimizer, 1)
    kept = optimizer.serialize()
    before = backend._sequence
    wide = ms.as_distributed(ms.nn.MLP([3, 5, 2]), backend)
    other = ms.as_distributed(ms.optimizers.AdamW(), backend)
    steps(backend, wide, other, 1)
    wrong = other.serialize()
    sent = backend._sequence
    assert sent > before
    for given, error, message in (
        ("state", TypeError, "deserialize needs bytes, got str"),
        (b"state", ValueError, "these 5 bytes are not those of an optimizer's serialize..:"),
        (good[:-3], ValueError, "are not those of an optimizer's"),
        (
            model.wrapped_model.clone().with_parameters(np.ones(26)).serialize(),
            ValueError,
            "are not those of an optimizer's",
        ),
        (data, ValueError, r"hold the state \['velocity'\] of SGD, and AdamW needs \['first"),
        (wrong, ValueError, "state tensors do not fit the model, first '.*/first_moment/"),
    ):
        with pytest.raises(error, match=message):
            optimizer.deserialize(given)
    assert backend._sequence == sent
    with pytest.raises(ValueError, match="the bytes differ between ranks"):
        optimizer.deserialize(good if backend.rank else kept)
    assert optimizer.serialize() == kept


@in_worlds(2)
def test_loaded_state_of_another_model_is_refused_at_the_first_step(backend):
    data, _ = trained(backend)
    optimizer = ms.as_distributed(ms.optimizers.AdamW(1e-2), backend)
    optimizer.deserialize(data)
    wide = ms.as_distributed(ms.nn.MLP([3, 5, 2]), backend)
    with pytest.raises(ValueError, match="do not fit the model"):
        optimizer.step(wide, X, Y)
    optimizer.reset()
    optimizer.step(wide, X, Y)  # it waits no longer


def test_other_settings_are_named(caplog):
    data, _ = ms.run_in_threads(2, trained)[0]

    def load(backend):
        model, optimizer = wrap(backend, rule=ms.optimizers.AdamW(1e-2, beta1=0.5))
        optimizer.bind(model)
        optimizer.deserialize(data)

    with caplog.at_level(logging.WARNING, "mpishard"):
        ms.run_in_threads(2, load)
    (record,) = caplog.records
    assert "beta1 was 0.9 and is 0.5" in record.getMessage()


@by_strategy
@in_worlds(1, 2)
def test_an_overwritten_gradient_is_not_returned(backend, strategy):
    model, optimizer = wrap(backend, strategy)
    other = ms.as_distributed(ms.optimizers.SGD(), model.sharding_configuration, strategy)
    options = {"*.bias": {"frozen": True}}
    frozen = ms.optimizers.SGD(parameter_options=options)
    partial = ms.as_distributed(frozen, model.sharding_configuration, strategy)

    def fail():
        with pytest.raises(NonFiniteLossError):
            other.step(model, X * np.nan, Y)

    for overwrite in (fail, lambda: partial.bind(model)):
        steps(backend, model, optimizer, 1)
        model.evaluate(X, Y)
        model.loss_and_gradients(X, Y)
        assert np.isfinite(optimizer.last_computed_gradients).all()
        overwrite()
        with pytest.raises(ShardingError, match="the gradient of the last step is not available"):
            _ = optimizer.last_computed_gradients


@in_worlds(1, 2)
def test_reset_forgets_a_model_that_is_closed(backend):
    model, _ = wrap(backend, "ddp")
    config = model.sharding_configuration
    late = ms.optimizers.AsyncSGDOptimizer(ms.optimizers.SGD(), config, 1)
    late.step(model, X, Y)
    model.close()
    late.reset()
    late.step(wrap(backend, "ddp")[0], X, Y)
