"""Active features and their spread go with the parameters: into files, bytes, streams, copies."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpishard as ms
from mpishard import checkpoint
from mpishard.checkpoint.exchange.plain import named_bytes
from mpishard.communication.threads.run import run_in_threads
from mpishard.errors import CheckpointError, StructureOnlyError
from mpishard.nn import (
    MSE,
    FeatureLinear,
    Linear,
    LinearRegression,
    Model,
    ReLU,
    Residual,
    Sequential,
)
from mpishard.testing.worlds import in_worlds

X = np.random.default_rng(0).standard_normal((6, 4))
SPREAD = np.array([0.1, 1 / 3, 2.0, 1e-300])
ACTIVE = [0, 3]


def chosen() -> LinearRegression:
    model = LinearRegression(4, seed=1)
    model.set_active_feature_indices(ACTIVE)
    model.feature_spread = SPREAD
    return model


def through_a_file(source: Any, target: Any, path: Path) -> None:
    source.save_model(path)
    target.load_model(path)


def through_bytes(source: Any, target: Any, path: Path) -> None:
    target.deserialize(source.serialize())


def through_a_stream(source: Any, target: Any, path: Path) -> None:
    stream = io.BytesIO()
    source.save_state(stream)
    stream.seek(0)
    target.load_state(stream)


def through_a_snapshot(source: Any, target: Any, path: Path) -> None:
    checkpoint.save(path, source, metadata={"choices": "the user's"})
    assert checkpoint.load(path, target) == {"choices": "the user's"}


by_way = pytest.mark.parametrize(
    "way", [through_a_file, through_bytes, through_a_stream, through_a_snapshot]
)


@by_way
def test_a_plain_model_has_the_features_that_were_saved(way: Any, tmp_path: Path) -> None:
    source, target = chosen(), LinearRegression(4, seed=2)
    way(source, target, tmp_path / "model")
    assert target.get_active_feature_indices() == ACTIVE
    np.testing.assert_array_equal(target.feature_spread, SPREAD)
    np.testing.assert_array_equal(target.predict(X), source.predict(X))
    assert target.get_feature_importance() == source.get_feature_importance()


@by_way
def test_files_without_active_features_activate_all(way: Any, tmp_path: Path) -> None:
    target = chosen()
    way(LinearRegression(4, seed=2), target, tmp_path / "model")
    assert target.get_active_feature_indices() == [0, 1, 2, 3]
    np.testing.assert_array_equal(target.feature_spread, np.ones(4))


def sharded(model: Any, backend: Any, strategy: str) -> Any:
    configuration = ms.ShardingConfiguration(backend, minimum_parameter_group_size=1)
    return ms.as_distributed(model, configuration, strategy=strategy)


@by_way
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_active_features_are_loaded_at_every_world_size(
    way: Any, strategy: str, tmp_path: Path
) -> None:
    """One and three ranks load what two ranks saved, and three what a plain model saved."""
    expected = chosen().predict(X)
    plain = LinearRegression(4, seed=2)

    def check(model: Any) -> None:
        assert list(model.get_active_feature_indices()) == ACTIVE
        np.testing.assert_array_equal(model.predict(X), expected)
        with model.unsharded() as whole:
            np.testing.assert_array_equal(whole.feature_spread, SPREAD)

    def save(backend: Any) -> bytes:
        source = sharded(chosen(), backend, strategy)
        way(source, source, tmp_path / "a")
        check(source)
        data: bytes = source.serialize()
        return data

    data = run_in_threads(2, save)
    assert data[0] == data[1]

    def take(backend: Any) -> None:
        for load in (
            lambda model: model.deserialize(data[0]),
            lambda model: model.deserialize(chosen().serialize()),
        ):
            model = sharded(LinearRegression(4, seed=2), backend, strategy)
            load(model)
            check(model)
        if (tmp_path / "a").exists():
            model = sharded(LinearRegression(4, seed=2), backend, strategy)
            model.load_model(tmp_path / "a")
            check(model)
        model.deserialize(LinearRegression(4, seed=2).serialize())
        assert list(model.get_active_feature_indices()) == [0, 1, 2, 3]

    run_in_threads(3, take)
    run_in_threads(1, take)
    plain.deserialize(data[0])
    np.testing.assert_array_equal(plain.predict(X), expected)


@in_worlds(2)
def test_all_ranks_refuse_active_features_that_differ_by_rank(backend: Any) -> None:
    source = chosen()
    source.set_active_feature_indices([backend.rank])
    model = sharded(LinearRegression(4, seed=2), backend, "fsdp")
    before = model.gather_full_parameters()
    with pytest.raises(ValueError, match="the model's settings in the bytes differ between ranks"):
        model.deserialize(source.serialize())
    assert list(model.get_active_feature_indices()) == [0, 1, 2, 3]
    np.testing.assert_array_equal(model.gather_full_parameters(), before)


# --------------------------------------------------------------------- models that cannot take them


def without_features() -> Model:
    return Model(Sequential({"linear": Linear(4, 1)}), MSE(), input_shape=(4,))


def test_a_model_without_feature_layers_refuses_saved_features(tmp_path: Path) -> None:
    chosen().save_model(tmp_path / "model")
    target = without_features()
    before = target.get_parameters()
    message = r"'linear' uses only the input features \[0, 3\].*FeatureLinear"
    with pytest.raises(CheckpointError, match=message):
        target.load_model(tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        target.deserialize(chosen().serialize())
    np.testing.assert_array_equal(target.get_parameters(), before)
    # Where all are active, the models are the same.
    target.deserialize(LinearRegression(4, seed=1).serialize())
    np.testing.assert_array_equal(target.predict(X), LinearRegression(4, seed=1).predict(X))


class Regression:
    """A black box with the parameters of a linear model."""

    def __init__(self) -> None:
        self.theta = np.zeros(5)

    def get_parameters(self) -> Any:
        return self.theta

    def set_parameters(self, theta: Any) -> None:
        self.theta = theta

    def compute_gradients(self, x: Any, y: Any) -> Any:
        return np.zeros(5)


@pytest.mark.parametrize("make", [without_features, Regression])
@in_worlds(2)
def test_a_sharded_model_without_feature_layers_refuses_saved_features(
    backend: Any, make: Any
) -> None:
    model = sharded(make(), backend, "fsdp")
    data = chosen().serialize()
    if make is Regression:
        # One parameter called "parameters": of such a model no other's bytes have the names.
        flat = np.zeros(5)
        data = named_bytes(model.parameter_entries, flat, chosen().choices())
    with pytest.raises(
        ValueError, match=r"input features \[0, 3\]|belong to the choices \['active_features'"
    ):
        model.deserialize(data)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"active_features": {"linear": [4]}}, r"integers in \[0, 4\), got 4"),
        ({"feature_spread": [1.0]}, r"shape \(4,\), got \(1,\)"),
    ],
)
def test_choices_that_do_not_fit_change_nothing(choices: Any, message: str) -> None:
    target = chosen()
    before = target.get_parameters()
    table = target.parameter_table.entries
    data = named_bytes(table, np.zeros(5), choices)
    with pytest.raises(ValueError, match=message):
        target.deserialize(data)
    assert target.get_active_feature_indices() == ACTIVE
    np.testing.assert_array_equal(target.feature_spread, SPREAD)
    np.testing.assert_array_equal(target.get_parameters(), before)


# ------------------------------------------------------------------------------------------- copies


def nested() -> Model:
    inner = Residual({"masked": FeatureLinear(4, 4), "relu": ReLU()})
    return Model(Sequential({"inner": inner, "out": Linear(4, 1)}), MSE(), input_shape=(4,))


def masked_layer(model: Model) -> FeatureLinear:
    layer = model.layers[0].children["masked"]
    assert isinstance(layer, FeatureLinear)
    return layer


@by_way
def test_a_layer_inside_others(way: Any, tmp_path: Path) -> None:
    source, target = nested(), nested()
    masked_layer(source).active = (1, 2)
    assert source.choices() == {"active_features": {"inner.masked": [1, 2]}}
    way(source, target, tmp_path / "model")
    assert masked_layer(target).active == (1, 2)
    np.testing.assert_array_equal(target.predict(X), source.predict(X))


@pytest.mark.parametrize("copied", ["clone", "deep_copy"])
def test_a_copy_of_a_structure_has_layers_of_its_own(copied: str) -> None:
    model = nested()
    masked_layer(model).active = (1, 2)
    vector = model.get_parameters()
    model.release_parameters("somebody")
    other = getattr(model, copied)()
    assert masked_layer(other).active == (1, 2)
    masked_layer(other).active = (0,)
    assert masked_layer(model).active == (1, 2)
    assert [info.layer for info in other.get_all_layer_info()] == list(other.layers)
    assert [info.layer for info in model.get_all_layer_info()] == list(model.layers)
    # Each gets parameters of its own, and computes with its own choice.
    other.reclaim_parameters(vector.copy())
    with pytest.raises(StructureOnlyError, match="held by somebody"):
        model.get_parameters()
    model.reclaim_parameters(vector.copy())
    other.apply_gradients(np.ones_like(vector), 1.0)
    np.testing.assert_array_equal(model.get_parameters(), vector)
    other.set_parameters(vector)
    assert (other.predict(X) != model.predict(X)).any()
    masked_layer(other).active = (1, 2)
    np.testing.assert_array_equal(other.predict(X), model.predict(X))


def test_a_copy_shares_a_layer_that_the_chain_has_twice() -> None:
    layer = FeatureLinear(4, 4)
    chain = Sequential({"a": layer, "b": layer}).copy()
    assert chain.children["a"] is chain.children["b"] is not layer
