"""What a run will cost, before it runs."""

from mpishard.planning.gantt import plot_timelines
from mpishard.planning.text_chart import text_chart
from mpishard.planning.timeline import Timeline, simulate

__all__ = ["Timeline", "plot_timelines", "simulate", "text_chart"]
