"""Checks that pass with the engine as it is; without any one of its collectives one of them fails.

Each takes `Problems` of ``tests/models/conftest.py`` and raises where something is wrong. They are
the test suite's own, at a size at which hundreds run in a minute.
"""

import feature_checks
import hybrid_checks
import leaves_checks
import mesh_checks
import other_checks
import training_checks
from registry import CHECKS, SECONDS

__all__ = [
    "CHECKS",
    "SECONDS",
    "feature_checks",
    "hybrid_checks",
    "leaves_checks",
    "mesh_checks",
    "other_checks",
    "training_checks",
]
