"""A chain of layers on a mesh: dealt to pipeline stages, its layers split over the tensor axis."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpishard.arrays import Array
from mpishard.communication import CommunicationBackend, ProcessMesh
from mpishard.contracts import ILayeredModel
from mpishard.layout import ShardLayout
from mpishard.models.programs.chain import LayerChain
from mpishard.models.programs.layered_program import LayeredProgram
from mpishard.models.programs.program import Batch, Program
from mpishard.models.programs.replica import MeshReplica
from mpishard.models.programs.stage_layout import StageLayout, lay_out
from mpishard.models.programs.stage_run import StageRun
from mpishard.models.stores.gradient_store import GradientStore
from mpishard.models.stores.parameter_store import ParameterStore
from mpishard.models.stores.vector import MeshVector, ModelVector
from mpishard.nn.layers.layer import Context, KeyValueCache
from mpishard.pipeline import (
    ActivationCheckpointConfig,
    IPipelineSchedule,
    PipelineExecutor,
    PipelineRecord,
)
from mpishard.pipeline.plan import most_saved
from mpishard.tensor import DimSplit, parallel_loss

__all__ = ["MeshChoices", "MeshProgram"]


@dataclass(frozen=True, slots=True)
class MeshChoices:
    """How a layered model is computed on a mesh.

    Parameters
    ----------
    mesh : ProcessMesh
        Where the ranks stand.
    schedule : IPipelineSchedule
        In which order each works.
    micro_batch_count : int
        M, into how many parts along the batch dim a rank's batch is cut.
    stages : tuple of (int, int)
        The layers of each of the model's stages, half open.
    sequence_parallel : bool
        Whether norms and dropout, too, are divided over the tensor axis, along the sequence.
    checkpoint_config : ActivationCheckpointConfig, optional
        Which activations are computed again.
    """

    mesh: ProcessMesh
    schedule: IPipelineSchedule
    micro_batch_count: int
    stages: tuple[tuple[int, int], ...]
    sequence_parallel: bool = False
    checkpoint_config: ActivationCheckpointConfig | None = None

    def stages_of(self, pipeline_rank: int) -> tuple[int, ...]:
        """The model's stages that a pipeline rank has, by virtual index."""
        ranks = self.mesh.pipeline_size
        virtual = range(self.schedule.virtual_stages_per_rank)
        return tuple(self.schedule.global_stage(pipeline_rank, v, ranks) for v in virtual)


class MeshProgram(LayeredProgram):
    """Layers on a mesh of ranks. The rank's own flat vector holds its stages' slices.

    A pass runs the operations of the rank's schedule. A parameter that several stages use, as a
    tied embedding, is held by each; the copies' gradients are added up at the end of a pass.

    Parameters
    ----------
    model : ILayeredModel
        Structure, first parameters and loss.
    minimum_unit_size : int
        See `mpishard.sharding.build_units`.
    choices : MeshChoices
        How it is computed.
    """

    def __init__(self, model: ILayeredModel, minimum_unit_size: int, choices: MeshChoices) -> None:
        self.choices = choices
        self.mesh = choices.mesh
        self.micro_batch_count = choices.micro_batch_count
        self.stages_here = choices.stages_of(self.mesh.pipeline_rank)
        self.stage_count = len(choices.stages)
        super().__init__(model, minimum_unit_size, self.mesh.world)
        self.replica = MeshReplica(
            self.mesh, speaks=self._has_output and self.mesh.tensor_rank == 0
        )
        self.vector = MeshVector(self.vector.placement, self.mesh)
        self._tie_groups = self._meet_in_ties()
        self._executors: dict[int, PipelineExecutor] = {}
        self.last_record = PipelineRecord()
        """Of the last training pass: when each operation waited and computed."""

    def _executor(self, micro_batches: int) -> PipelineExecutor:
        if micro_batches not in self._executors:
            self._executors[micro_batches] = PipelineExecutor(
                self.mesh.pipeline, self.choices.schedule, micro_batches, self.dtype
            )
        return self._executors[micro_batches]

    def _lay_out(self, *, sequence_parallel: bool) -> StageLayout:
        choices = self.choices
        return lay_out(
            self._model,
            self.mesh,
            choices.stages,
            [choices.stages_of(rank) for rank in range(self.mesh.pipeline_size)],
            self._minimum_unit_size,
            sequence_parallel=sequence_parallel,
        )

    def _hold(self) -> None:
        layout = self._lay_out(sequence_parallel=self.choices.sequence_parallel)
        held = layout.held
        self.units, self.entries = held.units, tuple(held.entries)
        self.vector = ModelVector(layout.placement)
        self.shared_units = layout.shared_units()
        self._shared = layout.shared
        self._splits_output = layout.splits_output
        self.partition_log = layout.log
        self.kept = held.reused
        if len(layout.ranges) == 1 and self.micro_batch_count == 1 and self.units:
            self.kept |= {self.units[-1].index}
        self.chains = [
            LayerChain(held, *bounds, self.kept, self._recomputed(virtual, bounds[0]))
            for virtual, bounds in enumerate(layout.ranges)
        ]
        self._chains = self.chains
        self._chains_by_token: list[LayerChain] | None = None
        # A layer is asked for its shape once, and not for each micro-batch.
        self._boundaries: dict[tuple[int, tuple[int, ...], bool], tuple[int, ...]] = {}

    def _recomputed(self, virtual_stage: int, first: int) -> list[range]:
        """The segments of a stage that are computed again; its layers are held from ``first``."""
        choices = self.choices
        if choices.checkpoint_config is None:
            return []
        start, stop = choices.stages[self.stages_here[virtual_stage]]
        order = choices.schedule.get_schedule(
            self.mesh.pipeline_rank, self.mesh.pipeline_size, self.micro_batch_count
        )
        segments = choices.checkpoint_config.segments(
            self._model.get_all_layer_info()[start:stop], self._model.dtype.itemsize,
            keeps_last=most_saved(order, virtual_stage) == 1,
        )  # fmt: skip
        return [range(s.start - start + first, s.stop - start + first) for s in segments]

    @property
    def _classes(self) -> int:
        """Size of the output's last dim, where it is split."""
        return self._model.get_all_layer_info()[-1].output_shape[-1]

    @property
    def _has_output(self) -> bool:
        return self.stage_count - 1 in self.stages_here

    def structure(self) -> str:
        choices = self.choices
        names = [(e.name, e.shape) for e in self.vector.placement.entries]
        return self._kinds() + repr((
            names, sorted(self.frozen), self.mesh.sizes, self.mesh.order, choices.schedule.name,
            len(self.stages_here),
            choices.micro_batch_count, choices.stages, choices.sequence_parallel,
            self._minimum_unit_size,
        ))  # fmt: skip

    def boundary_shape(
        self, stage: int, sample_shape: tuple[int, ...], *, whole_sequence: bool = False
    ) -> tuple[int, ...]:
        """Shape of a sample of what enters ``stage``, on this rank; of the output behind all.

        ``whole_sequence`` is without sequence parallelism, whatever was chosen.
        """
        key = stage, sample_shape, whole_sequence
        if key not in self._boundaries:
            self._boundaries[key] = self._find_boundary(*key)
        return self._boundaries[key]

    def _find_boundary(
        self, stage: int, sample_shape: tuple[int, ...], whole_sequence: bool
    ) -> tuple[int, ...]:
        layers = self._model.layers
        first = self.choices.stages[stage][0] if stage < self.stage_count else len(layers)
        shape = sample_shape
        for layer in layers[:first]:
            shape = layer.output_shape(shape)
        ranks = self.mesh.tensor_size
        if self.choices.sequence_parallel and not whole_sequence and 0 < first < len(layers):
            shape = (ShardLayout(shape[0], ranks).size(self.mesh.tensor_rank), *shape[1:])
        if self._splits_output and first == len(layers):
            shape = (*shape[:-1], ShardLayout(shape[-1], ranks).size(self.mesh.tensor_rank))
        return shape

    # ------------------------------------------------------------------------------- computing

    def check_next(self, x: Any) -> Array:
        super()._output_shape(x)  # of any length: see `predict_next`
        return self._model.as_input(x)

    def _output_shape(self, x: Any) -> tuple[int, ...]:
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
    ) -> tuple[float, float]:
        loss = batch.loss
        assert loss is not None
        if self._splits_output:
            loss = parallel_loss(loss, self.mesh.tensor, self._classes)
        run = StageRun(self, parameters, batch.x, batch.context, gradients, batch.y, loss)
        self.last_record = self._executor(self.micro_batch_count).run(run)
        self._add_ties(gradients)
        return (run.total, run.weight) if self.replica.speaks else (0.0, 0.0)

    def predict(self, parameters: ParameterStore, x: Array) -> Array:
        run = StageRun(self, parameters, x, Context(training=False))
        self._executor(self.micro_batch_count).run_forward(run)
        return self._output_of(run)

    def predict_next(self, parameters: ParameterStore, x: Array, cache: KeyValueCache) -> Array:
        # A token alone is no sequence that could be cut: the same parameters, uncut activations.
        chains = self.chains
        if self.choices.sequence_parallel:
            if self._chains_by_token is None:
                layout = self._lay_out(sequence_parallel=False)
                self._chains_by_token = [
                    LayerChain(layout.held, *bounds, self.kept) for bounds in layout.ranges
                ]
            chains = self._chains_by_token
        context = Context(training=False, cache=cache)
        run = StageRun(self, parameters, x, context, chains=chains, micro_batches=1)
        self._executor(1).run_forward(run)
        run.outputs = [y[:, -1] for y in run.outputs]
        return self._output_of(run)

    def _output_of(self, run: StageRun) -> Array:
        """The model's output on every rank of the replica. Collective."""
        y = None
        if self._has_output:
            xp = self.device.namespace
            y = run.outputs[0] if len(run.outputs) == 1 else xp.concatenate(run.outputs)
            if self._splits_output:
                y = DimSplit(self._classes, self.mesh.tensor_size).gather(
                    self.mesh.tensor, np.ascontiguousarray(y) if isinstance(y, np.ndarray) else y
                )
        if self.mesh.pipeline_size == 1:
            assert y is not None
            return y
        return self.mesh.pipeline.broadcast(y, root=self._output_rank)

    @property
    def _output_rank(self) -> int:
        ranks = range(self.mesh.pipeline_size)
        return next(r for r in ranks if self.stage_count - 1 in self.choices.stages_of(r))

    # ------------------------------------------------------------------------ shared parameters

    def _meet_in_ties(self) -> dict[str, CommunicationBackend]:
        """The ranks that hold a shared parameter, by its name, where there are several."""
        groups = {}
        pipeline = self.mesh.pipeline
        for name, ranks in self._shared.items():
            if len(ranks) == 1:
                continue
            is_all = len(ranks) == pipeline.world_size
            group = pipeline if is_all else pipeline.split(0 if pipeline.rank in ranks else None)
            if group is not None and pipeline.rank in ranks:
                groups[name] = group
        return groups

    def _add_ties(self, gradients: GradientStore) -> None:
        """Add up the copies' gradients of shared parameters, and reduce those over the replicas."""
        for unit in self.units:
            if unit.index not in self.shared_units or unit.index in self.frozen_units:
                continue
            name = self.shared_units[unit.index]
            if gradients.sends_now and name in self._tie_groups:
                self._tie_groups[name].all_reduce(gradients.gradient(unit))
            gradients.reduce(unit)

    def finish_local(self, gradients: GradientStore) -> None:
        """Add up the copies of shared parameters in a gradient that is not reduced."""
        for index, name in self.shared_units.items():
            if name in self._tie_groups and index not in self.frozen_units:
                self._tie_groups[name].all_reduce(gradients.gradient(self.units[index]))

    def copy(self) -> tuple[Program, Any]:
        program = copy.copy(self)
        program._model = self._copied_model()
        program._hold()
        program.vector = self.vector
        return self._copied(program), program._model
