"""Reports on a stall: the verdict on the odd rank and the table, from records of ranks."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest

import mpishard as ms
from mpishard import run_in_threads
from mpishard.communication.contract.call import Call, CollectiveKind, MessageWait
from mpishard.communication.contract.matching import (
    check_calls,
    divergence,
    group_label,
    group_members,
    ranks_text,
)
from mpishard.communication.contract.reduction import ReductionOperation
from mpishard.communication.contract.status import RankRecord, RankState
from mpishard.communication.failure.stall import (
    describe_stall,
    longest_waiting,
    rank_table,
    unfinished,
    verdict,
)
from mpishard.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationError,
    PeerError,
)

NOW = 1000.0
STEP, PREDICT = "FSDPOptimizer.step", "FSDPModel.predict"
TENSOR, DATA = "tensor group 1 (ranks 0, 1)", "data group 2 (ranks 0, 1)"


def logged(
    sequence, kind=CollectiveKind.BARRIER, *, line=1, method="", group="", ago=20.0, number=0
):
    array = None if kind is CollectiveKind.BARRIER else np.ones(5)
    operation = ReductionOperation.SUM if kind is CollectiveKind.ALL_REDUCE else None
    call = Call.describe(kind, array, operation=operation, sequence=sequence)
    call.filename, call.line, call.method = "train.py", line, method
    call.number, call.group, call.time = number or sequence, group, NOW - ago
    return call


def waiting(rank, *calls, seconds=31.0):
    """A rank that waits in the last of its calls."""
    return RankRecord(rank, RankState.RUNNING, calls=calls, waits=calls[-1], waited=seconds)


def busy(rank, *calls, state=RankState.RUNNING, **other):
    return RankRecord(rank, state, calls=calls, **other)


def history(upto, **options):
    return tuple(logged(number, **options) for number in range(1, upto + 1))


IN_PREDICT = (*history(17), logged(18, CollectiveKind.ALL_GATHER, line=40, method=PREDICT))


class TestUnfinished:
    def test_ranks_that_compute_and_ranks_that_wait_are_named(self):
        left = [busy(0, state=RankState.LEAVING), busy(3, state=RankState.LEFT)]
        records = [left[0], busy(1, *history(3, ago=42.0)), waiting(2, *history(4)), left[1]]
        assert unfinished(records, NOW) == (
            "for ranks 1, 2. Rank 2 waits in collective 4, barrier(), at train.py:1, for 31 s. "
            "Rank 1: in no collective since collective 3, barrier(), at train.py:1, 42 s ago: "
            "computing, asleep or stuck."
        )

    def test_a_rank_that_is_stopped_while_it_leaves_is_named(self):
        stopped = busy(1, *history(3), state=RankState.LEAVING, is_stopped=True, pid=77)
        text = unfinished([busy(0, state=RankState.LEAVING), stopped], NOW)
        assert text == (
            "for rank 1. Rank 1 is stopped (SIGSTOP, Ctrl-Z or a debugger) while it waits for the "
            "others to leave; continue it with kill -CONT 77, or end it."
        )

    def test_ranks_of_unknown_state_are_on_other_nodes(self):
        records = [busy(0, state=RankState.LEAVING), RankRecord(1, is_known=False)]
        assert unfinished(records, NOW).startswith("for ranks of other nodes")


class TestVerdict:
    def test_a_rank_that_computes_is_the_odd_one_out(self):
        records = [*(waiting(rank, *IN_PREDICT) for rank in (0, 2, 3))]
        records.insert(1, busy(1, *history(17, ago=42.0)))
        assert verdict(records, NOW) == (
            "Ranks 0, 2, 3 wait in collective 18, all_gather(float64[5]), at train.py:40 in "
            "FSDPModel.predict, for 31 s. Rank 1: in no collective since "
            "collective 17, barrier(), at train.py:1, 42 s ago: computing, asleep or stuck. "
            "FSDPModel.predict is collective: every rank calls it, equally often."
        )

    def test_no_advice_is_given_if_a_slow_rank_calls_the_same_function(self):
        calls = [logged(n, CollectiveKind.ALL_REDUCE, method=STEP) for n in range(1, 5)]
        text = verdict([waiting(0, *calls), busy(1, *calls[:3])], NOW)
        assert "20 s ago: computing, asleep or stuck." in text
        assert "is collective" not in text

    def test_the_number_of_collectives_that_a_rank_is_behind(self):
        text = verdict([waiting(0, *history(9)), busy(1, *history(5))], NOW)
        assert "ago, 4 collectives behind: computing" in text
        assert "behind" not in verdict([waiting(0, *history(6)), busy(1, *history(5))], NOW)

    def test_a_rank_that_issued_the_collective_and_does_not_wait_for_it(self):
        text = verdict([waiting(0, *history(9)), busy(1, *history(9))], NOW)
        assert "Rank 1: in no collective" in text
        assert "(called, but not waited for, there)" in text

    def test_a_rank_without_any_collective_is_named(self):
        text = verdict([waiting(0, *history(1)), busy(1)], NOW)
        assert "Rank 1: has called no collective yet" in text

    @pytest.mark.parametrize("state", [RankState.LEFT, RankState.LEAVING])
    def test_a_rank_that_left(self, state):
        text = verdict([waiting(0, *IN_PREDICT), busy(1, *history(17), state=state)], NOW)
        assert "Rank 1 left after collective 17, barrier(), at train.py:1." in text
        assert "FSDPModel.predict is collective: every rank calls it" in text

    def test_the_wait_of_a_rank_that_left_is_ignored(self):
        """A rank in MPI_Finalize marks its page by a wait for itself."""
        ends = {"waits": MessageWait(1, 0, False, ""), "waited": 2.0}
        left = busy(1, *history(17), state=RankState.LEFT, **ends)
        text = verdict([waiting(0, *IN_PREDICT), left], NOW)
        assert "Rank 1 left after collective 17, barrier(), at train.py:1." in text
        assert "rank 1 waits" not in text

    def test_a_rank_that_left_in_good_order_is_not_odd(self):
        records = [waiting(0, *history(4)), busy(1, *history(4), state=RankState.LEFT)]
        assert "Every rank has called what it waits for" in verdict(records, NOW)

    def test_a_rank_whose_process_is_gone_is_named(self):
        text = verdict([busy(0, *history(3)), busy(1, *history(3), is_alive=False)], NOW)
        assert text == (
            "Rank 1: its process is gone (killed, or out of memory?), after collective 3, "
            "barrier(), at train.py:1."
        )
        left = busy(1, *history(3), state=RankState.LEFT, is_alive=False)
        assert verdict([busy(0, *history(3)), left], NOW) == (
            "No rank is known to wait for another."
        )

    def test_a_rank_that_is_stopped_in_the_awaited_collective(self):
        stopped = replace(waiting(1, *IN_PREDICT, seconds=40.0), is_stopped=True, pid=77)
        records = [waiting(0, *IN_PREDICT), stopped, waiting(2, *IN_PREDICT)]
        assert verdict(records, NOW) == (
            "Ranks 0, 2 wait in collective 18, all_gather(float64[5]), at train.py:40 in "
            "FSDPModel.predict, for 31 s. Rank 1 is stopped (SIGSTOP, Ctrl-Z or a debugger) in "
            "collective 18, all_gather(float64[5]), at train.py:40 in FSDPModel.predict; continue "
            "it with kill -CONT 77, or end it."
        )
        assert longest_waiting(records) == 0

    @pytest.mark.parametrize(
        ("record", "where"),
        [
            (busy(1, *history(3)), "in or after collective 3, barrier(), at train.py:1"),
            (busy(1), "before any collective"),
            (busy(1, state=RankState.STARTED), "in init"),
            (RankRecord(1, is_known=False), "before or in init"),
            (
                busy(1, waits=MessageWait(0, 5, False, "")),
                "while it waits for a message with tag 5 from rank 0",
            ),
        ],
    )
    def test_the_place_at_which_a_rank_is_stopped(self, record, where):
        stopped = replace(record, is_stopped=True, pid=77)
        for other in waiting(0, *history(4)), busy(0, state=RankState.STARTED):
            text = verdict([other, stopped], NOW)
            assert text.endswith(
                f"Rank 1 is stopped (SIGSTOP, Ctrl-Z or a debugger) {where}; continue it with "
                "kill -CONT 77, or end it."
            )
        line = rank_table([stopped], NOW).splitlines()[0]
        assert line == f"  rank 1: stopped (SIGSTOP, Ctrl-Z or a debugger) {where}"

    def test_a_rank_that_is_stopped_after_it_has_left_is_not_odd(self):
        left = busy(1, *history(4), state=RankState.LEFT, is_stopped=True)
        assert "is stopped" not in verdict([waiting(0, *history(4)), left], NOW)

    def test_in_init_one_rank_reports_if_some_state_is_known(self):
        ranks = [busy(rank, state=RankState.STARTED) for rank in range(2)]
        late = RankRecord(2)
        assert longest_waiting([*ranks, late]) == 0
        assert verdict([*ranks, late], NOW) == "Rank 2: not yet come to init."
        unknown = RankRecord(2, is_known=False)
        assert longest_waiting([*ranks, unknown]) is None
        assert longest_waiting([ranks[0], replace(unknown, is_stopped=True)]) == 0

    def test_ranks_that_did_not_call_init_are_named(self):
        records = [waiting(0, *history(1)), RankRecord(1), RankRecord(2), RankRecord(3)]
        records[3] = busy(3, state=RankState.STARTED)
        text = verdict(records, NOW)
        assert "Ranks 1, 2: not yet come to init." in text
        assert "Rank 3: in init, where ranks wait for each other." in text

    def test_two_groups_in_different_orders_form_a_circle(self):
        records = [
            waiting(0, logged(1, group=TENSOR, line=5)),
            waiting(1, logged(1, group=DATA, line=6)),
        ]
        assert verdict(records, NOW) == (
            f"Rank 0 waits in collective 1, barrier(), of {TENSOR} at train.py:5, for rank 1; "
            f"rank 1 waits in collective 1, barrier(), of {DATA} at train.py:6, for rank 0. These "
            "ranks call the collectives of different groups in different orders: call them in one "
            "order on all ranks."
        )

    def test_a_circle_is_found_behind_a_chain_of_waits(self):
        label = "group 3 (ranks 2, 3)"
        records = [
            waiting(0, logged(1, group="group 9 (ranks 0, 1)")),
            waiting(1, logged(2, group="group 8 (ranks 1-3)")),
            waiting(2, logged(1, group=label)),
            waiting(3, logged(1, group="group 4 (ranks 2, 3)")),
        ]
        text = verdict(records, NOW)
        assert text.startswith(f"Rank 2 waits in collective 1, barrier(), of {label}")
        assert "rank 0" not in text

    def test_a_collective_and_a_message_in_different_orders(self):
        message = MessageWait(1, 5, is_send=False, group="")
        records = [
            RankRecord(0, RankState.RUNNING, calls=history(1), waits=message, waited=3.0),
            waiting(1, *history(2)),
        ]
        assert verdict(records, NOW).startswith(
            "Rank 0 waits for a message with tag 5 from rank 1; rank 1 waits in collective 2, "
            "barrier(), at train.py:1, for rank 0. These ranks call a collective and exchange "
            "messages in different orders"
        )

    def test_two_ranks_that_both_receive_first(self):
        records = [
            RankRecord(r, RankState.RUNNING, waits=MessageWait(1 - r, 0, False, ""), waited=3.0)
            for r in range(2)
        ]
        assert "send before you receive" in verdict(records, NOW)

    def test_a_receive_without_a_send(self):
        message = MessageWait(1, 5, is_send=False, group=TENSOR)
        waits = RankRecord(0, RankState.RUNNING, waits=message, waited=3.0)
        text = verdict([waits, busy(1, *history(2))], NOW)
        assert f"Rank 0 waits for a message with tag 5 from rank 1 in {TENSOR}, for 3.0 s." in text
        assert "Rank 1: in no collective" in text

    def test_the_odd_rank_at_the_end_of_a_chain_of_waits(self):
        records = [
            waiting(0, logged(1, group="group 3 (ranks 0, 1)")),
            RankRecord(1, RankState.RUNNING, waits=MessageWait(2, 0, False, ""), waited=3.0),
            busy(2, *history(1)),
        ]
        text = verdict(records, NOW)
        assert "Rank 1 waits for a message with tag 0 from rank 2" in text
        assert "Rank 2: in no collective" in text

    def test_mismatched_calls_that_were_not_compared(self):
        records = [
            waiting(
                rank,
                logged(3, CollectiveKind.ALL_REDUCE if rank == 1 else CollectiveKind.ALL_GATHER),
            )
            for rank in range(4)
        ]
        assert (
            "These do not belong together: rank 1 is the odd one out: collective 3, all_reduce, "
            "where ranks 0, 2, 3 gave collective 3, all_gather." in verdict(records, NOW)
        )

    def test_all_ranks_have_called_the_collective(self):
        text = verdict([waiting(0, *history(2)), waiting(1, *history(2))], NOW)
        assert "Every rank has called what it waits for" in text
        unknown = RankRecord(1, is_known=False)
        here, there = (replace(waiting(r, *history(2)), host=f"node{r + 1}") for r in range(2))
        assert verdict([here, there], NOW).endswith(
            "Ranks 0, 1 are both in collective 2: look at the network between node1 and node2, "
            "which loses data or is down."
        )
        ahead = replace(waiting(1, *history(3)), host="node2")
        assert verdict([here, ahead], NOW).endswith(
            "Every rank has called what it waits for: look at the network between node1 and node2, "
            "which loses data or is down."
        )
        text = verdict([waiting(0, *history(2)), unknown], NOW)
        assert "Nothing is known of rank 1, on other nodes." in text

    def test_ranks_outside_the_group_are_ignored(self):
        label = "group 3 (ranks 0, 2)"
        records = [
            waiting(0, logged(1, group=label)),
            busy(1, *history(4)),
            busy(2, *history(2)),
        ]
        text = verdict(records, NOW)
        assert "Rank 2: in no collective" in text
        assert "rank 1" not in text.lower()

    def test_the_rank_that_has_waited_longest_reports(self):
        records = [waiting(0, *history(1), seconds=2.0), waiting(1, *history(1), seconds=3.0)]
        assert longest_waiting(records) == 1
        assert longest_waiting([busy(0)]) is None
        same = [waiting(rank, *history(1)) for rank in (0, 1)]
        assert longest_waiting(same) == 0


class TestDivergence:
    def records(self, odd=PREDICT):
        return [
            busy(
                rank,
                *history(3, method=STEP),
                logged(
                    4, CollectiveKind.ALL_GATHER, line=7 + rank, method=odd if rank == 1 else STEP
                ),
                *(logged(n, method=STEP) for n in (5, 6)),
            )
            for rank in range(3)
        ]

    def test_the_function_that_fewest_ranks_called_is_named(self):
        assert divergence(self.records(), "") == (
            "the ranks diverged at collective 4: FSDPModel.predict is collective: rank 1 called it "
            "at train.py:8, ranks 0, 2 called FSDPOptimizer.step at train.py:7"
        )

    def test_a_collective_that_the_user_called_directly(self):
        assert "ranks 0, 2 called it at train.py:7, rank 1 called all_gather itself at" in (
            divergence(self.records(odd=""), "")
        )

    def test_different_lines_alone_are_no_divergence(self):
        assert not divergence(self.records(odd=STEP), "")

    def test_the_search_ends_at_the_given_collective(self):
        assert divergence(self.records(), "", upto=4)
        assert not divergence(self.records(), "", upto=3)

    def test_with_two_ranks_the_rarer_function_is_the_odd_one(self):
        text = divergence(self.records()[:2], "")
        assert "FSDPModel.predict is collective: rank 1 called it" in text

    def test_only_collectives_in_all_call_logs_are_compared(self):
        records = self.records()
        records[0] = busy(0, *records[0].calls[4:])
        assert not divergence(records, "")
        assert not divergence(records[:1], "")
        assert not divergence(self.records(), TENSOR)

    def test_the_divergence_is_part_of_the_verdict(self):
        records = [waiting(rank, *r.calls) for rank, r in enumerate(self.records())]
        records[1] = busy(1, *records[1].calls[:-1])
        assert "The ranks diverged at collective 4: FSDPModel.predict" in verdict(records, NOW)


class TestTable:
    def test_the_activity_and_the_last_collectives_of_each_rank(self):
        records = [
            waiting(0, *IN_PREDICT),
            busy(1, logged(1, group=TENSOR), logged(2, ago=42.0)),
            busy(2, *history(1), state=RankState.LEFT),
            busy(3, *history(1), is_alive=False),
            RankRecord(4),
            RankRecord(5, is_known=False),
            busy(6, state=RankState.STARTED),
            busy(7),
        ]
        predict = "collective 18, all_gather(float64[5]), at train.py:40 in FSDPModel.predict"
        idle = "42 s ago: computing, asleep or stuck"
        first = "collective 1, barrier(), at train.py:1"
        assert rank_table(records, NOW).splitlines() == [
            f"  rank 0: waits 31 s in {predict}",
            "    16: barrier() at train.py:1",
            "    17: barrier() at train.py:1",
            f"  rank 1: in no collective since collective 2, barrier(), at train.py:1, {idle}",
            f"    1: barrier() of {TENSOR} at train.py:1",
            "    2: barrier() at train.py:1",
            "  rank 2: left after collective 1, barrier(), at train.py:1",
            "    1: barrier() at train.py:1",
            f"  rank 3: its process is gone (killed, or out of memory?), after {first}",
            "    1: barrier() at train.py:1",
            "  rank 4: not yet come to init",
            "  rank 5: on another node, whose status pages cannot be read from here",
            "  rank 6: in init, where ranks wait for each other",
            "  rank 7: has called no collective yet: computing, asleep or stuck",
        ]

    def test_a_wait_for_a_collective_that_left_the_call_log(self):
        record = RankRecord(0, RankState.RUNNING, calls=history(3), waited=4.0)
        assert "waits 4.0 s in a collective that its log does not hold" in rank_table([record], NOW)

    def test_a_table_of_many_ranks_fits_a_screen(self):
        records = [
            busy(rank, *history(2))
            if rank in (7, 300)
            else waiting(rank, *history(3), seconds=30.0 + rank / 100)
            for rank in range(512)
        ]
        lines = rank_table(records, NOW).splitlines()
        assert lines[0].startswith("  ranks 0-6, 8-299, 301-511: waits 30 to 35 s in collective 3")
        assert lines[3].startswith("  ranks 7, 300: in no collective since collective 2")
        assert len(lines) == 6

    def test_a_table_of_many_ranks_that_all_differ_is_cut(self):
        records = [waiting(rank, *history(rank + 2)[-2:]) for rank in range(512)]
        lines = rank_table(records, NOW).splitlines()
        assert len(lines) == 40
        assert lines[-1] == "  ranks 39-511: each does something else again"
        few = rank_table(records[:12], NOW).splitlines()
        assert len(few) == 24
        assert len(rank_table(records[:30], NOW).splitlines()) == 30


class TestNames:
    @pytest.mark.parametrize("ranks", [[3], [0, 1], [0, 1, 2, 8], range(0, 512, 7), [5, 1, 3, 2]])
    def test_labels_are_read_back(self, ranks):
        assert group_members(group_label("tensor", "17.3", ranks)) == sorted(ranks)

    def test_a_label_of_too_many_ranks_has_their_range(self):
        ranks = [n * n for n in range(40)]
        label = group_label("replica", "17", ranks)
        assert label == "replica group 17 (40 ranks, 0 to 1521)"
        assert group_members(label) is None

    def test_the_members_of_a_large_group_are_the_ranks_that_called_in_it(self):
        label = group_label("replica", "17", [n * n for n in range(40)])
        records = [waiting(0, logged(2, group=label)), busy(1, logged(1, group=label)), busy(2)]
        text = verdict(records, NOW)
        assert "Rank 1: in no collective" in text
        assert "2 waits" not in text

    def test_ranks_are_written_as_ranges(self):
        assert ranks_text([9, 0, 1, 2]) == "0-2, 9"
        assert ranks_text([4, 6]) == "4, 6"


class TestMismatch:
    """`check_calls` names the ranks whose call differs from the majority's."""

    def message(self, calls, **world):
        with pytest.raises(CollectiveMismatchError) as caught:
            check_calls(calls, **world)
        return str(caught.value)

    def call(
        self, kind=CollectiveKind.ALL_REDUCE, *, length=4, dtype=float, method="", line=3, **options
    ):
        call = Call.describe(kind, np.ones(length, dtype), **options, sequence=2)
        call.filename, call.line, call.method = "train.py", line, method
        return call

    @pytest.mark.parametrize(
        ("odd", "words"),
        [
            ({"dtype": np.float32}, "float32, where ranks 0, 1, 3 gave float64"),
            ({"length": 5}, "(5,), where ranks 0, 1, 3 gave (4,)"),
            ({"operation": ReductionOperation.MAX}, "MAX, where ranks 0, 1, 3 gave SUM"),
            ({"root": 1}, "1, where ranks 0, 1, 3 gave -1"),
            (
                {"kind": CollectiveKind.BARRIER},
                "collective 2, barrier, where ranks 0, 1, 3 gave collective",
            ),
        ],
    )
    def test_the_odd_rank_of_four_is_named(self, odd, words):
        usual = {"operation": ReductionOperation.SUM}
        calls = [self.call(**usual | (odd if rank == 2 else {})) for rank in range(4)]
        assert f"no data was mixed. Rank 2 is the odd one out: {words}" in self.message(calls)

    def test_counts_that_differ_are_not_shown(self):
        calls = [self.call(CollectiveKind.REDUCE_SCATTER, counts=(r, 4 - r)) for r in (1, 1, 2)]
        assert "mixed. Rank 2 is the odd one out:\n" in self.message(calls)

    def test_without_a_majority_no_rank_is_odd(self):
        calls = [self.call(length=length) for length in (4, 4, 5, 5)]
        assert "no data was mixed:\n  rank 0: collective 2" in self.message(calls)

    def test_a_method_that_one_rank_alone_calls_is_named(self):
        calls = [
            self.call(
                CollectiveKind.ALL_GATHER if rank == 0 else CollectiveKind.ALL_REDUCE,
                method=PREDICT if rank == 0 else STEP,
                line=rank,
            )
            for rank in range(3)
        ]
        text = self.message(calls)
        assert (
            "mixed. FSDPModel.predict is collective: rank 0 called it at train.py:0, ranks 1, 2 "
            "called FSDPOptimizer.step at train.py:1" in text
        )
        assert "rank 2: collective 2, all_reduce(float64[4]) at train.py:2 in FSDPOptim" in text

    def test_ranks_of_a_group_have_their_world_numbers(self):
        calls = [self.call(length=length) for length in (4, 4, 5)]
        text = self.message(calls, ranks=(1, 3, 5), group="group 1 (ranks 1, 3, 5)")
        assert "the ranks' collectives of group 1 (ranks 1, 3, 5) do not match in shape" in text
        assert "Rank 5 is the odd one out" in text
        assert "\n  rank 5: " in text

    def test_many_ranks_with_equal_calls_share_a_line(self):
        calls = [self.call(length=5 if rank == 100 else 4) for rank in range(512)]
        lines = self.message(calls).splitlines()
        assert len(lines) == 3
        assert lines[1].startswith("  ranks 0-99, 101-511: collective 2")
        calls = [self.call(length=rank) for rank in range(512)]
        assert self.message(calls).endswith("\n  and 472 more")


def ends(world_size, body, timeout=30.0):
    """Return the exception or the result of each rank."""
    found = [None] * world_size

    def run(backend):
        try:
            found[backend.rank] = body(backend)
        except BaseException as error:
            found[backend.rank] = error
            raise

    with pytest.raises(CommunicationError):
        run_in_threads(world_size, run, timeout=timeout)
    return found


class TestThreadRanks:
    X, Y = np.ones((8, 4)), np.ones((8, 2))

    def wrapped(self, backend):
        model = ms.as_distributed(ms.nn.MLP([4, 4, 2], seed=0), backend)
        return model, ms.as_distributed(ms.optimizers.SGD(0.1), backend)

    def test_predict_on_one_rank_is_named_even_if_its_collective_matched(self, monkeypatch):
        monkeypatch.setenv("MPISHARD_ARENA", "off")

        def body(backend):
            model, optimizer = self.wrapped(backend)
            optimizer.step(model, self.X, self.Y)
            if backend.rank == 0:
                model.predict(self.X)
            optimizer.step(model, self.X, self.Y)

        messages = {str(error) for error in ends(3, body)}
        assert len(messages) == 1
        (text,) = messages
        assert "do not match in kind or order" in text
        assert "FSDPModel.predict is collective: rank 0 called it at" in text
        assert "ranks 1, 2 called FSDPOptimizer.step at" in text

    def test_predict_on_one_rank_while_another_leaves(self, monkeypatch):
        monkeypatch.setenv("MPISHARD_ARENA", "off")

        def body(backend):
            model, optimizer = self.wrapped(backend)
            optimizer.step(model, self.X, self.Y)
            backend.barrier()
            if backend.rank == 0:
                model.predict(self.X)

        error = ends(2, body)[0]
        assert isinstance(error, PeerError)
        assert "FSDPModel.predict is collective" in str(error)
        assert "in FSDPModel.predict. " in str(error)

    def test_two_groups_called_in_two_orders_are_reported(self):
        def body(backend):
            first, second = backend.split(0), backend.split(0)
            for group in (first, second) if backend.rank == 0 else (second, first):
                group.barrier()

        for error in ends(2, body, timeout=1.0):
            assert isinstance(error, CollectiveTimeoutError)
            assert "collectives of different groups in different orders" in str(error)
            assert "of group 1 (ranks 0, 1)" in str(error)
            assert "of group 2 (ranks 0, 1)" in str(error)

    def test_all_waiting_ranks_raise_the_same_table(self):
        done = threading.Event()

        def body(backend):
            backend.barrier()
            if backend.rank == 2:
                done.wait(20)
                backend.barrier()
            try:
                backend.all_reduce(np.ones(3))
            finally:
                done.set()

        errors = ends(4, body, timeout=1.0)
        for error in errors:
            assert isinstance(error, CollectiveTimeoutError)
            assert "ranks [2] did not arrive" in str(error)
            assert "Rank 2: in no collective since collective 1" in str(error)
        assert sum("cannot complete" in str(error) for error in errors) == 2
        assert "barrier is called after a failure: rank" in str(errors[2])

    def test_a_rank_of_a_group_is_named_by_its_world_number(self):
        def body(backend):
            group = backend.split(backend.rank % 2)
            if backend.rank == 1:
                group.barrier()

        found = ends(4, body)
        assert found[1].rank == 3
        assert (
            "rank 3 left after collective 0 of group 1 (ranks 1, 3), while rank 1 waits in "
            "collective 1, barrier(), of group 1 (ranks 1, 3), called at" in str(found[1])
        )

    def test_a_rank_that_fails_in_a_group_names_its_collective_there(self):
        def body(backend):
            group = backend.split(0)
            backend.barrier()
            group.barrier()
            if backend.rank == 1:
                raise CommunicationError("boom")
            backend.barrier()

        words = "rank 1 failed after collective 1, barrier(), of group 1 (ranks 0, 1) at "
        assert words in str(ends(2, body)[0])

    def test_an_error_raised_because_of_a_peer_names_the_first_failure(self):
        def body(backend):
            pair = backend.split(0 if backend.rank < 2 else None)
            if backend.rank == 0:
                backend.receive(2, 1)
            if backend.rank == 1:
                pair.barrier()
            time.sleep(0.2)  # rank 2: until the others wait

        found = ends(3, body)
        assert found[0].rank == 2
        assert found[1].rank == 2
        assert "cannot complete: rank 2 left after collective 1, while rank 0" in str(found[1])

    def test_a_message_of_a_group_names_the_sender_s_world_number(self):
        def body(backend):
            group = backend.split(backend.rank % 2)
            if backend.rank == 3:
                group.send(np.ones(2), 0, tag=4)
            if backend.rank == 1:
                with pytest.raises(CommunicationError, match="tag 4 from rank 3 has 2 elements"):
                    group.receive(1, 3, tag=4)
                with pytest.raises(PeerError, match="for a message with tag 9 from rank 3 in gro"):
                    group.receive(1, 3, tag=9)

        run_in_threads(4, body)

    def test_a_table_of_ranks_that_wait_for_nothing(self):
        def body(backend):
            backend.barrier()
            return describe_stall(backend._world.records()) if backend.rank == 0 else None

        text = run_in_threads(2, body)[0]
        assert "\nWhat each rank does, and its last collectives:\n  rank 0: " in text
