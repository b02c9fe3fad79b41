"""``mpishard doctor``: findings about MPI, GPUs and SLURM, most of them simulated."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from spawned_jobs import outside_launchers

from mpishard.cli.doctor import host as doctor_host
from mpishard.cli.doctor import job as doctor_job
from mpishard.cli.doctor import mpi as doctor_mpi
from mpishard.cli.doctor.finding import Verdict
from mpishard.cli.doctor.mpi import examine_mpi, why_it_failed
from mpishard.cli.probe import Answer, answer_line, ask, python_command
from mpishard.cli.run.launcher import Launcher, MPIInstallation, MPILibrary

OK, NOTE, PROBLEM = Verdict
MPICH = MPILibrary("MPICH Version:      5.0.2", Path("/opt/mpich/lib/libmpi.so"))
OPEN_MPI = MPILibrary("Open MPI v5.0.11, ident: 5.0.11")
HYDRA_SAYS = "HYDRA build details:\n    Version:    5.0.2"
OPEN_MPI_SAYS = "mpiexec (Open MPI) 5.0.11"


def by_name(findings):
    found = {finding.name: finding for finding in findings}
    assert all((f.fix is None) == (f.verdict is OK) for f in found.values()), found
    return found


# ---------------------------------------------------------------------------------------------- MPI


def test_the_launcher_of_another_mpi_first_on_path(programs):
    stranger = programs("mpiexec", OPEN_MPI_SAYS)
    own = Path("/opt/mpich/bin/mpiexec")
    found = by_name(examine_mpi(MPIInstallation(MPICH, Launcher(own, MPICH))))
    assert found["mpi.mpiexec"].verdict is NOTE
    assert f"{stranger}, is Open MPI, and mpi4py loads MPICH 5.0.2" in found["mpi.mpiexec"].text
    assert found["mpi.mpiexec"].fix == f'export PATH={own.parent}:"$PATH"'
    assert "mpi.mpirun" not in found
    programs("mpiexec", HYDRA_SAYS)
    found = by_name(examine_mpi(MPIInstallation(MPICH, Launcher(own, MPICH))))
    assert found.keys() == {"mpi.mpi4py", "mpi.launcher"}


def test_open_mpi_as_root(monkeypatch, programs):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.delenv("OMPI_ALLOW_RUN_AS_ROOT", raising=False)
    mpi = MPIInstallation(OPEN_MPI, Launcher(programs("mpiexec", OPEN_MPI_SAYS), OPEN_MPI))
    found = by_name(examine_mpi(mpi))
    assert found["mpi.launcher"].fix == (
        "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
    )


def test_mpi_that_is_not_there(monkeypatch, programs):
    mpi = MPIInstallation(None, None, "mpi4py cannot be used here: ImportError: libmpi.so.40")
    found = by_name(examine_mpi(mpi))
    if "mpi.mpi4py" in found and found["mpi.mpi4py"].value is not None:
        assert found["mpi.mpi4py"].verdict is PROBLEM
        assert "no MPI: ImportError: libmpi.so.40" in found["mpi.mpi4py"].text

    monkeypatch.setattr(doctor_mpi, "installed_version", lambda _: None)
    found = by_name(examine_mpi(mpi))["mpi.mpi4py"]
    assert (found.verdict, found.fix[-24:]) == (NOTE, "pip install mpi4py mpich")
    monkeypatch.setenv("SLURM_JOB_ID", "17")  # where ranks are wanted, with the site's own MPI
    found = by_name(examine_mpi(mpi))["mpi.mpi4py"]
    assert (found.verdict, found.fix[-18:]) == (PROBLEM, "pip install mpi4py")
    assert list(doctor_job.examine_job(mpi)) == []


def test_fixes_are_commands_without_holes(monkeypatch, programs):
    """A ``<folder>`` to be filled in is a redirection for the shell."""
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    found = [*examine_mpi(MPIInstallation(MPICH, None, "no mpiexec"))]
    found += doctor_mpi.examine_slurm(NO_MPI, quick=True)
    fixes = [finding.fix for finding in found if finding.fix]
    fixes += [cause.fix for _, cause in doctor_mpi._KNOWN]
    assert len(fixes) > 8
    assert not [fix for fix in fixes if "<" in fix]


# What the libraries really say.
SAID = {
    "root": "prterun has detected an attempt to run as root.\nYou can override\n",
    "bus": "=   EXIT CODE: 7\nYOUR APPLICATION ENDED WITH THE EXIT STRING: Bus error (signal 7)",
    "read-only": "UCX  ERROR   shm_open(file_name=/ucx_shm flags=0xc2) failed: Read-only file",
    "crash": "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Segmentation fault (signal 11)\n",
    "world": "mpishard.errors.MPIUnavailableError: the library sees a world of one. Fix: start\n",
    "srun": "the library sees a world of one. Fix: start with `srun --mpi=pmi2`\n",
    "no pmix": "srun: error: Task launch for StepId=13.0 failed on node n2: Unspecified error",
    "name": "getaddrinfo failed: Name or service not known\n",
    "busy": "srun: Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)\n",
    "plugin": "srun: error: Invalid MPI type 'pmi9', --mpi=list for acceptable types\n",
    "other": "Traceback\n  File x\nValueError: the sum is wrong\n=====\nBAD TERMINATION\n=====\n",
}


@pytest.mark.parametrize(
    ("said", "text", "fix"),
    [
        ("root", "refuses to run as root", "export OMPI_ALLOW_RUN_AS_ROOT=1"),
        ("bus", "which is full", "shm"),
        ("read-only", "may not write", "shm"),
        ("world", "each rank found itself alone", "install --force-reinstall mpi4py mpich"),
        ("srun", "srun needs a plugin", "export SLURM_MPI_TYPE=pmi2"),
        ("no pmix", "libpmix.so", "apt-get install libpmix-dev"),
        ("name", "has no address", "/etc/hosts"),
        ("busy", "no cores left", "export SLURM_OVERLAP=1"),
        ("plugin", "does not have the plugin", "unset SLURM_MPI_TYPE"),
        ("other", "ValueError: the sum is wrong", "mpiexec -n 2 p"),
        ("crash", "Segmentation fault (signal 11)", "mpiexec -n 2 p"),
    ],
)
def test_causes(monkeypatch, said, text, fix):
    monkeypatch.setattr(doctor_mpi, "free_bytes", lambda: 2**33)
    cause = why_it_failed(Answer(1, "", SAID[said], 30), ["mpiexec", "-n", "2", "p"])
    assert text in cause.text
    assert fix in cause.fix


def test_a_crash_with_little_shared_memory_is_for_want_of_it(monkeypatch):
    monkeypatch.setattr(doctor_mpi, "free_bytes", lambda: 16 * 2**20)
    cause = why_it_failed(Answer(11, "", SAID["crash"], 30), ["mpiexec"])
    assert "/dev/shm" in cause.text
    late = why_it_failed(Answer(None, "", "", 30), ["mpiexec", "p"])
    assert late == ("it did not end within 30 s", "mpiexec p")


def test_a_job_that_fails_and_one_that_ends_badly(monkeypatch, programs, answers):
    mpi = MPIInstallation(MPICH, Launcher(programs("mpiexec", HYDRA_SAYS), MPICH))
    answers(doctor_job, Answer(1, "", SAID["other"], 30))
    found = by_name(doctor_job.examine_job(mpi))["job.round_trip"]
    assert found.verdict is PROBLEM
    assert "two ranks do not communicate: ValueError" in found.text
    answers(doctor_job, Answer(11, answer_line({}), "", 30))
    found = by_name(doctor_job.examine_job(mpi))["job.round_trip"]
    assert (found.verdict, "do not end well" in found.text) == (PROBLEM, True)


@pytest.mark.parametrize(
    ("variable", "taken", "verdict", "fix"),
    [
        ("auto", "memfd", OK, None),
        ("off", None, NOTE, "unset MPISHARD_ARENA"),
        ("auto", None, NOTE, doctor_host.open_processes()),
    ],
)
def test_where_shared_memory_is_from(monkeypatch, programs, variable, taken, verdict, fix, answers):
    monkeypatch.setenv("MPISHARD_ARENA", variable)
    mpi = MPIInstallation(MPICH, Launcher(programs("mpiexec", HYDRA_SAYS), MPICH))
    reply = {"world_size": 2, "nodes": 1, "level": "FUNNELED", "is_shared": taken is not None}
    answers(doctor_job, reply)
    found = by_name(doctor_job.examine_job(mpi))
    assert found["job.arena"].value["taken"] == taken
    assert (found["job.arena"].verdict, found["job.arena"].fix) == (verdict, fix)
    assert "MPI_THREAD_FUNNELED and not MULTIPLE" in found["job.threads"].text
    assert found["job.threads"].fix.startswith("unset MPI4PY_RC_THREAD_LEVEL")


def test_settings_that_ranks_refuse(monkeypatch, programs):
    monkeypatch.setenv("MPISHARD_ARENA", "heap")
    found = by_name(doctor_host.examine_host())["host.settings"]
    assert (found.verdict, found.fix) == (PROBLEM, "unset MPISHARD_ARENA")
    mpi = MPIInstallation(MPICH, Launcher(programs("mpiexec", HYDRA_SAYS), MPICH))
    assert list(doctor_job.examine_job(mpi)) == []


# --------------------------------------------------------------------------------------------- GPUs

NO_MPI = MPIInstallation()
SMI = "NVIDIA H200, 143771 MiB, 580.1\n| NVIDIA-SMI 580.1   CUDA Version: 13.0 |"


class Installed:
    def __init__(self, name, version):
        self.name, self.version = name, version


def with_cupy(monkeypatch, *packages):
    found = [Installed("numpy", "2"), *(Installed(name, "13.6") for name in packages)]
    monkeypatch.setattr(doctor_job, "distributions", lambda: found)


def test_a_gpu_without_cupy(monkeypatch, programs):
    with_cupy(monkeypatch)
    programs("nvidia-smi", SMI)
    found = by_name(doctor_job.examine_gpus(NO_MPI, quick=False))
    assert "1 GPU: NVIDIA H200, 143771 MiB; driver 580.1, CUDA 13" in found["gpu.driver"].text
    assert found["gpu.cupy"].verdict is NOTE
    assert found["gpu.cupy"].fix.endswith("-m pip install 'cupy-cuda13x[ctk]>=14'")
    assert "gpu.cuda_aware" not in found


def test_no_gpu(monkeypatch, programs):
    with_cupy(monkeypatch)
    assert list(doctor_job.examine_gpus(NO_MPI, quick=False)) == []
    programs("nvidia-smi", "NVIDIA-SMI has failed", code=9)
    assert by_name(doctor_job.examine_gpus(NO_MPI, quick=True))["gpu.driver"].verdict is NOTE


def test_cupy_twice_and_cupy_that_does_not_compute(monkeypatch, programs, answers):
    programs("nvidia-smi", SMI)
    with_cupy(monkeypatch, "cupy-cuda12x", "cupy-cuda13x")
    found = by_name(doctor_job.examine_gpus(NO_MPI, quick=True))["gpu.cupy"]
    assert found.verdict is PROBLEM
    assert "pip uninstall -y cupy-cuda12x && " in found.fix
    assert found.fix.endswith("--force-reinstall 'cupy-cuda13x[ctk]>=14'")
    with_cupy(monkeypatch, "cupy-cuda12x")
    driver = [Answer(0, SMI, "", 1)] * 2
    broken = Answer(1, "", "RuntimeError: Failed to find CUDA headers\n", 60)
    answers(doctor_job, *driver, broken)
    found = by_name(doctor_job.examine_gpus(NO_MPI, quick=True))["gpu.cupy"]
    assert "cupy-cuda12x 13.6 does not compute: RuntimeError: Failed to find CUDA" in found.text
    assert "uninstall -y cupy-cuda12x" in found.fix
    assert found.fix.endswith("install 'cupy-cuda13x[ctk]>=14'")


RIGHT, WRONG = True, False
CRASH = Answer(139, "", SAID["crash"], 30)


@pytest.mark.parametrize(
    ("replies", "variable", "verdict", "fix"),
    [
        ([RIGHT] * 5, None, NOTE, "export MPISHARD_CUDA_AWARE=1"),
        ([RIGHT] * 5, "1", OK, None),
        ([CRASH] * 5, None, OK, None),
        # mpishard gives MPI messages alone: Open MPI has no non-blocking collectives of GPU memory.
        ([CRASH, CRASH, WRONG, CRASH, RIGHT], "1", OK, None),
        ([RIGHT, RIGHT, RIGHT, RIGHT, WRONG], "1", PROBLEM, "unset MPISHARD_CUDA_AWARE"),
        ([RIGHT, RIGHT, RIGHT, RIGHT, CRASH], None, OK, None),
    ],
)
def test_operations_on_gpu_memory(monkeypatch, programs, replies, variable, verdict, fix, answers):
    launcher = Launcher(programs("mpiexec", HYDRA_SAYS), MPICH)
    programs("nvidia-smi", SMI)
    with_cupy(monkeypatch, "cupy-cuda13x")
    if variable:
        monkeypatch.setenv("MPISHARD_CUDA_AWARE", variable)
    cupy = {"runtime": 13000, "driver": 13000, "memory": [2**37]}
    asked = answers(doctor_job, *[Answer(0, SMI, "", 1)] * 2, cupy, *replies)
    found = by_name(doctor_job.examine_gpus(MPIInstallation(MPICH, launcher), quick=False))
    assert found["gpu.cupy"].text == "cupy-cuda13x 13.6 computes on 1 GPU (128 GiB)"
    assert [command[-1] for command, _ in asked[3:]] == list(doctor_job._OPERATIONS)
    assert (found["gpu.cuda_aware"].verdict, found["gpu.cuda_aware"].fix) == (verdict, fix)
    works = [reply is RIGHT for reply in replies]
    assert list(found["gpu.cuda_aware"].value.values()) == works


# -------------------------------------------------------------------------------------------- SLURM

NEW = (
    "MPI plugin types are...\n\tnone\n\tpmi2\n\tpmix\n"
    "specific pmix plugin versions available: pmix_v4,pmix_v5"
)
OLD = "srun: MPI types are...\nsrun: cray_shasta\nsrun: pmi2\nsrun: none"


def test_plugins():
    assert doctor_mpi.listed_plugins(NEW) == ["none", "pmi2", "pmix", "pmix_v4", "pmix_v5"]
    assert doctor_mpi.listed_plugins(OLD) == ["cray_shasta", "pmi2", "none"]


@pytest.mark.parametrize(
    ("version", "listed", "fitting"),
    [
        ("Open MPI v5.0.11", ["pmi2", "pmix"], ["pmix"]),
        ("MPICH Version: 5", ["pmix", "none", "cray_shasta", "pmi2"], ["pmi2"]),  # SLURM of Debian
        ("MPICH Version: 5 --with-pmix", ["pmix", "pmi2"], ["pmi2", "pmix"]),
        ("CRAY MPICH version 8.1.29", ["pmi2", "cray_shasta"], ["cray_shasta", "pmi2"]),
        ("Intel(R) MPI Library 2021.9", ["none"], []),
    ],
)
def test_plugins_that_fit(version, listed, fitting):
    assert doctor_mpi.fitting_plugins(MPILibrary(version), listed) == fitting


@pytest.mark.parametrize(
    ("library", "listed", "default", "chosen", "verdict", "fix"),
    [
        (MPICH, NEW, "none", None, NOTE, "export SLURM_MPI_TYPE=pmi2"),
        (MPICH, NEW, "pmi2", None, OK, None),
        (OPEN_MPI, NEW, "pmi2", None, NOTE, "export SLURM_MPI_TYPE=pmix"),
        (OPEN_MPI, NEW, "pmi2", "pmix_v5", OK, None),
        (OPEN_MPI, OLD, "pmi2", None, PROBLEM, "--no-binary mpi4py mpi4py"),
        (MPICH, "", "none", None, NOTE, "export SLURM_MPI_TYPE=pmi2  # the usual one"),
    ],
)
def test_the_plugin_of_a_cluster(
    monkeypatch, programs, library, listed, default, chosen, verdict, fix
):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    if chosen:
        monkeypatch.setenv("SLURM_MPI_TYPE", chosen)
    programs("srun", listed)
    programs("scontrol", f"Configuration data\nMpiDefault              = {default}\nX = 1")
    found = by_name(doctor_mpi.examine_slurm(MPIInstallation(library), quick=True))
    assert found["slurm.plugin"].verdict is verdict
    assert (found["slurm.plugin"].fix or "").endswith(fix or "")


RIGHT_SUMS = Answer(0, answer_line({"hosts": "node[2-3]"}), "", 60)
NO_PMIX = "srun: error: Task launch for StepId=13.0 failed on node node2: Unspecified error\n"
NOT_NOW = "srun: error: Unable to allocate resources: Requested nodes are busy\n"


@pytest.mark.parametrize(
    ("trial", "verdict", "words", "fix"),
    [
        (RIGHT_SUMS, OK, "on node[2-3] start with --mpi=pmix", ""),
        (Answer(1, "", NO_PMIX, 60), PROBLEM, "2 nodes (node2 among them) do not", "libpmix-dev"),
        (Answer(1, "", NOT_NOW, 60), NOTE, "was not tried: 2 nodes could not be had", "salloc"),
    ],
)
def test_the_plugin_on_two_nodes(monkeypatch, programs, answers, trial, verdict, words, fix):
    monkeypatch.delenv("SLURM_JOB_NUM_NODES", raising=False)
    programs("srun", "")
    asked = answers(doctor_mpi, Answer(0, NEW, "", 20), trial)
    found = by_name(doctor_mpi.examine_slurm(MPIInstallation(OPEN_MPI), quick=False))
    assert asked[1][0][1:4] == ["--mpi=pmix", "--nodes=2", "--ntasks=2"]
    two_nodes = found["slurm.two_nodes"]
    assert (two_nodes.verdict, words in two_nodes.text) == (verdict, True)
    assert fix in (two_nodes.fix or "")


def test_an_allocation_without_srun(monkeypatch, programs):
    assert list(doctor_mpi.examine_slurm(NO_MPI, quick=False)) == []
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    found = by_name(doctor_mpi.examine_slurm(NO_MPI, quick=False))
    assert found["slurm.allocation"].verdict is NOTE


# NumPy as CuPy, and ranks that try every operation in one job: on GPUs each has its own.
FAKE_CUPY = """
from numpy import *
class cuda:
    class Device:
        def __init__(self, number): assert number == 0
        def use(self): pass
    class runtime:
        def getDeviceCount(): return 1
    class stream:
        def synchronize(): pass
    def get_current_stream(): return cuda.stream
def asnumpy(array): return array
"""
TRY_ALL = """
import sys, cupy
from mpishard.cli.doctor import job as doctor_job
for operation in doctor_job._OPERATIONS:
    sys.argv[1:] = [operation]
    doctor_job.main()
from mpi4py import MPI
right = cupy.asnumpy
cupy.asnumpy = lambda array: right(array) + MPI.COMM_WORLD.rank
doctor_job.main()
"""


@pytest.mark.spawned
def test_operations_on_memory_that_mpi_can_read(tmp_path):
    pytest.importorskip("mpi4py")
    mpiexec = shutil.which("mpiexec", path=Path(sys.executable).parent) or shutil.which("mpiexec")
    if mpiexec is None:
        pytest.skip("needs mpiexec")
    (tmp_path / "cupy.py").write_text(FAKE_CUPY)
    variables = {
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    job = ask([mpiexec, "-n", "2", *python_command(TRY_ALL)], 40, outside_launchers(**variables))
    assert job.code == 0, job
    said = [line for line in job.out.splitlines() if line.startswith("mpishard answer: ")]
    assert [line.endswith("true") for line in said] == [True] * 5 + [False]
