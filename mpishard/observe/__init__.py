"""Watching a run: progress, metrics, traces, plots, memory, time.

Begin with ``progress.py``, the line on the terminal, and ``metrics.py``, the file of numbers.
``ledger.py`` counts the bytes that a rank holds, ``timing.py`` measures calls and memory for
benchmarks, and ``plots.py`` draws; matplotlib is imported there.

``trace.py`` records each rank's time line, ``trace_reader.py`` reads and merges those of a job, and
``trace_summary.py`` computes the shares of computing, waiting and idling. This room imports
communication.
"""

from mpishard.observe.ledger import MemoryCategory, MemoryLedger
from mpishard.observe.metrics import MetricsWriter, parse_metrics, read_metrics
from mpishard.observe.plots import (
    BLUE,
    GREY,
    PALETTE,
    Curve,
    Panel,
    losses_of,
    moving_mean,
    new_figure,
    plain_axes,
    plot_loss_curve,
    plot_panels,
    save,
)
from mpishard.observe.progress import Progress
from mpishard.observe.timing import (
    Timing,
    memory_while,
    proportional_memory,
    time_alternately,
    time_chain,
)
from mpishard.observe.trace import span, step_span, trace
from mpishard.observe.trace_reader import JobTrace, TraceEnd, merge_traces, open_trace
from mpishard.observe.trace_summary import (
    CallTotals,
    RankShares,
    TraceSummary,
    summarize_trace,
)

__all__ = [
    "CallTotals",
    "Curve",
    "JobTrace",
    "MemoryCategory",
    "MemoryLedger",
    "MetricsWriter",
    "Panel",
    "Progress",
    "RankShares",
    "Timing",
    "TraceEnd",
    "TraceSummary",
    "losses_of",
    "memory_while",
    "merge_traces",
    "open_trace",
    "plot_loss_curve",
    "plot_panels",
    "proportional_memory",
    "read_metrics",
    "span",
    "step_span",
    "summarize_trace",
    "time_alternately",
    "time_chain",
    "trace",
]
