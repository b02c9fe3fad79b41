"""``mpishard watch``: the page of a run, while it trains, stalls and loses a rank, and after."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from spawned_jobs import Job, environment_of_a_job, needs_mpiexec
from typer.testing import CliRunner

import mpishard as ms
from mpishard.cli import app
from mpishard.cli.run.job_report import JobEnd, JobResult
from mpishard.cli.run.logs import CALLS, ENDED, RankLogs, newest_start, prepare_log_folder
from mpishard.cli.run.rank_processes import RankProcess
from mpishard.cli.watch import RunState
from mpishard.communication.contract.call import Call, CollectiveKind
from mpishard.communication.contract.status import RankState, StatusPage, records_in
from mpishard.observe import MetricsWriter

JOB = Path(__file__).with_name("watched_job.py")
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


def page_of(folder, rank, state=RankState.RUNNING):
    """The status page of a rank of two, as if this process were that rank."""
    page = StatusPage(rank, 2)
    page.end(state)
    (folder / CALLS).mkdir(exist_ok=True)
    page.publish(folder / CALLS)
    return page


def test_curves_follow_the_file(tmp_path):
    run = RunState(tmp_path / "run", tmp_path / "run")
    now = run.now()
    assert (now["exists"], now["age"], now["loss"], now["ranks"]) == (False, None, [], [])
    with MetricsWriter(tmp_path / "run" / "metrics.jsonl") as metrics:
        for step in range(1, 4):
            metrics.write(step, loss=1 / step, weight=10.0, time=step / 2, memory=1000 * step)
        metrics.write(3, validation_loss=0.5)
        metrics.write(4, loss=float("nan"), weight=10.0, time=2.0)
        now = run.now()
        assert now["loss"] == [[1, 1.0], [2, 0.5], [3, 1 / 3]]
        assert now["validation"] == [[3, 0.5]]
        assert now["throughput"] == [[2, 20.0], [3, 20.0], [4, 20.0]]
        assert now["memory"] == [[0.5, 1000], [1.0, 2000], [1.5, 3000]]
        assert now["last"]["step"] == 4
        metrics.write(5, loss=0.25)
        assert run.now()["loss"][-1] == [5, 0.25]
    with MetricsWriter(tmp_path / "run" / "metrics.jsonl", resume_step=2) as metrics:
        metrics.write(3, loss=7.0)
    assert run.now()["loss"] == [[1, 1.0], [2, 0.5], [3, 7.0]]


def test_half_a_line_waits_and_a_line_without_metrics_is_named(tmp_path):
    file = tmp_path / "a.jsonl"
    run = RunState(file, tmp_path)
    file.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert run.now()["loss"] == [[1, 2.0]]
    with file.open("a") as stream:
        stream.write('ss": 1.0}\n')
    assert run.now()["loss"] == [[1, 2.0], [2, 1.0]]
    with file.open("a") as stream:
        stream.write("no JSON\n")
    assert "is not JSON" in run.now()["error"]
    assert run.now()["loss"][0] == [1, 2.0]


def test_a_long_run_is_a_few_hundred_points(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl") as metrics:
        for step in range(1, 5001):
            metrics.write(step, loss=float(step), weight=3.0, time=step / 8)
    now = RunState(tmp_path, tmp_path).now()
    assert (len(now["loss"]), now["loss"][-1][0]) == (400, 5000)
    assert len(now["throughput"]) <= 121
    assert {pace for _, pace in now["throughput"]} == {24.0}


def test_an_update_of_a_long_run_reads_only_new_lines(tmp_path):
    line = '{"step": %d, "loss": 0.5, "weight": 64.0, "time": %d, "memory": 1000}\n'
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(line % (step, step) for step in range(1, 100_001)))
    run = RunState(tmp_path, tmp_path)
    run.now()
    with file.open("a") as stream:
        stream.write(line % (100_001, 100_001))
    began = time.thread_time()
    assert run.now()["last"]["step"] == 100_001
    assert time.thread_time() - began < 0.3  # dicts of all rows took 0.8 s on an idle machine
    assert len(json.dumps(run.now())) < 50_000


def test_ranks_that_run_wait_and_are_gone(tmp_path, monkeypatch):
    pages = page_of(tmp_path, 0), page_of(tmp_path, 1)
    call = Call.describe(CollectiveKind.BARRIER, None, sequence=1)
    pages[0].record(call, None)
    now = RunState(tmp_path, tmp_path).now()
    assert [(r["rank"], r["kind"], r["state"]) for r in now["ranks"]] == [
        (0, "runs", "runs"),
        (1, "runs", "runs"),
    ]
    assert now["is_running"]
    assert now["verdict"] == ""
    assert now["ranks"][0]["call"].startswith("collective 1, barrier()")
    assert all(r["memory"] > 1e6 for r in now["ranks"])
    pages[0].wait(call)
    monkeypatch.setattr("mpishard.cli.watch._STALLED_SECONDS", 0.0)
    now = RunState(tmp_path, tmp_path).now()
    assert [r["kind"] for r in now["ranks"]] == ["waits", "late"]
    assert re.fullmatch("waits 0 s", now["ranks"][0]["state"])
    assert "Rank 0 waits in collective 1, barrier()" in now["verdict"]


def test_ranks_of_a_plain_mpiexec_are_found(tmp_path):
    page = StatusPage(1, 2, 77)
    page.end(RankState.RUNNING)
    page.publish(None)
    run = RunState(tmp_path, tmp_path)
    with MetricsWriter(tmp_path / "metrics.jsonl") as metrics:
        metrics.write(1, loss=1.0)
        (rank,) = [each for each in run.now()["ranks"] if each["rank"] == 77]
        assert (rank["pid"], rank["kind"]) == (os.getpid(), "runs")
    assert run.now()["ranks"] == []


def test_the_end_of_a_job_stays(tmp_path):
    pages = page_of(tmp_path, 0, RankState.LEFT), page_of(tmp_path, 1)
    logs = RankLogs.of_job(records_in(tmp_path / CALLS))
    ended = [RankProcess(1, 17, 16, exit_code=-9)]
    verdict = JobResult(137, ("rank 1 was killed by signal 9 (SIGKILL)",))
    end = JobEnd(2, 137, logs, ended)
    (tmp_path / ENDED).write_text(json.dumps(end.summary(verdict)))
    now = RunState(tmp_path, tmp_path).now()
    assert (now["ended"]["code"], now["ended"]["text"]) == (137, verdict.lines[0])
    preempted = [RankProcess(1, 17, 16, exit_code=75)]
    text = JobEnd(2, 75, logs, preempted).summary(JobResult(75, ()))["text"]
    assert text == "the job saved and ended, as requested (exit code 75)"
    assert not now["is_running"]
    states = [(r["kind"], r["state"]) for r in now["ranks"]]
    assert states[0] == ("left", "left")
    assert states[1][0] == "gone"
    assert states[1][1].startswith("was killed by signal 9 (SIGKILL")
    assert pages
    (tmp_path / "restart-2").mkdir()
    (tmp_path / "restart-10").mkdir()
    (tmp_path / "restart-10.old").mkdir()
    assert newest_start(tmp_path) == tmp_path / "restart-10"
    assert RunState(tmp_path, tmp_path).now()["ended"] is None
    prepare_log_folder(tmp_path)
    assert not (tmp_path / ENDED).exists()


# ----------------------------------------------------------------------------------- the command


def test_mistakes_are_named(tmp_path):
    def watch(*words):
        result = CliRunner().invoke(app, ["watch", *map(str, words)])
        return result.exit_code, result.output

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, said = watch(tmp_path, "--port", port)
    assert (code, f"port {port} of 127.0.0.1: Address already in use" in said) == (2, True)
    code, said = watch(tmp_path, "--logs", tmp_path / "none")
    assert (code, "none is not a folder" in said) == (2, True)


@contextlib.contextmanager
def watching(run):
    """The address of the page of ``run``, and what the command says before it."""
    with subprocess.Popen(
        [sys.executable, "-m", "mpishard", "watch", str(run), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment_of_a_job(),
    ) as process:
        said = ""
        try:
            while "http://" not in said:
                line = process.stdout.readline()
                assert line, said
                said += line
            yield re.search(r"http://127\.0\.0\.1:\d+", said)[0], said
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
        assert "Traceback" not in process.stdout.read()


def state_of(address):
    with urllib.request.urlopen(f"{address}/state", timeout=20) as answer:
        return json.load(answer)


def wait_until(address, holds, limit=40):
    end = time.monotonic() + limit
    while not holds(now := state_of(address)):
        assert time.monotonic() < end, now
        time.sleep(0.1)
    return now


def seen(address, folder):
    """The page after its scripts have run, as a browser shows it."""
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        f"--user-data-dir={folder}", "--virtual-time-budget=1500", "--dump-dom", address,
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    return ended.stdout


@pytest.mark.spawned
def test_only_this_machine_is_answered(tmp_path):
    (tmp_path / "runs").mkdir()
    with watching(tmp_path / "run") as (address, said):
        assert f"there is no {tmp_path / 'run'} yet, and the page waits for it" in said
        assert "did you mean runs?" in said
        connection = http.client.HTTPConnection(address.removeprefix("http://"))
        for path, host, status in (
            ("/", None, 200),
            ("/state", None, 200),
            ("/../etc/passwd", None, 404),
            ("/state", "attacker.example:80", 403),
            ("/state", "attacker.example", 403),
            ("/state", "127.0.0.1", 200),
            ("/state", "localhost", 200),
        ):
            connection.request("GET", path, headers={} if host is None else {"Host": host})
            answer = connection.getresponse()
            assert (answer.status, path) == (status, path)
            text = answer.read().decode()
            if path == "/":
                assert not re.search(r"(src|href)=|https?://(?!www.w3.org/2000/svg)", text)
        connection.close()
        host, port = address.removeprefix("http://").split(":")
        for _ in range(3):  # a browser that leaves before the answer
            with socket.create_connection((host, int(port))) as browser:
                browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                browser.sendall(b"GET / HTTP/1.1\r\nHost: localhost:1\r\n\r\n")
        state_of(address)


@pytest.mark.spawned
@needs_mpiexec
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, a browser without a screen")
def test_a_browser_shows_a_job_that_trains_stalls_and_loses_a_rank(tmp_path):
    run = tmp_path / "run"
    launcher = [sys.executable, "-m", "mpishard", "run", "-n", "2", "--log-dir", run]
    with watching(run) as (address, _), Job([*launcher, JOB, run], word="training") as job:
        job.ranks()
        now = wait_until(address, lambda now: now["last"].get("step", 0) > 5 and now["is_running"])
        assert (len(now["ranks"]), now["verdict"]) == (2, "")
        (run / "stall").touch()
        wait_until(address, lambda now: now["verdict"])
        text = seen(address, tmp_path / "browser")
        assert re.search(r'<span id="state"[^>]*>waiting<', text), text
        assert re.search(r'<tr class="waits">.*<tr class="late">', text, re.DOTALL)
        assert re.search(r'<p id="message"[^>]*>Rank 0 waits in collective \d+', text)
        loss = re.search(r'<svg id="loss">.*?<polyline points="([^"]+)"', text, re.DOTALL)
        assert len(loss[1].split()) > 5
        os.kill(now["ranks"][1]["pid"], signal.SIGKILL)
        ended = job.end()
        assert ended.code == 137
        wait_until(address, lambda now: now["ended"])
        text = seen(address, tmp_path / "browser")
    assert re.search(r'<span id="state"[^>]*>ended with code 137<', text), text
    assert re.search(r'class="bad">rank 1 \(process \d+ on \S+\) was killed by signal 9', text)
    assert re.search(r'<tr class="gone">.*was killed by signal 9 \(SIGKILL', text, re.DOTALL)


def test_a_run_in_memory_has_curves_and_no_ranks(tmp_path):
    def main(backend):
        model = ms.as_distributed(ms.nn.MLP([2, 3, 1], seed=0), backend)
        ms.as_distributed(ms.optimizers.SGD(0.1), backend).optimize(
            ms.OptimizationInputData(
                model=model,
                x_train=np.ones((8, 2)),
                y_train=np.ones((8, 1)),
                batch_size=3,
                metrics=tmp_path / "metrics.jsonl",
                progress=False,
            )
        )

    ms.run_in_threads(2, main)
    now = RunState(tmp_path, tmp_path).now()
    assert [step for step, _ in now["loss"]] == [1, 2, 3]
    assert now["ranks"] == []
    assert now["memory"][0][1] > 0
