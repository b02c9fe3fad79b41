"""SIGUSR1 to `mpishard run` before it has started a job."""

import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from mpishard.cli import supervisor as module
from mpishard.cli.notice import Notice
from mpishard.cli.supervisor import Supervisor
from mpishard.communication.failure import marks

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
from mpishard.cli.notice import notice
print("given:", notice.is_given)
signal.raise_signal(signal.SIGUSR1)
"""


@pytest.mark.parametrize("is_ignored", [False, True])
def test_the_command_hears_it_while_it_is_being_imported(is_ignored):
    ignore = "import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN)\n" * is_ignored
    ended = subprocess.run(
        [sys.executable, "-c", ignore + PROGRAM], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended
    assert ended.stdout.splitlines()[-1] == f"given: {not is_ignored}"


def test_each_start_of_the_job_is_told(monkeypatch, tmp_path):
    given = Notice()
    given.hear(signal.SIGUSR1, None)
    monkeypatch.setattr(module, "notice", given)
    told = []

    def start(_command, *, env, **_):
        told.append((tmp_path / "calls" / marks.MAKE_ROOM).exists())
        raise OSError(env["MPISHARD_JOB_FOLDER"])

    monkeypatch.setattr(module.subprocess, "Popen", start)
    monkeypatch.setattr(module, "CALLS", "calls")
    monkeypatch.setattr(Supervisor, "_handle_signals", lambda _: None)
    for _ in range(2):
        supervisor = Supervisor("mpishard run", SimpleNamespace(), [], 2, 0, tmp_path)
        with pytest.raises(OSError, match="calls"):
            supervisor.run({})
    assert told == [True, True]
