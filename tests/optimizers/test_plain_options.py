"""Optimizers without strategy: options, settings, bytes and files."""

from __future__ import annotations

import io

import numpy as np
import pytest

import mpishard as ms
from mpishard.optimizers import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamOptimizerOptions,
    AdamW,
    Cosine,
    Exponential,
    Lion,
    OneCycle,
    OptimizationAlgorithmOptions,
    RMSprop,
    StepDecay,
    WarmUp,
    no_decay_on_biases_and_norms,
)

RULES = [
    SGD(0.1, 0.9, nesterov=True, weight_decay=0.1),
    SGD(0.1, weight_decay=2.0),
    Adagrad(0.1, weight_decay=0.1),
    RMSprop(0.1, momentum=0.5, centered=True, weight_decay=0.1),
    Adam(Cosine(0.1, 9), weight_decay=0.1, clip_value=0.3),
    AdamW(WarmUp(2, OneCycle(0.1, 9)), weight_decay=0.1, clip_global_norm=0.3),
    Lion(0.1, weight_decay=0.1),
    LAMB(StepDecay(0.1, 2), weight_decay=0.1),
]
by_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)

X = np.random.default_rng(0).standard_normal((12, 3))
Y = X[:, :1] - 1


def numbers(seed, shape=(7,), dtype=np.float64):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def mlp(seed=0):
    return ms.nn.MLP([3, 4, 1], seed=seed, dtype="float64")


@pytest.fixture(autouse=True)
def anew():
    yield
    for rule in RULES:
        rule.reset()


# ------------------------------------------------------------------------------ options and bytes


@by_rule
def test_files_go_on_where_they_were_written(rule, tmp_path):
    model, other = mlp(), mlp(1)
    rule.step(model, X, Y)
    rule.save_model(tmp_path / "rule")
    rule.step(model, X, Y)
    rule.save_model(tmp_path / "rule")  # in the place of the first
    assert [path.name for path in tmp_path.iterdir()] == ["rule"]
    fresh = type(rule)()
    fresh.load_model(tmp_path / "rule")
    assert fresh.serialize() == rule.serialize() == (tmp_path / "rule").read_bytes()
    stream = io.BytesIO()
    rule.save_state(stream)
    stream.seek(0)
    fresh.load_state(stream)
    other.set_parameters(model.get_parameters())
    assert fresh.step(other, X, Y) == rule.step(model, X, Y)
    assert (other.get_parameters() == model.get_parameters()).all()


def test_paths_without_a_valid_file(tmp_path):
    rule = SGD(0.1, 0.5)
    kept = rule.serialize()
    (tmp_path / "other").write_bytes(Adam().serialize())
    for path, error in (
        ("", ValueError),
        (5, TypeError),
        (tmp_path / "nothing", FileNotFoundError),
        (tmp_path / "other", ValueError),
    ):
        with pytest.raises(error):
            rule.load_model(path)
    for path, error in (("  ", ValueError), (None, TypeError)):
        with pytest.raises(error):
            rule.save_model(path)
    with pytest.raises(ValueError, match="cannot be written"):
        SGD(lambda step: 0.1).save_model(tmp_path / "other")
    assert rule.serialize() == kept
    assert (tmp_path / "other").read_bytes() == Adam().serialize()


def test_no_decay_on_biases_and_norms():
    gpt = ms.nn.GPT(vocabulary_size=5, context_length=4, width=4, heads=1, layers=1)
    options = no_decay_on_biases_and_norms(gpt)
    shapes = {entry.name: entry.shape for entry in gpt.parameter_table.entries}
    assert set(options) == {name for name, shape in shapes.items() if len(shape) == 1}
    assert {"norm.weight", "block0_mlp.norm.bias", "block0_mlp.expansion.bias"} <= set(options)
    rule = AdamW(0.1, weight_decay=0.5, parameter_options=options)
    before = gpt.get_parameters()
    rule.apply_gradients(np.zeros_like(before), gpt)
    for entry in gpt.parameter_table.entries:
        part = slice(entry.start, entry.stop)
        factor = 1 if entry.name in options else 0.95
        np.testing.assert_allclose(gpt.get_parameters()[part], factor * before[part], rtol=1e-6)
    assert no_decay_on_biases_and_norms(_without_bias()) == {}
    one_vector = ms.FunctionModel(lambda theta, x, y: (0.0, theta), np.ones(3))
    with pytest.raises(ValueError, match="fewer than two dims"):
        no_decay_on_biases_and_norms(one_vector)
    with pytest.raises(TypeError, match="does not name its parameters"):
        no_decay_on_biases_and_norms(object())


def _without_bias():
    chain = ms.nn.Sequential({"only": ms.nn.Linear(3, 2, bias=False)})
    return ms.nn.Model(chain, ms.nn.MSE(), input_shape=(3,))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"*": {"decay": 1}}, ValueError, "known are weight_decay"),
        ({"*": {"weight_decay": -1}}, ValueError, "must be 0 or more"),
        ({"*": {"weight_decay": "no"}}, TypeError, "must be a number"),
        ({"*": {"learning_rate": 0}}, ValueError, r"\['learning_rate'\] must be above 0"),
        ({"*": {"frozen": 1}}, TypeError, "must be True or False, got 1"),
        (
            {"*": {"frozen": True, "weight_decay": 0}},
            ValueError,
            "weight_decay would have no effect",
        ),
        ({"*": 0.1}, TypeError, "must be a mapping"),
    ],
)
def test_option_mistakes(options, error, message):
    with pytest.raises(error, match=message):
        SGD(parameter_options=options)


def test_frozen_names():
    names = ["a.weight", "a.bias", "head.weight"]
    rule = SGD(parameter_options={"*": {"frozen": True}, "head.*": {"frozen": False}})
    assert rule.checked_options.frozen_among(names) == {"a.weight", "a.bias"}
    assert SGD().checked_options.frozen_among(names) == frozenset()
    with pytest.raises(ValueError, match="freeze all 2 parameters"):
        rule.checked_options.frozen_among(names[:2])


@by_rule
def test_bytes_go_on_where_they_were_written(rule):
    p = rule.update_parameters(numbers(0), numbers(1))
    data = rule.serialize()
    other = type(rule)()
    other.deserialize(data)
    assert other.fingerprint() == rule.fingerprint()
    assert dict(other.get_options()) == dict(rule.get_options())
    for seed in (2, 3):
        expected = rule.update_parameters(p, numbers(seed))
        assert (other.update_parameters(p, numbers(seed)) == expected).all()


def test_bytes_of_settings():
    options = {"kind": {"learning_rate": Cosine(1.0, 5)}, "b": {"frozen": True}}
    rule = AdamW.from_options(AdamOptimizerOptions(beta1=0.8), parameter_options=options)
    other = AdamW()
    other.deserialize(rule.serialize())
    assert dict(other.get_options()) == dict(rule.get_options())
    with pytest.raises(ValueError, match=r"learning_rate is <function .* cannot be written; .*Cos"):
        SGD(lambda step: 0.1).serialize()
    for data, message in [
        (SGD().serialize(), "bytes are of SGD, not of AdamW"),
        (b"nonsense" * 9, "not those of an optimizer's serialize"),
        (mlp().serialize(), "not those of an optimizer's serialize"),
    ]:
        with pytest.raises(ValueError, match=message):
            other.deserialize(data)
    assert dict(other.get_options()) == dict(rule.get_options())


# ---------------------------------------------------------------- the mirrored hierarchy's defaults


def test_documented_defaults_hold_only_where_options_are_passed():
    assert AdamW().clip_global_norm is None
    assert AdamW().algorithm_options is None
    rule = SGD.from_options(OptimizationAlgorithmOptions())
    assert rule.learning_rate == Exponential(0.01, 0.99, 1e-6, 1.0)
    assert rule.clip_global_norm == 1.0
    rule = Adam.from_options(AdamOptimizerOptions(enable_gradient_clipping=False), beta2=0.9)
    settings = rule.beta1, rule.beta2, rule.epsilon, rule.learning_rate(0), rule.clip_global_norm
    assert settings == (0.9, 0.9, 1e-8, 1e-3, None)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: SGD.from_options(AdamOptimizerOptions()), ValueError, "beta1, beta2, epsilon"),
        (lambda: SGD.from_options({}), TypeError, "got dict"),
        (lambda: OptimizationAlgorithmOptions(max_iterations=0), ValueError, "max_iterations"),
        (lambda: OptimizationAlgorithmOptions(tolerance=-1), ValueError, "tolerance"),
        (lambda: OptimizationAlgorithmOptions(max_gradient_norm=0), ValueError, "max_gradient"),
        (lambda: OptimizationAlgorithmOptions(min_learning_rate=2), ValueError, "minimum must"),
        (
            lambda: OptimizationAlgorithmOptions(early_stopping_patience=0),
            ValueError,
            "patience must be 1",
        ),
    ],
)
def test_option_class_mistakes(make, error, message):
    with pytest.raises(error, match=message):
        make()


def data(**options):
    given = {"x_train": X, "y_train": Y, "epochs": 400, "progress": False}
    return ms.OptimizationInputData(model=mlp(), **(given | options))


@pytest.mark.parametrize("wrap", [False, True])
def test_options_end_the_training(wrap):
    def train(options, **settings):
        rule = SGD.from_options(options)
        if not wrap:
            return rule.optimize(data(**settings))
        return ms.run_in_threads(
            2, lambda backend: ms.as_distributed(rule, backend).optimize(data(**settings))
        )[0]

    options = OptimizationAlgorithmOptions(tolerance=0.0)
    assert train(options).iterations == 100
    assert train(options, max_steps=7).iterations == 7
    assert train(options, max_steps=700).iterations == 100
    # No loss falls by 1: after the first evaluation none is better.
    never = OptimizationAlgorithmOptions(tolerance=1e3, early_stopping_patience=3)
    assert train(never).iterations == 4
    assert train(never, patience=5).iterations == 100  # the data's own patience, without tolerance
    quiet = OptimizationAlgorithmOptions(tolerance=1e3, use_early_stopping=False)
    assert train(quiet).iterations == 100
