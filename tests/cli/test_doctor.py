"""``mpishard doctor``: what it makes of machines, most of them made up, and one whole report."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mpishard.cli import (
    app,
    doctor_causes,
    doctor_gpu,
    doctor_host,
    doctor_job,
    doctor_mpi,
    doctor_numpy,
    doctor_packages,
    doctor_probe,
    doctor_shm,
    doctor_slurm,
)
from mpishard.cli.doctor_causes import why_it_failed
from mpishard.cli.doctor_finding import Finding, Verdict, examined
from mpishard.cli.doctor_mpi import MPIInstallation, look_at_mpi
from mpishard.cli.doctor_probe import Answer, answer_line, ask, python_command
from mpishard.cli.doctor_report import as_json, show_findings, summary
from mpishard.cli.launcher import Launcher, MPIFamily, MPILibrary
from mpishard.communication import arena

OK, NOTE, PROBLEM = Verdict
MPICH = MPILibrary("MPICH Version:      5.0.2", Path("/opt/mpich/lib/libmpi.so"))
OPEN_MPI = MPILibrary("Open MPI v5.0.11, ident: 5.0.11")
HYDRA_SAYS = "HYDRA build details:\n    Version:    5.0.2"
OPEN_MPI_SAYS = "mpiexec (Open MPI) 5.0.11"


@pytest.fixture
def programs(monkeypatch, tmp_path):
    """Puts programs of these names alone on PATH, each of which prints what it is told to."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    for name in ("SLURM_JOB_ID", "SLURM_MPI_TYPE", "CUDA_VISIBLE_DEVICES", "MPISHARD_CUDA_AWARE"):
        monkeypatch.delenv(name, raising=False)

    def add(name, says, code=0):
        path = folder / name
        path.write_text(f"#!/bin/sh\n/bin/cat <<'EOF'\n{says}\nEOF\nexit {code}\n")
        path.chmod(0o755)
        return path

    return add


def by_name(findings):
    found = {finding.name: finding for finding in findings}
    assert all((f.mend is None) == (f.verdict is OK) for f in found.values()), found
    return found


def answers(monkeypatch, module, *replies):
    """Let the probes of ``module`` be answered so, one after the other; returns what was asked."""
    asked, left = [], list(replies)

    def reply(command, limit, variables=None):
        asked.append((list(command), variables))
        found = left.pop(0)
        return found if isinstance(found, Answer) else Answer(0, answer_line(found), "", limit)

    monkeypatch.setattr(module, "ask", reply)
    return asked


# ----------------------------------------------------------------------------------------- probes


def test_an_answer_is_found_among_noise():
    answer = ask(python_command("print('noise'); answer([1, None]); print('more')"), 30)
    assert (answer.code, answer.found) == (0, [1, None])
    failed = ask(python_command("raise SystemExit('all is lost')"), 30)
    assert (failed.code, failed.found, failed.reason) == (1, None, "all is lost")
    killed = ask(python_command("import os; os.kill(os.getpid(), 7)"), 30)
    assert killed.reason == "signal 7 (Bus error) ended it"


# A child in the program's process group; one in a session of its own, that the program ends when
# it is asked to, as a launcher does; and a program that is deaf.
CHILD = """
import signal, subprocess, sys, time
kind, folder = sys.argv[1:]
def end(*_): child.kill(); child.wait(); sys.exit()
if kind == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
child = subprocess.Popen(sleeps, start_new_session=kind == "elsewhere")
if kind == "elsewhere":
    signal.signal(signal.SIGTERM, end)
open(folder + "/pid", "w").write(str(child.pid))
time.sleep(60)
"""


@pytest.mark.parametrize("kind", ["group", "elsewhere", "deaf"])
def test_what_takes_too_long_ends_with_all_that_it_started(monkeypatch, tmp_path, kind):
    monkeypatch.setattr(doctor_probe, "_GRACE_SECONDS", 0.3 if kind == "deaf" else 30)
    answer = ask(python_command(CHILD, kind, str(tmp_path)), 1)
    assert answer.code is None
    assert answer.reason == "it did not end within 1 s"
    child = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_probe_is_outside_the_launchers_job(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("MPICH_NO_LOCAL", "1")
    code = "import os; answer([os.environ.get(n) for n in ('PMI_RANK', 'MPICH_NO_LOCAL', 'X')])"
    assert ask(python_command(code), 30).found == ["1", "1", None]  # nobody's launcher
    monkeypatch.setenv("PMI_SIZE", "2")
    assert ask(python_command(code), 30, {"X": "3"}).found == [None, "1", "3"]
    assert ask(python_command(code), 30, {"MPICH_NO_LOCAL": None}).found == [None, None, None]


def test_what_raises_is_a_finding():
    def look():
        yield Finding("host.python", OK, "3")
        raise ZeroDivisionError("oh")

    first, second = examined("host", look)
    assert first.name == "host.python"
    assert (second.name, second.verdict) == ("host.error", NOTE)
    assert "ZeroDivisionError: oh" in second.text


# ---------------------------------------------------------------------------------------- machine


@pytest.mark.parametrize(
    ("files", "own", "cores"),
    [
        ({"a/cpu.max": "150000 100000", "cpu.max": "max 100000"}, "0::/a/b", 1.5),
        ({"a/cpu.max": "400000 100000", "a/b/cpu.max": "200000 100000"}, "0::/a/b", 2),
        ({"cpu.max": "max 100000"}, "0::/", None),
        ({"cpu/j/cpu.cfs_quota_us": "50000", "cpu/j/cpu.cfs_period_us": "100000"}, "3:cpu:/j", 0.5),
        ({"cpu/j/cpu.cfs_quota_us": "-1", "cpu/j/cpu.cfs_period_us": "100000"}, "3:cpu:/j", None),
        ({"cpu/cpu.cfs_quota_us": "1", "cpu/cpu.cfs_period_us": "2"}, "4:memory:/j", None),
    ],
)
def test_cores_of_a_control_group(tmp_path, files, own, cores):
    write(tmp_path, {**files, "own": own})
    assert doctor_host.core_quota(tmp_path, tmp_path / "own") == cores


def test_memory_of_a_control_group(tmp_path):
    unlimited = doctor_host.available_memory(tmp_path, tmp_path / "own")
    write(tmp_path, {"own": "0::/j", "j/memory.max": "5000", "j/memory.current": "2000"})
    assert doctor_host.available_memory(tmp_path, tmp_path / "own") == (5000, 3000)
    assert unlimited is None or unlimited[0] > 2**24


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")


def test_fewer_cores_than_threads_would_think(monkeypatch):
    monkeypatch.setattr(doctor_host, "core_quota", lambda: 2.5)
    monkeypatch.setattr(doctor_host, "usable_cores", lambda: 8)
    found = by_name(doctor_host.look_at_host())["host.cores"]
    assert (found.verdict, found.mend) == (NOTE, "export OMP_NUM_THREADS=2")


def test_settings_that_ranks_refuse(monkeypatch, programs):
    monkeypatch.setenv("MPISHARD_ARENA", "heap")
    found = by_name(doctor_host.look_at_host())["host.settings"]
    assert (found.verdict, found.mend) == (PROBLEM, "unset MPISHARD_ARENA")
    mpi = MPIInstallation(MPICH, Launcher(programs("mpiexec", HYDRA_SAYS), MPICH))
    (job,) = doctor_job.look_at_a_job(mpi)
    assert "not tried" in job.text


@pytest.mark.parametrize(("hard", "mend"), [(2**20, "ulimit -n 4096"), (256, "limits.conf")])
def test_few_open_files(monkeypatch, hard, mend):
    monkeypatch.setattr(doctor_host.resource, "getrlimit", lambda _: (256, hard))
    found = by_name(doctor_host.look_at_host())["host.open_files"]
    assert found.verdict is NOTE
    assert mend in found.mend


# ------------------------------------------------------------------------------------------ NumPy

HASWELL = {
    "internal_api": "openblas", "version": "0.3", "filepath": "/l.so", "architecture": "Haswell",
    "num_threads": 2, "user_api": "blas",
}  # fmt: skip


def rates(float32):
    return {"1": {"float32": float32, "float64": float32 / 2}}


def test_a_faster_kernel_is_named_and_measured(monkeypatch):
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    monkeypatch.setattr(doctor_numpy, "better_kernel", lambda loaded: "SkylakeX")
    asked = answers(monkeypatch, doctor_numpy, HASWELL, rates(122), rates(235))
    found = by_name(doctor_numpy.look_at_numpy(quick=False))
    assert asked[2][1] == {"OPENBLAS_CORETYPE": "SkylakeX"}
    assert found["numpy.kernel"].mend == "export OPENBLAS_CORETYPE=SkylakeX"
    assert "235 instead of 122 GFLOP/s" in found["numpy.kernel"].text
    assert "122 and 61 GFLOP/s on 1 thread" in found["numpy.speed"].text


@pytest.mark.parametrize(("without", "verdict"), [(110, OK), (500, NOTE)])
def test_a_kernel_of_the_users_choice(monkeypatch, without, verdict):
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    own = {**HASWELL, "architecture": "SkylakeX"}
    asked = answers(monkeypatch, doctor_numpy, HASWELL, rates(100), own, rates(without))
    found = by_name(doctor_numpy.look_at_numpy(quick=False))["numpy.kernel"]
    assert [variables for _, variables in asked[2:]] == [{"OPENBLAS_CORETYPE": None}] * 2
    assert found.verdict is verdict
    assert found.mend == ("unset OPENBLAS_CORETYPE" if verdict is NOTE else None)


def test_more_threads_than_cores(monkeypatch):
    monkeypatch.setattr(doctor_numpy, "usable_cores", lambda: 2)
    monkeypatch.setattr(doctor_numpy, "core_quota", lambda: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    answers(monkeypatch, doctor_numpy, {**HASWELL, "internal_api": "mkl", "num_threads": 8})
    found = by_name(doctor_numpy.look_at_numpy(quick=True))
    assert found["numpy.threads"].mend == "export OMP_NUM_THREADS=2"
    assert "from OMP_NUM_THREADS=8" in found["numpy.threads"].text
    assert "numpy.speed" not in found


def test_numpy_without_a_library_and_numpy_that_does_not_load(monkeypatch):
    answers(monkeypatch, doctor_numpy, None)
    assert by_name(doctor_numpy.look_at_numpy(quick=True))["numpy.blas"].verdict is NOTE
    answers(monkeypatch, doctor_numpy, Answer(1, "", "ImportError: libgfortran.so.5\n", 30))
    found = by_name(doctor_numpy.look_at_numpy(quick=True))["numpy.blas"]
    assert found.verdict is PROBLEM
    assert "libgfortran" in found.text


# -------------------------------------------------------------------------------------------- MPI


def test_a_strangers_launcher_first_on_path(monkeypatch, programs, tmp_path):
    stranger = programs("mpiexec", OPEN_MPI_SAYS)
    own = tmp_path / "mpich/bin/mpiexec"
    write(tmp_path, {"mpich/bin/mpiexec": f"#!/bin/sh\n/bin/echo '{HYDRA_SAYS}'"})
    asked = answers(monkeypatch, doctor_mpi, {"level": "MULTIPLE", "agrees": True})
    found = by_name(look_at_mpi(MPIInstallation(MPICH, Launcher(own, MPICH))))
    assert found["mpi.mpiexec"].verdict is NOTE
    assert f"{stranger}, is Open MPI, and mpi4py loads MPICH 5.0.2" in found["mpi.mpiexec"].text
    assert found["mpi.mpiexec"].mend == f'export PATH={own.parent}:"$PATH"'
    assert "mpi.mpirun" not in found
    assert found["mpi.ulfm"].value is False  # its launcher ends the job
    assert asked[0][0][:3] == [str(own), "-n", "1"]
    programs("mpiexec", HYDRA_SAYS)
    answers(monkeypatch, doctor_mpi, {"level": "FUNNELED", "agrees": True})
    found = by_name(look_at_mpi(MPIInstallation(MPICH, Launcher(own, MPICH))))
    assert found["mpi.mpiexec"].verdict is OK
    assert "MPI_THREAD_FUNNELED and not MULTIPLE" in found["mpi.threads"].text


@pytest.mark.parametrize("knows_ulfm", [True, False])
def test_open_mpi_as_root(monkeypatch, programs, knows_ulfm):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.delenv("OMPI_ALLOW_RUN_AS_ROOT", raising=False)
    mpi = MPIInstallation(OPEN_MPI, Launcher(programs("mpiexec", OPEN_MPI_SAYS), OPEN_MPI))
    level = {"level": "MULTIPLE", "agrees": True}
    refused = Answer(1, "", "unrecognized option --with-ft\n", 20)
    asked = answers(monkeypatch, doctor_mpi, *([level] if knows_ulfm else [refused, level]))
    found = by_name(look_at_mpi(mpi))
    assert found["mpi.launcher"].mend == (
        "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
    )
    assert asked[0][0][1:3] == ["--with-ft", "ulfm"]
    assert found["mpi.ulfm"].value is knows_ulfm


def test_mpi_that_is_not_there(monkeypatch, programs):
    mpi = MPIInstallation(None, None, "mpi4py cannot be used here: ImportError: libmpi.so.40")
    found = by_name(look_at_mpi(mpi))
    if "mpi.mpi4py" in found and found["mpi.mpi4py"].value is not None:
        assert found["mpi.mpi4py"].verdict is PROBLEM
        assert "no MPI: ImportError: libmpi.so.40" in found["mpi.mpi4py"].text

    def missing(_):
        raise doctor_mpi.PackageNotFoundError

    monkeypatch.setattr(doctor_mpi, "version", missing)
    found = by_name(look_at_mpi(mpi))["mpi.mpi4py"]
    assert (found.verdict, found.mend[-24:]) == (NOTE, "pip install mpi4py mpich")
    monkeypatch.setenv("SLURM_JOB_ID", "17")  # where ranks are wanted, with the site's own MPI
    found = by_name(look_at_mpi(mpi))["mpi.mpi4py"]
    assert (found.verdict, found.mend[-18:]) == (PROBLEM, "pip install mpi4py")
    (job,) = doctor_job.look_at_a_job(mpi)
    assert job.text.startswith("not tried")


# What the libraries really say.
SAID = {
    "root": "prterun has detected an attempt to run as root.\nYou can override\n",
    "bus": "=   EXIT CODE: 7\nYOUR APPLICATION ENDED WITH THE EXIT STRING: Bus error (signal 7)",
    "read-only": "UCX  ERROR   shm_open(file_name=/ucx_shm flags=0xc2) failed: Read-only file",
    "crash": "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Segmentation fault (signal 11)\n",
    "world": "mpishard.errors.MPIUnavailableError: the library sees a world of one. Mend: start\n",
    "name": "getaddrinfo failed: Name or service not known\n",
    "busy": "srun: Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)\n",
    "plugin": "srun: error: Invalid MPI type 'pmi9', --mpi=list for acceptable types\n",
    "other": "Traceback\n  File x\nValueError: the sum is wrong\n=====\nBAD TERMINATION\n=====\n",
}


@pytest.mark.parametrize(
    ("said", "text", "mend"),
    [
        ("root", "refuses to run as root", "export OMPI_ALLOW_RUN_AS_ROOT=1"),
        ("bus", "no room there", "shm"),
        ("read-only", "may not write", "shm"),
        ("world", "each rank found itself alone", "mpishard doctor --quick"),
        ("name", "has no address", "/etc/hosts"),
        ("busy", "no cores left", "export SLURM_OVERLAP=1"),
        ("plugin", "has not the plugin", "unset SLURM_MPI_TYPE"),
        ("other", "ValueError: the sum is wrong", "mpiexec -n 2 p"),
        ("crash", "Segmentation fault (signal 11)", "mpiexec -n 2 p"),
    ],
)
def test_causes(monkeypatch, said, text, mend):
    monkeypatch.setattr(doctor_causes, "free_bytes", lambda: 2**33)
    cause = why_it_failed(Answer(1, "", SAID[said], 30), ["mpiexec", "-n", "2", "p"])
    assert text in cause.text
    assert mend in cause.mend


def test_a_crash_with_little_shared_memory_is_for_want_of_it(monkeypatch):
    monkeypatch.setattr(doctor_causes, "free_bytes", lambda: 16 * 2**20)
    cause = why_it_failed(Answer(11, "", SAID["crash"], 30), ["mpiexec"])
    assert "/dev/shm" in cause.text
    late = why_it_failed(Answer(None, "", "", 30), ["mpiexec", "p"])
    assert late == ("it did not end within 30 s", "mpiexec p")


def test_a_job_that_fails_and_one_that_ends_badly(monkeypatch, programs):
    mpi = MPIInstallation(MPICH, Launcher(programs("mpiexec", HYDRA_SAYS), MPICH))
    answers(monkeypatch, doctor_job, Answer(1, "", SAID["other"], 30))
    found = by_name(doctor_job.look_at_a_job(mpi))["job.round_trip"]
    assert found.verdict is PROBLEM
    assert "do not talk to each other: ValueError" in found.text
    answers(monkeypatch, doctor_job, Answer(11, answer_line({}), "", 30))
    found = by_name(doctor_job.look_at_a_job(mpi))["job.round_trip"]
    assert (found.verdict, "do not end well" in found.text) == (PROBLEM, True)


@pytest.mark.parametrize(
    ("variable", "works", "taken", "verdict", "mend"),
    [
        ("auto", ["file", "window"], "file", OK, None),
        ("off", ["memfd"], None, NOTE, "unset MPISHARD_ARENA"),
        ("memfd", ["file"], None, NOTE, "unset MPISHARD_ARENA"),
        ("auto", [], None, NOTE, doctor_shm.larger_folder()),
    ],
)
def test_where_shared_memory_is_from(monkeypatch, programs, variable, works, taken, verdict, mend):
    monkeypatch.setenv("MPISHARD_ARENA", variable)
    mpi = MPIInstallation(MPICH, Launcher(programs("mpiexec", HYDRA_SAYS), MPICH))
    reply = {
        "world_size": 2, "nodes": 1, "barrier": 2e-6, "arena": None,
        "messages": {str(nbytes): 1e-3 for nbytes in doctor_job.SIZES},
        "sources": {source: source in works for source in doctor_job.SOURCES},
    }  # fmt: skip
    answers(monkeypatch, doctor_job, reply)
    found = by_name(doctor_job.look_at_a_job(mpi))
    assert found["job.arena"].value["taken"] == taken
    assert (found["job.arena"].verdict, found["job.arena"].mend) == (verdict, mend)
    assert "64 MiB 1.00 ms (67 GB/s)" in found["job.all_reduce"].text


def test_sources_are_those_of_the_arena():
    assert tuple(arena._SOURCES) == doctor_job.SOURCES


# ---------------------------------------------------------------------------------- shared memory


def test_leftovers_are_old_unmapped_and_of_jobs(tmp_path):
    folder, processes = tmp_path / "shm", tmp_path / "proc"
    names = ["mpich_shm_dead_0", "mpich_shm_live_0", "sm_segment.new", "mpishard-arena-x", "other"]
    write(folder, dict.fromkeys(names, "x"))
    for name in names:
        if name != "sm_segment.new":  # a file's status changes with its times: see below
            os.utime(folder / name, (0, 0))
    inode = (folder / "mpich_shm_live_0").stat().st_ino
    # The same file under another name's inode is another file.
    maps = (
        "7f00-7f01 rw-s 00000000 00:18 1 /dev/shm/mpich_shm_dead_0 (deleted)\n"
        f"7f01-7f02 rw-s 00000000 00:18 {inode}                 {folder}/mpich_shm_live_0\n"
        "7f02-7f03 rw-p 00000000 00:00 0 [heap]\n7f03-7f04 rw-p 00000000 00:00 0\n"
    )
    write(processes, {"12/maps": maps, "self/maps": ""})
    now = time.time()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor_shm.time, "time", lambda: now + 120)
        os.utime(folder / "sm_segment.new", (now + 100, now + 100))
        dead = doctor_shm.leftovers(folder, processes)
    assert [path.name for path in dead] == ["mpich_shm_dead_0", "mpishard-arena-x"]


def test_leftovers_are_named_in_the_line_that_removes_them(monkeypatch, tmp_path):
    write(tmp_path, {f"mpich_shm_{number}_0": "12345" for number in range(25)})
    dead = sorted(tmp_path.glob("mpich*"))
    monkeypatch.setattr(doctor_shm, "FOLDER", tmp_path)
    monkeypatch.setattr(doctor_shm, "leftovers", lambda: dead)
    found = by_name(doctor_shm.look_at_shared_memory())["memory.leftovers"]
    assert len(found.value["files"]) == 25
    subprocess.run(["sh", "-c", found.mend], check=True)
    assert len(list(tmp_path.iterdir())) == 5  # the line is for the first 20


@pytest.mark.parametrize(
    ("free", "writable", "verdict"),
    [(2**30, True, OK), (2**24, True, NOTE), (2**30, False, PROBLEM)],
)
def test_a_folder_that_is_small_or_closed(monkeypatch, tmp_path, free, writable, verdict):
    def refuse(**_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(doctor_shm, "FOLDER", tmp_path)
    monkeypatch.setattr(doctor_shm, "free_bytes", lambda: free)
    if not writable:
        monkeypatch.setattr(doctor_shm.tempfile, "TemporaryFile", refuse)
    answers(monkeypatch, doctor_shm, "mpishard")
    found = by_name(doctor_shm.look_at_shared_memory())
    assert found["memory.folder"].verdict is verdict
    assert found["memory.memfd"].verdict is OK


def test_memory_that_others_cannot_open(monkeypatch):
    answers(monkeypatch, doctor_shm, Answer(1, "", "PermissionError: /proc/1/fd/3\n", 10))
    found = by_name(doctor_shm.look_at_shared_memory())["memory.memfd"]
    assert (found.verdict, found.value) == (NOTE, False)
    assert "PermissionError" in found.text


# ------------------------------------------------------------------------------------------- GPUs

NO_MPI = MPIInstallation()
SMI = "NVIDIA H200, 143771 MiB, 580.1\n| NVIDIA-SMI 580.1   CUDA Version: 13.0 |"


class Installed:
    def __init__(self, name, version):
        self.name, self.version = name, version


def with_cupy(monkeypatch, *packages):
    found = [Installed("numpy", "2"), *(Installed(name, "13.6") for name in packages)]
    monkeypatch.setattr(doctor_gpu, "distributions", lambda: found)


def test_a_gpu_without_cupy(monkeypatch, programs):
    with_cupy(monkeypatch)
    programs("nvidia-smi", SMI)
    found = by_name(doctor_gpu.look_at_gpus(NO_MPI, quick=False))
    assert "1 GPU: NVIDIA H200, 143771 MiB; driver 580.1, CUDA 13" in found["gpu.driver"].text
    assert found["gpu.cupy"].verdict is NOTE
    assert found["gpu.cupy"].mend.endswith("-m pip install 'cupy-cuda13x[ctk]'")
    assert found["gpu.cuda_aware"].text == "not tested: no GPU"


def test_no_gpu(monkeypatch, programs):
    with_cupy(monkeypatch)
    assert {f.verdict for f in doctor_gpu.look_at_gpus(NO_MPI, quick=False)} == {OK}
    programs("nvidia-smi", "NVIDIA-SMI has failed", code=9)
    assert by_name(doctor_gpu.look_at_gpus(NO_MPI, quick=True))["gpu.driver"].verdict is NOTE


def test_cupy_twice_and_cupy_that_does_not_compute(monkeypatch, programs):
    programs("nvidia-smi", SMI)
    with_cupy(monkeypatch, "cupy-cuda12x", "cupy-cuda13x")
    found = by_name(doctor_gpu.look_at_gpus(NO_MPI, quick=True))["gpu.cupy"]
    assert found.verdict is PROBLEM
    assert "pip uninstall -y cupy-cuda12x && " in found.mend
    with_cupy(monkeypatch, "cupy-cuda12x")
    driver = [Answer(0, SMI, "", 1)] * 2
    broken = Answer(1, "", "ImportError: libnvrtc.so.12: cannot open\n", 60)
    answers(monkeypatch, doctor_gpu, *driver, broken)
    found = by_name(doctor_gpu.look_at_gpus(NO_MPI, quick=True))["gpu.cupy"]
    assert "libnvrtc.so.12" in found.text
    assert "uninstall -y cupy-cuda12x" in found.mend
    assert found.mend.endswith("install 'cupy-cuda13x[ctk]'")


RIGHT, WRONG = True, False
CRASH = Answer(139, "", SAID["crash"], 30)


@pytest.mark.parametrize(
    ("replies", "variable", "verdict", "mend"),
    [
        ([RIGHT] * 5, None, NOTE, "export MPISHARD_CUDA_AWARE=1"),
        ([RIGHT] * 5, "1", OK, None),
        ([CRASH] * 5, None, OK, None),
        ([RIGHT, CRASH, RIGHT, RIGHT, RIGHT], "1", PROBLEM, "unset MPISHARD_CUDA_AWARE"),
        # mpishard reduces by itself, and sends from host memory.
        ([CRASH, RIGHT, RIGHT, RIGHT, WRONG], "1", OK, None),
    ],
)
def test_operations_on_gpu_memory(monkeypatch, programs, replies, variable, verdict, mend):
    launcher = Launcher(programs("mpiexec", HYDRA_SAYS), MPICH)
    programs("nvidia-smi", SMI)
    with_cupy(monkeypatch, "cupy-cuda13x")
    if variable:
        monkeypatch.setenv("MPISHARD_CUDA_AWARE", variable)
    cupy = {"runtime": 13000, "driver": 13000, "memory": [2**37]}
    asked = answers(monkeypatch, doctor_gpu, *[Answer(0, SMI, "", 1)] * 2, cupy, *replies)
    found = by_name(doctor_gpu.look_at_gpus(MPIInstallation(MPICH, launcher), quick=False))
    assert found["gpu.cupy"].text == "cupy-cuda13x 13.6 computes on 1 GPU (128 GiB)"
    assert [command[-1] for command, _ in asked[3:]] == list(doctor_gpu._OPERATIONS)
    assert (found["gpu.cuda_aware"].verdict, found["gpu.cuda_aware"].mend) == (verdict, mend)
    works = [reply is RIGHT for reply in replies]
    assert list(found["gpu.cuda_aware"].value.values()) == works


# ------------------------------------------------------------------------------------------ SLURM

NEW = (
    "MPI plugin types are...\n\tnone\n\tpmi2\n\tpmix\n"
    "specific pmix plugin versions available: pmix_v4,pmix_v5"
)
OLD = "srun: MPI types are...\nsrun: cray_shasta\nsrun: pmi2\nsrun: none"


def test_plugins():
    assert doctor_slurm.listed_plugins(NEW) == ["none", "pmi2", "pmix", "pmix_v4", "pmix_v5"]
    assert doctor_slurm.listed_plugins(OLD) == ["cray_shasta", "pmi2", "none"]
    fitting = doctor_slurm.fitting_plugins
    assert fitting(MPIFamily.OPEN_MPI, ["pmi2", "pmix"]) == ["pmix"]
    assert fitting(MPIFamily.MPICH, ["none", "pmi2", "cray_shasta"]) == ["cray_shasta", "pmi2"]
    assert fitting(MPIFamily.INTEL, ["none"]) == []


@pytest.mark.parametrize(
    ("library", "listed", "default", "chosen", "verdict", "mend"),
    [
        (MPICH, NEW, "none", None, NOTE, "export SLURM_MPI_TYPE=pmi2"),
        (MPICH, NEW, "pmi2", None, OK, None),
        (OPEN_MPI, NEW, "pmi2", None, NOTE, "export SLURM_MPI_TYPE=pmix"),
        (OPEN_MPI, NEW, "pmi2", "pmix_v5", OK, None),
        (OPEN_MPI, OLD, "pmi2", None, PROBLEM, "--no-binary mpi4py mpi4py"),
        (MPICH, "", "none", None, NOTE, "srun --mpi=list"),
    ],
)
def test_the_plugin_of_a_cluster(
    monkeypatch, programs, library, listed, default, chosen, verdict, mend
):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    if chosen:
        monkeypatch.setenv("SLURM_MPI_TYPE", chosen)
    programs("srun", listed)
    programs("scontrol", f"Configuration data\nMpiDefault              = {default}\nX = 1")
    found = by_name(doctor_slurm.look_at_slurm(MPIInstallation(library)))
    assert found["slurm.allocation"].value == "17"
    assert found["slurm.plugin"].verdict is verdict
    assert (found["slurm.plugin"].mend or "").endswith(mend or "")


def test_an_allocation_without_srun(monkeypatch, programs):
    assert next(doctor_slurm.look_at_slurm(NO_MPI)).verdict is OK
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert by_name(doctor_slurm.look_at_slurm(NO_MPI))["slurm.allocation"].verdict is NOTE


def test_packages(monkeypatch):
    monkeypatch.setattr(doctor_packages, "version", {"numba": "0.61", "h5py": "3"}.__getitem__)
    monkeypatch.setattr(doctor_packages, "PackageNotFoundError", KeyError)
    answers(monkeypatch, doctor_packages, Answer(1, "", "ImportError: Numba needs NumPy 2.2\n", 1))
    found = by_name(doctor_packages.look_at_packages())
    assert found["packages.h5py"].value == "3"
    assert found["packages.jax"].value is None
    assert found["packages.numba"].verdict is NOTE
    assert "Numba needs NumPy 2.2" in found["packages.numba"].text


# ----------------------------------------------------------------------------------------- report


def test_lines_for_people(capsys):
    long = "/a/folder/with/a/name/that/is/long/enough/to/be/wrapped/if/it/were/wrapped/" + "x" * 40
    findings = [
        Finding("host.python", OK, "3.11 " + "word " * 20),
        Finding("mpi.mpiexec", NOTE, "a stranger", None, f"export PATH={long}"),
        Finding("mpi.library", PROBLEM, long, None, "pip install"),
    ]
    assert show_findings(iter(findings)) == findings
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Python and this machine"
    assert lines[1].startswith("  ok       python        3.11 word")
    assert f"           mend: export PATH={long}" in lines  # to be copied whole
    assert f"  problem  library       {long}" in lines
    assert all(len(line) <= 80 for line in lines if long not in line)
    assert lines.count("MPI") == 1
    assert lines[-1] == "1 problem (mpi.library), 1 note (mpi.mpiexec)"


def test_json_counts():
    report = json.loads(
        as_json([Finding("a.b", NOTE, "t", {"x": 1}, "m"), Finding("a.c", OK, "u")])
    )
    assert (report["schema"], report["problems"], report["notes"]) == (1, 0, 1)
    assert report["findings"][0] == {
        "name": "a.b", "verdict": "note", "text": "t", "value": {"x": 1}, "mend": "m",
    }  # fmt: skip
    assert summary([]) == "0 problems, 0 notes"


def test_one_rank_speaks_under_a_launcher(monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "1")
    result = CliRunner().invoke(app, ["doctor"])
    assert (result.exit_code, result.output) == (0, "")


@pytest.mark.parametrize(("verdict", "code"), [(NOTE, 0), (PROBLEM, 1)])
def test_exit_code(monkeypatch, verdict, code):
    import mpishard.cli.doctor  # noqa: F401

    module = sys.modules["mpishard.cli.doctor"]
    monkeypatch.setattr(
        module, "_findings", lambda quick: iter([Finding("host.x", verdict, "t", None, "m")])
    )
    for options in (["--json"], ["--quick"]):
        assert CliRunner().invoke(app, ["doctor", *options]).exit_code == code


# -------------------------------------------------------------------------------------- processes


def environment(**extra):
    launchers = ("PMI", "OMPI_", "PMIX", "SLURM_", "HYDI", "MPICH_", "MPISHARD_")
    return {k: v for k, v in os.environ.items() if not k.startswith(launchers)} | extra


@pytest.mark.spawned
def test_the_whole_report():
    job = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "mpishard", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=55,
        env=environment(),
        check=False,
    )
    report = json.loads(job.stdout)
    found = {finding["name"]: finding for finding in report["findings"]}
    assert len(found) == len(report["findings"])
    assert not [name for name in found if name.endswith(".error")]
    for finding in report["findings"]:
        assert finding.keys() == {"name", "verdict", "text", "value", "mend"}
        assert finding["verdict"] in {"ok", "note", "problem"}
        assert (finding["mend"] is None) == (finding["verdict"] == "ok"), finding
    assert job.returncode == (1 if report["problems"] else 0)
    assert {name.partition(".")[0] for name in found} == {
        "host", "numpy", "mpi", "memory", "job", "gpu", "slurm", "packages",
    }  # fmt: skip
    assert found["numpy.speed"]["value"]["1"]["float32"] > 0.1
    # The probes printed their imports into files of their own.
    assert "mpi4py.MPI" not in job.stderr
    if "mpi.launcher" in found and found["mpi.launcher"]["value"]:
        assert found["mpi.threads"]["value"] == "MULTIPLE"
        assert found["job.round_trip"]["value"] == {"world_size": 2, "nodes": 1}
        assert found["job.all_reduce"]["value"]["messages"].keys() == {"8", "1048576", "67108864"}
        assert found["job.arena"]["value"]["taken"] is not None


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
from mpishard.cli import doctor_cuda_rank, doctor_gpu
for operation in doctor_gpu._OPERATIONS:
    sys.argv[1:] = [operation]
    doctor_cuda_rank.main()
right = cupy.asnumpy
cupy.asnumpy = lambda array: right(array) + 1
doctor_cuda_rank.main()
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
    job = ask([mpiexec, "-n", "2", *python_command(TRY_ALL)], 40, environment(**variables))
    assert job.code == 0, job
    said = [line for line in job.out.splitlines() if line.startswith("mpishard doctor: ")]
    assert [line.endswith("true") for line in said] == [True] * 5 + [False]
