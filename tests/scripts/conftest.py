"""A copy of the scripts in a repository of its own, on a simulated machine."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"

TOOLS = [
    *("basename", "bash", "cat", "cksum", "cp", "dirname", "env", "grep", "id", "mkdir", "mktemp"),
    *("mv", "rm", "sed", "sh", "sort", "tail", "tee", "tr"),
]

# Answers as the interpreter of an environment would, and writes down what it was asked to do.
PYTHON = """#!/bin/sh
echo "$(basename "$0") $*" >>"$CALLS"
case "$*" in
    *version_info\\ *) exit 0 ;;
    *ensurepip*) exit "${ENSUREPIP:-0}" ;;
    *_base_executable*) echo "$0" ;;
    "-m venv --without-pip -- "*) mkdir -p "$5/bin" && cp "$0" "$5/bin/python" ;;
    *purelib*) mkdir -p "$(dirname "$0")/../lib" && echo "$(dirname "$0")/../lib" ;;
    "-m venv -- "*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
    *"pip --disable-pip-version-check install"*) exit "${PIP:-0}" ;;
    *"import mpi4py.MPI"*) [ -z "${NO_MPI:-}" ] || { echo "cannot load MPI"; exit 1; } ;;
    *"version_info[:2]"*) echo python3.11 ;;
    *"-m pytest"*) . "$PYTEST" ;;
esac
"""


class Machine:
    """The scripts in a repository whose path has a space, and a PATH made for the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.repository = folder / "a repository"
        self.venv = self.repository / ".venv"
        self.bin = folder / "bin"
        self.calls_file = folder / "calls"
        self.bin.mkdir()
        shutil.copytree(SCRIPTS, self.repository / "scripts")
        (self.repository / "setup.cfg").write_text("[metadata]\n")
        (self.repository / "pyproject.toml").write_text("[build-system]\n\n[tool.ruff]\n")
        for name in TOOLS:
            (self.bin / name).symlink_to(shutil.which(name))
        self.program(self.bin / "apt-get", "#!/bin/sh\n")

    def program(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def add_python(
        self, name: str = "python3.12", text: str = PYTHON, first_case: str = ""
    ) -> None:
        self.program(self.bin / name, text.replace("in\n", f"in\n    {first_case}\n", 1))

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        self.calls_file.write_text("")
        environment = {"PATH": str(self.bin), "CALLS": str(self.calls_file), **variables}
        return subprocess.run(
            command,
            env=environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    def prepare(self, *extras: str, **variables: str) -> subprocess.CompletedProcess[str]:
        script = f"{self.repository}/scripts/environment.sh"
        command = 'set -euo pipefail; . "$0"; prepare_environment "$@"; echo "$python"'
        return self.run("bash", "-c", command, script, *extras, **variables)

    def prepare_openmpi(self) -> subprocess.CompletedProcess[str]:
        script = f"{self.repository}/scripts/environment.sh"
        command = 'set -euo pipefail; . "$0"; prepare_openmpi; echo "$openmpi_python"'
        return self.run("bash", "-c", command, script)

    def calls(self, part: str) -> list[str]:
        return [line for line in self.calls_file.read_text().splitlines() if part in line]


@pytest.fixture
def machine(tmp_path):
    if shutil.which("bash") is None or os.name != "posix":
        pytest.skip("needs bash")
    return Machine(tmp_path)
