"""All of a checkpoint or nothing of it."""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpishard import as_distributed, checkpoint, nn, run_in_threads
from mpishard.checkpoint import CheckpointFolder, CheckpointReader, write_checkpoint
from mpishard.checkpoint.format import disk
from mpishard.checkpoint.saving import free_space
from mpishard.errors import CheckpointError
from mpishard.sharding import ParameterEntry, Placement, Region


def save(backend: Any, fakes: Any, path: Path, seed: int) -> None:
    checkpoint.save(path, fakes.Model(backend, fakes.values(seed)), metadata={"seed": seed})


def seed_of(path: Path, fakes: Any) -> int:
    """The seed of the save at ``path``, whose checksums are compared."""
    seed: int = checkpoint.check(path).metadata["user"]["seed"]
    model = fakes.Model(None, np.zeros(fakes.LENGTH))
    checkpoint.load(path, model)
    assert model.equals({"parameters": fakes.values(seed)})
    return seed


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def test_a_save_to_the_same_path_leaves_only_the_new_checkpoint(tmp_path: Path, fakes: Any) -> None:
    for world_size, seed in [(3, 1), (1, 2), (2, 3)]:
        run_in_threads(world_size, save, fakes, tmp_path / "c", seed)
        assert seed_of(tmp_path / "c", fakes) == seed
        assert names(tmp_path) == ["c"]
        assert len(names(tmp_path / "c")) == world_size + 1


def test_missing_parent_directories_are_made(tmp_path: Path, fakes: Any) -> None:
    run_in_threads(2, save, fakes, tmp_path / "runs" / "one" / "c", 1)
    assert seed_of(tmp_path / "runs" / "one" / "c", fakes) == 1


def test_a_path_whose_bytes_are_not_utf8(tmp_path: Path, fakes: Any) -> None:
    path = tmp_path / os.fsdecode(b"gewicht\xe4")
    run_in_threads(2, save, fakes, path, 1)
    assert seed_of(path, fakes) == 1


def test_a_symbolic_link_is_followed(tmp_path: Path, fakes: Any) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "c")
    for seed in (1, 2):
        save(None, fakes, tmp_path / "link", seed)
        assert seed_of(tmp_path / "link", fakes) == seed
    assert (tmp_path / "link").is_symlink()
    assert names(tmp_path / "disk") == ["c"]


@pytest.mark.parametrize("existing", [True, False])
@pytest.mark.parametrize("failing", [0, 2])
def test_if_a_rank_cannot_write_the_old_checkpoint_stays(
    failing: int, existing: bool, tmp_path: Path, fakes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if existing:
        run_in_threads(3, save, fakes, tmp_path / "c", 1)
    real = disk.write_file

    def full_disk(file: Path, parts: Any) -> None:
        real(file, parts)
        if f"rank{failing:05d}" in file.name:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "write_file", full_disk)

    def work(backend: Any) -> str:
        with pytest.raises(CheckpointError, match="No space left") as caught:
            save(backend, fakes, tmp_path / "c", 2)
        backend.barrier()
        return str(caught.value)

    messages = run_in_threads(3, work)
    monkeypatch.undo()
    assert len(set(messages)) == 1, "all ranks say the same"
    assert re.search(
        rf"what was there is as it was; rank {failing}: .*: [\d,]+ bytes are needed and [\d,]+ are "
        "free in ",
        messages[0],
    )
    assert names(tmp_path) == (["c"] if existing else [])
    if existing:
        assert seed_of(tmp_path / "c", fakes) == 1


def test_if_a_rank_is_interrupted_the_old_checkpoint_stays(
    tmp_path: Path, fakes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_in_threads(2, save, fakes, tmp_path / "c", 1)
    real = disk.write_file

    def interrupt(file: Path, parts: Any) -> None:
        if "rank00001" in file.name:
            raise KeyboardInterrupt
        real(file, parts)

    monkeypatch.setattr(disk, "write_file", interrupt)
    with pytest.raises(CheckpointError, match="rank 1: KeyboardInterrupt"):
        run_in_threads(2, save, fakes, tmp_path / "c", 2)
    monkeypatch.undo()
    assert names(tmp_path) == ["c"]
    assert seed_of(tmp_path / "c", fakes) == 1


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_if_a_process_ends_between_renames_a_complete_checkpoint_is_there(
    renames: int, tmp_path: Path, fakes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(None, fakes, tmp_path / "c", 1)
    real, done = os.rename, []

    def rename(source: Any, target: Any) -> None:
        if len(done) == renames:
            raise Killed
        real(source, target)
        done.append(target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        # A killed process tidies nothing up.
        patch.setattr(disk, "remove_tree", lambda _: None)
        if renames == 2:
            save(None, fakes, tmp_path / "c", 2)
        else:
            with pytest.raises(CheckpointError, match="Killed"):
                save(None, fakes, tmp_path / "c", 2)
    assert seed_of(tmp_path / "c", fakes) == (2 if renames == 2 else 1)
    assert (tmp_path / "c").exists() == (renames != 1)
    assert len(names(tmp_path)) == 2

    save(None, fakes, tmp_path / "c", 3)
    assert names(tmp_path) == ["c"], "the next save tidies up"
    assert seed_of(tmp_path / "c", fakes) == 3


def test_a_second_rename_that_fails_is_undone(
    tmp_path: Path, fakes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(None, fakes, tmp_path / "c", 1)
    real = os.rename

    def rename(source: Any, target: Any) -> None:
        if str(source).endswith(".tmp"):
            raise PermissionError("no renaming")
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        with pytest.raises(CheckpointError, match="PermissionError: no renaming"):
            save(None, fakes, tmp_path / "c", 2)
    assert names(tmp_path) == ["c"]
    assert seed_of(tmp_path / "c", fakes) == 1


def test_a_directory_with_other_files_is_not_replaced(tmp_path: Path, fakes: Any) -> None:
    save(None, fakes, tmp_path / "c", 1)
    (tmp_path / "c" / "metrics.jsonl").write_text("{}\n")

    def work(backend: Any) -> None:
        with pytest.raises(CheckpointError, match=r"holds metrics.jsonl, which .* path of its own"):
            save(backend, fakes, tmp_path / "c", 2)

    run_in_threads(2, work)
    assert seed_of(tmp_path / "c", fakes) == 1
    assert (tmp_path / "c" / "metrics.jsonl").exists()


def test_the_root_and_a_directory_of_others_are_refused_with_a_place_to_save_to(
    tmp_path: Path, fakes: Any
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").touch()
    place = re.escape(str(tmp_path / "mine" / "checkpoint"))
    with pytest.raises(CheckpointError, match=rf"mine holds notes, which .* such as {place}$"):
        save(None, fakes, tmp_path / "mine", 1)
    with pytest.raises(CheckpointError, match=r"^/ holds .* path of its own, such as /checkpoint$"):
        save(None, fakes, Path("/"), 1)
    with pytest.raises(FileNotFoundError, match=r"^/ holds no manifest\.json"):
        CheckpointReader("/")


@pytest.mark.parametrize("path", ["~", "~/runs/a", "~someone/a"])
def test_no_directory_of_the_name_of_the_home_directory_is_made(tmp_path, monkeypatch, path):
    """A user who removes it by name might remove the home directory."""
    monkeypatch.chdir(tmp_path)
    model = nn.MLP([2, 2])
    for member in (model.save_model, model.load_model, CheckpointFolder):
        with pytest.raises(ValueError, match=rf"expanduser\('{path}'\)"):
            member(path)
    assert not names(tmp_path)
    model.save_model("./~mine")
    assert names(tmp_path) == ["~mine"]


def test_a_file_is_not_replaced(tmp_path: Path, fakes: Any) -> None:
    (tmp_path / "c").write_text("mine")
    with pytest.raises(CheckpointError, match="is a file"):
        save(None, fakes, tmp_path / "c", 1)
    assert (tmp_path / "c").read_text() == "mine"


def test_a_blank_path_of_a_sharded_model_is_refused() -> None:
    def ask(backend: Any) -> None:
        model = as_distributed(nn.MLP([2, 2]), backend)
        for path in ("", " "):
            for member in (model.save_model, model.load_model):
                with pytest.raises(ValueError, match="blank"):
                    member(path)

    run_in_threads(2, ask)


def test_a_blank_path_is_refused(fakes: Any) -> None:
    with pytest.raises(ValueError, match="blank"):
        save(None, fakes, Path(" "), 1)


def test_a_directory_that_a_rank_cannot_see_is_named(
    tmp_path: Path, fakes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, ranks = free_space.path_from, threading.local()

    def elsewhere(text: str) -> Path | None:
        shared = real(text)
        if shared is None or ranks.mine == 0:
            return shared
        return Path("/nowhere", shared.relative_to(tmp_path))

    monkeypatch.setattr(free_space, "path_from", elsewhere)

    def work(backend: Any) -> None:
        ranks.mine = backend.rank
        with pytest.raises(CheckpointError, match=r"rank 1: .* is not there: .* all ranks share"):
            save(backend, fakes, tmp_path / "c", 1)

    run_in_threads(2, work)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        (
            [(0, 13), (3, 2)],
            r"elements 3 to 5 of a.weight are held twice, by rank00000.safetensors and rank00001",
        ),
        ([(0, 13), (5, 1), (4, 3)], r"elements 4 to 5 of a.weight are held twice"),
        ([(0, 13), (5, 1), (5, 2)], r"elements 5 to 6 of a.weight are held 3 times, by .* others"),
        ([(0, 4), (5, 8)], "nothing holds elements 4 to 5 of a.weight"),
        ([(0, 12)], "nothing holds elements 3 to 4 of b.weight"),
        ([(1, 12)], "nothing holds elements 0 to 1 of a.weight"),
        ([(0, 8), (9, 4)], "nothing holds elements 0 to 1 of b.scale"),
        ([], "nothing holds elements 0 to 6 of a.weight"),
    ],
)
def test_pieces_must_cover_each_parameter_exactly_once(
    pieces: list[tuple[int, int]], message: str, tmp_path: Path, fakes: Any
) -> None:
    save(None, fakes, tmp_path / "c", 1)
    placement = Placement.whole(fakes.entries())

    def work(backend: Any) -> None:
        mine = pieces[backend.rank :: 2]
        arrays = {"parameters": placement.cut([(start, np.zeros(size)) for start, size in mine])}
        with pytest.raises(CheckpointError, match=message):
            write_checkpoint(tmp_path / "c", backend, placement.entries, np.dtype("f8"), arrays, {})

    run_in_threads(2, work)
    assert names(tmp_path) == ["c"]
    assert seed_of(tmp_path / "c", fakes) == 1


def test_small_parameters_share_pieces(tmp_path: Path) -> None:
    """With one piece for each, 20,000 parameters took 14 s to load."""

    def work(backend: Any) -> None:
        chain = nn.Sequential(*(nn.LayerNorm(3) for _ in range(500)))
        plain = nn.Model(chain, nn.MSE(), input_shape=(3,), dtype="float32")
        model = as_distributed(plain, backend, "fsdp")
        checkpoint.save(tmp_path / "c", model)
        pieces = json.loads((tmp_path / "c" / "manifest.json").read_text())["content"]["arrays"]
        units = len(model.engine.layout.units)
        assert len(pieces["parameters"]["pieces"]) <= 2 * units < 100, units
        saved = model.gather_full_parameters()
        model.set_parameters(np.zeros_like(saved))
        checkpoint.load(tmp_path / "c", model)
        assert model.gather_full_parameters().tobytes() == saved.tobytes()

    run_in_threads(2, work)


def test_ranks_with_other_parameters_cannot_save_together(tmp_path: Path) -> None:
    """A range of the flat vector would have other parameters on each of them."""

    def work(backend: Any) -> None:
        names = ("a", "b") if backend.rank == 0 else ("b", "a")
        entries = [ParameterEntry(name, (2,), 2 * n) for n, name in enumerate(names)]
        start = 2 * backend.rank
        arrays = {"parameters": Placement.whole(entries).cut([(start, np.zeros(2))])}
        with pytest.raises(
            CheckpointError, match=r"wrote rank00001.* other parameters than rank 0"
        ):
            write_checkpoint(tmp_path / "c", backend, entries, np.dtype("f8"), arrays, {})

    run_in_threads(2, work)
    assert names(tmp_path) == []


ALL = Region("w", ((0, 13),), 0, 13)


@pytest.mark.parametrize(
    ("pieces", "metadata", "error", "message"),
    [
        ([(ALL, np.zeros((13, 1)))], {}, ValueError, r"has shape \(13,\), got \(13, 1\)"),
        ([(ALL, np.zeros(12))], {}, ValueError, r"w\[0:13\]\[0:13\] has shape .*, got \(12,\)"),
        ([(ALL, np.zeros(13))] * 2, {}, ValueError, r"w\[0:13\]\[0:13\] is given twice"),
        ([(ALL, np.zeros(13))], {"f": {1}}, TypeError, "metadata .* holds a set"),
        ([(ALL, np.zeros(13, "f4"))], {}, CheckpointError, "float64.*float32"),
        (None, {}, CheckpointError, "no parameters"),
        (
            [
                (Region("w", ((0, 13),), 0, 6), np.zeros(6, "f4")),
                (Region("w", ((0, 13),), 6, 13), np.zeros(7)),
            ],
            {},
            CheckpointError,
            r"\['float32', 'float64'\]",
        ),
        ([(ALL, np.zeros(13, complex))], {}, CheckpointError, "dtype complex128, which no saf"),
        ([(Region("w", ((0, 14),), 0, 14), np.zeros(14))], {}, CheckpointError,
         r"w\[0:14\]\[0:14\] is not a part of a tensor of shape \(13,\)"),
        ([(Region("v", ((0, 13),), 0, 13), np.zeros(13))], {}, CheckpointError,
         "rank00000.safetensors holds a piece of 'v', which is not a parameter"),
    ],
)  # fmt: skip
def test_arrays_and_metadata_that_cannot_be_written_are_refused(
    pieces: Any, metadata: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    entry = ParameterEntry("w", (13,), 0)
    arrays = {"optimizer/m": []} if pieces is None else {"parameters": pieces}
    with pytest.raises(error, match=message):
        write_checkpoint(tmp_path / "c", None, [entry], np.dtype("f8"), arrays, metadata)
    assert names(tmp_path) == []


def test_pieces_need_not_be_contiguous(tmp_path: Path) -> None:
    vector = np.arange(26.0)[::2]
    write_checkpoint(
        tmp_path / "c",
        None,
        [ParameterEntry("w", (13,), 0)],
        vector.dtype,
        {"parameters": [(ALL, vector)]},
        {},
    )
    out = np.empty(13)
    with CheckpointReader(tmp_path / "c") as reader:
        reader.read("parameters", ALL, out)
    assert out.tobytes() == vector.tobytes()
