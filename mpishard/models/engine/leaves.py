"""A global batch in leaves, so that worlds of different sizes walk through the same bits.

A world of P ranks has V leaves to compute, P at a time: rank r computes the leaves r, r + P, .. .
If P is not a power of two, the largest power of two below P is the number of ranks that compute,
the first ones. A sum over all P ranks is the same, because the others add zeros.
Sums over leaves go through the tree of `mpishard.communication.contract.reduction` over
V slots, whatever P is: gradients in `LeafGradients`, loss and weight in `GradientLeaves`. Norms,
which are sums over parameters, are made of the same terms in every world: see
`mpishard.sharding.common_pieces`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from mpishard.base import (
    Array,
    Data,
    DType,
    LeafLayout,
    Scalar,
    ShardLayout,
    block_squares,
    read_numbers,
)
from mpishard.communication import (
    CommunicationBackend,
    ReductionOperation,
    TreeReducer,
    differences,
)
from mpishard.models.engine.passes import Passes, Reduced
from mpishard.models.engine.update import UpdatePieces
from mpishard.models.programs.program import Program
from mpishard.models.stores.gradient_store import BackwardPass, GradientStore, WrappedGradients
from mpishard.models.stores.replicated_gradients import ScatteredGradients
from mpishard.models.stores.sharded_gradients import ShardedGradients
from mpishard.models.stores.store_layout import StoreLayout
from mpishard.observe import MemoryCategory
from mpishard.sharding import (
    Piece,
    ShardingConfiguration,
    cut_into_common_pieces,
    numerics_fingerprint,
    refuse_with_leaves,
    reproducing_worlds,
)

if TYPE_CHECKING:
    from mpishard.models.engine.engine import Engine

NUMERICS = "numerics"
"""Key of `GradientLeaves.numerics` in the metadata of a checkpoint."""

_log = logging.getLogger("mpishard")

Sums = tuple[float, float, float]


def check_leaves(config: ShardingConfiguration, world_size: int, *, model_size: int = 1) -> None:
    """Refuse a world, a mesh or choices that cannot reproduce. Communicates nothing.

    Parameters
    ----------
    config : ShardingConfiguration
        With or without ``gradient_leaves``.
    world_size : int
        Number of ranks.
    model_size : int
        Number of ranks that compute one batch together.

    Raises
    ------
    ValueError
        If ``gradient_leaves`` is on, and the data axis is not the only one, the world is none of
        `reproducing_worlds`, each rank or replica updates alone, gradients are compressed, or NCCL
        adds them in an order of its own.
    """
    leaves = config.gradient_leaves
    if leaves is None:
        return
    name = f"gradient_leaves={leaves}"
    if config.communication_backend.reductions == "fast":
        refuse_with_leaves(leaves, "reductions='fast'", "choose reductions='exact'")
    # Another number of ranks makes another number of replicas, and so other steps.
    if config.replica_size is not None:
        refuse_with_leaves(leaves, f"replica_size={config.replica_size}")
    # Tensor ranks add up activations in an order that depends on their number.
    if model_size > 1:
        refuse_with_leaves(
            leaves,
            f"pipeline and tensor axes of {model_size} ranks",
            "give both axes the size 1, or gradient_leaves=None",
        )
    worlds = reproducing_worlds(leaves)
    if world_size not in worlds:
        below = max(world for world in worlds if world < world_size)
        larger = 1 << (world_size - 1).bit_length()
        others = f"gradient_leaves={larger} or None"
        if world_size not in reproducing_worlds(larger):
            others = "gradient_leaves=None"
        raise ValueError(
            f"{name} gives the same bits on {', '.join(map(str, worlds))} ranks, but this world "
            f"has {world_size}: start {below} ranks, or give {others}"
        )
    _check_choices(leaves, config)


def _check_choices(leaves: int, config: ShardingConfiguration) -> None:
    # Asked in each step too, because these two choices may change after the model is wrapped.
    if not config.auto_sync_gradients:
        refuse_with_leaves(leaves, "auto_sync_gradients=False")
    if config.enable_gradient_compression:
        refuse_with_leaves(leaves, "enable_gradient_compression=True")


def check_leaves_of(program: Program, config: ShardingConfiguration) -> None:
    """Refuse a model whose sums of gradients are rounded at each rank.

    Raises
    ------
    ValueError
        For parameters of 16 bits: their sums are made in float32, and each rank rounds its result.
    """
    # Such sums depend on the number of ranks, which decides after which leaves they are rounded.
    if config.gradient_leaves is not None and program.dtype.itemsize < 4:
        refuse_with_leaves(
            config.gradient_leaves,
            f"parameters of {program.dtype.name}, rounded at each rank,",
            "give float32 or float64",
        )


def warn_of_other_bits(config: ShardingConfiguration, dtype: DType) -> None:
    """Warn of idle ranks, different kernels and several BLAS threads. Collective."""
    backend = config.communication_backend
    # A warning and no refusal: the run is right, only not the same bits as elsewhere.
    mine = _fingerprint(dtype)
    differing = differences(backend, mine)
    # One warning is enough.
    if backend.rank != 0:
        return
    world_size, leaves = backend.world_size, config.gradient_leaves
    assert leaves is not None
    computing = LeafLayout(0, leaves, world_size).computing
    if computing < world_size:
        _log.warning(
            "gradient_leaves=%d: only %d of the %d ranks compute samples, because the same bits "
            "need a power of two; a step takes as long as on %d ranks",
            leaves,
            computing,
            world_size,
            computing,
        )
    if differing:
        _log.warning(
            "gradient_leaves: these settings differ between ranks, so that worlds of other sizes "
            "will not have the same bits; by rank, %s",
            differing,
        )
    threads = mine["blas_threads"]
    if threads not in ("1", "unknown"):
        _log.warning(
            "gradient_leaves: matrix products are computed by %s BLAS threads, and other numbers "
            "of threads give other bits. Set OMP_NUM_THREADS=1 here and wherever the run resumes",
            threads,
        )


def _fingerprint(dtype: DType) -> dict[str, str]:
    """Return versions, kernels and threads on which the bits of a model in this dtype depend."""
    found = numerics_fingerprint()
    if dtype == np.float64:  # layers have no compiled loops for it, and rules the bits of NumPy
        found.pop("loops", None)
        found.pop("products", None)
    return found


class GradientLeaves:
    """The leaves of this rank, and how all ranks' sums are put together.

    Parameters
    ----------
    config : ShardingConfiguration
        With ``gradient_leaves``, V, a power of two.
    axis : CommunicationBackend
        The ranks that compute other samples; one of `reproducing_worlds`.
    dtype : numpy.dtype
        Dtype of the parameters.

    Attributes
    ----------
    count : int
        V.
    micro_steps : int
        Number of leaves that each rank computes, one after the other.
    """

    def __init__(
        self, config: ShardingConfiguration, axis: CommunicationBackend, dtype: DType
    ) -> None:
        assert config.gradient_leaves is not None
        self.count = config.gradient_leaves
        # A tree of pairs needs 2^k ranks: with 6 ranks 4 compute, and 2 only own pieces.
        computing = LeafLayout(0, self.count, axis.world_size).computing
        self.micro_steps = self.count // computing
        self._axis, self._dtype = axis, dtype
        # Ranks cut units, so that common pieces, and with them norms, depend on the units' sizes.
        self._unit_size = config.minimum_parameter_group_size
        # A rank that computes nothing adds zeros to the slots of another.
        self._slots = slice(axis.rank % computing, self.count, computing)
        # Start of each trained common piece -> its index in a norm.
        self._norm_index: dict[int, int] = {}
        self._own: list[int] = []

    def cut(self, x: Data, y: Data, sample_start: int | None) -> list[tuple[Data, Data, int]]:
        """Return inputs, targets and first sample's index of this rank's leaves. Collective.

        Parameters
        ----------
        x, y : Array
            The samples of this rank's leaves, end to end.
        sample_start : int or None
            Index of the first of them in the global batch, if the caller knows it.

        Raises
        ------
        TypeError
            For a batch that cannot be sliced.
        ValueError
            On every rank, if the ranks' batches are not those of their leaves.
        """
        # The leaves of a rank shrink by one sample at most, and the first are the larger ones.
        own = ShardLayout(len(x), self.micro_steps)
        slices = [own.slice(step) for step in range(self.micro_steps)]
        if not hasattr(x, "__getitem__"):
            raise TypeError(
                f"gradient_leaves cuts batches into slices, and a {type(x).__name__} has none"
            )
        # The ranks exchange their counts: only all of them show whether the batch is cut right.
        own_start = -1 if sample_start is None else sample_start
        counts, starts = self._axis.all_gather(np.array([[len(x), own_start]])).T.tolist()
        layout = LeafLayout(sum(counts), self.count, self._axis.world_size)
        leaves = [layout.slices(rank) for rank in range(self._axis.world_size)]
        firsts = [own_leaves[0].start for own_leaves in leaves]
        is_elsewhere = any(n not in (-1, first) for n, first in zip(starts, firsts, strict=True))
        if counts != list(layout.sizes) or is_elsewhere:
            raise ValueError(
                f"gradient_leaves={self.count}: of a global batch of {sum(counts)} samples the "
                f"ranks pass {list(layout.sizes)}, those of their leaves, which begin at {firsts}; "
                f"they were given {counts}"
                + (f", with the first at {starts}" if is_elsewhere else "")
                + f". model.batch_indices({sum(counts)}) names the samples of a rank"
            )
        own_starts = [leaf.start for leaf in leaves[self._axis.rank]]
        return [
            (x[part], None if y is None else y[part], start)
            for part, start in zip(slices, own_starts, strict=True)
        ]

    def numerics(self) -> dict[str, str]:
        """Return all that decides a run's bits besides its program and data, for checkpoints."""
        return {
            "gradient_leaves": str(self.count),
            "minimum_parameter_group_size": str(self._unit_size),
            **_fingerprint(self._dtype),
        }

    def index_pieces(self, whole: Sequence[Piece], own: Sequence[Piece]) -> tuple[Piece, ...]:
        """Cut the trained pieces into common pieces, and record the index of each in a norm.

        Parameters
        ----------
        whole, own : sequence of Piece
            All trained pieces, and those that this rank owns.

        Returns
        -------
        tuple of Piece
            ``own`` in common pieces: `message` takes the norms of their gradients.
        """
        self._norm_index = {
            p.start: n for n, p in enumerate(cut_into_common_pieces(whole, self.count))
        }
        mine = cut_into_common_pieces(own, self.count)
        self._own = [self._norm_index[piece.start] for piece in mine]
        return mine

    def message(self, parts: Sequence[tuple[Scalar, Scalar]], gradients: Sequence[Array]) -> Array:
        """Return the rank's summands of the totals: zeros except for its own leaves and pieces.

        Parameters
        ----------
        parts : sequence of (float, float)
            Loss sum and weight of each of its leaves.
        gradients : sequence of Array
            Reduced gradients of the common pieces that `index_pieces` has returned.
        """
        # A number for each common piece of the model: ranks add zeros for those of other owners.
        squares = np.zeros(len(self._norm_index))
        with np.errstate(over="ignore"):
            squares[self._own] = read_numbers([block_squares(g).sum() for g in gradients])
        return np.concatenate([self._spread(parts), squares])

    def fold(self, message: Array) -> Sums:
        """Return loss sum, weight and squared norm from the sum of all ranks' messages."""
        # Each slot was written by one rank: their sum over ranks in any order has the same bits.
        losses, weights, squares = np.split(message, [self.count, 2 * self.count])
        with np.errstate(over="ignore", invalid="ignore"):
            # As many squares in the same order in every world: so their sum has the same bits.
            return _tree(losses), _tree(weights), float(squares.sum())

    def total(
        self, parts: Sequence[tuple[Scalar, Scalar]], subject: int = 0
    ) -> tuple[float, float]:
        """Return sum and weight of a loss over all leaves, from this rank's. Collective."""
        total, weight, _ = self.fold(self._axis.all_reduce(self._spread(parts), subject=subject))
        return total, weight

    def _spread(self, parts: Sequence[tuple[Scalar, Scalar]]) -> Array:
        """Return loss sums and weights of all leaves: zeros except for this rank's."""
        slots = np.zeros((2, self.count))
        slots[:, self._slots] += np.array(parts).T  # adding to 0 leaves no -0
        return slots.ravel()


def _tree(slots: Array) -> float:
    """Return the sum of 2^k slots, in the tree: each round adds neighbours."""
    while slots.size > 1:
        slots = slots[::2] + slots[1::2]
    return float(slots[0])


class LeafPasses(Passes):
    """Passes of one leaf each, whose sums do not depend on the number of ranks.

    Parameters
    ----------
    make_store : callable
        ``make_store(layout)`` makes a store that reduces to the owners of pieces. Collective.
    leaves : GradientLeaves
        The leaves of this rank.
    """

    leaves: GradientLeaves

    def __init__(
        self, make_store: Callable[[StoreLayout], GradientStore], leaves: GradientLeaves
    ) -> None:
        super().__init__(make_store)
        self.leaves = leaves

    def prepare(self, engine: Engine, layout: StoreLayout) -> UpdatePieces:
        pieces = super().prepare(engine, layout)
        without_gradient = engine.program.frozen_units
        every = [p for p in layout.pieces_of_all() if p.unit.index not in without_gradient]
        counted = self.leaves.index_pieces(engine.program.trained(every), pieces.owned)
        return replace(pieces, counted=counted)

    def require(self, engine: Engine) -> None:
        """Refuse a step before anything is communicated: also choices that changed since."""
        super().require(engine)
        _check_choices(self.leaves.count, engine.config)

    def gradient(
        self,
        engine: Engine,
        x: Data,
        y: Data,
        settings: Mapping[str, object],
        sample_start: int | None,
    ) -> Reduced:
        batches = self.leaves.cut(x, y, sample_start)
        # Every rank makes as many passes, with empty leaves too: each of them is a reduction.
        for number, (inputs, targets, start) in enumerate(batches, start=1):
            self.run(engine, inputs, targets, start, is_last=number == len(batches))
        return self.reduced(engine, engine.round.read()[0], settings)

    def model_changed(self) -> None:
        # The parts of rank 0 alone would decide the buffers.
        refuse_with_leaves(
            self.leaves.count,
            "buffers that a pass changes, as of batch normalisation in train mode,",
            "put those modules in eval mode, replace them, or give gradient_leaves=None",
        )

    def totals(self, engine: Engine, loss: float | Array, settings: Mapping[str, object]) -> Sums:
        round_, counted = engine.round, self.store.owned(engine.pieces.counted)
        message = self.leaves.message(round_.parts, counted)
        return round_.totals(message, loss, settings, engine.step_number + 1, self.leaves.fold)


class LeafGradients(WrappedGradients):
    """Every pass is one leaf of each rank, reduced at once: a whole subtree of all leaves.

    Each of P ranks makes V/P passes. After a pass the owner of a piece has the sum of P adjacent
    leaves. It combines these sums as a binary counter adds ones: a sum waits at its level until
    another of as many leaves comes. So the tree over V leaves is the same for every P, and the
    owner keeps log2(V/P) + 1 buffers as long as its pieces.

    `GradientLeaves.cut` synchronises the ranks before the first pass of a step. So no rank writes
    before all have read the sums of the last step, and `finish` has nothing to do.

    Parameters
    ----------
    inner : ScatteredGradients or ShardedGradients
        Holds a pass's gradients, and reduces them.
    """

    _inner: ScatteredGradients | ShardedGradients

    def __init__(self, inner: ScatteredGradients | ShardedGradients) -> None:
        super().__init__(inner)
        self._waiting: list[list[Array]] = []  # sums of fewer and fewer leaves
        self._free: list[list[Array]] = []
        self._done = 0  # passes of this round
        self._reducer = TreeReducer()

    def begin(self, this: BackwardPass) -> None:
        self._is_last = this.is_last
        if this.is_first:
            self._done = 0
            # An error may have ended the last round with sums still waiting at their levels.
            self._free += self._waiting
            self._waiting.clear()
        # For the inner store each leaf is a round of its own, which is reduced at once.
        self._inner.begin(BackwardPass(is_first=True, is_last=True))

    @property
    def reduces_at_once(self) -> bool:
        """False: the micro-batches of a leaf are added on the rank that computes it."""
        return False

    def await_reductions(self) -> None:
        self._inner.await_reductions()
        own = self._inner.own_sums()
        total, carry = own, self._done
        # A binary counter of leaves: two sums of equally many leaves become one, as in the tree of
        # reductions. The last sum is written to the arrays of `inner`.
        while carry & 1:
            left = self._waiting.pop()
            out, spare = (own, left) if self._is_last else (left, total)
            for first, second, result in zip(left, total, out, strict=True):
                self._reducer.reduce([first, second], ReductionOperation.SUM, out=result)
            if spare is not own:
                self._free.append(spare)
            total = out
            carry >>= 1
        self._done += 1
        if self._is_last:
            # Ranks without leaves add 0, which turns -0 into 0. Adding 0 gives these bits in all
            # worlds.
            for values in own:
                values[...] += 0.0
        if not self._is_last:
            self._waiting.append(self._kept(own) if total is own else total)
        else:
            self.spread()

    def _kept(self, own: list[Array]) -> list[Array]:
        """Return a copy of sums that the next pass overwrites."""
        if not self._free:
            allocate = self.layout.allocate
            self._free.append([allocate(MemoryCategory.GRADIENTS, int(a.size)) for a in own])
        kept = self._free.pop()
        for target, values in zip(kept, own, strict=True):
            target[...] = values
        return kept

    def finish(self) -> None:
        """Do nothing: the next step begins with a synchronisation."""
