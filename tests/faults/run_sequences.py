"""Random sequences: ``run_sequences.py WHERE RANKS SEED FIRST COUNT``, WHERE ``memory`` or not.

Every fourth has a mismatch, which all ranks must detect. Prints the number of correct calls.
"""

import sys

import numpy as np

import mpishard
from mpishard.testing.fuzz import fuzz_sequence


def sequences(backend, seed, first, count):
    calls = 0
    for number in range(first, first + count):
        has_mismatch = backend.world_size > 1 and number % 4 == 3
        calls += fuzz_sequence(backend, seed * 1_000_000 + number, mismatch=has_mismatch)
    return int(backend.all_reduce(np.array([calls]))[0])


def main():
    where, ranks, *numbers = sys.argv[1:]
    seed, first, count = (int(number) for number in numbers)
    if where == "memory":
        calls = mpishard.run_in_threads(int(ranks), sequences, seed, first, count, timeout=300)[0]
        print(count, "sequences,", calls, "calls")
    else:
        backend = mpishard.init("mpi")
        calls = sequences(backend, seed, first, count)
        backend.print(count, "sequences,", calls, "calls")


if __name__ == "__main__":
    main()
