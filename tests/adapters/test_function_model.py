"""A function as a model: what it takes, and what it says to a function that is none."""

import io

import numpy as np
import pytest

import mpishard as ms
from mpishard.errors import MissingMemberError
from mpishard.testing.gradients import check_gradients


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


def test_the_family():
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


def test_what_it_refuses_changes_nothing():
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
def test_mistakes(make, error, message):
    with pytest.raises(error, match=message):
        make()


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
