"""Frozen parameters have no state, in memory or in a checkpoint."""

from __future__ import annotations

import json
import zlib

import numpy as np
import pytest
import safetensors.numpy

import mpishard as ms
from mpishard.errors import CheckpointError

X = np.random.default_rng(0).standard_normal((12, 3))
Y = X[:, :1]
FROZEN = {"*.bias": {"frozen": True}}


def train(backend, strategy="fsdp", parameter_options=FROZEN, **options):
    config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=1)
    model = ms.as_distributed(ms.nn.MLP([3, 4, 2, 1], seed=0), config, strategy)
    rule = ms.optimizers.AdamW(1e-2, parameter_options=parameter_options)
    optimizer = ms.as_distributed(rule, config, strategy)
    result = optimizer.optimize(
        ms.OptimizationInputData(
            model=model, x_train=X, y_train=Y, batch_size=4, epochs=3, progress=False, **options
        )
    )
    return result, model.get_parameters(), optimizer.serialize()


@pytest.mark.parametrize(
    ("worlds", "strategies"), [((2, 2), ("fsdp", "fsdp")), ((3, 2), ("ddp", "zero1"))]
)
def test_interrupted_and_resumed_it_is_the_same_run(tmp_path, worlds, strategies):
    path = tmp_path / "run"
    _, parameters, _ = ms.run_in_threads(worlds[1], train, strategies[1])[0]
    ms.run_in_threads(worlds[0], train, strategies[0], max_steps=4, checkpoint=path)
    for result, values, data in ms.run_in_threads(worlds[1], train, strategies[1], resume=path):
        np.testing.assert_allclose(values, parameters, rtol=0, atol=1e-12)
        assert len(result.loss_history) == 5
        assert {name.rpartition(".")[2] for name in safetensors.numpy.load(data)} == {"weight"}
    ms.checkpoint.consolidate(path, tmp_path / "one.safetensors", optimizer=True)
    ms.checkpoint.convert(tmp_path / "one.safetensors", tmp_path / "one")
    assert "AdamW" in str(ms.checkpoint.check(tmp_path / "one"))
    again = ms.run_in_threads(worlds[1], train, strategies[1], resume=tmp_path / "one")[0][1]
    assert again.tobytes() == values.tobytes()


def test_frozen_parameters_have_no_state_in_a_checkpoint(tmp_path):
    path = tmp_path / "run"
    ms.run_in_threads(2, train, max_steps=4, checkpoint=path)

    def resume(backend):
        with pytest.raises(CheckpointError, match=r"of \S+\.bias.*, which was frozen when"):
            train(backend, parameter_options={}, resume=path)

    ms.run_in_threads(2, resume)


def test_a_state_with_a_hole_is_refused_where_nothing_was_frozen(tmp_path):
    path = tmp_path / "run"
    ms.run_in_threads(2, train, max_steps=4, checkpoint=path)
    (newest,) = path.glob("step-*")
    manifest = json.loads((newest / "manifest.json").read_text())
    for entry in manifest["content"]["parameters"]:
        entry.pop("frozen", None)
    manifest["crc32"] = zlib.crc32(json.dumps(manifest["content"]).encode())
    (newest / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="first_moment: nothing holds elements"):
        ms.checkpoint.check(path)
