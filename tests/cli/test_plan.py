"""``mpishard plan schedule``: figures of schedules, as a table, text, JSON and a picture."""

import json
import re

import pytest
from typer.testing import CliRunner

from mpishard.cli import app


def plan(*arguments):
    return CliRunner().invoke(app, ["plan", "schedule", *map(str, arguments)])


def row_of(output, name):
    (row,) = [line for line in output.splitlines() if line.startswith(f"{name}  ")]
    return re.split("  +", row.strip())


def test_table_and_text():
    ended = plan("-p", 4, "-m", 8)
    assert ended.exit_code == 0, ended.output
    assert row_of(ended.stdout, "1F1B") == [
        "1F1B",
        "1",
        "27.3%",
        "27.3%",
        "33",
        "27.3%",
        "4 3 2 1",
        "4 3 2 1",
    ]
    assert row_of(ended.stdout, "Looped-BFS")[1:] == [
        "2",
        "15.8%",
        "15.8%",
        "28.5",
        "15.8%",
        "8",
        "8",
    ]
    assert row_of(ended.stdout, "ZB-V")[1:] == ["2", "0.0%", "0.0%", "25.5", "5.9%", "4", "4"]
    assert "rank 0  F0F1F2F3......B0W0F4" in ended.stdout
    hidden = "Charts wider than 80 columns are not shown: Interleaved-1F1B, Looped-BFS, ZB-V.\n"
    assert f"{hidden}--output" in ended.stdout
    assert max(map(len, ended.stdout.splitlines())) <= 80


def test_one_schedule_with_times():
    options = [
        "--schedule",
        "zb-h1",
        "--forward",
        2,
        "--backward-input",
        3,
        "--backward-weight",
        5,
        "--communication",
        7,
    ]
    ended = plan("--stages", 2, "--micro-batches", 1, *options)
    assert ended.exit_code == 0, ended.output
    # 2, 7, 2, 3, 7, 3 and 5 more.
    assert row_of(ended.stdout, "ZB-H1")[2:5] == ["65.5%", "-", "29"]
    assert "GPipe" not in ended.stdout


def test_json():
    ended = plan("-p", 4, "-m", 8, "--virtual-stages", 4, "--json")
    assert ended.exit_code == 0, ended.output
    rows = {row["schedule"]: row for row in json.loads(ended.stdout)}
    assert list(rows) == [
        "GPipe",
        "1F1B",
        "Interleaved-1F1B",
        "Looped-BFS",
        "ZB-H1",
        "ZB-H2",
        "ZB-V",
    ]
    interleaved = rows["Interleaved-1F1B"]
    assert interleaved["virtual_stages_per_rank"] == 4
    assert interleaved["bubble_fraction"] == pytest.approx(3 / 35)
    assert interleaved["published_bubble_fraction"] == pytest.approx(3 / 35)
    # The times of a rank are divided among its stages: the work is the same for all.
    assert interleaved["makespan"] == pytest.approx(24 + 3 * 3 / 4)
    assert rows["ZB-H2"]["idle_fraction"] == pytest.approx(3 / 27)
    assert rows["ZB-H2"]["peak_live"] == [7, 5, 3, 1]
    assert rows["ZB-H2"]["spans"] == [[0, 24], [1, 25], [2, 26], [3, 27]]
    one = json.loads(plan("-p", 2, "-m", 3, "--schedule", "Interleaved", "--json").stdout)
    assert [row["published_bubble_fraction"] for row in one] == [None]


def test_many_ranks_are_summed_up():
    ended = plan("-p", 12, "-m", 24, "--schedule", "1f1b")
    assert row_of(ended.stdout, "1F1B")[-1] == "<= 12"


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "schedules.PNG"
    ended = plan("-p", 2, "-m", 2, "--schedule", "gpipe", "--output", path)
    assert ended.exit_code == 0, ended.output
    assert path.read_bytes().startswith(b"\x89PNG")
    assert ended.stderr == f"mpishard plan: wrote {path}\n"
    (tmp_path / "folder.png").mkdir()
    for name, message in {
        "": "give a name that ends with .png",
        "chart.pdf": "give a name that ends with .png",
        "new/chart.png": f"there is no folder {tmp_path / 'new'}",
        "folder.png": "folder.png is a folder",
    }.items():
        ended = plan("-p", 1, "-m", 1, "--schedule", "gpipe", "--output", tmp_path / name)
        assert (ended.exit_code, "Traceback" in ended.output) == (2, False)
        assert "mpishard plan: --output: " in ended.output
        assert message in ended.output
        assert ended.stdout == ""
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", 4], "Missing option '-m'"),
        (["-p", 0, "-m", 2], "'-p' / '--stages'"),
        (["-p", 2, "-m", 0], "'-m' / '--micro-batches'"),
        (["-p", 2, "-m", 2, "--forward", -1], "--forward must be 0 or more and finite, got -1"),
        (["-p", 2, "-m", 2, "--forward", "nan"], "--forward must be 0 or more and finite, got nan"),
        (["-p", 2, "-m", 2, "--forward", 0, "--backward-input", 0, "--backward-weight", 0],
         "--backward-weight and --communication are all 0"),
        (["-p", 2, "-m", 2, "--communication", "inf"], "communication must be 0 or more and fin"),
        (["-p", 2, "-m", 2, "--schedule", "dual"], "zb-h1, zb-h2, zb-v, all; got 'dual'"),
        (["-p", 2, "-m", 2, "--virtual-stages", 1], "must be 2 or more, got 1"),
        (["-p", 2, "-m", 2, "--schedule", "zb-v", "--virtual-stages", 3], "ZB-V has 2 virtual"),
        (["-p", 10, "-m", 10**6], "and 1000000 micro-batches has up to 30000000"),
    ],
)  # fmt: skip
def test_wrong_arguments(arguments, message):
    ended = plan(*arguments)
    assert ended.exit_code == 2
    assert message in ended.output
    assert "Traceback" not in ended.output
    assert ended.stdout == ""
