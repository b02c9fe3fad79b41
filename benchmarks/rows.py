"""The rows of the comparison: which two samples make a ratio, and what it must reach."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

Samples = Mapping[str, Sequence[float]]
"""Name of a measurement -> one value for each repeat."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Parameters
    ----------
    text : str
        Name of the row.
    ours, other : str
        Names of the measurements; the row is ours / other. ``other`` may name several, separated
        by ``|``: the fastest of those that were measured counts, in each repeat.
    target : float
        Largest value that reaches the target.
    factor : float
        Factor of ``other``.
    unit : str
        Unit of a row that is ours - other, such as ``"us"``; empty for a ratio.
    least : str
        Name of a measurement that is a lower bound of ``ours``; empty if there is none.
    """

    text: str
    ours: str
    other: str
    target: float
    factor: float = 1.0
    unit: str = ""
    least: str = ""

    def values(self, samples: Samples) -> list[float]:
        """The row in each repeat; empty where something was not measured."""
        others = [samples[name] for name in self.other.split("|") if name in samples]
        pairs = zip(samples.get(self.ours, ()), map(min, zip(*others, strict=False)), strict=False)
        if self.unit == "us":
            return [(ours - other) * 1e6 for ours, other in pairs]
        return [ours / (self.factor * other) for ours, other in pairs]

    def bound(self, samples: Samples) -> float | None:
        """What the row cannot go below on this machine, where that was measured."""
        least, other = samples.get(self.least), samples.get(self.other)
        return median(least) / (self.factor * median(other)) if least and other else None

    def format(self, value: float) -> str:
        """A value of this row as text."""
        return f"{value:.2f} {self.unit}" if self.unit else f"{value:.3f}"


MLP, GPT = {"least": "mlp products numpy"}, {"least": "gpt products numpy"}
JAX = "gpt jax|gpt jax bfloat16"
LARGE_PEERS = "|".join(
    f"large {peer}"
    for peer in ("fsdp2 bfloat16", "ddp bfloat16", "threads bfloat16", "jax", "jax bfloat16")
)

LOOPS = {"mlp": ("MLP", 0.30), "gpt": ("GPT", 0.80), "conv": ("convolutions", 0.75)}
LOOPS["encoder"] = ("encoder", 0.75)
"""Models of the loops of PyTorch: name in a row, and target of a step next to FSDP2's."""


def _loop_rows() -> list[Row]:
    rows = []
    for model, (name, target) in LOOPS.items():
        ours, theirs = f"loop {model} mst-fsdp", f"loop {model} fsdp2"
        kinds = [("step", "", target), ("processor time", " processor", target)]
        rows += [
            Row(f"{name}, loop: {text}, fsdp / FSDP2", ours + kind, theirs + kind, least)
            for text, kind, least in [*kinds, ("memory", " memory", 0.35)]
        ]
        ours, theirs = f"loop {model} mst-ddp", f"loop {model} ddp"
        rows += [
            Row(f"{name}, loop: {text}, ddp / gloo DDP", ours + kind, theirs + kind, 1.0)
            for text, kind, _ in kinds
        ]
    return rows


ROWS = [
    Row("MLP step, FSDP / PyTorch FSDP2", "mlp ours 2", "mlp fsdp2", 0.20, **MLP),
    Row("MLP step, FSDP / PyTorch DDP", "mlp ours 2", "mlp ddp", 0.32, **MLP),
    Row("MLP step, FSDP / PyTorch, one process", "mlp ours 2", "mlp single", 0.48, **MLP),
    Row("GPT step, FSDP / PyTorch FSDP2", "gpt ours 2", "gpt fsdp2", 0.62, **GPT),
    Row("GPT step, FSDP / PyTorch DDP", "gpt ours 2", "gpt ddp", 0.74, **GPT),
    Row("MLP, 2 ranks / PyTorch, 2 threads", "mlp ours 2", "mlp threads", 0.55, **MLP),
    Row("GPT, 2 ranks / PyTorch, 2 threads", "gpt ours 2", "gpt threads", 0.72, **GPT),
    Row("MLP step with numba / PyTorch FSDP2", "mlp ours 2 numba", "mlp fsdp2", 0.20, **MLP),
    Row("GPT step with numba / PyTorch FSDP2", "gpt ours 2 numba", "gpt fsdp2", 0.62, **GPT),
    *(
        Row(
            f"{model.upper()} in PyTorch, adapter / FSDP2",
            f"{model} adapter",
            f"{model} fsdp2",
            target,
            least=f"{model} products torch",
        )
        for model, target in (("mlp", 0.30), ("gpt", 0.80))
    ),
    Row("MLP, 2-rank step / 1-rank step", "mlp ours 2", "mlp ours 1", 0.90),
    Row("GPT, 2-rank step / 1-rank step", "gpt ours 2", "gpt ours 1", 1.03),
    *(
        Row(
            f"{name} 64 MiB, shared / MPI",
            f"{kind} 64 MiB ours, shared",
            f"{kind} 64 MiB MPI",
            0.15,
        )
        for name, kind in (("Reduce-scatter", "reduce_scatter"), ("All-reduce", "all_reduce"))
    ),
    *(
        Row(f"All-reduce {size}{how} / MPI", f"{kind} {size} ours", f"{kind} {size} MPI", 1.1)
        for how, kind in (("", "all_reduce"), (" by messages", "plain all_reduce"))
        for size in ("1 MiB", "8 MiB", "64 MiB")
    ),
    Row(
        "All-reduce 8 B in place, above MPI",
        "all_reduce 8 B ours, in place",
        "all_reduce 8 B MPI",
        8.0,
        unit="us",
    ),
    # Both with numba, which is used together with the extra bf16.
    Row("MLP step, bfloat16 / float32", "mlp ours 2 bfloat16", "mlp ours 2 numba", 0.66),
    Row("GPT step, bfloat16 / float32", "gpt ours 2 bfloat16", "gpt ours 2 numba", 0.60),
    # Peers in their own mixed precision.
    Row("MLP / FSDP2, both bfloat16", "mlp ours 2 bfloat16", "mlp fsdp2 bfloat16", 0.20),
    Row("GPT / FSDP2, both bfloat16", "gpt ours 2 bfloat16", "gpt fsdp2 bfloat16", 0.48),
    Row("MLP / PyTorch, 2 threads, autocast", "mlp ours 2 bfloat16", "mlp threads bfloat16", 0.90),
    Row("GPT / PyTorch, 2 threads, autocast", "gpt ours 2 bfloat16", "gpt threads bfloat16", 0.65),
    Row("GPT bfloat16 / JAX, better of the two", "gpt ours 2 bfloat16", JAX, 0.45),
    Row("GPT adapter / FSDP2, both bfloat16", "gpt adapter bfloat16", "gpt fsdp2 bfloat16", 0.65),
    Row("GPT 8 x 768, bfloat16 / float32", "large ours 2 bfloat16", "large ours 2 numba", 0.52),
    Row("GPT 8 x 768, bfloat16 / best peer", "large ours 2 bfloat16", LARGE_PEERS, 0.75),
    Row("MLP step with numba / products alone", "mlp ours 2 numba", "mlp products numpy", 1.30),
    Row("GPT step with numba / products alone", "gpt ours 2 numba", "gpt products numpy", 1.28),
    *(
        Row(
            f"Small MLP{text}, shared / messages",
            f"small shared{kind}",
            f"small messages{kind}",
            1.0,
        )
        for text, kind in (("", ""), (" in 3 units", " large units"))
    ),
    Row("MLP step, checks on / off", "mlp checked", "mlp unchecked", 1.02),
    Row("GPT step, checks on / off", "gpt checked", "gpt unchecked", 1.02),
    *(
        Row(
            f"GPT 4 x 512, one batch on 2 ranks / on 1: {way}",
            f"shared {way}",
            "shared one rank",
            0.625,
        )  # 1.6 times as fast
        for way in ("tensor", "1f1b", "zb-h1")
    ),
    Row("MLP, memory of the node / FSDP2", "mlp memory ours", "mlp memory fsdp2", 0.25),
    *(
        Row(
            f"GPT 8 x 768, {text}, bfloat16 / float32",
            f"large {kind} bfloat16",
            f"large {kind} float32",
            target,
        )
        for text, kind, target in (
            ("saved activations", "activations", 0.55),
            ("memory of the node", "memory", 0.85),
        )
    ),
    *_loop_rows(),
    Row("JAX MLP, 2 ranks / jit, one process", "jax ranks", "jax one", 1.1),
    Row("JAX MLP, 2 ranks / shard_map, 2 devices", "jax ranks", "jax devices", 0.6),
    Row("MLP, 4 ranks / (2 x 2-rank step)", "mlp ours 4", "mlp ours 2", 1.05, factor=2.0),
    Row("GPT, 4 ranks / (2 x 2-rank step)", "gpt ours 4", "gpt ours 2", 1.05, factor=2.0),
]
