"""Signals that a run receives while it trains, and their handlers before and after."""

import os
import signal
import threading
import time

import numpy as np
import pytest

import mpishard as ms
from mpishard.callbacks import preemption
from mpishard.callbacks.preemption import PREEMPTING_SIGNALS, Preemption
from mpishard.communication.contract.status import StatusPage
from mpishard.errors import NonFiniteLossError, Preempted

SAMPLES, BATCH = 24, 8


class Inputs:
    """Samples that call a function at a chosen read."""

    def __init__(self, then=None, at=0):
        self.values = np.random.default_rng(0).standard_normal((SAMPLES, 3))
        self.then, self.at, self.reads = then, at, 0

    def __len__(self):
        return SAMPLES

    def __getitem__(self, indices):
        self.reads += 1
        if self.reads == self.at:
            self.then()
        return self.values[indices]


def send(number):
    return lambda: os.kill(os.getpid(), number)


@pytest.fixture
def world():
    """A world of one rank on the main thread, which receives signals."""
    with ms.InMemoryCommunicationBackend(0, 1, "preemption") as backend:
        yield backend


@pytest.fixture(autouse=True)
def handlers():
    """Restore all handlers after the test."""
    before = {number: signal.getsignal(number) for number in PREEMPTING_SIGNALS}
    yield
    assert {number: signal.getsignal(number) for number in PREEMPTING_SIGNALS} == before


def train(backend, inputs, folder, **options):
    model = ms.as_distributed(ms.nn.MLP([3, 4, 1], seed=0), backend, "fsdp")
    optimizer = ms.as_distributed(ms.optimizers.Adam(1e-2), backend, "fsdp")
    if folder is not None:  # then a read happens in its own step
        options["user_state"] = {"none": np.random.default_rng(0)}
    data = ms.OptimizationInputData(
        model=model,
        x_train=inputs,
        y_train=np.ones((SAMPLES, 1)),
        batch_size=BATCH,
        epochs=3,
        progress=False,
        checkpoint=folder,
        **options,
    )
    result = optimizer.optimize(data)
    return result, model.gather_full_parameters()


@pytest.mark.parametrize("number", PREEMPTING_SIGNALS)
@pytest.mark.parametrize("checkpoint_async", [False, True])
def test_a_preempted_run_saves_and_ends(world, tmp_path, number, checkpoint_async):
    options = {"checkpoint_every": 2, "checkpoint_async": checkpoint_async}
    inputs = Inputs(send(number), at=6)  # the first read is a check
    with pytest.raises(
        Preempted, match=r"^preempted after step 5 of 9; saved in .*step-00000005$"
    ) as e:
        train(world, inputs, tmp_path / "run", **options)
    assert (e.value.code, e.value.step) == (75, 5)
    assert not isinstance(e.value, Exception)  # a script that goes on after any error ends
    assert not [t for t in threading.enumerate() if t.name == "mpishard-checkpoint"]
    result, parameters = train(world, Inputs(), tmp_path / "run", **options)
    assert (result.iterations, len(result.loss_history)) == (9, 4)
    _, undisturbed = train(world, Inputs(), tmp_path / "other", **options)
    np.testing.assert_array_equal(parameters, undisturbed)


@pytest.mark.parametrize("resume", [None, True, "run", False, "start"])
def test_the_log_says_what_the_same_command_does(world, tmp_path, caplog, monkeypatch, resume):
    """A run with resume=False reports neither that it can resume, nor with how many ranks."""
    monkeypatch.chdir(tmp_path)
    for folder in ("run", "start"):
        train(world, Inputs(), folder, max_steps=2)
    page = StatusPage(0, 1)
    monkeypatch.setattr(preemption, "own_page", lambda: page)
    seen = []

    def stop():
        seen.append(page.read().resumable_by)
        send(signal.SIGTERM)()

    with caplog.at_level("WARNING", "mpishard"), pytest.raises(Preempted):
        train(world, Inputs(stop, at=3), "run", resume=resume)
    if resume in (False, "start"):
        assert caplog.messages[-1].endswith(f"to resume from there, leave resume={resume!r} out")
        assert seen == [(0, 0)]
    else:
        assert caplog.messages[-1].endswith("; the same command resumes from there")
        assert seen[0][0] == 1


def test_a_run_preempted_at_its_last_step_ends_too(world, tmp_path):
    with pytest.raises(Preempted, match="after step 9 of 9"):
        train(world, Inputs(send(signal.SIGTERM), at=10), tmp_path / "run")
    result, _ = train(world, Inputs(), tmp_path / "run")
    assert (result.iterations, len(result.loss_history)) == (9, 0)


def test_without_checkpoints_nothing_is_received(world, tmp_path):
    present = []
    inputs = Inputs(lambda: present.append(signal.getsignal(signal.SIGUSR1)), at=3)
    train(world, inputs, None)
    assert present == [signal.SIG_DFL]


def test_the_user_s_own_handler_stays(world, tmp_path):
    received = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
    try:
        result, _ = train(world, Inputs(send(signal.SIGUSR1), at=6), tmp_path / "run")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert received == [signal.SIGUSR1]
    assert result.iterations == 9


def test_handlers_are_put_back_after_an_error(world, tmp_path):
    inputs = Inputs()
    inputs.then, inputs.at = lambda: inputs.values.fill(np.nan), 5
    with pytest.raises(NonFiniteLossError):
        train(world, inputs, tmp_path / "run")


def test_on_another_thread_nothing_is_received(tmp_path):
    present = []
    inputs = Inputs(lambda: present.append(signal.getsignal(signal.SIGUSR1)), at=3)
    ms.run_in_threads(1, train, inputs, tmp_path / "run")
    assert present == [signal.SIG_DFL]


@pytest.fixture
def passed_on(monkeypatch):
    """The signals passed on to the earlier handler, which records them here."""
    sent = []
    monkeypatch.setattr(preemption.os, "kill", lambda pid, number: sent.append((pid, number)))
    return sent


def test_a_second_sigterm_goes_to_the_handler_from_before(world, passed_on, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(preemption.time, "monotonic", lambda: now[0])
    present = signal.getsignal(signal.SIGTERM)
    with Preemption(world) as preempting:
        for seconds in (0.0, 0.9):  # one order, along two paths
            now[0] = 100.0 + seconds
            signal.raise_signal(signal.SIGTERM)
            assert passed_on == []
        signal.raise_signal(signal.SIGUSR1)
        assert preempting.is_asked()
        now[0] = 101.5
        signal.raise_signal(signal.SIGUSR1)  # a notice, given twice
        assert passed_on == []
        signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) == present
    assert passed_on == [(os.getpid(), signal.SIGTERM)]


def test_a_signal_after_the_last_step_goes_to_the_next_handler(world, passed_on):
    with Preemption(world) as preempting:
        assert not preempting.is_asked()
        signal.raise_signal(signal.SIGTERM)
    assert passed_on == [(os.getpid(), signal.SIGTERM)]


def test_a_forked_process_keeps_the_earlier_handler(world):
    ready = os.pipe()
    with Preemption(world):
        child = os.fork()
        if child == 0:
            os.write(ready[1], b"!")  # Python forgets signals that come before the fork is done
            for _ in range(1000):
                time.sleep(0.01)
            os._exit(0)
        assert os.read(ready[0], 1) == b"!"
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
    for end in ready:
        os.close(end)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
