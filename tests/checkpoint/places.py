"""A place that a job saves to again and again, and what is found there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from mpishard import checkpoint, run_in_threads
from mpishard.checkpoint import CheckpointFolder, newest_valid
from mpishard.checkpoint.snapshot import begin_save
from mpishard.checkpoint.target import Target

__all__ = ["Place"]

NEVER = 1000  # more saves than any of these tests makes


class Place:
    """Where a job saves: a single path, or a folder of which the two newest stay."""

    def __init__(self, root: Path, fakes: Any, *, is_folder: bool) -> None:
        self.path = root / "job" / "c"
        self.fakes = fakes
        self.is_folder = is_folder

    def save(self, step: int, seed: int, world_size: int) -> None:
        run_in_threads(world_size, self.save_on, step, seed)

    def save_on(self, backend: Any, step: int, seed: int) -> None:
        """One rank of a save."""
        model = self.fakes.Model(backend, self.fakes.values(seed))
        optimizer = self.fakes.Optimizer(backend, {"m": self.fakes.values(seed + NEVER)})
        named = {"seed": seed}
        begin_save(lambda: self._target(step), model, optimizer, metadata=named).wait()

    def _target(self, step: int) -> Target:
        return CheckpointFolder(self.path).target(step) if self.is_folder else Target(self.path)

    def seed(self) -> int | None:
        """Which save is found here, with every bit of it; None for none."""
        found: Path | None = self.path
        if self.is_folder:
            found = newest_valid(self.path)
            self._check_latest()
        try:
            checkpoint.check(found or self.path)
        except FileNotFoundError:
            return None
        model = self.fakes.Model(None, np.zeros(self.fakes.LENGTH))
        optimizer = self.fakes.Optimizer(None, {"m": np.zeros(self.fakes.LENGTH)})
        seed: int = checkpoint.load(found or self.path, model, optimizer)["seed"]
        assert model.equals({"parameters": self.fakes.values(seed)})
        assert optimizer.equals({"optimizer/m": self.fakes.values(seed + NEVER)})
        return seed

    def _check_latest(self) -> None:
        """`latest` names a whole checkpoint, where there is one."""
        latest = self.path / "latest"
        if latest.exists():
            named = self.path / latest.read_text().removesuffix("\n")
            is_waiting = not named.exists()  # its successor is about to take its place
            checkpoint.check(named.with_name(f"{named.name}.previous") if is_waiting else named)

    def check_is_tidy(self) -> None:
        """Nothing is there but checkpoints."""
        entries = sorted(
            entry.name for entry in (self.path if self.is_folder else self.path.parent).iterdir()
        )
        if self.is_folder:
            assert entries.pop(0) == "latest"
            assert len(entries) <= 2
            assert all(re.fullmatch(r"step-\d{8}", name) for name in entries), entries
        else:
            assert entries == ["c"]
