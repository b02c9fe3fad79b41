"""Compressed gradients: against textbook versions of all ranks in one process, and by the byte."""

from __future__ import annotations

import numpy as np
import pytest

import mpishard as ms
from mpishard import nn
from mpishard.errors import CheckpointError, NonFiniteLossError, ShardingError
from mpishard.models.stores.compression import Int8, Quantization, RandomK, TopK
from mpishard.optimizers import GradientCompressionOptimizer
from mpishard.testing.worlds import in_worlds

generator = np.random.default_rng(3)
X = generator.standard_normal((23, 6))
Y = np.sin(X[:, :3])
RATIO, RANK, SEED = 0.3, 1, 11
METHODS = ("quantization", "int8", "top-k", "random-k", "powersgd")

by_method = pytest.mark.parametrize("method", METHODS)


def plain():
    return nn.MLP([6, 8, 3], activation="tanh", seed=2)


def make_rule(name):
    if name == "adam":
        return ms.optimizers.Adam(1e-3)
    return ms.optimizers.SGD(1e-3, momentum=0.9)


def build(backend, method, rule="sgd", unit=1, **given):
    config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=unit)
    model = ms.DDPModel(plain(), config)
    options = {"compression_ratio": RATIO, "method": method, "rank": RANK, "seed": SEED} | given
    return model, GradientCompressionOptimizer(make_rule(rule), config, **options)


def share(step, rank, size):
    """Uneven, and of other samples in each step."""
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


def drawn(values, key):
    count = max(1, int(RATIO * values.size))
    places = np.random.default_rng(key[:-1]).choice(values.size, count, replace=False)
    found = np.zeros_like(values)
    found[places] = values[places]
    return found


def approximate(method, values, key):
    if not values.size:
        return values
    return {
        "quantization": lambda: mirrored(values),
        "int8": lambda: stochastic(values, key),
        "top-k": lambda: largest(values),
        "random-k": lambda: drawn(values, key),
    }[method]()


class Textbook:
    """All ranks of a world, one after the other, on whole vectors."""

    def __init__(self, method, size, units, entries, keeps=True, start_step=0):
        length = units[-1].stop
        self.method, self.size, self.units, self.entries = method, size, units, entries
        self.keeps, self.start_step = keeps, start_step
        self.errors = [np.zeros(length) for _ in range(size)]
        self.sums = np.zeros(length)
        self.factors = {}

    def reduce(self, gradients, step):
        if step < self.start_step:
            return sum(gradients)
        given = [g + e for g, e in zip(gradients, self.errors, strict=True)]
        self.errors = [g.copy() for g in given]
        result = np.zeros_like(self.sums)
        if self.method == "powersgd":
            self._powers(given, result)
        else:
            self._codes(given, result, step)
        if not self.keeps:
            self.errors = [0 * e for e in self.errors]
            self.sums[:] = 0
        return result

    def _codes(self, given, result, step):
        for unit in self.units:
            layout = ms.ShardLayout(unit.length, self.size)
            for owner in range(self.size):
                piece = slice(unit.start + layout.start(owner),
                              unit.start + layout.start(owner) + layout.size(owner))  # fmt: skip
                key = (SEED, step, unit.index, owner)
                total = np.zeros(layout.size(owner))
                for rank in range(self.size):
                    told = approximate(self.method, given[rank][piece], (*key, 1 + rank))
                    self.errors[rank][piece] -= told
                    total += told
                total += self.sums[piece]
                result[piece] = approximate(self.method, total, (*key, 0))
                self.sums[piece] = total - result[piece]

    def _powers(self, given, result):
        for number, entry in enumerate(self.entries):
            place = slice(entry.start, entry.stop)
            shape = entry.shape
            if len(shape) < 2 or RANK * sum(shape) >= entry.size:
                result[place] = sum(g[place] for g in given)
                for error in self.errors:
                    error[place] = 0
                continue
            start = np.random.default_rng((SEED, number)).standard_normal((shape[1], RANK))
            second = self.factors.get(entry.name, start)
            matrices = [g[place].reshape(shape) for g in given]
            basis, _ = np.linalg.qr(sum(m @ second for m in matrices))
            parts = [m.T @ basis for m in matrices]
            for error, part in zip(self.errors, parts, strict=True):
                error[place] -= (basis @ part.T).ravel()
            self.factors[entry.name] = sum(parts)
            result[place] = (basis @ self.factors[entry.name].T).ravel()


def train_textbook(method, rule, size, units, entries, steps, **options):
    model, book = plain(), Textbook(method, size, units, entries, **options)
    theta = model.get_parameters()
    first, second = np.zeros_like(theta), np.zeros_like(theta)
    for step in range(steps):
        batches = [share(step, rank, size) for rank in range(size)]
        weight = sum(y.size // y.shape[1] for _, y in batches)
        gradients = []
        for x, y in batches:
            _, gradient = model.with_parameters(theta).compute_loss_and_gradients(x, y)
            gradients.append(gradient * len(x))
        mean = book.reduce(gradients, step) / weight
        if rule == "sgd":
            first = 0.9 * first + mean
            theta = theta - 1e-3 * first
        else:
            first = 0.9 * first + 0.1 * mean
            second = 0.999 * second + 0.001 * mean**2
            corrected = second / (1 - 0.999 ** (step + 1))
            theta = theta - 1e-3 * first / (1 - 0.9 ** (step + 1)) / (np.sqrt(corrected) + 1e-8)
    return theta, book


@by_method
@in_worlds(1, 2, 3, 4)
def test_fifty_steps_are_the_textbooks(backend, method):
    rule = "sgd" if backend.world_size % 2 else "adam"
    start = 10 if backend.world_size in (2, 3) else 0
    model, optimizer = build(
        backend, method, rule, unit=1 if rule == "sgd" else 1000, start_step=start
    )
    for step in range(50):
        optimizer.step(model, *share(step, backend.rank, backend.world_size))
    everyones = backend.all_gather(model.get_parameters()[None])
    errors = backend.all_gather(optimizer._state.errors.own[None].copy())
    if backend.rank == 0:
        expected, book = train_textbook(
            method, rule, backend.world_size, model.units, model.parameter_entries, 50,
            start_step=start,
        )  # fmt: skip
        assert (everyones == everyones[0]).all()
        np.testing.assert_allclose(everyones[0], expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(errors, book.errors, rtol=0, atol=1e-9)
        assert errors.any()


@in_worlds(1, 3)
def test_without_error_feedback_what_is_left_out_is_lost(backend):
    model, optimizer = build(backend, "top-k", error_feedback=False)
    for step in range(20):
        optimizer.step(model, *share(step, backend.rank, backend.world_size))
    expected, _ = train_textbook(
        "top-k", "sgd", backend.world_size, model.units, model.parameter_entries, 20, keeps=False
    )
    np.testing.assert_allclose(model.get_parameters(), expected, rtol=0, atol=1e-12)
    assert not optimizer._state.errors.own.any()


@pytest.mark.usefixtures("messages_only")
@by_method
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@in_worlds(1, 2, 3, 4)
def test_the_bytes_on_the_wire_are_the_documented_ones(backend, method, dtype):
    config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=1)
    chain = nn.MLP([40, 64, 24], activation="tanh", seed=2, dtype=dtype)
    model = ms.DDPModel(chain, config)
    optimizer = GradientCompressionOptimizer(
        make_rule("sgd"), config, 0.01, method=method, rank=4, start_step=1
    )
    optimizer.bind(model)
    x = np.ones((4, 40), dtype)
    y = np.ones((4, 24), dtype)
    backend.traffic.reset()
    backend.all_reduce(np.zeros(7))
    small = backend.traffic.total_bytes
    sent = []
    for _ in range(4):
        backend.traffic.reset()
        optimizer.step(model, x, y)
        sent.append(backend.traffic.total_bytes - small)
    first, total, *later = (int(n) for n in backend.all_reduce(np.array(sent)))
    assert later == [total] * 2
    size, b, expected = backend.world_size, np.dtype(dtype).itemsize, 0
    assert first == 2 * (size - 1) * b * model.parameter_count
    pieces = [n for unit in model.units for n in ms.ShardLayout(unit.length, size).sizes]
    if method == "powersgd":
        expected = b * (4 * (40 + 64) + 64 + 4 * (64 + 24) + 24)
    for n in pieces if method != "powersgd" else ():
        k = max(1, n // 100)
        expected += {
            "quantization": n + 2 * b, "int8": n + b * -(-n // 128), "top-k": k * (4 + b),
            "random-k": k * b,
        }[method]  # fmt: skip
    assert total == 2 * (size - 1) * expected
    if dtype == np.float32 and size > 1:
        whole = 2 * (size - 1) * 4 * model.parameter_count
        limit = {"quantization": 0.26, "int8": 0.26, "top-k": 0.025, "random-k": 0.0125}
        assert total <= limit.get(method, 0.3) * whole


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


@by_method
@pytest.mark.parametrize("start_step", [0, 5])
@in_worlds(1, 2, 3)
def test_a_checkpoint_has_the_errors_of_each_rank(backend, method, start_step, shared_path):
    def steps(model, optimizer, first, last):
        for step in range(first, last):
            optimizer.step(model, *share(step, backend.rank, backend.world_size))

    model, optimizer = build(backend, method, start_step=start_step)
    steps(model, optimizer, 0, 4)
    ms.checkpoint.save(shared_path / "at4", model, optimizer)
    steps(model, optimizer, 4, 8)
    again, other = build(backend, method, start_step=start_step)
    ms.checkpoint.load(shared_path / "at4", again, other)
    steps(again, other, 4, 8)
    assert again.get_parameters().tobytes() == model.get_parameters().tobytes()
    for name in ("own", "reduced"):
        mine, expected = (getattr(o._state.errors, name) for o in (other, optimizer))
        assert mine.tobytes() == expected.tobytes()


@by_method
@pytest.mark.parametrize(("pattern", "unit"), [("linear0.*", 1), ("*.bias", 1000)])
@in_worlds(1, 2, 3)
def test_a_checkpoint_of_a_model_with_frozen_parameters(
    backend, method, pattern, unit, shared_path
):
    def run(first, last, at):
        model, optimizer = build(backend, method, unit=unit)
        optimizer.wrapped_optimizer.parameter_options = {pattern: {"frozen": True}}
        optimizer.bind(model)
        if first:
            ms.checkpoint.load(shared_path / "at2", model, optimizer)
        for step in range(first, last):
            if step == at:
                ms.checkpoint.save(shared_path / "at2", model, optimizer)
            optimizer.step(model, *share(step, backend.rank, backend.world_size))
        return model.get_parameters()

    whole = run(0, 4, 2)
    assert run(2, 4, None).tobytes() == whole.tobytes()
    assert (whole != plain().get_parameters()).any()


@by_method
def test_another_number_of_ranks_takes_the_same_sum_of_errors(method, tmp_path):
    def errors(backend, write):
        model, optimizer = build(backend, method)
        if write:
            for step in range(3):
                optimizer.step(model, *share(step, backend.rank, backend.world_size))
            ms.checkpoint.save(tmp_path / "run", model, optimizer)
        else:
            ms.checkpoint.load(tmp_path / "run", model, optimizer)
        kept = optimizer._state.errors
        own = backend.all_reduce(kept.own.copy())
        total = [np.zeros(0)]
        for unit in model.units:
            start = kept.places[unit.index][1]
            size = ms.ShardLayout(unit.length, backend.world_size).size(backend.rank)
            total.append(backend.all_gather(kept.reduced[start : start + size].copy()))
        factors = np.concatenate(
            [np.zeros(0), *(kept.factors[n].ravel() for n in sorted(kept.factors))]
        )
        return np.concatenate([own, *total, factors])

    expected = ms.run_in_threads(3, errors, True)[0]
    assert expected.any()
    for size in (1, 2, 3, 5):
        for found in ms.run_in_threads(size, errors, False):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)


@in_worlds(1, 2, 3)
def test_optimize_resumes_and_a_plain_model_is_wrapped(backend, shared_path):
    def run(limit, folder):
        config = ms.ShardingConfiguration(backend)
        optimizer = GradientCompressionOptimizer(make_rule("adam"), config, method="int8")
        return optimizer.optimize(ms.OptimizationInputData(
            model=plain(), x_train=X, y_train=Y, batch_size=8, max_steps=limit, progress=False,
            checkpoint=shared_path / folder,
        ))  # fmt: skip

    whole = run(7, "whole")
    run(3, "parts")
    rest = run(7, "parts")
    assert rest.loss_history == whole.loss_history[3:]


@by_method
@in_worlds(1, 2)
def test_a_step_that_fails_changes_no_error(backend, method):
    model, optimizer = build(backend, method)
    for step in range(2):
        optimizer.step(model, *share(step, backend.rank, backend.world_size))
    before = optimizer._state.errors.own.copy()
    x, y = share(2, backend.rank, backend.world_size)
    bad = x.copy()
    if backend.rank == backend.world_size - 1:
        bad[0, 0] = np.nan
    with pytest.raises(NonFiniteLossError):
        optimizer.step(model, bad, y)
    assert optimizer._state.errors.own.tobytes() == before.tobytes()
    optimizer.step(model, x, y)
    expected, _ = train_textbook(
        method, "sgd", backend.world_size, model.units, model.parameter_entries, 3
    )
    np.testing.assert_allclose(model.get_parameters(), expected, rtol=0, atol=1e-12)


@in_worlds(2, 3)
def test_accumulated_batches_are_compressed_once_and_a_rank_may_have_none(backend):
    model, optimizer = build(backend, "top-k")
    x, y = share(0, backend.rank, backend.world_size)
    if backend.rank == 1:
        x, y = x[:0], y[:0]
    with model.accumulate():
        optimizer.step(model, x[:1], y[:1])
    optimizer.step(model, x[1:], y[1:])
    other, second = build(backend, "top-k")
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
    assert model.engine.gradients_user is None
    assert off.serialize()
    for given, match in (
        ({"compression_ratio": 0}, r"compression_ratio must be in \(0, 1\], got 0"),
        ({"compression_ratio": np.nan}, "compression_ratio must be in"),
        ({"method": "zip"}, "method must be one of quantization, int8"),
        ({"rank": 0}, "rank must be 1 or more"),
        ({"seed": -1}, "seed must be 0 or more"),
        ({"start_step": -1}, "start_step must be 0 or more, got -1"),
    ):
        with pytest.raises(ValueError, match=match):
            GradientCompressionOptimizer(rule, config, **given)
    with pytest.raises(TypeError, match="start_step must be an integer, got 3"):
        GradientCompressionOptimizer(rule, config, start_step=3.0)
    for name, value in (("enable_gradient_compression", True), ("gradient_leaves", 4)):
        other = ms.ShardingConfiguration(backend, **{name: value})
        with pytest.raises(ValueError, match=f"{name}={value} contradicts"):
            GradientCompressionOptimizer(rule, other).bind(ms.DDPModel(plain(), other))
    with pytest.raises(ShardingError, match="updates DDPModel"):
        made.bind(ms.FSDPModel(plain(), config))


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
    with pytest.raises(NotImplementedError, match="each rank's own"):
        optimizer.serialize()
    optimizer.reset()
    exact = ms.DDPOptimizer(make_rule("sgd"), model.sharding_configuration)
    exact.step(model, X, Y)
    ms.checkpoint.save(shared_path / "exact", model, exact)
    again, compressed = build(backend, "int8")
    with pytest.raises(CheckpointError, match="error0"):
        ms.checkpoint.load(shared_path / "exact", again, compressed)


@pytest.mark.parametrize(
    "code",
    [Quantization(2), Quantization(256), Int8(), TopK(0.1), RandomK(0.5), TopK(1.0)],
    ids=str,
)
@pytest.mark.parametrize("length", [0, 1, 5, 128, 129, 3000])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_code_has_its_length_and_rounds_as_it_says(code, length, dtype):
    values = np.random.default_rng(length).standard_normal(length).astype(dtype)
    key = (0, 1, 2, 3, 4)
    told = code.encode(values, key)
    assert told.dtype == np.uint8
    assert told.size == code.wire_bytes(length, values.itemsize)
    found = np.full_like(values, np.nan)
    code.decode(told, found, key)
    assert np.isfinite(found).all()
    same = np.full_like(values, 0.25)
    code.decode(code.encode(same, key), found, key)
    if not isinstance(code, TopK | RandomK):
        np.testing.assert_allclose(found, same, rtol=1e-6)
