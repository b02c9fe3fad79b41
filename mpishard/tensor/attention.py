"""Self-attention and a transformer block, whose heads are dealt to the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpishard.arguments import check_divides, check_sizes, require_type
from mpishard.arrays import Array
from mpishard.communication import CommunicationBackend
from mpishard.nn.layers.activations import ReLU
from mpishard.nn.layers.attention import Attention
from mpishard.nn.layers.cache import KeyValueCache
from mpishard.nn.layers.composites import Residual, Sequential
from mpishard.nn.layers.layer import Context, Layer, Parameters
from mpishard.nn.layers.normalization import LayerNorm
from mpishard.tensor.linear import ColumnParallelLinear, RowParallelLinear


class _SequenceChain(Sequential):
    """A chain on inputs of shape (B, T, D), which it checks before the ranks communicate."""

    def __init__(self, children: Mapping[str, Layer], embed_dim: int) -> None:
        super().__init__(children)
        self.embed_dim = int(embed_dim)

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """(T, D) -> (T, D)."""
        if len(input_shape) != 2 or input_shape[1] != self.embed_dim:
            raise ValueError(
                f"{type(self).__name__} needs an input of shape (batch, time, {self.embed_dim}), "
                f"got samples of shape {input_shape}"
            )
        return super().output_shape(input_shape)

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Any]:
        """x_BTD -> y_BTD, refused if the shape is another. Collective."""
        # Before the first layer communicates, or the other ranks would wait for this one.
        self.output_shape(x.shape[1:])
        return super().forward(p, x, context)


class TensorParallelAttention(_SequenceChain):
    """Multi-head self-attention, the heads dealt evenly to the ranks.

    Shoeybi et al., "Megatron-LM", 2019 (arXiv:1909.08053), section 3, figure 3b. A chain of
    three layers: ``qkv``, a `ColumnParallelLinear` without bias (see `mpishard.nn.Attention`) to
    the queries, keys and values of this rank's heads; ``core``, which attends; ``projection``, a
    `RowParallelLinear` that sums over the ranks. It trains like any layer, and sends one
    all-reduce forward and one backward, each of the size of the output: 2 (t - 1) Y bytes for
    each over t ranks.

    Parameters
    ----------
    backend : CommunicationBackend
        The tensor group.
    embed_dim : int
        Size D of the last dim of input and output, x_BTD -> y_BTD.
    num_heads : int
        Heads H; a multiple of the group's size, and a divisor of D.
    causal : bool
        Whether a position sees itself and what came before, or all positions.
    num_kv_heads : int, optional
        Heads of keys and values, each shared by as many heads of queries (see
        `mpishard.nn.Attention`): a multiple of the group's size, and a divisor of H. Default: H.

    Raises
    ------
    TypeError
        For no backend.
    ValueError
        For sizes that are no integers >= 1, and heads that do not divide the width or cannot be
        dealt evenly, as `partition_chain` need not; when it runs, for inputs of another shape.
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
    """Causal `TensorParallelAttention` that reads many sequences, their past in blocks of memory.

    For prediction. Each rank keeps the keys and values of its own heads: see
    `mpishard.nn.KeyValueCache`, in which sequences begin (`add`), and give their blocks back
    (`free`). Begin and free the same sequences on all ranks, in the same order.

    Parameters
    ----------
    backend, embed_dim, num_heads, num_kv_heads
        As for `TensorParallelAttention`.
    block_count : int
        Number of blocks that all sequences share.
    block_size : int
        Positions of a block.

    Attributes
    ----------
    layer : TensorParallelAttention
        The layers, of which ``layer.walk_parameters()`` names the parameters.
    cache : KeyValueCache
        The blocks.

    Raises
    ------
    TypeError, ValueError
        As `TensorParallelAttention`; ValueError also for blocks that are no integers >= 1.

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
        """Read T more positions of each sequence: x_BTD -> y_BTD. Collective.

        Raises
        ------
        ValueError
            For another shape, unknown sequences, or too few free blocks; before anything changes.
        """
        self.layer.output_shape(x.shape[1:])
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
    """The layers of attention over this rank's heads: ``qkv``, ``core``, ``projection``.

    Errors are those of `TensorParallelAttention`, in the name of ``owner``.
    """
    require_type("backend", backend, CommunicationBackend)
    groups = num_heads if num_kv_heads is None else num_kv_heads
    check_sizes(owner, embed_dim=embed_dim, num_heads=num_heads, num_kv_heads=groups)
    ranks = backend.world_size
    for name, number in ("num_heads", num_heads), ("num_kv_heads", groups):
        if number % ranks:
            raise ValueError(
                f"{owner} deals its heads evenly: {name} {number} is no multiple of the {ranks} "
                "ranks; use a multiple, or partition_chain, which deals any number"
            )
    check_divides("num_heads", num_heads, "embed_dim", embed_dim)
    check_divides("num_kv_heads", groups, "num_heads", num_heads)
    size, shared = embed_dim // num_heads, num_heads // groups
    # Each rank's queries are those that share its keys and values: attention exchanges nothing.
    return {
        "qkv": ColumnParallelLinear(
            backend, embed_dim, embed_dim + 2 * groups * size, bias=False, parts=(shared, 1, 1),
            multiple=size,
        ),
        "core": Attention(num_heads // ranks, causal=causal, kv_heads=groups // ranks),
        "projection": RowParallelLinear(backend, embed_dim, embed_dim, multiple=shared * size),
    }  # fmt: skip


class TensorParallelTransformerBlock(_SequenceChain):
    """Attention and a two-layer perceptron, each behind a norm and with a way around it.

    y = z + W2 f(W1 norm(z)) with z = x + attention(norm(x)): the block of GPT-2, split as in
    Shoeybi et al., "Megatron-LM", 2019 (arXiv:1909.08053), figure 4. A chain of two `Residual`,
    ``attention`` of ``norm``, ``qkv``, ``core`` and ``projection`` (see
    `TensorParallelAttention`), and ``mlp`` of ``norm``, ``expansion``, ``activation`` and
    ``projection``. It trains like any layer, and sends two all-reduces forward and two backward,
    each of the size of the output.

    Parameters
    ----------
    backend : CommunicationBackend
        The tensor group.
    embed_dim : int
        Size D of the last dim of input and output, x_BTD -> y_BTD.
    num_heads : int
        Heads; a multiple of the group's size, and a divisor of D.
    ffn_dim : int
        Outputs of W1, which are dealt evenly or with one more to the first ranks.
    activation : callable
        Makes the layer f, which works element by element: `ReLU`, `GELU` or another class.
    causal : bool
        Whether a position sees itself and what came before, or all positions.
    num_kv_heads : int, optional
        Heads of keys and values, each shared by as many heads of queries (see
        `mpishard.nn.Attention`): a multiple of the group's size, and a divisor of H. Default: H.

    Raises
    ------
    TypeError
        For no backend, or an activation that makes no layer.
    ValueError
        As `TensorParallelAttention`, and for a ``ffn_dim`` below the number of ranks.
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
