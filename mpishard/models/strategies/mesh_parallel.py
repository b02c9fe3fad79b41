"""Strategies on a mesh: tensor and pipeline parallelism, and both with data parallelism."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, ClassVar

from mpishard.base import Document
from mpishard.communication import AXES, ProcessMesh
from mpishard.contracts import ILayeredModel, UserModel
from mpishard.models.engine.leaves import check_leaves
from mpishard.models.engine.update import Policy
from mpishard.models.programs.mesh_program import MeshProgram
from mpishard.models.programs.mesh_replica import MeshReplica
from mpishard.models.programs.program import Program, WholeProgram
from mpishard.models.stores.vector import ModelVector
from mpishard.models.strategies.data_parallel import DDPModel
from mpishard.models.strategies.mesh_options import (
    DATA_POLICIES,
    MeshOptions,
    Partition,
    axis_sizes,
    checked_mesh_options,
    idle_axes,
    mesh_choices,
    replica_count,
)
from mpishard.models.wrapper.base import ShardedModelBase
from mpishard.pipeline import (
    ActivationCheckpointConfig,
    GPipeSchedule,
    IPipelinePartitionStrategy,
    IPipelineSchedule,
    RecomputeStrategy,
)
from mpishard.sharding import (
    Placement,
    ShardingConfiguration,
    refuse_for_model,
    refuse_updates_alone,
)

_log = logging.getLogger("mpishard")


class MeshModel(ShardedModelBase):
    """A model whose layers are assigned to pipeline stages, and split over the tensor axis.

    The ranks that differ in pipeline and tensor coordinates alone compute one batch, and must be
    given the same one. Batches are divided by `data_rank` and `data_size`. `HybridShardedModel`
    describes all options.
    """

    policy: Policy = DDPModel.policy
    # Whether metadata describe the axis: a strategy with one axis does not describe the other.
    _describes_pipeline: ClassVar[bool] = True
    _describes_tensor_axis: ClassVar[bool] = True

    def __init__(
        self,
        wrapped_model: UserModel,
        config: ShardingConfiguration,
        pipeline_parallel_size: int = 1,
        tensor_parallel_size: int = 1,
        data_parallel_size: int = -1,
        *,
        micro_batch_count: int = 1,
        schedule: IPipelineSchedule | str | None = None,
        partition_strategy: Partition | None = None,
        checkpoint_config: ActivationCheckpointConfig | None = None,
        sequence_parallel: bool = False,
        data_parallel_strategy: str = "zero1",
        order: Sequence[str] = AXES,
    ) -> None:
        self._sizes = pipeline_parallel_size, tensor_parallel_size, data_parallel_size
        self._options = MeshOptions(
            **checked_mesh_options(
                {
                    "micro_batch_count": micro_batch_count,
                    "schedule": schedule,
                    "partition_strategy": partition_strategy,
                    "checkpoint_config": checkpoint_config,
                    "sequence_parallel": sequence_parallel,
                    "data_parallel_strategy": data_parallel_strategy,
                    "order": order,
                }
            )
        )
        super().__init__(wrapped_model, config)

    def _check_leaves(self) -> None:
        self._sizes = pipeline, tensor, _ = axis_sizes(self._config, *self._sizes)
        check_leaves(self._config, self.world_size, model_size=pipeline * tensor)

    def _on_before_initialize_sharding(self) -> None:
        model, options = self._wrapped_model, self._options
        if not self._config.auto_sync_gradients:
            refuse_updates_alone("here ranks hold parts of one")
        if isinstance(model, ILayeredModel):
            return
        name = type(model).__name__
        for_layers = {
            f"micro_batch_count={options.micro_batch_count}": options.micro_batch_count > 1,
            f"schedule={options.schedule.name!r}": not isinstance(options.schedule, GPipeSchedule),
            "partition_strategy": options.partition_strategy is not None,
            "sequence_parallel=True": options.sequence_parallel,
            "checkpoint_config": self._recomputes,
        }
        if refused := [option for option, is_given in for_layers.items() if is_given]:
            refuse_for_model(
                ", ".join(refused),
                name,
                "is a black box without layers: leave it out, or give a "
                "model that implements ILayeredModel (mpishard.nn)",
            )

    def _initialize_sharding(self) -> None:
        super()._initialize_sharding()
        program, ranks = self.engine.program, self.mesh.model_size
        found = []
        if isinstance(program, MeshProgram):
            found = idle_axes(self._wrapped_model, program.choices)
        elif ranks > 1:
            self._is_once_per_node = False  # each data axis has the parameters
            found.append(
                f"the {ranks} ranks of the pipeline and tensor axes repeat each other's work, "
                f"because {type(self._wrapped_model).__name__} is a black box: use strategy "
                "'fsdp', which divides samples and state over all ranks, or a model that "
                "implements ILayeredModel (mpishard.nn)"
            )
        # One line with all reasons: every rank would say the same.
        if self.rank == 0 and found:
            _log.warning("%r: %s", self, "; ".join(found))

    def _shared_choices(self) -> dict[str, object]:
        options = self._options
        return {
            "mesh": " x ".join(map(str, self._sizes)),
            "order": options.order,
            "schedule": options.schedule.name,
            "virtual_stages_per_rank": options.schedule.virtual_stages_per_rank,
            "micro_batch_count": options.micro_batch_count,
            "checkpoint_config": repr(options.checkpoint_config),
            "sequence_parallel": options.sequence_parallel,
            "data_parallel_strategy": options.data_parallel_strategy,
            "model": type(self._wrapped_model).__name__,
        }

    @property
    def _recomputes(self) -> bool:
        config = self._options.checkpoint_config
        return config is not None and config.strategy is not RecomputeStrategy.NONE

    def _divided(self, program: Program) -> Program:
        self.mesh = ProcessMesh(
            self.backend,
            *self._sizes,
            replica=replica_count(self._config),
            order=self._options.order,
        )
        # One data rank has no other to shard with.
        if self.mesh.data_size > 1:
            self.policy = DATA_POLICIES[self._options.data_parallel_strategy]
        # Nothing of a black box can be cut: all ranks of a replica compute the same.
        if isinstance(program, WholeProgram):
            if self.mesh.model_size > 1:
                # Of the ranks that repeat one another's work, the first counts and writes.
                reports_loss = self.mesh.model.rank == 0
                program.replica = MeshReplica(
                    self.mesh, reports_loss=reports_loss, predicts_together=False
                )
                program.vector = ModelVector(
                    Placement.whole(program.entries, is_counted=reports_loss)
                )
            return program
        model: ILayeredModel = self._wrapped_model
        return MeshProgram(model, self._config, mesh_choices(model, self.mesh, self._options))

    def _replicas(self, size: int) -> ProcessMesh:
        return self.mesh

    # ------------------------------------------------------------------------------- properties

    def _described_ranks(self) -> str:
        words, count = [self.mesh.describe()], self._options.micro_batch_count
        if not isinstance(self._wrapped_model, ILayeredModel):
            return f"{words[0]}, computed whole"
        if self.mesh.pipeline_size > 1:  # elsewhere a schedule orders nothing
            words.append(self._options.schedule.name)
        return ", ".join([*words, f"{count} micro-batch{'es' * (count > 1)}"])

    @property
    def data_parallel_strategy(self) -> str:
        """Name of the data axis's strategy."""
        return self._options.data_parallel_strategy

    @property
    def sequence_parallel(self) -> bool:
        """True if norms and dropout, too, are divided over the tensor axis."""
        return self._options.sequence_parallel

    def data_rank_of(self, rank: int) -> int:
        data = self.mesh.coordinates_of(rank)[2]
        return self.mesh.replica_of(rank) * self.mesh.data_size + data

    @property
    def micro_batch_count(self) -> int:
        """M, the number of parts into which a rank's batch is cut along the batch dim."""
        return self._options.micro_batch_count

    @property
    def schedule(self) -> IPipelineSchedule:
        """The order in which the ranks of a pipeline work."""
        return self._options.schedule

    @property
    def estimated_bubble_fraction(self) -> float:
        """The published fraction of time that a rank of the pipeline waits.

        It is 0 for one stage, and for a black box, because no rank waits for another then.
        """
        if not self.is_compute_partitioned:
            return 0.0
        return self._options.schedule.estimate_bubble_fraction(
            self.mesh.pipeline_size, self._options.micro_batch_count
        )

    @property
    def stage_layers(self) -> tuple[tuple[int, int], ...]:
        """The layers ``(first, stop)`` of each of the model's stages; () for a black box."""
        program = self.engine.program
        return program.choices.stages if isinstance(program, MeshProgram) else ()

    @property
    def partition_log(self) -> tuple[str, ...]:
        """The decision of the tensor axis on each layer of this rank's stages, and the reason."""
        program = self.engine.program
        return program.layout.log if isinstance(program, MeshProgram) else ()

    @property
    def is_compute_partitioned(self) -> bool:
        """True if ranks share a batch's computation; each computes a black box whole."""
        return isinstance(self.engine.program, MeshProgram)

    def _properties(self) -> Document:
        properties = super()._properties()
        mesh = self.mesh
        properties |= {
            "PipelineParallelSize": mesh.pipeline_size,
            "TensorParallelSize": mesh.tensor_size,
            "DataParallelSize": mesh.data_size,
            "PipelineRank": mesh.pipeline_rank,
            "TensorRank": mesh.tensor_rank,
            "DataRank": mesh.data_rank,
            "DataParallelStrategy": self._options.data_parallel_strategy,
            "ComputePartitioned": self.is_compute_partitioned,
        }
        if mesh.replica_count > 1:
            properties |= {
                "ReplicaCount": mesh.replica_count,
                "ReplicaRank": mesh.replica_rank,
            }
        if mesh.model_size > 1 and self.is_compute_partitioned:
            properties |= {
                "GradientsSharded": True,
                "GradientsReplicated": False,
                "OptimizerStateSharded": True,
                "ParametersSharded": True,
                "ParametersReplicated": False,
            }
        if self._describes_pipeline:
            strategy, by = self._options.partition_strategy, None
            if isinstance(strategy, IPipelinePartitionStrategy):
                by = type(strategy).__name__
            elif self.is_compute_partitioned:
                by = f"LoadBalanced by {'FLOPs' if strategy is None else 'given costs'}"
            properties |= {
                "StageId": self.mesh.pipeline_rank,
                "NumStages": self.mesh.pipeline_size,
                "MicroBatchCount": self._options.micro_batch_count,
                "Schedule": self._options.schedule.name if self.is_compute_partitioned else None,
                "VirtualStagesPerRank": self._options.schedule.virtual_stages_per_rank,
                "EstimatedBubbleFraction": self.estimated_bubble_fraction,
                "ActivationCheckpointing": self._recomputes,
                "PartitionStrategy": by,
                "SupportsDecomposedBackward": self.is_compute_partitioned,
            }
        if self._describes_tensor_axis:
            style = "ColumnThenRow"
            if self._options.sequence_parallel:
                style += "+Sequence"
            properties |= {
                "PartitioningStyle": style if self.is_compute_partitioned else None,
                "PartitionLog": list(self.partition_log),
            }
        return properties


class HybridShardedModel(MeshModel):
    """Layers on pipeline stages, split over the tensor axis; samples over the data axis.

    Narayanan et al., "Efficient large-scale language model training on GPU clusters using
    Megatron-LM", SC 2021 (arXiv:2104.04473). A rank holds only its stages' layers, and only its
    slice of a layer that is split. The data axis runs one of the data-parallel strategies on them.
    With a ``replica_size`` in the configuration that many ranks form a mesh of these three axes,
    and the optimizer decides what such replicas exchange: see `ShardingConfiguration`.

    Parameters
    ----------
    wrapped_model : object
        A layered model; or a black box, which the data axis trains as its strategy does alone. The
        ranks of the other axes repeat that work, and the options that divide layers are refused.
        A black box must not depend on its rank: `check_replicas` compares the repeated results.
    config : ShardingConfiguration
        Backend and choices.
    pipeline_parallel_size, tensor_parallel_size : int
        Sizes of these axes.
    data_parallel_size : int
        Size of the data axis; -1 takes what is left of the world, or of a replica.
    micro_batch_count : int
        M, the number of parts into which a rank's batch is cut along the batch dim. Their sizes may
        differ by one sample; losses are weighted sums, so the result is that of one batch.
    schedule : IPipelineSchedule or str, optional
        The order in which stages work, or its name as in ``mpishard plan schedule``. Default:
        `GPipeSchedule`.
    partition_strategy : IPipelinePartitionStrategy, callable or sequence of float, optional
        A strategy that assigns layers to stages; or the cost of each layer, as a sequence or as a
        function of its `LayerInfo`. Default: the largest stage has as few FLOPs as possible. Rank
        0's value is used.
    checkpoint_config : ActivationCheckpointConfig, optional
        Activations that are computed again in backward and not kept.
    sequence_parallel : bool
        Whether activations between split layers are divided along the sequence over the tensor axis
        (Korthikanti et al., 2022, arXiv:2205.05198). The same bytes travel, and each rank has 1/N
        of norms, dropout and their activations.
    data_parallel_strategy : {"zero1", "zero2", "fsdp", "ddp"}
        Strategy of the data axis. Under "zero2" and "fsdp" each micro-batch's gradient is reduced
        at once, and "fsdp" gathers for each.
    order : sequence of str
        The axes, slowest first: see `ProcessMesh`.

    Raises
    ------
    TypeError, ValueError
        For arguments of another type, sizes that do not make up the world, a micro-batch count
        below 1, and options for layers with a black box, before anything is communicated.
    NotImplementedError
        For activation checkpointing of a black box.
    """

    strategy: ClassVar[str] = "3D-Parallelism (Hybrid)"


class PipelineParallelModel(MeshModel):
    """Each rank holds some consecutive layers, and works on one micro-batch after the other.

    Huang et al., "GPipe", 2019 (arXiv:1811.06965), and the schedules that came after it. Outputs
    travel to the next stage and gradients back; nothing else does, but the copies of a tied
    parameter's gradient. All ranks must be given the same batch. It is the mesh (W, 1, 1) of
    `HybridShardedModel`.

    Parameters
    ----------
    wrapped_model : object
        A layered model, or a black box; see `HybridShardedModel`.
    config : ShardingConfiguration
        Backend and choices.
    micro_batch_count : int
        M, the number of parts into which the batch is cut along the batch dim.
    partition_strategy, schedule, checkpoint_config
        See `HybridShardedModel`.
    """

    strategy: ClassVar[str] = "PipelineParallel"
    _describes_tensor_axis: ClassVar[bool] = False

    def __init__(
        self,
        wrapped_model: UserModel,
        config: ShardingConfiguration,
        micro_batch_count: int = 1,
        *,
        partition_strategy: Partition | None = None,
        schedule: IPipelineSchedule | str | None = None,
        checkpoint_config: ActivationCheckpointConfig | None = None,
    ) -> None:
        super().__init__(
            wrapped_model,
            config,
            _world_size_of(config),
            1,
            1,
            micro_batch_count=micro_batch_count,
            schedule=schedule,
            partition_strategy=partition_strategy,
            checkpoint_config=checkpoint_config,
        )


class TensorParallelModel(MeshModel):
    """Each rank computes its slice of every layer that splits, and all compute one batch.

    Shoeybi et al., "Megatron-LM", 2019 (arXiv:1909.08053), section 3: linear layers in pairs, the
    first split by outputs and the second by inputs, attention by heads, embedding and
    cross-entropy by vocabulary. For each pair one all-reduce of the output in forward, one of the
    input's gradient in backward.

    All ranks must be given the same batch. It is the mesh (1, W, 1) of `HybridShardedModel`.

    Parameters
    ----------
    wrapped_model : object
        A layered model, or a black box; see `HybridShardedModel`.
    config : ShardingConfiguration
        Backend and choices.
    sequence_parallel, checkpoint_config
        See `HybridShardedModel`.
    """

    strategy: ClassVar[str] = "TensorParallel"
    _describes_pipeline: ClassVar[bool] = False

    def __init__(
        self,
        wrapped_model: UserModel,
        config: ShardingConfiguration,
        *,
        sequence_parallel: bool = False,
        checkpoint_config: ActivationCheckpointConfig | None = None,
    ) -> None:
        super().__init__(
            wrapped_model,
            config,
            1,
            _world_size_of(config),
            1,
            sequence_parallel=sequence_parallel,
            checkpoint_config=checkpoint_config,
        )


def _world_size_of(config: Any) -> int:
    """Return the number of ranks; 1 for another type, which the base class refuses."""
    is_right = isinstance(config, ShardingConfiguration)
    return config.communication_backend.world_size if is_right else 1
