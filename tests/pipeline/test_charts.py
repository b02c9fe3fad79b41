"""Charts of timelines: each operation on its rank, at its time."""

import struct

import pytest

from mpishard.pipeline import (
    SCHEDULE_NAMES,
    GPipeSchedule,
    Interleaved1F1BSchedule,
    OneForwardOneBackwardSchedule,
    PipelineOperationType,
    StageTimes,
    ZeroBubbleH1Schedule,
    plot_timelines,
    schedule_by_name,
    simulate,
    text_chart,
)
from mpishard.pipeline import planning as charts


def test_text():
    chart = text_chart(simulate(OneForwardOneBackwardSchedule(), 2, 2))
    assert chart.splitlines() == [
        "rank 0  F0F1....B0==..B1==",
        "rank 1  ..F0B0==F1B1==",
    ]
    chart = text_chart(simulate(Interleaved1F1BSchedule(), 2, 2))
    assert chart.splitlines()[0] == "rank 0  F0F1f0f1....b0==..b1==B0==B1=="


def test_text_of_times_that_are_no_multiples():
    times = StageTimes(forward=1, backward_input=1.3, backward_weight=1.7)
    for micro_batches in (3, 12):
        timeline = simulate(ZeroBubbleH1Schedule(), 3, micro_batches, times)
        for line, timed in zip(
            text_chart(timeline, 1000).splitlines(), timeline.ranks, strict=True
        ):
            bars = line[len("rank 0  ") :]
            label = 1 + len(str(micro_batches - 1))
            assert abs(len(bars) - timed[-1].end * label) <= 0.5
            letters = [letter for letter in bars if letter in "FBW"]
            assert len(letters) == len(timed)


def test_text_needs_room():
    timeline = simulate(GPipeSchedule(), 2, 2)  # 9 units of 2 columns behind a name of 8
    assert text_chart(timeline, 26) is not None
    assert text_chart(timeline, 25) is None
    assert text_chart(simulate(GPipeSchedule(), 2, 2, StageTimes(forward=0))) is None


def size_of(path):
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    return struct.unpack(">II", content[16:24])


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    timelines = [simulate(schedule_by_name(name), 3, 2) for name in ("1f1b", "zb-v")]
    one, all_of_them = tmp_path / "new" / "one.png", tmp_path / "all.png"
    plot_timelines(one, timelines[:1])
    plot_timelines(all_of_them, timelines)
    assert plot_timelines(None, timelines).axes
    assert size_of(one)[0] == size_of(all_of_them)[0]
    assert size_of(all_of_them)[1] > 1.5 * size_of(one)[1]
    with pytest.raises(ValueError, match="no timeline"):
        plot_timelines(one, [])


class Axes:
    """Keeps what is drawn: bars as (row, colour, start, end), and texts."""

    def __init__(self):
        from matplotlib.figure import Figure

        self._axes = Figure().add_subplot()
        self.bars, self.texts = [], []

    def broken_barh(self, spans, row, facecolor, **style):
        if facecolor != "none":
            self.bars += [(row[0] + 0.42, facecolor, a, a + length) for a, length in spans]

    def text(self, x, y, text, **style):
        self.texts.append((y, x, text))

    def __getattr__(self, name):
        return getattr(self._axes, name)


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_picture_shows_each_operation(name):
    pytest.importorskip("matplotlib")
    v = schedule_by_name(name).virtual_stages_per_rank
    timeline = simulate(schedule_by_name(name), 2, 3, StageTimes(1, 2, 3))
    axes = Axes()
    charts._draw(axes, timeline, 0.5, charts._ROW)
    blends = [
        lambda colour, v=v, k=k: charts._paler(colour, 0.6 * k / max(v - 1, 1)) for k in range(v)
    ]
    bars, texts = [], []
    for rank, timed in enumerate(timeline.ranks):
        for operation, _, start, end in timed:
            paint = blends[operation.virtual_stage_index]
            texts.append((rank, (start + end) / 2, str(operation.micro_batch_index)))
            if operation.type is PipelineOperationType.BACKWARD:
                bars += [
                    (rank, paint(charts._INPUT), start, start + 2),
                    (rank, paint(charts._WEIGHT), start + 2, end),
                ]
            else:
                colour = {
                    PipelineOperationType.FORWARD: charts._FORWARD,
                    PipelineOperationType.BACKWARD_INPUT: charts._INPUT,
                    PipelineOperationType.BACKWARD_WEIGHT: charts._WEIGHT,
                }[operation.type]
                bars.append((rank, paint(colour), start, end))
    rounded = [(round(rank, 6), *rest) for rank, *rest in axes.bars]
    assert sorted(rounded) == sorted(bars)
    assert axes.texts == texts
    assert timeline.schedule_name in axes.get_title(loc="left")
    assert f"bubble {timeline.bubble_fraction:.1%}" in axes.get_title(loc="left")
    axes.texts.clear()
    charts._draw(axes, timeline, 0.01, charts._ROW)  # too narrow for numbers
    assert axes.texts == []


def test_pictures_of_all_schedules_are_small(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "all.png"
    lines = [simulate(schedule_by_name(name), 4, 8) for name in SCHEDULE_NAMES]
    plot_timelines(path, lines)
    assert path.stat().st_size < 150_000
