"""Update rules on a GPU, or on its stand-in, do what they do on the host."""

import numpy as np
import pytest

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
