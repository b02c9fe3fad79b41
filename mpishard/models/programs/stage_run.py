"""One pass of a batch through the stages of a rank, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mpishard.arrays import Array
from mpishard.contracts import ILossFunction
from mpishard.layout import ShardLayout
from mpishard.models.programs.chain import LayerChain
from mpishard.models.stores.gradient_store import GradientStore
from mpishard.models.stores.parameter_store import ParameterStore
from mpishard.nn.layers.layer import Context
from mpishard.pipeline.executor import IPipelineStage
from mpishard.sharding import Unit

if TYPE_CHECKING:
    from mpishard.models.programs.mesh_program import MeshProgram

__all__ = ["StageRun"]


class StageRun(IPipelineStage):
    """What a schedule's operations do on this rank, and what micro-batches leave behind.

    Parameters
    ----------
    program : MeshProgram
        Whose stages they are.
    parameters : ParameterStore
        What they compute with.
    x : Array
        This rank's batch, as the first layer takes it.
    context : Context
        Of the batch: of its first sample, and whether backward follows.
    gradients : GradientStore, optional
        Where gradients are added; None where only outputs are wanted.
    y : Array, optional
        Targets, where backward follows.
    loss : ILossFunction, optional
        What the last stage minimises.
    chains : sequence of LayerChain, optional
        The rank's stages, where they are not the program's own, and work on whole sequences.
    micro_batches : int, optional
        Into how many parts the batch is cut, where not as the program says.

    Attributes
    ----------
    total, weight : float
        Sums of the loss over the micro-batches, in the last stage.
    outputs : list of Array
        The last stage's, by micro-batch, where only outputs are wanted.
    """

    def __init__(
        self,
        program: MeshProgram,
        parameters: ParameterStore,
        x: Array,
        context: Context,
        gradients: GradientStore | None = None,
        y: Array | None = None,
        loss: ILossFunction | None = None,
        *,
        chains: Sequence[LayerChain] | None = None,
        micro_batches: int | None = None,
    ) -> None:
        self._program = program
        self._chains = program.chains if chains is None else chains
        self._whole_sequence = self._chains is not program.chains
        self._parameters = parameters
        self._gradients = gradients
        self._x, self._y = x, y
        self._loss = loss
        self._context = context
        self._rows = ShardLayout(len(x), micro_batches or program.micro_batch_count)
        self._activations: dict[tuple[int, int], Any] = {}
        self._pending: dict[tuple[int, int], Any] = {}
        self._left = [self._rows.world_size] * len(self._chains)
        self.total = self.weight = 0.0
        self.outputs: list[Array] = []

    def input_shape(self, virtual_stage: int, micro_batch: int) -> tuple[int, ...]:
        stage = self._program.stages_here[virtual_stage]
        return self._boundary(stage, micro_batch)

    def output_shape(self, virtual_stage: int, micro_batch: int) -> tuple[int, ...]:
        stage = self._program.stages_here[virtual_stage]
        return self._boundary(stage + 1, micro_batch)

    def describe(self, virtual_stage: int) -> str:
        names = self._chain(virtual_stage).names
        layers = "no layers" if not names else f"layer {names[0]!r}"
        if len(names) > 1:
            layers = f"layers {names[0]!r} to {names[-1]!r}"
        return f"virtual stage {virtual_stage} ({layers})"

    def _boundary(self, stage: int, micro_batch: int) -> tuple[int, ...]:
        shape = self._program.boundary_shape(
            stage, tuple(self._x.shape[1:]), whole_sequence=self._whole_sequence
        )
        return (self._rows.size(micro_batch), *shape)

    def forward(self, virtual_stage: int, micro_batch: int, x: Array | None) -> Array | None:
        rows = self._rows.slice(micro_batch)
        if x is None:
            x = self._x[rows]
        context = self._context
        if context.training:
            start = context.sample_start + rows.start
            context = replace(context, sample_start=start)
        chain = self._chain(virtual_stage)
        y, activations = chain.forward(self._parameters, x, context)
        is_last = self._is_last(virtual_stage)
        if not context.training:
            chain.let_go(self._parameters)
            if is_last:
                self.outputs.append(y)
            return None if is_last else y
        key = virtual_stage, micro_batch
        if not is_last:
            self._activations[key] = activations
            return y
        assert self._loss is not None
        assert self._y is not None
        total, weight, saved = self._loss.forward(y, self._y[rows])
        self.total += total
        self.weight += weight
        self._activations[key] = activations
        self._pending[key] = saved
        return None

    def backward(self, virtual_stage: int, micro_batch: int, dy: Array | None) -> Array | None:
        key = virtual_stage, micro_batch
        dy = self._output_gradient(key, dy)
        assert self._gradients is not None
        dx = self._chain(virtual_stage).backward(
            self._parameters, self._gradients, self._activations.pop(key), dy,
            self._reducer(virtual_stage), needs_input_gradient=self._needs_dx(virtual_stage),
        )  # fmt: skip
        self._left[virtual_stage] -= 1
        return dx if self._needs_dx(virtual_stage) else None

    def backward_input(
        self, virtual_stage: int, micro_batch: int, dy: Array | None
    ) -> Array | None:
        key = virtual_stage, micro_batch
        dy = self._output_gradient(key, dy)
        dx, self._pending[key] = self._chain(virtual_stage).backward_input(
            self._parameters, self._activations.pop(key), dy,
            needs_input_gradient=self._needs_dx(virtual_stage),
        )  # fmt: skip
        return dx if self._needs_dx(virtual_stage) else None

    def backward_weight(self, virtual_stage: int, micro_batch: int) -> None:
        assert self._gradients is not None
        pending = self._pending.pop((virtual_stage, micro_batch))
        reduce = self._reducer(virtual_stage)
        self._chain(virtual_stage).backward_weight(self._gradients, pending, reduce)
        self._left[virtual_stage] -= 1

    def _chain(self, virtual_stage: int) -> LayerChain:
        return self._chains[virtual_stage]

    def _is_last(self, virtual_stage: int) -> bool:
        return self._program.stages_here[virtual_stage] == self._program.stage_count - 1

    def _needs_dx(self, virtual_stage: int) -> bool:
        return self._program.stages_here[virtual_stage] > 0

    def _output_gradient(self, key: tuple[int, int], dy: Array | None) -> Array:
        if dy is not None:
            return dy
        assert self._loss is not None
        return self._loss.backward(self._pending.pop(key))

    def _reducer(self, virtual_stage: int) -> Any:
        """What is done with a unit when a micro-batch's gradient of it is complete."""
        gradients = self._gradients
        assert gradients is not None
        is_last = self._left[virtual_stage] == 1
        shared = self._program.shared_units

        def reduce(unit: Unit) -> None:
            if unit.index not in shared and (is_last or gradients.reduces_at_once):
                gradients.reduce(unit)

        return reduce
