"""The search for the mpiexec that belongs to an MPI library."""

import os
import sys
from pathlib import Path

import pytest

from mpishard.cli.machine import usable_cores
from mpishard.cli.probe import Answer, answer_line
from mpishard.cli.run import launcher
from mpishard.cli.run.launcher import (
    Host,
    Launcher,
    MPIFamily,
    MPILibrary,
    find_launcher,
    loaded_library,
)
from mpishard.errors import MPIUnavailableError

MPICH = MPILibrary("MPICH Version:      5.0.2\nMPICH Device:       ch4:ucx ofi\n")
OPEN_MPI = MPILibrary("Open MPI v5.0.11, package: Open MPI user@localhost, ident: 5.0.11")
INTEL = MPILibrary("Intel(R) MPI Library 2021.14 for Linux* OS\n")

HYDRA_SAYS = "HYDRA build details:\n    Version:    5.0.2"
OPEN_MPI_SAYS = "mpiexec (Open MPI) 5.0.11"


@pytest.fixture
def bare_path(monkeypatch, tmp_path):
    """No launcher on PATH or beside the interpreter, and no SLURM."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return tmp_path


def add_program(path: Path, says: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n/bin/cat <<'EOF'\n{says}\nEOF\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("text", "family"),
    [
        (MPICH.version, MPIFamily.MPICH),
        ("MVAPICH2 Version      :\t2.3.7", MPIFamily.MPICH),
        ("MPI VERSION    : CRAY MPICH version 8.1.28.29 (ANL base 3.4a2)", MPIFamily.MPICH),
        (HYDRA_SAYS, MPIFamily.MPICH),
        (OPEN_MPI.version, MPIFamily.OPEN_MPI),
        (OPEN_MPI_SAYS, MPIFamily.OPEN_MPI),
        ("mpirun (OpenRTE) 4.1.8", MPIFamily.OPEN_MPI),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.14", MPIFamily.INTEL),
        ("Fujitsu MPI Library 4.0.0", None),
    ],
)
def test_family(text, family):
    assert MPIFamily.of(text) is family


def test_names_the_library_in_a_few_words():
    assert str(MPICH) == "MPICH 5.0.2"
    assert str(OPEN_MPI) == "Open MPI 5.0.11"
    assert str(INTEL) == "Intel MPI 2021.14"


def test_skips_a_launcher_of_another_mpi(bare_path, monkeypatch):
    other = add_program(bare_path / "bin/mpiexec", OPEN_MPI_SAYS)
    mine = add_program(bare_path / "more/mpiexec", HYDRA_SAYS)
    monkeypatch.setenv("PATH", f"{other.parent}{os.pathsep}{mine.parent}")
    assert find_launcher(MPICH).program == mine
    assert find_launcher(OPEN_MPI).program == other


@pytest.mark.parametrize("library_folder", ["lib", "lib/x86_64-linux-gnu", "lib64/release"])
def test_prefers_the_launcher_beside_the_library(bare_path, library_folder):
    add_program(bare_path / "bin/mpiexec", HYDRA_SAYS)
    mine = add_program(bare_path / "opt/mpich/bin/mpiexec", HYDRA_SAYS)
    library = MPILibrary(MPICH.version, bare_path / "opt/mpich" / library_folder / "libmpi.so.12")
    assert find_launcher(library).program == mine


def test_finds_the_launcher_that_came_as_a_wheel(bare_path):
    mine = add_program(bare_path / "prefix/bin/mpiexec", HYDRA_SAYS)
    assert find_launcher(MPICH).program == mine


def test_finds_alternatives_by_their_own_names(bare_path):
    add_program(bare_path / "bin/mpiexec", OPEN_MPI_SAYS)
    mine = add_program(bare_path / "bin/mpiexec.mpich", HYDRA_SAYS)
    assert find_launcher(MPICH).program == mine


def test_names_what_it_found_instead(bare_path):
    with pytest.raises(MPIUnavailableError, match=r"loads MPICH 5\.0\.2, and no mpiexec"):
        find_launcher(MPICH)
    other = add_program(bare_path / "bin/mpiexec", OPEN_MPI_SAYS)
    with pytest.raises(MPIUnavailableError, match=rf"found only {other} \(Open MPI\)"):
        find_launcher(MPICH)


def test_a_launcher_that_does_not_run_is_skipped(bare_path):
    broken = bare_path / "bin/mpiexec"
    broken.parent.mkdir()
    broken.write_text("#!/nowhere\n")
    broken.chmod(0o755)
    with pytest.raises(MPIUnavailableError, match="unknown"):
        find_launcher(MPICH)


def test_an_unknown_library_is_refused(bare_path):
    with pytest.raises(MPIUnavailableError, match="Fujitsu MPI Library"):
        find_launcher(MPILibrary("Fujitsu MPI Library 4.0.0"))


def test_srun_inside_an_allocation_only(bare_path, monkeypatch):
    srun = add_program(bare_path / "bin/srun", "slurm 24.05")
    mpiexec = add_program(bare_path / "bin/mpiexec", HYDRA_SAYS)
    assert find_launcher(MPICH).program == mpiexec
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    launcher = find_launcher(MPICH)
    assert launcher.program == srun
    command = launcher.command(4, ["python", "a.py"], hosts=[Host("n1", 2), Host("n2", 2)])
    assert command[:3] == [str(srun), "-n", "4"]
    assert {"--nodelist=n1,n2", "--nodes=2"} < set(command)
    assert "--export=ALL" in command
    assert command[-2:] == ["python", "a.py"]
    with pytest.raises(ValueError, match="--hosts n1:1,n2:3: inside SLURM srun distributes"):
        launcher.command(4, ["p"], hosts=[Host("n1", 1), Host("n2", 3)])


def test_hydra_command():
    launcher = Launcher(Path("/opt/mpiexec"), MPICH)
    assert launcher.command(3, ["p"]) == ["/opt/mpiexec", "-n", "3", "p"]
    assert launcher.command(3, ["p"], hosts=[Host("a", 2), Host("b", 2)], variables=["X"]) == (
        ["/opt/mpiexec", "-n", "3", "-hosts", "a,b", "-ppn", "2", "p"]
    )
    assert launcher.command(3, ["p"], hosts=[Host("a", 1), Host("b", 2)]) == (
        ["/opt/mpiexec", "-n", "3", "-hosts", "a:1,b:2", "p"]
    )


@pytest.mark.parametrize("user", [0, 1000])
def test_open_mpi_command(monkeypatch, user):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    launcher = Launcher(Path("/opt/mpiexec"), OPEN_MPI)
    here = launcher.command(3, ["p"])
    assert ("--allow-run-as-root" in here) == (user == 0)
    assert here[here.index("--map-by") + 1] == ":OVERSUBSCRIBE"
    hosts = [Host("a", 1), Host("b", 2)]
    there = launcher.command(3, ["p"], hosts=hosts, variables=["OMP_NUM_THREADS"])
    assert there[there.index("--host") + 1] == "a:1,b:2"
    assert there[-3:] == ["-x", "OMP_NUM_THREADS", "p"]


def test_the_variable_that_holds_the_rank():
    assert Launcher(Path("/opt/mpiexec"), MPICH).rank_variable == "PMI_RANK"
    assert Launcher(Path("/opt/mpiexec"), INTEL).rank_variable == "PMI_RANK"
    assert Launcher(Path("/opt/mpiexec"), OPEN_MPI).rank_variable == "OMPI_COMM_WORLD_RANK"
    assert Launcher(Path("/opt/srun"), OPEN_MPI).rank_variable == "SLURM_PROCID"


def test_usable_cores():
    assert 1 <= usable_cores() <= os.cpu_count()


def with_answer(monkeypatch, *answer):
    monkeypatch.setattr(launcher, "ask", lambda command, limit: Answer(*answer, limit))


def test_library_file_is_found_among_the_mapped_ones(monkeypatch):
    files = ["/p/lib/libmpifort.so.12", "/p/lib/libmpi.so.12"]
    found = answer_line({"version": "MPICH Version: 5.0.2", "files": files})
    with_answer(monkeypatch, 0, f"noise\n{found}\n", "")
    assert loaded_library() == MPILibrary("MPICH Version: 5.0.2", Path("/p/lib/libmpi.so.12"))


def test_missing_mpi4py(monkeypatch):
    with_answer(monkeypatch, 1, "", "Traceback\nModuleNotFoundError: No module named 'mpi4py'\n")
    with pytest.raises(MPIUnavailableError, match=r"No module named 'mpi4py'\n.*pip install"):
        loaded_library()


@pytest.mark.parametrize(
    ("code", "message"),
    [(-11, r"signal 11 \(Segmentation fault\) ended it"), (None, "took more than 60 s: `.*hangs")],
)
def test_library_that_crashes_or_hangs_on_loading(monkeypatch, code, message):
    with_answer(monkeypatch, code, "", "")
    with pytest.raises(MPIUnavailableError, match=message):
        loaded_library()
