"""The seam at which `mpishard.mirror` joins native classes; nothing else native names that room.

A native class that has documented members beside its own names a base class from here::

    from mpishard.base.mirrored import OptimizerMembers

    class Optimizer(OptimizerMembers): ...

`mpishard` loads the room, which offers its classes with `offer`. Without it each name is an empty
class, and the native classes work all the same. A type checker sees the room's classes.
"""

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpishard.mirror.members.configurations import ConfigurationPresets
    from mpishard.mirror.members.optimizers import OptimizerMembers
    from mpishard.mirror.members.plain_models import LayeredModelMembers, PlainModelMembers
    from mpishard.mirror.members.sharded_models import ShardedModelMembers
    from mpishard.mirror.members.sharded_optimizers import ShardedOptimizerMembers
    from mpishard.mirror.members.spellings import (
        LayerSpellings,
        OperationSpellings,
        RecomputeSpellings,
        ReductionSpellings,
        StrategySpellings,
    )

__all__ = [
    "ConfigurationPresets",
    "LayerSpellings",
    "LayeredModelMembers",
    "OperationSpellings",
    "OptimizerMembers",
    "PlainModelMembers",
    "RecomputeSpellings",
    "ReductionSpellings",
    "ShardedModelMembers",
    "ShardedOptimizerMembers",
    "StrategySpellings",
]

_modules: dict[str, str] = {}  # name of a class -> the module that has it


def offer(modules: Mapping[str, str]) -> None:
    """Offer classes for the bases of native ones; a module is loaded when it is first needed.

    Parameters
    ----------
    modules : mapping of str to str
        Name of a class -> the module that has it.
    """
    _modules.update(modules)


def __getattr__(name: str) -> object:
    if name not in __all__:  # tools and the import system ask every module for names of theirs
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _modules:
        return getattr(importlib.import_module(_modules[name]), name)
    return type(name, (), {"__doc__": "Nothing, because mpishard.mirror is not loaded."})
