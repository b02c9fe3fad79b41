"""Messages from one rank to another."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpishard.arrays import Array
from mpishard.communication.contract.backend import CommunicationBackend
from mpishard.errors import CommunicationError
from mpishard.testing.checks import CommunicationChecks
from mpishard.testing.reference import assert_raises, assert_same, values

__all__ = ["TransferChecks"]


class TransferChecks(CommunicationChecks):
    """The checks of `CommunicationConformance` of point to point."""

    def check_point_to_point(self, backend: CommunicationBackend) -> None:
        """In order for each tag, whatever order the tags are received in; shapes are kept."""
        world, rank = backend.world_size, backend.rank
        if world == 1:
            return
        right, left = (rank + 1) % world, (rank - 1) % world
        for dtype in self.dtypes:
            for number, size in enumerate((0, 3, 5000)):
                for tag in (0, 7):
                    mine = values(dtype, size, rank, 100 * tag + number)
                    backend.send(mine, right, tag)
                    mine[...] = 0  # what was sent is a copy
            for tag in (7, 0):
                for number, size in enumerate((0, 3, 5000)):
                    got = backend.receive(left, size, tag)
                    assert_same(
                        got, values(dtype, size, left, 100 * tag + number), f"receive tag {tag}"
                    )
        backend.send(np.ones((2, 3)), right)
        assert backend.receive(left, 6).shape == (2, 3)
        backend.send(np.arange(4), right)
        backend.send(np.arange(2000), right)
        for count, wrong in ((4, 5), (2000, 4)):
            assert_raises(CommunicationError, backend.receive, left, wrong)
            assert backend.receive(left, count).tolist() == list(range(count))
        backend.barrier()

    def check_async_point_to_point(self, backend: CommunicationBackend) -> None:
        """Receives issued ahead, sends without copies, both mixed with the blocking ones."""
        world, rank = backend.world_size, backend.rank
        if world == 1:
            return
        right, left = (rank + 1) % world, (rank - 1) % world
        sizes = (5000, 0, 3, 7000, 511, 513)

        def message(dtype: np.dtype[Any], sender: int, tag: int, number: int) -> Array:
            return values(dtype, sizes[number], sender, 100 * tag + number)

        for dtype in self.dtypes:
            coming = {
                (tag, number): backend.receive_async(left, size, tag, dtype=dtype)
                for tag in (0, 7)
                for number, size in enumerate(sizes)
            }
            going = []
            for number in range(len(sizes)):
                for tag in (7, 0):
                    mine = message(dtype, rank, tag, number)
                    if number % 3 == 1:
                        backend.send(mine, right, tag)
                        mine[...] = 0
                    else:
                        going.append((mine, backend.send_async(mine, right, tag)))
            order = np.random.default_rng(rank).permutation(len(coming))
            keys = [list(coming)[index] for index in order]
            got = {key: coming[key].wait() for key in keys}
            for sent, work in going:
                work.wait()
                sent[...] = 0  # is the sender's again
            for key in keys:
                expected = message(dtype, left, *key)
                assert_same(got[key], expected, f"receive_async tag {key[0]}")
                got[key][...] = 0  # and what came is the receiver's
            assert coming[keys[0]].wait() is got[keys[0]], "a second wait gives another array"
        backend.barrier()
        self._check_receives_in_line(backend, left, right)

    @staticmethod
    def _check_receives_in_line(backend: CommunicationBackend, left: int, right: int) -> None:
        """Receives of all sorts behind each other; what is given up is the next one's."""
        for size in (2, 4000):
            first = backend.receive_async(left, size, dtype=np.float64)
            given_up = backend.receive_async(left, size, dtype=np.float64)
            third = backend.receive_async(left, size, dtype=np.float64)
            given_up.cancel()
            given_up.cancel()
            assert_raises(CommunicationError, given_up.wait)
            backend.barrier()  # nothing has been sent before
            sends = [backend.send_async(np.full(size, float(k)), right) for k in range(4)]
            assert backend.receive(left, size)[-1] == 2.0, "a receive did not wait in line"
            last = backend.receive_async(left, size, dtype=np.float64)
            assert [work.wait()[-1] for work in (last, third, first)] == [3.0, 1.0, 0.0]
            for work in sends:
                work.wait()
            assert_raises(ValueError, sends[0].cancel)
            # Messages that are not the one expected are refused, and those behind them are not.
            wrong = backend.receive_async(left, size, 1, dtype=np.float32)
            fewer = backend.receive_async(left, size + 1, 2, dtype=np.float64)
            backend.send(np.full(size, 1.0), right, 1)
            backend.send(np.full(size, 2.0), right, 2)
            backend.send(np.full(size, 3.0), right, 3)
            assert backend.receive(left, size, 3)[0] == 3.0
            assert_raises(CommunicationError, wrong.wait)
            assert_raises(CommunicationError, fewer.wait)
            assert backend.receive(left, size, 2)[0] == 2.0, "a refused message is lost"
            backend.barrier()
