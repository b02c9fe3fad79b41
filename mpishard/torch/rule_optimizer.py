"""An update rule of mpishard as an optimizer of PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mpishard.optimizers import Constant, Optimizer, OwnedRange, Segment, UpdateContext
from mpishard.torch.clipping import norm_of
from mpishard.torch.parameters import Part

__all__ = ["RuleOptimizer"]


class RuleOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """A rule that updates the parts of a model which this rank owns.

    Its one group has ``lr``, which schedulers of PyTorch set, and ``steps``, the number of
    updates. A rule with a schedule of its own sets ``lr`` itself. Options of single parameters
    are the rule's ``parameter_options``.

    Parameters
    ----------
    groups : list
        Tensors of parts, or one group of them.
    rule : Optimizer
        Of `mpishard.optimizers`.
    parts : mapping of int to Part
        The parts, by the id of their tensors.

    Raises
    ------
    ValueError
        For several groups or models, or options that match no parameter.
    TypeError
        For a rule that searches along a line.
    """

    def __init__(self, groups: Sequence[Any], rule: Optimizer, parts: Mapping[int, Part]) -> None:
        if rule.searches:
            raise TypeError(
                f"{type(rule).__name__} computes the loss several times a step; loops of PyTorch "
                "take rules that update once after a backward()"
            )
        if len({part.owner for part in parts.values()}) > 1:
            raise ValueError(f"{type(rule).__name__} updates one model; make one for each")
        self.rule = rule
        self._parts = parts
        super().__init__(groups, {"lr": rule.rate_of_step(0), "steps": 0, "numbers": {}})
        self._names = [part.entry.name for part in parts.values()]
        rule.checked_options.check_patterns(self._names)
        self._frozen = rule.checked_options.frozen_among(self._names)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take the one group."""
        if self.param_groups:
            raise ValueError(
                f"{type(self.rule).__name__} of mpishard has one group of parameters; options of "
                'some of them are given as parameter_options={"*.bias": {"weight_decay": 0}}'
            )
        super().add_param_group(param_group)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: None = None) -> None:
        """Update the parts that have a gradient. Collective."""
        rule, (group,) = self.rule, self.param_groups
        if not isinstance(rule.learning_rate, Constant):
            # Schedulers of PyTorch leave this key in the groups that they change.
            if "initial_lr" in group:
                raise ValueError(
                    f"the learning rate of {type(rule).__name__} is a schedule of its own, "
                    f"{rule.learning_rate!r}, and a scheduler of PyTorch would set it, too; give "
                    "the rule a number"
                )
            group["lr"] = rule.checked_rate(group["steps"])
        parts = [self._parts[id(tensor)] for tensor in group["params"]]
        owner = parts[0].owner
        trained = [
            part
            for part in parts
            if part.tensor.grad is not None and part.entry.name not in self._frozen
        ]
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
        ranges = [self._range(part) for part in trained]  # of empty parts, too: all have state
        rule.update_all([owned for owned in ranges if owned.parameters.size], context)
        group["steps"] += 1

    def _range(self, part: Part) -> OwnedRange:
        state = self.state[part.tensor]
        for name in self.rule.needed_state():
            if name not in state:
                state[name] = torch.zeros_like(part.tensor)
        return OwnedRange(
            _flat(part.tensor),
            _flat(part.tensor.grad),
            {name: _flat(vector) for name, vector in state.items()},
            (Segment(part.entry.name, 0, part.stop - part.start),),
        )


def _flat(tensor: Any) -> np.ndarray[Any, Any]:
    """The elements of a contiguous tensor, in its memory."""
    values: np.ndarray[Any, Any] = tensor.detach().reshape(-1).numpy()
    return values
