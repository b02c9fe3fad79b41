"""A launcher that does not end after its ranks is killed."""

import os
import signal
import sys
from pathlib import Path

import pytest

from mpishard.cli.run import rank_agent, supervisor
from mpishard.cli.run.launcher import Launcher, MPILibrary
from mpishard.cli.run.rank_processes import can_be_watched
from mpishard.cli.run.resizing import Resizing
from mpishard.cli.run.supervisor import Supervisor

pytestmark = [
    pytest.mark.spawned,
    pytest.mark.skipif(not can_be_watched(), reason="the system does not tell when processes end"),
]

LAUNCHER = """
import os, subprocess, sys, time
ends = sys.argv[1:]
ranks = [
    subprocess.Popen([*AGENT, "PMI_RANK", "", "sh", "-c", f"sleep 0.5; {end}"],
                     env=os.environ | {"PMI_RANK": str(rank)})
    for rank, end in enumerate(ends)
]
for rank in ranks:
    rank.wait()
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def as_before():
    numbers = [*supervisor._FORWARDED, signal.SIGQUIT, signal.SIGALRM, signal.SIGUSR1]
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("ends", "code"), [(["exit 0", "exit 0"], 0), (["exit 0", "exit 3"], 3), (["kill -9 $$"], 137)]
)
def test_a_launcher_that_outlives_its_ranks_is_ended(ends, code, monkeypatch):
    monkeypatch.setattr(supervisor, "_LAUNCHER_SECONDS", 0.3)
    launcher = Launcher(Path("prterun"), MPILibrary("Open MPI v5.0.11, ident: 5.0.11"))
    assert launcher.rank_variable
    agent = [sys.executable, "-I", "-S", rank_agent.__file__]
    program = LAUNCHER.replace("PMI_RANK", launcher.rank_variable).replace("*AGENT", f"*{agent}")
    command, size = [sys.executable, "-c", program, *ends], len(ends)
    job = Supervisor("test", launcher, command, size, Resizing(size, size, size))
    assert job.run(os.environ).result.code == code
