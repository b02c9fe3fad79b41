"""Checksums of a file's blocks, which a thread computes while the file is written."""

from __future__ import annotations

import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpishard.checkpoint.format import disk, tensor_file
from mpishard.checkpoint.format.tensor_file import ChecksumThread, TensorFile


@given(st.lists(st.binary(max_size=30)), st.integers(1, 16), st.integers(0, 2))
def test_each_block_has_a_checksum_whatever_the_parts_are(
    parts: list[bytes], block: int, ahead: int
) -> None:
    with ChecksumThread(block, ahead) as thread:
        assert list(thread.watch(map(memoryview, parts))) == parts
    whole = b"".join(parts)
    blocks = [whole[start : start + block] for start in range(0, len(whole), block)]
    assert thread.checksums == [zlib.crc32(each) for each in blocks]


def test_checksums_are_those_of_the_written_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(tensor_file, "_PART_BYTES", 300)
    values = {"a": np.arange(401.0), "b": np.arange(33, dtype=np.float16)}
    file = TensorFile(values, {})
    for name in ("first", "second"):
        file.write(tmp_path / name)
        content = (tmp_path / name).read_bytes()
        starts = range(0, len(content), 1000)
        assert file.checksums == [zlib.crc32(content[low : low + 1000]) for low in starts]
        assert len(file.checksums) == -(-file.nbytes // 1000) == 4


def test_a_disk_that_fails_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: Path, parts: Any) -> None:
        next(iter(parts))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "write_file", fail)
    before = threading.active_count()
    with pytest.raises(OSError, match="No space left"):
        TensorFile({"a": np.zeros(3)}, {}).write(tmp_path / "x")
    assert threading.active_count() == before
