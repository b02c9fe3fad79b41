"""Losses written in JAX: sharded training is that of one process, to 1e-12 in float64."""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import mpishard as ms
from mpishard.adapters import JaxModel
from mpishard.base import settings
from mpishard.errors import MissingMemberError, NonFiniteLossError, PeerError, StructureOnlyError
from mpishard.testing.gradients import check_gradients
from mpishard.testing.worlds import in_worlds

jax = pytest.importorskip("jax", reason="JAX is not installed here; pip install 'mpishard[jax]'")
jax.config.update("jax_enable_x64", True)
jnp = jax.numpy
ravel_pytree = pytest.importorskip("jax.flatten_util").ravel_pytree

RATE = 1e-3
STEPS = 3

by_path = pytest.mark.parametrize("path", ["arena", "messages", "two nodes"], indirect=True)
by_strategy = pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])


class Scale(NamedTuple):
    gain: Any
    offset: Any


def network(parameters: Any, x: Any) -> Any:
    for layer in parameters["layers"]:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return parameters["scale"].gain * x + parameters["scale"].offset


def loss(parameters: Any, x: Any, y: Any) -> Any:
    return jnp.mean((network(parameters, x) - y) ** 2)


def tree(seed: int, dtype: Any = np.float64) -> Any:
    def normal(*shape: int) -> Any:
        return jnp.asarray(0.5 * generator.standard_normal(shape), dtype)

    generator = np.random.default_rng(seed)
    layers = [{"kernel": normal(a, b), "bias": normal(b)} for a, b in ((5, 7), (7, 2))]
    return {"scale": Scale(1.25, normal(2)), "layers": layers, "absent": None, "unused": normal(3)}


def model(seed: int = 0) -> JaxModel:
    return JaxModel(loss, tree(seed), predict=network)


ENDS = [0, 4, 6, 9, 10]  # of each rank's samples: of one shape, because XLA compiles for each


def batch(step: int) -> tuple[Any, Any]:
    x = np.random.default_rng(step).standard_normal((10, 5))
    return x, np.sin(x[:, :2])


def part(backend: Any, step: int) -> tuple[Any, Any]:
    """A rank's samples: uneven, and none for one rank, another one at each step."""
    rank, size = backend.rank, backend.world_size
    is_empty = size > 1 and step % size == rank
    return tuple(a[ENDS[rank] : ENDS[rank + (not is_empty)]] for a in batch(step))


@functools.cache
def train_plainly(world_size: int) -> tuple[list[float], list[Any]]:
    """Losses before each step and parameters after it, by JAX alone with AdamW by hand."""
    flat, unravel = ravel_pytree(tree(0))
    theta = np.array(flat)
    m, v = np.zeros_like(theta), np.zeros_like(theta)
    losses, parameters = [], []
    for step in range(1, STEPS + 1):
        counts = np.diff(ENDS[: world_size + 1])
        counts[(step - 1) % world_size] *= world_size == 1
        rows = np.concatenate([np.arange(a, a + n) for a, n in zip(ENDS, counts, strict=False)])
        weights = np.isin(np.arange(10), rows) / len(rows)
        value, g = weighted(unravel)(theta, *batch(step - 1), weights)
        g = np.asarray(g)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        change = (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
        decay = np.where(np.isin(np.arange(theta.size), BIASES), 0.0, 0.1)
        theta = np.array(theta - RATE * change - RATE * decay * theta)
        losses.append(float(value))
        parameters.append(theta)
    return losses, parameters


@functools.cache
def weighted(unravel: Any) -> Any:
    """Loss, and its gradient, of samples that have weights."""
    return jax.jit(
        jax.value_and_grad(
            lambda t, x, y, weights: weights @ jnp.mean((network(unravel(t), x) - y) ** 2, axis=1)
        )
    )


BIASES = [*range(7), *range(42, 44)]  # keys are sorted: a layer's bias comes first


def adamw() -> Any:
    return ms.optimizers.AdamW(
        RATE, weight_decay=0.1, parameter_options={"layers.*.bias": {"weight_decay": 0}}
    )


def wrap(backend: Any, strategy: str, plain: Any = None) -> tuple[Any, Any]:
    """Model and optimizer; each rank's plain model has values of its own: rank 0's count."""
    config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=1)
    plain = model(backend.rank) if plain is None else plain
    return ms.as_distributed(plain, config, strategy), ms.as_distributed(adamw(), config, strategy)


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------------ the tree


def test_names_shapes_and_order_follow_jax() -> None:
    plain = model()
    assert [(e.name, e.shape, e.start) for e in plain.parameter_entries] == [
        ("layers.0.bias", (7,), 0),
        ("layers.0.kernel", (5, 7), 7),
        ("layers.1.bias", (2,), 42),
        ("layers.1.kernel", (7, 2), 44),
        ("scale.gain", (), 58),
        ("scale.offset", (2,), 59),
        ("unused", (3,), 61),
    ]
    flat = ravel_pytree(tree(0))[0]
    assert np.array_equal(plain.get_parameters(), flat)
    found = plain.parameters_tree(2 * plain.get_parameters())
    assert isinstance(found["scale"], Scale)
    assert (found["scale"].gain, found["absent"]) == (2.5, None)
    assert np.array_equal(found["unused"], 2 * tree(0)["unused"])


def test_modules_of_other_libraries_have_readable_names() -> None:
    linen = pytest.importorskip("flax.linen")
    x, key = np.ones((2, 3)), jax.random.key(0)
    dense = linen.Dense(4)
    plain = JaxModel(lambda p, x, y: dense.apply(p, x).mean(), dense.init(key, x))
    assert [e.name for e in plain.parameter_entries] == ["params.bias", "params.kernel"]

    equinox = pytest.importorskip("equinox")
    module = equinox.nn.MLP(3, 2, 4, 1, key=key)
    with pytest.raises(TypeError, match=r"'activation' must be .*got .*equinox\.partition"):
        JaxModel(loss, module)
    trained, rest = equinox.partition(module, equinox.is_inexact_array)

    def of_module(p: Any, x: Any, y: Any) -> Any:
        return jnp.mean(jax.vmap(equinox.combine(p, rest))(x) - y)

    plain = JaxModel(of_module, trained)
    assert [e.name for e in plain.parameter_entries] == [
        "layers.0.weight",
        "layers.0.bias",
        "layers.1.weight",
        "layers.1.bias",
    ]
    assert plain.compute_gradients(x, np.ones((2, 2))).any()
    assert isinstance(plain.parameters_tree(), equinox.nn.MLP)

    haiku = pytest.importorskip("haiku")

    def linear(x: Any) -> Any:
        return haiku.Linear(4)(x)

    transformed = haiku.without_apply_rng(haiku.transform(linear))
    plain = JaxModel(lambda p, x, y: transformed.apply(p, x).mean(), transformed.init(key, x))
    assert [e.name for e in plain.parameter_entries] == ["linear.b", "linear.w"]


def test_dtype_is_that_of_the_arrays() -> None:
    plain = JaxModel(loss, tree(0, np.float32))
    value, gradient = plain.compute_loss_and_gradients(*batch(0))
    assert plain.dtype == gradient.dtype == np.float32
    np.testing.assert_allclose(gradient, model().compute_gradients(*batch(0)), atol=1e-5)
    assert isinstance(value, float)
    assert JaxModel(loss, [0.5]).dtype == np.float64
    with jax.enable_x64(False):
        assert JaxModel(loss, [0.5]).dtype == np.float32
        with pytest.raises(ValueError, match=r"JAX would compute in float32: .*jax_enable_x64"):
            JaxModel(loss, [np.ones(3)])


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"a": {"n": jnp.arange(3)}}, TypeError, r"'a\.n' must be a float32 or .*got int64"),
        ({"a": 3}, TypeError, "'a' must be a float32 or float64 array, got int"),
        ({"a": jnp.ones(2, jnp.bfloat16)}, TypeError, "'a' .* got bfloat16"),
        ({"a": jax.random.key(0)}, TypeError, "'a' must be a float32 or float64 array, got key"),
        ({"a": None}, ValueError, "no array in the parameters"),
        ([np.ones(2), np.ones(2, np.float32)], ValueError, "one dtype: 0 is float64, 1 is float32"),
        ({"a": np.ones((2, 0))}, ValueError, r"'a' of shape \(2, 0\) has no elements"),
        ({"a.b": np.ones(1), "a": {"b": np.ones(1)}}, ValueError, "the name 'a.b'"),
    ],
)
def test_other_leaves_are_refused_by_name(given: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        JaxModel(loss, given)


def test_other_functions_and_batches_are_refused() -> None:
    x, y = batch(0)
    for arguments in ((1, tree(0)), (loss, tree(0), 1)):
        with pytest.raises(TypeError, match=r"must be (loss|predict)\(parameters, x.*, got int"):
            JaxModel(*arguments)
    for value in (lambda p, x, y: x, lambda p, x, y: (1.0, 2.0), lambda p, x, y: 3):
        with pytest.raises(TypeError, match="must return one float, the mean over samples; got"):
            JaxModel(value, tree(0)).compute_gradients(x, y)
    with pytest.raises(TypeError, match="x must be one array of samples, got dict"):
        model().compute_gradients({"x": x}, y)
    with pytest.raises(MissingMemberError, match="this JaxModel was made without predict"):
        JaxModel(loss, tree(0)).predict(x)


# ----------------------------------------------------------------------------------- gradients


def test_gradients_against_differences() -> None:
    errors = check_gradients(model(), *batch(1), samples=None)
    assert max(errors.values()) < 1e-8
    assert not model().parameters_tree(model().compute_gradients(*batch(1)))["unused"].any()


def test_another_loss_is_differentiated_through_predict() -> None:
    x, y = batch(0)
    expected, gradient = model().compute_loss_and_gradients(x, y)
    value, found = model().compute_loss_and_gradients(x, y, ms.nn.MSE())
    close(value, expected)
    close(found, gradient)
    assert model().predict(x).flags.writeable


def test_a_jitted_loss_and_jax_arrays_will_do() -> None:
    x, y = batch(0)
    plain = JaxModel(jax.jit(loss), tree(0))
    close(plain.compute_gradients(jnp.asarray(x), jnp.asarray(y)), model().compute_gradients(x, y))


# ------------------------------------------------------------------------------------ training


@by_path
@by_strategy
@in_worlds(1, 2, 3, 4)
def test_training_equals_one_process(backend: Any, strategy: str, path: str) -> None:
    losses, parameters = train_plainly(backend.world_size)
    sharded, optimizer = wrap(backend, strategy)
    for step in range(STEPS):
        close(optimizer.step(sharded, *part(backend, step)), losses[step])
        close(sharded.gather_full_parameters(), parameters[step])


@in_worlds(2, 3)
def test_loss_gradient_and_predictions_of_all_ranks(backend: Any) -> None:
    sharded, _ = wrap(backend, "fsdp")
    x, y = batch(0)
    mine = slice(0, 10) if backend.rank == 1 else slice(0)
    expected, gradient = model().compute_loss_and_gradients(x, y)
    close(sharded.evaluate(x[mine], y[mine]), (expected, 10))
    found, full = sharded.loss_and_gradients(x[mine], y[mine])
    close(found, expected)
    close(full, gradient)
    close(sharded.predict(x), network(tree(0), x))
    with sharded.unsharded(0) as plain:
        if plain is not None:
            close(plain.predict(x), network(tree(0), x))


@in_worlds(1, 2, 3)
def test_optimize_saves_and_resumes(backend: Any, shared_path: Path) -> None:
    def run(steps: int, **options: Any) -> Any:
        sharded, optimizer = wrap(backend, "fsdp")
        x, y = (np.tile(array, (3, 1)) for array in batch(7))
        data = ms.OptimizationInputData(
            model=sharded,
            x_train=x,
            y_train=y,
            batch_size=6,
            max_steps=steps,
            progress=False,
            **options,
        )
        optimizer.optimize(data)
        return sharded

    whole = run(4).gather_full_parameters()
    run(2, checkpoint=shared_path / "run")
    resumed = run(4, checkpoint=shared_path / "run")
    close(resumed.gather_full_parameters(), whole)
    resumed.save_model(shared_path / "model")
    names = [entry.name for entry in model().parameter_entries]
    if backend.rank == 0:
        assert [*ms.checkpoint.load_arrays(shared_path / "model")] == names
        plain = model(9)
        plain.load_model(shared_path / "model")
        close(plain.get_parameters(), whole)
    backend.barrier()


@in_worlds(2)
def test_the_plain_model_gives_its_parameters_up_and_gets_them_back(backend: Any) -> None:
    plain = model()
    sharded, optimizer = wrap(backend, "fsdp", plain)
    with pytest.raises(StructureOnlyError, match="JaxModel are held by a FSDPModel"):
        plain.get_parameters()
    optimizer.step(sharded, *part(backend, 0))
    assert sharded.release() is plain
    close(plain.get_parameters(), train_plainly(2)[1][0])
    copied = plain.deep_copy()
    copied.train(*batch(0))
    close(plain.get_parameters(), train_plainly(2)[1][0])


@in_worlds(2, 3)
def test_a_loss_that_is_not_finite_names_its_rank(backend: Any) -> None:
    sharded, optimizer = wrap(backend, "fsdp")
    before = sharded.gather_full_parameters()
    x, y = (array.copy() for array in batch(0))
    if backend.rank == 1:
        x[0] = np.nan
    with pytest.raises(NonFiniteLossError, match=r"loss of ranks \[1\] is not finite"):
        optimizer.step(sharded, x, y)
    assert np.array_equal(sharded.gather_full_parameters(), before)


def test_an_error_in_a_loss_ends_all_ranks_and_names_its_own() -> None:
    def main(backend: Any) -> None:
        def odd(parameters: Any, x: Any, y: Any) -> Any:
            if backend.rank == 1:
                raise KeyError("no such column")
            return loss(parameters, x, y)

        sharded, optimizer = wrap(backend, "fsdp", JaxModel(odd, tree(0)))
        if backend.rank == 1:
            optimizer.step(sharded, *batch(0))
        with pytest.raises(PeerError, match=r"rank 1.*no such column"):
            optimizer.step(sharded, *batch(0))

    with pytest.raises(KeyError, match="no such column"):
        ms.run_in_threads(3, main)


# --------------------------------------------------------------------------- memory and threads


def place(plain: JaxModel, arrays: list[np.ndarray]) -> None:
    ms.run_in_threads(1, lambda backend: plain.place_parameters(arrays, "a test", backend))


def test_aligned_parameters_are_read_in_place() -> None:
    """A loss reads one number of 32 MB: a copy would take a hundred times as long."""
    vector = np.zeros((1 << 23) + 32, np.float32)
    start = -vector.ctypes.data % 64 // 4
    plain = JaxModel(lambda p, x, y: p[0] * jnp.mean(x), np.zeros(1 << 23, np.float32))
    times = []
    for first in (start, start + 1):
        place(plain, [vector[first : first + (1 << 23)]])
        plain.own_loss(np.ones(1), np.ones(1))
        taken = []
        for value in range(1, 6):
            vector[first] = value
            began = time.perf_counter()
            assert plain.own_loss(np.ones(1), np.ones(1)) == (value, 1.0), "it sees each change"
            taken.append(time.perf_counter() - began)
        times.append(min(taken))
    assert times[0] < times[1] / 4


def test_too_many_xla_threads_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = model()
    plain.compute_gradients(*batch(0))
    for allowed in (None, 1000, 0):
        assert not caplog.messages
        monkeypatch.setattr(settings, "xla_threads", lambda allowed=allowed: allowed)
        place(plain, [np.zeros(e.size) for e in plain.parameter_entries])
    (message,) = caplog.messages
    assert "and 0 would be enough: JAX made its first array before mpishard.init()" in message


PROGRAM = """
import mpishard as ms
import jax, jax.numpy as jnp, numpy as np
from pathlib import Path

jax.config.update("jax_enable_x64", True)

def loss(p, x, y):
    return jnp.mean((jnp.tanh(x @ p["kernel"] + p["bias"]) - y) ** 2)

def factory(seed):
    generator = np.random.default_rng(seed)
    kernel, x, y = (generator.standard_normal(shape) for shape in ((40, 2), (90, 40), (90, 2)))
    return ms.adapters.JaxModel(loss, {"kernel": kernel, "bias": np.zeros(2)}), x, y

if __name__ == "__main__":
    backend = ms.init()
    plain, x, y = factory(0)
    ms.as_distributed(plain, backend, "fsdp").train(x, y)
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    assert names.count("tf_XLAEigen\\n") <= max(1, int(backend.cores_per_rank)), names
"""


@pytest.mark.spawned
@pytest.mark.parametrize("command", [["run", "-n", "2"], ["verify", "--steps", "1"]])
def test_jax_models_on_mpi_ranks(command: list[str], tmp_path: Path) -> None:
    """Ranks have as many threads as cores, with no warning; `verify` finds them equal to one."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    target = f"{program}:factory" if command[0] == "verify" else str(program)
    ended = subprocess.run(
        [sys.executable, "-m", "mpishard", *command, target],
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "XLA has" not in ended.stderr
    assert command[0] == "run" or "EQUAL" in ended.stdout
