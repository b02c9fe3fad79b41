"""The comparison with peers: arithmetic, files, and the same model on both sides."""

import importlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mpishard as ms

FOLDER = Path(__file__).parents[2] / "benchmarks"
SAMPLES = {
    "mlp ours 2": [0.02, 0.04, 0.03],
    "mlp fsdp2": [0.2, 0.2, 0.2],
    "mlp ours 4": [0.04, 0.08],
    "mlp products numpy": [0.03],
    "all_reduce 8 B ours, in place": [12e-6],
    "all_reduce 8 B MPI": [2e-6],
    "loop conv mst-fsdp": [0.03],
    "loop conv mst-fsdp processor": [0.02],
    "loop conv mst-fsdp memory": [5e6],
    "loop conv ddp": [0.04],
    "large activations float32": [8e6, 8e6],
    "large activations bfloat16": [4e6, 4e6],
    "large memory float32": [20e6, 20e6],
    "large memory bfloat16": [16e6, 18e6],
    "jax ranks": [0.01],
    "jax one": [0.02],
    "jax devices": [0.03],
}


def test_rows_pair_the_repeats():
    rows = {row.text: row for row in importlib.import_module("rows").ROWS}
    values = rows["MLP step, FSDP / PyTorch FSDP2"].values(SAMPLES)
    assert values == pytest.approx([0.1, 0.2, 0.15])
    assert rows["MLP, 4 ranks / (2 x 2-rank step)"].values(SAMPLES) == pytest.approx([1.0, 1.0])
    assert rows["All-reduce 8 B in place, above MPI"].values(SAMPLES) == pytest.approx([10.0])
    assert rows["GPT step, FSDP / PyTorch DDP"].values(SAMPLES) == []
    best = rows["GPT bfloat16 / JAX, better of the two"]
    peers = {"gpt jax": [2.0, 4.0], "gpt jax bfloat16": [4.0, 2.0]}
    assert best.values(peers | {"gpt ours 2 bfloat16": [1.0, 1.0]}) == [0.5, 0.5]
    assert best.values({"gpt jax": [2.0], "gpt ours 2 bfloat16": [1.0]}) == [0.5]
    assert best.values({"gpt ours 2 bfloat16": [1.0]}) == []


RESULT = {
    "date": "2026-11-28",
    "commit": "1a2b3c4",
    "machine": {
        "processor": "Abacus",
        "cores": 2,
        "memory_bytes": 2**34,
        "system": "Linux",
        "python": "3.12",
        "mpishard": "1",
        "numpy": "2",
        "mpi4py": "4",
        "blas": ["openblas 0.3"],
    },
    "peer": "PyTorch 2",
    "peer_optimizer": "fused",
    "samples": SAMPLES,
}


def test_section_of_a_page(tmp_path):
    report = importlib.import_module("report")
    other = {**RESULT, "machine": {**RESULT["machine"], "processor": "Quipu (family 1, model 2)"}}
    other["samples"] = {"mlp ours 2": [0.2], "mlp fsdp2": [0.4], "gpt ours 2": [1], "gpt ddp": [2]}
    text = report.markdown([RESULT, other])
    assert "|  | Abacus | Quipu (family 1, model 2) |\n|---|---|---|\n" in text
    machine = "Measured on 2026-11-28 at commit 1a2b3c4: 2 cores, 16 GiB; Linux, Python 3.12; mpi"
    assert f"#### Abacus\n\n{machine}" in text
    assert f"#### Quipu (family 1, model 2)\n\n{machine}" in text
    assert report.file_of("Quipu (family 1, model 2)").name == "Quipu-family-1-model-2.json"
    assert "PyTorch 2 with AdamW(fused)" in text
    assert "| 0.150 (0.100 to 0.200; 3), bound 0.150 | 0.500 (0.500 to 0.500; 1) |" in text
    assert "| 10.00 us (10.00 us to 10.00 us; 1) |  |" in text
    assert "GPT step, FSDP / PyTorch DDP |  | 0.500 (0.500 to 0.500; 1) |" in text
    assert "missed" not in text
    assert "| ours, 2 ranks | 30.0 ms |  |  |\n| ours, 4 ranks | 60.0 ms |  |  |\n" in text
    assert "| PyTorch FSDP2 | 200.0 ms |  |  |" in text
    assert "saved activations, bfloat16 / float32 | 0.500 (0.500 to" in text
    assert "memory of the node, bfloat16 / float32 | 0.850 (0.8" in text
    beside = report.targets([RESULT, other])
    assert "|  | target | Abacus | Quipu (family 1, model 2) |\n|---|---|---|---|\n" in beside
    assert "| <= 0.200 | 0.150, reached | 0.500, missed by 150% |" in beside
    assert "| <= 8.00 us | 10.00 us, missed by 2.00 us |  |" in beside
    assert "20 MB in float32, of which 8 MB activations; 17 MB in bfloat16, of which 4 MB" in text
    assert "| convolutions |  | 30 ms, 20 ms, 5 MB | 40 ms |  |" in text
    assert "JAX: 2 ranks 10 ms; jit, one process 20 ms; shard_map, 2 devices 30 ms." in text
    assert "linear layers alone, one thread: MLP 30.0 ms in NumPy.\n" in text
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    report.replace_section(page, text)
    report.replace_section(page, text)
    assert page.read_text() == f"before\n{report.BEGIN}\n\n{text}\n\n{report.END}\nafter\n"
    page.write_text(f"only {report.BEGIN}")
    with pytest.raises(ValueError, match="needs the lines <!-- measured: begin -->"):
        report.replace_section(page, text)


def test_the_page_has_the_results_of_all_processors(tmp_path):
    report = importlib.import_module("report")
    text = (FOLDER.parent / "docs" / "performance.md").read_text(encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text(text)
    report.replace_section(page, report.markdown(report.kept()))
    assert page.read_text() == text, "compare.py --report --page docs/performance.md"
    text = (FOLDER / "results" / "targets.md").read_text(encoding="utf-8")
    page.write_text(text)
    report.replace_section(page, report.targets(report.kept()))
    assert page.read_text() == text, "compare.py --report --targets benchmarks/results/targets.md"
    for result in report.kept():
        assert report.file_of(report.name(result)).exists()


def test_the_beginning_of_the_page_has_the_ratios_and_the_picture_of_the_results():
    draw = importlib.import_module("draw_steps")
    assert draw.PICTURE.read_text(encoding="utf-8") == draw.drawing()
    page = (FOLDER.parent / "docs" / "performance.md").read_text(encoding="utf-8")
    samples = draw.newest()["samples"]
    for text, peer in {
        "PyTorch FSDP2, 2 processes": "fsdp2",
        "PyTorch DDP, 2 processes": "ddp",
        "PyTorch, 1 process, 2 threads": "threads",
        "JAX with `jit`, 1 process, 2 threads": "jax",
    }.items():
        cells = {}
        for model in ("mlp", "gpt"):
            pairs = [
                (samples[f"{model} ours 2{kind}"], samples.get(f"{model} {peer}{kind}", ()))
                for kind in ("", " bfloat16")
            ]
            found = [[a / b for a, b in zip(*pair, strict=False)] for pair in pairs]
            cells[model] = ", ".join(f"{np.median(values):.2f}" for values in found if values)
        assert f"\n| {text} | {cells['mlp']} | {cells['gpt']} |".replace("|  |", "| |") in page


def test_model_of_a_step():
    model = importlib.import_module("model")
    line = model.Line.fit((n, 2e-5 + 1e-9 * n) for n in (100, 10_000, 1_000_000))
    assert (line.alpha, line.beta) == pytest.approx((2e-5, 1e-9))
    assert model.Line.fit([(10, 1.0), (1000, 0.9)]).beta == 0.0
    assert model.Line.fit([(10, 1e-3), (1000, 1.0)]).alpha == 0.0
    # Two units of 10 and 20 elements on 3 ranks, alpha = 1 s for each collective.
    costs = model.Costs(model.Line(1.0, 0.0), model.Line(1.0, 0.0), shared=False)
    assert costs.communication([10, 20], 3) == 1 + 2 + 3
    assert costs.step(100.0, 30.0, [10, 20], 3) == 100 - 20 + 6
    shared = model.Costs(model.Line(1.0, 0.0), model.Line(1.0, 0.0), shared=True)
    assert shared.communication([10, 20], 3) == 1 + 2
    assert shared.communication([10, 20], 1) == 0
    assert model.bytes_sent([10, 20], 3) == 2 * 4 * (3 * 10 + 2 * 20)


def test_units_of_a_case():
    case = importlib.import_module("growth_job").Case(4, 6, 1, 40)
    assert case.units == [40, 40, 40]


def test_names_of_samples_are_those_of_the_jobs():
    rows = importlib.import_module("rows").ROWS
    assert len({row.text for row in rows}) == len(rows)
    kinds = {row.ours.split()[0] for row in rows} | {row.other.split()[0] for row in rows}
    expected = {
        "mlp",
        "gpt",
        "large",
        "small",
        "plain",
        "shared",
        "all_reduce",
        "reduce_scatter",
        "loop",
        "jax",
    }
    assert kinds == expected


def compare(*arguments):
    return subprocess.run(
        [sys.executable, str(FOLDER / "compare.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


@pytest.mark.timeout(60)
@pytest.mark.spawned
def test_report_and_refusal():
    assert "| target |" in compare("--report").stdout
    ended = compare("--repeats", 0)
    assert ended.returncode == 2
    assert "--repeats must be 1 or more, got 0" in ended.stderr
    ended = compare("--only", "resnet")
    assert "invalid choice: 'resnet'" in ended.stderr
    ended = compare("--keep", "--only", "mlp")
    assert "--keep measures all groups" in ended.stderr
    assert "--page and --targets are for --report" in compare("--page", "page.md").stderr


@pytest.mark.parametrize("which", ["mlp", "gpt"])
def test_peers_compute_the_same_loss(which):
    torch = pytest.importorskip("torch", reason="PyTorch is no dependency of the tests")
    models = importlib.import_module("models")
    generator = np.random.default_rng(0)
    if which == "mlp":
        theirs, ours = models.mlp(16, 3), ms.nn.MLP([16] * 4, dtype="float32")
        x = y = generator.standard_normal((5, 16), dtype=np.float32)
    else:
        theirs = models.GPT(16, 8, 2)
        ours = ms.nn.GPT(vocabulary_size=256, context_length=128, width=16, heads=8, layers=2)
        tokens = generator.integers(0, 256, (2, 129))
        x, y = tokens[:, :-1].copy(), tokens[:, 1:].copy()
    flat = [p.detach().numpy().ravel() for p in theirs.parameters()]
    ours.set_parameters(np.concatenate(flat))
    prediction = theirs(torch.from_numpy(x))
    np.testing.assert_allclose(ours.predict(x), prediction.detach().numpy(), atol=1e-5)
    loss, _ = ours.compute_loss_and_gradients(x, y)
    expected = models.loss_of(prediction, torch.from_numpy(y)).item()
    assert loss == pytest.approx(expected, rel=1e-5)


def test_the_peer_in_jax_computes_the_same_loss():
    jax = pytest.importorskip("jax", reason="JAX is no dependency of the tests")
    peer = importlib.import_module("jax_gpt")
    ours = ms.nn.GPT(vocabulary_size=256, context_length=32, width=16, heads=8, layers=2)
    parameters = peer.initial(16, 2, 32)
    flat = [np.asarray(leaf).ravel() for leaf in jax.tree.leaves(parameters)]
    ours.set_parameters(np.concatenate(flat))
    tokens = np.random.default_rng(0).integers(0, 256, (2, 33))
    x, y = tokens[:, :-1].copy(), tokens[:, 1:].copy()
    loss, _ = ours.compute_loss_and_gradients(x, y)
    assert float(jax.jit(peer.loss)(parameters, x, y)) == pytest.approx(loss, rel=1e-5)
