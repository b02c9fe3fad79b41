"""The folder of the benchmarks is no package: its programs import each other by name."""

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.syspath_prepend(str(FOLDER / "peers"))
    yield
    for path in FOLDER.rglob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.fixture
def script(monkeypatch):
    """Runs a script of the benchmarks in this process, on two thread-ranks."""

    def run(name, *words):
        path = str(FOLDER / f"{name}.py")
        monkeypatch.setattr(sys, "argv", [path, *map(str, words)])
        runpy.run_path(path, run_name="__main__")

    return run
