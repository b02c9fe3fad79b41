"""Update rules of mpishard in a PyTorch loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpishard as ms
from mpishard.testing.worlds import in_worlds

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here; pip install 'mpishard[torch]'"
)
import torch_nets as nets  # noqa: E402

import mpishard.torch as mst  # noqa: E402

RULES = {
    "adamw": lambda: ms.optimizers.AdamW(
        1e-2, clip_global_norm=0.3, parameter_options={"*.bias": {"weight_decay": 0}}
    ),
    "lamb": lambda: ms.optimizers.LAMB(1e-2, clip_value=0.1),
    "cosine": lambda: ms.optimizers.SGD(ms.optimizers.Cosine(0.1, 9), momentum=0.9),
    "frozen": lambda: ms.optimizers.Adam(1e-2, parameter_options={"0.*": {"frozen": True}}),
}


def expected(rule: Any, steps: int) -> Any:
    """The rule's updates of whole parameters, in one process."""
    model = nets.make(nets.perceptron)
    parameters = dict(model.named_parameters())
    frozen = rule.checked_options.frozen_among(list(parameters))
    state: dict[str, Any] = {}
    for step in range(steps):
        model.zero_grad()
        nets.squared(model, *nets.batch("mlp")).backward()
        trained = {name: p for name, p in parameters.items() if name not in frozen}
        norm = float(torch.cat([p.grad.view(-1) for p in trained.values()]).norm())
        ranges = []
        for name, p in trained.items():
            flat, gradient = p.detach().view(-1).numpy(), p.grad.view(-1).numpy()
            zeros = np.zeros((len(rule.needed_state()), flat.size))
            own = state.setdefault(name, dict(zip(rule.needed_state(), zeros, strict=True)))
            segment = ms.optimizers.Segment(name, 0, flat.size)
            ranges.append(ms.optimizers.PieceViews(flat, gradient, own, (segment,)))
        rule.update_all(
            ranges,
            ms.optimizers.UpdateContext(step + 1, rule.rate_of_step(step), rule.clip_factor(norm)),
        )
    return model


def run(backend: Any, model: Any, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        nets.squared(model, *nets.mine(backend, nets.batch("mlp"))).backward()
        optimizer.step()


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
@in_worlds(1, 3)
def test_a_rule_updates_owned_parts(backend, name, strategy):
    mst.init()
    model = mst.shard(nets.make(nets.perceptron), strategy, minimum_unit_size=1)
    run(backend, model, mst.optimizer(RULES[name](), model), 4)
    assert nets.difference(model, expected(RULES[name](), 4).state_dict()) < 1e-13


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
@pytest.mark.parametrize(
    ("rule", "theirs"), [("Adam", torch.optim.Adam), ("AdamW", torch.optim.AdamW)]
)
@in_worlds(1, 3)
def test_rules_count_the_updates_of_each_parameter_as_pytorch(
    backend, strategy, rule, theirs, shared_path
):
    """Branches are used in some steps only, also after a checkpoint."""
    mst.init()
    x, _ = nets.batch("mlp")
    made = getattr(ms.optimizers, rule)
    model, expected = (nets.make(nets.Branches) for _ in range(2))
    mst.shard(model, strategy, minimum_unit_size=1)
    optimizer = mst.optimizer(made(1e-2, weight_decay=0.3), model)
    alone = theirs(expected.parameters(), lr=1e-2, weight_decay=0.3)
    for step, left in enumerate([True, False, False, True, False, True]):
        for m, o in ((model, optimizer), (expected, alone)):
            o.zero_grad()
            m(x, left=left).square().sum().backward()
            o.step()
        assert nets.difference(model, expected.state_dict()) < 1e-12
        if step == 2:
            mst.save(shared_path / "run", model, optimizer)
            model = mst.shard(nets.make(nets.Branches), "zero1", minimum_unit_size=1)
            optimizer = mst.optimizer(made(1e-2, weight_decay=0.3), model)
            mst.load(shared_path / "run", model, optimizer)


@pytest.mark.parametrize(("first", "then"), [("fsdp", "ddp"), ("ddp", "zero1")])
@in_worlds(2, 3)
def test_a_run_goes_on_from_a_checkpoint_and_from_a_state_dict(backend, shared_path, first, then):
    def start(strategy: str, rate: float = 1e-2) -> tuple[Any, Any, Any]:
        model = mst.shard(nets.make(nets.perceptron), strategy, minimum_unit_size=1)
        made = mst.optimizer(ms.optimizers.AdamW(rate), model)
        return model, made, torch.optim.lr_scheduler.StepLR(made, 2, 0.5)

    def go_on(model: Any, made: Any, scheduler: Any) -> None:
        for _ in range(3):
            run(backend, model, made, 1)
            scheduler.step()

    mst.init()
    whole = start(first)
    go_on(*whole)
    mst.save(shared_path / "run", *whole, step=3)
    saved, parameters = (
        whole[1].state_dict(),
        {n: t.clone() for n, t in whole[0].state_dict().items()},
    )
    go_on(*whole)
    assert whole[1].param_groups[0]["lr"] == 1e-2 / 8
    again = start(then, rate=7.0)  # the saved rate and number of updates win
    assert mst.load(shared_path / "run", *again)["step"] == 3
    go_on(*again)
    assert nets.difference(again[0], whole[0].state_dict()) < 1e-13
    other = start(then)
    other[0].load_state_dict(parameters)
    other[1].load_state_dict(saved)
    backend.barrier()
    run(backend, *other[:2], 1)
    assert other[1].param_groups[0]["steps"] == 4
    other = start(then)
    with pytest.raises(ms.errors.CheckpointError, match="AdamW"):
        mst.load(shared_path / "run", other[0], mst.optimizer(torch.optim.AdamW, other[0]))


@in_worlds(2)
def test_misuse_is_refused(backend):
    mst.init()
    model = mst.shard(nets.make(nets.perceptron), "fsdp")
    rules = ms.optimizers
    with pytest.raises(TypeError, match=r"betas: the settings of AdamW are given when it is made"):
        mst.optimizer(rules.AdamW(1e-3), model, betas=(0.9, 0.99))
    with pytest.raises(TypeError, match="LBFGS computes the loss several times"):
        mst.optimizer(rules.LBFGS(), model)
    with pytest.raises(ValueError, match=r"one group of parameters.*parameter_options"):
        mst.optimizer(rules.AdamW(1e-3), [{"params": [p]} for p in model.parameters()])
    with pytest.raises(ValueError, match="nothing"):
        mst.optimizer(rules.AdamW(1e-3, parameter_options={"nothing.*": {"frozen": True}}), model)
    with pytest.raises(TypeError, match="or a rule such as"):
        mst.optimizer(rules.AdamW, model)
    made = mst.optimizer(rules.AdamW(rules.Cosine(1e-3, 9)), model)
    torch.optim.lr_scheduler.StepLR(made, 2)
    nets.squared(model, *nets.mine(backend, nets.batch("mlp"))).backward()
    with pytest.raises(ValueError, match="is already a schedule"):
        made.step()
