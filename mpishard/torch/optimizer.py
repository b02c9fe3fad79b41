"""Optimizers of PyTorch, or rules of mpishard, on the parts that a rank owns; and clipping.

Their state dicts are in PyTorch's own form: whole tensors, on every rank.
"""

from __future__ import annotations

import functools
import inspect
import math
import weakref
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mpishard import settings
from mpishard.communication import ReductionOperation
from mpishard.communication.contract.status import called_as
from mpishard.errors import ShardingError
from mpishard.observe.trace import span
from mpishard.optimizers import Constant, Optimizer, OwnedRange, Segment, UpdateContext
from mpishard.torch.parameters import GradientPiece, Part, SharedParameter
from mpishard.torch.sharded import ShardedModule, module_of, part_of


def norm_of(parts: Sequence[Part], order: float = 2.0) -> float:
    """Return the p-norm of the gradients over all parts and ranks. Collective."""
    is_largest = math.isinf(order)
    shared, alone = 0.0, 0.0  # of divided gradients, and of those that each rank has whole
    for part in parts:
        if part.tensor.grad is None:
            continue
        gradient = part.tensor.grad.as_subclass(torch.Tensor)
        norm = float(torch.linalg.vector_norm(gradient, order)) if gradient.numel() else 0.0
        value = norm if is_largest else norm**order
        if not part.owner.shards_state:
            alone = max(alone, value) if is_largest else alone + value
        else:
            shared = max(shared, value) if is_largest else shared + value
    # Replicas have the same gradients: added up over the ranks each would count several times.
    if any(part.owner.shards_state for part in parts):
        operation = ReductionOperation.MAX if is_largest else ReductionOperation.SUM
        shared = float(parts[0].owner.backend.all_reduce(np.array([shared]), operation)[0])
    return max(shared, alone) if is_largest else (shared + alone) ** (1 / order)


def clip_grad_norm_(
    parameters: Any, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Any:
    """Scale gradients down if their norm over all parameters and ranks is larger. Collective.

    As ``torch.nn.utils.clip_grad_norm_`` does in one process.

    Parameters
    ----------
    parameters : torch.nn.Module, torch.Tensor, or iterable of torch.Tensor
        A sharded model, or parameters of sharded models.
    max_norm : float
        Largest norm; infinity only computes it.
    norm_type : float
        p of the p-norm, above 0; infinity, or "inf", for the largest element.
    error_if_nonfinite : bool
        Refuse gradients that are not finite.

    Returns
    -------
    torch.Tensor
        The norm before, a scalar, the same on every rank.

    Raises
    ------
    ShardingError
        For parameters of no sharded model; if the last ``backward()`` was inside `no_sync`.
    RuntimeError
        On every rank, for a norm that is not finite, if that is asked for. Nothing has changed.
    """
    max_norm, norm_type = float(max_norm), float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type must be above 0, got {norm_type}")
    if isinstance(parameters, torch.nn.Module):
        parts = module_of(parameters).parts
    else:
        given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        parts = [part_of(parameter) for parameter in given if parameter.requires_grad]
    owners = list(dict.fromkeys(part.owner for part in parts))
    for owner in owners:
        owner.require_reduced("clip_grad_norm_()")
    total = norm_of(parts, norm_type)
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is not finite, so they cannot be "
            "clipped; error_if_nonfinite=False turns this check off"
        )
    # As torch.nn.utils.clip_grad_norm_ computes it, so that both give the same numbers.
    factor = max_norm / (total + 1e-6)
    if not factor >= 1:  # NaN, too
        for part in parts:
            if part.tensor.grad is not None:
                part.tensor.grad.mul_(factor)
    dtype = parts[0].tensor.dtype if parts else torch.float32
    return torch.tensor(total, dtype=dtype)


class RuleOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """A rule that updates the parts of a model which this rank owns.

    Its one group has ``lr``, which schedulers of PyTorch set, and ``steps``, the number of
    updates. A rule with a schedule of its own sets ``lr`` itself. Options of single parameters
    are the rule's ``parameter_options``.

    Parameters
    ----------
    groups : list
        Tensors of parts, or one group of them.
    rule : Optimizer
        Of `mpishard.optimizers`.
    parts : mapping of int to Part
        The parts, by the id of their tensors.

    Raises
    ------
    ValueError
        For several groups or models, or options that match no parameter.
    TypeError
        For a rule that searches along a line.
    """

    def __init__(self, groups: Sequence[Any], rule: Optimizer, parts: Mapping[int, Part]) -> None:
        if rule.searches:
            raise TypeError(
                f"{type(rule).__name__} computes the loss several times a step; loops of PyTorch "
                "take rules that update once after a backward()"
            )
        if len({part.owner for part in parts.values()}) > 1:
            raise ValueError(f"{type(rule).__name__} updates one model; make one for each")
        self.rule = rule
        self._parts = parts
        super().__init__(groups, {"lr": rule.rate_of_step(0), "steps": 0, "numbers": {}})
        self._names = [part.entry.name for part in parts.values()]
        rule.checked_options.check_patterns(self._names)
        self._frozen = rule.checked_options.frozen_among(self._names)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take the one group."""
        if self.param_groups:
            raise ValueError(
                f"{type(self.rule).__name__} of mpishard has one group of parameters; give options "
                'of single parameters as parameter_options={"*.bias": {"weight_decay": 0}}'
            )
        super().add_param_group(param_group)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: None = None) -> None:
        """Update the parts that have a gradient. Collective."""
        rule, (group,) = self.rule, self.param_groups
        if not isinstance(rule.learning_rate, Constant):
            # Schedulers of PyTorch leave this key in the groups that they change.
            if "initial_lr" in group:
                raise ValueError(
                    f"the learning rate of {type(rule).__name__} is already a schedule, "
                    f"{rule.learning_rate!r}; give the rule a number if a scheduler of PyTorch "
                    "sets its rate"
                )
            group["lr"] = rule.checked_rate(group["steps"])
        parts = [self._parts[id(tensor)] for tensor in group["params"]]
        owner = parts[0].owner
        trained = [
            part
            for part in parts
            if part.tensor.grad is not None and part.entry.name not in self._frozen
        ]
        scale = 1.0
        if rule.clip_global_norm is not None:
            scale = rule.clip_factor(norm_of(trained))
        context = UpdateContext(
            step=group["steps"] + 1,
            learning_rate=float(group["lr"]),
            gradient_scale=scale,
            sum_over_owners=owner.backend.all_reduce if owner.shards_state else lambda rows: rows,
            parameter_names=self._names,
            numbers=group["numbers"],
        )
        ranges = [self._range(part) for part in trained]  # of empty parts, too: all have state
        rule.update_all([owned for owned in ranges if owned.parameters.size], context)
        group["steps"] += 1

    def _range(self, part: Part) -> OwnedRange:
        state = self.state[part.tensor]
        for name in self.rule.needed_state():
            if name not in state:
                state[name] = torch.zeros_like(part.tensor)
        return OwnedRange(
            _flat(part.tensor),
            _flat(part.tensor.grad),
            {name: _flat(vector) for name, vector in state.items()},
            (Segment(part.entry.name, 0, part.stop - part.start),),
        )


def _flat(tensor: Any) -> np.ndarray[Any, Any]:
    """The elements of a contiguous tensor, in its memory."""
    values: np.ndarray[Any, Any] = tensor.detach().reshape(-1).numpy()
    return values


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
    for owner in owners:
        owner.placed.require_placed()
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
    made._mpishard_options = options
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
    if not isinstance(parameters, Iterable) or isinstance(parameters, torch.Tensor):
        raise TypeError(
            "parameters must be a sharded module, an iterable of its parameters, or of groups of "
            f"them, got {type(parameters).__name__}"
        )
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

    It is tried on a matrix, and by one optimizer each on the two halves of it, if an owner divides
    its state: ranks have an optimizer each, so that no norm over parameters is that of all of them.
    """
    owner = next((owner for owner in owners if owner.shards_state), None)
    if owner is None:
        return
    dtype = owner.parts[0].tensor.dtype
    values = torch.linspace(-1, 1, 12, dtype=dtype).view(3, 4)
    whole = torch.nn.Parameter(values.clone())
    # Cut inside a row, as the parts of ranks are.
    halves = [torch.nn.Parameter(half.clone()) for half in values.view(-1).tensor_split([5])]
    tried = [kind([parameter], **options) for parameter in (whole, *halves)]
    try:
        for step in range(3):
            # Larger ones later: with any usual limit of a norm some are clipped.
            gradient = 100**step * torch.cos(7 * values + step)
            whole.grad = gradient
            for half, part in zip(halves, gradient.reshape(-1).tensor_split([5]), strict=True):
                half.grad = part.clone()  # an optimizer may change gradients in place
            for one in tried:
                one.step()
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{kind.__name__} {_NEEDS_WHOLE}: {error}") from error
    if not torch.allclose(whole.detach().view(-1), torch.cat([h.detach() for h in halves])):
        raise ValueError(f"{kind.__name__} {_NEEDS_WHOLE}")


_NEEDS_WHOLE = (
    "looks at parameters as a whole (rows, columns, or norms), and with "
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
        owner.placed.require_placed()
        owner.let_go()
    chosen = [
        sorted((n, str(_plain(v))) for n, v in group.items() if n not in ("params", "param_names"))
        for group in made.param_groups
    ]
    backend = owners[0].backend
    # Each rank updates other elements, so that different settings would raise no error. Not int64,
    # as the number of a unit is, which a rank still in backward() may be gathering.
    everyone = backend.all_gather(np.array([zlib.crc32(repr(chosen).encode())], np.uint32))
    if (everyone != everyone[0]).any():
        raise ShardingError(
            "the settings of the update, such as the learning rate, differ between ranks "
            f"(checksums by rank: {everyone.tolist()}; here {chosen}). Nothing was updated; give "
            "every rank the same settings"
        )
    with torch._C.DisableTorchFunctionSubclass():
        for part in made._mpishard_parts.values():
            gradient = part.tensor.grad
            if type(gradient) is GradientPiece:  # which would make each operation slower
                part.tensor.grad = gradient.as_subclass(torch.Tensor)
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


def states_of_numbers(made: Any) -> frozenset[str]:
    """Return the names of the states that have a value for each element of a parameter.

    Their shapes do not tell if a parameter is one number, which other states are as well: a trial
    does. Without such a parameter no name is needed, and none is returned.
    """
    if all(part.entry.shape for part in parts_of(made).values()):
        return frozenset()
    if isinstance(made, RuleOptimizer):
        return frozenset(made.rule.needed_state())
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


def is_elementwise(key: str, value: Any, shape: Any, of_numbers: Collection[str]) -> bool:
    """Whether a state has a value for each element of a tensor of ``shape``.

    ``of_numbers`` are the names that `states_of_numbers` gives.
    """
    if not isinstance(value, torch.Tensor) or value.shape != shape:
        return False
    return value.dim() > 0 or key in of_numbers


@called_as("optimizer.state_dict()")
def gather_states(parts: Mapping[int, Part], made: Any, state_dict: dict[str, Any]) -> Any:
    """Hook: the states of all ranks' parts, put together. Collective."""
    state = dict(state_dict["state"])
    for number, part in numbered_parts(parts, made):
        if number in state and part.owner.shards_state:
            state[number] = {
                key: _whole(part, value)
                if is_elementwise(key, value, part.tensor.shape, ())
                else value
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
    of_numbers = states_of_numbers(made)
    for number, part in numbered_parts(parts, made):
        if number in state:
            state[number] = {
                key: _own(part, key, value, of_numbers) for key, value in state[number].items()
            }
    return {**state_dict, "state": state}


def _own(part: Part, key: str, value: Any, of_numbers: Collection[str]) -> Any:
    """A copy, for PyTorch would go on with the tensors given; thread-ranks are given the same."""
    if part.owner.shards_state and is_elementwise(key, value, part.entry.shape, of_numbers):
        value = value.reshape(-1)[part.in_parameter]
    return value.clone() if isinstance(value, torch.Tensor) else value
