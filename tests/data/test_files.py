"""Data on disk: read in runs, ahead, on a thread; the bits and the order of arrays in memory."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpishard as ms
from mpishard.data import Batches, Column, GlobalBatchSampler, LocalBatchSampler, take
from mpishard.errors import PeerError
from mpishard.testing.worlds import in_worlds

SAMPLES, BATCH, EPOCHS, BLOCK = 101, 8, 2, 5
X = np.random.default_rng(0).standard_normal((SAMPLES, 5))
Y = np.sin(X[:, :2])


class Recorded:
    """A data set that is no array: it records its reads, and can fail at a given one."""

    filename = "samples.bin"

    def __init__(self, array, fails_at=None):
        self.array, self.shape, self.fails_at = array, array.shape, fails_at
        self.runs, self.read, self.threads = 0, np.zeros(len(array), int), set()

    def __len__(self):
        return len(self.array)

    def __getitem__(self, indices):
        self.threads.add(threading.current_thread().name)
        self.runs += 1 if isinstance(indices, slice) else len(indices)
        self.read[indices] += 1
        if self.fails_at is not None and self.read[self.fails_at]:
            raise OSError("the disk is gone")
        return self.array[indices]


def train(backend, x=X, y=Y, **options):
    model = ms.as_distributed(ms.nn.MLP([5, 7, 2], seed=1, dtype="float64"), backend, "fsdp")
    optimizer = ms.as_distributed(ms.optimizers.SGD(0.01), backend, "fsdp")
    chosen = {"batch_size": BATCH, "epochs": EPOCHS, "seed": 3, "shuffle_block_size": BLOCK}
    data = ms.OptimizationInputData(
        model=model, x_train=x, y_train=y, progress=False, **(chosen | options)
    )
    optimizer.optimize(data)
    return model.get_parameters()


# ------------------------------------------------------------------------------------- the order


def test_the_order_of_a_shuffle_in_blocks_is_pinned():
    """A resumed run must continue in its first order under every version."""
    sampler = GlobalBatchSampler(23, 4, seed=3, shuffle_block_size=2)
    order = np.concatenate([sampler.batch(1, index) for index in range(6)])
    assert order.tolist() == PINNED


PINNED = [7, 13, 19, 5, 11, 16, 22, 2, 10, 17, 18, 4, 6, 14, 1, 3, 9, 12, 20, 21, 8, 15, 0]


@given(
    length=st.integers(1, 90),
    batch=st.integers(1, 20),
    block=st.integers(1, 30),
    world=st.integers(1, 5),
)
def test_every_sample_is_seen_once_in_any_world(length, batch, block, world):
    sampler = GlobalBatchSampler(length, batch, seed=1, shuffle_block_size=block)
    order = []
    for index in range(sampler.batches_per_epoch):
        parts = [sampler.local(2, index, rank, world)[0] for rank in range(world)]
        assert np.concatenate(parts).tolist() == sampler.batch(2, index).tolist()
        order.extend(sampler.batch(2, index).tolist())
    assert sorted(order) == list(range(length))
    local = LocalBatchSampler([length, length + 3], max(2, batch), shuffle_block_size=block)
    own = [local.local(0, i, 1, 2)[0].tolist() for i in range(local.batches_per_epoch)]
    assert sorted(itertools.chain(*own)) == list(range(length + 3))


def test_a_batch_has_samples_of_many_blocks_and_a_rank_reads_runs():
    sampler = GlobalBatchSampler(64 * 64, 64, seed=0, shuffle_block_size=64)
    assert sampler.window == 16
    blocks = [len(np.unique(sampler.batch(0, index) // 64)) for index in range(64)]
    assert min(blocks) == 16
    mine = [sampler.local(0, index, 1, 4)[0] for index in range(16)]
    assert len(np.unique(np.concatenate(mine) // 64)) == 4  # whole blocks: its own quarter
    # Two epochs mix other blocks, and in other orders.
    assert set(sampler.batch(0, 0) // 64) != set(sampler.batch(1, 0) // 64)


def test_a_shuffle_in_blocks_needs_a_shuffle_and_a_size(tmp_path):
    for options, message in (
        ({"shuffle": False, "shuffle_block_size": 4}, "needs shuffle=True"),
        ({"shuffle_block_size": 0}, "shuffle_block_size must be 1 or more, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            ms.OptimizationInputData(model=1, x_train=X, y_train=Y, **options).checked()
    with pytest.raises(ValueError, match="shuffle_block_size must be 1"):
        GlobalBatchSampler(4, 2, shuffle_block_size=-1)
    # No array of the block's size is made.
    whole = GlobalBatchSampler(5, 5, shuffle_block_size=10**12)
    assert sorted(whole.batch(0, 0)) == list(range(5))


# ------------------------------------------------------------------------------- reading of files


def test_a_thread_reads_a_rank_s_own_samples_once_in_runs():
    def main(backend):
        x = Recorded(X)
        parameters = train(backend, x, epochs=1)
        sampler = GlobalBatchSampler(SAMPLES, BATCH, seed=3, shuffle_block_size=BLOCK)
        mine = np.zeros(SAMPLES, int)
        for index in range(sampler.batches_per_epoch):
            mine[sampler.local(0, index, backend.rank, backend.world_size)[0]] += 1
        mine[0] += 1  # looked at before training, too
        assert x.read.tolist() == mine.tolist()
        assert x.runs < x.read.sum() / 2
        return parameters.tobytes(), x.threads

    found = ms.run_in_threads(3, main)
    expected = ms.run_in_threads(3, lambda backend: train(backend, epochs=1).tobytes())
    assert [parameters for parameters, _ in found] == expected
    assert all(any("mpishard-reading" in name for name in names) for _, names in found)
    assert not [t for t in threading.enumerate() if "mpishard-reading" in t.name]


def stored(kind, folder):
    if kind == "memmap":
        np.save(folder / "x.npy", X)
        return np.load(folder / "x.npy", mmap_mode="r")
    if kind == "hdf5":
        h5py = pytest.importorskip("h5py")
        file = h5py.File(folder / "x.h5", "w")
        return file.create_dataset("x", data=X, chunks=(BLOCK, 5))
    if kind == "zarr":
        zarr = pytest.importorskip("zarr")
        return zarr.create_array(str(folder / "x.zarr"), data=X, chunks=(BLOCK, 5))
    if kind == "rows":
        return Column(Rows(), "x")
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({f"c{i}": X[:, i] for i in range(5)})
    parquet.write_table(table[:40], folder / "a.parquet", row_group_size=BLOCK)
    parquet.write_table(table[40:], folder / "b.parquet", row_group_size=BLOCK)
    return ms.data.ParquetColumns(folder, [f"c{i}" for i in range(5)])


class Rows:
    """Rows by name, as in a Hugging Face data set."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, indices):
        return {"x": X[indices]}


@pytest.mark.parametrize("kind", ["memmap", "hdf5", "zarr", "parquet", "rows"])
@pytest.mark.parametrize("block", [None, BLOCK])
def test_files_give_the_bits_of_the_array_in_memory(kind, block, tmp_path):
    x = stored(kind, tmp_path)
    assert take(x, np.array([7, 3, 3])).tolist() == X[[7, 3, 3]].tolist()

    def main(backend):
        given = {"shuffle_block_size": block, "x_validation": x, "y_validation": Y, "epochs": 1}
        return train(backend, x, **given).tobytes()

    expected = ms.run_in_threads(
        2, lambda backend: train(backend, shuffle_block_size=block, epochs=1).tobytes()
    )
    assert ms.run_in_threads(2, main) == expected


@in_worlds(2, 3)
def test_resumes_in_a_window_with_another_number_of_ranks(backend, shared_path):
    """Step 4 is in the middle of a window; ranks 1 and up wait for rank 0's run of one rank."""
    folder = shared_path / "run"
    expected = train(backend, Recorded(X))
    if backend.rank == 0:
        ms.run_in_threads(1, train, Recorded(X), checkpoint=folder, max_steps=4)
    backend.barrier()
    assert np.abs(train(backend, Recorded(X), checkpoint=folder) - expected).max() < 1e-12
    with pytest.raises(ValueError, match="shuffle_block_size was 5 and is None"):
        train(backend, Recorded(X), checkpoint=folder, shuffle_block_size=None, epochs=9)


def test_a_read_that_fails_on_one_rank_names_the_file_and_ends_all():
    order = GlobalBatchSampler(SAMPLES, BATCH, seed=3, shuffle_block_size=BLOCK)
    others = []

    def main(backend):
        x = Recorded(X, fails_at=order.local(0, 9, 0, 2)[0][0] if backend.rank == 0 else None)
        try:
            train(backend, x)
        except PeerError as error:
            others.append(str(error))
            raise

    with pytest.raises(OSError, match="the disk is gone") as caught:
        ms.run_in_threads(2, main)
    note = caught.value.__notes__[0]
    assert note.startswith("while reading samples ")
    assert "of x_train (Recorded of samples.bin) for step 1" in note
    (other,) = others
    assert note in other
    assert not [t for t in threading.enumerate() if "mpishard-reading" in t.name]


def test_a_file_that_is_closed_too_early_says_which_samples_were_missing(tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        x = file.create_dataset("x", data=X)
    with (
        Batches(x, None, GlobalBatchSampler(SAMPLES, BATCH), 0, 1, steps=range(9)) as batches,
        pytest.raises((OSError, RuntimeError), match="identifier is not") as caught,
    ):
        next(iter(batches))
    assert caught.value.__notes__[0].endswith("of x_train (Dataset) for step 1")


def test_a_data_set_that_returns_too_little_is_refused():
    class Short(Recorded):
        def __getitem__(self, indices):
            return super().__getitem__(indices)[:3]

    with pytest.raises(ValueError, match=r"asked for 8 samples, 10 to 17, .* shape \(3, 5\)"):
        take(Short(X), np.arange(10, 18))


def test_a_caller_who_leaves_early_ends_the_thread():
    x = Recorded(X)
    with Batches(x, None, GlobalBatchSampler(SAMPLES, BATCH), 0, 1, steps=range(9)) as batches:
        batch = next(iter(batches))
        batches.await_read()
        assert batch.y is None
        assert batch.x.tobytes() == X[batch.indices].tobytes()
    assert x.read.sum() == 2 * BATCH
    assert not [t for t in threading.enumerate() if "mpishard-reading" in t.name]


@in_worlds(1, 2)
def test_a_loss_without_targets_needs_no_y_train(backend):
    """fun(theta, x, None): the mean of the samples."""

    def fun(theta, x, y):
        assert y is None
        error = theta - x
        return float((error**2).mean(axis=0).sum()), 2 * error.mean(axis=0)

    model = ms.as_distributed(ms.FunctionModel(fun, np.zeros(5)), backend, "ddp")
    optimizer = ms.as_distributed(ms.optimizers.SGD(0.5), backend, "ddp")
    data = {"x_train": Recorded(X), "x_validation": X, "batch_size": SAMPLES, "progress": False}
    result = optimizer.optimize(ms.OptimizationInputData(model=model, **data))
    assert np.allclose(model.get_parameters(), X.mean(axis=0), atol=1e-12)
    assert result.validation_history[-1][1] == pytest.approx(X.var(axis=0).sum())
    with pytest.raises(TypeError, match=r"MSE needs targets, and y .y_train. is None"):
        train(backend, y=None)


# ---------------------------------------------------------------------------------------- tables


def test_errors_of_parquet_files_name_what_is_missing(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "t.parquet"
    ragged = pyarrow.array([[1.0, 2.0], [3.0]])
    columns = {"a": [1.0, None], "v": [[1, 2], [3, 4]], "r": ragged, "f": [1, 2]}
    parquet.write_table(pyarrow.table(columns), path)
    read = ms.data.ParquetColumns
    assert read(path, "v")[1:].tolist() == [[3, 4]]
    assert read([path, str(path)], "v").shape == (4, 2)
    assert read(path, "v").row_group_size == 2
    with pytest.raises(KeyError, match=r"has no column 'b', but .*'a', 'v', 'r', 'f'"):
        read(path, ["v", "b"])
    with pytest.raises(ValueError, match=r"'a' of .*t.parquet has missing values"):
        read(path, "a")
    with pytest.raises(ValueError, match="lists of different lengths"):
        read(path, "r")
    with pytest.raises(FileNotFoundError, match=r"no \*.parquet file"):
        (tmp_path / "empty").mkdir() or read(tmp_path / "empty", "a")
    (tmp_path / "other").write_bytes(b"text, much longer than a footer")
    with pytest.raises(ValueError, match="other is no Parquet file: "):
        read(tmp_path / "other", "a")
    with pytest.raises(IndexError, match="rows 2 to 2 of 2"):
        read(path, "v")[np.array([2])]
    with pytest.raises(TypeError, match="chosen by integers, got an array of bool"):
        read(path, "v")[np.array([False, True])]
    with pytest.raises(ValueError, match=r"different shapes: \[\(\), \(2,\)\]"):
        read(path, ["v", "f"])
    with pytest.raises(ValueError, match="must name a column or more"):
        read(path, [])
    with pytest.raises(FileNotFoundError):
        read([], "v")


def test_parquet_columns_are_numbers_or_lists_of_numbers(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "t.parquet"
    large = pyarrow.array([[1.0, 2.0], [3.0, 4.0]], pyarrow.large_list(pyarrow.float64()))
    columns = {"l": large, "t": ["x", "y"], "n": [[1, None], [2, 3]], "d": [[[1]], [[2]]]}
    parquet.write_table(pyarrow.table(columns), path)
    read = ms.data.ParquetColumns
    assert read(path, "l")[:].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    with pytest.raises(ValueError, match=r"'n' of .* has missing values"):
        read(path, "n")
    for name, kind in (("t", "string"), ("d", "list<")):
        with pytest.raises(ValueError, match=f"'{name}' of .* holds {kind}.*, not numbers"):
            read(path, name)


def test_parquet_files_of_other_types(tmp_path):
    """Files without rows, of any type; wider and narrower numbers; longer lists."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def write(number, values, kind):
        table = pyarrow.table({"v": pyarrow.array(values, kind)})
        parquet.write_table(table, tmp_path / f"{number}.parquet")

    pairs = pyarrow.list_(pyarrow.float64())
    read = ms.data.ParquetColumns
    write(0, [], pyarrow.null())
    write(1, [[1, 2]], pairs)
    write(2, [], pairs)
    write(3, [[3, 4]], pyarrow.large_list(pyarrow.float32()))
    assert read(tmp_path, "v")[:].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    write(4, [[5, 6, 7]], pairs)
    with pytest.raises(ValueError, match=r"lists of different lengths: .* \(2,\) and \(3,\)"):
        read(tmp_path, "v")[:]
    paths = iter([tmp_path / "5.parquet", tmp_path / "6.parquet"])
    write(5, [1, 2], pyarrow.int64())
    write(6, [0.5], pyarrow.float64())  # would be 0 as an integer
    with pytest.raises(ValueError, match=r"6.parquet are double, which int64 of the files before"):
        read(paths, "v")


def test_a_column_that_is_not_there_is_refused():
    with pytest.raises(KeyError, match="no column 'z'; there are x"):
        Column(Rows(), "z")
