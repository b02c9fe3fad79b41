"""Watching a run: progress, metrics, plots, memory, time."""

from mpishard.observe.ledger import MemoryCategory, MemoryLedger
from mpishard.observe.metrics import MetricsWriter, read_metrics
from mpishard.observe.plots import plot_loss_curve
from mpishard.observe.progress import Progress
from mpishard.observe.timing import (
    Timing,
    memory_while,
    proportional_memory,
    time_alternately,
    time_chain,
)

__all__ = [
    "MemoryCategory",
    "MemoryLedger",
    "MetricsWriter",
    "Progress",
    "Timing",
    "memory_while",
    "plot_loss_curve",
    "proportional_memory",
    "read_metrics",
    "time_alternately",
    "time_chain",
]
