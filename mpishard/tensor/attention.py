"""Self-attention of which each rank has some of the heads."""

from __future__ import annotations

from typing import Any

from mpishard.arrays import Array
from mpishard.communication import CommunicationBackend
from mpishard.nn.attention import Attention, CausalAttention
from mpishard.nn.composites import Sequential
from mpishard.nn.layer import Context, Layer, Parameters
from mpishard.nn.sizes import check_sizes
from mpishard.tensor.linear import ColumnParallelLinear, RowParallelLinear

__all__ = ["TensorParallelAttention", "attention_layers"]


class TensorParallelAttention(Sequential):
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
    ) -> None:
        super().__init__(
            attention_layers(type(self).__name__, backend, embed_dim, num_heads, causal)
        )
        self.embed_dim = int(embed_dim)
        self.num_heads = int(num_heads)

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """(T, D) -> (T, D)."""
        if len(input_shape) != 2 or input_shape[1] != self.embed_dim:
            raise ValueError(
                f"{type(self).__name__} needs an input of shape (batch, time, {self.embed_dim}), "
                f"got samples of shape {input_shape}"
            )
        return super().output_shape(input_shape)

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Any]:
        """x_BTD -> y_BTD, refused where the shape is another. Collective."""
        self.output_shape(x.shape[1:])
        return super().forward(p, x, context)


def attention_layers(
    owner: str, backend: CommunicationBackend, embed_dim: int, num_heads: int, causal: bool
) -> dict[str, Layer]:
    """The layers of attention over this rank's heads: ``qkv``, ``core``, ``projection``.

    Errors are those of `TensorParallelAttention`, in the name of ``owner``.
    """
    if not isinstance(backend, CommunicationBackend):
        raise TypeError(f"backend must be a CommunicationBackend, got {type(backend).__name__}")
    check_sizes(owner, embed_dim=embed_dim, num_heads=num_heads)
    if num_heads % backend.world_size:
        raise ValueError(
            f"{owner} deals its heads evenly: num_heads {num_heads} is no multiple of the "
            f"{backend.world_size} ranks; use a multiple, or partition_chain, which deals any "
            "number"
        )
    if embed_dim % num_heads:
        raise ValueError(
            f"num_heads must divide embed_dim, got {embed_dim} = {embed_dim // num_heads} * "
            f"{num_heads} + {embed_dim % num_heads}"
        )
    size, heads = embed_dim // num_heads, num_heads // backend.world_size
    return {
        "qkv": ColumnParallelLinear(
            backend, embed_dim, 3 * embed_dim, bias=False, parts=3, multiple=size
        ),
        "core": CausalAttention(heads) if causal else Attention(heads),
        "projection": RowParallelLinear(backend, embed_dim, embed_dim, multiple=size),
    }
