"""A linear layer whose weight is sharded as in ZeRO stage 3: `Stage3ShardedLinear`.

Shape suffixes: I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mpishard.base import NAMESPACES, Array, ShardLayout, wide_dtype
from mpishard.communication import CommunicationBackend
from mpishard.contracts import Saved
from mpishard.nn import Context, Gradients, Layer, Linear, Parameters, ParameterSpec, unwritten
from mpishard.sharding import Box
from mpishard.tensor.linear import SplitLinear


class Stage3ShardedLinear(SplitLinear):
    """Linear map whose W is sharded as in ZeRO stage 3, with all of b on every rank.

    y = activation(x W^T + b). Each rank holds a piece of the flattened W, as `ShardLayout` cuts it.
    It computes the whole output of its own samples with a W that is gathered for each product and
    then freed: Rajbhandari et al., "ZeRO", SC 2020 (arXiv:1910.02054), section 5.3.

    Bytes sent, summed over N ranks, for a W of S bytes: (N - 1) S forward (an all-gather). Backward
    (N - 1) S for the input's gradient (another all-gather), (N - 1) S for the weight's (a
    reduce-scatter), and 2 (N - 1) times the bytes of the bias (an all-reduce).

    Gradients are *summed* over ranks, as losses are. If each rank starts backward with the
    gradient of its samples' sum, division by the number of all ranks' samples gives the gradient
    of the mean. The ranks may have different numbers of samples, including 0, but all must call
    the layer together.

    This is for one layer. `mpishard.FSDPModel` shards any model unit by unit, and overlaps
    communication with computation.

    Parameters
    ----------
    backend : CommunicationBackend
        The ranks.
    input_size, output_size : int
        Sizes I and O of the last dim of the input and of the output.
    activation : Layer, optional
        Element-wise layer without parameters, such as ``ReLU()``.

    Raises
    ------
    TypeError
        If ``backend`` is not a `CommunicationBackend`, or the activation is not a layer.
    ValueError
        If a size is not an integer >= 1.
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
        """Number of elements of W that this rank holds."""
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
            # The whole W is drawn, so that values do not depend on the number of ranks.
            initializer=lambda generator, _: spec.initializer(generator, spec.shape).reshape(-1)[
                piece
            ],
        )
        return {"weight": weight, "bias": whole["bias"]}

    def boxes(self, name: str) -> tuple[Box, ...]:
        """Return the boxes of W in the piece: end of a row, whole rows, start of a row."""
        if name == "bias":
            return super().boxes(name)
        piece, width = self._layout.slice(self.backend.rank), self.input_size
        boxes: list[Box] = []
        start = piece.start
        while start < piece.stop:
            row, column = divmod(start, width)
            # A piece may begin and end within a row, and boxes are rectangles.
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
        # A rank without elements holds an empty piece, whose boxes say nothing.
        return name == "weight" and self.backend.world_size > 1

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return (..., O) for the shape (..., I)."""
        return self._linear.output_shape(input_shape)

    def estimated_flops(self, input_shape: tuple[int, ...]) -> int:
        """Return 2 I O for each row: the operations of the product."""
        return self._linear.estimated_flops(input_shape)

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Saved]:
        """Map this rank's x of shape (..., I), and save x but not W. Collective."""
        y, saved = self._linear.forward(self._gathered(p), x, context)
        y, activation_saved = self._activate(y, context)
        return y, (saved, activation_saved) if context.training else None

    def backward_input(self, p: Parameters, saved: Saved, dy: Array) -> tuple[Array, Saved]:
        """Return the gradient of this rank's input, with W gathered again. Collective."""
        dy = self._before_activation(saved[1], dy)
        return self._linear.backward_input(self._gathered(p), saved[0], dy)

    def backward_weight(self, pending: Saved, g: Gradients) -> None:
        """Add this rank's piece of W's gradient, and the bias's gradient. Collective.

        Both are sums over the samples of all ranks.
        """
        xp = NAMESPACES[type(pending[1])]
        dtype = wide_dtype(pending[1])
        # A rank's samples contribute to every element of W, so that it needs a whole gradient
        # until the reduce-scatter has ended.
        own = {
            "weight": xp.zeros((self.output_size, self.input_size), dtype=dtype),
            "bias": xp.zeros(self.output_size, dtype=dtype),
        }
        self._linear.backward_weight(pending, own)
        target = unwritten(g, "weight")
        flat = own["weight"].reshape(-1)
        # The reduce-scatter is under way while the small all-reduce of the bias runs.
        # Written to the gradient itself, if nothing was added to it before.
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
        self,
        p: Parameters,
        saved: Saved,
        dy: Array,
        g: Gradients,
        *,
        needs_input_gradient: bool = True,
    ) -> Array | None:
        """Run both halves, or only the weight's, which does not gather W. Collective."""
        if needs_input_gradient:
            return super().backward(p, saved, dy, g)
        self.backward_weight((saved[0], self._before_activation(saved[1], dy)), g)
        return None

    def _gathered(self, p: Parameters) -> dict[str, Array]:
        # Not kept: a layer whose W stays is not sharded any more.
        flat = self.backend.all_gather(p["weight"])
        return {"weight": flat.reshape(self.output_size, self.input_size), "bias": p["bias"]}
