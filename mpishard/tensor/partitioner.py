"""Rules by which a tensor group splits a chain of layers, and each rank's part of the chain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum

from mpishard.base import as_flag, require_type
from mpishard.communication import CommunicationBackend
from mpishard.nn import (
    Attention,
    Conv2D,
    Dropout,
    Embedding,
    Flatten,
    Layer,
    LayerNorm,
    Linear,
    MaxPool2D,
    PositionalEmbedding,
    Residual,
    RMSNorm,
    Sequential,
)
from mpishard.sharding import Box
from mpishard.tensor.layer import DimSplit, TensorParallelLayer
from mpishard.tensor.linear import ColumnParallelLinear, RowParallelLinear
from mpishard.tensor.partition import (
    ACTIVATIONS,
    ATTENTIONS,
    LayerDecision,
    LayerPattern,
    PatternKind,
    SplitKind,
    TensorPartition,
    Ties,
    find_patterns,
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

# Minimum FLOPs to save for each element sent. A core computes about 1e11 FLOPs per second, and
# shared memory moves about 1e9 elements per second.
_WORTHWHILE = 100


class Extent(Enum):
    """Positions of a sequence that an activation has."""

    ALL = "all"
    SLICE = "this rank's"


_SLICED: Mapping[type[Layer], Callable[..., Layer]] = {
    Dropout: SequenceParallelDropout,
    LayerNorm: SequenceParallelNorm,
    PositionalEmbedding: SequenceParallelPositionalEmbedding,
    RMSNorm: SequenceParallelNorm,
}
"""Layers with little computation, and those that do it on a slice of the sequence."""


class _RankChain:
    """A rank's chain under construction, with operators where layers need other positions."""

    def __init__(self, backend: CommunicationBackend, extent: Extent) -> None:
        self.backend = backend
        self.layers: dict[str, Layer] = {}
        self.extent = extent

    def add(
        self, name: str, layer: Layer, takes: Extent | None = None, gives: Extent | None = None
    ) -> None:
        """Add a layer, behind an operator if its input must have other positions.

        ``takes`` are the positions of its input, None if it takes any. ``gives`` are the positions
        of its output, None if they are those of its input.
        """
        # An operator stands only before a layer that needs other positions. Layers that take any
        # positions then work on slices.
        if takes not in (None, self.extent):
            # Within the layer's name, because an operator of its own would rename the layers behind
            # it.
            layer = Framed(layer, before=self._operator(takes))
        self.layers[name] = layer
        self.extent = gives or self.extent

    def end(self, extent: Extent) -> None:
        """End the chain with these positions."""
        if extent is not self.extent:
            name, last = self.layers.popitem()
            self.layers[name] = Framed(last, after=self._operator(extent))

    def _operator(self, extent: Extent | None) -> GatherSequence | ScatterSequence:
        kind = GatherSequence if extent is Extent.ALL else ScatterSequence
        return kind(self.backend)


class ChainSplit:
    """Rules of `partition_chain`, and the decisions made so far.

    Parameters
    ----------
    backend : CommunicationBackend
        The tensor group, of two ranks or more.
    ties : Ties
        Tied parameters of the model.
    sequence_parallel : bool
        True if activations between split layers are slices of the sequence.

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
        """Return this rank's parts of a chain, and True if the output is split.

        Parameters
        ----------
        layers : mapping of str to Layer
            The chain, with one layer or more.
        prefix : str
            Prefix of the layers' names in the model, with the dot.
        starts, ends : Extent
            Positions of the chain's input and output.
        keeps_split : bool
            True if the output of a last linear layer stays split. ``ends`` is then ALL.
        """
        parts = _RankChain(self.backend, starts)
        world_size, splits_output = self.backend.world_size, False
        last = list(layers)[-1]
        for pattern in find_patterns(
            layers, prefix, world_size, self.ties, keeps_split=keeps_split
        ):
            if pattern.kind is PatternKind.SINGLE:
                name, layer = pattern.layers[0]
                is_last = name == last
                splits_output = self._split_layer(
                    parts,
                    prefix,
                    name,
                    layer,
                    ends if is_last else self.between,
                    keeps_split=keeps_split and is_last,
                )
            else:
                self._split_pattern(parts, prefix, pattern)
        parts.end(ends)
        return parts.layers, splits_output

    def _split_pattern(self, parts: _RankChain, prefix: str, pattern: LayerPattern) -> None:
        """Split two linear layers and those between them, so that a rank has a part of each."""
        (first_name, first), *between, (last_name, last) = pattern.layers
        assert isinstance(first, Linear)
        assert isinstance(last, Linear)
        core = between[0][1] if pattern.kind is PatternKind.ATTENTION else None
        # Both halves of a gated activation are split alike, so that a rank has pairs of them.
        blocks: int | tuple[int, ...] = 2 if pattern.kind is PatternKind.GATED else 1
        multiple = run = 1
        if isinstance(core, Attention):
            # Heads of queries are on the rank of the keys and values that they share.
            shared = core.heads // core.kv_heads
            blocks = (shared, 1, 1)
            multiple = max(1, first.outputs // (core.heads + 2 * core.kv_heads))
            run = shared * multiple
        # The inputs of the last layer are split in the same runs as the outputs of the first, so
        # that nothing is sent between the two layers.
        split = DimSplit(last.inputs, self.backend.world_size, 1, run)
        share = split.local_size(0) / split.size  # No rank has more than the first.
        column = ColumnParallelLinear(
            self.backend,
            first.inputs,
            first.outputs,
            bias=first.bias,
            initializer=first.parameters["weight"].initializer,
            tied_to=first.parameters["weight"].tied_to,
            parts=blocks,
            multiple=multiple,
            sequence_parallel=self.sequence_parallel,
        )
        parts.add(first_name, column, self.between, Extent.ALL)
        self._note(
            prefix + first_name,
            column,
            SplitKind.COLUMN,
            share,
            f"{_sizes(first)} split by rows, {column.local_output_size} here; pairs with "
            f"{prefix}{last_name}",
        )
        for name, layer in between:
            parts.add(name, self._inner(prefix + name, layer, split, share))
        row = RowParallelLinear(
            self.backend,
            last.inputs,
            last.outputs,
            bias=last.bias,
            initializer=last.parameters["weight"].initializer,
            multiple=run,
            sequence_parallel=self.sequence_parallel,
        )
        parts.add(last_name, row, None, self.between)
        self._note(
            prefix + last_name,
            row,
            SplitKind.ROW,
            share,
            f"{_sizes(last)} split by columns, {row.local_input_size} here; sums what "
            f"{prefix}{first_name} began",
        )

    def _inner(self, path: str, layer: Layer, split: DimSplit, share: float) -> Layer:
        """Return a layer between a column and a row split, for this rank's features."""
        kind, here = type(layer).__name__, split.local_size(self.backend.rank)
        if isinstance(layer, Attention):
            # The copy keeps the heads of the model's own layer, which the plain model needs later.
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

    def _split_layer(
        self,
        parts: _RankChain,
        prefix: str,
        name: str,
        layer: Layer,
        ends: Extent,
        *,
        keeps_split: bool,
    ) -> bool:
        """Split a layer without partners; return True if its output stays split.

        ``ends`` and ``keeps_split`` are those of `chain`, for this layer's output.
        """
        path, kind, ranks = prefix + name, type(layer), self.backend.world_size
        if kind is Residual:
            # A branch ends with the positions of its beginning, because its output is added to its
            # input.
            inner, _ = self.chain(
                layer.children, f"{path}.", starts=self.between, ends=self.between
            )
            parts.add(name, Residual(inner), self.between, self.between)
            return False
        if kind is Sequential:
            inner, splits_output = self.chain(
                layer.children, f"{path}.", starts=parts.extent, ends=ends, keeps_split=keeps_split
            )
            parts.add(name, Sequential(inner), None, ends)
            return splits_output
        if kind in ACTIVATIONS or kind in _SLICED:
            # These have little to compute. An activation takes any positions.
            # None for activations, which compute on a slice as they are.
            own = _SLICED.get(kind)
            is_sliced = self.sequence_parallel if own else parts.extent is Extent.SLICE
            if is_sliced:
                reason = f"{kind.__name__} of this rank's slice of the sequence"
                self._note(path, layer, SplitKind.POSITIONS, 1 / ranks, reason)
                if own is not None:
                    parts.add(name, own(self.backend, layer), Extent.SLICE, Extent.SLICE)
                    return False
            else:
                reason = f"{kind.__name__} on every rank: it has little to compute"
                self._note(path, layer, SplitKind.WHOLE, 1.0, reason)
            parts.add(name, layer)
            return False
        obstacle = self._obstacle(path, layer)
        if obstacle is not None:
            reason = f"{kind.__name__} on every rank: {obstacle}"
            self._note(path, layer, SplitKind.WHOLE, 1.0, reason)
            parts.add(name, layer, Extent.ALL, Extent.ALL)
            return False
        if isinstance(layer, Linear):
            self._linear(parts, path, name, layer, ends, keeps_split=keeps_split)
            return keeps_split
        assert isinstance(layer, Embedding)
        self._embedding(parts, path, name, layer)
        return False

    def _obstacle(self, path: str, layer: Layer) -> str | None:
        """Return the reason for which a layer stays whole, or None."""
        ranks = self.backend.world_size
        if type(layer) is Linear:
            size, what = layer.outputs, "outputs"
        elif type(layer) is Embedding:
            size, what = layer.vocabulary_size, "rows"
        elif isinstance(layer, Attention) and layer.kv_heads < ranks:
            heads = "heads" if layer.kv_heads == layer.heads else "heads of keys and values"
            return f"{layer.kv_heads} {heads} cannot be divided among {ranks} ranks"
        elif type(layer) in ATTENTIONS:
            return "it does not stand between two linear layers with weights of their own"
        else:
            # The user's own layers end here: nothing is known of what they compute.
            return f"no rule splits a {type(layer).__name__}"
        tied = self.ties.obstacle(path, layer)
        if tied is None and size < ranks:
            return f"{size} {what} cannot be divided among {ranks} ranks"
        return tied

    def _linear(
        self,
        parts: _RankChain,
        path: str,
        name: str,
        layer: Linear,
        ends: Extent,
        *,
        keeps_split: bool,
    ) -> None:
        """Split a linear layer by outputs: gathered, or left split at the model's end."""
        weight = layer.parameters["weight"]
        # A column-parallel layer that takes slices gathers them itself. It returns all positions,
        # and is used only if these are wanted.
        takes_slices = self.sequence_parallel and ends is Extent.ALL
        column = ColumnParallelLinear(
            self.backend,
            layer.inputs,
            layer.outputs,
            not keeps_split,
            bias=layer.bias,
            initializer=weight.initializer,
            tied_to=weight.tied_to,
            sequence_parallel=takes_slices,
        )
        parts.add(name, column, self.between if takes_slices else Extent.ALL, Extent.ALL)
        if keeps_split:
            outcome = "its output stays split for the loss"
        else:
            # Forward and backward take 6 I O FLOPs per position. O elements are gathered, and I are
            # summed, which sends each of them twice.
            worth = 6 * layer.inputs * layer.outputs / (layer.outputs + 2 * layer.inputs)
            verdict = "worth it" if worth >= _WORTHWHILE else "hardly worth it"
            outcome = (
                f"has no partner, so its output is gathered: {verdict}, {worth:.0f} FLOPs are "
                "saved for each element sent"
            )
        share = column.split.local_size(0) / layer.outputs
        self._note(
            path,
            column,
            SplitKind.COLUMN,
            share,
            f"{_sizes(layer)} split by rows, {column.local_output_size} here; {outcome}",
        )

    def _embedding(self, parts: _RankChain, path: str, name: str, layer: Embedding) -> None:
        """Split an embedding by rows of its table."""
        embedding = VocabularyParallelEmbedding(
            self.backend,
            layer.vocabulary_size,
            layer.width,
            layer.parameters["weight"].initializer,
            sequence_parallel=self.sequence_parallel,
        )
        parts.add(name, embedding, Extent.ALL, self.between)
        rows, here = layer.vocabulary_size, embedding.split.local_size(self.backend.rank)
        self._note(
            path,
            embedding,
            SplitKind.VOCABULARY,
            embedding.split.local_size(0) / rows,
            f"Embedding of {rows} x {layer.width} split by rows, {here} here",
        )

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
                    # The table has one entry for both, under the owner's name.
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

    Every rank calls it with the same chain, and nothing is sent. The rules go by the exact types of
    layers, because a subclass may compute anything:

    * An `Embedding` is split by rows of its table.
    * A `Linear`, an `Attention` and a `Linear` are split by heads. `Dropout` may follow the
      `Attention`.
    * Two `Linear` with activations or `Dropout` between them are split by the outputs of the first
      (a *column* split) and the inputs of the second (a *row* split). Pairs are formed greedily
      from the chain's start.
    * The same holds if a `SwiGLU` directly follows the first `Linear`. Its two halves are split in
      the same way.
    * Any other `Linear` is split by outputs, which are gathered.
    * The layers in a `Residual` or `Sequential` are split as a chain of their own.
    * All other layers are whole on every rank, and each rank computes the same.

    Sizes need not divide: `ShardLayout` distributes widths and heads. A layer with fewer outputs,
    rows or heads than there are ranks is whole on every rank.

    The chain's input and output are whole on every rank. With ``sequence_parallel`` they are this
    rank's slice of dim 1, with three exceptions that have all positions: the input of the model's
    first layer, integer inputs, and the output of the model's last layer. Norms, dropout and
    positional embeddings work on slices. Layers that no rule splits get the whole sequence.

    Parameters
    ----------
    layers : mapping of str to Layer
        Consecutive top-level layers of a model.
    backend : CommunicationBackend
        The tensor group.
    model_layers : mapping of str to Layer, optional
        All top-level layers of the model, in order. They tell if the chain begins or ends the
        model, and to which layers weights are tied. The default is ``layers``.
    sequence_parallel : bool
        True if activations between the split layers are slices of the sequence: Korthikanti et
        al., "Reducing activation recomputation in large transformer models", 2022
        (arXiv:2205.05198). The parameters are the same with and without.
    split_output : bool
        True if the output of the model, which the chain ends, may stay split along the last dim,
        for a loss that takes it so. A last `Linear` that is wider than its input, or has no
        partner, is then not gathered.

    Returns
    -------
    TensorPartition
        This rank's layers, with the same names in the same order.

    Raises
    ------
    TypeError
        If ``backend`` is not a `CommunicationBackend`, ``layers`` is not a mapping of layers, or a
        flag is not a bool.
    ValueError
        If a layer is tied to one that is not given. With ``sequence_parallel``, if there are layers
        of images, whose dim 1 is not time. With ``split_output``, if the chain does not end the
        model.
    """
    require_type("backend", backend, CommunicationBackend)
    require_type("layers", layers, Mapping)
    for name, layer in layers.items():
        require_type(name, layer, Layer)
    sequence_parallel = as_flag("sequence_parallel", sequence_parallel)
    split_output = as_flag("split_output", split_output)
    if backend.world_size == 1:
        # With one rank the layers stay the model's own, without any call of a collective.
        decisions = tuple(
            LayerDecision(path, SplitKind.WHOLE, 1.0, f"{type(layer).__name__} on the one rank")
            for path, layer in walk_layers(layers)
        )
        return TensorPartition(dict(layers), {}, splits_output=False, decisions=decisions)
    if sequence_parallel:
        _check_images(layers)
    # A pipeline stage may have no layers. It then passes on its input.
    if not layers:
        return TensorPartition({}, {}, splits_output=False, decisions=())
    names, model_names = list(layers), list(model_layers or layers)
    # A stage of a pipeline may begin or end anywhere in the model.
    is_last = names[-1] == model_names[-1]
    if split_output and not is_last:
        raise ValueError(
            f"split_output is for the model's last layer, {model_names[-1]}, and this chain ends "
            f"with {names[-1]}"
        )
    split = ChainSplit(backend, Ties(model_layers or layers), sequence_parallel)
    # Tokens take few bytes, and each rank's part of the table needs all of them.
    enters_whole = names[0] == model_names[0] or layers[names[0]].takes_integers
    parts, splits_output = split.chain(
        layers,
        "",
        starts=Extent.ALL if enters_whole else split.between,
        ends=Extent.ALL if is_last else split.between,
        keeps_split=split_output,
    )
    return TensorPartition(parts, split.boxes, splits_output, tuple(split.decisions))


def _check_images(layers: Mapping[str, Layer]) -> None:
    kinds = (Conv2D, MaxPool2D, Flatten)
    images = [(path, layer) for path, layer in walk_layers(layers) if isinstance(layer, kinds)]
    for path, layer in images:
        raise ValueError(
            "sequence parallelism cuts activations along dim 1, time, which is not time for "
            f"{path}, a {type(layer).__name__}: partition this model without sequence_parallel"
        )


def check_sequence(layers: Mapping[str, Layer], input_shape: tuple[int, ...]) -> None:
    """Refuse a model whose activations are not sequences, which sequence parallelism would cut.

    Parameters
    ----------
    layers : mapping of str to Layer
        All top-level layers.
    input_shape : tuple of int
        Shape of one sample: (T,) of tokens, or (T, ...).

    Raises
    ------
    ValueError
        If the input of a layer has no time dim, or another length than the model's input. The
        message names the first such layer.
    """
    _check_images(layers)
    shape, time = tuple(input_shape), input_shape[:1]
    for name, layer in layers.items():
        # Samples of tokens have only a time dim, other samples time and width.
        least = 1 if layer.takes_integers else 2
        if len(shape) < least or shape[:1] != time:
            raise ValueError(
                f"sequence parallelism needs samples of shape (time, ...) throughout, and {name} "
                f"takes samples of shape {shape}: partition this model without sequence_parallel"
            )
        shape = layer.output_shape(shape)
