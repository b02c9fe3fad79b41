"""Tensor parallelism: each rank of a group computes a part of every layer that can be split.

Begin with ``linear.py``: linear layers that are split by columns or by rows. ``stage3.py`` has one
that is split as ZeRO stage 3 does.
``layer.py`` has the base of split layers, and `DimSplit`, the partition of a dim.
``vocabulary.py``, ``attention.py`` and ``sequence.py`` split other layers and the loss.
``regions.py`` has the operators at the edges of a split region.

``partitioner.py`` makes one rank's part of a model's chain of layers. ``partition.py`` finds the
layers that are split jointly, and ``figures.py`` counts what a partition has split.
``inference.py`` predicts on the threads of one process. This room imports nn, sharding,
communication and contracts.
"""

from mpishard.tensor.attention import (
    TensorParallelAttention,
    TensorParallelPagedAttention,
    TensorParallelTransformerBlock,
)
from mpishard.tensor.figures import TensorParallelLayerPartitioner
from mpishard.tensor.inference import TensorParallelInference
from mpishard.tensor.layer import DimSplit, TensorParallelLayer
from mpishard.tensor.linear import ColumnParallelLinear, RowParallelLinear, SplitLinear
from mpishard.tensor.partition import LayerDecision, SplitKind, TensorPartition
from mpishard.tensor.partitioner import check_sequence, partition_chain
from mpishard.tensor.regions import (
    CopyToRegion,
    GatherOutput,
    GatherSequence,
    ReduceFromRegion,
    ScatterSequence,
)
from mpishard.tensor.sequence import (
    SequenceParallelDropout,
    SequenceParallelNorm,
    SequenceParallelPositionalEmbedding,
    TensorParallelDropout,
)
from mpishard.tensor.stage3 import Stage3ShardedLinear
from mpishard.tensor.vocabulary import (
    GatheredOutputLoss,
    VocabularyParallelCrossEntropy,
    VocabularyParallelEmbedding,
    parallel_loss,
)

__all__ = [
    "ColumnParallelLinear",
    "CopyToRegion",
    "DimSplit",
    "GatherOutput",
    "GatherSequence",
    "GatheredOutputLoss",
    "LayerDecision",
    "ReduceFromRegion",
    "RowParallelLinear",
    "ScatterSequence",
    "SequenceParallelDropout",
    "SequenceParallelNorm",
    "SequenceParallelPositionalEmbedding",
    "SplitKind",
    "SplitLinear",
    "Stage3ShardedLinear",
    "TensorParallelAttention",
    "TensorParallelDropout",
    "TensorParallelInference",
    "TensorParallelLayer",
    "TensorParallelLayerPartitioner",
    "TensorParallelPagedAttention",
    "TensorParallelTransformerBlock",
    "TensorPartition",
    "VocabularyParallelCrossEntropy",
    "VocabularyParallelEmbedding",
    "check_sequence",
    "parallel_loss",
    "partition_chain",
]
