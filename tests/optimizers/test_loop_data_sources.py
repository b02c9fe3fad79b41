"""Training from files: each rank reads its own rows, and nothing else is loaded."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import mpishard as ms
from mpishard.data import GlobalBatchSampler
from mpishard.testing.worlds import in_worlds

SAMPLES, BATCH, EPOCHS = 30, 8, 2
generator = np.random.default_rng(0)
X = generator.standard_normal((SAMPLES, 5))
Y = np.sin(X[:, :2])


@pytest.fixture
def file(tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"], file["y"], file["none"], file["single"] = X, Y, X[:0], 3.0
    with h5py.File(tmp_path / "data.h5") as file:
        yield file


class Counting:
    """An HDF5 data set that counts the rows that are read of it."""

    def __init__(self, dataset):
        self.dataset = dataset
        self.read = np.zeros(len(dataset), int)

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, indices):
        self.read[indices] += 1
        return self.dataset[indices]


def train(backend, x, y, strategy="fsdp", **options):
    model = ms.as_distributed(ms.nn.MLP([5, 7, 2], seed=1), backend, strategy)
    optimizer = ms.as_distributed(ms.optimizers.SGD(0.01), backend, strategy)
    given = {"batch_size": BATCH, "epochs": EPOCHS, "seed": 3, "progress": False}
    result = optimizer.optimize(
        ms.OptimizationInputData(model=model, x_train=x, y_train=y, **(given | options))
    )
    return result, model.get_parameters()


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_rank_reads_its_own_rows_of_an_hdf5_file(file, world_size):
    expected = ms.run_in_threads(world_size, train, X, Y)[0][1]
    sampler = GlobalBatchSampler(SAMPLES, BATCH, seed=3)

    def main(backend):
        x = Counting(file["x"])
        _, parameters = train(backend, x, file["y"])
        assert parameters.tobytes() == expected.tobytes()
        mine = np.zeros(SAMPLES, int)
        for step in range(EPOCHS * sampler.batches_per_epoch):
            batch = divmod(step, sampler.batches_per_epoch)
            mine[sampler.local(*batch, backend.rank, world_size)[0]] += 1
        mine[0] = x.read[0]  # looked at before training, too
        assert x.read.tolist() == mine.tolist()
        return x.read

    read = np.sum(ms.run_in_threads(world_size, main), axis=0)
    assert (read[1:] == EPOCHS).all()


def test_thread_ranks_may_share_one_open_data_set(file):
    """h5py serialises access itself; many ranks at once get what they ask for."""
    expected = ms.run_in_threads(4, train, X, Y)[0][1]
    for _, parameters in ms.run_in_threads(4, train, file["x"], file["y"]):
        assert parameters.tobytes() == expected.tobytes()
    assert threading.active_count() < 20


@in_worlds(1, 2)
def test_a_memory_map_trains_the_same_and_stays_on_disk(backend, shared_path):
    path = shared_path / f"x{backend.rank}.npy"
    np.save(path, X)
    mapped = np.load(path, mmap_mode="r")
    _, expected = train(backend, X, Y)
    result, parameters = train(backend, mapped, Y)
    assert parameters.tobytes() == expected.tobytes()
    assert result.training_result.x is mapped  # not a copy


@in_worlds(2)
def test_validation_and_test_data_from_a_file(backend, shared_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(shared_path / f"{backend.rank}.h5", "w") as file:
        file["x"], file["y"] = X, Y
        given = {
            "x_validation": file["x"], "y_validation": file["y"], "x_test": file["x"],
            "y_test": file["y"],
        }  # fmt: skip
        result, parameters = train(backend, file["x"], file["y"], **given)
    plain = ms.nn.MLP([5, 7, 2]).with_parameters(parameters)
    loss = ms.nn.MSE()(plain.predict(X), Y)
    assert result.test_loss == pytest.approx(loss, rel=1e-12)
    assert result.validation_history[-1][1] == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize(
    ("choose", "error", "message"),
    [
        (lambda file: file, TypeError, r"x_train .* got a File, .*by name.*: none, single, x, y"),
        (lambda file: file["single"], TypeError, "len.. of this Dataset fails"),
        (lambda file: file["none"], ValueError, "x_train holds no samples"),
    ],
)
def test_objects_other_than_data_sets_are_refused(file, choose, error, message):
    def main(backend):
        before = backend._sequence
        with pytest.raises(error, match=message):
            ms.as_distributed(ms.optimizers.SGD(0.01), backend).optimize(
                ms.OptimizationInputData(
                    model=ms.nn.MLP([5, 7, 2]), x_train=choose(file), y_train=file["y"]
                )
            )
        assert backend._sequence == before

    ms.run_in_threads(2, main)


def test_a_closed_file_is_named(file):
    dataset = file["x"]
    file.close()

    def main(backend):
        with pytest.raises(ValueError, match="x_train is a Dataset of an HDF5 file that is closed"):
            train(backend, dataset, Y)

    ms.run_in_threads(2, main)


def test_indexing_that_gives_something_else_is_refused():
    class Columns:
        """As a data frame, it takes an index for a column."""

        def __len__(self):
            return SAMPLES

        def __getitem__(self, indices):
            return X[:, indices]

    def main(backend):
        with pytest.raises(ValueError, match=r"x_train gave an array of shape \(30, 1\) for the"):
            train(backend, Columns(), Y)

    ms.run_in_threads(2, main)


@pytest.mark.parametrize(
    ("index", "error"),
    [
        (lambda i: [0.0] * int(i), TypeError),
        (lambda i: (X[i], Y[i], "label"), ValueError),
        (lambda i: iter(X[i]), ValueError),
        (lambda i: list(X)[i], TypeError),
    ],
)
def test_an_error_names_the_index_given_to_a_data_set_of_single_samples(index, error):
    """As data sets of PyTorch; NumPy's own words do not say whose mistake it is."""

    class One:
        def __len__(self):
            return SAMPLES

        def __getitem__(self, i):
            return index(i)

    def main(backend):
        with pytest.raises(error) as caught:
            train(backend, One(), Y)
        message = " ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
        assert all(words in message for words in ("x_train", "One", "an array of integers"))

    ms.run_in_threads(1, main)
