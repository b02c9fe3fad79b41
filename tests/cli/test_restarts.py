"""Ends of a job that are failures, and the restarts after them, with simulated starts."""

import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mpishard.base import settings
from mpishard.cli import app
from mpishard.cli.run import job as jobs
from mpishard.cli.run.job_report import JobResult, Outcome
from mpishard.cli.run.launcher import Host, Launcher, MPILibrary
from mpishard.cli.run.restarts import RestartLimits, Restarts
from mpishard.cli.run.supervisor import Supervisor

HOSTS = [Host("a", 2), Host("b", 2)]
ROOT = "after 1 restart; root cause, in the first start: "
LINE = "rank 1 (process 4711) was killed by signal 9 (SIGKILL)"


def failed(code=137, lines=(LINE,), *, seconds=5.0, called_init=True, logs=None):
    cause = lines[-1] if lines else f"the job ended with code {code}, as rank 1 reported"
    return Outcome(JobResult(code, tuple(lines)), cause, called_init, seconds, logs)


WELL = Outcome(JobResult(0), "", True, 5.0)


class SimulatedJob:
    """A job whose starts end in the given way, with a record of its starts and messages."""

    def __init__(self, monkeypatch, *ends, ranks=4, **options):
        self.ends, self.starts, self.lines, self.pauses = list(ends), [], [], []
        names = options.keys() & {"most", "min_ranks", "max_ranks"}
        limits = RestartLimits(**{name: options.pop(name) for name in names})
        self.job = Restarts(self.start, self.lines.append, ranks, limits=limits, **options)
        monkeypatch.setattr(Restarts, "_wait", lambda _, seconds: self.pauses.append(seconds))

    def start(self, count, ranks, hosts):
        self.starts.append((count, ranks, [host.name for host in hosts]))
        end = self.ends[count]
        return end() if callable(end) else end


@pytest.fixture
def simulated(monkeypatch):
    def run(*ends, **options):
        job = SimulatedJob(monkeypatch, *ends, **options)
        job.code = job.job.run()
        return job

    return run


def test_a_job_that_fails_is_started_again(simulated):
    job = simulated(failed(), failed(1, ()), WELL, most=3)
    assert job.code == 0
    assert job.starts == [(0, 4, []), (1, 4, []), (2, 4, [])]
    assert job.lines == [
        f"{LINE}; restart 1 of 3 with 4 ranks in 1 s",
        "the job ended with code 1, as rank 1 reported; restart 2 of 3 with 4 ranks in 2 s",
        "the job ended well after 2 restarts",
    ]


def test_the_code_is_of_the_last_start_and_the_root_cause_of_the_first(simulated):
    first = failed(lines=("also this", LINE), logs=Path("/logs"))
    job = simulated(first, failed(7, ("rank 0 (process 5) ended with code 7",)), most=1, ranks=1)
    assert job.code == 7
    assert job.lines == [
        "also this",
        f"{LINE}; restart 1 of 1 with 1 rank in 1 s",
        "rank 0 (process 5) ended with code 7",
        f"the job failed for good, {ROOT}{LINE} (logs: /logs)",
    ]


def test_without_restarts_nothing_is_added(simulated):
    job = simulated(failed(), ranks=2)
    assert (job.code, job.lines, job.pauses) == (137, [LINE], [])


@pytest.mark.parametrize(
    "end",
    [
        failed(settings.EXIT_PREEMPTED, ()),
        failed(settings.EXIT_INTERRUPT, ()),
        failed(2, ("rank 0 (process 5) ended with code 2",), called_init=False),
    ],
    ids=["preempted", "interrupted", "usage"],
)
def test_no_failures(simulated, end):
    job = simulated(failed(), end, most=5)
    assert len(job.starts) == 2
    assert job.code == end.result.code
    assert job.lines[1:] == list(end.result.lines)


@pytest.mark.parametrize("code", [1, 2, 9, 124, 137, 143, 255])
def test_failures(simulated, code):
    assert simulated(failed(code), WELL, most=1).code == 0


def test_pauses_grow_while_starts_fail_soon(simulated):
    soon, late = failed(seconds=59.9), failed(seconds=60.0)
    job = simulated(*[soon] * 7, late, soon, WELL, most=20)
    assert job.pauses == [1, 2, 4, 8, 16, 30, 30, 1, 2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_a_start_ends_the_job(simulated, number):
    received = []

    def interrupted():
        received.append(number)
        return failed(128 + number, ("the ranks were ended",))

    job = simulated(failed(), interrupted, most=5, received=received)
    assert (job.code, len(job.starts)) == (128 + number, 2)
    assert job.lines[1:] == ["the ranks were ended"]


def test_a_signal_between_two_starts_ends_the_job(simulated, monkeypatch):
    received = []
    job = SimulatedJob(monkeypatch, failed(), most=5, received=received)
    monkeypatch.setattr(Restarts, "_wait", lambda *_: received.append(signal.SIGTERM))
    assert job.job.run() == 143
    assert len(job.starts) == 1
    assert job.lines[1:] == ["SIGTERM: no restart"]
    # Also while hosts are asked, whose answers are worth nothing then.
    received.clear()
    job = simulated(
        failed(), most=5, hosts=HOSTS, received=received,
        find_lost=lambda: received.append(signal.SIGINT) or ["a", "b"],
    )  # fmt: skip
    assert (job.code, len(job.starts)) == (130, 1)
    assert job.lines == [LINE, "SIGINT: no restart"]


def test_the_pause_ends_with_a_signal_and_by_itself():
    Restarts(None, None, 4, received=[signal.SIGINT])._wait(1e9)
    Restarts(None, None, 4)._wait(0.01)


def lost_in_turn(*answers):
    left = list(answers)
    return lambda: left.pop(0)


def test_a_lost_host_takes_ranks_away_until_it_is_back(simulated):
    job = simulated(
        failed(),
        failed(),
        failed(),
        WELL,
        hosts=HOSTS,
        most=5,
        min_ranks=2,
        find_lost=lost_in_turn(["a"], ["b"], []),
    )
    assert job.starts == [(0, 4, ["a", "b"]), (1, 2, ["b"]), (2, 2, ["a"]), (3, 4, ["a", "b"])]
    assert job.lines[0] == f"{LINE}; restart 1 of 5 with 2 ranks on b without a in 1 s"
    assert job.lines[2] == f"{LINE}; restart 3 of 5 with 4 ranks in 4 s"


def test_a_restart_uses_free_slots(simulated):
    hosts = [Host("a", 4), Host("b", 4)]
    lost = lost_in_turn(["b"], [])
    job = simulated(failed(), failed(), WELL, hosts=hosts, most=2, max_ranks=6, find_lost=lost)
    assert [ranks for _, ranks, _ in job.starts] == [4, 4, 6]


def test_free_slots_take_the_ranks_of_a_lost_host(simulated):
    hosts = [Host("a", 3), Host("b", 2), Host("c", 3)]
    job = simulated(failed(), WELL, hosts=hosts, most=1, find_lost=lambda: ["b"], ranks=6)
    assert job.starts[1] == (1, 6, ["a", "c"])
    job = simulated(failed(), WELL, hosts=hosts, most=1, find_lost=lambda: ["b"], ranks=1)
    assert job.starts[1] == (1, 1, ["a"])  # a host without a rank is none


@pytest.mark.parametrize(
    ("min_ranks", "lost", "left", "need"),
    [
        (None, "a", "the other hosts take 2 ranks", "without --min-ranks it keeps its 4"),
        (3, "b", "the other hosts take 2 ranks", "--min-ranks is 3"),
        (1, "a, b", "no other host is left", "--min-ranks is 1"),
    ],
)
def test_too_few_ranks_end_the_restarts(simulated, min_ranks, lost, left, need):
    job = simulated(
        failed(), hosts=HOSTS, most=5, min_ranks=min_ranks, find_lost=lambda: lost.split(", ")
    )
    assert (job.code, len(job.starts)) == (137, 1)
    assert job.lines == [f"{LINE}; no restart: {lost} cannot be reached, {left}, and {need}"]


def test_too_few_hosts_end_the_restarts_and_the_root_cause_is_named(simulated):
    find_lost = lost_in_turn([], ["a"])
    job = simulated(failed(), failed(255), hosts=HOSTS, most=5, find_lost=find_lost)
    assert job.code == 255
    assert job.lines[-1] == f"the job failed for good, {ROOT}{LINE}"


def test_slurm_restarts_a_job_on_the_nodes_that_are_left(tmp_path, monkeypatch, programs):
    starts = []
    ends = [failed(lines=("why",)), WELL]
    script = tmp_path / "script.py"
    script.touch()

    def supervise(supervisor, environment):
        starts.append((supervisor, environment["MPISHARD_RESTART"]))
        return ends[len(starts) - 1]

    library = MPILibrary("MPICH Version: 5.0.2")
    monkeypatch.setattr(jobs, "loaded_library", lambda: library)
    monkeypatch.setattr(jobs, "find_launcher", lambda lib: Launcher(Path("/bin/srun"), lib))
    monkeypatch.setattr(Supervisor, "run", supervise)
    monkeypatch.setattr(Restarts, "_wait", lambda *_: None)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    programs("scontrol", "n1\nn2")
    programs("sinfo", "n1 alloc\nn2 down*")
    options = ["-n", "4", "--max-restarts", "1", "--min-ranks", "2"]
    result = CliRunner().invoke(app, ["run", *options, str(script)])
    assert result.exit_code == 0, result.output
    assert "why; restart 1 of 1 with 2 ranks on n1 without n2 in 1 s" in result.stderr
    (first, _), (second, _) = starts
    assert [count for _, count in starts] == ["0", "1"]
    assert first.command[1:3] == ["-n", "4"]
    assert not [word for word in first.command if word.startswith("--nodelist")]
    assert second.command[1:3] == ["-n", "2"]
    assert {"--nodelist=n1", "--nodes=1"} < set(second.command)
    assert (first.world_size, second.world_size) == (4, 2)
    assert (first.host_count, second.host_count) == (1, 1)  # SLURM's, also if it names none
