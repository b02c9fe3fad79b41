"""Options of optimizers, with the defaults of the documented hierarchy."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from mpishard.base import as_amount, as_count, take_plain_fields
from mpishard.optimizers import Exponential

if TYPE_CHECKING:
    from mpishard.training import OptimizationInputData


@dataclass(frozen=True, kw_only=True)
class OptimizationAlgorithmOptions:
    """Settings and length of training of an optimizer that is made by ``from_options``.

    The defaults are those of the documented hierarchy. They hold only here: an optimizer that is
    made without such options neither clips, decays nor stops unless its arguments say so.

    Parameters
    ----------
    max_iterations : int
        Updates after which training ends at the latest.
    use_early_stopping : bool
        End training when the score no longer improves.
    early_stopping_patience : int
        Number of evaluations without improvement after which it ends.
    tolerance : float
        Least improvement that counts, in units of the score.
    initial_learning_rate, learning_rate_decay, min_learning_rate, max_learning_rate : float
        Update k, from 0, has the rate ``initial_learning_rate * learning_rate_decay**k``, or the
        nearest between the least and the greatest.
    enable_gradient_clipping : bool
        Clip gradients by their global norm.
    max_gradient_norm : float
        The norm above which they are clipped.

    Raises
    ------
    ValueError
        For a number outside its range.
    """

    max_iterations: int = 100
    use_early_stopping: bool = True
    early_stopping_patience: int = 10
    tolerance: float = 1e-6
    initial_learning_rate: float = 0.01
    learning_rate_decay: float = 0.99
    min_learning_rate: float = 1e-6
    max_learning_rate: float = 1.0
    enable_gradient_clipping: bool = True
    max_gradient_norm: float = 1.0

    def __post_init__(self) -> None:
        take_plain_fields(self)
        for name in ("max_iterations", "early_stopping_patience"):
            as_count(name, getattr(self, name))
        as_amount("tolerance", self.tolerance)
        if not self.max_gradient_norm > 0:
            raise ValueError(f"max_gradient_norm must be above 0, got {self.max_gradient_norm}")
        self.schedule()

    def schedule(self) -> Exponential:
        """Return the learning rate as a function of the update."""
        return Exponential(
            self.initial_learning_rate,
            self.learning_rate_decay,
            self.min_learning_rate,
            self.max_learning_rate,
        )

    def applied(self, data: OptimizationInputData) -> OptimizationInputData:
        """Return the data with an end of training, unless they name an earlier one."""
        steps = self.max_iterations
        steps = steps if data.max_steps is None else min(steps, data.max_steps)
        if self.use_early_stopping and data.patience is None:
            return replace(
                data,
                max_steps=steps,
                patience=self.early_stopping_patience,
                tolerance=self.tolerance,
            )
        return replace(data, max_steps=steps)

    def rule_settings(self) -> dict[str, Any]:
        """Return the options that an update rule takes, by the names of its arguments."""
        # Fields that a subclass adds are named as the settings of its rule.
        common = {field.name for field in fields(OptimizationAlgorithmOptions)}
        return {
            "learning_rate": self.schedule(),
            "clip_global_norm": self.max_gradient_norm if self.enable_gradient_clipping else None,
            **{f.name: getattr(self, f.name) for f in fields(self) if f.name not in common},
        }


@dataclass(frozen=True, kw_only=True)
class AdamOptimizerOptions(OptimizationAlgorithmOptions):
    """`OptimizationAlgorithmOptions` for `Adam`, `AdamW` and `LAMB`.

    Parameters
    ----------
    beta1, beta2, epsilon : float
        See `Adam`.
    """

    initial_learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
