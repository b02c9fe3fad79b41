"""The folder of --log-dir: logs of an earlier job are kept."""

import errno
import fcntl

import pytest
import typer

from mpishard.cli.run.job import own_log_folder
from mpishard.cli.run.logs import (
    CALLS,
    check_log_folder,
    folder_of_start,
    locked_log_folder,
    prepare_log_folder,
)
from mpishard.communication.contract.status import StatusPage


def leave_logs(folder, text):
    (folder / CALLS).mkdir(parents=True)
    (folder / CALLS / "rank-0.calls").write_text(text)
    (folder / "rank-0.log").write_text(text)
    (folder / "rank-0.calls.txt").write_text(text)


def test_earlier_logs_are_moved_aside(tmp_path):
    folder = tmp_path / "a" / "logs"
    with locked_log_folder(folder):
        assert prepare_log_folder(folder) is None
    (folder / "notes.txt").write_text("mine")
    for number, text in enumerate(("first", "second"), start=1):
        leave_logs(folder, text)
        leave_logs(folder_of_start(folder, 12), text)
        check_log_folder(folder)
        aside = prepare_log_folder(folder)
        assert aside == folder / f"earlier-{number}"
        names = ("rank-0.log", "rank-0.calls.txt", f"{CALLS}/rank-0.calls")
        for name in (*names, *(f"restart-12/{name}" for name in names)):
            assert (aside / name).read_text() == text
            assert not (folder / name).exists()
    assert (folder / "earlier-1" / "rank-0.log").read_text() == "first"
    assert (folder / "notes.txt").read_text() == "mine"


def test_a_file_is_refused(tmp_path):
    (tmp_path / "logs").write_text("")
    with pytest.raises(ValueError, match=r"--log-dir must be a folder, and .*logs is a file"):
        check_log_folder(tmp_path / "logs")


@pytest.mark.parametrize("restart_count", [0, 3])
def test_the_folder_of_a_running_job_is_refused(tmp_path, restart_count):
    calls = folder_of_start(tmp_path, restart_count) / CALLS
    calls.mkdir(parents=True)
    StatusPage(2, 4).publish(calls)
    with pytest.raises(ValueError, match=r"belongs to a job that still runs: its rank 2 is proc"):
        check_log_folder(tmp_path)


def test_two_jobs_do_not_share_a_folder(tmp_path, capsys):
    """The second is refused before it moves anything, whatever its script imports."""
    folder = tmp_path / "logs"
    with own_log_folder("run", folder):
        leave_logs(folder, "of the first")
        with pytest.raises(typer.Exit) as refused, own_log_folder("run", folder):
            pytest.fail("two jobs were let in")
        assert refused.value.exit_code == 2
        assert "belongs to a job that still runs. Give each job" in capsys.readouterr().err
        assert (folder / "rank-0.log").read_text() == "of the first"
    with own_log_folder("run", folder):
        assert "moved the logs of an earlier job" in capsys.readouterr().err


def test_a_file_system_without_locks_does_not_keep_jobs_from_logging(tmp_path, monkeypatch):
    def flock(handle, operation):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked_log_folder(tmp_path):
        pass
