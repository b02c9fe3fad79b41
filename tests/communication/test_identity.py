"""The same inputs give the same bits on every backend and transport, in every dtype."""

import hashlib
import os

import ml_dtypes
import numpy as np
import pytest
from reduction_bits import adversarial, canonical_bytes, reduction_digests

from mpishard import run_in_threads
from mpishard.communication import MPICommunicationBackend
from mpishard.communication.contract.call import DTYPES
from mpishard.communication.contract.reduction import ReductionOperation, TreeReducer
from mpishard.testing.reductions import tree_reduce
from mpishard.testing.worlds import in_worlds

by_path = pytest.mark.parametrize("path", ["arena", "messages", "two nodes"], indirect=True)

FULL = bool(os.environ.get("MPISHARD_TEST_FULL"))
SAMPLE = ("bool", "int8", "uint64", "float16", "bfloat16", "float32", "float64", "complex64")
TRAVEL = [dtype for dtype in DTYPES if FULL or dtype.name in SAMPLE]
GROUPS = {
    "integers": [d for d in TRAVEL if d.kind in "biu"],
    "16 bits": [d for d in TRAVEL if d.name in ("float16", "bfloat16")],
    "floats": [d for d in TRAVEL if d.name in ("float32", "float64")],
    "complex": [d for d in TRAVEL if d.kind == "c"],
}


@by_path
@pytest.mark.parametrize("group", GROUPS)
@in_worlds(2, 3, 4)
def test_every_transport_gives_the_bits_of_the_tree(backend, path, group):
    digests = reduction_digests(backend, GROUPS[group])
    text = "".join(f"{name} {digest}\n" for name, digest in digests.items()).encode()
    mine = np.frombuffer(hashlib.sha256(text).digest(), np.uint8)
    everyones = backend.all_gather(mine).reshape(backend.world_size, -1)
    assert (everyones == mine).all()
    if isinstance(backend, MPICommunicationBackend) and backend.rank == 0:
        in_memory = run_in_threads(backend.world_size, reduction_digests, GROUPS[group])
        assert all(other == digests for other in in_memory)
    backend.barrier()


@in_worlds(1, 5, 8)
def test_worlds_of_other_sizes_give_the_bits_of_the_tree(backend):
    reduction_digests(backend, [d for d in DTYPES if d.name in ("float16", "complex128", "int8")])


def test_adversarial_values_depend_on_the_order_of_their_sum():
    for dtype in DTYPES:
        arrays = [adversarial(dtype, 3001, rank) for rank in range(4)]
        turned = [arrays[i] for i in (0, 2, 1, 3)]
        total, other = (tree_reduce(a, ReductionOperation.SUM) for a in (arrays, turned))
        assert (canonical_bytes(total) == canonical_bytes(other)) == (dtype.kind in "biu")
        if dtype.kind in "biu":
            continue
        parts = total.view(total.real.dtype) if dtype.kind == "c" else total
        assert np.isnan(parts).any()
        assert np.isinf(parts).any()
        values = arrays[0].view(parts.dtype).astype(np.float64)
        assert np.isnan(values).any()
        assert np.isinf(values).any()
        assert (np.signbit(values) & (values == 0)).any()
        smallest = float(ml_dtypes.finfo(parts.dtype).tiny)
        with np.errstate(invalid="ignore"):
            assert ((abs(values) > 0) & (abs(values) < smallest)).any(), "no denormal"
    assert len(TRAVEL) == sum(map(len, GROUPS.values()))


def test_two_swapped_ranks_are_detected(monkeypatch):
    combine = TreeReducer.reduce_subtrees

    def swapped(self, subtrees, count, operation, out):
        turned = {
            (slot ^ 3 if slot in (1, 2) else slot, level): array
            for (slot, level), array in subtrees.items()
        }
        combine(self, turned if count > 3 else subtrees, count, operation, out)

    monkeypatch.setattr(TreeReducer, "reduce_subtrees", swapped)
    with pytest.raises(AssertionError, match=r"SUM of \d+ float32 by all_reduce"):
        run_in_threads(4, reduction_digests, GROUPS["floats"])


def test_min_and_max_propagate_nan_from_every_rank():
    """MIN and MAX are NaN for each element that is NaN on one rank or more."""
    for operation in (ReductionOperation.MIN, ReductionOperation.MAX):

        def body(backend, operation=operation):
            array = np.arange(float(backend.world_size))
            array[backend.rank] = np.nan
            return backend.all_reduce(array, operation)

        for result in run_in_threads(3, body):
            assert np.isnan(result).all()
