"""The script `tests/mutate_engine.py` imports the modules of this folder, too."""

import importlib.util
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


@pytest.fixture(scope="session")
def script():
    """The script, as a module."""
    specification = importlib.util.spec_from_file_location(
        "mutate_engine", HERE.parent / "mutate_engine.py"
    )
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # where dataclasses look
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def problems(script):
    return script.load_problems()
