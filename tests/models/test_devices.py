"""Sharded models on a GPU, or on its stand-in: devices of all arrays, and their bytes."""

import logging
import threading

import numpy as np
import pytest

from mpishard import nn
from mpishard.base.arrays import is_device_array, to_host
from mpishard.base.devices import Device
from mpishard.base.layout import ShardLayout
from mpishard.communication import InMemoryCommunicationBackend, run_in_threads
from mpishard.models.engine.evaluation import measured
from mpishard.models.stores.offload import UpdateStage
from mpishard.models.stores.store_layout import StoreLayout
from mpishard.observe.ledger import MemoryCategory, MemoryLedger
from mpishard.optimizers import AdamW
from mpishard.sharding import ShardingConfiguration
from mpishard.testing.worlds import in_worlds
from mpishard.training import OptimizationInputData

ALL = ("optimizer", "gradients", "parameters")


def trained(backend, problems, strategy, offload=(), kind="mlp", steps=2):
    model, optimizer = problems.build(
        backend, kind, strategy, "adamw", 1, device="cuda", offload=offload
    )
    for step in range(steps):
        optimizer.step(model, *problems.local_batch(backend, kind, step))
    return model, optimizer


@in_worlds(3)
def test_each_rank_computes_on_its_own_gpu(backend, problems, gpu):
    model, _ = trained(backend, problems, "fsdp")
    count = gpu.cuda.runtime.getDeviceCount()
    assert gpu.cuda.runtime.getDevice() == backend.local_rank % count
    x, _ = problems.local_batch(backend, "mlp", 0)
    for array in (
        model.predict(x),
        model.predict(gpu.asarray(x)),
        model.gather_full_parameters(),
        model.local_parameter_shard,
        model.compute_gradients(*problems.local_batch(backend, "mlp", 1)),
    ):
        assert array.data.device_id == backend.local_rank % count


def test_another_thread_of_a_rank_computes_on_its_gpu_too(problems, gpu):
    def body(backend):
        model, _ = trained(backend, problems, "ddp")
        x, y = problems.batch("mlp", 3)
        wanted = to_host(model.predict(x))
        gpu.cuda.get_current_stream().synchronize()
        found = []

        def elsewhere():
            found.append(to_host(model.predict(x)))
            found.append(measured(model.engine, x, y)[1:])
            found.append(to_host(model.compute_gradients(x, y)))
            found.append(to_host(model.gather_full_parameters()))
            gpu.cuda.get_current_stream().synchronize()

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert len(found) == 4
        np.testing.assert_array_equal(found[0], wanted)

    run_in_threads(2, body)


@pytest.mark.parametrize(
    ("strategy", "offload"),
    [
        *((strategy, ALL) for strategy in ("ddp", "zero1", "zero2", "fsdp")),
        ("fsdp", ()),
        *((strategy, ("optimizer",)) for strategy in ("ddp", "zero1")),
        *((strategy, ("gradients",)) for strategy in ("zero1", "zero2")),
        *((strategy, ("parameters",)) for strategy in ("ddp", "fsdp")),
    ],
)
def test_each_offload_flag_moves_its_bytes_to_the_host(
    problems, strategy, offload, gpu, messages_only
):
    def body(backend):
        model, optimizer = trained(backend, problems, strategy, offload)
        held = model.memory.held
        mine = 8 * sum(
            ShardLayout(unit.length, backend.world_size).size(backend.rank) for unit in model.units
        )
        whole = 8 * model.parameter_count
        owned = {
            "parameters": mine if strategy == "fsdp" else whole,
            "gradients": mine if strategy in ("zero2", "fsdp") else whole,
            "optimizer_state": 2 * (whole if strategy == "ddp" else mine),
        }
        for category, nbytes in owned.items():
            is_on_host = category.removesuffix("_state") in offload
            assert held(category, "host") == (nbytes if is_on_host else 0), category
            assert held(category, "device") == (0 if is_on_host else nbytes), category
            assert held(category) == nbytes
        for vector in optimizer.state.values():
            assert is_device_array(vector) == ("optimizer" not in offload)
        longest = 8 * max(unit.length for unit in model.units)
        if "parameters" in offload:  # the kept unit, and one at a time
            assert held("gathered", "device") <= 2 * longest
        if "gradients" in offload:
            assert held("full_gradients", "device") == longest

    run_in_threads(2, body)


def test_peaks_are_counted_for_host_and_device(problems, gpu, messages_only):
    def body(backend):
        model, _ = trained(backend, problems, "fsdp", ("parameters",))
        peak = model.memory.peak
        assert peak("gathered", "device") > 0
        assert peak("gathered", "host") > 0
        assert peak("gathered") >= max(peak("gathered", "device"), peak("gathered", "host"))

    run_in_threads(2, body)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("offload", [(), ALL])
@in_worlds(2)
def test_surface(backend, problems, strategy, offload, gpu, shared_path):
    """Checkpoints, bytes, vectors and copies go between hosts and GPUs."""
    model, _ = trained(backend, problems, strategy, offload)
    full = to_host(model.gather_full_parameters())
    model.save_model(shared_path / "model")
    host, _ = problems.build(backend, "mlp", strategy)
    host.load_model(shared_path / "model")
    np.testing.assert_array_equal(host.gather_full_parameters(), full)
    host.set_parameters(np.zeros_like(full))
    host.deserialize(model.serialize())
    np.testing.assert_array_equal(host.gather_full_parameters(), full)
    assert model.serialize() == host.serialize()
    for given in (2 * full, gpu.asarray(3 * full)):
        model.set_parameters(given)
        np.testing.assert_array_equal(to_host(model.gather_full_parameters()), to_host(given))
    model.apply_gradients(full, 1.0)
    np.testing.assert_allclose(
        to_host(model.gather_full_parameters()), 2 * full, rtol=0, atol=1e-12
    )
    copied = model.deep_copy()
    model.load_model(shared_path / "model")
    np.testing.assert_array_equal(to_host(model.get_parameters()), full)
    np.testing.assert_allclose(
        to_host(copied.gather_full_parameters()), 2 * full, rtol=0, atol=1e-12
    )
    x, y = problems.batch("mlp", 0)
    with model.unsharded() as plain:
        np.testing.assert_allclose(to_host(plain.predict(x)), host.predict(x), rtol=0, atol=1e-12)
    with model.unsharded(root=1) as plain:
        assert (plain is None) == (backend.rank == 0)
    assert measured(model.engine, x, y)[1:] == pytest.approx(measured(host.engine, x, y)[1:])
    assert model.train(x, y) == pytest.approx(host.train(x, y))
    np.testing.assert_allclose(
        to_host(model.gather_full_parameters()), host.gather_full_parameters(), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("offload", [(), ALL])
@in_worlds(2)
def test_rounds_compression_and_drifting(backend, problems, offload, gpu):
    """Rounds, compression and drifting replicas give the same results on a GPU."""
    found = {}
    for device in ("cpu", "cuda"):
        model, optimizer = problems.build(
            backend, "mlp", "fsdp", "adamw", device=device, offload=offload
        )
        for defer in (False, True):
            with model.accumulate(defer=defer):
                optimizer.step(model, *problems.local_batch(backend, "mlp", 0))
            optimizer.step(model, *problems.local_batch(backend, "mlp", 1))
        model.sharding_configuration.enable_gradient_compression = True
        optimizer.step(model, *problems.local_batch(backend, "mlp", 2))
        replica, _ = problems.build(backend, "mlp", "ddp", device=device, offload=offload)
        replica.sharding_configuration.auto_sync_gradients = False
        replica.train(*(array[:3] for array in problems.batch("mlp", backend.rank)))
        replica.synchronize_gradients()
        found[device] = [to_host(m.gather_full_parameters()) for m in (model, replica)]
    np.testing.assert_allclose(found["cuda"], found["cpu"], rtol=0, atol=1e-12)


def test_arrays_may_change_after_they_were_staged_for_an_update(gpu):
    """The gradients of an update on the GPU come from pinned memory, which the next round uses."""
    device, backend = Device.parse("cuda"), InMemoryCommunicationBackend(0, 1, "staged")
    layout = StoreLayout(
        (), frozenset(), np.dtype(np.float64), backend, MemoryLedger(), device=device
    )
    for state, far in ((layout, device.pinned), (layout.on_host, gpu.empty)):
        arrays = [[far(n, np.dtype(np.float64)) for n in (3, 4)] for _ in range(2)]
        for array in (*arrays[0], *arrays[1]):
            array[...] = 1.0
        with UpdateStage(state).staged(*arrays) as (parameters, gradients):
            for array in arrays[1]:
                array[...] = 2.0
            for array in (*parameters, *gradients):
                assert is_device_array(array) == (state is layout)
                assert to_host(array).tolist() == [1.0] * len(array)
                array[...] = 5.0
        assert [to_host(array).tolist() for array in arrays[0]] == [[5.0] * 3, [5.0] * 4]
        for array in parameters:
            array[...] = 7.0
        assert [to_host(array).tolist() for array in arrays[0]] == [[5.0] * 3, [5.0] * 4]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_memory_that_is_pinned_is_booked(problems, strategy, gpu, messages_only):
    def body(backend):
        model, _ = trained(backend, problems, strategy, ALL)
        if getattr(gpu, "__stand_in__", False):
            held = sum(model.memory.held(category, "host") for category in MemoryCategory)
            assert gpu.cuda.pinned_bytes == held > 0

    run_in_threads(1, body)


def test_offload_flags_change_nothing_on_the_host_and_are_logged_once(problems, caplog):
    caplog.set_level(logging.INFO, "mpishard")

    def body(backend):
        model, _ = problems.build(backend, "mlp", "fsdp", offload=ALL)
        model.deep_copy()
        return problems.train_sharded(backend, "mlp", "fsdp", "adamw", 1, offload=ALL)

    results = run_in_threads(2, body)
    plain = run_in_threads(2, problems.train_sharded, "mlp", "fsdp", "adamw", 1)
    np.testing.assert_array_equal(results[0].parameters, plain[0].parameters)
    said = [r for r in caplog.records if "has no effect, because the model is in" in r.message]
    assert len(said) == 2  # rank 0 of two models
    assert "cpu_offload_optimizer, cpu_offload_gradients, cpu_offload_par" in said[0].message


def test_ranks_on_different_devices_are_refused(problems, gpu):
    def body(backend):
        model = nn.MLP([2, 2], device="cuda" if backend.rank else "cpu")
        with pytest.raises(ValueError, match="by rank, device is cpu, cuda"):
            problems.STRATEGIES["ddp"][0](model, ShardingConfiguration(backend))

    run_in_threads(2, body)


def test_training_loop(device):
    x = np.random.default_rng(0).standard_normal((64, 3))
    y = x @ np.array([[1.0], [-2.0], [0.5]])
    model = nn.LinearRegression(3, device=device)

    result = AdamW(0.05).optimize(
        OptimizationInputData(
            model=model,
            x_train=x,
            y_train=y,
            x_validation=x,
            y_validation=y,
            batch_size=16,
            epochs=30,
        )
    )
    assert result.fitness_history[-1] < 0.01 * result.fitness_history[0]
    assert is_device_array(model.get_parameters()) == (device == "cuda")
