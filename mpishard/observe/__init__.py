"""Watching a run: progress, metrics, plots, memory, time."""

from mpishard.observe.curves import Curve, Panel, plot_panels
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
    "Curve",
    "MemoryCategory",
    "MemoryLedger",
    "MetricsWriter",
    "Panel",
    "Progress",
    "Timing",
    "memory_while",
    "plot_loss_curve",
    "plot_panels",
    "proportional_memory",
    "read_metrics",
    "time_alternately",
    "time_chain",
]
