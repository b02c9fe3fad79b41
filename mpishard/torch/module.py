"""`shard`, and what else is done with a whole sharded module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from mpishard.communication.tracing.recorder import current_recorder
from mpishard.errors import ShardingError
from mpishard.observe.trace import span
from mpishard.torch.parameters import Part, SharedParameter
from mpishard.torch.sharded import POLICIES, ShardedModule, check_precision
from mpishard.torch.world import current_world

__all__ = ["check_replicas", "module_of", "no_sync", "part_of", "shard"]

_ATTRIBUTE = "_mpishard"


def shard(
    module: Any,
    strategy: Literal["ddp", "zero1", "zero2", "fsdp"] = "fsdp",
    *,
    minimum_unit_size: int = 1 << 16,
    precision: Literal["bfloat16"] | None = None,
) -> Any:
    """Shard a module in place: the training loop around it stays as it is. Collective.

    Every rank builds the same module and gets rank 0's values. Afterwards the trained parameters
    stand in memory that the ranks of a node share (under DDP in each rank's own), the module
    computes with them as before, and ``backward()`` reduces gradients: the mean over the ranks,
    each of which has its own samples. ``.grad`` is this rank's part of it.

    Parameters
    ----------
    module : torch.nn.Module
        On the CPU; its trained parameters are all float32, or all float64.
    strategy : {"ddp", "zero1", "zero2", "fsdp"}
        What is divided over the ranks: nothing; the optimizer's state; gradients too; parameters
        too. On one node fsdp, as zero1 and zero2, has one copy of the parameters.
    minimum_unit_size : int
        Elements below which no unit is closed: units are reduced as one.
    precision : {"bfloat16"}, optional
        Compute with parameters that are rounded to bfloat16, of which a node has one copy (each
        rank under DDP). Their owners keep float32, which optimizers and `save` see. Gradients are
        reduced, and floating inputs rounded, as FSDP2's mixed precision does; outputs are
        bfloat16.

    Returns
    -------
    torch.nn.Module
        ``module``.

    Raises
    ------
    NotInitializedError
        Before `init`.
    TypeError, ValueError
        For another module or strategy; on every rank if the ranks' modules differ. Nothing has
        changed then.
    ShardingError
        If it, or a part of it, is sharded already.

    Notes
    -----
    With fsdp on several nodes, or where the ranks of a node share no memory
    (``MPISHARD_ARENA=off``), each rank holds its parts: an operation that needs a parameter gathers
    its unit, in forward and backward, and two units stay. All ranks then use parameters in the same
    order, ``state_dict()`` is collective, and ``torch.compile`` is refused. With zero1 and zero2
    every node, or without shared memory every rank, has all parameters.

    Random layers: rank 0 goes on with its
    own generator, and each other rank's PyTorch generator is seeded differently, by rank 0's seed
    and the rank. Thread-ranks share one generator, which is left alone.
    """
    backend = current_world()
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    if strategy not in POLICIES:
        raise ValueError(f"strategy must be one of {', '.join(POLICIES)}, got {strategy!r}")
    taken = [name for name, p in module.named_parameters() if isinstance(p, SharedParameter)]
    if taken:
        raise ShardingError(
            f"parameter {taken[0]!r} is sharded already; shard() a module once, and each part of "
            "two modules by one of them"
        )
    check_precision(module, precision)
    sharded = ShardedModule(module, strategy, backend, minimum_unit_size, precision)
    module.__dict__[_ATTRIBUTE] = sharded
    if current_recorder.get() is not None:
        module.register_forward_pre_hook(_forward_begins)
        module.register_forward_hook(_forward_ends, always_call=True)
    return module


def _forward_begins(module: Any, _inputs: Any) -> None:
    """Hook of a module in a run that is traced."""
    owner = vars(module)[_ATTRIBUTE]
    if owner is not None:  # else the module is a copy
        owner.passes.part_of_step.enter_context(span("forward"))


def _forward_ends(module: Any, *_: Any) -> None:
    owner = vars(module)[_ATTRIBUTE]
    if owner is not None:
        owner.passes.part_of_step.close()


def module_of(module: Any) -> ShardedModule:
    """Return what holds a sharded module.

    Raises
    ------
    TypeError, ShardingError
        For another object, or a module that is not sharded.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(module).__name__}")
    # torch.compile's module holds the user's as _orig_mod.
    sharded = vars(getattr(module, "_orig_mod", module)).get(_ATTRIBUTE)
    if sharded is None:
        raise ShardingError(
            f"this {type(module).__name__} is not sharded; call mpishard.torch.shard(model) first"
        )
    return sharded  # type: ignore[no-any-return]


def part_of(parameter: Any) -> Part:
    """Return the part of a sharded parameter.

    Raises
    ------
    ShardingError
        For another tensor.
    """
    if isinstance(parameter, SharedParameter) and parameter._part.entry.trainable:
        return parameter._part
    raise ShardingError(
        f"a parameter of shape {tuple(parameter.shape)} is no trained parameter of a sharded "
        "module: it was frozen when the module was sharded, or the optimizer's parameters were "
        "collected before shard()"
    )


@contextmanager
def no_sync(*models: Any) -> Iterator[None]:
    """Let backward passes inside only add to this rank's gradients, without any message.

    The first ``backward()`` outside reduces the sum. Meanwhile each rank holds full gradients.

    Parameters
    ----------
    *models : torch.nn.Module
        Sharded modules.
    """
    held = [module_of(model) for model in models]
    before = [sharded.passes.syncs for sharded in held]
    for sharded in held:
        sharded.passes.syncs = False
    try:
        yield
    finally:
        for sharded, value in zip(held, before, strict=True):
            sharded.passes.syncs = value


def check_replicas(*models: Any) -> int:
    """Compare, bit by bit, every copy of every parameter that ranks hold for good. Collective.

    With ddp each rank has a copy. With the other strategies each node has one, and what only one
    rank holds is not compared. Call it every some hundred steps: it costs one checksum of the
    parameters and one small message.

    Parameters
    ----------
    *models : torch.nn.Module
        Sharded modules.

    Returns
    -------
    int
        Number of ranges of parameters that have several copies.

    Raises
    ------
    ReplicaError
        On every rank, naming the ranks and parameters that differ.
    """
    return sum(module_of(model).check_replicas() for model in models)
