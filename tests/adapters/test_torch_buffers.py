"""Modules whose passes change buffers, as batch normalisation does: trained, saved, resharded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpishard import as_distributed, run_in_threads
from mpishard.adapters import TorchModel
from mpishard.errors import (
    CollectiveMismatchError,
    NonFiniteLossError,
    PeerError,
    ShardingError,
)
from mpishard.models import DDPModel, HybridShardedModel
from mpishard.optimizers import SGD, AdamW, LocalSGDOptimizer
from mpishard.sharding import ShardingConfiguration
from mpishard.testing.worlds import in_worlds
from mpishard.training import OptimizationInputData

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here; pip install 'mpishard[torch]'"
)
from torch_nets import SAMPLES, batch, convolutions, make, making  # noqa: E402

from mpishard.torch import convert_sync_batchnorm  # noqa: E402

nn = torch.nn
squared = nn.functional.mse_loss
X, Y = (values.numpy() for values in batch("conv"))
STEPS = 4

by_strategy = pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])


def rows(step: int, rank: int, world_size: int) -> slice:
    """A rank's samples: uneven, and in the second step none on the first rank."""
    ends = np.linspace(0, SAMPLES, world_size + 1).astype(int)
    ends[1:-1] = 0 if step == 1 else ends[1:-1] + step % 2
    return slice(ends[rank], ends[rank + 1])


def wrap(backend: Any, strategy: str, *, joins: bool = True, **options: Any) -> Any:
    """Each rank's module has buffers of its own: rank 0's count."""
    module = make(convolutions)
    module[1].running_mean.fill_(backend.rank)
    module = convert_sync_batchnorm(module) if joins else module
    config = ShardingConfiguration(backend, minimum_parameter_group_size=1, **options)
    return as_distributed(TorchModel(module, squared), config, strategy)


def rule_for(model: Any, rule: Any = None) -> Any:
    rule = AdamW(1e-3, weight_decay=0.1) if rule is None else rule
    return as_distributed(rule, model.sharding_configuration, model.strategy.lower())


def state_of(model: Any) -> dict[str, Any]:
    state = model.wrapped_model.module.state_dict()
    return {name: values.detach().clone().numpy() for name, values in state.items()}


def close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, values in found.items():
        np.testing.assert_allclose(values, expected[name], rtol=0, atol=1e-12, err_msg=name)


def by_pytorch(steps: int) -> dict[str, Any]:
    """One process, on all samples."""
    with making:
        module = make(convolutions)
    optimizer = torch.optim.AdamW(module.parameters(), 1e-3, weight_decay=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        squared(module(torch.from_numpy(X)), torch.from_numpy(Y)).backward()
        optimizer.step()
    return {name: values.detach().numpy() for name, values in module.state_dict().items()}


@by_strategy
@pytest.mark.parametrize("path", ["arena", "messages", "two nodes"], indirect=True)
@in_worlds(1, 2, 3)
def test_statistics_of_all_ranks_are_those_of_one_process(backend, strategy, path):
    model = wrap(backend, strategy)
    optimizer = rule_for(model)
    for step in range(STEPS):
        mine = rows(step, backend.rank, backend.world_size)
        optimizer.step(model, X[mine], Y[mine])
    close(state_of(model), by_pytorch(STEPS))


@pytest.mark.parametrize("joins", [True, False])
@by_strategy
@in_worlds(1, 2, 3)
def test_a_refused_step_leaves_the_buffers_of_before(backend, strategy, joins):
    model = wrap(backend, strategy, joins=joins)
    optimizer = rule_for(model)
    mine = rows(0, backend.rank, backend.world_size)
    optimizer.step(model, X[mine], Y[mine])
    before = state_of(model)
    odd = np.where(backend.rank == 0, np.nan, X[mine])
    for accumulates in (False, True):
        if accumulates:
            with model.accumulate():
                optimizer.step(model, X[mine], Y[mine])
        with pytest.raises(NonFiniteLossError):
            optimizer.step(model, odd, Y[mine])
        found = state_of(model)
        assert all(np.array_equal(found[name], before[name]) for name in before)
    optimizer.step(model, X[mine], Y[mine])
    assert int(state_of(model)["1.num_batches_tracked"]) == 2


@by_strategy
@in_worlds(2, 3)
def test_optimize_resumes_with_buffers(backend, strategy, shared_path):
    def run(folder: str, steps: int, resume: str | None = None) -> Any:
        model = wrap(backend, strategy)
        data = OptimizationInputData(
            model=model, x_train=X, y_train=Y, batch_size=SAMPLES, max_steps=steps, epochs=9,
            shuffle=False, checkpoint=shared_path / folder,
            resume=None if resume is None else shared_path / resume,
        )  # fmt: skip
        rule_for(model).optimize(data)
        return model

    close(state_of(run("whole", STEPS)), by_pytorch(STEPS))
    run("half", 2)
    close(state_of(run("rest", STEPS, "half")), by_pytorch(STEPS))


@pytest.mark.parametrize(("first", "then"), [(2, 3), (3, 1)])
def test_a_checkpoint_fits_other_worlds_and_strategies(first, then, tmp_path):
    def train(backend: Any, strategy: str, start: Any, end: Any, steps: range) -> Any:
        model = wrap(backend, strategy)
        optimizer = rule_for(model, SGD(1e-2))
        if start is not None:
            model.load_model(start)
        for step in steps:
            mine = rows(step, backend.rank, backend.world_size)
            optimizer.step(model, X[mine], Y[mine])
        model.save_model(end)
        return state_of(model)

    whole = run_in_threads(1, lambda b: train(b, "ddp", None, tmp_path / "whole", range(STEPS)))[0]
    run_in_threads(first, lambda b: train(b, "fsdp", None, tmp_path / "half", range(2)))
    for found in run_in_threads(
        then, lambda b: train(b, "zero1", tmp_path / "half", tmp_path / "end", range(2, STEPS))
    ):
        close(found, whole)
    alone = TorchModel(make(convolutions), squared)
    alone.load_model(tmp_path / "end")
    close({name: values.numpy() for name, values in alone.module.state_dict().items()}, whole)


@by_strategy
@in_worlds(2, 3)
def test_plain_batch_norm_has_rank_zeros_buffers_everywhere(backend, strategy):
    model = wrap(backend, strategy, joins=False)
    alone = make(convolutions)
    for step in range(3):
        mine = rows(step, backend.rank, backend.world_size)
        first = X[rows(step, 0, backend.world_size)]
        present = {n: torch.from_numpy(v) for n, v in state_of(model).items()}
        alone.load_state_dict({**present, **dict(alone.named_buffers())})
        if len(first):
            alone(torch.from_numpy(first))
        model.train(X[mine], Y[mine])
    for name, buffer in alone.named_buffers():
        np.testing.assert_array_equal(buffer.numpy(), state_of(model)[name])


@in_worlds(2)
def test_copies_and_bytes_hold_buffers_and_compute_alone(backend):
    model = wrap(backend, "fsdp")
    model.train(X, Y)
    before = state_of(model)
    copy = model.deep_copy()
    with model.unsharded(0) as plain:
        if backend.rank == 0:  # with its own samples, for nobody else is there
            plain.train(X, Y)
            assert int(plain.module[1].num_batches_tracked) == 2
    close(state_of(model), before)
    copy.train(X, Y)
    model.train(X, Y)
    close(state_of(copy), state_of(model))
    alone = TorchModel(make(convolutions), squared)
    alone.deserialize(model.serialize())
    close({n: v.numpy() for n, v in alone.module.state_dict().items()}, state_of(model))
    released = model.release()
    if backend.rank == 0:
        released.train(X, Y)


@in_worlds(2)
def test_replicas_that_drift_have_one_set_of_buffers_again(backend):
    model = wrap(backend, "ddp", joins=False)
    optimizer = LocalSGDOptimizer(SGD(1e-2), model.sharding_configuration, 2)
    mine = rows(0, backend.rank, backend.world_size)
    for step in range(2):
        optimizer.step(model, X[mine], Y[mine])
        means = backend.all_gather(state_of(model)["1.running_mean"][None])
        assert (means == means[0]).all() == (step == 1)


@in_worlds(2)
def test_the_best_solution_has_its_own_buffers(backend):
    model = wrap(backend, "fsdp")
    states = []

    class Watch:
        def on_evaluate(self, run: Any, record: Any) -> None:
            states.append((record.score, state_of(model)))

    data = OptimizationInputData(
        model=model,
        x_train=X,
        y_train=Y,
        x_validation=X,
        y_validation=-Y,
        batch_size=SAMPLES,
        max_steps=5,
        epochs=5,
        validate_every=1,
        patience=9,
        callbacks=[Watch()],
    )
    result = rule_for(model, SGD(0.05)).optimize(data)
    best = min(states, key=lambda pair: pair[0])[1]
    assert result.best_iteration < 5
    close(state_of(model), best)


@in_worlds(2)
def test_a_mesh_whose_ranks_compute_one_batch(backend):
    config = ShardingConfiguration(backend, minimum_parameter_group_size=1)
    plain = TorchModel(convert_sync_batchnorm(make(convolutions)), squared)
    model = HybridShardedModel(plain, config, 1, 2)
    whole = wrap(backend, "ddp")
    for one, mine in ((model, slice(None)), (whole, rows(0, backend.rank, 2))):
        one.train(X[mine], Y[mine])
    close(state_of(model), state_of(whole))


@in_worlds(1, 2, 3)
def test_statistics_with_rounded_parameters_are_float32_of_all_ranks(backend):
    module = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(2, momentum=1.0), *convolutions()))
    config = ShardingConfiguration(backend, precision="bfloat16")
    model = DDPModel(TorchModel(module.float(), squared), config)
    mine = slice(backend.rank, None, backend.world_size)
    model.train(X[mine], Y[mine])
    rounded = torch.from_numpy(X).bfloat16().double()
    mean, found = rounded.mean((0, 2, 3)), module[0].running_mean
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), mean, rtol=1e-6, atol=0)
    assert np.isfinite(model.predict(X[mine])).all()


class Counting(nn.Linear):
    """Changes a buffer in each pass, and has another that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__(5, 2)
        self.register_buffer("passes", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()), persistent=False)

    def forward(self, x: Any) -> Any:
        self.passes = self.passes + 1
        self.last.copy_(x.detach().sum())
        return super().forward(x)


@in_worlds(1, 2)
def test_any_buffer_may_change(backend):
    model = DDPModel(TorchModel(Counting(), squared), ShardingConfiguration(backend))
    for _ in range(3):
        model.train(np.ones((2, 5), "f4") + backend.rank, np.ones((2, 2), "f4"))
    module = model.wrapped_model.module
    assert (float(module.passes), float(module.last)) == (3, 10)
    other = TorchModel(Counting(), squared)
    other.deserialize(model.serialize())
    assert (float(other.module.passes), float(other.module.last)) == (3, 0)


class Adding(nn.Linear):
    """It has no buffers until a pass adds a submodule, if ``adds`` is True."""

    adds = True

    def forward(self, x: Any) -> Any:
        if self.adds and not hasattr(self, "norm"):
            self.norm = nn.BatchNorm1d(5, affine=False, dtype=torch.float64)
        return super().forward(self.norm(x) if hasattr(self, "norm") else x)


@by_strategy
@in_worlds(1, 2)
def test_buffers_of_a_submodule_that_a_pass_adds_are_rank_zeros(backend, strategy):
    plain = TorchModel(Adding(5, 2).double(), squared)
    model = as_distributed(plain, ShardingConfiguration(backend), strategy)
    alone, x = nn.BatchNorm1d(5, affine=False, dtype=torch.float64), np.eye(4, 5)
    for _ in range(2):
        model.train(x + backend.rank, np.ones((4, 2)))
        alone(torch.from_numpy(x))
    np.testing.assert_allclose(plain.module.norm.running_mean, alone.running_mean, rtol=1e-12)


@in_worlds(2, 3)
def test_a_submodule_with_buffers_that_one_rank_adds_is_refused(backend):
    module = Adding(5, 2).double()
    module.adds = backend.rank == 1
    model = DDPModel(TorchModel(module, squared), ShardingConfiguration(backend))
    with pytest.raises(CollectiveMismatchError):
        model.train(np.ones((4, 5)), np.ones((4, 2)))


class Growing(nn.Linear):
    """Has two tables that grow with the inputs, and have equally many elements together."""

    def __init__(self) -> None:
        super().__init__(5, 2)
        self.register_buffer("first", torch.zeros(2))
        self.register_buffer("second", torch.zeros(2))

    def forward(self, x: Any) -> Any:
        size = int(x[0, 0])
        self.first, self.second = torch.arange(size) + x[0, 1], torch.arange(10 - size)
        return super().forward(x)


@in_worlds(2)
def test_buffers_that_differ_between_ranks_are_refused_by_name(backend):
    model = DDPModel(TorchModel(Growing(), squared), ShardingConfiguration(backend))
    x, y = np.full((2, 5), 4.0 + 2 * backend.rank, "f4"), np.ones((2, 2), "f4")
    wanted = r"'first' is float32\[4\], float32\[6\]; buffer 'second' is int64\[6\], int64\[4\]"
    with pytest.raises(ShardingError, match=wanted):
        model.train(x, y)
    x[:, 0] = 6
    model.train(x, y)
    module = model.wrapped_model.module
    assert module.first.tolist() == [4, 5, 6, 7, 8, 9]
    assert module.second.tolist() == [0, 1, 2, 3]


class Unlike(nn.Linear):
    """A module whose tensors beside the vector depend on the rank."""

    def __init__(self, sizes: tuple[int, int], frozen: int = 3) -> None:
        super().__init__(5, 2)
        self.register_buffer("first", torch.zeros(sizes[0]))
        self.register_buffer("second", torch.ones(sizes[1]))
        self.frozen = nn.Parameter(torch.ones(frozen).double(), requires_grad=False)


@in_worlds(2)
def test_modules_with_other_tensors_beside_the_vector_are_refused_by_name(backend):
    config = ShardingConfiguration(backend)
    one = Unlike((2 + backend.rank, 3 - backend.rank))
    wanted = r"'first' is float32\[2\], float32\[3\]; buffer 'second' is float32\[3\], float32\[2\]"
    with pytest.raises(ValueError, match=wanted):
        DDPModel(TorchModel(one, squared), config)
    assert (one.first == 0).all()
    assert (one.second == 1).all()
    with pytest.raises(ValueError, match=r"parameter 'frozen' is float64\[1\], float64\[2\]"):
        DDPModel(TorchModel(Unlike((1, 1), 1 + backend.rank), squared), config)


@in_worlds(2)
def test_gradient_leaves_are_refused(backend):
    model = wrap(backend, "ddp", joins=False, gradient_leaves=2)
    with pytest.raises((ValueError, PeerError), match=r"gradient_leaves=2 .* buffers that a pass"):
        model.train(X[rows(0, backend.rank, 2)], Y[rows(0, backend.rank, 2)])


def test_refuses_buffers_of_another_module():
    saved = TorchModel(make(convolutions), squared).serialize()
    other = convolutions().double()
    other.register_buffer("scale", torch.ones(2))
    TorchModel(other, squared).deserialize(saved)  # a buffer more is left as it is
    saved = TorchModel(other, squared).serialize()
    with pytest.raises(ValueError, match=r"'scale' of shape \(2,\), and this module has none"):
        TorchModel(make(convolutions), squared).deserialize(saved)


@in_worlds(1)
def test_conversion_comes_before_sharding(backend):
    import mpishard.torch as mst

    mst.init()
    module = mst.shard(make(convolutions))
    with pytest.raises(ShardingError, match=r"call convert_sync_batchnorm\(\) before shard"):
        convert_sync_batchnorm(module)
