"""A function as a model: its training, its files, and refusals of other functions."""

import io

import numpy as np
import pytest

import mpishard as ms
from mpishard.errors import MissingMemberError
from mpishard.testing.gradients import check_gradients
from mpishard.testing.worlds import in_worlds


def fun(theta, x, y):
    error = x @ theta - y
    return float(np.mean(error**2)), 2 * x.T @ error / len(x)


def data(samples=9):
    generator = np.random.default_rng(0)
    return generator.standard_normal((samples, 3)), generator.standard_normal(samples)


def model(**options) -> ms.FunctionModel:
    return ms.FunctionModel(fun, np.array([1.0, -1.0, 0.5]), **options)


def test_parameters_are_copies():
    first = np.zeros(3)
    one = ms.FunctionModel(fun, first)
    first[0] = 7
    one.get_parameters()[1] = 7
    assert one.get_parameters().tolist() == [0, 0, 0]
    given = np.ones(3)
    one.set_parameters(given)
    given[0] = 7
    assert one.get_parameters().tolist() == [1, 1, 1]


def test_gradient_and_plain_training():
    check_gradients(model(), *data())
    one = model()
    losses = [one.train(*data(), learning_rate=0.1) for _ in range(50)]
    assert losses[-1] < losses[0]


def test_predict_needs_a_function():
    with pytest.raises(MissingMemberError, match="pass predict="):
        model().predict(data()[0])
    one = model(predict=lambda theta, x: x @ theta)
    assert (one.predict(data()[0]) == data()[0] @ one.get_parameters()).all()


def test_files_go_round_and_fit_sharded_models(tmp_path):
    def save(backend):
        sharded = ms.as_distributed(model(), backend)
        sharded.set_parameters(np.array([3.0, 4.0, 5.0]))
        sharded.save_model(tmp_path / "saved")
        return sharded.serialize()

    data_of_ranks = ms.run_in_threads(2, save)
    for take in (
        lambda m: m.load_model(tmp_path / "saved"),
        lambda m: m.deserialize(data_of_ranks[1]),
    ):
        one = model()
        take(one)
        assert one.get_parameters().tolist() == [3, 4, 5]


def test_a_function_model_has_the_interfaces():
    one = model(predict=lambda theta, x: x @ theta)
    assert isinstance(one, ms.contracts.IFullModel)
    metadata = one.get_model_metadata()
    assert (metadata.name, metadata.model_type) == ("FunctionModel", "FunctionModel")
    assert metadata.description == "fun(theta, x, y) of 3 parameters"
    assert metadata.complexity == one.parameter_count == 3
    assert metadata.properties == {"ParameterCount": 3, "DType": "float64"}
    assert one.default_loss_function is None
    assert one.supports_parameter_initialization
    assert (one.get_input_shape(), one.get_output_shape()) == ([], [])
    with one as same:
        assert same is one


def test_a_clone_shares_and_a_deep_copy_does_not():
    one = model()
    shared, own, new = one.clone(), one.deep_copy(), one.with_parameters(np.full(3, 9.0))
    one.set_parameters(np.zeros(3))
    one.apply_gradients(np.ones(3), 0.5)
    assert shared.get_parameters().tolist() == [-0.5, -0.5, -0.5]
    assert own.get_parameters().tolist() == [1, -1, 0.5]
    assert new.get_parameters().tolist() == [9, 9, 9]
    own.set_parameter_chunks([np.array([1.0]), np.array([2.0, 3.0])])
    assert next(own.get_parameter_chunks()).tolist() == [1, 2, 3]


def test_streams_go_round():
    stream = io.BytesIO()
    model().with_parameters(np.full(3, 9.0)).save_state(stream)
    stream.seek(0)
    one = model()
    one.load_state(stream)
    assert one.get_parameters().tolist() == [9, 9, 9]


def test_refused_parameters_change_nothing():
    one = model()
    for take in (
        one.set_parameters,
        one.with_parameters,
        lambda v: one.apply_gradients(v, 0.1),
    ):
        with pytest.raises(ValueError, match="FunctionModel has 3 parameters"):
            take(np.ones(1))
        with pytest.raises(TypeError, match="NumPy or CuPy array"):
            take(None)
    with pytest.raises(ValueError, match="pass no loss_function"):
        one.compute_gradients(*data(), ms.nn.MSE())
    with pytest.raises(FileNotFoundError):
        one.load_model("nowhere")
    assert one.get_parameters().tolist() == [1, -1, 0.5]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ms.FunctionModel(None, np.ones(2)), TypeError, "fun\\(theta, x, y\\)"),
        (lambda: ms.FunctionModel(fun, np.ones(2), predict=3), TypeError, "predict"),
        (lambda: ms.FunctionModel(fun, np.ones((2, 2))), ValueError, r"shape \(2, 2\)"),
        (lambda: ms.FunctionModel(fun, np.ones(0)), ValueError, "non-empty"),
        (lambda: ms.FunctionModel(fun, [1, 2]), ValueError, "int64"),
        (lambda: ms.FunctionModel(fun, np.ones(2, ">f8")), ValueError, r"got float64 \(>f8\)"),
        (lambda: ms.FunctionModel(fun, np.ones(2, "g")), ValueError, r"use .astype\(float\)"),
        (lambda: model().set_parameters(np.ones(4)), ValueError, "has 3 parameters"),
        (
            lambda: ms.FunctionModel(lambda t, x, y: (0.0, t[:1]), np.ones(2)).train(*data()),
            ValueError,
            r"gradient of shape \(1,\) for parameters of shape \(2,\)",
        ),
    ],
)
def test_wrong_functions_and_parameters_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def exporter(library):
    """A function that makes an array of JAX, or a tensor of PyTorch that requires a gradient."""
    module = pytest.importorskip(library)
    if library == "jax":
        return module.numpy.asarray
    return lambda value: module.tensor(value, requires_grad=True)


def of_float32(theta, x, y):
    """Float32, because JAX has no other dtype by default."""
    loss, gradient = fun(theta, x, y)
    return np.float32(loss), gradient.astype(np.float32)


class Box:
    """A black box whose parameters and gradients are arrays of a library."""

    def __init__(self, made):
        self.made, self.theta = made, made(np.zeros(3, np.float32))

    def get_parameters(self):
        return self.theta

    def set_parameters(self, parameters):
        self.theta = self.made(parameters)

    def compute_gradients(self, x, y):
        theta = self.theta.detach() if hasattr(self.theta, "detach") else self.theta
        return self.made(of_float32(np.asarray(theta), x, y)[1])


@pytest.mark.parametrize("library", ["jax", "torch"])
@in_worlds(1, 2)
def test_loss_gradient_and_first_parameters_may_be_of_another_library(backend, library):
    made = exporter(library)

    def theirs(theta, x, y):
        loss, gradient = of_float32(theta, x, y)
        return made(loss), made(gradient)

    x, y = data(10)
    mine = ms.ShardLayout(10, backend.world_size).slice(backend.rank)

    def trained(given):
        sharded = ms.as_distributed(given, backend, "zero2")
        optimizer = ms.as_distributed(ms.optimizers.SGD(0.1), backend, "zero2")
        for _ in range(3):
            optimizer.step(sharded, x[mine], y[mine])
        return sharded.get_parameters().tobytes()

    start = np.zeros(3, np.float32)
    expected = ms.FunctionModel(of_float32, start)
    found = ms.FunctionModel(theirs, made(start))
    assert found.train(x, y) == expected.train(x, y)
    assert found.get_parameters().tobytes() == expected.get_parameters().tobytes()
    assert type(found.compute_gradients(x, y)) is np.ndarray
    bits = trained(expected)
    assert trained(found) == bits
    assert trained(Box(np.asarray)) == trained(Box(made))
    best = ms.minimize(of_float32, start, (x, y), backend=backend)
    assert ms.minimize(theirs, made(start), (x, y), backend=backend).x.tobytes() == best.x.tobytes()


@pytest.mark.parametrize(
    ("result", "error", "match"),
    [
        ((0.0, [0.0, 0.0]), ValueError, "the function returned a list as its gradient"),
        ((0.0, None), ValueError, "the function returned a NoneType as its gradient"),
        ((0.0, np.zeros(2, complex)), TypeError, "gradient of complex128; it must be real"),
        (
            (None, np.zeros(2)),
            TypeError,
            "the loss of FunctionModel must be one real number, .*None",
        ),
        ((1j, np.zeros(2)), TypeError, "the loss of FunctionModel must be one real number, .*1j"),
    ],
)
def test_a_result_that_is_no_loss_and_gradient_is_named(result, error, match):
    def main(backend):
        model = ms.as_distributed(ms.FunctionModel(lambda *_: result, np.zeros(2)), backend, "ddp")
        model.train(np.zeros((4, 2)), np.zeros(4))

    with pytest.raises(error, match=match):
        ms.run_in_threads(2, main)
