"""Gradients that every rank holds whole, and that travel compressed, with error feedback."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from mpishard.arrays import Array, copy_into, to_host
from mpishard.communication import ReductionOperation
from mpishard.communication.contract.reduction import TreeReducer
from mpishard.layout import ShardLayout
from mpishard.models.stores.compression import Code, PowerSGD
from mpishard.models.stores.gradient_store import (
    BackwardPass,
    CompressionBuffers,
    ReplicatedGradients,
)
from mpishard.models.stores.store_layout import StoreLayout
from mpishard.observe.ledger import MemoryCategory
from mpishard.sharding import ParameterEntry, Unit

__all__ = ["CompressedGradients", "ErrorFeedback"]


class ErrorFeedback:
    """The parts that compression has left out so far, which are added to the next gradient.

    Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML
    2019, algorithm 2. All errors are of sums over samples. A step writes new ones beside the old,
    which stay if the step fails.

    Parameters
    ----------
    layout : StoreLayout
        Units, ranks, and where memory is booked.

    Attributes
    ----------
    own : Array
        Of what this rank sends of its gradient, shape (all elements that are trained,).
    reduced : Array
        Of what it sends of the sums that it owns, shape (the elements that it owns,).
    factors : dict of str to Array
        Parameter -> second factor of PowerSGD in the last step, shape (columns, rank).
    """

    def __init__(self, layout: StoreLayout) -> None:
        trained = layout.trained_units
        parts = [ShardLayout(u.length, layout.backend.world_size) for u in trained]
        rank = layout.backend.rank
        self.lengths = sum(u.length for u in trained), sum(part.size(rank) for part in parts)
        allocate = layout.ledger.allocate
        self._kept, self._fresh = (
            [allocate(MemoryCategory.OPTIMIZER_STATE, n, layout.dtype) for n in self.lengths]
            for _ in range(2)
        )
        for vector in self._kept:
            vector.fill(0)
        self.factors: dict[str, Array] = {}
        self._fresh_factors: dict[str, Array] = {}
        self._is_complete = False
        # By unit: its place in either vector.
        self.places: dict[int, tuple[int, int]] = {}
        position = owned = 0
        for unit, part in zip(trained, parts, strict=True):
            self.places[unit.index] = position, owned
            position, owned = position + unit.length, owned + part.size(rank)

    @property
    def own(self) -> Array:
        return self._kept[0]

    @property
    def reduced(self) -> Array:
        return self._kept[1]

    def of(self, unit: Unit, size: int) -> list[tuple[Array, Array]]:
        """Return old and new errors of a unit: of the rank's gradient, and of its ``size`` sums."""
        starts = self.places[unit.index]
        return [
            (old[start : start + length], new[start : start + length])
            for old, new, start, length in zip(
                self._kept, self._fresh, starts, (unit.length, size), strict=True
            )
        ]

    def write_factor(self, name: str, factor: Array) -> None:
        """Remember a factor for the next step, if this one succeeds."""
        self._fresh_factors[name] = factor

    def commit(self) -> None:
        """Take the new errors for the old ones: the step has updated the parameters."""
        if self._is_complete:
            self._kept, self._fresh = self._fresh, self._kept
            self.factors = self._fresh_factors
        self.drop()

    def settle(self) -> None:
        """Note that all units have new errors."""
        self._is_complete = True

    def drop(self) -> None:
        """Forget the new errors."""
        self._fresh_factors = {}
        self._is_complete = False


class CompressedGradients(ReplicatedGradients):
    """Every rank holds the full gradient, which is reduced from codes in a round's last pass.

    Each rank encodes the piece of a unit that each rank owns, of its own gradient and error. The
    owner adds what it decodes in the order of the one tree, adds its error, and sends the sum as a
    code to all. With w(n) the bytes of a code of n elements the ranks send 2 (N - 1) times the sum
    of w over the pieces: as an all-reduce does, in codes. `PowerSGD` all-reduces the two factors of
    each matrix, and what is no matrix, instead.

    Parameters
    ----------
    layout : StoreLayout
        See `GradientStore`.
    entries : sequence of ParameterEntry
        The parameters, none of which is cut by a unit.
    code : Code or PowerSGD
        What travels.
    errors : ErrorFeedback
        The optimizer's; none is added if ``keeps_errors`` is False.
    key : callable
        Returns seed and step.
    start_step : int
        Earlier steps all-reduce whole gradients, and neither use nor write errors.
    frozen : collection of str
        Names of the parameters that are not trained. They have no error, because checkpoints
        hold nothing of them.
    """

    def __init__(
        self,
        layout: StoreLayout,
        entries: Sequence[ParameterEntry],
        code: Code | PowerSGD,
        errors: ErrorFeedback,
        key: Callable[[], tuple[int, int]],
        *,
        keeps_errors: bool = True,
        start_step: int = 0,
        frozen: Collection[str] = (),
    ) -> None:
        super().__init__(layout)
        self._entries = entries
        self._code = code
        self._errors = errors
        self._key = key
        self._keeps_errors = keeps_errors
        self._start_step = start_step
        self._frozen = [(entry.start, entry.stop) for entry in entries if entry.name in frozen]
        self._reducer = TreeReducer()
        self._is_finite = True

    def _make_buffers(self) -> CompressionBuffers:
        raise AssertionError("the optimizer refuses a second compression")

    def begin(self, this: BackwardPass) -> None:
        super().begin(this)
        self._errors.drop()
        self._is_finite = True

    @property
    def _is_whole(self) -> bool:
        """True if gradients of this step travel whole, as those of `DDPModel` do."""
        return self._key()[1] < self._start_step

    def reduce(self, unit: Unit) -> None:
        if self._is_whole:
            super().reduce(unit)
            return
        if not self._is_last:
            return
        full = self.gradient(unit)
        host = to_host(full)
        part = ShardLayout(unit.length, self.backend.world_size)
        (old, new), (old_sum, new_sum) = self._errors.of(unit, part.size(self.backend.rank))
        given = host + old
        if not np.isfinite(given).all():
            given.fill(np.nan)  # a code could hide the one element; every rank's step must fail
            self._is_finite = False
        with np.errstate(invalid="ignore", over="ignore"):
            if isinstance(self._code, PowerSGD):
                result = self._exchange_factors(unit, given, new, self._code)
                new_sum.fill(0)
            else:
                result = self._exchange_codes(unit, part, given, new, old_sum, new_sum, self._code)
        if not self._keeps_errors:
            new.fill(0)
            new_sum.fill(0)
        own = part.start(self.backend.rank)
        for start, stop in self._frozen:
            for begin, errors in ((unit.start, new), (unit.start + own, new_sum)):
                errors[max(0, start - begin) : max(0, stop - begin)] = 0
        copy_into(full, result)

    def settle(self) -> None:
        super().settle()
        if self._is_last and self._is_finite and not self._is_whole:
            self._errors.settle()

    def finish(self) -> None:
        """Keep the errors of this step: it has updated the parameters."""
        self._errors.commit()

    def abandon(self) -> None:
        super().abandon()
        self._errors.drop()

    def _exchange_codes(
        self, unit: Unit, part: ShardLayout, given: Array, new: Array, old_sum: Array,
        new_sum: Array, code: Code,
    ) -> Array:  # fmt: skip
        """Return the sum over ranks of ``given``, as the codes tell it, and write new errors."""
        backend, rank = self.backend, self.backend.rank
        slices = [part.slice(owner) for owner in range(backend.world_size)]
        keys = [(*self._key(), unit.index, owner) for owner in range(backend.world_size)]
        sent = [
            code.encode(given[piece], (*key, 1 + rank))
            for key, piece in zip(keys, slices, strict=True)
        ]
        for key, piece, mine in zip(keys, slices, sent, strict=True):
            code.decode(mine, new[piece], (*key, 1 + rank))
        # The error is what this rank's own codes leave out, as their receivers decode them.
        np.subtract(given, new, out=new)
        pieces = []
        for sender, received in enumerate(backend.all_to_all(sent)):
            piece = np.empty_like(given[slices[rank]])
            code.decode(received, piece, (*keys[rank], 1 + sender))
            pieces.append(piece)
        total = np.empty_like(given[slices[rank]])
        self._reducer.reduce(pieces, ReductionOperation.SUM, total)
        # The sum is encoded once more on its way back, and that error stays with its owner.
        total += old_sum
        codes = backend.all_gather(code.encode(total, (*keys[rank], 0)))
        position = 0
        result = given
        for key, piece in zip(keys, slices, strict=True):
            length = code.wire_bytes(piece.stop - piece.start, given.dtype.itemsize)
            code.decode(codes[position : position + length], result[piece], (*key, 0))
            position += length
        np.subtract(total, result[slices[rank]], out=new_sum)
        return result

    def _exchange_factors(self, unit: Unit, given: Array, new: Array, code: PowerSGD) -> Array:
        """Return the sum over ranks of ``given``, matrices as products of summed factors."""
        new.fill(0)
        matrices: list[tuple[str, slice, Any, Any]] = []
        rest = np.ones(unit.length, bool)
        seed, _ = self._key()
        for number, entry in enumerate(self._entries):
            shape = code.shape_of(entry.shape)
            if shape is None or not unit.start <= entry.start < unit.stop:
                continue
            place = slice(entry.start - unit.start, entry.stop - unit.start)
            rest[place] = False
            second = self._errors.factors.get(entry.name)
            if second is None or not second.any():  # zeros, from a checkpoint or a zero gradient
                second = code.first_factor(shape[1], (seed, number)).astype(given.dtype)
            matrices.append((entry.name, place, given[place].reshape(shape), second))
        firsts = self._summed([matrix @ second for _, _, matrix, second in matrices], given[rest])
        if rest.any():
            given[rest] = firsts.pop()
        # A decomposition would raise for NaN, on the ranks that have it alone. The sums are NaN on
        # all of them, and so every rank's step fails where totals are compared.
        is_finite = all(np.isfinite(first).all() for first in firsts)
        bases = [np.linalg.qr(first)[0] if is_finite else first for first in firsts]
        own = [matrix.T @ basis for (_, _, matrix, _), basis in zip(matrices, bases, strict=True)]
        for (_, place, matrix, _), basis, second in zip(matrices, bases, own, strict=True):
            new[place] = (matrix - basis @ second.T).ravel()
        for (name, place, _, _), basis, second in zip(
            matrices, bases, self._summed(own), strict=True
        ):
            given[place] = (basis @ second.T).ravel()
            self._errors.write_factor(name, second)
        return given

    def _summed(self, arrays: Sequence[Array], rest: Array | None = None) -> list[Array]:
        """Return the arrays' sums over ranks, in one all-reduce; ``rest`` last, if not empty."""
        given = [*arrays, *([] if rest is None or not rest.size else [rest])]
        if not given:
            return []
        summed = self.backend.all_reduce(np.concatenate([array.ravel() for array in given]))
        ends = np.cumsum([array.size for array in given])[:-1]
        return [
            part.reshape(array.shape)
            for part, array in zip(np.split(summed, ends), given, strict=True)
        ]
