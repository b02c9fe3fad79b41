"""The measurements on all processors as a section of a page, side by side."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rows import LOOPS, ROWS, Row

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"

MODELS = {"mlp": "MLP", "gpt": "GPT", "large": "GPT 8 x 768"}

IMPLEMENTATIONS = {
    "ours 1": "ours, 1 rank",
    "ours 2": "ours, 2 ranks",
    "ours 2 numba": "ours, 2 ranks, numba",
    "ours 2 bfloat16": "ours, 2 ranks, numba, bfloat16",
    "ours 4": "ours, 4 ranks",
    "adapter": "PyTorch module, adapter",
    "adapter bfloat16": "PyTorch module, adapter, bfloat16",
    "single": "PyTorch, one process",
    "threads": "PyTorch, 2 threads, both batches",
    "threads bfloat16": "PyTorch, 2 threads, both batches, autocast",
    "ddp": "PyTorch DDP",
    "ddp bfloat16": "PyTorch DDP, autocast",
    "fsdp2": "PyTorch FSDP2",
    "fsdp2 bfloat16": "PyTorch FSDP2, bfloat16",
    "jax": "JAX, one process, both batches",
    "jax bfloat16": "JAX, one process, both batches, bfloat16",
}
"""Name of each in the table of medians."""

Result = Mapping[str, Any]

PROCESSORS = Path(__file__).parent / "results" / "processors"
"""Folder of the results, a file for each processor."""

LEGEND = (
    "Each cell has the median, and in parentheses the lowest and highest value and the number of "
    "repeats. The bound is the ratio of a step that consists only of its matrix products."
)


def file_of(processor: str) -> Path:
    """The file of results of a processor, such as ``AMD-EPYC-family-25-model-17.json``."""
    return PROCESSORS / ("-".join(re.findall(r"[A-Za-z0-9.]+", processor)) + ".json")


def kept() -> list[Result]:
    """The results of every processor that was measured, in the order of their files' names."""
    return [json.loads(path.read_text("utf-8")) for path in sorted(PROCESSORS.glob("*.json"))]


def markdown(results: Sequence[Result]) -> str:
    """Ratios of all processors side by side, and the medians and the machine of each."""
    parts = [LEGEND, ratios(results)]
    for result in results:
        samples = result["samples"]
        parts += [f"#### {name(result)}", machine(result), times(samples), *memory(samples)]
        parts += [*loops(samples), *products(samples)]
    return "\n\n".join(parts)


def name(result: Result) -> str:
    """The processor's name."""
    return str(result["machine"]["processor"])


def machine(result: Result) -> str:
    """Hardware, versions and settings in a few lines."""
    found = result["machine"]
    gigabytes = (found["memory_bytes"] or 0) / 2**30
    versions = [f"{name} {found[name]}" for name in ("mpishard", "numpy", "mpi4py")]
    if result["peer"]:
        versions.append(f"{result['peer']} with AdamW({result['peer_optimizer']})")
    if result.get("jax"):
        versions.append(result["jax"])
    return (
        f"Measured on {result['date']} at commit {result['commit']}: {found['cores']} cores, "
        f"{gigabytes:.0f} GiB; {found['system']}, Python {found['python']}; "
        f"{', '.join(versions)}; BLAS: {', '.join(found['blas'])}."
    )


def ratios(results: Sequence[Result]) -> str:
    """The rows that were measured on any processor, as a table with a column for each."""
    return table(results, [""], lambda row: [row.text], cell)


def targets(results: Sequence[Result]) -> str:
    """The same rows beside what we want to reach."""
    return table(
        results, ["", "target"], lambda row: [row.text, f"<= {row.format(row.target)}"], verdict
    )


def table(
    results: Sequence[Result],
    heads: Sequence[str],
    begin: Callable[[Row], Sequence[str]],
    fill: Callable[[Row, Mapping[str, Sequence[float]]], str],
) -> str:
    """A line for each row that was measured on any processor, with a column for each of them."""
    heads = [*heads, *map(name, results)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in ROWS:
        measured = [result["samples"] for result in results]
        cells = [fill(row, samples) if row.values(samples) else "" for samples in measured]
        if any(cells):
            lines.append(f"| {' | '.join([*begin(row), *cells])} |")
    return "\n".join(lines)


def cell(row: Row, samples: Mapping[str, Sequence[float]]) -> str:
    """A row's median and range, and its bound, if measured."""
    values = row.values(samples)
    spread = f"({row.format(min(values))} to {row.format(max(values))}; {len(values)})"
    least = row.bound(samples)
    bound = "" if least is None else f", bound {row.format(least)}"
    return f"{row.format(median(values))} {spread}{bound}"


def verdict(row: Row, samples: Mapping[str, Sequence[float]]) -> str:
    """A row's median, and whether it reaches its target, or by how much it is above."""
    found = median(row.values(samples))
    above = row.format(found - row.target) if row.unit else f"{found / row.target - 1:.0%}"
    return f"{row.format(found)}, {'reached' if found <= row.target else f'missed by {above}'}"


def times(samples: Mapping[str, Sequence[float]]) -> str:
    """The medians of the steps, for each implementation that was measured."""
    lines = [f"| median of a step | {' | '.join(MODELS.values())} |", "|---" * 4 + "|"]
    for name, text in IMPLEMENTATIONS.items():
        found = [samples.get(f"{model} {name}") for model in MODELS]
        if any(found):
            cells = [f"{median(values) * 1e3:.1f} ms" if values else "" for values in found]
            lines.append(f"| {text} | {' | '.join(cells)} |")
    return "\n".join(lines)


def memory(samples: Mapping[str, Sequence[float]]) -> list[str]:
    """The memory behind the memory rows, and the times behind that of the small model."""
    texts = []
    if "mlp memory ours" in samples and "mlp memory fsdp2" in samples:
        ours, peer = (median(samples[f"mlp memory {name}"]) / 1e6 for name in ("ours", "fsdp2"))
        texts.append(f"Memory of both ranks, MLP: {ours:.0f} MB, FSDP2 {peer:.0f} MB.")
    if "large memory bfloat16" in samples:
        found = []
        for precision in ("float32", "bfloat16"):
            both = [samples[f"large {kind} {precision}"] for kind in ("memory", "activations")]
            all_of, saved = (median(values) / 1e6 for values in both)
            found.append(f"{all_of:.0f} MB in {precision}, of which {saved:.0f} MB activations")
        texts.append(f"Memory of both ranks, GPT 8 x 768: {'; '.join(found)}.")
    if "small shared" in samples:
        shared, sent = (median(samples[f"small {name}"]) * 1e3 for name in ("shared", "messages"))
        texts.append(
            f"Step of the small MLP: {shared:.1f} ms in shared memory, {sent:.1f} ms by messages."
        )
    return texts


def loops(samples: Mapping[str, Sequence[float]]) -> list[str]:
    """The medians of PyTorch loops: step, processor time, memory above idle; and of JAX."""
    ways = {"fsdp2": "FSDP2", "mst-fsdp": "mst fsdp", "ddp": "gloo DDP", "mst-ddp": "mst ddp"}
    kinds = [("", 1e-3, "ms"), (" processor", 1e-3, "ms"), (" memory", 1e6, "MB")]
    lines = []
    for model, (name, _) in LOOPS.items():
        cells = []
        for way in ways:
            found = [(samples.get(f"loop {model} {way}{kind}"), *unit) for kind, *unit in kinds]
            cells.append(", ".join(f"{median(v) / by:.0f} {unit}" for v, by, unit in found if v))
        if any(cells):
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    head = [
        "| loop: step, processor time, memory | " + " | ".join(ways.values()) + " |",
        "|---" * 5 + "|",
    ]
    parts = ["\n".join([*head, *lines])] if lines else []
    names = {"ranks": "2 ranks", "one": "jit, one process", "devices": "shard_map, 2 devices"}
    if all(f"jax {how}" in samples for how in names):
        found = (
            f"{text} {median(samples[f'jax {how}']) * 1e3:.0f} ms" for how, text in names.items()
        )
        parts.append(f"Step of the MLP in JAX: {'; '.join(found)}.")
    return parts


def products(samples: Mapping[str, Sequence[float]]) -> list[str]:
    """What the matrix products alone take, as a sentence, where it was measured."""
    texts = []
    for model in ("mlp", "gpt"):
        found = {
            name: f"{median(samples[key]) * 1e3:.1f} ms in {name}"
            for name, key in (
                ("NumPy", f"{model} products numpy"),
                ("PyTorch", f"{model} products torch"),
            )
            if key in samples
        }
        if found:
            texts.append(f"{model.upper()} {', '.join(found.values())}")
    if not texts:
        return []
    return [f"Matrix products of one rank's linear layers alone, one thread: {'; '.join(texts)}."]


def replace_section(page: Path, text: str) -> None:
    """Replace the text between the page's marks by ``text``.

    Raises
    ------
    ValueError
        If the page does not have both marks.
    """
    old = page.read_text(encoding="utf-8")
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} needs the lines {BEGIN} and {END}, one after the other")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")
