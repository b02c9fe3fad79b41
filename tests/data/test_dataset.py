"""Reading samples: arrays, memory maps, files that take only sorted indices, token windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpishard.data import TokenWindows, check_dataset, take


class SortedOnly:
    """Indexes as an h5py data set does: rising integers, each once, at least one."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.values = values
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, indices: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        self.asked.append(indices.tolist())
        if indices.size == 0 or (np.diff(indices) <= 0).any():
            raise TypeError("Indexing elements must be in increasing order")
        return self.values[indices]


VALUES = np.arange(24.0).reshape(8, 3)
INDICES = [[5, 2, 7], [3, 3, 0, 3], [1], [0, 1, 2], []]


@pytest.mark.parametrize("indices", INDICES)
@pytest.mark.parametrize("kind", ["array", "memory map", "sorted only"])
def test_take_gives_the_rows_asked_for(kind: str, indices: list[int], tmp_path: Path) -> None:
    dataset: Any = VALUES
    if kind == "memory map":
        np.save(tmp_path / "values.npy", VALUES)
        dataset = np.load(tmp_path / "values.npy", mmap_mode="r")
    elif kind == "sorted only":
        dataset = SortedOnly(VALUES)
    rows = take(dataset, np.array(indices, np.int64))
    assert type(rows) is np.ndarray
    assert rows.tolist() == VALUES[indices].tolist()
    assert rows.shape == (len(indices), 3)
    assert not np.shares_memory(rows, VALUES)


def test_take_asks_a_file_for_each_sample_once() -> None:
    dataset = SortedOnly(VALUES)
    take(dataset, np.array([6, 1, 6, 4]))
    assert dataset.asked == [[1, 4, 6]]


def test_take_from_h5py(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "values.h5", "w") as file:
        dataset = file.create_dataset("x", data=VALUES)
        for indices in INDICES:
            rows = take(dataset, np.array(indices, np.int64))
            assert rows.tolist() == VALUES[indices].tolist()


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (None, "x_train must be an array.*got None"),
        ("a.h5", r"got the str 'a.h5'; open the file first, as by h5py"),
        (Path("a.npy"), r"got the PosixPath 'a.npy'; open the file first"),
        ([1, 2], r"got a list; pass numpy.asarray\(x_train\)"),
        ((np.ones(2), np.ones(2)), r"several inputs .* as mpishard.data.Samples\(x_train\)"),
        ({"a": 1}, "got a dict"),
        (np.array(3.0), "len.. of this ndarray fails"),
        (7, "got a int"),
    ],
)
def test_objects_without_array_indexing_are_refused(dataset: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        check_dataset(dataset, "x_train")


def test_a_data_frame_is_refused_with_a_fix() -> None:
    class Frame(SortedOnly):
        iloc = None

    with pytest.raises(TypeError, match=r"pass x.to_numpy\(\)"):
        check_dataset(Frame(VALUES), "x")


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(ValueError, match="y holds no samples"):
        check_dataset(np.zeros((0, 4)), "y")


def test_check_dataset_returns_the_number_of_samples() -> None:
    assert check_dataset(VALUES, "x") == 8
    assert check_dataset(SortedOnly(VALUES), "x") == 8
    assert check_dataset(TokenWindows(np.arange(9), 4), "x") == 5


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
@pytest.mark.parametrize("stride", [1, 2, 4, 100])
@pytest.mark.parametrize("length", [5, 9, 12, 13])
def test_targets_are_the_tokens_behind_the_inputs(length: int, stride: int, dtype: Any) -> None:
    tokens = (np.arange(length) * 20).astype(dtype)
    inputs = TokenWindows(tokens, 4, stride=stride)
    targets = TokenWindows(tokens, 4, offset=1, stride=stride)
    starts = list(range(0, length - 4, stride))
    assert len(inputs) == len(targets) == len(starts)
    everything = np.arange(len(inputs))
    assert inputs[everything].tolist() == [tokens[s : s + 4].tolist() for s in starts]
    assert targets[everything].tolist() == [tokens[s + 1 : s + 5].tolist() for s in starts]
    assert inputs[everything].dtype == np.int64
    assert take(inputs, everything[::-1])[0].tolist() == inputs[len(inputs) - 1].tolist()


def test_windows_copy_no_tokens(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(1000, dtype=np.uint16))
    tokens = np.load(tmp_path / "tokens.npy", mmap_mode="r")
    windows = TokenWindows(tokens, 100)
    assert np.shares_memory(windows._windows, tokens)
    assert windows.shape == (900, 100)
    assert windows[2:4].tolist() == [list(range(2, 102)), list(range(3, 103))]
    with pytest.raises(IndexError):
        windows[np.array([900])]


@pytest.mark.parametrize(
    ("tokens", "arguments", "error", "message"),
    [
        ([1, 2, 3], {}, TypeError, "got list"),
        (np.zeros(9), {}, TypeError, "got float64"),
        (np.zeros((3, 3), int), {}, ValueError, r"1-D, got shape \(3, 3\)"),
        (np.zeros(4, int), {}, ValueError, "4 tokens hold no window of context_length 4"),
        (np.zeros(9, int), {"offset": 2}, ValueError, "offset .* got 2"),
        (np.zeros(9, int), {"stride": 0}, ValueError, "stride .* got 0"),
    ],
)
def test_windows_refuse_bad_arguments(
    tokens: Any, arguments: dict[str, int], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        TokenWindows(tokens, 4, **arguments)


def test_windows_refuse_an_empty_context() -> None:
    with pytest.raises(ValueError, match="context_length must be 1 or more, got 0"):
        TokenWindows(np.arange(4), 0)


def test_a_mapping_of_arrays_is_refused_with_their_names(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=VALUES, y=VALUES)
    with (
        np.load(tmp_path / "a.npz") as archive,
        pytest.raises(TypeError, match="by name; pass one of them: x, y"),
    ):
        check_dataset(archive, "x_train")


def test_samples_that_are_no_arrays_become_some() -> None:
    class Lists(SortedOnly):
        def __getitem__(self, indices: np.ndarray[Any, Any]) -> Any:
            return super().__getitem__(indices).tolist()

    rows = take(Lists(VALUES), np.array([3, 1]))
    assert rows.tolist() == VALUES[[3, 1]].tolist()
    assert type(take(Lists(VALUES), np.zeros(0, np.int64))) is np.ndarray


def test_a_rank_may_have_no_samples_of_its_own() -> None:
    assert check_dataset(VALUES[:0], "x", allow_empty=True) == 0
    assert take(VALUES[:0], np.zeros(0, np.int64)).shape == (0, 3)


def test_a_failed_read_raises_its_own_error_alone() -> None:
    class Failing(SortedOnly):
        def __getitem__(self, indices: Any) -> Any:
            raise OSError("Input/output error")

    with pytest.raises(OSError, match="Input/output error") as caught:
        take(Failing(np.zeros((9, 2))), np.array([7, 3, 4]))
    assert caught.value.__context__ is None
