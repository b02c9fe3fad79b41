"""A custom communication backend: ranks are processes, connected by pipes of multiprocessing.

There is one pipe for each pair of ranks. A message is an address, the sender's call, and the bytes
of an array. docs/write-a-backend.md explains this file.

    python examples/pipe_backend.py -n 3

runs mpishard's conformance suite on three processes, trains a small model on them, and compares it
with the same training on threads, bit for bit.
"""

import argparse
import contextlib
import json
import multiprocessing
import queue
import threading
import time
import traceback
import weakref
from collections import deque
from itertools import combinations
from typing import NamedTuple

import mpishard as ms
import numpy as np
import threadpoolctl
from mpishard.communication import Call, CommunicationBackend, Waitable, refuse_other_message
from mpishard.errors import CollectiveTimeoutError, CommunicationError, PeerError
from mpishard.testing import CommunicationConformance

WORLD = "world"
CHUNK = 2**20  # bytes


class Message(NamedTuple):
    """A message from one rank to another; ``address`` identifies its receiver and purpose."""

    address: tuple
    call: Call | None = None
    array: np.ndarray | None = None


def post(connection, message):
    """Write a message into a pipe: a header, and the bytes of the array."""
    address, call, array = message
    header = [address] if array is None else [address, array.dtype.name, array.shape]
    packed = b"" if call is None else call.to_bytes()
    connection.send_bytes(json.dumps(header).encode() + b"\n" + packed)
    for part in [] if array is None else chunks(array):
        connection.send_bytes(part)


def take(connection):
    """Read the next message of a pipe, its array straight into the memory of a new one."""
    header, _, packed = connection.recv_bytes().partition(b"\n")
    address, *kind = json.loads(header)
    array = np.empty(kind[1], kind[0]) if kind else None
    for part in [] if array is None else chunks(array):
        connection.recv_bytes_into(part)
    return Message(tuple(address), Call.from_bytes(packed) if packed else None, array)


def chunks(array):
    data = array.reshape(-1).view(np.uint8)
    return [data[start : start + CHUNK] for start in range(0, data.size, CHUNK)]


class Pipes:
    """One rank's ends of its pipes, and the messages that have come through them.

    Two threads block on each pipe, a writer and a reader. The rank's own thread never blocks on
    a pipe: it waits for its readers, at most ``timeout`` seconds (0: no limit). All ranks may
    send any amount at once, because the readers always read.
    """

    def __init__(self, rank, connections, timeout):
        self.rank, self.timeout = rank, timeout
        self.backends = weakref.WeakSet()  # worlds of this rank: others may wait in any of them
        self.changed = threading.Condition()  # guards the next three
        self.news = 0
        self.arrived = {}  # (source, address) -> messages, oldest first
        self.ended = {}  # (rank, world) -> origin, text, whether it is a failure
        self.outgoing, self.writers = {}, []
        for peer, connection in connections.items():
            self.outgoing[peer] = queue.SimpleQueue()
            writer = threading.Thread(target=self._write, args=(peer, connection), daemon=True)
            reader = threading.Thread(target=self._read, args=(peer, connection), daemon=True)
            self.writers.append(writer)
            writer.start()
            reader.start()

    def send(self, target, message):
        """Send a message, whose array must not change any more. Return at once."""
        if target == self.rank:
            self._sort(target, message)
        else:
            self.outgoing[target].put(message)

    def close(self, last_message):
        """Send a last message to every rank, and wait until it is sent."""
        self._sort(self.rank, last_message)
        for outgoing in self.outgoing.values():
            outgoing.put(last_message)
            outgoing.put(None)
        for writer in self.writers:
            writer.join(self.timeout or None)

    def drive(self, work):
        """Advance all calls of this rank until ``work`` is done."""
        deadline = time.monotonic() + self.timeout if self.timeout else None
        while True:
            with self.changed:
                seen = self.news
            for backend in tuple(self.backends):
                backend.progress()
            if work.done:
                return
            with self.changed:
                left = None if deadline is None else deadline - time.monotonic()
                if not self.changed.wait_for(lambda seen=seen: self.news > seen, left):
                    text = f"rank {self.rank} waited {self.timeout:g} s {work.where}"
                    if isinstance(work.waitable, Messages):  # and not for an earlier receive
                        text += f"; nothing came from ranks {work.waitable.missing()}"
                    raise CollectiveTimeoutError(text)

    def _write(self, peer, connection):
        while (message := self.outgoing[peer].get()) is not None:
            with contextlib.suppress(OSError):  # of a peer that has ended, as its reader says
                post(connection, message)

    def _read(self, peer, connection):
        try:
            while (peer, WORLD) not in self.ended:
                self._sort(peer, take(connection))
        except (EOFError, OSError):
            text = f"rank {peer} ended without a word: its process was killed, or crashed"
            self._sort(peer, Message(("ended", WORLD, peer, text, True)))

    def _sort(self, source, message):
        kind, *what = message.address
        with self.changed:
            if kind == "ended":
                world, *ending = what
                self.ended[source, world] = ending
            else:
                self.arrived.setdefault((source, message.address), deque()).append(message)
            self.news += 1
            self.changed.notify_all()


class Messages(Waitable):
    """One message per source for an address."""

    def __init__(self, pipes, sources, address):
        self.pipes, self.address = pipes, address
        self.keys = [(source, address) for source in sources]

    def missing(self):
        return [key[0] for key in self.keys if key not in self.pipes.arrived]

    def test(self):
        with self.pipes.changed:
            missing = self.missing()  # all messages of a rank arrive before its last one
            for (rank, world), (origin, text, is_failure) in self.pipes.ended.items():
                waits_for_it = rank in missing and world in (self.address[1], WORLD)
                if missing and (is_failure or waits_for_it):
                    raise PeerError(text, origin)
        return not missing

    def look(self):
        return [self.pipes.arrived[key][0] for key in self.keys]

    def take(self):
        with self.pipes.changed:
            messages = [self.pipes.arrived[key].popleft() for key in self.keys]
            for key in self.keys:
                if not self.pipes.arrived[key]:
                    del self.pipes.arrived[key]
        return messages


class PipeBackend(CommunicationBackend):
    """One process as one rank of a world that communicates through pipes."""

    def __init__(self, pipes, ranks):
        super().__init__(rank=ranks.index(pipes.rank), world_size=len(ranks))
        self._pipes = pipes
        self._world_ranks = tuple(ranks)  # numbered as in the first world
        pipes.backends.add(self)

    def _on_initialize(self):
        if {(self._pipes.rank, world) for world in (self.group, WORLD)} & self._pipes.ended.keys():
            raise CommunicationError(f"{self.describe()} has ended; its pipes are closed")

    def _on_shutdown(self):
        me = self._pipes.rank
        text = f"rank {me} left after collective {self._sequence} of {self.label or WORLD}"
        message = Message(("ended", self.group, me, text, False))
        if self._is_root:
            for group in set(self._pipes.backends) - {self}:
                group.shutdown()
            self._pipes.close(message)
        else:
            for rank in self.world_ranks:
                self._pipes.send(rank, message)

    def abort(self, error):
        origin = self._pipes.rank
        if isinstance(error, PeerError):  # caused by another rank: name the origin
            origin, text = error.rank, str(error)
        else:
            trace = "".join(traceback.format_exception(error))
            text = f"rank {origin} failed after collective {self._sequence}, with {trace}"
        self._pipes.close(Message(("ended", WORLD, origin, text, True)))

    def _drive(self, work):
        self._pipes.drive(work)

    def _exchange(self, call, parts):
        """Send ``parts[r]`` to rank r; return what each rank sent here."""
        address = ("collective", self.group, call.sequence)
        for rank, part in zip(self.world_ranks, parts, strict=True):
            self._pipes.send(rank, Message(address, call, part))
        messages = Messages(self._pipes, self.world_ranks, address)
        yield messages
        taken = messages.take()
        self._verify([message.call for message in taken])  # before any data is used
        return [message.array for message in taken]

    def _to_all(self, array):
        """One copy for all: the caller may change ``array`` as soon as the collective ends."""
        return [None if array is None else np.array(array)] * self.world_size

    def _steps_all_reduce(self, call, array, out):
        layout = ms.ShardLayout(array.size, self.world_size)
        parts = _pieces(array.reshape(-1), layout.sizes)
        contributions = yield from self._exchange(call, parts)
        mine = np.empty(layout.size(self.rank), array.dtype)
        self._reducer.reduce(contributions, call.operation, mine)  # in the one tree
        reduced = yield from self._exchange(call, [mine] * self.world_size)
        np.concatenate(reduced, out=out.reshape(-1))
        return out

    def _steps_reduce_scatter(self, call, array, counts, out):
        contributions = yield from self._exchange(call, _pieces(array, counts))
        flat = [piece.reshape(-1) for piece in contributions]
        self._reducer.reduce(flat, call.operation, out.reshape(-1))
        return out

    def _steps_all_gather(self, call, array, out):
        arrays = yield from self._exchange(call, self._to_all(array))
        return np.concatenate(arrays, out=out)

    def _steps_broadcast(self, call, array, root):
        arrays = yield from self._exchange(call, self._to_all(array if self.rank == root else None))
        if array is None:
            array = arrays[root]
        elif self.rank != root:
            array[...] = arrays[root]
        return array

    def _steps_scatter(self, call, array, counts, root):
        is_root = self.rank == root
        parts = _pieces(array, counts) if is_root else self._to_all(None)
        arrays = yield from self._exchange(call, parts)
        return arrays[root]

    def _steps_gather(self, call, array, root):
        parts = self._to_all(None)
        parts[root] = np.array(array)
        arrays = yield from self._exchange(call, parts)
        return np.concatenate(arrays) if self.rank == root else None

    def _steps_all_to_all(self, call, parts):
        received = yield from self._exchange(call, [np.array(part) for part in parts])
        return received

    def _steps_barrier(self, call):
        yield from self._exchange(call, self._to_all(None))

    def _steps_split(self, call, color, key):
        choice = np.array([-1 if color is None else color, key])
        choices = yield from self._exchange(call, [choice] * self.world_size)
        if color is None:
            return None
        members = sorted((key, rank) for rank, (its, key) in enumerate(choices) if its == color)
        return PipeBackend(self._pipes, [self.world_ranks[rank] for _, rank in members])

    def _send(self, array, destination, tag):
        message = Message(("message", self.group, int(tag)), array=np.array(array))
        self._pipes.send(self.world_ranks[destination], message)

    def _steps_receive(self, source, count, tag, dtype):
        world_rank = self.world_ranks[source]
        message = Messages(self._pipes, [world_rank], ("message", self.group, tag))
        yield message
        array = message.look()[0].array
        refuse_other_message(array.size, array.dtype, count, dtype, world_rank, tag)
        return message.take()[0].array


def _pieces(array, counts):
    """Return copies of the parts of ``array`` along dim 0, one for each rank."""
    return [np.array(part) for part in np.split(array, np.cumsum(counts)[:-1])]


def run_in_processes(world_size, body, *arguments, timeout=30.0):
    """Call ``body(backend, *arguments)`` on ``world_size`` new processes; return their results.

    ``body`` is a function of a module: each process imports it. The first failure is raised.
    """
    context = multiprocessing.get_context("spawn")  # available on every platform
    ends = [{} for _ in range(world_size)]
    for a, b in combinations(range(world_size), 2):
        ends[a][b], ends[b][a] = context.Pipe()
    processes = []
    for rank, connections in enumerate(ends):
        answer, its_end = context.Pipe(duplex=False)
        inputs = (rank, connections, its_end, timeout, body, arguments)
        process = context.Process(target=_run_rank, args=inputs, daemon=True)
        process.start()
        its_end.close()
        processes.append((process, answer))
    for connection in [end for connections in ends for end in connections.values()]:
        connection.close()  # so that a pipe ends when the process at its other end does
    results, errors = [], []
    for rank, (process, answer) in enumerate(processes):
        try:
            result, error = answer.recv()
        except EOFError:
            process.join()
            result, error = None, RuntimeError(f"rank {rank} ended with code {process.exitcode}")
        process.join()
        results.append(result)
        errors += [] if error is None else [error]
    for error in sorted(errors, key=lambda error: isinstance(error, PeerError)):
        raise error  # a PeerError is only a consequence, so it is sorted last
    return results


def _run_rank(rank, connections, answer, timeout, body, arguments):
    threadpoolctl.threadpool_limits(1)  # the ranks share the cores
    result = error = None
    try:
        pipes = Pipes(rank, connections, timeout)
        with PipeBackend(pipes, range(len(connections) + 1)) as backend:
            result = body(backend, *arguments)
    except Exception as caught:  # noqa: BLE001 - raised by the process that waits for this one
        caught.add_note(f"raised on rank {rank}:\n{traceback.format_exc()}")
        error = caught
    answer.send((result, error))


def train(backend):
    """Train a small sharded model; return all parameters on every rank."""
    x = np.random.default_rng(0).standard_normal((60, 8))
    mine = x[ms.ShardLayout(len(x), backend.world_size).slice(backend.rank)]
    model = ms.as_distributed(ms.nn.MLP([8, 32, 8], seed=0), backend, "fsdp")
    optimizer = ms.as_distributed(ms.optimizers.AdamW(1e-3), backend, "fsdp")
    for _ in range(20):
        optimizer.step(model, mine, mine)
    return model.gather_full_parameters()


def train_and_compare(backend):
    """Return True if threads of this process train to the same bits."""
    ours, threads = train(backend), ms.run_in_threads(backend.world_size, train)
    return ours.tobytes() == threads[backend.rank].tobytes()


def check_and_train(backend):
    CommunicationConformance().run(backend)
    return train_and_compare(backend)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-n", type=int, default=3, metavar="N", help="number of processes")
    n = parser.parse_args().n
    if n < 1:
        parser.error(f"argument -n: needs an integer >= 1, got {n}")
    print(f"{n} processes, {n * (n - 1) // 2} pipes")
    are_same = run_in_processes(n, check_and_train)
    print(f"passed, twice each: {' '.join(CommunicationConformance.names())}")
    if not all(are_same):
        raise SystemExit(f"FSDP, 20 steps: as on threads, by rank: {are_same}")
    print("FSDP, 20 steps: the same parameters as on threads, to the bit")


if __name__ == "__main__":
    main()
