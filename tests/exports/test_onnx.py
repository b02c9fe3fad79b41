"""ONNX files compute what the models predict, by another program."""

import tracemalloc

import numpy as np
import pytest

import mpishard as ms
from mpishard import nn
from mpishard.exports.onnx import _OPERATIONS
from mpishard.nn.graph.primitives import PRIMITIVES
from mpishard.testing.worlds import in_worlds

SIZES = {"vocabulary_size": 11, "context_length": 6, "width": 12, "heads": 4, "layers": 2}


def features(*shape):
    return 3 * np.random.default_rng(2).standard_normal((4, *shape)).astype(np.float32)


def tokens(length=6):
    return np.random.default_rng(3).integers(0, 11, (3, length))


def chain_of(*layers, shape):
    return nn.Model(nn.Sequential(*layers), nn.MSE(), input_shape=shape, dtype="float64")


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


def encoder():
    """A transformer encoder over vectors, with the remaining layers."""
    return chain_of(
        nn.Residual(nn.LayerNorm(12), nn.Linear(12, 36), nn.Attention(4), nn.Linear(12, 12)),
        nn.Residual(nn.RMSNorm(12), nn.Linear(12, 48), nn.SwiGLU(), nn.Linear(24, 12)),
        nn.Sigmoid(),
        nn.Linear(12, 24),
        nn.Attention(4, kv_heads=2),
        nn.Tanh(),
        nn.Softmax(),
        shape=(5, 12),
    )


def linear_with_a_choice():
    model = nn.LinearRegression(5, 2)
    model.set_active_feature_indices([0, 3])
    return model


MODELS = {
    "mlp": (lambda: nn.MLP([5, 7, 4, 2]), features(5)),
    "tanh": (lambda: nn.MLP([5, 7, 2], "tanh", dtype="float32"), features(5)),
    "choice": (linear_with_a_choice, features(5)),
    "logistic": (lambda: nn.LogisticRegression(5, 3), features(5)),
    "two": (lambda: nn.LogisticRegression(5, 2), features(5)),
    "conv": (conv_net, features(1, 8, 8)),
    "encoder": (encoder, features(5, 12)),
    "gpt": (lambda: nn.GPT(**SIZES), tokens()),
    "short": (lambda: nn.GPT(**SIZES, kv_heads=2, tied_embeddings=True), tokens(4)),
}


def perturbed(make):
    model = make()
    noise = np.random.default_rng(4).standard_normal(model.parameter_count)
    model.set_parameters(model.get_parameters() + 0.3 * noise.astype(model.dtype))
    return model


def run(path, x):
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(["y"], {"x": x})[0]


@pytest.mark.parametrize("name", MODELS)
def test_onnx_runtime_computes_what_the_model_predicts(name, tmp_path):
    pytest.importorskip("onnx")
    make, x = MODELS[name]
    model = perturbed(make)
    ms.export_onnx(model, tmp_path / "model.onnx")
    for batch in (x, x[:1]):  # batches of any size
        found, expected = run(tmp_path / "model.onnx", batch), model.predict(batch)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_every_operation_of_a_graph_is_written_and_tested():
    assert _OPERATIONS.keys() == PRIMITIVES.keys()
    seen = {n.op for make, _ in MODELS.values() for n in make().export_computation_graph([]).walk()}
    assert {*PRIMITIVES} - seen == set()


@in_worlds(2, 3)
def test_rank_zero_writes_the_file_of_a_sharded_model(backend, shared_path):
    pytest.importorskip("onnx")
    model = ms.as_distributed(perturbed(lambda: nn.GPT(**SIZES)), backend, "fsdp")
    ms.export_onnx(model, shared_path / "model.onnx")
    expected = model.predict(tokens())
    if backend.rank == 0:
        np.testing.assert_allclose(run(shared_path / "model.onnx", tokens()), expected, atol=1e-5)
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere to write to"):
        ms.export_onnx(model, shared_path / "nowhere" / "model.onnx")
    assert backend.all_reduce(np.ones(1))[0] == backend.world_size  # all ranks go on


@pytest.mark.parametrize("write", [ms.export_onnx, ms.save_gpt2])
@in_worlds(2)
def test_no_rank_holds_a_copy_of_the_model(backend, shared_path, write):
    pytest.importorskip("onnx")
    sizes = {"vocabulary_size": 8, "context_length": 8, "width": 128, "heads": 2, "layers": 6}
    config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=1)
    model = ms.as_distributed(nn.GPT(**sizes), config, "fsdp")
    write(model, shared_path / "first")  # what is imported and kept is here now
    backend.barrier()
    tracemalloc.start()
    write(model, shared_path / "file")
    peak = tracemalloc.get_traced_memory()[1]
    backend.barrier()
    tracemalloc.stop()
    assert peak < 0.6 * (shared_path / "file").stat().st_size  # of both ranks if they are threads


def test_models_that_onnx_cannot_hold_are_refused(tmp_path):
    pytest.importorskip("onnx")

    class Doubled(nn.ReLU):
        def forward(self, p, x, context):
            return 2 * x, None

    path = tmp_path / "old.onnx"
    path.write_bytes(b"old")
    with pytest.raises(ValueError, match="no operation for Doubled, a layer that is not"):
        ms.export_onnx(chain_of(nn.Linear(3, 3), Doubled(), shape=(3,)), path)
    with pytest.raises(TypeError, match=r"needs a model of mpishard.nn, got a FunctionModel"):
        ms.export_onnx(ms.FunctionModel(lambda t, x, y: (0.0, t), np.ones(3)), path)
    with pytest.raises(ValueError, match="path"):
        ms.export_onnx(nn.MLP([2, 1]), " ")
    with pytest.raises(IsADirectoryError, match="is a folder; give the path of a file"):
        ms.export_onnx(nn.MLP([2, 1]), tmp_path)
    assert path.read_bytes() == b"old"


def test_names_of_parameters_stay(tmp_path):
    onnx = pytest.importorskip("onnx")
    model = nn.GPT(**SIZES)
    ms.export_onnx(model, tmp_path / "m.onnx")
    graph = onnx.load(tmp_path / "m.onnx").graph
    assert {e.name for e in model.parameter_table.entries} <= {i.name for i in graph.initializer}
    (dims,) = [
        [d.dim_param or d.dim_value for d in i.type.tensor_type.shape.dim] for i in graph.input
    ]
    assert dims == ["batch", "dim1"]
