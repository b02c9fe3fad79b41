"""Memory that the ranks of a node share, and collectives that read it in place."""

import errno
import gc
from pathlib import Path

import numpy as np
import pytest

from mpishard import ReductionOperation, ShardLayout, run_in_threads
from mpishard.communication.contract.arena import Nodes
from mpishard.communication.contract.reduction import TreeReducer, complete_subtrees
from mpishard.communication.mpi import node_memory
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


def part_of(backend, length):
    """The indices of this rank's piece."""
    return ShardLayout(length, backend.world_size).slice(backend.rank)


@by_path
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@in_worlds(1, 2, 3, 4, 5, 7)
def test_an_arena_gives_the_bits_of_messages(backend, path, dtype):
    for length in LENGTHS:
        arena = backend.allocate_arena(length, dtype)
        common = backend.allocate_arena(length, dtype, once_per_node=True)
        data = [numbers(rank, length, dtype) for rank in range(backend.world_size)]
        part, mine = part_of(backend, length), arena.mine
        wanted = tree_reduce(data, ReductionOperation.SUM)
        for _ in range(2):  # the second time over what the first has left
            mine[...] = data[backend.rank]
            out = arena.reduce_into(np.empty_like(wanted[part])).wait()
            assert bits(out) == bits(wanted[part])
            assert mine.tobytes() == data[backend.rank].tobytes()
            arena.reduce_into(mine[part]).wait()
            assert bits(mine[part]) == bits(wanted[part])
            mine[...] = data[backend.rank]
            arena.reduce_in_place().wait()
            assert bits(mine) == bits(wanted)
            for gathered in (arena, common):
                gathered.mine[part] = 0
                backend.barrier()
                gathered.gather_in_place(wanted[part].copy()).wait()
                assert gathered.mine.tobytes() == wanted.tobytes()
            backend.barrier()


@by_path
@in_worlds(2, 3, 4)
def test_several_reductions_at_once(backend, path):
    arenas = [backend.allocate_arena(2000, np.float64) for _ in range(4)]
    works = []
    for arena in arenas:
        arena.mine[...] = backend.rank + 1
        out = np.empty(part_of(backend, 2000).stop - part_of(backend, 2000).start)
        works.append(arena.reduce_into(out))
    total = backend.world_size * (backend.world_size + 1) / 2
    for work in reversed(works):
        assert (work.wait() == total).all()


@pytest.mark.parametrize("path", ["two nodes"], indirect=True)
@in_worlds(2, 3, 4)
def test_long_pieces_travel_between_nodes_in_rounds(backend, path, monkeypatch):
    monkeypatch.setattr("mpishard.communication.mpi.messages.MessageChannel.ROUND_BYTES", 400)
    length = 1003
    arena = backend.allocate_arena(length, np.float64)
    common = backend.allocate_arena(length, np.float64, once_per_node=True)
    part = part_of(backend, length)
    arena.mine[...] = np.arange(length) * (backend.rank + 1)
    wanted = np.arange(length) * backend.world_size * (backend.world_size + 1) / 2
    assert (arena.reduce_into(wanted[part].copy()).wait() == wanted[part]).all()
    assert (arena.reduce_in_place().wait() == wanted).all()
    assert (common.gather_in_place(wanted[part].copy()).wait() == wanted).all()


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
    arena = backend.allocate_arena(length, np.float64)
    common = backend.allocate_arena(length, np.float64, once_per_node=True)
    layout, nodes = ShardLayout(length, backend.world_size), Nodes(backend.nodes, backend.rank)
    part, out = layout.size(backend.rank), np.empty(layout.size(backend.rank))
    is_shared = backend.node_count < backend.world_size
    subtrees = len(complete_subtrees(backend.peers, backend.world_size))
    reduced = width * sum(layout.size(rank) for rank in nodes.clients) * subtrees
    gathered, read = width * part * (backend.node_count - 1), width * part
    expected = {
        "reduce_into": ({"reduce_scatter": reduced}, read * (len(backend.peers) - 1)),
        "reduce_in_place": ({"reduce_scatter": reduced, "all_gather": gathered},
                            read * (len(backend.peers) - 1)),
        "gather_in_place": ({"all_gather": gathered}, 0),
    }  # fmt: skip
    for name, call in (
        ("reduce_into", lambda: arena.reduce_into(out)),
        ("reduce_in_place", arena.reduce_in_place),
        ("gather_in_place", lambda: common.gather_in_place(out)),
    ):
        backend.traffic.reset()
        call().wait()
        sent, read_bytes = expected[name]
        if is_shared:
            assert dict(backend.traffic.bytes_sent) == sent
            assert backend.traffic.bytes_read.get("reduce_scatter", 0) == read_bytes
        if path == "arena":
            assert backend.traffic.total_bytes == 0
    # Every piece of every node comes to each of the others once.
    sent = backend.all_reduce(np.array([backend.traffic.bytes_sent["all_gather"]]))[0]
    assert sent == length * width * (backend.node_count - 1)


@in_worlds(2, 3)
def test_wrong_arguments_of_an_arenas_collectives_are_refused(backend):
    """By each rank alone, before anything is communicated."""
    arena = backend.allocate_arena(100, np.float64)
    common = backend.allocate_arena(100, np.float64, once_per_node=True)
    part = part_of(backend, 50)
    size, other = part.stop - part.start, (backend.rank + 1) % backend.world_size
    right, used = np.ones(size), "which all ranks of the node use"
    for message, call in (
        ("out has shape", lambda: arena.reduce_into(np.ones(size + 1), slice(50))),
        ("and dtype float32, expected", lambda: arena.reduce_into(right.astype("f4"), slice(50))),
        ("without a step", lambda: arena.reduce_into(right, slice(0, 100, 2))),
        (f"out overlaps the vector of rank {other}, {used}",
         lambda: arena.reduce_into(arena.of(other)[part], slice(50))),
        (f"out overlaps the vector of rank {backend.rank}, {used}",
         lambda: arena.reduce_into(arena.mine[26 - size // 2 :][:size], slice(50))),
        ("reduce_into sums a vector of each rank", lambda: common.reduce_into(right, slice(50))),
        ("reduce_in_place sums a vector of each rank", common.reduce_in_place),
        ("rank's piece has shape", lambda: common.gather_in_place(np.ones(size + 1), slice(50))),
        (f"the piece overlaps the vector of rank [0-9], {used}",
         lambda: common.gather_in_place(common.mine[1 + part.start :][:size], slice(50))),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()
    # Outside of the part no rank reads or writes.
    arena.mine[...] = 1
    arena.reduce_into(arena.mine[60 : 60 + size], slice(50)).wait()
    assert (arena.mine[60 : 60 + size] == backend.world_size).all()


@by_path
@in_worlds(2, 3)
def test_shared_memory_is_an_ordinary_array_to_other_collectives(backend, path):
    shared = backend.allocate_shared(1000 * backend.world_size, np.float64)
    mine = shared[1000 * backend.rank :][:1000]
    for array in (mine, mine if backend.rank == 0 else np.empty(1000)):
        array[...] = 1
        assert (backend.reduce_scatter(array) == backend.world_size).all()
        assert (backend.all_reduce(array) == backend.world_size).all()


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

        monkeypatch.setattr(node_memory.mmap, "mmap", refuse)
    assert backend.allocate_shared(1000, np.float64) is None


@pytest.mark.mpi
@pytest.mark.parametrize("code", [errno.EMFILE, errno.EPERM])
def test_messages_are_used_if_descriptors_or_memory_run_out(backend, monkeypatch, code, caplog):
    def refuse(*_: object) -> None:
        raise OSError(code, "nothing left")

    last = backend.world_size - 1
    if backend.rank == last:
        monkeypatch.setattr(node_memory.mmap, "mmap", refuse)
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
