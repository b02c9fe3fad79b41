"""Result of splitting a chain of layers over a tensor group, and the search for layers to split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum

from mpishard.nn import (
    GELU,
    Attention,
    CausalAttention,
    Dropout,
    Embedding,
    Layer,
    Linear,
    ReLU,
    Residual,
    Sequential,
    Sigmoid,
    SiLU,
    SwiGLU,
    Tanh,
)
from mpishard.sharding import Box


class SplitKind(StrEnum):
    """Dim along which a layer's computation is distributed over the ranks."""

    COLUMN = "column"
    """Outputs of a linear layer: rows of its weight. The literature calls it a column split."""
    ROW = "row"
    """Inputs of a linear layer: columns of its weight."""
    VOCABULARY = "vocabulary"
    """Rows of an embedding."""
    HEADS = "heads"
    """Attention heads."""
    FEATURES = "features"
    """Last dim of activations and dropout between a column and a row split."""
    POSITIONS = "positions"
    """Slices of the sequence."""
    WHOLE = "whole"
    """No dim: each rank computes the same."""


@dataclass(frozen=True, slots=True)
class LayerDecision:
    """Decision about a leaf layer.

    Parameters
    ----------
    name : str
        Dotted name of the layer in the model.
    kind : SplitKind
        Dim along which the layer is split.
    share : float
        Largest fraction of the layer's computation on one rank, in (0, 1]; 1 if it is whole.
    reason : str
        Description of the layer after the split, with sizes, and the reason.
    """

    name: str
    kind: SplitKind
    share: float
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


@dataclass(frozen=True, slots=True)
class TensorPartition:
    """Result of splitting a chain of layers.

    Parameters
    ----------
    layers : mapping of str to Layer
        The same names in the same order. Layers that could be split are this rank's part.
    boxes : mapping of str to tuple of Box
        Full name -> this rank's boxes, for each parameter that is split. If it is tied to another
        parameter, both names are included. All other parameters are whole on every rank, and have
        the same gradient there.
    splits_output : bool
        True if the output's last dim is only this rank's part, as
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
        """Line for each leaf layer, with its name, the decision, and the reason."""
        return tuple(str(decision) for decision in self.decisions)


def is_open(layer: Layer) -> bool:
    """True if the layer is a composite whose inner layers are split one by one.

    Subclasses may compute anything and are not.
    """
    # Exact types, because a subclass may do something else with its children.
    return type(layer) in (Residual, Sequential)


def walk_layers(layers: Mapping[str, Layer], prefix: str = "") -> Iterator[tuple[str, Layer]]:
    """Yield (dotted name, layer) of each layer that is not `is_open`, in order."""
    for name, layer in layers.items():
        if is_open(layer):
            yield from walk_layers(layer.children, f"{prefix}{name}.")
        else:
            yield prefix + name, layer


class Ties:
    """Tied parameters of a model.

    Parameters
    ----------
    model_layers : mapping of str to Layer
        All top-level layers of the model. The layers of one pipeline stage do not suffice, because
        a parameter may be tied to one of another stage.
    """

    def __init__(self, model_layers: Mapping[str, Layer]) -> None:
        self._owners: dict[str, tuple[str, Layer]] = {}
        self._users: dict[str, list[tuple[str, Layer]]] = {}
        for path, layer in walk_layers(model_layers):
            for name, spec in layer.walk_parameters(f"{path}."):
                self._owners[name] = path, layer
                if spec.tied_to is not None:
                    # By the owner's name: several layers may use one table.
                    self._users.setdefault(spec.tied_to, []).append((path, layer))

    def obstacle(self, path: str, layer: Layer) -> str | None:
        """Return the tie because of which the layer named ``path`` must stay whole, or None.

        An embedding, and linear layers that compute logits from its table, are all split by the
        same rows of the table. Other layers that share a weight need all of it.

        Raises
        ------
        ValueError
            If the layer is tied to a parameter that none of the model's layers has.
        """
        for name, spec in layer.parameters.items():
            target = spec.tied_to or f"{path}.{name}"
            # Neither tied nor used by another layer.
            if target not in self._users and spec.tied_to is None:
                continue
            if target not in self._owners:
                raise ValueError(
                    f"{path}.{name} is tied to {target}, which none of the layers given has: pass "
                    "model_layers, all layers of the model, if only a part of it is partitioned"
                )
            owner = self._owners[target]
            for other, sharer in [owner, *self._users[target]]:
                # Rows of an embedding and outputs of a linear layer are cut in the same way. Any
                # other pair of layers would need different slices of the weight.
                expected = Embedding if other == owner[0] else Linear
                if type(sharer) is not expected:
                    return (
                        f"it shares {target} with {other}, a {type(sharer).__name__}, and only an "
                        "Embedding and Linear layers tied to it are split alike"
                    )
        return None

    def is_shared(self, path: str, layer: Layer) -> bool:
        """True if the layer named ``path`` shares a parameter with another layer."""
        return any(
            spec.tied_to is not None or f"{path}.{name}" in self._users
            for name, spec in layer.parameters.items()
        )


ACTIVATIONS = (GELU, ReLU, SiLU, Sigmoid, Tanh)
"""Element-wise layers, which can work on any slice."""

ATTENTIONS = (Attention, CausalAttention)

# Layers that may stand between two linear layers that are split jointly.
_INNER = (*ACTIVATIONS, *ATTENTIONS, Dropout, SwiGLU)


class PatternKind(Enum):
    """Kinds of patterns."""

    ATTENTION = "a linear layer to queries, keys and values, attention, and a linear layer"
    PAIR = "two linear layers with element-wise layers between them"
    GATED = "a pair with a gated activation after the first layer, which halves its outputs"
    SINGLE = "one layer"


@dataclass(frozen=True, slots=True)
class LayerPattern:
    """Consecutive layers of a chain that are split jointly, or a single layer.

    Parameters
    ----------
    kind : PatternKind
        Kind of the pattern.
    layers : tuple of (str, Layer)
        Names in the chain, and the layers.
    """

    kind: PatternKind
    layers: tuple[tuple[str, Layer], ...]


def find_patterns(
    layers: Mapping[str, Layer], prefix: str, world_size: int, ties: Ties, *, keeps_split: bool
) -> Iterator[LayerPattern]:
    """Yield the patterns of a chain, found greedily from its first layer on.

    Only the exact types of layers are recognized, because a subclass may compute anything.

    Parameters
    ----------
    layers : mapping of str to Layer
        The chain.
    prefix : str
        Prefix of the layers' names in the model, with the dot.
    world_size : int
        Number of ranks, each of which needs at least one head or output.
    ties : Ties
        Tied parameters of the model.
    keeps_split : bool
        True if the chain's output may stay split. A last linear layer that is wider than its input
        is then a pattern of its own.
    """
    chain, start = tuple(layers.items()), 0
    while start < len(chain):
        kind, stop = PatternKind.SINGLE, start + 1
        if type(chain[start][1]) is Linear:
            end = start + 1
            # Greedy: a chain of linear layers alternates column and row splits, with one sum for
            # each pair.
            while end < len(chain) and type(chain[end][1]) in _INNER:
                end += 1
            last = chain[end][1] if end < len(chain) else None
            if type(last) is Linear:
                # A split output must come from a column split. In a pair the last layer would be a
                # row split, whose wide output is summed over the ranks.
                stays_alone = keeps_split and end == len(chain) - 1 and last.outputs > last.inputs
                found = (
                    None if stays_alone else _kind(chain[start : end + 1], prefix, world_size, ties)
                )
                if found is not None:
                    kind, stop = found, end + 1
        yield LayerPattern(kind, chain[start:stop])
        start = stop


def _kind(
    layers: tuple[tuple[str, Layer], ...], prefix: str, world_size: int, ties: Ties
) -> PatternKind | None:
    """Return the kind of pattern of two linear layers and those between them, or None."""
    (first_name, first), *between, (last_name, last) = layers
    assert isinstance(first, Linear)
    assert isinstance(last, Linear)
    # A shared weight can be split only by rows, and the last layer of a pattern by columns.
    if ties.is_shared(prefix + last_name, last):
        return None
    mixers = [layer for _, layer in between if isinstance(layer, Attention | SwiGLU)]
    if not mixers:
        # A layer with fewer outputs than ranks cannot be split, and its partner has nothing to sum.
        is_whole = ties.obstacle(prefix + first_name, first) is not None
        return None if is_whole or first.outputs < world_size else PatternKind.PAIR
    # The outputs of the first layer are then several blocks, each distributed over the ranks. A
    # shared table's rows are one block.
    # It must come first: an activation before it would see the blocks in another order.
    mixer = between[0][1]
    if mixers != [mixer] or ties.is_shared(prefix + first_name, first):
        return None
    if isinstance(mixer, Attention):
        # Heads of keys and values are never cut or repeated, so that each rank needs one of its
        # own.
        return PatternKind.ATTENTION if mixer.kv_heads >= world_size else None
    # Each rank needs an element of both halves.
    return PatternKind.GATED if first.outputs >= 2 * world_size else None
