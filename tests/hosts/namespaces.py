"""Hosts made of Linux namespaces, for one run of pytest. ``netns.sh`` makes and removes them."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Self

from spawned_jobs import ROOT, outside_launchers

__all__ = ["Hosts", "why_none"]

_NETNS = Path(__file__).with_name("netns.sh")
_LIMIT = 60.0

_PROGRAMS = {
    "ip": "iproute2",
    "ethtool": "ethtool",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "unshare": "util-linux",
    "pgrep": "procps",
    "gcc": "gcc",
}
"""Programs that netns.sh needs, and their packages on Debian."""

_TRIAL = "ip link add name a type veth peer name b && ip link add name c type bridge"


def why_none() -> str:
    """Return the reason why hosts cannot be made here; empty if they can."""
    if sys.platform != "linux":
        return f"needs Linux namespaces, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "needs root, who may make network namespaces"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [package for name, package in _PROGRAMS.items() if not shutil.which(name, path=path)]
    if missing:
        return f"needs apt-get install --no-install-recommends {' '.join(missing)}"
    words = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc"]
    trial = subprocess.run(
        [*words, "sh", "-c", _TRIAL], capture_output=True, text=True, timeout=_LIMIT, check=False
    )
    reason = " ".join(trial.stderr.split())
    return f"needs namespaces, veth and a bridge: {reason}" if trial.returncode else ""


class Hosts:
    """``count`` hosts, node1 to node<count>, from entry to exit of the block.

    The state lies in a temporary folder, whose lock is held while the process lives. Therefore
    the hosts of a process that was killed are known, and removed at the next start.
    """

    def __init__(self, count: int, **settings: str) -> None:
        self.count = count
        self._settings = settings

    def __enter__(self) -> Self:
        base = Path(tempfile.gettempdir()) / f"mpishard-hosts-{os.geteuid()}"
        base.mkdir(mode=0o700, exist_ok=True)
        # One run at a time: a folder whose lock is not yet held would look like one left behind.
        with (base / "lock").open("w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            _remove_those_left_behind(base)
            self.folder = Path(tempfile.mkdtemp(prefix="run-", dir=base))
            self._lock = (self.folder / "lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.work = self.folder / "work"
        self.work.mkdir()
        try:
            self.call("up", self.count)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        _take_down(self.folder)
        self._lock.close()

    def call(self, *words: object) -> str:
        """Return the output of a command of netns.sh."""
        variables = _variables(self.folder) | self._settings
        ended = subprocess.run(
            [str(_NETNS), *map(str, words)],
            env=outside_launchers(**variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT,
            check=False,
        )
        assert ended.returncode == 0, f"netns.sh {words}: {ended.stdout}{ended.stderr}"
        return ended.stdout

    def popen(
        self, host: int, *command: object, cwd: Path | None = None, **variables: str
    ) -> subprocess.Popen[str]:
        """Start ``command`` on a host, in the folder that all hosts share."""
        # outside_launchers(): those of MPI are left out, and settings of netns.sh come last.
        kept = outside_launchers(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", MPISHARD_NUMBA="off")
        return subprocess.Popen(
            [str(_NETNS), "exec", str(host), *map(str, command)],
            cwd=cwd or self.work,
            env=kept | variables | _variables(self.folder),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def run(
        self, host: int, *command: object, limit: float = _LIMIT, **variables: str
    ) -> tuple[int, str]:
        """Return the exit code and the output of ``command`` on a host."""
        process = self.popen(host, *command, **variables)
        try:
            out, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            self.mend()  # ends all processes of the hosts
            out, _ = process.communicate()
            raise AssertionError(f"{command} took more than {limit} s:\n{out}") from None
        return process.returncode, out

    def processes(self, host: int) -> dict[int, str]:
        """Return the command lines of the processes of a host, less its init and its sshd.

        The keys are their numbers on this machine.
        """
        found = {}
        for pid in self.call("pids", host).split():
            with suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                if line and not re.search(r"host-init|\[listener\]|^sleep 3600", line):
                    found[int(pid)] = line.strip()
        return found

    def ranks(self, host: int) -> dict[int, int]:
        """Return the process of each rank that runs on a host, as this machine numbers it."""
        found = {}
        for pid, line in self.processes(host).items():
            # `mpishard run` starts ranks so; the command line of their agents is longer.
            if re.match(r"\S*python\S* -u ", line):
                with suppress(OSError):
                    variables = Path(f"/proc/{pid}/environ").read_text(errors="replace")
                    rank = re.search(r"(?:^|\0)(?:PMI|OMPI_COMM_WORLD)_RANK=(\d+)", variables)
                    found[int(rank[1])] = pid
        return found

    def left(self, host: int, seconds: float) -> list[str]:
        """Return the processes and files of a host, for which it may need up to ``seconds``."""
        deadline = time.monotonic() + seconds
        while True:
            found = [*self.processes(host).values(), *self.files(host)]
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.1)

    def sent(self) -> int:
        """Return the number of bytes that all hosts have sent, with all headers."""
        return sum(int(line.split()[1]) for line in self.call("bytes").splitlines())

    def files(self, host: int) -> list[str]:
        """Return the files in /dev/shm and /tmp of a host, less the folders that hosts share."""
        _, out = self.run(host, "ls", "-A", "/dev/shm", "/tmp")
        shared = {Path(name).relative_to("/tmp").parts[0] for name in _kept(self.folder)}
        return sorted(set(out.split()) - {"/dev/shm:", "/tmp:", *shared})

    def mend(self) -> None:
        """Plug and thaw all hosts, and end and remove what jobs have left on them."""
        self.call("mend")


def _kept(folder: Path) -> list[str]:
    """Folders below /tmp that hosts share: the state, and the checkout if it lies there."""
    paths = [folder, ROOT, Path(sys.prefix), Path(sys.prefix).resolve()]
    return list(dict.fromkeys(str(path) for path in paths if path.is_relative_to("/tmp")))


def _variables(folder: Path) -> dict[str, str]:
    number = zlib.crc32(folder.name.encode()) % 2**14
    return {
        "MH_STATE": str(folder),
        "MH_PRE": f"mh-{folder.name}-",
        "MH_NET": f"10.{64 + number // 256}.{number % 256}",
        "MH_KEEP": " ".join(_kept(folder)),
    }


def _take_down(folder: Path) -> None:
    subprocess.run(
        [str(_NETNS), "down"],
        env=outside_launchers(**_variables(folder)),
        capture_output=True,
        timeout=_LIMIT,
        check=False,
    )
    shutil.rmtree(folder, ignore_errors=True)


def _remove_those_left_behind(base: Path) -> None:
    for folder in base.glob("run-*"):
        with suppress(OSError), (folder / "lock").open("w") as lock:
            # Fails while the run lives: the system releases the lock of a process that ends.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _take_down(folder)
