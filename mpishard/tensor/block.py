"""A transformer block of which each rank computes a part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpishard.arrays import Array
from mpishard.communication import CommunicationBackend
from mpishard.nn.activations import ReLU
from mpishard.nn.composites import Residual, Sequential
from mpishard.nn.layer import Context, Layer, Parameters
from mpishard.nn.normalization import LayerNorm
from mpishard.nn.sizes import check_sizes
from mpishard.tensor.attention import attention_layers
from mpishard.tensor.linear import ColumnParallelLinear, RowParallelLinear

__all__ = ["TensorParallelTransformerBlock"]


class TensorParallelTransformerBlock(Sequential):
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
    ) -> None:
        owner = type(self).__name__
        attention = attention_layers(owner, backend, embed_dim, num_heads, causal)
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
            }
        )
        self.embed_dim = int(embed_dim)
        self.num_heads = int(num_heads)
        self.ffn_dim = int(ffn_dim)

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
