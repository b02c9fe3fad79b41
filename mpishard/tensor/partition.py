"""A chain of layers as one rank of a tensor group computes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum

from mpishard.nn.layers.activations import GELU, ReLU, Sigmoid, SiLU, SwiGLU, Tanh
from mpishard.nn.layers.attention import Attention, CausalAttention
from mpishard.nn.layers.composites import Residual, Sequential
from mpishard.nn.layers.dropout import Dropout
from mpishard.nn.layers.embedding import Embedding
from mpishard.nn.layers.layer import Layer
from mpishard.nn.layers.linear import Linear
from mpishard.sharding import Box


class SplitKind(StrEnum):
    """The dim along which a layer's computation is dealt to the ranks."""

    COLUMN = "column"
    """Outputs of a linear layer: rows of its weight, in the literature's words a column split."""
    ROW = "row"
    """Inputs of a linear layer: columns of its weight."""
    VOCABULARY = "vocabulary"
    """Rows of an embedding."""
    HEADS = "heads"
    """Attention heads."""
    FEATURES = "features"
    """The last dim, between a column and a row split: activations and dropout."""
    POSITIONS = "positions"
    """Slices of the sequence."""
    WHOLE = "whole"
    """Not at all: each rank computes the same."""


@dataclass(frozen=True, slots=True)
class LayerDecision:
    """The decision about a leaf layer.

    Parameters
    ----------
    name : str
        Its dotted name in the model.
    kind : SplitKind
        Dim along which it is split.
    share : float
        The largest part of its computation that one rank has, in (0, 1]; 1 if it is whole.
    reason : str
        The layer as it is now, with sizes, and the reason.
    """

    name: str
    kind: SplitKind
    share: float
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


@dataclass(frozen=True, slots=True)
class TensorPartition:
    """The result of splitting a chain of layers.

    Parameters
    ----------
    layers : mapping of str to Layer
        The same names in the same order; layers that could be split are this rank's part.
    boxes : mapping of str to tuple of Box
        Full parameter name -> what this rank holds of it, for those that are split; of one that
        is tied to another, both names. All others are whole on every rank, and have the same
        gradient there.
    splits_output : bool
        Whether the chain's output has this rank's part alone of its last dim, as
        ``ShardLayout(size, world_size)`` cuts it.
    decisions : tuple of LayerDecision
        Decision about each leaf layer, with its reason, in the chain's order.
    """

    layers: Mapping[str, Layer]
    boxes: Mapping[str, tuple[Box, ...]]
    splits_output: bool
    decisions: tuple[LayerDecision, ...]

    @property
    def log(self) -> tuple[str, ...]:
        """A line for each leaf layer: its name, the decision, and the reason."""
        return tuple(str(decision) for decision in self.decisions)


def is_open(layer: Layer) -> bool:
    """True if the rules know the composite's computation, and look into it."""
    return type(layer) in (Residual, Sequential)


def walk_layers(layers: Mapping[str, Layer], prefix: str = "") -> Iterator[tuple[str, Layer]]:
    """Yield (dotted name, layer) of all that the rules do not go into, in order."""
    for name, layer in layers.items():
        if is_open(layer):
            yield from walk_layers(layer.children, f"{prefix}{name}.")
        else:
            yield prefix + name, layer


class Ties:
    """The ties of a model; a pipeline stage may hold one end of them alone.

    Parameters
    ----------
    model_layers : mapping of str to Layer
        All top-level layers of the model.
    """

    def __init__(self, model_layers: Mapping[str, Layer]) -> None:
        self._owners: dict[str, tuple[str, Layer]] = {}
        self._users: dict[str, list[tuple[str, Layer]]] = {}
        for path, layer in walk_layers(model_layers):
            for name, spec in layer.walk_parameters(f"{path}."):
                self._owners[name] = path, layer
                if spec.tied_to is not None:
                    self._users.setdefault(spec.tied_to, []).append((path, layer))

    def obstacle(self, path: str, layer: Layer) -> str | None:
        """Reason for which the layer called ``path`` must stay whole, if it is a tie.

        An embedding and the linear layers that read logits from its table are split by rows of
        the table, all alike. Whatever else shares a weight needs all of it.

        Raises
        ------
        ValueError
            If the layer is tied to a parameter that none of the model's layers has.
        """
        for name, spec in layer.parameters.items():
            target = spec.tied_to or f"{path}.{name}"
            if target not in self._users and spec.tied_to is None:
                continue
            if target not in self._owners:
                raise ValueError(
                    f"{path}.{name} is tied to {target}, which none of the layers given has: pass "
                    "model_layers, all layers of the model, where a part of it is partitioned"
                )
            owner = self._owners[target]
            for other, sharer in [owner, *self._users[target]]:
                # The rows of a table are dealt as the outputs of a linear layer are: only these two
                # agree.
                expected = Embedding if other == owner[0] else Linear
                if type(sharer) is not expected:
                    return (
                        f"it shares {target} with {other}, a {type(sharer).__name__}, and only an "
                        "Embedding and Linear layers tied to it are split alike"
                    )
        return None

    def is_shared(self, path: str, layer: Layer) -> bool:
        """True if another layer has a parameter of this one, or this one another's."""
        return any(
            spec.tied_to is not None or f"{path}.{name}" in self._users
            for name, spec in layer.parameters.items()
        )


ACTIVATIONS = (GELU, ReLU, SiLU, Sigmoid, Tanh)
"""What works element by element, and so on any slice."""

ATTENTIONS = (Attention, CausalAttention)

_INNER = (*ACTIVATIONS, *ATTENTIONS, Dropout, SwiGLU)  # which a pair of linear layers may enclose


class SegmentKind(Enum):
    """The kinds of segments."""

    ATTENTION = "a linear layer to queries, keys and values, attention, and one behind it"
    PAIR = "two linear layers with element-wise layers between them"
    GATED = "the same with a gated activation behind the first, which halves its outputs"
    ALONE = "one layer"


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive layers of a chain that are split together, or one that stands alone.

    Parameters
    ----------
    kind : SegmentKind
        Kind of the segment.
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
        Prefix of its names in the model, with the dot.
    world_size : int
        Ranks, each of which needs a head or an output.
    ties : Ties
        Weights that layers share.
    keeps_split : bool
        Whether the chain's output may stay split.
    """
    chain, start = tuple(layers.items()), 0
    while start < len(chain):
        kind, stop = SegmentKind.ALONE, start + 1
        if type(chain[start][1]) is Linear:
            end = start + 1
            while end < len(chain) and type(chain[end][1]) in _INNER:
                end += 1
            last = chain[end][1] if end < len(chain) else None
            if type(last) is Linear:
                # Logits of a model with a split output stay split, and a pair would sum them up on
                # every rank.
                stays_alone = keeps_split and end == len(chain) - 1 and last.outputs > last.inputs
                found = (
                    None if stays_alone else _kind(chain[start : end + 1], prefix, world_size, ties)
                )
                if found is not None:
                    kind, stop = found, end + 1
        yield Segment(kind, chain[start:stop])
        start = stop


def _kind(
    layers: tuple[tuple[str, Layer], ...], prefix: str, world_size: int, ties: Ties
) -> SegmentKind | None:
    """The segment that two linear layers and those between them make; None if they make none."""
    (first_name, first), *between, (last_name, last) = layers
    assert isinstance(first, Linear)
    assert isinstance(last, Linear)
    # A shared weight is split by rows, which the second of a pair is not.
    if ties.is_shared(prefix + last_name, last):
        return None
    mixers = [layer for _, layer in between if isinstance(layer, Attention | SwiGLU)]
    if not mixers:
        is_whole = ties.obstacle(prefix + first_name, first) is not None
        return None if is_whole or first.outputs < world_size else SegmentKind.PAIR
    # The outputs of the first are then blocks of which each is dealt: not a table's rows.
    mixer = between[0][1]
    if mixers != [mixer] or ties.is_shared(prefix + first_name, first):
        return None
    if isinstance(mixer, Attention):
        return SegmentKind.ATTENTION if mixer.kv_heads >= world_size else None
    return SegmentKind.GATED if first.outputs >= 2 * world_size else None
