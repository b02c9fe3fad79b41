"""Update rules against the textbook, whatever the range is cut into."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from mpishard.optimizers import SGD, AdamW, Constant, Cosine, Segment, UpdateContext, WarmUp

STEPS = 20
LENGTH = 100_000  # several chunks


def gradients(step: int) -> np.ndarray:
    return np.random.default_rng(step).standard_normal(LENGTH)


def run(rule, cuts=(), dtype=np.float64, options_at=((0, LENGTH, "w"),)):
    """Parameters after 20 updates, each range between cuts updated on its own."""
    p = np.linspace(-1, 1, LENGTH).astype(dtype)
    state = {name: np.zeros(LENGTH, dtype) for name in rule.needed_state()}
    bounds = [0, *cuts, LENGTH]
    for step in range(STEPS):
        g = (gradients(step) * 8).astype(dtype)
        context = UpdateContext(step + 1, rule.learning_rate(step), 1 / 8)
        for start, stop in pairwise(bounds):
            mine = slice(start, stop)
            segments = [
                Segment(name, max(a, start) - start, min(b, stop) - start)
                for a, b, name in options_at
                if a < stop and start < b
            ]
            rule.update(p[mine], g[mine], {k: v[mine] for k, v in state.items()}, segments, context)
    return p


def textbook_sgd(momentum=0.0, nesterov=False, decay=0.0, rate=0.1):
    p, v = np.linspace(-1, 1, LENGTH), np.zeros(LENGTH)
    for step in range(STEPS):
        g = gradients(step) + decay * p
        v = momentum * v + g
        p = p - rate * (g + momentum * v if nesterov else v)
    return p


def textbook_adamw(rate=1e-3, b1=0.9, b2=0.999, epsilon=1e-8, decay=0.0):
    p, m, v = np.linspace(-1, 1, LENGTH), np.zeros(LENGTH), np.zeros(LENGTH)
    for step in range(STEPS):
        t, g = step + 1, gradients(step)
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        p = p - rate * decay * p
        p = p - rate * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + epsilon)
    return p


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (SGD(0.1), textbook_sgd()),
        (SGD(0.1, 0.9), textbook_sgd(0.9)),
        (SGD(0.1, 0.9, nesterov=True, weight_decay=0.3), textbook_sgd(0.9, True, 0.3)),
        (AdamW(), textbook_adamw()),
        (
            AdamW(0.01, 0.8, 0.95, 1e-3, weight_decay=0.2),
            textbook_adamw(0.01, 0.8, 0.95, 1e-3, 0.2),
        ),
    ],
)
def test_twenty_steps(rule, expected):
    np.testing.assert_allclose(run(rule), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rule", [SGD(0.1, 0.9, weight_decay=0.1), AdamW(weight_decay=0.1)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_cuts_change_no_bit(rule, dtype):
    whole = run(rule, dtype=dtype)
    assert whole.dtype == dtype
    for cuts in [(1,), (5_000,), (3, 4, 9_999), tuple(range(0, LENGTH, 997))]:
        assert (run(rule, cuts, dtype) == whole).all()


def test_options_by_name():
    places = ((0, 4_000, "a.weight"), (4_000, 4_003, "a.bias"), (4_003, LENGTH, "b.weight"))
    rule = AdamW(weight_decay=0.2, parameter_options={
        "*.bias": {"weight_decay": 0}, "b.*": {"learning_rate_scale": 0.5, "weight_decay": 0.1}
    })  # fmt: skip
    expected = np.concatenate([
        textbook_adamw(decay=0.2)[:4_000],
        textbook_adamw()[4_000:4_003],
        textbook_adamw(rate=5e-4, decay=0.1)[4_003:],
    ])  # fmt: skip
    for cuts in [(), (4_001,), (10, 4_002, 4_003, 8_000)]:
        np.testing.assert_allclose(run(rule, cuts, options_at=places), expected, rtol=0, atol=1e-12)


def test_schedules():
    warm = WarmUp(4, Cosine(1.0, 10, minimum=0.1))
    assert [warm(k) for k in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert warm(9) == pytest.approx(0.55)
    assert warm(14) == warm(99) == pytest.approx(0.1)
    assert SGD(Constant(0.3)).learning_rate(7) == 0.3


def test_clip_factor():
    assert SGD(clip_global_norm=2.0).clip_factor(1.9) == 1.0
    assert SGD(clip_global_norm=2.0).clip_factor(8.0) == 0.25
    assert SGD().clip_factor(1e9) == 1.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(-1), "learning_rate must be above 0"),
        (lambda: SGD(momentum=1.0), r"momentum must be in \[0, 1\), got 1.0"),
        (lambda: SGD(nesterov=True), "nesterov needs a momentum"),
        (lambda: AdamW(beta2=-0.1), "beta2 must be"),
        (lambda: AdamW(epsilon=0), "epsilon must be above 0"),
        (lambda: AdamW(weight_decay=-1), "weight_decay must be 0 or more"),
        (lambda: AdamW(clip_global_norm=0), "clip_global_norm must be above 0"),
        (lambda: AdamW(parameter_options={"*": {"decay": 1}}), "known are weight_decay"),
        (lambda: AdamW(parameter_options={"*": {"weight_decay": -1}}), "must be 0 or more"),
        (lambda: Cosine(1.0, 0), "steps must be 1 or more"),
        (lambda: Cosine(1.0, 5, minimum=2.0), "minimum must be in"),
        (lambda: WarmUp(-1, Constant(1.0)), "steps must be 0 or more"),
    ],
)
def test_mistakes(make, message):
    with pytest.raises(ValueError, match=message):
        make()
