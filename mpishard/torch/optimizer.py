"""Optimizers of PyTorch, or rules of mpishard, for the parts that a rank owns; and clipping.

Their state dicts have PyTorch's own form: whole tensors, on every rank.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import operator
import weakref
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mpishard.base import Array, CollectiveMismatchError, ShardingError, settings
from mpishard.communication import CommunicationBackend, called_as, differences
from mpishard.observe import span
from mpishard.optimizers import (
    Constant,
    Optimizer,
    PieceViews,
    Segment,
    UpdateContext,
    count_missed,
    missed_by,
)
from mpishard.torch.gradients import GradientPart, plain
from mpishard.torch.lone_saves import warn_of_lone_saves
from mpishard.torch.parameters import OwnedParameter, PlacedParameter, StateDict
from mpishard.torch.sharded import ShardedModule, module_of, owned_parameter


def norm_of(parts: Sequence[OwnedParameter], order: float = 2.0) -> float:
    """Return the p-norm of the gradients over all parts and ranks. Collective."""
    is_largest = math.isinf(order)
    add = max if is_largest else operator.add
    sums = {True: 0.0, False: 0.0}  # Of gradients that are split, and of whole gradients.
    for part in parts:
        if part.tensor.grad is None:
            continue
        gradient = plain(part.tensor.grad)
        norm = float(torch.linalg.vector_norm(gradient, order)) if gradient.numel() else 0.0
        is_split = part.owner.shards_state
        sums[is_split] = add(sums[is_split], norm if is_largest else norm**order)
    # Only split gradients are summed over ranks. Whole gradients are equal on every rank, and would
    # count several times.
    if any(part.owner.shards_state for part in parts):
        # Ranks may give the parameters in any order.
        given = sorted((part.owner.layout.subject, part.index) for part in parts)
        mark = zlib.crc32(np.array(given).tobytes())
        row = np.array([[sums[True], mark]])
        rows = parts[0].owner.backend.all_gather(row, subject=given[0][0])
        if (rows[:, 1] != mark).any():
            raise ShardingError(
                "the ranks compute the norm of the gradients of different parameters: give "
                "clip_grad_norm_() the same on every rank"
            )
        norms = rows[:, 0]
        sums[True] = float(norms.max() if is_largest else norms.sum())
    total: float = add(sums[True], sums[False])
    return total if is_largest else total ** (1 / order)


def clip_grad_norm_(
    parameters: Any, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Any:
    """Scale gradients down to a norm, over all parameters and ranks, of ``max_norm``. Collective.

    It computes what ``torch.nn.utils.clip_grad_norm_`` computes in one process.

    Parameters
    ----------
    parameters : torch.nn.Module, torch.Tensor, or iterable of torch.Tensor
        A sharded model, or parameters of sharded models.
    max_norm : float
        Maximum norm. With infinity the norm is only computed.
    norm_type : float
        Order p > 0 of the p-norm. With infinity, or "inf", it is the largest absolute value.
    error_if_nonfinite : bool
        Raise an error if the norm is not finite.

    Returns
    -------
    torch.Tensor
        The norm before clipping, a scalar, the same on every rank.

    Raises
    ------
    ValueError
        If ``norm_type`` is not above 0.
    ShardingError
        If a parameter is not one of a sharded model, or the last ``backward()`` was inside
        `no_sync`. On every rank, if ranks give different parameters, except under DDP.
    RuntimeError
        If the norm is not finite and ``error_if_nonfinite`` is True. Every rank raises it, and
        nothing has changed.
    """
    max_norm, norm_type = float(max_norm), float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type must be above 0, got {norm_type}")
    if isinstance(parameters, torch.nn.Module):
        parts = module_of(parameters).parts
    else:
        given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        parts = [owned_parameter(parameter) for parameter in given if parameter.requires_grad]
    owners = list(dict.fromkeys(part.owner for part in parts))
    for owner in owners:
        owner.require_reduced("clip_grad_norm_()")
    total = norm_of(parts, norm_type)
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is not finite, so they cannot be "
            "clipped; error_if_nonfinite=False turns this check off"
        )
    # torch.nn.utils.clip_grad_norm_ adds 1e-6, too, so that both give the same numbers.
    factor = max_norm / (total + 1e-6)
    if not factor >= 1:  # This is True for NaN, too, as in PyTorch.
        for part in parts:
            if part.tensor.grad is not None:
                plain(part.tensor.grad).mul_(factor)
    dtype = parts[0].tensor.dtype if parts else torch.float32
    return torch.tensor(total, dtype=dtype)


class RuleOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """Optimizer that updates this rank's parts of a model by a rule of mpishard.

    Its only group has ``lr``, which schedulers of PyTorch set, and ``steps``, the number of
    updates. A rule with a schedule of its own sets ``lr`` itself. Options of single parameters
    are the rule's ``parameter_options``.

    Parameters
    ----------
    groups : list
        Tensors of parts, or one group of them.
    rule : Optimizer
        Rule of `mpishard.optimizers`.
    parts : mapping of int to OwnedParameter
        The parts, by the id of their tensors.

    Raises
    ------
    ValueError
        If there are several groups or models, or options match no parameter.
    TypeError
        If the rule searches along a line.
    """

    def __init__(
        self, groups: Sequence[Any], rule: Optimizer, parts: Mapping[int, OwnedParameter]
    ) -> None:
        if rule.searches:
            raise TypeError(
                f"{type(rule).__name__} computes the loss several times a step; loops of PyTorch "
                "take rules that update once after a backward()"
            )
        # A rule's clipping and count of steps are those of one model.
        if len({part.owner for part in parts.values()}) > 1:
            raise ValueError(f"{type(rule).__name__} updates one model; make one for each")
        self.rule = rule
        self._parts = parts
        super().__init__(groups, {"lr": rule.rate_of_step(0), "steps": 0, "numbers": {}})
        self._names = [part.entry.name for part in parts.values()]
        rule.checked_options.check_patterns(self._names)
        self._frozen = rule.checked_options.frozen_among(self._names)

    def add_param_group(self, param_group: StateDict) -> None:
        """Add the only group, and refuse a second one."""
        if self.param_groups:
            raise ValueError(
                f"{type(self.rule).__name__} of mpishard has one group of parameters; give options "
                'of single parameters as parameter_options={"*.bias": {"weight_decay": 0}}'
            )
        super().add_param_group(param_group)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parts that have a gradient, and return the closure's loss. Collective."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rule, (group,) = self.rule, self.param_groups
        if not isinstance(rule.learning_rate, Constant):
            # A group has the key "initial_lr" if a scheduler of PyTorch changes it.
            if "initial_lr" in group:
                raise ValueError(
                    f"the learning rate of {type(rule).__name__} is already a schedule, "
                    f"{rule.learning_rate!r}; give the rule a number if a scheduler of PyTorch "
                    "sets its rate"
                )
            group["lr"] = rule.checked_rate(group["steps"])
        parts = [self._parts[id(tensor)] for tensor in group["params"]]
        owner = parts[0].owner
        parts = [part for part in parts if part.entry.name not in self._frozen]
        trained = [part for part in parts if part.tensor.grad is not None]
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
        # Empty parts get a state, too, so that all ranks save the same kinds of arrays.
        ranges = [self._range(part) for part in trained]
        rule.update_all([owned for owned in ranges if owned.parameters.size], context)
        unused = [part.entry.name for part in parts if part.tensor.grad is None]
        count_missed(unused, group["numbers"])
        group["steps"] += 1
        return loss

    def _range(self, part: OwnedParameter) -> PieceViews:
        state = self.state[part.tensor]
        for name in self.rule.needed_state():
            if name not in state:
                state[name] = torch.zeros_like(part.tensor)
        return PieceViews(
            _flat(part.tensor),
            _flat(part.tensor.grad),
            {name: _flat(vector) for name, vector in state.items()},
            (Segment(part.entry.name, 0, part.stop - part.start),),
            missed_by(part.entry.name, self.param_groups[0]["numbers"]),
        )


def _flat(tensor: torch.Tensor) -> Array:
    """Return the elements of a contiguous tensor as a vector in the same memory."""
    values: Array = tensor.detach().reshape(-1).numpy()
    return values


def optimizer(kind: Any, parameters: Any, **options: Any) -> Any:
    """Make an optimizer of a sharded model.

    It is an optimizer of the given ``torch.optim`` class, whose parameters are the parts that this
    rank owns. Schedulers, ``param_groups``, ``zero_grad`` and hooks work as usual. ``step()`` is
    collective: it waits until all ranks have called it, and until all have updated. The closure of
    ``step(closure)`` returns the loss of this rank's batch; the optimizer gets the mean over ranks,
    or the sum with ``loss_is_sum``.
    ``state_dict()`` is collective, too, and has PyTorch's own form: whole tensors, in the order of
    the parameters. ``load_state_dict()`` takes such a dict, also one of plain PyTorch.

    Parameters
    ----------
    kind : type or Optimizer
        A class of ``torch.optim``, or a class with the same methods: with ``strategy="ddp"`` any,
        such as LBFGS, and else one that updates each element alone. Or a rule of
        `mpishard.optimizers`, such as ``AdamW(1e-3)``, with its own clipping, decay groups and
        state. The learning rate of a rule is a schedule of its own, or a number that schedulers of
        PyTorch may change.
    parameters : torch.nn.Module or iterable
        A sharded model, all of whose trained parameters are updated. Or parameters of one or
        several sharded models, or groups of them (dicts with ``"params"``).
    **options
        Options of the class, such as ``lr``. A rule takes none.

    Returns
    -------
    torch.optim.Optimizer
        The optimizer.

    Raises
    ------
    TypeError
        If the class is not an optimizer, or a rule is given options or searches along a line.
    ValueError
        If there are no parameters, or the class looks at parameters as a whole and a rank has only
        parts of them: Adafactor, Muon, LBFGS and SAM need ``strategy="ddp"``.
    ShardingError
        If a parameter is not a trained parameter of a sharded model.
    """
    is_rule = isinstance(kind, Optimizer)
    if not is_rule:
        is_class = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
        if not is_class:
            shown = f"the class {kind.__name__}" if isinstance(kind, type) else type(kind).__name__
            raise TypeError(
                f"kind must be a class of torch.optim, or a rule such as mpishard.optimizers.AdamW("
                f"1e-3), got {shown}"
            )
    parts: dict[int, OwnedParameter] = {}
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
        made: torch.optim.Optimizer = RuleOptimizer(groups, kind, parts)
    else:
        _require_elementwise(kind, options, owners)
        made = kind(groups, **options)
    made.register_step_pre_hook(functools.partial(_before_step, owners))
    made.register_step_post_hook(functools.partial(_after_step, owners))
    made.register_state_dict_post_hook(functools.partial(gather_states, parts))
    made.register_load_state_dict_pre_hook(functools.partial(slice_states, parts))
    made._mpishard_parts, made._mpishard_is_divided = parts, False
    made._mpishard_options, made._mpishard_has_stepped = options, False
    made._mpishard_checksum = None, 0
    # With this flag GradScaler calls step() on every rank, and `_before_step` refuses it. Without
    # it only the ranks whose own part has an infinity would skip the call, and the others wait.
    made._step_supports_amp_scaling = True
    # A proxy avoids a reference cycle, so that an unused optimizer and its models are freed.
    made.add_param_group = functools.partial(_add_group, weakref.proxy(made), options, owners)
    return made


def _add_group(
    made: torch.optim.Optimizer,
    options: Mapping[str, Any],
    owners: list[ShardedModule],
    param_group: StateDict,
) -> None:
    """Add a group of parameters of sharded models to the optimizer ``made``."""
    parts: dict[int, OwnedParameter] = {}
    (group,) = _groups([param_group], parts)
    everyone = list(dict.fromkeys([*owners, *(part.owner for part in parts.values())]))
    if not isinstance(made, RuleOptimizer):  # Rules update ranges of parameters correctly.
        _require_elementwise(made.__class__, options, everyone)
    made.__class__.add_param_group(made, group)
    made._mpishard_parts.update(parts)
    owners[:] = everyone


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


def _groups(parameters: Any, parts: dict[int, OwnedParameter]) -> list[Any]:
    """Return the groups with tensors of this rank's parts, and add the parts to ``parts``."""

    def own(parameter: torch.Tensor) -> Any:
        if isinstance(parameter, tuple):  # A (name, parameter) of named_parameters().
            return parameter[0], own(parameter[1])
        part = owned_parameter(parameter)
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
    """Refuse an optimizer whose updates of a matrix and of parts of the matrix differ.

    If an owner splits the optimizer's state, three optimizers are tried: one on a matrix, and one
    on each half of it. Each rank has an optimizer of its own, too, so that a norm over its
    parameters would not be that of all parameters.
    """
    owner = next((owner for owner in owners if owner.shards_state), None)
    if owner is None:
        return
    if _needs_closure(kind):  # It compares losses, or takes products of all gradients.
        raise ValueError(f"{kind.__name__} {_NEEDS_WHOLE}")
    dtype = owner.parts[0].tensor.dtype
    values = torch.linspace(-1, 1, 12, dtype=dtype).view(3, 4)
    whole = torch.nn.Parameter(values.clone())
    # The cut is inside a row, as the parts of ranks may be.
    halves = [torch.nn.Parameter(half.clone()) for half in values.view(-1).tensor_split([5])]
    tried = [kind([whole], **options)]
    try:
        tried += [kind([half], **options) for half in halves]
        for step in range(3):
            # Gradients grow a hundredfold per step, so that any usual limit of a norm clips some.
            gradient = 100**step * torch.cos(7 * values + step)
            whole.grad = gradient
            for half, part in zip(halves, gradient.reshape(-1).tensor_split([5]), strict=True):
                half.grad = part.clone()  # An optimizer may change gradients in place.
            for one in tried:
                one.step()
    # An assertion is that of SAM's step() without a closure.
    except (ValueError, RuntimeError, AssertionError) as error:
        raise ValueError(f"{kind.__name__} {_NEEDS_WHOLE}") from error
    if not torch.allclose(whole.detach().view(-1), torch.cat([h.detach() for h in halves])):
        raise ValueError(f"{kind.__name__} {_NEEDS_WHOLE}")


def _needs_closure(kind: Any) -> bool:
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


_NEEDS_WHOLE = (
    "looks at parameters as a whole (rows, columns, norms or all at once), and with "
    'this strategy each rank updates a part of it; use strategy="ddp", or an optimizer '
    "that updates each element alone: SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, "
    "RMSprop, Rprop, ASGD"
)


@called_as("optimizer.step()")
def _before_step(
    owners: list[ShardedModule], made: torch.optim.Optimizer, args: Any, kwargs: Any
) -> Any:
    """Check, before a step, that gradients are complete and all ranks have the same settings.

    The hook is collective: after it no rank reads parameters. It also releases gathered units. With
    a closure, which computes the gradients, it returns the arguments for `_Evaluation`.
    """
    # The first of args is the optimizer itself.
    closure = next((given for given in (*args[1:], *kwargs.values()) if given is not None), None)
    if hasattr(made, "found_inf"):
        # GradScaler sets these for one call, and deletes them only if the call raises no error.
        del made.found_inf, made.grad_scale
        raise ShardingError(
            "torch.amp.GradScaler looks for infinities in the gradients of one rank, and would "
            "change the scale, and leave steps out, on that rank alone. Nothing was updated; call "
            "optimizer.step() without a scaler: autocast to bfloat16 needs none"
        )
    first = owners[0].backend
    shards = first.world_size > 1 and any(owner.shards_state for owner in owners)
    if shards and not made._mpishard_has_stepped and first.rank == 0:
        warn_of_lone_saves(gathers=any(owner.gathered is not None for owner in owners))
    made._mpishard_has_stepped = True
    for owner in owners:
        if closure is None:
            owner.require_reduced("step()")
        owner.placed.require_placed()
        owner.free_gathered()
    chosen = [
        sorted(
            (name, str(value.tolist() if isinstance(value, torch.Tensor) else value))
            for name, value in group.items()
            if name not in ("params", "param_names")
        )
        for group in made.param_groups
    ]
    backend, subject = owners[0].backend, owners[0].layout.subject
    # Each rank updates other elements, so that different settings would raise no error.
    mine = np.array([[zlib.crc32(repr(chosen).encode()), _checksum_of_parameters(made)]])
    of_settings, of_parameters = backend.all_gather(mine, subject=subject).T
    _refuse_other_parameters(of_parameters, made, backend)
    if (of_settings != of_settings[0]).any():
        raise ShardingError(
            "the settings of the update, such as the learning rate, differ between ranks "
            f"(checksums by rank: {of_settings.tolist()}; here {chosen}). Nothing was updated; "
            "give every rank the same settings, and ReduceLROnPlateau the same value"
        )
    if closure is not None:
        return (args[0], _Evaluation(owners, made, closure)), {}
    _take_gradients(made)
    record("gradients", made)
    owners[0].passes.part_of_step.enter_context(span("update"))
    return None


def _take_gradients(made: torch.optim.Optimizer) -> None:
    """Give the optimizer the gradients of its parts as plain tensors."""
    with torch._C.DisableTorchFunctionSubclass():
        for part in made._mpishard_parts.values():
            gradient = part.tensor.grad
            if type(gradient) is GradientPart:  # `_after_step` makes it one again.
                gradient.__class__ = torch.Tensor


class _Evaluation:
    """The closure of a step: the loss is the mean over ranks, or the sum with ``loss_is_sum``.

    A line search compares losses, and all ranks must see the same. Each call is collective.
    """

    def __init__(
        self, owners: list[ShardedModule], made: torch.optim.Optimizer, closure: Callable[[], Any]
    ) -> None:
        self._owners, self._made, self._closure = owners, made, closure
        self._is_first = True

    @called_as("optimizer.step(closure)")
    def __call__(self) -> Any:
        if not self._is_first:  # The optimizer has changed its parts since.
            for owner in self._owners:
                owner.share()
        loss = self._closure()
        for owner in self._owners:
            owner.require_reduced("step(closure)")
            owner.free_gathered()
        _take_gradients(self._made)
        if self._is_first:
            record("gradients", self._made)
        self._is_first = False
        first = self._owners[0]
        # Also without a loss: after it no rank reads parameters, which the optimizer changes now.
        mine = torch.as_tensor(math.nan if loss is None else loss).detach()
        own = mine.double().reshape(1).numpy()
        total = first.backend.all_reduce(own, subject=first.layout.subject)
        if loss is None:
            return None
        return torch.from_numpy(total).to(mine.dtype).reshape(mine.shape) * first.passes.scale


def _checksum_of_parameters(made: torch.optim.Optimizer) -> int:
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


def _refuse_other_parameters(
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


@called_as("optimizer.step()")
def _after_step(owners: list[ShardedModule], made: torch.optim.Optimizer, *_: Any) -> None:
    """Publish, after a step, the parameters that each rank has updated. Collective."""
    for part in made._mpishard_parts.values():
        part.restore_gradient()
    for owner in owners:
        owner.publish()
    record("parameters", made)


def _refuse_others(made: torch.optim.Optimizer, *_: object) -> None:
    """Refuse, before a step of any optimizer, to update parameters that other ranks own."""
    if hasattr(made, "_mpishard_parts"):
        return
    for group in made.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, PlacedParameter):
                parameter._stored.refuse_optimizer(type(made).__name__)


register_optimizer_step_pre_hook(_refuse_others)


def record(kind: str, made: torch.optim.Optimizer) -> None:
    """Write this rank's parts of a step's "gradients" or "parameters" for ``mpishard verify``.

    Nothing is written in other runs.

    Raises
    ------
    SystemExit
        After the last step to compare, on every rank.
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
    # `mpishard verify` needs no further steps, so that the rest of the script is not run.
    if kind == "parameters" and step == steps:
        raise SystemExit(0)


def numbered_parameters(
    parts: Mapping[int, OwnedParameter], made: torch.optim.Optimizer
) -> Iterator[tuple[int, OwnedParameter]]:
    """Yield each parameter's number in a state dict of an optimizer, and its part."""
    tensors = (tensor for group in made.param_groups for tensor in group["params"])
    for number, tensor in enumerate(tensors):
        yield number, parts[id(tensor)]


def states_of_numbers(made: torch.optim.Optimizer) -> frozenset[str]:
    """Return the names of states with a value for each element, for parameters of shape ().

    Other states, such as a count of steps, may have the shape () as well. The names are therefore
    found by a trial step with a vector. If no parameter has the shape (), the set is empty.
    """
    if all(part.entry.shape for part in owned_parameters(made).values()):
        return frozenset()
    if isinstance(made, RuleOptimizer):
        return frozenset(made.rule.needed_state())
    if _needs_closure(made.__class__):  # LBFGS keeps products and directions of all parameters.
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
        mine = np.array([_checksum_of_parameters(made)])
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
        _refuse_other_parameters(everyone, made, owner.backend)

    def whole(part: OwnedParameter, key: str, value: Any) -> Any:
        if not (part.owner.shards_state and is_elementwise(key, value, part.tensor.shape, ())):
            return value
        owner = part.owner
        gathered = owner.backend.all_gather(
            value.detach().contiguous().numpy(), subject=owner.layout.subjects[part.unit.index]
        )
        return torch.from_numpy(np.asarray(gathered)).view(part.entry.shape)

    return _changed_states(parts, made, state_dict, whole)


def slice_states(
    parts: Mapping[int, OwnedParameter], made: torch.optim.Optimizer, state_dict: StateDict
) -> Any:
    """Return a state dict with this rank's parts, from one with whole states."""
    if made._mpishard_is_divided:  # Each rank has read only its parts from a checkpoint.
        return state_dict
    of_numbers = states_of_numbers(made)

    def own(part: OwnedParameter, key: str, value: Any) -> Any:
        if part.owner.shards_state and is_elementwise(key, value, part.entry.shape, of_numbers):
            value = value.reshape(-1)[part.in_parameter]
        # A copy, because PyTorch would use the given tensor itself, which thread-ranks share.
        return copy.deepcopy(value)

    return _changed_states(parts, made, state_dict, own)
