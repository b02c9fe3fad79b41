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
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LIMIT = 30.0
"""Seconds after which a mutant that does not end is taken for one that never will."""
LATER = (1, 10)
"""By how much a late rank is later, where nothing fails at first."""

# What may survive, by function and text, and why.
SPARED = {
    ("LayeredProgram._views", "parameters.backend.progress()"):
        "speed alone: lets what is under way go on; every result is waited for elsewhere",
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
    sys.path[:0] = [str(HERE.parent), str(HERE / "mutation")]
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
    return _report(chosen, _verdicts(chosen))


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

    problems = _problems()
    workers = len(os.sched_getaffinity(0))
    sites = list(chosen.values())
    with ThreadPoolExecutor(workers) as pool:
        with watched(sites) as reached:
            looks = pool.map(lambda name: _forked(_look, problems, name, reached), CHECKS)
            rows = dict(zip(CHECKS, looks, strict=True))
        order = sorted(CHECKS, key=lambda name: rows[name][0])
        reaching = {n: [c for c in order if site in rows[c][1]] for n, site in chosen.items()}
        found = pool.map(lambda n: _judge(problems, chosen[n], reaching[n]), chosen)
        return dict(zip(chosen, found, strict=True))


def _problems() -> Any:
    """The class `Problems` of the models' tests."""
    path = HERE / "models" / "conftest.py"
    spec = importlib.util.spec_from_file_location("problems_of_models", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.Problems


def _judge(problems: Any, site: Any, checks: list[str]) -> Verdict:
    for later in LATER:
        names = [n for n in checks if later == 1 or "late" in n or "barrier" in n]
        found = _forked(_try, problems, names, site, later)
        if found is not None:
            return Verdict(*found)
    return Verdict(reached=len(checks))


def _look(problems: Any, name: str, reached: set[Any]) -> Any:
    """Seconds that a check takes, and the sites that it reaches."""
    from checks import CHECKS

    started = time.perf_counter()
    CHECKS[name](problems)
    return time.perf_counter() - started, reached


def _try(problems: Any, names: list[str], site: Any, later: float) -> tuple[str, str] | None:
    """The first of some checks that fails with a mutant, and how."""
    import checks
    import forgotten
    from sites import without

    checks.SECONDS["late"] *= later
    with without(site, forgotten):
        for name in names:
            try:
                checks.CHECKS[name](problems)
            except BaseException as error:
                return name, _brief(error)
    return None


def _forked(function: Any, *arguments: Any) -> Any:
    """What the function returns in a process of its own.

    Raises
    ------
    RuntimeError
        Where it raises: a check that fails as the engine stands, or a mutant that cannot be made.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, function, arguments), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(LIMIT):
            return "a time limit", f"hangs for {LIMIT:g} s"
        is_good, answer = receiver.recv()
    finally:
        receiver.close()
        process.kill()
        process.join()
    if not is_good:
        raise RuntimeError(answer)
    return answer


def _answer(sender: Any, function: Any, arguments: Any) -> None:
    try:
        sender.send((True, function(*arguments)))
    except BaseException as error:
        sender.send((False, f"{arguments[1:]}: {_brief(error)}"))


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
