"""The time limit of a test grows with the load of the machine, and still ends a hanging test."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

CONFTEST = """
import os
import time_limits
from time_limits import pytest_timeout_set_timer

def load():
    return 1000.0 if "busy_machine" in os.environ["PYTEST_CURRENT_TEST"] else 2.0

time_limits.load_per_core = load
"""

TESTS = """
import time

def test_on_a_busy_machine():
    time.sleep(1.5)

def test_that_hangs():
    time.sleep(600)
"""


@pytest.mark.parametrize("method", ["signal", "thread"])
def test_a_limit_stretches_with_the_load_and_ends(tmp_path, method):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_slow.py").write_text(TESTS)
    path = os.pathsep.join([str(ROOT / "tests" / "helpers"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--rootdir=.",
         "-o", "timeout=0.5", "-o", f"timeout_method={method}", "test_slow.py"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    text = done.stdout + done.stderr
    assert done.returncode == 1, text
    assert "test_on_a_busy_machine PASSED" in text
    assert "Timeout" in text.partition("test_that_hangs")[2]
