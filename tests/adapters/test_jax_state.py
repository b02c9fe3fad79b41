"""Losses in JAX with state and keys: those of one process that knows the ranks' samples."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpishard as ms
from mpishard.adapters import JaxModel
from mpishard.adapters.jax_state import JaxState
from mpishard.errors import CheckpointError, NonFiniteLossError, ShardingError
from mpishard.testing.worlds import in_worlds

jax = pytest.importorskip("jax", reason="JAX is not installed here; pip install 'mpishard[jax]'")
jax.config.update("jax_enable_x64", True)
jnp = jax.numpy
ravel_pytree = pytest.importorskip("jax.flatten_util").ravel_pytree

RATE = 1e-2
ENDS = [0, 4, 6, 9]  # of each rank's samples

by_strategy = pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])


# ------------------------------------------------------------- programs, as on docs/jax-loss.md


def plain() -> tuple[Any, ...]:
    """Batch normalisation, a counter, and dropout by the key of each sample, by hand."""
    generator = np.random.default_rng(0)
    first = {"a": generator.standard_normal((5, 7)) / 2, "b": generator.standard_normal((7, 2)) / 2}
    state = {"mean": np.zeros(7, np.float32), "passes": 0, "seen": np.zeros(2, bool)}

    def loss(parameters: Any, state: Any, keys: Any, x: Any, y: Any) -> Any:
        x = x @ parameters["a"]
        if keys is None:
            x = x - state["mean"]
        else:
            mean = 0.9 * state["mean"] + 0.1 * x.mean(0)
            x = (x - x.mean(0)) * jax.vmap(lambda key: jax.random.bernoulli(key, 0.7, (7,)))(keys)
            state = {"mean": mean, "passes": state["passes"] + 1, "seen": ~state["seen"]}
        return jnp.mean((jnp.tanh(x) @ parameters["b"] - y) ** 2), state

    def predict(parameters: Any, state: Any, x: Any) -> Any:
        return jnp.tanh(x @ parameters["a"] - state["mean"]) @ parameters["b"]

    return loss, first, predict, state


def linen() -> tuple[Any, ...]:
    nn = pytest.importorskip("flax.linen")

    class Net(nn.Module):  # type: ignore[misc, name-defined]
        @nn.compact  # type: ignore[untyped-decorator]
        def __call__(self, x: Any, train: bool) -> Any:
            x = nn.Dense(7, param_dtype=float)(x)
            x = nn.BatchNorm(not train, param_dtype=float)(x)
            return nn.Dense(2, param_dtype=float)(nn.Dropout(0.3, deterministic=not train)(x))

    net = Net()
    state = net.init(jax.random.key(0), np.ones((1, 5)), False)
    parameters = state.pop("params")

    def loss(parameters: Any, state: Any, keys: Any, x: Any, y: Any) -> Any:
        given, train = {"params": parameters, **state}, keys is not None
        rngs = {"dropout": keys[0]} if train else {}
        z, state = net.apply(given, x, train, mutable=["batch_stats"], rngs=rngs)
        return jnp.mean((z - y) ** 2), state

    def predict(parameters: Any, state: Any, x: Any) -> Any:
        return net.apply({"params": parameters, **state}, x, False)

    return loss, parameters, predict, state


def of_nnx() -> tuple[Any, ...]:
    nnx = pytest.importorskip("flax.nnx")
    rngs = nnx.Rngs(0)
    net = nnx.Sequential(
        nnx.Linear(5, 7, rngs=rngs, param_dtype=float),
        nnx.BatchNorm(7, rngs=rngs, param_dtype=float),
        nnx.Dropout(0.3, rngs=rngs),
        nnx.Linear(7, 2, rngs=rngs, param_dtype=float),
    )
    graph, parameters, state, rest = nnx.split(net, nnx.Param, nnx.BatchStat, ...)

    def loss(parameters: Any, state: Any, keys: Any, x: Any, y: Any) -> Any:
        net = nnx.merge(graph, parameters, state, rest, copy=True)
        if keys is None:
            net.eval()
        else:
            nnx.reseed(net, default=keys[0])
        return jnp.mean((net(x) - y) ** 2), nnx.state(net, nnx.BatchStat)

    def predict(parameters: Any, state: Any, x: Any) -> Any:
        net = nnx.merge(graph, parameters, state, rest, copy=True)
        net.eval()
        return net(x)

    return loss, parameters, predict, state


def of_haiku() -> tuple[Any, ...]:
    hk = pytest.importorskip("haiku")

    def forward(x: Any, train: bool) -> Any:
        x = hk.BatchNorm(True, True, 0.9)(hk.Linear(7)(x), train)
        return hk.Linear(2)(hk.dropout(hk.next_rng_key(), 0.3, x) if train else x)

    net = hk.transform_with_state(forward)
    parameters, state = net.init(jax.random.key(0), np.ones((1, 5)), True)

    def loss(parameters: Any, state: Any, keys: Any, x: Any, y: Any) -> Any:
        train = keys is not None
        z, state = net.apply(parameters, state, keys[0] if train else None, x, train)
        return jnp.mean((z - y) ** 2), state

    def predict(parameters: Any, state: Any, x: Any) -> Any:
        return net.apply(parameters, state, None, x, False)[0]

    return loss, parameters, predict, state


def of_equinox() -> tuple[Any, ...]:
    eqx = pytest.importorskip("equinox")

    class Net(eqx.Module):  # type: ignore[misc, name-defined]
        first: Any = eqx.field(default_factory=lambda: eqx.nn.Linear(5, 7, key=jax.random.key(0)))
        norm: Any = eqx.field(default_factory=lambda: eqx.nn.BatchNorm(7, "batch", mode="batch"))
        last: Any = eqx.field(default_factory=lambda: eqx.nn.Linear(7, 2, key=jax.random.key(1)))

        def __call__(self, x: Any, state: Any, key: Any) -> Any:
            x, state = self.norm(self.first(x), state, inference=key is None)
            return self.last(eqx.nn.Dropout(0.3)(x, key=key, inference=key is None)), state

    net, state = eqx.nn.make_with_state(Net)()
    parameters, rest = eqx.partition(net, eqx.is_inexact_array)

    def apply(parameters: Any, state: Any, keys: Any, x: Any) -> Any:
        axes = (0, None, None if keys is None else 0)
        net = jax.vmap(eqx.combine(parameters, rest), axes, (0, None), axis_name="batch")
        return net(x, state, keys)

    def loss(parameters: Any, state: Any, keys: Any, x: Any, y: Any) -> Any:
        z, state = apply(parameters, state, keys, x)
        return jnp.mean((z - y) ** 2), state

    def predict(parameters: Any, state: Any, x: Any) -> Any:
        return apply(parameters, state, None, x)[0]

    return loss, parameters, predict, state


# ------------------------------------------------------------------------------- one process


def batch(step: int) -> tuple[Any, Any]:
    x = np.random.default_rng(step).standard_normal((9, 5)) + 1
    return x, np.sin(x[:, :2])


def rows(rank: int, step: int, size: int) -> slice:
    """A rank's samples: uneven, and none for one rank, another one at each step."""
    is_empty = size > 1 and step % size == rank
    return slice(ENDS[rank], ENDS[rank + (not is_empty)])


@functools.cache
def train_alone(program: Any, size: int, steps: int) -> list[tuple[float, Any, list[Any]]]:
    """Loss before each step, parameters and state after it, by JAX alone with plain descent."""
    loss, parameters, _, state = program()
    theta, unravel = ravel_pytree(parameters)
    theta, structure = np.array(theta), jax.tree_util.tree_structure(state)
    leaves = [np.asarray(leaf) for leaf in jax.tree_util.tree_leaves(state)]
    leaves = [leaf.astype(float) if leaf.dtype.kind == "f" else leaf for leaf in leaves]
    differentiated = jax.jit(
        jax.value_and_grad(lambda t, *given: loss(unravel(t), *given), has_aux=True)
    )
    found = []
    for step in range(steps):
        x, y = batch(step)
        total, gradient, sums, start = 0.0, np.zeros_like(theta), [0.0 * leaf for leaf in leaves], 0
        for rank in range(size):
            mine = rows(rank, step, size)
            samples = len(x[mine])
            if samples == 0:
                continue
            step_key = jax.random.fold_in(jax.random.key(3), step)
            keys = [jax.random.fold_in(step_key, i) for i in range(start, start + samples)]
            start += samples
            given = structure.unflatten(leaves), jnp.stack(keys), x[mine], y[mine]
            (value, new), part = differentiated(theta, *given)
            total += samples * value
            gradient += samples * np.asarray(part)
            pairs = zip(sums, jax.tree_util.tree_leaves(new), strict=True)
            sums = [a + samples * np.asarray(leaf) for a, leaf in pairs]
        theta = theta - RATE * gradient / start
        pairs = zip(leaves, sums, strict=True)
        leaves = [(a / start).astype(old.dtype) for old, a in pairs]
        found.append((float(total / start), theta, leaves))
    return found


def model(program: Any, **options: Any) -> JaxModel:
    loss, parameters, predict, state = program()
    return JaxModel(loss, parameters, predict, state=state, seed=3, **options)


def wrap(backend: Any, strategy: str, one: JaxModel, **options: Any) -> tuple[Any, Any]:
    config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=1, **options)
    sgd = ms.as_distributed(ms.optimizers.SGD(RATE), config, strategy)
    return ms.as_distributed(one, config, strategy), sgd


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12)


@by_strategy
@in_worlds(1, 2, 3)
def test_a_refused_step_leaves_the_state_of_before(backend: Any, strategy: str) -> None:
    one = model(plain)
    sharded, optimizer = wrap(backend, strategy, one)
    x, y = (array[rows(backend.rank, 9, 1)] for array in batch(0))
    optimizer.step(sharded, x, y)
    before = jax.tree_util.tree_map(np.array, one.state_tree())
    odd = np.where(backend.rank == 0, np.nan, x)
    for accumulates in (False, True):
        if accumulates:
            with sharded.accumulate():
                optimizer.step(sharded, x, y)
        with pytest.raises(NonFiniteLossError):
            optimizer.step(sharded, odd, y)
        found = jax.tree_util.tree_leaves(one.state_tree())
        for leaf, old in zip(found, jax.tree_util.tree_leaves(before), strict=True):
            np.testing.assert_array_equal(leaf, old)
    optimizer.step(sharded, x, y)
    assert int(one.state_tree()["passes"]) == 2


def require_equal(program: Any, backend: Any, strategy: str) -> None:
    one = model(program)
    sharded, optimizer = wrap(backend, strategy, one)
    rank, size = backend.rank, backend.world_size
    for step, (loss, theta, leaves) in enumerate(train_alone(program, size, 3)):
        x, y = batch(step)
        mine = rows(rank, step, size)
        close(optimizer.step(sharded, x[mine], y[mine]), loss)
        close(sharded.gather_full_parameters(), theta)
        found = jax.tree_util.tree_leaves(one.state_tree())
        for leaf, expected in zip(found, leaves, strict=True):
            assert leaf.dtype == expected.dtype
            close(leaf, expected)
    # Evaluation has the running statistics, and no dropout.
    _, parameters, predict, state = program()
    tree = ravel_pytree(parameters)[1](theta)
    state = jax.tree_util.tree_structure(state).unflatten(leaves)
    expected = predict(tree, state, x)
    close(sharded.predict(x), expected)
    close(sharded.evaluate(x, y)[0], np.mean((expected - y) ** 2))


@by_strategy
@in_worlds(2, 3)
def test_training_equals_one_process(backend: Any, strategy: str) -> None:
    require_equal(plain, backend, strategy)


@pytest.mark.parametrize("program", [linen, of_nnx, of_haiku, of_equinox])
@in_worlds(2)
def test_programs_of_libraries_equal_one_process(backend: Any, program: Any) -> None:
    require_equal(program, backend, "fsdp")


def masked(parameters: Any, state: Any, keys: Any, x: Any, y: Any) -> Any:
    if keys is not None:
        x = x * jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (5,)))(keys)
    return jnp.mean((x @ parameters["a"] - y) ** 2), state


@pytest.mark.parametrize("leaves", [None, 4])
@in_worlds(1, 2, 3)
def test_masks_depend_on_samples_and_not_on_ranks(backend: Any, leaves: int | None) -> None:
    one = JaxModel(masked, {"a": np.zeros((5, 2))}, state={}, seed=backend.rank)
    sharded, optimizer = wrap(backend, "fsdp", one, gradient_leaves=leaves)
    a = np.zeros((5, 2))
    for step in range(2):
        x, y = batch(step)
        mine = sharded.batch_indices(9)
        optimizer.step(sharded, x[mine], y[mine])
        key = jax.random.fold_in(jax.random.key(0), step)
        kept = [jax.random.bernoulli(jax.random.fold_in(key, i), 0.5, (5,)) for i in range(9)]
        x = x * np.array(kept)
        a = a - RATE * x.T @ (x @ a - y) / 9
    close(sharded.gather_full_parameters(), a.ravel())


@in_worlds(1, 2)
def test_a_run_that_resumes_has_state_and_keys_of_one_that_did_not_stop(
    backend: Any, shared_path: Path
) -> None:
    def run(steps: int, **options: Any) -> Any:
        sharded, optimizer = wrap(backend, "fsdp", model(plain))
        x, y = (np.tile(array, (2, 1)) for array in batch(7))
        data = ms.OptimizationInputData(
            model=sharded, x_train=x, y_train=y, batch_size=6, max_steps=steps, progress=False,
            **options,
        )  # fmt: skip
        optimizer.optimize(data)
        return sharded

    whole = run(4)
    run(2, checkpoint=shared_path / "run")
    resumed = run(4, checkpoint=shared_path / "run")
    close(resumed.gather_full_parameters(), whole.gather_full_parameters())
    found, expected = (each.wrapped_model.state_tree() for each in (resumed, whole))
    close(found["mean"], expected["mean"])
    assert int(found["passes"]) == 4
    resumed.save_model(shared_path / "model")
    alone = model(plain)
    alone.load_model(shared_path / "model")
    close(alone.predict(batch(0)[0]), whole.predict(batch(0)[0]))
    backend.barrier()


@in_worlds(2)
def test_replicas_that_train_apart_have_one_state_after_synchronisation(backend: Any) -> None:
    one = model(plain)
    sharded, optimizer = wrap(backend, "ddp", one, auto_sync_gradients=False)
    x, y = batch(0)
    mine = slice(ENDS[backend.rank], ENDS[backend.rank + 1])
    for _ in range(2):
        optimizer.step(sharded, x[mine], y[mine])
    means = backend.all_gather(np.asarray(one.state_tree()["mean"])).reshape(2, -1)
    assert not np.allclose(*means)
    sharded.synchronize_gradients()
    close(one.state_tree()["mean"], (4 * means[0] + 2 * means[1]) / 6)


# ----------------------------------------------------------------------------------- refusals


@in_worlds(2)
def test_a_state_that_cannot_be_averaged_must_be_equal(backend: Any) -> None:
    def loss(parameters: Any, state: Any, keys: Any, x: Any, y: Any) -> Any:
        return jnp.mean((x @ parameters["a"] - y) ** 2), {"n": state["n"] + jnp.array([0, len(x)])}

    one = JaxModel(loss, {"a": np.zeros((5, 2))}, state={"n": np.zeros(2, int)})
    sharded, optimizer = wrap(backend, "zero2", one)
    x, y = batch(0)
    mine = slice(ENDS[backend.rank], ENDS[backend.rank + 1])
    with pytest.raises(ShardingError, match=r"state 'n' .*element \[1\] is 4 on rank 0 and 2 on"):
        optimizer.step(sharded, x[mine], y[mine])


@in_worlds(3)
def test_a_state_of_any_dtype_is_averaged_and_saved(backend: Any) -> None:
    dtypes = {"b": jnp.bfloat16, "h": np.float16, "f": float, "n": np.uint8, "is": bool}
    first = {name: jnp.zeros((2, 3), dtype) for name, dtype in dtypes.items()} | {"e": np.ones(0)}
    state = JaxState(first, np.dtype(float))
    state.distribute(backend)
    new = {n: jnp.full_like(a, backend.rank) if n in "bhf" else a + 1 for n, a in first.items()}
    state.take(state.checked({**new, "is": ~first["is"]}), backend.rank + 1)
    state.share(backend)
    for name, leaf in state.tree.items():
        assert leaf.dtype == first[name].dtype
        # The weights of ranks 0, 1 and 2 are 1, 2 and 3.
        assert (leaf == first[name].dtype.type((0 + 2 + 6) / 6)).all()
    for leaf, saved in zip(state.leaves, state.values_in(state.to_text()), strict=True):
        assert leaf.dtype == saved.dtype
        assert leaf.tobytes() == saved.tobytes()


@in_worlds(2)
def test_states_of_another_form_are_refused(backend: Any) -> None:
    one = JaxModel(masked, {"a": np.zeros((5, 2))}, state={"mean": np.zeros(3 + backend.rank)})
    with pytest.raises(ValueError, match=r"state 'mean' is float64\[3\], float64\[4\]"):
        wrap(backend, "fsdp", one)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda mean, state: mean, "must return the mean and the new state; got float64"),
        (lambda mean, state: (mean, {}), r"returned none as state 'n', which is float32\[2\]"),
        (lambda mean, state: (mean, {"n": state["n"][:1]}), r"float32\[1\] as state 'n', which is"),
        (lambda mean, state: (mean, {"n": state["n"] + mean}), r"float64\[2\] as state 'n'"),
        (lambda mean, state: (mean, {**state, "m": mean}), "state 'm', which state= has not"),
        (lambda mean, state: (state["n"], state), r"one float, .* got float32\[2\]"),
    ],
)
def test_other_results_are_refused(returned: Any, message: str) -> None:
    def loss(parameters: Any, state: Any, keys: Any, x: Any, y: Any) -> Any:
        return returned(jnp.mean(x @ parameters["a"]), state)

    one = JaxModel(loss, {"a": np.zeros((5, 1), np.float32)}, state={"n": np.zeros(2, np.float32)})
    with pytest.raises(TypeError, match=message):
        one.compute_gradients(*batch(0))


def test_other_arguments_and_checkpoints_are_refused(tmp_path: Path) -> None:
    first = {"a": np.zeros((5, 2))}
    with pytest.raises(TypeError, match=r"state 'rngs\.key' is a key .* nnx\.reseed"):
        JaxModel(masked, first, state={"rngs": {"key": jax.random.key(0)}})
    with pytest.raises(TypeError, match=r"state 'z' must be an array of floats, .* got complex128"):
        JaxModel(masked, first, state={"z": 1j})
    with pytest.raises(ValueError, match="seed must be 0 or more, got -1"):
        JaxModel(masked, first, state={}, seed=-1)
    aux = JaxModel(lambda p, x, y: (jnp.mean(x @ p["a"]), 1.0), first)
    with pytest.raises(TypeError, match=r"got tuple\. .*state=first values"):
        aux.compute_gradients(*batch(0))
    with pytest.raises(ValueError, match=r"trains by its own loss, .* got MSE"):
        model(plain).compute_loss_and_gradients(*batch(0), ms.nn.MSE())
    JaxModel(masked, first, state={"n": np.zeros(2)}).save_model(tmp_path)
    for state in ({"n": np.zeros(3)}, {"m": np.zeros(2)}, {"n": np.zeros(2, int)}):
        with pytest.raises(CheckpointError, match=r"has state '.' as .*, and the model has it as"):
            JaxModel(masked, first, state=state).load_model(tmp_path)
    with pytest.raises(CheckpointError, match=r"'n' as .*, and the model has it as none"):
        JaxModel(masked, first).load_model(tmp_path)


@in_worlds(2)
def test_a_line_search_with_a_state_is_refused(backend: Any) -> None:
    one = JaxModel(masked, {"a": np.zeros((5, 2))}, state={"n": np.zeros(2)})
    sharded, _ = wrap(backend, "ddp", one)
    with pytest.raises(ValueError, match=r"a state that the loss returns .*without state="):
        ms.as_distributed(ms.optimizers.LBFGS(), backend, "ddp").bind(sharded)


def test_an_nnx_module_of_outside_is_explained() -> None:
    nnx = pytest.importorskip("flax.nnx")
    net = nnx.BatchNorm(5, rngs=nnx.Rngs(0))
    graph, parameters, rest = nnx.split(net, nnx.Param, ...)
    one = JaxModel(lambda p, x, y: nnx.merge(graph, p, rest)(x).mean(), parameters)
    assert [entry.name for entry in one.parameter_entries] == ["bias", "scale"]
    with pytest.raises(TypeError, match=r"made outside of it, .* nnx\.merge\(graph, .*copy=True"):
        one.compute_gradients(np.ones((4, 5), np.float32), np.ones(4))
