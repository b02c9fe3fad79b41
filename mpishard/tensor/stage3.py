"""A linear layer whose weight lies in pieces on ranks that each have data of their own.

Shape suffixes: I inputs, O outputs; ``...`` leading dims.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mpishard.arrays import Array, array_namespace
from mpishard.bfloat16 import wide_dtype
from mpishard.communication import CommunicationBackend
from mpishard.layout import ShardLayout
from mpishard.nn.layers.layer import (
    Context,
    Gradients,
    Layer,
    Parameters,
    ParameterSpec,
    unwritten,
)
from mpishard.nn.layers.linear import Linear
from mpishard.sharding import Box
from mpishard.tensor.linear import SplitLinear

__all__ = ["Stage3ShardedLinear"]


class Stage3ShardedLinear(SplitLinear):
    """y = activation(x W^T + b), with W sharded as by ZeRO stage 3 and b on every rank.

    Each rank holds a piece of the flattened W, as `ShardLayout` cuts it, and computes the whole
    output of its own samples with a W that is gathered for the product and let go: Rajbhandari
    et al., "ZeRO", SC 2020 (arXiv:1910.02054), section 5.3. Bytes sent, summed over N ranks, for
    a W of S bytes: (N - 1) S forward, an all-gather; (N - 1) S backward for the input's gradient,
    another, and (N - 1) S for the weight's, a reduce-scatter; and 2 (N - 1) times the bias.

    Gradients are *summed* over ranks, as losses are: if each rank starts backward with the
    gradient of its samples' sum, division by the number of all ranks' samples gives the mean's.
    The ranks may have different numbers of samples, 0 among them; all call it together.

    `mpishard.FSDPModel` does so for any model, unit by unit and overlapped; this is for one layer.

    Parameters
    ----------
    backend : CommunicationBackend
        The ranks.
    input_size, output_size : int
        Sizes I and O of the last dim of the input and of the output.
    activation : Layer, optional
        Such as ``ReLU()``: element by element, without parameters.

    Raises
    ------
    TypeError
        For no backend, or an activation that is no layer.
    ValueError
        For a size that is no integer >= 1.
    """

    def __init__(
        self,
        backend: CommunicationBackend,
        input_size: int,
        output_size: int,
        activation: Layer | None = None,
    ) -> None:
        super().__init__(backend, input_size, output_size, activation)
        self._linear = Linear(self.input_size, self.output_size)

    @property
    def _layout(self) -> ShardLayout:
        return ShardLayout(self.input_size * self.output_size, self.backend.world_size)

    @property
    def shard_length(self) -> int:
        """Elements of W that this rank holds."""
        return self._layout.size(self.backend.rank)

    @property
    def parameters(self) -> Mapping[str, ParameterSpec]:
        """``weight`` of shape (shard_length,), a piece of the flattened W, and all of ``bias``."""
        whole = self.whole_parameters
        spec = whole["weight"]
        piece = self._layout.slice(self.backend.rank)
        weight = replace(
            spec,
            shape=(self.shard_length,),
            initializer=lambda generator, _: spec.initializer(generator, spec.shape).reshape(-1)[
                piece
            ],
        )
        return {"weight": weight, "bias": whole["bias"]}

    def boxes(self, name: str) -> tuple[Box, ...]:
        """Boxes of W: rest of a row, whole rows, start of a row; end to end the piece."""
        if name == "bias":
            return super().boxes(name)
        piece, width = self._layout.slice(self.backend.rank), self.input_size
        boxes: list[Box] = []
        start = piece.start
        while start < piece.stop:
            row, column = divmod(start, width)
            rows = (piece.stop - start) // width if column == 0 else 0
            if rows:
                boxes.append(((row, row + rows), (0, width)))
                start += rows * width
            else:
                stop = min(piece.stop - row * width, width)
                boxes.append(((row, row + 1), (column, stop)))
                start = row * width + stop
        return tuple(boxes)

    def is_split(self, name: str) -> bool:
        """True for W on more than one rank, even if W has fewer elements than there are ranks."""
        return name == "weight" and self.backend.world_size > 1

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """(..., I) -> (..., O)."""
        return self._linear.output_shape(input_shape)

    def estimated_flops(self, input_shape: tuple[int, ...]) -> int:
        """2 I O for each row, those of the product."""
        return self._linear.estimated_flops(input_shape)

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Any]:
        """Map this rank's x of shape (..., I); saves it, and not W. Collective."""
        y, saved = self._linear.forward(self._gathered(p), x, context)
        y, activation_saved = self._activate(y, context)
        return y, (saved, activation_saved) if context.training else None

    def backward_input(self, p: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        """The gradient of this rank's input, with W gathered again. Collective."""
        dy = self._before_activation(saved[1], dy)
        return self._linear.backward_input(self._gathered(p), saved[0], dy)

    def backward_weight(self, pending: Any, g: Gradients) -> None:
        """Add this rank's piece of W's gradient, and the bias's, over all samples. Collective."""
        xp = array_namespace(pending[1])
        dtype = wide_dtype(pending[1])
        # All of it, for the time of the reduction: each rank has samples for every element.
        own = {
            "weight": xp.zeros((self.output_size, self.input_size), dtype=dtype),
            "bias": xp.zeros(self.output_size, dtype=dtype),
        }
        self._linear.backward_weight(pending, own)
        target = unwritten(g, "weight")
        flat = own["weight"].reshape(-1)
        # Under way while the small all-reduce of the bias runs.
        reduced = self.backend.reduce_scatter_async(flat, out=target)
        self.backend.all_reduce(own["bias"])
        db_O = g["bias"]
        db_O += own["bias"]
        if target is None:
            dw = g["weight"]
            dw += reduced.wait()
        else:
            reduced.wait()

    def backward(
        self, p: Parameters, saved: Any, dy: Array, g: Gradients, *,
        needs_input_gradient: bool = True,
    ) -> Array:  # fmt: skip
        """Both halves, or the weight's alone, for which W is not gathered. Collective."""
        if needs_input_gradient:
            return super().backward(p, saved, dy, g)
        self.backward_weight((saved[0], self._before_activation(saved[1], dy)), g)
        return None

    def _gathered(self, p: Parameters) -> dict[str, Array]:
        flat = self.backend.all_gather(p["weight"])
        return {"weight": flat.reshape(self.output_size, self.input_size), "bias": p["bias"]}
