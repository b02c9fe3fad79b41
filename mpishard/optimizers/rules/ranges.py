"""What an update rule is called with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mpishard.arrays import Array
from mpishard.optimizers.rules.options import Segment

__all__ = ["OwnedRange", "UpdateContext"]


@dataclass(frozen=True, slots=True)
class UpdateContext:
    """What an update may depend on beside its own range.

    ``step`` counts updates from 1. ``gradient_scale`` turns the given gradient, a sum over
    samples, into the clipped mean: ``clip / weight``. ``sum_over_owners`` adds a small vector up
    over all ranks that own a part of the parameters, which every one of them calls; where each
    rank owns all, it gives back what it gets. ``parameter_names`` are all the model's, in one
    order on all ranks, so that such a vector can have a place for each; without them each rank
    owns all. With ``gradient_leaves`` a name stands once for each of its cells, in order, and each
    place gets the sum of the whole parameter, whatever the number of ranks.
    """

    step: int
    learning_rate: float
    gradient_scale: float
    sum_over_owners: Callable[[Array], Array] = lambda vector: vector
    parameter_names: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class OwnedRange:
    """What a rule gets of one owned piece: 1-D views of one length, and what they are part of.

    ``gradients`` may be read-only. ``state`` has one view per name of `Optimizer.needed_state`;
    ``segments`` say which parameters the range cuts through.
    """

    parameters: Array
    gradients: Array
    state: Mapping[str, Array]
    segments: Sequence[Segment]
