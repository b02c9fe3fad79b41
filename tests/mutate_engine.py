"""Removes every collective of the engine, one at a time, and looks for a check that fails.

    python tests/mutate_engine.py             # all, a few at once, and a table of them
    python tests/mutate_engine.py --list      # the places, with their numbers
    python tests/mutate_engine.py --only 3 17
    python tests/mutate_engine.py --only 17 --suite tests/models -x    # pytest, with that mutant

A check that passes with a collective removed is no check. What is removed is every call that
communicates, or that waits for what does, in `mpishard/models` and `mpishard/optimizers`; they are
found in the source, so that a new one has its mutant from the day it is written. In its place is
what somebody would have who forgot it: the array as it is, this rank's own part, nothing.

The exit code is 1 where a mutant survives that is not in `SPARED`, with the reason.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LIMIT = 10.0
"""Seconds that a check may take with a mutant, beyond five times what it takes without."""
LATER = (1, 20)
"""By how much a late rank is later, where nothing fails at first."""
_SECONDS = 120  # that a test may take with a mutant
_TESTS_FAILED = 1  # pytest's exit code; others say that there was no test, or that it was stopped

_PROGRESS = "speed alone: lets what is under way go on; every result is waited for elsewhere"
# What may survive, by function and text, and why.
SPARED = {
    ("LayerChain._forward", "parameters.backend.progress()"): _PROGRESS,
    ("LayerChain.backward", "parameters.backend.progress()"): _PROGRESS,
    ("_Progressing.reduce", "self._across.progress()"): _PROGRESS,
    ("TrainingRun._hooks", "data.progress"): "a flag of the user's, of the same name",
}  # fmt: skip

# What no check reaches is for tests of its own, by function and text.
_RESUME = "optimizers/test_resume.py"
_LATE = "optimizers/test_async_sgd.py"
_MANY_LATE = f"{_LATE}::test_many_steps_are_the_textbooks_on_every_rank"
_DROPPED = f"{_LATE}::test_a_buffer_is_written_to_when_its_dropped_message_has_ended"
_COMPRESSED = "optimizers/test_compression.py::test_many_steps_are_the_textbooks"
TESTED = {
    ("_copy_all", "synchronize(array)"):
        "models/test_devices.py::test_arrays_may_change_after_they_were_staged_for_an_update",
    ("ExchangedPasses.again", "engine.world.all_reduce(squares, subject=engine.layout.subject)"):
        f"{_LATE}::test_pending_gradients_are_applied_as_by_later_steps",
    ("CompressedSums.exchange", "self.across.all_reduce_async(array)"): _COMPRESSED,
    ("CompressedSums.exchange", "work.wait()"):
        "optimizers/test_compression.py::test_whole_gradients_of_the_first_steps_are_waited_for",
    ("CompressedSums._exchange_unit", "self.across.all_reduce(host.values)"): _COMPRESSED,
    ("_Progressing.reduce", "self._inner.reduce(unit)"): _COMPRESSED,
    ("DelayedSums.exchange", "self._stale[0].wait_until_over()"): _DROPPED,
    ("DelayedSums.expect", "self._stale.pop().wait_until_over()"): _DROPPED,
    ("DelayedSums.exchange", "self.across.all_reduce_async(array)"): _MANY_LATE,
    ("DelayedSums.exchange", "work.wait()"): _MANY_LATE,
    ("DelayedState.apply_pending",
     "differences(self.model.backend, {name: str(value) for name, value in mine.items()})"):
        "optimizers/test_async_sgd.py::test_ranks_with_other_pending_gradients_are_refused",
    ("compare_replicas",
     "world.all_gather(rows.reshape(-1, 3), subject=parameters.layout.subject)"):
        "models/test_digest.py::test_names_the_rank_and_the_parameter",
    ("TrainingRun._resume", "same_outcome(self.model.backend)"):
        f"{_RESUME}::test_state_that_one_rank_cannot_restore_ends_all",
    ("TrainingRun._one_step", "model.backend.all_reduce(np.array(requests.own))"):
        "callbacks/test_callbacks.py::test_a_request_at_an_evaluation_stops_at_once",
    ("checkpoint_to_resume", "same_outcome(backend)"):
        f"{_RESUME}::test_all_ranks_raise_if_rank_0_cannot_search_for_a_checkpoint",
    ("checkpoint_to_resume", "share_path(backend, found)"):
        "optimizers/test_frozen_checkpoints.py::test_interrupted_and_resumed_it_is_the_same_run",
    ("UserState.position", "same_outcome(self._backend)"):
        f"{_RESUME}::test_state_that_one_rank_cannot_save_is_refused_by_all",
    ("UserState.position", "gather_texts(self._backend, text)"):
        f"{_RESUME}::test_state_that_differs_between_ranks_is_saved_for_each",
    ("minimize", "differences(backend, choices)"):
        "optimizers/test_minimize.py::test_unequal_arguments_are_an_error_on_every_rank",
    ("_Minimization.go", "same_outcome(backend)"): "optimizers/test_minimize.py"
        "::test_a_folder_that_cannot_be_written_is_refused_before_the_first_step",
}  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """What became of one mutant: which check fails and how, of how many that reach the site."""

    killer: str = ""
    how: str = ""
    reached: int = 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="the places, and nothing else")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="these mutants")
    parser.add_argument("--every", type=int, default=1, metavar="K", help="each K-th mutant")
    parser.add_argument("--suite", nargs=argparse.REMAINDER, help="pytest with the one mutant")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # for what forks
    sys.path[:0] = [str(HERE.parent), str(HERE / "mutation"), str(HERE / "helpers")]
    from sites import find_sites

    every = dict(enumerate(find_sites()))
    numbers = options.only or range(0, len(every), options.every)
    chosen = {number: every[number] for number in numbers}
    if options.list:
        for number, site in chosen.items():
            print(f"{number:3}  {site.place:42} {site.text}")
        return 0
    if options.suite is not None:
        return _suite(list(chosen.values()), options.suite)
    gone = set(TESTED) - {(site.function, site.text) for site in every.values()}
    assert not gone, f"TESTED names what is no site: {gone}"
    verdicts = _verdicts(chosen)
    for number, site in chosen.items():
        test = TESTED.get((site.function, site.text))
        if test is not None and not verdicts[number].killer:
            verdicts[number] = _judge_by_pytest(number, test)
    return _report(chosen, verdicts)


def _suite(chosen: list[Any], arguments: Sequence[str]) -> int:
    """Run pytest with one mutant in the place of its original."""
    import forgotten
    import pytest
    from sites import without

    (site,) = chosen
    with without(site, forgotten):
        return int(pytest.main(["-p", "no:cacheprovider", *arguments]))


# --------------------------------------------------------------------------------------- verdicts


def _verdicts(chosen: dict[int, Any]) -> dict[int, Verdict]:
    logging.getLogger("mpishard").setLevel(logging.ERROR)
    from checks import CHECKS
    from sites import watched

    problems = load_problems()
    seconds: dict[str, float] = {}
    reaching: dict[Any, list[str]] = {site: [] for site in chosen.values()}
    with watched(list(reaching)) as reached:
        for name, check in CHECKS.items():  # here, so that what forks later need not warm up
            started = time.perf_counter()
            reached.clear()
            check(problems)
            seconds[name] = time.perf_counter() - started
            for site in reached:
                reaching[site].append(name)
    for names in reaching.values():
        names.sort(key=seconds.__getitem__)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = pool.map(lambda item: _judge(problems, *item, seconds), reaching.items())
        return dict(zip(chosen, found, strict=True))


def load_problems() -> Any:
    """The class `Problems` of the models' tests."""
    path = HERE / "models" / "conftest.py"
    spec = importlib.util.spec_from_file_location("problems_of_models", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.Problems


def _judge(problems: Any, site: Any, checks: list[str], seconds: dict[str, float]) -> Verdict:
    """What becomes of a mutant in a process of its own."""
    for later in LATER:
        limits = {
            name: LIMIT + 5 * later * seconds[name]
            for name in checks
            if later == 1 or "late" in name or "barrier" in name
        }
        found = limits and _forked(2 * sum(limits.values()), problems, limits, site, later)
        if found:
            return Verdict(*found)
    return Verdict(reached=len(checks))


def _judge_by_pytest(number: int, test: str) -> Verdict:
    """What becomes of a mutant in a test."""
    suite = [str(HERE / test), "-q", "-x"]
    command = [sys.executable, __file__, "--only", str(number), "--suite", *suite]
    name = test.rpartition("::")[2][:38]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        return Verdict(name, f"did not end within {_SECONDS} s", 1)
    if done.returncode < 0:
        return Verdict(name, f"its process ended by signal {-done.returncode}", 1)
    if done.returncode != _TESTS_FAILED:
        return Verdict(reached=1)
    return Verdict(name, done.stdout.strip().splitlines()[-1], 1)


def _try(
    problems: Any, limits: dict[str, float], site: Any, later: float
) -> tuple[str, str] | None:
    """The first of some checks that fails with a mutant, and how."""
    import checks
    import forgotten
    from sites import without

    def end(*_: Any) -> None:
        raise TimeoutError("it does not end")

    signal.signal(signal.SIGALRM, end)
    checks.SECONDS["late"] *= later
    with without(site, forgotten):
        for name, limit in limits.items():
            signal.setitimer(signal.ITIMER_REAL, limit)
            try:
                checks.CHECKS[name](problems)
            except BaseException as error:
                return name, _brief(error)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    return None


def _forked(limit: float, *arguments: Any) -> tuple[str, str] | None:
    """What `_try` finds in a process of its own.

    Raises
    ------
    RuntimeError
        Where it ends with an exception of its own: a mutant that cannot be made.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, arguments), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(limit):
            return "nothing", f"did not end within {limit:.0f} s"
        found, error = receiver.recv()
    except EOFError:
        return "nothing", "its process died"
    finally:
        receiver.close()
        process.kill()
        process.join()
    if error:
        raise RuntimeError(error)
    return found  # type: ignore[no-any-return]


def _answer(sender: Any, arguments: Any) -> None:
    try:
        sender.send((_try(*arguments), ""))
    except BaseException as error:
        sender.send((None, f"{arguments[2]}: {_brief(error)}"))


def _brief(error: BaseException) -> str:
    first = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first[:60]}"


# ----------------------------------------------------------------------------------------- report


def _report(chosen: dict[int, Any], verdicts: dict[int, Verdict]) -> int:
    killed, unexpected = 0, []
    print(f"{'':3}  {'where':41} {'removed':22} {'killed by':38} how")
    for number, site in chosen.items():
        verdict = verdicts[number]
        reason = SPARED.get((site.function, site.text))
        if verdict.killer:
            killed += 1
            fate = f"{verdict.killer:38} {verdict.how}"
        elif reason is not None:
            fate = f"SPARED: {reason}"
        else:
            unexpected.append(number)
            fate = f"SURVIVED {verdict.reached} checks that reach it"
        print(f"{number:3}  {site.place:41} {site.name:22} {fate}")
    spared = len(chosen) - killed - len(unexpected)
    print(f"\n{len(chosen)} mutants, {killed} killed, {spared} spared, {len(unexpected)} survived")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
