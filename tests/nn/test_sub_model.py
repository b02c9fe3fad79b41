"""Sub-models: consecutive layers of a model, which share the model's parameters."""

import itertools

import numpy as np
import pytest

import mpishard as ms
from mpishard import nn
from mpishard.errors import StructureOnlyError

SIZES = {"vocabulary_size": 11, "context_length": 6, "width": 12, "heads": 3, "layers": 2}


def mlp():
    return nn.MLP([5, 7, 4, 2], seed=3)


def gpt(**options):
    return nn.GPT(**SIZES, dtype="float64", seed=3, **options)


@pytest.mark.parametrize("cuts", [(0, 5), (0, 1, 5), (0, 2, 3, 5), (0, 1, 2, 3, 4, 5)])
def test_consecutive_sub_models_compute_the_model(cuts):
    model, x = mlp(), np.random.default_rng(0).standard_normal((4, 5))
    parts = [model.extract_sub_model(a, b) for a, b in itertools.pairwise(cuts)]
    y = x
    for part in parts:
        y = part.predict(y)
    np.testing.assert_array_equal(y, model.predict(x))
    assert sum(part.parameter_count for part in parts) == model.parameter_count
    vector = np.concatenate([part.get_parameters() for part in parts])
    np.testing.assert_array_equal(vector, model.get_parameters())
    names = [e.name for part in parts for e in part.parameter_table.entries]
    assert names == [e.name for e in model.parameter_table.entries]
    assert [i.name for p in parts for i in p.get_all_layer_info()] == list(model.chain.children)
    losses = [part.default_loss_function for part in parts]
    assert losses == [None] * (len(parts) - 1) + [model.default_loss_function]


def test_tokens_and_blocks():
    model, x = gpt(), np.random.default_rng(0).integers(0, 11, (3, 5))
    first, last = model.extract_sub_model(0, 3), model.extract_sub_model(3, 8)
    assert isinstance(first, nn.SubModel)
    assert (first.get_input_shape(), last.get_input_shape()) == ([6], [6, 12])
    np.testing.assert_array_equal(last.predict(first.predict(x)), model.predict(x))


def test_parameters_are_shared_both_ways():
    model = mlp()
    part = model.extract_sub_model(2, 5)
    start = model.get_layer_info(2).parameter_offset
    part.apply_gradients(np.ones(part.parameter_count), 1.0)
    expected = mlp().get_parameters()
    expected[start:] -= 1
    np.testing.assert_array_equal(model.get_parameters(), expected)
    part.set_parameters(np.zeros(part.parameter_count))
    expected[start:] = 0
    np.testing.assert_array_equal(model.get_parameters(), expected)
    model.set_parameters(2 * expected + 1)
    np.testing.assert_array_equal(part.get_parameters(), 1)
    own = part.deep_copy()
    model.set_parameters(expected)
    np.testing.assert_array_equal(own.get_parameters(), 1)
    other = part.with_parameters(np.full(part.parameter_count, 5.0))
    other.set_parameters(np.full(part.parameter_count, 6.0))
    np.testing.assert_array_equal(part.get_parameters(), 0)


def test_a_sub_model_of_a_sub_model():
    model, x = mlp(), np.random.default_rng(0).standard_normal((4, 7))
    part = model.extract_sub_model(1, 5).extract_sub_model(1, 3)
    assert [layer.name for layer in part.get_all_layer_info()] == ["linear1", "relu1"]
    part.apply_gradients(np.ones(part.parameter_count), 1.0)
    y, _ = nn.Sequential(*model.layers[2:4]).forward(
        {"0": model.parameter_table.nested_views(model.get_parameters())["linear1"]},
        x,
        nn.Context(training=False),
    )
    np.testing.assert_array_equal(part.predict(x), y)


def test_parameters_are_made_on_first_use(monkeypatch):
    model = gpt()
    expected = gpt().get_parameters()
    part = model.extract_sub_model(3, 8)
    monkeypatch.setattr(model._vector, "get", None)  # what would make the whole vector
    out = np.empty(part.parameter_count)
    part.fill_parameters(0, out)
    start = model.get_layer_info(3).parameter_offset
    np.testing.assert_array_equal(out, expected[start:])


def test_training_the_last_sub_model_is_training_on_outputs_of_the_first():
    model, x = mlp(), np.random.default_rng(0).standard_normal((4, 5))
    y = np.ones((4, 2))
    first, last = model.extract_sub_model(0, 2), model.extract_sub_model(2, 5)
    hidden = first.predict(x)
    loss, gradient = last.compute_loss_and_gradients(hidden, y)
    expected_loss, expected = model.compute_loss_and_gradients(x, y)
    assert loss == expected_loss
    np.testing.assert_array_equal(gradient, expected[first.parameter_count :])
    with pytest.raises(RuntimeError, match="SubModel has no default loss"):
        first.compute_gradients(x, hidden)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_part_can_be_sharded(strategy):
    def train(backend):
        model, x = mlp(), np.random.default_rng(0).standard_normal((4, 7))
        config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=1)
        sharded = ms.as_distributed(model.extract_sub_model(1, 5), config, strategy)
        sharded.train(x[2 * backend.rank :][:2], np.ones((2, 2)))
        return sharded.get_parameters()

    plain = mlp().extract_sub_model(1, 5)
    plain.train(np.random.default_rng(0).standard_normal((4, 7)), np.ones((4, 2)))
    for vector in ms.run_in_threads(2, train):
        np.testing.assert_allclose(vector, plain.get_parameters(), rtol=1e-12, atol=1e-14)


def test_a_part_whose_parameters_are_taken_leaves_the_model_its_own():
    model = mlp()
    before = model.get_parameters()
    part = model.extract_sub_model(0, 2)
    part.release_parameters("a stage")
    with pytest.raises(StructureOnlyError, match="held by a stage"):
        part.get_parameters()
    np.testing.assert_array_equal(model.get_parameters(), before)
    model.release_parameters("a FSDPModel")
    with pytest.raises(StructureOnlyError, match="held by a FSDPModel"):
        model.extract_sub_model(0, 2).get_parameters()


@pytest.mark.parametrize(("start", "end"), [(2, 2), (3, 2), (-1, 2), (0, 6), (5, 5)])
def test_ranges_that_are_none(start, end):
    with pytest.raises(ValueError, match=rf"layers \[{start}, {end}\) are empty or reach outside"):
        mlp().extract_sub_model(start, end)


def test_tied_layers_cannot_be_separated():
    model, x = gpt(tied_embeddings=True), np.random.default_rng(0).integers(0, 11, (2, 6))
    np.testing.assert_array_equal(model.extract_sub_model(0, 8).predict(x), model.predict(x))
    assert model.extract_sub_model(0, 3).parameter_count
    with pytest.raises(ValueError, match=r"head\.weight is embedding\.weight, of a layer outside"):
        model.extract_sub_model(3, 8)


def test_a_part_of_a_model_on_a_gpu_lies_there_too(gpu):
    model, host = nn.MLP([5, 7, 2], seed=3, device="cuda"), nn.MLP([5, 7, 2], seed=3)
    x, y = np.random.default_rng(0).standard_normal((4, 5)), np.ones((4, 2))
    first, last = model.extract_sub_model(0, 2), model.extract_sub_model(2, 3)
    hidden = first.predict(x)
    assert isinstance(hidden, gpu.ndarray)
    np.testing.assert_allclose(last.predict(hidden).get(), host.predict(x), rtol=1e-12)
    dx, cached = last.compute_activation_gradients(hidden, y)
    gradient = last.compute_weight_gradients(hidden, y, cached)
    assert isinstance(dx, gpu.ndarray)
    expected = host.compute_gradients(x, y)[first.parameter_count :]
    np.testing.assert_allclose(gradient.get(), expected, rtol=1e-12)
    last.apply_gradients(gradient, 1.0)
    last.set_parameters(2 * last.get_parameters())
    np.testing.assert_array_equal(
        model.get_parameters()[first.parameter_count :].get(), last.get_parameters().get()
    )
    node = model.export_computation_graph([])
    np.testing.assert_allclose(node.evaluate({"x": x}), model.predict(x).get(), rtol=1e-12)


def test_a_layered_model_need_not_have_sub_models():
    with pytest.raises(NotImplementedError, match="does not implement extract_sub_model"):
        ms.contracts.ILayeredModel.extract_sub_model(mlp(), 0, 1)
