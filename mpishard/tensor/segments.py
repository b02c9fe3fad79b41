"""Runs of consecutive layers that are split together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from mpishard.nn.activations import GELU, ReLU, Sigmoid, SiLU, Tanh
from mpishard.nn.attention import Attention, CausalAttention
from mpishard.nn.dropout import Dropout
from mpishard.nn.gated import SwiGLU
from mpishard.nn.layer import Layer
from mpishard.nn.linear import Linear
from mpishard.tensor.ties import Ties

__all__ = ["ACTIVATIONS", "ATTENTIONS", "Segment", "SegmentKind", "find_segments"]

ACTIVATIONS = (GELU, ReLU, SiLU, Sigmoid, Tanh)
"""What works element by element, and so on any slice."""

ATTENTIONS = (Attention, CausalAttention)


class SegmentKind(Enum):
    """What a segment is."""

    ATTENTION = "a linear layer to queries, keys and values, attention, and one behind it"
    PAIR = "two linear layers with what works element by element between them"
    GATED = "the same with a gated activation behind the first, which halves its outputs"
    ALONE = "one layer"


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive layers of a chain that are split together, or one that stands alone.

    Parameters
    ----------
    kind : SegmentKind
        What they are.
    layers : tuple of (str, Layer)
        Names in the chain, and the layers.
    """

    kind: SegmentKind
    layers: tuple[tuple[str, Layer], ...]


def find_segments(
    layers: Mapping[str, Layer], prefix: str, world_size: int, ties: Ties, *, keeps_split: bool
) -> Iterator[Segment]:
    """The segments of a chain, greedily from its first layer on.

    Layers count by their exact type: a subclass may compute anything. With ``keeps_split`` a last
    linear layer that is wider than its input stays alone, for its output is left split.

    Parameters
    ----------
    layers : mapping of str to Layer
        The chain.
    prefix : str
        What stands before its names in the model, with the dot.
    world_size : int
        Ranks, each of which needs a head or an output.
    ties : Ties
        Which weights are shared.
    keeps_split : bool
        Whether the chain's output may stay split.
    """
    chain = tuple(layers.items())
    start = 0
    while start < len(chain):
        kind, stop = SegmentKind.ALONE, start + 1
        end = _end_of_run(chain, start)
        if end is not None and not (keeps_split and _widens(chain, end)):
            found = _Run(chain[start : end + 1], prefix, world_size, ties).kind()
            if found is not None:
                kind, stop = found, end + 1
        yield Segment(kind, chain[start:stop])
        start = stop


def _end_of_run(chain: tuple[tuple[str, Layer], ...], start: int) -> int | None:
    """Where the next linear layer is, with nothing before it but what can be split like both."""
    if type(chain[start][1]) is not Linear:
        return None
    for i in range(start + 1, len(chain)):
        kind = type(chain[i][1])
        if kind is Linear:
            return i
        if kind not in (*ACTIVATIONS, *ATTENTIONS, Dropout, SwiGLU):
            return None
    return None


def _widens(chain: tuple[tuple[str, Layer], ...], index: int) -> bool:
    layer = chain[index][1]
    return index == len(chain) - 1 and isinstance(layer, Linear) and layer.outputs > layer.inputs


class _Run:
    """Two linear layers and what stands between them."""

    def __init__(
        self, layers: tuple[tuple[str, Layer], ...], prefix: str, world_size: int, ties: Ties
    ) -> None:
        self.layers = layers
        self.prefix = prefix
        self.world_size = world_size
        self.ties = ties

    def kind(self) -> SegmentKind | None:
        """What they can be split as; None where they cannot be split together."""
        (first_name, first), *between, (last_name, last) = self.layers
        assert isinstance(first, Linear)
        assert isinstance(last, Linear)
        # A shared weight is split by rows, which the second of a pair is not.
        if self.ties.is_shared(self.prefix + last_name, last):
            return None
        mixers = [layer for _, layer in between if isinstance(layer, Attention | SwiGLU)]
        if not mixers:
            is_whole = self.ties.obstacle(self.prefix + first_name, first) is not None
            too_few = first.outputs < self.world_size
            return None if is_whole or too_few else SegmentKind.PAIR
        # The outputs of the first are then blocks of which each is dealt: not a table's rows.
        mixer = between[0][1]
        if mixers != [mixer] or self.ties.is_shared(self.prefix + first_name, first):
            return None
        if isinstance(mixer, Attention):
            return SegmentKind.ATTENTION if mixer.heads >= self.world_size else None
        return SegmentKind.GATED if first.outputs >= 2 * self.world_size else None
