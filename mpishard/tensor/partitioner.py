"""From a chain of layers to one rank's part of it: the rules by which a tensor group splits it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from mpishard.arguments import require_type
from mpishard.communication import CommunicationBackend
from mpishard.nn.layers.attention import Attention
from mpishard.nn.layers.composites import Residual, Sequential
from mpishard.nn.layers.convolution import Conv2D, Flatten, MaxPool2D
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
    TensorPartition,
    Ties,
    find_segments,
    is_open,
    walk_layers,
)
from mpishard.tensor.regions import Framed, GatherSequence, ScatterSequence
from mpishard.tensor.sequence import (
    SequenceParallelDropout,
    SequenceParallelNorm,
    SequenceParallelPositionalEmbedding,
    TensorParallelDropout,
)
from mpishard.tensor.vocabulary import VocabularyParallelEmbedding

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


def partition_chain(
    layers: Mapping[str, Layer],
    backend: CommunicationBackend,
    *,
    model_layers: Mapping[str, Layer] | None = None,
    sequence_parallel: bool = False,
    split_output: bool = False,
) -> TensorPartition:
    """Split a chain of layers over the ranks of a tensor group.

    Every rank calls it with the same chain; nothing is sent. Layers count by their exact type, for
    a subclass may compute anything:

    * an `Embedding`, by rows of its table;
    * a `Linear`, an `Attention` core and a `Linear`, by heads, with `Dropout` behind the core;
    * two `Linear` with activations or `Dropout` between them, the first by outputs (a *column*
      split), the second by inputs (a *row* split), greedily from the chain's start;
    * likewise with a `SwiGLU` right behind the first, whose two halves are dealt alike;
    * any other `Linear` by outputs, which are gathered;
    * the layers in a `Residual` or `Sequential` likewise, as a separate chain;
    * everything else is whole on every rank, and each computes the same.

    Sizes need not divide: widths and heads are dealt as `ShardLayout` deals them. Of a layer with
    fewer outputs, rows or heads than there are ranks, each rank has all.

    What enters and leaves the chain is whole on every rank. With ``sequence_parallel`` it is this
    rank's slice of dim 1 instead, except for what enters the model's first layer or is integer,
    and for what leaves the model's last layer, all of which have all positions. Norms, dropout
    and positional embeddings work on slices; what no rule splits is given the whole sequence.

    Parameters
    ----------
    layers : mapping of str to Layer
        Consecutive top-level layers of a model.
    backend : CommunicationBackend
        The tensor group.
    model_layers : mapping of str to Layer, optional
        All top-level layers of the model, in order; ``layers`` if not given. Says which chain
        begins and which ends the model, and what tied weights are.
    sequence_parallel : bool
        Whether activations between the split layers are slices of the sequence: Korthikanti et
        al., "Reducing activation recomputation in large transformer models", 2022
        (arXiv:2205.05198). Parameters are the same with and without.
    split_output : bool
        Whether the output of the model, which the chain ends, may stay split along the last dim,
        for a loss that takes it so. A last `Linear` that is wider than its input, or has no
        partner, is then not gathered.

    Returns
    -------
    TensorPartition
        The same names in the same order.

    Raises
    ------
    TypeError
        For no backend, or what is no layer.
    ValueError
        With ``sequence_parallel`` for layers of images, whose dim 1 is no sequence; with
        ``split_output`` for a chain that does not end the model; for a layer that is tied to one
        not given.
    """
    require_type("backend", backend, CommunicationBackend)
    for name, layer in layers.items():
        require_type(name, layer, Layer)
    if backend.world_size == 1:
        decisions = tuple(
            LayerDecision(path, SplitKind.WHOLE, 1.0, f"{type(layer).__name__} on the one rank")
            for path, layer in walk_layers(layers)
        )
        return TensorPartition(dict(layers), {}, splits_output=False, decisions=decisions)
    if sequence_parallel:
        _check_images(layers)
    # A stage behind the model's last layer has none, and hands on what it is given.
    if not layers:
        return TensorPartition({}, {}, splits_output=False, decisions=())
    names, model_names = list(layers), list(model_layers or layers)
    is_last = names[-1] == model_names[-1]
    if split_output and not is_last:
        raise ValueError(
            f"split_output is for the model's last layer, {model_names[-1]}, and this chain ends "
            f"with {names[-1]}"
        )
    split = ChainSplit(backend, Ties(model_layers or layers), sequence_parallel)
    enters_whole = names[0] == model_names[0] or layers[names[0]].takes_integers
    parts, splits_output = split.chain(
        layers, "", starts=Extent.ALL if enters_whole else split.between,
        ends=Extent.ALL if is_last else split.between, keeps_split=split_output,
    )  # fmt: skip
    return TensorPartition(parts, split.boxes, splits_output, tuple(split.decisions))


def _check_images(layers: Mapping[str, Layer]) -> None:
    kinds = (Conv2D, MaxPool2D, Flatten)
    images = [(path, layer) for path, layer in walk_layers(layers) if isinstance(layer, kinds)]
    for path, layer in images:
        raise ValueError(
            f"sequence parallelism cuts activations along time, dim 1, which {path}, a "
            f"{type(layer).__name__}, takes for something else: partition this model without "
            "sequence_parallel"
        )


def check_sequence(layers: Mapping[str, Layer], input_shape: tuple[int, ...]) -> None:
    """Refuse a model whose activations are no sequences, before sequence parallelism cuts them.

    Parameters
    ----------
    layers : mapping of str to Layer
        All top-level layers.
    input_shape : tuple of int
        Shape of one sample: (T,) of tokens, or (T, ...).

    Raises
    ------
    ValueError
        Naming the first layer whose input has no time dim, or another length than the one before.
    """
    _check_images(layers)
    shape, time = tuple(input_shape), input_shape[:1]
    for name, layer in layers.items():
        # Samples of token numbers have time alone, others time and width.
        least = 1 if layer.takes_integers else 2
        if len(shape) < least or shape[:1] != time:
            raise ValueError(
                f"sequence parallelism needs samples of shape (time, ...) throughout, and {name} "
                f"takes samples of shape {shape}: partition this model without sequence_parallel"
            )
        shape = layer.output_shape(shape)


class TensorParallelLayerPartitioner:
    """`partition_chain`, and figures of the result.

    Parameters
    ----------
    backend : CommunicationBackend
        The tensor group.
    sequence_parallel : bool
        See `partition_chain`.

    Raises
    ------
    TypeError
        For no backend.
    """

    def __init__(self, backend: CommunicationBackend, *, sequence_parallel: bool = False) -> None:
        require_type("backend", backend, CommunicationBackend)
        self.backend = backend
        self.sequence_parallel = sequence_parallel
        self._layers: Mapping[str, Layer] = {}
        self._partition = TensorPartition({}, {}, splits_output=False, decisions=())

    def partition(
        self,
        layers: Mapping[str, Layer],
        *,
        model_layers: Mapping[str, Layer] | None = None,
        split_output: bool = False,
    ) -> TensorPartition:
        """Split a chain; the figures below are then of it. Parameters are `partition_chain`'s."""
        self._partition = partition_chain(
            layers, self.backend, model_layers=model_layers,
            sequence_parallel=self.sequence_parallel, split_output=split_output,
        )  # fmt: skip
        self._layers = dict(layers)
        return self._partition

    @property
    def log(self) -> tuple[str, ...]:
        """The decision about each layer of the last chain, and its reason."""
        return self._partition.log

    @property
    def counts(self) -> Mapping[SplitKind, int]:
        """Number of its layers by the kind of split; `SplitKind.WHOLE` counts the others."""
        counted = Counter(decision.kind for decision in self._partition.decisions)
        return {kind: counted[kind] for kind in SplitKind}

    def split_share(self, input_shape: tuple[int, ...]) -> float:
        """The part of the chain's FLOPs that is dealt to the ranks, in [0, 1].

        Parameters
        ----------
        input_shape : tuple of int
            Shape of one whole sample that enters the chain.
        """
        flops = list(self._flops(input_shape))
        split = sum(count for count, share in flops if share < 1)
        return split / max(1, sum(count for count, _ in flops))

    def estimated_speedup(self, input_shape: tuple[int, ...]) -> float:
        """One rank's FLOPs for the whole chain over those of the rank that has most to do.

        An upper bound: what the ranks send takes time, too. Amdahl, "Validity of the single
        processor approach", AFIPS 1967.
        """
        flops = list(self._flops(input_shape))
        # The first rank has the larger part of every layer whose size does not divide.
        busiest = sum(count * share for count, share in flops)
        return sum(count for count, _ in flops) / busiest if busiest else 1.0

    def _flops(self, input_shape: tuple[int, ...]) -> Iterator[tuple[int, float]]:
        """FLOPs of each layer for one sample, with the largest share that a rank has of them."""
        shares = {decision.name: decision.share for decision in self._partition.decisions}

        def walk(
            layers: Mapping[str, Layer], prefix: str, shape: tuple[int, ...]
        ) -> Iterator[tuple[int, float]]:
            for name, layer in layers.items():
                if is_open(layer):
                    yield from walk(layer.children, f"{prefix}{name}.", shape)
                else:
                    yield layer.estimated_flops(shape), shares[prefix + name]
                shape = layer.output_shape(shape)

        yield from walk(self._layers, "", input_shape)
