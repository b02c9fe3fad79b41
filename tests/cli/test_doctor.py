"""``mpishard doctor``: findings on simulated machines, and one whole report of this one."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from spawned_jobs import outside_launchers
from typer.testing import CliRunner

from mpishard.base import memory, products
from mpishard.base.onednn import processor_has_unit
from mpishard.cli import app, machine
from mpishard.cli import probe as doctor_probe
from mpishard.cli.doctor import command as doctor
from mpishard.cli.doctor import host as doctor_host
from mpishard.cli.doctor.finding import (
    Finding,
    Verdict,
    as_json,
    examined,
    show_findings,
    summary,
)
from mpishard.cli.probe import Answer, answer_line, ask, python_command
from mpishard.cli.run import shared_memory

OK, NOTE, PROBLEM = Verdict


def by_name(findings):
    found = {finding.name: finding for finding in findings}
    assert all((f.fix is None) == (f.verdict is OK) for f in found.values()), found
    return found


# ------------------------------------------------------------------------------------------- probes


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
import os, signal, subprocess, sys, time
kind, folder = sys.argv[1:]
def end(*_): child.kill(); child.wait(); sys.exit()
if kind == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
child = subprocess.Popen(sleeps, start_new_session=kind == "elsewhere")
if kind == "elsewhere":
    signal.signal(signal.SIGTERM, end)
open(folder + "/new", "w").write(str(child.pid))
os.rename(folder + "/new", folder + "/pid")
time.sleep(60)
"""


@pytest.mark.parametrize("kind", ["group", "elsewhere", "deaf"])
def test_a_program_past_its_limit_ends_with_its_children(monkeypatch, tmp_path, kind):
    monkeypatch.setattr(doctor_probe, "_GRACE_SECONDS", 0.3 if kind == "deaf" else 30)
    for limit in (1, 5, 25):  # busy machines take long to start a program
        answer = ask(python_command(CHILD, kind, str(tmp_path)), limit)
        assert answer.code is None
        assert answer.reason == f"it did not end within {limit} s"
        if (tmp_path / "pid").exists():
            break
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


def test_an_exception_becomes_a_finding():
    def look():
        yield Finding("host.python", "3")
        raise ZeroDivisionError("oh")

    first, second = examined("host", look())
    assert first.name == "host.python"
    assert (second.name, second.verdict) == ("host.error", NOTE)
    assert "ZeroDivisionError: oh" in second.text


# ------------------------------------------------------------------------------------------ machine


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
    assert machine.core_quota(tmp_path, tmp_path / "own") == cores


def test_memory_of_a_control_group(tmp_path):
    unlimited = memory.available_memory(tmp_path, tmp_path / "own")
    write(tmp_path, {"own": "0::/j", "j/memory.max": "5000", "j/memory.current": "2000"})
    assert memory.available_memory(tmp_path, tmp_path / "own") == (5000, 3000)
    assert unlimited[0] > 2**24


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")


def test_a_core_quota_below_the_cores_is_a_note(monkeypatch):
    monkeypatch.setattr(doctor_host, "core_quota", lambda: 2.5)
    monkeypatch.setattr(doctor_host, "usable_cores", lambda: 8)
    found = by_name(doctor_host.examine_host())["host.cores"]
    assert (found.verdict, found.fix) == (NOTE, "export OMP_NUM_THREADS=2")


@pytest.mark.parametrize(("hard", "fix"), [(2**20, "ulimit -n 4096"), (256, "limits.conf")])
def test_few_open_files(monkeypatch, hard, fix):
    monkeypatch.setattr(doctor_host.resource, "getrlimit", lambda _: (256, hard))
    found = by_name(doctor_host.examine_host())["host.open_files"]
    assert found.verdict is NOTE
    assert fix in found.fix


# -------------------------------------------------------------------------------------------- NumPy

HASWELL = {
    "internal_api": "openblas", "version": "0.3", "filepath": "/l.so", "architecture": "Haswell",
    "num_threads": 2, "user_api": "blas",
}  # fmt: skip


def rates(float32):
    return {"1": {"float32": float32, "float64": float32 / 2}}


def blas(architecture, measured=None):
    return [[{**HASWELL, "architecture": architecture}], measured]


def test_a_faster_kernel_is_named_and_measured(monkeypatch, answers):
    monkeypatch.setattr(doctor_host, "better_kernel", lambda loaded: "SkylakeX")
    asked = answers(doctor_host, blas("Haswell", rates(122)), blas("SkylakeX", rates(235)))
    found = by_name(doctor_host.examine_numpy(quick=False))
    assert asked[1][1] == {"OPENBLAS_CORETYPE": "SkylakeX"}
    assert found["numpy.kernel"].fix == "export OPENBLAS_CORETYPE=SkylakeX"
    assert "235 instead of 122 GFLOP/s" in found["numpy.kernel"].text
    assert "122 and 61 GFLOP/s on 1 thread" in found["numpy.speed"].text


def test_a_kernel_that_is_hardly_faster_is_no_advice(monkeypatch, answers):
    monkeypatch.setattr(doctor_host, "better_kernel", lambda loaded: "SkylakeX")
    answers(doctor_host, blas("Haswell", rates(100)), blas("SkylakeX", rates(105)))
    found = by_name(doctor_host.examine_numpy(quick=False))["numpy.kernel"]
    assert (found.verdict, found.value["better"]) == (OK, None)
    assert "105 instead of 100 GFLOP/s" in found.text
    answers(doctor_host, blas("Haswell"))  # nothing is measured: the processor's name decides
    found = by_name(doctor_host.examine_numpy(quick=True))["numpy.kernel"]
    assert (found.verdict, found.value["better"]) == (NOTE, "SkylakeX")


def test_libraries_are_named_when_a_product_crashes(answers):
    answers(doctor_host, Answer(-4, f"{answer_line(blas('Haswell'))}\n", "", 30))
    found = by_name(doctor_host.examine_numpy(quick=False))
    assert "openblas 0.3, /l.so" in found["numpy.blas"].text
    assert found["numpy.speed"].verdict is PROBLEM


@pytest.mark.parametrize(("all_threads", "verdict"), [(8, NOTE), (95, OK), (180, OK)])
def test_threads_that_compete_for_cores(all_threads, verdict, monkeypatch, answers):
    monkeypatch.setattr(doctor_host, "better_kernel", lambda kernel: None)
    measured = {"1": {"float32": 101, "float64": 46}}
    measured["2"] = {"float32": all_threads, "float64": all_threads}
    answers(doctor_host, blas("Haswell", measured))
    found = by_name(doctor_host.examine_numpy(quick=False))["numpy.speed"]
    assert found.verdict is verdict
    assert ("slower than one" in found.text) == (verdict is NOTE)
    assert found.fix == ("export OMP_NUM_THREADS=1" if verdict is NOTE else None)


@pytest.mark.parametrize(("without", "verdict"), [(110, OK), (500, NOTE)])
def test_a_kernel_of_the_users_choice(monkeypatch, without, verdict, answers):
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    replies = blas("Haswell", rates(100)), blas("SkylakeX", rates(without))
    asked = answers(doctor_host, *replies)
    found = by_name(doctor_host.examine_numpy(quick=False))["numpy.kernel"]
    assert [variables for _, variables in asked[1:]] == [{"OPENBLAS_CORETYPE": None}]
    assert found.verdict is verdict
    assert found.fix == ("unset OPENBLAS_CORETYPE" if verdict is NOTE else None)


def test_more_threads_than_cores(monkeypatch, answers):
    monkeypatch.setattr(doctor_host, "usable_cores", lambda: 2)
    monkeypatch.setattr(doctor_host, "core_quota", lambda: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    mkl = {**HASWELL, "internal_api": "mkl", "num_threads": 8}
    answers(doctor_host, [[mkl], None])
    found = by_name(doctor_host.examine_numpy(quick=True))
    assert found["numpy.threads"].fix == "export OMP_NUM_THREADS=2"
    assert "from OMP_NUM_THREADS=8" in found["numpy.threads"].text
    assert "numpy.speed" not in found


@pytest.fixture
def own_choice(monkeypatch, tmp_path):
    """What this machine's user keeps is not seen."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("MPISHARD_PRODUCTS", "auto")


@pytest.mark.parametrize(("faster", "fix"), [(1.05, None), (1.3, "--products onednn")])
def test_doctor_names_the_faster_library(own_choice, monkeypatch, answers, faster, fix):
    measured = {"numpy": 100e9, "onednn": faster * 100e9}
    answers(doctor_host, *[measured] * 3)
    (found,) = doctor_host.examine_float32(quick=False)
    assert f"NumPy 100 and oneDNN {faster * 100:.0f} GFLOP/s on one thread" in found.text
    assert (fix is None) == (found.fix is None)
    assert fix is None or f"mpishard doctor {fix} " in found.fix
    (found,) = doctor_host.examine_float32(quick=True)
    assert (found.text, found.fix) == ("NumPy multiplies, by default", None)
    monkeypatch.setenv("MPISHARD_PRODUCTS", "numpy")
    (found,) = doctor_host.examine_float32(quick=False)
    assert (found.text.partition(";")[0], found.fix) == (
        "NumPy multiplies, because of MPISHARD_PRODUCTS",
        None,
    )


def test_doctor_keeps_a_choice(own_choice, monkeypatch):
    monkeypatch.setattr(doctor_host, "find_library", object)
    shown = CliRunner().invoke(app, ["doctor", "--products", "onednn"])
    assert "oneDNN multiplies, in ranks of one BLAS thread, by" in " ".join(shown.output.split())
    assert (shown.exit_code, products.choice()) == (0, "onednn")
    monkeypatch.setattr(doctor_host, "find_library", lambda: None)
    for words in (["--products", "onednn"], ["--products", "mkl"], ["--hosts", "a,b"]):
        refused = CliRunner().invoke(app, ["doctor", "--products", "onednn", *words])
        assert refused.exit_code == 2
    (found,) = doctor_host.examine_float32(quick=True)
    assert found.fix is not None  # the choice is kept, and the library is gone


def test_bfloat16_names_unit_library_and_speeds(monkeypatch, answers):
    monkeypatch.setattr(doctor_host, "processor_has_unit", lambda: True)
    measured = {"library": ["3.2.0", "/l/libdnnl.so.3"], "reason": "", "float32": 98.0}
    measured["bfloat16"] = 211.0
    answers(doctor_host, measured, measured | {"library": None, "reason": "no oneDNN: pip .."})
    (found,) = doctor_host.examine_bfloat16(quick=False)
    assert "oneDNN 3.2.0 at /l/libdnnl.so.3; 211 and 98 GFLOP/s of bfloat16 and" in found.text
    assert found.verdict is OK
    (found,) = doctor_host.examine_bfloat16(quick=False)
    assert "does not use the processor's unit: no oneDNN" in found.text
    assert (found.verdict, found.fix[-27:]) == (NOTE, "pip install onednn-cpu-gomp")
    assert list(doctor_host.examine_bfloat16(quick=True)) == []
    answers(doctor_host, Answer(-4, "", "", 30))
    (found,) = doctor_host.examine_bfloat16(quick=False)
    assert (found.verdict, found.fix) == (NOTE, "export MPISHARD_ONEDNN=off")
    monkeypatch.setenv("MPISHARD_ONEDNN", "off")
    answers(doctor_host, measured | {"library": None, "reason": "MPISHARD_ONEDNN=off"})
    (found,) = doctor_host.examine_bfloat16(quick=False)
    assert (found.verdict, found.fix) == (NOTE, "unset MPISHARD_ONEDNN")
    monkeypatch.setattr(doctor_host, "processor_has_unit", lambda: False)
    assert list(doctor_host.examine_bfloat16(quick=False)) == []  # no library would help


def test_numba_that_compiles_nothing(monkeypatch, answers):
    def look(*replies):
        answers(doctor_host, *replies)
        return next(doctor_host.examine_numba(), None)

    monkeypatch.setattr(doctor_host.settings, "numba_is_allowed", lambda: True)
    monkeypatch.setattr(doctor_host, "installed_version", {"numba": "0.61"}.get)
    found = look(Answer(1, "", "ImportError: Numba needs NumPy 2.2\n", 1))
    assert (found.verdict, "Numba needs NumPy 2.2" in found.text) == (NOTE, True)
    assert look(Answer(0, "", "", 1)).verdict is OK
    monkeypatch.setattr(doctor_host.settings, "numba_is_allowed", lambda: False)
    assert look().fix == "unset MPISHARD_NUMBA"
    monkeypatch.setattr(doctor_host, "installed_version", lambda _: None)
    assert look() is None


def test_numpy_without_a_library_and_numpy_that_does_not_load(monkeypatch, answers):
    answers(doctor_host, [[], None])
    assert by_name(doctor_host.examine_numpy(quick=True))["numpy.blas"].verdict is NOTE
    answers(doctor_host, Answer(1, "", "ImportError: libgfortran.so.5\n", 30))
    found = by_name(doctor_host.examine_numpy(quick=True))["numpy.blas"]
    assert found.verdict is PROBLEM
    assert "libgfortran" in found.text


# ------------------------------------------------------------------------------------ shared memory


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
        patch.setattr(shared_memory.time, "time", lambda: now + 120)
        os.utime(folder / "sm_segment.new", (now + 100, now + 100))
        dead = shared_memory.leftovers(folder, processes)
    assert [path.name for path in dead] == ["mpich_shm_dead_0", "mpishard-arena-x"]


def test_the_line_that_removes_leftovers_is_short(monkeypatch, tmp_path):
    write(tmp_path, {f"mpich_shm_{number}_0": "12345" for number in range(25)})
    dead = sorted(tmp_path.glob("mpich*"))
    monkeypatch.setattr(doctor_host, "leftovers", lambda: dead)
    found = by_name(doctor_host.examine_shared_memory())["memory.leftovers"]
    assert len(found.value["files"]) == 25
    assert found.fix == f"{sys.executable} -m mpishard.cli.run.shared_memory"
    monkeypatch.setattr(shared_memory, "leftovers", lambda: dead)
    monkeypatch.setattr(shared_memory, "_own", lambda _: [])  # not those of this machine
    shared_memory.remove_files_of_dead_jobs()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("free", "writable", "verdict"),
    [(2**30, True, OK), (2**24, True, NOTE), (2**30, False, PROBLEM)],
)
def test_a_folder_that_is_small_or_closed(monkeypatch, tmp_path, free, writable, verdict):
    def refuse(**_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(doctor_host, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(doctor_host, "free_bytes", lambda: free)
    if not writable:
        monkeypatch.setattr(doctor_host.tempfile, "TemporaryFile", refuse)
    found = by_name(doctor_host.examine_shared_memory())
    assert found["memory.folder"].verdict is verdict


# ------------------------------------------------------------------------------------------- report
def test_lines_for_people(capsys):
    long = "/a/folder/with/a/name/that/is/long/enough/to/be/wrapped/if/it/were/wrapped/" + "x" * 40
    findings = [
        Finding("host.python", "3.11 " + "word " * 20),
        Finding("mpi.mpiexec", "a stranger", None, f"export PATH={long}"),
        Finding("mpi.library", long, None, "pip install", is_problem=True),
    ]
    assert show_findings(iter(findings)) == findings
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Python and this machine"
    assert lines[1].startswith("  ok       python        3.11 word")
    assert f"           fix: export PATH={long}" in lines  # to be copied whole
    assert f"  problem  library       {long}" in lines
    assert all(len(line) <= 80 for line in lines if long not in line)
    assert lines.count("MPI") == 1
    assert lines[-1] == "1 problem (mpi.library), 1 note (mpi.mpiexec)"


def test_json_counts():
    report = json.loads(as_json([Finding("a.b", "t", {"x": 1}, "m"), Finding("a.c", "u")]))
    assert (report["schema"], report["problems"], report["notes"]) == (2, 0, 1)
    assert report["findings"][0] == {
        "name": "a.b",
        "verdict": "note",
        "text": "t",
        "value": {"x": 1},
        "fix": "m",
    }
    assert summary([]) == "0 problems, 0 notes"


def test_only_the_first_rank_reports_under_a_launcher(monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "1")
    result = CliRunner().invoke(app, ["doctor"])
    assert (result.exit_code, result.output) == (0, "")


@pytest.mark.parametrize(("verdict", "code"), [(NOTE, 0), (PROBLEM, 1)])
def test_exit_code(monkeypatch, verdict, code):
    monkeypatch.setattr(
        doctor,
        "_findings",
        lambda quick: iter([Finding("host.x", "t", None, "m", verdict is PROBLEM)]),
    )
    for options in (["--json"], ["--quick"]):
        assert CliRunner().invoke(app, ["doctor", *options]).exit_code == code


# ---------------------------------------------------------------------------------------- processes


@pytest.mark.timeout(60)
@pytest.mark.spawned
def test_the_whole_report():
    job = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "mpishard", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=55,
        env=outside_launchers(),
        check=False,
    )
    report = json.loads(job.stdout)
    found = {finding["name"]: finding for finding in report["findings"]}
    assert len(found) == len(report["findings"])
    assert not [name for name in found if name.endswith(".error")]
    for finding in report["findings"]:
        assert finding.keys() == {"name", "verdict", "text", "value", "fix"}
        assert finding["verdict"] in {"ok", "note", "problem"}
        assert (finding["fix"] is None) == (finding["verdict"] == "ok"), finding
    assert job.returncode == (1 if report["problems"] else 0)
    groups = {name.partition(".")[0] for name in found}
    assert groups - {"gpu", "slurm"} == {"host", "numpy", "mpi", "memory", "job"}
    assert found["numpy.speed"]["value"]["1"]["float32"] > 0.1
    assert found["numpy.float32"]["value"]["speeds"]["numpy"] > 1e8
    if processor_has_unit():
        assert found["numpy.bfloat16"]["value"]["bfloat16"] > 0.1
    # The probes printed their imports into files of their own.
    assert "mpi4py.MPI" not in job.stderr
    assert "safetensors" not in job.stderr  # of which an installation may have none that loads
    if "mpi.launcher" in found and found["mpi.launcher"]["value"]:
        assert found["job.threads"]["value"] == "MULTIPLE"
        assert found["job.round_trip"]["value"] == {"world_size": 2, "nodes": 1}
        assert found["job.arena"]["value"]["taken"] is not None
