"""One start of a job: forward signals to it, watch its ranks, and remove their files."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from mpishard.base import settings
from mpishard.cli.run import shared_memory
from mpishard.cli.run.hosts import VARIABLE as OTHER_HOSTS
from mpishard.cli.run.hosts import Hosts
from mpishard.cli.run.job_report import JobEnd, JobResult, Outcome, interrupted
from mpishard.cli.run.launcher import Launcher
from mpishard.cli.run.logs import CALLS, ENDED, RankLogs
from mpishard.cli.run.notice import notice
from mpishard.cli.run.rank_processes import RankProcess, RankProcesses, can_be_watched
from mpishard.cli.run.resizing import Resizing
from mpishard.cli.run.shared_memory import (
    hold_folder,
    remove_files_of_dead_jobs,
    remove_shared_memory,
)
from mpishard.cli.wording import counted, say
from mpishard.communication import PAGE_BYTES, UNPRINTED, RankState, records_in, who

_GRACE_SECONDS = 3.5
"""Between a forwarded signal and SIGKILL: a job ends within 5 seconds of Ctrl-C."""

_SAVE_SECONDS = 25.0
"""Time for ranks that save before they end. SLURM sends SIGKILL 30 seconds after SIGTERM."""

_SAME_SIGNAL_SECONDS = 1.0
"""A job that is cancelled may receive SIGTERM on several paths: from SLURM, and from srun."""

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_LAUNCHER_SECONDS = 10.0
"""Time for the launcher to end after its ranks. That of Open MPI sometimes never ends."""

_OTHERS_SECONDS = 3.0
"""Time for the other ranks and the launcher to end by themselves after a rank has failed."""

_SAVED = (0, settings.EXIT_PREEMPTED)
"""Exit codes of a job that saved in time; 0 if it was at its end anyway."""

_FIRST_LOOK_SECONDS, _START_LOOK_SECONDS, _LAST_LOOK_SECONDS = 0.01, 0.05, 0.5

_START_SECONDS = 10.0
"""Time in which the supervisor looks often: most jobs that fail do so in the beginning."""

_FORK_SECONDS, _STARTS_SECONDS = 2.0, 30.0
"""Times without a new rank, while some are missing, after which the supervisor tests whether the
system allows another process, and gives up."""

_OPEN_MPI_FOLDER = "PRTE_MCA_prte_local_tmpdir_base"

_JANITOR = """
trap '' HUP INT TERM QUIT
read launcher
read word && exit
[ "$launcher" ] && { kill -TERM -$launcher; sleep 3; kill -KILL -$launcher; sleep 0.5; }
python=$1 script=$2 since=$3
shift 3
rm -rf "$@"
exec "$python" -I -S "$script" "$since"
"""
"""Waits for the end of `mpishard run`; if that was killed, ends its job and removes its files."""


@dataclass(slots=True)
class Supervisor:
    """Runs the launcher of a job, once.

    The job is a process group of its own, so that it receives each signal once, from here: at a
    second Ctrl-C Hydra leaves its ranks behind. The terminal stays with this process. The input of
    ranks is empty, because the system would stop them at the first read of the terminal.

    Parameters
    ----------
    name : str
        The command of mpishard that prints messages, such as ``run``.
    launcher : Launcher
        The program that starts the ranks.
    command : sequence of str
        Its command line.
    world_size : int
        Number of ranks.
    resizing : Resizing
        Accepts requests for another number of ranks.
    hosts : sequence of str
        The machines that the user named; empty for this one, or for those that SLURM chooses.
    log_folder : Path, optional
        Folder for the call logs of a job that failed.
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
    resizing: Resizing
    hosts: Sequence[str] = ()
    log_folder: Path | None = None
    received: list[signal.Signals] = field(default_factory=list)
    survives: bool = False
    _folder: Path = field(init=False)
    """Where the ranks keep their call logs."""
    _processes: RankProcesses = field(init=False)
    _hosts: Hosts | None = None
    _job: subprocess.Popen[bytes] | None = None
    _stopped_for: RankProcess | None = None
    _has_ended_launcher: bool = False
    _saves_since: float | None = None
    _is_ending: bool = False
    _reason: str = ""

    @property
    def host_count(self) -> int:
        """Number of machines that the ranks were given, at least; 0 is this one."""
        return len(self.hosts) or int(self.launcher.is_slurm)

    def run(self, environment: Mapping[str, str]) -> Outcome:
        """Run the job to its end.

        Its exit code is, in this order: the code in the report of a rank; 128 + the signal that
        this process received, or that ended the first rank that failed; the code of that rank; 1 if
        that rank ended with 0 without leaving.
        """
        temporary = Path(tempfile.mkdtemp(prefix="mpishard-job-"))
        self._folder = self._folder_for_calls(temporary)
        if self.host_count and can_be_watched():
            self._hosts = Hosts(
                temporary.name,
                self._folder,
                self.hosts,
                settings.host_timeout(),
                is_watched=self.log_folder is not None,
            )
        self._processes = RankProcesses(self._folder, self.world_size, self._hosts)
        # Open MPI's launcher puts its files here, and leaves them behind if it is killed. The path
        # is short, because the paths of sockets may have 107 characters at most.
        variables = {_OPEN_MPI_FOLDER: str(temporary), **environment}
        variables["MPISHARD_JOB_FOLDER"] = str(self._folder)
        variables.pop(OTHER_HOSTS, None)  # of a job in which a rank has started this one
        if self._hosts is not None:
            variables[OTHER_HOSTS] = self._hosts.variable
        folders = (self._folder, temporary)
        remove_files_of_dead_jobs()
        hold_folder(temporary)
        began = time.time()
        try:
            return self._run(variables, folders)
        finally:
            remove_files_of_dead_jobs(began)
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)

    def _folder_for_calls(self, temporary: Path) -> Path:
        """Return the folder for the call logs: ``temporary`` if the disk of --log-dir is full.

        The end of a rank is known only from its call log and the notes of the agents beside it.
        """
        if self.log_folder is None:
            return temporary
        folder = self.log_folder / CALLS
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                # Twice, because agents and logs need room before the ranks allocate their pages.
                os.posix_fallocate(file.fileno(), 0, 2 * self.world_size * PAGE_BYTES)
        except OSError as error:
            why = f"--log-dir: {error}: the logs will be cut off"
            say(self.name, f"{why}, and `mpishard watch` shows no ranks")
            shutil.rmtree(folder, ignore_errors=True)
            return temporary
        return folder

    def _run(self, environment: dict[str, str], to_remove: Sequence[Path]) -> Outcome:
        processes = self._processes
        self._handle_signals()
        cleanup = (sys.executable, shared_memory.__file__, time.time())
        # Its input is closed when this process ends, even by SIGKILL: then it ends the job.
        janitor = subprocess.Popen(
            ["/bin/sh", "-c", _JANITOR, "sh", *map(str, [*cleanup, *to_remove])],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # In a session of its own it outlives a signal to the group of this process.
            start_new_session=True,
        )
        started = time.monotonic()
        self._job = job = subprocess.Popen(
            self.command,
            env=environment,
            stdin=subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None,
            process_group=0,
        )
        if janitor.stdin is not None:
            janitor.stdin.write(b"%d\n" % job.pid)
            janitor.stdin.flush()
        if self.received:  # while it started
            self._signal_job(self.received[-1])
        if can_be_watched():
            self._watch(job)
        code = job.wait()
        self._job = None
        signal.setitimer(signal.ITIMER_REAL, 0)  # of the time to save
        # The launcher may end before the agents have noted the last ends.
        processes.wait_for_all()
        for process in processes.running:  # they would write to the files of the next start
            process.send(signal.SIGKILL)
        lost = ""
        if self._hosts is not None:
            lost = self._hosts.lost()
            lost = self._hosts.end() or lost
            processes.look()
        # The code of a launcher that this process has killed says nothing about the job.
        if self._has_ended_launcher:
            code = next((process.exit_code for process in processes.ended if process.exit_code), 0)
        seconds = time.monotonic() - started
        # After this line the janitor has nothing to do.
        janitor.communicate(b"the job has ended\n")
        # No rank has started on this machine, where all were to run.
        if code and can_be_watched() and not (processes.ranks or self.host_count or self._reason):
            why = f"{self.launcher.program} ended with code {code}; read its messages first"
            self._not_started(0, why)
        return self._judge(128 - code if code < 0 else code, seconds, job.pid, lost)

    def _judge(
        self, launcher_code: int, seconds: float, launcher_pid: int = 0, lost: str = ""
    ) -> Outcome:
        processes, records = self._processes, records_in(self._folder)
        # Reports of ranks that had closed their stderr.
        with suppress(OSError):  # no rank has left any
            text = (self._folder / UNPRINTED).read_text(errors="replace")
            sys.stderr.write(text)
            sys.stderr.flush()
        remove_shared_memory(records)
        logs = RankLogs.of_job(records)
        end = JobEnd(
            self.world_size,
            launcher_code,
            logs,
            processes.ended,
            is_local=not self.host_count or processes.all_seen,
            is_hydra=self.launcher.is_hydra,
            launcher_may_break=self.host_count > 1 or self.launcher.is_slurm,
            stopped_for=self._stopped_for,
            orphaned=processes.orphaned,
            program=self.launcher.program.name,
            launcher_pid=launcher_pid,
            hosts=() if self.launcher.is_slurm else self.hosts,
            survives=self.survives,
            lost=lost,
        )
        result = end.judge()
        if self._reason:
            result = JobResult(settings.EXIT_FAILURE, (self._reason,))
        # A job that has saved after SIGTERM ends with its own code, as after SIGUSR1.
        has_saved = self._saves_since is not None and result.code in _SAVED
        if self.received and not has_saved:
            result = interrupted(self.received[0], logs)
        if self.log_folder is not None:
            try:
                for rank, log in logs.items() if result.code else ():
                    path = self.log_folder / f"rank-{rank}.calls.txt"
                    path.write_text(log.text(), encoding="utf-8")
                text = json.dumps(end.summary(result))  # for `mpishard watch`
                (self.log_folder / ENDED).write_text(text, encoding="utf-8")
            except OSError as error:  # a full disk: the job has ended as it has
                say(self.name, f"--log-dir: the logs do not say how the job ended: {error}")
        return Outcome(result, end.cause(result), end.called_init, seconds, self.log_folder)

    # ------------------------------------------------------------------------------------ watching

    def _watch(self, job: subprocess.Popen[bytes]) -> None:
        """Wait for the end of ``job``. End it if ranks wait for one that is gone."""
        processes = self._processes
        pause = _FIRST_LOOK_SECONDS
        failed_at = ended_at = 0.0
        started = looked_at = time.monotonic()
        waited = 0.0
        launcher = os.pidfd_open(job.pid)
        while job.poll() is None:
            found = processes.look()
            for process in found if notice.is_given else ():  # SIGUSR1 came before the rank
                process.send(signal.SIGUSR1)
            now = time.monotonic()
            suspect = self._suspect()
            if suspect is None and not processes.orphaned:
                failed_at = 0.0
            elif not failed_at:
                failed_at = now
            elif now - failed_at > _OTHERS_SECONDS and not self._is_ending:
                self._stopped_for = suspect
                self._end(signal.SIGTERM)
                logs = self._logs()
                for process in processes.running:
                    log = logs.get(process.rank)
                    # A rank that is not in a world yet would report SIGTERM as a failure.
                    if log is None or log.state is RankState.STARTED:
                        process.send(signal.SIGKILL)
            self._end_without_lost_hosts()
            if not processes.all_seen or any(rank.is_running() for rank in processes.running):
                ended_at = 0.0
            elif not ended_at:
                ended_at = now
            elif now - ended_at > _LAUNCHER_SECONDS and not self._has_ended_launcher:
                self._has_ended_launcher = True
                self._signal_job(signal.SIGKILL)
            # The time in which this process was suspended does not count.
            waited = 0.0 if found else waited + min(now - looked_at, 2 * _LAST_LOOK_SECONDS)
            looked_at = now
            if not (processes.all_seen or self.host_count or self._is_ending):
                self._look_for_ranks(waited)
            self._wait(launcher, pause)
            has_started = now - started > _START_SECONDS
            pause = min(pause * 1.3, _LAST_LOOK_SECONDS if has_started else _START_LOOK_SECONDS)
        os.close(launcher)

    def _end_without_lost_hosts(self) -> None:
        """End the job if a host is lost, for which the others and the launcher may wait."""
        if self._hosts is None or self._is_ending or self.survives:
            return
        if lost := self._hosts.lost():
            self._reason = lost
            self._end(signal.SIGTERM)

    def _look_for_ranks(self, waited: float) -> None:
        """End the job if no further rank of this machine has started for ``waited`` seconds.

        Hydra never gives up if the system allows no more processes.
        """
        why = ""
        if self._processes.failed:
            why = f"the agent of {who(self._processes.failed)} could not start it"
        elif waited > _STARTS_SECONDS:
            why = f"no other has come within {_STARTS_SECONDS:g} s"
        elif waited > _FORK_SECONDS:
            try:
                subprocess.run(["/bin/true"], check=False)
            except BlockingIOError as error:
                why = f"the system allows no more processes ({error})"
        if why:
            self._not_started(len(self._processes.ranks), why)
            self._end(signal.SIGTERM)

    def _not_started(self, count: int, why: str) -> None:
        self._reason = (
            f"{count} of {counted(self.world_size, 'rank')} were started: {why}. Do `ulimit -u` "
            "and `ulimit -n` allow as many processes, threads and open files as the job needs?"
        )

    def _suspect(self) -> RankProcess | None:
        """Return the first rank that failed, unless a rank has reported why the job ends.

        Open MPI's launcher and srun end the job if a rank fails; under Hydra the others may wait
        for it. If ranks survive each other, only a rank that is lost before its world began counts.
        """
        logs = self._logs() if self._processes.ended else {}
        if any(log.state is RankState.REPORTED for log in logs.values()):
            return None
        for process in self._processes.ended:
            log = logs.get(process.rank)
            if log is None:
                is_suspect = bool(process.exit_code)
            else:
                is_suspect = log.state is not RankState.LEFT
                is_suspect &= not (self.survives and log.has_begun)
            if is_suspect:
                return process
        return None

    # ------------------------------------------------------------------------------------- signals

    def _handle_signals(self) -> None:
        handlers: dict[signal.Signals, Callable[[int, FrameType | None], None]] = {
            **dict.fromkeys(_FORWARDED, self._forward),
            signal.SIGQUIT: self._request_reports,
            signal.SIGUSR1: self._give_notice,
        }
        signal.signal(signal.SIGALRM, self._after_grace)
        for number, handler in handlers.items():
            # With nohup, or in the background, this process must ignore the signal as before.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, handler)

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))
        # Schedulers send SIGTERM some time before they kill, which is enough to save.
        if number == signal.SIGTERM:
            now = time.monotonic()
            savers = self._savers() if self._saves_since is None else []
            for process in savers:  # directly: Open MPI's launcher would not wait for them
                process.send(signal.SIGTERM)
            if savers:
                self._saves_since = now
                signal.setitimer(signal.ITIMER_REAL, _SAVE_SECONDS)
            if self._saves_since is not None and now - self._saves_since < _SAME_SIGNAL_SECONDS:
                return
        self._end(signal.Signals(number))

    def _give_notice(self, _number: int, _frame: FrameType | None) -> None:
        """Forward the notice of preemption: the ranks save and leave as soon as they can.

        The ranks of this machine are enough, because all ranks save together. The signal stays
        pending in a rank that has not imported mpishard yet.
        """
        notice.is_given = True
        running = self._processes.running
        for process in running:
            process.send(signal.SIGUSR1)
        if self.host_count and not running:
            self._signal_job(signal.SIGUSR1)  # launchers forward it to other machines
        elif not self._savers():
            say(
                self.name,
                "SIGUSR1: no rank can save now, as none is in optimize(checkpoint=FOLDER); the "
                "job runs until one is",
            )

    def _wait(self, launcher: int, seconds: float) -> None:
        """Wait until the job ends, a request for another number of ranks comes, or time is up."""
        resizing = self.resizing
        watched: list[int | socket.socket] = [launcher, *resizing.sockets]
        from_hosts = [] if self._hosts is None else self._hosts.sockets
        readable = select.select([*watched, *from_hosts], [], [], seconds)[0]
        is_asked = set(readable) & set(resizing.sockets)
        is_ending = self._is_ending or notice.is_given or bool(self.received)
        if is_asked:
            are_to_save = resizing.take(self._logs(), is_ending=is_ending)
        else:
            are_to_save = not is_ending and resizing.take_back_hosts(self._logs)
            if are_to_save:
                say(
                    self.name,
                    "lost hosts answer again: the ranks will save at the next step boundary",
                )
        if are_to_save:
            savers = self._savers()
            for process in savers:
                process.send(signal.SIGUSR1)
            if not savers:  # they run on other machines
                self._signal_job(signal.SIGUSR1)
        # A rank in optimize(checkpoint=FOLDER) trains again: the change is complete.
        elif resizing.before and any(log.is_saving for log in self._logs().values()):
            resizing.end(f"the job continues with {counted(self.world_size, 'rank')}", 0)

    def _savers(self) -> list[RankProcess]:
        """Return the ranks of this machine that would save if they received SIGUSR1 now."""
        logs = self._logs()
        return [p for p in self._processes.running if p.rank in logs and logs[p.rank].is_saving]

    def _end(self, number: signal.Signals) -> None:
        self._signal_job(number)
        signal.setitimer(signal.ITIMER_REAL, _GRACE_SECONDS)
        self._is_ending = True

    def _after_grace(self, _number: int, _frame: FrameType | None) -> None:
        # The time to save is over: now the job is ended as by any signal.
        if not self._is_ending:
            say(self.name, f"the ranks have not saved within {_SAVE_SECONDS:g} s")
            self._end(signal.SIGTERM)
            return
        self._signal_job(signal.SIGKILL)
        # Hydra gives each rank a session of its own.
        for process in self._processes.running:
            process.send(signal.SIGKILL)

    def _request_reports(self, _number: int, _frame: FrameType | None) -> None:
        """Make the ranks of this machine report what they do. The job continues."""
        running = self._processes.running
        # SIGQUIT would end a process without a handler, such as a rank before init.
        asked = [process for process in running if process.catches(signal.SIGQUIT)]
        for process in asked:
            process.send(signal.SIGQUIT)
        others = [process for process in running if process not in asked]
        say(
            self.name,
            f"SIGQUIT (Ctrl-\\) went to {who([p.rank for p in asked]) if asked else 'no rank'}"
            + (f"; {who([p.rank for p in others])} cannot answer yet" if others else ""),
        )

    def _logs(self) -> dict[int, RankLogs]:
        return RankLogs.of_job(records_in(self._folder, with_calls=False))

    def _signal_job(self, number: signal.Signals) -> None:
        if self._job is not None:
            with suppress(ProcessLookupError):  # it has just ended
                os.killpg(self._job.pid, number)
