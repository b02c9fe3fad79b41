"""Initial values: their distribution, and their dependence on seed and name alone."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from mpishard.nn import MSE, Linear, Model, Sequential
from mpishard.nn.layers.initializers import (
    glorot_uniform,
    kaiming_uniform,
    normal,
    ones,
    parameter_generator,
    uniform,
    zeros,
)


@pytest.mark.parametrize("value", [np.ones(5), np.ones(3), 1.0, np.ones((4, 1))])
def test_values_of_another_shape_are_refused(value):
    layer = Linear(4, 4, initializer=lambda generator, shape: value)
    model = Model(Sequential(layer), MSE(), input_shape=(4,))
    with pytest.raises(ValueError, match=r"0.weight must return .* of shape \(4, 4\), got"):
        model.get_parameters()


def test_values_may_be_a_list():
    layer = Linear(2, 1, initializer=lambda generator, shape: [[3, 4]])
    model = Model(Sequential(layer), MSE(), input_shape=(2,))
    np.testing.assert_array_equal(model.get_parameters(), [3, 4, 0])


def test_streams_depend_on_seed_and_name_alone():
    def draw(seed, name):
        return parameter_generator(seed, name).standard_normal(4)

    np.testing.assert_array_equal(draw(0, "a.weight"), draw(0, "a.weight"))
    assert not np.array_equal(draw(0, "a.weight"), draw(0, "b.weight"))
    assert not np.array_equal(draw(0, "a.weight"), draw(1, "a.weight"))
    # Neither may run into the other.
    assert not np.array_equal(draw(1, "1"), draw(11, ""))


def test_streams_are_the_same_in_every_release():
    drawn = parameter_generator(7, "block0_mlp.expansion.weight").integers(0, 1 << 32, 3)
    assert drawn.tolist() == [3125240485, 2992574480, 3273137077]


@pytest.mark.parametrize(
    ("initializer", "std", "bound"),
    [
        (normal(0.02), 0.02, 0.2),
        (uniform(0.3), 0.3 / np.sqrt(3), 0.3),
        (kaiming_uniform(8), np.sqrt(2 / 8), np.sqrt(6 / 8)),
        (glorot_uniform(8, 24), np.sqrt(2 / 32), np.sqrt(6 / 32)),
        (zeros(), 0.0, 0.0),
    ],
)
def test_distribution(initializer, std, bound):
    values = initializer(parameter_generator(0, "weight"), (300, 101))
    assert values.shape == (300, 101)
    assert values.dtype == np.float64
    assert np.abs(values).max() <= bound
    np.testing.assert_allclose(values.std(), std, rtol=0.02)
    np.testing.assert_allclose(values.mean(), 0.0, atol=0.02 * std)


def test_ones():
    assert (ones()(parameter_generator(0, "weight"), (3,)) == 1.0).all()


@pytest.mark.parametrize(
    "initializer", [zeros(), ones(), normal(0.02), uniform(3.0), kaiming_uniform(5)]
)
def test_a_pickled_initializer_draws_the_same(initializer):
    again = pickle.loads(pickle.dumps(initializer))
    first, second = (f(parameter_generator(1, "weight"), (3, 2)) for f in (initializer, again))
    np.testing.assert_array_equal(first, second)
    assert first.dtype == np.float64
