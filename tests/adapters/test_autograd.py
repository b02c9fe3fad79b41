"""Losses written in NumPy: gradients, and sharded training that equals that of one process."""

from __future__ import annotations

import functools
import sys
import time
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest

import mpishard as ms
from mpishard.adapters import AutogradModel
from mpishard.errors import (
    MissingMemberError,
    NonFiniteLossError,
    ShardingError,
    StructureOnlyError,
)
from mpishard.testing.gradients import check_gradients
from mpishard.testing.worlds import in_worlds

autograd = pytest.importorskip(
    "autograd", reason="autograd is not installed here; pip install 'mpishard[autograd]'"
)
anp = pytest.importorskip("autograd.numpy")

RATE = 1e-3
STEPS = 4

by_path = pytest.mark.parametrize("path", ["arena", "messages", "two nodes"], indirect=True)
by_strategy = pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])


class Scale(NamedTuple):
    gain: Any
    offset: Any


def network(parameters: Any, x: Any) -> Any:
    for layer in parameters["layers"]:
        x = anp.tanh(x @ layer["weight"] + layer["bias"])
    scale = parameters["scale"]
    return scale.gain * x + scale.offset


def loss(parameters: Any, x: Any, y: Any) -> Any:
    return anp.mean((network(parameters, x) - y) ** 2)


def tree(seed: int, dtype: Any = np.float64) -> Any:
    def normal(*shape: int) -> Any:
        return (0.5 * generator.standard_normal(shape)).astype(dtype)

    generator = np.random.default_rng(seed)
    sizes = [5, 7, 6, 2]
    layers = [{"weight": normal(a, b), "bias": normal(b)} for a, b in pairwise(sizes)]
    return {"layers": layers, "scale": Scale(1.25, normal(2)), "never used": normal(3, 1)}


def model(seed: int = 0, **options: Any) -> AutogradModel:
    return AutogradModel(loss, tree(seed), predict=network, **options)


def batch(step: int) -> tuple[Any, Any]:
    generator = np.random.default_rng(step)
    x = generator.standard_normal((7 + 2 * step, 5))
    return x, np.sin(x[:, :2])


def part(backend: Any, step: int) -> tuple[Any, Any]:
    """A rank's samples: uneven, and none for one rank, another one at each step."""
    x, y = batch(step)
    size = backend.world_size
    shares = np.random.default_rng([step, size]).dirichlet(np.ones(size))
    if size > 1:
        shares[step % size] = 0
    ends = np.round(np.cumsum([0, *shares / shares.sum()]) * len(x)).astype(int)
    mine = slice(ends[backend.rank], ends[backend.rank + 1])
    return x[mine], y[mine]


@functools.cache
def train_plainly() -> tuple[list[float], list[Any]]:
    """Losses before each step and parameters after it, by autograd's own `value_and_grad`."""
    plain = model()
    theta = plain.get_parameters()
    m, v = np.zeros_like(theta), np.zeros_like(theta)
    losses, parameters = [], []
    of_vector = autograd.value_and_grad(lambda t, x, y: loss(unflatten(t), x, y))
    for step in range(1, STEPS + 1):
        value, g = of_vector(theta, *batch(step - 1))
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        change = (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
        decay = np.where(np.isin(np.arange(theta.size), BIASES), 0.0, 0.1)
        theta = theta - RATE * change - RATE * decay * theta
        losses.append(value)
        parameters.append(theta)
    return losses, parameters


# Where the biases lie: behind their layers' weights, in the order of the keys.
BIASES = [*range(35, 42), *range(84, 90), *range(102, 104)]


def unflatten(t: Any) -> Any:
    """The tree by hand."""
    layers, start = [], 0
    for a, b in ((5, 7), (7, 6), (6, 2)):
        weight = anp.reshape(t[start : start + a * b], (a, b))
        start += a * b
        layers.append({"weight": weight, "bias": t[start : start + b]})
        start += b
    return {"layers": layers, "scale": Scale(t[start], t[start + 1 : start + 3])}


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12)


def wrap(
    backend: Any, strategy: str, plain: Any = None, rule: Any = None, unit_size: int = 1
) -> tuple[Any, Any]:
    """Model and optimizer; each rank's plain model has values of its own: rank 0's count."""
    config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=unit_size)
    plain = model(backend.rank) if plain is None else plain
    rule = ms.optimizers.SGD(RATE) if rule is None else rule
    return ms.as_distributed(plain, config, strategy), ms.as_distributed(rule, config, strategy)


def adamw() -> Any:
    """Without decay of what is called a bias."""
    return ms.optimizers.AdamW(
        RATE, weight_decay=0.1, parameter_options={"layers.*.bias": {"weight_decay": 0}}
    )


# ------------------------------------------------------------------------------------ the tree


def test_names_shapes_and_order_follow_the_tree() -> None:
    plain = model()
    assert [(e.name, e.shape, e.start) for e in plain.parameter_entries] == [
        ("layers.0.weight", (5, 7), 0),
        ("layers.0.bias", (7,), 35),
        ("layers.1.weight", (7, 6), 42),
        ("layers.1.bias", (6,), 84),
        ("layers.2.weight", (6, 2), 90),
        ("layers.2.bias", (2,), 102),
        ("scale.gain", (), 104),
        ("scale.offset", (2,), 105),
        ("never used", (3, 1), 107),
    ]
    found, given = plain.parameters_tree(), tree(0)
    assert np.array_equal(found["layers"][1]["weight"], given["layers"][1]["weight"])
    assert isinstance(found["scale"], Scale)
    assert type(found["scale"].gain) is float
    assert found["scale"].gain == 1.25
    found["layers"][0]["weight"][...] = 7  # a copy
    assert plain.get_parameters()[0] != 7
    doubled = plain.parameters_tree(2 * plain.get_parameters())
    assert doubled["scale"].gain == 2.5


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (np.ones((2, 3)), ["parameters"]),
        ([np.ones(2), (np.ones(1), 0.5)], ["0", "1.0", "1.1"]),
        ({3: np.float32([1])}, ["3"]),
        (2.5, ["parameters"]),
    ],
)
def test_trees_of_all_kinds_go_round(given: Any, names: list[str]) -> None:
    plain = AutogradModel(loss, given)
    assert [entry.name for entry in plain.parameter_entries] == names
    assert repr(plain.parameters_tree()) == repr(given)


def test_dtype_is_that_of_the_arrays() -> None:
    plain = AutogradModel(loss, tree(0, np.float32), predict=network)
    value, gradient = plain.compute_loss_and_gradients(*batch(0))
    assert plain.dtype == gradient.dtype == np.float32
    np.testing.assert_allclose(gradient, model().compute_gradients(*batch(0)), atol=1e-5)
    assert isinstance(value, float)
    assert AutogradModel(loss, [0.5]).dtype == np.float64


# ----------------------------------------------------------------------------------- gradients


def test_gradients_against_differences() -> None:
    errors = check_gradients(model(), *batch(1), samples=None)
    assert max(errors.values()) < 1e-8
    assert {*errors} == {entry.name for entry in model().parameter_entries}
    tree_of_gradient = model().parameters_tree(model().compute_gradients(*batch(1)))
    assert not tree_of_gradient["never used"].any()
    assert tree_of_gradient["scale"].gain != 0


def test_arrays_may_be_many_and_used_in_any_way() -> None:
    """As autograd's own gradient; a loss may use one array twice, by parts, or not at all."""

    def odd(p: Any, x: Any, y: Any) -> Any:
        first, second = p[0][::2], anp.concatenate([p[0], p[1]])
        return (anp.sum(first**3) + anp.sum(second[anp.array([0, 0, 5])] * p[0][:3])) * p[2] + sum(
            anp.sum(a * a) for a in p[4:]
        )

    leaves = [np.arange(1.0, 5), np.ones(2), 0.5, np.ones(3), *np.ones((200, 2))]
    plain = AutogradModel(odd, leaves)
    expected = autograd.grad(lambda p: odd(p, None, None))(leaves)
    close(
        plain.compute_gradients(np.ones(3), np.ones(3)),
        np.concatenate([np.ravel(g) for g in expected]),
    )


def curvature(parameters: Any, x: Any, y: Any) -> Any:
    """A loss that differentiates inside: the network's own derivative by its input."""
    inner = autograd.elementwise_grad(lambda z: anp.tanh(z * parameters["a"]) ** 3)
    return anp.mean((inner(x) - y) ** 2)


def test_losses_may_differentiate_inside() -> None:
    x = np.linspace(-1, 1, 9)
    check_gradients(AutogradModel(curvature, {"a": 0.7}), x, np.sin(x))


def test_threads_take_turns_with_the_one_trace() -> None:
    inside: list[int] = []
    together: list[int] = []
    x = np.linspace(-1, 1, 9)

    def slow(parameters: Any, x: Any, y: Any) -> Any:
        inside.append(1)
        time.sleep(0.005)
        together.append(len(inside))
        value = curvature(parameters, x, y)
        inside.pop()
        return value

    def train(backend: Any) -> None:
        sharded, optimizer = wrap(backend, "ddp", AutogradModel(slow, {"a": 0.7}))
        for _ in range(3):
            optimizer.step(sharded, x, np.sin(x))

    ms.run_in_threads(4, train)
    assert together == 12 * [1]


# ------------------------------------------------------------------------------------- sharded


@by_strategy
@by_path
@in_worlds(1, 2, 3, 4)
def test_equals_training_in_one_process(backend: Any, strategy: str, path: str) -> None:
    losses, parameters = train_plainly()
    for unit_size in (1, 60):  # twice, which finds buffers that are stale
        sharded, optimizer = wrap(backend, strategy, rule=adamw(), unit_size=unit_size)
        for step in range(STEPS):
            close(optimizer.step(sharded, *part(backend, step)), losses[step])
            close(sharded.gather_full_parameters(), parameters[step])


@pytest.mark.parametrize("defer", [False, True])
@by_strategy
@in_worlds(1, 3)
def test_accumulated_batches_are_one(backend: Any, strategy: str, defer: bool) -> None:
    sharded, optimizer = wrap(backend, strategy, rule=adamw())
    x, y = part(backend, 0)
    with sharded.accumulate(defer=defer):
        optimizer.step(sharded, x[:1], y[:1])
        optimizer.step(sharded, x[1:3], y[1:3])
    optimizer.step(sharded, x[3:], y[3:])
    close(sharded.gather_full_parameters(), train_plainly()[1][0])


@by_strategy
@pytest.mark.parametrize("path", ["arena"], indirect=True)
@in_worlds(1, 2)
def test_parameters_are_views_of_the_store(backend: Any, strategy: str, path: str) -> None:
    plain = model(backend.rank)
    seen = []

    def looking(parameters: Any, x: Any) -> Any:
        seen.append(parameters["layers"][0]["weight"])
        return network(parameters, x)

    plain._predict = looking
    sharded, optimizer = wrap(backend, strategy, plain)
    for step in range(2):
        optimizer.step(sharded, *part(backend, step))
        sharded.predict(np.ones((2, 5)))
    assert seen[0].ctypes.data == seen[1].ctypes.data
    vector = sharded.engine.parameters._vector
    assert all(np.may_share_memory(weight, vector) for weight in seen)
    close(seen[1].ravel(), sharded.gather_full_parameters()[:35])
    with pytest.raises(ValueError, match="read-only"):
        seen[1][0] = 0
    with pytest.raises(StructureOnlyError, match="gather_full_parameters"):
        plain.get_parameters()
    held = backend.all_gather(np.array([sharded.memory.as_dict()["parameters"]]))
    copies = backend.world_size if strategy == "ddp" else 1
    assert held.sum() == copies * 8 * plain.parameter_count
    full = sharded.gather_full_parameters()
    assert sharded.release() is plain
    close(plain.get_parameters(), full)
    plain.train(*batch(0))


@in_worlds(2)
def test_loops_evaluates_and_resumes(backend: Any, shared_path: Any) -> None:
    x, y = batch(10)

    def run(folder: str, steps: int, resume: str | None = None, **options: Any) -> Any:
        plain = AutogradModel(loss, tree(backend.rank))  # no predict is needed to validate
        sharded, optimizer = wrap(backend, "fsdp", plain, adamw())
        data = ms.OptimizationInputData(
            model=sharded,
            x_train=x,
            y_train=y,
            x_validation=x,
            y_validation=y,
            batch_size=8,
            epochs=9,
            max_steps=steps,
            validate_every=2,
            checkpoint=shared_path / folder,
            checkpoint_every=2,
            resume=None if resume is None else shared_path / resume,
        )
        return sharded, optimizer.optimize(data)

    whole, result = run("whole", 6)
    full = whole.gather_full_parameters()
    assert np.isclose(
        result.validation_history[-1][1], loss(model().parameters_tree(full), x, y), rtol=1e-12
    )
    assert result.validation_history[-1][1] < result.validation_history[0][1]
    run("half", 4)
    resumed, _ = run("rest", 6, resume="half")
    assert np.array_equal(resumed.gather_full_parameters(), full)
    saved = ms.checkpoint.load_arrays(shared_path / "whole")
    assert np.array_equal(saved["layers.1.bias"], full[84:90])


@in_worlds(1, 2)
def test_copies_share_nothing(backend: Any) -> None:
    sharded, optimizer = wrap(backend, "fsdp")
    before = sharded.gather_full_parameters()
    copy = sharded.deep_copy()
    optimizer.step(sharded, *batch(0))
    assert np.array_equal(copy.gather_full_parameters(), before)
    with sharded.unsharded() as plain:
        plain.train(*batch(0))
    optimizer.step(sharded, *batch(0))
    twin = model()
    other = twin.deep_copy()
    twin.train(*batch(0))
    close(other.get_parameters(), model().get_parameters())


@in_worlds(2)
def test_another_loss_needs_a_prediction(backend: Any) -> None:
    sharded, _ = wrap(backend, "fsdp")
    x, y = batch(0)
    gradient = sharded.compute_gradients(x, y)
    close(gradient, sharded.compute_gradients(x, y, ms.nn.MSE()))
    assert gradient.any()
    bare, _ = wrap(backend, "fsdp", AutogradModel(loss, tree(0)))
    with pytest.raises(MissingMemberError, match="pass predict="):
        bare.compute_gradients(x, y, ms.nn.MSE())
    with pytest.raises(MissingMemberError, match="pass predict="):
        bare.predict(x)


@in_worlds(1, 2)
def test_a_loss_may_need_no_targets(backend: Any) -> None:
    def spread(parameters: Any, x: Any, y: Any) -> Any:
        assert y is None
        return anp.mean((x - parameters) ** 2)

    x = batch(0)[0]
    sharded, optimizer = wrap(backend, "fsdp", AutogradModel(spread, x[0].copy()))
    optimizer.optimize(
        ms.OptimizationInputData(
            model=sharded, x_train=x, x_validation=x, batch_size=4, epochs=2, progress=False
        )
    )
    found, gradient = sharded.loss_and_gradients(x, None)
    theta = sharded.gather_full_parameters()
    close(found, np.mean((x - theta) ** 2))
    close(gradient, 2 * (theta - x.mean(axis=0)) / theta.size)
    with pytest.raises(TypeError, match="targets must be an array, got NoneType"):
        sharded.compute_gradients(x, None, ms.nn.MSE())


# ------------------------------------------------------------------------------------- mistakes


@in_worlds(1, 2)
def test_a_loss_that_is_not_finite_stops_all_ranks(backend: Any) -> None:
    sharded, optimizer = wrap(
        backend,
        "fsdp",
        AutogradModel(lambda p, x, y: anp.sum(p[0] * x) + (np.nan if x[0] > 0 else 0.0), [0.5]),
    )
    before = sharded.gather_full_parameters()
    last = backend.world_size - 1
    with pytest.raises(NonFiniteLossError, match=rf"the loss of ranks \[{last}\] is not finite"):
        optimizer.step(sharded, np.array([1.0 if backend.rank == last else -1.0]), np.zeros(1))
    assert np.array_equal(sharded.gather_full_parameters(), before)


REFUSED_TREES = {
    "integers": ({"a": np.ones(2), "b": [np.arange(3)]}, TypeError,
                 r"'b.0' must be float32 or float64, got int64; use .astype\(float\)"),
    "an int": ([1], TypeError, r"'0' must be a NumPy array or a float, got int; write 1.0"),
    "a string": ({"name": "x"}, TypeError, "'name' must be a NumPy array or a float, got str"),
    "half": (np.ones(2, np.float16), TypeError, "'parameters' must be float32 or float64, got"),
    "two dtypes": ({"a": np.ones(2), "b": np.ones(1, np.float32), "c": 1.0}, ValueError,
                   "one dtype: a is float64, b is float32"),
    "empty": ({"a": np.ones((0, 2))}, ValueError, r"'a' of shape \(0, 2\) has no elements"),
    "nothing": ({"a": [], "b": {}}, ValueError, "there is no array in the parameters"),
    "one name": ({"a.b": 1.0, "a": {"b": 2.0}}, ValueError, "two parameters have the name 'a.b'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED_TREES)
def test_refuses_trees(case: str) -> None:
    given, error, message = REFUSED_TREES[case]
    with pytest.raises(error, match=message):
        AutogradModel(loss, given)


def assigns(p: Any, x: Any, y: Any) -> Any:
    errors = np.zeros(len(x))
    for i in range(len(x)):
        errors[i] = p["a"][0] * x[i] - y[i]
    return anp.mean(errors**2)


def assigns_in_place(p: Any, x: Any, y: Any) -> Any:
    p["a"][0] = 1.0
    return anp.sum(p["a"])


@autograd.extend.primitive
def twice(a: Any) -> Any:
    return 2 * a


autograd.extend.defvjp(twice, lambda ans, a: lambda g: np.ones(5))


@autograd.extend.primitive
def unknown(a: Any) -> Any:
    return 2 * a


REFUSED_LOSSES = {
    "a vector": (lambda p, x, y: p["a"] * 2, ValueError,
                 r"one number, the mean over the samples; got an array of shape \(2,\)"),
    "a tuple": (lambda p, x, y: (anp.sum(p["a"]), 1), TypeError, "no parameter in the loss's val"),
    "no parameter": (lambda p, x, y: np.mean(x), TypeError, "no parameter in the loss's value"),
    "float": (lambda p, x, y: float(p["a"][0]) * p["a"][0], TypeError, "cannot differentiate the"),
    "assigns": (assigns, TypeError, r"cannot differentiate.*assign to no element.*np.where"),
    "in place": (assigns_in_place, TypeError, "support item assignment. Inside it, compute with"),
    "no vjp": (lambda p, x, y: anp.sum(unknown(p["a"])), TypeError, "VJP of unknown"),
    "shape": (lambda p, x, y: anp.sum(twice(p["a"])), ValueError,
              r"parameter 'a' of shape \(2,\) has the shape \(5,\)\..* defvjp must give"),
    "own": (lambda p, x, y: p["b"], KeyError, "'b'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED_LOSSES)
def test_refuses_losses(case: str) -> None:
    function, error, message = REFUSED_LOSSES[case]
    plain = AutogradModel(function, {"a": np.ones(2)})
    for _ in range(2):
        with pytest.raises(error, match=message):
            plain.train(np.ones(3), np.ones(3))
    good = AutogradModel(lambda p, x, y: anp.sum(p["a"] ** 2), {"a": np.ones(2)})
    assert good.compute_gradients(np.ones(3), np.ones(3)).tolist() == [2, 2]


def test_refuses_other_arguments(monkeypatch: Any) -> None:
    with pytest.raises(TypeError, match=r"loss\(parameters, x, y\), got float"):
        AutogradModel(0.5, [1.0])
    with pytest.raises(TypeError, match=r"predict\(parameters, x\), got str"):
        AutogradModel(loss, [1.0], predict="yes")
    with pytest.raises(ValueError, match=r"110 parameters; got a vector of shape \(3,\)"):
        model().set_parameters(np.zeros(3))
    with pytest.raises(TypeError, match="samples with a length, got float"):
        model().train(1.0, 1.0)
    monkeypatch.setitem(sys.modules, "autograd", None)
    with pytest.raises(ImportError, match=r"pip install 'mpishard\[autograd\]'"):
        AutogradModel(loss, [1.0])


def test_one_object_belongs_to_one_rank() -> None:
    plain = model()
    with pytest.raises(ShardingError, match="AutogradModel object is wrapped already"):
        ms.run_in_threads(2, lambda backend: wrap(backend, "fsdp", plain))
