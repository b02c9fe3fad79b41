"""The optimizer that sends compressed gradients, and its state: the rule's, and the errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from mpishard.arguments import as_flag, as_integer, as_number
from mpishard.arrays import Array
from mpishard.checkpoint import Pieces
from mpishard.contracts import IOptimizer
from mpishard.models import DDPModel, ShardedModelBase
from mpishard.models.stores.compressed_gradients import CompressedGradients, ErrorFeedback
from mpishard.models.stores.compression import (
    Code,
    Int8,
    PowerSGD,
    Quantization,
    RandomK,
    TopK,
)
from mpishard.models.stores.store_layout import StoreLayout
from mpishard.optimizers.rules.rule import Optimizer
from mpishard.optimizers.sharded.base import ShardedOptimizerBase
from mpishard.optimizers.sharded.state import ModelState
from mpishard.sharding import ShardingConfiguration, owned_pieces

__all__ = ["GradientCompressionOptimizer"]

_METHODS: dict[str, Callable[[float, int], Code | PowerSGD]] = {
    "quantization": lambda ratio, _: Quantization(max(2, int(ratio * 256))),
    "int8": lambda *_: Int8(),
    "top-k": lambda ratio, _: TopK(ratio),
    "random-k": lambda ratio, _: RandomK(ratio),
    "powersgd": lambda _, rank: PowerSGD(rank),
}


class GradientCompressionOptimizer(ShardedOptimizerBase):
    """Updates a `DDPModel` with gradients that travel compressed, with error feedback.

    What a code leaves out is added to the next gradient, so that it arrives later and not never
    (Karimireddy et al., ICML 2019, algorithm 2). Both the gradient of each rank and the sum of each
    piece are encoded, so errors take as much memory on each rank as its gradient, and 1/N of it
    more; twice, because a step that fails keeps the old ones. The ranks send in each step, summed
    over N ranks, 2 (N - 1) times the sum of w(n) over all pieces of all units, of n elements of b
    bytes:

    ================  =========================================================================
    method            w(n)
    ================  =========================================================================
    ``quantization``  n + 2 b: the nearest of max(2, int(256 ratio)) values between the least
                      and the greatest element
    ``int8``          n + b ceil(n / 128): stochastic rounding, a scale for 128 elements
    ``top-k``         k (4 + b): the k = max(1, int(ratio n)) largest elements and their places
    ``random-k``      k b: places drawn anew in each step, the same on all ranks
    ``powersgd``      b r (rows + columns) for each matrix, b n for other parameters, over whole
                      units: products of r columns and rows
    ================  =========================================================================

    The first ``start_step`` steps send whole gradients, and are those of a `DDPOptimizer` by the
    bit; then w(n) is b n. While a training is steep, what arrives late costs most.

    A checkpoint has the errors of each rank. The same number of ranks goes on with the same bits.
    Of another number, rank j takes the sum of the errors of the ranks i with i % N == j, so that
    nothing is lost.

    Parameters
    ----------
    wrapped_optimizer : Optimizer
        The rule and its settings.
    config : ShardingConfiguration
        Backend and choices.
    compression_ratio : float
        In (0, 1]: the share of elements that are sent, or of 256 levels.
    use_quantization, use_sparsification : bool
        Choose "quantization" or "top-k"; of both, "top-k". Of neither, nothing is compressed.
    method : str, optional
        One of the table's, instead of these two flags.
    rank : int
        r of "powersgd".
    error_feedback : bool
        Whether errors are added to the next gradient.
    seed : int
        Of random codes, which are a function of seed, step, unit, owner and sender.
    start_step : int
        Number of steps before the first compressed one, 0 or more.

    Raises
    ------
    TypeError, ValueError
        As `ShardedOptimizerBase`; for a number outside its range, or another method.
    """

    model_class: type[ShardedModelBase] = DDPModel

    def __init__(
        self,
        wrapped_optimizer: IOptimizer,
        config: ShardingConfiguration,
        compression_ratio: float = 0.1,
        use_quantization: bool = True,
        use_sparsification: bool = False,
        *,
        method: str | None = None,
        rank: int = 4,
        error_feedback: bool = True,
        seed: int = 0,
        start_step: int = 0,
    ) -> None:
        super().__init__(wrapped_optimizer, config)
        if not 0 < as_number("compression_ratio", compression_ratio) <= 1:
            raise ValueError(f"compression_ratio must be in (0, 1], got {compression_ratio}")
        if as_integer("rank", rank) < 1:
            raise ValueError(f"rank must be 1 or more, got {rank}")
        for name, number in (("seed", seed), ("start_step", start_step)):
            if as_integer(name, number) < 0:
                raise ValueError(f"{name} must be 0 or more, got {number}")
        if method is not None and method not in _METHODS:
            raise ValueError(f"method must be one of {', '.join(_METHODS)}, got {method!r}")
        self.compression_ratio = float(compression_ratio)
        self.use_quantization = as_flag("use_quantization", use_quantization)
        self.use_sparsification = as_flag("use_sparsification", use_sparsification)
        self.error_feedback = as_flag("error_feedback", error_feedback)
        self.method = method
        if method is None and self.use_sparsification:
            self.method = "top-k"
        elif method is None and self.use_quantization:
            self.method = "quantization"
        self.seed = int(seed)
        self.start_step = int(start_step)
        self.power_rank = int(rank)

    def _settings(self) -> dict[str, Any]:
        names = (
            "compression_ratio", "method", "power_rank", "error_feedback", "seed", "start_step"
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def _make_state(self, model: ShardedModelBase, frozen: frozenset[str]) -> ModelState:
        if self.method is None:
            return super()._make_state(model, frozen)
        code = _METHODS[self.method](self.compression_ratio, self.power_rank)
        return _CompressedState(
            self._rule, model, frozen, code, self.seed,
            keeps_errors=self.error_feedback, start_step=self.start_step,
        )  # fmt: skip

    def _require_model_of_this_kind(self, model: ShardedModelBase) -> None:
        super()._require_model_of_this_kind(model)
        if model is self.model or self.method is None:
            return
        self._refuse_other_gradients(model, "sends gradients its own way")
        if self._rule.searches:
            raise ValueError(
                f"{type(self._rule).__name__} needs exact gradients: compress with another rule"
            )

    def _refusals(self) -> Mapping[str, str]:
        if self.method is None:
            return {}
        return {
            "serialize": "the errors of compression are each rank's own, which bytes that are the "
            "same on all ranks cannot hold: use mpishard.checkpoint.save, or save_model"
        }


class _CompressedState(ModelState):
    """A rule's state and the errors of compression, which this rank alone has."""

    keeps_gradients = True

    def __init__(
        self,
        rule: Optimizer,
        model: ShardedModelBase,
        frozen: frozenset[str],
        code: Code | PowerSGD,
        seed: int,
        **choices: Any,
    ) -> None:
        super().__init__(rule, model, frozen)
        self._code, self._seed, self._choices = code, seed, choices
        self._kind = f"optimizer/{type(rule).__name__}"
        self._writers = model.backend.world_size  # of a checkpoint that is read
        self._read: list[Array] = []
        self._factors: Array | None = None
        model.engine.lend_gradients("GradientCompressionOptimizer", self._store)

    def _store(self, layout: StoreLayout) -> CompressedGradients:
        # Called again if other units are frozen; then there are other errors.
        self.errors = ErrorFeedback(layout)
        self._layout = layout
        return CompressedGradients(
            layout, self.model.engine.program.entries, self._code, self.errors,
            lambda: (self._seed, self.steps), frozen=self.model.engine.program.frozen,
            **self._choices,
        )  # fmt: skip

    # Kinds: "error<r>" of rank r's gradients, "reduced_error" of the sums, and "factors".

    def arrays_to_write(self) -> Pieces:
        backend = self.model.backend
        own = {f"{self._kind}/error{r}": self._regions_of(self.errors.own, whole=True)
               if r == backend.rank else [] for r in range(backend.world_size)}  # fmt: skip
        sums = {f"{self._kind}/reduced_error": self._regions_of(self.errors.reduced, whole=False)}
        return {**super().arrays_to_write(), **own, **sums, **self._factor_regions(writes=True)}

    def expect(self, kinds: Collection[str]) -> None:
        """Learn from the kinds of a checkpoint how many ranks wrote it."""
        pattern = re.compile(re.escape(self._kind) + r"/error\d+")
        self._writers = sum(bool(pattern.fullmatch(kind)) for kind in kinds)

    def arrays_to_read(self) -> Pieces:
        backend = self.model.backend
        found: dict[str, Any] = {}
        self._read = []
        for r in range(self._writers or backend.world_size):
            mine = r % backend.world_size == backend.rank
            if mine:
                self._read.append(np.zeros_like(self.errors.own))
            found[f"{self._kind}/error{r}"] = (
                self._regions_of(self._read[-1], whole=True) if mine else []
            )
        found[f"{self._kind}/reduced_error"] = self._regions_of(self.errors.reduced, whole=False)
        return {**super().arrays_to_read(), **found, **self._factor_regions(writes=False)}

    def restored(self, metadata: Mapping[str, Any]) -> None:
        super().restored(metadata)
        self.errors.own.fill(0)
        own = self.errors.own
        for vector in self._read:
            own += vector
        self._read = []
        if self._factors is not None:
            for name, place, shape in self._factor_places():
                self.errors.factors[name] = self._factors[place].reshape(shape).copy()
        self._factors = None

    def _regions_of(self, vector: Array, *, whole: bool) -> Sequence[tuple[Any, Array]]:
        """Return the regions of a vector of all trained units, or of the pieces of them."""
        backend = self.model.backend
        size, rank = (1, 0) if whole else (backend.world_size, backend.rank)
        starts, engine = self.errors.places, self.model.engine
        pieces = []
        for piece in owned_pieces(self._layout.units, size, rank):
            if piece.unit.index in starts:
                start = starts[piece.unit.index][not whole] - piece.start
                pieces += [(part.start, vector[start + part.start : start + part.stop])
                           for part in engine.program.trained([piece])]  # fmt: skip
        return engine.placement.cut(pieces)

    def _factor_places(self) -> list[tuple[str, slice, tuple[int, int]]]:
        """Return the places of PowerSGD's factors: at the beginning of their parameters."""
        assert isinstance(self._code, PowerSGD)
        found = []
        for entry in self.model.engine.program.entries:
            shape = self._code.shape_of(entry.shape)
            if shape is not None and entry.name not in self.frozen:
                factor = shape[1], self._code.rank
                place = slice(entry.start, entry.start + factor[0] * factor[1])
                found.append((entry.name, place, factor))
        return found

    def _factor_regions(self, *, writes: bool) -> Pieces:
        """Return the factors as a vector of the parameters' length, which rank 0 writes."""
        if not isinstance(self._code, PowerSGD):
            return {}
        engine = self.model.engine
        self._factors = vector = np.zeros(self._layout.length, self._layout.dtype)
        if writes:
            for name, place, _ in self._factor_places():
                if name in self.errors.factors:
                    vector[place] = self.errors.factors[name].ravel()
        trained = engine.program.trained(engine.layout.pieces(sharded=False))
        mine = trained if not writes or self.model.rank == 0 else ()
        return {f"{self._kind}/factors": engine.placement.cut(
            (piece.start, vector[piece.start : piece.stop]) for piece in mine
        )}  # fmt: skip
