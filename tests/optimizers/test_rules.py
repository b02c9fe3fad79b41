"""Update rules against PyTorch and the papers, for any cut of the vector into pieces."""

from __future__ import annotations

import functools
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from mpishard.optimizers import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Constant,
    Cosine,
    Lion,
    PieceViews,
    RMSprop,
    Segment,
    UpdateContext,
    WarmUp,
)
from mpishard.optimizers.rules.pieces import count_missed

STEPS = 20
LENGTH = 100_000  # several chunks
TORCH = json.loads(Path(__file__).with_name("torch_reference.json").read_text())


@functools.cache
def gradients(step: int) -> np.ndarray:
    return np.random.default_rng(step).standard_normal(LENGTH)


class Returning(SGD):
    def update(self, parameters, gradients, state, segments, context):
        return parameters - context.learning_rate * gradients


def test_a_rule_that_returns_parameters_instead_of_changing_them_is_refused():
    owned = PieceViews(np.ones(3), np.ones(3), {}, (Segment("w", 0, 3),))
    with pytest.raises(TypeError, match=r"Returning\.update must change the parameters in place"):
        Returning(0.1).update_all([owned], UpdateContext(1, 0.1, 1.0))


def test_a_rule_that_changes_its_parameters_may_return_them():
    class Changing(SGD):
        def update(self, parameters, gradients, state, segments, context):
            parameters -= context.learning_rate * gradients
            return parameters

    owned = PieceViews(np.ones(3), np.ones(3), {}, (Segment("w", 0, 3),))
    Changing(0.5).update_all([owned], UpdateContext(1, 0.5, 1.0))
    assert owned.parameters.tolist() == [0.5] * 3


def test_a_rule_with_its_own_update_gets_the_options_of_each_parameter():
    seen = []

    class Own(SGD):
        def update(self, parameters, gradients, state, segments, context):
            seen.append(([s.name for s in segments], context.weight_decay))
            parameters -= context.learning_rate * gradients

    options = {"b": {"learning_rate_scale": 0.1, "weight_decay": 0.2}, "c": {"learning_rate": 2.0}}
    segments = [Segment(name, 2 * i, 2 * i + 2) for i, name in enumerate("abc")]
    owned = PieceViews(np.zeros(6), np.ones(6), {}, segments)
    Own(0.5, parameter_options=options).update_all([owned], UpdateContext(1, 0.5, 1.0))
    assert owned.parameters.tolist() == [-0.5, -0.5, -0.05, -0.05, -2, -2]
    assert seen == [(["a"], 0), (["b"], 0.2), (["c"], 0)]


def test_a_rule_that_multiplies_by_its_schedule_or_is_not_initialized_is_refused():
    class Mine(SGD):
        def update(self, parameters, gradients, state, segments, context):
            parameters -= gradients * self.learning_rate

    class Bare(Mine):
        def __init__(self, rate):
            self.rate = rate

    owned = PieceViews(np.zeros(2), np.ones(2), {}, [Segment("a", 0, 2)])
    with pytest.raises(
        TypeError, match=r"Constant\(rate=0\.5\) is no number: .*context\.learning_rate"
    ):
        Mine(0.5).update_all([owned], UpdateContext(1, 0.5, 1.0))
    with pytest.raises(TypeError, match=r"Bare\.__init__ must call super\(\)\.__init__"):
        _ = Bare(0.5).checked_options


def run(rule, cuts=(), dtype=np.float64, options_at=((0, LENGTH, "w"),), first=-1.0):
    """Return parameters after 20 updates; the pieces between ``cuts`` are those of one rank."""
    p = np.linspace(first, 1, LENGTH).astype(dtype)
    state = {name: np.zeros(LENGTH, dtype) for name in rule.needed_state()}
    bounds = [0, *cuts, LENGTH]
    for step in range(STEPS):
        g = (gradients(step) * 8).astype(dtype)
        g.flags.writeable = False
        ranges = []
        for start, stop in pairwise(bounds):
            mine = slice(start, stop)
            segments = [
                Segment(name, max(a, start) - start, min(b, stop) - start)
                for a, b, name in options_at
                if a < stop and start < b
            ]
            own_state = {k: v[mine] for k, v in state.items()}
            ranges.append(PieceViews(p[mine], g[mine], own_state, segments))
        rule.update_all(ranges, UpdateContext(step + 1, rule.learning_rate(step), 1 / 8))
    return p


def textbook_sgd(momentum=0.0, nesterov=False, decay=0.0, rate=0.1, clip=np.inf):
    p, v = np.linspace(-1, 1, LENGTH), np.zeros(LENGTH)
    for step in range(STEPS):
        g = np.clip(gradients(step), -clip, clip) + decay * p
        v = momentum * v + g
        p = p - rate * (g + momentum * v if nesterov else v)
    return p


def textbook_adamw(rate=1e-3, b1=0.9, b2=0.999, epsilon=1e-8, decay=0.0, clip=np.inf):
    p, m, v = np.linspace(-1, 1, LENGTH), np.zeros(LENGTH), np.zeros(LENGTH)
    for step in range(STEPS):
        t, g = step + 1, np.clip(gradients(step), -clip, clip)
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        now = rate(step) if callable(rate) else rate
        p = p - now * decay * p
        p = p - now * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + epsilon)
    return p


def textbook_lion(rate=1e-4, b1=0.9, b2=0.99, decay=0.0, clip=np.inf):
    """Chen et al., 2023, algorithm 2."""
    p, m = np.linspace(-1, 1, LENGTH), np.zeros(LENGTH)
    for step in range(STEPS):
        g = np.clip(gradients(step), -clip, clip)
        c = b1 * m + (1 - b1) * g
        p = p - rate * (np.sign(c) + decay * p)
        m = b2 * m + (1 - b2) * g
    return p


def textbook_lamb(
    places, rate=1e-3, b1=0.9, b2=0.999, epsilon=1e-6, decay=0.0, clip=np.inf, first=-1.0
):
    """You et al., 2020, algorithm 2, parameter by parameter."""
    p = np.linspace(first, 1, LENGTH)
    m, v = np.zeros(LENGTH), np.zeros(LENGTH)
    decays = decay if isinstance(decay, dict) else dict.fromkeys((n for *_, n in places), decay)
    for step in range(STEPS):
        t, g = step + 1, np.clip(gradients(step), -clip, clip)
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        r = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + epsilon)
        for start, stop, name in places:
            x = p[start:stop]
            u = r[start:stop] + decays[name] * x
            x -= rate * np.linalg.norm(x) / np.linalg.norm(u) * u
    return p


# ------------------------------------------------------------------------------------- PyTorch's

NAMES = {
    "lr": "learning_rate",
    "alpha": "beta2",
    "eps": "epsilon",
    "momentum": "momentum",
    "nesterov": "nesterov",
    "centered": "centered",
    "weight_decay": "weight_decay",
}
RULES = {rule.__name__: rule for rule in (SGD, Adagrad, RMSprop, Adam, AdamW)}


def of_torch(rule, settings):
    given = {NAMES[name]: value for name, value in settings.items() if name != "betas"}
    given |= dict(zip(("beta1", "beta2"), settings.get("betas", ()), strict=False))
    return RULES[rule](**given)


@pytest.mark.parametrize("numba", ["auto", "off"])
@pytest.mark.parametrize("label", TORCH["rules"])
def test_twenty_steps_of_pytorch(label, numba, set_numba):
    set_numba(numba)
    case = TORCH["rules"][label]
    rule = of_torch(case["rule"], case["settings"])
    p, curvatures = np.array(TORCH["start"]), np.array(TORCH["curvatures"])
    state = {name: np.zeros_like(p) for name in rule.needed_state()}
    for step, noise in enumerate(TORCH["noise"]):
        g = (curvatures * p + noise) * 8
        context = UpdateContext(step + 1, rule.learning_rate(step), 1 / 8)
        rule.update_all([PieceViews(p, g, state, [Segment("w", 0, len(p))])], context)
    assert len(TORCH["noise"]) == STEPS
    np.testing.assert_allclose(p, case["theta"], rtol=0, atol=1e-12)


def test_the_reference_has_every_rule_with_figures_of_its_own():
    found = TORCH["rules"].values()
    assert {case["rule"] for case in found} == set(RULES)
    ends = [case["theta"] for case in found]
    same = [(a, b) for i, a in enumerate(ends) for b in ends[:i] if np.allclose(a, b, atol=1e-9)]
    assert len(same) == 1  # Adam and AdamW, without decay


# ------------------------------------------------------------------------------------ the papers'


@pytest.mark.parametrize(
    ("rule", "textbook", "settings"),
    [
        (SGD(0.1), textbook_sgd, {}),
        (SGD(0.1, 0.9), textbook_sgd, {"momentum": 0.9}),
        (
            SGD(0.1, 0.9, nesterov=True, weight_decay=0.3),
            textbook_sgd,
            {"momentum": 0.9, "nesterov": True, "decay": 0.3},
        ),
        (SGD(0.1, 0.9, clip_value=0.3), textbook_sgd, {"momentum": 0.9, "clip": 0.3}),
        (AdamW(), textbook_adamw, {}),
        (Adam(), textbook_adamw, {}),
        (Adam(clip_value=0.3), textbook_adamw, {"clip": 0.3}),
        (
            AdamW(0.01, 0.8, 0.95, 1e-3, weight_decay=0.2),
            textbook_adamw,
            {"rate": 0.01, "b1": 0.8, "b2": 0.95, "epsilon": 1e-3, "decay": 0.2},
        ),
        (Lion(), textbook_lion, {}),
        (
            Lion(1e-3, 0.8, 0.95, weight_decay=0.2),
            textbook_lion,
            {"rate": 1e-3, "b1": 0.8, "b2": 0.95, "decay": 0.2},
        ),
        (Lion(1e-3, clip_value=0.3), textbook_lion, {"rate": 1e-3, "clip": 0.3}),
    ],
)
def test_twenty_steps(rule, textbook, settings):
    np.testing.assert_allclose(run(rule), textbook(**settings), rtol=0, atol=1e-12)


PLACES = ((0, 4_000, "a.weight"), (4_000, 4_003, "a.bias"), (4_003, LENGTH, "b.weight"))
CUTS = [(), (4_001,), (10, 4_002, 4_003, 8_000), tuple(range(0, LENGTH, 9_973))[1:]]


@pytest.mark.parametrize("cuts", CUTS)
def test_lamb_sees_whole_parameters(cuts):
    rule = LAMB(
        0.01, weight_decay=0.2, clip_value=1.5, parameter_options={"*.bias": {"weight_decay": 0}}
    )
    decay = {"a.weight": 0.2, "a.bias": 0.0, "b.weight": 0.2}
    expected = textbook_lamb(PLACES, 0.01, decay=decay, clip=1.5)
    found = run(rule, cuts, options_at=PLACES)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_lamb_adds_the_norms_of_all_owners_up_in_one_vector():
    """Two ranks by hand: each adds the sums of the other to its own."""
    halves = (0, 50_000, LENGTH)
    names = [name for *_, name in PLACES]
    expected = textbook_lamb(PLACES)
    p = np.linspace(-1, 1, LENGTH)
    rule, moments = LAMB(), [np.zeros(LENGTH), np.zeros(LENGTH)]
    for step in range(STEPS):
        g = gradients(step)
        sums = []

        def update(start, stop, sum_over_owners, into, step=step, g=g):
            mine = slice(start, stop)
            state = dict(zip(rule.needed_state(), (v[mine].copy() for v in moments), strict=True))
            segments = [
                Segment(n, max(a, start) - start, min(b, stop) - start)
                for a, b, n in PLACES
                if a < stop and start < b
            ]
            context = UpdateContext(step + 1, 1e-3, 1.0, sum_over_owners, names)
            rule.update_all([PieceViews(into[mine], g[mine], state, segments)], context)
            return mine, state

        for start, stop in pairwise(halves):
            update(start, stop, lambda v, sums=sums: sums.append(v.copy()) or v, p.copy())
        assert [s.shape for s in sums] == [(3, 2)] * 2
        for start, stop in pairwise(halves):
            mine, state = update(start, stop, lambda v, sums=sums: sum(sums), p)
            for whole, name in zip(moments, rule.needed_state(), strict=True):
                whole[mine] = state[name]
    np.testing.assert_allclose(p, expected, rtol=0, atol=1e-12)


def test_lamb_moves_a_parameter_of_zeros():
    p, state = np.zeros(4), {name: np.zeros(4) for name in LAMB.state_names}
    context = UpdateContext(1, 0.5, 1.0)
    LAMB(0.5).update(p, np.ones(4), state, [Segment("w", 0, 4)], context)
    np.testing.assert_allclose(p, -0.5, rtol=1e-5)
    p[:] = 0
    LAMB(0.5).update(
        p, np.zeros(4), state | {"first_moment": np.zeros(4)}, [Segment("w", 0, 4)], context
    )
    assert (p == 0).all()


def test_lamb_takes_norms_in_float64():
    p = np.full(LENGTH, 1e-30, np.float32)  # whose squares are 0 in float32
    state = {name: np.zeros(LENGTH, np.float32) for name in LAMB.state_names}
    g = np.ones(LENGTH, np.float32)
    LAMB(0.5).update(p, g, state, [Segment("w", 0, LENGTH)], UpdateContext(1, 0.5, 1.0))
    np.testing.assert_allclose(p, 0.5e-30, rtol=1e-5)


# ----------------------------------------------------------------------------- left-out parameters


@pytest.mark.parametrize("own_rate", [False, True])
@pytest.mark.parametrize("kind", [SGD, Adam, AdamW, LAMB])
def test_a_left_out_parameter_counts_its_own_updates_and_schedules_count_all(kind, own_rate):
    schedule = Cosine(0.1, 9)
    options = {"b": {"learning_rate": schedule}} if own_rate else None
    rule = kind(0.05 if own_rate else schedule, weight_decay=0.1, parameter_options=options)
    p, g = np.linspace(-1, 1, 40), np.cos(np.arange(40.0))
    state = {name: np.zeros(40) for name in rule.needed_state()}
    expected, of_b = p.copy(), {name: np.zeros(15) for name in rule.needed_state()}
    segments, numbers = (Segment("a", 0, 20), Segment("b", 20, 35), Segment("c", 35, 40)), {}
    for step, unused in enumerate([set(), {"b"}, {"b", "c"}, set()]):
        whole = PieceViews(p, g, state, segments)
        context = UpdateContext(step + 1, rule.rate_of_step(step), 1.0, numbers=numbers)
        rule.update_all(list(whole.without(unused, numbers)), context)
        count_missed(unused, numbers)
        if not unused:
            own = kind(schedule(step), weight_decay=0.1)
            context = UpdateContext(1 if step == 0 else 2, schedule(step), 1.0)
            of_it = PieceViews(expected[20:35], g[20:35], of_b, [Segment("b", 0, 15)])
            own.update_all([of_it], context)
    np.testing.assert_array_equal(p[20:35], expected[20:35])
    assert numbers == {"missed": {"b": 2, "c": 1}}


# ------------------------------------------------------------------------------ cuts and options

ELEMENTWISE = [
    SGD(0.1, 0.9, weight_decay=0.1),
    Adagrad(weight_decay=0.1),
    RMSprop(momentum=0.5, centered=True, weight_decay=0.1, clip_value=0.5),
    Adam(weight_decay=0.1, clip_value=0.5),
    AdamW(weight_decay=0.1),
    Lion(weight_decay=0.1),
]


@pytest.mark.parametrize("rule", ELEMENTWISE, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_cuts_change_no_bit(rule, dtype):
    whole = run(rule, dtype=dtype)
    assert whole.dtype == dtype
    for cuts in [(1,), (5_000,), (3, 4, 9_999), tuple(range(0, LENGTH, 997))]:
        assert (run(rule, cuts, dtype) == whole).all()


def test_options_by_name():
    rule = AdamW(
        weight_decay=0.2,
        parameter_options={
            "*.bias": {"weight_decay": 0},
            "b.*": {"learning_rate_scale": 0.5, "weight_decay": 0.1},
        },
    )
    expected = np.concatenate([
        textbook_adamw(decay=0.2)[:4_000],
        textbook_adamw()[4_000:4_003],
        textbook_adamw(rate=5e-4, decay=0.1)[4_003:],
    ])  # fmt: skip
    for cuts in CUTS[:3]:
        found = run(rule, cuts, options_at=PLACES)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_rates_by_name():
    schedule = WarmUp(3, Cosine(0.01, 9))
    rule = AdamW(
        Cosine(1e-3, 7),
        parameter_options={
            "b.*": {"learning_rate": schedule},
            "a.bias": {"learning_rate": 2e-3},
            "*": {"learning_rate_scale": 0.5},
        },
    )
    expected = np.concatenate(
        [
            textbook_adamw(rate=lambda step: 0.5 * Cosine(1e-3, 7)(step))[:4_000],
            textbook_adamw()[4_000:4_003],
            textbook_adamw(rate=lambda step: 0.5 * schedule(step))[4_003:],
        ]
    )
    found = run(rule, (10, 4_002, 4_003, 8_000), options_at=PLACES)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_clip_factor():
    assert SGD(clip_global_norm=2.0).clip_factor(1.9) == 1.0
    assert SGD(clip_global_norm=2.0).clip_factor(8.0) == 0.25
    assert SGD().clip_factor(1e9) == 1.0
    assert SGD(clip_value=2.0).clip_factor(1e9) == 1.0


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
        (lambda: LAMB(clip_value=-1), "clip_value must be above 0 or None, got -1"),
        (lambda: LAMB(clip_value=1, clip_global_norm=2), "two ways to clip; choose one"),
        (lambda: LAMB(beta1=1), "beta1 must be"),
        (lambda: Lion(beta2=1), "beta2 must be"),
        (lambda: Adagrad(epsilon=-1), "epsilon must be above 0"),
        (lambda: RMSprop(momentum=-1), "momentum must be"),
        (lambda: AdamW(epsilon=np.inf), "epsilon must be above 0 and finite, got inf"),
    ],
)
def test_mistakes(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdamW(weight_decay=True), "weight_decay must be a number, got True"),
        (lambda: SGD(True), "learning_rate must be a number"),
        (lambda: SGD(clip_global_norm=True), "clip_global_norm must be a number, got True"),
        (lambda: SGD(parameter_options=5), "parameter_options must be a Mapping, got int"),
        (lambda: SGD(parameter_options=[]), "parameter_options must be a Mapping, got list"),
    ],
)
def test_mistakes_of_type(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_a_constant_schedule():
    assert SGD(Constant(0.3)).learning_rate(7) == 0.3
