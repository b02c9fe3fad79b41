"""Damaged checkpoints are refused with a reason, or read bit for bit, without crash or hang."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from mutations import MUTATIONS, lie, seal
from places import Place

from mpishard import checkpoint, run_in_threads
from mpishard.checkpoint import newest_valid
from mpishard.errors import CheckpointError

SHAPES = {"a.weight": (6, 4), "a.bias": (4,), "b.scale": (), "b.empty": (0, 3), "b.weight": (9, 5)}
LENGTH = 24 + 4 + 1 + 45
MEMORY = 1 << 30  # bytes that a checkpoint of some kilobytes never needs
LEAST = 100  # trials, of which some of each kind happen


class Watch:
    """Sees what the interpreter does while it reads: what it opens, and whether it runs code."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.is_on = False
        self.seen: list[str] = []
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        if event == "open":
            path = arguments[0]
            if isinstance(path, str | bytes) and not str(path).startswith(self.folder):
                self.seen.append(f"opens {path!r}")
        elif event in ("exec", "compile", "import", "pickle.find_class", "os.system") or (
            event.startswith(("subprocess.", "ctypes.dlopen", "socket."))
        ):
            self.seen.append(f"{event} {arguments}")


@contextmanager
def little_memory() -> Iterator[None]:
    """A process that may have so much more, and no more."""
    used = next(
        int(line.split()[1]) << 10
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmSize")
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def save(backend: Any, fakes: Any, path: Path, seed: int) -> None:
    model, optimizer = states(backend, fakes, seed)
    checkpoint.save(path, model, optimizer, metadata={"seed": seed})


def states(backend: Any, fakes: Any, seed: int) -> tuple[Any, Any]:
    vectors = [fakes.values(s, d, LENGTH) for s, d in ((seed, "f8"), (seed + 50, "f4"))]
    optimizer = fakes.Optimizer(backend, {"m": vectors[1]}, shapes=SHAPES)
    return fakes.Model(backend, vectors[0], SHAPES), optimizer


def bits(*given: Any) -> list[bytes]:
    return [array.tobytes() for state in given for p in state.pieces.values() for _, array in p]


def outcome(reading: Callable[[], Any], path: Path) -> str:
    """The outcome of a load: refused with a reason, or read."""
    try:
        reading()
    except (CheckpointError, FileNotFoundError) as error:
        said = str(error)
    else:
        return "read"
    assert str(path) in said, f"the message names no file: {said}"
    return "refused"


def test_damaged_checkpoints_are_refused_or_read_bit_for_bit(
    tmp_path: Path, fakes: Any, torture: Any
) -> None:
    for seed, name in ((1, "one"), (2, "other")):
        run_in_threads(3, save, fakes, tmp_path / "good" / name, seed)
    right = states(None, fakes, 1)
    arrays = checkpoint.load_arrays(tmp_path / "good" / "one")
    watch = Watch(tmp_path)
    kinds, outcomes = sorted(MUTATIONS), Counter[str]()
    count = max(LEAST, torture.count(250, 50_000))
    place = tmp_path / "spoilt"

    def load_arrays() -> None:
        # What has no elements lies in no file: its name is what the manifest says.
        found, wanted = (
            {name: (array.shape, array.tobytes()) for name, array in given.items() if array.size}
            for given in (checkpoint.load_arrays(place / "one"), arrays)
        )
        assert found == wanted

    def load() -> None:
        model, optimizer = states(None, fakes, 3)
        before = bits(model, optimizer)
        try:
            checkpoint.load(place / "one", model, optimizer)
        except CheckpointError as error:
            found_on_the_way = "do not have the checksum", "cannot read", "header", "no metadata"
            if not any(words in str(error) for words in found_on_the_way):
                assert bits(model, optimizer) == before
            raise
        assert bits(model, optimizer) == bits(*right)

    def find_problems() -> None:
        problems = checkpoint.find_problems(place / "one")
        if problems:
            raise CheckpointError(f"{place / 'one'}: {problems}")

    readings = [lambda: checkpoint.check(place / "one"), find_problems, load, load_arrays]
    with little_memory():
        for number in range(count):
            dice = torture.dice(number)
            kind = kinds[number % len(kinds)]
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(tmp_path / "good", place)
            MUTATIONS[kind](place, dice)
            dice.shuffle(readings)
            try:
                watch.is_on = True
                said = [outcome(reading, place / "one") for reading in readings]
                watch.is_on = False
            except BaseException as error:
                watch.is_on = False
                error.add_note(f"trial {number}: {kind}")
                raise
            assert not watch.seen, f"trial {number}: {kind}: {watch.seen}"
            outcomes.update(said)
    assert outcomes["refused"] > outcomes["read"] > 0
    torture.saw(
        f"{count} spoilt checkpoints of {len(kinds)} kinds, each read in 4 ways: "
        f"{outcomes['refused']} times refused, {outcomes['read']} times the right bits"
    )


def read_spoilt(tmp_path: Path, fakes: Any, change: Callable[[dict[str, Any]], None]) -> str:
    """Why a checkpoint, whose manifest an adversary changed, is refused."""
    save(None, fakes, tmp_path / "one", 1)
    manifest = tmp_path / "one" / "manifest.json"
    content = json.loads(manifest.read_text())["content"]
    change(content)
    manifest.write_text(seal(json.dumps(content)))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.check(tmp_path / "one")
    return str(caught.value)


def twice(content: dict[str, Any]) -> None:
    first = content["parameters"][0]
    content["parameters"].append(dict(first, start=content["length"]))
    content["length"] += 24


def crossed(content: dict[str, Any]) -> None:
    pieces = content["arrays"]["parameters"]["pieces"]
    one, other = (
        next(p for p in pieces if p["tensor"] == f"a.{name}") for name in ("bias", "weight")
    )
    one["offset"], other["offset"] = other["offset"], one["offset"]


def outside(content: dict[str, Any]) -> None:
    content["files"]["../../etc/passwd"] = content["files"].pop("rank00000.safetensors")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (twice, "two parameters named 'a.weight'"),
        (crossed, r"rank00000.safetensors: its header and the manifest differ: parameters@a"),
        (outside, "'../../etc/passwd' is not the name of a file"),
        (lambda content: content.update(sequence=0), "its save number is 0"),
        (lambda content: content.update(sequence=10**40), "its save number is 1000"),
        (lambda c: c["parameters"][3].update(shape=[0, 2**62]), r"'b.empty' .*is too large"),
        (lambda c: c["parameters"][3].update(shape=[0] * 33), r"'b.empty' .*32 dims"),
    ],
)
def test_forged_manifests_are_refused_with_a_reason(
    change: Callable[[dict[str, Any]], None], words: str, tmp_path: Path, fakes: Any
) -> None:
    assert re.search(words, read_spoilt(tmp_path, fakes, change))


@pytest.mark.parametrize("kind", ["pipe", "zeros", "long", "directory"])
def test_a_manifest_that_is_no_regular_file_is_refused_at_once(
    kind: str, tmp_path: Path, fakes: Any
) -> None:
    """It is not read into memory. In a folder, the run resumes from another checkpoint."""
    for step in (1, 2):
        Place(tmp_path, fakes, is_folder=True).save(step, step, 1)
    manifest = tmp_path / "job" / "c" / "step-00000002" / "manifest.json"
    text = manifest.read_bytes()
    manifest.unlink()
    if kind == "pipe":
        os.mkfifo(manifest)
    elif kind == "zeros":
        manifest.symlink_to("/dev/zero")
    elif kind == "long":
        manifest.write_bytes(text)
        os.truncate(manifest, 1 << 40)
    else:
        manifest.mkdir()
    with little_memory():
        assert newest_valid(tmp_path / "job" / "c") == manifest.parents[1] / "step-00000001"
        with pytest.raises((CheckpointError, FileNotFoundError), match="manifest"):
            checkpoint.check(manifest.parent)


def test_damaged_safetensors_files_and_indexes_are_converted_or_refused(
    tmp_path: Path, fakes: Any, torture: Any
) -> None:
    """Safetensors files and indexes that lie: converted, or refused."""
    save(None, fakes, tmp_path / "c", 1)
    checkpoint.convert(tmp_path / "c", tmp_path / "one.safetensors")
    checkpoint.convert(tmp_path / "c", tmp_path / "hf", "hf", maximum_shard_bytes=300)
    files = [tmp_path / "one.safetensors", *sorted((tmp_path / "hf").iterdir())]
    assert len(files) == 4, "one, and two with an index"
    count, outcomes = max(LEAST, torture.count(120, 5000)), Counter[str]()
    target = tmp_path / "target"
    for number in range(count):
        dice = torture.dice(number)
        file = dice.choice(files)
        good = file.read_bytes()
        source = file if file.parent == tmp_path else file.parent
        head = 0 if file.suffix == ".json" else 8
        length = int.from_bytes(good[:8], "little") if head else len(good)
        document = json.loads(good[head : head + length])
        lie(document, dice)
        text = json.dumps(document).encode()
        file.write_bytes(
            (len(text).to_bytes(8, "little") if head else b"") + text + good[head + length :]
        )
        try:
            checkpoint.convert(source, target, dice.choice(["checkpoint", "hf"]))
            outcomes["converted"] += 1
            shutil.rmtree(target)
        except (CheckpointError, FileNotFoundError):
            outcomes["refused"] += 1
        file.write_bytes(good)
        assert not target.exists(), f"trial {number}"
        assert {p.name for p in tmp_path.iterdir()} == {"c", "hf", "one.safetensors"}, number
    assert outcomes["refused"] > outcomes["converted"] > 0
    torture.saw(f"{count} lying files of others: {outcomes['refused']} refused, the rest converted")
