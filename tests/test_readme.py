"""README's programs run as printed, alone and under MPI."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
EXPECTED = [
    r"loss \d\.\d\de-\d\d",
    r"2 pipeline x 2 tensor x [12] data: after 0 3 6 comes 9 12 15 18 21",
    r"decay and frequency: \[0\.7 2\.5\]",
]
RANKS = [2, 4, 2]  # under MPI
# Left out but with --full: number, under MPI, and what else sees it.
ELSEWHERE = {
    (0, False): "tests/test_public.py runs it and looks at what it saves",
    (1, True): "tests/models/test_mesh_equality.py trains on meshes under mpiexec",
}
MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent))

needs_mpiexec = pytest.mark.skipif(
    MPIEXEC is None, reason="no mpiexec beside this Python: pip install 'mpishard[mpi]'"
)


def test_no_program_is_missed() -> None:
    assert len(PROGRAMS) == len(EXPECTED)


@pytest.mark.spawned
@pytest.mark.parametrize(
    "under_mpi", [False, pytest.param(True, marks=needs_mpiexec)], ids=["alone", "mpi"]
)
@pytest.mark.parametrize("number", range(len(EXPECTED)))
def test_program_runs_as_printed(tmp_path: Path, number: int, under_mpi: bool) -> None:
    if (number, under_mpi) in ELSEWHERE and not os.environ.get("MPISHARD_TEST_FULL"):
        pytest.skip(ELSEWHERE[number, under_mpi])
    launcher = [str(MPIEXEC), "-n", str(RANKS[number])] if under_mpi else []
    script = tmp_path / "program.py"
    script.write_text(PROGRAMS[number])
    ended = subprocess.run(
        [*launcher, sys.executable, str(script)],
        # The first alone has numba where it is installed; the others need no second to load it.
        cwd=tmp_path, env=os.environ | ({"MPISHARD_NUMBA": "off"} if under_mpi or number else {}),
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert len(re.findall(EXPECTED[number], ended.stdout)) == 1, ended.stdout


@pytest.mark.parametrize("program", ["quickstart", "train_3d", "fit_function"])
def test_program_is_the_example(program: str) -> None:
    assert (ROOT / "examples" / f"{program}.py").read_text().strip() in {
        text.strip() for text in PROGRAMS
    }


def test_what_readme_names_is_there() -> None:
    named = re.findall(r"`((?:tests|scripts|docs|examples)/[\w/.]+)", README)
    named += re.findall(r"\]\(((?:docs|LICENSE)[\w/.]*)\)", README)
    assert [path for path in named if not (ROOT / path).exists()] == []
