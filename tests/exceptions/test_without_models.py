"""Mistakes with functions, communication, configuration and helpers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpishard as ms
from mpishard.errors import CollectiveMismatchError, MissingMemberError, NotInitializedError
from mpishard.nn import MLP
from mpishard.optimizers import SGD
from mpishard.testing.worlds import in_worlds

X = np.ones((3, 5))
MEAN = ms.ReductionOperation.AVERAGE


def at(world_size, rank=0, name="default"):
    return ms.InMemoryCommunicationBackend(rank, world_size, name)


def managed(name, call):
    """``call`` while the CommunicationManager has a backend, of a world of one."""
    ms.CommunicationManager.initialize(at(1, name=name))
    try:
        return call()
    finally:
        ms.CommunicationManager.shutdown()


def read_only():
    array = np.ones(2)
    array.flags.writeable = False
    return array


def askew():
    return np.ones((4, 4))[:, 1:3]


def collectives(name, array):
    """Rows for every collective of ``g.<name>`` with the result of ``array``."""

    def backend(g):
        return getattr(g, name)

    return {
        "all_reduce": lambda g: backend(g).all_reduce(array()),
        "all_reduce_async": lambda g: backend(g).all_reduce_async(array()),
        "reduce_scatter": lambda g: backend(g).reduce_scatter(array()),
        "reduce_scatter_async": lambda g: backend(g).reduce_scatter_async(array()),
        "all_gather": lambda g: backend(g).all_gather(array()),
        "all_gather_async": lambda g: backend(g).all_gather_async(array()),
        "broadcast": lambda g: backend(g).broadcast(array(), root=backend(g).rank),
        "scatter": lambda g: backend(g).scatter(array(), root=backend(g).rank),
        "gather": lambda g: backend(g).gather(array()),
        "all_to_all": lambda g: backend(g).all_to_all([array(), array()]),
        "send": lambda g: backend(g).send(array(), g.peer),
        "send_async": lambda g: backend(g).send_async(array(), g.peer),
    }


def closed_backend_calls():
    def made(g):
        return at(2, name=g.name)

    return {
        "all_reduce": lambda g: made(g).all_reduce(np.ones(2)),
        "reduce_scatter": lambda g: made(g).reduce_scatter(np.ones(2)),
        "all_gather": lambda g: made(g).all_gather(np.ones(2)),
        "broadcast": lambda g: made(g).broadcast(np.ones(2)),
        "scatter": lambda g: made(g).scatter(np.ones(2)),
        "gather": lambda g: made(g).gather(np.ones(2)),
        "all_to_all": lambda g: made(g).all_to_all([np.ones(2)] * 2),
        "barrier": lambda g: made(g).barrier(),
        "split": lambda g: made(g).split(0),
        "allocate_shared": lambda g: made(g).allocate_shared(2, float),
        "send": lambda g: made(g).send(np.ones(2), 1),
        "receive": lambda g: made(g).receive(1, 2),
        "send_async": lambda g: made(g).send_async(np.ones(2), 1),
        "receive_async": lambda g: made(g).receive_async(1, 2, dtype=float),
    }


MANAGED: dict[str, Callable[[], Any]] = {
    "get_rank": ms.CommunicationManager.get_rank,
    "get_world_size": ms.CommunicationManager.get_world_size,
    "barrier": ms.CommunicationManager.barrier,
    "all_reduce": lambda: ms.CommunicationManager.all_reduce(np.ones(2)),
    "all_gather": lambda: ms.CommunicationManager.all_gather(np.ones(2)),
    "broadcast": lambda: ms.CommunicationManager.broadcast(np.ones(2)),
    "scatter": lambda: ms.CommunicationManager.scatter(np.ones(2)),
    "reduce_scatter": lambda: ms.CommunicationManager.reduce_scatter(np.ones(2)),
}
PRESETS = (
    "create_default", "create_for_high_bandwidth", "create_for_low_bandwidth",
    "create_for_zero_offload", "create_for_zero_offload_full",
)  # fmt: skip
FLAGS = (
    "auto_sync_gradients", "enable_gradient_compression", "cpu_offload_optimizer",
    "cpu_offload_gradients", "cpu_offload_parameters", "check_collectives", "allow_nonfinite",
)  # fmt: skip

# fmt: off
# Section, condition, exception, message, call: where the strategy plays no part.
LOCAL = [
    ("A", "launch: no ranks", ValueError, "world_size must be 1 or more, got 0",
     lambda g: ms.launch(print, world_size=0)),
    ("A", "launch: unknown backend", ValueError, "got 'gloo'",
     lambda g: ms.launch(print, backend="gloo")),
    ("A", "init: unknown backend", ValueError, "'mpi', 'nccl' or 'memory', got 'gloo'",
     lambda g: ms.init("gloo")),
    ("A", "run_in_threads: no ranks", ValueError, "world_size must be 1 or more, got 0",
     lambda g: ms.run_in_threads(0, print)),
    ("A", "run_in_threads: the function's own", KeyError, "mine",
     lambda g: ms.run_in_threads(2, lambda backend: {}["mine"])),
    ("A", "as_distributed: unknown strategy", ValueError, "'zero9'; there are ddp, zero1",
     lambda g: ms.as_distributed(MLP([2, 2]), g.backend, "zero9")),
    ("A", "as_distributed: a class", TypeError, "not the class SGD",
     lambda g: ms.as_distributed(SGD, g.backend)),
    ("A", "as_distributed: no backend", TypeError, "ShardingConfiguration, got str",
     lambda g: ms.as_distributed(MLP([2, 2]), "mpi")),
    ("A", "as_distributed: no model", MissingMemberError, "int has no member 'get_parameters'",
     lambda g: ms.as_distributed(5, g.backend)),
    ("A", "FunctionModel: no function", TypeError, r"fun\(theta, x, y\)",
     lambda g: ms.FunctionModel(None, np.ones(3))),
    ("A", "FunctionModel: integers", ValueError, r"floating vector, got int64 of shape \(3,\)",
     lambda g: ms.FunctionModel(print, np.arange(3))),
    ("A", "FunctionModel: predict was not given", MissingMemberError, "pass predict=",
     lambda g: ms.FunctionModel(print, np.ones(3)).predict(X)),
    ("A", "ShardLayout: negative length", ValueError, "0 or more, got -1",
     lambda g: ms.ShardLayout(-1, 2)),
    ("A", "ShardLayout: no ranks", ValueError, "1 or more, got 0", lambda g: ms.ShardLayout(2, 0)),
    *[("A", f"ShardLayout.{method}: another rank", ValueError, r"rank 3 is outside \[0, 3\)",
       lambda g, method=method: getattr(ms.ShardLayout(10, 3), method)(3))
      for method in ("start", "size", "slice")],
    ("A", "ShardLayout.owner: no element", IndexError, r"10 is outside \[0, 10\)",
     lambda g: ms.ShardLayout(10, 3).owner(10)),
    *[("A", f"checkpoint.{function}: nothing there", FileNotFoundError, "there is no checkpoint",
       lambda g, function=function: getattr(ms.checkpoint, function)(g.path / "nothing"))
      for function in ("check", "load_arrays", "CheckpointReader")],
    ("A", "checkpoint.consolidate: nothing there", FileNotFoundError, "there is no checkpoint",
     lambda g: ms.checkpoint.consolidate(g.path / "nothing", g.path / "new.safetensors")),

    # ---------------------------------------------------------------------------- collectives
    *[("1.3", f"{name}: None", TypeError, "needs an array, got None", call)
      for name, call in collectives("backend", lambda: None).items()],
    *[("1.3", f"{name}: a list", TypeError, "NumPy or CuPy array, got list", call)
      for name, call in collectives("backend", lambda: [1.0]).items()],
    *[("1.3", f"{name}: not contiguous", ValueError, r"C-contiguous array, got shape \(4, 2\)",
       call)
      for name, call in collectives("backend", askew).items()],
    *[("1.3", f"{name}: objects", ValueError, "cannot send dtype object", call)
      for name, call in collectives("backend", lambda: np.array([None])).items()],
    *[("1.3", f"{name}: another byte order", ValueError,
       r"float64 in another byte order; .astype\('float64'\) converts it", call)
      for name, call in collectives("backend", lambda: np.ones(2, np.dtype(float).newbyteorder()))
      .items()],
    *[("1.3", f"{name}: a scalar", TypeError, r"1.0.*, a NumPy scalar; pass numpy.array", call)
      for name, call in collectives("backend", lambda: np.float64(1.0)).items()],
    *[("1.3", f"{name}: not initialised", NotInitializedError, r"call initialize\(\)", call)
      for name, call in closed_backend_calls().items()],
    *[("1.3", f"{name}: another operation", TypeError, f"SUM, PRODUCT, .*got {wrong!r}",
       lambda g, name=name, wrong=wrong: getattr(g.backend, name)(np.ones(2), wrong))
      for name in ("all_reduce", "reduce_scatter") for wrong in ("sum", 4, None)],
    *[("1.3", f"{name}: the mean of integers", ValueError, "AVERAGE of int64 would truncate",
       lambda g, name=name: getattr(g.backend, name)(np.arange(4), MEAN))
      for name in ("all_reduce", "reduce_scatter")],
    *[("1.3", f"{name}: root {root}", ValueError, rf"root {root} is outside \[0, 2\)",
       lambda g, name=name, root=root: getattr(g.backend, name)(np.ones(2), root))
      for name in ("broadcast", "scatter", "gather") for root in (-1, 2)],
    *[("1.3", f"{name}: root {root}", TypeError, f"root must be an integer, got {root}",
       lambda g, name=name, root=root: getattr(g.backend, name)(np.ones(2), root))
      for name in ("broadcast", "scatter", "gather") for root in (None, 0.5)],
    *[("1.3", f"{name}: strict, and does not divide", ValueError, "3 rows over 2 ranks leave 1",
       lambda g, name=name, arguments=arguments:
           getattr(g.backend, name)(np.ones(3), *arguments(g), strict=True))
      for name, arguments in (("reduce_scatter", lambda g: ()),
                              ("scatter", lambda g: (g.backend.rank,)))],
    *[("1.3", f"{name}: counts {counts}", ValueError, "2 numbers, none negative, that add up to 3",
       lambda g, name=name, arguments=arguments, counts=counts:
           getattr(g.backend, name)(np.ones(3), *arguments(g), counts=counts))
      for name, arguments in (("reduce_scatter", lambda g: ()),
                              ("scatter", lambda g: (g.backend.rank,)))
      for counts in ([3], [4, -1], [2, 2])],
    ("1.3", "all_reduce: out of another shape", ValueError, r"shape \(3,\).*expected \(2,\)",
     lambda g: g.backend.all_reduce(np.ones(2), out=np.ones(3))),
    ("1.3", "all_gather: out of another dtype", ValueError, "dtype float32, expected",
     lambda g: g.backend.all_gather(np.ones(2), out=np.ones(4, np.float32))),
    ("1.3", "all_gather: out is a list", TypeError, "array, got list",
     lambda g: g.backend.all_gather(np.ones(2), out=[0.0] * 4)),
    ("1.3", "all_gather: out without dims", ValueError, "0-dim array has none",
     lambda g: g.backend.all_gather(np.ones(2), out=np.ones(()))),
    ("1.3", "all_reduce: read-only", ValueError, r"read-only array of shape \(2,\)",
     lambda g: g.backend.all_reduce(read_only())),
    *[("1.3", f"reduce_scatter: counts {counts!r}", TypeError, "must be .*integer",
       lambda g, counts=counts: g.backend.reduce_scatter(np.ones(4), counts=counts))
      for counts in ("22", [2.0, 2.0], [True, 3], 5)],
    *[("1.3", f"all_to_all: {parts!r}", TypeError, f"a list of arrays, .* got {parts!r}",
       lambda g, parts=parts: g.backend.all_to_all(parts)) for parts in (None, 5)],
    ("A", "allocate_shared: half an element", TypeError, r"length must be an integer, got 1\.5",
     lambda g: g.backend.allocate_shared(1.5, float)),
    ("A", "abort: no exception", TypeError, "error must be a BaseException, got str",
     lambda g: g.backend.abort("it failed")),
    ("1.3", "all_to_all: too few parts", ValueError, "each of 2 ranks, got 1",
     lambda g: g.backend.all_to_all([np.ones(1)])),
    ("1.3", "all_to_all: two dtypes", ValueError, "float64 and int64",
     lambda g: g.backend.all_to_all([np.ones(1), np.arange(1)])),
    ("1.3", "split: negative color", ValueError, "0 or more, or None; got -1",
     lambda g: g.backend.split(-1)),
    ("1.3", "split: color is no integer", TypeError, "color must be an integer, got 0.5",
     lambda g: g.backend.split(0.5)),
    ("1.3", "split: key is no integer", TypeError, "key must be an integer, got 'a'",
     lambda g: g.backend.split(0, "a")),
    ("A", "allocate_shared: no elements", ValueError, "1 or more, got 0",
     lambda g: g.backend.allocate_shared(0, float)),
    ("A", "allocate_shared: objects", ValueError, "cannot share dtype object",
     lambda g: g.backend.allocate_shared(2, object)),
    ("1.3", "send: to itself", ValueError, "itself",
     lambda g: g.backend.send(np.ones(1), g.backend.rank)),
    ("1.3", "receive: from itself", ValueError, "itself",
     lambda g: g.backend.receive(g.backend.rank, 1)),
    *[("1.3", f"{name}: rank {rank}", ValueError, rf"rank {rank} is outside \[0, 2\)", call)
      for rank in (-1, 2)
      for name, call in (
          ("send", lambda g, rank=rank: g.backend.send(np.ones(1), rank)),
          ("receive", lambda g, rank=rank: g.backend.receive(rank, 1)),
          ("send_async", lambda g, rank=rank: g.backend.send_async(np.ones(1), rank)),
          ("receive_async", lambda g, rank=rank: g.backend.receive_async(rank, 1, dtype=float)))],
    ("1.3", "send: rank is no integer", TypeError, "rank must be an integer, got '1'",
     lambda g: g.backend.send(np.ones(1), "1")),
    ("1.3", "send: negative tag", ValueError, "got -1",
     lambda g: g.backend.send(np.ones(1), g.peer, -1)),
    ("1.3", "receive: negative tag", ValueError, "got -1",
     lambda g: g.backend.receive(g.peer, 1, -1)),
    ("1.3", "receive: negative count", ValueError, "0 or more, got -1",
     lambda g: g.backend.receive(g.peer, -1)),
    ("A", "receive_async: from itself", ValueError, "itself",
     lambda g: g.backend.receive_async(g.backend.rank, 1, dtype=float)),
    ("1.3", "receive: objects", ValueError, "receive cannot take dtype object",
     lambda g: g.backend.receive(g.peer, 1, dtype=object)),
    ("A", "receive_async: another byte order", ValueError, "float64 in another byte order",
     lambda g: g.backend.receive_async(
         g.peer, 1, dtype=np.dtype(float).newbyteorder())),
    ("A", "receive_async: objects", ValueError, "cannot take dtype object",
     lambda g: g.backend.receive_async(g.peer, 1, dtype=object)),
    ("A", "receive_async: negative tag", ValueError, "got -1",
     lambda g: g.backend.receive_async(g.peer, 1, -1, dtype=float)),
    ("A", "receive_async: negative count", ValueError, "0 or more, got -1",
     lambda g: g.backend.receive_async(g.peer, -1, dtype=float)),
    ("1.3", "receive: count is no integer", TypeError, "count must be an integer, got 1.5",
     lambda g: g.backend.receive(g.peer, 1.5)),

    # -------------------------------------------------------------------------------- backends
    ("1.3", "InMemory: negative rank", ValueError, r"rank -1 is outside \[0, 2\)",
     lambda g: at(2, -1)),
    ("1.3", "InMemory: rank beyond the world", ValueError, r"rank 2 is outside \[0, 2\)",
     lambda g: at(2, 2)),
    *[("1.3", f"InMemory: world of {size}", ValueError, f"1 or more, got {size}",
       lambda g, size=size: at(size)) for size in (0, -1)],
    ("1.3", "InMemory: a half rank", TypeError, r"rank must be an integer, got 0\.5",
     lambda g: at(2, 0.5)),
    ("1.3", "InMemory: an infinite world", TypeError, "world_size must be an integer, got inf",
     lambda g: at(float("inf"))),
    ("1.3", "InMemory: a timeout that is NaN", ValueError, "timeout must be 0 or more seconds",
     lambda g: ms.InMemoryCommunicationBackend(0, 1, "nan", timeout=float("nan"))),
    ("A", "run_in_threads: too many", ValueError, "1 to 4096, .* got 1000000000000; .* -n",
     lambda g: ms.run_in_threads(10**12, len)),
    ("A", "run_in_threads: no function", TypeError, "calls a function .*, and 5 is no function",
     lambda g: ms.run_in_threads(2, 5)),
    *[("A", f"ShardLayout: {length!r} over {size!r}", TypeError, "must be an integer, got",
       lambda g, length=length, size=size: ms.ShardLayout(length, size))
      for length, size in ((2.5, 3), (float("nan"), 3), ("x", 3), (10, None), (10, True))],
    *[("A", f"ShardLayout.{name}({at!r})", TypeError, "must be an integer, got",
       lambda g, name=name, at=at: getattr(ms.ShardLayout(10, 3), name)(at))
      for name in ("start", "slice", "owner") for at in (0.5, None, True)],
    *[("1.3", f"InMemory: id {name!r}", ValueError, f"must not be blank, got {name!r}",
       lambda g, name=name: at(1, name=name)) for name in ("", "  ")],
    ("1.3", "InMemory: id None", TypeError, "must be a string, got None",
     lambda g: at(1, name=None)),
    *[("1.3", f"CommunicationManager.{name}: before initialize", NotInitializedError,
       r"CommunicationManager\.initialize\(backend\)", lambda g, call=call: call())
      for name, call in MANAGED.items()],
    ("1.3", "CommunicationManager.initialize: None", TypeError,
     "CommunicationBackend, got NoneType",
     lambda g: ms.CommunicationManager.initialize(None)),
    ("1.3", "CommunicationManager.initialize: twice", RuntimeError, "has a backend already",
     lambda g: managed(g.name, lambda: ms.CommunicationManager.initialize(g.backend))),
    *[("1.3", f"CommunicationManager.{name}: integers", NotImplementedError,
       "float32 and float64, got int64",
       lambda g, name=name: managed(
           g.name, lambda: getattr(ms.CommunicationManager, name)(np.arange(2))))
      for name in ("all_reduce", "reduce_scatter")],
    *[("1.3", f"CommunicationManager.{name}: root", ValueError, r"root 1 is outside \[0, 1\)",
       lambda g, name=name: managed(
           g.name, lambda: getattr(ms.CommunicationManager, name)(np.ones(2), 1)))
      for name in ("broadcast", "scatter")],

    # --------------------------------------------------------------------------- configuration
    ("1.4", "ShardingConfiguration: None", TypeError, "CommunicationBackend, got NoneType",
     lambda g: ms.ShardingConfiguration(None)),
    *[("1.4", f"{preset}: None", TypeError, "CommunicationBackend, got NoneType",
       lambda g, preset=preset: getattr(ms.ShardingConfiguration, preset)(None))
      for preset in PRESETS],
    *[("1.4", f"learning_rate {rate}", ValueError, f"above 0 and finite, got {rate}",
       lambda g, rate=rate: ms.ShardingConfiguration(g.backend, rate))
      for rate in (0, -1.0, float("nan"), float("inf"))],
    ("1.4", "learning_rate is no number", TypeError, "learning_rate must be a number, got '1'",
     lambda g: ms.ShardingConfiguration(g.backend, "1")),
    ("1.4", "learning_rate, afterwards", ValueError, "above 0 and finite, got 0",
     lambda g: setattr(g.config, "learning_rate", 0)),
    ("1.4", "minimum_parameter_group_size 0", ValueError, "1 or more, got 0",
     lambda g: setattr(g.config, "minimum_parameter_group_size", 0)),
    ("1.4", "minimum_parameter_group_size 1.5", TypeError, "an integer, got 1.5",
     lambda g: setattr(g.config, "minimum_parameter_group_size", 1.5)),
    *[("1.4", f"{flag} is no bool", TypeError, f"{flag} must be True or False, got 'no'",
       lambda g, flag=flag: setattr(g.config, flag, "no")) for flag in FLAGS],
    ("1.4", "communication_backend, afterwards", AttributeError, "no setter",
     lambda g: setattr(g.config, "communication_backend", g.backend)),

    # ---------------------------------------------------------------------------------- helpers
    *[("1.11", f"ParameterAnalyzer: {name} {value}", ValueError,
       f"{name} must be 1 or more, got {value}",
       lambda g, name=name, value=value: ms.ParameterAnalyzer(**{name: value}))
      for name in ("minimum_group_size", "world_size") for value in (0, -1)],
    *[("1.11", f"ParameterAnalyzer.{method}: None", TypeError, "got None",
       lambda g, method=method: getattr(ms.ParameterAnalyzer(), method)(None))
      for method in ("analyze_model", "analyze_parameters", "analyze_for_distribution",
                     "calculate_distribution_stats")],
    *[("1.11", f"validate_grouping: {what}", RuntimeError, message,
       lambda g, groups=groups: ms.ParameterAnalyzer().validate_grouping(
           groups and [ms.ParameterGroup(start, size, f"g{start}") for start, size in groups], 10))
      for what, groups, message in (
          ("None", None, "no groups for 10 parameters"),
          ("empty", [], "no groups for 10 parameters"),
          ("begins late", [(1, 9)], "begins at 1 and not at 0"),
          ("gap", [(5, 5), (0, 4)], "a gap between 'g0', which ends at 4, and 'g5'"),
          ("overlap", [(0, 6), (5, 5)], "an overlap between 'g0', which ends at 6, and 'g5'"),
          ("ends early", [(0, 9)], "ends at 9, and there are 10"))],
    *[("1.11", f"{name}: None", TypeError, "got NoneType and",
       lambda g, name=name: getattr(ms, name)(None, g.backend))
      for name in ("as_distributed", "as_distributed_for_high_bandwidth",
                   "as_distributed_for_low_bandwidth")],
    *[("1.11", f"{name}: no backend", TypeError, message,
       lambda g, name=name: getattr(ms, name)(MLP([2, 2]), None))
      for name, message in (("as_distributed", "MLP and NoneType"),
                            ("as_distributed_for_high_bandwidth", "got NoneType; mpishard.init()"),
                            ("as_distributed_for_low_bandwidth", "got NoneType; mpishard.init()"))],
]
# fmt: on

MISMATCHES = {
    "operation": lambda b: b.all_reduce(
        np.ones(2),
        list(ms.ReductionOperation)[2 * b.rank],  # SUM, MIN
    ),
    "dtype": lambda b: b.all_gather(np.ones(2, [np.float32, np.float64][b.rank])),
    "shape": lambda b: b.all_reduce(np.ones(2 + b.rank)),
    "counts": lambda b: b.reduce_scatter(np.ones(2), counts=[[1, 1], [2, 0]][b.rank]),
    "trailing dims": lambda b: b.gather(np.ones((2, 1 + b.rank))),
    "root": lambda b: b.broadcast(np.ones(2), root=b.rank),
    "kind or order": lambda b: b.all_reduce(np.ones(1)) if b.rank else b.barrier(),
}


@in_worlds(2)
def test_mistakes_that_one_rank_finds(mistakes, backend, shared_path):
    g = mistakes.Rank(backend, "fsdp", shared_path)
    for condition, *row in mistakes.rows_of(LOCAL, g.strategy):
        with mistakes.named(condition):
            mistakes.refused_alone(g, *row)
            mistakes.goes_on(g)


@pytest.mark.parametrize("what", MISMATCHES)
@in_worlds(2)
def test_collectives_that_do_not_belong_together(backend, what):
    with pytest.raises(CollectiveMismatchError, match=f"do not match in {what}; no data was mixed"):
        MISMATCHES[what](backend)
    assert backend.all_reduce(np.ones(1))[0] == 2


@in_worlds(2)
def test_rows_of_an_out_that_do_not_add_up(backend):
    with pytest.raises(ValueError, match=r"has 3 rows; the ranks send \[1, 1\], 2 in all"):
        backend.all_gather(np.ones(1), out=np.ones(3))


@in_worlds(2)
def test_a_message_of_another_length_stays_queued(backend):
    peer = 1 - backend.rank
    backend.send(np.ones(3), peer)
    with pytest.raises(RuntimeError, match="has 3 elements, 2 were expected; it stays queued"):
        backend.receive(peer, 2)
    assert backend.receive(peer, 3).tolist() == [1, 1, 1]


def test_a_rank_that_never_arrives():
    backend = ms.InMemoryCommunicationBackend(0, 2, "never arrives", timeout=0.01)
    with backend:
        with pytest.raises(TimeoutError, match=r"rank 0 (waited|is alone) .*from rank 1"):
            backend.receive(1, 1)
        with pytest.raises(TimeoutError, match="1"):
            backend.barrier()
    ms.InMemoryCommunicationBackend.clear_environment("never arrives")
