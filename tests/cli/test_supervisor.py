"""What is left when the launcher has ended."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpishard.cli.rank_processes import RankProcesses

pytestmark = [
    pytest.mark.spawned,
    pytest.mark.skipif(
        not RankProcesses.can_be_watched(), reason="the system does not tell when processes end"
    ),
]

# A rank that says who it is, and does not end.
RANK = """
import os, sys, time
from pathlib import Path
from mpishard import settings
from mpishard.communication.call_file import CallFile
file = CallFile.create(settings.job_folder() / "rank-0.calls", 0, 2)
Path(sys.argv[1], "new").write_text(str(os.getpid()))
os.rename(sys.argv[1] + "/new", sys.argv[1] + "/pid")
time.sleep(60)
"""

# In a process of its own: it handles signals. Its launcher ends as soon as the rank is there.
SUPERVISOR = """
import os, sys
from pathlib import Path
from mpishard.cli.launcher import Launcher, MPILibrary
from mpishard.cli.supervisor import Supervisor
folder, rank = sys.argv[1:]
shell = '"$0" -c "$1" "$2" & while [ ! -e "$2/pid" ]; do sleep 0.02; done; exit 3'
command = ["sh", "-c", shell, sys.executable, rank, folder]
launcher = Launcher(Path("/bin/sh"), MPILibrary("MPICH Version: 5.0.2"))
print(Supervisor("test", launcher, command, 2, 0).run(os.environ).verdict)
"""


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_rank_that_outlives_its_launcher_is_ended_and_not_blamed(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", SUPERVISOR, str(tmp_path), RANK],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=50, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    pid = int((tmp_path / "pid").read_text())
    try:
        assert ended.stdout == "Verdict(code=3, lines=())\n", ended
        assert not is_running(pid)
    finally:
        if is_running(pid):
            os.kill(pid, 9)
