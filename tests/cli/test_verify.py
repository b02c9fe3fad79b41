"""``mpishard verify``: models that depend on a rank are detected, other targets are refused."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import mpishard as ms
from mpishard.cli import app
from mpishard.cli.factories import TargetError, load_factory
from mpishard.cli.verify.comparison import Comparison, default_tolerance, relative_error
from mpishard.cli.verify.job import VerifyJob
from mpishard.cli.verify.problem import (
    RETURNS,
    SIZES,
    Problem,
    build_problem,
)
from mpishard.cli.verify.ranks import compare
from mpishard.cli.verify.reference import fitted, train_alone
from mpishard.communication.mesh import mesh_sizes
from mpishard.distributed import DistributedStrategy
from mpishard.models.stores.parameter_store import MixedParameters
from mpishard.pipeline import SCHEDULE_NAMES, ActivationCheckpointConfig, RecomputeStrategy
from mpishard.testing.worlds import in_worlds

ALONE = None
STRATEGIES = [s.value for s in DistributedStrategy if s != DistributedStrategy.NONE]
DATA_STRATEGIES = STRATEGIES[:5]

# Every setting of a rule differs from its default.
OPTIMIZERS = {
    "sgd": ms.optimizers.SGD(1e-3, momentum=0.9),
    "nesterov": ms.optimizers.SGD(1e-3, 0.8, nesterov=True, weight_decay=0.1, clip_value=0.05),
    "descent": ms.optimizers.SGD(lambda step: 1e-3 / (1 + step), clip_global_norm=0.1),
    "adagrad": ms.optimizers.Adagrad(1e-3, 1e-8, weight_decay=0.1),
    "rmsprop": ms.optimizers.RMSprop(1e-3, 0.99, weight_decay=0.1),
    "centered": ms.optimizers.RMSprop(1e-3, 0.8, 1e-6, momentum=0.7, centered=True),
    "adam": ms.optimizers.Adam(1e-3, 0.8, 0.99, weight_decay=0.1),
    "adamw": ms.optimizers.AdamW(1e-3, 0.8, 0.99, weight_decay=0.01),
    "lion": ms.optimizers.Lion(1e-3, 0.8, 0.95, weight_decay=0.01),
    "lamb": ms.optimizers.LAMB(1e-3, 0.8, 0.99, 1e-8, weight_decay=0.01),
}
# So few pairs that five steps discard the oldest.
SEARCH = ms.optimizers.LBFGS(memory=3)


def data() -> tuple[Any, Any]:
    generator = np.random.default_rng(1)
    x = generator.standard_normal((50, 5))
    return x, np.sin(x[:, :2])


def squares(scale: Any = lambda: 1.0, shift: float = 0.0) -> Any:
    """Least squares, whose gradient can be made wrong on a rank."""

    def fun(theta: Any, x: Any, y: Any) -> Any:
        error = x @ theta - y[:, 0]
        return float(np.mean(error**2)), scale() * 2 * x.T @ error / len(x)

    return ms.FunctionModel(fun, np.linspace(-1, 1, 5) + shift, lambda theta, x: x @ theta)


def of(rank: int | None, culprit: int, fault: Any, right: Any) -> Any:
    return fault if rank == culprit else right


class WithLoss:
    """A black box whose loss is an argument."""

    def __init__(self) -> None:
        self.theta = np.zeros(5)

    def get_parameters(self) -> Any:
        return self.theta.copy()

    def set_parameters(self, theta: Any) -> None:
        self.theta = theta

    def predict(self, x: Any) -> Any:
        return (x @ self.theta)[:, None]

    def compute_gradients(self, x: Any, y: Any, loss: Any = None) -> Any:
        assert isinstance(loss, ms.nn.MSE)
        return 2 * x.T @ (self.predict(x) - y)[:, 0] / len(x)


def dropout() -> Any:
    chain = ms.nn.Sequential(
        ms.nn.Linear(5, 9), ms.nn.Tanh(), ms.nn.Dropout(0.5), ms.nn.Linear(9, 2)
    )
    return ms.nn.Model(chain, ms.nn.MSE(), input_shape=(5,), seed=0)


# What each process makes; the argument is its rank, None for the one that trains alone.
RIGHT = {
    "mlp": lambda rank: Problem(ms.nn.MLP([5, 7, 6, 2], activation="tanh", seed=0), *data()),
    "dropout": lambda rank: Problem(dropout(), *data()),
    "function": lambda rank: Problem(squares(), *data()),
    "loss": lambda rank: Problem(WithLoss(), data()[0], data()[1][:, :1], ms.nn.MSE()),
}
WRONG = {
    "gradient": (
        lambda rank: Problem(squares(lambda: of(rank, 1, 1 + 1e-6, 1.0)), *data()),
        "step 1: on rank 1 the gradient of the rank's own samples differs from",
    ),
    "late": (
        lambda rank: Problem(squares(_late(rank)), *data()),
        "step 3: on rank 1 the gradient of the rank's own samples differs from",
    ),
    "first parameters": (
        lambda rank: Problem(squares(shift=of(rank, 1, 1e-3, 0.0)), *data()),
        "rank 1 got other first parameters than a process alone: factory(seed) must depend on",
    ),
    "data": (
        lambda rank: Problem(squares(), data()[0], data()[1] + of(rank, 1, 1e-3, 0.0)),
        "rank 1 got other data than a process alone",
    ),
    "prediction": (
        lambda rank: Problem(_predicts(of(rank, 1, 1.001, 1.0)), *data()),
        "the parameters agree, and the predictions of rank 1 differ",
    ),
    "no mean": (
        lambda rank: Problem(_sums(), *data()),
        "step 1: the loss is a sum over samples, because the gradient of a batch is the sum of",
    ),
}


def _late(rank: int | None) -> Any:
    calls = []

    def scale() -> float:
        calls.append(1)
        return of(rank, 1, 1.001, 1.0) if len(calls) > 4 else 1.0  # two calls in a step

    return scale


def _predicts(factor: float) -> Any:
    model = squares()
    model._predict = lambda theta, x: factor * (x @ theta)
    return model


def _sums() -> Any:
    def fun(theta: Any, x: Any, y: Any) -> Any:
        error = x @ theta - y[:, 0]
        return float(np.sum(error**2)), 2 * x.T @ error

    return ms.FunctionModel(fun, np.zeros(5))


def job(world_size: int, sizes: Any = (), **settings: Any) -> VerifyJob:
    settings = {"strategy": "fsdp", "steps": 4, "batch_size": 16} | settings
    axes = {"pipeline": (world_size, 1, 1), "tensor": (1, world_size, 1)}
    mesh = mesh_sizes(world_size, *(sizes or axes.get(settings["strategy"], (1, 1, -1))))
    return VerifyJob(Path(), "unused", sizes=mesh, world_size=world_size, **settings)


def verdict_of(
    backend: Any,
    make: Any,
    sizes: Any = (),
    optimizer: str = "sgd",
    options: Any = None,
    **settings: Any,
) -> Comparison:
    """On every rank; each trains the reference for itself."""

    def problem(rank: int | None) -> Problem:
        rule = SEARCH if optimizer == "lbfgs" else OPTIMIZERS[optimizer]
        return replace(make(rank), optimizer=rule, options=options or {})

    mine = job(backend.world_size, sizes, has_one_batch=optimizer == "lbfgs", **settings)
    return compare(backend, mine, problem(backend.rank), train_alone(mine, problem(ALONE)))


@in_worlds(2)
def test_a_factory_that_builds_a_model_of_another_size_on_ranks_is_named(backend: Any) -> None:
    mine = job(backend.world_size)
    reference = train_alone(mine, Problem(ms.nn.MLP([5, 7, 2], seed=0), *data()))
    found = compare(backend, mine, Problem(ms.nn.MLP([5, 8, 2], seed=0), *data()), reference)
    assert not found.is_equal
    expected = "ranks 0, 1 got other first parameters than a process alone: factory(seed) must"
    assert any(line.startswith(expected) for line in found.lines()), found.lines()


# A rule does not know the model: one is enough for each.
@pytest.mark.parametrize(
    ("kind", "strategy", "optimizer"),
    [*((kind, strategy, "sgd") for kind in RIGHT for strategy in STRATEGIES),
     *(("mlp", "fsdp", rule) for rule in OPTIMIZERS if rule != "sgd")],
)  # fmt: skip
@in_worlds(1, 3)
def test_correct_models_are_equal(backend: Any, kind: str, strategy: str, optimizer: str) -> None:
    verdict = verdict_of(backend, RIGHT[kind], strategy=strategy, optimizer=optimizer)
    assert verdict.is_equal, verdict.lines()
    c = verdict
    assert c.worst("parameters", "losses", "own gradients") < 1e-12
    is_box = kind in ("function", "loss")
    on_axes = strategy in ("tensor", "pipeline") and backend.world_size > 1
    assert ("because the model is a black box" in c.note) == (is_box and on_axes)
    cause = c.causes["own gradients"]
    assert ("that several ranks compute together" in cause) == (on_axes and not is_box)
    assert c.errors["parameters"].shape[:2] == (backend.world_size, 5)
    assert c.worst("predictions") < 1e-12
    assert verdict.lines()[-1].startswith("EQUAL: all ")


@in_worlds(1, 3)
def test_a_line_search_is_equal(backend: Any) -> None:
    # More steps than pairs, so that the oldest pair is forgotten.
    given = {"optimizer": "lbfgs", "steps": 6}
    for strategy, kind in (
        ("fsdp", "mlp"),
        ("pipeline", "mlp"),
        ("zero2", "function"),
        ("ddp", "loss"),
    ):
        c = verdict_of(backend, RIGHT[kind], strategy=strategy, **given)
        assert c.is_equal, c.lines()
        assert c.worst("parameters", "losses", "own gradients") < 1e-12
        assert c.errors["losses"].shape == (backend.world_size, 7, 1)


# ----------------------------------------------------------------------------------------- meshes


def gpt() -> Any:
    return ms.nn.GPT(
        vocabulary_size=11,
        context_length=6,
        width=8,
        heads=2,
        layers=1,
        seed=0,
        dtype="float64",
        tied_embeddings=True,
    )


def tokens() -> tuple[Any, Any]:
    generator = np.random.default_rng(2)
    return generator.integers(0, 11, (50, 6)), generator.integers(-1, 11, (50, 6))


ON_MESHES = {
    **{kind: RIGHT[kind] for kind in ("mlp", "dropout", "function")},
    "gpt": lambda rank: Problem(gpt(), *tokens()),
}


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        *((kind, mesh) for kind in ON_MESHES for mesh in ((2, 1, 2), (1, 2, 2))),
        ("gpt", (2, 2, 1)),
        ("mlp", (4, 1, 1)),
    ],
)
@in_worlds(4)
def test_every_mesh_is_equal_under_every_schedule(backend: Any, kind: str, mesh: Any) -> None:
    options: dict[str, Any] = {"data_parallel_strategy": DATA_STRATEGIES[sum(mesh) % 5]}
    goes_round = mesh == (4, 1, 1)
    if kind == "gpt" and mesh[1] == 2:
        options["sequence_parallel"] = True
    if kind != "function":
        strategy = RecomputeStrategy("full" if mesh[0] == 2 else "selective")
        options["checkpoint_config"] = ActivationCheckpointConfig(
            enabled=True, checkpoint_every_n_layers=2, recompute_strategy=strategy
        )
        options["micro_batch_count"] = 3
    for schedule in SCHEDULE_NAMES if goes_round else ("zb-v",):
        own = {"schedule": schedule} if kind != "function" else {}
        c = verdict_of(
            backend, ON_MESHES[kind], mesh, "adamw", options | own, strategy="hybrid", steps=2
        )
        assert c.worst("parameters", "losses", "own gradients") < 1e-12
        assert c.is_equal, c.lines()
        said = [line for line in c.lines() if "ILayeredModel" in line]
        assert len(said) == (kind == "function")


def test_a_fault_of_one_schedule_is_found(monkeypatch: Any) -> None:
    """The gradients of the copies of a tied parameter are not added up."""
    from mpishard.models.programs.mesh_program import MeshProgram

    make = MeshProgram.__init__

    def make_untied(program: Any, *arguments: Any) -> None:
        make(program, *arguments)
        program._tie_groups.clear()

    monkeypatch.setattr(MeshProgram, "__init__", make_untied)
    given = {"strategy": "pipeline", "options": {"schedule": "1f1b"}}
    verdicts = ms.run_in_threads(2, verdict_of, ON_MESHES["gpt"], **given)
    assert all(not verdict.is_equal for verdict in verdicts)
    (found,) = {verdict.lines()[-2] for verdict in verdicts}
    assert "step 1: the gradient of one batch that several ranks compute together" in found
    assert "(worst embedding.weight)" in found


def given(kind: str, **options: Any) -> Problem:
    return replace(ON_MESHES[kind](ALONE), options=options)


def test_a_mesh_and_its_options_are_named() -> None:
    mine = job(8, (2, 2, 2), strategy="hybrid")
    full = given(
        "gpt",
        schedule="zb-h1",
        sequence_parallel=True,
        data_parallel_strategy="ddp",
        checkpoint_config=ActivationCheckpointConfig(enabled=True),
    )
    assert mine.describe(full) == (
        " (2 pipeline x 2 tensor x 2 data, schedule=zb-h1, sequence_parallel=True, "
        "data_parallel_strategy=ddp, checkpoint_config=ActivationCheckpointConfig, "
        "micro_batch_count=4)"
    )
    assert mine.options(full).keys() == {*SIZES, *full.options, "micro_batch_count"}
    tensor = job(3, strategy="tensor")
    assert tensor.describe(given("gpt", schedule="zb-h1")) == " (1 pipeline x 3 tensor x 1 data)"
    assert tensor.options(given("gpt", schedule="zb-h1")) == {}
    assert job(3, strategy="zero1").describe(given("gpt")) == ""
    box = job(2, strategy="pipeline").describe(given("function"))
    assert box == " (2 pipeline x 1 tensor x 1 data)"


def test_options_of_another_strategy_are_left_out_with_a_message(capsys: Any) -> None:
    completed = fitted(job(2, strategy="zero2"), given("mlp", schedule="zb-h1"))
    assert completed.mesh == ""
    said = "leaves out schedule of factory(seed), which --strategy zero2 does not take"
    assert said in capsys.readouterr().err


def test_the_factory_s_settings_are_those_of_the_job() -> None:
    mine = job(3, batch_size=0)
    completed = fitted(mine, RIGHT["mlp"](ALONE))
    assert (completed.batch_size, completed.has_one_batch, completed.rule) == (24, False, "SGD")
    completed = fitted(mine, replace(RIGHT["mlp"](ALONE), batch_size=5, optimizer=SEARCH))
    assert (completed.batch_size, completed.has_one_batch, completed.rule) == (5, True, "LBFGS")


def test_options_of_layers_are_not_for_a_black_box() -> None:
    for strategy, name in (("tensor", "checkpoint_config"), ("pipeline", "schedule")):
        asked = job(2, strategy=strategy)
        value = ActivationCheckpointConfig() if strategy == "tensor" else "1f1b"
        with pytest.raises(TargetError, match=f"is a black box, and {name} is for.*\nleave it out"):
            fitted(asked, given("function", **{name: value}))
        fitted(asked, given("mlp", **{name: value}))
        fitted(asked, given("function"))


def test_a_line_search_needs_one_function_that_returns_a_loss() -> None:
    asked = job(2, has_one_batch=True)

    def search(problem: Problem, **settings: Any) -> Problem:
        return replace(problem, optimizer=SEARCH)

    with pytest.raises(TargetError, match=r"another function at each point\nleave dropout"):
        fitted(asked, search(RIGHT["dropout"](ALONE)))
    with pytest.raises(TargetError, match=r"compares losses of one function.*\nleave out --precis"):
        fitted(replace(asked, precision="bfloat16"), search(RIGHT["mlp"](ALONE)))
    silent = WithLoss()
    silent.compute_gradients = lambda x, y: np.ones(5)
    with pytest.raises(TargetError, match="the model returns none\ngive it"):
        train_alone(asked, search(Problem(silent, *data())))
    fitted(asked, search(RIGHT["loss"](ALONE)))
    model = ms.FunctionModel(lambda theta, x, y: (1.0, 0 * theta), np.zeros(5))
    with pytest.raises(TargetError, match="no lower loss than 1 in 20 trials\ngive fewer --steps"):
        train_alone(asked, search(Problem(model, *data())))
    batches = [each.batch(3, 50).tolist() for each in (asked, job(2))]
    assert batches[0] == asked.batch(0, 50).tolist() != batches[1]


def test_sequence_parallelism_needs_sequences_that_can_be_cut() -> None:
    def fit(ranks: int, kind: str) -> None:
        fitted(job(ranks, strategy="tensor"), given(kind, sequence_parallel=True))

    with pytest.raises(TargetError, match=r"of sequences: leave it out\n.*linear0 .* shape \(5,\)"):
        fit(2, "mlp")
    with pytest.raises(TargetError, match=r"5 equal parts, .* 6 positions are .* of 5\nleave it"):
        fit(5, "gpt")
    with pytest.raises(TargetError, match="sequence_parallel is for models of layers"):
        fit(2, "function")
    fit(3, "gpt")
    fit(1, "mlp")  # nothing is cut


def test_a_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    mine = replace(job(4, (2, 1, -1), strategy="hybrid"), folder=tmp_path)
    mine.write(mine)
    assert VerifyJob.read(tmp_path) == mine
    assert VerifyJob.read(tmp_path, "comparison") is None
    assert mine.data_size == 2


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@in_worlds(2, 3)
def test_models_that_depend_on_the_rank_are_detected(
    backend: Any, kind: str, strategy: str
) -> None:
    make, reason = WRONG[kind]
    verdict = verdict_of(backend, make, strategy=strategy)
    assert not verdict.is_equal
    *_, found, last = verdict.lines()
    assert reason in found
    assert last.startswith("DIFFERENT: 0 of 1 " if kind == "prediction" else "DIFFERENT: ")


def test_losses_explain_nothing_if_parameters_differ_later() -> None:
    """The loss is a sum: after one step of Adam the parameters do not show its scale."""
    losses, parameters = np.zeros((2, 4, 1)), np.zeros((2, 4, 2))
    losses[:, 1:] = 0.5
    c = Comparison(
        [("a", "(1,)"), ("b", "(1,)")], {"parameters": parameters, "losses": losses},
        {"parameters": 1e-10, "losses": 1e-10}, {"error": "parameters"},
        {"parameters": "step {step}: the update of {name}", "losses": "losses of {ranks}"},
        "float64",
    )  # fmt: skip
    assert c.lines()[1:] == [
        "losses of ranks 0, 1",
        "DIFFERENT: 0 of 2 parameters exceed 1e-10 in 3 steps (worst 0.0e+00), float64",
    ]
    parameters[0, 2, 1] = 1e-3
    assert c.lines()[1] == "step 2: the update of b"


def test_float32_has_a_tolerance_of_its_own() -> None:
    def make(rank: int | None) -> Problem:
        return Problem(ms.nn.MLP([5, 7, 2], seed=0, dtype="float32"), *data())

    (verdict,) = ms.run_in_threads(1, verdict_of, make)
    assert verdict.is_equal
    assert verdict.tolerance == 1e-4
    assert default_tolerance("float64") == 1e-10


def _in_bfloat16(
    backend: Any, kind: str, strategy: str = "fsdp", options: Any = None
) -> Comparison:
    def make(dtype: str) -> Problem:
        if kind == "gpt":
            model = ms.nn.GPT(
                vocabulary_size=11, context_length=6, width=8, heads=2, layers=1, dtype=dtype
            )
            return Problem(model, *tokens(), options=options or {})
        x, y = (array.astype(dtype) for array in data())
        model = ms.nn.MLP([5, 7, 2], seed=0, dtype=dtype)
        return Problem(model, x, y, options=options or {})

    mine = job(backend.world_size, strategy=strategy, precision="bfloat16")
    return compare(backend, mine, make("float32"), train_alone(mine, make("float64")))


FULL = ActivationCheckpointConfig(enabled=True, checkpoint_every_n_layers=2)
IN_BFLOAT16 = [
    ("pipeline", {"schedule": "zb-v", "checkpoint_config": FULL}),
    ("tensor", {}),
    ("tensor", {"sequence_parallel": True}),
]


@pytest.mark.parametrize("kind", ["mlp", "gpt"])
@pytest.mark.parametrize(("strategy", "options"), IN_BFLOAT16)
@in_worlds(2)
def test_bfloat16_on_a_mesh_is_within_its_roundings(
    backend: Any, kind: str, strategy: str, options: Any
) -> None:
    if kind == "mlp" and options.get("sequence_parallel"):
        return
    verdict = _in_bfloat16(backend, kind, strategy, options)
    assert verdict.is_equal, verdict.lines()
    assert verdict.worst("own gradients") > 2.0**-12


@pytest.mark.parametrize("kind", ["mlp", "gpt"])
@in_worlds(2)
def test_bfloat16_is_within_its_roundings_of_float64(backend: Any, kind: str) -> None:
    verdict = _in_bfloat16(backend, kind)
    assert verdict.is_equal, verdict.lines()
    assert 2.0**-8 < verdict.tolerance < 0.04
    assert verdict.worst("own gradients") > 2.0**-12  # it is not float32 in disguise


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("strategy", ["fsdp", "tensor", "pipeline"])
def test_a_wrong_rounding_of_one_owner_is_found(monkeypatch: Any, rank: int, strategy: str) -> None:
    here = threading.local()

    def main(backend: Any) -> Comparison:
        real = MixedParameters._round
        here.rank = backend.rank

        def truncates(self: Any, pieces: Any) -> None:
            real(self, pieces)
            if here.rank == rank:
                for master, copy in zip(
                    self.owned(pieces), self._copies.owned(pieces), strict=True
                ):
                    copy.view(np.uint16)[...] = master.view(np.uint32) >> 16
            self.backend.barrier()

        if backend.rank == 0:
            monkeypatch.setattr(MixedParameters, "_round", truncates)
        backend.barrier()
        return _in_bfloat16(backend, "mlp", strategy)

    for verdict in ms.run_in_threads(2, main):
        assert not verdict.is_equal
        assert "bfloat16 parameters are not the nearest" in verdict.lines()[-2]


def test_the_reference_imports_none_of_our_update_rules() -> None:
    """A wrong rule on the ranks is detected, so the reference does not use it."""
    wrong = {
        "sgd": ms.optimizers.SGD(1.001e-3, 0.9),
        "lbfgs": ms.optimizers.LBFGS(memory=2),
    }

    def train(backend: Any, name: str, rule: Any) -> Comparison:
        mine = job(backend.world_size, has_one_batch=name == "lbfgs")
        right = SEARCH if name == "lbfgs" else OPTIMIZERS[name]
        alone, ours = (replace(RIGHT["mlp"](ALONE), optimizer=each) for each in (right, rule))
        return compare(backend, mine, ours, train_alone(mine, alone))

    for name, rule in wrong.items():
        verdicts = ms.run_in_threads(2, train, name, rule)
        assert "Then the fault is mpishard's" in verdicts[1].lines()[-2]


@in_worlds(1, 2)
def test_options_of_single_parameters_are_equal(backend: Any) -> None:
    options = {
        "*.bias": {"weight_decay": 0.0, "learning_rate_scale": 3.0},
        "linear1.*": {"learning_rate": lambda step: 1e-2 / (1 + step)},
        "linear0.weight": {"frozen": True},
    }
    rule = ms.optimizers.AdamW(1e-3, weight_decay=0.1, parameter_options=options)
    mine, problem = job(backend.world_size), replace(RIGHT["mlp"](ALONE), optimizer=rule)
    reference = train_alone(mine, problem)
    theta = reference.parameters
    assert (theta[0, :35] == theta[-1, :35]).all()
    assert (theta[0, 35:] != theta[-1, 35:]).all()
    found = compare(backend, mine, replace(RIGHT["mlp"](ALONE), optimizer=rule), reference)
    assert found.is_equal, found.lines()
    assert found.worst("parameters", "losses", "own gradients") < 1e-12


def test_the_worst_parameter_comes_first_with_its_rank_and_step() -> None:
    parameters = np.zeros((2, 4, 3))
    parameters[1, 3, 1] = 0.5
    parameters[0, 2, 2] = parameters[0, 3, 2] = 0.25
    c = Comparison(
        [(name, "(1,)") for name in "abc"],
        {"parameters": parameters},
        {"parameters": 1e-10},
        {"error": "parameters"},
        {"parameters": "step {step}: {ranks}, {name}"},
        "float64",
    )
    table = c.table()
    rows = list(zip(*(column._cells for column in table.columns), strict=True))
    assert rows == [
        ("b", "(1,)", "5.0e-01", "1", "3"),
        ("c", "(1,)", "2.5e-01", "0", "2"),
        ("a", "(1,)", "0.0e+00", "0", ""),
    ]
    assert c.lines() == [
        "step 2: rank 0, c",
        "DIFFERENT: 2 of 3 parameters exceed 1e-10 in 3 steps (worst 5.0e-01), float64",
    ]


def test_errors_are_relative_to_the_largest_element() -> None:
    assert relative_error(np.array([1e6 + 1, 0]), np.array([1e6, 0])) == 1e-6
    assert relative_error(np.array([1e-3]), np.array([0.0])) == 1e-3
    assert relative_error(np.array([1.0]), np.array([np.nan])) == np.inf
    assert relative_error(np.ones(3), np.ones(2)) == np.inf
    assert relative_error(np.array([2e-9]), np.array([1e-9]), floor=1e-9) == 1.0


def test_shares_are_uneven_and_complete() -> None:
    for world_size in (1, 2, 3, 5):
        mine = job(world_size)
        for step in range(5):
            parts = [mine.share(step, 16, rank) for rank in range(world_size)]
            assert [p.start for p in parts] + [16] == [0, *(p.stop for p in parts)]
            sizes = [p.stop - p.start for p in parts]
            assert world_size == 1 or len(set(sizes)) > 1
            assert (0 in sizes) == (step % 3 == 2 and world_size > 1)
        assert len(set(mine.batch(0, 50))) == 16
        assert sorted(mine.batch(1, 9)) == list(range(9))


# ------------------------------------------------------------------------------------- targets


FILE = """
import os, threading
import numpy as np
import mpishard as ms

NUMBER = 3

def factory(seed, dtype="float64"):
    x = np.random.default_rng(seed).standard_normal((20, 3)).astype(dtype)
    model = ms.nn.MLP([3, 4, 1], seed=seed, dtype=dtype)
    return model, x, np.sin(x[:, :1])

def fault(seed):
    def fun(theta, x, y):
        error = x @ theta - y[:, 0]
        name = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))
        wrong = name == "1" or threading.current_thread().name == "rank-1"
        return float(np.mean(error**2)), (1 + wrong * 1e-5) * 2 * x.T @ error / len(x)
    x = np.random.default_rng(seed).standard_normal((20, 3))
    return ms.FunctionModel(fun, np.ones(3)), x, x[:, :1]

def box(seed):
    def fun(theta, x, y):
        error = x @ theta - y[:, 0]
        return float(np.mean(error**2)), 2 * x.T @ error / len(x)
    x = np.random.default_rng(seed).standard_normal((20, 3))
    return ms.FunctionModel(fun, np.ones(3)), x, x[:, :1]

def chosen(seed):
    return *factory(seed, "float32"), {"optimizer": ms.optimizers.AdamW(1e-2), "batch_size": 12}

def scheduled(seed):
    return *factory(seed), {"schedule": "zb-v"}

def sequences(seed):
    return *factory(seed), {"sequence_parallel": True}

def diverges(seed):
    return ms.FunctionModel(lambda t, x, y: (np.inf, t), np.ones(3)), np.ones(4), np.ones(4)
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "my models.py"
    path.write_text(FILE)
    return str(path)


def verify(*arguments: str, cwd: Any = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mpishard", "verify", *arguments],
        cwd=cwd,
        # Without numba, which takes a second to load on each rank.
        env={"PYTHONPATH": str(Path(__file__).parents[2])} | os.environ | {"MPISHARD_NUMBA": "off"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


@pytest.fixture
def without_mpi(tmp_path: Path, monkeypatch: Any) -> None:
    """An environment whose mpi4py cannot be imported: ranks are threads."""
    (tmp_path / "mpi4py.py").write_text("raise ImportError('libmpi.so.12 is missing')")
    places = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    monkeypatch.setenv("PYTHONPATH", places)


@pytest.mark.spawned
def test_a_job_of_threads(file: str, without_mpi: None) -> None:
    ended = verify(f"{file}:chosen", "-n", "4", "--strategy", "zero1", "--seed", "4")
    assert ended.returncode == 0, ended.stderr
    first, heads, *_, last = ended.stdout.splitlines()
    where = "zero1 on 4 thread-ranks against training alone"
    assert f"{where}, 5 steps of AdamW, float32" in first
    assert heads.split() == ["parameter", "shape", "error", "on", "rank", "above", "from", "step"]
    assert last.startswith("EQUAL: all 4 parameters on 4 ranks are within 1e-04")
    assert "uses threads, because MPI cannot be started here: " in ended.stderr
    assert "libmpi.so.12 is missing" in ended.stderr


def test_a_job_on_a_mesh_has_the_schedule_of_the_factory(file: str, without_mpi: None) -> None:
    options = ["--strategy", "hybrid", "--pipeline-parallel-size", "2", "--steps", "2"]
    ended = CliRunner().invoke(app, ["verify", f"{file}:scheduled", "-n", "4", *options])
    assert ended.exit_code == 0, ended.output
    first, *_, last = ended.stdout.splitlines()
    mesh = "2 pipeline x 1 tensor x 2 data, schedule=zb-v, micro_batch_count=4"
    assert f"hybrid ({mesh}) on 4 thread-ranks against training alone" in first
    assert last.startswith("EQUAL: all 4 parameters on 4 ranks")


@pytest.mark.spawned
def test_a_black_box_is_trained_on_a_mesh(file: str, without_mpi: None) -> None:
    ended = verify(f"{file}:box", "--strategy", "pipeline", "--steps", "1")
    assert ended.returncode == 0, ended.stderr
    first, *lines = ended.stdout.splitlines()
    assert "pipeline (2 pipeline x 1 tensor x 1 data) on 2 thread-ranks against" in first
    assert len([line for line in lines if line.startswith("EQUAL")]) == 1
    assert ended.stderr.count("repeat each other's work") == 1


@pytest.mark.spawned
def test_options_that_do_not_fit_the_model_end_with_2_and_two_lines(file: str) -> None:
    ended = verify(f"{file}:sequences", "--strategy", "tensor")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert len(ended.stderr.splitlines()) == 2
    assert ended.stderr.startswith("mpishard verify: sequence_parallel is for models of sequen")


@pytest.mark.timeout(60)
@pytest.mark.spawned
def test_a_fault_on_one_mpi_rank_is_found(file: str) -> None:
    pytest.importorskip("mpi4py")
    ended = verify(f"{file}:fault")
    assert ended.returncode == 1, ended.stderr
    assert "on rank 1 the gradient of the rank's own samples" in ended.stdout
    assert ended.stdout.splitlines()[-1].startswith("DIFFERENT: 1 of 1 parameters exceed 1e-10")


@pytest.mark.spawned
def test_a_target_that_is_none_ends_with_2_and_two_lines(tmp_path: Path) -> None:
    ended = verify("nowhere.py:factory", cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr == (
        f"mpishard verify: there is no file nowhere.py\nlooked for it from {tmp_path}\n"
    )


def test_targets_are_files_and_modules(file: str) -> None:
    assert load_factory(f"{file}:factory", RETURNS)(0)[1].shape == (20, 3)
    assert load_factory("mpishard.base.layout:ShardLayout", RETURNS) is ms.ShardLayout
    assert (
        build_problem(load_factory(f"{file}:factory", RETURNS), 0, "float32").model.dtype
        == np.float32
    )


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("factory", "package.module:factory or file.py:factory, got 'factory'\nfactory"),
        ("FILE:", "package.module:factory or file.py:factory, got"),
        ("FILE:factroy", "has no 'factroy'\nits functions are factory, fault, box, chosen"),
        ("FILE:NUMBER", "'NUMBER' of .* is of type int, not a function\nfactory"),
        ("no.such:factory", "there is no module 'no'\nlooked for it in"),
        ("mpishard.nowhere:factory", "there is no module 'mpishard.nowhere'\n"),
    ],
)
def test_refuses_targets(file: str, target: str, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        load_factory(target.replace("FILE", file), RETURNS)


def test_an_import_that_fails_inside_the_target_is_the_users(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import not_there_at_all\n")
    with pytest.raises(
        TargetError, match=r"line 1, in <module>\n.*\nModuleNotFoundError: .*_at_all"
    ):
        load_factory(f"{path}:factory", RETURNS)
    path = tmp_path / "unfinished.py"  # of one size and second with the other, it has its bytecode
    path.write_text("x = 1\ndef factory(seed)\n")
    with pytest.raises(TargetError, match="SyntaxError: expected ':'") as caught:
        load_factory(f"{path}:factory", RETURNS)
    assert "importlib" not in str(caught.value)
    assert f'{path}", line 2\n    def factory(seed)' in str(caught.value)


class Nothing:
    pass


class OwnRule(ms.optimizers.SGD):
    pass


@pytest.mark.parametrize(
    ("given", "dtype", "message"),
    [
        (3, None, "must return .model, x, y. or .*\nit returned int"),
        ((1, 2), None, "it returned a tuple of 2"),
        (
            (Nothing(), *data()),
            None,
            "has no get_parameters and no set_parameters and no compute_gradients\n",
        ),
        ((squares(), [1.0], np.ones(1)), None, "cannot be trained on\nx must be an array"),
        ((squares(), np.ones((3, 5)), np.ones(2)), None, "x has 3 and y has 2"),
        ((squares(), *data(), np.sum), None, "must be a loss of mpishard.nn\nit is a"),
        ((squares(), *data(), None, {}, {}), None, "it returned a tuple of 6"),
        ((squares(), data()[0], {}), None, "it returned a tuple of 3"),
        (
            (squares(), *data(), {"optimiser": 1}),
            None,
            "has 'optimiser'\nknown are optimizer, batch_size, .* did you mean optimizer",
        ),
        (
            (squares(), *data(), {"optimizer": "adamw"}),
            None,
            "must be a rule of mpishard.optimizers\nit is an object of str; verify has the",
        ),
        (
            (squares(), *data(), {"optimizer": ms.optimizers.AdamW}),
            None,
            "it is the class AdamW: return an object of it",
        ),
        (
            (squares(), *data(), {"optimizer": OwnRule()}),
            None,
            "it is an object of OwnRule; verify has the textbook's form of SGD, Adagrad, RMSprop",
        ),
        ((squares(), *data(), {"batch_size": 0}), None, "\nbatch_size must be 1 or more, got 0"),
        (
            (squares(), *data(), {"schedule": "dualpipe"}),
            None,
            "an option that cannot be used\nschedule must be one of gpipe, 1f1b, interleaved",
        ),
        ((squares(), *data(), {"micro_batch_count": 0}), None, "\nmicro_batch_count must be 1 or"),
        (
            (squares(), *data(), {"data_parallel_strategy": "hybrid"}),
            None,
            "\nunknown data_parallel_strategy 'hybrid'; there are ddp, zero1, zero2, zero3, fsdp",
        ),
        (
            (squares(), *data(), {"tensor_parallel_size": 2}),
            None,
            (
                "has 'tensor_parallel_size', a size of the mesh\n"
                "give --tensor-parallel-size to the comm"
            ),
        ),
    ],
)
def test_refuses_wrong_results_of_factories(given: Any, dtype: Any, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        build_problem(lambda seed: given, 0, dtype)


def test_a_factory_returns_options_after_model_and_data() -> None:
    rule = ms.optimizers.Lion()
    options = {"optimizer": rule, "batch_size": 7, "schedule": "1f1b"}
    for loss in ((), (ms.nn.MSE(),)):
        found = build_problem(lambda seed, loss=loss: (squares(), *data(), *loss, options), 0, None)
        assert (found.optimizer, found.batch_size, found.options) == (rule, 7, {"schedule": "1f1b"})
        assert (found.loss is None) == (not loss)
    found = build_problem(lambda seed: (squares(), *data()), 0, None)
    assert (type(found.optimizer), found.optimizer.momentum) == (ms.optimizers.SGD, 0.9)
    assert (found.batch_size, found.options) == (None, {})


def test_precision_needs_a_factory_that_takes_a_dtype() -> None:
    with pytest.raises(TargetError, match=r"float64 alone\nwrite def <lambda>\(seed, dtype\):"):
        build_problem(lambda seed: (squares(), *data()), 0, "float32")
    with pytest.raises(TargetError, match=r"alone: got float64 parameters from factory\(seed, dty"):
        build_problem(lambda seed, dtype: (squares(), *data()), 0, "float32")


def test_refuses_a_factory_without_a_seed() -> None:
    def factory() -> Any:
        raise AssertionError

    with pytest.raises(
        TargetError, match=r"factory\(\) must take a seed\nfactory\(seed\) is a fun"
    ):
        build_problem(factory, 0, None)


def test_refuses_a_model_that_is_sharded() -> None:
    def wrap(backend: Any) -> None:
        model = ms.as_distributed(squares(), backend)
        with pytest.raises(TargetError, match="is sharded already, as FSDPModel\nreturn the plain"):
            build_problem(lambda seed: (model, *data()), 0, None)

    ms.run_in_threads(1, wrap)


def test_training_alone_that_diverges_is_reported(file: str) -> None:
    problem = build_problem(load_factory(f"{file}:diverges", RETURNS), 0, None)
    with pytest.raises(TargetError, match=r"step 1 of training alone.*not finite\nlower the learn"):
        train_alone(job(2), problem)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategy", "zero9"], "zero3, fsdp, tensor, pipeline, hybrid; got 'zero9'"),
        (["--strategy", ""], "--strategy must be one of ddp, zero1"),
        (["--tolerance", "-1"], "--tolerance must be above 0 and finite, got -1.0"),
        (["-n", "0"], "Invalid value for '-n'"),
        (["--steps", "0"], "Invalid value for '--steps'"),
        (["--precision", "float16"], "'float16' is not one of 'bfloat16'"),
        (["--pipeline-parallel-size", "1"], "--pipeline-parallel-size is for --strategy hybrid"),
        (["--strategy", "pipeline", "--tensor-parallel-size", "2"],
         "--tensor-parallel-size is for --strategy hybrid; got pipeline"),
        (["--strategy", "hybrid", "--data-parallel-size", "0"],
         "-n 2: data must be 1 or more, or -1 for what is left, got 0"),
        (["--strategy", "hybrid", "-n", "4", "--pipeline-parallel-size", "3"],
         "-n 4: pipeline 3 x tensor 1 = 3 does not divide the world of 4 ranks"),
        (["--strategy", "hybrid", "-n", "4", "--tensor-parallel-size", "2",
          "--data-parallel-size", "3"],
         "-n 4: pipeline 1 x tensor 2 x data 3 = 6, and the world has 4 ranks"),
        (["--optimizer", "adamw"], "No such option: --optimizer"),
    ],
)  # fmt: skip
def test_refuses_options(arguments: list[str], message: str) -> None:
    ended = CliRunner().invoke(app, ["verify", "file.py:factory", *arguments])
    assert ended.exit_code == 2
    assert message in " ".join(ended.stderr.replace("│", " ").split())
    assert ended.stdout == ""


def test_refuses_a_setting_that_ranks_would_refuse(monkeypatch: Any) -> None:
    monkeypatch.setenv("MPISHARD_ARENA", "sand")
    ended = CliRunner().invoke(app, ["verify", "file.py:factory"])
    assert ended.exit_code == 2
    assert ended.stderr.startswith("mpishard verify: MPISHARD_ARENA must be ")


def test_refuses_to_be_a_rank(monkeypatch: Any) -> None:
    monkeypatch.setenv("PMI_SIZE", "2")
    ended = CliRunner().invoke(app, ["verify", "file.py:factory"])
    assert ended.exit_code == 2
    assert "PMI_SIZE is set" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.py", "--strategy", "zero1"], "--strategy is for a factory; a script makes its"),
        (["train.py", "--tensor-parallel-size", "4"], "--tensor-parallel-size is for a factory"),
        (["train.py", "--tolerance", "-1"], "--tolerance must be above 0 and finite, got -1.0"),
        (["file.py:factory", "8"], "8: a factory takes no arguments; a script does"),
        (["nowhere.py"], "nowhere.py"),
    ],
)
def test_refuses_options_of_the_other_kind_of_target(arguments: list[str], message: str) -> None:
    ended = CliRunner().invoke(app, ["verify", *arguments])
    assert ended.exit_code == 2
    assert message in " ".join(ended.stderr.split())


@pytest.mark.spawned
def test_a_script_without_a_loop_of_pytorch_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trains')")
    ended = verify("train.py", cwd=tmp_path)
    assert ended.returncode == 2
    assert "made no step of an optimizer of mpishard.torch" in ended.stderr


def test_the_help_has_at_most_12_options() -> None:
    said = CliRunner().invoke(app, ["verify", "--help"]).output.partition("Options:")[2]
    options = [line.split()[0] for line in said.splitlines() if line.startswith("  -")]
    assert len(options) <= 12, options
