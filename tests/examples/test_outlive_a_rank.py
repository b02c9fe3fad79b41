"""The example that loses a rank has the result of a run without a loss."""

import argparse
import importlib.util
import threading
from pathlib import Path

import pytest

import mpishard as ms

FILE = Path(__file__).parents[2] / "examples" / "outlive_a_rank.py"


def run(output, lose):
    spec = importlib.util.spec_from_file_location("outlive_a_rank", FILE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    arguments = argparse.Namespace(steps=12, every=3, lose=lose, at=8, output=output)
    return ms.launch(example.main, arguments, threading.local(), world_size=3, on_failure="shrink")


def test_the_loss_at_the_end_is_the_same(tmp_path, caplog):
    whole, ranks = run(tmp_path / "whole", "")
    assert ranks == 3
    caplog.set_level("INFO", "mpishard")
    loss, left = run(tmp_path / "lost", "1")
    assert left == 2
    assert loss == pytest.approx(whole, rel=1e-9)
    assert "resuming after step 6 of 12" in caplog.text
