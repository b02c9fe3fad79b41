"""``mpishard resize``: a job that continues with other ranks, and the requests that it refuses."""

import json
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import mpishard as ms
from mpishard.base import settings
from mpishard.cli import app
from mpishard.cli.run import resizing as resizing_module
from mpishard.cli.run import restarts as module
from mpishard.cli.run.job_report import JobResult, Outcome
from mpishard.cli.run.launcher import Host
from mpishard.cli.run.logs import RankLogs
from mpishard.cli.run.notice import Notice
from mpishard.cli.run.resizing import Request, Resizing
from mpishard.cli.run.restarts import RestartLimits, Restarts
from mpishard.communication.contract.status import StatusPage, records_in

LIMIT = 60
HOSTS = [Host("a", 2), Host("b", 2)]


def ended(code, cause="the cause"):
    return Outcome(JobResult(code, (cause,) if code else ()), cause, True, 5.0)


SAVED = ended(settings.EXIT_PREEMPTED, "saved")


class Command:
    """The end of a connection on which a command would wait."""

    def __init__(self):
        self.answers = []

    def sendall(self, line):
        self.answers.append(tuple(json.loads(line)))

    def close(self):
        self.answers.append("closed")


class Job:
    """A job whose starts end in the given way, each after the given event."""

    def __init__(self, monkeypatch, *ends, ranks=2, **options):
        monkeypatch.setattr(module, "notice", Notice())
        monkeypatch.setattr(Restarts, "_wait", lambda *_: None)
        self.ends, self.starts, self.lines = list(ends), [], []
        self.command = Command()
        names = options.keys() & {"most", "min_ranks", "max_ranks"}
        limits = RestartLimits(**{name: options.pop(name) for name in names})
        self.restarts = Restarts(self.start, self.lines.append, ranks, limits=limits, **options)
        self.resizing = self.restarts.resizing
        self.code = self.restarts.run()

    def start(self, count, ranks, hosts):
        self.starts.append((ranks, [host.name for host in hosts]))
        events, end = self.ends[count]
        for event in events.split():
            if event == "trains" and self.resizing.before:
                self.resizing.end("done", 0)
            elif event.isdecimal():
                self.resizing.request = Request(int(event), self.command, ["a"] * bool(hosts))
            elif event == "SIGTERM":
                self.restarts.received.append(signal.SIGTERM)
            elif event == "SIGUSR1":
                module.notice.is_given = True
        return end


@pytest.mark.parametrize(
    ("ends", "starts", "code", "answer"),
    [
        ([("trains 4", SAVED), ("trains", ended(0))], [2, 4], 0, ("done", 0)),
        ([("4", SAVED), ("", ended(0, "ended well"))], [2, 4], 0, ("ended well", 0)),
        # The requested ranks fail before they train, and the job goes back: no restart is used up.
        ([("4", SAVED), ("", ended(1)), ("", ended(0))], [2, 4, 2], 0,
         ("the cause, before it trained with 4 ranks; it continues with 2", 1)),
        ([("4", SAVED), ("", ended(2)), ("", ended(0))], [2, 4, 2], 0,
         ("the cause, before it trained with 4 ranks; it continues with 2", 1)),
        # Later failures are restarts, with the requested number.
        ([("4", SAVED), ("trains", ended(9)), ("", ended(0))], [2, 4, 4], 0, ("done", 0)),
        # A rank is lost while they save; the job has ended before it could.
        ([("4", ended(137)), ("", ended(0))], [2, 2], 0, ("no change: the cause", 1)),
        ([("4", ended(0, "it has ended"))], [2], 0, ("no change: it has ended", 1)),
        # The job is to end for good meanwhile.
        ([("4 SIGUSR1", SAVED)], [2], 75, ("no change: saved", 1)),
        ([("4 SIGTERM", SAVED)], [2], 75, ("no change: saved", 1)),
        ([("4", SAVED), ("SIGTERM", ended(143))], [2, 4], 143, ("no change: the cause", 1)),
    ],
)  # fmt: skip
def test_a_request_is_answered_by_its_result(monkeypatch, ends, starts, code, answer):
    job = Job(monkeypatch, *ends, most=1)
    assert ([ranks for ranks, _ in job.starts], job.code) == (starts, code)
    assert job.command.answers == [answer, "closed"]
    assert (job.resizing.request, job.resizing.before) == (None, 0)


def test_the_lines_of_changes_and_the_number_of_a_start(monkeypatch):
    ends = ("4", SAVED), ("trains", ended(9)), ("", ended(7))
    job = Job(monkeypatch, *ends, most=1)
    assert job.lines == [
        "the ranks have saved; the job continues with 4 ranks instead of 2",
        "the cause; restart 1 of 1 with 4 ranks in 1 s",
        "the cause",
        "the job failed for good, after 1 restart; root cause, in start 2: the cause",
    ]


def test_hosts_that_answered_at_the_request_are_used(monkeypatch):
    lost = iter([["a"], []])
    ends = ("2", SAVED), ("trains", ended(9)), ("", ended(9)), ("", ended(0))
    job = Job(
        monkeypatch,
        *ends,
        ranks=4,
        most=9,
        min_ranks=1,
        max_ranks=4,
        hosts=HOSTS,
        find_lost=lambda: next(lost),
    )
    # The host that was away is back in the last start, which has as many ranks as were requested.
    assert job.starts == [(4, ["a", "b"]), (2, ["b"]), (2, ["b"]), (2, ["a", "b"])]
    assert (job.resizing.least, job.resizing.most) == (1, 4)


@pytest.fixture
def requested(tmp_path):
    """Send a request to a simulated job; return exit code, output and errors."""
    folder = tmp_path / ("logs" * 30)  # longer than the address of a socket may be
    folder.mkdir()

    def run(resizing, ranks, *, allowed=(1, 8), is_ending=False, after=None):
        page = StatusPage(0, 2)
        page.publish(folder)
        page.note_saving(True, allowed)
        logs = RankLogs.of_job(records_in(folder))
        with resizing.listens(folder):
            found = []
            words = ["resize", str(folder), "-n", str(ranks)]
            command = threading.Thread(target=lambda: found.append(CliRunner().invoke(app, words)))
            command.start()
            assert select.select(resizing.sockets, [], [], LIMIT)[0]
            is_taken = resizing.take(logs, is_ending=is_ending)
            if is_taken and after is not None:
                after()
            command.join(LIMIT)
        assert not (folder / ".resize").exists()
        return found[0].exit_code, found[0].stdout, found[0].stderr, is_taken

    return run


@pytest.mark.parametrize(
    ("ranks", "options", "message"),
    [
        (5, {}, "the job cannot have 5 ranks: `mpishard run` was started for 2 to 4 (--min-ranks"),
        (1, {}, "the job cannot have 1 rank: `mpishard run` was started for 2 to 4"),
        (4, {"allowed": (2, 3)}, "the job cannot have 4 ranks: the script's optimize allows 2 t"),
        (4, {"allowed": (0, 0)}, "no rank is in an optimize(checkpoint=FOLDER) now"),
        (4, {"is_ending": True}, "the job is ending"),
    ],
)  # fmt: skip
def test_refused_requests(requested, ranks, options, message):
    resizing = Resizing(3, 2, 4)
    code, out, error, is_taken = requested(resizing, ranks, **options)
    assert (code, out, is_taken, resizing.request) == (2, "", False, None)
    assert error.startswith(f"mpishard resize: {message}")


def test_hosts_limit_the_ranks(requested):
    resizing = Resizing(2, 1, 8, HOSTS, lambda: ["b"])
    error = requested(resizing, 4)[2]
    words = (
        "the job cannot have 4 ranks: the hosts take 2 without b, which cannot be reached; the job"
    )
    assert error.startswith(f"mpishard resize: {words} has 2")
    code, *_ = requested(resizing, 1, after=lambda: resizing.end("done", 0))
    assert code == 0


def test_one_request_at_a_time(requested):
    resizing = Resizing(2, 1, 4)
    assert requested(resizing, 2)[:2] == (0, "the job has 2 ranks already\n")
    resizing.request = Request(3, Command())
    message = "the job is changing from 2 ranks to 3: ask again when that is done"
    assert requested(resizing, 4)[2] == f"mpishard resize: {message}\n"
    resizing.before, resizing.ranks = 2, 3
    assert requested(resizing, 2)[2] == f"mpishard resize: {message}\n"


def test_a_host_that_answers_again_is_taken_back(monkeypatch, tmp_path):
    monkeypatch.setattr(resizing_module, "_HOSTS_SECONDS", -1.0)
    asked, lost = [], iter([["a"], ["a", "b"], []])
    page = StatusPage(0, 2)
    page.publish(tmp_path)
    resizing = Resizing(2, 1, 4, HOSTS, lambda: asked.append(1) or next(lost))

    def looks():
        """Return True if the ranks must save after the hosts have answered."""
        before = set(threading.enumerate())
        is_taken = resizing.take_back_hosts(lambda: RankLogs.of_job(records_in(tmp_path)))
        for thread in set(threading.enumerate()) - before:
            thread.join()
        return is_taken

    assert not looks()
    assert asked == []  # no host is missing
    resizing.wanted = 4
    page.note_saving(True, (1, 3))
    assert [looks() for _ in range(3)] == [False] * 3  # a is away; both are
    page.note_saving(True, (1, 4))
    monkeypatch.setattr(resizing_module, "_HOSTS_SECONDS", 1e9)
    resizing._answers = [["a"], []]
    assert looks()
    assert (resizing.request.ranks, resizing.request.lost) == (4, [])
    assert not looks()  # it is being carried out
    resizing.end("done", 0)
    assert resizing.request is None


def test_a_job_returns_to_its_ranks_when_a_lost_host_is_back(monkeypatch):
    lost = iter([["b"], []])
    ends = ("", ended(9)), ("4", SAVED), ("trains", ended(9)), ("", ended(0))
    seen = []
    monkeypatch.setattr(Resizing, "wanted", property(lambda _: 0, lambda _, n: seen.append(n)))
    job = Job(
        monkeypatch, *ends, ranks=4, most=9, min_ranks=1, hosts=HOSTS, find_lost=lambda: next(lost)
    )
    assert [ranks for ranks, _ in job.starts] == [4, 2, 4, 4]
    assert seen[1:] == [4, 4, 4, 4]


@pytest.mark.parametrize("how", ["fails", "vanishes"])
def test_a_change_that_fails(requested, how):
    resizing = Resizing(2, 1, 4)

    def after():
        if how == "fails":
            resizing.end("why", 1)
        else:
            resizing.request.connection.close()

    code, out, error, _ = requested(resizing, 4, after=after)
    assert (code, out) == (
        1,
        "2 ranks will save at the next step boundary; the job then continues with 4\n",
    )
    assert error == f"mpishard resize: {'why' if how == 'fails' else 'the job has ended'}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere", "-n", "2"], "there is no folder nowhere"),
        ([".", "-n", "0"], "a job has at least one rank, got -n 0"),
        ([".", "-n", "2"], "no `mpishard run --log-dir .` runs on this machine"),
    ],
)
def test_there_is_no_job(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(app, ["resize", *words])
    assert (found.exit_code, found.stderr) == (2, f"mpishard resize: {message}\n")


# Each step waits until the test lets it go on, up to the step that the file allows.
TRAINS = """
import sys, time
from pathlib import Path
import numpy as np
import mpishard as ms
folder = Path(sys.argv[1])
backend = ms.init()
generator = np.random.default_rng(0)
x, y = generator.standard_normal((30, 6)), generator.standard_normal((30, 3))
class Paced:
    def on_step(self, run, record):
        (folder / "step").write_text(f"{record.step}")
        while record.step >= int((folder / "allowed").read_text()):
            time.sleep(0.01)
config = ms.ShardingConfiguration(backend, gradient_leaves=4)
optimizer = ms.ElasticOptimizer(ms.optimizers.Adam(1e-2), config, 1, 4, strategy="zero2")
result = optimizer.optimize(ms.OptimizationInputData(
    model=ms.nn.MLP([6, 8, 3], activation="tanh", seed=2), x_train=x, y_train=y, batch_size=8,
    max_steps=24, epochs=10, progress=False, checkpoint=folder / "run", callbacks=[Paced()],
))
parameters = result.model.gather_full_parameters()
if backend.rank == 0:
    np.save(folder / "found.npy", parameters)
"""


def whole():
    """The same training in one process."""

    def main(backend):
        generator = np.random.default_rng(0)
        x, y = generator.standard_normal((30, 6)), generator.standard_normal((30, 3))
        config = ms.ShardingConfiguration(backend, gradient_leaves=4)
        result = ms.optimizers.ZeRO2Optimizer(ms.optimizers.Adam(1e-2), config).optimize(
            ms.OptimizationInputData(
                model=ms.nn.MLP([6, 8, 3], activation="tanh", seed=2),
                x_train=x,
                y_train=y,
                batch_size=8,
                max_steps=24,
                epochs=10,
                progress=False,
            )
        )
        return result.model.gather_full_parameters()

    return ms.run_in_threads(1, main)[0]


@pytest.mark.spawned
def test_a_running_job_takes_another_rank_and_has_the_same_bits(tmp_path):
    pytest.importorskip("mpi4py")
    script, logs, allowed = tmp_path / "job.py", tmp_path / "logs", tmp_path / "allowed"
    script.write_text(TRAINS)
    mpishard = [sys.executable, "-m", "mpishard"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MPISHARD_NUMBA": "off"}
    options = ["-n", "1", "--min-ranks", "1", "--max-ranks", "2", "--log-dir", str(logs)]
    allowed.write_text("9")
    with subprocess.Popen(
        [*mpishard, "run", *options, str(script), str(tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as job:
        try:
            wait_for_step(tmp_path / "step", 9)
            words = [*mpishard, "resize", str(logs), "-n", "2"]
            with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as command:
                assert command.stdout.readline().startswith("1 rank will save at the next step")
                allowed.write_text("99")
                said = command.communicate(timeout=LIMIT)[0]
            assert (command.returncode, said) == (0, "the job continues with 2 ranks\n")
            error = job.communicate(timeout=LIMIT)[1]
        finally:
            if job.poll() is None:
                job.terminate()
    assert job.returncode == 0, error
    assert "the ranks have saved; the job continues with 2 ranks instead of 1\n" in error
    assert "preempted after step 9 of 24" in error
    assert np.load(tmp_path / "found.npy").tobytes() == whole().tobytes()


def wait_for_step(path: Path, step: int):
    for _ in range(LIMIT * 100):
        if path.exists() and path.read_text() == str(step):
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"no step {step}")
