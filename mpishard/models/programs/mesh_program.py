"""A chain of layers on a mesh: divided into stages, its layers split over the tensor axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mpishard.base import BFLOAT16, Array, Data, Scalar, ShardLayout, is_device_array
from mpishard.communication import CommunicationBackend
from mpishard.contracts import ILayeredModel, ILossFunction
from mpishard.models.programs.chain import LayerChain, Reduce
from mpishard.models.programs.layered_program import LayeredProgram
from mpishard.models.programs.mesh_replica import MeshReplica
from mpishard.models.programs.program import Batch, unread_loss
from mpishard.models.programs.stage_layout import MeshChoices, StageLayout
from mpishard.models.stores.gradient_store import GradientStore
from mpishard.models.stores.parameter_store import ParameterStore
from mpishard.models.stores.vector import MeshVector, ModelVector
from mpishard.nn import Context, KeyValueCache
from mpishard.pipeline import (
    IPipelineStage,
    PipelineExecutor,
    most_saved,
)
from mpishard.sharding import ShardingConfiguration, Unit
from mpishard.tensor import DimSplit, parallel_loss


class MeshProgram(LayeredProgram):
    """Layers on a mesh of ranks. The rank's own flat vector holds its stages' slices.

    A pass runs the operations of the rank's schedule. A parameter that several stages use, as a
    tied embedding, is held by each; the copies' gradients are added up at the end of a pass.

    Parameters
    ----------
    model : ILayeredModel
        Structure, initial parameters and loss.
    config : ShardingConfiguration
        See `LayeredProgram`. Stages that compute in bfloat16 also send it.
    choices : MeshChoices
        Mesh, schedule and stages.
    """

    def __init__(
        self, model: ILayeredModel, config: ShardingConfiguration, choices: MeshChoices
    ) -> None:
        self.choices = choices
        self.mesh = choices.mesh
        self.micro_batch_count = choices.micro_batch_count
        self.stages_here = choices.stages_of(self.mesh.pipeline_rank)
        self.stage_count = len(choices.stages)
        # After these attributes, because it calls `_lay_out`.
        super().__init__(model, config)
        # One rank reports the loss of a batch: the last stage computes it, and its tensor ranks all
        # have the same.
        self.replica = MeshReplica(
            self.mesh, reports_loss=self._has_output and self.mesh.tensor_rank == 0
        )
        # After the base class, which lays out this rank's part; other ranks' come by a message.
        self.vector = self._make_vector()
        # The group of ranks that hold each shared parameter.
        self._tie_groups: dict[str, CommunicationBackend] = {}
        pipeline = self.mesh.pipeline
        for name, ranks in self.layout.shared.items():
            # The pipeline's communicator is the group if all its ranks hold the parameter: a split
            # would make another one.
            is_here, is_all = pipeline.rank in ranks, len(ranks) == pipeline.world_size
            if len(ranks) > 1:
                group = pipeline if is_all else pipeline.split(0 if is_here else None)
                if group is not None and is_here:
                    self._tie_groups[name] = group
        self._executors: dict[int, PipelineExecutor] = {}

    def _make_vector(self) -> ModelVector:
        """Return the layout of the model's vector over the ranks. Collective."""
        return MeshVector(self.vector.placement, self.mesh)

    def _executor(self, micro_batches: int) -> PipelineExecutor:
        # Kept by number of micro-batches: each has the plan of its own schedule.
        if micro_batches not in self._executors:
            dtype = BFLOAT16 if self._mixed else self.dtype
            self._executors[micro_batches] = PipelineExecutor(
                self.mesh.pipeline, self.choices.schedule, micro_batches, dtype
            )
        return self._executors[micro_batches]

    def _make_layout(self) -> StageLayout:
        """Return this rank's layers and parameters."""
        return StageLayout(self._model, self.choices, self._minimum_unit_size)

    def _lay_out(self) -> None:
        self.layout = layout = self._make_layout()
        local = layout.layers
        self.units, self.entries = local.units, tuple(local.entries)
        self.vector = ModelVector(layout.placement)
        self.kept = local.reused
        if len(layout.ranges) == 1 and self.micro_batch_count == 1 and self.units:
            # Backward begins with the last unit, which would otherwise be gathered twice.
            self.kept |= {self.units[-1].index}
        self.chains = [
            LayerChain(
                local,
                *bounds,
                self.kept,
                self._recomputed(virtual, bounds[0]),
                precision=self._products,
            )
            for virtual, bounds in enumerate(layout.ranges)
        ]
        self._chains_by_token: list[LayerChain] | None = None
        # Each layer computes its shape once, and not for each micro-batch.
        self._boundaries: dict[tuple[int, tuple[int, ...], bool], tuple[int, ...]] = {}

    def _recomputed(self, virtual_stage: int, first: int) -> list[range]:
        """Return segments that are computed again; the stage's own layers begin at ``first``."""
        choices = self.choices
        if choices.checkpoint_config is None:
            return []
        start, stop = choices.stages[self.stages_here[virtual_stage]]
        order = choices.schedule.get_schedule(
            self.mesh.pipeline_rank, self.mesh.pipeline_size, self.micro_batch_count
        )
        segments = choices.checkpoint_config.segments(
            self._model.get_all_layer_info()[start:stop],
            self._model.dtype.itemsize,
            keeps_last=most_saved(order, virtual_stage) == 1,
        )
        return [range(s.start - start + first, s.stop - start + first) for s in segments]

    @property
    def _classes(self) -> int:
        """Size of the output's last dim, if it is split."""
        return self._model.get_all_layer_info()[-1].output_shape[-1]

    @property
    def _has_output(self) -> bool:
        return self.stage_count - 1 in self.stages_here

    def boundary_shape(
        self, stage: int, sample_shape: tuple[int, ...], *, whole_sequence: bool = False
    ) -> tuple[int, ...]:
        """Return the shape of a sample that enters ``stage`` on this rank.

        After the last stage it is that of the output. ``whole_sequence`` ignores sequence
        parallelism.
        """
        key = stage, sample_shape, whole_sequence
        if key not in self._boundaries:
            layers = self._model.layers
            first = self.choices.stages[stage][0] if stage < self.stage_count else len(layers)
            shape = sample_shape
            for layer in layers[:first]:
                shape = layer.output_shape(shape)
            ranks, rank = self.mesh.tensor_size, self.mesh.tensor_rank
            if self.choices.sequence_parallel and not whole_sequence and 0 < first < len(layers):
                # Between layers each tensor rank has its slice of the sequence; the chain's input
                # and output are whole.
                shape = (ShardLayout(shape[0], ranks).size(rank), *shape[1:])
            if self.layout.splits_output and first == len(layers):
                shape = (*shape[:-1], ShardLayout(shape[-1], ranks).size(rank))
            self._boundaries[key] = shape
        return self._boundaries[key]

    # ------------------------------------------------------------------------------- computing

    def check_next(self, x: Data) -> Array:
        super()._output_shape(x)  # of any length: see `predict_next`
        return self._model.as_input(x)

    def _output_shape(self, x: Data) -> tuple[int, ...]:
        shape = super()._output_shape(x)
        ranks = self.mesh.tensor_size
        if self.choices.sequence_parallel and x.shape[1] % ranks:
            raise ValueError(
                f"sequence_parallel cuts sequences into {ranks} equal parts, and {x.shape[1]} is "
                f"no multiple of {ranks}: pad them, or give sequence_parallel=False"
            )
        return shape

    def train(
        self, parameters: ParameterStore, gradients: GradientStore, batch: Batch
    ) -> tuple[Scalar, Scalar]:
        assert batch.loss is not None
        loss = self.loss_here(batch.loss)
        run = StageRun(self, parameters, replace(batch, loss=loss), gradients)
        self._executor(self.micro_batch_count).run(run)
        # Each stage that uses a shared parameter has a copy of it, and a part of its gradient.
        for unit in self.units:
            if unit.index not in self.layout.shared_units or unit.index in self.frozen_units:
                continue
            name = self.layout.shared_units[unit.index]
            # Accumulated gradients are added up in the round's last pass, as those of replicas are.
            if gradients.sends_now and name in self._tie_groups:
                self._tie_groups[name].all_reduce(gradients.gradient(unit))
            gradients.reduce(unit)
        # One rank of a batch reports the loss, so that the sum over all ranks counts it once.
        return (run.total, run.weight) if self.replica.reports_loss else (0.0, 0.0)

    def loss_here(self, loss: ILossFunction) -> ILossFunction:
        """Return the loss of this rank's part of the output."""
        # The ranks' logits are parts of the classes, and the loss adds up their sums. Gathered
        # logits would be the largest array of the step.
        if self.layout.splits_output:
            return parallel_loss(loss, self.mesh.tensor, self._classes)
        return loss

    def predict(self, parameters: ParameterStore, x: Array) -> Array:
        run = StageRun(self, parameters, Batch(x, None, None, Context(training=False)))
        self._executor(self.micro_batch_count).run_forward(run)
        return self._output_of(run)

    def predict_next(self, parameters: ParameterStore, x: Array, cache: KeyValueCache) -> Array:
        # A single token cannot be cut along the sequence. These chains have the same parameters,
        # and whole activations.
        chains = self.chains
        if self.choices.sequence_parallel:
            if self._chains_by_token is None:
                choices = replace(self.choices, sequence_parallel=False)
                layout = StageLayout(self._model, choices, self._minimum_unit_size)
                self._chains_by_token = [
                    LayerChain(layout.layers, *bounds, self.kept, precision=self._products)
                    for bounds in layout.ranges
                ]
            chains = self._chains_by_token
        batch = Batch(x, None, None, Context(training=False, cache=cache))
        run = StageRun(self, parameters, batch, chains=chains, micro_batches=1)
        self._executor(1).run_forward(run)
        # Sampling needs the last position alone, so no more than that is sent to the other ranks.
        run.outputs = [y[:, -1] for y in run.outputs]
        return self._output_of(run)

    def _output_of(self, run: StageRun) -> Array:
        """Return the model's output on all ranks that compute the batch. Collective."""
        y = None
        if self._has_output:
            xp = self.device.namespace
            y = run.outputs[0] if len(run.outputs) == 1 else xp.concatenate(run.outputs)
            if self.layout.splits_output:
                y = DimSplit(self._classes, self.mesh.tensor_size).gather(
                    self.mesh.tensor, y if is_device_array(y) else np.ascontiguousarray(y)
                )
        if self.mesh.pipeline_size == 1:
            assert y is not None
            return self.leaving(y)
        ranks = range(self.mesh.pipeline_size)
        # In a V-shaped schedule the last stage is on the first rank.
        last = next(r for r in ranks if self.stage_count - 1 in self.choices.stages_of(r))
        return self.leaving(self.mesh.pipeline.broadcast(y, root=last))

    def finish_local(self, gradients: GradientStore) -> None:
        """Add up the copies of shared parameters in a gradient that is not reduced."""
        for index, name in self.layout.shared_units.items():
            if name in self._tie_groups and index not in self.frozen_units:
                self._tie_groups[name].all_reduce(gradients.gradient(self.units[index]))


class StageRun(IPipelineStage):
    """The operations of a schedule on this rank, and the saved activations of micro-batches.

    Parameters
    ----------
    program : MeshProgram
        The program of these stages.
    parameters : ParameterStore
        Parameters of the stages.
    batch : Batch
        This rank's batch. Backward follows if its context is one of training.
    gradients : GradientStore, optional
        Store to add gradients to; None if only outputs are wanted.
    chains : sequence of LayerChain, optional
        Stages that work on whole sequences, instead of the program's own.
    micro_batches : int, optional
        Number of parts of the batch, if not the program's.

    Attributes
    ----------
    total, weight : float
        Sums of the loss over the micro-batches, in the last stage.
    outputs : list of Array
        The last stage's, by micro-batch, if only outputs are wanted.
    """

    def __init__(
        self,
        program: MeshProgram,
        parameters: ParameterStore,
        batch: Batch,
        gradients: GradientStore | None = None,
        *,
        chains: Sequence[LayerChain] | None = None,
        micro_batches: int | None = None,
    ) -> None:
        self._program = program
        self._chains = program.chains if chains is None else chains
        self._whole_sequence = self._chains is not program.chains
        self._parameters = parameters
        self._gradients = gradients
        self._batch = batch
        # Parts may differ by one sample: weighted sums need no equal ones.
        self._rows = ShardLayout(len(batch.x), micro_batches or program.micro_batch_count)
        self._activations: dict[tuple[int, int], list[object]] = {}
        self._pending: dict[tuple[int, int], list[object]] = {}
        self._left = [self._rows.world_size] * len(self._chains)
        self.total: Scalar = 0.0
        self.weight: Scalar = 0.0
        self.outputs: list[Array] = []

    def input_shape(self, virtual_stage: int, micro_batch: int) -> tuple[int, ...]:
        return self._boundary(self._program.stages_here[virtual_stage], micro_batch)

    def output_shape(self, virtual_stage: int, micro_batch: int) -> tuple[int, ...]:
        return self._boundary(self._program.stages_here[virtual_stage] + 1, micro_batch)

    def describe(self, virtual_stage: int) -> str:
        names = self._chains[virtual_stage].names
        layers = "no layers" if not names else f"layer {names[0]!r}"
        if len(names) > 1:
            layers = f"layers {names[0]!r} to {names[-1]!r}"
        return f"virtual stage {virtual_stage} ({layers})"

    def _boundary(self, stage: int, micro_batch: int) -> tuple[int, ...]:
        shape = self._program.boundary_shape(
            stage, tuple(self._batch.x.shape[1:]), whole_sequence=self._whole_sequence
        )
        return (self._rows.size(micro_batch), *shape)

    def forward(self, virtual_stage: int, micro_batch: int, x: Array | None) -> Array | None:
        rows = self._rows.slice(micro_batch)
        # The first stage has no sender: its input is the batch.
        if x is None:
            x = self._program.entering(self._batch.x[rows])
        batch, context = self._batch, self._batch.context
        if context.training:
            # Dropout's masks depend on the sample's place in the global batch alone.
            start = context.sample_start + rows.start
            context = replace(context, sample_start=start)
        chain = self._chains[virtual_stage]
        # The chain knows nothing of micro-batches: what it saves belongs to this call.
        y, activations = chain.forward(self._parameters, x, context)
        is_last = self._program.stages_here[virtual_stage] == self._program.stage_count - 1
        if not context.training:
            chain.release_kept(self._parameters)
            if is_last:
                self.outputs.append(y)
            return None if is_last else y
        key = virtual_stage, micro_batch
        if not is_last:
            self._activations[key] = activations
            return y
        assert batch.loss is not None
        prediction = self._program.leaving_for(batch.loss, y)
        total, weight, saved = batch.loss.forward(prediction, batch.y[rows])
        self.total = self.total + unread_loss(total, batch.loss)
        self.weight = self.weight + weight
        self._activations[key] = activations
        self._pending[key] = saved
        return None

    def backward(self, virtual_stage: int, micro_batch: int, dy: Array | None) -> Array | None:
        dx = self._backward(virtual_stage, micro_batch, dy, None)
        self._left[virtual_stage] -= 1
        return dx

    def backward_input(
        self, virtual_stage: int, micro_batch: int, dy: Array | None
    ) -> Array | None:
        pending: list[object] = []
        dx = self._backward(virtual_stage, micro_batch, dy, pending)
        self._pending[virtual_stage, micro_batch] = pending
        return dx

    def _backward(
        self, virtual_stage: int, micro_batch: int, dy: Array | None, pending: list[object] | None
    ) -> Array | None:
        key = virtual_stage, micro_batch
        if dy is None:  # the model's last stage begins with the loss
            assert self._batch.loss is not None
            dy = self._program.entering(self._batch.loss.backward(self._pending.pop(key)))
        assert self._gradients is not None
        is_first = self._program.stages_here[virtual_stage] == 0
        dx = self._chains[virtual_stage].backward(
            self._parameters,
            self._gradients,
            self._activations.pop(key),
            dy,
            self._reducer(virtual_stage),
            needs_input_gradient=not is_first,
            pending=pending,
        )
        return None if is_first else dx

    def backward_weight(self, virtual_stage: int, micro_batch: int) -> None:
        assert self._gradients is not None
        pending = self._pending.pop((virtual_stage, micro_batch))
        reduce = self._reducer(virtual_stage)
        self._chains[virtual_stage].backward_weight(self._gradients, pending, reduce)
        self._left[virtual_stage] -= 1

    def _reducer(self, virtual_stage: int) -> Reduce:
        """Return a function that reduces a unit when its gradient is complete."""
        gradients = self._gradients
        assert gradients is not None
        # The last micro-batch completes a gradient, and with stage 2 or 3 of ZeRO each one is
        # reduced at once.
        is_last = self._left[virtual_stage] == 1
        shared = self._program.layout.shared_units

        def reduce(unit: Unit) -> None:
            # Copies of a shared parameter are added up after the whole schedule: see `train`.
            if unit.index not in shared and (is_last or gradients.reduces_at_once):
                gradients.reduce(unit)

        return reduce
