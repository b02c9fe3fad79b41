"""Checks for backends and models of your own: conformance, random sequences, gradients.

Begin with ``gradients.py``, which checks layers and models, and ``communication.py``, the
conformance suite of backends. The suite consists of ``reductions.py``, which also computes the
expected results in a simple way, ``twins.py`` and ``refusals.py``. ``fuzz.py`` runs the random
sequences that ``fuzz_plan.py`` draws. ``worlds.py`` runs one test on threads and under MPI. The
package itself imports nothing from here.
"""

from mpishard.testing.communication import CommunicationConformance
from mpishard.testing.fuzz import fuzz_sequence
from mpishard.testing.gradients import (
    GradientMismatchError,
    check_gradients,
    check_layer_gradients,
    check_parallel_layer,
)
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
