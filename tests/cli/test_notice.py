"""SIGUSR1 to `mpishard run` before it has started a job."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mpishard.cli.run import rank_agent
from mpishard.cli.run import supervisor as module
from mpishard.cli.run.launcher import Launcher, MPILibrary
from mpishard.cli.run.notice import Notice
from mpishard.cli.run.resizing import Resizing
from mpishard.cli.run.supervisor import Supervisor

PROGRAM = """
import signal, sys

class Sender:
    def find_spec(self, name, *_):
        if name == "typer":
            signal.raise_signal(signal.SIGUSR1)

sys.meta_path.insert(0, Sender())
from mpishard.__main__ import main
sys.argv = ["mpishard", "--version"]
try:
    main()
except SystemExit:
    pass
from mpishard.cli.run.notice import notice
print("given:", notice.is_given)
signal.raise_signal(signal.SIGUSR1)
"""


@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_notice_during_the_imports_is_kept(is_ignored):
    ignore = "import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN)\n" * is_ignored
    ended = subprocess.run(
        [sys.executable, "-c", ignore + PROGRAM], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended
    assert ended.stdout.splitlines()[-1] == f"given: {not is_ignored}"


RANK = """
import os, signal, sys
import mpishard
from mpishard.communication.failure.watchdog import preemption_notice
sys.exit(0 if preemption_notice.is_given else 3)
"""


@pytest.mark.spawned
def test_each_start_of_the_job_receives_the_notice(monkeypatch, tmp_path):
    """Ranks that begin after the notice receive it, too, when they import mpishard."""
    given = Notice()
    given.receive(signal.SIGUSR1, None)
    monkeypatch.setattr(module, "notice", given)
    monkeypatch.setattr(Supervisor, "_handle_signals", lambda _: None)
    variables = os.environ | {"PMI_RANK": "0", "PMI_SIZE": "1"}
    rank = [sys.executable, "-c", f"import time; time.sleep(0.3)\n{RANK}"]
    command = [sys.executable, "-I", "-S", rank_agent.__file__, "PMI_RANK", "", *rank]
    launcher = Launcher(Path("mpiexec"), MPILibrary("MPICH Version: 5.0.2"))
    for _ in range(2):
        supervisor = Supervisor("run", launcher, command, 1, Resizing(1, 1, 1), log_folder=tmp_path)
        assert supervisor.run(variables).result.code == 0
