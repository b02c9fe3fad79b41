"""Layers of which each rank of a group computes a part."""

from mpishard.tensor.attention import TensorParallelAttention, TensorParallelTransformerBlock
from mpishard.tensor.embedding import VocabularyParallelEmbedding
from mpishard.tensor.inference import TensorParallelInference
from mpishard.tensor.layer import DimSplit, TensorParallelLayer
from mpishard.tensor.linear import ColumnParallelLinear, RowParallelLinear, SplitLinear
from mpishard.tensor.losses import GatheredOutputLoss, VocabularyParallelCrossEntropy, parallel_loss
from mpishard.tensor.partition import LayerDecision, SplitKind, TensorPartition
from mpishard.tensor.partitioner import (
    TensorParallelLayerPartitioner,
    check_sequence,
    partition_chain,
)
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
    "TensorParallelTransformerBlock",
    "TensorPartition",
    "VocabularyParallelCrossEntropy",
    "VocabularyParallelEmbedding",
    "check_sequence",
    "parallel_loss",
    "partition_chain",
]
