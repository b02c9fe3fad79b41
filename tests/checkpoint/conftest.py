"""Fixtures of the tests of checkpoints."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the modules that lie beside the tests

from vectors import Fakes


@pytest.fixture(scope="session")
def fakes() -> type[Fakes]:
    return Fakes


ORDER = json.loads(os.environ.get("MPISHARD_TEST_TORTURE", "{}"))
"""Settings of ``scripts/torture.sh checkpoint``: count, seed, and a file for the report."""


class Torture:
    """Number of trials and their seed; ``scripts/torture.sh checkpoint`` makes more trials.

    Parameters
    ----------
    name : str
        Of the test, for the report.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.is_nightly = bool(ORDER)
        self.seed: int = ORDER.get("seed", 0)

    def count(self, usual: int, nightly: int) -> int:
        """Number of trials."""
        if not self.is_nightly:
            return usual
        return int(ORDER["count"] or nightly)

    def dice(self, number: int) -> random.Random:
        """Random numbers of trial ``number``, the same at each run."""
        return random.Random(f"{self.seed} {number}")

    def saw(self, figures: str) -> None:
        """Note what came out, for who asked."""
        if self.is_nightly:
            with Path(ORDER["report"]).open("a") as report:
                print(f"{self._name}: {figures}", file=report)
        else:
            print(figures)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if ORDER:  # thousands of trials take their time
        for item in items:
            item.add_marker(pytest.mark.timeout(0), append=False)


@pytest.fixture
def torture(request: pytest.FixtureRequest) -> Torture:
    return Torture(request.node.name)
