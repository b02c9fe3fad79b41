"""Black boxes: objects of the user's that need three members and no more."""

from __future__ import annotations

import ast
import logging
from typing import Any

import numpy as np
import pytest

import mpishard as ms
from mpishard import nn
from mpishard.adapters import FunctionModel
from mpishard.communication import run_in_threads
from mpishard.errors import MissingMemberError, PeerError
from mpishard.models import DDPModel, FSDPModel
from mpishard.optimizers import SGD, AdamW, DDPOptimizer, FSDPOptimizer
from mpishard.sharding import ShardingConfiguration
from mpishard.testing.worlds import in_worlds

X = np.random.default_rng(0).standard_normal((8, 3))
Y = X @ np.array([[1.0], [2.0], [3.0]])
SMALL = 1e-3

both = pytest.mark.parametrize(
    ("model_class", "optimizer_class"), [(DDPModel, DDPOptimizer), (FSDPModel, FSDPOptimizer)]
)


class Least:
    """The smallest black box: least squares without a loss, a name or a base class."""

    def __init__(self) -> None:
        self.theta = np.zeros(3)
        self.calls = 0

    def get_parameters(self) -> Any:
        return self.theta

    def set_parameters(self, parameters: Any) -> None:
        self.theta = parameters

    def compute_gradients(self, x: Any, y: Any) -> Any:
        self.calls += 1
        return 2 * x.T @ (x @ self.theta - y[:, 0]) / len(x)


Slotted = type(  # an object that nothing can be attached to
    "Slotted",
    (),
    {
        "__slots__": ("calls", "theta"),
        **{name: value for name, value in vars(Least).items() if callable(value)},
    },
)


class WithLoss(Least):
    """A black box with a loss, by `predict` and a loss object."""

    default_loss_function = nn.MSE()

    def predict(self, x: Any) -> Any:
        return (x @ self.theta)[:, None]

    def compute_gradients(self, x: Any, y: Any, loss_function: Any = None) -> Any:
        self.seen = loss_function
        return super().compute_gradients(x, y)


def descent(steps: int) -> Any:
    plain = Least()
    for _ in range(steps):
        plain.theta = plain.theta - SMALL * plain.compute_gradients(X, Y)
    return plain.theta


def rows(backend: Any) -> slice:
    """All but the first rank share the samples; rank 0 has none, if there is another."""
    if backend.world_size == 1:
        return slice(None)
    return slice(backend.rank - 1, None, backend.world_size - 1) if backend.rank else slice(0, 0)


@both
@pytest.mark.parametrize("box", [Least, Slotted, WithLoss])
@in_worlds(1, 2, 3)
def test_three_members_are_enough(
    backend: Any, box: Any, model_class: Any, optimizer_class: Any
) -> None:
    plain, config = box(), ShardingConfiguration(backend)
    model, optimizer = model_class(plain, config), optimizer_class(SGD(SMALL), config)
    mine = rows(backend)
    loss = [optimizer.step(model, X[mine], Y[mine]) for _ in range(4)][-1]
    expected = descent(4)
    np.testing.assert_allclose(model.get_parameters(), expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(plain.theta, expected, rtol=0, atol=1e-12)  # the user's own object
    assert plain.calls == (0 if len(X[mine]) == 0 else 4)
    if box is WithLoss:
        np.testing.assert_allclose(loss, nn.MSE()((X @ descent(3))[:, None], Y), rtol=1e-12)
        assert getattr(plain, "seen", None) is None  # its own loss is not named to it


@both
@pytest.mark.parametrize("missing", ["get_parameters", "set_parameters", "compute_gradients"])
@in_worlds(1, 2)
def test_a_missing_member_is_named_before_anything_is_sent(
    backend: Any, missing: str, model_class: Any, optimizer_class: Any
) -> None:
    members = {
        name: getattr(Least, name)
        for name in ("__init__", "get_parameters", "set_parameters", "compute_gradients")
        if name != missing
    }
    sequence = backend._sequence
    with pytest.raises(MissingMemberError, match=rf"Part has no member '{missing}'"):
        model_class(type("Part", (), members)(), ShardingConfiguration(backend))
    assert backend._sequence == sequence


@in_worlds(1, 2)
def test_a_member_is_required_when_it_is_needed(backend: Any) -> None:
    model = DDPModel(Least(), ShardingConfiguration(backend))
    with pytest.raises(MissingMemberError, match="Least has no member 'predict'"):
        model.predict(X)
    assert model.default_loss_function is None
    assert np.isnan(model.train(X, Y))  # a loss that nobody can tell


@in_worlds(2)
def test_another_loss_is_passed_to_the_black_box_or_refused(backend: Any) -> None:
    config, loss = ShardingConfiguration(backend), nn.MSE()
    plain = WithLoss()
    DDPModel(plain, config).compute_gradients(X, Y, loss)
    assert plain.seen is loss
    function = FunctionModel(lambda theta, x, y: (0.0, theta), np.ones(2))
    with pytest.raises(ValueError, match="pass no loss_function"):
        DDPModel(function, config).compute_gradients(X, Y, loss)


@pytest.mark.parametrize(
    ("vector", "message"),
    [
        (np.zeros((3, 1)), r"of shape \(3, 1\)"),
        (np.zeros(3, int), "int64"),
        (np.zeros(0), r"at least one element"),
        ([0.0, 1.0], "got list"),
    ],
)
def test_a_flat_vector_is_1d_floating_and_not_empty(vector: Any, message: str) -> None:
    def body(backend: Any) -> None:
        plain = Least()
        plain.theta = vector
        FSDPModel(plain, ShardingConfiguration(backend))

    with pytest.raises(ValueError, match=message):
        run_in_threads(1, body)


@pytest.mark.parametrize(
    ("gradient", "message"),
    [
        (np.zeros(2), r"gradient of shape \(2,\) for 3"),
        (np.zeros((3, 1)), r"\(3, 1\)"),
        ([0.0, 0.0, 0.0], "returned a list as its gradient"),
        (None, "returned a NoneType"),
    ],
)
@in_worlds(2)
def test_a_gradient_has_the_length_of_the_vector(backend: Any, gradient: Any, message: str) -> None:
    plain, config = Least(), ShardingConfiguration(backend)
    plain.compute_gradients = lambda x, y: gradient
    model = FSDPModel(plain, config)
    with pytest.raises(ValueError, match=message):
        FSDPOptimizer(SGD(), config).step(model, X, Y)
    assert model.get_parameters().tolist() == [0, 0, 0]


@both
def test_an_exception_in_one_box_ends_all_ranks(model_class: Any, optimizer_class: Any) -> None:
    ends = {}

    def body(backend: Any) -> None:
        def fun(theta: Any, x: Any, y: Any) -> Any:
            if backend.rank == 1 and theta[0] != 0:
                raise ZeroDivisionError("in the user's function")
            return 1.0, np.ones(3)

        config = ShardingConfiguration(backend)
        model = model_class(FunctionModel(fun, np.zeros(3)), config)
        optimizer = optimizer_class(AdamW(), config)
        try:
            for _ in range(3):
                optimizer.step(model, X, Y)
        except Exception as error:
            ends[backend.rank] = type(error), optimizer.steps
            raise

    with pytest.raises(ZeroDivisionError, match="in the user's function"):
        run_in_threads(3, body, timeout=5)
    assert ends == {0: (PeerError, 1), 1: (ZeroDivisionError, 1), 2: (PeerError, 1)}


@both
@in_worlds(1, 3)
def test_an_exception_in_all_boxes_can_be_caught(
    backend: Any, model_class: Any, optimizer_class: Any
) -> None:
    plain, config = Least(), ShardingConfiguration(backend)
    model, optimizer = model_class(plain, config), optimizer_class(SGD(SMALL), config)
    original = plain.compute_gradients
    for _ in range(2):
        plain.compute_gradients = None  # cannot be called
        with pytest.raises(TypeError):
            optimizer.step(model, X, Y)
        plain.compute_gradients = original
        optimizer.step(model, X, Y)
    np.testing.assert_allclose(model.get_parameters(), descent(2), rtol=0, atol=1e-12)


def test_one_warning_names_what_is_not_sharded(caplog: pytest.LogCaptureFixture) -> None:
    def wrap(model_class: Any) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.INFO, "mpishard"):
            run_in_threads(3, lambda b: model_class(Least(), ShardingConfiguration(b)))
        return [record.getMessage() for record in caplog.records]

    assert wrap(DDPModel) == []
    (message,) = wrap(FSDPModel)
    for words in ("FSDPModel", "parameters of Least stay whole", "ILayeredModel"):
        assert words in message


class Minimal:
    """A linear black box with one member of each kind, as users write them."""

    def __init__(self) -> None:
        self.theta = np.ones(3)

    def get_parameters(self) -> Any:
        return self.theta.copy()

    def set_parameters(self, theta: Any) -> None:
        self.theta = theta

    def predict(self, x: Any) -> Any:
        return x @ self.theta


class MakesItsLoss(Minimal):
    @property
    def default_loss_function(self) -> Any:
        return nn.MSE()  # another object each time

    def compute_loss_and_gradients(self, x: Any, y: Any) -> Any:
        error = self.predict(x) - y
        return np.array([(error**2).mean()]), 2 * x.T @ error / len(x)


class PlainFunctionForLoss(Minimal):
    @staticmethod
    def default_loss_function(prediction: Any, y: Any) -> Any:
        return ((prediction - y) ** 2).mean()

    def compute_gradients(self, x: Any, y: Any) -> Any:
        return 2 * x.T @ (self.predict(x) - y) / len(x)


@pytest.mark.parametrize("kind", [MakesItsLoss, PlainFunctionForLoss])
@in_worlds(1, 2)
def test_losses_as_users_write_them(backend: Any, kind: Any) -> None:
    model = ms.as_distributed(kind(), backend, "zero2")
    x = np.arange(12.0).reshape(4, 3) / 12
    mine = ms.ShardLayout(4, backend.world_size).slice(backend.rank)
    expected = ((x.sum(axis=1)) ** 2).mean()
    assert model.train(x[mine], np.zeros(4)[mine]) == pytest.approx(expected, rel=1e-12)
    optimizer = ms.as_distributed(ms.optimizers.SGD(0.1), backend, "zero2")
    result = optimizer.optimize(
        ms.OptimizationInputData(
            model=model, x_train=x, y_train=np.zeros(4), x_validation=x, y_validation=np.zeros(4),
            epochs=2, progress=False,
        )
    )  # fmt: skip
    assert result.validation_history[-1][1] < expected
    assert model.deep_copy().train(x, np.zeros(4)) > 0


@in_worlds(1)
def test_values_that_a_black_box_returns_are_checked(backend: Any) -> None:
    class Alone(MakesItsLoss):
        def compute_loss_and_gradients(self, x: Any, y: Any) -> Any:
            return 1.0

    class PerSample(MakesItsLoss):
        def compute_loss_and_gradients(self, x: Any, y: Any) -> Any:
            return self.predict(x) - y, np.ones(3)

    x, y = np.ones((2, 3)), np.ones(2)
    with pytest.raises(TypeError, match=r"must return \(loss, gradient\), got a float"):
        ms.as_distributed(Alone(), backend, "ddp").train(x, y)
    with pytest.raises(ValueError, match=r"must be one number.* shape \(2,\)"):
        ms.as_distributed(PerSample(), backend, "ddp").train(x, y)


# ----------------------------------------------------------- what it holds beside its vector


class Scaled(Least):
    """A black box that scales its inputs by a number that training does not change."""

    def __init__(self, scale: float = 0.0) -> None:
        super().__init__()
        self.scale = scale

    def serialize(self) -> bytes:
        return repr((self.scale, self.theta.tolist())).encode()

    def deserialize(self, data: bytes) -> None:
        self.scale, theta = ast.literal_eval(data.decode())
        self.theta = np.array(theta)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline"])
@in_worlds(2, 3)
def test_a_checkpoint_holds_what_a_black_box_serializes(
    backend: Any, shared_path: Any, strategy: str
) -> None:
    model = ms.as_distributed(Scaled(7.0 + backend.rank), backend, strategy)
    mine = model.batch_indices(len(X))
    for _ in range(2):
        model.train(X[mine], Y[mine])
    kept = model.get_parameters()
    model.save_model(shared_path / "own")
    plain = Scaled()
    other = ms.as_distributed(plain, backend, "ddp")
    other.load_model(shared_path / "own")
    assert plain.scale == 7.0  # rank 0's
    np.testing.assert_array_equal(plain.theta, kept)
    np.testing.assert_array_equal(other.get_parameters(), kept)
    ms.as_distributed(Least(), backend, "ddp").load_model(shared_path / "own")


def test_a_black_box_without_serialize_gets_one_warning(caplog: Any, tmp_path: Any) -> None:
    with (
        ms.InMemoryCommunicationBackend(0, 1, "unsaved") as backend,
        caplog.at_level(logging.WARNING, "mpishard"),
    ):
        model = ms.as_distributed(Least(), backend, "ddp")
        for name in "ab":
            model.save_model(tmp_path / name)
        ms.as_distributed(Scaled(), backend, "ddp").save_model(tmp_path / "c")
    (said,) = [r.getMessage() for r in caplog.records]
    assert said.startswith("checkpoints contain the parameters of Least, but none of its other")
