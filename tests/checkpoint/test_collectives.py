"""The few collectives of a save: agreement, end of the writes, records, and rank 0's commit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpishard as ms
from mpishard.checkpoint import CheckpointFolder
from mpishard.checkpoint.format import disk
from mpishard.checkpoint.saving import pending
from mpishard.checkpoint.saving.save import begin_save

MOST = 5
X = np.random.default_rng(0).standard_normal((8, 4))

SAVES: dict[str, Callable[[Path, Any, Any], None]] = {
    "model.save_model": lambda path, model, _: model.save_model(path),
    "optimizer.save_model": lambda path, _, optimizer: optimizer.save_model(path),
    "save": ms.checkpoint.save,
    "save_async": lambda path, model, optimizer: ms.checkpoint.save_async(
        path, model, optimizer, metadata={"note": 1}
    ).wait(),
    "folder": lambda path, model, optimizer: begin_save(
        lambda: CheckpointFolder(path).target(3), model, optimizer
    ).wait(),
}


class Calls(threading.local):
    """Number of collectives that a rank has called, in the world or in any group of it."""

    count = 0


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    of_thread, admit = Calls(), ms.InMemoryCommunicationBackend._admit

    def note(*arguments: Any, **options: Any) -> Any:
        of_thread.count += 1
        return admit(*arguments, **options)

    monkeypatch.setattr(ms.InMemoryCommunicationBackend, "_admit", note)
    return of_thread


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp", "tensor", "pipeline"])
def test_a_save_is_few_collectives(
    strategy: str, tmp_path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A machine that is busy may take a second to write a file; the ranks would meet once more.
    monkeypatch.setattr(pending, "_MEET_SECONDS", 20.0)

    def work(backend: Any) -> dict[str, int]:
        model = ms.as_distributed(ms.nn.MLP([4, 8, 8, 1], seed=0), backend, strategy=strategy)
        optimizer = ms.as_distributed(ms.optimizers.AdamW(1e-3), backend, strategy=strategy)
        optimizer.step(model, X, X[:, :1])
        counts = {}
        for name, save in SAVES.items():
            for _ in range(2):  # the first makes a directory, the second replaces it
                before = calls.count
                save(tmp_path / strategy / name, model, optimizer)
                counts[name] = calls.count - before
        return counts

    for counts in ms.run_in_threads(2, work):
        assert all(1 <= count <= MOST for count in counts.values()), counts
    assert ms.checkpoint.find_problems(tmp_path / strategy / "save") == []


def test_waiting_for_a_slow_disk_is_a_collective_a_second(
    tmp_path: Path, fakes: Any, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a rank that never comes is found, and one that writes for long is not lost."""
    real = disk.write_file

    def slow(file: Path, parts: Any) -> None:
        if file.name == "rank00001.safetensors":
            time.sleep(0.5)
        real(file, parts)

    monkeypatch.setattr(pending, "_MEET_SECONDS", 0.05)
    monkeypatch.setattr(disk, "write_file", slow)

    def work(backend: Any) -> int:
        ms.checkpoint.save(tmp_path / "c", fakes.Model(backend, fakes.values(1)))
        return calls.count

    counts = ms.run_in_threads(2, work, timeout=0.4)
    assert min(counts) > MOST
