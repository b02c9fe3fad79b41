"""Injects random faults into jobs on hosts of namespaces, and judges each end.

torture.py KIT [--seed N] [--trials N] [--only KIND..] [--mpi mpich openmpi]

KIT has netns.sh; two hosts are up (`netns.sh up 2`), with a MH_STATE outside of /tmp. A trial is a
job of `torture_job.py` under one MPI, on 2 x 1 or 2 x 2 ranks, and a fault of one kind at one
moment. It is good if the job ends in time, names the one that failed and no other, and leaves
nothing on any host, also after a lost host has come back. It is bad if the job never began to
train, and void, which counts as none, if there was no process to which the fault could be done, or
`mpishard run` was still loading its own modules.
Each trial depends on the seed and its number alone.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOST_TIMEOUT, TIMEOUT, GRACE = 5.0, 10.0, float(os.environ.get("TORTURE_GRACE", "3"))
RANK = r"^\S*python\S* -u .*torture_job"
STATE = os.environ["MH_STATE"]


class Kit:
    """The hosts: commands of netns.sh, and their processes as this machine numbers them."""

    def __init__(self, folder: Path) -> None:
        self.script = str(folder.resolve() / "netns.sh")

    def do(self, *words: object) -> str:
        command = [self.script, *map(str, words)]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        ).stdout

    def processes(self, host: int) -> dict[int, str]:
        """The processes of a host, but for its own."""
        found = {}
        for pid in self.do("pids", host).split():
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
            except OSError:
                continue
            text = line.decode(errors="replace").strip()
            if text and not re.search(r"host-init|\[listener\]|^sleep 3600", text):
                found[int(pid)] = text
        return found

    def find(self, host: int, pattern: str) -> list[int]:
        """The processes of a host that match, which may not be started yet."""
        return until(
            lambda: [pid for pid, line in self.processes(host).items() if re.search(pattern, line)]
        )

    def rank(self, number: int) -> list[int]:
        """The process of a rank."""
        return until(lambda: self._rank(number))

    def _rank(self, number: int) -> list[int]:
        for pid, line in (self.processes(1) | self.processes(2)).items():
            if not re.search(RANK, line):
                continue
            try:
                text = Path(f"/proc/{pid}/environ").read_bytes()
            except OSError:
                continue
            if re.search(rb"(?:^|\0)(?:PMI_RANK|OMPI_COMM_WORLD_RANK)=%d\0" % number, text):
                return [pid]
        return []

    def files(self, host: int) -> list[str]:
        """What jobs have left in the host's own folders."""
        names = self.do("exec", host, "ls", "-A", "/dev/shm", "/tmp").split()
        shared = [Path(p) for p in (os.environ.get("MH_KEEP", "") + " " + STATE).split()]
        kept = {p.relative_to("/tmp").parts[0] for p in shared if p.is_relative_to("/tmp")}
        return [name for name in names if name not in {"/dev/shm:", "/tmp:", *kept}]

    def mend(self) -> None:
        self.do("unshape")
        for host in (1, 2):
            self.do("thaw", host)
            self.do("cable", host, "up")
            self.do("sshd", host)

    def clean(self) -> None:
        for host in (1, 2):
            for pid in self.processes(host):
                send([pid], signal.SIGKILL)
            self.do("exec", host, "sh", "-c", "rm -rf /dev/shm/* /tmp/hydra* /tmp/pr* /tmp/mpis*")


def until(find: Callable[[], list[int]]) -> list[int]:
    deadline = time.monotonic() + 20
    while not (found := find()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def send(pids: list[int], number: int) -> bool:
    """Send a signal; return whether there was a process that could receive it."""
    sent = False
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            sent = True
    return sent


@dataclass
class Trial:
    """A job, its fault, and what its end must be."""

    kind: str
    mpi: str
    ranks: int
    victim: int
    moment: float
    """Seconds after the first checkpoint; below 0: that long after the start."""
    restarts: bool = False
    hosts: int = 2
    seconds: float = 0.0
    code: int | None = None
    output: str = ""
    ended: str = ""
    """The ends of all ranks, as mpishard run knows them."""
    is_void: bool = False
    problems: list[str] = field(default_factory=list)

    @property
    def goes_on(self) -> bool:
        """Whether the fault is none, or one that a job survives: Hydra needs ssh for the start."""
        is_needed = self.mpi != "mpich" or self.moment < 0
        return self.kind in ("none", "blink") or (self.kind == "kill-ssh" and not is_needed)

    @property
    def may_go_on(self) -> bool:
        """Whether a host has no agent, as if it could not connect, if the fault came too early."""
        return self.kind == "kill-host-agent" and self.moment < 0

    def __str__(self) -> str:
        when = f"{self.moment:.1f} s" if self.moment >= 0 else f"start + {-self.moment:.1f} s"
        more = " +restart" * self.restarts
        shape = f"{self.hosts}x{self.ranks // self.hosts}"
        return f"{self.mpi} {shape} {self.kind} rank {self.victim} at {when}{more}"


PROXY = r"hydra_pmi_proxy|prted"
IN_SCRIPT = ("exit", "raise", "asleep", "elsewhere")
LOST = ("cable", "freeze")
RANKS = ("kill-rank", "segv-rank", "stop-rank", "term-rank", "kill-then-term", "kill-then-usr1")
ON_HOST = (*LOST, "kill-agent", "kill-proxy", "kill-host-agent", "kill-all", "blink")
NAMED = re.compile(r"mpishard run: rank (\d+) \(process")
THEN = {"kill-then-term": signal.SIGTERM, "kill-then-usr1": signal.SIGUSR1}
"""Only with --only: a rank is killed, and then another one, which may wait for it, is signalled."""
KINDS = (
    "kill-rank", "kill-rank", "segv-rank", "stop-rank", "term-rank", "kill-agent", "kill-proxy",
    "kill-host-agent", "kill-all", "cable", "freeze", "blink", "term-run", "int-run", "kill-run",
    "kill-launcher", "kill-ssh", "none", *IN_SCRIPT,
)  # fmt: skip


def inject(kit: Kit, trial: Trial) -> bool:
    """Inject the fault of a trial that is not in the script; return whether it could be done."""
    victim = lambda: kit.rank(trial.victim)  # noqa: E731
    faults: dict[str, Callable[[], object]] = {
        "kill-rank": lambda: send(victim(), signal.SIGKILL),
        "segv-rank": lambda: send(victim(), signal.SIGSEGV),
        "stop-rank": lambda: send(victim(), signal.SIGSTOP),
        "term-rank": lambda: send(victim(), signal.SIGTERM),
        "kill-agent": lambda: send(kit.find(2, "rank_agent")[:1], signal.SIGKILL),
        "kill-proxy": lambda: send(kit.find(2, PROXY), signal.SIGKILL),
        "kill-host-agent": lambda: send(kit.find(2, "host_agent"), signal.SIGKILL),
        "kill-all": lambda: kit.do("kill", 2),
        "cable": lambda: kit.do("cable", 2, "down"),
        "freeze": lambda: kit.do("freeze", 2),
        "blink": lambda: (kit.do("cable", 2, "down"), time.sleep(2), kit.do("cable", 2, "up")),
        "term-run": lambda: send(kit.find(1, "mpishard run")[:1], signal.SIGTERM),
        "int-run": lambda: send(kit.find(1, "mpishard run")[:1], signal.SIGINT),
        "kill-run": lambda: send(kit.find(1, "mpishard run")[:1], signal.SIGKILL),
        "kill-launcher": lambda: send(kit.find(1, r"^\S*/(mpiexec|prterun) "), signal.SIGKILL),
        "kill-ssh": lambda: send(kit.find(1, r"^\S*ssh "), signal.SIGKILL),
    }
    if trial.kind in THEN:
        dead, partner = victim(), kit.rank((trial.victim + 1) % trial.ranks)
        is_done = send(dead, signal.SIGKILL)
        time.sleep(trial.moment % 0.1)  # for the partner to come to a collective, or not
        send(partner, THEN[trial.kind])
        return is_done
    # Those of netns.sh always can.
    return trial.kind not in faults or faults[trial.kind]() is not False


def run(kit: Kit, trial: Trial, work: Path) -> None:
    """Run the job of a trial to its end, and note what it was."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    python = ROOT / (".venv" if trial.mpi == "mpich" else ".venv-openmpi") / "bin/python"
    steps = 250 if trial.goes_on or trial.may_go_on or trial.restarts else 100_000
    job = [python, "-m", "mpishard", "run", "-n", trial.ranks]
    job += ["--hosts", "node1,node2"] * (trial.hosts > 1)
    job += ["--log-dir", work / "logs"] * (trial.kind in THEN)
    job += ["--max-restarts", 2, "--min-ranks", 1] * trial.restarts
    job += [ROOT / "tests/hosts/torture_job.py", work, steps]
    job += [trial.kind, trial.victim, 12] * (trial.kind in IN_SCRIPT)
    job += ["saves", 0, 0] * (trial.kind in THEN and trial.victim % 2)
    variables = {
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MPISHARD_TIMEOUT": f"{TIMEOUT:g}",
        "MPISHARD_HOST_TIMEOUT": f"{HOST_TIMEOUT:g}", "MPISHARD_WARN_AFTER": "0",
    }  # fmt: skip
    log = work / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [kit.script, "exec", "1", *map(str, job)],
            cwd=work,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # A shell's `&` lets its programs ignore Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        )
    started = time.monotonic()
    if trial.moment < 0:
        time.sleep(-trial.moment)
    else:
        while not (work / "latest").exists() and process.poll() is None:
            if time.monotonic() - started > 90:
                trial.problems.append("no checkpoint within 90 s")
                break
            time.sleep(0.02)
        time.sleep(trial.moment)
    if trial.moment >= 0 and not (work / "latest").exists():
        trial.problems.append("the job never began to train")
    before = time.monotonic()
    trial.is_void = not inject(kit, trial) or "mpishard run: " not in log.read_text()
    # Finding the process takes a while.
    began = before if trial.kind in LOST else time.monotonic()
    limit = 90 if trial.restarts or trial.goes_on else 45
    while process.poll() is None and time.monotonic() - began < limit:
        time.sleep(0.02)
    trial.seconds = time.monotonic() - began
    if process.poll() is None:
        trial.problems.append(f"HANGS: still running after {trial.seconds:.0f} s")
        trial.output = log.read_text(errors="replace")
        return
    trial.code = process.returncode
    trial.output = log.read_text(errors="replace")
    with suppress(OSError):
        trial.ended = (work / "logs" / "ended.json").read_text()


def judge(trial: Trial) -> None:  # noqa: C901, PLR0912 - a line for each kind
    """Compare the end of a trial with what it must be."""
    text, code, kind, problems = trial.output, trial.code, trial.kind, trial.problems
    if code is None:
        return
    own = [line for line in text.splitlines() if line.startswith("mpishard run: ")]
    named = NAMED.search(text)
    is_running = trial.moment >= 0

    def expect(condition: object, what: str) -> None:
        if not condition:
            problems.append(what)

    # Of the ranks: that of the fault, or those of its host, or none.
    suspects = {trial.victim} if kind in (*IN_SCRIPT, *RANKS) else set[int]()
    if kind in ON_HOST:
        suspects = set(range(trial.ranks // 2, trial.ranks))
    wrong = sorted({int(rank) for rank in NAMED.findall(text)} - suspects)
    expect(not wrong or kind in ("kill-launcher", "kill-ssh"), f"BLAMED WRONGLY: rank {wrong}")
    expect(code not in (14, 255), f"code {code}")
    expect("Traceback" not in text or kind == "raise", "a traceback")
    if trial.restarts:
        expect(code == 0, f"code {code} in place of 0")
        expect(text.count("is at its end"), "not at its last step")
        return
    limits = {"term-run": 5.0, "int-run": 5.0, "term-rank": 3.0, **dict.fromkeys(LOST, 12.0)}
    limits |= dict.fromkeys(("stop-rank", "asleep", "elsewhere"), TIMEOUT)
    limit = limits.get(kind, 0.0)
    if not trial.goes_on and kind not in IN_SCRIPT and is_running:
        limit += 3.0 + GRACE
        expect(trial.seconds <= limit, f"{trial.seconds:.1f} s are more than {limit:g}")
    if kind in ("kill-rank", "segv-rank", "exit", *THEN):
        wanted = {"segv-rank": 139, "exit": 7}.get(kind, 137)
        if is_running:
            expect(code == wanted, f"code {code} in place of {wanted}")
            expect(named and int(named[1]) == trial.victim, "it is not named")
    elif kind == "raise":
        expect(code == 1 and f"rank {trial.victim} of" in text, f"code {code}, or not named")
    elif kind in ("stop-rank", "asleep", "elsewhere"):
        expect(code == 124 or not is_running, f"code {code} in place of 124")
        words = {"stop-rank": "is stopped", "asleep": "asleep"}.get(kind, "message")
        expect(not is_running or re.search(rf"[Rr]ank {trial.victim}\b", text), "it is not named")
        expect(not is_running or words in text, f"no word of {words}")
    elif kind in LOST:
        expect(not is_running or re.search(r"host node2 \(ranks? .*has not been", text), "no host")
        expect(code not in (0, None), "code 0")
    elif kind == "kill-all":
        expect(not is_running or "node2" in "".join(own[1:]), "no host is named")
    elif kind == "kill-proxy":
        expect(not is_running or re.search(r"process \d+ of \w+.*is gone", text), "not named")
    elif kind in ("term-run", "int-run"):
        wanted = 143 if kind == "term-run" else 130
        expect(code == wanted or not is_running, f"code {code} in place of {wanted}")
    elif trial.goes_on:
        expect(code == 0, f"code {code} in place of 0")
    expect(trial.goes_on or trial.may_go_on or code != 0, "code 0")
    if kind in THEN:
        expect(trial.seconds <= 5, f"{trial.seconds:.1f} s are more than 5")
        expect("signal 11" not in text + trial.ended, "a rank was ended by SIGSEGV")


def look_for_leftovers(kit: Kit, trial: Trial) -> None:
    """Wait until no host has anything of the job, for 12 seconds after a host has come back."""
    began = time.monotonic()
    limit = 12.0 if trial.kind in LOST or trial.kind == "kill-run" else 3.0 + GRACE
    kit.mend()
    while True:
        left = {f"node{h}": [*kit.processes(h).values(), *kit.files(h)] for h in (1, 2)}
        if not any(left.values()) or time.monotonic() - began > limit:
            break
        time.sleep(0.2)
    for host, things in left.items():
        # If its agent was killed, a host cleans up at its next job.
        is_late = trial.kind in ("kill-all", "kill-host-agent")
        is_late |= trial.kind == "kill-agent" and trial.moment < 0  # which starts that of the host
        wrong = [thing for thing in things if "python" in thing or not is_late]
        if wrong:
            trial.problems.append(f"left on {host}: {' | '.join(text[:90] for text in wrong)}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kit", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--mpi", nargs="*", default=["mpich", "openmpi"])
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--hosts", type=int, default=2, choices=[1, 2])
    parser.add_argument("--running", action="store_true", help="no faults in the start")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    kit = Kit(options.kit)
    work = Path(STATE) / f"torture-{options.seed}"
    counts = {"good": 0, "BAD": 0, "void": 0}
    for number in range(options.first, options.first + options.trials):
        chance = random.Random(f"{options.seed} {number}")
        ranks = chance.choice(options.ranks)
        kind = chance.choice(options.only or KINDS)
        moment = chance.uniform(0, 1.5)
        if chance.random() < 0.2 and not options.running and kind not in IN_SCRIPT:
            moment = -chance.uniform(0.3, 4)
        name, _, more = kind.partition("+")
        restarts = bool(more) or (kind in ("kill-rank", *LOST) and chance.random() < 0.2)
        trial = Trial(name, chance.choice(options.mpi), ranks, chance.randrange(ranks), moment,
                      restarts, options.hosts)  # fmt: skip
        run(kit, trial, work)
        judge(trial)
        if trial.code is None:
            kit.mend()
        else:
            look_for_leftovers(kit, trial)
        kit.mend()
        kit.clean()
        verdict = "BAD" if trial.problems else "void" if trial.is_void else "good"
        counts[verdict] += 1
        print(f"{verdict:4} {number} {trial}: code {trial.code}, {trial.seconds:.1f} s", flush=True)
        for problem in trial.problems:
            print(f"    {problem}", flush=True)
        if trial.problems or options.verbose:
            lines = [line for line in trial.output.splitlines() if line.strip()]
            print("\n".join(f"      | {line[:300]}" for line in lines[-25:]), flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    sys.exit(bool(counts["BAD"]))


main()
