"""The partitioner: from a chain of layers to one rank's part of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from mpishard.arguments import require_type
from mpishard.communication import CommunicationBackend
from mpishard.nn.layers.convolution import Conv2D, Flatten, MaxPool2D
from mpishard.nn.layers.layer import Layer
from mpishard.tensor.chain_split import ChainSplit, Extent
from mpishard.tensor.partition import (
    LayerDecision,
    SplitKind,
    TensorPartition,
    Ties,
    is_open,
    walk_layers,
)

__all__ = ["TensorParallelLayerPartitioner", "check_sequence", "partition_chain"]


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
