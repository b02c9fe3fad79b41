"""Optimizers of PyTorch, or rules of mpishard, on the parts that a rank owns.

Their state dicts are in PyTorch's own form: whole tensors, on every rank.
"""

from __future__ import annotations

import functools
import inspect
import weakref
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mpishard import settings
from mpishard.communication.contract.status import called_as
from mpishard.errors import ShardingError
from mpishard.observe.trace import span
from mpishard.optimizers import Optimizer
from mpishard.torch.module import module_of, part_of
from mpishard.torch.parameters import Part, SharedParameter
from mpishard.torch.rule_optimizer import RuleOptimizer
from mpishard.torch.sharded import ShardedModule

__all__ = ["is_elementwise", "numbered_parts", "optimizer", "parts_of"]


def optimizer(kind: Any, parameters: Any, **options: Any) -> Any:
    """Make an optimizer of a sharded model.

    It is a ``torch.optim`` optimizer, of the class given, whose parameters are the parts that this
    rank owns. Schedulers, ``param_groups``, ``zero_grad`` and hooks work as ever. ``step()`` is
    collective: it waits until all ranks have come to it, and until all have updated.
    ``state_dict()`` is collective, too, and is PyTorch's own: whole tensors, in the order of the
    parameters; ``load_state_dict()`` takes one, also of plain PyTorch.

    Parameters
    ----------
    kind : type or Optimizer
        A class of ``torch.optim``, or one like it. Or a rule of `mpishard.optimizers`, such as
        ``AdamW(1e-3)``, with its own clipping, decay groups and state; its rate is a schedule of
        its own, or a number that schedulers of PyTorch may change.
    parameters : torch.nn.Module or iterable
        The sharded model: all its trained parameters. Or parameters of one or several sharded
        models, or groups of them, as for the class: dicts with ``"params"``.
    **options
        For a class.

    Returns
    -------
    torch.optim.Optimizer

    Raises
    ------
    TypeError
        For a class that is no optimizer, or whose steps need a closure.
    ValueError
        For one that looks at whole matrices, if only parts of them are here: Adafactor and Muon
        need ``strategy="ddp"``.
    ShardingError
        For parameters of no sharded model.
    """
    is_rule = isinstance(kind, Optimizer)
    if not is_rule:
        _require_torch(kind)
    parts: dict[int, Part] = {}
    groups = _groups(parameters, parts)
    owners = list(dict.fromkeys(part.owner for part in parts.values()))
    if not owners:
        raise ValueError("the optimizer was given no parameters")
    if is_rule:
        if options:
            raise TypeError(
                f"{', '.join(options)}: the settings of {type(kind).__name__} are given when it "
                "is made"
            )
        made: Any = RuleOptimizer(groups, kind, parts)
    else:
        _require_elementwise(kind, options, owners)
        made = kind(groups, **options)
    made.register_step_pre_hook(functools.partial(_before_step, owners))
    made.register_step_post_hook(functools.partial(_after_step, owners))
    made.register_state_dict_post_hook(functools.partial(gather_states, parts))
    made.register_load_state_dict_pre_hook(functools.partial(slice_states, parts))
    made._mpishard_parts, made._mpishard_is_divided = parts, False
    # GradScaler then calls step() on every rank, where it is refused; else a rank whose own part
    # has an inf would leave the call out.
    made._step_supports_amp_scaling = True
    # By a proxy: the optimizer is freed when nobody uses it, and its models with it.
    made.add_param_group = functools.partial(_add_group, weakref.proxy(made), options, owners)
    return made


def _add_group(
    made: Any,
    options: Mapping[str, Any],
    owners: list[ShardedModule],
    param_group: Mapping[str, Any],
) -> None:
    """``add_param_group`` with parameters of sharded models."""
    parts: dict[int, Part] = {}
    (group,) = _groups([param_group], parts)
    everyone = list(dict.fromkeys([*owners, *(part.owner for part in parts.values())]))
    if not isinstance(made, RuleOptimizer):  # which needs no trial: rules know ranges
        _require_elementwise(made.__class__, options, everyone)
    made.__class__.add_param_group(made, group)
    made._mpishard_parts.update(parts)
    owners[:] = everyone


def _require_torch(kind: Any) -> None:
    is_class = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    if not is_class:
        shown = f"the class {kind.__name__}" if isinstance(kind, type) else type(kind).__name__
        raise TypeError(
            f"kind must be a class of torch.optim, or a rule such as mpishard.optimizers.AdamW("
            f"1e-3), got {shown}"
        )
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise TypeError(
            f"the steps of {kind.__name__} need a closure, which computes the loss several times "
            "a step; sharded models take optimizers that update once after a backward()"
        )


def parts_of(made: Any) -> dict[int, Part]:
    """Return the parts that an optimizer updates, by the id of their tensors.

    Raises
    ------
    TypeError
        For an optimizer that `optimizer` has not made.
    """
    parts: dict[int, Part] | None = getattr(made, "_mpishard_parts", None)
    if parts is None:
        raise TypeError(
            f"{type(made).__name__} is no optimizer of a sharded model; mpishard.torch.optimizer("
            "torch.optim.AdamW, model, lr=1e-3) makes one"
        )
    return parts


def _groups(parameters: Any, parts: dict[int, Part]) -> list[Any]:
    """The same groups with the parts that this rank owns, which are noted in ``parts``."""

    def own(parameter: Any) -> Any:
        if isinstance(parameter, tuple):  # a name, as of named_parameters()
            return parameter[0], own(parameter[1])
        part = part_of(parameter)
        parts[id(part.tensor)] = part
        return part.tensor

    if isinstance(parameters, torch.nn.Module):
        return [own(part.parameter) for part in module_of(parameters).parts]
    given = list(parameters)
    if not given or not isinstance(given[0], Mapping):
        return [own(parameter) for parameter in given]
    groups = []
    for group in given:
        inside = group["params"]
        inside = [inside] if isinstance(inside, torch.Tensor) else inside
        groups.append({**group, "params": [own(parameter) for parameter in inside]})
    return groups


def _require_elementwise(
    kind: Any, options: Mapping[str, Any], owners: list[ShardedModule]
) -> None:
    """Refuse an optimizer of which a part of a matrix is updated otherwise than the whole.

    It is tried on a matrix, and on the two halves of it, if an owner divides its state.
    """
    owner = next((owner for owner in owners if owner.shards_state), None)
    if owner is None:
        return
    dtype = owner.parts[0].tensor.dtype
    values = torch.linspace(-1, 1, 12, dtype=dtype).view(3, 4)
    whole = torch.nn.Parameter(values.clone())
    # Cut inside a row, as the parts of ranks are.
    halves = [torch.nn.Parameter(half.clone()) for half in values.view(-1).tensor_split([5])]
    tried = kind([whole], **options), kind(halves, **options)
    try:
        for step in range(3):
            gradient = torch.cos(7 * values + step)
            whole.grad = gradient
            for half, part in zip(halves, gradient.reshape(-1).tensor_split([5]), strict=True):
                half.grad = part
            for one in tried:
                one.step()
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{kind.__name__} {_NEEDS_WHOLE}: {error}") from error
    if not torch.allclose(whole.detach().view(-1), torch.cat([h.detach() for h in halves])):
        raise ValueError(f"{kind.__name__} {_NEEDS_WHOLE}")


_NEEDS_WHOLE = (
    "looks at a parameter as a whole (rows, columns, or its norm), and with "
    'this strategy each rank updates a part of it; use strategy="ddp", or an optimizer '
    "that updates each element alone: SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, "
    "RMSprop, Rprop, ASGD"
)


@called_as("optimizer.step()")
def _before_step(owners: list[ShardedModule], made: Any, args: Any, kwargs: Any) -> None:
    """Hook: all ranks have gradients, nobody reads parameters, and all will do the same."""
    if any(value is not None for value in (*args[1:], *kwargs.values())):  # args begin with made
        raise TypeError(
            "step() of a sharded model takes no closure: call backward() before it, on every rank"
        )
    if hasattr(made, "found_inf"):  # set for this call by GradScaler, which an error would leave
        del made.found_inf, made.grad_scale
        raise ShardingError(
            "torch.amp.GradScaler looks for infinities in the gradients of one rank, and would "
            "change the scale, and leave steps out, on that rank alone. Nothing was updated; call "
            "optimizer.step() without a scaler: autocast to bfloat16 needs none"
        )
    for owner in owners:
        owner.require_reduced("step()")
        owner.require_placed()
        owner.let_go()
    chosen = [
        sorted((n, str(_plain(v))) for n, v in group.items() if n not in ("params", "param_names"))
        for group in made.param_groups
    ]
    backend = owners[0].backend
    # Each rank updates other elements, so that different settings would raise no error.
    everyone = backend.all_gather(np.array([zlib.crc32(repr(chosen).encode())]))
    if (everyone != everyone[0]).any():
        raise ShardingError(
            "the ranks would update with different settings, such as the learning rate (checksums "
            f"by rank: {everyone.tolist()}; here {chosen}). Nothing was updated; give every "
            "rank the same"
        )
    record("gradients", made)
    owners[0].passes.part_of_step.enter_context(span("update"))


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


@called_as("optimizer.step()")
def _after_step(owners: list[ShardedModule], made: Any, *_: Any) -> None:
    """Hook: let all ranks read the parameters that each has updated."""
    for owner in owners:
        owner.publish()
    record("parameters", made)


def _refuse_others(made: Any, *_: Any) -> None:
    """Hook of every optimizer: others than ours would update parameters that other ranks read."""
    if hasattr(made, "_mpishard_parts"):
        return
    for group in made.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, SharedParameter) and parameter._part.owner.shards_state:
                raise ShardingError(
                    f"{type(made).__name__} would update parameter {parameter._part.entry.name!r} "
                    "whole, and this rank owns a part of it; make the optimizer with "
                    f"mpishard.torch.optimizer(torch.optim.{type(made).__name__}, model, ...)"
                )


register_optimizer_step_pre_hook(_refuse_others)


def record(kind: str, made: Any) -> None:
    """Write this rank's parts of a step's "gradients" or "parameters" if verify asks for them.

    Raises
    ------
    SystemExit
        After the last step to compare: the ranks end there together.
    """
    verification = settings.verification()
    if verification is None:
        return
    folder, steps = verification
    parts = made._mpishard_parts.values()
    owners = list(dict.fromkeys(part.owner for part in parts))
    rank = owners[0].backend.rank
    step = 1 + sum(1 for _ in folder.glob(f"{kind}-*-{rank}.npz"))
    arrays: dict[str, Any] = {}
    for part in parts:
        tensor = part.tensor if kind == "parameters" else part.tensor.grad
        own = part.in_parameter
        key = f"{owners.index(part.owner)}/{part.entry.name}/{own.start}/{own.stop}"
        arrays[key] = np.empty(0) if tensor is None else tensor.detach().numpy().reshape(-1)
    np.savez(folder / f"{kind}-{step}-{rank}.npz", **arrays)
    # verify has what it asked for: the rest of the script would take time alone.
    if kind == "parameters" and step == steps:
        raise SystemExit(0)


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
    """The whole tensor of which each rank has a part. Collective."""
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
