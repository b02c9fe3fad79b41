"""An interrupted run resumes with the same bits, and refuses checkpoints that do not fit."""

import os

import numpy as np
import pytest

import mpishard as ms
from mpishard.checkpoint import CheckpointFolder
from mpishard.errors import CheckpointError
from mpishard.nn import MSE, Dropout, Linear, Model, Sequential, Tanh
from mpishard.testing.worlds import in_worlds
from mpishard.training import saving

STEPS = 500 if os.environ.get("MPISHARD_TEST_FULL") else 20
SAMPLES, BATCH = 50, 16
generator = np.random.default_rng(0)
X = generator.standard_normal((SAMPLES, 5))
Y = np.sin(X[:, :2])
X_NEW, Y_NEW = X[:11] + 0.1, Y[:11]


class StopsError(Exception):
    """The error that interrupts a run."""


class Inputs:
    """Inputs whose n-th read interrupts the run. With ``noise`` they draw random numbers."""

    def __init__(self, reads=np.inf, noise=None):
        self.left = reads + 1  # one for the check of the first sample
        self.noise = noise

    def __len__(self):
        return SAMPLES

    def __getitem__(self, indices):
        if self.left == 0:
            raise StopsError
        self.left -= 1
        if self.noise is None or not len(indices):
            return X[indices]
        return X[indices] + 0.1 * self.noise.standard_normal((SAMPLES, 5))[indices]


def network(dtype):
    layers = Sequential(
        {"one": Linear(5, 8), "tanh": Tanh(), "dropout": Dropout(0.3), "two": Linear(8, 2)}
    )
    return Model(layers, MSE(), input_shape=(5,), seed=4, dtype=dtype)


def schedule():
    return ms.optimizers.WarmUp(5, ms.optimizers.Cosine(1e-2, STEPS - 5))


RULES = {
    "momentum": lambda: ms.optimizers.SGD(schedule(), momentum=0.9, clip_global_norm=0.5),
    "adamw": lambda: ms.optimizers.AdamW(schedule(), weight_decay=0.1),
}


def train(backend, folder, rule="adamw", strategy="fsdp", dtype=np.float64, **options):
    """Return the result, and the parameters at the end."""
    config = ms.ShardingConfiguration(backend, enable_gradient_compression=dtype == np.float32)
    model = ms.as_distributed(network(dtype), config, strategy)
    optimizer = ms.as_distributed(RULES[rule](), config, strategy)
    choices = {
        "x_train": Inputs(), "y_train": Y, "batch_size": BATCH, "epochs": STEPS, "seed": 3,
        "max_steps": STEPS, "progress": False, "checkpoint": folder,
    }  # fmt: skip
    result = optimizer.optimize(ms.OptimizationInputData(model=model, **(choices | options)))
    return result, model.gather_full_parameters()


def interrupt(backend, folder, reads, **options):
    with pytest.raises(StopsError):
        train(backend, folder, **{"x_train": Inputs(reads), **options})


def same_run(resumed, undisturbed, made_before):
    """Require the same bits and the same history."""
    assert resumed[1].tobytes() == undisturbed[1].tobytes()
    for kind in ("validation_history", "fitness_history", "best_iteration", "best_fitness_score"):
        assert getattr(resumed[0], kind) == getattr(undisturbed[0], kind)
    assert resumed[0].loss_history == undisturbed[0].loss_history[made_before:]


@pytest.mark.parametrize(
    ("rule", "strategy", "dtype"),
    [
        ("momentum", "ddp", np.float64),
        ("momentum", "zero2", np.float64),
        ("adamw", "zero1", np.float32),
        ("adamw", "fsdp", np.float64),
        ("adamw", "fsdp", np.float32),
    ],
)
@in_worlds(1, 3)
def test_an_interrupted_run_ends_with_the_same_bits(backend, rule, strategy, dtype, shared_path):
    """With a schedule, clipping, dropout, validation, and the best parameters at the end."""
    options = {
        "rule": rule, "strategy": strategy, "dtype": dtype, "x_validation": X_NEW,
        "y_validation": Y_NEW, "validate_every": 3, "patience": STEPS, "keep_best": True,
        "checkpoint_every": 2,
    }  # fmt: skip
    undisturbed = train(backend, shared_path / "other", **options)
    for reads in (7, 6):  # an odd number of steps, and up to a save
        interrupt(backend, shared_path / "run", reads, **options)
    same_run(train(backend, shared_path / "run", **options), undisturbed, 12)


@in_worlds(2)
def test_early_stopping_is_at_the_same_evaluation(backend, shared_path):
    options = {"x_validation": X_NEW, "y_validation": -Y_NEW, "validate_every": 2, "patience": 4}
    options["checkpoint_every"] = 1
    undisturbed = train(backend, shared_path / "other", **options)
    assert undisturbed[0].stopped_early
    interrupt(backend, shared_path / "run", 5, **options)
    same_run(train(backend, shared_path / "run", **options), undisturbed, 5)


# ------------------------------------------------------------------------- what is the user's own


class Counter:
    """A part of a script's state that is no generator."""

    def __init__(self):
        self.value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


BIT_GENERATORS = [np.random.PCG64, np.random.Philox, np.random.MT19937, np.random.SFC64]


@pytest.mark.parametrize("bits", BIT_GENERATORS)
@in_worlds(2)
def test_a_generator_of_the_script_goes_on_where_it_was(backend, bits, shared_path):
    def noisy(folder, reads=np.inf):
        noise = np.random.Generator(bits(7))
        noise.standard_normal(3, np.float32)  # half of what it has drawn is kept
        inputs = Inputs(reads, noise)
        return {
            "folder": folder,
            "x_train": inputs,
            "checkpoint_every": 4,
            "user_state": {"noise": noise},
        }

    undisturbed = train(backend, **noisy(shared_path / "other"))
    with pytest.raises(StopsError):
        train(backend, **noisy(shared_path / "run", 6))
    same_run(train(backend, **noisy(shared_path / "run")), undisturbed, 4)


@in_worlds(3)
def test_state_that_differs_between_ranks_is_saved_for_each(backend, shared_path):
    mine, alike = Counter(), Counter()
    mine.value, alike.value = 10 + backend.rank, 5
    train(backend, shared_path / "run", max_steps=2, user_state={"mine": mine, "alike": alike})
    found = {"mine": Counter(), "alike": Counter()}
    train(backend, shared_path / "run", max_steps=3, user_state=found)
    assert (found["mine"].value, found["alike"].value) == (10 + backend.rank, 5)


def test_state_that_differs_needs_as_many_ranks(tmp_path):
    def counting(backend, step):
        own = Counter()
        own.value = step * backend.rank
        train(backend, tmp_path / "run", max_steps=step, user_state={"own": own})

    ms.run_in_threads(2, counting, 1)
    with pytest.raises(ValueError, match=r"differed between 2 ranks when .* 3 ranks now"):
        ms.run_in_threads(3, counting, 2)
    alike = tmp_path / "alike"
    ms.run_in_threads(2, train, alike, max_steps=1, user_state={"own": Counter()})
    ms.run_in_threads(3, train, alike, max_steps=2, user_state={"own": Counter()})


class Unsayable(Counter):
    def state_dict(self):
        return {"array": np.ones(2)}


class Numbered(Counter):
    def state_dict(self):
        return {1: "one", "1": "another"}


class Unwilling(Counter):
    def load_state_dict(self, state):
        raise ValueError("this state is of another generator")


def errors_of(ranks, body):
    """Return the class and the message of the error that ``body`` raises on each rank."""

    def caught(backend):
        with pytest.raises(Exception) as error:  # noqa: PT011 - which one it is, is looked at
            body(backend)
        return error.type, str(error.value)

    return ms.run_in_threads(ranks, caught)


def test_state_that_one_rank_cannot_save_is_refused_by_all(tmp_path):
    def body(backend):
        part = Unsayable() if backend.rank == 1 else Counter()
        train(backend, tmp_path / "run", user_state={"own": part})

    own = "Object of type ndarray is not JSON serializable"
    errors = errors_of(3, body)
    assert [kind for kind, _ in errors] == [TypeError] * 3
    assert all(own in words and "array.tolist()" in words for _, words in errors)
    assert errors[0][1].startswith("rank 1: ")
    assert not (tmp_path / "run").exists()


def test_state_that_one_rank_cannot_restore_ends_all(tmp_path):
    ms.run_in_threads(3, train, tmp_path / "run", max_steps=2, user_state={"own": Counter()})

    def body(backend):
        part = Unwilling() if backend.rank == 1 else Counter()
        train(backend, tmp_path / "run", user_state={"own": part})

    words = "this state is of another generator"
    found = (ValueError, f"rank 1: {words}")
    assert errors_of(3, body) == [found, (ValueError, words), found]


def test_all_ranks_raise_if_rank_0_cannot_search_for_a_checkpoint(tmp_path, monkeypatch):
    def look(place):
        raise PermissionError(f"{place} is not to be read")

    monkeypatch.setattr(saving, "find_single", look)
    errors = errors_of(3, lambda backend: train(backend, tmp_path / "run"))
    words = f"{tmp_path / 'run'} is not to be read"
    found = (PermissionError, f"rank 0: {words}")
    assert errors == [(PermissionError, words), found, found]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"user_state": np.random.default_rng()}, TypeError, "must map names to .*got Generator"),
        ({"user_state": {"rng": np.random}}, TypeError, "'rng' is a module"),
        ({"user_state": {3: Counter()}}, TypeError, "3 is no name"),
        ({"user_state": {"a": Unsayable()}}, TypeError, "user_state 'a': .* not JSON serial"),
        ({"user_state": {"a": Numbered()}}, TypeError, r"got the key 1 in \['a'\]"),
        ({"user_state": {"a": Counter()}, "folder": None}, ValueError, "needs checkpoint or resum"),
    ],
)
def test_refuses_state_that_cannot_be_saved(tmp_path, given, error, message):
    untouched = Inputs(1)  # each rank looks at the first sample, and makes no step
    with pytest.raises(error, match=message):
        ms.run_in_threads(2, train, **({"folder": tmp_path / "run", "x_train": untouched} | given))
    assert not (tmp_path / "run").exists()


def test_refuses_another_state_than_was_saved(tmp_path):
    ms.run_in_threads(1, train, tmp_path / "run", max_steps=2, user_state={"a": Counter()})
    for other in (None, {"b": Counter()}):
        with pytest.raises(ValueError, match=r"user_state 'a', but has (none|'b') now"):
            ms.run_in_threads(1, train, tmp_path / "run", user_state=other)


# ------------------------------------------------------------------------------------- the folder


def damage(path):
    """Change a byte in the middle of rank 0's file."""
    file = path / "rank00000.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_run_resumes_before_a_damaged_checkpoint(tmp_path, caplog):
    ms.run_in_threads(2, train, tmp_path / "run", max_steps=6, checkpoint_every=3)
    damage(tmp_path / "run" / "step-00000006")
    resumed = ms.run_in_threads(2, train, tmp_path / "run")[0]
    assert len(resumed[0].loss_history) == STEPS - 3
    assert "because later checkpoints cannot be used: step-00000006: " in caplog.text
    undisturbed = ms.run_in_threads(2, train, tmp_path / "other")[0]
    assert resumed[1].tobytes() == undisturbed[1].tobytes()


def test_an_error_names_the_fault_of_each_checkpoint(tmp_path):
    ms.run_in_threads(2, train, tmp_path / "run", max_steps=6, checkpoint_every=3)
    for name in ("step-00000003", "step-00000006"):
        damage(tmp_path / "run" / name)
    with pytest.raises(CheckpointError, match=r"(?s)step-00000006: .*; step-00000003: "):
        ms.run_in_threads(2, train, tmp_path / "run")


def test_a_new_run_does_not_resume_existing_checkpoints(tmp_path):
    folder = tmp_path / "run"
    ms.run_in_threads(2, train, folder, max_steps=6, checkpoint_every=3)
    anew, _ = ms.run_in_threads(2, train, folder, max_steps=4, resume=False)[0]
    assert len(anew.loss_history) == 4
    # The newest is the last that was saved, and not the one of the highest step.
    assert CheckpointFolder(folder).entries()[0].step == 4
    resumed, _ = ms.run_in_threads(3, train, folder, max_steps=9)[0]
    assert len(resumed.loss_history) == 5


def test_a_changed_model_is_refused_with_what_to_do(tmp_path, monkeypatch):
    ms.run_in_threads(2, train, tmp_path / "run", max_steps=2)
    monkeypatch.setitem(globals(), "network", lambda _: ms.nn.MLP([5, 3, 2], seed=4))
    with pytest.raises(CheckpointError, match="does not fit the model") as error:
        ms.run_in_threads(2, train, tmp_path / "run")
    assert "choose another folder, or pass resume=False" in error.value.__notes__[0]


def test_resume_true_needs_a_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint in .*leave resume out"):
        ms.run_in_threads(2, train, tmp_path / "run", resume=True)
    ms.run_in_threads(2, train, tmp_path / "run", max_steps=4)
    again, _ = ms.run_in_threads(2, train, tmp_path / "run", resume=True)[0]
    assert len(again.loss_history) == STEPS - 4


@pytest.mark.parametrize("resume", [False, "earlier", None])
def test_restarts_that_would_begin_anew_are_named_before_training(
    tmp_path, monkeypatch, caplog, resume
):
    folder = tmp_path / "run"
    if resume == "earlier":
        resume = tmp_path / "earlier"
        ms.run_in_threads(2, train, resume, max_steps=2)
    options = {"max_steps": 4, "resume": resume}
    ms.run_in_threads(2, train, folder, **options)
    assert "if it fails" not in caplog.text
    monkeypatch.setenv("MPISHARD_MAX_RESTARTS", "3")
    ms.run_in_threads(2, train, folder, **options)
    monkeypatch.delenv("MPISHARD_MAX_RESTARTS")
    ms.launch(
        lambda backend: train(backend, folder, **options),
        backend="memory", world_size=2, on_failure="shrink",
    )  # fmt: skip
    warnings = [r.getMessage() for r in caplog.records if "if it fails" in r.getMessage()]
    if resume is None:
        assert not warnings
        return
    by_run, by_shrink = warnings
    assert f"resume={resume!r}, and mpishard run --max-restarts 3 starts the job again" in by_run
    assert "on_failure='shrink' begins main again if it fails" in by_shrink
    assert str(folder) in by_run
