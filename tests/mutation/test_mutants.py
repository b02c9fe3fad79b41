"""Without any one of its collectives a check of the engine fails: `tests/mutate_engine.py`."""

import ast
import os
import subprocess
import sys

import forgotten
import pytest
import sites
from checks import CHECKS, SECONDS

# A few of the mutants, each with a check that fails; the script tries all.
KILLED = [
    ("Round.totals", "all_reduce", "equality: ddp, messages"),
    ("NodeParameters.publish", "barrier", "a late rank: zero1, arena"),
    ("NodeGradients.finish", "fence", "a late rank: ddp, arena"),
    ("NodeGradients.await_readers", "wait_until_over", "idle works: ddp, arena"),
    ("_gather", "wait", "idle works: zero2, messages"),
    ("ShardedParameters.prefetch", "wait_until_over", "a step after one that failed"),
    ("OffloadedParameters.unshard", "synchronize", "offloading: parameters"),
    ("Engine.sum_over_owners", "all_reduce", "lamb"),
    ("check_position", "same_outcome", "runs that differ"),
]


is_full = bool(os.environ.get("MPISHARD_TEST_FULL"))
# The script runs all of them before it takes anything away. Here one in six, and those above.
PASSING = [
    name
    for number, name in enumerate(CHECKS)
    if is_full or number % 6 == 0 or name in {check for _, _, check in KILLED}
]


@pytest.mark.parametrize("name", PASSING)
def test_the_engine_passes(problems, name):
    CHECKS[name](problems)


@pytest.mark.parametrize(("function", "name", "check"), KILLED)
def test_a_check_fails_without_a_collective(problems, function, name, check, monkeypatch):
    monkeypatch.setattr("worlds.PATIENCE", 2.0)
    monkeypatch.setitem(SECONDS, "late", 0.03)
    (site, *_) = (s for s in sites.find_sites() if (s.function, s.name) == (function, name))
    with pytest.raises((Exception, pytest.fail.Exception)), sites.without(site, forgotten):
        CHECKS[check](problems)


def test_spared_sites_exist(script):
    """Each spared site has a reason."""
    found = {(site.function, site.text) for site in sites.find_sites()}
    assert set(script.SPARED) <= found
    assert all(script.SPARED.values())


def _that_communicate(path, by):
    """The public methods of a file's classes that call one of ``by``, themselves or by others."""
    tree = ast.parse((sites.PACKAGE / "communication" / "contract" / path).read_text())
    methods = {
        method.name: {node.attr for node in ast.walk(method) if isinstance(node, ast.Attribute)}
        for kind in tree.body
        if isinstance(kind, ast.ClassDef)
        for method in kind.body
        if isinstance(method, ast.FunctionDef)
    }
    talk = set(by)
    while more := {name for name, called in methods.items() if called & talk} - talk:
        talk |= more
    return {name for name in talk if not name.startswith("_")}


def test_every_call_of_a_backend_is_found():
    """The script must know every collective of a backend, whatever its name."""
    calls = _that_communicate("backend.py", {"_issue", "_begin", "_send", "_shrink"})
    assert {"all_reduce", "barrier_async", "receive", "shrink", "split"} <= calls
    assert calls <= sites.COLLECTIVES
    of_arenas = _that_communicate("arena.py", {"_start", "barrier_async"})
    assert of_arenas - {"barrier_async", "part"} == {
        "fence",
        "gather_in_place",
        "reduce_in_place",
        "reduce_into",
    }
    assert of_arenas - {"barrier_async", "part"} <= set(sites.METHODS)
    assert {site.name for site in sites.find_sites()} <= set(vars(forgotten))


@pytest.mark.timeout(900)
@pytest.mark.skipif(not is_full, reason="scripts/test.sh --full")
def test_a_check_fails_without_each_collective(script):
    run = subprocess.run(
        [sys.executable, script.__file__], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
