"""Watching a run: progress, metrics, plots, memory."""

from mpishard.observe.ledger import MemoryCategory, MemoryLedger
from mpishard.observe.metrics import MetricsWriter, read_metrics
from mpishard.observe.plots import plot_loss_curve
from mpishard.observe.progress import Progress

__all__ = [
    "MemoryCategory",
    "MemoryLedger",
    "MetricsWriter",
    "Progress",
    "plot_loss_curve",
    "read_metrics",
]
