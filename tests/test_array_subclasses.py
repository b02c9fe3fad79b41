"""Masked arrays and other subclasses of ndarray are refused wherever arrays are given."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import mpishard as ms
from mpishard.adapters import AutogradModel, FunctionModel, TorchModel
from mpishard.data import TokenWindows, take
from mpishard.testing.worlds import in_worlds

PLAIN = np.arange(12.0).reshape(6, 2)
MASKED = np.ma.array(PLAIN, mask=PLAIN == 3)
MATRIX = PLAIN.view(np.matrix)
SUBCLASSES = {
    "masked": (MASKED, r"got a MaskedArray.*\.filled\(value\)"),
    "matrix": (MATRIX, r"got a matrix.*numpy\.asarray"),
}
FIRST = np.arange(6)


@pytest.fixture(params=SUBCLASSES)
def refused(request):
    """An array to refuse, and the error's message."""
    return SUBCLASSES[request.param]


def loss_and_gradient(theta, x, y):
    return float(((x @ theta - y[:, 0]) ** 2).mean()), 2 * x.T @ (x @ theta - y[:, 0]) / len(x)


def black_box():
    return FunctionModel(loss_and_gradient, np.ones(2), predict=lambda theta, x: x @ theta)


def dense():
    return ms.nn.MLP([2, 3, 2], seed=1)


@in_worlds(1, 2, 3)
def test_in_collectives(backend, refused):
    array, message = refused
    rank, world = backend.rank, backend.world_size
    calls = {
        "all_reduce": (array,),
        "reduce_scatter": (array,),
        "all_gather": (array,),
        "broadcast": (array,),
        "gather": (array, rank),
        "scatter": (array, rank),
        "all_to_all": ([array] * world,),
    }
    if world > 1:
        calls["send"] = (array, (rank + 1) % world)
    for name, arguments in calls.items():
        with pytest.raises(TypeError, match=message):
            getattr(backend, name)(*arguments)
        with pytest.raises(TypeError, match=message):
            getattr(backend, f"{name}_async")(*arguments)
    for name in ("all_reduce", "all_gather"):
        with pytest.raises(TypeError, match=message):
            getattr(backend, name)(PLAIN, out=array)
    assert backend.all_reduce(np.ones(3)).tolist() == [world] * 3  # the ranks are in step


@in_worlds(1, 2)
def test_a_memory_map_travels(backend, tmp_path):
    file = tmp_path / f"map-{backend.rank}"
    mapped = np.memmap(file, np.float64, "w+", shape=(6, 2))
    mapped[...] = PLAIN
    assert (backend.all_reduce(mapped) == backend.world_size * PLAIN).all()
    model = ms.as_distributed(dense(), backend)
    optimizer = ms.as_distributed(ms.optimizers.SGD(0.01), backend)
    assert optimizer.step(model, mapped, mapped) > 0


@pytest.mark.parametrize("make", [dense, black_box])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@in_worlds(1, 2)
def test_in_sharded_training(backend, refused, make, strategy):
    array, message = refused
    model = ms.as_distributed(make(), backend, strategy)
    optimizer = ms.as_distributed(ms.optimizers.SGD(0.01), backend, strategy)
    before = model.gather_full_parameters()

    def optimize(x, y, **more):
        options = {"epochs": 1, "progress": False} | more
        optimizer.optimize(ms.OptimizationInputData(model=model, x_train=x, y_train=y, **options))

    calls = [partial(model.predict, array)]
    for x, y in ((array, PLAIN), (PLAIN, array)):
        calls += [
            partial(optimizer.step, model, x, y),
            partial(model.train, x, y),
            partial(model.compute_gradients, x, y),
            partial(optimize, x, y),
            partial(optimize, PLAIN, PLAIN, x_validation=x, y_validation=y),
        ]
    for call in calls:
        with pytest.raises(TypeError, match=message):
            call()
    assert (model.gather_full_parameters() == before).all()
    assert optimizer.step(model, PLAIN, PLAIN) > 0


@pytest.mark.parametrize("make", [dense, black_box])
def test_in_one_process(refused, make):
    array, message = refused
    model, optimizer = make(), ms.optimizers.SGD(0.01)
    before = model.get_parameters()
    for x, y in ((array, PLAIN), (PLAIN, array)):
        for call in (partial(optimizer.step, model), model.train, model.compute_gradients):
            with pytest.raises(TypeError, match=message):
                call(x, y)
    assert (model.get_parameters() == before).all()


def test_parameters_and_gradients(refused):
    array, message = refused
    for given in ((array, PLAIN), (PLAIN, array)):
        with pytest.raises(TypeError, match=message):
            ms.optimizers.SGD(0.01).update_parameters(*given)
        with pytest.raises(TypeError, match=message):
            ms.optimizers.SGD(0.01).update_parameters(*([PLAIN, one] for one in given))
    with pytest.raises(TypeError, match=message):
        FunctionModel(loss_and_gradient, array)


def test_a_gradient_of_a_black_box():
    def masked(theta, x, y):
        loss, gradient = loss_and_gradient(theta, x, y)
        return loss, np.ma.array(gradient, mask=[True, False])

    def main(backend):
        model = ms.as_distributed(FunctionModel(masked, np.ones(2)), backend)
        optimizer = ms.as_distributed(ms.optimizers.SGD(0.01), backend)
        with pytest.raises(TypeError, match="got a MaskedArray"):
            optimizer.step(model, PLAIN, PLAIN)

    ms.run_in_threads(1, main)


def test_in_data_sets(refused):
    array, message = refused

    class Reader:  # as netCDF4 reads
        def __len__(self):
            return len(array)

        def __getitem__(self, indices):
            return array[indices]

    for dataset in (array, Reader()):
        with pytest.raises(TypeError, match=message):
            take(dataset, FIRST)
    if isinstance(array, np.ma.MaskedArray):
        with pytest.raises(TypeError, match=message):
            TokenWindows(array[:, 0].astype(int), 2)


def test_in_autograd_models(refused):
    pytest.importorskip("autograd")
    array, message = refused

    def loss(parameters, x, y):
        return ((x * parameters["w"] - y) ** 2).mean()

    model = AutogradModel(loss, {"w": np.ones(2)})
    with pytest.raises(TypeError, match=message):
        model.set_parameters(array[0])
    for x, y in ((array, PLAIN), (PLAIN, array)):
        with pytest.raises(TypeError, match=message):
            model.train(x, y)
    with pytest.raises(TypeError, match=message):
        AutogradModel(loss, {"w": array})


def test_in_torch_models(refused):
    torch = pytest.importorskip("torch")
    array, message = refused
    model = TorchModel(torch.nn.Linear(2, 2), torch.nn.functional.mse_loss)
    for x, y in ((array, PLAIN), (PLAIN, array)):
        with pytest.raises(TypeError, match=message):
            model.train(x, y)
