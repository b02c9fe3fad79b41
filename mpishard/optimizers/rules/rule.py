"""What an update rule is."""

from __future__ import annotations

import inspect
import math
import re
import threading
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from mpishard.arguments import as_number
from mpishard.arrays import Array, array_namespace, chunk_length
from mpishard.optimizers.plain.optimizer import PlainOptimizer
from mpishard.optimizers.rules.algorithm_options import OptimizationAlgorithmOptions
from mpishard.optimizers.rules.compiled import ElementLoop, run_compiled
from mpishard.optimizers.rules.options import (
    OptionRange,
    ParameterOptions,
    Segment,
    checked_options,
    described,
    frozen_names,
    option_ranges,
)
from mpishard.optimizers.rules.ranges import OwnedRange, UpdateContext
from mpishard.optimizers.rules.schedules import Schedule, as_schedule, rate_at, rates

if TYPE_CHECKING:
    from mpishard.optimizers.loop.data import OptimizationInputData
    from mpishard.optimizers.loop.result import OptimizationResult

__all__ = ["Optimizer"]

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # differs between processes


class Optimizer(PlainOptimizer):
    """An update rule with its settings. State belongs to whoever runs it.

    A rule sees one owned range at a time: 1-D views of parameters, gradients and state, of any
    length and cut anywhere. It works in place: in NumPy passes over chunks that fit the cache
    (`_update_chunk`), or in one compiled loop that gives the same bits, where the rule has one
    (`_element_loop`) and numba is installed.

    Parameters
    ----------
    learning_rate : float or Schedule
        Step size, or ``schedule(step)`` with the first update as step 0.
    weight_decay : float
        Strength of decay; how it is applied is the rule's.
    clip_global_norm : float, optional
        Scale the gradient down where its Euclidean norm over all parameters and ranks is
        larger (Pascanu et al., "On the difficulty of training recurrent neural networks", ICML
        2013, algorithm 1).
    clip_value : float, optional
        Cut each element of the mean gradient off at ``-clip_value`` and ``clip_value`` (Mikolov,
        "Statistical Language Models Based on Neural Networks", 2012, section 3.2.2); instead of
        ``clip_global_norm``, not beside it.
    parameter_options : mapping, optional
        Glob pattern of parameter names -> options that differ there; later patterns win.
        ``weight_decay``; ``learning_rate``, a number or schedule; ``learning_rate_scale``, which
        multiplies the rate; ``frozen``, alone: ``{"*.bias": {"weight_decay": 0}, "embedding.*":
        {"frozen": True}}``. See also `no_decay_on_biases_and_norms`.

    Raises
    ------
    ValueError
        For a number outside its range, an unknown option, or both ways of clipping.
    """

    state_names: ClassVar[tuple[str, ...]] = ()
    clip_global_norm: float | None
    clip_value: float | None

    def __init__(
        self,
        learning_rate: float | Schedule,
        *,
        weight_decay: float = 0.0,
        clip_global_norm: float | None = None,
        clip_value: float | None = None,
        parameter_options: ParameterOptions | None = None,
    ) -> None:
        super().__init__()
        self._spans: dict[tuple[Segment, ...], list[OptionRange]] = {}
        self._scratch: dict[Any, list[Array]] = {}
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        for name, limit in {"clip_global_norm": clip_global_norm, "clip_value": clip_value}.items():
            if limit is not None and not as_number(name, limit) > 0:
                raise ValueError(f"{name} must be above 0 or None, got {limit}")
            setattr(self, name, None if limit is None else float(limit))
        if clip_global_norm is not None and clip_value is not None:
            raise ValueError(
                f"clip_global_norm={clip_global_norm} and clip_value={clip_value} are two ways to "
                "clip; choose one"
            )
        self.parameter_options = parameter_options or {}
        self.algorithm_options: OptimizationAlgorithmOptions | None = None

    @property
    def learning_rate(self) -> Schedule:
        """The rate by step. It may be set between steps, to a number too."""
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, rate: float | Schedule) -> None:
        self._learning_rate = as_schedule(rate)

    @property
    def weight_decay(self) -> float:
        """Strength of decay. It may be set between steps."""
        return self._weight_decay

    @weight_decay.setter
    def weight_decay(self, value: float) -> None:
        self._weight_decay = _at_least_zero("weight_decay", value)
        self._spans.clear()

    @property
    def parameter_options(self) -> Mapping[str, Mapping[str, Any]]:
        """What differs by name; read-only. Another mapping may be set between steps.

        A sharded optimizer that has made its state refuses other frozen parameters.
        """
        return MappingProxyType(
            {k: MappingProxyType(v) for k, v in self._parameter_options.items()}
        )

    @parameter_options.setter
    def parameter_options(self, options: ParameterOptions) -> None:
        self._parameter_options = checked_options(options)
        self._described: str | None = None
        self._spans.clear()

    @property
    def described_options(self) -> str:
        """``parameter_options`` as text, the same in every process whose options are the same."""
        if self._described is None:
            self._described = described(self._parameter_options)
        return self._described

    @classmethod
    def from_options(cls, options: OptimizationAlgorithmOptions, **settings: Any) -> Self:
        """An optimizer with the options of the mirrored hierarchy, and their defaults.

        Parameters
        ----------
        options : OptimizationAlgorithmOptions
            Rate, clipping, and when `optimize` ends where its data say nothing else.
        **settings
            Arguments of the rule, which win over the options.

        Raises
        ------
        TypeError
            For options of another type.
        ValueError
            For options of another rule than this one.
        """
        if not isinstance(options, OptimizationAlgorithmOptions):
            raise TypeError(
                f"options must be OptimizationAlgorithmOptions, got {type(options).__name__}"
            )
        given = options.rule_settings()
        unknown = given.keys() - inspect.signature(cls).parameters.keys()
        if unknown:
            raise ValueError(
                f"{type(options).__name__} has {', '.join(sorted(unknown))}, which {cls.__name__} "
                "does not take; use OptimizationAlgorithmOptions"
            )
        made = cls(**(given | settings))
        made.algorithm_options = options
        return made

    def needed_state(self) -> tuple[str, ...]:
        """Names of the state vectors that these settings need."""
        return self.state_names

    def update_all(self, ranges: Sequence[OwnedRange], context: UpdateContext) -> None:
        """Update all that a rank owns, in place. Every rank makes the call, owning nothing too.

        A rule that needs norms of whole parameters overrides this.
        """
        for owned in ranges:
            self.update(owned.parameters, owned.gradients, owned.state, owned.segments, context)

    def update(
        self,
        parameters: Array,
        gradients: Array,
        state: Mapping[str, Array],
        segments: Sequence[Segment],
        context: UpdateContext,
    ) -> None:
        """Update one owned range in place.

        Parameters
        ----------
        parameters, gradients : Array
            1-D, equally long.
        state : mapping of str to Array
            The rule's state of the same range, one vector per name.
        segments : sequence of Segment
            Which parameters the range cuts through.
        context : UpdateContext
            Step, rate and scale.
        """
        views = (parameters, gradients, *(state[name] for name in self.needed_state()))
        scale = context.gradient_scale
        if self.clip_value is not None:
            context = replace(context, gradient_scale=1.0)
        for span in self._option_ranges(segments):
            rate = span.rate(context.step - 1, context.learning_rate)
            loop = self._element_loop(rate, span.weight_decay, context)
            if self.clip_value is None and run_compiled(
                loop, [view[span.start : span.stop] for view in views]
            ):
                continue
            for start, stop in self._chunks(parameters, span):
                p, g, *own_state = (view[start:stop] for view in views)
                if self.clip_value is not None:
                    g = self._clipped(g, scale)
                    if run_compiled(loop, [p, g, *own_state]):
                        continue
                named = dict(zip(self.needed_state(), own_state, strict=True))
                self._update_chunk(p, g, named, rate, span.weight_decay, context)

    @abstractmethod
    def _update_chunk(
        self,
        p: Array,
        g: Array,
        state: Mapping[str, Array],
        learning_rate: float,
        weight_decay: float,
        context: UpdateContext,
    ) -> None:
        """Update one chunk, by operations on whole arrays. ``g`` is not to be written."""

    def _element_loop(
        self, learning_rate: float, weight_decay: float, context: UpdateContext
    ) -> ElementLoop | None:
        """`_update_chunk` as a loop that can be compiled; None where a rule has none.

        It takes the state in the order of `needed_state`.
        """
        return None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "_update_chunk" in vars(cls) and "_element_loop" not in vars(cls):
            # An inherited loop would do what the passes no longer do.
            cls._element_loop = Optimizer._element_loop  # type: ignore[method-assign]

    def frozen_names(self, names: Sequence[str]) -> frozenset[str]:
        """Those of a model's parameters ``names`` that ``parameter_options`` freeze.

        Raises
        ------
        ValueError
            Where nothing would be left to train.
        """
        return frozen_names(self.parameter_options, names)

    def checked_rate(self, step: int) -> float:
        """The rate of update ``step``, from 0, after a look at those of ``parameter_options``.

        Raises
        ------
        TypeError, ValueError
            Where a schedule gives what is no rate.
        """
        schedules = {"the schedule": self.learning_rate} | {
            f"the schedule of parameter_options[{pattern!r}]": values["learning_rate"]
            for pattern, values in self.parameter_options.items()
            if "learning_rate" in values
        }
        for name, schedule in schedules.items():
            rate = rate_at(schedule, step, name)
            if not 0 <= rate < math.inf:
                raise ValueError(
                    f"{name} gave a learning rate of {rate} for step {step}; nothing was updated"
                )
        return rate_at(self.learning_rate, step)

    def clip_factor(self, gradient_norm: float) -> float:
        """What the gradient is multiplied with to satisfy ``clip_global_norm``."""
        if self.clip_global_norm is None or gradient_norm <= self.clip_global_norm:
            return 1.0
        return self.clip_global_norm / gradient_norm

    def optimize(self, input_data: OptimizationInputData) -> OptimizationResult:
        """Train a plain model in this process: a world of one rank.

        The model has the trained parameters afterwards.
        """
        from mpishard.optimizers.plain.single import optimize_single  # it imports this module

        return optimize_single(self, input_data)

    def get_options(self) -> Mapping[str, Any]:
        """The settings: what ``__init__`` of the class and its bases takes and keeps by name.

        Other attributes are none: a rule may keep counts and records of its own.
        """
        given = (
            name
            for kind in reversed(type(self).__mro__)
            if "__init__" in vars(kind) and issubclass(kind, Optimizer)
            for name in list(inspect.signature(kind.__init__).parameters)[1:]
        )
        names = dict.fromkeys((*given, "algorithm_options"))
        return {name: getattr(self, name) for name in names if hasattr(self, name)}

    def fingerprint(self) -> dict[str, Any]:
        """The settings as JSON knows them, to be compared between ranks and with a checkpoint.

        A schedule may be any function, so it stands there by its rates at some steps.
        """
        found: dict[str, Any] = {"rule": type(self).__name__}
        for name, value in self.get_options().items():
            is_plain = isinstance(value, int | float | str | None)
            found[name] = value if is_plain else _ADDRESS.sub("", repr(value))
        found["learning_rate"] = rates(self.learning_rate)
        found["parameter_options"] = self.described_options
        return found

    def _option_ranges(self, segments: Sequence[Segment]) -> list[OptionRange]:
        key = tuple(segments)
        if key not in self._spans:
            self._spans[key] = self._find_ranges(segments)
        return self._spans[key]

    def _find_ranges(self, segments: Sequence[Segment]) -> list[OptionRange]:
        """What is updated as one; a rule that looks at whole parameters overrides this."""
        return option_ranges(segments, self.weight_decay, self.parameter_options)

    def _clipped(self, g: Array, scale: float) -> Array:
        """The mean gradient ``g * scale``, cut off at ``clip_value``, in scratch memory."""
        assert self.clip_value is not None
        (clipped,) = self._temporary(g, 1, "clipped")
        xp = array_namespace(g)
        xp.multiply(g, scale, out=clipped)
        return xp.clip(clipped, -self.clip_value, self.clip_value, out=clipped)

    def _chunks(self, array: Array, span: OptionRange) -> Iterable[tuple[int, int]]:
        # Half a chunk: an update has more operands than most chains of operations.
        step = max(1, chunk_length(array) // 2)
        return (
            (start, min(start + step, span.stop)) for start in range(span.start, span.stop, step)
        )

    def _temporary(
        self, like: Array, count: int, purpose: str = "passes", dtype: Any = None
    ) -> list[Array]:
        """``count`` scratch arrays shaped as ``like``, reused between calls of one purpose."""
        xp = array_namespace(like)
        dtype = np.dtype(dtype or like.dtype)
        # Thread-ranks may share a rule, for it holds nothing else that changes.
        key = (threading.get_ident(), xp.__name__, dtype.str, purpose)
        buffers = self._scratch.setdefault(key, [])
        if buffers and buffers[0].size < like.size:
            buffers.clear()
        while len(buffers) < count:
            buffers.append(xp.empty(buffers[0].size if buffers else like.size, dtype))
        return [buffer[: like.size] for buffer in buffers[:count]]


def _at_least_zero(name: str, value: float) -> float:
    if not 0 <= as_number(name, value) < float("inf"):
        raise ValueError(f"{name} must be 0 or more and finite, got {value}")
    return float(value)


def check_epsilon(value: float) -> float:
    """``value`` where it is above 0; ValueError elsewhere."""
    if not as_number("epsilon", value) > 0:
        raise ValueError(f"epsilon must be above 0, got {value}")
    return float(value)


def check_fraction(name: str, value: float) -> float:
    """``value`` where it is in [0, 1); ValueError elsewhere."""
    if not 0 <= as_number(name, value) < 1:
        raise ValueError(f"{name} must be in [0, 1), got {value}")
    return float(value)
