"""Launches, copies and waits of a step on a GPU, counted by the stand-in."""

import numpy as np
import pytest
from cupy_stand_in.counts import counting

import mpishard as ms
from mpishard.base.arrays import read_numbers, to_host
from mpishard.errors import NonFiniteLossError
from mpishard.models.stores.norm import squared_norm
from mpishard.optimizers import AdamW
from mpishard.testing.worlds import in_worlds

STRATEGIES = ["ddp", "zero1", "zero2", "fsdp"]


@pytest.fixture
def counted(gpu):
    """The stand-in: a real GPU counts nothing."""
    if not hasattr(gpu, "__stand_in__"):
        pytest.skip("only the stand-in counts")
    return gpu


def trainer(backend, strategy, model, **settings):
    config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=1, **settings)
    wrapped = ms.as_distributed(model, config, strategy)
    rule = AdamW(1e-3, weight_decay=0.1, clip_global_norm=1.0)
    return wrapped, ms.as_distributed(rule, config, strategy)


def mlp(device="cuda"):
    return ms.nn.MLP([8, 16, 16, 3], seed=0, dtype="float32", device=device)


def gpt(layers=2):
    sizes = {"vocabulary_size": 11, "context_length": 6, "width": 8, "heads": 2}
    return ms.nn.GPT(**sizes, layers=layers, seed=0, device="cuda")


def batch(gpu, samples=6, outputs=3):
    generator = np.random.default_rng(3)
    return (
        gpu.asarray(generator.standard_normal((samples, 8)).astype("float32")),
        gpu.asarray(generator.standard_normal((samples, outputs)).astype("float32")),
    )


def counts_of_a_step(backend, strategy, model, x, y):
    wrapped, optimizer = trainer(backend, strategy, model)
    optimizer.step(wrapped, x, y)  # makes what all later steps use
    with counting() as counts:
        optimizer.step(wrapped, x, y)
    return counts


@pytest.mark.parametrize("strategy", STRATEGIES)
@in_worlds(1)
def test_a_step_of_an_mlp_takes_45_operations_and_one_read(backend, strategy, counted):
    counts = counts_of_a_step(backend, strategy, mlp(), *batch(counted))
    assert counts.operations <= 45
    assert counts.copies == 0
    assert counts.reads == 1
    assert counts.waits == 0


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@in_worlds(1)
def test_the_host_waits_equally_often_for_a_model_of_more_layers(backend, strategy, counted):
    tokens = counted.asarray(np.arange(12).reshape(2, 6) % 11)
    found = []
    for layers in (1, 4):
        counts = counts_of_a_step(backend, strategy, gpt(layers), tokens, tokens)
        assert counts.waits == 0
        found.append(counts.reads)
    assert found[0] == found[1]


@pytest.mark.parametrize("strategy", STRATEGIES)
@in_worlds(2, 3)
def test_each_rank_reads_loss_weight_and_norm_once(backend, strategy, counted):
    wrapped, optimizer = trainer(backend, strategy, mlp())
    x, y = batch(counted)
    optimizer.step(wrapped, x, y)
    backend.barrier()
    with counting() as counts:
        optimizer.step(wrapped, x, y)
        backend.barrier()
    # Thread-ranks share one counter. MPI's collectives read a GPU's arrays, too.
    if isinstance(backend, ms.InMemoryCommunicationBackend):
        assert counts.reads == backend.world_size


@pytest.mark.parametrize("strategy", STRATEGIES)
@in_worlds(1, 2)
def test_a_loss_that_is_not_finite_changes_nothing_on_a_gpu(backend, strategy, gpu):
    wrapped, optimizer = trainer(backend, strategy, mlp())
    x, y = batch(gpu)
    optimizer.step(wrapped, x, y)
    before = to_host(wrapped.gather_full_parameters())
    state = {name: to_host(vector).copy() for name, vector in optimizer.state.items()}
    if backend.rank == backend.world_size - 1:
        y[0] = np.inf
    with pytest.raises(NonFiniteLossError, match="step 2"):
        optimizer.step(wrapped, x, y)
    np.testing.assert_array_equal(to_host(wrapped.gather_full_parameters()), before)
    for name, vector in optimizer.state.items():
        np.testing.assert_array_equal(to_host(vector), state[name])


@pytest.mark.parametrize("strategy", STRATEGIES)
@in_worlds(1)
def test_accumulated_steps_on_a_gpu_are_those_of_the_host(backend, strategy, gpu):
    found = []
    for place, device in ((np.asarray, "cpu"), (gpu.asarray, "cuda")):
        wrapped, optimizer = trainer(
            backend, strategy, ms.nn.MLP([8, 16, 3], seed=0, device=device)
        )
        x, y = (to_host(array).astype("float64") for array in batch(gpu))
        reports = []
        for _ in range(2):
            with wrapped.accumulate():
                reports.append(optimizer.step_report(wrapped, place(x[:2]), place(y[:2])))
            reports.append(optimizer.step_report(wrapped, place(x[2:]), place(y[2:])))
        assert all(type(report.loss) is float for report in reports)
        found.append((
            [report.loss for report in reports], [reports[1].gradient_norm, reports[1].weight],
            to_host(wrapped.gather_full_parameters()),
        ))  # fmt: skip
    for host, gpu_value in zip(*found, strict=True):
        np.testing.assert_allclose(gpu_value, host, rtol=1e-9)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_squared_norm_on_a_gpu_is_not_waited_for_until_it_is_read(dtype, gpu):
    values = np.random.default_rng(0).standard_normal(50_000).astype(dtype)
    whole = gpu.asarray(values)
    pieces = [whole[:7], whole[7:7], whole[7:30_000], whole[30_010:]]
    with counting() as counts:
        squares = squared_norm(pieces)
    if hasattr(gpu, "__stand_in__"):
        assert counts.launches == (5 if dtype == "float16" else 3)  # two runs, and the total
        assert counts.reads == counts.waits == 0
    wanted = np.delete(values.astype("float64"), slice(30_000, 30_010))
    assert read_numbers([squares, 2.0]) == pytest.approx([wanted @ wanted, 2.0], rel=1e-13)
    assert read_numbers([squared_norm(pieces)]) == read_numbers([squares])


@in_worlds(1)
def test_a_collective_of_one_rank_on_a_gpu_is_one_copy_at_most(backend, gpu):
    array = gpu.asarray(np.arange(1000.0))
    out = gpu.zeros(1000)
    with counting() as counts:
        assert backend.all_reduce(array) is array
        assert backend.broadcast(array) is array
        assert backend.all_gather(array, out=array) is array
        backend.all_reduce(array, out=out)
        backend.all_gather(array, out=out)
        scattered = backend.reduce_scatter(array)
        gathered = backend.all_gather(array[:, None])
        average = backend.all_reduce(array.copy(), ms.ReductionOperation.AVERAGE)
    assert counts.reads == counts.waits == 0
    assert counts.copies <= 6
    for found in (out, scattered, gathered[:, 0], average):
        np.testing.assert_array_equal(to_host(found), np.arange(1000.0))
    with pytest.raises(ValueError, match="rows"):
        backend.all_gather(array, out=gpu.zeros(999))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@in_worlds(1)
def test_a_step_of_a_gpt_reads_twice_the_checks_of_its_tokens_and_the_loss(
    backend, strategy, counted
):
    tokens = counted.asarray(np.arange(12).reshape(2, 6) % 11)
    counts = counts_of_a_step(backend, strategy, gpt(12), tokens, tokens)
    assert counts.operations <= 800
    assert counts.reads == 2
    assert counts.waits == 0


@pytest.mark.parametrize("weighted", [False, True])
@in_worlds(2)
def test_values_that_a_gpu_finds_wrong_are_refused_and_change_nothing(backend, weighted, gpu):
    wrapped, optimizer = trainer(backend, "fsdp", gpt())
    tokens = np.arange(12).reshape(2, 6) % 11
    weights = np.ones((2, 6))
    optimizer.step(wrapped, gpu.asarray(tokens), gpu.asarray(tokens))
    before = to_host(wrapped.gather_full_parameters())
    for x, y, w, message in (
        (tokens + 9, tokens, weights, r"token 19 is outside the vocabulary \[0, 11\)"),
        (tokens, tokens + 9, weights, r"target 1[0-9] is neither in \[0, 11\)"),
        (tokens, tokens, -weights, "weights must be 0 or more"),
    ):
        if not weighted and (w < 0).any():
            continue
        target = gpu.asarray(y)
        if weighted:
            target = ms.data.Samples((target, gpu.asarray(w)))
        with pytest.raises(ValueError, match=message):
            optimizer.step(wrapped, gpu.asarray(x), target)
    np.testing.assert_array_equal(to_host(wrapped.gather_full_parameters()), before)
    # Both ranks have refused all of it, and no rank waits for the other.
    optimizer.step(wrapped, gpu.asarray(tokens), gpu.asarray(tokens))
