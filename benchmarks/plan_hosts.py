"""Planned steps beside measured ones on hosts made of network namespaces, at three rates.

    python benchmarks/plan_hosts.py --netns tests/hosts/netns.sh --json FILE

For each set of hosts and each rate `mpishard bench machine` measures machine and network, and
`plan_step.py` plans and measures the steps. That needs root and, on two cores, ten minutes. The
ranks of a set share the cores of this machine, which the plan does not know: more ranks than cores
are measured only with a model and at rates at which messages take most of a step.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from hosts import LINKS, Hosts
from rich.table import Table

from mpishard.cli.machine import describe_machine
from mpishard.cli.outputs import write_json
from mpishard.cli.tables import show
from mpishard.cli.wording import milliseconds

JOB = Path(__file__).with_name("plan_step.py")
SETS: dict[str, tuple[int, int, tuple[str, ...], tuple[str, ...]]] = {
    "2x1": (2, 1, tuple(LINKS), ("mlp", "gpt")),
    "2x2": (2, 2, ("1 Gbit/s", "100 Mbit/s"), ("mlp",)),
    "4x1": (4, 1, ("100 Mbit/s",), ("mlp",)),
}
"""Name -> hosts, ranks of each, the links that are measured, and models of `plan_step.py`."""

WAYS = ("ddp", "zero1", "zero2", "fsdp")


def measure(hosts: Hosts, name: str, link: str, nice: int) -> list[dict[str, Any]]:
    """Return a row for each model and way of a set of hosts on one link."""
    count, ranks, _, models = SETS[name]
    rate, delay = LINKS[link]
    hosts.do("shape", rate, delay)
    with tempfile.TemporaryDirectory() as folder:
        machine, steps = Path(folder, "machine.json"), Path(folder, "steps.json")
        bench = ["-m", "mpishard", "bench", "machine", "--repeats", "8", "--json", str(machine)]
        hosts.run(count, ranks, *bench)
        words = ["--machine", str(machine), "--json", str(steps), "--nice", str(nice)]
        words += ["--models", *models, "--ways", *WAYS]
        # A step at the slowest rate takes seconds, and hardly varies.
        few = ["--rounds", "1", "--warmup", "1", "--steps", "2"] if rate == "100mbit" else []
        hosts.run(count, ranks, str(JOB), *words, *few)
        network = json.loads(machine.read_text(encoding="utf-8"))["network"]
        rows = json.loads(steps.read_text(encoding="utf-8"))["steps"]
    return [{"link": link, "network": network, **row} for row in rows]


def main() -> None:
    """Measure each set of hosts at its rates, show the ratios, and write them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--netns", type=Path, required=True, help="netns.sh of the test bed")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=[*SETS])
    parser.add_argument("--links", nargs="+", choices=LINKS, default=[*LINKS])
    parser.add_argument("--nice", type=int, default=-10)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    hosts = Hosts(arguments.netns, arguments.nice)
    for name in arguments.sets:
        hosts.do("up", str(SETS[name][0]))
        try:
            for link in (link for link in SETS[name][2] if link in arguments.links):
                rows += measure(hosts, name, link, arguments.nice)
                print(f"{name}, {link}: done", file=sys.stderr, flush=True)
                if arguments.json is not None:
                    write_json(arguments.json, {"machine": describe_machine(), "rows": rows})
        finally:
            hosts.do("down")
    table = Table("hosts", "link", "model", "way", "planned", "measured", "/")
    for row in rows:
        times = (milliseconds(row[name]) for name in ("seconds", "measured"))
        hosts_of = f"{row['hosts']}x{row['ranks'] // row['hosts']}"
        cells = hosts_of, row["link"], row["model"], row["way"], *times
        table.add_row(*cells, f"{row['seconds'] / row['measured']:.2f}")
    show(table)


if __name__ == "__main__":
    main()
