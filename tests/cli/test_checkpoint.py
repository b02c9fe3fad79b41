"""``mpishard checkpoint``: what it prints, what it makes, and how it ends."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner, Result

import mpishard as ms
from mpishard.cli import app


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run of eight steps leaves; nobody changes it."""
    path: Path = tmp_path_factory.mktemp("runs") / "run"
    x = np.random.default_rng(0).standard_normal((32, 4))

    def train(backend: Any) -> None:
        pair = [
            ms.as_distributed(each, backend, "fsdp")
            for each in (ms.nn.MLP([4, 6, 1], seed=0), ms.optimizers.AdamW(1e-2))
        ]
        pair[1].optimize(
            ms.OptimizationInputData(
                model=pair[0], x_train=x, y_train=x[:, :1], batch_size=8, epochs=2, progress=False,
                checkpoint=path, checkpoint_every=3,
            )
        )  # fmt: skip

    ms.run_in_threads(2, train)
    return path


@pytest.fixture
def damaged(folder: Path, tmp_path: Path) -> Path:
    """A copy whose newest has a flipped bit, and whose oldest lacks a file."""
    shutil.copytree(folder, tmp_path / "run")
    newest = tmp_path / "run" / "step-00000008" / "rank00001.safetensors"
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    (tmp_path / "run" / "step-00000006" / "rank00000.safetensors").unlink()
    return tmp_path / "run"


def invoke(*arguments: Any) -> Result:
    result = CliRunner().invoke(app, ["checkpoint", *(str(a) for a in arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def read(*arguments: Any) -> Any:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_inspect_lists_a_folder(folder: Path, damaged: Path) -> None:
    found = read("inspect", folder, "--json")
    assert found["latest"] == "step-00000008"
    assert [(c["name"], c["step"], c["whole"]) for c in found["checkpoints"]] == [
        ("step-00000008", 8, True), ("step-00000006", 6, True)
    ]  # fmt: skip
    for entry in found["checkpoints"]:
        sizes = [f.stat().st_size for f in (folder / entry["name"]).iterdir()]
        assert entry["bytes"] == sum(sizes)
    result = invoke("inspect", folder)
    assert result.exit_code == 0
    rows = [line for line in result.stdout.splitlines() if "step-" in line]
    assert ["whole, latest" in row for row in rows] == [True, False]
    # Lengths are compared and nothing is read: a missing file is seen, a flipped bit is not.
    problems = {c["name"]: c["problem"] for c in read("inspect", damaged, "--json")["checkpoints"]}
    missing = "rank00000.safetensors is missing"
    assert problems == {"step-00000008": "", "step-00000006": missing}
    assert missing in invoke("inspect", damaged).stdout


def test_inspect_says_what_a_checkpoint_holds(folder: Path) -> None:
    found = read("inspect", folder / "step-00000006", "--json")
    assert (found["step"], found["strategy"], found["world_size"]) == (6, "FSDP", 2)
    assert found["elements"] == 4 * 6 + 6 + 6 + 1
    assert found["parameters"]["linear0.weight"] == [6, 4]
    assert found["kinds"]["optimizer/AdamW/first_moment"] == "float64"
    assert found["metadata"]["user"]["training_loop"]["step"] == 6
    assert list(found["files"]) == ["rank00000.safetensors", "rank00001.safetensors"]
    text = invoke("inspect", folder / "step-00000006").stdout
    assert "after step 6; FSDP on 2 ranks" in text
    assert "6 x 4" in text
    assert "4 parameters, 37 elements" in text


def test_check(folder: Path, damaged: Path) -> None:
    result = invoke("check", folder)
    assert result.exit_code == 0
    assert "step-00000008 is whole: 37 elements" in result.stdout
    assert "step-00000006" not in result.stdout
    assert invoke("check", folder, "--all").stdout.count("is whole") == 2
    result = invoke("check", damaged, "--all")
    assert result.exit_code == 1
    assert "2 of 2 checkpoints cannot be trusted" in result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].endswith("step-00000008 is damaged:")
    assert lines[1].startswith("  rank00001.safetensors: bytes 0 to ")
    assert "do not have the checksum that they were written with; there are parameters" in lines[1]
    assert lines[3].startswith("  rank00000.safetensors: it is missing; there are parameters of")
    assert invoke("check", damaged).exit_code == 1
    assert invoke("check", damaged / "step-00000006").exit_code == 1
    (damaged / "step-00000008" / "manifest.json").write_text("{}")
    assert invoke("check", damaged).stdout.startswith(f"{damaged / 'step-00000008'} is damaged")
    words = invoke("check", damaged / "step-00000008").stdout
    assert "  manifest.json: it does not say that its format" in words


def test_problems_name_file_tensor_and_reason(damaged: Path) -> None:
    problems = ms.checkpoint.find_problems(damaged / "step-00000006")
    assert [(p.file, p.reason) for p in problems] == [("rank00000.safetensors", "it is missing")]
    assert "parameters of linear0.weight" in problems[0].tensors
    seen: list[tuple[int, int]] = []
    (problem,) = ms.checkpoint.find_problems(damaged, lambda *pair: seen.append(pair))
    assert problem.file == "rank00001.safetensors"
    assert seen[-1][0] == seen[-1][1] == sum(read_sizes(damaged / "step-00000008"))
    assert ms.checkpoint.describe(damaged).parameter_count == 37


def read_sizes(directory: Path) -> list[int]:
    return [file.stat().st_size for file in directory.glob("*.safetensors")]


def test_out_and_in_again(folder: Path, tmp_path: Path) -> None:
    result = invoke("consolidate", folder, tmp_path / "all.safetensors", "--optimizer")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(f"{tmp_path / 'all.safetensors'}: 1 file, ")
    arrays = load_file(tmp_path / "all.safetensors")
    wanted = ms.checkpoint.load_arrays(folder)
    assert len(arrays) == 12
    assert "optimizer/AdamW/first_moment/linear1.bias" in arrays
    for name, array in wanted.items():
        assert arrays[name].tobytes() == array.tobytes()
    assert invoke("convert", tmp_path / "all.safetensors", tmp_path / "c").exit_code == 0
    assert invoke("check", tmp_path / "c").exit_code == 0
    result = invoke("convert", tmp_path / "c", tmp_path / "hf", "--max-shard-size", "0.1KB")
    assert result.stdout == f"{tmp_path / 'hf'}: 4 files, {result.stdout.split(', ')[1]}"
    result = invoke("convert", tmp_path / "hf", tmp_path / "c2", "--to", "checkpoint")
    assert result.exit_code == 0, result.stderr
    for name, array in ms.checkpoint.load_arrays(tmp_path / "c2").items():
        assert wanted[name].tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("inspect", "none"), "there is no checkpoint"),
        (("check", "none"), "there is no checkpoint"),
        (("consolidate", "none", "x.safetensors"), "there is no checkpoint"),
        (("convert", "none", "x"), "there is no checkpoint"),
        (("consolidate", "run", "x"), "its name ends with .safetensors"),
        (("convert", "run", "run"), "there is something at"),
        (("convert", "run", "x", "--max-shard-size", "5 parsecs"), "got '5 parsecs'"),
        (("convert", "run", "x", "--max-shard-size", "0"), "got '0'"),
        (("convert", "run", "x", "--to", "gguf"), "gguf"),
    ],
)
def test_what_cannot_be_done(
    arguments: tuple[str, ...], words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert [entry.name for entry in folder.parent.iterdir()] == ["run"]
