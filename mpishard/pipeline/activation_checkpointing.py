"""Activation checkpointing: the activations that backward computes again instead of keeping.

The activations saved for backward are most of a deep model's memory. A *segment* of consecutive
layers may keep its input alone; when backward comes to it, its forward is run again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from mpishard.base import as_flag, as_integer
from mpishard.contracts import LayerInfo


class RecomputeStrategy(StrEnum):
    """The parts that backward computes again.

    FULL cuts the chain of layers into segments that each keep their input alone: Chen et al.,
    "Training deep nets with sublinear memory cost", 2016 (arXiv:1604.06174), section 4.1. With
    segments of sqrt(L) of L layers, memory grows with sqrt(L), for one more forward pass.

    SELECTIVE computes single layers again, those that free most bytes for the least work:
    Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022
    (arXiv:2205.05198), section 5. In the paper these are the scores of attention, which
    `nn.Attention` never keeps; here layers are chosen by their estimates.

    NONE keeps everything.
    """

    SELECTIVE = "selective"
    FULL = "full"
    NONE = "none"

    # As the mirrored hierarchy spells them.
    Selective = SELECTIVE
    Full = FULL


@dataclass(frozen=True, slots=True)
class ActivationCheckpointConfig:
    """The choice of activations that a model keeps, and of those that it computes again.

    Results have the same bits: dropout depends on the sample, not on the call. If parameters are
    sharded, those of a segment are gathered once more. If layers are split over the tensor axis,
    the collectives of their forward are made once more.

    Parameters
    ----------
    enabled : bool
        Whether anything is computed again.
    checkpoint_every_n_layers : int or "sqrt"
        FULL: n, the number of top-level layers of a segment; the last may have fewer. ``"sqrt"`` is
        the root of the number of layers that a rank has in a row, rounded up. SELECTIVE ignores it.
    recompute_strategy : RecomputeStrategy, optional
        The parts that are computed again; None stands for FULL.
    max_activations_in_memory : int
        A limit; 0 for none. FULL: the most segments that keep their input, for each micro-batch;
        segments are made longer to meet it. SELECTIVE: the most layers that could be computed again
        and are kept instead.
    checkpoint_first_layer : bool
        Whether the model's first layer may be computed again; if not, its activations are kept.

    Raises
    ------
    TypeError
        For an argument of another type.
    ValueError
        For fewer than one layer, a negative limit or an unknown strategy.

    Examples
    --------
    >>> config = ActivationCheckpointConfig(enabled=True, checkpoint_every_n_layers="sqrt")
    >>> config.strategy
    <RecomputeStrategy.FULL: 'full'>
    >>> import mpishard as ms
    >>> layers = ms.nn.MLP([8] * 6).get_all_layer_info()
    >>> len(layers), config.segments(layers, itemsize=8, keeps_last=True)
    (9, (range(0, 3), range(3, 6)))
    """

    enabled: bool = False
    checkpoint_every_n_layers: int | Literal["sqrt"] = 10
    recompute_strategy: RecomputeStrategy | None = None
    max_activations_in_memory: int = 0
    checkpoint_first_layer: bool = True

    def __post_init__(self) -> None:
        as_flag("enabled", self.enabled)
        as_flag("checkpoint_first_layer", self.checkpoint_first_layer)
        every = self.checkpoint_every_n_layers
        if every != "sqrt" and as_integer("checkpoint_every_n_layers", every) < 1:
            raise ValueError(f"checkpoint_every_n_layers must be 1 or more, or 'sqrt'; got {every}")
        limit = self.max_activations_in_memory
        if as_integer("max_activations_in_memory", limit) < 0:
            raise ValueError(f"max_activations_in_memory must be 0 (no limit) or more, got {limit}")
        # A string is accepted, too, because configurations are read from JSON and command lines.
        if self.recompute_strategy is not None:
            try:
                strategy = RecomputeStrategy(self.recompute_strategy)
            except ValueError:
                known = ", ".join(strategy.value for strategy in RecomputeStrategy)
                raise ValueError(
                    f"unknown recompute_strategy {self.recompute_strategy!r}; there are {known}"
                ) from None
            object.__setattr__(self, "recompute_strategy", strategy)

    @property
    def strategy(self) -> RecomputeStrategy:
        """The strategy in effect: NONE unless enabled, FULL by default."""
        if not self.enabled:
            return RecomputeStrategy.NONE
        return self.recompute_strategy or RecomputeStrategy.FULL

    def segments(
        self, layers: Sequence[LayerInfo], itemsize: int, *, keeps_last: bool
    ) -> tuple[range, ...]:
        """Return the segments of layers that are computed again, as ranges of ``index``, in order.

        Parameters
        ----------
        layers : sequence of LayerInfo
            Layers that a rank computes in a row.
        itemsize : int
            Bytes of an element of the layers' outputs.
        keeps_last : bool
            Whether backward follows forward at once. The last segment is then kept, because
            computing it again would save nothing.
        """
        if self.strategy is RecomputeStrategy.NONE or not layers:
            return ()
        if self.strategy is RecomputeStrategy.FULL:
            # Segments have one length, because a pass needs memory for the longest and all inputs.
            first, stop = layers[0].index, layers[-1].index + 1
            if not self._may_recompute(layers[0]):
                # The first layer's activations are kept, so that segments begin after it.
                first += 1
            every = self.checkpoint_every_n_layers
            length = math.isqrt(len(layers) - 1) + 1 if every == "sqrt" else int(every)
            if self.max_activations_in_memory:
                length = max(length, math.ceil((stop - first) / self.max_activations_in_memory))
            segments = [range(i, min(i + length, stop)) for i in range(first, stop, length)]
        else:
            segments = self._cheap_layers(layers, itemsize)
        # `keeps_last` is about a segment that reaches the end. SELECTIVE may have none there.
        is_last = segments and segments[-1].stop == layers[-1].index + 1
        return tuple(segments[:-1] if keeps_last and is_last else segments)

    def _cheap_layers(self, layers: Sequence[LayerInfo], itemsize: int) -> list[range]:
        """Return layers whose work per freed byte is at most the mean of all that free any.

        A layer saves about its input and the outputs of layers inside it; the next layer saves its
        output. A layer that is computed again keeps only its input.
        """
        inside = {
            info.index: info.estimated_activation_memory - itemsize * math.prod(info.output_shape)
            for info in layers
            if self._may_recompute(info)
        }
        # Layers that free nothing would only cost time.
        freed = {index: nbytes for index, nbytes in inside.items() if nbytes > 0}
        flops = {info.index: info.estimated_flops for info in layers if info.index in freed}
        all_flops, all_freed = sum(flops.values()), sum(freed.values())
        cheapest = sorted(freed, key=lambda index: flops[index] / freed[index])
        # Products of integers instead of quotients, so that every rank chooses the same layers.
        count = sum(flops[i] * all_freed <= all_flops * freed[i] for i in freed)
        if self.max_activations_in_memory:
            # More layers than the mean suggests, if the limit asks for it.
            count = max(count, len(cheapest) - self.max_activations_in_memory)
        return [range(index, index + 1) for index in sorted(cheapest[:count])]

    def _may_recompute(self, info: LayerInfo) -> bool:
        # By the index in the model: other stages of a pipeline have no first layer.
        return info.index > 0 or self.checkpoint_first_layer
