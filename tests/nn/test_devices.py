"""Layers, losses and plain models compute the same on the host and on a GPU or its stand-in."""

import sys

import numpy as np
import pytest
from cupy_stand_in import installed

import mpishard as ms
from mpishard import nn
from mpishard.base import devices
from mpishard.base.arrays import is_device_array, read_numbers, to_host
from mpishard.base.devices import Device
from mpishard.data import Samples, map_arrays
from mpishard.errors import DeviceUnavailableError
from mpishard.nn.layers.layer import GradientTargets
from mpishard.sharding import ParameterTable

LAYERS = {
    "linear": (nn.Linear(5, 4), (5,)),
    "linear over time": (nn.Linear(5, 4, bias=False), (3, 5)),
    "relu": (nn.ReLU(), (6,)),
    "tanh": (nn.Tanh(), (6,)),
    "gelu": (nn.GELU(), (6,)),
    "sigmoid": (nn.Sigmoid(), (6,)),
    "silu": (nn.SiLU(), (6,)),
    "swiglu": (nn.SwiGLU(), (3, 6)),
    "softmax": (nn.Softmax(), (3, 6)),
    "layer norm": (nn.LayerNorm(6), (3, 6)),
    "rms norm": (nn.RMSNorm(6), (3, 6)),
    "attention": (nn.CausalAttention(2), (5, 12)),
    "whole attention": (nn.Attention(2), (5, 12)),
    "embedding": (nn.Embedding(7, 4), None),
    "position": (nn.PositionalEmbedding(6, 4), (5, 4)),
    "dropout": (nn.Dropout(0.4), (9,)),
    "flatten": (nn.Flatten(), (2, 3)),
    "conv": (nn.Conv2D(2, 3, 3, stride=2, padding=1), (2, 6, 5)),
    "pool": (nn.MaxPool2D(2, 1), (2, 5, 5)),
    "residual": (nn.Residual(nn.Linear(4, 4), nn.Tanh()), (4,)),
    "features": (nn.FeatureLinear(5, 2), (5,)),
}
LOSSES = {
    "mse": (nn.MSE(), (4, 3), "f"),
    "mae": (nn.MAE(), (4, 3), "f"),
    "huber": (nn.Huber(), (4, 3), "f"),
    "cross entropy": (nn.CrossEntropy(), (4, 5), "i"),
    "label smoothing": (nn.CrossEntropy(label_smoothing=0.1, z_loss=0.01), (4, 5), "i"),
    "classes": (nn.CrossEntropy(class_weight=[1, 0, 2, 3, 0.5]), (4, 5), "i"),
    "binary": (nn.BinaryCrossEntropy(), (4, 1), "b"),
    "no and yes": (nn.BinaryCrossEntropy(class_weight=[1, 2]), (4, 1), "b"),
}


def run(layer, place, samples, sample_shape, *, empty):
    """Output, input gradient, and gradients written and added to, as host arrays."""
    generator = np.random.default_rng(3)
    table = ParameterTable(layer.walk_parameters())
    vector = place(generator.standard_normal(table.length))
    if sample_shape is None:
        x = place(generator.integers(0, 7, (samples, 5)))
    else:
        x = place(generator.standard_normal((samples, *sample_shape)))
    p = table.nested_views(vector)
    y, saved = layer.forward(p, x, nn.Context(seed=1, path="layer"))
    dy = place(generator.standard_normal(y.shape))
    flat = place(generator.standard_normal(table.length))
    targets = GradientTargets(
        {entry.name: entry for entry in table.entries},
        lambda entry: flat[entry.start : entry.stop],
        {entry.name for entry in table.entries} if empty else set(),
    )
    dx = layer.backward(p, saved, dy, targets)
    targets.clear_unwritten()
    return [None if a is None else to_host(a) for a in (y, dx, flat)]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("samples", [4, 0])
def test_layers(name, samples, gpu):
    layer, shape = LAYERS[name]
    for empty in (True, False):
        wanted = run(layer, np.asarray, samples, shape, empty=empty)
        found = run(layer, gpu.asarray, samples, shape, empty=empty)
        for expected, actual in zip(wanted, found, strict=True):
            if expected is None:
                assert actual is None
            else:
                np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("samples", [4, 0])
def test_losses(name, samples, weighted, gpu):
    loss, shape, kind = LOSSES[name]
    generator = np.random.default_rng(5)
    prediction = generator.standard_normal(shape)[:samples]
    target = {
        "f": lambda: generator.standard_normal(shape),
        "i": lambda: generator.integers(-1, shape[-1], shape[:-1]),
        "b": lambda: generator.integers(0, 2, shape),
    }[kind]()[:samples]
    if weighted:
        target = Samples((target, np.array([0.5, 0, 2, 1])[:samples]))
    total, weight, saved = loss.forward(prediction, target)
    found = loss.forward(gpu.asarray(prediction), map_arrays(gpu.asarray, target))
    # The sums may wait on the device until somebody needs them.
    assert all(type(number) is float or type(number) is gpu.ndarray for number in found[:2])
    assert read_numbers(found[:2]) == pytest.approx([total, weight], rel=1e-13)
    np.testing.assert_allclose(
        to_host(loss.backward(found[2])), loss.backward(saved), rtol=1e-12, atol=1e-14
    )


def test_rows_of_one_token_do_not_cancel(gpu):
    """Each run's sum is as exact as it is alone, whatever came before it in the batch."""
    tokens = np.arange(600) % 3
    dy = np.where(tokens == 0, 1e6, 1.0).astype(np.float32)[:, None]
    g = {"weight": gpu.zeros((3, 1), dtype="float32")}
    nn.Embedding(3, 1).backward_weight((gpu.asarray(tokens), gpu.asarray(dy)), g)
    np.testing.assert_allclose(g["weight"].get()[:, 0], [2e8, 200, 200], rtol=1e-6)


MODELS = {
    "mlp": lambda device: nn.MLP([4, 6, 3], seed=2, device=device),
    "gpt": lambda device: nn.GPT(
        vocabulary_size=11, context_length=6, width=8, heads=2, layers=1, seed=2,
        dtype="float64", device=device,
    ),
    "conv": lambda device: nn.Model(
        nn.Sequential(
            nn.Conv2D(1, 2, 3), nn.ReLU(), nn.MaxPool2D(2), nn.Flatten(), nn.Linear(8, 3)
        ),
        nn.CrossEntropy(), input_shape=(1, 6, 6), seed=2, device=device,
    ),
    "logistic": lambda device: nn.LogisticRegression(4, 3, seed=2, device=device),
}  # fmt: skip


def batch(kind):
    generator = np.random.default_rng(7)
    if kind == "gpt":
        return generator.integers(0, 11, (3, 6)), generator.integers(-1, 11, (3, 6))
    if kind == "conv":
        return generator.standard_normal((3, 1, 6, 6)), generator.integers(0, 3, 3)
    x = generator.standard_normal((3, 4))
    return x, generator.integers(0, 3, 3) if kind == "logistic" else generator.random((3, 3))


@pytest.mark.parametrize("kind", MODELS)
def test_plain_models(kind, gpu):
    host, model = MODELS[kind]("cpu"), MODELS[kind]("cuda")
    x, y = batch(kind)
    np.testing.assert_array_equal(to_host(model.get_parameters()), host.get_parameters())
    for given in ((x, y), (gpu.asarray(x), gpu.asarray(y)), (x, gpu.asarray(y))):
        assert is_device_array(model.predict(given[0]))
        np.testing.assert_allclose(
            to_host(model.predict(given[0])), host.predict(x), rtol=1e-11, atol=1e-13
        )
        loss, gradients = model.compute_loss_and_gradients(*given)
        wanted = host.compute_loss_and_gradients(x, y)
        assert loss == pytest.approx(wanted[0], rel=1e-13)
        np.testing.assert_allclose(to_host(gradients), wanted[1], rtol=1e-11, atol=1e-13)
    assert model.train(x, y, 0.1) == pytest.approx(host.train(x, y, 0.1))
    for vector in (model.get_parameters(), *model.get_parameter_chunks()):
        assert is_device_array(vector)
    np.testing.assert_allclose(
        to_host(model.get_parameters()), host.get_parameters(), rtol=1e-11, atol=1e-13
    )
    again = model.with_parameters(host.get_parameters())  # of the host
    assert is_device_array(again.get_parameters())
    again.deserialize(host.serialize())
    again.set_parameter_chunks(model.get_parameter_chunks())
    assert again.serialize() == model.serialize()
    assert to_host(model.deep_copy().get_parameters()).tobytes() == again.get_parameters().tobytes()


def test_a_plain_model_of_weighted_samples(gpu):
    x, y = batch("logistic")
    samples = Samples((y, np.array([0.5, 2, 0])))
    wanted = MODELS["logistic"]("cpu").compute_loss_and_gradients(x, samples)
    model = MODELS["logistic"]("cuda")
    for given in (samples, map_arrays(gpu.asarray, samples)):
        loss, gradients = model.compute_loss_and_gradients(x, given)
        assert loss == pytest.approx(wanted[0], rel=1e-13)
        np.testing.assert_allclose(to_host(gradients), wanted[1], rtol=1e-11, atol=1e-13)


def test_a_gpt_generates_what_it_does_on_the_host(gpu):
    tokens = [MODELS["gpt"](device).generate([1, 2], 5, seed=3) for device in ("cpu", "cuda")]
    np.testing.assert_array_equal(*tokens)


def test_arrays_are_on_the_requested_device(gpu):
    count = gpu.cuda.runtime.getDeviceCount()
    for index in range(count):
        model = nn.MLP([2, 2], device=f"cuda:{index}")
        assert model.predict(np.ones((1, 2))).data.device_id == index
        assert str(model.device) == f"cuda:{index}"
    gpu.cuda.Device(0).use()
    assert nn.MLP([2, 2], device="cuda").get_parameters().data.device_id == 0
    with pytest.raises(ValueError, match=rf"'cuda:{count}' .* 0 to {count - 1}"):
        nn.MLP([2, 2], device=f"cuda:{count}")


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:-1", "cuda1", "", None])
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match="'cpu', 'cuda' or 'cuda:<number>'"):
        nn.MLP([2, 2], device=name)


def test_without_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceUnavailableError, match=r"pip install 'mpishard\[cuda12\]'"):
        nn.MLP([2, 2], device="cuda")


def test_without_a_gpu():
    with installed(device_count=0), pytest.raises(DeviceUnavailableError, match="finds no GPU"):
        Device.parse("cuda")


def test_with_a_driver_alone():
    """CuPy can be imported and counts the GPUs, and its first kernel fails."""
    why = r"GPU {} \(Failed to find CUDA headers.*pip install 'mpishard\[cuda12\]'"
    for count, device, number in ((1, "cuda", 0), (1, "cuda:0", 0), (2, "cuda:1", 1)):
        with installed(count, has_headers=False) as cupy:
            assert cupy.cuda.runtime.getDeviceCount() == count
            with pytest.raises(DeviceUnavailableError, match=why.format(number)):
                nn.MLP([2, 2], device=device)


def test_with_a_driver_alone_and_several_gpus(monkeypatch):
    """No rank computes on another rank's GPU, not even to find out whether it can."""
    tried = []
    try_out = devices._try_out
    monkeypatch.setattr(devices, "_try_out", lambda cupy, n: (tried.append(n), try_out(cupy, n)))

    def body(backend):
        model = nn.MLP([2, 2], device="cuda")
        with pytest.raises(DeviceUnavailableError, match=f"GPU {backend.rank} .*Failed to find"):
            ms.as_distributed(model, backend, strategy="ddp")

    with installed(device_count=2, has_headers=False):
        ms.run_in_threads(2, body)
        assert sorted(tried) == [0, 1]
        with pytest.raises(DeviceUnavailableError, match=r"GPU 0 .*Failed to find"):
            nn.MLP([2, 2], device="cuda").get_parameters()


@pytest.mark.parametrize("host", [np.array(3.0), np.ones((3, 4)).T, np.empty((0, 2)), np.ones(2)])
def test_arrays_of_any_shape_are_copied_to_a_device_and_back(host, gpu):
    there = Device.parse("cuda").put(host)
    assert is_device_array(there)
    assert Device.parse("cuda").put(there) is there
    back = Device.parse("cpu").put(there)
    assert back.shape == host.shape
    np.testing.assert_array_equal(back, host)
    assert Device.parse("cpu").put(host) is host
