"""Real models and optimizers, saved at one layout and loaded at any other: the same bits."""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpishard as ms
from mpishard.models import DDPModel, FSDPModel, HybridShardedModel, ZeRO1Model, ZeRO2Model
from mpishard.optimizers import (
    DDPOptimizer,
    FSDPOptimizer,
    HybridShardedOptimizer,
    ZeRO1Optimizer,
    ZeRO2Optimizer,
)

STRATEGIES = {
    "ddp": (DDPModel, DDPOptimizer),
    "zero1": (ZeRO1Model, ZeRO1Optimizer),
    "zero2": (ZeRO2Model, ZeRO2Optimizer),
    "fsdp": (FSDPModel, FSDPOptimizer),
}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-v")
LARGEST = 8
TOKENS = 4


@dataclass(frozen=True)
class Layout:
    """Layout of a model on ranks: a strategy, or a mesh whose data axis has one."""

    strategy: str
    mesh: tuple[int, int, int]
    schedule: str = ""

    @property
    def world_size(self) -> int:
        return math.prod(self.mesh)

    def build(self, backend: Any, seed: int) -> tuple[Any, Any]:
        """A model and an optimizer, whose every number depends on the seed."""
        plain = ms.nn.GPT(
            vocabulary_size=13,
            context_length=TOKENS,
            layers=2,
            heads=4,
            width=8,
            seed=seed,
        )
        config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=1)
        rule = ms.optimizers.AdamW(1e-3, parameter_options={"*.norm.*": {"frozen": True}})
        if not self.schedule:
            model, optimizer = STRATEGIES[self.strategy]
            return model(plain, config), optimizer(rule, config)
        mesh = HybridShardedModel(
            plain,
            config,
            *self.mesh,
            data_parallel_strategy=self.strategy,
            schedule=self.schedule,
            micro_batch_count=2,
        )
        return mesh, HybridShardedOptimizer(rule, config, *self.mesh)


def layouts() -> list[Layout]:
    """Every strategy in every world, and every mesh, up to 8 ranks."""
    found = [
        Layout(strategy, (1, 1, size)) for strategy in STRATEGIES for size in range(1, LARGEST + 1)
    ]
    for mesh in itertools.product((1, 2, 3), (1, 2, 4), range(1, LARGEST + 1)):
        if math.prod(mesh) <= LARGEST and mesh[:2] != (1, 1):
            names = SCHEDULES if mesh[0] == 2 else SCHEDULES[:1]
            place = sum(mesh)
            found.append(Layout([*STRATEGIES][place % 4], mesh, names[mesh[2] % len(names)]))
    return found


def state_of(model: Any, optimizer: Any) -> tuple[bytes, bytes]:
    return model.gather_full_parameters().tobytes(), optimizer.serialize()


def train(model: Any, optimizer: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, y = (rng.integers(0, 13, (8, TOKENS)) for _ in range(2))
    optimizer.step(model, x, y)


def save(backend: Any, layout: Layout, path: Path) -> Any:
    model, optimizer = layout.build(backend, 1)
    train(model, optimizer, 2)
    ms.checkpoint.save(path, model, optimizer, metadata={"layout": str(layout)})
    return state_of(model, optimizer)


def load(backend: Any, layout: Layout, path: Path, expected: Any) -> None:
    model, optimizer = layout.build(backend, 3)
    assert model.gather_full_parameters().tobytes() != expected[0]
    ms.checkpoint.load(path, model, optimizer)
    assert state_of(model, optimizer) == expected


@pytest.mark.timeout(120)
def test_saved_at_one_loaded_at_another(
    tmp_path: Path, torture: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    every, dice = layouts(), torture.dice(0)
    loads = torture.count(3, len(every))
    firsts = every if torture.is_nightly else dice.sample(every, 5)
    seconds = list(every)
    pairs = set()
    for number, first in enumerate(firsts):
        path = tmp_path / str(number)
        expected = ms.run_in_threads(first.world_size, save, first, path)[0]
        dice.shuffle(seconds)
        for second in seconds[:loads]:
            try:
                ms.run_in_threads(second.world_size, load, second, path, expected)
            except BaseException as error:
                error.add_note(f"from {first} to {second}")
                raise
            pairs.add((first, second))
    torture.saw(f"{len(pairs)} pairs of {len(every)} layouts up to {LARGEST} ranks: the same bits")
