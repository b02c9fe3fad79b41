"""The path or folder of a simulated job: saves to it, loads from it, and checks of its content."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from mpishard import checkpoint, run_in_threads
from mpishard.checkpoint import CheckpointFolder, PendingSave, StagingBuffer, newest_valid
from mpishard.checkpoint.format.folder import Target
from mpishard.checkpoint.saving.save import begin_save

__all__ = ["Place"]

NEVER = 1000  # more saves than any of these tests makes


class Place:
    """The place of a job's saves: a single path, or a folder that keeps the two newest."""

    def __init__(
        self, root: Path, fakes: Any, *, is_folder: bool, length: int | None = None
    ) -> None:
        self.path = root / "job" / "c"
        self.fakes = fakes
        self.is_folder = is_folder
        self._length = length or fakes.LENGTH
        self._shapes = fakes.SHAPES if length is None else {"w": (length,)}

    def save(self, step: int, seed: int, world_size: int) -> None:
        run_in_threads(world_size, self.save_on, step, seed)

    def save_on(self, backend: Any, step: int, seed: int) -> None:
        """One rank of a save."""
        self.begin(backend, step, seed).wait()

    def begin(
        self, backend: Any, step: int, seed: int, staging: StagingBuffer | None = None
    ) -> PendingSave:
        """One rank of a save, in the background where it has a buffer."""
        model, optimizer = self._states(backend, seed)
        return begin_save(
            lambda: self._target(step), model, optimizer, metadata={"seed": seed}, staging=staging
        )

    def load_on(self, backend: Any) -> int:
        """One rank of a load; which save it was."""
        found = newest_valid(self.path, backend) if self.is_folder else self.path
        assert found is not None
        seed: int = checkpoint.load(found, *self._states(backend, None))["seed"]
        return seed

    def _states(self, backend: Any, seed: int | None) -> tuple[Any, Any]:
        """The content of a save, which is a function of its seed, or zeros."""
        vectors = [np.zeros(self._length)] * 2
        if seed is not None:
            vectors = [self.fakes.values(s, length=self._length) for s in (seed, seed + NEVER)]
        model = self.fakes.Model(backend, vectors[0], self._shapes)
        return model, self.fakes.Optimizer(backend, {"m": vectors[1]}, shapes=self._shapes)

    def _target(self, step: int) -> Target:
        return CheckpointFolder(self.path).target(step) if self.is_folder else Target(self.path)

    def seed(self) -> int | None:
        """The seed of the save that is found here, whose bits are all compared; None for none."""
        found: Path | None = self.path
        if self.is_folder:
            found = newest_valid(self.path)
            self._check_latest()
        try:
            checkpoint.check(found or self.path)
        except FileNotFoundError:
            return None
        states = self._states(None, None)
        seed: int = checkpoint.load(found or self.path, *states)["seed"]
        for state, expected in zip(states, self._states(None, seed), strict=True):
            assert [*state.pieces] == [*expected.pieces]
            for kind, pieces in expected.pieces.items():
                for (_, array), (_, wanted) in zip(state.pieces[kind], pieces, strict=True):
                    assert array.tobytes() == wanted.tobytes()
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
