"""What an update rule is."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from mpishard.arrays import Array, array_namespace, chunk_length
from mpishard.contracts import IGradientBasedOptimizer
from mpishard.optimizers.compiled import ElementLoop, run_compiled
from mpishard.optimizers.options import (
    OptionRange,
    ParameterOptions,
    Segment,
    check_options,
    option_ranges,
)
from mpishard.optimizers.schedules import Schedule, as_number, as_schedule

if TYPE_CHECKING:
    from mpishard.optimizers.data import OptimizationInputData
    from mpishard.optimizers.result import OptimizationResult

__all__ = ["Optimizer", "OwnedRange", "UpdateContext"]


@dataclass(frozen=True, slots=True)
class UpdateContext:
    """What an update may depend on beside its own range.

    ``step`` counts updates from 1. ``gradient_scale`` turns the given gradient, a sum over
    samples, into the clipped mean: ``clip / weight``. ``sum_over_owners`` adds a small vector up
    over all ranks that own a part of the parameters, which every one of them calls; where each
    rank owns all, it gives back what it gets.
    """

    step: int
    learning_rate: float
    gradient_scale: float
    sum_over_owners: Callable[[Array], Array] = lambda vector: vector


@dataclass(frozen=True, slots=True)
class OwnedRange:
    """What a rule gets of one owned piece: 1-D views of one length, and what they are part of.

    ``gradients`` may be read-only. ``state`` has one view per name of `Optimizer.needed_state`;
    ``segments`` say which parameters the range cuts through.
    """

    parameters: Array
    gradients: Array
    state: Mapping[str, Array]
    segments: Sequence[Segment]


class Optimizer(IGradientBasedOptimizer):
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
    parameter_options : mapping, optional
        Glob pattern of parameter names -> options that differ there, ``weight_decay`` and
        ``learning_rate_scale``: ``{"*.bias": {"weight_decay": 0}}``. Later patterns win.

    Raises
    ------
    ValueError
        For a number outside its range, or an unknown option.
    """

    state_names: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        learning_rate: float | Schedule,
        *,
        weight_decay: float = 0.0,
        clip_global_norm: float | None = None,
        parameter_options: ParameterOptions | None = None,
    ) -> None:
        self.learning_rate = as_schedule(learning_rate)
        self.weight_decay = _at_least_zero("weight_decay", weight_decay)
        if clip_global_norm is not None and not clip_global_norm > 0:
            raise ValueError(f"clip_global_norm must be above 0 or None, got {clip_global_norm}")
        self.clip_global_norm = clip_global_norm
        self.parameter_options = dict(parameter_options or {})
        check_options(self.parameter_options)
        self._spans: dict[tuple[Segment, ...], list[OptionRange]] = {}
        self._scratch: dict[Any, list[Array]] = {}

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
        key = tuple(segments)
        spans = self._spans.get(key)
        if spans is None:
            spans = option_ranges(segments, self.weight_decay, self.parameter_options)
            self._spans[key] = spans
        vectors = (parameters, gradients, *(state[name] for name in self.needed_state()))
        for span in spans:
            rate = float(context.learning_rate * span.learning_rate_scale)
            loop = self._element_loop(rate, span.weight_decay, context)
            if run_compiled(loop, [vector[span.start : span.stop] for vector in vectors]):
                continue
            for start, stop in self._chunks(parameters, span):
                self._update_chunk(
                    parameters[start:stop],
                    gradients[start:stop],
                    {name: vector[start:stop] for name, vector in state.items()},
                    rate,
                    span.weight_decay,
                    context,
                )

    @abstractmethod
    def _update_chunk(
        self,
        p: Array,
        g: Array,
        state: Mapping[str, Array],
        learning_rate: float,
        weight_decay: float,
        context: UpdateContext,
    ) -> None: ...

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

    def clip_factor(self, gradient_norm: float) -> float:
        """What the gradient is multiplied with to satisfy ``clip_global_norm``."""
        if self.clip_global_norm is None or gradient_norm <= self.clip_global_norm:
            return 1.0
        return self.clip_global_norm / gradient_norm

    def optimize(self, input_data: OptimizationInputData) -> OptimizationResult:
        """Train a plain model in this process: a world of one rank.

        The model has the trained parameters afterwards.
        """
        from mpishard.optimizers.single import optimize_single  # it imports this module

        return optimize_single(self, input_data)

    def get_options(self) -> Mapping[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def fingerprint(self) -> dict[str, Any]:
        """The settings as JSON knows them, to be compared between ranks and with a checkpoint.

        A schedule may be any function, so it stands there by its rates at some steps.
        """
        found: dict[str, Any] = {"rule": type(self).__name__}
        for name, value in self.get_options().items():
            found[name] = value if isinstance(value, int | float | str | None) else repr(value)
        found["learning_rate"] = [self.learning_rate(step) for step in (0, 1, 10, 100, 1000, 10000)]
        return found

    def get_current_learning_rate(self) -> float:
        """The rate of the first update; a rule has no step of its own."""
        return self.learning_rate(0)

    def reset(self) -> None:
        """Nothing to forget: state belongs to whoever runs the rule."""

    def _chunks(self, array: Array, span: OptionRange) -> Iterable[tuple[int, int]]:
        # Half a chunk: an update has more operands than most chains of operations.
        step = max(1, chunk_length(array) // 2)
        return (
            (start, min(start + step, span.stop)) for start in range(span.start, span.stop, step)
        )

    def _temporary(self, like: Array, count: int) -> list[Array]:
        """``count`` scratch arrays shaped as ``like``, reused between calls."""
        xp = array_namespace(like)
        # Thread-ranks may share a rule, for it holds nothing else that changes.
        key = (threading.get_ident(), xp.__name__, like.dtype.str)
        buffers = self._scratch.setdefault(key, [])
        if buffers and buffers[0].size < like.size:
            buffers.clear()
        while len(buffers) < count:
            buffers.append(xp.empty(buffers[0].size if buffers else like.size, like.dtype))
        return [buffer[: like.size] for buffer in buffers[:count]]


def _at_least_zero(name: str, value: float) -> float:
    if not 0 <= as_number(name, value) < float("inf"):
        raise ValueError(f"{name} must be 0 or more and finite, got {value}")
    return float(value)


def check_fraction(name: str, value: float) -> float:
    """``value`` where it is in [0, 1); ValueError elsewhere."""
    if not 0 <= as_number(name, value) < 1:
        raise ValueError(f"{name} must be in [0, 1), got {value}")
    return float(value)
