"""Schedules, at all steps."""

from __future__ import annotations

import json
from math import cos, pi
from pathlib import Path

import pytest

from mpishard.optimizers import SGD, Constant, Cosine, Exponential, OneCycle, StepDecay, WarmUp

TORCH = json.loads(Path(__file__).with_name("torch_reference.json").read_text())["one_cycle"]
NAMES = {
    "max_lr": "peak",
    "total_steps": "steps",
    "pct_start": "rise",
    "div_factor": "start_divisor",
    "final_div_factor": "end_divisor",
    "anneal_strategy": "shape",
    "three_phase": "three_phases",
}


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Constant(0.3), [0.3] * 7),
        (StepDecay(1.0, 3, 0.5), [1, 1, 1, 0.5, 0.5, 0.5, 0.25]),
        (StepDecay(2.0, 2), [2, 2, 0.2, 0.2, 0.02, 0.02, 0.002]),
        (Exponential(1.0, 0.5, 0.1, 0.8), [0.8, 0.5, 0.25, 0.125, 0.1, 0.1]),
        (Cosine(1.0, 4, 0.2), [0.2 + 0.4 * (1 + cos(pi * k / 4)) for k in range(5)] + [0.2] * 3),
        (WarmUp(4, Constant(2.0)), [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]),
        (WarmUp(2, StepDecay(1.0, 2)), [0.5, 1, 1, 1, 0.1, 0.1, 0.01]),
        (WarmUp(0, Constant(2.0)), [2.0, 2.0]),
        (WarmUp(4, Cosine(1.0, 10, minimum=0.1)), [0.25, 0.5, 0.75, 1.0, 1.0]),
    ],
)
def test_rates(schedule, expected):
    assert [schedule(step) for step in range(len(expected))] == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("label", TORCH)
def test_one_cycle_is_that_of_pytorch(label):
    settings = TORCH[label]["settings"]
    schedule = OneCycle(**{NAMES[name]: value for name, value in settings.items()})
    expected = TORCH[label]["rates"]
    assert len(expected) == schedule.steps
    assert [schedule(k) for k in range(schedule.steps)] == pytest.approx(expected, abs=1e-14)
    assert schedule(schedule.steps) == schedule(10**6) == pytest.approx(expected[-1])


def test_one_cycle_of_a_few_steps():
    assert [OneCycle(1.0, 2, 0.5)(k) for k in range(3)] == pytest.approx([1.0, 4e-6, 4e-6])
    assert OneCycle(1.0, 1)(0) == pytest.approx(4e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Constant(0), "rate must be above 0"),
        (lambda: StepDecay(0, 1), "initial must be above 0"),
        (lambda: StepDecay(1, 0), "every must be 1 or more"),
        (lambda: StepDecay(1, 1, 1.5), r"factor must be in \(0, 1\]"),
        (lambda: Exponential(1.0, 0), "factor must be in"),
        (lambda: Exponential(1.0, 0.5, 0.2, 0.1), r"minimum must be in \[0, maximum=0.1\]"),
        (lambda: Cosine(1.0, 0), "steps must be 1 or more"),
        (lambda: Cosine(1.0, 5, minimum=2.0), "minimum must be in"),
        (lambda: WarmUp(-1, Constant(1.0)), "steps must be 0 or more"),
        (lambda: OneCycle(1.0, 0), "steps must be 1 or more"),
        (lambda: OneCycle(1.0, 9, 1.0), "rise must be above 0 and below 1, got 1.0"),
        (lambda: OneCycle(1.0, 9, 0.6, three_phases=True), "at most 0.5 with three phases"),
        (lambda: OneCycle(1.0, 9, start_divisor=0.5), "start_divisor must be 1 or more"),
        (lambda: OneCycle(1.0, 9, shape="round"), "shape must be"),
    ],
)
def test_mistakes(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("make", [lambda: WarmUp(2, 0.1), lambda: StepDecay(1.0, 2.5)])
def test_wrong_types(make):
    with pytest.raises(TypeError):
        make()


def test_a_schedule_that_gives_no_rate():
    rule = SGD(0.1, parameter_options={"b": {"learning_rate": lambda step: 1.0 - step}})
    assert rule.checked_rate(1) == 0.1
    with pytest.raises(ValueError, match=r"options\['b'\] gave a learning rate of -1.0 for step 2"):
        rule.checked_rate(2)
    rule.parameter_options = {"c": {"learning_rate": lambda step: -1.0}}
    with pytest.raises(ValueError, match=r"options\['c'\] gave a learning rate of -1.0 for step 0"):
        rule.checked_rate(0)
