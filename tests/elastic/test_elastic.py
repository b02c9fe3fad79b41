"""A killed run that resumes with other ranks ends with the bits of an undisturbed one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

import mpishard as ms

sys.path.insert(0, str(Path(__file__).parent))

import history
from history import Life, StruckError, start


def undisturbed(tmp_path, rule):
    """Return the parameters of an undisturbed run on one rank."""
    (parameters,) = ms.run_in_threads(
        1, history.train, tmp_path / "undisturbed", Life("ddp", rule), history.strike_by_raising
    )
    return parameters


def live(folder, life):
    """Run one life on threads; return whether it reached the end, and its parameters."""
    try:
        results = ms.run_in_threads(
            life.world_size, history.train, folder, life, history.strike_by_raising
        )
    except (StruckError, ms.errors.PeerError):
        return None
    assert all(result.tobytes() == results[0].tobytes() for result in results)
    return results[0]


@pytest.mark.parametrize("rule", history.RULES)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_any_history_gives_the_same_bits(tmp_path, rule, asynchronous):
    """Each life has another strategy, and 1 to 4 ranks."""
    lives = [
        Life("ddp", rule, 4, 3, 3, asynchronous=asynchronous),
        Life("fsdp", rule, 2, 0, 1, asynchronous=asynchronous),
        Life("zero1", rule, 1, 0, 4, asynchronous=asynchronous),
        Life("zero2", rule, 4, 1, 2, asynchronous=asynchronous),
    ]
    for life in lives:
        assert live(tmp_path / "run", life) is None, "the life came to its end"
    last = live(tmp_path / "run", Life("fsdp", rule, 2))
    assert last.tobytes() == undisturbed(tmp_path, rule).tobytes()


@pytest.mark.spawned
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "rule", history.RULES if os.environ.get("MPISHARD_TEST_FULL") else ["adamw"]
)
def test_killed_mpi_ranks(tmp_path, rule):
    """The same with processes that are killed, and threads at the end.

    Jobs differ from threads in how they are killed, not in their rules: one of them.
    """
    folder, result = tmp_path / "run", tmp_path / "result.npy"
    for strategy, ranks, victim in [("ddp", 2, 1), ("fsdp", 4, 2)]:
        ended = start(
            folder, result, ranks=ranks, strategy=strategy, rule=rule, victim=victim,
            strike_after=3,
        )  # fmt: skip
        assert ended.returncode == 137, ended.stderr
        assert f"rank {victim} (process " in ended.stderr
    ended = start(folder, result, strategy="zero1", rule=rule, world_size=4)
    assert ended.returncode == 0, ended.stderr
    assert "others than those" not in ended.stderr
    whole = tmp_path / "whole.npy"
    start(tmp_path / "other", whole, strategy="ddp", rule=rule)
    assert np.load(result).tobytes() == np.load(whole).tobytes()
