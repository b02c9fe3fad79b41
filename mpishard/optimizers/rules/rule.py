"""The base of all update rules."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, cast

from mpishard.base import (
    Array,
    as_amount,
    as_number,
    nearest,
)
from mpishard.base.mirrored import OptimizerMembers
from mpishard.contracts import UserModel
from mpishard.optimizers.rules.compiled import Body, run
from mpishard.optimizers.rules.options import (
    CheckedOptions,
    ParameterOptions,
    SegmentOptions,
)
from mpishard.optimizers.rules.pieces import PieceViews, Segment, UpdateContext, joined
from mpishard.optimizers.rules.plain import PlainTraining
from mpishard.optimizers.rules.schedules import Schedule, as_schedule, rate_at, rates

if TYPE_CHECKING:
    from mpishard.training import OptimizationInputData, OptimizationResult

_ELSEWHERE = {
    "lr": "learning_rate",
    "step_size": "learning_rate",
    "betas": "beta1 and beta2",
    "eps": "epsilon",
    "max_norm": "clip_global_norm",
    "grad_clip": "clip_global_norm",
}
"""Name of a setting in PyTorch, JAX and their relatives -> its name here."""

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # differs between processes


def _above_zero_or_none(name: str, value: float | None) -> float | None:
    if value is not None and not as_number(name, value) > 0:
        raise ValueError(f"{name} must be above 0 or None, got {value}")
    return None if value is None else float(value)


def fraction(name: str, value: Any) -> float:
    """Return a setting that must be in [0, 1)."""
    if not 0 <= as_number(name, value) < 1:
        raise ValueError(f"{name} must be in [0, 1), got {value}")
    return float(value)


class TrainingOptions(Protocol):
    """Options that a rule was made from, which bring an end of training with them."""

    def applied(self, data: OptimizationInputData) -> OptimizationInputData:
        """Return the data with that end, unless they name an earlier one."""


@dataclass(eq=False)
class Optimizer(OptimizerMembers):
    """An update rule: a dataclass of its settings, and one body that updates elements.

    A rule updates one owned piece at a time: 1-D views of parameters, gradients and state, of any
    length and cut anywhere. NumPy runs its `body` on chunks that fit the cache; numba, if it is
    installed, compiles the same function into one loop that gives the same bits, and so does the
    kernel that it becomes on a GPU. State belongs to the caller. Settings may be set between steps
    and are checked then, too.

    Parameters
    ----------
    learning_rate : float or Schedule
        Step size, or ``schedule(step)`` with the first update as step 0. It is kept as a schedule.
    weight_decay : float
        Strength of decay; each rule says how it applies it.
    clip_global_norm : float, optional
        Scale the gradient down if its Euclidean norm over all parameters and ranks is
        larger (Pascanu et al., "On the difficulty of training recurrent neural networks", ICML
        2013, algorithm 1).
    clip_value : float, optional
        Limit each element of the mean gradient to [-clip_value, clip_value] (Mikolov, "Statistical
        Language Models Based on Neural Networks", 2012, section 3.2.2); instead of
        ``clip_global_norm``, not together with it.
    parameter_options : mapping, optional
        Glob pattern of parameter names -> options that differ there; later patterns win.
        ``weight_decay``; ``learning_rate``, a number or schedule; ``learning_rate_scale``, which
        multiplies the rate; ``frozen``, alone: ``{"*.bias": {"weight_decay": 0}, "embedding.*":
        {"frozen": True}}``. The mapping is kept read-only; another one may be set. A sharded
        optimizer that has made its state refuses other frozen parameters. See also
        `no_decay_on_biases_and_norms`.

    Raises
    ------
    ValueError
        For a number outside its range, an unknown option, or both ways of clipping.
    """

    learning_rate: float | Schedule
    # By keyword, so that the settings of a subclass are the positions after the rate.
    _: KW_ONLY
    weight_decay: float = 0.0
    clip_global_norm: float | None = None
    clip_value: float | None = None
    parameter_options: ParameterOptions | None = None

    state_names: ClassVar[tuple[str, ...]] = ()
    # Setting -> its check, which returns the value that the rule keeps.
    checks: ClassVar[dict[str, Callable[[str, Any], object]]] = {
        "learning_rate": as_schedule,
        "weight_decay": as_amount,
        "clip_global_norm": _above_zero_or_none,
        "clip_value": _above_zero_or_none,
        "parameter_options": lambda _, options: CheckedOptions({} if options is None else options),
    }
    _merges_segments: ClassVar[bool] = True  # not for LAMB, which scales each parameter separately
    searches: ClassVar[bool] = False  # an update takes several evaluations: see `LBFGS`
    # Its numbers are those of all parameters: one without a gradient has the gradient 0.
    updates_unused: ClassVar[bool] = False

    def __new__(cls, *_: object, **settings: object) -> Self:
        """Make a rule; refuse a setting that it does not have, and name the one that is meant.

        Raises
        ------
        TypeError
            For an unknown setting.
        """
        # Python's own error, from __init__, would not name the setting that is meant.
        known = inspect.signature(cls.__init__).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in known.values())
        for name in () if takes_any else settings.keys() - known.keys():
            meant = _ELSEWHERE.get(name, "")
            has_it = meant.partition(" ")[0] in known
            hint = f"; did you mean {meant}?" if has_it else nearest(name, known)
            raise TypeError(f"{cls.__name__} has no setting {name!r}{hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        # Made when it is first used: a rule inside a sharded optimizer trains nothing by itself.
        self._holder: PlainTraining | None = None
        if self.clip_global_norm is not None and self.clip_value is not None:
            raise ValueError(
                f"clip_global_norm={self.clip_global_norm} and clip_value={self.clip_value} are "
                "two ways to clip; choose one"
            )
        # Set by `from_options` alone: `optimize` then takes its end of training from there.
        self.algorithm_options: TrainingOptions | None = None

    def __setattr__(self, name: str, value: object) -> None:
        # Settings may change between two steps, so that each assignment is checked.
        check = self.checks.get(name)
        super().__setattr__(name, value if check is None else check(name, value))
        if name in ("weight_decay", "parameter_options"):  # the cached options contain these
            self._known_options: dict[tuple[Segment, ...], list[SegmentOptions]] = {}
        # `checked_rate` collects the schedules anew, because they may be others now.
        if name in ("learning_rate", "parameter_options"):
            self._schedules: dict[str, Schedule] = {}  # name in errors -> schedule

    @property
    def checked_options(self) -> CheckedOptions:
        """``parameter_options`` by the type in which they are kept.

        Raises
        ------
        TypeError
            If a user's ``__init__`` has not called that of `Optimizer`, which sets them.
        """
        if not isinstance(self.parameter_options, CheckedOptions):
            raise TypeError(
                f"{type(self).__name__}.__init__ must call super().__init__(learning_rate)"
            )
        return self.parameter_options

    def rate_of_step(self, step: int) -> float:
        """Return the learning rate of update ``step``, from 0."""
        return rate_at(cast("Schedule", self.learning_rate), step)

    def needed_state(self) -> tuple[str, ...]:
        """Return the names of the state vectors that these settings need."""
        return self.state_names

    def update_all(self, pieces: Sequence[PieceViews], context: UpdateContext) -> None:
        """Update all pieces of this rank, in place. Every rank calls it, also without pieces.

        A rule that needs norms of whole parameters overrides this.
        """
        # Piece by piece: an elementwise rule needs nothing of the others.
        for piece in joined(pieces):
            for options in self._options_of(piece.segments):
                # Cut here, so that `parameter_options` also hold for a rule with its own `update`.
                owned = piece.cut(options.start, options.stop)
                own = replace(
                    context,
                    learning_rate=self._rate_in(options, context),
                    weight_decay=options.weight_decay,
                    missed=owned.missed,
                )
                returned: object = self.update(  # type: ignore[func-returns-value]
                    owned.parameters, owned.gradients, owned.state, owned.segments, own
                )
                # A rule written in the style of JAX returns new arrays, which nothing would read.
                if returned is not None and returned is not owned.parameters:
                    raise TypeError(
                        f"{type(self).__name__}.update must change the parameters in place, as in "
                        f"parameters -= ...; it returned another {type(returned).__name__}"
                    )

    def update(
        self,
        parameters: Array,
        gradients: Array,
        state: Mapping[str, Array],
        segments: Sequence[Segment],
        context: UpdateContext,
    ) -> None:
        """Update one owned piece in place, or the part of one whose options are equal.

        Parameters
        ----------
        parameters, gradients : Array
            1-D, equally long.
        state : mapping of str to Array
            The rule's state of the same piece, one vector per name.
        segments : sequence of Segment
            The parameters that the piece cuts through.
        context : UpdateContext
            Step, scale, and the rate and weight decay of these parameters.
        """
        needed = self.needed_state()
        # A body has an argument for each state; numba compiles it for those that are not None.
        arrays: list[Array | None] = [parameters, gradients]
        arrays += [state[name] if name in needed else None for name in self.state_names]
        clip = None
        if self.clip_value is not None:  # then `run` scales the gradient before it clips it
            clip = context.gradient_scale, self.clip_value
            context = replace(context, gradient_scale=1.0)
        # Schedules count all updates, and bias corrections those of the piece.
        own = replace(context, step=context.step - context.missed) if context.missed else context
        run(self.body(own.learning_rate, own.weight_decay, own), arrays, clip)

    def body(self, learning_rate: float, weight_decay: float, context: UpdateContext) -> Body:
        """Return the update of elements with these numbers; see `Body`.

        Its function receives the state in the order of ``state_names``, None for the names that
        are not in `needed_state`.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither a body nor an update_all")

    def checked_rate(self, step: int) -> float:
        """Return the rate of update ``step``, from 0; check those of ``parameter_options``, too.

        Raises
        ------
        TypeError, ValueError
            If a schedule does not return a rate.
        """
        # Collected once: otherwise each step would search the options for them.
        if not self._schedules:
            self._schedules = {"the schedule": cast("Schedule", self.learning_rate)} | {
                f"the schedule of parameter_options[{pattern!r}]": values["learning_rate"]
                for pattern, values in self.checked_options.items()
                if "learning_rate" in values
            }
        # All are asked before the first update: a schedule that fails must change nothing.
        found = []
        for name, schedule in self._schedules.items():
            rate = rate_at(schedule, step, name)
            if not 0 <= rate < math.inf:
                raise ValueError(
                    f"{name} gave a learning rate of {rate} for step {step}; nothing was updated"
                )
            found.append(rate)
        return found[0]

    def _rate_in(self, options: SegmentOptions, context: UpdateContext) -> float:
        """Return the rate of some segments, whose options may differ from the other parameters'."""
        own = context.learning_rate
        if options.learning_rate is not None:
            # Schedules count from 0, and updates from 1.
            own = rate_at(options.learning_rate, context.step - 1)
        return own * options.learning_rate_scale

    def clip_factor(self, gradient_norm: float) -> float:
        """Return the factor of the gradient that satisfies ``clip_global_norm``."""
        if self.clip_global_norm is None or gradient_norm <= self.clip_global_norm:
            return 1.0
        return self.clip_global_norm / gradient_norm

    def _settings(self) -> dict[str, object]:
        """Return the settings: the arguments of ``__init__`` that are kept under their names.

        Arguments of the bases count; other attributes, such as counts of a rule, do not.
        """
        given = (
            name
            for kind in reversed(type(self).__mro__)
            if "__init__" in vars(kind) and issubclass(kind, Optimizer)
            for name in list(inspect.signature(kind.__init__).parameters)[1:]
        )
        # A user's __init__ may keep an argument under another name; it is no setting then.
        names = dict.fromkeys((*given, "algorithm_options"))
        return {name: getattr(self, name) for name in names if hasattr(self, name)}

    def fingerprint(self) -> dict[str, object]:
        """Return the settings for JSON, to compare them between ranks and with a checkpoint.

        A schedule may be any function, so it is represented by its rates at some steps.
        """
        found: dict[str, object] = {"rule": type(self).__name__}
        for name, value in self._settings().items():
            # Without addresses, which differ between ranks for equal settings.
            is_plain = isinstance(value, int | float | str | None)
            found[name] = value if is_plain else _ADDRESS.sub("", repr(value))
        found["learning_rate"] = rates(cast("Schedule", self.learning_rate))
        found["parameter_options"] = self.checked_options.description
        return found

    def _options_of(self, segments: Sequence[Segment]) -> list[SegmentOptions]:
        # Cached, because matching names with patterns takes longer than a small update.
        key = tuple(segments)
        if key not in self._known_options:
            self._known_options[key] = self.checked_options.by_segment(
                segments, self.weight_decay, merges=self._merges_segments
            )
        return self._known_options[key]

    # ------------------------------------------------------------------- training without ranks

    @property
    def _own(self) -> PlainTraining:
        """The holder of the rule's own state, made when it is first needed.

        A shallow copy of a rule gets a holder of its own: settings belong to the rule.
        """
        # copy.copy shares the holder, which would update by the settings of the original.
        if self._holder is None or self._holder.rule is not self:
            self._holder = PlainTraining(self)
        return self._holder

    def reset(self) -> None:
        """Forget the own state and step count, and the model they belong to."""
        self._own.reset()

    def optimize(self, input_data: OptimizationInputData) -> OptimizationResult:
        """Train a plain model in this process: a world of one rank.

        The model has the trained parameters afterwards, and is the result's ``model``.
        """
        from mpishard.training import train_plain  # of a room above, which runs any rule

        return train_plain(self, input_data, self._own.model)

    def step(self, model: UserModel, x: Array, y: Array) -> float:
        """Make one update of a plain model on one batch, as a sharded optimizer's ``step``.

        Parameters
        ----------
        model : object
            With ``get_parameters``, ``set_parameters``, and ``compute_loss_and_gradients`` or
            ``compute_gradients``.
            Gradients of another dtype than the parameters' are converted. A
            ``compute_loss_and_gradients`` that takes ``step``, as those of `mpishard.nn`, is given
            the number of the update, from 0, for random layers.
        x, y : Array
            Inputs and targets, shape (samples, ...).

        Returns
        -------
        float
            The mean loss before the update; NaN if the model computes only gradients.

        Raises
        ------
        NonFiniteLossError
            If the loss or the gradient is not finite; model and state are unchanged then.
        ShardingError
            For another model than that of the own state.
        TypeError
            For a sharded model, which needs a sharded optimizer.
        """
        loss: float = self._own.step(model, x, y)
        return loss


class JointRule(Optimizer):
    """A rule that updates all pieces of a rank in one call: it overrides `update_all`."""

    def update(
        self,
        parameters: Array,
        gradients: Array,
        state: Mapping[str, Array],
        segments: Sequence[Segment],
        context: UpdateContext,
    ) -> None:
        self.update_all([PieceViews(parameters, gradients, state, segments)], context)
