"""Computation graphs give what `predict` gives, by formulas that share no code with the layers."""

import numpy as np
import pytest

import mpishard as ms
from mpishard import nn
from mpishard.nn.graph.primitives import PRIMITIVES

SIZES = {"vocabulary_size": 11, "context_length": 6, "width": 12, "heads": 3, "layers": 2}


def images(channels=1, size=8):
    return np.random.default_rng(1).standard_normal((3, channels, size, size))


def features(*shape):
    return 3 * np.random.default_rng(2).standard_normal((4, *shape))


def tokens(length=6):
    return np.random.default_rng(3).integers(0, 11, (3, length))


def chain_of(*layers, shape, **options):
    return nn.Model(nn.Sequential(*layers), nn.MSE(), input_shape=shape, **options)


def conv_net():
    return chain_of(
        nn.Conv2D(1, 4, kernel=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2D(2),
        nn.Conv2D(4, 5, kernel=(2, 3), stride=(1, 2), padding=(0, 1), bias=False),
        nn.SiLU(),
        nn.MaxPool2D((2, 1), stride=1),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(20, 3),
        shape=(1, 8, 8),
    )


def linear_with_a_choice():
    model = nn.LinearRegression(5, 2)
    model.set_active_feature_indices([0, 3])
    return model


MODELS = {
    "relu": (lambda: nn.MLP([5, 7, 4, 2]), lambda: features(5)),
    "gelu": (lambda: nn.MLP([5, 7, 2], "gelu"), lambda: features(5)),
    "tanh": (lambda: nn.MLP([5, 7, 2], "tanh"), lambda: features(5)),
    "integers": (lambda: nn.MLP([5, 7, 2]), lambda: features(5).astype(int)),
    "linear": (lambda: nn.LinearRegression(5, 2), lambda: features(5)),
    "choice": (linear_with_a_choice, lambda: features(5)),
    "logistic": (lambda: nn.LogisticRegression(5, 3), lambda: features(5)),
    "conv": (conv_net, images),
    "gpt": (lambda: nn.GPT(**SIZES, dtype="float64"), tokens),
    "short": (lambda: nn.GPT(**SIZES, dtype="float64"), lambda: tokens(4)),
    "tied": (lambda: nn.GPT(**SIZES, dtype="float64", tied_embeddings=True), tokens),
    "dropout": (lambda: nn.GPT(**SIZES, dtype="float64", dropout=0.5), tokens),
    "sequence": (
        lambda: chain_of(
            nn.RMSNorm(5, epsilon=1e-3),
            nn.Sigmoid(),
            nn.Softmax(),
            nn.Residual(nn.Linear(5, 5), nn.LayerNorm(5)),
            nn.Linear(5, 24),
            nn.SwiGLU(),
            nn.Attention(2, kv_heads=1),
            shape=(3, 5),
        ),
        lambda: features(3, 5),
    ),
    "empty": (lambda: nn.MLP([5, 2]), lambda: np.zeros((0, 5))),
}


def perturbed(make):
    """A model none of whose parameters is at a first value that hides something."""
    model = make()
    vector = model.get_parameters()
    noise = np.random.default_rng(4).standard_normal(vector.shape)
    model.set_parameters(vector + 0.3 * noise)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_a_graph_gives_what_predict_gives(name):
    make, batch = MODELS[name]
    model, x = perturbed(make), batch()
    inputs = []
    node = model.export_computation_graph(inputs)
    (given,) = inputs
    expected = model.predict(x)
    for feeds in ({given: x}, {"x": x}, {given.name: x.tolist()} if x.size else {"x": x}):
        np.testing.assert_allclose(node.evaluate(feeds), expected, rtol=1e-12, atol=1e-12)
    assert model.supports_jit_compilation
    check_shapes(node, {given: x})


def check_shapes(node, feeds):
    """What each node says of its shape is so, and what is open is what batches decide."""
    for inner in node.walk():
        shape = inner.evaluate(feeds).shape
        assert len(shape) == len(inner.shape), inner
        assert all(n in (None, m) for n, m in zip(inner.shape, shape, strict=True)), inner


def test_every_operation_is_used_and_no_layer_is_run(monkeypatch):
    seen = set()
    for make, _ in MODELS.values():
        seen |= {node.op for node in make().export_computation_graph([]).walk()}
    assert seen == {"input", "constant", *PRIMITIVES}
    model, x = nn.GPT(**SIZES), tokens()
    node = model.export_computation_graph([])
    for layer in (nn.Linear, nn.LayerNorm, nn.CausalAttention, nn.Embedding, nn.GELU):
        monkeypatch.setattr(layer, "forward", None)
    assert node.evaluate({"x": x}).shape == (3, 6, 11)


def test_every_layer_of_the_package_has_operations():
    from mpishard.nn.graph.tracing import _COMPOSITES, _LEAVES

    layers = {
        getattr(nn, name)
        for name in nn.__all__
        if isinstance(getattr(nn, name), type) and issubclass(getattr(nn, name), nn.Layer)
    }
    assert layers - {nn.Layer} == {*_COMPOSITES, *_LEAVES}


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_constants_by_name(tied):
    model = nn.GPT(**SIZES, tied_embeddings=tied)
    node = model.export_computation_graph([])
    constants = [n for n in node.walk() if n.op == "constant"]
    assert sorted(n.name for n in constants) == sorted(
        e.name for e in model.parameter_table.entries
    )
    by_name = {n.name: n for n in constants}
    for entry in model.parameter_table.entries:
        value = by_name[entry.name].attributes["value"]
        assert value.shape == by_name[entry.name].shape == entry.shape
        np.testing.assert_array_equal(
            value.reshape(-1), model.get_parameters()[entry.start : entry.stop]
        )


def test_a_graph_stays_as_it_was_exported():
    model, x = nn.MLP([3, 2]), features(3)
    before = model.predict(x)
    node = model.export_computation_graph([])
    model.train(x, np.ones((4, 2)))
    np.testing.assert_allclose(node.evaluate({"x": x}), before, rtol=1e-12)


def test_float32_models_compute_in_float32():
    model, x = perturbed(lambda: nn.GPT(**SIZES)), tokens()
    for make, batch in ((lambda: model, x), (lambda: nn.MLP([5, 3], dtype="float32"), features(5))):
        y = make().export_computation_graph([]).evaluate({"x": batch})
        assert y.dtype == np.float32
        np.testing.assert_allclose(y, make().predict(batch), rtol=1e-3, atol=1e-5)


def test_graphs_join():
    inputs = []
    first, second = nn.MLP([3, 4]), nn.MLP([4, 2], seed=1)
    hidden = first.export_computation_graph(inputs)
    joined = [hidden]
    node = second.export_computation_graph(joined)
    assert joined == [hidden]
    x = features(3)
    expected = second.predict(first.predict(x))
    np.testing.assert_allclose(node.evaluate({inputs[0]: x}), expected, rtol=1e-12)


def test_sub_models_have_graphs_that_join():
    model, x = perturbed(lambda: nn.GPT(**SIZES, dtype="float64")), tokens(5)
    inputs = []
    node = model.extract_sub_model(0, 3).export_computation_graph(inputs)
    node = model.extract_sub_model(3, 8).export_computation_graph([node])
    np.testing.assert_allclose(node.evaluate({"x": x}), model.predict(x), rtol=1e-12, atol=1e-12)


class Doubling(nn.Layer):
    """A layer of a user's own, with a parameter."""

    @property
    def parameters(self):
        return {"by": nn.ParameterSpec((), lambda _, shape: np.full(shape, 2.0))}

    def output_shape(self, input_shape):
        return (input_shape[0] + 1, *input_shape[1:])

    def forward(self, p, x, context):
        assert not context.training
        return np.concatenate([x * p["by"], x[:, :1]], axis=1), None

    def backward_input(self, p, saved, dy):
        raise NotImplementedError


class Shifted(nn.Linear):
    """A layer that derives from one of ours and computes something else."""

    def forward(self, p, x, context):
        y, saved = super().forward(p, x, context)
        return y + 1, saved


def test_layers_of_the_users_own_are_run():
    model = chain_of(
        nn.Linear(5, 5),
        Doubling(),
        nn.Residual({"a": nn.ReLU(), "b": Shifted(5, 5)}),
        shape=(3, 5),
    )
    x = features(3, 5)
    node = model.export_computation_graph([])
    assert [n.shape for n in node.walk() if n.op == "layer"] == [(None, None, 5)] * 2
    np.testing.assert_allclose(node.evaluate({"x": x}), model.predict(x), rtol=1e-12, atol=1e-12)
    check_shapes(node, {"x": x})


def test_large_numbers_do_not_overflow():
    x = np.array([[-2000.0, 2000.0, 0.0]])
    for layer in (nn.Sigmoid(), nn.SiLU(), nn.Softmax(), nn.GELU()):
        node = chain_of(layer, shape=(3,)).export_computation_graph([])
        expected, _ = layer.forward({}, x, nn.Context(training=False))
        np.testing.assert_allclose(node.evaluate({"x": x}), expected, rtol=1e-12)


def test_a_deep_graph_needs_no_deep_stack():
    model = chain_of(*[nn.ReLU() for _ in range(3000)], shape=(2,))
    node = model.export_computation_graph([])
    assert node.evaluate({"x": [[-1.0, 2.0]]}).tolist() == [[0, 2]]


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        (None, TypeError, "must be a list, got None"),
        ((), TypeError, "must be a list, got tuple"),
        (["x"], TypeError, "must hold ComputationNodes, got a str"),
        ([nn.ComputationNode("input")] * 2, ValueError, "one input, got 2"),
        (
            [nn.ComputationNode("input", (), {"name": "z"}, (None, 4))],
            ValueError,
            r"inputs of shape \(None, 3\), got a node of \(None, 4\)",
        ),
        ([nn.ComputationNode("input", shape=(3,))], ValueError, r"got a node of \(3,\)"),
    ],
)
def test_invalid_input_nodes_are_refused(inputs, error, message):
    with pytest.raises(error, match=message):
        nn.MLP([3, 2]).export_computation_graph(inputs)


def test_invalid_feeds_are_refused():
    node = nn.MLP([3, 2]).export_computation_graph([])
    with pytest.raises(TypeError, match="must map inputs to arrays, got ndarray"):
        node.evaluate(np.ones((1, 3)))
    with pytest.raises(ValueError, match=r"nothing was fed to the input 'x'; .* \['x'\]"):
        node.evaluate({"y": np.ones((1, 3))})
    for wrong in (np.ones((1, 4)), np.ones(3)):
        with pytest.raises(ValueError, match=r"'x' has shape \(None, 3\) \(None: any size\), got"):
            node.evaluate({"x": wrong})
    with pytest.raises(ValueError, match="unknown operation 'fold'; there are cast, add"):
        nn.ComputationNode("fold").evaluate({})
    gpt = nn.GPT(**SIZES).export_computation_graph([])
    for token in (-1, 11):
        with pytest.raises(ValueError, match=r"outside \[0, 11\)"):
            gpt.evaluate({"x": [[token]]})


def test_exporting_the_graph_of_a_structure_only_model_names_the_holder():
    with ms.InMemoryCommunicationBackend(0, 1, "test_graph") as backend:
        plain = nn.MLP([3, 2])
        ms.as_distributed(plain, backend)
        with pytest.raises(RuntimeError, match=r"unsharded\(\) the plain model"):
            plain.export_computation_graph([])
