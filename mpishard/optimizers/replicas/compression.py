"""The optimizer that sends compressed gradients, and its state: the rule's, and the errors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from mpishard.base import Array, Metadata, as_count, as_flag, as_number
from mpishard.checkpoint import Pieces
from mpishard.communication import CommunicationBackend
from mpishard.contracts import IOptimizer
from mpishard.models import ShardedModelBase, StoreLayout, pieces_to_write
from mpishard.optimizers.replicas.codes import Code, Int8, Quantization, TopK
from mpishard.optimizers.replicas.compressed_sums import CompressedSums, ErrorFeedback
from mpishard.optimizers.replicas.exchanged_passes import ExchangedPasses, ExchangedPiece
from mpishard.optimizers.replicas.wrapper import ReplicasOptimizer
from mpishard.optimizers.rules.rule import Optimizer
from mpishard.optimizers.sharded.state import ModelState
from mpishard.sharding import Piece, Region, ShardingConfiguration, refuse_line_search

_METHODS: dict[str, Callable[[float], Code]] = {
    "quantization": lambda ratio: Quantization(max(2, int(ratio * 256))),
    "int8": lambda _: Int8(),
    "top-k": TopK,
}


class GradientCompressionOptimizer(ReplicasOptimizer):
    """Updates with gradients that travel compressed between replicas, with error feedback.

    A replica may be a group of ranks, as with `LocalSGDOptimizer`, and by default a node. Inside it
    gradients are whole. Each of its R ranks exchanges its part, 1/R of the gradient, with the ranks
    that hold the same part of the other replicas.

    The error of a code is added to the next gradient, so that no part of a gradient is lost
    (Karimireddy et al., ICML 2019, algorithm 2). Both a replica's part of the gradient and the sums
    that a rank owns are encoded. So errors take as much memory on each rank as that part, and 1/N
    of it more for N replicas; twice, because a step that fails keeps the old ones. In each step the
    replicas send, summed over their ranks, 2 (N - 1) times the sum of w(n) over the ranges that
    ranks own: n elements of b bytes, about 1/(R N) of each unit. On a mesh parameters that several
    ranks of a replica hold travel as they are, because all must get the same sums:

    ================  =========================================================================
    method            w(n)
    ================  =========================================================================
    ``quantization``  n + 2 b: the nearest of max(2, int(256 ratio)) values between the least
                      and the greatest element
    ``int8``          n + b ceil(n / 128): stochastic rounding, a scale for 128 elements
    ``top-k``         k (4 + b): the k = max(1, int(ratio n)) largest elements and their places
    ================  =========================================================================

    The first ``start_step`` steps send whole gradients, w(n) = b n, and have the bits of a
    `DDPOptimizer`. At the beginning of a training late gradients cost most.

    A checkpoint has the errors of each replica. The same number of replicas of the same kind
    continues with the same bits. If N other replicas continue, replica j takes the sum of the
    errors of the replicas i with i % N == j, so that nothing is lost. Their ranks and their
    strategy may be others.

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
    error_feedback : bool
        Whether errors are added to the next gradient.
    seed : int
        Seed of random codes, which are a function of seed, step, unit, owner and sender.
    start_step : int
        Number of steps before the first compressed one, 0 or more.
    strategy : {"ddp", "zero1", "zero2", "zero3", "fsdp", "hybrid"}
        Inside each replica: see `LocalSGDOptimizer`.

    Raises
    ------
    TypeError, ValueError
        As `LocalSGDOptimizer`; for a number outside its range, and another method.
    """

    _setting_names = "compression_ratio", "method", "error_feedback", "seed", "start_step"

    def __init__(
        self,
        wrapped_optimizer: IOptimizer,
        config: ShardingConfiguration,
        compression_ratio: float = 0.1,
        use_quantization: bool = True,
        use_sparsification: bool = False,
        *,
        method: str | None = None,
        error_feedback: bool = True,
        seed: int = 0,
        start_step: int = 0,
        strategy: str = "ddp",
    ) -> None:
        super().__init__(wrapped_optimizer, config)
        if not 0 < as_number("compression_ratio", compression_ratio) <= 1:
            raise ValueError(f"compression_ratio must be in (0, 1], got {compression_ratio}")
        self.seed = as_count("seed", seed, least=0)
        self.start_step = as_count("start_step", start_step, least=0)
        if method is not None and method not in _METHODS:
            raise ValueError(f"method must be one of {', '.join(_METHODS)}, got {method!r}")
        self.compression_ratio = float(compression_ratio)
        self.use_quantization = as_flag("use_quantization", use_quantization)
        self.use_sparsification = as_flag("use_sparsification", use_sparsification)
        self.error_feedback = as_flag("error_feedback", error_feedback)
        self.method = method
        # If both flags are set, the sparse code is chosen.
        if method is None and self.use_sparsification:
            self.method = "top-k"
        elif method is None and self.use_quantization:
            self.method = "quantization"
        self._choose_replicas(strategy)

    @property
    def _is_plain(self) -> bool:
        return self.method is None

    def _make_state(self, model: ShardedModelBase, frozen: frozenset[str]) -> ModelState:
        if self.method is None:
            return super()._make_state(model, frozen)
        return _CompressedState(
            self._rule,
            model,
            frozen,
            _METHODS[self.method](self.compression_ratio),
            self.seed,
            keeps_errors=self.error_feedback,
            start_step=self.start_step,
        )

    def _require_fit(self, model: ShardedModelBase) -> None:
        super()._require_fit(model)
        if self.method and self._rule.searches:
            refuse_line_search(type(self._rule).__name__, "compressed gradients are not exact")


class _CompressedState(ModelState):
    """A rule's state and the errors of compression, which this rank alone has."""

    keeps_gradients = True

    def __init__(
        self,
        rule: Optimizer,
        model: ShardedModelBase,
        frozen: frozenset[str],
        code: Code,
        seed: int,
        *,
        keeps_errors: bool,
        start_step: int,
    ) -> None:
        super().__init__(rule, model, frozen)
        self._code, self._seed = code, seed
        self._keeps_errors, self._start_step = keeps_errors, start_step
        self._across = model.engine.replica.across
        self._writers = self._across.world_size  # number of replicas in a checkpoint that is read
        self._read: list[Array] = []
        model.engine.use_passes(ExchangedPasses("GradientCompressionOptimizer", self._make_sums))

    def _make_sums(
        self, layout: StoreLayout, across: CommunicationBackend, pieces: tuple[ExchangedPiece, ...]
    ) -> CompressedSums:
        program = self.engine.program
        frozen = [(e.start, e.stop) for e in program.entries if e.name in program.frozen]
        # Made again if other units are frozen: then the errors have other lengths.
        self.errors = ErrorFeedback(layout, across, pieces)
        return CompressedSums(
            across,
            pieces,
            self._code,
            self.errors,
            lambda: (self._seed, self.steps),
            keeps_errors=self._keeps_errors,
            start_step=self._start_step,
            frozen=frozen,
        )

    # Kinds: "error<r>" of replica r's gradients, and "reduced_error" of the sums.

    def arrays_to_write(self) -> Pieces:
        size, rank = self._across.world_size, self._across.rank
        mine = self._regions_of(self.errors.own, self.errors.own_pieces, writes=True)
        # Every rank names the kinds of all replicas: a save needs the same kinds on all ranks.
        own = {f"{self.kind}/error{r}": mine if r == rank else [] for r in range(size)}
        return {**super().arrays_to_write(), **own, **self._reduced_regions(writes=True)}

    def expect(self, kinds: Collection[str]) -> None:
        """Read the number of replicas that wrote a checkpoint from its kinds."""
        # Kinds are counted, because a checkpoint does not record its number of replicas.
        self._writers = sum(f"{self.kind}/error{r}" in kinds for r in range(len(kinds)))

    def arrays_to_read(self) -> Pieces:
        size, rank = self._across.world_size, self._across.rank
        errors = self.errors
        found: dict[str, Sequence[tuple[Region, Array]]] = {
            f"{self.kind}/error{r}": [] for r in range(self._writers or size)
        }
        self._read = []
        # Replica j takes the errors of the replicas i with i % size == j: none is lost or doubled.
        for kind in list(found)[rank::size]:
            self._read.append(np.zeros_like(errors.own))
            found[kind] = self._regions_of(self._read[-1], errors.own_pieces, writes=False)
        return {**super().arrays_to_read(), **found, **self._reduced_regions(writes=False)}

    def restored(self, metadata: Metadata) -> None:
        super().restored(metadata)
        # Added up in place, in the order of the kinds, so that every run has the same bits.
        self.errors.own.fill(0)
        own = self.errors.own
        for vector in self._read:
            own += vector
        self._read = []

    def _regions_of(
        self, vector: Array, pieces: Iterable[Piece], *, writes: bool
    ) -> Sequence[tuple[Region, Array]]:
        """Return the trained regions of a vector of ``pieces``; to write, of copies only one."""
        engine, found = self.engine, []
        for piece in pieces:
            trained = engine.program.trained([piece])
            for own in pieces_to_write(trained, engine.placement) if writes else trained:
                start = piece.offset + own.start - piece.start
                found.append((own.start, vector[start : start + own.length]))
        return engine.placement.cut(found)

    def _reduced_regions(self, *, writes: bool) -> Pieces:
        errors = self.errors
        sums = self._regions_of(errors.reduced, errors.reduced_pieces, writes=writes)
        return {f"{self.kind}/reduced_error": sums}
