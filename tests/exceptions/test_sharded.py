"""Mistakes with sharded models and optimizers that one rank finds, in every strategy."""

from __future__ import annotations

import io

import numpy as np
import pytest

import mpishard as ms
from mpishard.errors import (
    MissingInterfaceError,
    MissingLossError,
    MissingMemberError,
    ShardingError,
    StructureOnlyError,
)
from mpishard.mirror import IOptimizer
from mpishard.nn import MLP
from mpishard.optimizers import SGD
from mpishard.testing.worlds import in_worlds

X, Y = np.ones((3, 5)), np.ones((3, 2))
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "tensor", "pipeline", "hybrid")
SHARDED = ("zero1", "zero2", "fsdp")  # the optimizer's state, at least
RATE = {"apply_gradients": (0.1,)}
OTHER = dict.fromkeys(STRATEGIES, "ddp") | {"ddp": "fsdp"}


class Search(IOptimizer):
    """An optimizer that is not gradient based."""

    def optimize(self, input_data):
        return None

    def get_options(self):
        return {}

    def reset(self):
        pass


def enter(context):
    with context:
        pass


def while_unsynchronised(g, call):
    g.config.auto_sync_gradients = False
    try:
        return call()
    finally:
        g.config.auto_sync_gradients = True


def twice_nested(g):
    with g.model.accumulate(), g.model.accumulate():
        pass


# fmt: off
# The strategies are all, or those that are named last.
WRAPPED = [
    # --------------------------------------------------------------------------------- wrapping
    ("1.5", "model None", TypeError, "must be a model, got None",
     lambda g: type(g.model)(None, g.config)),
    ("1.5", "configuration None", TypeError, "ShardingConfiguration, got NoneType",
     lambda g: type(g.model)(MLP([2, 2]), None)),
    ("1.5", "configuration is a backend", TypeError, "ShardingConfiguration, got ",
     lambda g: type(g.model)(MLP([2, 2]), g.backend)),
    ("A", "model is sharded already", TypeError, "sharded already, as ", lambda g: g.wrap(g.model)),
    ("A", "model is wrapped already", ShardingError, "wrapped already|held by",
     lambda g: g.wrap(g.model.wrapped_model)),
    ("1.6", "optimizer None", TypeError, "an optimizer of mpishard.optimizers, got NoneType",
     lambda g: type(g.optimizer)(None, g.config)),
    ("1.6", "configuration of an optimizer None", TypeError, "got NoneType",
     lambda g: type(g.optimizer)(SGD(), None)),
    ("A", "optimizer is sharded already", TypeError, "sharded already, as ",
     lambda g: g.wrap(g.optimizer)),
    ("1.8", "optimizer knows no gradients", ValueError, "Search is not gradient based",
     lambda g: g.wrap(Search())),

    # ------------------------------------------------------------------------------- parameters
    *[("1.5", f"{name}: {what}", error, message,
       lambda g, name=name, value=value: getattr(g.model, name)(value(g), *RATE.get(name, ())))
      for name in ("set_parameters", "with_parameters", "apply_gradients")
      for what, value, error, message in (
          ("None", lambda g: None, TypeError, "array, got NoneType"),
          ("a list", lambda g: [1.0], TypeError, "array, got list"),
          ("too short", lambda g: np.ones(3), ValueError,
           rf"{name}: expected a vector of shape \(26,\), got \(3,\)"),
          ("two dims", lambda g: g.ones[None], ValueError, r"shape \(26,\), got \(1, 26\)"),
          ("complex", lambda g: g.ones.astype(complex), TypeError, "got a vector of complex128"))],
    ("1.1", "set_parameter_chunks: none", ValueError, "expected 26 parameters, got no chunk",
     lambda g: g.model.set_parameter_chunks([])),
    ("1.1", "set_parameter_chunks: too few", ValueError, r"\(26,\), got \(3,\)",
     lambda g: g.model.set_parameter_chunks([np.ones(3)])),
    ("1.1", "apply_gradients: rate None", TypeError, "learning_rate must be a number, got None",
     lambda g: g.model.apply_gradients(g.ones, None)),
    ("A", "parameters of a wrapped model", StructureOnlyError, r"gather_full_parameters\(\)",
     lambda g: g.model.wrapped_model.get_parameters()),
    ("A", "unsharded: root", ValueError, r"root 2 is outside \[0, 2\)",
     lambda g: enter(g.model.unsharded(root=2))),
    ("A", "start and size of a shard of two units", ShardingError, "owned_ranges",
     lambda g: g.model._shard_start_index, ("fsdp",)),
    ("1.7", "parameter_delta_shard: not kept", ShardingError, "tracks_parameter_deltas = True",
     lambda g: g.model.parameter_delta_shard, ("zero2",)),

    # -------------------------------------------------------------------------------- computing
    *[(section, f"{name}: {what}", error, message,
       lambda g, call=call, x=x, y=y: call(g, x, y))
      for section, name, call in (
          ("1.5", "train", lambda g, x, y: g.model.train(x, y)),
          ("1.1", "compute_gradients", lambda g, x, y: g.model.compute_gradients(x, y)),
          ("A", "step", lambda g, x, y: g.optimizer.step(g.model, x, y)))
      for what, x, y, error, message in (
          ("x None", None, Y, TypeError, r"shape \(samples, 5\), got NoneType"),
          ("y None", X, None, TypeError, "MSE needs targets, and y .y_train. is None"),
          ("x of another shape", X[:, :4], Y, ValueError, r"dim is 5, got sample shape \(4,\)"),
          ("y of another shape", X, Y[:, :1], ValueError, "one shape"),
          ("lengths", X, Y[:2], ValueError, "x has 3 samples and y has 2"))],
    ("1.1", "predict: None", TypeError, "got NoneType", lambda g: g.model.predict(None)),
    ("1.1", "predict: another shape", ValueError, "last dim is 5",
     lambda g: g.model.predict(X[:, :4])),
    ("A", "predict: a black box without", MissingMemberError, "BlackBox has no member 'predict'",
     lambda g: g.box.predict(X)),
    ("1.1", "compute_gradients: no loss", MissingLossError, "Model has no default loss; pass",
     lambda g: g.lossless.compute_gradients(X, Y)),
    ("1.1", "train: no loss", MissingLossError, "Model has no default loss",
     lambda g: g.lossless.train(X, Y)),
    ("1.1", "compute_gradients: what is no loss", TypeError, "ILossFunction, got str",
     lambda g: g.model.compute_gradients(X, Y, "mse")),
    ("1.7", "synchronize_gradients: before a step", RuntimeError, "before any gradient",
     lambda g: g.other.synchronize_gradients()),
    ("A", "auto_sync_gradients=False", ValueError, r"use DDP, or model\.accumulate\(\)",
     lambda g: while_unsynchronised(g, lambda: g.model.train(X, Y)), SHARDED),
    ("A", "auto_sync_gradients=False: step", ValueError, r"use DDP, or model\.accumulate\(\)",
     lambda g: while_unsynchronised(g, lambda: g.optimizer.step(g.model, X, Y)), SHARDED),
    ("A", "accumulate: nested", RuntimeError, "cannot be nested", twice_nested),
    *[("1.1", f"{name} of a closed model", ShardingError, "is closed",
       lambda g, call=call: call(g.closed))
      for name, call in (
          ("predict", lambda m: m.predict(X)), ("train", lambda m: m.train(X, Y)),
          ("get_parameters", lambda m: m.get_parameters()),
          ("serialize", lambda m: m.serialize()))],

    # -------------------------------------------------------------------------- bytes and files
    *[("1.5", f"deserialize: {what}", error, message,
       lambda g, data=data: g.model.deserialize(data))
      for what, data, error, message in (
          ("None", None, TypeError, "needs bytes, got NoneType"),
          ("something else", b"no tensors", ValueError, "10 bytes are not those of serialize"),
          ("another model's", MLP([5, 4, 2]).serialize(), ValueError, "do not fit the model"))],
    *[("1.1", f"{name}: no stream", TypeError, "binary stream, got NoneType",
       lambda g, name=name, who=who: getattr(getattr(g, who), name)(None))
      for name in ("save_state", "load_state") for who in ("model", "optimizer")],
    ("1.1", "load_state: ends early", ValueError, "ended after 3 of 8 bytes",
     lambda g: g.model.load_state(io.BytesIO(b"abc"))),
    *[("1.5", f"{name} of {who}: {path!r}", error, message,
       lambda g, name=name, who=who, path=path: getattr(getattr(g, who), name)(path))
      for name in ("save_model", "load_model") for who in ("model", "optimizer")
      for path, error, message in (
          ("", ValueError, "must not be blank, got ''"),
          ("  ", ValueError, "must not be blank, got '  '"),
          (None, TypeError, "a string or a path, got None"))],
    *[("A", f"checkpoint.{name}: {what}", error, message,
       lambda g, name=name, arguments=arguments:
           getattr(ms.checkpoint, name)(*arguments(g)))
      for name in ("save", "load")
      for what, arguments, error, message in (
          ("blank", lambda g: ("", g.model), ValueError, "must not be blank"),
          ("path None", lambda g: (None, g.model), TypeError, "a path, got None"),
          ("model None", lambda g: (g.path, None), TypeError, "needs a model.*got NoneType"),
          ("a plain optimizer", lambda g: (g.path, g.model, SGD()), TypeError,
           "needs a sharded optimizer.*got SGD"))],

    # ----------------------------------------------------------------------- features and graphs
    *[("1.1", f"{name} of {kind}", MissingInterfaceError,
       f"{'MLP' if who == 'model' else 'BlackBox'} does not implement {interface}",
       lambda g, who=who, call=call: call(getattr(g, who)))
      for who, kind in (("model", "a model without"), ("box", "a black box"))
      for name, interface, call in (
          ("get_active_feature_indices", "IFeatureAware",
           lambda m: m.get_active_feature_indices()),
          ("set_active_feature_indices", "IFeatureAware",
           lambda m: m.set_active_feature_indices([0])),
          ("is_feature_used", "IFeatureAware", lambda m: m.is_feature_used(0)),
          ("get_feature_importance", "IFeatureImportance",
           lambda m: m.get_feature_importance()))],
    *[("1.1", f"set_active_feature_indices: {wrong!r}", ValueError,
       rf"integers in \[0, 5\), got {wrong!r}",
       lambda g, wrong=wrong: g.features.set_active_feature_indices([0, wrong]))
      for wrong in (5, -1, "a", 0.5)],
    ("1.1", "export_computation_graph: None", TypeError, "must be a list, got None",
     lambda g: g.model.export_computation_graph(None)),
    ("1.1", "export_computation_graph: a black box", NotImplementedError,
     "BlackBox does not implement IJitCompilable", lambda g: g.box.export_computation_graph([])),

    # ------------------------------------------------------------------------ sharded optimizers
    ("1.8", "synchronize_optimizer_state", NotImplementedError, "partitions the optimizer state",
     lambda g: g.optimizer.synchronize_optimizer_state(), SHARDED),
    ("1.8", "optimize: None", TypeError, "OptimizationInputData, got NoneType",
     lambda g: g.optimizer.optimize(None)),
    *[("1.2", f"optimize: {what}", error, message,
       lambda g, options=options: g.optimize(**options))
      for what, options, error, message in (
          ("no model", {"model": None}, TypeError, "needs a model"),
          ("no training data", {"x_train": None, "y_train": None}, TypeError, "x_train must be"),
          ("inputs without targets", {"x_test": X}, TypeError, "x_test and y_test must both"),
          ("a list", {"x_train": [1, 2, 3]}, TypeError, r"got a list; pass numpy\.asarray"),
          ("no samples", {"x_train": X[:0], "y_train": Y[:0]}, ValueError, "holds no samples"),
          ("lengths", {"y_train": Y[:2]}, ValueError, "3 samples and y_train has 2"),
          ("batch_size 0", {"batch_size": 0}, ValueError, "batch_size must be 1 or more, got 0"),
          ("epochs 1.5", {"epochs": 1.5}, TypeError, "epochs must be an integer, got 1.5"),
          ("seed None", {"seed": None}, TypeError, "seed must be an integer, got None"),
          ("patience 0", {"patience": 0}, ValueError, "patience must be 1 or more, got 0"),
          ("tolerance -1", {"tolerance": -1, "patience": 1}, ValueError, "0 or more.*got -1"),
          ("drop_last", {"drop_last": True, "batch_size": 4}, ValueError, "leaves no batch: 3"),
          ("validate_every alone", {"validate_every": 1}, ValueError, "needs x_validation"),
          ("checkpoint_every alone", {"checkpoint_every": 1}, ValueError, "needs checkpoint"),
          ("a blank checkpoint", {"checkpoint": ""}, ValueError, "checkpoint must not be blank"),
          ("a unit that is a number", {"throughput_unit": 5}, TypeError,
           "throughput_unit must be a str, got int"),
          ("resume is no path", {"resume": 5}, TypeError, "resume must be a string or a path"))],
    *[("1.5", f"apply_gradients: rate {rate}", ValueError, f"rate must be finite, got {rate}",
       lambda g, rate=rate: g.model.apply_gradients(g.ones, rate))
      for rate in (float("nan"), float("inf"))],
    ("A", "unsharded: a root that is a word", TypeError, "root must be an integer, got 'x'",
     lambda g: g.model.unsharded(root="x").__enter__()),
    *[("A", f"checkpoint.save_async: staging {value!r}", TypeError,
       "staging must be a StagingBuffer",
       lambda g, value=value: ms.checkpoint.save_async(g.path / "made", g.model, staging=value))
      for value in (5, b"")],
    ("A", "checkpoint.reserve: staging None", TypeError, "must be a StagingBuffer, got NoneType",
     lambda g: ms.checkpoint.reserve(None, g.model)),
    *[("A", f"checkpoint.reserve: kept {kept!r}", error, f"kept must be .*, got {kept!r}",
       lambda g, kept=kept: ms.checkpoint.reserve(
           ms.checkpoint.StagingBuffer(), g.model, kept=kept))
      for kept, error in ((-1, ValueError), (1.5, TypeError))],
    ("A", "accumulate: defer 1", TypeError, "defer must be True or False, got 1",
     lambda g: g.model.accumulate(defer=1).__enter__()),
    ("A", "step: a plain model", TypeError, r"got MLP; wrap it with mpishard\.as_distributed",
     lambda g: g.optimizer.step(MLP([5, 2]), X, Y)),
    ("A", "step: a second model", ShardingError, r"another model; .*reset\(\)",
     lambda g: g.optimizer.step(g.other, X, Y)),
    ("A", "step: another strategy", ShardingError, "use one strategy for both",
     lambda g: ms.as_distributed(SGD(), g.config, OTHER[g.strategy]).step(g.model, X, Y)),
    ("A", "step: another backend", ShardingError, "use one for both",
     lambda g: ms.as_distributed(SGD(), g.split_backend, g.strategy).step(g.model, X, Y)),
    ("A", "step: a pattern that matches nothing", ValueError, "'bias' matches none",
     lambda g: g.wrap(SGD(parameter_options={"bias": {"weight_decay": 0}})).step(g.other, X, Y)),
    *[("1.6", f"apply_gradients of an optimizer: {what}", error, message,
       lambda g, value=value: g.optimizer.apply_gradients(value, g.model))
      for what, value, error, message in (
          ("None", None, TypeError, "array, got NoneType"),
          ("too short", np.ones(3), ValueError, r"\(26,\), got \(3,\)"))],
    ("1.6", "apply_gradients: no model", TypeError, "got NoneType; wrap it",
     lambda g: g.optimizer.apply_gradients(g.ones, None)),
    ("1.6", "last_computed_gradients: before a step", ShardingError,
     "the gradient of the last step is not available",
     lambda g: g.fresh.last_computed_gradients),
    *[("1.6", f"deserialize of an optimizer: {what}", error, message,
       lambda g, data=data: g.optimizer.deserialize(data))
      for what, data, error, message in (
          ("None", None, TypeError, "needs bytes, got NoneType"),
          ("something else", b"no state", ValueError, r"8 bytes are not those of .*serialize"))],
]
# fmt: on


@pytest.mark.parametrize("strategy", STRATEGIES)
@in_worlds(2)
def test_mistakes_with_sharded_models(mistakes, backend, shared_path, strategy):
    g = mistakes.Rank(backend, strategy, shared_path)
    for condition, *row in mistakes.rows_of(WRAPPED, strategy):
        with mistakes.named(condition):
            mistakes.refused_alone(g, *row)
            mistakes.goes_on(g)
