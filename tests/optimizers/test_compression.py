"""Compressed gradients: against textbook versions of all ranks in one process, and by the byte."""

from __future__ import annotations

import json
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from computed_once import computed_once
from layouts import wrap
from textbook_steps import steps_for

import mpishard as ms
from mpishard import nn
from mpishard.communication.agreement import all_texts
from mpishard.errors import CheckpointError, NonFiniteLossError, ShardingError
from mpishard.optimizers import LBFGS, GradientCompressionOptimizer
from mpishard.optimizers.replicas.codes import Int8, Quantization, TopK
from mpishard.sharding import by_parameter
from mpishard.sharding.regions import put_region
from mpishard.testing.worlds import in_worlds

generator = np.random.default_rng(3)
X = generator.standard_normal((23, 6))
Y = np.sin(X[:, :3])
RATIO, SEED = 0.3, 11
METHODS = ("quantization", "int8", "top-k")

by_method = pytest.mark.parametrize("method", METHODS)


def plain():
    return nn.MLP([6, 8, 3], activation="tanh", seed=2)


def make_rule(name):
    if name == "adam":
        return ms.optimizers.Adam(1e-3)
    return ms.optimizers.SGD(1e-3, momentum=0.9)


def build(backend, method, rule="sgd", unit=1, layout="ddp", **given):
    model, strategy = wrap(backend, plain(), layout, unit)
    options = {"compression_ratio": RATIO, "method": method, "seed": SEED} | given
    return model, GradientCompressionOptimizer(
        make_rule(rule), model.sharding_configuration, strategy=strategy, **options
    )


def train(model, optimizer, steps):
    for step in steps:
        optimizer.step(model, *share(step, model.data_rank, model.data_size))
    return model.get_parameters()


def share(step, rank, size):
    """Return uneven batches, other ones in each step."""
    cuts = [k * 23 // size + (0 < k < size) for k in range(size + 1)]
    rows = np.random.default_rng(step).permutation(23)[cuts[rank] : cuts[rank + 1]]
    return X[rows], Y[rows]


# -------------------------------------------------------------------------------- textbooks


def mirrored(values):
    levels = max(2, int(RATIO * 256))
    low, high = values.min(), values.max()
    if high - low < 1e-12:
        return np.full_like(values, low)
    step = (high - low) / (levels - 1)
    return low + np.round((values - low) / step) * step


def stochastic(values, key):
    drawn = np.random.default_rng(key).random(values.size, np.float32)
    found = np.empty_like(values)
    for start in range(0, values.size, 128):
        block = slice(start, start + 128)
        scale = np.abs(values[block]).max() / 127
        found[block] = np.clip(np.floor(values[block] / scale + drawn[block]), -127, 127) * scale
    return found


def largest(values):
    count = max(1, int(RATIO * values.size))
    found = np.zeros_like(values)
    for place in sorted(range(values.size), key=lambda i: -abs(values[i]))[:count]:
        found[place] = values[place]
    return found


def approximate(method, values, key):
    if not values.size:
        return values
    return {
        "quantization": lambda: mirrored(values),
        "int8": lambda: stochastic(values, key),
        "top-k": lambda: largest(values),
    }[method]()


def exchanged_pieces(model):
    """Return the pieces that replicas exchange, as indices in the flat vector and key. Collective.

    The key of a piece that is sent uncompressed is None.
    """
    replica, placement = model.engine.replica, model.engine.placement
    found = []
    count = replica.data.world_size if replica.is_grouped else 1
    place = replica.data.rank if replica.is_grouped else 0
    slices = [held.entry for held in placement.local_parameters]
    replicated = []
    if replica.is_on_mesh:  # what its ranks hold replicated travels whole
        held = {each.entry.name: each.boxes for each in placement.local_parameters}
        pipeline, tensor = model.mesh.pipeline_rank, model.mesh.tensor_rank
        everyones = [
            json.loads(text)
            for text in all_texts(model.backend, json.dumps([pipeline, tensor, held]))
        ]
        mine = json.loads(json.dumps(held))
        replicated = [
            name
            for name in mine
            if any(
                their[:2] != [pipeline, tensor] and their[2].get(name) == mine[name]
                for their in everyones
            )
        ]
    for unit in model.engine.layout.units:
        layout = ms.ShardLayout(unit.length, count)
        start = unit.start + layout.start(place)
        stop = start + layout.size(place)
        runs = [(start, stop)]
        for entry in slices:
            if entry.name in replicated:
                runs = [
                    cut
                    for a, b in runs
                    for cut in ((a, min(b, entry.start)), (max(a, entry.stop), b))
                    if cut[0] < cut[1]
                ]
                low, high = max(start, entry.start), min(stop, entry.stop)
                if low < high:
                    found.append((list(placement.ranges(low, high)), None, low))
        for start_, stop_ in runs:
            size = replica.group.world_size if replica.is_grouped else 1
            key = [unit.index] if size == 1 else [unit.index, replica.group.rank]
            key += [start_ - unit.start] if replicated else []
            found.append((list(placement.ranges(start_, stop_)), key, start_))
    found.sort(key=lambda part: part[2])
    everyones = {}
    for text in all_texts(model.backend, json.dumps(found)):
        for ranges, key, _ in json.loads(text):
            places = np.concatenate([np.arange(0), *(np.arange(*pair) for pair in ranges)])
            everyones[tuple(places), str(key)] = places, key
    mine = [
        np.concatenate([np.arange(0), *(np.arange(*pair) for pair in ranges)])
        for ranges, *_ in found
    ]
    return list(everyones.values()), mine


class Textbook:
    """All replicas of a world, one after the other, on whole vectors."""

    def __init__(self, method, size, parts, length, keeps=True, start_step=0):
        self.method, self.size, self.parts = method, size, parts
        self.keeps, self.start_step = keeps, start_step
        self.errors = [np.zeros(length) for _ in range(size)]
        self.sums = np.zeros(length)

    def reduce(self, gradients, step):
        if step < self.start_step:
            return sum(gradients)
        given = [g + e for g, e in zip(gradients, self.errors, strict=True)]
        self.errors = [g.copy() for g in given]
        result = np.zeros_like(self.sums)
        self._codes(given, result, step)
        if not self.keeps:
            self.errors = [0 * e for e in self.errors]
            self.sums[:] = 0
        return result

    def _codes(self, given, result, step):
        for places, key in self.parts:
            if key is None:
                result[places] = sum(g[places] for g in given)
                for error in self.errors:
                    error[places] = 0
                continue
            layout = ms.ShardLayout(len(places), self.size)
            for owner in range(self.size):
                piece = places[layout.slice(owner)]
                of_owner = (SEED, step, *key, owner)
                total = np.zeros(layout.size(owner))
                for rank in range(self.size):
                    decoded = approximate(self.method, given[rank][piece], (*of_owner, 1 + rank))
                    self.errors[rank][piece] -= decoded
                    total += decoded
                total += self.sums[piece]
                result[piece] = approximate(self.method, total, (*of_owner, 0))
                self.sums[piece] = total - result[piece]


def train_textbook(method, rule, model, steps, **options):
    """Return the parameters and the textbook, and the indices of this rank's errors. Collective."""
    parts, mine = exchanged_pieces(model)
    size = model.data_size  # of which each computes a part of the samples
    count = model.engine.replica.across.world_size
    return *textbook_of(method, rule, size, count, pickle.dumps(parts), steps, **options), mine


@computed_once
def textbook_of(method, rule, size, count, parts, steps, **options):
    chain = plain()
    theta = chain.get_parameters()
    book = Textbook(method, count, pickle.loads(parts), theta.size, **options)
    first, second = np.zeros_like(theta), np.zeros_like(theta)
    for step in range(steps):
        batches = [share(step, rank, size) for rank in range(size)]
        weight = sum(y.size // y.shape[1] for _, y in batches)
        gradients = np.zeros((count, theta.size))
        for rank, (x, y) in enumerate(batches):
            if len(x):
                _, gradient = chain.with_parameters(theta).compute_loss_and_gradients(x, y)
                gradients[rank * count // size] += gradient * len(x)
        mean = book.reduce(list(gradients), step) / weight
        if rule == "sgd":
            first = 0.9 * first + mean
            theta = theta - 1e-3 * first
        else:
            first = 0.9 * first + 0.1 * mean
            second = 0.999 * second + 0.001 * mean**2
            corrected = second / (1 - 0.999 ** (step + 1))
            theta = theta - 1e-3 * first / (1 - 0.9 ** (step + 1)) / (np.sqrt(corrected) + 1e-8)
    return theta, book


def require_equal_copies(model):
    """Fail if ranks have different bits of replicated parameters. Collective."""
    held = {}
    for unit in model.engine.layout.units:
        values = np.empty(unit.length)
        model.engine.parameters.read(unit, values)
        for part in model.engine.placement.local_parameters:
            entry = part.entry
            if unit.start <= entry.start < unit.stop:
                own = values[entry.start - unit.start : entry.stop - unit.start]
                held[f"{entry.name} {part.boxes}"] = own.tobytes().hex()
    for text in all_texts(model.backend, json.dumps(held)):
        assert all(held.get(name, bits) == bits for name, bits in json.loads(text).items())


ROWS = [
    *((3, "ddp", method) for method in METHODS), *((4, "fsdp/2", method) for method in METHODS),
    *((4, "1x2", method) for method in METHODS), (1, "ddp", "quantization"), (2, "ddp", "top-k"),
    (2, "zero1/1", "int8"), (4, "ddp/2", "int8"),
    (6, "zero2/2", "top-k"), (6, "fsdp/3", "int8"),
    (4, "2x1", "top-k"), (8, "1x2x2 fsdp", "int8"),
    (8, "1x2x2 ddp", "quantization"), (8, "2x1x2 zero2", "top-k"), (4, "1x1x2 fsdp", "top-k"),
]  # fmt: skip


@pytest.mark.parametrize(("world_size", "layout", "method"), ROWS)
@in_worlds()
def test_many_steps_are_the_textbooks(backend, method, layout):
    size = backend.world_size
    rule = "sgd" if size % 2 else "adam"
    start = 10 if size in (2, 6) else 0
    model, optimizer = build(
        backend, method, rule, unit=1 if rule == "sgd" else 40, layout=layout, start_step=start
    )
    steps = steps_for(size)
    found = train(model, optimizer, range(steps))
    expected, book, places = train_textbook(method, rule, model, steps, start_step=start)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    assert (backend.all_gather(found[None]) == found).all()
    require_equal_copies(model)
    # Errors are as long as this rank's part of the gradient.
    across = model.engine.replica.across
    errors = optimizer._state.errors
    assert errors.own.size == sum(map(len, places))
    own = np.concatenate([np.zeros(0), *(book.errors[across.rank][each] for each in places)])
    np.testing.assert_allclose(errors.own, own, rtol=0, atol=1e-9)
    assert errors.own.any() or not len(errors.own)


def test_whole_gradients_of_the_first_steps_are_waited_for():
    def body(backend):
        class Message:
            def __init__(self, array):
                self.array = array
                array.fill(np.nan)  # what is read too early shows

            def wait(self):
                self.array.fill(0)

        model, optimizer = build(backend, "int8", start_step=1)
        optimizer.bind(model)
        sums = model.engine.passes.exchange
        sums.across = SimpleNamespace(all_reduce_async=Message, progress=lambda: None)
        before = model.get_parameters()
        assert (train(model, optimizer, range(1)) == before).all()

    ms.run_in_threads(1, body)


@in_worlds(1, 3)
def test_without_error_feedback_compression_loses_values(backend):
    model, optimizer = build(backend, "top-k", error_feedback=False)
    for step in range(20):
        optimizer.step(model, *share(step, backend.rank, backend.world_size))
    expected, _, _ = train_textbook("top-k", "sgd", model, 20, keeps=False)
    np.testing.assert_allclose(model.get_parameters(), expected, rtol=0, atol=1e-12)
    assert not optimizer._state.errors.own.any()


@pytest.mark.usefixtures("messages_only")
@by_method
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("world_size", "layout"), [(1, "ddp"), (3, "ddp"), (4, "ddp"), (4, "fsdp/2"), (6, "zero1/3")]
)
@in_worlds()
def test_the_bytes_on_the_wire_are_the_documented_ones(backend, method, dtype, layout):
    chain = nn.MLP([40, 64, 24], activation="tanh", seed=2, dtype=dtype)
    model, strategy = wrap(backend, chain, layout)
    config, replica = model.sharding_configuration, model.engine.replica
    optimizer = GradientCompressionOptimizer(
        make_rule("sgd"), config, 0.01, method=method, start_step=1, strategy=strategy
    )
    optimizer.bind(model)
    x = np.ones((4, 40), dtype)
    y = np.ones((4, 24), dtype)
    across = replica.across
    backend.traffic.reset()
    backend.all_reduce(np.zeros(7))
    small = backend.traffic.total_bytes if across is backend else 0
    sent = []
    for _ in range(4):
        across.traffic.reset()
        optimizer.step(model, x, y)
        sent.append(across.traffic.total_bytes - small)
    first, total, *later = (int(n) for n in backend.all_reduce(np.array(sent)))
    assert later == [total] * 2
    size, b, expected = across.world_size, np.dtype(dtype).itemsize, 0
    assert first == 2 * (size - 1) * b * model.parameter_count
    ranks = backend.world_size // size
    parts = [n for unit in model.units for n in ms.ShardLayout(unit.length, ranks).sizes]
    pieces = [n for part in parts for n in ms.ShardLayout(part, size).sizes]
    for n in pieces:
        k = max(1, n // 100)
        expected += {
            "quantization": n + 2 * b,
            "int8": n + b * -(-n // 128),
            "top-k": k * (4 + b),
        }[method]
    assert total == 2 * (size - 1) * expected
    if dtype == np.float32 and size > 1 and layout == "ddp":
        whole = 2 * (size - 1) * 4 * model.parameter_count
        assert total <= {"quantization": 0.26, "int8": 0.26, "top-k": 0.025}[method] * whole


@by_method
@in_worlds(1, 2, 3)
def test_the_first_steps_are_those_of_ddp_by_the_bit(backend, method):
    model, optimizer = build(backend, method, "adam", start_step=3)
    exact, _ = build(backend, method)
    other = ms.DDPOptimizer(make_rule("adam"), exact.sharding_configuration)
    optimizer.wrapped_optimizer.clip_global_norm = other.wrapped_optimizer.clip_global_norm = 0.1
    for step in range(4):
        batch = share(step, backend.rank, backend.world_size)
        assert optimizer.step(model, *batch) == other.step(exact, *batch)
        same = model.get_parameters().tobytes() == exact.get_parameters().tobytes()
        assert same is (step < 3)
        assert optimizer._state.errors.own.any() == (step == 3)


in_layouts = pytest.mark.parametrize(
    ("world_size", "layout"), [(1, "ddp"), (3, "ddp"), (4, "fsdp/2"), (4, "1x2")]
)


@by_method
@pytest.mark.parametrize("start_step", [0, 3])
@in_layouts
@in_worlds()
def test_a_checkpoint_has_the_errors_of_each_rank(backend, method, start_step, layout, shared_path):
    model, optimizer = build(backend, method, layout=layout, start_step=start_step)
    train(model, optimizer, range(2))
    ms.checkpoint.save(shared_path / "at2", model, optimizer)
    expected = train(model, optimizer, range(2, 5))
    again, other = build(backend, method, layout=layout, start_step=start_step)
    ms.checkpoint.load(shared_path / "at2", again, other)
    assert train(again, other, range(2, 5)).tobytes() == expected.tobytes()
    for name in ("own", "reduced"):
        mine, expected = (getattr(o._state.errors, name) for o in (other, optimizer))
        assert mine.tobytes() == expected.tobytes()


@by_method
@pytest.mark.parametrize(("pattern", "unit"), [("linear0.*", 1), ("*.bias", 1000)])
@in_layouts
@in_worlds()
def test_a_checkpoint_of_a_model_with_frozen_parameters(
    backend, method, pattern, unit, layout, shared_path
):
    def run(first, last, at):
        model, optimizer = build(backend, method, unit=unit, layout=layout)
        optimizer.wrapped_optimizer.parameter_options = {pattern: {"frozen": True}}
        optimizer.bind(model)
        if first:
            ms.checkpoint.load(shared_path / "at2", model, optimizer)
        for step in range(first, last):
            if step == at:
                ms.checkpoint.save(shared_path / "at2", model, optimizer)
            train(model, optimizer, [step])
        return model.get_parameters()

    whole = run(0, 4, 2)
    assert run(2, 4, None).tobytes() == whole.tobytes()
    assert (whole != plain().get_parameters()).any()


def sums_of_errors(backend, method, layout, *, write=None, read=None):
    """Return the sums of all ranks' errors, as a checkpoint has them. Collective."""
    model, optimizer = build(backend, method, layout=layout)
    if write:
        train(model, optimizer, range(3))
        ms.checkpoint.save(write, model, optimizer)
    else:
        ms.checkpoint.load(read, model, optimizer)
    state, sums = optimizer._state, []
    for kind in ("own", "reduced"):
        # All replicas' in the model's vector, each element of a replica once.
        full = np.zeros(model.parameter_count)
        vector, pieces = (getattr(state.errors, name) for name in (kind, kind + "_pieces"))
        entries = model.engine.placement.entries
        regions = state._regions_of(vector, pieces, writes=True)
        for region, values in by_parameter(regions, entries):
            entry = next(e for e in entries if e.name == region.name)
            put_region(values, region, full[entry.start : entry.stop].reshape(entry.shape))
        sums.append(backend.all_reduce(full))
    return np.concatenate(sums)


@pytest.fixture(scope="module")
def written_errors(tmp_path_factory):
    """Return a function that makes a checkpoint with errors, and their sums."""

    @computed_once
    def write(method, size, layout):
        path = tmp_path_factory.mktemp("errors") / "run"
        return path, ms.run_in_threads(size, sums_of_errors, method, layout, write=path)[0]

    return write


@pytest.mark.parametrize(
    ("size", "layout", "written", "method"),
    [
        (1, "ddp", (4, "fsdp/2"), "int8"),
        (3, "ddp", (4, "fsdp/2"), "quantization"),
        (5, "ddp", (4, "ddp"), "top-k"),
        (4, "fsdp/2", (4, "ddp"), "quantization"),
        (4, "fsdp/2", (8, "1x2x2 fsdp"), "top-k"),
        (6, "zero1/3", (4, "fsdp/2"), "top-k"),
        (4, "1x2", (4, "fsdp/2"), "int8"),
        (4, "1x2", (8, "1x2x2 fsdp"), "quantization"),
        (4, "1x2x2 fsdp", (4, "ddp"), "int8"),
    ],
)
def test_another_layout_of_ranks_takes_the_same_sum_of_errors(
    written_errors, written, size, layout, method
):
    path, expected = written_errors(method, *written)
    assert expected.any()
    for found in ms.run_in_threads(size, sums_of_errors, method, layout, read=path):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)


def test_errors_saved_by_other_ranks_are_added(tmp_path):
    def run(backend, layout, *, write=False, **given):
        model, optimizer = build(backend, layout=layout, **given)
        if write:
            train(model, optimizer, range(3))
            ms.checkpoint.save(tmp_path / "run", model, optimizer)
            return None
        ms.checkpoint.load(tmp_path / "run", model, optimizer)
        first = train(model, optimizer, [3])
        require_equal_copies(model)
        return first, train(model, optimizer, [4])

    def go_on(size, layout):  # with codes that leave nothing out
        given = {"method": "top-k", "compression_ratio": 1.0}
        return ms.run_in_threads(size, lambda b: run(b, layout, **given))

    ms.run_in_threads(4, lambda b: run(b, "fsdp/2", write=True, method="top-k"))
    expected = go_on(1, "ddp")[0]
    assert abs(expected[0] - expected[1]).max() > 1e-6
    for size, layout in ((3, "ddp"), (4, "1x2"), (4, "zero1/2"), (6, "1x3"), (8, "1x2x2 fsdp")):
        for found in go_on(size, layout):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("messages_only")
@pytest.mark.parametrize("layout", ["ddp/2", "zero1/2", "fsdp/2"])
@in_worlds(4)
def test_replicas_that_share_no_memory(backend, layout):
    model, optimizer = build(backend, "int8", layout=layout)
    found = train(model, optimizer, range(8))
    expected, _, _ = train_textbook("int8", "sgd", model, 8)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(backend.all_gather(found[None]), [found] * 4)


@pytest.mark.parametrize(("world_size", "strategy"), [(1, "ddp"), (3, "ddp"), (4, "fsdp")])
@in_worlds()
def test_optimize_resumes_and_a_plain_model_is_wrapped(backend, strategy, shared_path):
    def run(limit, folder):
        size = None if strategy == "ddp" else 2
        config = ms.ShardingConfiguration(backend, replica_size=size)
        optimizer = GradientCompressionOptimizer(
            make_rule("adam"), config, method="int8", strategy=strategy
        )
        return optimizer.optimize(ms.OptimizationInputData(
            model=plain(), x_train=X, y_train=Y, x_validation=X, y_validation=Y, validate_every=2,
            batch_size=8, max_steps=limit, progress=False, checkpoint=shared_path / folder,
            digest_every=2,
        ))  # fmt: skip

    whole = run(7, "whole")
    run(3, "parts")
    rest = run(7, "parts")
    assert rest.loss_history == whole.loss_history[3:]
    assert rest.validation_history == whole.validation_history


@by_method
@pytest.mark.parametrize(("world_size", "layout"), [(1, "ddp"), (2, "ddp"), (4, "zero2/2")])
@in_worlds()
def test_a_step_that_fails_changes_no_error(backend, method, layout):
    model, optimizer = build(backend, method, layout=layout)
    train(model, optimizer, range(2))
    before = optimizer._state.errors.own.copy()
    x, y = share(2, backend.rank, backend.world_size)
    bad = x.copy()
    if backend.rank == backend.world_size - 1:
        bad[0, 0] = np.nan
    with pytest.raises(NonFiniteLossError):
        optimizer.step(model, bad, y)
    assert optimizer._state.errors.own.tobytes() == before.tobytes()
    optimizer.step(model, x, y)
    expected, _, _ = train_textbook(method, "sgd", model, 3)
    np.testing.assert_allclose(model.get_parameters(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("world_size", "layout"), [(2, "ddp"), (4, "ddp/2"), (4, "fsdp/2")])
@in_worlds()
def test_accumulated_batches_are_compressed_once_and_a_replica_may_have_none(backend, layout):
    model, optimizer = build(backend, "top-k", layout=layout)
    x, y = share(0, backend.rank, backend.world_size)
    if backend.rank >= backend.world_size // 2:
        x, y = x[:0], y[:0]
    with model.accumulate():
        optimizer.step(model, x[:1], y[:1])
    optimizer.step(model, x[1:], y[1:])
    other, second = build(backend, "top-k", layout=layout)
    second.step(other, x, y)
    np.testing.assert_allclose(model.get_parameters(), other.get_parameters(), atol=1e-12)


@in_worlds(1, 2)
def test_arguments_and_settings(backend):
    config = ms.ShardingConfiguration(backend)
    rule = make_rule("sgd")
    made = GradientCompressionOptimizer(rule, config)
    assert (made.compression_ratio, made.use_quantization, made.use_sparsification) == (
        0.1, True, False,
    )  # fmt: skip
    assert made.method == "quantization"
    assert GradientCompressionOptimizer(rule, config, 0.1, True, True).method == "top-k"
    off = GradientCompressionOptimizer(rule, config, use_quantization=False)
    assert off.method is None
    model = ms.DDPModel(plain(), config)
    off.step(model, X, Y)
    assert model.engine.passes.user is None
    assert off.serialize()
    for given, match in (
        ({"compression_ratio": 0}, r"compression_ratio must be in \(0, 1\], got 0"),
        ({"compression_ratio": np.nan}, "compression_ratio must be in"),
        ({"method": "zip"}, "method must be one of quantization, int8"),
        ({"seed": -1}, "seed must be 0 or more"),
        ({"start_step": -1}, "start_step must be 0 or more, got -1"),
    ):
        with pytest.raises(ValueError, match=match):
            GradientCompressionOptimizer(rule, config, **given)
    with pytest.raises(TypeError, match="start_step must be an integer, got 3"):
        GradientCompressionOptimizer(rule, config, start_step=3.0)
    for name, value in (("enable_gradient_compression", True), ("gradient_leaves", 4)):
        other = ms.ShardingConfiguration(backend, **{name: value})
        with pytest.raises(ValueError, match=f"{name}={value} .*leave out one of the two"):
            GradientCompressionOptimizer(rule, other).bind(ms.DDPModel(plain(), other))
    with pytest.raises(ShardingError, match="updates DDPModel"):
        made.bind(ms.FSDPModel(plain(), config))
    for strategy, match in (("fsdp", "give ShardingConfiguration"), ("tensor", "must be one of")):
        with pytest.raises(ValueError, match=match):
            GradientCompressionOptimizer(rule, config, strategy=strategy)
    alone = ms.ShardingConfiguration(backend, auto_sync_gradients=False)
    with pytest.raises(ValueError, match=r"^auto_sync_gradients=False .*leave out one of the two"):
        GradientCompressionOptimizer(rule, alone).bind(ms.DDPModel(plain(), alone))
    replicas = ms.ShardingConfiguration(backend, replica_size=1)
    inside = GradientCompressionOptimizer(rule, replicas, strategy="fsdp")
    with pytest.raises(ValueError, match=r"is one replica of all ranks: give Sharding"):
        inside.bind(ms.FSDPModel(plain(), config))


@pytest.mark.parametrize("layout", ["ddp/2", "fsdp/2", "1x2"])
@in_worlds(4)
def test_replicas_without_a_method_send_whole_gradients(backend, layout):
    model, optimizer = build(
        backend, None, "adam", layout=layout, use_quantization=False, use_sparsification=False
    )
    config = ms.ShardingConfiguration(backend)
    other, exact = ms.DDPModel(plain(), config), ms.DDPOptimizer(make_rule("adam"), config)
    for each in (optimizer, exact):
        each.wrapped_optimizer.clip_global_norm = 0.1
    for step in range(5):
        batch = share(step, model.data_rank, model.data_size)
        report = optimizer.step_report(model, *batch)
        counts = model.engine.replica.reports_loss  # ranks that compute together count once
        known = exact.step_report(other, *(array[: len(array) * counts] for array in batch))
        figures = [(each.loss, each.weight, each.gradient_norm) for each in (report, known)]
        np.testing.assert_allclose(*figures, rtol=1e-12)
    found = model.get_parameters()
    np.testing.assert_allclose(found, other.get_parameters(), rtol=0, atol=1e-12)
    saved = optimizer.serialize()
    again, second = build(backend, None, "adam", layout=layout, use_quantization=False)
    second.deserialize(saved)
    second.bind(again)
    for name, vector in optimizer.state.items():
        np.testing.assert_array_equal(second.state[name], vector)
    mine = {name: vector.copy() for name, vector in optimizer.state.items()}
    if model.engine.replica.across.rank:
        optimizer.state["first_moment"].fill(9)
    optimizer.synchronize_optimizer_state()
    assert (optimizer.state["first_moment"] == mine["first_moment"]).all()


def test_a_plain_model_has_nodes_for_replicas(monkeypatch):
    monkeypatch.setenv("MPISHARD_VIRTUAL_NODES", "2")

    def main(backend):
        config = ms.ShardingConfiguration(backend)
        optimizer = GradientCompressionOptimizer(make_rule("sgd"), config, strategy="fsdp")
        optimizer.optimize(
            ms.OptimizationInputData(
                model=plain(), x_train=X, y_train=Y, max_steps=2, progress=False
            )
        )
        across = optimizer.model.engine.replica.across
        assert (across.world_size, across.axis, config.replica_size) == (2, "replica", None)
        assert type(optimizer.model) is ms.FSDPModel
        leaves = ms.ShardingConfiguration(backend, gradient_leaves=4)
        with pytest.raises(ValueError, match=r"each of the 2 nodes a replica.*leave out grad"):
            GradientCompressionOptimizer(make_rule("sgd"), leaves)

    ms.run_in_threads(4, main)


@pytest.mark.parametrize("layout", ["fsdp/2", "1x2"])
@in_worlds(4)
def test_replicas_that_compress_nothing_take_every_rule(backend, layout):
    model, strategy = wrap(backend, plain(), layout)
    optimizer = GradientCompressionOptimizer(
        LBFGS(), model.sharding_configuration, use_quantization=False, strategy=strategy
    )
    place = model.data_rank, model.data_size
    losses = [optimizer.step(model, *share(0, *place)) for _ in range(4)]
    alone = ms.DDPModel(plain(), ms.ShardingConfiguration(backend))
    other = ms.DDPOptimizer(LBFGS(), alone.sharding_configuration)
    x, y = share(0, 0, 1)
    rows = ms.ShardLayout(len(x), backend.world_size).slice(backend.rank)
    expected = [other.step(alone, x[rows], y[rows]) for _ in range(4)]
    np.testing.assert_allclose(losses, expected, rtol=1e-12)
    np.testing.assert_allclose(model.get_parameters(), alone.get_parameters(), atol=1e-12)


@in_worlds(2, 3)
def test_ranks_must_compress_alike_and_a_compressed_model_has_one_optimizer(backend, shared_path):
    model, _ = build(backend, "int8")
    config = model.sharding_configuration
    wrong = GradientCompressionOptimizer(make_rule("sgd"), config, 0.1 * (1 + (backend.rank > 0)))
    with pytest.raises(ValueError, match=r"compression_ratio is 0\.1, 0\.2"):
        wrong.bind(model)
    model, optimizer = build(backend, "int8")
    optimizer.bind(model)
    with pytest.raises(ShardingError, match=r"call its reset\(\) first"):
        ms.DDPOptimizer(make_rule("sgd"), model.sharding_configuration).bind(model)
    optimizer.reset()
    exact = ms.DDPOptimizer(make_rule("sgd"), model.sharding_configuration)
    exact.step(model, X, Y)
    ms.checkpoint.save(shared_path / "exact", model, exact)
    again, compressed = build(backend, "int8")
    with pytest.raises(CheckpointError, match="error0"):
        ms.checkpoint.load(shared_path / "exact", again, compressed)


@pytest.mark.parametrize(
    "code",
    [Quantization(2), Quantization(256), Int8(), TopK(0.1), TopK(1.0)],
    ids=str,
)
@pytest.mark.parametrize("length", [0, 1, 5, 128, 129, 3000])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_code_has_its_length_and_rounds_as_it_says(code, length, dtype):
    values = np.random.default_rng(length).standard_normal(length).astype(dtype)
    key = (0, 1, 2, 3, 4)
    encoded = code.encode(values, key)
    assert encoded.dtype == np.uint8
    assert encoded.size == code.wire_bytes(length, values.itemsize)
    found = np.full_like(values, np.nan)
    code.decode(encoded, found, key)
    assert np.isfinite(found).all()
    same = np.full_like(values, 0.25)
    code.decode(code.encode(same, key), found, key)
    if not isinstance(code, TopK):
        np.testing.assert_allclose(found, same, rtol=1e-6)
