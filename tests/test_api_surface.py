"""The documented members, as one table: names, arguments and defaults of every class.

Properties stand by name, methods as they are called, without annotations. Of what the mirrored
hierarchy has, these are left out on purpose:

* ``_ensure_sharding_initialized``: wrapping deals the parameters, so there is no later moment;
* ``_offload_gradients_to_cpu``, ``_offload_params_to_cpu``, ``_begin_cpu_offload_scope``: where
  memory lies is the business of mpishard/models/stores/offload.py, chosen by the configuration;
* ``_get_authoritative_parameter_source``: the engine's parameter store;
* ``INumericOperations``: NumPy or CuPy, which ``_num_ops`` is;
* ``_run_*_step`` of optimizers: one engine makes all steps;
* ``_apply_reduction_operation``: one tree (mpishard/communication/contract/reduction.py).
"""

import inspect
import re

import pytest

import mpishard as ms
from mpishard import mirror as contracts
from mpishard import optimizers, training
from mpishard.nn import ComputationNode, Loss

COLLECTIVES = """
    all_reduce(array, operation=SUM, *, out=None, subject=0)
    reduce_scatter(array, operation=SUM, *, counts=None, strict=False, out=None, subject=0)
    all_gather(array, *, out=None, subject=0)
    broadcast(array, root=0, *, subject=0)
    scatter(array, root=0, *, counts=None, strict=False, subject=0)
    gather(array, root=0, *, subject=0)
    all_to_all(parts)
    barrier(*, subject=0)
"""
TWINS = re.sub(r"(\w+)\(", r"\1_async(", COLLECTIVES)
BACKEND = f"""
    rank world_size is_initialized local_rank node_count
    initialize() shutdown() abort(error) print(*values) __enter__() __exit__(kind, error, trace)
    {COLLECTIVES} {TWINS}
    send(array, destination_rank, tag=0) receive(source_rank, count, tag=0, *, dtype=None)
    split(color, key=None) shrink() allocate_shared(length, dtype)
    _on_initialize() _on_shutdown()
"""
SERIALIZER = "serialize() deserialize(data) save_model(path) load_model(path)"
STREAMS = f"{SERIALIZER} save_state(stream) load_state(stream)"
PARAMETERS = """
    parameter_count supports_parameter_initialization
    get_parameters() set_parameters(parameters) with_parameters(parameters)
    sanitize_parameters(parameters) get_parameter_chunks() set_parameter_chunks(chunks)
"""
FEATURES = """
    get_active_feature_indices() set_active_feature_indices(indices) is_feature_used(index)
    get_feature_importance()
"""
SHAPES = "get_input_shape() get_output_shape() get_dynamic_shape_info()"
MODEL = f"""
    default_loss_function supports_jit_compilation
    train(x, y) predict(x) get_model_metadata() {STREAMS} {PARAMETERS} {FEATURES} {SHAPES}
    clone() deep_copy() compute_gradients(x, y, loss_function=None)
    apply_gradients(gradients, learning_rate) export_computation_graph(input_nodes)
    close() __enter__() __exit__(kind, error, traceback)
"""
LAYERED = """
    layers layer_count get_layer_info(index) get_all_layer_info() validate_partition_point(after)
    extract_sub_model(start, end)
"""
SHARDED = f"""
    {MODEL} wrapped_model rank world_size sharding_configuration local_parameter_shard
    gather_full_parameters() synchronize_gradients()
"""
SHARDED_BASE = f"""
    {SHARDED} owned_ranges check_replicas() accumulate(*, defer=False) unsharded(root=None)
    loss_and_gradients(x, y) evaluate(x, y)
    _cached_full_parameters _local_shard _num_ops _shard_size _shard_start_index
    _wrapped_model_internal
    _initialize_sharding() _on_before_initialize_sharding() _invalidate_cache()
    _update_local_shard_from_full(full)
"""
OPTIMIZER = "optimize(input_data) get_options() reset() should_early_stop()"
GRADIENT_BASED = f"""
    {OPTIMIZER} last_computed_gradients get_current_learning_rate()
    update_parameters(parameters, gradients) reverse_update(updated, gradients)
    apply_gradients(*given)
"""
SHARDED_OPTIMIZER = f"""
    {OPTIMIZER} wrapped_optimizer rank world_size sharding_configuration
    synchronize_optimizer_state()
"""
SHARDED_OPTIMIZER_BASE = f"""
    {SHARDED_OPTIMIZER} {STREAMS} last_computed_gradients apply_gradients(gradients, model)
    step(model, x, y) get_current_learning_rate() _synchronize_parameters(model)
    set_model(model) update_parameters(parameters, gradients) reverse_update(updated, gradients)
"""
SCHEDULE = """
    name virtual_stages_per_rank get_schedule(stage_id, num_stages, num_micro_batches)
    estimate_bubble_fraction(num_stages, num_micro_batches)
"""
PARTITION = "compute_partition(total_parameters, num_stages)"
PRESETS = " ".join(
    f"create_{name}(communication_backend, learning_rate=0.01)"
    for name in (
        "default",
        "for_high_bandwidth",
        "for_low_bandwidth",
        "for_zero_offload",
        "for_zero_offload_full",
    )
)
CONFIGURATION = (
    "ShardingConfiguration(communication_backend, learning_rate=0.01, *, auto_sync_gradients=True, "
    "minimum_parameter_group_size=1024, enable_gradient_compression=False, "
    "cpu_offload_optimizer=False, cpu_offload_gradients=False, cpu_offload_parameters=False, "
    "gradient_leaves=None, check_collectives=True, allow_nonfinite=False, precision=None, "
    "replica_size=None)"
)
MESH_MODEL = f"""
    {SHARDED_BASE} data_rank data_size micro_batch_count schedule estimated_bubble_fraction
    stage_layers partition_log is_compute_partitioned
"""
RATE = "learning_rate={}"
COMMON = "weight_decay=0.0, clip_global_norm=None, clip_value=None, parameter_options=None"
INPUT_DATA = (
    "OptimizationInputData(*, model=None, x_train, y_train=None, x_validation=None, "
    "y_validation=None, x_test=None, y_test=None, local_data=False, batch_size=32, epochs=None, "
    "max_steps=None, seed=0, shuffle=True, drop_last=False, shuffle_block_size=None, "
    "validate_every=None, patience=None, tolerance=0.0, keep_best=None, "
    "training_statistics=False, predictions=False, checkpoint=None, checkpoint_every=None, "
    "keep_last=2, keep_every=None, checkpoint_async=False, resume=None, user_state=None, "
    "digest_every=None, progress=True, throughput_unit='samples', metrics=None, callbacks=())"
)

# Class, how it is made (or nothing, of an interface), members.
CLASSES = [
    # 1.1, models
    (contracts.IModel, "", "train(x, y) predict(x) get_model_metadata()"),
    (contracts.IModelSerializer, "", SERIALIZER),
    (contracts.ICheckpointableModel, "", STREAMS),
    (contracts.IParameterizable, "", PARAMETERS),
    (contracts.IFeatureAware, "", FEATURES.replace("get_feature_importance()", "")),
    (contracts.IFeatureImportance, "", "get_feature_importance()"),
    (contracts.ICloneable, "", "clone() deep_copy()"),
    (contracts.IGradientComputable, "",
     "compute_gradients(x, y, loss_function=None) apply_gradients(gradients, learning_rate)"),
    (contracts.IJitCompilable, "",
     "supports_jit_compilation export_computation_graph(input_nodes)"),
    (contracts.IFullModel, "", MODEL),
    (contracts.IModelShape, "", SHAPES),
    (contracts.IParameterSource, "", "parameter_count get_parameters() get_parameter_chunks()"),
    (contracts.ILayeredModel, "", LAYERED),
    (contracts.IPipelineDecomposableModel, "",
     "compute_activation_gradients(x, target) compute_weight_gradients(x, target, cached)"),
    (contracts.ILossFunction, "",
     ("__call__(prediction, target) derivative(prediction, target) backward(saved) "
     "forward(prediction, target, training=True)")),
    (Loss, "", "__call__(prediction, target) derivative(prediction, target)"),
    (contracts.ModelMetadata,
     ("ModelMetadata(name, version='1', training_date=..., properties=..., feature_count=0, "
     "complexity=0, description='', additional_info=..., model_data=b'', feature_importance=..., "
     "model_type='')"),
     "set_property(key, value) remove_property(key)"),
    (contracts.LayerInfo,
     ("LayerInfo(index, name, category, layer, parameter_offset, parameter_count, input_shape, "
     "output_shape, is_trainable, estimated_flops, estimated_activation_memory)"), ""),
    (contracts.DynamicShapeInfo,
     "DynamicShapeInfo(dynamic_input_dims=(), dynamic_output_dims=())", ""),
    (ComputationNode, "", "evaluate(feeds)"),
    (ms.nn.MLP,
     "MLP(sizes, activation='relu', *, seed=0, dtype='float64', loss=None, device='cpu')",
     f"{MODEL.replace('train(x, y)', 'train(x, y, learning_rate=0.01)')} {LAYERED}"),
    (ms.FunctionModel,
     "FunctionModel(loss_and_gradient, initial_parameters, predict=None, *, loss_is_sum=False)",
     f"{PARAMETERS} {STREAMS} predict(x)"),
    # 1.2, optimizers and data
    (contracts.IOptimizer, "", OPTIMIZER),
    (contracts.IGradientBasedOptimizer, "", GRADIENT_BASED),
    (optimizers.SGD, f"SGD({RATE.format(0.01)}, momentum=0.0, nesterov=False, *, {COMMON})",
     f"{GRADIENT_BASED} set_model(model) step(model, x, y) {STREAMS}"),
    (optimizers.Adagrad, f"Adagrad({RATE.format(0.01)}, epsilon=1e-10, *, {COMMON})", ""),
    (optimizers.RMSprop,
     (f"RMSprop({RATE.format(0.001)}, beta2=0.9, epsilon=1e-08, momentum=0.0, centered=False, *, "
     f"{COMMON})"), ""),
    *[(rule, (f"{rule.__name__}({RATE.format(0.001)}, beta1=0.9, beta2=0.999, epsilon={epsilon}, "
       f"*, {COMMON})"), GRADIENT_BASED)
      for rule, epsilon in ((optimizers.Adam, 1e-8), (optimizers.AdamW, 1e-8),
                            (optimizers.LAMB, 1e-6))],
    (optimizers.Lion, f"Lion({RATE.format(0.0001)}, beta1=0.9, beta2=0.99, *, {COMMON})", ""),
    (contracts.OptimizationAlgorithmOptions,
     ("OptimizationAlgorithmOptions(*, max_iterations=100, use_early_stopping=True, "
     "early_stopping_patience=10, tolerance=1e-06, initial_learning_rate=0.01, "
     "learning_rate_decay=0.99, min_learning_rate=1e-06, max_learning_rate=1.0, "
     "enable_gradient_clipping=True, max_gradient_norm=1.0)"), ""),
    (ms.OptimizationInputData, INPUT_DATA, "initial_solution"),
    (ms.OptimizationResult,
     ("OptimizationResult(best_solution, best_fitness_score=inf, best_iteration=None, "
     "iterations=0, stopped_early=False, fitness_history=..., loss_history=..., "
     "validation_history=..., training_result=None, validation_result=None, test_result=None, "
     "fit_detection_result=None, "
     "selected_feature_indices=None, selected_features=None, best_intercept=None, "
     "coefficient_lower_bounds=None, coefficient_upper_bounds=None, seconds=0.0, weight=0.0)"),
     "model deep_copy() with_parameters(parameters)"),
    (training.DatasetResult,
     "DatasetResult(x, y, stats=..., predictions=None, indices=None)", ""),
    # 1.3, communication
    (ms.CommunicationBackend, "", BACKEND),
    (ms.InMemoryCommunicationBackend,
     "InMemoryCommunicationBackend(rank, world_size, environment_id='default', *, timeout=None)",
     f"{BACKEND} clear_environment(environment_id)"),
    (ms.MPICommunicationBackend,
     "MPICommunicationBackend(comm=None, *, on_failure='abort')", BACKEND),
    (ms.NCCLCommunicationBackend,
     "NCCLCommunicationBackend(comm=None, *, reductions='exact', on_failure='abort')", BACKEND),
    (ms.CommunicationManager, "",
     ("is_initialized initialize(backend) shutdown() get_rank() get_world_size() barrier() "
     "all_reduce(array, operation=SUM) all_gather(array) broadcast(array, root=0) "
     "scatter(array, root=0) reduce_scatter(array, operation=SUM)")),
    (ms.ShardLayout, "ShardLayout(length, world_size)",
     "start(rank) size(rank) slice(rank) owner(index)"),
    # 1.4, configuration
    (ms.ShardingConfiguration, CONFIGURATION,
     (f"{PRESETS} communication_backend learning_rate auto_sync_gradients "
     "minimum_parameter_group_size enable_gradient_compression cpu_offload_optimizer "
     "cpu_offload_gradients cpu_offload_parameters gradient_leaves check_collectives")),
    # 1.5 and 1.7, sharded models
    (contracts.IShardedModel, "", SHARDED),
    (ms.ShardedModelBase, "ShardedModelBase(wrapped_model, config)", SHARDED_BASE),
    *[(model, f"{model.__name__}(wrapped_model, config)", SHARDED_BASE)
      for model in (ms.DDPModel, ms.ZeRO1Model, ms.FSDPModel, ms.ZeRO3Model)],
    (ms.ZeRO2Model, "ZeRO2Model(wrapped_model, config)",
     f"{SHARDED_BASE} parameter_delta_shard all_gather_parameter_shards()"),
    (ms.TensorParallelModel,
     ("TensorParallelModel(wrapped_model, config, *, sequence_parallel=False, "
     "checkpoint_config=None)"), MESH_MODEL),
    (ms.PipelineParallelModel,
     ("PipelineParallelModel(wrapped_model, config, micro_batch_count=1, *, "
     "partition_strategy=None, schedule=None, checkpoint_config=None)"), MESH_MODEL),
    (ms.HybridShardedModel,
     ("HybridShardedModel(wrapped_model, config, pipeline_parallel_size=1, "
     "tensor_parallel_size=1, data_parallel_size=-1, *, micro_batch_count=1, schedule=None, "
     "partition_strategy=None, checkpoint_config=None, sequence_parallel=False, "
     "data_parallel_strategy='zero1', order=('pipeline', 'tensor', 'data'))"), MESH_MODEL),
    # 1.6 and 1.8, sharded optimizers
    (contracts.IShardedOptimizer, "", SHARDED_OPTIMIZER),
    *[(optimizer, f"{optimizer.__name__}(wrapped_optimizer, config)", SHARDED_OPTIMIZER_BASE)
      for optimizer in (ms.ShardedOptimizerBase, ms.DDPOptimizer, ms.ZeRO1Optimizer,
                        ms.ZeRO2Optimizer, ms.FSDPOptimizer, ms.ZeRO3Optimizer)],
    (ms.TensorParallelOptimizer,
     "TensorParallelOptimizer(wrapped_optimizer, config, **model_options)",
     SHARDED_OPTIMIZER_BASE),
    (ms.PipelineParallelOptimizer,
     ("PipelineParallelOptimizer(wrapped_optimizer, config, num_micro_batches=1, "
     "**model_options)"), SHARDED_OPTIMIZER_BASE),
    (ms.HybridShardedOptimizer,
     ("HybridShardedOptimizer(wrapped_optimizer, config, pipeline_parallel_size=1, "
     "tensor_parallel_size=1, data_parallel_size=-1, **model_options)"), SHARDED_OPTIMIZER_BASE),
    # 1.9, pipeline parts
    (ms.pipeline.IPipelineSchedule, "", SCHEDULE),
    (ms.pipeline.PipelineOperation,
     ("PipelineOperation(type, micro_batch_index, is_warmup=False, is_cooldown=False, "
     "virtual_stage_index=0)"), ""),
    *[(schedule, f"{schedule.__name__}()", SCHEDULE)
      for schedule in (ms.pipeline.GPipeSchedule, ms.pipeline.OneForwardOneBackwardSchedule,
                       ms.pipeline.ZeroBubbleH1Schedule, ms.pipeline.ZeroBubbleH2Schedule,
                       ms.pipeline.ZeroBubbleVSchedule)],
    *[(schedule, f"{schedule.__name__}(virtual_stages_per_rank=2)", SCHEDULE)
      for schedule in (ms.pipeline.Interleaved1F1BSchedule, ms.pipeline.LoopedBFSSchedule)],
    (ms.pipeline.IPipelinePartitionStrategy, "", PARTITION),
    (ms.pipeline.UniformPartitionStrategy, "UniformPartitionStrategy()", PARTITION),
    (ms.pipeline.LoadBalancedPartitionStrategy,
     ("LoadBalancedPartitionStrategy(layer_boundaries=None, cost_estimator=None, *, "
     "estimated_layer_size=None)"), PARTITION),
    (ms.pipeline.ActivationCheckpointConfig,
     ("ActivationCheckpointConfig(enabled=False, checkpoint_every_n_layers=10, "
     "recompute_strategy=None, max_activations_in_memory=0, checkpoint_first_layer=True)"), ""),
    # 1.10, tensor-parallel layers
    (ms.tensor.ColumnParallelLinear,
     ("ColumnParallelLinear(backend, input_size, output_size, gather_output=False, "
     "activation=None, *, bias=True, initializer=None, tied_to=None, parts=1, multiple=1, "
     "sequence_parallel=False)"),
     "local_output_size set_from_full_weights(weight, bias=None)"),
    (ms.tensor.RowParallelLinear,
     ("RowParallelLinear(backend, input_size, output_size, activation=None, *, bias=True, "
     "initializer=None, tied_to=None, multiple=1, sequence_parallel=False)"),
     "local_input_size set_from_full_weights(weight, bias=None)"),
    (ms.tensor.Stage3ShardedLinear,
     "Stage3ShardedLinear(backend, input_size, output_size, activation=None)",
     "shard_length set_from_full_weights(weight, bias=None)"),
    (ms.tensor.TensorParallelAttention,
     ("TensorParallelAttention(backend, embed_dim, num_heads, causal=False, *, "
     "num_kv_heads=None)"), ""),
    (ms.tensor.TensorParallelTransformerBlock,
     ("TensorParallelTransformerBlock(backend, embed_dim, num_heads, ffn_dim, activation=ReLU, "
     "causal=False, *, num_kv_heads=None)"), ""),
    (ms.tensor.TensorParallelInference, "",
     "forward_in_process(world_size, input, build_rank)"),
    # 1.12, the mesh
    (ms.ProcessMesh,
     ("ProcessMesh(backend, pipeline=1, tensor=1, data=-1, *, replica=1, "
      "order=('pipeline', 'tensor', 'data'))"),
     ("rank_of(pipeline, tensor, data, replica=0) coordinates_of(rank) replica_of(rank) "
      "group_of(axis, rank=None) model_ranks(data, replica=0) sizes replica_size model_size")),
    # 1.11, helpers
    (ms.ParameterAnalyzer, "ParameterAnalyzer(minimum_group_size=1024, world_size=1)",
     ("analyze_model(model) analyze_parameters(parameters) analyze_for_distribution(parameters) "
     "calculate_distribution_stats(groups) validate_grouping(groups, total_parameters)")),
    (ms.ParameterGroup, "ParameterGroup(start_index=0, size=0, name='', is_merged=False)", ""),
]  # fmt: skip

FUNCTIONS = [
    (ms, "launch(main, *args, backend='auto', world_size=None, on_failure='abort')"),
    (ms, "init(backend='auto', *, on_failure='abort')"),
    (ms, "run_in_threads(world_size, fn, /, *args, timeout=None, on_failure='abort', **kwargs)"),
    (
        ms,
        (
            "as_distributed(model_or_optimizer, backend_or_config, strategy=FSDP, *, "
            "precision=None, **degrees)"
        ),
    ),
    (ms, "as_distributed_for_high_bandwidth(model, backend)"),
    (ms, "as_distributed_for_low_bandwidth(model, backend)"),
    (ms.checkpoint, "save(path, model, optimizer=None, *, metadata=None)"),
    (ms.checkpoint, "load(path, model, optimizer=None)"),
    (ms.checkpoint, "check(path)"),
    (ms.checkpoint, "consolidate(path, target, *, optimizer=False, progress=None)"),
    (ms.checkpoint, "load_arrays(path)"),
]

# Enumeration, its members in order, each with the mirrored spelling where that differs.
ENUMERATIONS = [
    (ms.ReductionOperation,
     ["SUM Sum", "PRODUCT Product", "MIN Min", "MAX Max", "AVERAGE Average"]),
    (ms.DistributedStrategy,
     ["NONE", "DDP", "ZERO1 ZeRO1", "ZERO2 ZeRO2", "ZERO3 ZeRO3", "FSDP",
      "TENSOR_PARALLEL TensorParallel", "PIPELINE_PARALLEL PipelineParallel", "HYBRID Hybrid"]),
    (ms.pipeline.PipelineOperationType,
     ["FORWARD Forward", "BACKWARD Backward", "BACKWARD_INPUT BackwardInput",
      "BACKWARD_WEIGHT BackwardWeight"]),
    (ms.pipeline.RecomputeStrategy, ["SELECTIVE Selective", "FULL Full", "NONE"]),
]  # fmt: skip


class Shown(str):
    """A default as the table shows it; one that is made anew each time has no value."""

    __slots__ = ()

    def __repr__(self):
        return "..." if self == "<factory>" else str(self)


def called(name, function):
    """How ``function`` is called, ``self`` and annotations left out."""
    found = inspect.signature(function)
    shown = []
    for parameter in found.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        default = parameter.default
        if default is not parameter.empty:
            names = (getattr(default, kind, None) for kind in ("name", "__name__"))
            default = Shown(next(filter(None, names), None) or repr(default))
        shown.append(parameter.replace(annotation=parameter.empty, default=default))
    return name + str(found.replace(parameters=shown, return_annotation=found.empty))


def members(text):
    """Properties and calls in a row of the table."""
    return re.findall(r"\w+(?:\([^()]*\))?", re.sub(r"\s+", " ", text))


@pytest.mark.parametrize(
    ("kind", "made", "listed"), [pytest.param(*row, id=row[0].__name__) for row in CLASSES]
)
def test_members(kind, made, listed):
    if made:
        assert called(kind.__name__, kind) == made
    missing = []
    for member in members(listed):
        name = member.partition("(")[0]
        found = inspect.getattr_static(kind, name, None)
        if found is None:  # of the metaclass: what a class answers without an object
            found = inspect.getattr_static(type(kind), name, None)
        if "(" not in member:
            matches = isinstance(found, property)
        elif isinstance(found, staticmethod | classmethod):
            matches = called(name, getattr(kind, name)) == member
        else:
            matches = inspect.isfunction(found) and called(name, found) == member
        if not matches:
            shown = (
                called(name, getattr(kind, name)) if callable(getattr(kind, name, None)) else found
            )
            missing.append(f"{member}: there is {shown}")
    assert not missing


@pytest.mark.parametrize(("room", "listed"), FUNCTIONS)
def test_functions(room, listed):
    name = listed.partition("(")[0]
    assert called(name, getattr(room, name)) == listed


@pytest.mark.parametrize(("kind", "listed"), ENUMERATIONS)
def test_enumerations(kind, listed):
    names = [entry.split() for entry in listed]
    assert [member.name for member in kind] == [name for name, *_ in names]
    for name, *others in names:
        assert all(kind[other] is kind[name] for other in others)


def test_numbers_and_names_of_the_mirrored_hierarchy():
    assert [operation.value for operation in ms.ReductionOperation] == [0, 1, 2, 3, 4]
    assert contracts.ShardedModel is contracts.IShardedModel
    assert issubclass(ms.ZeRO3Model, ms.FSDPModel)
    assert issubclass(ms.ZeRO3Optimizer, ms.FSDPOptimizer)
    assert issubclass(contracts.AdamOptimizerOptions, contracts.OptimizationAlgorithmOptions)
    assert contracts.AdamOptimizerOptions().initial_learning_rate == 1e-3
    names = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp": "FSDP",
             "tensor": "TensorParallel", "pipeline": "PipelineParallel",
             "hybrid": "3D-Parallelism (Hybrid)"}  # fmt: skip
    with ms.InMemoryCommunicationBackend(0, 1, "names") as backend:
        for strategy in list(names):
            model = ms.as_distributed(ms.nn.MLP([2, 2]), backend, strategy)
            properties = model.get_model_metadata().properties
            assert properties["Strategy"] == names[strategy]
            assert properties.keys() >= {"IsDistributed", "WorldSize", "Rank", "ShardSize"}
            assert ("EquivalentTo" in properties) == (strategy == "zero3")


def test_an_input_has_its_model_under_both_names():
    data = ms.OptimizationInputData(model="a model", x_train=[], y_train=[])
    assert data.initial_solution == "a model"
    assert ms.OptimizationResult("a model").model == "a model"
