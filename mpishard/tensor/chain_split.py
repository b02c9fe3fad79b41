"""The rules by which a chain of layers is split over the ranks of a tensor group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from mpishard.communication import CommunicationBackend
from mpishard.nn.layers.attention import Attention
from mpishard.nn.layers.composites import Residual, Sequential
from mpishard.nn.layers.dropout import Dropout
from mpishard.nn.layers.embedding import Embedding, PositionalEmbedding
from mpishard.nn.layers.layer import Layer
from mpishard.nn.layers.linear import Linear
from mpishard.nn.layers.normalization import LayerNorm, RMSNorm
from mpishard.sharding import Box
from mpishard.tensor.layer import DimSplit, TensorParallelLayer
from mpishard.tensor.linear import ColumnParallelLinear, RowParallelLinear
from mpishard.tensor.partition import (
    ACTIVATIONS,
    ATTENTIONS,
    LayerDecision,
    Segment,
    SegmentKind,
    SplitKind,
    Ties,
    find_segments,
)
from mpishard.tensor.regions import Framed, GatherSequence, ScatterSequence
from mpishard.tensor.sequence import (
    SequenceParallelDropout,
    SequenceParallelNorm,
    SequenceParallelPositionalEmbedding,
    TensorParallelDropout,
)
from mpishard.tensor.vocabulary import VocabularyParallelEmbedding

__all__ = ["ChainSplit", "Extent"]

# FLOPs that a rank should save for each element sent. A core multiplies some 1e11 numbers a second
# and shared memory moves some 1e9 of them.
_WORTHWHILE = 100


class Extent(Enum):
    """The positions of a sequence that an activation has."""

    ALL = "all"
    SLICE = "this rank's"


@dataclass(frozen=True, slots=True)
class _End:
    """The demands on a layer's output: its positions, and whether its last dim may stay split."""

    extent: Extent
    keeps_split: bool = False


class _Parts:
    """The layers of a chain as they come to be, each given the positions that it takes."""

    def __init__(self, backend: CommunicationBackend, extent: Extent) -> None:
        self.backend = backend
        self.layers: dict[str, Layer] = {}
        self.extent = extent

    def add(
        self, name: str, layer: Layer, takes: Extent | None = None, gives: Extent | None = None
    ) -> None:
        """Add a layer that takes and gives these positions: None if any will do, or none."""
        # Gathering or scattering stands in front of the layer that needs it, so that layers that
        # take any positions work on slices.
        if takes not in (None, self.extent):
            layer = Framed(layer, before=self._operator(takes))
        self.layers[name] = layer
        self.extent = gives or self.extent

    def end(self, extent: Extent) -> None:
        """Let the chain give these positions."""
        if extent is not self.extent:
            name, last = self.layers.popitem()
            self.layers[name] = Framed(last, after=self._operator(extent))

    def _operator(self, extent: Extent | None) -> GatherSequence | ScatterSequence:
        kind = GatherSequence if extent is Extent.ALL else ScatterSequence
        return kind(self.backend)


class ChainSplit:
    """The rules of `partition_chain`, with their decisions so far.

    Parameters
    ----------
    backend : CommunicationBackend
        The tensor group, of two ranks or more.
    ties : Ties
        Shared weights of the model.
    sequence_parallel : bool
        Whether activations between split layers are slices of the sequence.

    Attributes
    ----------
    boxes, decisions
        As in `TensorPartition`.
    """

    def __init__(self, backend: CommunicationBackend, ties: Ties, sequence_parallel: bool) -> None:
        self.backend = backend
        self.ties = ties
        self.sequence_parallel = sequence_parallel
        self.between = Extent.SLICE if sequence_parallel else Extent.ALL
        self.boxes: dict[str, tuple[Box, ...]] = {}
        self.decisions: list[LayerDecision] = []

    # ------------------------------------------------------------------------------------- chains

    def chain(
        self,
        layers: Mapping[str, Layer],
        prefix: str,
        *,
        starts: Extent,
        ends: Extent,
        keeps_split: bool = False,
    ) -> tuple[dict[str, Layer], bool]:
        """The parts of a chain, and whether its output is split.

        Parameters
        ----------
        layers : mapping of str to Layer
            The chain, with one layer or more.
        prefix : str
            Prefix of its names in the model, with the dot.
        starts, ends : Extent
            The positions of what enters and of what leaves it.
        keeps_split : bool
            Whether the output of a last linear layer is left split; ``ends`` is then ALL.
        """
        parts = _Parts(self.backend, starts)
        world_size, splits_output = self.backend.world_size, False
        last = list(layers)[-1]
        for segment in find_segments(
            layers, prefix, world_size, self.ties, keeps_split=keeps_split
        ):
            if segment.kind is SegmentKind.ALONE:
                name, layer = segment.layers[0]
                end = _End(ends, keeps_split) if name == last else _End(self.between)
                splits_output = self._alone(parts, prefix, name, layer, end)
            else:
                self._together(parts, prefix, segment)
        parts.end(ends)
        return parts.layers, splits_output

    def _together(self, parts: _Parts, prefix: str, segment: Segment) -> None:
        """Split two linear layers and the layers between them: each rank has a part of all."""
        (first_name, first), *between, (last_name, last) = segment.layers
        assert isinstance(first, Linear)
        assert isinstance(last, Linear)
        core = between[0][1] if segment.kind is SegmentKind.ATTENTION else None
        blocks: int | tuple[int, ...] = 2 if segment.kind is SegmentKind.GATED else 1
        multiple = run = 1
        if isinstance(core, Attention):
            # Heads of queries go where the keys and values are that they share.
            shared = core.heads // core.kv_heads
            blocks = (shared, 1, 1)
            multiple = max(1, first.outputs // (core.heads + 2 * core.kv_heads))
            run = shared * multiple
        # The inputs of the last layer are dealt in the same runs as the outputs of the first:
        # nothing is exchanged between them.
        split = DimSplit(last.inputs, self.backend.world_size, 1, run)
        share = split.local_size(0) / split.size  # the first rank has the most
        column = ColumnParallelLinear(
            self.backend, first.inputs, first.outputs, bias=first.bias,
            initializer=first.parameters["weight"].initializer,
            tied_to=first.parameters["weight"].tied_to, parts=blocks, multiple=multiple,
            sequence_parallel=self.sequence_parallel,
        )  # fmt: skip
        parts.add(first_name, column, self.between, Extent.ALL)
        self._note(
            prefix + first_name, column, SplitKind.COLUMN, share,
            f"{_sizes(first)} split by rows, {column.local_output_size} here; pairs with "
            f"{prefix}{last_name}",
        )  # fmt: skip
        for name, layer in between:
            parts.add(name, self._inner(prefix + name, layer, split, share))
        row = RowParallelLinear(
            self.backend, last.inputs, last.outputs, bias=last.bias,
            initializer=last.parameters["weight"].initializer, multiple=run,
            sequence_parallel=self.sequence_parallel,
        )  # fmt: skip
        parts.add(last_name, row, None, self.between)
        self._note(
            prefix + last_name, row, SplitKind.ROW, share,
            f"{_sizes(last)} split by columns, {row.local_input_size} here; sums what "
            f"{prefix}{first_name} began",
        )  # fmt: skip

    def _inner(self, path: str, layer: Layer, split: DimSplit, share: float) -> Layer:
        """Return a layer between a column and a row split, for this rank's features."""
        kind, here = type(layer).__name__, split.local_size(self.backend.rank)
        if isinstance(layer, Attention):
            # The model's own layer keeps all its heads, for the plain model that is given back.
            own = layer.copy()
            own.kv_heads = here // split.multiple
            own.heads = heads = own.kv_heads * (layer.heads // layer.kv_heads)
            reason = f"{kind} of {heads} of {layer.heads} heads here"
            self._note(path, own, SplitKind.HEADS, share, reason)
            return own
        reason = f"{kind} of {here} of {split.size} features here"
        self._note(path, layer, SplitKind.FEATURES, share, reason)
        if isinstance(layer, Dropout):
            return TensorParallelDropout(self.backend, layer, split.size, multiple=split.multiple)
        return layer

    # --------------------------------------------------------------------------------- one by one

    def _alone(self, parts: _Parts, prefix: str, name: str, layer: Layer, end: _End) -> bool:
        """Split a layer without partners; return True if its output stays split."""
        path, kind = prefix + name, type(layer)
        if kind is Residual:
            inner, _ = self.chain(
                layer.children, f"{path}.", starts=self.between, ends=self.between
            )
            parts.add(name, Residual(inner), self.between, self.between)
        elif kind is Sequential:
            inner, splits_output = self.chain(
                layer.children, f"{path}.", starts=parts.extent, ends=end.extent,
                keeps_split=end.keeps_split,
            )  # fmt: skip
            parts.add(name, Sequential(inner), None, end.extent)
            return splits_output
        elif type(layer) is Linear:
            return self._linear(parts, path, name, layer, end)
        elif type(layer) is Embedding:
            self._embedding(parts, path, name, layer)
        elif kind in ACTIVATIONS:
            is_sliced = parts.extent is Extent.SLICE
            self._decide_light(path, layer, is_sliced)
            parts.add(name, layer)
        elif kind in (Dropout, LayerNorm, RMSNorm, PositionalEmbedding):
            self._light(parts, path, name, layer)
        else:
            ranks = self.backend.world_size
            reason = f"no rule splits a {kind.__name__}"
            if isinstance(layer, Attention) and layer.kv_heads < ranks:
                heads = "heads" if layer.kv_heads == layer.heads else "heads of keys and values"
                reason = f"{layer.kv_heads} {heads} cannot be dealt to {ranks} ranks"
            elif kind in ATTENTIONS:
                reason = "it does not stand between two linear layers with weights of their own"
            self._whole(parts, path, name, layer, reason)
        return False

    def _linear(self, parts: _Parts, path: str, name: str, layer: Linear, end: _End) -> bool:
        """Split a linear layer by outputs: gathered, or left split at the model's end."""
        ranks = self.backend.world_size
        obstacle = self.ties.obstacle(path, layer)
        if obstacle is None and layer.outputs < ranks:
            obstacle = f"{layer.outputs} outputs cannot be dealt to {ranks} ranks"
        if obstacle is not None:
            self._whole(parts, path, name, layer, obstacle)
            return False
        weight = layer.parameters["weight"]
        takes_slices = self.sequence_parallel and end.extent is Extent.ALL
        column = ColumnParallelLinear(
            self.backend, layer.inputs, layer.outputs, not end.keeps_split, bias=layer.bias,
            initializer=weight.initializer, tied_to=weight.tied_to,
            sequence_parallel=takes_slices,
        )  # fmt: skip
        parts.add(name, column, self.between if takes_slices else Extent.ALL, Extent.ALL)
        if end.keeps_split:
            outcome = "its output stays split for the loss"
        else:
            # Of forward and backward, for each position: 6 I O FLOPs are dealt; O elements are
            # gathered and I are reduced, which sends each twice.
            worth = 6 * layer.inputs * layer.outputs / (layer.outputs + 2 * layer.inputs)
            verdict = "worth it" if worth >= _WORTHWHILE else "hardly worth it"
            outcome = (
                f"has no partner, so its output is gathered: {verdict}, {worth:.0f} FLOPs are "
                "saved for each element sent"
            )
        share = column.split.local_size(0) / layer.outputs
        self._note(
            path, column, SplitKind.COLUMN, share,
            f"{_sizes(layer)} split by rows, {column.local_output_size} here; {outcome}",
        )  # fmt: skip
        return end.keeps_split

    def _embedding(self, parts: _Parts, path: str, name: str, layer: Embedding) -> None:
        """Split an embedding by rows of its table."""
        rows, ranks = layer.vocabulary_size, self.backend.world_size
        obstacle = self.ties.obstacle(path, layer)
        if obstacle is None and rows < ranks:
            obstacle = f"{rows} rows cannot be dealt to {ranks} ranks"
        if obstacle is not None:
            self._whole(parts, path, name, layer, obstacle)
            return
        own = VocabularyParallelEmbedding(
            self.backend, rows, layer.width, layer.parameters["weight"].initializer,
            sequence_parallel=self.sequence_parallel,
        )  # fmt: skip
        parts.add(name, own, Extent.ALL, self.between)
        here = own.split.local_size(self.backend.rank)
        self._note(
            path, own, SplitKind.VOCABULARY, own.split.local_size(0) / rows,
            f"Embedding of {rows} x {layer.width} split by rows, {here} here",
        )  # fmt: skip

    def _light(self, parts: _Parts, path: str, name: str, layer: Layer) -> None:
        """Split a cheap layer along time, or leave it whole."""
        self._decide_light(path, layer, self.sequence_parallel)
        if not self.sequence_parallel:
            parts.add(name, layer)
            return
        own: Layer
        if isinstance(layer, Dropout):
            own = SequenceParallelDropout(self.backend, layer)
        elif isinstance(layer, PositionalEmbedding):
            own = SequenceParallelPositionalEmbedding(self.backend, layer)
        else:
            assert isinstance(layer, LayerNorm | RMSNorm)
            own = SequenceParallelNorm(self.backend, layer)
        parts.add(name, own, Extent.SLICE, Extent.SLICE)

    def _decide_light(self, path: str, layer: Layer, is_sliced: bool) -> None:
        kind, ranks = type(layer).__name__, self.backend.world_size
        if is_sliced:
            reason = f"{kind} of this rank's slice of the sequence"
            self._note(path, layer, SplitKind.POSITIONS, 1 / ranks, reason)
        else:
            reason = f"{kind} on every rank: it has little to compute"
            self._note(path, layer, SplitKind.WHOLE, 1.0, reason)

    def _whole(self, parts: _Parts, path: str, name: str, layer: Layer, reason: str) -> None:
        """Leave a layer whole: on every rank, on all positions."""
        reason = f"{type(layer).__name__} on every rank: {reason}"
        self._note(path, layer, SplitKind.WHOLE, 1.0, reason)
        parts.add(name, layer, Extent.ALL, Extent.ALL)

    # ------------------------------------------------------------------------------------ records

    def _note(self, path: str, layer: Layer, kind: SplitKind, share: float, reason: str) -> None:
        """Note a decision, and this rank's boxes of the layer's parameters if it splits them."""
        self.decisions.append(LayerDecision(path, kind, share, reason))
        if not isinstance(layer, TensorParallelLayer):
            return
        for name, spec in layer.whole_parameters.items():
            if layer.is_split(name):
                self.boxes[f"{path}.{name}"] = layer.boxes(name)
                if spec.tied_to is not None:
                    self.boxes[spec.tied_to] = layer.boxes(name)


def _sizes(layer: Linear) -> str:
    return f"Linear {layer.inputs} -> {layer.outputs}"
