"""Callbacks of `optimize` and of hand-written loops: their calls, and their requests."""

from __future__ import annotations

import csv
import json
import logging
import re
import signal
import subprocess
import sys
import types

import numpy as np
import pytest

import mpishard as ms
from mpishard.callbacks import (
    CSVFile,
    EarlyStopping,
    JSONLines,
    ProgressLine,
    TensorBoard,
    WandB,
    running,
)
from mpishard.errors import PeerError, Preempted, ShardingError
from mpishard.observe import read_metrics
from mpishard.testing.worlds import in_worlds

SAMPLES, BATCH = 50, 16  # an epoch is four steps, of which the last has two samples
X = np.random.default_rng(0).standard_normal((SAMPLES, 5))
Y = np.sin(X[:, :2])
VALIDATION = {"x_validation": X[:7], "y_validation": Y[:7]}


class Spy:
    """Records all calls, and calls a function at one of them."""

    def __init__(self, hook="", at=0, then=None):
        self.hook, self.at, self.then = hook, at, then
        self.calls = []

    def _call(self, hook, run, record):
        self.calls.append((hook, record))
        if self.then is not None and (hook, record.step) == (self.hook, self.at):
            self.then(run)

    def __getattr__(self, name):
        if name not in ("on_start", "on_step", "on_evaluate", "on_checkpoint", "on_stop"):
            raise AttributeError(name)
        return lambda run, record: self._call(name, run, record)

    def __dir__(self):
        return ["on_start", "on_step", "on_evaluate", "on_checkpoint", "on_stop"]

    def steps(self, hook):
        return [record.step for name, record in self.calls if name == hook]


def train(backend, *callbacks, strategy="fsdp", **options):
    model = ms.as_distributed(ms.nn.MLP([5, 7, 2], seed=1), backend, strategy)
    rule = ms.optimizers.Adam(ms.optimizers.WarmUp(3, ms.optimizers.Constant(1e-3)))
    choices = {"batch_size": BATCH, "epochs": 3, "progress": False} | options
    return ms.as_distributed(rule, backend, strategy).optimize(
        ms.OptimizationInputData(
            model=model, x_train=X, y_train=Y, callbacks=list(callbacks), **choices
        )
    )


# -------------------------------------------------------------------------------- what they see


@in_worlds(1, 2, 3)
def test_callbacks_are_called_on_every_rank(backend, shared_path):
    spy = Spy()
    given = {"checkpoint": shared_path / "run", "checkpoint_every": 5}
    result = train(backend, spy, **VALIDATION, **given)
    hooks = [name for name, _ in spy.calls]
    assert (hooks[0], hooks[-1]) == ("on_start", "on_stop")
    assert (spy.steps("on_start"), spy.steps("on_stop")) == ([0], [12])
    assert spy.steps("on_step") == list(range(1, 13))
    assert spy.steps("on_checkpoint") == [5, 10, 12]
    seen = dict(zip(spy.steps("on_step"), [r for n, r in spy.calls if n == "on_step"], strict=True))
    assert [seen[step].loss for step in range(1, 13)] == result.loss_history
    assert [seen[step].samples for step in (3, 4)] == [16, 2]
    assert [seen[step].epoch for step in (4, 5)] == [0, 1]
    assert [seen[step].learning_rate for step in (1, 2, 3)] == [
        pytest.approx(1e-3 * k / 3) for k in (1, 2, 3)
    ]
    assert all(r.gradient_norm > 0 and r.memory > 0 for r in seen.values())
    assert all(0 < r.step_seconds <= r.seconds for r in seen.values())
    scores = [(r.step, r.score) for name, r in spy.calls if name == "on_evaluate"]
    assert scores == result.validation_history
    saved = [r.checkpoint for name, r in spy.calls if name == "on_checkpoint"]
    assert saved == [shared_path / "run" / f"step-{step:08d}" for step in (5, 10, 12)]


@in_worlds(2)
def test_an_evaluation_without_validation_data_is_the_end_of_an_epoch(backend):
    spy = Spy()
    result = train(backend, spy)
    records = [record for name, record in spy.calls if name == "on_evaluate"]
    assert [record.step for record in records] == [4, 8, 12]
    assert [record.score for record in records] == result.fitness_history
    assert not any(record.validation for record in records)


@in_worlds(2)
def test_callbacks_change_no_bits_and_add_no_collective(backend):
    def calls():
        return backend.status.count

    before = calls()
    alone = train(backend)
    between = calls()
    watched = train(backend, Spy())
    assert watched.loss_history == alone.loss_history
    extra = calls() - between - (between - before)
    assert extra <= 3  # one for each evaluation, and none for each of 12 steps


# ----------------------------------------------------------------------------- what they can do


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@in_worlds(1, 2, 3)
def test_one_rank_stops_all_after_the_next_step(backend, strategy, caplog):
    last = backend.world_size - 1
    spy = Spy("on_step", 5, lambda run: run.stop("enough") if run.rank == last else None)
    caplog.set_level(logging.INFO, "mpishard")  # not at_level, which thread-ranks undo in any order
    result = train(backend, spy, strategy=strategy)
    assert result.stopped_early
    assert (result.iterations, len(result.loss_history)) == (6, 6)
    assert spy.steps("on_step") == [1, 2, 3, 4, 5, 6]
    assert spy.steps("on_stop") == [6]
    if backend.rank == 0:
        who = "" if backend.world_size == 1 else f"rank {last}, "
        assert f"stopped after step 6 of 12: {who}Spy: enough" in caplog.text


@in_worlds(3)
def test_a_request_at_an_evaluation_stops_at_once(backend):
    result = train(
        backend, Spy("on_evaluate", 8, lambda run: run.stop() if run.rank == 2 else None)
    )
    assert result.iterations == 8


@pytest.mark.parametrize("kind", ["gradient leaves", "hybrid", "local SGD"])
@in_worlds(4)
def test_a_request_travels_in_every_kind_of_step(backend, kind):
    leaves = 4 if kind == "gradient leaves" else None
    config = ms.ShardingConfiguration(backend, gradient_leaves=leaves)
    strategy = {"hybrid": "hybrid", "local SGD": "ddp"}.get(kind, "fsdp")
    degrees = {"pipeline_parallel_size": 2} if kind == "hybrid" else {}
    model = ms.as_distributed(ms.nn.MLP([5, 7, 2], seed=1), config, strategy, **degrees)
    rule = ms.optimizers.SGD(0.01)
    if kind == "local SGD":
        optimizer = ms.LocalSGDOptimizer(rule, config)
    else:
        optimizer = ms.as_distributed(rule, config, strategy, **degrees)
    spy = Spy("on_step", 2, lambda run: run.stop() if run.rank == 3 else None)
    data = ms.OptimizationInputData(
        model=model, x_train=X, y_train=Y, batch_size=8, progress=False, callbacks=[spy]
    )
    assert optimizer.optimize(data).iterations == 3


@in_worlds(2)
def test_a_save_request_of_one_rank_saves_on_all(backend, shared_path):
    spy = Spy("on_step", 2, lambda run: run.save() if run.rank == 1 else None)
    train(backend, spy, checkpoint=shared_path / "run", keep_last=9)
    assert spy.steps("on_checkpoint") == [3, 12]
    backend.barrier()
    names = sorted(path.name for path in (shared_path / "run").glob("step-*"))
    assert names == ["step-00000003", "step-00000012"]


@in_worlds(2)
def test_background_saves_are_reported_once_they_are_on_the_disk(backend, shared_path):
    def look(run):
        assert spy.calls[-1][1].checkpoint.is_dir()

    spy = Spy("on_checkpoint", 12, look)
    train(
        backend,
        spy,
        checkpoint=shared_path / "run",
        checkpoint_every=4,
        checkpoint_async=True,
        keep_last=9,
    )
    reported = [record.checkpoint.name for name, record in spy.calls if name == "on_checkpoint"]
    assert reported == ["step-00000004", "step-00000008", "step-00000012"]


@pytest.mark.parametrize("hook", ["on_start", "on_step", "on_evaluate", "on_stop"])
def test_an_exception_on_one_rank_is_its_failure(hook):
    step = {"on_start": 0, "on_step": 3, "on_evaluate": 4, "on_stop": 12}[hook]
    errors = {}

    def fail(run):
        if run.rank == 1:
            raise KeyError("mine")

    def main(backend):
        try:
            train(backend, Spy(hook, step, fail))
            backend.barrier()
        except Exception as error:
            errors[backend.rank] = error
            raise

    with pytest.raises(KeyError, match="mine"):
        ms.run_in_threads(2, main)
    assert any(
        f"raised in {hook} of the callback Spy on rank 1, after step {step}" in note
        for note in errors[1].__notes__
    )
    assert isinstance(errors[0], PeerError)


@in_worlds(1)
def test_mistakes_with_callbacks_are_refused(backend):
    for wrong, match in (
        (Spy, "got the class Spy"),
        (object(), "the callback object has none of the methods on_start, on_step"),
        (types.SimpleNamespace(on_epoch=print), "has on_epoch, which nothing calls"),
        (
            types.SimpleNamespace(on_stop=print, on_step=lambda event: 0),
            r"on_step of the callback SimpleNamespace must take \(run, record\), got \(event\)",
        ),
    ):
        with pytest.raises(TypeError, match=match):
            train(backend, wrong)
    with pytest.raises(TypeError, match="callbacks must be a list, got Spy"):
        ms.OptimizationInputData(model=1, x_train=X, y_train=Y, callbacks=Spy()).checked()
    with pytest.raises(ValueError, match="needs checkpoint") as error:
        train(backend, Spy("on_step", 1, lambda run: run.save()))
    assert "in on_step of the callback Spy on rank 0" in error.value.__notes__[0]
    with pytest.raises(ValueError, match="any name but step"):
        train(backend, Spy("on_step", 1, lambda run: run.log(step=3)))
    with pytest.raises(ValueError, match=r"run.log\(a=...\) takes .* array of shape \(2,\)"):
        train(backend, Spy("on_step", 1, lambda run: run.log(a=np.ones(2))))
    for options, match in (({"patience": 0}, "1 or more"), ({"tolerance": -1.0}, "0 or more")):
        with pytest.raises(ValueError, match=match):
            EarlyStopping(**options)


@pytest.mark.parametrize(("kind", "package"), [(TensorBoard, "tensorboardX"), (WandB, "wandb")])
def test_a_package_that_is_not_there_is_named(kind, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"{kind.__name__} needs {package}: pip install"):
        kind(**({"folder": "x"} if kind is TensorBoard else {}))


@in_worlds(2)
def test_every_rank_has_the_same_callbacks(backend):
    with pytest.raises(ValueError, match=r"callbacks is \['Spy'\], \[\]"):
        train(backend, *[Spy()] * (backend.rank == 0))


class Counter:
    """A callback with a state, which calls a collective."""

    def __init__(self):
        self.seen = 0

    def on_step(self, run, record):
        self.seen += int(run.backend.all_reduce(np.ones(1))[0])

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


@in_worlds(2)
def test_the_state_of_callbacks_is_resumed(backend, shared_path):
    for steps in (5, 12):
        counter = Counter()
        train(backend, counter, EarlyStopping(9), max_steps=steps, checkpoint=shared_path / "run")
    assert counter.seen == 12 * backend.world_size
    with pytest.raises(ValueError, match="'callback Counter', 'callback EarlyStopping', but has"):
        train(backend, checkpoint=shared_path / "run")


@in_worlds(2)
def test_early_stopping_is_a_callback(backend, caplog):
    caplog.set_level(logging.INFO, logger="mpishard")
    wanted = train(backend, patience=2, tolerance=0.5, epochs=9)
    stopping = EarlyStopping(2, 0.5)
    found = train(backend, stopping, epochs=9)
    assert found.iterations == wanted.iterations < 36
    if backend.rank == 0:  # who logs
        assert caplog.text.count(": EarlyStopping: 2 evaluations without improvement") == 1
    assert found.stopped_early
    again = train(backend, stopping, epochs=9)  # which knows nothing of the run before
    assert again.iterations == wanted.iterations


# -------------------------------------------------------------------------------------- writers


class Log:
    def on_step(self, run, record):
        run.log(twice=2 * record.step)
        if record.step == 6:
            run.log(late=1.5)


@in_worlds(2)
def test_files_have_all_figures_and_those_that_were_logged(backend, shared_path):
    for steps in (7, 12):
        files = JSONLines(shared_path / "new" / "m.jsonl"), CSVFile(shared_path / "new" / "m.csv")
        result = train(
            backend,
            Log(),
            *files,
            **VALIDATION,
            max_steps=steps,
            checkpoint=shared_path / "run",
            checkpoint_every=5,
            keep_last=9,
            **({} if steps == 7 else {"resume": shared_path / "run" / "step-00000005"}),
        )
    backend.barrier()
    rows = [row for row in read_metrics(shared_path / "new" / "m.jsonl") if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [row["loss"] for row in rows[5:]] == result.loss_history
    assert {"twice": 12, "late": 1.5}.items() <= rows[5].items()
    with (shared_path / "new" / "m.csv").open(newline="") as stream:
        table = list(csv.DictReader(stream))
    steps = [row for row in table if row["loss"]]
    assert [int(row["step"]) for row in steps] == list(range(1, 13))
    assert [float(row["loss"]) for row in steps[5:]] == result.loss_history
    assert (steps[0]["late"], steps[5]["late"]) == ("", "1.5")
    checked = [float(row["validation_loss"]) for row in table if row["validation_loss"]]
    assert checked[-1] == result.validation_history[-1][1]


def test_tensorboard_reads_the_events(tmp_path):
    events_of = pytest.importorskip("tensorboardX.proto.event_pb2")

    def main(backend):
        note = Spy("on_step", 2, lambda run: run.log(note="a word"))
        return train(backend, Log(), note, TensorBoard(tmp_path / "tb"))

    results = ms.run_in_threads(2, main)
    (file,) = (tmp_path / "tb").iterdir()
    data, events = file.read_bytes(), []
    while data:  # TFRecord: length, its checksum, the event, its checksum
        length = int.from_bytes(data[:8], "little")
        events.append(events_of.Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    found = {(e.step, v.tag): v.simple_value for e in events for v in e.summary.value}
    losses = [found[step, "loss"] for step in range(1, 13)]
    assert losses == pytest.approx(results[0].loss_history)
    assert found[6, "twice"] == 12
    assert (2, "note/text_summary") in found


def test_ranks_that_are_threads_may_share_a_writer(tmp_path):
    files = CSVFile(tmp_path / "a.csv"), JSONLines(tmp_path / "a.jsonl")
    ms.run_in_threads(3, lambda backend: train(backend, *files, max_steps=5))
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 6
    assert [row["step"] for row in read_metrics(tmp_path / "a.jsonl")] == [1, 2, 3, 4, 5]


KILLED = """
import csv, os, signal, sys
import mpishard as ms

def main(backend):
    lines = ms.callbacks.JSONLines(sys.argv[1] + "/k.jsonl")
    table = ms.callbacks.CSVFile(sys.argv[1] + "/k.csv")
    with ms.callbacks.running([lines, table], backend) as hooks:
        for step in range(1, 5):
            if step == 4:  # a column more: the table is written anew
                csv.DictWriter.writerows = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            hooks.step(1 / step, **{"more": 1.0} if step == 4 else {})

ms.run_in_threads(1, main)
"""


def test_a_kill_loses_no_row_and_a_row_without_its_end_is_dropped(tmp_path):
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert [row["step"] for row in read_metrics(tmp_path / "k.jsonl")] == [1, 2, 3, 4]
    path = tmp_path / "k.csv"
    assert [line[:2] for line in path.read_text().splitlines()] == ["st", "1,", "2,", "3,"]
    with path.open("a") as stream:
        stream.write("3,,0.3")  # as a full disk may leave it

    def go_on(backend):
        with running([CSVFile(path)], backend, step=3) as hooks:
            hooks.step(0.25, more=1.0)

    ms.run_in_threads(1, go_on)
    with path.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert {row["step"]: row["more"] for row in rows} == {"1": "", "2": "", "3": "", "4": "1.0"}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["k.csv", "k.jsonl"]


def test_a_shared_callback_with_a_state_is_refused(tmp_path):
    shared = EarlyStopping(2)
    with pytest.raises(ShardingError, match=r"EarlyStopping is one object for the thread-ranks \d"):
        ms.run_in_threads(2, lambda backend: train(backend, shared, **VALIDATION))
    for _ in range(2):  # one rank after the other may use it
        ms.run_in_threads(1, lambda backend: train(backend, shared, **VALIDATION, max_steps=2))


def test_weights_and_biases_gets_the_figures_of_rank_0(monkeypatch):
    calls = []
    stub = types.ModuleType("wandb")

    class Started:
        def log(self, figures, step):
            calls.append((step, figures))

        def finish(self, exit_code):
            calls.append(exit_code)

    stub.init = lambda **options: calls.append(options) or Started()
    monkeypatch.setitem(sys.modules, "wandb", stub)
    result = ms.run_in_threads(2, lambda b: train(b, WandB(project="p"), max_steps=3))[0]
    assert (calls[0], calls[-1]) == ({"project": "p"}, 0)
    assert [(step, figures["loss"]) for step, figures in calls[1:-1]] == list(
        enumerate(result.loss_history, 1)
    )
    calls.clear()

    def fail(run):
        raise RuntimeError("a failure")

    with pytest.raises(RuntimeError, match="a failure"):
        ms.run_in_threads(2, lambda b: train(b, WandB(), Spy("on_step", 2, fail)))
    assert calls[-1] == 1
    assert json.dumps(calls[1][1])


# ------------------------------------------------------------------------- loops written by hand


@in_worlds(1, 2, 3)
def test_a_hand_written_loop_has_the_same_callbacks(backend, shared_path):
    spy = Spy("on_step", 3, lambda run: run.stop("enough") if run.rank == 0 else None)
    last = backend.world_size - 1
    request = Spy("on_evaluate", 2, lambda run: run.save() if run.rank == last else None)
    saved = []
    with running([spy, request, JSONLines(shared_path / "m")], backend, total_steps=9) as hooks:
        for step in range(1, 10):
            stops = hooks.step(1 / step, samples=8, learning_rate=0.1, extra=step)
            assert not hooks.saves
            if step == 2:
                stops = hooks.evaluate(np.float64(0.5), accuracy=0.75)
            if hooks.saves:
                saved.append(step)
                hooks.checkpoint(shared_path)
            if stops:
                break
    assert (step, saved) == (3, [2])
    assert [name for name, _ in spy.calls] == [
        "on_start",
        "on_step",
        "on_step",
        "on_evaluate",
        "on_checkpoint",
        "on_step",
        "on_stop",
    ]
    backend.barrier()
    rows = read_metrics(shared_path / "m")
    assert [(row["step"], row.get("loss"), row.get("extra")) for row in rows] == [
        (1, 1.0, 1),
        (2, 0.5, 2),
        (2, None, None),
        (3, 1 / 3, 3),
    ]
    assert (rows[2]["validation_loss"], rows[2]["validation_accuracy"]) == (0.5, 0.75)


@in_worlds(2)
def test_an_evaluation_keeps_the_request_of_its_step(backend):
    request = Spy("on_step", 2, lambda run: run.save() if run.rank == 1 else None)
    saved = []
    with running([request], backend) as hooks:
        for step in (1, 2, 3):
            hooks.step(1.0)
            hooks.evaluate(0.5)
            if hooks.saves:
                saved.append(step)
                hooks.checkpoint("a")
                assert not hooks.saves
    assert saved == [2]


def test_progress_without_an_end(capsys):
    def main(backend):
        with running([ProgressLine()], backend, unit="tokens") as hooks:
            for _ in range(3):
                hooks.step(0.5, samples=64)
            hooks.evaluate(0.25)
            hooks.run.stop("enough")
            hooks.step(0.5, samples=64)

    ms.run_in_threads(2, main)
    lines = [line.split("  ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    assert lines[0].startswith("step 1  loss 0.5000  ")
    assert lines[1] == "step 3  loss 0.5000  validation loss 0.2500"
    assert re.match(r"step 4  loss 0.5000  \S+ tokens/s$", lines[2])
    assert len(lines) == 3


def test_a_preempted_run_stops_after_its_save(tmp_path):
    spy = Spy("on_step", 2, lambda run: signal.raise_signal(signal.SIGTERM))
    with (
        ms.InMemoryCommunicationBackend(0, 1, "hooks") as backend,
        pytest.raises(Preempted, match="preempted after step 2 of 12; saved in"),
    ):
        train(backend, spy, checkpoint=tmp_path / "run")
    assert [name for name, _ in spy.calls][-2:] == ["on_checkpoint", "on_stop"]
    assert spy.steps("on_stop") == [2]


def test_an_exception_in_a_hand_written_loop():
    def main(backend):
        fail = Spy("on_step", 2, lambda run: run.backend.rank == 1 and 1 / 0)
        with running([fail], backend) as hooks:
            while not hooks.step(1.0):
                pass

    with pytest.raises(ZeroDivisionError) as error:
        ms.run_in_threads(2, main)
    assert (
        "raised in on_step of the callback Spy on rank 1, after step 2" in error.value.__notes__[0]
    )


def test_a_signal_ends_a_hand_written_loop_at_a_save():
    spy = Spy()

    def loop(backend):
        with running([spy], backend, step=10) as hooks:
            while not hooks.step(1.0):
                assert not hooks.saves
                if hooks.record.step == 12:
                    signal.raise_signal(signal.SIGTERM)
            assert hooks.saves

    with (
        ms.InMemoryCommunicationBackend(0, 1, "hooks") as backend,
        pytest.raises(Preempted) as ended,
    ):
        loop(backend)
    assert (ended.value.code, ended.value.step) == (75, 13)
    assert spy.steps("on_stop") == [13]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"unit": 5}, TypeError, "unit must be a str, got int"),
        ({"total_steps": "9"}, TypeError, "total_steps must be an integer, got '9'"),
        ({"total_steps": -1}, ValueError, "total_steps must be 0 or more, got -1"),
        ({"step": True}, TypeError, "step must be an integer, got True"),
        ({"step": -3}, ValueError, "step must be 0 or more, got -3"),
    ],
)
@in_worlds(2)
def test_wrong_arguments_in_a_hand_written_loop_are_refused(backend, options, error, message):
    with pytest.raises(error, match=message), running([], backend, **options):
        raise AssertionError("the loop has begun")


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [(5, TypeError, "path must be a string"), ("", ValueError, "path must not be blank")],
)
@pytest.mark.parametrize("kind", [JSONLines, CSVFile])
def test_a_writer_needs_the_path_of_a_file(kind, path, error, message):
    with pytest.raises(error, match=message):
        kind(path)
