"""Ways to spoil a checkpoint, by accident or on purpose.

Each takes a folder with two checkpoints of the same model, ``one`` and ``other``, and dice, and
spoils ``one``. An adversary knows the format: what is changed has the checksums that it should.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

__all__ = ["MUTATIONS", "lie", "seal"]

BLOCK = 4 << 20

MUTATIONS: dict[str, Callable[[Path, Random], None]] = {}


def mutation(body: Callable[[Path, Random], None]) -> Callable[[Path, Random], None]:
    MUTATIONS[body.__name__] = body
    return body


def _file(folder: Path, dice: Random, *, data: bool = False) -> Path:
    files = sorted((folder / "one").glob("rank*" if data else "*"))
    return files[dice.randrange(len(files))]


# ---------------------------------------------------------------------------------- by accident


@mutation
def flip_bits(folder: Path, dice: Random) -> None:
    file = _file(folder, dice)
    content = bytearray(file.read_bytes())
    for _ in range(dice.choice([1, 1, 1, 2, 20])):
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    file.write_bytes(content)


@mutation
def truncate(folder: Path, dice: Random) -> None:
    file = _file(folder, dice)
    os.truncate(file, dice.choice([0, dice.randrange(file.stat().st_size)]))


@mutation
def extend(folder: Path, dice: Random) -> None:
    with _file(folder, dice).open("ab") as file:
        file.write(dice.choice([b"\0", b" ", b"}", dice.randbytes(100)]))


@mutation
def zero_a_range(folder: Path, dice: Random) -> None:
    file = _file(folder, dice)
    content = bytearray(file.read_bytes())
    start = dice.randrange(len(content))
    stop = dice.randrange(start, len(content)) + 1
    content[start:stop] = bytes(stop - start)
    file.write_bytes(content)


@mutation
def random_content(folder: Path, dice: Random) -> None:
    file = _file(folder, dice)
    file.write_bytes(dice.randbytes(file.stat().st_size))


@mutation
def lose_a_file(folder: Path, dice: Random) -> None:
    _file(folder, dice).unlink()


@mutation
def swap_two_shards(folder: Path, dice: Random) -> None:
    one, other = dice.sample(sorted((folder / "one").glob("rank*")), 2)
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


@mutation
def a_file_of_another_save(folder: Path, dice: Random) -> None:
    file = _file(folder, dice)
    shutil.copy(folder / "other" / file.name, file)


@mutation
def another_kind_of_file(folder: Path, dice: Random) -> None:
    file = _file(folder, dice)
    content = file.read_bytes()
    file.unlink()
    what = dice.randrange(5)
    if what == 0:
        file.mkdir()
    elif what == 1:
        os.mkfifo(file)
    elif what == 2:
        file.symlink_to(file)
    elif what == 3:
        file.symlink_to("/dev/zero")
    else:
        with file.open("wb") as sparse:
            sparse.write(content)
            sparse.truncate(dice.choice([1 << 33, 1 << 40]))


# ---------------------------------------------------------------------------------- on purpose


def seal(text: str) -> str:
    """A manifest around a content, with the checksum that this has when it is read."""
    crc32 = zlib.crc32(json.dumps(json.loads(text)).encode())
    return (
        f'{{"format": "mpishard checkpoint", "version": 3, "crc32": {crc32},\n"content": {text}}}\n'
    )


def _content(folder: Path) -> Any:
    return json.loads((folder / "one" / "manifest.json").read_text())["content"]


def _put(folder: Path, content: Any) -> None:
    (folder / "one" / "manifest.json").write_text(seal(json.dumps(content)))


def _nest(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


NASTY: list[Any] = [
    0, 1, -1, 2, 2**31, 2**53, 2**60, 2**63, 2**64, -(2**63), 10**40, -(10**40), 10**4000, 0.5,
    1e300, float("nan"), float("inf"), -float("inf"), None, True, False, "", " ", "0", "-1", "1e9",
    "../../../etc/passwd", "/etc/passwd", "rank00000.safetensors/../../x", "rank99999.safetensors",
    "\0", "\ud800", "x" * 10_000, "float64", "object", "parameters", "optimizer/m", "__class__",
    [], {}, [[]], [[0, 2**60]], [[0, 1]] * 70, [2**60], [2**32, 2**32], [-1], [0, 2**62], [1] * 70,
    _nest(400), {"a": {"b": 1}},
]  # fmt: skip


def _nodes(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every place in a document: what holds it, and under which key or index."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        found.append((value, key))
        if isinstance(value[key], dict | list):
            _nodes(value[key], found)
    return found


def lie(document: Any, dice: Random) -> None:
    """Change a JSON document somewhere."""
    for _ in range(dice.choice([1, 1, 2, 4])):
        places = _nodes(document, [])
        if not places:
            return
        holder, key = dice.choice(places)
        value, what = holder[key], dice.randrange(8)
        if what == 0:
            del holder[key]
        elif what == 1 and isinstance(holder, list):
            holder.insert(key, dice.choice([value, dice.choice(holder)]))
        elif what == 2 and isinstance(holder, list):
            other = dice.randrange(len(holder))
            holder[key], holder[other] = holder[other], holder[key]
        elif what == 3 and isinstance(holder, dict):
            holder[dice.choice(["x", "../x", *holder])] = value
        elif what in (4, 5) and type(value) is int:
            holder[key] = value + dice.choice([-64, -8, -1, 1, 8, 64, value])
        else:
            # A copy: what stands in two places is changed in one.
            holder[key] = copy.deepcopy(dice.choice(NASTY))


@mutation
def a_manifest_that_lies(folder: Path, dice: Random) -> None:
    content = _content(folder)
    lie(content, dice)
    _put(folder, content)


@mutation
def pieces_that_lie(folder: Path, dice: Random) -> None:
    content = _content(folder)
    pieces = [piece for record in content["arrays"].values() for piece in record["pieces"]]
    piece, other = dice.sample(pieces, 2)
    what = dice.choice(["offset", "file", "tensor", "box", "start", "stop", "region", "place"])
    names = {"region": ["tensor", "box", "start", "stop"], "place": ["file", "offset"]}
    for name in names.get(what, [what]):
        piece[name], other[name] = other[name], piece[name]
    _put(folder, content)


@mutation
def a_huge_parameter(folder: Path, dice: Random) -> None:
    """With all that belongs to it, as far as a manifest can lie."""
    content = _content(folder)
    shape = dice.choice(
        [
            [2**60],
            [2**31, 2**31],
            [2**20] * 10,
            [0, 2**62],
            [2**62, 0],
            [1] * 65,
            [1] * 200,
            [0] * 100,
            [2**64, 0],
            [-1, -1],
            [10**30],
        ]
    )
    size = 1
    for dim in shape:
        size *= dim
    content["parameters"].append({"name": "huge", "shape": shape, "start": content["length"]})
    content["length"] += size
    first = min(content["files"])
    for record in content["arrays"].values():
        if size:
            record["pieces"].append(
                {
                    "file": first,
                    "offset": 0,
                    "tensor": "huge",
                    "box": [[0, dim] for dim in shape],
                    "start": 0,
                    "stop": size,
                }
            )
    if dice.random() < 0.5:
        content["files"][first]["bytes"] = size * 8
    if dice.random() < 0.3:
        content["parameters"].append(dict(content["parameters"][0], start=content["length"]))
        content["length"] += 6
    _put(folder, content)


@mutation
def the_same_name_twice(folder: Path, dice: Random) -> None:
    content = _content(folder)
    where = dice.randrange(3)
    if where == 0:
        first = content["parameters"][0]
        again = dict(first, start=content["length"], shape=dice.choice([first["shape"], [2], [0]]))
        size = 1
        for dim in again["shape"]:
            size *= dim
        content["parameters"].append(again)
        content["length"] += size
        _put(folder, content)
    else:
        text = json.dumps(content)
        key = dice.choice(['"files": {', '"arrays": {', '"metadata": {', '"dtype": "'])
        doubled = text.replace(key, '"length": 3, "length": 13, ' + key, 1)
        (folder / "one" / "manifest.json").write_text(seal(doubled if where == 1 else text * 1))


@mutation
def a_header_that_lies(folder: Path, dice: Random) -> None:
    """Change a safetensors file, and the checksums of its blocks in the manifest."""
    file = _file(folder, dice, data=True)
    content = bytearray(file.read_bytes())
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    what = dice.randrange(4)
    if what == 0:
        content[:8] = dice.choice([0, 1, length + 1, 2**31, 2**63, 2**64 - 1]).to_bytes(8, "little")
    elif what == 1:
        content[8 : 8 + length] = dice.choice([b"[", b'{"a":', b"\xff"]) * length
        del content[8 + length :]
        content += bytes(file.stat().st_size - len(content))
    else:
        keys = [key for key in header if key != "__metadata__"]
        one, other = dice.choice(keys), dice.choice(keys)
        if what == 2:
            header[one], header[other] = header[other], header[one]
        else:
            nasty: list[Any] = [[0, 2**60], [8, 0], [-8, 0], [0], "x", None, [0, 8]]
            header[one]["data_offsets"] = dice.choice(nasty)
        text = json.dumps(header).encode()[:length].ljust(length)
        content[8 : 8 + length] = text
    content = content[: file.stat().st_size]
    file.write_bytes(content)
    document = _content(folder)
    document["files"][file.name]["crc32"] = [
        zlib.crc32(content[low : low + BLOCK]) for low in range(0, len(content), BLOCK)
    ]
    _put(folder, document)


@mutation
def a_bomb(folder: Path, dice: Random) -> None:
    manifest = folder / "one" / "manifest.json"
    text = manifest.read_text()
    deep = dice.choice([1000, 100_000])
    manifest.write_text(
        dice.choice(
            [
                "[" * deep,
                '{"a":' * deep,
                "[" * deep + "]" * deep,
                text.replace('"crc32": ', '"crc32": ' + "9" * 10_000, 1),
                text.replace('"version": 3', f'"version": {dice.choice(["3.5", "[]", "1e999"])}'),
                text.replace('"metadata": {', '"metadata": {"a": ' + "[" * deep + "]" * deep + ","),
                " " * 1_000_000 + text,
                '"' * deep,
                "9" * deep,
                "\ufeff" + text,
                text.replace("mpishard checkpoint", "mpishard"),
            ]
        )
    )
