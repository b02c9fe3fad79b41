"""Modules that compute with bfloat16 copies of float32 parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from mpishard.errors import ShardingError

__all__ = ["check_precision", "compute_in_bfloat16"]


def check_precision(module: Any, precision: str | None) -> None:
    """Refuse what cannot be rounded, before anything is changed."""
    if precision not in (None, "bfloat16"):
        raise ValueError(f'precision must be None or "bfloat16", got {precision!r}')
    odd = [name for name, p in module.named_parameters() if p.dtype != torch.float32]
    if precision is not None and odd:
        raise ValueError(
            f'precision="bfloat16" rounds float32 parameters, and {odd[0]!r} of this '
            f"{type(module).__name__} is {module.get_parameter(odd[0]).dtype}: use module.float()"
        )


def compute_in_bfloat16(module: Any) -> None:
    """Round floating inputs, and refuse values that the owners of parameters would not see."""
    module.register_forward_pre_hook(_round_inputs, with_kwargs=True)
    for inner in module.modules():
        inner.register_load_state_dict_pre_hook(_refuse)


def _round_inputs(_module: Any, arguments: Any, options: Any) -> Any:
    """Hook: round floating inputs, as PyTorch does not mix dtypes."""

    def rounded(x: Any) -> Any:
        return x.bfloat16() if x.is_floating_point() else x

    return tree_map_only(torch.Tensor, rounded, (arguments, options))


def _refuse(module: Any, *_: Any) -> None:
    raise ShardingError(
        f'load_state_dict() of {type(module).__name__} with precision="bfloat16" would change the '
        "rounded copies, and not the float32 parameters of their owners: call it before shard(), "
        "or load a checkpoint with mpishard.torch.load"
    )
