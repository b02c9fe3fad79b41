"""The folder of the benchmarks is no package: its programs import each other by name."""

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.syspath_prepend(str(FOLDER / "peers"))
    yield
    for name in ("growth_job", "jax_gpt", "model", "models", "report", "rows"):
        sys.modules.pop(name, None)
