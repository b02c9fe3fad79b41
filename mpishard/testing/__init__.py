"""Checks that backends and models of your own can run: conformance, random sequences, gradients."""

from mpishard.testing.communication import CommunicationConformance
from mpishard.testing.fuzz import fuzz_sequence
from mpishard.testing.gradients import (
    GradientMismatchError,
    check_gradients,
    check_layer_gradients,
)
from mpishard.testing.parallel_layers import check_parallel_layer
from mpishard.testing.worlds import in_worlds

__all__ = [
    "CommunicationConformance",
    "GradientMismatchError",
    "check_gradients",
    "check_layer_gradients",
    "check_parallel_layer",
    "fuzz_sequence",
    "in_worlds",
]
