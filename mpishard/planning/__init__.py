"""The cost of a run, before it runs.

Begin with ``timeline.py``: a schedule with times, its makespan, waiting and memory. ``charts.py``
draws it, as a picture or as text. This room imports pipeline and observe.
"""

from mpishard.planning.charts import plot_timelines, text_chart
from mpishard.planning.timeline import Timeline, simulate

__all__ = ["Timeline", "plot_timelines", "simulate", "text_chart"]
