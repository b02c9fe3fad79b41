"""optax transformations as rules: updates of owned pieces equal those of one process, to 1e-12."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpishard as ms
from mpishard.adapters import OptaxRule
from mpishard.testing.worlds import in_worlds

jax = pytest.importorskip("jax", reason="JAX is not installed here; pip install 'mpishard[jax]'")
optax = pytest.importorskip("optax", reason="optax is not installed here; pip install optax")
jax.config.update("jax_enable_x64", True)
pytestmark = pytest.mark.filterwarnings("ignore:Specifying a key will be required")

RULES = {
    "momentum": lambda: optax.sgd(1e-2, 0.9, nesterov=True),
    "adamw": lambda: optax.chain(
        optax.zero_nans(), optax.clip(0.1), optax.adamw(optax.cosine_decay_schedule(1e-3, 10))
    ),
    "adagrad": lambda: optax.adagrad(1e-2),  # its state does not begin at 0
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(1e-2)),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
}
MADE: dict[str, OptaxRule] = {}


def rule(name: str) -> OptaxRule:
    """A rule holds no state, so that tests and thread-ranks may share one."""
    if name not in MADE:
        MADE[name] = OptaxRule(RULES[name]())
    return MADE[name]


def batch(step: int) -> tuple[Any, Any]:
    x = np.random.default_rng(step).standard_normal((9, 5))
    return x, np.sin(x[:, :2])


def part(backend: Any, step: int) -> tuple[Any, Any]:
    """Uneven, and none for the last of several ranks."""
    ends = [0, 5, 9, 9, 9] if backend.world_size > 1 else [0, 9]
    mine = slice(ends[backend.rank], ends[backend.rank + 1])
    return tuple(array[mine] for array in batch(step))


def net(seed: int = 0) -> ms.nn.MLP:
    return ms.nn.MLP([5, 7, 2], "tanh", seed=seed, dtype="float64")


def train_plainly(name: str, steps: int) -> Any:
    plain, transformation = net(), RULES[name]()
    theta = plain.get_parameters()
    state = transformation.init(theta)
    for step in range(steps):
        plain.set_parameters(theta)
        updates, state = transformation.update(plain.compute_gradients(*batch(step)), state, theta)
        theta = np.array(theta + updates)
    return theta


def wrap(backend: Any, made: OptaxRule, strategy: str = "fsdp") -> tuple[Any, Any]:
    config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=1)
    return (
        ms.as_distributed(net(backend.rank), config, strategy),
        ms.as_distributed(made, config, strategy),
    )


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
@pytest.mark.parametrize("name", RULES)
@in_worlds(1, 2, 3)
def test_updates_are_those_of_one_process(backend: Any, strategy: str, name: str) -> None:
    model, optimizer = wrap(backend, rule(name), strategy)
    for step in range(3):
        optimizer.step(model, *part(backend, step))
    found = model.gather_full_parameters()
    np.testing.assert_allclose(found, train_plainly(name, 3), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["adamw", "injected"])
def test_state_and_counts_go_to_other_worlds(name: str, tmp_path: Path) -> None:
    def main(backend: Any, steps: range) -> Any:
        model, optimizer = wrap(backend, rule(name))
        if steps.start:
            ms.checkpoint.load(tmp_path / str(steps.start), model, optimizer)
        for step in steps:
            optimizer.step(model, *part(backend, step))
        ms.checkpoint.save(tmp_path / str(steps.stop), model, optimizer)
        return model.gather_full_parameters()

    for world_size, steps in ((2, range(2)), (4, range(2, 3)), (1, range(3, 4))):
        found = ms.run_in_threads(world_size, main, steps)[0]
    np.testing.assert_allclose(found, train_plainly(name, 4), rtol=0, atol=1e-12)


@in_worlds(1, 3)
def test_clipping_and_options_are_the_rules_own(backend: Any) -> None:
    made = OptaxRule(
        optax.sgd(0.5), clip_global_norm=1e-3,
        parameter_options={
            "linear0.bias": {"frozen": True}, "linear1.*": {"learning_rate_scale": 0.1}
        },
    )  # fmt: skip
    model, optimizer = wrap(backend, made)
    optimizer.step(model, *part(backend, 0))
    plain = net()
    entries = {entry.name: entry for entry in plain.parameter_table.entries}
    gradient, scale = plain.compute_gradients(*batch(0)), np.full(plain.parameter_count, 0.5)
    frozen = slice(entries["linear0.bias"].start, entries["linear0.bias"].stop)
    gradient[frozen] = 0
    scale[entries["linear1.weight"].start :] = 0.05
    gradient *= 1e-3 / np.linalg.norm(gradient)
    expected = plain.get_parameters() - scale * gradient
    np.testing.assert_allclose(model.gather_full_parameters(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "make",
    [
        lambda: optax.chain(optax.adam(1e-3), optax.clip_by_global_norm(1.0)),
        lambda: optax.lamb(1e-3),
        lambda: optax.adafactor(1e-3),
        lambda: optax.adafactor(
            1e-3, multiply_by_parameter_scale=False, clipping_threshold=None
        ),
        lambda: optax.contrib.muon(1e-3),
        lambda: optax.apply_if_finite(optax.adam(1e-3), 3),
    ],
    ids=["clip", "lamb", "adafactor", "factored", "muon", "finite"],
)  # fmt: skip
def test_rules_of_more_than_one_element_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="looks at more than one element at a time"):
        OptaxRule(make())


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: optax.adam(1e-3, mu_dtype="bfloat16"), ValueError, r"state '0\.mu' is bfloat16"),
        (lambda: optax.masked(optax.adam(1e-3), {"a": True}), TypeError, "use parameter_options"),
        (
            lambda: optax.adamw(1e-3, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)),
            ValueError, r"weight_decay with a rule such as mpishard\.optimizers\.AdamW",
        ),
        (lambda: optax.lbfgs(), TypeError, "cannot be applied to one vector"),  # noqa: PLW0108
        (
            lambda: optax.add_noise(0.1, 0.5, 0), ValueError,
            r"draws random numbers, with the key in its state '\w*rng_key'",
        ),
        (lambda: optax.adam, TypeError, r"must be an optax\.GradientTransformation, .*function"),
    ],
    ids=["dtype", "masked", "decay mask", "search", "noise", "class"],
)  # fmt: skip
def test_other_objects_are_refused(make: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        OptaxRule(make())


@in_worlds(1, 2)
def test_a_state_of_a_dtype_of_its_own_must_be_that_of_the_parameters(backend: Any) -> None:
    """optax.MultiSteps adds gradients in float32 unless it is told otherwise."""

    def steps(dtype: str) -> Any:
        rule = optax.sgd(0.5, 0.0, accumulator_dtype=dtype)
        return optax.MultiSteps(rule, 2, accumulator_dtype=dtype)

    model, optimizer = wrap(backend, OptaxRule(steps("float32")))
    before = model.gather_full_parameters()
    with pytest.raises(ValueError, match="' is float32, and the parameters are float64"):
        optimizer.step(model, *part(backend, 0))
    backend.barrier()
    np.testing.assert_array_equal(model.gather_full_parameters(), before)
    model, optimizer = wrap(backend, OptaxRule(steps("float64")))
    for _ in range(2):
        optimizer.step(model, *part(backend, 0))
    expected = before - 0.5 * net().compute_gradients(*batch(0))
    np.testing.assert_allclose(model.gather_full_parameters(), expected, rtol=0, atol=1e-12)


def test_unsupported_members_of_optax_rules_raise_with_a_reason() -> None:
    for option in ("weight_decay", "learning_rate"):
        with pytest.raises(ValueError, match=f"{option} is the transformation's own"):
            OptaxRule(optax.sgd(1.0), parameter_options={"*.bias": {option: 0.1}})
    with pytest.raises(ValueError, match=r"clip_by_global_norm\(1\), and clip_global_norm is 2"):
        OptaxRule(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)), clip_global_norm=2)
    with pytest.raises(NotImplementedError, match="a sharded optimizer's step, in one process too"):
        rule("adamw").step(net(), *batch(0))

    def main(backend: Any) -> None:
        model, optimizer = wrap(backend, OptaxRule(optax.sgd(0.1 + backend.rank)))
        with pytest.raises(ValueError, match=r"with the same .* transformation is -0\.04"):
            optimizer.step(model, *part(backend, 0))

    ms.run_in_threads(2, main)
    with (
        ms.InMemoryCommunicationBackend(0, 1, "test_optax") as backend,
        pytest.raises(TypeError, match=r"optax transformation: wrap it in .*OptaxRule"),
    ):
        ms.as_distributed(optax.adam(1e-3), backend)
