"""A start of a job, to its end: signals go to it, its ranks are watched, nothing stays."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import typer

from mpishard import settings
from mpishard.cli.job_report import JobEnd, Outcome, interrupted
from mpishard.cli.launcher import Launcher
from mpishard.cli.leftovers import remove_shared_memory
from mpishard.cli.log_folder import CALLS
from mpishard.cli.notice import notice
from mpishard.cli.rank_logs import RankLogs
from mpishard.cli.rank_processes import RankProcess, RankProcesses, held_pipes
from mpishard.communication.contract.matching import who
from mpishard.communication.contract.status import RankState, records_in
from mpishard.communication.failure import marks

__all__ = ["Supervisor"]

_GRACE_SECONDS = 3.5
"""Between a forwarded signal and SIGKILL: a job ends within 5 seconds of Ctrl-C."""

_SAVE_SECONDS = 25.0
"""What ranks that save before they end have for it. SLURM kills 30 seconds after SIGTERM."""

_ONE_ORDER_SECONDS = 1.0
"""Of one order to end a job, SIGTERM may come along several paths: from SLURM, and from srun."""

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_LAUNCHER_SECONDS = 10.0
"""What the launcher has to end when all its ranks have. Open MPI's at times waits for ever."""

_PATIENCE_SECONDS = 3.0
"""What the others, and the launcher, have to end by themselves when a rank has failed."""

_MADE_ROOM = (0, settings.EXIT_PREEMPTED)
"""Exit codes of a job that was let save: it may have been at its end."""

_FIRST_LOOK_SECONDS, _START_LOOK_SECONDS, _LAST_LOOK_SECONDS = 0.01, 0.05, 0.5

_START_SECONDS = 10.0
"""For so long ranks are looked for often: of two that end between two looks, and hold no pipe yet,
nobody knows which was the first, and a loaded machine starts them late."""


@dataclass(slots=True)
class Supervisor:
    """Runs the launcher of a job, once.

    The job is a process group of its own, so that it gets each signal once, from here: Hydra takes
    a second Ctrl-C for an order to drop its ranks. A terminal stays with this process; ranks read
    an empty input instead of being stopped by the first read.

    Parameters
    ----------
    name : str
        The command that speaks, such as ``mpishard run``.
    launcher : Launcher
        What starts the ranks.
    command : sequence of str
        Its command line.
    world_size : int
        Number of ranks.
    host_count : int
        Number of machines that the ranks were given; 0 is this one.
    log_folder : Path, optional
        Where the call logs of a job that failed are kept.
    hosts : sequence of str
        The machines that the user named.
    received : list of Signals
        The signals that were to end the job, in any of its starts; also those that come later,
        until another one is run.
    survives : bool
        Whether ranks may outlive each other.
    """

    name: str
    launcher: Launcher
    command: Sequence[str]
    world_size: int
    host_count: int
    log_folder: Path | None = None
    hosts: Sequence[str] = ()
    received: list[signal.Signals] = field(default_factory=list)
    survives: bool = False
    _folder: Path | None = None
    _job: subprocess.Popen[bytes] | None = None
    _processes: RankProcesses | None = None
    _stopped_for: RankProcess | None = None
    _has_ended_launcher: bool = False
    _saves_since: float | None = None
    _is_ending: bool = False

    def run(self, environment: Mapping[str, str]) -> Outcome:
        """Run the job to its end.

        Its exit code is the one that a rank reported with; else 128 + the signal that this process
        was sent, or that ended the first rank that failed; else that rank's own code, and 1 where
        it ended with 0 without a word.
        """
        if self.log_folder is None:
            folder = Path(tempfile.mkdtemp(prefix="mpishard-job-"))
        else:
            folder = self.log_folder / CALLS
            folder.mkdir(parents=True, exist_ok=True)
        try:
            return self._run(dict(environment) | {"MPISHARD_JOB_FOLDER": str(folder)}, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _run(self, environment: dict[str, str], folder: Path) -> Outcome:
        self._folder = folder
        self._handle_signals()
        if notice.is_given:  # before there was a job, or in its start before this one
            self._note_order(folder)
        can_watch = RankProcesses.can_be_watched()
        pipes = held_pipes(folder, self.world_size) if can_watch else {}
        started = time.monotonic()
        self._job = job = subprocess.Popen(
            self.command,
            env=environment,
            stdin=subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None,
            process_group=0,
        )
        if self.received:  # while it started
            self._signal_job(self.received[-1])
        if can_watch:
            self._processes = RankProcesses(
                job.pid, self.launcher.rank_variable, folder, self.world_size, pipes
            )
            self._watch(job, self._processes, folder)
        code = job.wait()
        self._job = None
        signal.setitimer(signal.ITIMER_REAL, 0)
        ended = self._all_ended()
        if self._has_ended_launcher:
            code = next((process.exit_code for process in ended if process.exit_code), 0)
        seconds = time.monotonic() - started
        outcome = self._judge(128 - code if code < 0 else code, folder, ended, seconds)
        if self._processes is not None:
            self._processes.close()
        return outcome

    def _all_ended(self) -> tuple[RankProcess, ...]:
        """The ranks that have ended by themselves; those that outlive their launcher are ended."""
        processes = self._processes
        if processes is None:
            return ()
        processes.look()
        processes.wait_for_all()
        ended = tuple(processes.ended)
        left = self._running()
        for process in left:
            process.send(signal.SIGKILL)
        if left:  # they would write to the files of the next start
            processes.wait_for_all()
        return ended

    def _judge(
        self, launcher_code: int, folder: Path, ended: Sequence[RankProcess], seconds: float
    ) -> Outcome:
        processes = self._processes
        records = records_in(folder)
        remove_shared_memory(records)
        logs = RankLogs.of_job(records)
        end = JobEnd(
            self.world_size,
            launcher_code,
            logs,
            ended,
            is_local=not self.host_count or (processes is not None and processes.all_seen),
            is_hydra=self.launcher.is_hydra,
            launcher_may_break=self.launcher.is_hydra and self.host_count > 1,
            starting=marks.marked(folder, marks.STARTING),
            stopped_for=self._stopped_for,
            program=self.launcher.program.name,
            hosts=() if self.launcher.is_slurm else self.hosts,
            survives=self.survives,
        )
        verdict = end.judge()
        has_made_room = self._saves_since is not None and verdict.code in _MADE_ROOM
        if self.received and not has_made_room:
            verdict = interrupted(self.received[0], logs)
        if verdict.code and self.log_folder is not None:
            for rank, log in logs.items():
                (self.log_folder / f"rank-{rank}.calls.txt").write_text(
                    log.text(), encoding="utf-8"
                )
        return Outcome(verdict, end.cause(verdict), end.called_init, seconds, self.log_folder)

    # ------------------------------------------------------------------------------------ watching

    def _watch(self, job: subprocess.Popen[bytes], processes: RankProcesses, folder: Path) -> None:
        """Wait for the end of ``job``; end it where a rank is gone that the others wait for."""
        pause = _FIRST_LOOK_SECONDS
        failed_at: float | None = None
        ended_at: float | None = None
        started = time.monotonic()
        while job.poll() is None:
            processes.look()
            suspect = self._suspect(processes, folder)
            if suspect is None:
                failed_at = None
            elif failed_at is None:
                failed_at = time.monotonic()
            elif time.monotonic() - failed_at > _PATIENCE_SECONDS and self._stopped_for is None:
                self._stopped_for = suspect
                self._end(signal.SIGTERM)
                self._end_early(folder)
            if not processes.all_seen or self._running():
                ended_at = None
            elif ended_at is None:
                ended_at = time.monotonic()
            elif time.monotonic() - ended_at > _LAUNCHER_SECONDS and not self._has_ended_launcher:
                self._has_ended_launcher = True
                self._signal_job(signal.SIGKILL)
            is_settled = processes.all_seen and not processes.ended
            processes.wait(None if is_settled else pause)
            has_started = time.monotonic() - started > _START_SECONDS
            pause = min(pause * 1.3, _LAST_LOOK_SECONDS if has_started else _START_LOOK_SECONDS)

    def _suspect(self, processes: RankProcesses, folder: Path) -> RankProcess | None:
        """The first rank that failed, where the others would not be told of it.

        One that failed, or ended in the middle: Open MPI's launcher and srun end the job for it,
        Hydra may leave the others to wait. Of ranks that outlive each other, only one that is lost
        before there is a world of them.
        """
        if not processes.ended:
            return None
        logs = RankLogs.of_job(records_in(folder, with_calls=False))
        states = {rank: log.state for rank, log in logs.items()}
        if RankState.REPORTED in states.values():
            return None
        for process in processes.ended:
            log = logs.get(process.rank)
            if log is not None and (
                log.state is RankState.LEFT or (self.survives and log.has_begun)
            ):
                continue
            if process.exit_code or process.rank in states:
                return process
        return None

    def _end_early(self, folder: Path) -> None:
        """End ranks that are not in a world yet: of SIGTERM they would speak as of a failure."""
        logs = RankLogs.of_job(records_in(folder, with_calls=False))
        for process in self._running():
            log = logs.get(process.rank)
            if log is None or log.state is RankState.STARTED:
                process.send(signal.SIGKILL)

    # ------------------------------------------------------------------------------------- signals

    def _handle_signals(self) -> None:
        signal.signal(signal.SIGALRM, self._end_of_patience)
        for number in _FORWARDED:
            # Whoever started us with nohup, or in the background, wants the signal ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._forward)
        for number, answer in ((signal.SIGQUIT, self._ask), (signal.SIGUSR1, self._give_notice)):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, answer)

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))
        if number == signal.SIGTERM:
            now = time.monotonic()
            savers = self._savers() if self._saves_since is None else []
            for process in savers:  # Open MPI's launcher would not wait for them
                process.send(signal.SIGTERM)
            if savers:
                self._saves_since = now
                signal.setitimer(signal.ITIMER_REAL, _SAVE_SECONDS)
            if self._saves_since is not None and now - self._saves_since < _ONE_ORDER_SECONDS:
                return
        self._end(signal.Signals(number))

    def _give_notice(self, _number: int, _frame: FrameType | None) -> None:
        """Have the ranks save, and leave, in their own time, as soon as they are where they can.

        Those of this machine: one is enough, as the ranks save together.
        """
        notice.is_given = True
        if self._folder is None:
            return
        # In this order: a rank listens, and looks for the mark then.
        self._note_order(self._folder)
        hearers = [process for process in self._running() if process.catches(signal.SIGUSR1)]
        for process in hearers:
            process.send(signal.SIGUSR1)
        processes = self._processes
        is_elsewhere = self.host_count and not (processes is not None and processes.all_seen)
        if is_elsewhere and not hearers:
            self._signal_job(signal.SIGUSR1)  # launchers pass it on to other machines
        elif not self._savers():
            self._say(
                "SIGUSR1: no rank is where it could save, in an optimize(checkpoint=FOLDER); the "
                "job goes on until one is"
            )

    def _note_order(self, folder: Path) -> None:
        """Leave the order where ranks look that do not hear signals yet."""
        with suppress(OSError):  # full, or removed behind the job's end
            (folder / marks.MAKE_ROOM).touch()

    def _savers(self) -> list[RankProcess]:
        """The ranks of this machine that save now when they are told to make room."""
        # Whom the system says to catch SIGUSR1 may be one that only keeps the order, or MPICH.
        saving = frozenset() if self._folder is None else marks.marked(self._folder, marks.SAVING)
        return [process for process in self._running() if process.pid in saving]

    def _end(self, number: signal.Signals) -> None:
        self._signal_job(number)
        signal.setitimer(signal.ITIMER_REAL, _GRACE_SECONDS)
        self._is_ending = True

    def _end_of_patience(self, _number: int, _frame: FrameType | None) -> None:
        if not self._is_ending:
            self._say(f"the ranks have not saved within {_SAVE_SECONDS:g} s")
            self._end(signal.SIGTERM)
            return
        self._signal_job(signal.SIGKILL)
        # Hydra gives each rank a session of its own.
        for process in self._running():
            process.send(signal.SIGKILL)

    def _ask(self, _number: int, _frame: FrameType | None) -> None:
        """Ask the ranks of this machine what they do. The job goes on."""
        if self._job is not None and self._processes is not None:
            self._processes.look()
        running = self._running()
        # Unprepared, as before init, a process would end of it.
        asked = [process for process in running if process.catches(signal.SIGQUIT)]
        for process in asked:
            process.send(signal.SIGQUIT)
        others = [process for process in running if process not in asked]
        self._say(
            f"SIGQUIT (Ctrl-\\) went to {who([p.rank for p in asked]) if asked else 'no rank'}"
            + (f"; {who([p.rank for p in others])} cannot answer yet" if others else "")
        )

    def _running(self) -> list[RankProcess]:
        """The ranks of this machine that have not ended."""
        known = {} if self._processes is None else self._processes.ranks
        # A copy: a signal handler may find more meanwhile.
        return [process for process in list(known.values()) if not process.has_ended]

    def _signal_job(self, number: signal.Signals) -> None:
        if self._job is not None:
            with suppress(ProcessLookupError):  # it has just ended
                os.killpg(self._job.pid, number)

    def _say(self, line: str) -> None:
        typer.echo(f"{self.name}: {line}", err=True)
