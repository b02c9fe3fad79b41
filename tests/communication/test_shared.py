"""Memory that the ranks of a node share, and collectives that read it in place."""

import errno
import gc
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from mpishard import ReductionOperation, ShardLayout, run_in_threads
from mpishard.communication.contract.arena import PRIVATE, Allocations, Nodes, anonymous_memory
from mpishard.communication.contract.reduction import TreeReducer, complete_subtrees
from mpishard.communication.mpi import node_memory as arena
from mpishard.errors import CollectiveMismatchError
from mpishard.testing.reductions import ADVERSARIAL_VALUES, tree_reduce
from mpishard.testing.worlds import in_worlds

by_path = pytest.mark.parametrize("path", ["arena", "two nodes"], indirect=True)
LENGTHS = (1, 3, 40, 1001)


def numbers(rank, length, dtype):
    """Values whose order of addition shows in the bits."""
    order = np.random.default_rng([rank, length]).integers(0, len(ADVERSARIAL_VALUES), length)
    with np.errstate(over="ignore"):
        return np.array(ADVERSARIAL_VALUES)[order].astype(dtype)


def bits(array):
    """The bytes of ``array``, of which a NaN may have either sign."""
    return np.where(np.isnan(array), np.nan, array).astype(array.dtype).tobytes()


def own_slice(backend, length, dtype):
    """This rank's part of memory that its node shares."""
    shared = backend.allocate_shared(length * backend.world_size, dtype)
    return shared[backend.rank * length : (backend.rank + 1) * length]


@by_path
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@in_worlds(1, 2, 3, 4, 5, 7)
def test_shared_memory_gives_the_bits_of_messages(backend, path, dtype):
    layout_of = {n: ShardLayout(n, backend.world_size) for n in LENGTHS}
    for length in LENGTHS:
        mine, result = own_slice(backend, length, dtype), backend.allocate_shared(length, dtype)
        data = [numbers(rank, length, dtype) for rank in range(backend.world_size)]
        part = layout_of[length].slice(backend.rank)
        for operation in ReductionOperation:
            wanted = tree_reduce(data, operation)
            for _ in range(2):  # the second time over what the first has left
                mine[...] = data[backend.rank]
                assert bits(backend.reduce_scatter(mine, operation)) == bits(wanted[part])
                assert bits(backend.all_reduce(mine, operation, out=result)) == bits(wanted)
                private = backend.all_reduce(mine, operation, out=np.empty_like(mine))
                assert bits(private) == bits(wanted)
                assert mine.tobytes() == data[backend.rank].tobytes()
                backend.reduce_scatter(mine, operation, out=mine[part])
                assert bits(mine[part]) == bits(wanted[part])
                mine[...] = data[backend.rank]
                assert bits(backend.all_reduce(mine, operation)) == bits(wanted)
            backend.barrier()
            result[part] = 0
            backend.barrier()
            gathered = backend.all_gather(wanted[part].copy(), out=result)
            assert gathered.tobytes() == wanted.tobytes()
            backend.barrier()


@by_path
@in_worlds(2, 3, 4)
def test_several_reductions_at_once(backend, path):
    n = 2000
    shared = [own_slice(backend, n, np.float64) for _ in range(4)]
    for array in shared:
        array[...] = backend.rank + 1
    works = [backend.reduce_scatter_async(array) for array in shared]
    total = backend.world_size * (backend.world_size + 1) / 2
    for work in reversed(works):
        assert (work.wait() == total).all()


@pytest.mark.parametrize("path", ["two nodes"], indirect=True)
@in_worlds(2, 3, 4)
def test_long_pieces_travel_between_nodes_in_rounds(backend, path, monkeypatch):
    monkeypatch.setattr("mpishard.communication.mpi.messages.MessageChannel.ROUND_BYTES", 400)
    length = 1003
    mine, result = own_slice(backend, length, np.float64), backend.allocate_shared(length, float)
    part = ShardLayout(length, backend.world_size).slice(backend.rank)
    mine[...] = np.arange(length) * (backend.rank + 1)
    wanted = np.arange(length) * backend.world_size * (backend.world_size + 1) / 2
    assert (backend.reduce_scatter(mine) == wanted[part]).all()
    assert (backend.all_reduce(mine, out=result) == wanted).all()
    assert (backend.all_gather(wanted[part].copy(), out=result) == wanted).all()
    assert (backend.all_reduce(mine) == wanted).all()


@by_path
@in_worlds(2, 3, 5)
def test_a_shared_array_exists_once_on_each_node(backend, path):
    shared = backend.allocate_shared(1000, np.int64)
    assert not shared.any()
    backend.barrier()
    assert shared.ctypes.data % 4096 == 0
    shared[backend.rank] = backend.rank + 1
    backend.barrier()
    seen = [rank for rank in range(backend.world_size) if shared[rank] == rank + 1]
    assert tuple(seen) == backend.peers
    assert len(backend.peers) == backend.nodes.count(backend.nodes[backend.rank])
    assert backend.peers[backend.local_rank] == backend.rank
    assert backend.node_count == (2 if path == "two nodes" else 1)


@by_path
@in_worlds(2, 4, 5)
def test_data_that_are_read_in_place_are_not_sent(backend, path):
    length, width = 4000, 8
    mine, result = own_slice(backend, length, np.float64), backend.allocate_shared(length, float)
    layout, nodes = ShardLayout(length, backend.world_size), Nodes(backend.nodes, backend.rank)
    part = layout.size(backend.rank)
    for call in (
        lambda: backend.reduce_scatter(mine),
        lambda: backend.all_reduce(mine, out=result),
        lambda: backend.all_gather(mine[:part], out=result),
    ):
        backend.traffic.reset()
        call()
        sent, read = backend.traffic.bytes_sent, backend.traffic.bytes_read
        if path == "arena":
            assert backend.traffic.total_bytes == 0
        subtrees = len(complete_subtrees(backend.peers, backend.world_size))
        clients = sum(layout.size(rank) for rank in nodes.clients)
        assert sent["reduce_scatter"] in (0, width * clients * subtrees)
        assert sent["all_gather"] in (0, width * part * (backend.node_count - 1))
        assert read["reduce_scatter"] in (0, width * part * (len(backend.peers) - 1))
    # Every piece of every node comes to each of the others once.
    backend.traffic.reset()
    backend.all_gather(mine[:part], out=result)
    sent = backend.all_reduce(np.array([backend.traffic.bytes_sent["all_gather"]]))[0]
    assert sent == length * width * (backend.node_count - 1)


@in_worlds(2, 3)
def test_arrays_of_several_allocations_are_sent(backend):
    shared = own_slice(backend, 1000, np.float64)
    shared[...] = 1
    array = shared if backend.rank == 0 else shared.copy()
    assert (backend.reduce_scatter(array) == backend.world_size).all()
    assert (backend.all_reduce(array) == backend.world_size).all()


@pytest.mark.mpi
def test_results_that_overlap_arrays_of_other_ranks_are_refused(backend):
    shared = backend.allocate_shared(2000 * backend.world_size, np.float64)
    mine = shared[2000 * backend.rank :][:2000]
    mine[...] = 1
    part = ShardLayout(2000, backend.world_size).slice(backend.rank)
    length = part.stop - part.start
    askew = part.start + (1 if backend.rank == 0 else -1)
    for _ in range(2):
        with pytest.raises(ValueError, match="out of rank 0 overlaps the array of rank"):
            backend.all_reduce(mine, out=shared[1000:3000])
        with pytest.raises(ValueError, match="overlaps the array of rank"):
            backend.reduce_scatter(mine, out=mine[askew : askew + length])
    assert (mine == 1).all()
    backend.barrier()
    backend.all_reduce(mine)
    assert (mine == backend.world_size).all()


@in_worlds(2)
def test_lengths_and_dtypes_must_agree(backend):
    with pytest.raises(CollectiveMismatchError, match="shape"):
        backend.allocate_shared(100 + backend.rank, np.float64)
    with pytest.raises(CollectiveMismatchError, match="dtype"):
        backend.allocate_shared(100, [np.float64, np.float32][backend.rank])
    with pytest.raises(ValueError, match="1 or more, got 0"):
        backend.allocate_shared(0, np.float64)
    with pytest.raises(ValueError, match="cannot share dtype"):
        backend.allocate_shared(10, "datetime64[s]")


@in_worlds(1, 2)
def test_allocate_shared_returns_none_without_shared_memory(backend, messages_only):
    assert backend.allocate_shared(100, np.float64) is None
    assert backend.all_reduce(np.ones(100))[0] == backend.world_size


@pytest.mark.mpi
def test_ranks_of_a_node_share_memory(backend):
    handles = len(list(Path("/proc/self/fd").iterdir()))
    shared = backend.allocate_shared(300_000, np.float32)
    assert not shared.any()
    backend.barrier()
    shared[backend.rank :: backend.world_size] = backend.rank
    backend.barrier()
    assert shared[:-1:7].tolist() == (np.arange(300_000) % backend.world_size)[:-1:7].tolist()
    backend.barrier()
    assert not list(Path("/dev/shm").glob("mpishard*"))
    for _ in range(20):
        another = backend.allocate_shared(10, np.float32)
        assert another is not None
        del another
    del shared
    gc.collect()
    # The watchdog's thread opens a file now and then, for a moment.
    assert any(len(list(Path("/proc/self/fd").iterdir())) <= handles for _ in range(1000))


@pytest.mark.mpi
def test_no_rank_uses_memory_that_one_rank_cannot_map(backend, monkeypatch):
    if backend.rank == backend.world_size - 1:

        def refuse(*_: object) -> None:
            raise OSError(errno.EPERM, "not here")

        monkeypatch.setattr(arena.mmap, "mmap", refuse)
    assert backend.allocate_shared(1000, np.float64) is None


@pytest.mark.mpi
@pytest.mark.parametrize("code", [errno.EMFILE, errno.EPERM])
def test_messages_are_used_if_descriptors_or_memory_run_out(backend, monkeypatch, code, caplog):
    def refuse(*_: object) -> None:
        raise OSError(code, "nothing left")

    last = backend.world_size - 1
    if backend.rank == last:
        monkeypatch.setattr(arena.mmap, "mmap", refuse)
    memory = backend.allocate_shared(1000, np.float64)
    assert memory is None
    is_logged = "ulimit -n" in caplog.text
    assert is_logged == (backend.rank == last and code == errno.EMFILE)
    assert (backend.all_reduce(np.ones(1000)) == backend.world_size).all()


@pytest.mark.parametrize("name", ["MPISHARD_ARENA", "MPISHARD_VIRTUAL_NODES"])
def test_settings_without_meaning_are_refused(name, monkeypatch):
    monkeypatch.setenv(name, "0")
    with pytest.raises(ValueError, match=f"{name} must be"):
        run_in_threads(1, lambda backend: None)


# --------------------------------------------------------------------------------------- the parts


def test_an_allocation_is_known_until_its_last_array_is_gone():
    allocations = Allocations()
    assert allocations.count == 0
    memory = anonymous_memory(4096)
    allocations.add(memory)
    array = memory[64:128].view(np.float64)
    assert allocations.locate(array) == (0, 64)
    assert allocations.locate(np.ones(3)) == PRIVATE
    assert allocations.locate(memory) == (0, 0)
    again = allocations.view((0, 64), array)
    again[0] = 5
    assert array[0] == 5
    del memory, again
    assert allocations.locate(array) == (0, 64)
    del array
    gc.collect()
    assert allocations.locate(np.ones(3)) == PRIVATE
    assert not allocations._allocations
    allocations.add(anonymous_memory(10))
    assert allocations.count == 2, (
        "numbers are not used again: ranks collect garbage at other times"
    )


def test_allocations_may_be_collected_during_a_look_up():
    """The collector may run at any allocation of memory in `locate`."""
    for after in range(1, 40):
        look_while_garbage_is_collected(after)


def look_while_garbage_is_collected(after):
    allocations, kept, thresholds = Allocations(), [], gc.get_threshold()
    gc.disable()
    try:
        for number in range(40):
            memory = np.zeros(64, np.uint8)
            allocations.add(memory)
            kept.append(memory)
            if number % 2:
                cycle = [kept.pop()]
                cycle.append(cycle)
        del memory, cycle
        gc.set_threshold(gc.get_count()[0] + after, 1, 1)
        gc.enable()
        assert allocations.locate(np.zeros(5)) == PRIVATE
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()
    assert allocations.locate(kept[-1])[1] == 0


def test_allocations_may_be_freed_by_another_thread_during_a_look_up():
    allocations, array = Allocations(), np.ones(3)
    stop = threading.Event()

    def come_and_go():
        while not stop.is_set():
            allocations.add(anonymous_memory(100))

    thread = threading.Thread(target=come_and_go)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(20000):
            assert allocations.locate(array) == PRIVATE
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_complex_products_do_not_depend_on_length(dtype):
    generator = np.random.default_rng(0)
    arrays = [(generator.standard_normal((200, 2)) @ [1, 1j]).astype(dtype) for _ in range(5)]
    reducer, whole = TreeReducer(), np.empty(200, dtype)
    reducer.reduce(arrays, ReductionOperation.PRODUCT, whole)
    for i in range(200):
        one = np.empty(1, dtype)
        reducer.reduce([a[i : i + 1] for a in arrays], ReductionOperation.PRODUCT, one)
        assert one.tobytes() == whole[i : i + 1].tobytes()


def test_agents_and_clients_of_each_rank():
    nodes = [Nodes((0, 0, 1, 1, 1), rank) for rank in range(5)]
    assert [n.own for n in nodes] == [0, 0, 1, 1, 1]
    assert [n.clients for n in nodes] == [[2, 4], [3], [0], [1], []]
    for other in range(5):
        for node in (0, 1):
            agent = nodes[0].agent(other, node)
            assert nodes[agent].own == node
            assert other == agent or other in nodes[agent].clients
    assert nodes[0].subtrees(0) == ((0, 1),)
    assert len(nodes[2].subtrees(1)) == 2  # ranks 2, 3 and rank 4


def test_nodes_whose_arrays_and_results_are_shared():
    def arrays_are_shared(locations, numbers):
        return Nodes(tuple(numbers), 0).arrays_are_shared([(own, PRIVATE) for own in locations])

    def results_are_shared(locations, numbers):
        return Nodes(tuple(numbers), 0).results_are_shared([(PRIVATE, out) for out in locations])

    assert arrays_are_shared([(0, 0), (0, 64), (3, 0)], [0, 0, 1])
    assert not arrays_are_shared([(0, 0), (1, 64), (3, 0)], [0, 0, 1])
    assert not arrays_are_shared([(0, 0), PRIVATE], [0, 0])
    assert not arrays_are_shared([(0, 0), (0, 0)], [0, 1]), "alone on a node, nothing is gained"
    assert results_are_shared([(0, 8), (0, 8), (0, 16)], [0, 0, 1])
    assert not results_are_shared([(0, 8), (0, 16)], [0, 0])
    assert not results_are_shared([PRIVATE, PRIVATE], [0, 0])


def test_sums_of_subtrees_are_sums_of_the_tree():
    for count in range(1, 20):
        require_sums_of_the_tree(count)


def require_sums_of_the_tree(count):
    generator = np.random.default_rng(count)
    arrays = [
        generator.standard_normal(50) * 10.0 ** generator.integers(-8, 8) for _ in range(count)
    ]
    wanted = tree_reduce(arrays, ReductionOperation.AVERAGE)
    reducer = TreeReducer()
    for _ in range(20):
        owner = generator.integers(0, 3, count)
        parts = {}
        for node in range(3):
            slots = [slot for slot in range(count) if owner[slot] == node]
            for first, level in complete_subtrees(slots, count):
                under = [s for s in range(first, first + (1 << level)) if s < count]
                assert set(under) <= set(slots)
                out = np.empty(50)
                reducer.reduce([arrays[s] for s in under], ReductionOperation.SUM, out)
                parts[first, level] = out
        result = np.empty(50)
        reducer.reduce_subtrees(parts, count, ReductionOperation.AVERAGE, result)
        assert result.tobytes() == wanted.tobytes()


def test_an_aligned_node_sends_one_sum():
    for first, size in ((0, 1), (4, 4), (8, 8), (6, 2)):
        assert len(complete_subtrees(range(first, first + size), 16)) == 1


@in_worlds(1, 2, 3, 4)
def test_an_arena_has_a_vector_for_each_rank_of_a_node(backend):
    arena = backend.allocate_arena(1003, np.float64)
    for number in range(2):
        arena.mine[:] = np.arange(1003) * (backend.rank + 1) + number
        arena.fence().wait()
        for rank in backend.peers:
            assert (arena.of(rank) == np.arange(1003) * (rank + 1) + number).all()
        total = np.arange(1003) * sum(range(1, backend.world_size + 1))
        total = total + number * backend.world_size
        part = slice(100, 901)
        mine = ShardLayout(801, backend.world_size).slice(backend.rank)
        piece = np.empty(mine.stop - mine.start)
        arena.reduce_into(piece, part).wait()
        assert (piece == total[part][mine]).all()
        arena.part(100, 801).reduce_into(arena.mine[part][mine]).wait()
        assert (arena.mine[part][mine] == total[part][mine]).all()
        backend.traffic.reset()
        arena.fence().wait()
        assert backend.traffic.total_bytes == 0, "on a node nothing is sent"


@pytest.mark.parametrize(("length", "times"), [(16, 3000), (8000, 300)])
@in_worlds(2, 3, 4)
def test_no_rank_sees_partial_sums_in_a_shared_result(backend, length, times):
    """Every rank may write the result there: none may see the sums on the way to an average.

    Most often with two ranks, which read each other's rows; more ranks than cores are slow.
    """
    memory = backend.allocate_shared(length, np.float64)
    if memory is None:
        pytest.skip("no shared memory")
    own = np.full(length, 1.0 + backend.rank)
    expected = (1 + backend.world_size) / 2
    for _ in range(times if backend.world_size == 2 else times // 5):
        backend.all_reduce(own, ReductionOperation.AVERAGE, out=memory)
        assert (memory == expected).all()
