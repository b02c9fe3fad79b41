"""Saved at one world size, restored at another, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpishard import checkpoint, run_in_threads
from mpishard.checkpoint.saving.save import save_states
from mpishard.errors import CheckpointError

WORLDS = [1, 2, 3, 5, 16]


def save(backend: Any, fakes: Any, path: Path, seed: int, dtype: Any = np.float64) -> None:
    model = fakes.Model(backend, fakes.values(seed, dtype))
    states = {"m": fakes.values(seed + 1), "v": fakes.values(seed + 2)}
    optimizer = fakes.Optimizer(backend, states, step=seed)
    checkpoint.save(path, model, optimizer, metadata={"seed": np.int64(seed)})


def load(backend: Any, fakes: Any, path: Path, seed: int, dtype: Any = np.float64) -> Any:
    """Restore into vectors of zeros; return the parameters' pieces."""
    model = fakes.Model(backend, np.zeros(fakes.LENGTH, dtype))
    optimizer = fakes.Optimizer(backend, {name: np.zeros(fakes.LENGTH) for name in "mv"})
    assert checkpoint.load(path, model, optimizer) == {"seed": seed}
    assert model.restored_with == {"kind": "fake"}
    assert optimizer.restored_with == {"step": seed}
    assert model.equals({"parameters": fakes.values(seed, dtype)})
    vectors = {"optimizer/m": fakes.values(seed + 1), "optimizer/v": fakes.values(seed + 2)}
    assert optimizer.equals(vectors)
    return model, optimizer


@pytest.mark.parametrize("second", WORLDS)
@pytest.mark.parametrize("first", WORLDS)
def test_there_and_back_bitwise(first: int, second: int, tmp_path: Path, fakes: Any) -> None:
    run_in_threads(first, save, fakes, tmp_path / "one", 3)

    def move(backend: Any) -> None:
        model, optimizer = load(backend, fakes, tmp_path / "one", 3)
        checkpoint.save(tmp_path / "two", model, optimizer, metadata={"seed": 3})

    run_in_threads(second, move)
    run_in_threads(first, load, fakes, tmp_path / "two", 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "two"]


def test_a_checkpoint_is_saved_and_loaded_without_ranks(tmp_path: Path, fakes: Any) -> None:
    save(None, fakes, tmp_path / "c", 5)
    load(None, fakes, tmp_path / "c", 5)
    run_in_threads(2, load, fakes, tmp_path / "c", 5)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_parameters_of_few_bits_beside_wide_states(dtype: Any, tmp_path: Path, fakes: Any) -> None:
    run_in_threads(3, save, fakes, tmp_path / "c", 7, dtype)
    run_in_threads(2, load, fakes, tmp_path / "c", 7, dtype)
    arrays = checkpoint.load_arrays(tmp_path / "c")
    assert {a.dtype for a in arrays.values()} == {np.dtype(dtype)}


@pytest.mark.parametrize("elements", [0, 1, 2])
def test_more_ranks_than_elements(elements: int, tmp_path: Path, fakes: Any) -> None:
    vector, shapes = np.arange(elements) + 0.5, {"w": (elements,)}

    def work(backend: Any, save: bool) -> None:
        model = fakes.Model(backend, vector if save else np.zeros(elements), shapes)
        (checkpoint.save if save else checkpoint.load)(tmp_path / "c", model)
        assert model.equals({"parameters": vector})

    run_in_threads(5, work, True)
    run_in_threads(3, work, False)
    files = [p.name for p in (tmp_path / "c").iterdir()]
    assert len(files) == elements + 1, "a rank without elements writes no file"


def test_the_model_alone_out_of_a_checkpoint_with_an_optimizer(tmp_path: Path, fakes: Any) -> None:
    save(None, fakes, tmp_path / "c", 1)
    model = fakes.Model(None, np.zeros(fakes.LENGTH))
    checkpoint.load(tmp_path / "c", model)
    assert model.equals({"parameters": fakes.values(1)})


def test_an_optimizer_that_was_not_saved_is_refused(tmp_path: Path, fakes: Any) -> None:
    checkpoint.save(tmp_path / "c", fakes.Model(None, fakes.values(1)))
    model = fakes.Model(None, fakes.values(2))
    with pytest.raises(CheckpointError, match="was saved without an optimizer"):
        checkpoint.load(tmp_path / "c", model, fakes.Optimizer(None, {"m": fakes.values(0)}))
    assert model.equals({"parameters": fakes.values(2)})


@pytest.mark.parametrize("names", ["m", "mvw", ""])
def test_an_optimizer_with_other_states_is_refused(names: str, tmp_path: Path, fakes: Any) -> None:
    save(None, fakes, tmp_path / "c", 1)
    model = fakes.Model(None, fakes.values(2))
    optimizer = fakes.Optimizer(None, {name: fakes.values(0) for name in names})
    with pytest.raises(CheckpointError, match=r"holds optimizer/m, optimizer/v of the opt"):
        checkpoint.load(tmp_path / "c", model, optimizer)
    assert model.equals({"parameters": fakes.values(2)})


def test_another_model_is_refused_with_all_differences(tmp_path: Path, fakes: Any) -> None:
    save(None, fakes, tmp_path / "c", 1)
    shapes = {"a.weight": (2, 3), "a.bias": (2,), "b.scale": (), "c.weight": (4,)}
    model = fakes.Model(None, fakes.values(2, np.float32), shapes)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(tmp_path / "c", model)
    message = str(caught.value)
    assert str(tmp_path / "c") in message
    assert "dtype: float64 in the checkpoint, float32 in the model" in message
    assert "a.weight: (3, 2) in the checkpoint, (2, 3) in the model" in message
    assert "b.weight: (4, 1) in the checkpoint, not in the model" in message
    assert "c.weight: (4,) in the model, not in the checkpoint" in message
    assert "a.bias" not in message
    assert model.equals({"parameters": fakes.values(2, np.float32)})


def test_another_order_of_the_same_parameters_is_loaded_by_name(tmp_path: Path, fakes: Any) -> None:
    shapes = {"one": (2,), "two": (2,)}
    checkpoint.save(tmp_path / "c", fakes.Model(None, np.arange(4.0), shapes))
    model = fakes.Model(None, np.zeros(4), dict(reversed(shapes.items())))
    checkpoint.load(tmp_path / "c", model)
    assert model.equals({"parameters": np.array([2.0, 3.0, 0.0, 1.0])})


def test_one_ranks_misfit_is_every_ranks_error_and_changes_nothing(
    tmp_path: Path, fakes: Any
) -> None:
    run_in_threads(2, save, fakes, tmp_path / "c", 1)

    def work(backend: Any) -> str:
        shapes = {"w": (fakes.LENGTH,)} if backend.rank == 1 else fakes.SHAPES
        model = fakes.Model(backend, fakes.values(2), shapes)
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load(tmp_path / "c", model)
        assert model.equals({"parameters": fakes.values(2)})
        assert model.restored_with is None
        backend.barrier()  # the world is in order
        return str(caught.value)

    first, second, third = run_in_threads(3, work)
    assert "w: (13,) in the model, not in the checkpoint" in second
    assert first == third == f"rank 1: {second}"


def test_a_missing_checkpoint_is_file_not_found_on_all_ranks(tmp_path: Path, fakes: Any) -> None:
    (tmp_path / "step-10").mkdir()

    def work(backend: Any) -> None:
        path = tmp_path / ("step-10" if backend.rank else "step-20")
        with pytest.raises(FileNotFoundError, match="step-10"):
            checkpoint.load(path, fakes.Model(backend, fakes.values(1)))

    run_in_threads(2, work)


def test_load_arrays_gives_names_and_shapes(tmp_path: Path, fakes: Any) -> None:
    run_in_threads(3, save, fakes, tmp_path / "c", 4)
    arrays = checkpoint.load_arrays(tmp_path / "c")
    assert {name: a.shape for name, a in arrays.items()} == fakes.SHAPES
    flat = np.concatenate([a.ravel() for a in arrays.values()])
    assert flat.tobytes() == fakes.values(4).tobytes()


def test_an_optimizer_alone_has_no_arrays_of_a_model(tmp_path: Path, fakes: Any) -> None:
    optimizer = fakes.Optimizer(None, {"m": fakes.values(1)})
    save_states(tmp_path / "c", fakes.Model(None, fakes.values(2)), {"optimizer": optimizer})
    with pytest.raises(CheckpointError, match=r"holds \['optimizer/m'\], and no parameters"):
        checkpoint.load_arrays(tmp_path / "c")


def test_check_reports_what_is_there(tmp_path: Path, fakes: Any) -> None:
    run_in_threads(3, save, fakes, tmp_path / "c", 4, np.float32)
    report = checkpoint.check(tmp_path / "c")
    assert report.parameter_count == fakes.LENGTH
    assert report.shapes == fakes.SHAPES
    kinds = {"parameters": "float32", "optimizer/m": "float64", "optimizer/v": "float64"}
    assert report.kinds == kinds
    assert len(report.files) == 3
    assert report.metadata["user"] == {"seed": 4}
    assert "13 elements in 5 parameters" in str(report)
