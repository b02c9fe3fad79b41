"""Layers of which each rank of a group computes a part."""

from mpishard.tensor.attention import TensorParallelAttention
from mpishard.tensor.block import TensorParallelTransformerBlock
from mpishard.tensor.cross_entropy import VocabularyParallelCrossEntropy
from mpishard.tensor.dropout import SequenceParallelDropout, TensorParallelDropout
from mpishard.tensor.embedding import VocabularyParallelEmbedding
from mpishard.tensor.inference import TensorParallelInference
from mpishard.tensor.layer import TensorParallelLayer
from mpishard.tensor.linear import ColumnParallelLinear, RowParallelLinear
from mpishard.tensor.losses import GatheredOutputLoss, parallel_loss
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
from mpishard.tensor.sequence import SequenceParallelNorm, SequenceParallelPositionalEmbedding
from mpishard.tensor.split import DimSplit
from mpishard.tensor.split_linear import SplitLinear
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
