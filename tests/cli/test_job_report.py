"""Exit code of a job and the rank that is named, for the ends that launchers report."""

import dataclasses
import re
import signal
from types import SimpleNamespace

import numpy as np
import pytest

from mpishard.base import settings
from mpishard.cli.run.job_report import JobEnd, JobResult, interrupted
from mpishard.cli.run.logs import RankLogs
from mpishard.cli.run.rank_processes import RankProcess
from mpishard.communication.contract.call import Call, CollectiveKind
from mpishard.communication.contract.reduction import ReductionOperation
from mpishard.communication.contract.status import RankState, StatusPage

KILLED, ENDED, TERMINATED, SEGMENTED = -9, 0, -15, -11


def record_of(
    rank,
    state=RankState.RUNNING,
    code=0,
    calls=2,
    world_size=3,
    launched_rank=None,
    world_number=0,
    waits=0,
):
    page = StatusPage(rank, world_size, launched_rank, world_number)
    for sequence in range(1, calls + 1):
        call = Call.describe(
            CollectiveKind.ALL_REDUCE,
            np.ones(4),
            operation=ReductionOperation.SUM,
            sequence=sequence,
        )
        call.filename, call.line = "train.py", 33
        page.record(call, None)
        if sequence == waits:
            page.wait(call)
    page.end(state, code)
    return page.read()


def job(launcher_code, *ended, states=None, **known):
    """A job of 3 ranks: ``ended`` are pairs (rank, exit code) in the order of the ends."""
    states = {} if states is None else states
    records = {rank: record_of(rank, *states.get(rank, (RankState.RUNNING,))) for rank in range(3)}
    known = {"records": records, "is_hydra": True} | known
    logs = RankLogs.of_job(known.pop("records").values())
    processes = [RankProcess(rank, 4000 + rank, 3000 + rank, code) for rank, code in ended]
    return JobEnd(3, launcher_code, logs=logs, ended=processes, **known)


@pytest.mark.parametrize("launcher_code", [9, 137], ids=["Hydra", "Open MPI and srun"])
def test_names_the_first_that_was_killed(launcher_code):
    ends = (1, KILLED), (0, KILLED), (2, KILLED)
    result = job(launcher_code, *ends, is_hydra=launcher_code == 9).judge()
    assert result.code == 137
    (line,) = result.lines
    host = record_of(0).host
    assert line == (
        f"rank 1 (process 4001 on {host}) was killed by signal 9 (SIGKILL; out of memory?) "
        "after collective 2, all_reduce(SUM, float64[4]), at train.py:33; the others were ended "
        "for it"
    )


@pytest.mark.parametrize(
    ("launcher_code", "status", "code", "words"),
    [
        (11, SEGMENTED, 139, "signal 11 (SIGSEGV)"),
        (6 | 9, -6, 134, "signal 6 (SIGABRT)"),  # Hydra: or-ed with the others'
        (7, -7, 135, "signal 7 (SIGBUS; shared memory full?)"),
        (9, 7, 7, "ended with code 7 without leaving"),  # Hydra returns the others' SIGKILL
        (7, 7, 7, "ended with code 7 without leaving"),
        (0, ENDED, 1, "ended with code 0 without leaving"),  # os._exit(0): Hydra is content
    ],
)
def test_code_of_the_first_that_failed_under_hydra(launcher_code, status, code, words):
    result = job(launcher_code, (1, status), (0, KILLED), (2, KILLED)).judge()
    assert result.code == code
    assert result.lines[0].startswith("rank 1 ")
    assert words in result.lines[0]


@pytest.mark.parametrize(
    ("launcher_code", "status", "code", "words"),
    [
        (139, SEGMENTED, 139, "signal 11 (SIGSEGV)"),
        (7, 7, 7, "ended with code 7 without leaving"),
        (1, ENDED, 1, "ended with code 0 without leaving"),
    ],
)
def test_code_of_the_first_that_failed_under_open_mpi(launcher_code, status, code, words):
    ends = (1, status), (0, TERMINATED), (2, TERMINATED)
    result = job(launcher_code, *ends, is_hydra=False).judge()
    assert result.code == code
    assert result.lines[0].startswith("rank 1 ")
    assert words in result.lines[0]


def test_ranks_that_the_launcher_ended_after_an_abort_are_not_blamed():
    # MPI_Abort(5): Hydra kills the rank that called it together with the others.
    assert job(5, (0, KILLED), (1, KILLED), (2, KILLED)).judge() == JobResult(5)
    # Open MPI lets it end by itself, at times after others.
    result = job(5, (0, TERMINATED), (1, 5), (2, TERMINATED)).judge()
    assert result.code == 5
    assert result.lines[0].startswith("rank 1 ")


def test_the_report_of_a_rank_counts():
    states = {1: (RankState.REPORTED, 1)}
    ends = (0, KILLED), (2, KILLED), (1, 1)
    assert job(1, *ends, states=states).judge() == JobResult(1)
    assert job(143, (0, TERMINATED), states={1: (RankState.REPORTED, 143)}).judge().code == 143
    # It said that rank 0 is gone, and not how it went.
    result = job(139, (0, SEGMENTED), (1, TERMINATED), states=states).judge()
    assert result.code == 139
    assert result.lines[0].startswith("rank 0 ")


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (ENDED, 1, "ended with code 0 without leaving"),
        (7, 7, "ended with code 7 without leaving"),
        (KILLED, 137, "was killed by signal 9"),
    ],
)
def test_a_rank_that_others_report_as_gone_is_named_with_its_end(status, code, words):
    states = {1: (RankState.REPORTED, 0)}
    ends = (0, status), (2, TERMINATED), (1, 1)
    result = job(1, *ends, states=states, is_hydra=False).judge()
    assert result.code == code
    assert result.lines[0].startswith("rank 0 ")
    assert words in result.lines[0]
    # The ranks of another machine are not seen.
    ends = (2, TERMINATED), (1, 1)
    assert job(1, *ends, states=states, is_hydra=False, is_local=False).judge() == JobResult(1)


def test_a_signal_to_the_command_is_reported_if_no_rank_reports_it():
    records = {0: record_of(0), 1: record_of(1), 2: record_of(2, calls=3, waits=3)}
    result = interrupted(signal.SIGINT, RankLogs.of_job(records.values()))
    assert result.code == 130
    place = "all_reduce(SUM, float64[4]), at train.py:33"
    (line,) = result.lines
    assert line == (
        f"interrupted (SIGINT); the ranks were ended; ranks 0, 1 after collective 2, {place}; "
        f"rank 2 in collective 3, {place}"
    )
    assert interrupted(signal.SIGTERM, {}) == JobResult(
        143, ("ended by SIGTERM; the ranks were ended",)
    )
    records[1] = record_of(1, RankState.REPORTED, 130)
    assert interrupted(signal.SIGINT, RankLogs.of_job(records.values())) == JobResult(130)


def test_ranks_that_left_have_codes_of_their_own():
    left = dict.fromkeys(range(3), (RankState.LEFT,))
    ends = (0, ENDED), (1, 3), (2, 4)
    assert job(3 | 4, *ends, states=left).judge() == JobResult(3)
    assert job(0, (0, ENDED), (1, ENDED), (2, ENDED), states=left).judge() == JobResult(0)
    result = job(11, (0, ENDED), (1, SEGMENTED), states=left).judge()
    assert result.code == 139
    assert "after it had left all worlds cleanly" in result.lines[0]


def test_before_and_in_init():
    records = {0: record_of(0)}
    line = job(1, (2, 1), records=records).judge().lines[0]
    assert line.startswith("rank 2 (process 4002) ended with code 1 before it called mpishard.init")
    records = {0: record_of(0, RankState.STARTED), 2: record_of(2, calls=0)}
    assert "in mpishard.init();" in job(9, (0, KILLED), records=records).judge().lines[0]
    assert "before any collective" in job(9, (2, KILLED), records=records).judge().lines[0]


def test_hydra_breaks_if_a_rank_is_killed_in_init():
    records = {rank: record_of(rank, RankState.STARTED) for rank in (1, 2)}
    result = job(255, (2, KILLED), (1, KILLED), records=records).judge()
    assert result.code == 137
    assert re.match(r"rank 2 \(process 4002 on .*\) was killed by signal 9", result.lines[0])
    # After init it may be an MPI_Abort(-1), for which Hydra ends all ranks.
    assert job(255, (2, KILLED), (1, KILLED), (0, KILLED)).judge() == JobResult(1)


def test_a_rank_that_fails_before_any_calls_init_is_named():
    result = job(1, (1, 1), (0, TERMINATED), records={}, is_hydra=False).judge()
    assert result.code == 1
    (line,) = result.lines
    assert line == (
        "rank 1 (process 4001) ended with code 1 before it called mpishard.init(); "
        "the others were ended for it"
    )


def test_machines_that_cannot_be_reached():
    hosts = ["a", "b"]
    (line,) = job(255, records={}, hosts=hosts, is_local=False, program="mpirun").judge().lines
    assert line == (
        "no rank was started (exit code 255 of mpirun): can a, b be reached by `ssh a true`, "
        "`ssh b true`?"
    )
    assert job(3, records={}, hosts=hosts, is_local=False).judge() == JobResult(3)
    assert job(255, records={}).judge() == JobResult(1)  # a code that no user knows
    states = dict.fromkeys(range(3), (RankState.LEFT,))
    assert job(255, states=states, hosts=hosts, is_local=False).judge() == JobResult(1)


def test_ranks_that_never_came_to_init_are_named():
    records = {0: record_of(0, RankState.REPORTED, 124)}
    result = job(124, (1, ENDED), (0, 124), (2, KILLED), records=records).judge()
    assert result.code == 124
    assert result.lines == (
        "rank 1 (process 4001) ended with code 0 before it called mpishard.init()",
    )


def test_a_rank_that_is_killed_before_init_is_named():
    result = job(9, (1, KILLED), records={}).judge()
    assert result.code == 137
    assert result.lines[0].startswith("rank 1 (process 4001) was killed by signal 9")
    assert job(0, (1, ENDED), records={}).judge() == JobResult(0)


def test_a_launcher_that_fails_by_itself_is_named():
    """As if the disk is full, and the launcher cannot write the output of the ranks."""
    line = "no rank failed, and mpiexec ended with code 255: its messages say why"
    assert job(255, (0, ENDED)).judge().lines != (line,)  # that rank left the others alone
    assert job(255).judge() == JobResult(1, (line,))


def test_on_several_machines_a_signal_may_be_the_launchers():
    assert job(9, (1, KILLED), is_local=False).judge() == JobResult(9)
    line = job(255, (1, SEGMENTED), is_local=False, launcher_may_break=True).judge().lines[0]
    assert "signal 11" in line
    result = job(0, is_local=False).judge()
    assert (result.code, result.lines) == (1, ("ranks 0-2 ended without leaving",))


@pytest.mark.parametrize("launcher_code", [14, 1, 255])
@pytest.mark.parametrize("ends", [[(1, KILLED), (0, 14)], [(0, 14), (1, KILLED)]])
@pytest.mark.parametrize("states", [{}, {2: (RankState.REPORTED, 0)}], ids=["", "reported"])
def test_a_rank_that_lost_its_connection_to_a_killed_one_is_not_blamed(launcher_code, ends, states):
    known = {"is_hydra": False, "launcher_may_break": True, "states": states}
    result = job(launcher_code if launcher_code != 1 else 137, *ends, **known).judge()
    assert result.code == 137
    assert result.lines[0].startswith("rank 1 ")


def test_a_world_of_one_may_end_without_leaving():
    one = JobEnd(
        1, 0, RankLogs.of_job([record_of(0, world_size=1)]), [RankProcess(0, 4000, 3000, ENDED)]
    )
    assert one.judge() == JobResult(0)


@pytest.mark.parametrize(
    ("launcher_code", "status", "code", "words"),
    [(9, KILLED, 137, "was killed by signal 9"), (3, 3, 3, "ended with code 3")],
)
def test_the_one_rank_of_a_world_of_one_is_named(launcher_code, status, code, words):
    ended = [RankProcess(0, 4000, 3000, status)]
    result = JobEnd(1, launcher_code, {}, ended, is_hydra=True).judge()
    assert result.code == code
    assert words in result.lines[0]
    assert "init" not in result.lines[0]


def test_the_rank_for_which_the_job_was_ended():
    culprit = RankProcess(2, 4002, 3000, 1)
    result = job(143, (2, 1), records={}, stopped_for=culprit).judge()
    assert result.code == 1
    assert result.lines[0].startswith("rank 2 (process 4002) ended with code 1 before it called")


def test_the_cause_in_a_line():
    def cause(*ends, **known):
        end = job(*ends, **known)
        return end.cause(end.judge())

    assert cause(9, (1, KILLED)).startswith("rank 1 (process 4001 on ")
    reports = {1: (RankState.REPORTED, 124), 2: (RankState.REPORTED, 0)}
    assert cause(124, states=reports) == "the job ended with code 124, as rank 1 reported"
    assert cause(1, states={2: (RankState.REPORTED, 0)}).endswith("code 1, as rank 2 reported")
    words = "rank 1 (process 4001) was killed by signal 11 (SIGSEGV) before it called mpishard.init"
    assert cause(11, (1, SEGMENTED), (0, KILLED), records={}).startswith(words)
    assert cause(3, records={}, is_local=False) == "the job ended with code 3"


def test_a_world_is_known_by_its_logs():
    assert job(1).called_init
    assert not job(1, records={}).called_init


def test_a_record_can_be_read():
    lines = RankLogs((record_of(1),)).text().splitlines()
    assert lines[0].startswith("rank 1 of 3, process ")
    assert lines[0].endswith(": ended without leaving, 2 collectives")
    assert lines[2].endswith("  collective 2, all_reduce(SUM, float64[4]), at train.py:33")


class TestSeveralWorldsOfOneProcess:
    """Halves of a job, or a second world beside the first."""

    def two(self, first, second):
        return RankLogs((record_of(2, first), record_of(0, second, calls=3, world_number=1)))

    def test_a_rank_has_left_if_it_left_all_worlds(self):
        left, running = RankState.LEFT, RankState.RUNNING
        assert self.two(left, left).state is left
        assert self.two(running, left).state is running
        assert self.two(left, running).state is running
        assert self.two(running, RankState.STARTED).state is RankState.STARTED
        assert self.two(RankState.REPORTED, left).state is RankState.REPORTED

    def test_the_last_collective_is_that_of_the_process(self):
        first, second = record_of(0), record_of(0, calls=3, world_number=1)
        assert RankLogs((first, second)).newest.last.number == 3
        assert RankLogs((first, second)).place.startswith("after collective 3, ")
        logs = RankLogs((first, record_of(0, calls=4, world_number=1, waits=4)))
        assert logs.place.startswith("in collective 4, ")
        waits_no_more = RankLogs((record_of(0, calls=4, waits=3),))
        assert waits_no_more.place.startswith("after collective 4, ")

    def test_the_launchers_number_is_named(self):
        # Two halves of a job of 4: both have a rank 1.
        halves = [
            record_of(rank % 2, world_size=2, launched_rank=rank, calls=rank) for rank in range(4)
        ]
        logs = RankLogs.of_job(halves)
        ended = [RankProcess(3, 4003, 3000, KILLED), RankProcess(1, 4001, 3000, KILLED)]
        (line,) = JobEnd(4, 9, logs=logs, ended=ended, is_hydra=True).judge().lines
        assert line.startswith("rank 3 (process 4003 ")
        assert "after collective 3" in line
        assert "rank 3 of the job, in a world of its own rank 1 of 2, process " in logs[3].text()

    def test_a_world_that_was_left_hides_no_other_world(self):
        records = [
            record_of(rank, state, world_number=number)
            for rank in range(2)
            for number, state in enumerate((RankState.RUNNING, RankState.LEFT))
        ]
        ended = [RankProcess(1, 4001, 3000, ENDED)]
        result = JobEnd(2, 0, RankLogs.of_job(records), ended, is_hydra=True).judge()
        assert result.code == 1
        assert result.lines[0].startswith("rank 1 ")
        assert "ended with code 0 without leaving" in result.lines[0]


class TestRanksThatOutliveEachOther:
    LEFT = (RankState.LEFT,)

    def judge(self, code, *ended, states):
        return job(code, *ended, states=states, is_hydra=False, survives=True).judge()

    @pytest.mark.parametrize("code", [0, settings.EXIT_PREEMPTED])
    def test_each_lost_rank_is_named_and_the_code_is_that_of_the_others(self, code):
        states = {1: self.LEFT, 2: (RankState.REPORTED, 1)}
        result = self.judge(code, (0, KILLED), (2, KILLED), (1, ENDED), states=states)
        killed, failed = result.lines
        assert result.code == code
        assert "rank 0 (process 4000" in killed
        assert "was killed by signal 9 (SIGKILL; out of memory?) after collective 2" in killed
        assert killed.endswith("at train.py:33; the others continued without it")
        assert "rank 2 (process 4002" in failed
        assert failed.endswith("failed, as it reported; the others continued without it")

    def test_a_last_survivor_that_is_killed_fails_the_job(self):
        running = (RankState.RUNNING,)
        result = self.judge(0, (1, KILLED), (0, KILLED), states={0: self.LEFT, 1: running})
        assert result.code == 137
        assert "was killed by signal 9" in result.lines[0]

    def test_nothing_is_printed_if_no_rank_was_lost(self):
        states = dict.fromkeys(range(3), self.LEFT)
        ends = (0, ENDED), (1, ENDED), (2, ENDED)
        assert self.judge(0, *ends, states=states) == JobResult(0)

    def test_the_code_of_the_remaining_ranks_is_kept(self):
        states = {1: self.LEFT, 2: self.LEFT}
        ends = (0, KILLED), (1, 5), (2, 5)
        assert self.judge(5, *ends, states=states).code == 5

    def test_the_first_lost_rank_is_blamed_if_none_remains(self):
        states = {1: (RankState.REPORTED, 0)}
        result = self.judge(0, (0, KILLED), (1, KILLED), (2, KILLED), states=states)
        assert result.code == 137
        assert "rank 0 (process 4000" in result.lines[0]

    def test_a_lost_rank_fails_the_job_if_ranks_may_not_outlive_it(self):
        states = {1: self.LEFT, 2: self.LEFT}
        ended = (0, KILLED), (1, ENDED), (2, ENDED)
        assert job(0, *ended, states=states, is_hydra=False).judge().code == 137


def ended(*pairs):
    """Ranks that ended by SIGKILL, each at its time in seconds."""
    return [RankProcess(rank, 4000 + rank, 3000 + rank, KILLED, at) for rank, at in pairs]


@pytest.mark.parametrize(("later", "are_named"), [(0.001, True), (0.01, False)])
def test_ends_too_close_for_an_order_are_all_named(later, are_named):
    end = job(137, is_hydra=False)
    end = dataclasses.replace(end, ended=ended((2, 5.0), (1, 5.0 + later)))
    (line,) = end.judge().lines
    assert line.startswith("rank 2 (process 4002 ")
    assert line.endswith("; ranks 1, 2 ended at the same time") == are_named


def test_a_launcher_s_process_that_is_gone_is_named():
    orphans = [RankProcess(rank, 4000 + rank, 3000 + rank, orphaned_by=77) for rank in (0, 1)]
    line = (
        "ranks 0, 1 were killed: process 77 of mpiexec, which had started ranks 0, 1, is gone "
        "(killed, or crashed)"
    )
    assert job(15, orphaned=orphans).judge() == JobResult(1, (line,))
    # A rank that failed before is the cause.
    assert job(9, (2, KILLED), orphaned=orphans).judge().code == 137


def test_the_launcher_s_process_that_was_gone_first_is_named_or_its_host():
    """The process on another host first, and then the launcher itself, which was waiting for it."""
    host = SimpleNamespace(name="node2")
    orphans = [
        RankProcess(2, 4002, 3002, orphaned_by=78, host=host),
        RankProcess(0, 4000, 3000, orphaned_by=77),
    ]
    end = job(1, orphaned=orphans, is_hydra=False, launcher_may_break=True)
    (line,) = end.judge().lines
    assert line.startswith("rank 2 was killed: process 78 of mpiexec on ")
    lost = "host node2 (rank 2) has closed its connection"
    assert dataclasses.replace(end, lost=lost).judge() == JobResult(1, (lost,))
    # The launcher has ended by itself, with a code of its own.
    end = dataclasses.replace(end, orphaned=orphans[1:], launcher_pid=77)
    line = "mpiexec ended with code 1: its messages say why"
    assert end.judge() == JobResult(1, (line,))
    dead = RankProcess(2, 4002, 3002, KILLED, host=host)
    (line,) = dataclasses.replace(end, ended=[dead], launcher_code=250).judge().lines
    assert line.startswith("rank 2 (process 4002 on ")
    (line,) = dataclasses.replace(end, launcher_code=137).judge().lines
    assert line.startswith("rank 0 was killed: process 77 of mpiexec on ")


def test_a_rank_that_crashes_after_another_host_was_lost_is_not_blamed():
    host = SimpleNamespace(name="node2")
    orphan = RankProcess(2, 4002, 3002, orphaned_by=78, host=host, ended_at=1.0)
    crashed = RankProcess(0, 4000, 3000, SEGMENTED, ended_at=2.0)
    end = job(255, orphaned=[orphan], launcher_may_break=True)
    end = dataclasses.replace(end, ended=[crashed])
    assert end.judge().lines[0].startswith("rank 2 was killed: process 78 of mpiexec on ")
    lost = "host node2 (rank 2) has closed its connection"
    assert dataclasses.replace(end, orphaned=[], lost=lost).judge() == JobResult(1, (lost,))
    # A rank that crashed first is the cause.
    late = dataclasses.replace(orphan, ended_at=3.0)
    assert dataclasses.replace(end, orphaned=[late]).judge().code == 139
    assert dataclasses.replace(end, orphaned=[late], lost=lost).judge().code == 139


def test_a_rank_that_had_left_when_the_launcher_ended_was_not_killed():
    """Open MPI ends when one rank has ended with a code; another may still be ending then."""
    orphans = [RankProcess(0, 4000, 3000, orphaned_by=77)]
    states = {0: (RankState.LEFT,), 1: (RankState.LEFT,)}
    end = job(75, (2, KILLED), (1, 75), states=states, orphaned=orphans, is_hydra=False)
    result = dataclasses.replace(end, survives=True).judge()
    assert result.code == 75
    (line,) = result.lines
    assert line.startswith("rank 2 (process 4002 ")


@pytest.mark.parametrize("known", [{}, {"records": {}}], ids=["in a world", "before init"])
def test_a_rank_that_was_killed_with_its_agent_is_reported_as_killed(known):
    result = job(9, **known).judge()
    assert result.code == 137
    assert "a rank was killed by signal 9" in result.lines[0]
