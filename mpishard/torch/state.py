"""The state of an optimizer in PyTorch's own form: whole tensors, on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from mpishard.communication.contract.status import called_as
from mpishard.torch.parameters import Part

__all__ = ["gather_states", "numbered_parts", "slice_states"]


def numbered_parts(parts: Mapping[int, Part], made: Any) -> Iterator[tuple[int, Part]]:
    """Yield the number in a state dict of each parameter of an optimizer, and its part."""
    tensors = (tensor for group in made.param_groups for tensor in group["params"])
    for number, tensor in enumerate(tensors):
        yield number, parts[id(tensor)]


def is_elementwise(value: Any, shape: Any) -> bool:
    """Whether a state has a value for each element of a tensor of ``shape``."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == shape


@called_as("optimizer.state_dict()")
def gather_states(parts: Mapping[int, Part], made: Any, state_dict: dict[str, Any]) -> Any:
    """Hook: the states of all ranks' parts, put together. Collective."""
    state = dict(state_dict["state"])
    for number, part in numbered_parts(parts, made):
        if number in state and part.owner.shards_state:
            state[number] = {
                key: _whole(part, value) if is_elementwise(value, part.tensor.shape) else value
                for key, value in state[number].items()
            }
    return {**state_dict, "state": state}


def _whole(part: Part, value: Any) -> Any:
    """The whole of what each rank has a part of. Collective."""
    gathered = part.owner.backend.all_gather(value.detach().contiguous().numpy())
    return torch.from_numpy(np.asarray(gathered)).view(part.entry.shape)


def slice_states(parts: Mapping[int, Part], made: Any, state_dict: dict[str, Any]) -> Any:
    """Hook: the parts of a whole state that this rank owns."""
    if made._mpishard_is_divided:  # by a checkpoint, of which each rank reads its part
        return state_dict
    state = dict(state_dict["state"])
    for number, part in numbered_parts(parts, made):
        if number in state:
            state[number] = {key: _own(part, value) for key, value in state[number].items()}
    return {**state_dict, "state": state}


def _own(part: Part, value: Any) -> Any:
    """A copy, for PyTorch would go on with the tensors given; thread-ranks are given the same."""
    if part.owner.shards_state and is_elementwise(value, part.entry.shape):
        value = value.reshape(-1)[part.in_parameter]
    return value.clone() if isinstance(value, torch.Tensor) else value
