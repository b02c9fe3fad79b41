"""Growth of a step's cost with the number of parameters, of ranks, and with the size of units.

    python benchmarks/growth.py --images docs/images
    python benchmarks/growth.py --study ranks --images docs/images

Draws growth_parameters.png, growth_ranks.png, growth_units.png and collectives.png. Points are
measured; dashed lines are the alpha-beta model (model.py) with the collectives measured in the same
job. Takes about five minutes. Needs matplotlib.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from jobs import Runner
from model import Costs, Line, bytes_sent

from mpishard.cli.machine import usable_cores
from mpishard.observe import Curve, Panel, Timing, plot_panels

WORLDS = (1, 2, 3, 4, 6, 8)
STUDIES = ("parameters", "ranks", "units", "collectives")
SIZES = "64B,1KiB,16KiB,256KiB,4MiB,64MiB"

Job = dict[str, Any]
Scale = Literal["xy", "x", ""]
X = Callable[[Job, dict[str, Any]], float]


class Study:
    """Jobs on shared memory and by messages, where there is both."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def jobs(self, study: str, worlds: Iterable[int]) -> dict[str, list[Job]]:
        """Name of the curve -> a job for each world."""
        found: dict[str, list[Job]] = {"by messages": [], "in shared memory": []}
        program = str(Path(__file__).with_name("growth_job.py"))
        for ranks in worlds:
            for name, arena in (("by messages", "off"), ("in shared memory", "auto")):
                print(f"{study}: {ranks} ranks, {name}", file=sys.stderr)
                words = ("run", "-n", program, "--study", study)
                found[name].append(self.runner.ours(*words, ranks=ranks, MPISHARD_ARENA=arena))
        return {name: jobs for name, jobs in found.items() if name == "by messages" or shares(jobs)}


def shares(jobs: list[Job]) -> bool:
    """Whether the ranks had shared memory."""
    return any("shared" in row["way"] for job in jobs for row in job["collectives"])


def costs(job: Job, name: str) -> Costs:
    """Alpha and beta of the job's own collectives."""
    shared = name == "in shared memory"

    def line(kind: str, way: str) -> Line:
        rows = [r for r in job["collectives"] if (r["collective"], r["way"]) == (kind, way)]
        return Line.fit((row["nbytes"], Timing(tuple(row["seconds"])).median) for row in rows)

    if job["world_size"] == 1:
        nothing = Line(0.0, 0.0)
        return Costs(nothing, nothing, shared)
    way = "ours, shared" if shared else "ours"
    return Costs(line("reduce_scatter", way), line("all_gather", "ours"), shared)


def panels(
    study: dict[str, list[Job]],
    x_label: str,
    x: X,
    scales: tuple[Scale, Scale],
    boundary: tuple[float, str] | None = None,
) -> list[Panel]:
    """Step time and bytes sent against ``x``, with the model's lines."""
    times, amounts = [], []
    for name, jobs in study.items():
        rows = [(job, case) for job in jobs for case in job["cases"]]
        places = [x(job, case) for job, case in rows]
        seconds = [case["seconds"] * 1e3 for _, case in rows]
        spread = [tuple(1e3 * quartile for quartile in case["quartiles"]) for _, case in rows]
        times.append(Curve(f"FSDP {name}", places, seconds, spread))
        modelled = [
            1e3
            * costs(job, name).step(case["alone"], case["update"], case["units"], job["world_size"])
            for job, case in rows
        ]
        times.append(Curve(f"model, {name}", places, modelled, modelled=True))
        sent = [case["bytes_sent"] / 1e6 for _, case in rows]
        amounts.append(Curve(f"FSDP {name}", places, sent))
        if name == "by messages":
            alone = [case["alone"] * 1e3 for _, case in rows]
            times.append(Curve("alone: no communication", places, alone))
            formula = [bytes_sent(case["units"], job["world_size"]) / 1e6 for job, case in rows]
            label = "3 (N-1) (S-K) + 2 (N-1) K"
            amounts.append(Curve(label, places, formula, modelled=True))
    ranks = {job["world_size"] for jobs in study.values() for job in jobs}
    where = f", {ranks.pop()} ranks" if len(ranks) == 1 else ""
    return [
        Panel(f"Time of a step{where}", x_label, "milliseconds", times, scales[0], boundary),
        Panel(f"Sent in a step{where}", x_label, "MB, all ranks", amounts, scales[1], boundary),
    ]


def collective_panels(found: list[dict[str, Any]]) -> list[Panel]:
    """A panel of time against size for each collective that has sizes."""
    panels = []
    for kind in dict.fromkeys(row["collective"] for row in found if row["nbytes"]):
        mine = [row for row in found if row["collective"] == kind]
        curves = []
        for way in dict.fromkeys(row["way"] for row in mine):
            points = [row for row in mine if row["way"] == way]
            times = [Timing(tuple(s * 1e3 for s in row["seconds"])) for row in points]
            sizes, medians = [row["nbytes"] for row in points], [timing.median for timing in times]
            curves.append(Curve(way, sizes, medians, [timing.quartiles for timing in times]))
        panels.append(Panel(kind.replace("_", "-"), "bytes", "milliseconds", curves))
    return panels


def draw(study: str, runner: Runner, folder: Path) -> Path:
    """Measure one study and make its picture."""
    measured = Study(runner)
    if study == "collectives":
        words = ("bench", "collectives", "-n", "--sizes", SIZES, "--repeats", "9")
        found = runner.ours(*words, ranks=2)["collectives"]
        drawn = collective_panels(found)
    elif study == "ranks":
        cores = usable_cores()
        boundary = (cores + 0.5, f"more ranks than the {cores} cores")
        jobs = measured.jobs(study, WORLDS)
        drawn = panels(jobs, "ranks", lambda job, _: job["world_size"], ("", ""), boundary)
    elif study == "parameters":
        jobs = measured.jobs(study, (2,))
        drawn = panels(jobs, "parameters", lambda _, case: case["parameters"], ("xy", "xy"))
    else:
        jobs = measured.jobs(study, (2,))
        drawn = panels(jobs, "parameters in a unit", lambda _, case: case["units"][0], ("x", "x"))
    path = folder / ("collectives.png" if study == "collectives" else f"growth_{study}.png")
    plot_panels(path, drawn)
    return path


def main() -> None:
    """Make the pictures that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--study", nargs="+", choices=STUDIES, default=STUDIES)
    parser.add_argument("--images", type=Path, default=Path("docs/images"), metavar="FOLDER")
    parser.add_argument("--prefix", default="", help="put before every job, as 'taskset -c 0,1'")
    arguments = parser.parse_args()
    runner = Runner(sys.executable, prefix=shlex.split(arguments.prefix))
    for study in arguments.study:
        print(draw(study, runner, arguments.images))


if __name__ == "__main__":
    main()
