"""State dicts of optimizers, in PyTorch's own form: whole tensors, on every rank."""

from __future__ import annotations

import copy
import inspect
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from mpishard.base import CollectiveMismatchError, ShardingError, ShardLayout
from mpishard.communication import CommunicationBackend, called_as, differences
from mpishard.torch.complex_parameters import real_numbers
from mpishard.torch.parameters import OwnedParameter, StateDict
from mpishard.torch.rule_optimizer import RuleOptimizer

_TOGETHER = 1 << 26  # Bytes of whole states that are gathered together, or of a larger one.


def owned_parameters(made: torch.optim.Optimizer) -> dict[int, OwnedParameter]:
    """Return the parts that an optimizer updates, by the id of their tensors.

    Raises
    ------
    TypeError
        If `optimizer` has not made the optimizer.
    """
    parts: dict[int, OwnedParameter] | None = getattr(made, "_mpishard_parts", None)
    if parts is None:
        raise TypeError(
            f"{type(made).__name__} is not an optimizer of a sharded model; "
            "mpishard.torch.optimizer(torch.optim.AdamW, model, lr=1e-3) makes one"
        )
    return parts


def numbered_parameters(
    parts: Mapping[int, OwnedParameter], made: torch.optim.Optimizer
) -> Iterator[tuple[int, OwnedParameter]]:
    """Yield each parameter's number in a state dict of an optimizer, and its part."""
    tensors = (tensor for group in made.param_groups for tensor in group["params"])
    for number, tensor in enumerate(tensors):
        yield number, parts[id(tensor)]


def checksum_of_parameters(made: torch.optim.Optimizer) -> int:
    """Return a checksum of the parameters in each group, in their order."""
    lengths = [len(group["params"]) for group in made.param_groups]
    ids = lengths, [id(tensor) for group in made.param_groups for tensor in group["params"]]
    # Kept, because each step compares it, and seldom has other parameters than the last one.
    known, checksum = made._mpishard_checksum
    if known != ids:
        parts = [made._mpishard_parts[number] for number in ids[1]]
        numbers = [(part.owner.layout.subject, part.index) for part in parts]
        checksum = zlib.crc32(repr((lengths, numbers)).encode())
        made._mpishard_checksum = ids, checksum
    return checksum  # type: ignore[no-any-return]


def refuse_other_parameters(
    checksums: Any, made: torch.optim.Optimizer, backend: CommunicationBackend
) -> None:
    """Refuse parameters that differ between ranks, by the ranks' checksums. Collective then."""
    if (checksums == checksums[0]).all():
        return
    parts = iter(numbered_parameters(made._mpishard_parts, made))
    names = {
        f"parameter {place} of group {number}": next(parts)[1].entry.name
        for number, group in enumerate(made.param_groups)
        for place in range(len(group["params"]))
    }
    found = differences(backend, names) or "they have the same names in other models"
    raise ShardingError(
        f"the ranks' optimizers differ in their parameters: by rank, {found}. Nothing was changed; "
        "give mpishard.torch.optimizer the same parameters, groups and order on every rank"
    )


def needs_closure(kind: Any) -> bool:
    """Return True if steps of the class compute the loss themselves, as those of LBFGS do."""
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def states_of_numbers(made: torch.optim.Optimizer) -> frozenset[str]:
    """Return the names of states with a value for each element, for parameters of shape ().

    Other states, such as a count of steps, may have the shape () as well. The names are therefore
    found by a trial step with a vector. If no parameter has the shape (), the set is empty.
    """
    if all(part.entry.shape for part in owned_parameters(made).values()):
        return frozenset()
    if isinstance(made, RuleOptimizer):
        return frozenset(made.rule.needed_state())
    if needs_closure(made.__class__):  # LBFGS keeps products and directions of all parameters.
        return frozenset()
    names: set[str] = set()
    for group in made.param_groups:
        trial = torch.nn.Parameter(torch.ones(2))
        trial.grad = torch.ones(2)
        options = {key: value for key, value in group.items() if key != "param_names"}
        tried = made.__class__([{**options, "params": [trial]}], **made._mpishard_options)
        tried.step()
        state = tried.state[trial]
        names |= {key for key in state if is_elementwise(key, state[key], trial.shape, ())}
    return frozenset(names)


def is_elementwise(key: str, value: object, shape: object, of_numbers: Collection[str]) -> bool:
    """Return True if a state has a value for each element of a tensor of ``shape``.

    ``of_numbers`` has the names that `states_of_numbers` returns.
    """
    if not isinstance(value, torch.Tensor) or value.shape != shape:
        return False
    return value.dim() > 0 or key in of_numbers


def _changed_states(
    parts: Mapping[int, OwnedParameter],
    made: torch.optim.Optimizer,
    state_dict: StateDict,
    change: Callable[[OwnedParameter, str, Any], Any],
) -> dict[str, Any]:
    """Return the state dict with ``change(part, key, value)`` in place of each state."""
    state = dict(state_dict["state"])
    for number, part in numbered_parameters(parts, made):
        if number in state:
            state[number] = {key: change(part, key, v) for key, v in state[number].items()}
    return {**state_dict, "state": state}


@called_as("optimizer.state_dict()")
def gather_states(
    parts: Mapping[int, OwnedParameter], made: torch.optim.Optimizer, state_dict: StateDict
) -> Any:
    """Return a state dict with whole states, from the states of all ranks' parts. Collective."""
    owner = next((part.owner for part in parts.values() if part.owner.shards_state), None)
    if owner is not None:
        mine = np.array([checksum_of_parameters(made)])
        try:
            everyone = owner.backend.all_gather(mine, subject=owner.layout.subject)
        except CollectiveMismatchError as error:
            error.add_note(
                "Each rank has a part of the optimizer's state: call it on every rank, and save on "
                "rank 0:\n    state = optimizer.state_dict()\n"
                "    if mst.rank() == 0: torch.save(state, path)\n"
                "or call mst.save(path, model, optimizer) on every rank"
            )
            raise
        refuse_other_parameters(everyone, made, owner.backend)

    found: dict[Any, list[tuple[OwnedParameter, str, torch.Tensor]]] = {}
    wholes: dict[tuple[int, str], torch.Tensor] = {}
    for number, part in numbered_parameters(parts, made):
        for key, value in state_dict["state"].get(number, {}).items():
            if not is_elementwise(key, value, part.tensor.shape, ()):
                continue
            if part.owner.shards_state:
                found.setdefault((part.owner, value.dtype), []).append((part, key, value))
            elif part.is_complex:
                wholes[id(part), key] = part.whole(value)
    for states in found.values():
        ends = accumulate(part.entry.size * value.itemsize for part, _, value in states)
        numbered = zip((end // _TOGETHER for end in ends), states, strict=True)
        for _, run in groupby(numbered, key=itemgetter(0)):
            group = [state for _, state in run]
            gathered = _gathered([(part, value) for part, _, value in group])
            for (part, key, _), value in zip(group, gathered, strict=True):
                wholes[id(part), key] = value
    return _changed_states(
        parts, made, state_dict, lambda part, key, value: wholes.get((id(part), key), value)
    )


def _gathered(states: Sequence[tuple[OwnedParameter, torch.Tensor]]) -> Iterator[torch.Tensor]:
    """Yield whole states from this rank's parts, of one model and dtype. Collective."""
    owner = states[0][0].owner
    world_size = owner.backend.world_size
    own = torch.cat([value.detach().reshape(-1) for _, value in states]).numpy()
    # One message, because a model may have thousands of small parameters.
    everyone = torch.from_numpy(
        np.asarray(owner.backend.all_gather(own, subject=owner.layout.subject))
    )
    edges: dict[int, list[int]] = {}  # Of the ranks' pieces of each unit.
    lengths = []
    for part, _ in states:
        unit, start, stop = part.unit, part.entry.start, part.entry.stop
        if unit.index not in edges:
            sizes = ShardLayout(unit.length, world_size).sizes
            edges[unit.index] = [*accumulate(sizes, initial=unit.start)]
        inside = [min(max(edge, start), stop) for edge in edges[unit.index]]
        lengths.append([after - before for before, after in pairwise(inside)])
    pieces = everyone.split(
        [length for of_rank in zip(*lengths, strict=True) for length in of_rank]
    )
    for place, (part, _) in enumerate(states):
        yield part.whole(torch.cat(pieces[place :: len(states)]))


def slice_states(
    parts: Mapping[int, OwnedParameter], made: torch.optim.Optimizer, state_dict: StateDict
) -> Any:
    """Return a state dict with this rank's parts, from one with whole states."""
    if made._mpishard_is_divided:  # Each rank has read only its parts from a checkpoint.
        return state_dict
    of_numbers = states_of_numbers(made)

    def own(part: OwnedParameter, key: str, value: Any) -> Any:
        whole = is_elementwise(key, value, part.shape, of_numbers)
        if part.is_complex:  # Only states with a value for each element are complex.
            whole = isinstance(value, torch.Tensor) and value.is_complex()
        if whole and part.gives_parts:
            value = real_numbers(value)[part.in_parameter].view(part.tensor.shape)
        # A copy, because PyTorch would use the given tensor itself, which thread-ranks share.
        return copy.deepcopy(value)

    return _changed_states(parts, made, state_dict, own)
