"""Early stopping and the best solution: ends of runs, their parameters, and resumed runs."""

from __future__ import annotations

import re

import numpy as np
import pytest

import mpishard as ms
from mpishard.checkpoint import load_arrays
from mpishard.errors import ShardingError
from mpishard.observe.ledger import MemoryCategory
from mpishard.testing.worlds import in_worlds

generator = np.random.default_rng(0)
X = generator.standard_normal((24, 5))
Y = X @ generator.standard_normal((5, 2))
# The way to the training data's minimum leads past the validation data's, half way there.
VALIDATION = {"x_validation": X[:7], "y_validation": 0.5 * Y[:7]}

by_strategy = pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
whole_or_sharded = pytest.mark.parametrize("strategy", ["ddp", "fsdp"])


def rule():
    return ms.optimizers.SGD(0.05, momentum=0.5)


def wrap(backend, strategy="fsdp", optimizer=None):
    config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=1)
    model = ms.as_distributed(ms.nn.MLP([5, 4, 2], activation="tanh", seed=1), config, strategy)
    return model, ms.as_distributed(optimizer or rule(), config, strategy)


def train(backend, strategy="fsdp", optimizer=None, **options):
    """Return the result, and the parameters at the end of the run."""
    model, optimizer = wrap(backend, strategy, optimizer)
    given = {
        "x_train": X, "y_train": Y, "batch_size": 8, "epochs": 20, "seed": 3, "progress": False,
        "validate_every": 2 if "x_validation" in options else None,
    }  # fmt: skip
    result = optimizer.optimize(ms.OptimizationInputData(model=model, **(given | options)))
    return result, model.get_parameters()


def loss_of(parameters):
    plain = ms.nn.MLP([5, 4, 2], activation="tanh").with_parameters(parameters)
    return ms.nn.MSE()(plain.predict(VALIDATION["x_validation"]), VALIDATION["y_validation"])


# ------------------------------------------------------------------------------- an undisturbed run


@whole_or_sharded
@in_worlds(2)
def test_all_ranks_have_the_parameters_that_were_put_back(backend, strategy):
    model, optimizer = wrap(backend, strategy)
    seen = []
    optimizer.should_early_stop = lambda: seen.append(model.gather_full_parameters())
    given = {"x_train": X, "y_train": Y, "batch_size": 8, "epochs": 20, "progress": False}
    result = optimizer.optimize(
        ms.OptimizationInputData(model=model, patience=3, **given, **VALIDATION)
    )
    assert result.best_iteration < result.iterations
    assert model._cached_full_parameters is None
    assert (model.gather_full_parameters() == seen[-4]).all()  # three evaluations were no better
    with pytest.raises(ShardingError, match="the gradient of the last step is not available"):
        _ = optimizer.last_computed_gradients


@by_strategy
@in_worlds(1, 2, 3)
def test_early_stopping_puts_the_best_parameters_back(backend, strategy):
    result, parameters = train(backend, strategy, patience=3, **VALIDATION)
    losses = [loss for _, loss in result.validation_history]
    best = int(np.argmin(losses))
    assert 0 < best == len(losses) - 4  # three evaluations in a row were no better
    assert result.stopped_early
    assert result.iterations == 2 * len(losses) < 60
    assert (result.best_fitness_score, result.best_iteration) == (min(losses), 2 * (best + 1))
    assert loss_of(parameters) == pytest.approx(min(losses), rel=1e-12)
    _, expected = train(backend, strategy, max_steps=result.best_iteration)
    assert parameters.tobytes() == expected.tobytes()
    assert result.model.get_parameters().tobytes() == parameters.tobytes()
    assert result.validation_result.stats["loss"] == pytest.approx(min(losses), rel=1e-12)


@in_worlds(2)
def test_without_patience_nothing_stops_or_is_put_back(backend):
    result, parameters = train(backend, **VALIDATION)
    assert not result.stopped_early
    assert result.iterations == 60
    assert result.best_iteration < 60
    assert result.best_fitness_score == min(loss for _, loss in result.validation_history)
    assert loss_of(parameters) == pytest.approx(result.validation_history[-1][1], rel=1e-12)
    assert result.model.memory.held(MemoryCategory.BEST_PARAMETERS) == 0
    _, expected = train(backend)
    assert parameters.tobytes() == expected.tobytes()


@whole_or_sharded
@in_worlds(2)
def test_keep_best_goes_through_all_epochs_and_each_rank_keeps_its_part(backend, strategy):
    model, optimizer = wrap(backend, strategy)
    kept = []
    ask = optimizer.should_early_stop

    def watch():
        kept.append(model.memory.held(MemoryCategory.BEST_PARAMETERS))
        return ask()

    optimizer.should_early_stop = watch
    result = optimizer.optimize(
        ms.OptimizationInputData(
            model=model,
            x_train=X,
            y_train=Y,
            batch_size=8,
            epochs=20,
            seed=3,
            progress=False,
            validate_every=2,
            keep_best=True,
            **VALIDATION,
        )
    )
    own = sum(piece.length for piece in model.engine.layout.pieces())
    assert set(kept) == {own * 8}
    assert own < model.parameter_count
    assert result.iterations == 60
    assert loss_of(model.get_parameters()) == pytest.approx(result.best_fitness_score, rel=1e-12)


@in_worlds(2)
def test_patience_without_keeping_the_best(backend):
    result, parameters = train(backend, patience=3, keep_best=False, **VALIDATION)
    assert result.stopped_early
    assert loss_of(parameters) == pytest.approx(result.validation_history[-1][1], rel=1e-12)


@in_worlds(2)
def test_without_validation_data_the_epochs_training_loss_counts(backend):
    result, _ = train(backend, patience=2, tolerance=0.05, epochs=40)
    *_, improved, first, second = result.fitness_history
    assert result.stopped_early
    assert improved - min(first, second) < 0.05
    finer, _ = train(backend, patience=2, epochs=40)
    assert result.iterations < finer.iterations
    assert result.best_fitness_score == min(result.fitness_history)
    assert result.best_iteration == result.iterations == 3 * len(result.fitness_history)


@in_worlds(2)
def test_the_end_between_two_evaluations_is_evaluated_too(backend):
    result, parameters = train(backend, max_steps=5, keep_best=True, **VALIDATION)
    assert [step for step, _ in result.validation_history] == [2, 4, 5]
    assert result.best_iteration == 5
    assert loss_of(parameters) == pytest.approx(result.best_fitness_score, rel=1e-12)


class Impatient(ms.optimizers.SGD):
    """A rule that asks to stop on one rank after some evaluations."""

    def __init__(self, evaluations):
        super().__init__(0.05, momentum=0.5)
        self._left = evaluations

    def should_early_stop(self):
        self._left -= 1
        return self._left < 0


@whole_or_sharded
@in_worlds(3)
def test_a_stop_request_of_one_rank_stops_all(backend, strategy):
    last = backend.world_size - 1
    mine = Impatient(4 if backend.rank == last else 1000)
    result, parameters = train(backend, strategy, mine, **VALIDATION)
    assert result.stopped_early
    assert result.iterations == 10
    _, expected = train(backend, strategy, max_steps=10)
    assert parameters.tobytes() == expected.tobytes()


@in_worlds(1, 3)
def test_all_ranks_stop_if_one_does(backend):
    for who in range(backend.world_size):
        _, optimizer = wrap(backend, "ddp", Impatient(0 if backend.rank == who else 9))
        assert optimizer.should_early_stop() is True
    _, optimizer = wrap(backend, "ddp", Impatient(9))
    assert optimizer.should_early_stop() is False


# ---------------------------------------------------------------------------------------- resumed


@pytest.mark.parametrize(
    ("strategy", "stop"), [("ddp", 7), ("zero1", 19), ("zero2", 7), ("fsdp", 19)]
)
def test_interrupted_and_resumed_it_is_the_same_run(tmp_path, strategy, stop):
    """Between evaluations, before the best and behind it; the bits are the same."""
    whole, parameters = ms.run_in_threads(2, _patient, strategy)[0]
    assert whole.best_iteration < whole.iterations
    ms.run_in_threads(2, _patient, strategy, max_steps=stop, checkpoint=tmp_path / "run")
    for result, values in ms.run_in_threads(2, _patient, strategy, resume=tmp_path / "run"):
        assert values.tobytes() == parameters.tobytes()
        for name in (
            "best_fitness_score", "best_iteration", "iterations", "stopped_early",
            "fitness_history", "validation_history", "fit_detection_result",
        ):  # fmt: skip
            assert getattr(result, name) == getattr(whole, name), name
        assert result.validation_result.stats == whole.validation_result.stats
        assert result.test_loss == whole.test_loss


def _patient(backend, strategy, **options):
    tests = {"x_test": X[7:], "y_test": Y[7:]}
    return train(backend, strategy, patience=3, **VALIDATION, **tests, **options)


@pytest.mark.parametrize(
    ("worlds", "strategies"), [((3, 2), ("fsdp", "ddp")), ((1, 4), ("ddp", "zero1"))]
)
def test_a_run_resumes_in_another_world(tmp_path, worlds, strategies):
    whole, parameters = ms.run_in_threads(1, _patient, "fsdp")[0]
    stop = whole.best_iteration + 2
    ms.run_in_threads(
        worlds[0], _patient, strategies[0], max_steps=stop, checkpoint=tmp_path / "run"
    )
    for result, values in ms.run_in_threads(
        worlds[1], _patient, strategies[1], resume=tmp_path / "run"
    ):
        np.testing.assert_allclose(values, parameters, rtol=0, atol=1e-12)
        assert (result.best_iteration, result.iterations) == (
            whole.best_iteration, whole.iterations,
        )  # fmt: skip


@in_worlds(2)
def test_a_run_that_has_stopped_stays_so_until_it_gets_more_patience(backend, shared_path):
    path = shared_path / "run"
    whole, parameters = train(backend, patience=3, checkpoint=path, **VALIDATION)
    again, values = train(backend, patience=3, resume=path, **VALIDATION)
    assert again.loss_history == []
    assert again.stopped_early
    assert values.tobytes() == parameters.tobytes()
    longer, _ = train(backend, patience=5, resume=path, **VALIDATION)
    assert longer.iterations == whole.iterations + 4


@in_worlds(2)
def test_a_checkpoint_holds_the_newest_parameters_and_the_best_beside_them(backend, shared_path):
    path = shared_path / "run"
    result, best = train(backend, patience=3, checkpoint=path, **VALIDATION)
    _, newest = train(backend, max_steps=result.iterations)
    stored = np.concatenate([array.ravel() for array in load_arrays(path).values()])
    assert stored.tobytes() == newest.tobytes() != best.tobytes()
    with ms.checkpoint.CheckpointReader(path) as reader:
        kind = "training/best_parameters"
        kept = np.concatenate(
            [reader.read_whole(kind, e).ravel() for e in reader.parameters_of(kind)]
        )
    assert kept.tobytes() == best.tobytes()
    model, optimizer = wrap(backend)
    model.load_model(path)
    ms.checkpoint.load(path, model, optimizer)  # nothing but a loop needs the best
    assert model.get_parameters().tobytes() == newest.tobytes()


@in_worlds(2)
def test_patience_may_begin_at_a_resume(backend, shared_path):
    path = shared_path / "run"
    before, _ = train(backend, max_steps=20, checkpoint=path, **VALIDATION)
    result, parameters = train(backend, patience=2, resume=path, **VALIDATION)
    assert before.best_iteration < 20 < result.best_iteration
    since = [loss for step, loss in result.validation_history if step > 20]
    assert result.best_fitness_score == min(since) > before.best_fitness_score
    assert loss_of(parameters) == pytest.approx(result.best_fitness_score, rel=1e-12)
    without, _ = train(backend, resume=path, **VALIDATION)
    assert without.best_iteration == before.best_iteration


@in_worlds(2)
def test_options_of_the_mirrored_hierarchy_bring_an_end_of_training(backend):
    options = ms.mirror.OptimizationAlgorithmOptions(
        initial_learning_rate=0.05,
        learning_rate_decay=1.0,
        enable_gradient_clipping=False,
        max_iterations=30,
        early_stopping_patience=3,
        tolerance=0.0,
    )
    from_options = ms.optimizers.SGD.from_options(options, momentum=0.5)
    result, parameters = train(backend, "fsdp", from_options, **VALIDATION)
    expected, values = train(backend, patience=3, max_steps=30, **VALIDATION)
    assert result.stopped_early
    assert parameters.tobytes() == values.tobytes()
    assert result.validation_history == expected.validation_history
    own, _ = train(backend, "fsdp", ms.optimizers.SGD.from_options(options), max_steps=4)
    assert own.iterations == 4


# --------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"patience": 0}, ValueError, "patience must be 1 or more, got 0"),
        ({"patience": True}, TypeError, "patience must be an integer, got True"),
        ({"patience": 2, "tolerance": -1.0}, ValueError, "tolerance must be 0 or more"),
        ({"patience": 2, "tolerance": "low"}, TypeError, "tolerance must be a number"),
        ({"tolerance": 0.1}, ValueError, "tolerance 0.1 has no effect without patience"),
    ],
)
@in_worlds(2)
def test_bad_input_is_refused_before_anything_is_sent(backend, options, error, message):
    model, optimizer = wrap(backend)
    before = backend._sequence
    with pytest.raises(error, match=message):
        optimizer.optimize(
            ms.OptimizationInputData(model=model, x_train=X, y_train=Y, progress=False, **options)
        )
    assert backend._sequence == before


@in_worlds(2)
def test_ranks_with_different_patience_are_refused(backend):
    with pytest.raises(ValueError, match="patience is 3, 4"):
        train(backend, patience=3 + backend.rank, **VALIDATION)


@in_worlds(2)
def test_a_black_box_without_a_loss_cannot_be_the_best(backend):
    class Silent:
        theta = np.ones(2)

        def get_parameters(self):
            return self.theta.copy()

        def set_parameters(self, parameters):
            self.theta = parameters

        def compute_gradients(self, x, y):
            return x.mean(axis=0)

    optimizer = ms.as_distributed(rule(), backend)
    data = {"x_train": X[:, :2], "y_train": Y, "progress": False}
    for options in ({"patience": 1}, {"patience": 1, "keep_best": False}, {"keep_best": True}):
        with pytest.raises(ValueError, match="Silent computes none"):
            optimizer.optimize(ms.OptimizationInputData(model=Silent(), **options, **data))
        optimizer.reset()
    result = ms.as_distributed(rule(), backend).optimize(
        ms.OptimizationInputData(model=Silent(), x_test=X[:, :2], y_test=Y, **data)
    )
    assert np.isnan(result.test_loss)


# ------------------------------------------------------------------------------- what is printed


def printed(capsys, **options):
    result = ms.run_in_threads(2, lambda backend: train(backend, progress=True, **options))[0][0]
    lines = capsys.readouterr().out.splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  \S", line) for line in lines)
    return result, [line[21:] for line in lines]


def test_the_last_line_says_why_the_run_stopped(capsys):
    result, lines = printed(capsys, patience=3, **VALIDATION)
    assert lines[-1] == (
        f"stopped early after step {result.iterations} of 60: best validation loss "
        f"{result.best_fitness_score:.4f} after step {result.best_iteration}"
    )
    assert "stopped early" not in "".join(printed(capsys, epochs=1)[1])


def test_the_first_line_says_whether_epochs_or_max_steps_end_first(capsys):
    both = {"epochs": 2, "max_steps": 5}
    result, lines = printed(capsys, **both)
    assert result.iterations == 5
    assert lines[0] == (
        "training for 5 steps: 2 epochs = 6 steps, max_steps = 5; max_steps ends first"
    )
    assert lines[1].startswith("step 1/5")
    result, lines = printed(capsys, epochs=1, max_steps=30)
    assert result.iterations == 3
    assert lines[0] == "training for 3 steps: 1 epoch = 3 steps, max_steps = 30; epochs ends first"
    assert printed(capsys, epochs=2)[1][0].startswith("step 1/6")
