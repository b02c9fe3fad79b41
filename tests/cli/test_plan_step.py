"""``mpishard plan step`` and ``mesh``: tables, JSON, a picture, and refusals."""

import json
import re

import pytest
from typer.testing import CliRunner

from mpishard.cli import app
from mpishard.planning import PARTS, Link, Machine, ProductRate

MODELS = """
import mpishard as ms

def gpt():
    return ms.nn.GPT(vocabulary_size=32, context_length=16, width=32, heads=4, layers=2)

def box():
    return BlackBox()

def own():
    layers = ms.nn.Sequential(ms.nn.Linear(8, 8), Mine())
    return ms.nn.Model(layers, ms.nn.MSE(), input_shape=(8,), dtype="float32")

class Mine(ms.nn.Layer):
    def output_shape(self, shape):
        return shape
    forward = backward_input = None

class BlackBox:
    def get_parameters(self):
        return None
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "models.py").write_text(MODELS)
    rates = (ProductRate("float32", 64, 64, 64, 1e10),)
    machine = Machine("by hand", 2, rates, (1e9,), Link(1e-6, 1e9), memory_bytes=1 << 30)
    machine.write(tmp_path / "machine.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan(*arguments):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def test_step_as_a_table_a_picture_and_json(folder):
    options = ("models.py:gpt", "-n", 4, "--batch", 16, "--mesh", "2x1x2", "--mesh", "1x2x2")
    options += ("-m", 4, "--schedule", "1f1b", "--schedule", "zb-h1")
    ended = plan("step", *options, "--output", "bars.png")
    assert ended.exit_code == 0, ended.output
    assert (folder / "bars.png").stat().st_size > 1000
    assert all(len(line) <= 80 for line in ended.stdout.splitlines())
    ended = plan("step", *options, "--json")
    steps = json.loads(ended.stdout)["rows"]
    # Micro-batches of a strategy are those of a mesh with a data axis alone.
    assert [step["name"] for step in steps[6:]] == [
        "fsdp 1f1b m4",
        "fsdp zb-h1 m4",
        "2x1x2 zero1 1f1b m4",
        "2x1x2 zero1 zb-h1 m4",
        "1x2x2 zero1 1f1b m4",
        "1x2x2 zero1 zb-h1 m4",
    ]
    memory = json.loads(plan("memory", *options, "--json").stdout)["rows"]
    assert [row["name"] for row in memory] == [step["name"] for step in steps]
    assert {row["samples"] for row in (*memory, *steps)} == {16}
    for step in steps:
        assert step["seconds"] == pytest.approx(sum(step[part] for part in PARTS))
        assert step["samples_per_second"] == pytest.approx(16 / step["seconds"])


def test_rows_of_a_table_have_one_batch_and_the_given_order(folder):
    order = ["pipeline", "tensor", "data"]
    options = ("-n", 4, "--mesh", "1x2x2", "--order", ",".join(order), "--recompute")
    ended = plan("step", "models.py:gpt", *options, "--json")
    *plain, mesh = json.loads(ended.stdout)["rows"]
    # 8 samples for each rank, and not only for the two data ranks of the mesh.
    assert mesh["samples_per_second"] == pytest.approx(32 / mesh["seconds"])
    assert mesh["order"] == order
    assert mesh["recomputes"]
    assert plain[0]["recomputes"]
    # A long name is folded, and the figures beside it are not.
    options = ("-n", 4, "--mesh", "2x1x2", "-m", 4, "--schedule", "interleaved", "--recompute")
    shown = plan("step", "models.py:gpt", *options).stdout.splitlines()
    assert sum(bool(re.search(r"\d [mu]s .*\d%.* [\d,]+$", line)) for line in shown) == 5


def test_a_layer_with_unknown_products_is_named(folder):
    ended = plan("step", "models.py:own", "-n", 2)
    assert ended.exit_code == 0, ended.output
    assert "the products of Mine are not known" in ended.stderr
    assert "not known" not in plan("step", "models.py:gpt", "-n", 2).stderr


def test_mesh_says_what_it_rejected(folder):
    ended = plan("mesh", "models.py:gpt", "-n", 2, "--batch", 4, "--json")
    assert ended.exit_code == 0, ended.output
    found = json.loads(ended.stdout)["rows"]
    assert found[0]["is_chosen"]
    ended = plan("mesh", "models.py:gpt", "-n", 2, "--batch", 4)
    assert 'As a run: as_distributed(model, config, "' in ended.stdout
    ended = plan("mesh", "models.py:gpt", "-n", 2, "--batch", 4, "--host-memory", "1KB")
    assert ended.exit_code == 1
    assert "more" in ended.stdout
    assert "Nothing fits" in ended.stdout
    rejected = [line.split() for line in ended.stdout.splitlines() if line.endswith(" more")]
    needed = [float(words[-3]) for words in rejected]
    assert len(needed) > 5
    assert needed == sorted(needed)  # the nearest first; all are in KiB
    assert "recompute does not fit on up to 4 hosts" in ended.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("step", "models.py:gpt", "-n", 4, "--mesh", "2x2"), "--mesh is pipeline x tensor x data"),
        (("step", "models.py:gpt", "-n", 4, "--mesh", "3x1x1"), "and the world has 4 ranks"),
        (("step", "models.py:box", "-n", 4), "has no layers"),
        (("step", "models.py:none", "-n", 4), "has no 'none'"),
        (("step", "models.py:gpt", "-n", 4, "--hosts", 2), 'has no "network"'),
        (("step", "models.py:gpt", "-n", 4, "--machine", "models.py"), "is no JSON"),
        (("step", "models.py:gpt", "-n", 4, "--precision", "bfloat16"), "no products in bfloat16"),
        (("step", "models.py:gpt", "-n", 4, "--machine", "none.json"), "there is no machine file"),
        (("step", "models.py:gpt", "-n", 4, "--batch", 2), "too small for a data axis of 4"),
        (("step", "models.py:gpt", "-n", 4, "--order", "data"), "order must name pipeline, tensor"),
        (("mesh", "models.py:gpt", "-n", 2, "--host-memory", "much"), "a size is a number"),
    ],
)
def test_refusals(folder, options, words):
    ended = plan(*options)
    assert ended.exit_code == 2
    assert words in ended.output.replace("\n", " "), ended.output
