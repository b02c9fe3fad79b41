"""Forged metadata with the right checksum are refused with file, key and reason."""

from __future__ import annotations

import copy
import json
import math
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import NASTY, seal

import mpishard as ms
from mpishard.errors import CheckpointError

X = np.random.default_rng(0).standard_normal((16, 3))


def run(folder: Path, backend: Any = None, *, steps: int = 4, resume: Any = None) -> Any:
    model: Any = ms.nn.MLP([3, 4, 1], seed=0)
    optimizer: Any = ms.optimizers.AdamW(1e-2)
    if backend is not None:
        model = ms.as_distributed(model, backend, "fsdp")
        optimizer = ms.as_distributed(optimizer, backend, "fsdp")
    return optimizer.optimize(
        ms.OptimizationInputData(
            model=model,
            x_train=X,
            y_train=X[:, :1],
            x_validation=X,
            y_validation=X[:, :1],
            batch_size=4,
            epochs=4,
            max_steps=steps,
            validate_every=2,
            patience=9,
            progress=False,
            keep_best=True,
            checkpoint=folder,
            checkpoint_every=2,
            resume=resume,
            user_state={"rng": np.random.default_rng(3)},
        )
    )


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one checkpoint of a run; nobody changes it."""
    path: Path = tmp_path_factory.mktemp("good") / "run"
    ms.run_in_threads(2, lambda backend: run(path, backend))
    shutil.rmtree(path / "step-00000002")
    return path


def forge(good: Path, place: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy whose manifest was changed; return the manifest."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(good, place)
    manifest = place / "step-00000004" / "manifest.json"
    content = json.loads(manifest.read_text())["content"]
    change(content)
    manifest.write_text(seal(json.dumps(content)))
    return manifest


def loop_of(content: Any) -> Any:
    return content["metadata"]["user"]["training_loop"]


FORGED: list[tuple[Callable[[Any], None], str]] = [
    (lambda c: c.update(arrays=5), "manifest.content.arrays must be an object, got 5"),
    (lambda c: c.update(metadata=[]), r"content.metadata must be an object, got \[\]"),
    (lambda c: c.pop("files"), "manifest.content has no key 'files'"),
    (lambda c: c["parameters"][1].pop("start"), r"content.parameters\[1\] has no key 'start'"),
    (lambda c: c["arrays"].update(parameters=2), "arrays.parameters must be an object, got 2"),
    (
        lambda c: c["arrays"]["parameters"]["pieces"][0].update(box=[1]),
        r"pieces\[0\].box\[0\] must be a list",
    ),
    (lambda c: c["files"].update({"rank00000.safetensors": 1}), "rank00000.* an object, got 1"),
    (lambda c: c["metadata"].pop("user"), "metadata has no key 'user'"),
    (lambda c: c["metadata"].update(user=1), "metadata.user must be an object, got 1"),
    (lambda c: c["metadata"]["user"].update(training_loop=[1]), r"loop must be an .*got \[1\]"),
    (lambda c: c["metadata"].update(model=7), "saved without a model"),
    (lambda c: c["metadata"]["model"].update(steps="x"), 'metadata.model.steps .* got "x"'),
    (lambda c: c["metadata"]["model"].update(choices=3), "model.choices must be an object"),
    (lambda c: c["metadata"].update(optimizer=None), "saved without an optimizer"),
    (lambda c: c["metadata"]["optimizer"].pop("settings"), "optimizer has no key 'settings'"),
    (lambda c: c["metadata"]["optimizer"].update(optimizer_steps=-1), "optimizer_steps .* -1"),
    (lambda c: loop_of(c).update(step=None), "loop.step must be a whole number .* got None"),
    (lambda c: loop_of(c).pop("stopping"), "training_loop has no key 'stopping'"),
    (lambda c: loop_of(c)["stopping"].update(waited={}), "stopping.waited must be"),
    (lambda c: loop_of(c).update(order=1), "order must be an object, got 1"),
    (lambda c: loop_of(c).update(epoch_sums=[1]), "epoch_sums must be a list of 2"),
    (lambda c: loop_of(c).update(fitness_history=["a"]), r"fitness_history\[0\] must be a num"),
    (lambda c: loop_of(c).update(validation_history=[1]), r"history\[0\] must be a list"),
    (
        lambda c: loop_of(c).update(validation_history=[[-math.inf, 1.0]]),
        r"history\[0\]\[0\] must be a whole number",
    ),
    (lambda c: loop_of(c)["user_state"].update(ranks=[{}]), r"ranks\[0\] has no key 'rng'"),
    (
        lambda c: loop_of(c)["user_state"].update(ranks=[{"rng": 1}]),
        "'rng' is no state of a PCG64",
    ),
]


@pytest.mark.parametrize(
    ("change", "words", "resume"),
    [*((*row, None) for row in FORGED), *((*row, True) for row in FORGED[::5])],
)
def test_forged_metadata_are_refused_with_file_key_and_reason(
    change: Callable[[Any], None], words: str, resume: Any, good: Path, tmp_path: Path
) -> None:
    manifest = forge(good, tmp_path / "run", change)

    def go_on(backend: Any) -> None:
        with pytest.raises(CheckpointError) as caught:
            run(tmp_path / "run", backend, steps=6, resume=resume)
        assert re.search(words, str(caught.value)), str(caught.value)
        assert str(manifest.parent) in str(caught.value) or manifest.parent.name in str(
            caught.value
        )

    ms.run_in_threads(2, go_on)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in a document."""
    keys: Any = value if isinstance(value, dict) else range(len(value))
    if not isinstance(value, dict | list):
        return []
    found = []
    for key in keys:
        found.append((*path, key))
        if isinstance(value[key], dict | list):
            found += places(value[key], (*path, key))
    return found


@settings(max_examples=60, deadline=None)
@given(number=st.integers(0, 10**9), is_lost=st.booleans(), is_metadata=st.booleans())
def test_any_value_at_any_key_of_the_metadata(
    good: Path,
    tmp_path_factory: pytest.TempPathFactory,
    number: int,
    is_lost: bool,
    is_metadata: bool,
) -> None:
    dice = random.Random(number)

    def change(content: Any) -> None:
        root = ("metadata",) if is_metadata else ()
        document = content["metadata"] if is_metadata else content
        *way, last = (*root, *dice.choice(places(document)))
        holder = content
        for key in way:
            holder = holder[key]
        if is_lost:
            del holder[last]
        else:
            holder[last] = copy.deepcopy(dice.choice(NASTY))

    place = tmp_path_factory.getbasetemp() / "forged"
    forge(good, place, change)
    try:
        run(place, steps=4, resume=True)
    except CheckpointError as refused:
        said = str(refused)
    except ValueError:  # it says that it is another run's, or none's
        return
    else:  # as good as what was saved
        return
    assert "step-00000004" in said
