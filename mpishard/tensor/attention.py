"""Self-attention and a transformer block whose heads are distributed over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mpishard.base import Array, check_divides, check_sizes, require_type
from mpishard.communication import CommunicationBackend
from mpishard.contracts import Saved
from mpishard.nn import (
    Attention,
    Context,
    KeyValueCache,
    Layer,
    LayerNorm,
    Parameters,
    ReLU,
    Residual,
    Sequential,
)
from mpishard.tensor.linear import ColumnParallelLinear, RowParallelLinear


class _SequenceChain(Sequential):
    """Chain for inputs of shape (B, T, D), which it checks before the ranks communicate."""

    def __init__(self, children: Mapping[str, Layer], embed_dim: int) -> None:
        super().__init__(children)
        self.embed_dim = int(embed_dim)

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the input's shape (T, D)."""
        if len(input_shape) != 2 or input_shape[1] != self.embed_dim:
            raise ValueError(
                f"{type(self).__name__} needs an input of shape (batch, time, {self.embed_dim}), "
                f"got samples of shape {input_shape}"
            )
        return super().output_shape(input_shape)

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Saved]:
        """Map x_BTD to y_BTD, after a check of the shape. Collective."""
        # If a layer failed after the first one has communicated, the other ranks would wait.
        self.output_shape(x.shape[1:])
        return super().forward(p, x, context)


class TensorParallelAttention(_SequenceChain):
    """Multi-head self-attention whose heads are distributed evenly over the ranks.

    Shoeybi et al., "Megatron-LM", 2019 (arXiv:1909.08053), section 3, figure 3b. It is a chain of
    three layers. ``qkv`` is a `ColumnParallelLinear` to the queries, keys and values of this rank's
    heads, without bias (see `mpishard.nn.Attention`). ``core`` computes attention. ``projection``
    is a `RowParallelLinear`, which sums over the ranks.

    The chain trains like any layer. It sends one all-reduce forward and one backward, each of the
    size of the output: 2 (t - 1) Y bytes each, summed over t ranks, for an output of Y bytes.

    Parameters
    ----------
    backend : CommunicationBackend
        The tensor group.
    embed_dim : int
        Size D of the last dim of input x_BTD and output y_BTD.
    num_heads : int
        Number H of heads: a multiple of the group's size, and a divisor of D.
    causal : bool
        If True, a position sees itself and earlier positions; if False, all positions.
    num_kv_heads : int, optional
        Number of heads of keys and of values, each shared by equally many heads of queries (see
        `mpishard.nn.Attention`): a multiple of the group's size, and a divisor of H. The default
        is H.

    Raises
    ------
    TypeError
        If ``backend`` is not a `CommunicationBackend`.
    ValueError
        If a size is not an integer >= 1, or the heads do not divide the width or cannot be
        distributed evenly (`partition_chain` allows that). During a pass: if the input has another
        shape.
    """

    def __init__(
        self,
        backend: CommunicationBackend,
        embed_dim: int,
        num_heads: int,
        causal: bool = False,
        *,
        num_kv_heads: int | None = None,
    ) -> None:
        super().__init__(
            attention_layers(
                type(self).__name__, backend, embed_dim, num_heads, causal, num_kv_heads
            ),
            embed_dim,
        )
        self.num_heads = int(num_heads)
        self.num_kv_heads = int(num_heads if num_kv_heads is None else num_kv_heads)


class TensorParallelPagedAttention:
    """Causal `TensorParallelAttention` for predictions, with a cache of many sequences.

    Each rank caches the keys and values of its own heads in blocks of memory. A sequence begins
    with ``cache.add`` and releases its blocks with ``cache.free``: see `mpishard.nn.KeyValueCache`.
    All ranks must begin and free the same sequences in the same order.

    Parameters
    ----------
    backend, embed_dim, num_heads, num_kv_heads
        As for `TensorParallelAttention`.
    block_count : int
        Number of blocks that all sequences share.
    block_size : int
        Number of positions per block.

    Attributes
    ----------
    layer : TensorParallelAttention
        The chain of layers. ``layer.walk_parameters()`` names the parameters.
    cache : KeyValueCache
        The cache.

    Raises
    ------
    TypeError, ValueError
        As for `TensorParallelAttention`. ValueError also if a size of blocks is not an integer
        >= 1.

    Examples
    --------
    >>> import numpy as np
    >>> from mpishard.sharding import ParameterTable
    >>> from mpishard.tensor import TensorParallelInference, TensorParallelPagedAttention
    >>> def build_rank(backend):
    ...     attention = TensorParallelPagedAttention(backend, 8, 2, block_count=4, block_size=2)
    ...     table = ParameterTable(attention.layer.walk_parameters())
    ...     p, sequence = table.nested_views(np.ones(table.length)), attention.cache.add()
    ...     def read(x):
    ...         start = attention.forward(p, x[:, :3], [sequence])
    ...         return np.concatenate([start, attention.forward(p, x[:, 3:], [sequence])], axis=1)
    ...     return read
    >>> x = np.random.default_rng(0).standard_normal((1, 5, 8))
    >>> TensorParallelInference.forward_in_process(2, x, build_rank).shape
    (1, 5, 8)
    """

    def __init__(
        self,
        backend: CommunicationBackend,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        block_count: int,
        block_size: int = 16,
    ) -> None:
        self.layer = TensorParallelAttention(
            backend, embed_dim, num_heads, causal=True, num_kv_heads=num_kv_heads
        )
        self.cache = KeyValueCache(block_count, block_size)

    def forward(self, p: Parameters, x: Array, sequences: Sequence[int]) -> Array:
        """Map x_BTD, the next T positions of each sequence, to y_BTD. Collective.

        Raises
        ------
        ValueError
            If the shape is another, a sequence is unknown, or there are too few free blocks.
            Nothing has changed then.
        """
        # Before the cache reserves blocks for the new positions.
        self.layer.output_shape(x.shape[1:])
        # Before the pass, in which a rank that failed alone would leave the others waiting.
        if len(x) != len(sequences):
            raise ValueError(f"got {len(x)} rows for {len(sequences)} sequences: one for each")
        with self.cache.reading(sequences, x.shape[1]):
            return self.layer.forward(p, x, Context(training=False, cache=self.cache))[0]


def attention_layers(
    owner: str,
    backend: CommunicationBackend,
    embed_dim: int,
    num_heads: int,
    causal: bool,
    num_kv_heads: int | None = None,
) -> dict[str, Layer]:
    """Return the layers of attention over this rank's heads: ``qkv``, ``core``, ``projection``.

    Errors are those of `TensorParallelAttention`; their messages name ``owner``.
    """
    require_type("backend", backend, CommunicationBackend)
    groups = num_heads if num_kv_heads is None else num_kv_heads
    check_sizes(owner, embed_dim=embed_dim, num_heads=num_heads, num_kv_heads=groups)
    ranks = backend.world_size
    # Ranks with fewer heads would wait at each sum; `partition_chain` accepts that.
    for name, number in ("num_heads", num_heads), ("num_kv_heads", groups):
        if number % ranks:
            raise ValueError(
                f"{owner} splits its heads evenly: {name} {number} is not a multiple of the "
                f"{ranks} ranks; use a multiple, or partition_chain, which splits any number"
            )
    check_divides("num_heads", num_heads, "embed_dim", embed_dim)
    check_divides("num_kv_heads", groups, "num_heads", num_heads)
    size, shared = embed_dim // num_heads, num_heads // groups
    # A rank has the queries that share its keys and values, so that ``core`` sends nothing.
    return {
        "qkv": ColumnParallelLinear(
            backend,
            embed_dim,
            embed_dim + 2 * groups * size,
            bias=False,
            parts=(shared, 1, 1),
            multiple=size,
        ),
        # Heads do not depend on each other, so that the plain layer computes this rank's.
        "core": Attention(num_heads // ranks, causal=causal, kv_heads=groups // ranks),
        "projection": RowParallelLinear(backend, embed_dim, embed_dim, multiple=shared * size),
    }


class TensorParallelTransformerBlock(_SequenceChain):
    """Transformer block: attention and a two-layer perceptron, each in a residual branch.

    y = z + W2 f(W1 norm(z)) with z = x + attention(norm(x)): the block of GPT-2, split as in
    Shoeybi et al., "Megatron-LM", 2019 (arXiv:1909.08053), figure 4. It is a chain of two
    `Residual` layers: ``attention`` with ``norm``, ``qkv``, ``core`` and ``projection`` (see
    `TensorParallelAttention`), and ``mlp`` with ``norm``, ``expansion``, ``activation`` and
    ``projection``. The chain trains like any layer. It sends two all-reduces forward and two
    backward, each of the size of the output.

    Parameters
    ----------
    backend : CommunicationBackend
        The tensor group.
    embed_dim : int
        Size D of the last dim of input x_BTD and output y_BTD.
    num_heads : int
        Number H of heads: a multiple of the group's size, and a divisor of D.
    ffn_dim : int
        Number of outputs of W1. If the group's size does not divide it, the first ranks have one
        more each.
    activation : callable
        Function that makes the element-wise layer f: `ReLU`, `GELU` or another class.
    causal : bool
        If True, a position sees itself and earlier positions; if False, all positions.
    num_kv_heads : int, optional
        Number of heads of keys and of values, each shared by equally many heads of queries (see
        `mpishard.nn.Attention`): a multiple of the group's size, and a divisor of H. The default
        is H.

    Raises
    ------
    TypeError
        If ``backend`` is not a `CommunicationBackend`, or ``activation()`` is not a layer.
    ValueError
        As for `TensorParallelAttention`, and if ``ffn_dim`` is below the number of ranks.
    """

    def __init__(
        self,
        backend: CommunicationBackend,
        embed_dim: int,
        num_heads: int,
        ffn_dim: int,
        activation: Callable[[], Layer] = ReLU,
        causal: bool = False,
        *,
        num_kv_heads: int | None = None,
    ) -> None:
        owner = type(self).__name__
        attention = attention_layers(owner, backend, embed_dim, num_heads, causal, num_kv_heads)
        check_sizes(owner, ffn_dim=ffn_dim)
        # A class or function, because two blocks must not share one layer.
        function = activation()
        if not isinstance(function, Layer):
            raise TypeError(
                "activation() must be a layer, as mpishard.nn.ReLU() is, got "
                f"{type(function).__name__}"
            )
        mlp = {
            "expansion": ColumnParallelLinear(backend, embed_dim, ffn_dim),
            "activation": function,
            "projection": RowParallelLinear(backend, ffn_dim, embed_dim),
        }
        super().__init__(
            {
                "attention": Residual({"norm": LayerNorm(embed_dim)} | attention),
                "mlp": Residual({"norm": LayerNorm(embed_dim)} | mlp),
            },
            embed_dim,
        )
        self.num_heads = int(num_heads)
        self.ffn_dim = int(ffn_dim)
