"""Choices that do not combine: each rule once, with its one sentence.

docs/combinations.md shows which choices a user can combine, and gives these sentences for the rest.
Every function raises a ValueError, and communicates nothing.
"""

from __future__ import annotations

from typing import NoReturn


# Functions and no table of texts: each sentence has its numbers, and a caller cannot forget to
# raise. `NoReturn` tells the type checker so.
def refuse_with_leaves(
    leaves: int, other: str, instead: str = "leave out one of the two"
) -> NoReturn:
    """Refuse ``gradient_leaves`` beside a choice with which bits depend on the number of ranks."""
    raise ValueError(
        f"gradient_leaves={leaves} gives the same bits on any number of ranks, and {other} would "
        f"change them: {instead}"
    )


def refuse_updates_alone(
    reason: str, instead: str = "use DDP, or model.accumulate() to synchronise less often"
) -> NoReturn:
    """Refuse ``auto_sync_gradients=False`` unless each rank can update a replica of its own."""
    raise ValueError(
        f"auto_sync_gradients=False lets each rank update a replica of its own, and {reason}: "
        f"{instead}"
    )


def refuse_line_search(rule: str, reason: str, instead: str = "choose another rule") -> NoReturn:
    """Refuse a rule that searches along a line, if values of one function cannot be compared."""
    raise ValueError(
        f"{rule} compares losses of one function at several points, and {reason}: {instead}"
    )


def refuse_several_replicas(replicas: int, other: str, instead: str) -> NoReturn:
    """Refuse ``replica_size`` if all ranks must train one replica."""
    raise ValueError(
        f"replica_size makes {replicas} replicas, and {other} trains one on all ranks: {instead}, "
        "or leave replica_size out"
    )


def refuse_one_replica(optimizer: str, other: str) -> NoReturn:
    """Refuse an optimizer that exchanges between replicas, if all ranks hold one together."""
    raise ValueError(
        f"{optimizer} exchanges between replicas, and {other} is one replica of all ranks: give "
        'ShardingConfiguration(replica_size=), a number of ranks, or "node"'
    )


# Error feedback would never see what this rounding has lost.
def refuse_rounding(optimizer: str) -> NoReturn:
    """Refuse ``enable_gradient_compression`` beside an optimizer that sends gradients itself."""
    raise ValueError(
        f"{optimizer} chooses how replicas send gradients, and enable_gradient_compression=True "
        "would round them first: leave out one of the two"
    )


def refuse_for_model(option: str, model: str, obstacle: str) -> NoReturn:
    """Refuse an option of layers for a model that is not made of layers which support it."""
    raise ValueError(f"{option} does not fit this {model}, which {obstacle}")
