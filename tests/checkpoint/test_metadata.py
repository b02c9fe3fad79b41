"""Metadata of checkpoints: values that come back, values that are refused, and strict JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

import mpishard as ms
from mpishard import checkpoint, run_in_threads
from mpishard.checkpoint import Manifest
from mpishard.checkpoint.exchange.sources import open_source

INF, NAN = math.inf, math.nan
ODD = {"best": INF, "scores": [1.5, NAN, [-INF, 2]], "deep": {"array": np.array([1.0, NAN])}}


def refuse(word: str) -> float:
    raise AssertionError(f"{word} is not JSON")


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=refuse)


def test_numbers_that_json_does_not_know_come_back(tmp_path: Path) -> None:
    model = ms.nn.MLP([2, 1], seed=0)
    checkpoint.save(tmp_path / "c", model, metadata=ODD)
    strict((tmp_path / "c" / "manifest.json").read_text())
    checkpoint.consolidate(tmp_path / "c", tmp_path / "c.safetensors")
    with safe_open(tmp_path / "c.safetensors", "numpy") as file:
        for words in file.metadata().values():
            if words.startswith("{"):
                strict(words)
    with open_source(tmp_path / "c.safetensors") as source:
        assert source.metadata["user"]["best"] == INF
    checkpoint.convert(tmp_path / "c.safetensors", tmp_path / "again")
    for name in ("c", "again"):
        found = checkpoint.load(tmp_path / name, model)
        assert repr(found) == repr(
            {"best": INF, "scores": [1.5, NAN, [-INF, 2]], "deep": {"array": [1.0, NAN]}}
        )


def test_a_run_without_an_evaluation_leaves_strict_json(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((8, 2))
    data = ms.OptimizationInputData(
        model=ms.nn.MLP([2, 1], seed=0),
        x_train=x,
        y_train=x[:, :1],
        batch_size=2,
        max_steps=1,
        patience=3,
        progress=False,
        checkpoint=tmp_path / "run",
    )
    ms.optimizers.AdamW(1e-2).optimize(data)
    directory = tmp_path / "run" / "step-00000001"
    text = (directory / "manifest.json").read_text()
    strict(text)
    assert '{"$float": "Infinity"}' in text  # the best score so far
    assert (
        math.inf in Manifest.read(directory).metadata["user"]["training_loop"]["stopping"].values()
    )


@pytest.mark.parametrize(
    ("metadata", "error", "message"),
    [
        ([1], TypeError, r"metadata must map names to values of JSON.*got \[1\]"),
        (0, TypeError, "metadata must map names"),
        ({1: 2, "1": 3}, TypeError, r"strings for keys.*got the key 1 in \['user'\]"),
        ({"a": [{"b": {None: 1}}]}, TypeError, r"the key None in \['user'\]\['a'\]\[0\]\['b'\]"),
        ({"a": np.array([{2: 1}])}, TypeError, "got the key 2 in"),
        ({"a": {"$float": "NaN"}}, ValueError, r"must not have the key '\$float'"),
        ({"a": {1}}, TypeError, "it holds a set"),
    ],
)
def test_metadata_that_would_not_come_back_unchanged_are_refused(
    metadata: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    def save(backend: Any) -> None:
        model = ms.as_distributed(ms.nn.MLP([2, 1], seed=0), backend, "fsdp")
        with pytest.raises(error, match=message):
            checkpoint.save(tmp_path / "c", model, metadata=metadata)

    run_in_threads(2, save)
    assert not [*tmp_path.iterdir()]


def test_a_path_with_nul_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must not have a NUL character in it, got 'a\\x00b'"):
        checkpoint.load("a\0b", ms.nn.MLP([2, 1]))
