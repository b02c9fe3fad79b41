"""Reads of any region of a checkpoint, and the errors of incomplete, damaged and changed ones."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpishard import checkpoint, run_in_threads
from mpishard.checkpoint import CheckpointReader, Manifest, write_checkpoint
from mpishard.checkpoint.format.manifest import KindRecord
from mpishard.checkpoint.format.tensor_file import FileRecord, PieceRecord
from mpishard.errors import CheckpointError
from mpishard.sharding import FLAT, ParameterEntry, Region


@pytest.fixture
def path(tmp_path: Path, fakes: Any) -> Path:
    """A checkpoint of three ranks."""

    def save(backend: Any) -> None:
        checkpoint.save(tmp_path / "c", fakes.Model(backend, fakes.values(1)))

    run_in_threads(3, save)
    return tmp_path / "c"


def change(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Edit the content of the manifest, as one who knows its checksum."""
    document = json.loads((path / "manifest.json").read_text())
    edit(document["content"])
    document["crc32"] = zlib.crc32(json.dumps(document["content"]).encode())
    (path / "manifest.json").write_text(json.dumps(document))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    cuts=st.lists(st.integers(0, 40), max_size=8),
    ranges=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=6),
    block=st.sampled_from([1, 3, 1 << 22]),
)
def test_every_range_of_every_cut(
    cuts: list[int], ranges: list[tuple[int, int]], block: int, tmp_path: Path
) -> None:
    vector = np.arange(40, dtype=np.float32)
    bounds = sorted({0, 40, *cuts})
    pieces = [(Region("w", ((0, 40),), a, b), vector[a:b]) for a, b in itertools.pairwise(bounds)]
    entry = ParameterEntry("w", (40,), 0)
    arrays = {"parameters": pieces[::-1]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mpishard.checkpoint.loading.reader._BLOCK", block)
        write_checkpoint(tmp_path / "c", None, [entry], vector.dtype, arrays, {})
        with CheckpointReader(tmp_path / "c") as reader:
            for one, other in ranges:
                start, stop = sorted((one, other))
                if start < stop:
                    out = np.full(stop - start, -1, np.float32)
                    reader.read("parameters", Region("w", ((0, 40),), start, stop), out)
                    assert out.tolist() == list(range(start, stop))


def weight(start: int, stop: int) -> Region:
    """The first parameter has 6 elements, and each of 3 ranks wrote 2 of the first 5."""
    return Region("a.weight", ((0, 3), (0, 2)), start, stop)


def test_a_range_of_the_flat_vector_of_which_parts_are_of_single_parameters(tmp_path: Path) -> None:
    vector = np.arange(20, dtype=np.float32)
    entries = [ParameterEntry("a", (4, 3), 0), ParameterEntry("b", (8,), 12)]
    pieces = [
        (Region(FLAT, ((0, 20),), 0, 5), vector[:5]),
        (entries[0].region(5, 12), vector[5:12]),
        (entries[1].region(12, 14), vector[12:14]),
        (Region(FLAT, ((0, 20),), 14, 20), vector[14:]),
    ]
    write_checkpoint(tmp_path / "c", None, entries, vector.dtype, {"parameters": pieces}, {})
    with CheckpointReader(tmp_path / "c") as reader:
        for start, stop in ((0, 20), (3, 13), (6, 8), (14, 20)):
            out = np.full(stop - start, -1, np.float32)
            reader.read("parameters", Region(FLAT, ((0, 20),), start, stop), out)
            assert np.array_equal(out, vector[start:stop])


def test_only_the_files_of_the_region_are_opened(path: Path, fakes: Any) -> None:
    for file in path.glob("rank*"):
        if file.name != "rank00000.safetensors":
            file.write_bytes(b"\xff" * file.stat().st_size)
    out = np.empty(2)
    with CheckpointReader(path) as reader:
        reader.read("parameters", weight(0, 2), out)
        assert out.tobytes() == fakes.values(1)[:2].tobytes()
        with pytest.raises(CheckpointError, match=r"rank00001.*parameters of a.weight.*checksum"):
            reader.read("parameters", weight(2, 4), out)


def test_attributes_of_a_reader(path: Path, fakes: Any) -> None:
    with CheckpointReader(path) as reader:
        assert reader.path == path
        assert reader.parameters == fakes.entries()
        assert tuple(reader.parameters_of("parameters")) == fakes.entries()
        assert (reader.dtype, reader.length) == (np.dtype("f8"), 13)
        assert reader.kinds == {"parameters": np.dtype("f8")}
        assert reader.metadata["model"] == {"kind": "fake"}
        reader.close()
        reader.close()
        reader.read("parameters", weight(0, 6), np.empty(6))
        scale = reader.read_whole("parameters", reader.parameters[2])
        assert scale.shape == ()
        assert scale == fakes.values(1)[8]
        assert reader.read_whole("parameters", reader.parameters[3]).shape == (0, 3)


@pytest.mark.parametrize(
    ("kind", "region", "out", "message"),
    [
        ("optimizer/m", weight(0, 1), np.empty(1), r"holds \['parameters'\], and no 'optimizer/m'"),
        ("parameters", weight(0, 1), np.empty((1, 1)), r"shape \(1,\) for .*, got \(1, 1\)"),
        ("parameters", weight(0, 1), np.empty(2), r"shape \(1,\) for .*, got \(2,\)"),
        ("parameters", weight(0, 1), np.empty(1, "f4"), "has dtype float64, out has float32"),
        (
            "parameters",
            weight(5, 7),
            np.empty(2),
            r"a.weight\[0:3, 0:2\]\[5:7\] is not a part of .* \(3,",
        ),
        (
            "parameters",
            weight(-1, 1),
            np.empty(2),
            r"a.weight\[0:3, 0:2\]\[-1:1\] is not a part of",
        ),
        ("parameters", weight(2, 2), np.empty(0), r"\[2:2\] is not a part of"),
        (
            "parameters",
            Region("a.weight", ((0, 6),), 0, 6),
            np.empty(6),
            r"\[0:6\] is not a part of",
        ),
        ("parameters", Region("a.weight", ((0, 3), (1, 3)), 0, 1), np.empty(1), "is not a part of"),
        ("parameters", Region("c", ((0, 1),), 0, 1), np.empty(1), "holds no parameter 'c'"),
    ],
)
def test_regions_that_are_not_there(
    kind: str, region: Region, out: Any, message: str, path: Path
) -> None:
    with CheckpointReader(path) as reader, pytest.raises(ValueError, match=message):
        reader.read(kind, region, out)


def test_a_missing_checkpoint_says_what_is_there(path: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no checkpoint .*/d, and none in the .* either$"):
        CheckpointReader(tmp_path / "d")
    (tmp_path / "runs" / "mine" / "checkpoint").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "checkpoint" / "latest").write_text("step-1")
    with pytest.raises(FileNotFoundError, match=r"did you mean .*/runs/mine/checkpoint\?$"):
        CheckpointReader(tmp_path / "mine")
    with pytest.raises(FileNotFoundError, match=r"/d/e; .*/d does not exist"):
        CheckpointReader(tmp_path / "d" / "e")
    (path / "manifest.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no manifest.json, .* it holds rank00000.safet"):
        CheckpointReader(path)
    with pytest.raises(CheckpointError, match="is a file"):
        CheckpointReader(path / "rank00000.safetensors")


def test_a_torn_file_is_found_on_opening(path: Path) -> None:
    file = path / "rank00002.safetensors"
    content = file.read_bytes()
    for wrong in (content[:-1], content + b"x"):
        file.write_bytes(wrong)
        match = f"torn: rank00002.safetensors has {len(wrong)} of {len(content)} bytes"
        with pytest.raises(CheckpointError, match=match):
            CheckpointReader(path)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"torn: rank00002.safetensors is missing"):
        CheckpointReader(path)


def test_a_disk_that_cannot_be_read_has_not_changed_bytes(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    with CheckpointReader(path) as reader:
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(CheckpointError, match=r"safetensors: .*Input/output error$") as caught:
            reader.read_whole("parameters", reader.parameters_of("parameters")[0])
    assert isinstance(caught.value.__cause__, OSError)
    reasons = [problem.reason for problem in checkpoint.find_problems(path)]
    assert all("cannot be read: [Errno 5] Input/output error" in reason for reason in reasons)
    assert len(reasons) == len(list(path.glob("*.safetensors")))


def test_a_changed_bit_is_found_by_check(path: Path) -> None:
    file = path / "rank00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    CheckpointReader(path)
    match = r"rank00001.safetensors: bytes 0 to \d+ do not .*checksum.*somebody"
    with pytest.raises(CheckpointError, match=match):
        checkpoint.check(path)


def test_files_of_two_saves_are_not_mixed(path: Path, tmp_path: Path, fakes: Any) -> None:
    reader = CheckpointReader(path)

    def save(backend: Any) -> None:
        checkpoint.save(path, fakes.Model(backend, fakes.values(2)))

    run_in_threads(3, save)
    with pytest.raises(CheckpointError, match="was replaced while it was read"):
        reader.read("parameters", weight(0, 6), np.empty(6))


def test_a_replaced_checkpoint_is_read_to_the_end_where_it_is_open(path: Path, fakes: Any) -> None:
    out = np.empty(6)
    with CheckpointReader(path) as reader:
        reader.read("parameters", weight(0, 6), out)
        shutil.rmtree(path)
        out[:] = 0
        reader.read("parameters", weight(0, 6), out)
    assert out.tobytes() == fakes.values(1)[:6].tobytes()


@pytest.mark.parametrize("length", [0, 1, 40, 300])
def test_a_torn_manifest(length: int, path: Path) -> None:
    manifest = path / "manifest.json"
    manifest.write_text(manifest.read_text()[:length])
    with pytest.raises(CheckpointError, match=r"cannot use .*manifest.json: it is not JSON"):
        CheckpointReader(path)


@pytest.mark.parametrize("version", [5, 2, 0, "4", None])
def test_another_version(version: Any, path: Path) -> None:
    document = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(document | {"version": version}))
    with pytest.raises(CheckpointError, match=f"has version {version!r}; this mpishard reads ve"):
        CheckpointReader(path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.update(length=14), "have 13 elements, and it says 14"),
        (lambda d: d.update(dtype="float31"), "malformed: KeyError: 'float31'"),
        (lambda d: d.pop("files"), "malformed: manifest.content has no key 'files'"),
        (lambda d: d.update(arrays=3), "malformed: manifest.content.arrays must be an object"),
        (lambda d: d.update(files={"../x": {"bytes": 0, "crc32": []}}), "'../x' is not the name"),
        (lambda d: d.update(files={"r": {"bytes": 0, "crc32": []}}), "'r' is not the name"),
        (lambda d: d["files"]["rank00000.safetensors"].update(crc32=[]), "has 0 checksums"),
        (lambda d: d["files"]["rank00000.safetensors"].update(crc32=[1, 2]), "has 2 checksums"),
        (lambda d: d["arrays"]["parameters"]["pieces"][0].update(offset=-1), "to be bytes -1 to"),
        (
            lambda d: d["arrays"]["parameters"]["pieces"][0].update(offset=1 << 60),
            r"bytes 1152921504606846976 to .* of rank00000.safetensors, which has \d+",
        ),
        (lambda d: d["files"].pop("rank00001.safetensors"), "rank00001.* not among the files"),
        (
            lambda d: d["arrays"]["parameters"]["pieces"].pop(1),
            r"nothing holds elements \d to \d of",
        ),
        (lambda d: d["arrays"]["parameters"]["pieces"][0].update(tensor="x"), "piece of 'x', whic"),
        (
            lambda d: d["arrays"]["parameters"]["pieces"][0].update(stop=9),
            "is not a part of a tensor",
        ),
        (lambda d: d["arrays"]["parameters"]["pieces"][0].update(box=[[0, 3]]), "is not a part of"),
        (
            lambda d: d["arrays"]["parameters"]["pieces"][0].update(box=3),
            "malformed: .*box must be a",
        ),
        (lambda d: d["parameters"][0].update(shape=[-1]), r"'a.weight' has the shape \(-1,\)"),
        (lambda d: d["parameters"].pop(0), "'a.bias' starts at element 6; .* ends at 0"),
        (lambda d: d["arrays"].pop("parameters"), "no parameters"),
    ],
)
def test_a_wrong_manifest(edit: Any, message: str, path: Path) -> None:
    change(path, edit)
    with pytest.raises(CheckpointError, match=message):
        CheckpointReader(path)


def flat(content: dict[str, Any]) -> list[dict[str, Any]]:
    """The pieces of the flat vector."""
    return list(content["arrays"]["optimizer/m"]["pieces"])


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: flat(c)[0].update(box=[[1, 13]]), "is not a range of the flat vector"),
        (lambda c: flat(c)[0].update(box=[[0, 14]]), r"<flat vector>\[0:14\].* is not a part of"),
        (
            lambda c: flat(c)[0].update(stop=14),
            r"\[0:14\] is not a part of a tensor of shape \(13,",
        ),
        (lambda c: flat(c)[0].update(stop=3), "optimizer/m: elements 2 to 3 of a.weight .* twice"),
        (
            lambda c: c["arrays"]["optimizer/m"]["pieces"].pop(1),
            "nothing holds elements 5 to 6 of a",
        ),
        (
            lambda c: c["parameters"][4].update(frozen=True),
            "holds a piece of 'b.weight', .* frozen",
        ),
        # The file has no names of parameters in such a piece.
        (lambda c: c["parameters"][1].update(name="x"), "parameters of other names or shapes, or"),
        (lambda c: c["parameters"][4].update(shape=[1, 4]), "parameters of other names or shapes"),
    ],
)
def test_a_forged_piece_of_the_flat_vector(
    edit: Any, message: str, tmp_path: Path, fakes: Any
) -> None:
    def save(backend: Any) -> None:
        state = fakes.Optimizer(backend, {"m": fakes.values(2)})
        arrays = {"parameters": state.pieces["optimizer/m"], **state.pieces}
        write_checkpoint(
            tmp_path / "c", backend, fakes.entries(), np.dtype("f8"), arrays, {"model": {}}
        )

    run_in_threads(3, save)
    checkpoint.check(tmp_path / "c")
    change(tmp_path / "c", edit)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.check(tmp_path / "c")


def test_a_manifest_that_somebody_edited(path: Path) -> None:
    manifest = path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"fake"', '"mine"'))
    with pytest.raises(CheckpointError, match="does not have the checksum"):
        CheckpointReader(path)
    manifest.write_text("{}")
    with pytest.raises(CheckpointError, match="its format is not"):
        CheckpointReader(path)


def test_a_manifest_that_is_nested_without_end(path: Path) -> None:
    (path / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="not JSON: RecursionError"):
        CheckpointReader(path)


def test_a_swapped_file(path: Path) -> None:
    """Files of two ranks with equal lengths are swapped. The damage is found when they are read."""

    def save(backend: Any) -> None:
        start = 5 * backend.rank
        region = Region("w", ((0, 10),), start, start + 5)
        arrays = {"parameters": [(region, np.arange(start, start + 5.0))]}
        entry = ParameterEntry("w", (10,), 0)
        write_checkpoint(path, backend, [entry], np.dtype("f8"), arrays, {})

    run_in_threads(2, save)
    one, other = path / "rank00000.safetensors", path / "rank00001.safetensors"
    assert one.stat().st_size == other.stat().st_size
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"rank00000.*parameters of w"):
        checkpoint.load_arrays(path)


def test_ranks_verify_their_share(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank reads some of many blocks, and the ranks find all that have changed."""
    monkeypatch.setattr("mpishard.checkpoint.format.tensor_file.BLOCK_BYTES", 64)
    monkeypatch.setattr("mpishard.checkpoint.loading.mapped_file.BLOCK_BYTES", 64)
    monkeypatch.setattr("mpishard.checkpoint.format.manifest.BLOCK_BYTES", 64)
    vector = np.arange(1000.0)
    entry = ParameterEntry("w", (1000,), 0)
    arrays = {"parameters": [(Region.whole("w", (1000,)), vector)]}
    write_checkpoint(path, None, [entry], vector.dtype, arrays, {})
    file = path / "rank00000.safetensors"
    content = file.read_bytes()
    for place in (8, 4000, len(content) - 1):
        changed = bytearray(content)
        changed[place] ^= 4
        file.write_bytes(changed)
        found = []
        for part in range(3):
            with CheckpointReader(path) as reader:
                try:
                    reader.verify(part, 3)
                except CheckpointError as error:
                    found.append((part, str(error)))
        ((_, message),) = found
        assert f"bytes {place // 64 * 64} to" in message


@given(
    names=st.lists(st.text(min_size=1, max_size=5), unique=True, max_size=4),
    shapes=st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=4, max_size=4),
    metadata=st.dictionaries(st.text(max_size=3), st.integers() | st.text() | st.none()),
)
def test_a_manifest_is_the_same_after_a_round_trip_as_text(
    names: list[str], shapes: list[list[int]], metadata: dict[str, Any]
) -> None:
    entries: list[ParameterEntry] = []
    for name, shape in zip(names, shapes, strict=False):
        entries.append(ParameterEntry(name, tuple(shape), entries[-1].stop if entries else 0))
    dtype = np.dtype("f4")
    pieces = [
        PieceRecord("rank00000.safetensors", 8, Region.whole(entry.name, entry.shape))
        for entry in entries
        if entry.size
    ]
    arrays = {"parameters": KindRecord.of(dtype, pieces)}
    files = {"rank00000.safetensors": FileRecord(8 + 4 * 4**4, (2,))}
    manifest = Manifest("id", 3, dtype, tuple(entries), arrays, files, metadata)
    assert Manifest.from_json(manifest.to_bytes().decode()) == manifest
