"""``mpishard checkpoint``: output, files and exit codes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zlib
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
    """The checkpoints of a run of eight steps, which no test changes."""
    path: Path = tmp_path_factory.mktemp("runs") / "run"
    x = np.random.default_rng(0).standard_normal((32, 4))

    def train(backend: Any) -> None:
        pair = [
            ms.as_distributed(each, backend, "fsdp")
            for each in (ms.nn.MLP([4, 6, 1], seed=0), ms.optimizers.AdamW(1e-2))
        ]
        pair[1].optimize(
            ms.OptimizationInputData(
                model=pair[0],
                x_train=x,
                y_train=x[:, :1],
                batch_size=8,
                epochs=2,
                progress=False,
                checkpoint=path,
                checkpoint_every=3,
            )
        )

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


def test_a_pipe_that_nobody_reads_ends_a_check_in_silence(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "mpishard", "checkpoint", "check", folder, "--all"]
    with os.fdopen(writer, "w") as output:
        ended = subprocess.run(words, stdout=output, check=False)
    assert (ended.returncode, capfd.readouterr().err) == (1, "")


def test_inspect_lists_a_folder(folder: Path, damaged: Path) -> None:
    found = read("inspect", folder, "--json")
    assert found["latest"] == "step-00000008"
    assert [(c["name"], c["step"], c["whole"]) for c in found["checkpoints"]] == [
        ("step-00000008", 8, True),
        ("step-00000006", 6, True),
    ]
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
    assert f"step-00000006: {missing}" in invoke("inspect", damaged).stdout.splitlines()


@pytest.fixture
def without_manifests(folder: Path, tmp_path: Path) -> Path:
    """A folder of four, of which steps 8, that `latest` names, and 5 have no manifest."""
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    shutil.copytree(copy / "step-00000006", copy / "step-00000005")
    shutil.copytree(copy / "step-00000006", copy / "step-00000004")
    for step in (5, 8):
        (copy / f"step-{step:08d}" / "manifest.json").unlink()
    return copy


def test_inspect_lists_broken_ones_at_their_place(without_manifests: Path) -> None:
    found = read("inspect", without_manifests, "--json")["checkpoints"]
    assert [entry["step"] for entry in found] == [8, 6, 5, 4]
    assert [entry["problem"] for entry in found] == ["it has no manifest.json", ""] * 2
    lines = invoke("inspect", without_manifests).stdout.splitlines()
    states = [line.split("│")[-2].strip() for line in lines if "│" in line and "step-" in line]
    assert states == ["broken, latest", "whole", "broken", "whole"]
    assert lines[-2:] == [f"step-0000000{step}: it has no manifest.json" for step in (8, 5)]


def test_check_reports_each_without_a_manifest(without_manifests: Path) -> None:
    newest = f"mpishard checkpoint: the newest that is whole is {without_manifests}/step-00000006"
    result = invoke("check", without_manifests, "--all")
    assert result.exit_code == 1
    assert [line.split("/")[-1] for line in result.stdout.splitlines() if "damaged" in line] == [
        "step-00000008 is damaged:",
        "step-00000005 is damaged:",
    ]
    assert result.stdout.count("  manifest.json: it is missing") == 2
    assert result.stdout.count("is whole") == 2
    summary = "mpishard checkpoint: 2 of 4 checkpoints cannot be trusted"
    assert result.stderr.splitlines() == [summary, newest]
    result = invoke("check", without_manifests)
    assert result.exit_code == 1
    assert "step-00000008 is damaged:\n  manifest.json: it is missing" in result.stdout
    summary = "mpishard checkpoint: 1 of 1 checkpoint cannot be trusted"
    assert result.stderr.splitlines() == [summary, newest]


def test_check_follows_latest(without_manifests: Path) -> None:
    (without_manifests / "step-00000008").rename(without_manifests.parent / "lost")
    result = invoke("check", without_manifests)
    assert result.exit_code == 1
    assert "latest names 'step-00000008', which is not there" in result.stdout
    assert "step-00000006 is whole" in result.stdout
    assert "which is not there" in invoke("inspect", without_manifests).stdout
    (without_manifests / "latest").write_text("step-00000005\n")
    result = invoke("check", without_manifests)
    assert (result.exit_code, result.stdout.count("is damaged")) == (1, 1)
    # As a save that was killed between its renames leaves it: nothing is wrong.
    (without_manifests / "step-00000004").rename(without_manifests / "step-00000004.previous")
    (without_manifests / "latest").write_text("step-00000004\n")
    result = invoke("check", without_manifests)
    assert (result.exit_code, result.stdout.count("is whole")) == (0, 2)


def test_inspect_shortens_histories(tmp_path: Path) -> None:
    metadata = {"losses": [0.5] * 200 + [float("nan")], "words": "x" * 300, "few": [1, 2]}
    ms.checkpoint.save(tmp_path / "c", ms.nn.MLP([2, 1], seed=0), metadata=metadata)
    text = invoke("inspect", tmp_path / "c").stdout
    assert '"losses": "(201 items)", "words": "(300 characters)", "few": [1, 2]' in text
    user = read("inspect", tmp_path / "c", "--json")["metadata"]["user"]
    assert user["losses"] == [0.5] * 200 + [{"$float": "NaN"}]
    assert user["words"] == metadata["words"]


def test_inspect_shows_the_content_of_a_checkpoint(folder: Path) -> None:
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
    assert "have the checksum that they were written with; tensors there: param" in lines[1]
    assert lines[3].startswith("  rank00000.safetensors: it is missing; tensors there: parameters")
    assert result.stderr.splitlines()[-1].endswith("none is whole")
    assert invoke("check", damaged).exit_code == 1
    assert invoke("check", damaged / "step-00000006").exit_code == 1
    (damaged / "step-00000008" / "manifest.json").write_text("{}")
    assert invoke("check", damaged).stdout.startswith(f"{damaged / 'step-00000008'} is damaged")
    words = invoke("check", damaged / "step-00000008").stdout
    assert "  manifest.json: its format is not" in words


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


def test_a_checkpoint_is_consolidated_and_converted_back(folder: Path, tmp_path: Path) -> None:
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


def test_a_target_that_is_named_like_another_file_needs_a_form(
    folder: Path, tmp_path: Path
) -> None:
    assert invoke("convert", folder, tmp_path / "v1.2").exit_code == 0
    assert invoke("convert", folder, tmp_path / "x.bin", "--to", "hf").exit_code == 0
    assert (tmp_path / "x.bin" / "model.safetensors.index.json").is_file()


def test_forged_metadata_are_no_traceback(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "step-00000008", tmp_path / "c")
    manifest = tmp_path / "c" / "manifest.json"
    content = json.loads(manifest.read_text())["content"]
    lies = [
        (3, "metadata.model must be an object, got 3"),
        ({"steps": "many"}, "metadata.model.steps must be a whole number from 0 on"),
    ]
    for model, words in lies:
        content["metadata"]["model"] = model
        text = json.dumps(content)
        manifest.write_text(
            f'{{"format": "mpishard checkpoint", "version": 3, '
            f'"crc32": {zlib.crc32(text.encode())}, "content": {text}}}'
        )
        result = invoke("inspect", tmp_path / "c")
        assert result.exit_code == 2
        assert words in result.stderr
        assert str(manifest) in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("inspect", "none"), "there is no checkpoint"),
        (("check", "none"), "there is no checkpoint"),
        (("inspect", ""), "must not be blank, got ''"),
        (("check", " "), "must not be blank, got ' '"),
        (("consolidate", "", "x.safetensors"), "must not be blank"),
        (("consolidate", "run", ""), "must not be blank"),
        (("convert", "", "x"), "must not be blank"),
        (("convert", "run", ""), "must not be blank"),
        (("consolidate", "none", "x.safetensors"), "there is no checkpoint"),
        (("convert", "none", "x"), "there is no checkpoint"),
        (("consolidate", "run", "x"), "whose name must end with .safetensors"),
        (("convert", "run", "run"), "run already exists"),
        (("convert", "run", "x", "--max-shard-size", "5 parsecs"), "got '5 parsecs'"),
        (("convert", "run", "x", "--max-shard-size", "0"), "got '0'"),
        (("convert", "run", "x", "--to", "gguf"), "gguf"),
        (("convert", "run", "x.pt"), ".pt files are not written"),
        (("convert", "run", "x.NPZ"), 'whose form is "checkpoint" or "hf"'),
    ],
)
def test_impossible_requests_are_refused(
    arguments: tuple[str, ...], words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert [entry.name for entry in folder.parent.iterdir()] == ["run"]
