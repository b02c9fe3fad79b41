"""An optimizer of PyTorch that updates a rank's parts by a rule of mpishard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mpishard.base import Array
from mpishard.optimizers import (
    Constant,
    Optimizer,
    PieceViews,
    Segment,
    UpdateContext,
    count_missed,
    missed_by,
)
from mpishard.torch.clipping import norm_of
from mpishard.torch.parameters import OwnedParameter, StateDict


class RuleOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """Optimizer that updates this rank's parts of a model by a rule of mpishard.

    Its only group has ``lr``, which schedulers of PyTorch set, and ``steps``, the number of
    updates. A rule with a schedule of its own sets ``lr`` itself. Options of single parameters
    are the rule's ``parameter_options``.

    Parameters
    ----------
    groups : list
        Tensors of parts, or one group of them.
    rule : Optimizer
        Rule of `mpishard.optimizers`.
    parts : mapping of int to OwnedParameter
        The parts, by the id of their tensors.

    Raises
    ------
    ValueError
        If there are several groups or models, or options match no parameter.
    TypeError
        If the rule searches along a line.
    """

    def __init__(
        self, groups: Sequence[Any], rule: Optimizer, parts: Mapping[int, OwnedParameter]
    ) -> None:
        if rule.searches:
            raise TypeError(
                f"{type(rule).__name__} computes the loss several times a step; loops of PyTorch "
                "take rules that update once after a backward()"
            )
        # A rule's clipping and count of steps are those of one model.
        if len({part.owner for part in parts.values()}) > 1:
            raise ValueError(f"{type(rule).__name__} updates one model; make one for each")
        self.rule = rule
        self._parts = parts
        super().__init__(groups, {"lr": rule.rate_of_step(0), "steps": 0, "numbers": {}})
        self._names = [part.entry.name for part in parts.values()]
        rule.checked_options.check_patterns(self._names)
        self._frozen = rule.checked_options.frozen_among(self._names)

    def add_param_group(self, param_group: StateDict) -> None:
        """Add the only group, and refuse a second one."""
        if self.param_groups:
            raise ValueError(
                f"{type(self.rule).__name__} of mpishard has one group of parameters; give options "
                'of single parameters as parameter_options={"*.bias": {"weight_decay": 0}}'
            )
        super().add_param_group(param_group)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parts that have a gradient, and return the closure's loss. Collective."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rule, (group,) = self.rule, self.param_groups
        if not isinstance(rule.learning_rate, Constant):
            # A group has the key "initial_lr" if a scheduler of PyTorch changes it.
            if "initial_lr" in group:
                raise ValueError(
                    f"the learning rate of {type(rule).__name__} is already a schedule, "
                    f"{rule.learning_rate!r}; give the rule a number if a scheduler of PyTorch "
                    "sets its rate"
                )
            group["lr"] = rule.checked_rate(group["steps"])
        parts = [self._parts[id(tensor)] for tensor in group["params"]]
        owner = parts[0].owner
        parts = [part for part in parts if part.entry.name not in self._frozen]
        trained = [part for part in parts if part.tensor.grad is not None]
        scale = 1.0
        if rule.clip_global_norm is not None:
            scale = rule.clip_factor(norm_of(trained))
        context = UpdateContext(
            step=group["steps"] + 1,
            learning_rate=float(group["lr"]),
            gradient_scale=scale,
            sum_over_owners=owner.backend.all_reduce if owner.shards_state else lambda rows: rows,
            parameter_names=self._names,
            numbers=group["numbers"],
        )
        # Empty parts get a state, too, so that all ranks save the same kinds of arrays.
        ranges = [self._range(part) for part in trained]
        rule.update_all([owned for owned in ranges if owned.parameters.size], context)
        unused = [part.entry.name for part in parts if part.tensor.grad is None]
        count_missed(unused, group["numbers"])
        group["steps"] += 1
        return loss

    def _range(self, part: OwnedParameter) -> PieceViews:
        state = self.state[part.tensor]
        for name in self.rule.needed_state():
            if name not in state:
                state[name] = torch.zeros_like(part.tensor)
        return PieceViews(
            _flat(part.tensor),
            _flat(part.tensor.grad),
            {name: _flat(vector) for name, vector in state.items()},
            (Segment(part.entry.name, 0, part.stop - part.start),),
            missed_by(part.entry.name, self.param_groups[0]["numbers"]),
        )


def _flat(tensor: torch.Tensor) -> Array:
    """Return the elements of a contiguous tensor as a vector in the same memory."""
    values: Array = tensor.detach().reshape(-1).numpy()
    return values
