"""Panels of measured points and models' lines."""

import sys

import pytest

from mpishard.observe import Curve, Panel, plot_panels

POINTS = Curve("measured", [1, 10, 100], [2.0, 3.0, 20.0], [(1, 3), (2, 4), (15, 25)])
LINE = Curve("model", [1, 100], [2.0, 19.0], modelled=True)


@pytest.mark.parametrize("logarithmic", ["xy", "x", ""])
def test_small_png(tmp_path, logarithmic):
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "panels.png"
    panel = Panel("Time", "bytes", "ms", [POINTS, LINE, POINTS], logarithmic, (10, "here"))
    plot_panels(path, [panel, panel])
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size < 150_000


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ImportError, match=r"pip install 'mpishard\[plot\]'"):
        plot_panels(tmp_path / "x.png", [])
