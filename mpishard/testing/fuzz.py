"""Random sequences of collectives, the same on all ranks; each rank computes the results alone.

A sequence is a function of its seed and of the world size. It has collectives and messages of all
kinds, dtypes, shapes, operations, roots and counts, in the world, in groups of it, and in their
arenas. The calls block or are issued ahead. Each
rank chooses the order in which it waits for the calls that it has issued. `fuzz_plan` draws a
sequence; `fuzz_sequence` runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpishard.base import Array, CollectiveMismatchError, as_count, as_flag, require_type
from mpishard.communication import Arena, CommunicationBackend, ReductionOperation
from mpishard.testing.fuzz_plan import ARENA_LENGTH, IN_ARENAS, SequenceStep, draw_plan, spoil
from mpishard.testing.reductions import (
    assert_same,
    bounds,
    even_sizes,
    expected_result,
    tree_reduce,
    values,
)

Check = Callable[[Any], None]


def fuzz_sequence(
    backend: CommunicationBackend, seed: int, *, length: int = 30, mismatch: bool = False
) -> int:
    """Run the sequence of ``seed`` on every rank of a world. Collective.

    Parameters
    ----------
    backend : CommunicationBackend
        The backend of this rank. All ranks call with the same other arguments.
    seed : int
        Seed of the sequence, 0 or more.
    length : int
        Number of steps, collectives and messages, that are drawn.
    mismatch : bool
        Let one rank make a call that does not match in one step. The step must be refused on every
        rank that takes part in it, and all others must succeed.

    Returns
    -------
    int
        Number of this rank's collectives that succeeded.

    Raises
    ------
    AssertionError
        For a wrong result, a right call that was refused, or a wrong call that was not. A note
        names the seed and the step.

    Examples
    --------
    >>> from mpishard import run_in_threads
    >>> good = run_in_threads(3, lambda backend: fuzz_sequence(backend, seed=4))
    >>> min(good) > 10
    True
    """
    require_type("backend", backend, CommunicationBackend)
    as_count("seed", seed, least=0)
    as_count("length", length)
    mismatch = as_flag("mismatch", mismatch)
    return _SequenceRun(backend, seed, length, mismatch=mismatch).run()


class _SequenceRun:
    """The run of one rank through a sequence."""

    def __init__(
        self, backend: CommunicationBackend, seed: int, length: int, *, mismatch: bool
    ) -> None:
        self._seed = seed
        self._world_rank = backend.rank
        self._plan = draw_plan(seed, backend.world_size, length)
        self._spoiled = spoil(self._plan, seed) if mismatch else None
        self._at = self._plan[0]
        # A generator of this rank alone chooses its waits, which may differ between ranks.
        self._generator = np.random.default_rng([seed, backend.rank, 1])
        # By the plan's numbers, which are the same on all ranks; a rank has only the groups it is
        # in.
        self._groups: dict[int, CommunicationBackend] = {0: backend}
        self._arenas: dict[int, Arena | None] = {}
        self._pending: list[tuple[SequenceStep, Any, Check]] = []
        self._good = 0

    def run(self) -> int:
        try:
            for step in self._plan:
                if step.group in self._groups:
                    self._at = step
                    self._take(step)
                # Seldom, so that several works are under way most of the time.
                if self._pending and self._generator.random() < 0.2:
                    self._finish_one()
                elif self._generator.random() < 0.1:
                    self._groups[0].progress()
            while self._pending:
                self._finish_one()
            # In one order, because each group must be left by all of its ranks.
            for number in sorted(self._groups)[1:]:
                self._groups[number].shutdown()
        except BaseException as error:
            spoiled = ", with a mismatch" if self._spoiled else ""
            error.add_note(
                f"fuzz_sequence of seed {self._seed}{spoiled}, rank {self._world_rank}, {self._at}"
            )
            raise
        return self._good

    def _take(self, step: SequenceStep) -> None:
        backend = self._groups[step.group]
        spoiled = self._spoiled
        if spoiled is not None and step.number == spoiled.step.number:
            self._refused(backend, spoiled.step if backend.rank == spoiled.rank else step)
        elif step.method == "split":
            child = backend.split(step.colors[backend.rank], step.keys[backend.rank])
            self._good += 1
            if child is not None:
                color = step.colors[backend.rank]
                self._groups[step.children[color]] = child  # type: ignore[index]
        elif step.method == "allocate_arena":
            self._arenas[step.group] = backend.allocate_arena(
                ARENA_LENGTH, step.dtype, once_per_node=step.is_common
            )
            self._good += 1
        elif step.method in IN_ARENAS:
            self._in_arena(backend, step)
        elif step.method == "message":
            self._message(backend, step)
        else:
            arguments, options, check = self._arguments(backend, step)
            if step.is_twin:
                work = getattr(backend, f"{step.method}_async")(*arguments, **options)
                self._pending.append((step, work, check))
            else:
                check(getattr(backend, step.method)(*arguments, **options))
                self._good += 1

    # ------------------------------------------------------------------------------- one step

    def _refused(self, backend: CommunicationBackend, step: SequenceStep) -> None:
        arguments, options, _ = self._arguments(backend, step)
        # A refused call must not have written to any array that it was given.
        given = [a for a in (*arguments, *options.values()) if isinstance(a, np.ndarray)]
        before = [array.copy() for array in given]
        try:
            getattr(backend, step.method)(*arguments, **options)
        except CollectiveMismatchError as error:
            message = str(error)
        else:
            raise AssertionError("a call that does not match was not refused")
        # The number from the rank's own record, which the message must name for every rank.
        last = backend.status.read().last_of(backend.label)
        for rank in backend.world_ranks:
            assert f"rank {rank}: collective {last}, " in message, message
        for array, copy in zip(given, before, strict=True):
            assert_same(array, copy, "an array of a call that was refused")

    def _message(self, backend: CommunicationBackend, step: SequenceStep) -> None:
        source, target = step.root, step.target
        if backend.rank == source:
            mine = self._input(step, source)
            if step.is_twin:
                work = backend.send_async(mine, target, step.tag)
                self._pending.append((step, work, lambda _: None))
            else:
                backend.send(mine, target, step.tag)
                # A send copies its array, so the receiver must still get the old values.
                mine[...] = 0
        elif backend.rank == target:
            expected = self._input(step, source)

            def check(message: Array) -> None:
                assert_same(message, expected, str(step))

            if step.has_out:
                work = backend.receive_async(source, expected.size, step.tag, dtype=expected.dtype)
                self._pending.append((step, work, check))
            else:
                check(backend.receive(source, expected.size, step.tag))

    def _in_arena(self, backend: CommunicationBackend, step: SequenceStep) -> None:
        arena, rank, world = self._arenas[step.group], backend.rank, backend.world_size
        if arena is None:
            return
        inputs = [self._input(step, peer) for peer in range(world)]
        mine, own = arena.mine[step.part], bounds(even_sizes(step.rows[0], world), rank)
        if step.method == "gather_in_place":
            whole = np.concatenate(
                [each[bounds(even_sizes(each.size, world), n)] for n, each in enumerate(inputs)]
            )
            work = arena.gather_in_place(inputs[rank][own], step.part)
        else:
            mine[...] = inputs[rank]
            whole = tree_reduce(inputs, ReductionOperation.SUM)
            if step.method == "reduce_in_place":
                work = arena.reduce_in_place(step.part)
            else:
                mine, whole = np.empty(own.stop - own.start, step.dtype), whole[own]
                work = arena.reduce_into(mine, step.part)

        def check(_: object) -> None:
            assert_same(mine, whole, str(step))

        if step.is_twin:
            self._pending.append((step, work, check))
        else:
            check(work.wait())
            self._good += 1

    def _finish_one(self) -> None:
        self._at, work, check = self._pending.pop(self._generator.integers(len(self._pending)))
        check(work.wait())
        self._good += self._at.method != "message"

    # --------------------------------------------------------------------- arguments and results

    def _input(self, step: SequenceStep, rank: int) -> Array:
        shape = (step.rows[rank], *step.trailing)
        array = values(step.dtype, shape, rank, 1000 * self._seed + step.number)
        if step.is_adversarial and step.dtype.kind == "f":
            with np.errstate(over="ignore"):
                # Magnitudes so far apart that another order of the sum rounds differently.
                array *= step.dtype.type(1e4) ** (rank - 1)
        return array

    def _arguments(
        self, backend: CommunicationBackend, step: SequenceStep
    ) -> tuple[tuple[object, ...], dict[str, object], Check]:
        """Return the arguments and options of this rank's call, and the check of its result."""
        rank, world, method = backend.rank, backend.world_size, step.method
        inputs: list[Any] = [self._input(step, peer) for peer in range(world)]
        mine = inputs[rank].copy()
        if method == "all_to_all":
            inputs = [
                # Another length for each pair, empty ones among them.
                [array[(source + target) % (len(array) + 1) :] for target in range(world)]
                for source, array in enumerate(inputs)
            ]
            mine = inputs[rank]
        elif method in ("broadcast", "scatter"):
            brings = rank == step.root or (method == "broadcast" and step.has_out)
            mine = mine if brings else None
        expected = expected_result(
            method, inputs, rank, operation=step.operation, root=step.root, counts=step.counts
        )
        options: dict[str, object] = {}
        if method == "reduce_scatter" or (method == "scatter" and rank == step.root):
            options["counts"] = step.counts
        given = mine if method in ("all_reduce", "broadcast") else None
        if step.has_out and method in ("all_reduce", "reduce_scatter", "all_gather"):
            given = np.zeros(expected.shape, step.dtype)
            options["out"] = given

        def check(result: object) -> None:
            assert_same(result, expected, str(step))
            assert given is None or result is given, f"{step} returned another array"
            if mine is not None and mine is not given:
                assert_same(mine, inputs[rank], f"the input of {step}")

        if method == "barrier":
            return (), {}, check
        if method in ("all_reduce", "reduce_scatter"):
            return (mine, step.operation), options, check
        rooted = method in ("broadcast", "scatter", "gather")
        return (mine, step.root) if rooted else (mine,), options, check
