"""A forward and backward pass whose layers compute nothing, and reserve what they would make.

Chains, segments that are computed again, micro-batches and schedules are those of a run: they
decide how long each array lives.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from mpishard.base import BFLOAT16, RETURNED_BYTES, Array, DType, widened_dtype
from mpishard.contracts import ILayeredModel, ILossFunction, Saved
from mpishard.models import LayeredProgram, MeshChoices, MeshProgram, ModelVector, StageLayout
from mpishard.nn import Context, Gradients, GradientTargets, Layer, Parameters
from mpishard.pipeline import IPipelineStage, PipelineOperationType
from mpishard.planning.reserved import ReservedArray
from mpishard.sharding import ShardingConfiguration


class Activations:
    """An account of reserved arrays: the most bytes that lived at once, large and small ones apart.

    The process keeps the memory of small arrays for the next small ones (`reuse_freed_memory`).
    That of large arrays comes from the system, and returns to it.
    """

    def __init__(self) -> None:
        self._held, self._peak = [0, 0], [0, 0]

    @property
    def peak(self) -> int:
        """The most bytes of small arrays, and of large ones."""
        return sum(self._peak)

    def array(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """Return an array, counted until Python frees it."""
        array = ReservedArray(shape, dtype)
        is_large = array.nbytes >= RETURNED_BYTES
        self._held[is_large] += array.nbytes
        self._peak[is_large] = max(self._peak[is_large], self._held[is_large])
        weakref.finalize(array, self._free, array.nbytes, is_large).atexit = False
        return array

    def _free(self, nbytes: int, is_large: bool) -> None:
        self._held[is_large] -= nbytes


class PlannedLayer(Layer):
    """A layer that reserves its output and what it saves.

    Parameters
    ----------
    layer : Layer
        The layer.
    activations : Activations
        The account.
    dtype : numpy.dtype
        Dtype of activations.
    """

    pending_is_saved_and_dy = True

    def __init__(self, layer: Layer, activations: Activations, dtype: DType) -> None:
        self._layer = layer
        self._activations = activations
        self._dtype = dtype
        self._names = [name for name, _ in layer.walk_parameters()]
        # Micro-batches have one shape.
        self._shapes = functools.cache(self._of_shape)

    def _of_shape(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], Any]:
        return self.output_shape(shape), self._layer.saved_activations(shape, self._dtype)

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        return self._layer.output_shape(input_shape)

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Saved]:
        batch, *sample = x.shape
        shape, saves = self._shapes(tuple(sample))
        is_view = saves.is_view and math.prod(shape) == math.prod(sample)
        y = x.reshape(batch, *shape) if is_view else self._array((batch, *shape))
        kept = [
            array for array, keeps in ((x, saves.keeps_input), (y, saves.keeps_output)) if keeps
        ]
        byte = np.dtype(np.uint8)
        kept += [self._activations.array((batch * nbytes,), byte) for nbytes in saves.arrays]
        return y, (x.shape, kept)

    def backward_input(self, p: Parameters, saved: Saved, dy: Array) -> tuple[Array | None, Saved]:
        # A layer may keep all that it saved, and dy, until the gradient of its parameters is made.
        return self._input_gradient(saved), (saved, dy)

    def backward_weight(self, pending: Saved, g: Gradients) -> None:
        if isinstance(g, GradientTargets):
            for name in self._names:
                g.unwritten(name)

    def _input_gradient(self, saved: Saved) -> Array | None:
        return None if self._layer.takes_integers else self._array(saved[0])

    def _array(self, shape: tuple[int, ...]) -> Array:
        return self._activations.array(shape, self._dtype)


class PlannedLoss(ILossFunction):
    """A loss that saves its gradient, as those of `mpishard.nn` do.

    Parameters
    ----------
    loss : ILossFunction or None
        The loss of the model.
    activations : Activations
        The account.
    """

    def __init__(self, loss: ILossFunction | None, activations: Activations) -> None:
        self.computes_bfloat16 = loss is not None and loss.computes_bfloat16
        self._activations = activations

    def check_target(self, prediction_shape: tuple[int, ...], target: Any) -> None: ...

    def forward(
        self, prediction: Array, target: Any, training: bool = True
    ) -> tuple[float, float, Saved]:
        return 0.0, 1.0, self._activations.array(prediction.shape, prediction.dtype)

    def backward(self, saved: Saved) -> Array:
        gradient: Array = saved
        return gradient


class _Planned(LayeredProgram):
    """The part that both programs below have in common."""

    activations: Activations

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of a sample."""
        return tuple(self._input_shape)

    @property
    def takes_integers(self) -> bool:
        """True if samples are integers."""
        return bool(self._model.layers[0].takes_integers)

    def _reserve(self, activations: Activations) -> None:
        self.activations = activations
        self.activation_dtype = BFLOAT16 if self._mixed else self.dtype
        make = functools.partial(PlannedLayer, activations=activations, dtype=self.activation_dtype)
        for chain in self.chains:
            chain.use_layers(make)

    def entering(self, values: Array) -> Array:
        if not self._mixed or values.dtype.kind != "f":
            return values
        return self.activations.array(values.shape, BFLOAT16)

    def leaving(self, values: Array) -> Array:
        if not self._mixed:
            return values
        return self.activations.array(values.shape, widened_dtype(values.dtype))


class PlannedProgram(_Planned):
    """A chain of layers on one axis."""

    def __init__(
        self, model: ILayeredModel, config: ShardingConfiguration, activations: Activations
    ) -> None:
        super().__init__(model, config)
        self._reserve(activations)


class PlannedMeshProgram(MeshProgram, _Planned):
    """Layers of one rank of a mesh."""

    def __init__(
        self,
        model: ILayeredModel,
        config: ShardingConfiguration,
        choices: MeshChoices,
        activations: Activations,
        layout: StageLayout,
    ) -> None:
        self._known_layout = layout
        super().__init__(model, config, choices)
        self._reserve(activations)

    def _make_layout(self) -> StageLayout:
        return self._known_layout

    def loss_here(self, loss: ILossFunction) -> ILossFunction:
        # A loss of a part of the classes takes float32.
        return PlannedLoss(None, self.activations) if self.layout.splits_output else loss

    def _make_vector(self) -> ModelVector:
        return self.vector  # Nothing is gathered, so that other ranks' parts are not needed.

    def _executor(self, micro_batches: int) -> Any:
        return _Replay(self)


class _Replay:
    """The operations of one rank in the schedule's order; inputs come from nowhere."""

    def __init__(self, program: PlannedMeshProgram) -> None:
        self._program = program

    def run(self, stage: IPipelineStage) -> None:
        program, choices = self._program, self._program.choices
        mesh, count = choices.mesh, choices.micro_batch_count
        order = choices.schedule.get_schedule(mesh.pipeline_rank, mesh.pipeline_size, count)
        for operation in order:
            virtual, micro_batch = operation.virtual_stage_index, operation.micro_batch_index
            key = virtual, micro_batch
            compute: Callable[..., Array | None] = getattr(stage, operation.type)
            at = program.stages_here[virtual]
            if operation.type is PipelineOperationType.BACKWARD_WEIGHT:
                compute(*key)
                continue
            is_forward = operation.type is PipelineOperationType.FORWARD
            has_input = at > 0 if is_forward else at < program.stage_count - 1
            shape = (stage.input_shape if is_forward else stage.output_shape)(*key)
            given = None
            if has_input:
                given = program.activations.array(shape, program.activation_dtype)
            # The result is sent: it is freed when the next operation begins.
            compute(*key, given)
            del given
