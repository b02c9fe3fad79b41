"""The cost of a run, before it runs."""

from mpishard.planning.charts import plot_timelines, text_chart
from mpishard.planning.timeline import Timeline, simulate

__all__ = ["Timeline", "plot_timelines", "simulate", "text_chart"]
