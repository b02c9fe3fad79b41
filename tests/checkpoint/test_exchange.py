"""Conversions to and from other programs' files: the same bits, and no incomplete files."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import mpishard as ms
from mpishard import checkpoint, run_in_threads
from mpishard.checkpoint.exchange import sources
from mpishard.checkpoint.format import disk
from mpishard.errors import CheckpointError

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
INDEX = "model.safetensors.index.json"


def made(fakes: Any, path: Path, dtype: Any = np.float32, ranks: int = 3) -> dict[str, Any]:
    """Save a checkpoint; what it holds, by the names of a consolidated file."""
    vectors = {"m": fakes.values(2), "v": fakes.values(3, np.float32)}

    def save(backend: Any) -> None:
        model = fakes.Model(backend, fakes.values(1, dtype))
        metadata = {"seed": 4}
        checkpoint.save(path, model, fakes.Optimizer(backend, vectors, 7), metadata=metadata)

    run_in_threads(ranks, save)
    kinds = {"": fakes.values(1, dtype)} | {f"optimizer/{n}/": v for n, v in vectors.items()}
    return {
        prefix + e.name: vector[e.start : e.stop].reshape(e.shape)
        for prefix, vector in kinds.items()
        for e in fakes.entries()
    }


def loaded(fakes: Any, path: Path, dtype: Any = np.float32, *, optimizer: bool = True) -> None:
    """Assert that ``path`` loads as what `made` saved."""

    def load(backend: Any) -> None:
        model = fakes.Model(backend, fakes.values(9, dtype))
        rule = fakes.Optimizer(backend, {"m": fakes.values(8), "v": fakes.values(8, np.float32)})
        user = checkpoint.load(path, model, rule if optimizer else None)
        assert model.equals({"parameters": fakes.values(1, dtype)})
        assert user == {"seed": 4}
        if optimizer:
            saved = {"optimizer/m": fakes.values(2), "optimizer/v": fakes.values(3, np.float32)}
            assert rule.equals(saved)
            assert rule.metadata == {"step": 7}

    run_in_threads(2, load)


def same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()


def parameters_of(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: array for name, array in arrays.items() if not name.startswith("optimizer/")}


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_file_has_the_bits(dtype: Any, tmp_path: Path, fakes: Any) -> None:
    arrays = made(fakes, tmp_path / "c", dtype)
    for optimizer in (False, True):
        file = tmp_path / f"{optimizer}.safetensors"
        assert checkpoint.consolidate(tmp_path / "c", file, optimizer=optimizer) == file
        same(load_file(file), arrays if optimizer else parameters_of(arrays))
        back = checkpoint.convert(file, tmp_path / f"back{optimizer}")
        checkpoint.check(back)
        assert list(checkpoint.load_arrays(back)) == list(fakes.SHAPES)
        loaded(fakes, back, dtype, optimizer=optimizer)
    with pytest.raises(CheckpointError, match="saved without an optimizer"):
        loaded(fakes, tmp_path / "backFalse", dtype)
    names = {"True.safetensors", "False.safetensors", "c", "backTrue", "backFalse"}
    assert {entry.name for entry in tmp_path.iterdir()} == names


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_files_with_an_index(dtype: Any, tmp_path: Path, fakes: Any) -> None:
    arrays = parameters_of(made(fakes, tmp_path / "c", dtype))
    folder = checkpoint.convert(
        tmp_path / "c", tmp_path / "hf", maximum_shard_bytes=7 * np.dtype(dtype).itemsize
    )
    document = json.loads((folder / INDEX).read_text())
    # (3, 2); then (2,), () and (0, 3) with (4, 1), which are 7 elements.
    shards = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert sorted(p.name for p in folder.iterdir()) == [*shards, INDEX]
    assert document["weight_map"] == {
        "a.weight": shards[0],
        "a.bias": shards[1],
        "b.scale": shards[1],
        "b.empty": shards[1],
        "b.weight": shards[1],
    }
    assert document["metadata"]["total_size"] == 13 * np.dtype(dtype).itemsize
    same({n: a for s in shards for n, a in load_file(folder / s).items()}, arrays)
    with safe_open(folder / shards[0], "np") as file:
        assert file.metadata() == {"format": "pt"}
    # On to one file, and to a checkpoint; that of no model of ours, which knows no kind.
    one = checkpoint.convert(folder, tmp_path / "one.safetensors")
    same(load_file(one), arrays)
    again = checkpoint.convert(one, tmp_path / "again", "hf", maximum_shard_bytes=1)
    assert len(list(again.glob("*.safetensors"))) == 5
    back = checkpoint.convert(again, tmp_path / "back", "checkpoint")
    same(checkpoint.load_arrays(back), arrays)


def test_a_checkpoint_is_converted_to_one_of_a_single_file(tmp_path: Path, fakes: Any) -> None:
    made(fakes, tmp_path / "c")
    one = checkpoint.convert(tmp_path / "c", tmp_path / "one", "checkpoint")
    assert sorted(p.name for p in one.iterdir()) == ["manifest.json", "rank00000.safetensors"]
    checkpoint.check(one)
    loaded(fakes, one)


@pytest.mark.parametrize("strategy", ["fsdp", "tensor"])
def test_a_foreign_file_loads_into_a_model(strategy: str, tmp_path: Path) -> None:
    plain = ms.nn.MLP([4, 6, 2], seed=3)
    vector = plain.get_parameters()
    arrays = {
        e.name: vector[e.start : e.stop].reshape(e.shape) for e in plain.parameter_table.entries
    }
    # The library's writer orders names as it likes; what counts is that they are equal.
    save_file(arrays, tmp_path / "x.safetensors")
    path = checkpoint.convert(tmp_path / "x.safetensors", tmp_path / "c")

    def load(backend: Any) -> Any:
        model = ms.as_distributed(ms.nn.MLP([4, 6, 2], seed=8), backend, strategy)
        model.load_model(path)
        return model.gather_full_parameters()

    for found in run_in_threads(2, load):
        assert found.tobytes() == plain.get_parameters().tobytes()
    other = ms.nn.MLP([4, 6, 2], seed=9)
    checkpoint.load(path, other)
    assert other.get_parameters().tobytes() == plain.get_parameters().tobytes()
    with pytest.raises(CheckpointError, match="does not fit the model"):
        ms.nn.MLP([4, 7, 2]).load_model(path)


def test_load_model_of_a_file_names_the_command_that_converts_it(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(CheckpointError, match="a directory, which `mpishard checkpoint convert`"):
        ms.nn.MLP([2, 1]).load_model(file)


def test_bytes_of_a_model_are_a_file_and_a_file_is_its_bytes(tmp_path: Path) -> None:
    """Also state beside the parameters, such as the active features of a linear model."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 5))
    model = ms.nn.LinearRegression(5)
    model.set_parameters(rng.standard_normal(model.parameter_count))
    model.set_active_feature_indices([0, 3])
    (tmp_path / "m.safetensors").write_bytes(model.serialize())
    path = checkpoint.convert(tmp_path / "m.safetensors", tmp_path / "c")
    again, third = ms.nn.LinearRegression(5), ms.nn.LinearRegression(5)
    again.load_model(path)
    third.deserialize(checkpoint.consolidate(path, tmp_path / "n.safetensors").read_bytes())
    for each in (again, third):
        np.testing.assert_array_equal(each.predict(x), model.predict(x))


@pytest.mark.parametrize("source", ["c", "one.safetensors", "hf"])
def test_conversions_hold_few_bytes_in_memory(
    source: str, tmp_path: Path, fakes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = {f"{n}": (512, 512) for n in range(6)}  # 2 MiB each

    def save(backend: Any) -> None:
        vector = fakes.values(1, length=6 * 512 * 512)
        checkpoint.save(tmp_path / "c", fakes.Model(backend, vector, shapes))

    run_in_threads(2, save)
    checkpoint.consolidate(tmp_path / "c", tmp_path / "one.safetensors")
    checkpoint.convert(tmp_path / "c", tmp_path / "hf", maximum_shard_bytes=5 << 20)
    monkeypatch.setattr(sources, "_BLOCK_BYTES", 1 << 18)
    seen: list[tuple[int, int]] = []
    for form in checkpoint.CheckpointForm:
        tracemalloc.start()
        checkpoint.convert(
            tmp_path / source, tmp_path / f"{form}.safetensors", form,
            progress=lambda *pair: seen.append(pair),
        )  # fmt: skip
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1.5 * 2**20, "blocks of 256 KiB, and headers"
        assert seen[-1] == (12 << 20, 12 << 20)
        assert len(seen) == 48
        seen.clear()


def write_index(folder: Path, weight_map: Any, **arrays: Any) -> None:
    folder.mkdir()
    for name, given in arrays.items():
        save_file(given, folder / f"{name}.safetensors")
    (folder / INDEX).write_text(
        weight_map if isinstance(weight_map, str) else json.dumps({"weight_map": weight_map})
    )


ONE = {"w": np.ones(2, np.float32)}
BOTH = {"w": np.ones(2, np.float32), "b": np.ones(1, np.float32)}


@pytest.mark.parametrize(
    ("weight_map", "arrays", "message"),
    [
        ({"w": "../a.safetensors"}, {}, r"'w' is said to be in '../a.safetensors', which is no"),
        ({"w": "/tmp/a.safetensors"}, {}, "which is not the name of a safetensors file beside"),
        ({"w": "..\\a.safetensors"}, {}, "which is not the name"),
        ({"w": "a.bin"}, {}, "'a.bin', which is not the name of a safetensors file"),
        ({"w": "a.safetensors", "b": "c.safetensors"}, {"a": ONE}, "lacks 'c.safetensors'"),
        ({"w": "a.safetensors"}, {"a": BOTH}, "holds 'b', which .* lists in another file or not"),
        ({"w": "a.safetensors", "b": "c.safetensors"}, {"a": ONE, "c": BOTH}, "holds 'w', which"),
        ({"w": "a.safetensors", "b": "a.safetensors"}, {"a": ONE}, "does not hold 'b', which"),
        ('{"weight_map": {"w": "a.safetensors", "w": "a.safetensors"}}', {"a": ONE}, "twice: 'w'"),
        ('{"weight_map": ["w"]}', {}, "no weight_map of names to files"),
        ('{"weight_map": {"w": 3}}', {}, "no weight_map of names to files"),
        ("[1]", {}, "the index is a JSON list, not an object"),
        ("{", {}, "the index is malformed"),
        ("[" * 100_000, {}, "the index is malformed"),
    ],
)  # fmt: skip
def test_a_wrong_index_is_refused(
    weight_map: Any, arrays: Any, message: str, tmp_path: Path
) -> None:
    save_file(ONE, tmp_path / "a.safetensors")  # where "../" leads
    write_index(tmp_path / "hf", weight_map, **arrays)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.convert(tmp_path / "hf", tmp_path / "new")
    assert {p.name for p in tmp_path.iterdir()} == {"hf", "a.safetensors"}


def torn(path: Path, change: Callable[[bytes], bytes]) -> Path:
    save_file(BOTH, path)
    path.write_bytes(change(path.read_bytes()))
    return path


def header(text: str, data: bytes = b"\0" * 8) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode() + data


TENSOR = '"a":{"dtype":"%s","shape":[%d],"data_offsets":[%d,%d]}'
TWICE = f"{{{TENSOR % ('F32', 1, 0, 4)},{TENSOR % ('F32', 1, 4, 8)}}}"
NARROW = f"{{{TENSOR % ('F8_E4M3', 8, 0, 8)}}}"


def former(words: str) -> bytes:
    metadata = json.dumps({"mpishard.checkpoint": words})
    return header(f'{{"__metadata__":{metadata},{TENSOR % ("F32", 2, 0, 8)}}}')


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:-1], "not a complete safetensors file: .*"),
        (lambda content: content + b"x", "not a complete safetensors file"),
        (lambda content: b"\xff" * 8 + content[8:], "not a complete safetensors file"),
        (lambda _: b"", "not a complete safetensors file"),
        (lambda _: header(TWICE), "not a complete safetensors file: .*invalid offset"),
        (lambda _: header(NARROW), "'a' has dtype F8_E4M3; BOOL, "),
        (lambda _: former("[]"), "is a JSON list, not an object"),
        (lambda _: former("{}"), "'mpishard.checkpoint' is malformed"),
        (lambda _: former('{"kinds": [], "frozen": [], "metadata": {"user": 3}}'), "malformed"),
        (
            lambda _: former('{"kinds": ["x"], "frozen": [], "metadata": {"user": {}}}'),
            "x: nothing",
        ),
    ],
)
def test_a_wrong_file_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    file = torn(tmp_path / "x.safetensors", change)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.convert(file, tmp_path / "new")
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_tensors_that_no_checkpoint_can_hold_are_refused(tmp_path: Path) -> None:
    mixed = {"w": np.ones(2, np.float32), "step": np.ones(1, np.int64)}
    save_file(mixed, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"'w' has float32.*have one dtype"):
        checkpoint.convert(tmp_path / "x.safetensors", tmp_path / "new")
    same(
        load_file(checkpoint.convert(tmp_path / "x.safetensors", tmp_path / "y.safetensors")), mixed
    )
    save_file({}, tmp_path / "empty.safetensors")
    with pytest.raises(CheckpointError, match="holds no tensors"):
        checkpoint.convert(tmp_path / "empty.safetensors", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_wrong_arguments_of_conversions_are_refused(tmp_path: Path, fakes: Any) -> None:
    made(fakes, tmp_path / "c")
    with pytest.raises(FileExistsError, match=r"c already exists"):
        checkpoint.convert(tmp_path / "c", tmp_path / "c")
    (tmp_path / "dangling.safetensors").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError):
        checkpoint.consolidate(tmp_path / "c", tmp_path / "dangling.safetensors")
    with pytest.raises(ValueError, match=r"must end with \.safetensors"):
        checkpoint.consolidate(tmp_path / "c", tmp_path / "d")
    with pytest.raises(ValueError, match="'gguf' is not a valid"):
        checkpoint.convert(tmp_path / "c", tmp_path / "d", "gguf")
    with pytest.raises(ValueError, match="1 or more, got 0"):
        checkpoint.convert(tmp_path / "c", tmp_path / "d", maximum_shard_bytes=0)
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        checkpoint.convert(tmp_path / "e", tmp_path / "d")
    save_file(ONE, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="is not a checkpoint; convert reads"):
        checkpoint.consolidate(tmp_path / "x.safetensors", tmp_path / "y.safetensors")


@pytest.mark.parametrize("form", list(checkpoint.CheckpointForm))
@pytest.mark.parametrize("when", ["write", "rename", "room", "bits"])
def test_a_failure_leaves_nothing(
    form: str, when: str, tmp_path: Path, fakes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(fakes, tmp_path / "c")
    message = "Input/output error"

    def fail(*_: Any) -> None:
        raise OSError(5, message)

    if when == "room":
        monkeypatch.setattr(disk, "free_bytes", lambda _: 10)
        message = "not enough room: .* bytes are needed and 10 are free"
    elif when == "bits":
        file = next((tmp_path / "c").glob("rank00001*"))
        content = bytearray(file.read_bytes())
        content[-3] ^= 4
        file.write_bytes(content)
        message = "do not have the checksum"
    else:
        monkeypatch.setattr(disk, {"write": "write_file", "rename": "rename"}[when], fail)
    with pytest.raises(OSError, match=message):
        checkpoint.convert(tmp_path / "c", tmp_path / "new", form)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
