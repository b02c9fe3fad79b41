"""Names that no safetensors file can hold are refused before anything is trained or written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import mpishard as ms
from mpishard import checkpoint
from mpishard.adapters import AutogradModel
from mpishard.checkpoint.format.tensor_file import TensorFile, bytes_of, tensors_of
from mpishard.errors import CheckpointError
from mpishard.sharding import FLAT, ParameterEntry

UNREADABLE = {
    "__metadata__": "'__metadata__' is reserved by the safetensors format",
    "\ud800": r"'\\ud800' cannot be written as UTF-8",
}
READABLE = ["", " ", "__metadata__.weight", "ä/ß", "a\0b", 'a"b', "\n"]


@pytest.fixture(params=UNREADABLE)
def unreadable(request: Any) -> tuple[str, str]:
    return request.param, UNREADABLE[request.param]


class Named:
    """A black box that names its three parameters."""

    def __init__(self, *names: str) -> None:
        self.theta = np.zeros(3)
        first, second = names
        entries = [ParameterEntry(first, (1,), 0), ParameterEntry(second, (2,), 1)]
        self.parameter_table = SimpleNamespace(entries=entries)

    def get_parameters(self) -> Any:
        return self.theta

    def set_parameters(self, parameters: Any) -> None:
        self.theta = parameters

    def compute_gradients(self, x: Any, y: Any) -> Any:
        return 2 * x.T @ (x @ self.theta - y[:, 0]) / len(x)


def wrap(model: Any, strategy: str) -> Any:
    return ms.run_in_threads(2, lambda backend: ms.as_distributed(model(), backend, strategy))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_black_box_is_not_wrapped(unreadable: tuple[str, str], strategy: str) -> None:
    name, message = unreadable
    with pytest.raises(ValueError, match=f"parameter name {message}"):
        wrap(lambda: Named("first", name), strategy)


def test_a_black_box_with_one_name_twice_is_not_wrapped() -> None:
    with pytest.raises(ValueError, match="two parameters named 'same'"):
        wrap(lambda: Named("same", "same"), "ddp")


def test_the_name_of_the_flat_vector_is_refused() -> None:
    with pytest.raises(ValueError, match="'<flat vector>' is that of the flat vector in check"):
        ParameterEntry(FLAT, (1,), 0)


def test_other_names_are_saved_and_read(tmp_path: Any) -> None:
    def main(backend: Any, name: str, folder: Any) -> Any:
        model = ms.as_distributed(Named("first", name), backend, "fsdp")
        model.set_parameters(np.arange(3.0))
        data = model.serialize()
        model.save_model(folder)
        model.set_parameters(np.zeros(3))
        model.deserialize(data)
        return model.gather_full_parameters().tolist()

    for number, name in enumerate(READABLE):
        folder = tmp_path / str(number)
        assert ms.run_in_threads(2, main, name, folder) == [[0.0, 1.0, 2.0]] * 2
        file = checkpoint.consolidate(folder, tmp_path / f"{number}.safetensors")
        assert set(safetensors.numpy.load_file(file)) == {"first", name}
        checkpoint.check(checkpoint.convert(file, tmp_path / f"back{number}"))


def test_a_model_with_unreadable_names_is_not_made(unreadable: tuple[str, str]) -> None:
    pytest.importorskip("autograd")
    name, message = unreadable
    with pytest.raises(ValueError, match=f"parameter name {message}"):
        AutogradModel(lambda p, x, y: ((x * p[name] - y) ** 2).mean(), {name: np.ones(2)})


def test_bytes_and_files_are_not_written(unreadable: tuple[str, str], tmp_path: Any) -> None:
    name, message = unreadable
    with pytest.raises(ValueError, match=message):
        bytes_of({name: np.ones(2)}, {"key": "value"})
    assert list(tensors_of(bytes_of({"fine": np.ones(2)}, {"key": "value"}))) == ["fine"]
    with pytest.raises(CheckpointError, match=message):
        TensorFile({name: np.ones(2)}, {}).write(tmp_path / "file")
    assert not list(tmp_path.iterdir())


def test_a_parameter_that_is_called_like_a_state_is_not_consolidated(tmp_path: Any) -> None:
    """In one file its key would be that of the optimizer's state."""

    def main(backend: Any) -> None:
        model = ms.as_distributed(Named("first", "optimizer/SGD/velocity/other"), backend, "ddp")
        optimizer = ms.as_distributed(ms.optimizers.SGD(0.1, 0.9), backend, "ddp")
        optimizer.step(model, np.ones((2, 3)), np.ones((2, 1)))
        checkpoint.save(tmp_path / "c", model, optimizer)

    ms.run_in_threads(2, main)
    file = tmp_path / "one.safetensors"
    with pytest.raises(CheckpointError, match=r"'optimizer/SGD/velocity/other'.* begins like"):
        checkpoint.consolidate(tmp_path / "c", file, optimizer=True)
    assert not file.exists()
    checkpoint.consolidate(tmp_path / "c", file)
    checkpoint.check(checkpoint.convert(file, tmp_path / "back"))
