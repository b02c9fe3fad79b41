"""The model interfaces, as the plain models of `nn` implement them."""

import io

import numpy as np
import pytest

from mpishard import nn
from mpishard.errors import CheckpointError, MissingLossError, StructureOnlyError
from mpishard.mirror import (
    DynamicShapeInfo,
    IFullModel,
    ILayeredModel,
    IPipelineDecomposableModel,
    LayerCategory,
)

SIZES = {"vocabulary_size": 11, "context_length": 6, "width": 12, "heads": 3, "layers": 2}


def mlp():
    return nn.MLP([5, 7, 2], seed=3)


def gpt(**options):
    return nn.GPT(**SIZES, dtype="float64", seed=3, **options)


def conv():
    chain = nn.Sequential(nn.Conv2D(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    return nn.Model(chain, nn.CrossEntropy(), input_shape=(1, 4, 4))


def batch(model, samples=4):
    generator = np.random.default_rng(0)
    if isinstance(model, nn.GPT):
        x = generator.integers(0, 11, (samples, 6))
        return x, generator.integers(-1, 11, (samples, 6))
    x = generator.standard_normal((samples, *model.get_input_shape()))
    if isinstance(model.default_loss_function, nn.CrossEntropy):
        return x, generator.integers(0, 3, samples)
    return x, generator.standard_normal((samples, *model.get_output_shape()))


by_model = pytest.mark.parametrize("make", [mlp, gpt, conv, lambda: nn.LogisticRegression(5, 3)])


# -------------------------------------------------------------------------------------- parameters


@by_model
def test_chunks_are_the_parameters_in_their_shapes(make):
    model = make()
    chunks = list(model.get_parameter_chunks())
    assert [c.shape for c in chunks] == [e.shape for e in model.parameter_table.entries]
    vector = model.get_parameters()
    np.testing.assert_array_equal(np.concatenate([c.reshape(-1) for c in chunks]), vector)
    chunks[0][...] = 7
    np.testing.assert_array_equal(model.get_parameters(), vector)
    other = make()
    other.set_parameter_chunks(2 * chunk for chunk in model.get_parameter_chunks())
    np.testing.assert_array_equal(other.get_parameters(), 2 * vector)


def test_chunks_are_made_one_at_a_time(monkeypatch):
    model = gpt()
    expected = gpt().get_parameters()
    monkeypatch.setattr(model, "_parameters", None)  # what would make the whole vector
    chunks = model.get_parameter_chunks()
    got = np.concatenate([chunk.reshape(-1) for chunk in chunks])
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ([], ValueError, r"ended before linear0\.weight of shape \(7, 5\)"),
        ([35, 7, 14], ValueError, r"ended before linear1\.bias"),
        ([35, 6, 14, 2], ValueError, r"linear0\.bias of shape \(7,\) got a chunk of shape \(6,\)"),
        ([35, 7, 14, 2, 1], ValueError, "more chunks than the 4 parameters"),
        ([None], TypeError, "NumPy or CuPy array"),
    ],
)
def test_chunks_that_do_not_fit_change_nothing(sizes, error, message):
    model = mlp()
    before = model.get_parameters()
    chunks = [[1.0] * 35 if size is None else np.ones(size) for size in sizes]
    with pytest.raises(error, match=message):
        model.set_parameter_chunks(chunks)
    np.testing.assert_array_equal(model.get_parameters(), before)


@by_model
def test_vectors_that_do_not_fit_change_nothing(make):
    model = make()
    before = model.get_parameters()
    n = before.size
    for take in (
        model.set_parameters,
        model.with_parameters,
        lambda v: model.apply_gradients(v, 0.1),
    ):
        for shape in ((n - 1,), (n + 1,), (n, 1), ()):
            with pytest.raises(ValueError, match=f"has {n} parameters"):
                take(np.ones(shape))
        for wrong in (None, [1.0] * n):
            with pytest.raises(TypeError, match="NumPy or CuPy array"):
                take(wrong)
    np.testing.assert_array_equal(model.get_parameters(), before)


@by_model
def test_a_clone_shares_and_a_deep_copy_does_not(make):
    model, x = make(), batch(make())[0]
    shared, own = model.clone(), model.deep_copy()  # before anything is made
    before = model.get_parameters()
    model.apply_gradients(np.ones_like(before), 0.5)
    np.testing.assert_array_equal(shared.get_parameters(), before - 0.5)
    np.testing.assert_array_equal(own.get_parameters(), before)
    later = model.deep_copy()
    shared.set_parameters(2 * before)
    np.testing.assert_array_equal(model.get_parameters(), 2 * before)
    np.testing.assert_array_equal(model.predict(x), shared.predict(x))
    np.testing.assert_array_equal(later.get_parameters(), before - 0.5)
    model.set_parameter_chunks(later.get_parameter_chunks())
    np.testing.assert_array_equal(shared.get_parameters(), before - 0.5)
    model.set_parameters(2 * before)
    new = model.with_parameters(before.copy())
    assert type(new) is type(model)
    new.apply_gradients(np.ones_like(before), 1.0)
    np.testing.assert_array_equal(model.get_parameters(), 2 * before)


def test_set_parameters_copies_the_vector():
    model = mlp()
    vector = model.get_parameters()
    model.set_parameters(vector)
    vector[0] += 1
    assert model.get_parameters()[0] == vector[0] - 1


@by_model
def test_gradients_go_downhill_and_leave_parameters(make):
    model = make()
    x, y = batch(model)
    before = model.get_parameters()
    gradient = model.compute_gradients(x, y)
    np.testing.assert_array_equal(model.get_parameters(), before)
    model.apply_gradients(gradient, 0.25)
    np.testing.assert_array_equal(model.get_parameters(), before - 0.25 * gradient)


def test_gradients_need_a_loss():
    model = nn.Model(nn.Sequential(nn.Linear(3, 2)), None, input_shape=(3,))
    x, y = np.ones((4, 3)), np.zeros((4, 2))
    assert model.default_loss_function is None
    for ask in (model.compute_gradients, model.train, model.compute_activation_gradients):
        with pytest.raises(MissingLossError, match="has no default loss; pass loss_function") as e:
            ask(x, y)
        assert isinstance(e.value, RuntimeError)
    expected = nn.Model(nn.Sequential(nn.Linear(3, 2)), nn.MAE(), input_shape=(3,))
    np.testing.assert_array_equal(
        model.compute_gradients(x, y, nn.MAE()), expected.compute_gradients(x, y)
    )
    assert model.get_model_metadata().additional_info["Loss"] is None


# ------------------------------------------------------------------------------- files and streams


@by_model
def test_bytes_files_and_streams(make, tmp_path):
    model = make()
    vector = 3 * model.get_parameters()
    model.set_parameters(vector)
    stream = io.BytesIO()
    model.save_state(stream)
    stream.seek(0)
    model.save_model(tmp_path / "saved")
    for take in (
        lambda m: m.deserialize(model.serialize()),
        lambda m: m.load_state(stream),
        lambda m: m.load_model(tmp_path / "saved"),
        lambda m: m.load_model(str(tmp_path / "saved")),
    ):
        other = make()
        take(other)
        np.testing.assert_array_equal(other.get_parameters(), vector)


def test_bytes_that_are_no_saved_model_are_refused(tmp_path, monkeypatch):
    model, other = mlp(), nn.MLP([5, 7, 3])
    before = model.get_parameters()
    other.save_model(tmp_path / "other")
    model.save_model(tmp_path / "torn")
    (tmp_path / "torn" / "manifest.json").write_text("{")
    for load, error in (
        (lambda: model.load_model(tmp_path / "missing"), FileNotFoundError),
        (lambda: model.load_model(tmp_path / "torn"), CheckpointError),
        (lambda: model.load_model(tmp_path / "other"), CheckpointError),
        (lambda: model.deserialize(b"nothing"), ValueError),
        (lambda: model.deserialize(other.serialize()), ValueError),
        (lambda: model.deserialize(None), TypeError),
        (lambda: model.save_model(""), ValueError),
        (lambda: model.load_model(" "), ValueError),
        (lambda: model.save_model(tmp_path / "torn" / "manifest.json" / "x"), OSError),
    ):
        with pytest.raises(error):
            load()
    assert issubclass(CheckpointError, OSError)
    np.testing.assert_array_equal(model.get_parameters(), before)

    def refuse(*_, **__):
        raise PermissionError(13, "no")

    monkeypatch.setattr("os.mkdir", refuse)
    with pytest.raises(PermissionError):
        model.save_model(tmp_path / "elsewhere")


def test_a_closed_model_has_no_parameters():
    model = mlp()
    shared = model.clone()
    vector = model.get_parameters()
    with model as same:
        assert same is model
    model.close()
    with pytest.raises(StructureOnlyError, match="the model was closed"):
        model.get_parameters()
    np.testing.assert_array_equal(shared.get_parameters(), vector)
    np.testing.assert_array_equal(model.with_parameters(vector).get_parameters(), vector)
    for ask in (
        lambda: model.set_parameters(vector),
        lambda: model.set_parameter_chunks([]),
        lambda: next(model.get_parameter_chunks()),
        model.serialize,
    ):
        with pytest.raises(StructureOnlyError):
            ask()


# -------------------------------------------------------------------------------------- structure


@by_model
def test_plain_models_implement_all_interfaces(make):
    model = make()
    for interface in (IFullModel, ILayeredModel, IPipelineDecomposableModel):
        assert isinstance(model, interface)
    assert model.supports_parameter_initialization
    metadata = model.get_model_metadata()
    assert metadata.name == metadata.model_type == type(model).__name__
    assert metadata.complexity == model.parameter_count
    assert metadata.feature_count == np.prod(model.get_input_shape())
    assert metadata.additional_info["Layers"] == list(model.chain.children)
    assert metadata.properties == {"ParameterCount": model.parameter_count, "DType": "float64"}
    assert f"{model.parameter_count} parameters" in metadata.description


def test_shapes():
    assert (mlp().get_input_shape(), mlp().get_output_shape()) == ([5], [2])
    assert (gpt().get_input_shape(), gpt().get_output_shape()) == ([6], [6, 11])
    assert (conv().get_input_shape(), conv().get_output_shape()) == ([1, 4, 4], [3])
    assert mlp().get_dynamic_shape_info() == DynamicShapeInfo((), ())
    assert gpt().get_dynamic_shape_info() == DynamicShapeInfo((0,), (0,))
    assert conv().get_dynamic_shape_info() == DynamicShapeInfo((), ())
    pooled = nn.Sequential(nn.Conv2D(1, 2, 3), nn.MaxPool2D(2))
    model = nn.Model(pooled, None, input_shape=(1, 4, 4))
    assert model.get_dynamic_shape_info() == DynamicShapeInfo((1, 2), (1, 2))


def test_layer_info_of_an_mlp():
    infos = nn.MLP([5, 7, 2], dtype="float32").get_all_layer_info()
    assert [
        (i.index, i.name, i.category, i.parameter_offset, i.parameter_count, i.input_shape)
        for i in infos
    ] == [
        (0, "linear0", LayerCategory.DENSE, 0, 42, (5,)),
        (1, "relu0", LayerCategory.ACTIVATION, 42, 0, (7,)),
        (2, "linear1", LayerCategory.DENSE, 42, 16, (7,)),
    ]
    assert [i.output_shape for i in infos] == [(7,), (7,), (2,)]
    assert [i.is_trainable for i in infos] == [True, False, True]
    assert [i.estimated_flops for i in infos] == [2 * 5 * 7, 7, 2 * 7 * 2]
    assert [i.estimated_activation_memory for i in infos] == [28, 28, 8]


def test_layer_info_of_a_gpt():
    model = gpt(tied_embeddings=True)
    infos = {info.name: info for info in model.get_all_layer_info()}
    assert infos["embedding"].estimated_flops == 0
    assert infos["position"].estimated_flops == 6 * 12
    attention = 7 * 6 * 12 + 2 * 6 * 12 * 36 + 2 * 12 * 6 * 7 + 2 * 6 * 12 * 12 + 6 * 12
    assert infos["block0_attention"].estimated_flops == attention
    assert infos["block0_attention"].category is LayerCategory.COMPOSITE
    outputs = 6 * (12 + 36 + 12 + 12 + 12)
    assert infos["block0_attention"].estimated_activation_memory == 8 * outputs
    assert (infos["head"].parameter_count, infos["head"].is_trainable) == (0, True)
    assert [infos[n].category.name for n in ("embedding", "norm", "head")] == [
        "EMBEDDING",
        "NORMALIZATION",
        "DENSE",
    ]


def test_layer_info_of_a_convolutional_network():
    chain = nn.Sequential(
        nn.Conv2D(3, 4, (2, 3)),
        nn.MaxPool2D(2),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Softmax(),
        nn.RMSNorm(8),
        nn.Linear(8, 1),
    )
    infos = nn.Model(chain, None, input_shape=(3, 5, 4)).get_all_layer_info()
    assert [i.category.name for i in infos] == [
        "CONVOLUTION",
        "POOLING",
        "REGULARIZATION",
        "RESHAPE",
        "ACTIVATION",
        "NORMALIZATION",
        "DENSE",
    ]
    assert [i.estimated_flops for i in infos] == [
        2 * (3 * 2 * 3) * (4 * 4 * 2),
        4 * (4 * 2),
        8,
        0,
        8,
        32,
        16,
    ]


def test_a_frozen_layer_is_not_trainable():
    class Frozen(nn.Layer):
        @property
        def parameters(self):
            return {"w": nn.ParameterSpec((3,), lambda _, s: np.ones(s), trainable=False)}

        def output_shape(self, input_shape):
            return input_shape

        def forward(self, p, x, context):
            return x * p["w"], None

        def backward_input(self, p, saved, dy):
            return dy * p["w"], None

    model = nn.Model(nn.Sequential(Frozen(), nn.Linear(3, 1)), nn.MSE(), input_shape=(3,))
    assert [i.is_trainable for i in model.get_all_layer_info()] == [False, True]
    assert model.get_layer_info(0).category is LayerCategory.OTHER


@pytest.mark.parametrize("index", [-1, 3])
def test_unknown_layers_are_refused(index):
    for ask in (mlp().get_layer_info, mlp().validate_partition_point):
        with pytest.raises(ValueError, match=rf"layer {index} is outside \[0, 3\)"):
            ask(index)


def test_points_at_which_a_model_may_be_cut():
    model = mlp()
    assert [model.validate_partition_point(i) for i in range(3)] == [True, True, False]

    class Odd(nn.MLP):
        def get_layer_info(self, index):
            info = super().get_layer_info(index)
            return type(info)(
                **{name: getattr(info, name) for name in info.__slots__}
                | ({"input_shape": (9,)} if index == 1 else {})
            )

    assert [Odd([5, 7, 2]).validate_partition_point(i) for i in range(3)] == [False, True, False]


# -------------------------------------------------------------------------------- backward halves


@by_model
@pytest.mark.parametrize("samples", [4, 0])
def test_backward_in_halves(make, samples):
    model = make()
    x, y = batch(model, samples)
    dx, cached = model.compute_activation_gradients(x, y)
    dw = model.compute_weight_gradients(x, y, cached)
    np.testing.assert_allclose(dw, model.compute_gradients(x, y), rtol=1e-12, atol=1e-14)
    if isinstance(model, nn.GPT):
        assert dx is None
        return
    assert dx.shape == x.shape
    direction = np.random.default_rng(5).standard_normal(x.shape)
    loss = model.default_loss_function
    up, down = (loss(model.predict(x + h * direction), y) for h in (1e-6, -1e-6))
    np.testing.assert_allclose((dx * direction).sum(), (up - down) / 2e-6, rtol=1e-6, atol=1e-10)


def test_cached_activations_serve_once_and_only_their_model():
    model = mlp()
    x, y = batch(model)
    _, cached = model.compute_activation_gradients(x, y)
    for wrong in (None, {}, mlp().compute_activation_gradients(x, y)[1]):
        with pytest.raises(ValueError, match="serves once"):
            model.compute_weight_gradients(x, y, wrong)
    model.compute_weight_gradients(x, y, cached)
    with pytest.raises(ValueError, match="serves once"):
        model.compute_weight_gradients(x, y, cached)
