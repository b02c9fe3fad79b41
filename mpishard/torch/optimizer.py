"""Optimizers of PyTorch, or rules of mpishard, for the parts that a rank owns."""

from __future__ import annotations

import functools
import math
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mpishard.base import ShardingError, settings
from mpishard.communication import called_as, differences
from mpishard.observe import span
from mpishard.optimizers import (
    Optimizer,
)
from mpishard.torch.batch_norm import layers_of_own_samples
from mpishard.torch.gradients import GradientPart
from mpishard.torch.lone_saves import warn_of_lone_saves
from mpishard.torch.optimizer_state import (
    checksum_of_parameters,
    gather_states,
    needs_closure,
    refuse_other_parameters,
    slice_states,
)
from mpishard.torch.parameters import OwnedParameter, PlacedParameter, StateDict
from mpishard.torch.rule_optimizer import RuleOptimizer
from mpishard.torch.sharded import ShardedModule, module_of, owned_parameter


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


def _groups(parameters: Any, parts: dict[int, OwnedParameter]) -> list[Any]:
    """Return the groups with tensors of this rank's parts, and add the parts to ``parts``."""

    def own(parameter: torch.Tensor) -> Any:
        if isinstance(parameter, tuple):  # A (name, parameter) of named_parameters().
            return parameter[0], own(parameter[1])
        part = owned_parameter(parameter)
        parts[id(part.tensor)] = part
        return part.tensor

    if isinstance(parameters, torch.nn.Module):
        trained = {id(part.parameter) for part in module_of(parameters).parts}
        return [own(p) for p in parameters.parameters() if id(p) in trained]
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
    if needs_closure(kind):  # It compares losses, or takes products of all gradients.
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
    changed = _changed_gradients(made)
    texts = repr(chosen), repr(changed)
    mine = [*(zlib.crc32(text.encode()) for text in texts), checksum_of_parameters(made)]
    of_settings, of_changed, of_parameters = backend.all_gather(np.array([mine]), subject=subject).T
    refuse_other_parameters(of_parameters, made, backend)
    if (of_settings != of_settings[0]).any():
        raise ShardingError(
            "the settings of the update, such as the learning rate, differ between ranks "
            f"(checksums by rank: {of_settings.tolist()}; here {chosen}). Nothing was updated; "
            "give every rank the same settings, and ReduceLROnPlateau the same value"
        )
    # A rank may have read a gradient, such as to print its norm, and changed nothing.
    differ = (of_changed != of_changed[0]).any()
    if differ and (found := differences(backend, _changed_gradients(made, of_values=True))):
        raise ShardingError(
            "the ranks have changed or assigned gradients differently (checksums by rank, "
            f"{found}), and would train differently. Nothing was updated; "
            "make the same changes on every rank, such as p.grad.mul_("
            "mpishard.torch.mean_over_ranks(factor))"
        )
    if closure is not None:
        return (args[0], _Evaluation(owners, made, closure)), {}
    _take_gradients(made)
    record("gradients", made)
    owners[0].passes.part_of_step.enter_context(span("update"))
    return None


def _changed_gradients(made: torch.optim.Optimizer, *, of_values: bool = False) -> dict[str, str]:
    """Return checksums of the gradients, or of their changes, that the user may have changed."""
    parts = made._mpishard_parts.values()
    changes = {part: part.change_of_gradient(of_values=of_values) for part in parts}
    return {
        f"the gradient of {part.entry.name!r}": str(change)
        for part, change in changes.items()
        if change
    }


def _take_gradients(made: torch.optim.Optimizer) -> None:
    """Give the optimizer the gradients of its parts as plain tensors."""
    with torch._C.DisableTorchFunctionSubclass():
        for part in _divided(made):
            gradient = part.present_gradient()
            if type(gradient) is GradientPart:  # `_after_step` makes it one again.
                gradient.__class__ = torch.Tensor


def _divided(made: torch.optim.Optimizer) -> list[OwnedParameter]:
    """Return the parameters whose gradients are parts."""
    return [part for part in made._mpishard_parts.values() if part.gives_parts]


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


@called_as("optimizer.step()")
def _after_step(owners: list[ShardedModule], made: torch.optim.Optimizer, *_: Any) -> None:
    """Publish, after a step, the parameters that each rank has updated. Collective."""
    for part in _divided(made):
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
        tensor = part.tensor if kind == "parameters" else part.present_gradient()
        own = part.in_parameter
        key = f"{owners.index(part.owner)}/{part.entry.name}/{own.start}/{own.stop}"
        arrays[key] = np.empty(0) if tensor is None else tensor.detach().numpy().reshape(-1)
    np.savez(folder / f"{kind}-{step}-{rank}.npz", **arrays)
    own = [repr(name) for owner in owners for name in layers_of_own_samples(owner.module)]
    if own and rank == 0:
        (folder / "own_samples.txt").write_text(", ".join(own), encoding="utf-8")
    # `mpishard verify` needs no further steps, so that the rest of the script is not run.
    if kind == "parameters" and step == steps:
        raise SystemExit(0)
