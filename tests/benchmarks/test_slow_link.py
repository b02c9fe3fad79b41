"""The script that starts ranks behind slow links."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "slow_link.sh"

STAND_IN = """#!/usr/bin/env bash
echo "$(basename "$0")" "$*" >>"$CALLS"
[ "$(basename "$0") $*" != "ip netns list" ] || awk '/netns add/ {print $4}' "$CALLS"
"""


def test_too_few_words_print_the_usage():
    ended = subprocess.run([SCRIPT, "2", "100"], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "usage: benchmarks/slow_link.sh N MBIT PYTHON SCRIPT" in ended.stdout


@pytest.mark.skipif(shutil.which("awk") is None, reason="the script needs awk")
def test_each_rank_has_a_link_and_every_namespace_is_removed(tmp_path):
    for name in ("ip", "tc"):
        (tmp_path / name).write_text(STAND_IN)
        (tmp_path / name).chmod(0o755)
    calls = tmp_path / "calls"
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(calls)}
    words = [SCRIPT, "3", "100", tmp_path / "python", "train.py", "--steps", "2"]
    subprocess.run(words, env=environment, check=True)
    lines = calls.read_text().splitlines()
    made = [line.split()[-1] for line in lines if line.startswith("ip netns add")]
    removed = [line.split()[-1] for line in lines if line.startswith("ip netns delete")]
    assert len(made) == 1 + 3
    assert sorted(removed) == sorted(made)
    # In both directions of each link.
    assert sum("rate 100mbit" in line for line in lines) == 2 * 3
    (job,) = [line for line in lines if "mpiexec" in line]
    assert "-hosts 10.77.0.1,10.77.0.2,10.77.0.3 -n 3 -ppn 1" in job
    assert job.endswith("python train.py --steps 2")
