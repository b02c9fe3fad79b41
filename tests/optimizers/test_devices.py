"""Update rules on a GPU, or on its stand-in, do what they do on the host."""

import numpy as np
import pytest

import mpishard as ms
from mpishard.arrays import to_host
from mpishard.optimizers import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Lion,
    OwnedRange,
    RMSprop,
    Segment,
    UpdateContext,
)
from mpishard.testing.worlds import in_worlds

RULES = {
    "sgd": SGD(0.01),
    "nesterov": SGD(0.01, 0.9, nesterov=True, weight_decay=0.1),
    "adagrad": Adagrad(0.01),
    "rmsprop": RMSprop(0.01),
    "adam": Adam(0.01, weight_decay=0.1),
    "adamw": AdamW(0.01, weight_decay=0.1, parameter_options={"b": {"weight_decay": 0.0}}),
    "lion": Lion(0.01, weight_decay=0.1),
    "lamb": LAMB(0.01, weight_decay=0.1),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rules(name, dtype, gpu):
    rule = RULES[name]
    generator = np.random.default_rng(0)
    first, gradients = generator.standard_normal((2, 1000)).astype(dtype)
    segments = (Segment("w", 0, 700), Segment("b", 700, 1000))
    results = []
    for place in (np.array, gpu.asarray):
        p, g = place(first), place(gradients)
        state = {kind: place(np.zeros(1000, dtype)) for kind in rule.needed_state()}
        for step in range(4):
            context = UpdateContext(step + 1, rule.learning_rate(step), 0.25)
            rule.update_all([OwnedRange(p, g, state, segments)], context)
        results.append(to_host(p))
    tolerance = 1e-6 if dtype == "float32" else 1e-14
    np.testing.assert_allclose(*results, rtol=0, atol=tolerance)
    assert np.abs(results[1] - first).max() > 0.001


@pytest.mark.parametrize(
    ("strategy", "what"),
    [("fsdp", "int8"), ("zero1", "top-k"), ("ddp", "late"), ("fsdp", "late")],
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
