"""Update rules on a GPU, or on its stand-in, give the results of the host."""

import numpy as np
import pytest
from cupy_stand_in.counts import counting

import mpishard as ms
from mpishard.base.arrays import to_host
from mpishard.optimizers import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Lion,
    PieceViews,
    RMSprop,
    Segment,
    UpdateContext,
)
from mpishard.optimizers.rules.compiled import Body, elements
from mpishard.optimizers.rules.pieces import joined
from mpishard.testing.worlds import in_worlds

RULES = {
    "sgd": SGD(0.01),
    "sgd, decay": SGD(0.01, weight_decay=0.1),
    "momentum": SGD(0.01, 0.9, weight_decay=0.1),
    "nesterov": SGD(0.01, 0.9, nesterov=True, clip_value=0.1),
    "adagrad": Adagrad(0.01, weight_decay=0.1),
    "rmsprop": RMSprop(0.01),
    "rmsprop, momentum": RMSprop(0.01, momentum=0.9, weight_decay=0.1),
    "rmsprop, centered": RMSprop(0.01, momentum=0.9, centered=True),
    "adam": Adam(0.01, weight_decay=0.1),
    "adam, clipped": Adam(0.01, clip_value=0.1),
    "adamw": AdamW(0.01, weight_decay=0.1),
    "decay of parts": AdamW(0.01, weight_decay=0.1, parameter_options={"b": {"weight_decay": 0}}),
    "lion": Lion(0.01, weight_decay=0.1),
}


LENGTH = 1000


def updated(rule, place, dtype, *, pieces=1, tiny=0):
    """Parameters and state after 4 updates; the first ``tiny`` gradients are about 1e-39."""
    generator = np.random.default_rng(0)
    first, gradients = generator.standard_normal((2, LENGTH)).astype(dtype)
    gradients[:tiny] *= np.asarray(1e-39, dtype)
    first[: tiny // 2] *= np.asarray(1e-39, dtype)
    p, g = place(first), place(gradients)
    state = {kind: place(np.zeros(LENGTH, dtype)) for kind in rule.needed_state()}
    ranges = []
    for piece in range(pieces):
        low, high = piece * LENGTH // pieces, (piece + 1) * LENGTH // pieces
        bounds = [("w", 0, 700), ("b", 700, LENGTH)]
        segments = tuple(
            Segment(name, max(start, low) - low, min(stop, high) - low)
            for name, start, stop in bounds
            if start < high and low < stop
        )
        views = {kind: vector[low:high] for kind, vector in state.items()}
        ranges.append(PieceViews(p[low:high], g[low:high], views, segments))
    for step in range(4):
        rule.update_all(ranges, UpdateContext(step + 1, rule.learning_rate(step), 0.25))
    return {"parameters": to_host(p)} | {kind: to_host(state[kind]) for kind in state}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in RULES), *((name, "float64") for name in [*RULES][::3])],
)
def test_an_update_on_a_gpu_has_the_bits_of_the_host(name, dtype, gpu):
    expected = updated(RULES[name], np.array, dtype, tiny=100)
    found = updated(RULES[name], gpu.asarray, dtype, tiny=100)
    assert found.keys() == expected.keys()
    for kind, values in expected.items():
        np.testing.assert_array_equal(found[kind], values, err_msg=kind)
    assert np.abs(found["parameters"] - updated(RULES[name], np.array, dtype)["parameters"]).max()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_lamb_on_a_gpu(dtype, gpu):
    expected, found = (
        updated(LAMB(0.01, weight_decay=0.1), place, dtype) for place in (np.array, gpu.asarray)
    )
    tolerance = 1e-6 if dtype == "float32" else 1e-14
    for kind, values in expected.items():
        np.testing.assert_allclose(found[kind], values, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ["adamw", "decay of parts"])
def test_pieces_that_lie_end_to_end_are_updated_by_one_launch(name, gpu):
    if not hasattr(gpu, "__stand_in__"):
        pytest.skip("only the stand-in counts launches")
    with counting() as counts:
        found = updated(RULES[name], gpu.asarray, "float64", pieces=7)
    ranges = {"adamw": 1, "decay of parts": 2}[name]
    assert counts.launches == 4 * ranges
    expected = updated(RULES[name], np.array, "float64")
    np.testing.assert_array_equal(found["parameters"], expected["parameters"])


def test_only_ranges_that_lie_end_to_end_in_all_their_arrays_are_joined(gpu):
    p, g, m = (gpu.zeros(12) for _ in range(3))

    def owned(p, g, m, name):
        return PieceViews(p, g, {"m": m}, (Segment(name, 0, int(p.size)),))

    first, second = owned(p[:5], g[:5], m[:5], "a"), owned(p[5:9], g[5:9], m[5:9], "b")
    (whole,) = joined([first, second])
    assert [array.size for array in (whole.parameters, whole.gradients, whole.state["m"])] == [
        9
    ] * 3
    assert whole.segments == (Segment("a", 0, 5), Segment("b", 5, 9))
    parameters = whole.parameters
    parameters += 1
    assert to_host(p).tolist() == [1] * 9 + [0] * 3
    for other in (
        owned(p[6:9], g[5:8], m[5:8], "b"),
        owned(p[5:9], gpu.zeros(4), m[5:9], "b"),
        owned(p[5:9], g[5:9], m[4:8], "b"),
    ):
        assert len(joined([first, other])) == 2
    host = [owned(*(np.zeros(9)[part] for _ in range(3)), "a") for part in (slice(4), slice(4, 9))]
    assert joined(host) == host


class Cubic(SGD):
    """Its body has a power, for which kernels have no operation."""

    def body(self, learning_rate, weight_decay, context):
        return Body(_cubic, (context.gradient_scale, learning_rate))


def _cubic(p, g, v, scale, rate):
    for i in elements(p.size):
        theta = p[i]
        theta -= (g[i] * scale) ** 3 * rate
        p[i] = theta


class Closed(SGD):
    """Its body is a closure, whose values a kernel would keep for ever."""

    def body(self, learning_rate, weight_decay, context):
        def step(p, g, v):
            p -= g * (learning_rate * context.gradient_scale)

        return Body(step, ())


@pytest.mark.parametrize("rule", [Cubic(0.01), Closed(0.01)])
def test_a_body_that_cannot_be_a_kernel_runs_all_the_same(rule, gpu):
    expected, found = (updated(rule, place, "float64") for place in (np.array, gpu.asarray))
    np.testing.assert_allclose(found["parameters"], expected["parameters"], rtol=1e-14)


@pytest.mark.parametrize(
    ("strategy", "what"),
    [("fsdp", "int8"), ("zero1", "top-k"), ("fsdp", "late")],
)
@in_worlds(4)
def test_compressed_and_late_gradients_of_replicas(backend, gpu, strategy, what):
    generator = np.random.default_rng(0)
    x, y = generator.standard_normal((24, 6)), generator.standard_normal((24, 3))
    mine = ms.ShardLayout(24, 4).slice(backend.rank)
    found = []
    for device, place in (("cpu", np.asarray), ("cuda", gpu.asarray)):
        config = ms.ShardingConfiguration(backend, replica_size=2, minimum_parameter_group_size=1)
        model = ms.as_distributed(ms.nn.MLP([6, 16, 3], seed=1, device=device), config, strategy)
        if what == "late":
            optimizer = ms.AsyncSGDOptimizer(Adam(1e-3), config, 2, strategy=strategy)
        else:
            optimizer = ms.GradientCompressionOptimizer(
                Adam(1e-3), config, method=what, strategy=strategy
            )
        for _ in range(5):
            optimizer.step(model, place(x[mine]), place(y[mine]))
        if what == "late":
            assert optimizer.apply_pending_gradients() == 2
        found.append(to_host(model.get_parameters()))
    np.testing.assert_allclose(*found, rtol=0, atol=1e-12)
