"""Figures of a chain's partition: its kinds of split, and the work that each rank has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from mpishard.base import as_flag, require_type
from mpishard.communication import CommunicationBackend
from mpishard.nn import Layer
from mpishard.tensor.partition import SplitKind, TensorPartition, is_open
from mpishard.tensor.partitioner import partition_chain


class TensorParallelLayerPartitioner:
    """Partition of a chain by `partition_chain`, with figures of the result.

    Parameters
    ----------
    backend : CommunicationBackend
        The tensor group.
    sequence_parallel : bool
        As in `partition_chain`.

    Raises
    ------
    TypeError
        If ``backend`` is not a `CommunicationBackend`, or ``sequence_parallel`` is not a bool.
    """

    def __init__(self, backend: CommunicationBackend, *, sequence_parallel: bool = False) -> None:
        require_type("backend", backend, CommunicationBackend)
        self.backend = backend
        self.sequence_parallel = as_flag("sequence_parallel", sequence_parallel)
        self._layers: Mapping[str, Layer] = {}
        self._partition = TensorPartition({}, {}, splits_output=False, decisions=())

    def partition(
        self, layers: Mapping[str, Layer], *, split_output: bool = False
    ) -> TensorPartition:
        """Split a whole model's chain, to which the figures then refer: see `partition_chain`."""
        self._partition = partition_chain(
            layers,
            self.backend,
            sequence_parallel=self.sequence_parallel,
            split_output=split_output,
        )
        self._layers = dict(layers)
        return self._partition

    @property
    def log(self) -> tuple[str, ...]:
        """Decision about each layer of the last chain, with its reason."""
        return self._partition.log

    @property
    def counts(self) -> Mapping[SplitKind, int]:
        """Number of layers of the last chain by kind of split, including `SplitKind.WHOLE`."""
        counted = Counter(decision.kind for decision in self._partition.decisions)
        return {kind: counted[kind] for kind in SplitKind}

    def split_share(self, input_shape: tuple[int, ...]) -> float:
        """Return the fraction of the chain's FLOPs that is in split layers, in [0, 1].

        Parameters
        ----------
        input_shape : tuple of int
            Shape of one whole sample that enters the chain.
        """
        flops = list(self._flops(input_shape))
        split = sum(count for count, share in flops if share < 1)
        # A chain of reshapes has no FLOPs.
        return split / max(1, sum(count for count, _ in flops))

    def estimated_speedup(self, input_shape: tuple[int, ...]) -> float:
        """Return the FLOPs of the whole chain, divided by those of the rank with the most FLOPs.

        The true speedup is smaller, because communication takes time, too. Amdahl, "Validity of the
        single processor approach", AFIPS 1967.

        Parameters
        ----------
        input_shape : tuple of int
            Shape of one whole sample that enters the chain.
        """
        flops = list(self._flops(input_shape))
        # If a size does not divide, the first rank has the larger part, so that it has the most.
        busiest = sum(count * share for count, share in flops)
        return sum(count for count, _ in flops) / busiest if busiest else 1.0

    def _flops(self, input_shape: tuple[int, ...]) -> Iterator[tuple[int, float]]:
        """Yield each layer's FLOPs for one sample, and the largest share of them on one rank."""
        # By the name in the model, which the layers keep after the split.
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
