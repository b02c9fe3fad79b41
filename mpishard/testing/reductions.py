"""Reductions that a communication backend must compute, to the bit."""

from __future__ import annotations

import numpy as np

from mpishard.communication.contract.backend import CommunicationBackend
from mpishard.communication.contract.call import DTYPES
from mpishard.communication.contract.reduction import ReductionOperation
from mpishard.testing.checks import CommunicationChecks, operations
from mpishard.testing.reference import (
    ADVERSARIAL_VALUES,
    assert_same,
    bounds,
    even_sizes,
    tree_reduce,
    values,
)

__all__ = ["ReductionChecks"]

SUM, PRODUCT, AVERAGE = (
    ReductionOperation.SUM,
    ReductionOperation.PRODUCT,
    ReductionOperation.AVERAGE,
)


class ReductionChecks(CommunicationChecks):
    """The checks of `CommunicationConformance` of all_reduce and reduce_scatter."""

    def check_all_reduce(self, backend: CommunicationBackend) -> None:
        """Every dtype, shape and operation, in place and into ``out``."""
        world = backend.world_size
        for dtype, shape in self._cases(world):
            inputs = [values(dtype, shape, rank) for rank in range(world)]
            for operation in operations(dtype) if len(shape) == 1 else [SUM]:
                what = f"all_reduce {operation.name} {dtype.name}{list(shape)}"
                expected = tree_reduce(inputs, operation)
                mine = inputs[backend.rank].copy()
                result = backend.all_reduce(mine, operation)
                assert result is mine, f"{what}: not in place"
                assert_same(mine, expected, what)
            mine, out = inputs[backend.rank].copy(), np.zeros(shape, dtype)
            assert backend.all_reduce(mine, out=out) is out
            assert_same(out, tree_reduce(inputs, SUM), "all_reduce out=")
            assert_same(mine, inputs[backend.rank], "all_reduce input with out=")

    def check_reduce_scatter(self, backend: CommunicationBackend) -> None:
        """Every dtype, shape and operation; counts of one's own; ``strict``, ``out``."""
        world, rank = backend.world_size, backend.rank
        for dtype, shape in self._cases(world):
            inputs = [values(dtype, shape, peer, 1) for peer in range(world)]
            even = even_sizes(shape[0], world)
            all_on_last = [0] * (world - 1) + [shape[0]]
            for operation in operations(dtype) if len(shape) == 1 else [SUM]:
                what = f"reduce_scatter {operation.name} {dtype.name}{list(shape)}"
                expected = tree_reduce(inputs, operation)
                mine = inputs[rank].copy()
                piece = backend.reduce_scatter(mine, operation)
                assert_same(piece, expected[bounds(even, rank)], what)
                assert_same(mine, inputs[rank], f"{what}, input")
            expected = tree_reduce(inputs, SUM)
            piece = backend.reduce_scatter(inputs[rank].copy(), counts=all_on_last)
            assert_same(piece, expected[bounds(all_on_last, rank)], "reduce_scatter counts=")
            mine, strict = inputs[rank].copy(), shape[0] % world == 0
            # In the input, where its own part is and where it is not; or beside it.
            out = mine[: even[rank]] if len(shape) < 3 else np.ones_like(mine[: even[rank]])
            assert backend.reduce_scatter(mine, strict=strict, out=out) is out
            assert_same(out, expected[bounds(even, rank)], f"reduce_scatter strict={strict}, out=")

    def check_accumulation(self, backend: CommunicationBackend) -> None:
        """16-bit floats are combined in float32 and rounded once, or never where ``out`` is."""
        world, rank = backend.world_size, backend.rank
        # ``much + 1`` is ``much`` in 16 bits, and twice ``high`` is infinite in float16.
        for name, much, high in (("float16", 2048.0, 60000.0), ("bfloat16", 256.0, 256.0)):
            dtype = self._has(name)
            if dtype is None:
                continue
            for length in (3, 3000):
                added = np.full(length, much if rank == 0 else 1.0).astype(dtype)
                total = np.full(length, much + world - 1.0)
                factor = {0: high, 1: 2.0, 2: 0.5}.get(rank, 1.0) if world > 2 else high**rank
                cases = [
                    (SUM, added, total),
                    (AVERAGE, np.full(length, high).astype(dtype), np.full(length, high)),
                    (PRODUCT, np.full(length, factor).astype(dtype), np.full(length, high)),
                ]
                for operation, mine, expected in cases if world > 1 else []:
                    what = f"{operation.name} of {length} {name} in float32"
                    own = bounds(even_sizes(length, world), rank)
                    once = expected.astype(dtype)
                    assert_same(backend.all_reduce(mine.copy(), operation), once, what)
                    assert_same(backend.reduce_scatter(mine, operation), once[own], what)
                wide = np.empty(total[bounds(even_sizes(length, world), rank)].shape, np.float32)
                assert backend.reduce_scatter(added, out=wide) is wide
                exact = np.full(wide.shape, much + world - 1, np.float32)
                assert_same(wide, exact, f"reduce_scatter of {name} into float32")

    def check_tree_order(self, backend: CommunicationBackend) -> None:
        """Sums of numbers whose order shows, short (in headers) and long, and one by one."""
        world = backend.world_size
        numbers = np.array(ADVERSARIAL_VALUES)
        for name in ("float16", "bfloat16", "float32", "float64", "complex128"):
            dtype = next(d for d in DTYPES if d.name == name)
            if dtype not in self.dtypes:
                continue
            for length in (3, len(numbers), 4097):
                inputs = []
                for rank in range(world):
                    order = np.random.default_rng([rank, length]).integers(0, len(numbers), length)
                    with np.errstate(all="ignore"):
                        inputs.append(numbers[order].astype(dtype))
                for operation in operations(dtype):
                    if dtype.kind == "c" and operation is not SUM:
                        continue
                    expected = tree_reduce(inputs, operation)
                    result = backend.all_reduce(inputs[backend.rank].copy(), operation)
                    assert_same(result, expected, f"tree {operation.name} {name}[{length}]")
                    sizes = even_sizes(length, world)
                    piece = backend.reduce_scatter(inputs[backend.rank], operation)
                    assert_same(
                        piece, expected[bounds(sizes, backend.rank)],
                        f"tree {operation.name} {name}[{length}] scattered",
                    )  # fmt: skip
