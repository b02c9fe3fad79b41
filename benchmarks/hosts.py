"""Training steps between hosts, beside PyTorch's over gloo and beside the limit of the network.

    python benchmarks/hosts.py --netns tests/hosts/netns.sh --peer-python PYTHON --json FILE

The hosts are network namespaces of this machine, which the script ``--netns`` makes, shapes and
enters; that needs root. The model is the GPT of 4 layers of width 256, on 2 hosts. The limit of a
step is the larger of computing alone, measured in the same job, and the bytes that a host sends
over the rate of its link. Each figure is the median of the steps of ``--repeats`` jobs in turn.
"""

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from harness import positive
from rich.table import Table

from mpishard.cli.bench.step import ALONE
from mpishard.cli.machine import describe_machine
from mpishard.cli.outputs import write_json
from mpishard.cli.tables import show

JOB = Path(__file__).with_name("hosts_job.py")
PEER = Path(__file__).parent / "peers" / "step.py"
LINKS = {"10 Gbit/s": ("10gbit", "0"), "1 Gbit/s": ("1gbit", "0"), "100 Mbit/s": ("100mbit", "1")}
"""Name -> rate and delay in ms, as ``netns.sh shape`` takes them."""

RATES = {"10gbit": 10e9, "1gbit": 1e9, "100mbit": 100e6}
PEERS = {"DDP": "ddp", "FSDP2": "fsdp2"}
OF_PEER = {"DDP": "ddp", "FSDP2": "fsdp"}
"""The way of ours that sends the same bytes."""

Samples = dict[str, list[float]]


class Hosts:
    """Two hosts of namespaces.

    Parameters
    ----------
    script : Path
        ``netns.sh`` of the test bed.
    nice : int
        Priority of the ranks.
    """

    def __init__(self, script: Path, nice: int) -> None:
        self._script, self._nice = str(script.resolve()), nice

    def do(self, *words: str) -> str:
        """Run a word of the script, and return what it prints."""
        done = subprocess.run(
            [self._script, *words], capture_output=True, text=True, check=False, timeout=600
        )
        if done.returncode:
            raise RuntimeError(f"`netns.sh {' '.join(words)}`: {done.stdout[-2000:]}{done.stderr}")
        return done.stdout

    def run(self, count: int, ranks: int, *words: str) -> None:
        """Run a job on ``ranks`` ranks of each of the first ``count`` hosts."""
        named = ",".join(f"node{host}:{ranks}" for host in range(1, count + 1))
        job = [sys.executable, "-m", "mpishard", "run", "-n", str(count * ranks), "--hosts", named]
        self.do("exec", "1", *job, *words)

    def ours(self, ranks: int, *words: str) -> dict[str, Any]:
        """Return the figures of ``hosts_job.py`` on ``ranks`` ranks of each of two hosts."""
        with tempfile.NamedTemporaryFile(suffix=".json", dir=Path.cwd()) as file:
            self.run(2, ranks, str(JOB), "--json", file.name, "--nice", str(self._nice), *words)
            found: dict[str, Any] = json.loads(Path(file.name).read_text(encoding="utf-8"))
        return found

    def peer(self, python: str, ranks: int, strategy: str, steps: int) -> list[float]:
        """Return the seconds of PyTorch's steps on ``ranks`` ranks of each host."""
        address = self.do("exec", "1", "getent", "hosts", "node1").split()[0]
        port = 20000 + secrets.randbelow(20000)
        # As in hosts_job.py: without the first line nice has no effect between sessions.
        first = f"echo {self._nice} >/proc/self/autogroup; exec nice -n {self._nice} "
        command = first + '"$@"'
        words = [python, str(PEER), "--strategy", strategy, "--model", "gpt"]
        words += ["--steps", str(steps), "--warmup", "3"]
        started = []
        for rank in range(2 * ranks):
            variables = {
                "RANK": rank, "WORLD_SIZE": 2 * ranks, "MASTER_ADDR": address, "MASTER_PORT": port,
                "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": 1,
            }  # fmt: skip
            own = os.environ | {name: str(value) for name, value in variables.items()}
            enter = [self._script, "exec", str(1 + rank // ranks), "setsid", "-w", "sh", "-c"]
            started.append(
                subprocess.Popen(
                    [*enter, command, "sh", *words], env=own, stdout=subprocess.PIPE, text=True
                )
            )
        printed = [process.communicate(timeout=600)[0] for process in started]
        seconds: list[float] = json.loads(printed[0].splitlines()[-1])["seconds"]
        return seconds


def measure(
    hosts: Hosts, link: str, ranks: int, arguments: argparse.Namespace
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the median seconds of each way and peer, and the bytes that a host sends."""
    rate, delay = LINKS[link]
    hosts.do("shape", rate, delay)
    steps = arguments.steps if delay == "0" else max(3, arguments.steps // 3)
    samples: Samples = defaultdict(list)
    sent: dict[str, float] = {}
    for _ in range(arguments.repeats):
        found = hosts.ours(ranks, "--steps", str(steps))
        sent = found["bytes"]
        for way, seconds in found["seconds"].items():
            samples[way] += seconds
        for name, strategy in {"PyTorch alone": "single", **PEERS}.items():
            if arguments.peer_python:
                samples[name] += hosts.peer(arguments.peer_python, ranks, strategy, steps)
    return {way: median(seconds) for way, seconds in samples.items()}, sent


def rows_of(
    link: str, ranks: int, seconds: dict[str, float], sent: dict[str, float]
) -> list[dict[str, Any]]:
    """Return a row for each way, with its limit and the ratio to it."""
    rows = []
    for way, found in seconds.items():
        if way in (ALONE, "PyTorch alone"):
            continue
        is_peer = way in PEERS
        nbytes = sent[OF_PEER.get(way, way)]
        alone = seconds["PyTorch alone" if is_peer else ALONE]
        limit = max(alone, 8 * nbytes / RATES[LINKS[link][0]])
        rows.append(
            {"link": link, "ranks_per_host": ranks, "way": way, "seconds": found, "alone": alone,
             "bytes_of_a_host": nbytes, "limit": limit, "ratio": found / limit}
        )  # fmt: skip
    return rows


def main() -> None:
    """Measure on each link, show the ratios, and write them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--netns", type=Path, required=True, help="netns.sh of the test bed")
    parser.add_argument("--peer-python", default="", help="an interpreter with PyTorch")
    parser.add_argument("--links", nargs="+", choices=LINKS, default=[*LINKS])
    parser.add_argument("--ranks", nargs="+", type=positive, default=[1, 2], help="of each host")
    parser.add_argument("--steps", type=positive, default=12)
    parser.add_argument("--repeats", type=positive, default=1)
    parser.add_argument("--nice", type=int, default=-10)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    hosts, rows = Hosts(arguments.netns, arguments.nice), list[dict[str, Any]]()
    hosts.do("up", "2")
    try:
        for ranks in arguments.ranks:
            for link in arguments.links:
                seconds, sent = measure(hosts, link, ranks, arguments)
                rows += rows_of(link, ranks, seconds, sent)
                load = os.getloadavg()[0]
                print(f"{link}, 2 x {ranks} ranks: load {load:.1f}", file=sys.stderr, flush=True)
                if arguments.json is not None:
                    figures = {"machine": describe_machine(), "load": load, "rows": rows}
                    write_json(arguments.json, figures)
    finally:
        hosts.do("down")
    table = Table("link", "ranks of a host", "way", "ms", "limit ms", "/ limit")
    for row in rows:
        times = (f"{1e3 * row[name]:.0f}" for name in ("seconds", "limit"))
        cells = row["link"], str(row["ranks_per_host"]), row["way"], *times
        table.add_row(*cells, f"{row['ratio']:.2f}")
    show(table)


if __name__ == "__main__":
    main()
