"""Sharded models: strategies, the surface that users see, and the engine behind it.

To learn how FSDP works, read `strategies/data_parallel`, `wrapper/base`, `engine/engine` and
`programs/chain`. Chapters, each of which imports only those before it: `stores` hold parameters
and gradients, `programs` compute, the `engine` steps, the `wrapper` is the surface, and
`strategies` name the vectors that are sharded.
"""

from mpishard.models.engine.engine import Engine
from mpishard.models.engine.evaluation import local_gradient, measured, synchronize_gradient
from mpishard.models.engine.leaves import check_leaves
from mpishard.models.engine.passes import Passes, Reduced, local_gradients
from mpishard.models.engine.update import (
    Policy,
    StepReport,
    Update,
    UpdatePieces,
    descent,
    divided_pieces,
    pieces_to_write,
)
from mpishard.models.programs.chain import LocalLayers
from mpishard.models.programs.layered_program import LayeredProgram, whole_layers
from mpishard.models.programs.mesh_program import MeshProgram
from mpishard.models.programs.opaque_program import OpaqueProgram
from mpishard.models.programs.placed_program import (
    ArrivalPlan,
    Arrivals,
    IPlaceableModel,
    PlacedProgram,
    units_of_modules,
    views_of_entries,
)
from mpishard.models.programs.program import Program
from mpishard.models.programs.stage_layout import MeshChoices, StageLayout
from mpishard.models.stores.gradient_store import BackwardPass, GradientStore, WrappedGradients
from mpishard.models.stores.norm import squared_norm
from mpishard.models.stores.parameter_store import ParameterStore, ShardedParameters
from mpishard.models.stores.replicated_gradients import ReplicatedGradients, ScatteredGradients
from mpishard.models.stores.store_layout import StoreLayout
from mpishard.models.stores.vector import ModelVector
from mpishard.models.strategies.data_parallel import (
    DDPModel,
    FSDPModel,
    ZeRO1Model,
    ZeRO2Model,
    ZeRO3Model,
)
from mpishard.models.strategies.mesh_options import (
    DATA_POLICIES,
    MeshOptions,
    axis_sizes,
    checked_mesh_options,
    mesh_choices,
)
from mpishard.models.strategies.mesh_parallel import (
    HybridShardedModel,
    MeshModel,
    PipelineParallelModel,
    TensorParallelModel,
)
from mpishard.models.wrapper.base import ShardedModelBase
from mpishard.models.wrapper.files import ModelFiles
from mpishard.models.wrapper.local_shard import LocalShard, compare_replicas
from mpishard.models.wrapper.paged import PagedModel
from mpishard.models.wrapper.wrapped import agreed_vector
from mpishard.models.wrapper.wrapping import (
    build_engine,
    make_gradient_store,
    make_mixed_store,
    make_parameter_store,
    program_of,
    require_precision,
)

__all__ = [
    "DDPModel",
    "FSDPModel",
    "HybridShardedModel",
    "PagedModel",
    "PipelineParallelModel",
    "ShardedModelBase",
    "TensorParallelModel",
    "ZeRO1Model",
    "ZeRO2Model",
    "ZeRO3Model",
]
