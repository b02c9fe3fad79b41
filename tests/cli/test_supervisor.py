"""Signals to `mpishard run` after which its ranks save and end."""

import errno
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpishard.cli.run import supervisor as module
from mpishard.cli.run.job_report import JobResult
from mpishard.cli.run.launcher import Launcher, MPILibrary
from mpishard.cli.run.logs import CALLS, ENDED
from mpishard.cli.run.notice import Notice
from mpishard.cli.run.rank_processes import RankProcesses
from mpishard.cli.run.resizing import Resizing
from mpishard.cli.run.supervisor import Supervisor
from mpishard.communication.contract.status import PAGE_BYTES, StatusPage


class Rank:
    """A rank's process."""

    def __init__(self, rank):
        self.rank = rank
        self.sent = []

    def send(self, number):
        self.sent.append(number)


class Run:
    """A supervisor of a simulated job, with a record of its signals and alarms."""

    def __init__(self, monkeypatch, folder, rank_count=2, is_elsewhere=False):
        monkeypatch.setattr(module, "notice", Notice())
        self.ranks = [Rank(number) for number in range(rank_count)]
        self.to_launcher, self.alarms, self.now = [], [], 100.0
        library = MPILibrary("MPICH Version: 5.0.2")
        launcher = Launcher(Path("/bin/mpiexec"), library)
        hosts = ["elsewhere"] * is_elsewhere
        self.supervisor = Supervisor("run", launcher, [], 2, Resizing(2, 2, 2), hosts)
        self.supervisor._job = SimpleNamespace(pid=1)
        self.supervisor._folder = folder
        self.supervisor._processes = SimpleNamespace(running=self.ranks)
        kill = lambda _, number: self.to_launcher.append(number)  # noqa: E731
        monkeypatch.setattr(module.os, "killpg", kill)
        alarm = lambda _, seconds: self.alarms.append(seconds)  # noqa: E731
        monkeypatch.setattr(module.signal, "setitimer", alarm)
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)

    def sent(self):
        return [rank.sent for rank in self.ranks]

    def receive(self, number):
        handler = {
            signal.SIGTERM: self.supervisor._forward,
            signal.SIGUSR1: self.supervisor._give_notice,
            signal.SIGALRM: self.supervisor._after_grace,
        }[number]
        handler(number, None)

    def saves(self, rank):
        page = StatusPage(rank, 2)
        page.publish(self.supervisor._folder)
        page.note_saving(True)
        return self


def test_ranks_that_save_get_time_to_finish(monkeypatch, tmp_path, capsys):
    run = Run(monkeypatch, tmp_path).saves(0)
    run.receive(signal.SIGTERM)
    assert run.sent() == [[signal.SIGTERM], []]
    assert (run.to_launcher, run.alarms) == ([], [25.0])
    run.now += 0.5  # the same request, along another path
    run.receive(signal.SIGTERM)
    assert run.to_launcher == []
    run.receive(signal.SIGALRM)
    assert "the ranks have not saved within 25 s" in capsys.readouterr().err
    assert (run.to_launcher, run.alarms) == ([signal.SIGTERM], [25.0, 3.5])
    run.receive(signal.SIGALRM)
    assert run.to_launcher == [signal.SIGTERM, signal.SIGKILL]
    assert run.sent()[0][-1] == signal.SIGKILL


def test_a_second_sigterm_ends_ranks_that_save(monkeypatch, tmp_path):
    run = Run(monkeypatch, tmp_path).saves(0).saves(1)
    run.receive(signal.SIGTERM)
    run.now += 2
    run.receive(signal.SIGTERM)
    assert (run.to_launcher, run.alarms) == ([signal.SIGTERM], [25.0, 3.5])


def test_ranks_that_do_not_save_are_ended_at_once(monkeypatch, tmp_path):
    run = Run(monkeypatch, tmp_path)
    run.receive(signal.SIGTERM)
    assert (run.sent(), run.to_launcher, run.alarms) == ([[], []], [signal.SIGTERM], [3.5])


def test_a_notice_goes_to_all_ranks_and_has_no_deadline(monkeypatch, tmp_path, capsys):
    run = Run(monkeypatch, tmp_path).saves(0)
    run.receive(signal.SIGUSR1)
    assert run.sent() == [[signal.SIGUSR1]] * 2
    assert module.notice.is_given  # for ranks that are not started yet, and for the next start
    assert capsys.readouterr().err == ""
    assert (run.to_launcher, run.alarms, run.supervisor.received) == ([], [], [])


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_notice_before_there_are_ranks_here(monkeypatch, tmp_path, capsys, is_elsewhere):
    run = Run(monkeypatch, tmp_path, 0, is_elsewhere=is_elsewhere)
    run.receive(signal.SIGUSR1)
    assert run.to_launcher == ([signal.SIGUSR1] if is_elsewhere else [])
    words = "SIGUSR1: no rank can save now, as none is in optimize(checkpoint=FOLDER); the job runs"
    assert (words in capsys.readouterr().err) != is_elsewhere


def test_a_notice_is_reported_if_no_rank_can_save(monkeypatch, tmp_path, capsys):
    run = Run(monkeypatch, tmp_path)
    run.receive(signal.SIGUSR1)
    assert (run.sent(), run.to_launcher) == ([[signal.SIGUSR1]] * 2, [])
    assert "the job runs until one is" in capsys.readouterr().err


def test_call_logs_are_elsewhere_if_the_disk_of_the_logs_is_full(monkeypatch, tmp_path, capsys):
    logs, temporary = tmp_path / "logs", tmp_path / "temporary"
    supervisor = Run(monkeypatch, tmp_path).supervisor
    assert supervisor._folder_for_calls(temporary) == temporary
    supervisor.log_folder = logs
    assert supervisor._folder_for_calls(temporary) == logs / CALLS
    asked = []

    def fill(_handle, _start, length):
        asked.append(length)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.os, "posix_fallocate", fill)
    assert supervisor._folder_for_calls(temporary) == temporary
    assert asked == [2 * 2 * PAGE_BYTES]
    assert list(logs.iterdir()) == []
    assert "--log-dir: [Errno 28] No space left on device: the" in capsys.readouterr().err


def test_a_job_keeps_its_exit_code_if_its_logs_cannot_be_written(tmp_path, capsys):
    launcher = Launcher(Path("/bin/mpiexec"), MPILibrary("MPICH Version: 5.0.2"))
    supervisor = Supervisor("run", launcher, [], 2, Resizing(2, 2, 2), log_folder=tmp_path)
    supervisor._folder = tmp_path / CALLS
    supervisor._processes = RankProcesses(supervisor._folder, 2)
    (tmp_path / ENDED).mkdir()  # not writable, as on a full disk
    assert supervisor._judge(0, 1.0).result == JobResult(0)
    assert capsys.readouterr().err == (
        "mpishard run: --log-dir: the logs do not say how the job ended: "
        f"[Errno 21] Is a directory: '{tmp_path / ENDED}'\n"
    )
