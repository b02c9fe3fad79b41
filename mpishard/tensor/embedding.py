"""A lookup table of which each rank has some of the rows.

Shape suffixes: B batch, T time, D width, N all tokens of the input in one dim, M those of them
that this rank has rows for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpishard.arrays import Array, array_namespace
from mpishard.bfloat16 import wide
from mpishard.communication import CommunicationBackend
from mpishard.contracts import LayerCategory
from mpishard.nn.layers.embedding import Embedding, add_rows
from mpishard.nn.layers.layer import Context, Gradients, Initializer, Parameters, ParameterSpec
from mpishard.sharding import Box
from mpishard.tensor.layer import DimSplit, TensorParallelLayer
from mpishard.tensor.regions import gather_time, local_length, reduce_scatter_time

__all__ = ["VocabularyParallelEmbedding"]


class VocabularyParallelEmbedding(TensorParallelLayer):
    """A vector for each token, y = W[tokens], with the rows of W dealt to the ranks.

    All ranks have the same tokens. A rank gives zeros for those that it has no rows for, and the
    sum over the ranks has each token's vector: Shoeybi et al., "Megatron-LM", 2019
    (arXiv:1909.08053), section 3. Bytes sent, summed over t ranks, for an output of Y bytes:
    2 (t - 1) Y forward, an all-reduce, and none backward; with ``sequence_parallel`` (t - 1) Y
    forward, a reduce-scatter, and (t - 1) Y backward, an all-gather of dy.

    Parameters
    ----------
    backend : CommunicationBackend
        The tensor group.
    vocabulary_size, width : int
        Sizes V and D of the whole table W of shape (V, D).
    initializer : Initializer, optional
        Initializer of the whole W; normal with standard deviation 0.02 if not given.
    sequence_parallel : bool
        Whether the output is this rank's slice of the sequence: (B, T) -> (B, T / t, D).

    Raises
    ------
    TypeError
        For no backend.
    ValueError
        For a size that is no integer >= 1, or fewer rows than ranks.

    Attributes
    ----------
    split : DimSplit
        Partition of the rows.
    """

    category = LayerCategory.EMBEDDING

    def __init__(
        self,
        backend: CommunicationBackend,
        vocabulary_size: int,
        width: int,
        initializer: Initializer | None = None,
        *,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__(backend)
        self._whole = Embedding(vocabulary_size, width, initializer)
        self.vocabulary_size = int(vocabulary_size)
        self.width = int(width)
        self.sequence_parallel = sequence_parallel
        self.split = DimSplit(self.vocabulary_size, backend.world_size)

    @property
    def whole_parameters(self) -> Mapping[str, ParameterSpec]:
        """``weight`` of shape (vocabulary_size, width)."""
        return self._whole.parameters

    def boxes(self, name: str) -> tuple[Box, ...]:
        """The rows of W that this rank has."""
        return tuple((rows, (0, self.width)) for rows in self.split.ranges(self.backend.rank))

    @property
    def takes_integers(self) -> bool:
        """True: tokens are integers."""
        return True

    def check_input(self, x: Array) -> None:
        """Refuse arrays of other dtypes than integers, and tokens outside the whole vocabulary."""
        self._whole.check_input(x)

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """(...) -> (..., width); (T, ...) -> (T / t, ..., width) of slices, if t divides T."""
        if self.sequence_parallel:
            if not input_shape:
                raise ValueError(
                    "VocabularyParallelEmbedding with sequence_parallel needs samples of shape "
                    "(time, ...), got ()"
                )
            input_shape = (local_length(self.backend, input_shape[0]), *input_shape[1:])
        return self._whole.output_shape(input_shape)

    def estimated_flops(self, input_shape: tuple[int, ...]) -> int:
        """0: rows are copied."""
        return 0

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Any]:
        """Look up integer tokens of any shape; saves them. Collective.

        Errors are those of `check_input`.
        """
        self.check_input(x)
        local, is_here = self._localize(x)
        y = p["weight"].take(array_namespace(x).where(is_here, local, 0), axis=0)
        y[~is_here] = 0
        saved = x if context.training else None
        if self.sequence_parallel:
            return reduce_scatter_time(self.backend, y), saved
        return self.backend.all_reduce(y), saved

    def backward_input(self, p: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        """None: token numbers have no gradient."""
        return None, (saved, dy)

    def backward_weight(self, pending: Any, g: Gradients) -> None:
        """Add each row of dy into the row of its token, if it is this rank's.

        In an order that is the same in every run. Collective with ``sequence_parallel``.
        """
        tokens, dy = pending
        if self.sequence_parallel:
            dy = gather_time(self.backend, dy)
        local, is_here = self._localize(tokens.reshape(-1))
        places_M = array_namespace(dy).flatnonzero(is_here)
        add_rows(g["weight"], local[places_M], wide(dy.reshape(-1, self.width)[places_M]))

    def _localize(self, tokens: Array) -> tuple[Array, Array]:
        """The row of each token among this rank's, and whether it is one of them."""
        low, high = self.split.within_block(self.backend.rank)
        local = tokens.astype("int64") - low
        return local, (local >= 0) & (local < high - low)
