"""A timeline as lines of text."""

from __future__ import annotations

import math

from mpishard.pipeline import PipelineOperationType
from mpishard.planning.timeline import Timeline

__all__ = ["text_chart"]

_LETTERS = {
    PipelineOperationType.FORWARD: "F",
    PipelineOperationType.BACKWARD: "B",
    PipelineOperationType.BACKWARD_INPUT: "B",
    PipelineOperationType.BACKWARD_WEIGHT: "W",
}


def text_chart(timeline: Timeline, width: int = 100) -> str | None:
    """One line for each rank, and time to the right.

    F is a forward, B a backward, or its input's half, W the parameters' half, with the
    micro-batch's number; what follows until the operation ends is filled with ``=``, and a dot is
    time in which the rank waits. In every other virtual stage the letters are small ones.

    Parameters
    ----------
    timeline : Timeline
        What is drawn.
    width : int
        Columns that there are.

    Returns
    -------
    str or None
        The lines; None where an operation would be too narrow for its label.

    Examples
    --------
    >>> from mpishard.pipeline import ZeroBubbleH1Schedule
    >>> from mpishard.planning import simulate, text_chart
    >>> print(text_chart(simulate(ZeroBubbleH1Schedule(), 2, 2), width=40))
    rank 0  F0F1..B0W0B1W1
    rank 1  ..F0B0F1B1W0W1
    """
    names = [f"rank {rank}" for rank in range(timeline.num_stages)]
    indent = max(map(len, names)) + 2
    shortest = min(o.duration for timed in timeline.ranks for o in timed)
    label = 1 + len(str(timeline.num_micro_batches - 1))
    if not shortest or indent + timeline.makespan / shortest * label > width + 1e-9:
        return None
    columns = label / shortest
    lines = []
    for name, timed in zip(names, timeline.ranks, strict=True):
        line = ""
        for operation, _, start, end in timed:
            letter = _LETTERS[operation.type]
            if operation.virtual_stage_index % 2:
                letter = letter.lower()
            first, behind = (math.floor(time * columns + 0.5 + 1e-9) for time in (start, end))
            line = line.ljust(first, ".")
            line += f"{letter}{operation.micro_batch_index}".ljust(behind - first, "=")
        lines.append(f"{name.ljust(indent)}{line}")
    return "\n".join(lines)
