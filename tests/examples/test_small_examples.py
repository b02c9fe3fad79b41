"""Short examples: one process, threads and MPI give the same training."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from mpishard.communication import run_in_threads
from mpishard.testing.worlds import in_worlds

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {"fit_autograd": "autograd", "custom_loop": "numpy", "train_digits": "sklearn"}
SHORT: dict[str, dict[str, Any]] = {
    "fit_autograd": {"experiments": 8, "steps": 15},
    "custom_loop": {"steps": 90},
    "train_digits": {"epochs": 1},
}
PICTURES = {"fit_autograd": "field", "custom_loop": "loop", "train_digits": "digits"}

by_name = pytest.mark.parametrize("name", NEEDS)


@functools.cache
def example(name: str) -> ModuleType:
    pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed here")
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def settings(name: str, output: Path, strategy: str = "fsdp") -> argparse.Namespace:
    return argparse.Namespace(strategy=strategy, output=output, **SHORT[name])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: Any) -> Callable[[str], Any]:
    """Return the result of an example in one process, which is trained once."""

    @functools.cache
    def find(name: str) -> Any:
        output = tmp_path_factory.mktemp("alone")
        return run_in_threads(1, example(name).main, settings(name, output))[0]

    return find


def numbers(found: Any) -> list[float]:
    return [*found.values()] if isinstance(found, dict) else [*np.atleast_1d(found)]


@by_name
@in_worlds(3)
def test_results_do_not_depend_on_the_world(
    backend: Any, name: str, shared_path: Path, alone: Callable[[str], Any]
) -> None:
    module = example(name)
    found = module.main(backend, settings(name, shared_path, "zero2"))
    backend.barrier()  # rank 0 has drawn
    if importlib.util.find_spec("matplotlib") is not None:
        picture = shared_path / f"{PICTURES[name]}.png"
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert picture.stat().st_size < 150_000
    if backend.rank == 0:
        np.testing.assert_allclose(numbers(found), numbers(alone(name)), rtol=1e-9, atol=1e-12)


def test_the_field_is_found(alone: Callable[[str], Any]) -> None:
    start = example("fit_autograd").relative_error(np.zeros((20, 20)))
    assert start > 0.3
    assert alone("fit_autograd") < 0.6 * start


def test_micro_batches_add_up_to_the_batch(alone: Callable[[str], Any]) -> None:
    loss, accuracy, apart = alone("custom_loop")
    assert loss < 0.4  # at first log 2
    assert accuracy > 0.8
    assert apart < 1e-12


@pytest.mark.timeout(180)
def test_digits_are_read(alone: Callable[[str], Any], tmp_path: Path) -> None:
    if os.environ.get("MPISHARD_TEST_FULL"):
        long = argparse.Namespace(strategy="fsdp", output=tmp_path, epochs=25)
        right = run_in_threads(1, example("train_digits").main, long)[0]
        assert min(right.values()) >= 0.97
    else:
        right = alone("train_digits")
        assert min(right.values()) > 0.7  # by chance 0.1; of 25 epochs one
    assert set(right) == {"perceptron", "convolutional"}


@pytest.mark.spawned
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "launcher", "arguments", "ending"),
    [
        ("fit_autograd", ["-m", "mpishard", "run", "-n", "2"], ["--experiments", "9"],
         "9 experiments on 2 rank(s), 3 steps: the field is recovered to "),
        ("custom_loop", [], ["-n", "2"], "3 steps on 2 rank(s): "),
    ],
    ids=["processes", "threads"],
)  # fmt: skip
def test_scripts_run(
    name: str, launcher: list[str], arguments: list[str], ending: str, tmp_path: Path
) -> None:
    pytest.importorskip(NEEDS[name])
    if launcher:
        pytest.importorskip("mpi4py")
    script = str(EXAMPLES / f"{name}.py")
    ended = subprocess.run(
        [sys.executable, *launcher, script, "--steps", "3", *arguments],
        cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
        env=os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "MPISHARD_NUMBA": "off"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ending in ended.stdout
    if importlib.util.find_spec("matplotlib") is not None:
        assert ended.stdout.splitlines()[-1] == f"runs/{name}/{PICTURES[name]}.png"
