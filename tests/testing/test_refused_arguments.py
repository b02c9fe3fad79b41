"""Checks refuse arguments with which they would test nothing."""

from __future__ import annotations

import numpy as np
import pytest

from mpishard.communication import run_in_threads
from mpishard.nn import MLP, Linear
from mpishard.testing import (
    CommunicationConformance,
    check_gradients,
    check_layer_gradients,
    fuzz_sequence,
    in_worlds,
)

X, Y = np.ones((3, 4)), np.ones((3, 2))


@pytest.mark.parametrize(
    "check",
    [
        lambda **options: check_layer_gradients(Linear(4, 2), X, **options),
        lambda **options: check_gradients(MLP([4, 2]), X, Y, **options),
    ],
)
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"samples": 0}, ValueError, "samples must be 1 or more, got 0"),
        ({"samples": True}, TypeError, "samples must be an integer, got True"),
        ({"samples": "x"}, TypeError, "samples must be an integer, got 'x'"),
        ({"tolerance": float("inf")}, ValueError, "tolerance must be 0 or more and finite"),
        ({"tolerance": float("nan")}, ValueError, "tolerance must be 0 or more and finite"),
        ({"tolerance": True}, TypeError, "tolerance must be a number, got True"),
    ],
)
def test_gradients(check, options, error, message):
    with pytest.raises(error, match=message):
        check(**options)


def test_an_object_that_is_no_layer_is_refused():
    with pytest.raises(TypeError, match="layer must be a Layer, got int"):
        check_layer_gradients(5, X)


@pytest.mark.parametrize(
    ("size", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), ("x", TypeError)]
)
def test_worlds(size, error):
    with pytest.raises(error, match="a world size must be"):
        in_worlds(size)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"backend": None}, TypeError, "backend must be a CommunicationBackend, got NoneType"),
        ({"seed": -1}, ValueError, "seed must be 0 or more, got -1"),
        ({"length": 0}, ValueError, "length must be 1 or more, got 0"),
        ({"mismatch": "no"}, TypeError, "mismatch must be True or False, got 'no'"),
    ],
)
def test_sequences(options, error, message):
    def body(backend):
        with pytest.raises(error, match=message):
            fuzz_sequence(**({"backend": backend, "seed": 0} | options))

    run_in_threads(1, body)


def test_conformance_without_dtypes():
    with pytest.raises(ValueError, match="dtypes must name one dtype or more"):
        CommunicationConformance([])
    assert CommunicationConformance([float]).dtypes == (np.dtype(float),)
