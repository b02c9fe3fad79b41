"""``mpishard verify``: finds what depends on a rank, says where, and refuses what is no target."""

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
from mpishard.cli.verify.comparison import Comparison, default_tolerance, relative_error
from mpishard.cli.verify.job import (
    DATA_STRATEGIES,
    MESH_FLAGS,
    MeshChoice,
    Problem,
    TargetError,
    VerifyJob,
    build_problem,
    load_factory,
)
from mpishard.cli.verify.ranks import compare
from mpishard.cli.verify.reference import RULES, fitted, train_alone
from mpishard.distributed import DistributedStrategy
from mpishard.models.stores.parameter_store import MixedParameters
from mpishard.testing.worlds import in_worlds

ALONE = None
STRATEGIES = [s.value for s in DistributedStrategy if s != DistributedStrategy.NONE]


def data() -> tuple[Any, Any]:
    generator = np.random.default_rng(1)
    x = generator.standard_normal((50, 5))
    return x, np.sin(x[:, :2])


def squares(scale: Any = lambda: 1.0, shift: float = 0.0) -> Any:
    """Least squares, whose gradient some process may get wrong."""

    def fun(theta: Any, x: Any, y: Any) -> Any:
        error = x @ theta - y[:, 0]
        return float(np.mean(error**2)), scale() * 2 * x.T @ error / len(x)

    return ms.FunctionModel(fun, np.linspace(-1, 1, 5) + shift, lambda theta, x: x @ theta)


def of(rank: int | None, culprit: int, fault: Any, right: Any) -> Any:
    return fault if rank == culprit else right


class WithLoss:
    """A black box that is told its loss."""

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
        "step 1: each rank's gradient of its own samples is right, and the update is not",
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


def job(world_size: int, flags: Any = None, **options: Any) -> VerifyJob:
    settings = {"strategy": "fsdp", "optimizer": "sgd", "steps": 4, "batch_size": 16, "seed": 0,
                "learning_rate": 1e-3} | options  # fmt: skip
    mesh = MeshChoice.of(settings["strategy"], world_size, flags or {})
    return VerifyJob(Path(), "unused", world_size=world_size, mesh=mesh, **settings)


def verdicts_of(backend: Any, make: Any, **options: Any) -> list[Comparison]:
    """On every rank, by schedule; each trains the reference for itself."""
    mine = fitted(job(backend.world_size, **options), make(ALONE))
    reference = train_alone(mine, make(ALONE))
    return [
        compare(backend, mine, make(backend.rank), reference, schedule)
        for schedule in mine.mesh.schedules
    ]


def verdict_of(backend: Any, make: Any, **options: Any) -> Comparison:
    (verdict,) = verdicts_of(backend, make, **options)
    return verdict


@in_worlds(2)
def test_a_factory_that_builds_a_model_of_another_size_on_ranks_is_named(backend: Any) -> None:
    mine = job(backend.world_size)
    reference = train_alone(mine, Problem(ms.nn.MLP([5, 7, 2], seed=0), *data()))
    found = compare(backend, mine, Problem(ms.nn.MLP([5, 8, 2], seed=0), *data()), reference)
    assert not found.is_equal
    expected = "ranks 0, 1 got other first parameters than a process alone: factory(seed) must"
    assert any(line.startswith(expected) for line in found.lines()), found.lines()


@pytest.mark.parametrize("rule", ["sgd", "adamw"])
@in_worlds(1, 2)
def test_late_gradients_are_equal_and_those_of_another_step_are_found(
    backend: Any, rule: str
) -> None:
    given = {"strategy": "ddp", "optimizer": rule, "wrapper": "async", "delay": 2}
    right = verdict_of(backend, RIGHT["mlp"], **given)
    assert right.is_equal, right.lines()
    assert right.worst("parameters") < 1e-12
    mine = job(backend.world_size, **given)
    reference = train_alone(replace(mine, delay=1), RIGHT["mlp"](ALONE))
    found = compare(backend, mine, RIGHT["mlp"](backend.rank), reference)
    assert not found.is_equal


@pytest.mark.parametrize(
    ("wrapper", "strategy", "optimizer"),
    [
        ("local-sgd", "ddp", "descent"),
        ("async", "ddp", "adamw"),
        ("elastic", "fsdp", "adamw"),
        ("compression", "ddp", "adamw"),
    ],
)
@in_worlds(1, 2)
def test_other_optimizers_are_equal(
    backend: Any, wrapper: str, strategy: str, optimizer: str
) -> None:
    given = {"strategy": strategy, "optimizer": optimizer, "wrapper": wrapper}
    right = verdict_of(backend, RIGHT["mlp"], **given)
    assert right.is_equal, right.lines()
    assert right.worst("parameters") < 1e-12


@pytest.mark.parametrize(
    ("strategy", "tensor", "size", "given"),
    [
        ("ddp", None, None, {"wrapper": "local-sgd", "optimizer": "descent"}),
        ("fsdp", None, 2, {"wrapper": "local-sgd", "optimizer": "descent"}),
        ("hybrid", 2, 2, {"wrapper": "local-sgd", "optimizer": "descent"}),
        ("hybrid", 4, 4, {"wrapper": "local-sgd", "optimizer": "descent"}),
        ("fsdp", None, 2, {"wrapper": "compression", "optimizer": "adamw"}),
        ("hybrid", 2, 2, {"wrapper": "compression", "optimizer": "adamw"}),
        ("zero2", None, 2, {"wrapper": "async", "delay": 1, "optimizer": "adamw"}),
        ("hybrid", 4, 4, {"wrapper": "async", "optimizer": "adamw"}),
    ],
)
@in_worlds(4)
def test_replicas_of_several_ranks_are_equal(
    backend: Any, strategy: str, tensor: int | None, size: int | None, given: Any
) -> None:
    flags = {"--tensor-parallel-size": tensor, "--data-parallel-size": tensor and 4 // tensor}
    mine = job(4, flags, strategy=strategy, **given)
    assert mine.replica_size == size
    reference = train_alone(mine, RIGHT["mlp"](ALONE))
    right = compare(backend, mine, RIGHT["mlp"](backend.rank), reference)
    assert right.is_equal, right.lines()
    assert right.worst("parameters") < 1e-12


@pytest.mark.parametrize("kind", RIGHT)
@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [*((strategy, "sgd") for strategy in STRATEGIES),
     *(("fsdp", rule) for rule in RULES if rule != "lbfgs")],
)  # fmt: skip
@in_worlds(1, 3)
def test_what_is_right_is_equal(backend: Any, kind: str, strategy: str, optimizer: str) -> None:
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
    given = {"optimizer": "lbfgs", "learning_rate": 1.0, "steps": 6}
    for strategy, kind in (("fsdp", "mlp"), ("pipeline", "mlp"), ("zero2", "function"),
                           ("ddp", "loss")):  # fmt: skip
        c = verdict_of(backend, RIGHT[kind], strategy=strategy, **given)
        assert c.is_equal, c.lines()
        assert c.worst("parameters", "losses", "own gradients") < 1e-12
        assert c.errors["losses"].shape == (backend.world_size, 7, 1)


# ----------------------------------------------------------------------------------------- meshes


def gpt() -> Any:
    return ms.nn.GPT(
        vocabulary_size=11, context_length=6, width=8, heads=2, layers=1, seed=0,
        dtype="float64", tied_embeddings=True,
    )  # fmt: skip


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
    flags = dict(zip(list(MESH_FLAGS)[:3], mesh, strict=True))
    flags |= {"--micro-batches": 3, "--data-parallel-strategy": DATA_STRATEGIES[sum(mesh) % 5]}
    goes_round = (kind, mesh) in (("mlp", (4, 1, 1)), ("gpt", (2, 2, 1)))
    if kind != "function":
        flags["--schedule"] = "all" if goes_round else "zb-v"
    if kind == "gpt" and mesh[1] == 2:
        flags["--sequence-parallel"] = True
    if kind != "function":
        flags["--recompute"] = "full" if mesh[0] == 2 else "selective"
    verdicts = verdicts_of(
        backend, ON_MESHES[kind], strategy="hybrid", flags=flags, optimizer="adamw", steps=2
    )
    assert len(verdicts) == (7 if goes_round else 1)
    for verdict in verdicts:
        c = verdict
        assert c.worst("parameters", "losses", "own gradients") < 1e-12
        assert verdict.is_equal, verdict.lines()
        said = [line for line in verdict.lines() if "ILayeredModel" in line]
        assert len(said) == (kind == "function")


def test_a_fault_of_one_schedule_is_found(monkeypatch: Any) -> None:
    """Gradients of the copies of a tied parameter that nobody adds up."""
    from mpishard.models.programs.mesh_program import MeshProgram

    make = MeshProgram.__init__

    def make_untied(program: Any, *arguments: Any) -> None:
        make(program, *arguments)
        program._tie_groups.clear()

    monkeypatch.setattr(MeshProgram, "__init__", make_untied)
    flags = {"--schedule": "1f1b"}
    gpt = ON_MESHES["gpt"]
    verdicts = ms.run_in_threads(2, verdict_of, gpt, strategy="pipeline", flags=flags)
    assert all(not verdict.is_equal for verdict in verdicts)
    (found,) = {verdict.lines()[-2] for verdict in verdicts}
    assert "step 1: the gradient of one batch that several ranks compute together" in found
    assert "(worst embedding.weight)" in found


def test_what_a_mesh_is_called() -> None:
    flags = {"--pipeline-parallel-size": 2, "--schedule": "zb-h1",
             "--tensor-parallel-size": 2, "--sequence-parallel": True,
             "--data-parallel-strategy": "ddp"}  # fmt: skip
    mesh = MeshChoice.of("hybrid", 8, flags | {"--recompute": "full"})
    assert mesh.sizes == (2, 2, 2)
    assert mesh.describe("zb-h1") == (
        " (2 pipeline x 2 tensor x 2 data, zb-h1, 4 micro-batches, "
        "ddp over data, sequence parallel, full recomputation)"
    )
    assert mesh.schedules == ("zb-h1",)
    assert MeshChoice.of("tensor", 3, {}).describe("") == " (1 pipeline x 3 tensor x 1 data)"
    assert MeshChoice.of("zero1", 3, {}).describe("") == ""
    assert (
        MeshChoice.of("pipeline", 3, {"--schedule": "all"}).schedules == ms.pipeline.SCHEDULE_NAMES
    )
    with pytest.raises(ValueError, match="-n 2: pipeline 1 x tensor 3"):
        MeshChoice.of("hybrid", 2, {"--tensor-parallel-size": 3})


def test_a_black_box_has_no_activations_to_compute_again() -> None:
    asked = job(2, {"--recompute": "full"}, strategy="tensor")
    with pytest.raises(TargetError, match="FunctionModel is a black box\nleave it out"):
        fitted(asked, RIGHT["function"](ALONE))
    fitted(asked, RIGHT["mlp"](ALONE))
    fitted(job(2), RIGHT["function"](ALONE))


def test_a_line_search_needs_one_function_that_tells_a_loss() -> None:
    asked = job(2, optimizer="lbfgs", learning_rate=1.0)
    with pytest.raises(TargetError, match=r"another function at each point\nleave dropout"):
        fitted(asked, RIGHT["dropout"](ALONE))
    silent = WithLoss()
    silent.compute_gradients = lambda x, y: np.ones(5)
    with pytest.raises(TargetError, match="the model returns none\ngive it"):
        train_alone(asked, Problem(silent, *data()))
    fitted(asked, RIGHT["loss"](ALONE))
    model = ms.FunctionModel(lambda theta, x, y: (1.0, 0 * theta), np.zeros(5))
    with pytest.raises(TargetError, match="no lower loss than 1 in 20 trials\ngive fewer --steps"):
        train_alone(asked, Problem(model, *data()))
    batches = [each.batch(3, 50).tolist() for each in (asked, job(2))]
    assert batches[0] == asked.batch(0, 50).tolist() != batches[1]


def test_sequence_parallelism_needs_sequences_that_can_be_cut() -> None:
    def asked(ranks: int) -> VerifyJob:
        return job(ranks, {"--sequence-parallel": True}, strategy="tensor")

    with pytest.raises(TargetError, match=r"of sequences: leave it out\n.*linear0 .* shape \(5,\)"):
        fitted(asked(2), RIGHT["mlp"](ALONE))
    with pytest.raises(TargetError, match=r"5 equal parts, .* 6 positions are .* of 5\nleave it"):
        fitted(asked(5), ON_MESHES["gpt"](ALONE))
    with pytest.raises(TargetError, match="--sequence-parallel is for models of layers"):
        fitted(asked(2), RIGHT["function"](ALONE))
    fitted(asked(3), ON_MESHES["gpt"](ALONE))
    fitted(asked(1), RIGHT["mlp"](ALONE))  # nothing is cut


def test_a_black_box_has_no_schedules() -> None:
    asked = job(2, {"--schedule": "all"}, strategy="pipeline")
    settled = fitted(asked, RIGHT["function"](ALONE))
    assert (settled.mesh.schedules, settled.mesh.options) == (("",), {})
    assert settled.mesh.describe("") == " (2 pipeline x 1 tensor x 1 data)"
    assert fitted(asked, RIGHT["mlp"](ALONE)) is asked


def test_a_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    flags = {"--pipeline-parallel-size": 2, "--schedule": "all"}
    mine = replace(job(4, flags, strategy="hybrid"), folder=tmp_path)
    mine.write(mine)
    assert VerifyJob.read(tmp_path) == mine
    assert VerifyJob.read(tmp_path, "comparison-gpipe") is None
    assert mine.data_size == 2


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@in_worlds(2, 3)
def test_what_depends_on_the_rank_is_found(backend: Any, kind: str, strategy: str) -> None:
    make, reason = WRONG[kind]
    verdict = verdict_of(backend, make, strategy=strategy)
    assert not verdict.is_equal
    *_, found, last = verdict.lines()
    assert reason in found
    assert last.startswith("DIFFERENT: 0 of 1 " if kind == "prediction" else "DIFFERENT: ")


def test_losses_explain_nothing_if_parameters_differ_later() -> None:
    """As those of a sum do: one step of Adam hides its scale from the parameters."""
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


def _in_bfloat16(backend: Any, kind: str, strategy: str = "fsdp", flags: Any = None) -> Comparison:
    def make(dtype: str) -> Problem:
        if kind == "gpt":
            model = ms.nn.GPT(
                vocabulary_size=11, context_length=6, width=8, heads=2, layers=1, dtype=dtype
            )
            return Problem(model, *tokens())
        x, y = (array.astype(dtype) for array in data())
        return Problem(ms.nn.MLP([5, 7, 2], seed=0, dtype=dtype), x, y)

    mine = job(backend.world_size, flags, strategy=strategy, precision="bfloat16")
    reference = train_alone(mine, make(mine.dtype_alone or ""))
    (schedule,) = mine.mesh.schedules
    return compare(backend, mine, make("float32"), reference, schedule)


IN_BFLOAT16 = [
    ("pipeline", {"--schedule": "zb-v", "--recompute": "full"}),
    ("tensor", {}),
    ("tensor", {"--sequence-parallel": True}),
]


@pytest.mark.parametrize("kind", ["mlp", "gpt"])
@pytest.mark.parametrize(("strategy", "flags"), IN_BFLOAT16)
@in_worlds(2)
def test_bfloat16_on_a_mesh_is_within_its_roundings(
    backend: Any, kind: str, strategy: str, flags: Any
) -> None:
    if kind == "mlp" and flags.get("--sequence-parallel"):
        return
    verdict = _in_bfloat16(backend, kind, strategy, flags)
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


def test_the_reference_knows_nothing_of_our_rules(monkeypatch: Any) -> None:
    monkeypatch.setitem(RULES, "sgd", lambda rate: ms.optimizers.SGD(1.001 * rate, 0.9))
    monkeypatch.setitem(RULES, "lbfgs", lambda rate: ms.optimizers.LBFGS(rate, memory=2))
    for given in ({}, {"optimizer": "lbfgs", "learning_rate": 1.0}):
        verdicts = ms.run_in_threads(2, verdict_of, RIGHT["mlp"], **given)
        assert "Then the fault is mpishard's" in verdicts[1].lines()[-2]


def test_the_worst_parameter_comes_first_with_its_rank_and_step() -> None:
    parameters = np.zeros((2, 4, 3))
    parameters[1, 3, 1] = 0.5
    parameters[0, 2, 2] = parameters[0, 3, 2] = 0.25
    c = Comparison(
        [(name, "(1,)") for name in "abc"], {"parameters": parameters}, {"parameters": 1e-10},
        {"error": "parameters"}, {"parameters": "step {step}: {ranks}, {name}"}, "float64",
    )  # fmt: skip
    table = c.table()
    rows = list(zip(*(column._cells for column in table.columns), strict=True))
    assert rows == [
        ("b", "(1,)", "5.0e-01", "1", "3"), ("c", "(1,)", "2.5e-01", "0", "2"),
        ("a", "(1,)", "0.0e+00", "0", ""),
    ]  # fmt: skip
    assert c.lines() == [
        "step 2: rank 0, c",
        "DIFFERENT: 2 of 3 parameters exceed 1e-10 in 3 steps (worst 5.0e-01), float64",
    ]


def test_errors_are_relative_to_what_is_large() -> None:
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
        [sys.executable, "-m", "mpishard", "verify", *arguments], cwd=cwd,
        # Without numba, which takes a second to load on each rank.
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "MPISHARD_NUMBA": "off"},
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip


@pytest.mark.spawned
def test_a_job_of_threads(file: str) -> None:
    ended = verify(f"{file}:factory", "-n", "4", "--backend", "memory", "--optimizer", "adamw",
                   "--dtype", "float32", "--strategy", "zero1", "--seed", "4",
                   "--wrapper", "compression")  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    first, heads, *_, last = ended.stdout.splitlines()
    where = "zero1 on 4 thread-ranks, 2 replicas, against training alone"
    assert f"{where}, 5 steps of adamw with compression, float32" in first
    assert heads.split() == ["parameter", "shape", "error", "on", "rank", "above", "from", "step"]
    assert last.startswith("EQUAL: all 4 parameters on 4 ranks are within 1e-04")


@pytest.mark.spawned
def test_a_job_on_a_mesh_goes_through_all_schedules(file: str) -> None:
    ended = verify(f"{file}:factory", "--strategy", "hybrid", "-n", "4", "--backend", "memory",
                   "--pipeline-parallel-size", "2", "--schedule", "all",
                   "--steps", "2")  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    names = [line for line in lines if "thread-ranks against training alone" in line]
    assert len(names) == len([line for line in lines if line.startswith("EQUAL")]) == 7
    assert "hybrid (2 pipeline x 1 tensor x 2 data, zb-v, 4 micro-batches) on 4" in names[-1]


@pytest.mark.spawned
def test_a_black_box_is_trained_once_for_all_schedules(file: str) -> None:
    ended = verify(f"{file}:box", "--strategy", "pipeline", "--backend", "memory",
                   "--schedule", "all", "--steps", "1")  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    first, *lines = ended.stdout.splitlines()
    assert "pipeline (2 pipeline x 1 tensor x 1 data) on 2 thread-ranks against" in first
    assert len([line for line in lines if line.startswith("EQUAL")]) == 1
    assert "once for all 7 schedules: FunctionModel is a black box" in ended.stderr
    assert ended.stderr.count("repeat each other's work") == 1


@pytest.mark.spawned
def test_sequence_parallelism_without_a_sequence_ends_with_2_and_two_lines(file: str) -> None:
    ended = verify(f"{file}:factory", "--strategy", "tensor", "--backend", "memory",
                   "--sequence-parallel")  # fmt: skip
    assert (ended.returncode, ended.stdout) == (2, "")
    assert len(ended.stderr.splitlines()) == 2
    assert ended.stderr.startswith("mpishard verify: --sequence-parallel is for models of sequen")


@pytest.mark.timeout(60)
@pytest.mark.spawned
def test_a_fault_on_one_mpi_rank_is_found(file: str) -> None:
    pytest.importorskip("mpi4py")
    ended = verify(f"{file}:fault", "--backend", "mpi")
    assert ended.returncode == 1, ended.stderr
    assert "on rank 1 the gradient of the rank's own samples" in ended.stdout
    assert ended.stdout.splitlines()[-1].startswith("DIFFERENT: 1 of 1 parameters exceed 1e-10")


@pytest.mark.spawned
def test_a_target_that_is_none_ends_with_2_and_two_lines(tmp_path: Path) -> None:
    ended = verify("nowhere.py:factory", "--backend", "memory", cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr == (
        f"mpishard verify: there is no file nowhere.py\nlooked for it from {tmp_path}\n"
    )


def test_targets_are_files_and_modules(file: str) -> None:
    assert load_factory(f"{file}:factory")(0)[1].shape == (20, 3)
    assert load_factory("mpishard.layout:ShardLayout") is ms.ShardLayout
    assert build_problem(load_factory(f"{file}:factory"), 0, "float32").model.dtype == np.float32


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("factory", "package.module:factory or file.py:factory, got 'factory'\nfactory"),
        ("FILE:", "package.module:factory or file.py:factory, got"),
        ("FILE:factroy", "has no 'factroy'\nits functions are factory, fault, box, diverges"),
        ("FILE:NUMBER", "'NUMBER' of .* is of type int, not a function\nfactory"),
        ("no.such:factory", "there is no module 'no'\nlooked for it in"),
        ("mpishard.nowhere:factory", "there is no module 'mpishard.nowhere'\n"),
    ],
)
def test_refuses_targets(file: str, target: str, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        load_factory(target.replace("FILE", file))


def test_an_import_that_fails_inside_the_target_is_the_users(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import not_there_at_all\n")
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        load_factory(f"{path}:factory")


class Nothing:
    pass


@pytest.mark.parametrize(
    ("given", "dtype", "message"),
    [
        (3, None, "must return .model, x, y. or .*\nit returned int"),
        ((1, 2), None, "it returned a tuple of 2"),
        ((Nothing(), *data()), None,
         "has no get_parameters and no set_parameters and no compute_gradients\n"),
        ((squares(), [1.0], np.ones(1)), None, "cannot be trained on\nx must be an array"),
        ((squares(), np.ones((3, 5)), np.ones(2)), None, "x has 3 and y has 2"),
        ((squares(), *data(), np.sum), None, "must be a loss of mpishard.nn\nit is a"),
        ((squares(), *data()), "float32",
         "--dtype float32: the model of factory.seed. has float64 parameters\nwrite def factory"),
    ],
)  # fmt: skip
def test_refuses_what_factories_return(given: Any, dtype: Any, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        build_problem(lambda seed: given, 0, dtype)


def test_refuses_a_factory_without_a_seed() -> None:
    def factory() -> Any:
        raise AssertionError

    with pytest.raises(
        TargetError, match=r"factory\(\) must take a seed\nfactory\(seed\) is a fun"
    ):
        build_problem(factory, 0, "float32")


def test_refuses_a_model_that_is_sharded() -> None:
    def wrap(backend: Any) -> None:
        model = ms.as_distributed(squares(), backend)
        with pytest.raises(TargetError, match="is sharded already, as FSDPModel\nreturn the plain"):
            build_problem(lambda seed: (model, *data()), 0, None)

    ms.run_in_threads(1, wrap)


def test_training_alone_that_diverges_is_told(file: str) -> None:
    problem = build_problem(load_factory(f"{file}:diverges"), 0, None)
    with pytest.raises(TargetError, match=r"step 1 of training alone.*not finite\nlower --learn"):
        train_alone(job(2), problem)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategy", "zero9"], "zero3, fsdp, tensor, pipeline, hybrid; got 'zero9'"),
        (["--strategy", ""], "--strategy must be one of ddp, zero1"),
        (["--optimizer", "bfgs"], "--optimizer must be one of sgd, adagrad"),
        (["--optimizer", "lbfgs", "--strategy", "ddp", "--wrapper", "compression"],
         "--optimizer lbfgs compares losses of one function: leave out --delay, --precision"),
        (["--optimizer", "lbfgs", "--precision", "bfloat16"], "leave out --delay, --precision"),
        (["--learning-rate", "0"], "--learning-rate must be above 0 and finite, got 0.0"),
        (["--learning-rate", "inf"], "--learning-rate must be above 0 and finite, got inf"),
        (["--tolerance", "-1"], "--tolerance must be above 0 and finite, got -1.0"),
        (["-n", "0"], "Invalid value for '-n'"),
        (["--steps", "0"], "Invalid value for '--steps'"),
        (["--dtype", "float16"], "'float16' is not one of 'float32', 'float64'"),
        (["--backend", "nccl"], "'nccl' is not one of 'auto', 'mpi', 'memory'"),
        (["--schedule", "1f1b"], "--schedule is for --strategy pipeline and hybrid; got fsdp"),
        (["--strategy", "tensor", "--micro-batches", "2"],
         "--micro-batches is for --strategy pipeline and hybrid; got tensor"),
        (["--strategy", "pipeline", "--tensor-parallel-size", "2"],
         "--tensor-parallel-size is for --strategy hybrid; got pipeline"),
        (["--strategy", "pipeline", "--sequence-parallel"],
         "--sequence-parallel is for --strategy tensor and hybrid; got pipeline"),
        (["--strategy", "pipeline", "--schedule", "dualpipe"],
         "--schedule must be one of all, gpipe, 1f1b, interleaved"),
        (["--strategy", "hybrid", "--data-parallel-size", "0"],
         "--data-parallel-size must be 1 or more, or -1 for what is left, got 0"),
        (["--strategy", "hybrid", "-n", "4", "--pipeline-parallel-size", "3"],
         "-n 4: pipeline 3 x tensor 1 = 3 does not divide the world of 4 ranks"),
        (["--strategy", "hybrid", "-n", "4", "--tensor-parallel-size", "2",
          "--data-parallel-size", "3"],
         "-n 4: pipeline 1 x tensor 2 x data 3 = 6, and the world has 4 ranks"),
        (["--strategy", "hybrid", "--data-parallel-strategy", "hybrid"],
         "--data-parallel-strategy must be one of ddp, zero1, zero2, zero3, fsdp; got 'hybrid'"),
        (["--recompute", "full"],
         "--recompute is for --strategy tensor and pipeline and hybrid; got fsdp"),
        (["--recompute", "half"], "'half' is not one of 'full', 'selective'"),
        (["--micro-batches", "0"], "Invalid value for '--micro-batches'"),
        (["--strategy", "tensor", "--delay", "1"], "fsdp, hybrid; got tensor"),
        (["--strategy", "Tensor", "--delay", "1"], "fsdp, hybrid; got tensor"),
        (["--strategy", "ddp", "--delay", "5"], "--delay 5 leaves no update of --steps 5"),
        (["--strategy", "tensor", "--wrapper", "local-sgd"],
         "is for --strategy ddp, zero1, zero2, zero3, fsdp, hybrid; got tensor"),
        (["--strategy", "ddp", "--wrapper", "local-sgd"],
         "--wrapper local-sgd is for --optimizer descent; got sgd, whose state would differ"),
        (["--strategy", "ddp", "--wrapper", "elastic", "--delay", "1"],
         "--delay 1 is for --wrapper async; got elastic"),
        (["--wrapper", "lokal"], "--wrapper must be one of local-sgd, async, elastic, compression"),
    ],
)  # fmt: skip
def test_refuses_options(arguments: list[str], message: str) -> None:
    ended = CliRunner().invoke(app, ["verify", "file.py:factory", *arguments])
    assert ended.exit_code == 2
    assert message in " ".join(ended.stderr.replace("│", " ").split())
    assert ended.stdout == ""


def test_refuses_a_setting_that_ranks_would_refuse(monkeypatch: Any) -> None:
    monkeypatch.setenv("MPISHARD_ARENA", "sand")
    ended = CliRunner().invoke(app, ["verify", "file.py:factory", "--backend", "memory"])
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
        (["train.py", "--batch-size", "4"], "--batch-size is for a factory"),
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
def test_a_script_without_a_loop_of_pytorch_is_told_what_to_give(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trains')")
    ended = verify("train.py", cwd=tmp_path)
    assert ended.returncode == 2
    assert "made no step of an optimizer of mpishard.torch" in ended.stderr
