"""Planned steps: their parts, what they send, and machine files. No test depends on a time."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

import mpishard as ms
from mpishard import run_in_threads
from mpishard.planning import (
    PARTS,
    Job,
    Link,
    Machine,
    MachineError,
    PassRate,
    ProductRate,
    UnplannableError,
    memory_of,
    plan_mesh,
    plan_step,
    works_of,
)
from mpishard.planning.mesh import _group, _until_one_fits
from mpishard.tensor import partition_chain

RATE = 1e11
MACHINE = Machine(
    "by hand",
    4,
    (ProductRate("float32", 256, 256, 256, RATE), ProductRate("bfloat16", 256, 256, 256, 2 * RATE)),
    (1e10, 8e9),
    Link(1e-6, 4e9),
    Link(1e-5, 1e9, 1e-6),
    (PassRate("AdamW", "float32", 1e-9),),
)


def mlp():
    return ms.nn.MLP([64] * 5, dtype="float32")


def gpt(**sizes):
    usual = {"vocabulary_size": 32, "context_length": 16, "width": 32, "heads": 4, "layers": 4}
    return ms.nn.GPT(**usual | sizes)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
def test_bytes_between_hosts_are_those_of_a_run(monkeypatch, strategy):
    """Each rank is a node, so that every byte of the traffic ledger is a message."""
    monkeypatch.setenv("MPISHARD_VIRTUAL_NODES", "4")
    x = np.ones((8, 64), np.float32)

    def sent(backend):
        config = ms.ShardingConfiguration(backend)
        model = ms.as_distributed(mlp(), config, strategy)
        optimizer = ms.as_distributed(ms.optimizers.AdamW(1e-3), config, strategy)
        optimizer.step(model, x, x)
        backend.traffic.reset()
        optimizer.step(model, x, x)
        return backend.traffic.total_bytes

    scalars = 4 * 3 * 7 * 4  # the totals of a step
    planned = plan_step(mlp(), Job(4, 4, strategy, batch_size=32), MACHINE).sent_bytes
    assert planned <= sum(run_in_threads(4, sent)) <= planned + 2 * scalars


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_collectives_of_split_layers_are_those_of_a_pass(monkeypatch, sequence_parallel):
    monkeypatch.setenv("MPISHARD_ARENA", "off")
    model = gpt(layers=1)
    layers = dict(zip([i.name for i in model.get_all_layer_info()], model.layers, strict=True))
    x = np.zeros((2, 16), np.int64)

    def sent(backend):
        part = partition_chain(layers, backend, sequence_parallel=sequence_parallel)
        shape, planned = (16,), 0
        total = backend.traffic.total_bytes
        y, saved = x, []
        for layer in part.layers.values():
            works, shape = works_of(layer, shape, len(x))
            for work in works:
                planned += sum(s.passes * s.elements for s in work.sent_forward)
                planned += sum(s.passes * s.elements for s in work.sent_backward)
            p = _views(layer)
            y, own = layer.forward(p, y, ms.nn.Context())
            saved.append((layer, p, own))
        assert y.shape[1:] == shape
        for layer, p, own in reversed(saved):
            y = layer.backward(p, own, y, _views(layer))
        # Each rank sends its part of what all ranks send, passes (t - 1) S.
        return backend.traffic.total_bytes - total, 4 * planned

    results = run_in_threads(2, sent)
    assert sum(measured for measured, _ in results) == results[0][1]


def _views(layer):
    """Return zeros for the parameters of a layer, nested as it reads them."""
    found = {name: np.zeros(s.shape, np.float32) for name, s in layer.parameters.items()}
    return found | {name: _views(child) for name, child in layer.children.items()}


def test_products_are_the_time_of_a_step_on_one_rank():
    machine = Machine("fast", 1, MACHINE.products, (1e30,), MACHINE.node)
    model = ms.nn.MLP([256, 256, 256], dtype="float32")
    plan = plan_step(model, Job(1, strategy="ddp", batch_size=256), machine)
    # Three products a layer, but no input gradient of the first.
    assert plan.seconds == pytest.approx(5 * 2 * 256**3 / RATE)
    assert plan.computing == plan.seconds


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-v", "interleaved"])
def test_bubble_of_a_pipeline_shrinks_with_micro_batches(schedule):
    few, many = (
        plan_step(
            gpt(),
            Job(2, 1, "hybrid", (2, 1, 1), batch_size=64, micro_batch_count=m, schedule=schedule),
            MACHINE,
        )
        for m in (4, 32)
    )
    assert 0 < many.bubble / many.seconds < few.bubble / few.seconds
    for plan in (few, many):
        assert plan.seconds == pytest.approx(sum(getattr(plan, part) for part in PARTS))


def test_overlap_waiting_and_sharing():
    def on(ranks, hosts, strategy="zero2", machine=MACHINE, **options):
        job = Job(ranks, hosts, strategy, batch_size=64 * ranks, **options)
        return plan_step(ms.nn.MLP([256] * 5, dtype="float32"), job, machine)

    assert on(4, 1).sent_bytes == 0
    near, far = on(4, 1), on(4, 4)
    # Four ranks of a host share its memory.
    assert near.computing > far.computing
    assert near.messages < far.messages
    # Two ranks of a host share its network.
    assert on(8, 4).messages > far.messages
    slow = Machine(**{**_fields(MACHINE), "network": Link(1e-5, 1e8)})
    assert on(4, 4, machine=slow).messages > 4 * far.messages
    # A processor that moves the bytes computes less meanwhile, also if the network is fast.
    fast = [
        on(4, 4, machine=Machine(**{**_fields(MACHINE), "network": Link(0, 1e15, 0, busy)}))
        for busy in (0.0, 1e-6)
    ]
    each = fast[0].sent_bytes / 4 / 2  # reductions overlap, and publishing is waited for
    assert fast[1].seconds - fast[0].seconds == pytest.approx(each * 1e-6, rel=1e-3)
    # Without a network only one host can be planned.
    alone = Machine(**{**_fields(MACHINE), "network": None})
    assert on(4, 1, machine=alone).seconds == near.seconds
    with pytest.raises(MachineError, match="measure it on two hosts"):
        on(4, 4, machine=alone)


def test_tensor_axis_on_one_host_is_faster_than_across():
    job = Job(4, 2, "hybrid", (1, 2, 2), batch_size=32)
    model = gpt(width=128)
    near = plan_step(model, job, MACHINE)
    across = plan_step(model, replace(job, order=("pipeline", "tensor", "data")), MACHINE)
    assert near.messages < across.messages


def test_recomputation_and_precision():
    again = ms.pipeline.ActivationCheckpointConfig(enabled=True, checkpoint_every_n_layers=1)
    plain, repeated, rounded = (
        plan_step(
            gpt(), Job(2, 1, "hybrid", (2, 1, 1), batch_size=8, micro_batch_count=4, **o), MACHINE
        )
        for o in ({}, {"checkpoint_config": again}, {"precision": "bfloat16"})
    )
    assert rounded.computing < plain.computing < repeated.computing < 1.5 * plain.computing
    # A strategy without meshes has it on a mesh with a data axis alone.
    alone, twice = (
        plan_step(gpt(), Job(2, 1, "zero2", batch_size=8, checkpoint_config=c), MACHINE)
        for c in (None, again)
    )
    assert alone.computing < twice.computing
    assert twice.job.sizes == (1, 1, 2)


def test_refusals():
    with pytest.raises(UnplannableError, match="has no layers"):
        plan_step(_BlackBox(), Job(2), MACHINE)
    with pytest.raises(UnplannableError, match="of 64 stages of the pipeline empty"):
        plan_step(mlp(), Job(64, 1, "hybrid", (64, 1, 1)), MACHINE)
    with pytest.raises(
        UnplannableError, match="too small for a data axis of 1 and 16 micro-batches"
    ):
        plan_step(mlp(), Job(2, 1, "pipeline", batch_size=8, micro_batch_count=16), MACHINE)
    with pytest.raises(MachineError, match="no products in float64, only in bfloat16, float32"):
        plan_step(ms.nn.MLP([8, 8], dtype="float64"), Job(2), MACHINE)


class _BlackBox:
    def get_parameters(self):
        return np.zeros(3)


def test_mesh_is_the_fastest_that_fits():
    job, model = Job(2, 1, batch_size=4), gpt(width=64)
    free = plan_mesh(model, job, MACHINE, 1 << 40)
    assert free.chosen is free.candidates[0]
    nothing = plan_mesh(model, job, MACHINE, 1000)
    assert nothing.chosen is None
    assert all(each.missing == each.host_bytes - 1000 for each in nothing.nearest)
    assert all(each.missing > 0 and each.host_bytes is None for each in nothing.candidates)
    limit = min(each.host_bytes for each in nothing.nearest)
    tight = plan_mesh(model, job, MACHINE, limit)
    assert tight.chosen.host_bytes <= limit
    assert tight.chosen is not tight.candidates[0]
    before = tight.candidates[: tight.candidates.index(tight.chosen)]
    assert all(each.missing > 0 for each in before)
    assert all(each.missing == each.host_bytes - limit for each in before if each.host_bytes)
    times = [each.step.seconds for each in tight.candidates]
    assert times == sorted(times)
    assert {each.step.job.samples for each in tight.candidates} == {4}
    assert [each.missing for each in nothing.nearest] == sorted(e.missing for e in nothing.nearest)
    assert nothing.nearest[0].step.job.checkpoint_config is not None
    assert any("with 4 samples" in line or "does not fit" in line for line in nothing.advice)
    known = {}
    for each in free.candidates:  # what a job shares with others changes nothing
        plan = plan_step(model, each.step.job, MACHINE, known)
        assert plan == each.step == plan_step(model, each.step.job, MACHINE)
    # One sample cannot be divided over two data ranks, but two stages can have it.
    single = plan_mesh(model, Job(2, 1, batch_size=1), MACHINE, 1 << 40)
    assert {each.step.job.sizes[2] for each in single.candidates} == {1}
    assert dict(single.refused)["1x1x2"].startswith("a batch of 1 is too small")


def test_no_way_that_fits_is_rejected():
    # With few samples the buffers of further micro-batches take more than these save, and stages of
    # few layers need more memory if they compute them again.
    model = ms.nn.MLP([64] * 7, dtype="float32")
    free = plan_mesh(model, Job(4, 2, batch_size=5), MACHINE, 1 << 40)
    known, groups = {}, {}
    for each in free.candidates:
        nbytes = memory_of(model, each.step.job, known).host.total
        groups.setdefault(_group(each.step.job), []).append((each.step, nbytes))
    for ways in groups.values():
        needed = sorted({nbytes for _, nbytes in ways})
        for limit in {needed[0], needed[len(needed) // 2]}:
            found, _ = _until_one_fits(model, [step for step, _ in ways], limit, known)
            assert found[-1].step == next(step for step, nbytes in ways if nbytes <= limit)
            assert found[-1].missing == 0
        found, nearest = _until_one_fits(model, [step for step, _ in ways], needed[0] - 1, known)
        assert all(each.missing > 0 for each in (*found, *nearest))


def test_jobs_that_share_what_is_known_differ_in_all_that_decides_their_times():
    again = [
        ms.pipeline.ActivationCheckpointConfig(enabled=True, checkpoint_every_n_layers=every)
        for every in (1, 4)
    ]
    looped = [ms.pipeline.Interleaved1F1BSchedule(stages) for stages in (2, 3)]
    mesh = {"strategy": "hybrid", "mesh": (2, 1, 2), "micro_batch_count": 4, "batch_size": 16}
    model, known = gpt(), {}
    for choices in (
        *({"checkpoint_config": config} for config in (None, *again)),
        *({"schedule": schedule} for schedule in looped),
        *({"hosts": hosts} for hosts in (1, 2, 4)),
        *({"minimum_parameter_group_size": size} for size in (1, 100_000)),
        *({"precision": "bfloat16"}, {"batch_size": 32}, {"sequence_parallel": True}),
    ):
        job = Job(4, **mesh | choices)
        assert plan_step(model, job, MACHINE, known) == plan_step(model, job, MACHINE)
        assert memory_of(model, job, known) == memory_of(model, job)


def test_a_stage_without_parameters_has_a_plan():
    model = ms.nn.Model(
        ms.nn.Sequential(ms.nn.Linear(8, 8), *(ms.nn.ReLU() for _ in range(3))),
        ms.nn.MSE(),
        input_shape=(8,),
        dtype="float32",
    )
    first, *rest = memory_of(model, Job(4, strategy="pipeline", batch_size=8)).stages
    assert first.parameters == 4 * 72
    assert {use.parameters for use in rest} == {0}


# --------------------------------------------------------------------------------- machine files


def _fields(machine):
    return {
        name: getattr(machine, name)
        for name in ("name", "ranks_per_node", "products", "memory", "node", "network", "passes")
    }


def test_machine_file_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "new" / "machine.json"
    MACHINE.write(path, measured_on={"cores": 4})
    assert Machine.load(path) == MACHINE


def test_rates_between_measured_shapes():
    rates = [ProductRate("float32", n, n, n, rate) for n, rate in ((16, 1e9), (256, 4e9))]
    machine = Machine("two", 1, tuple(rates), (1e9,), Link(0, 1))
    assert machine.product_seconds("float32", 16, 16, 16) == pytest.approx(2 * 16**3 / 1e9)
    # Halfway between 16 and 256 is 64, and halfway between the rates as powers is 2e9.
    assert machine.product_seconds("float32", 64, 64, 64) == pytest.approx(2 * 64**3 / 2e9)
    # Larger ones have the rate of the largest.
    assert machine.product_seconds("float32", 512, 512, 512) == pytest.approx(2 * 512**3 / 4e9)
    assert machine.product_seconds("float32", 0, 512, 512) == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 7}, "has version 7 of the machine file, and this mpishard reads version 1"),
        ({"format": "other"}, 'expected "format": "mpishard machine", got \'other\''),
        ({"node": {"latency": 1}}, "bytes_per_second"),
        ({"products": []}, "at least one entry"),
        ({"memory_bytes": "64GiB"}, "memory_bytes must be an integer"),
        ({"memory": [-1]}, "must be above 0 and finite, got -1"),
        ({"name": None, "ranks_per_node": 0}, "ranks_per_node must be 1 or more, got 0"),
        ({"unit_second": 1}, "'unit_second' is no name of a machine file; did you mean unit_sec"),
        ({"products": "fast"}, "products must be a list, got 'fast'"),
        ({"products": [1]}, "products must name precision, rows, columns, inner, flops_per_second"),
        ({"memory": 5}, "memory must be a list, got 5"),
        ({"node": None}, "node must name latency, bytes_per_second"),
        ({"network": {"latency": 0, "bytes": 1}}, "'bytes' is no name of a Link"),
    ],
)
def test_refused_machine_files(tmp_path, change, words):
    path = tmp_path / "machine.json"
    MACHINE.write(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(MachineError) as error:
        Machine.load(path)
    assert words in str(error.value)


def test_missing_names_and_text(tmp_path):
    path = tmp_path / "machine.json"
    path.write_text("{")
    with pytest.raises(MachineError, match="is no JSON"):
        Machine.load(path)
    MACHINE.write(path)
    found = json.loads(path.read_text())
    del found["memory"]
    path.write_text(json.dumps(found))
    with pytest.raises(MachineError, match="lacks 'memory'"):
        Machine.load(path)


def test_the_first_layer_of_a_later_stage_makes_a_gradient_of_its_input():
    layers = ms.nn.Sequential(ms.nn.Linear(4096, 4096), ms.nn.Linear(4096, 4096))
    model = ms.nn.Model(layers, ms.nn.MSE(), input_shape=(4096,), dtype="float32")
    whole, halves = (
        plan_step(model, Job(ranks, strategy=strategy, batch_size=64), MACHINE)
        for ranks, strategy in ((1, "ddp"), (2, "pipeline"))
    )
    assert 2 * halves.computing == pytest.approx(whole.computing, rel=0.05)


class Mixing(ms.nn.Layer):
    """A product of which the plan knows nothing."""

    def output_shape(self, input_shape):
        return input_shape

    def forward(self, p, x, context):
        return x, None

    def backward_input(self, p, saved, dy):
        return dy, None


class Counted(Mixing):
    """The same layer, which says its operations."""

    def estimated_flops(self, input_shape):
        return 2 * input_shape[0] ** 2


def test_layers_of_other_packages_are_known_by_their_flops_or_named():
    def plan(layer, machine=MACHINE):
        model = ms.nn.Model(
            ms.nn.Sequential(ms.nn.Linear(256, 256), layer),
            ms.nn.MSE(),
            input_shape=(256,),
            dtype="float32",
        )
        return plan_step(model, Job(1, batch_size=64), machine)

    unknown, counted, linear = map(plan, (Mixing(), Counted(), ms.nn.Linear(256, 256, bias=False)))
    assert unknown.unknown_layers == ("Mixing",)
    assert unknown.as_dict()["unknown_layers"] == ["Mixing"]
    assert counted.unknown_layers == linear.unknown_layers == ()
    assert counted.computing - unknown.computing == pytest.approx(3 * 2 * 64 * 256**2 / RATE)
    # A row of the machine file makes it known.
    rows = (*MACHINE.passes, PassRate("Mixing", "float32", 1e-6))
    known = plan(Mixing(), Machine(**{**_fields(MACHINE), "passes": rows}))
    assert known.unknown_layers == ()
    assert known.computing > unknown.computing


def chain(*sizes):
    layers = [ms.nn.Linear(*pair, bias=False) for pair in itertools.pairwise(sizes)]
    loss = ms.nn.MSE()
    return ms.nn.Model(ms.nn.Sequential(*layers), loss, input_shape=sizes[:1], dtype="float32")


def test_later_micro_batches_add_to_the_gradient():
    slow = Machine("slow", 1, MACHINE.products, (1e6,), Link(0, 1e30))
    job = Job(1, 1, "hybrid", (1, 1, 1), "ddp", 64)
    once, eight = (
        plan_step(chain(256, 256, 256), replace(job, micro_batch_count=count), slow)
        for count in (1, 8)
    )
    # Each of seven reads the gradient.
    nbytes = 2 * 256 * 256 * 4
    assert eight.computing - once.computing == pytest.approx(7 * nbytes / 1e6, rel=1e-3)


def test_publishing_takes_the_time_of_the_largest_stage():
    job = Job(4, 2, "hybrid", (2, 1, 2), "zero1", 64, order=("data", "tensor", "pipeline"))
    slow = Machine(**{**_fields(MACHINE), "network": Link(1e-5, 1e6)})
    first, second = (
        plan_step(chain(*sizes), job, slow).update for sizes in ((2048, 64, 64), (64, 64, 2048))
    )
    assert first == pytest.approx(second)
    assert second > 64 * 2048 * 4 / 2 / 1e6
