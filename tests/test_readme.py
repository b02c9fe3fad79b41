"""The programs of README and of the first pages run as printed, alone and under MPI."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
# An example, the pages that print it word for word, what it writes, and its ranks under MPI.
PROGRAMS = {
    "quickstart": (["README.md"], r"loss \d\.\d\de-\d\d", 2),
    "train_3d": (
        ["docs/tutorial.md"],
        r"2 pipeline x 2 tensor x [12] data: after 0 3 6 comes 9 12 15 18 21",
        4,
    ),
    "fit_function": (["docs/tutorial.md"], r"decay and frequency: \[0\.7 2\.5\]", 2),
    "export_onnx": (["docs/exports.md"], r"as predicted, to 1e-5: True", 2),
    "train_sklearn": (["docs/scikit-learn.md"], r"accuracy above 0.95: True", 2),
    "train_hdf5": (["docs/data-on-disk.md"], r"314 steps, accuracy above 0.9: True", 2),
    "train_callbacks": ([], r"stopped early: True", 2),
}
# Programs that run only with --full: name, under MPI, and the test that covers them by default.
ELSEWHERE = {
    ("quickstart", False): "tests/test_public.py runs it and looks at what it saves",
    ("export_onnx", False): "tests/docs/test_pages.py runs it",
    ("export_onnx", True): "tests/exports/test_onnx.py writes a sharded model under mpiexec",
    ("train_sklearn", False): "tests/docs/test_pages.py runs it",
    ("train_sklearn", True): "tests/test_sklearn.py fits under mpiexec",
    ("train_hdf5", False): "tests/docs/test_pages.py runs it",
    ("train_hdf5", True): "tests/data/test_files.py trains from files under mpiexec",
    ("fit_function", True): "tests/optimizers/test_minimize.py minimizes under mpiexec",
    ("train_callbacks", True): "tests/callbacks runs callbacks under mpiexec",
    ("train_3d", True): "tests/models/test_mesh_equality.py trains on meshes under mpiexec",
}
MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent))

needs_mpiexec = pytest.mark.skipif(
    MPIEXEC is None, reason="no mpiexec beside this Python: pip install 'mpishard[mpi]'"
)


def programs_of(page: str) -> set[str]:
    text = (ROOT / page).read_text()
    return {code.strip() for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL)}


def test_every_program_of_readme_is_found() -> None:
    listed = [name for name, (pages, _, _) in PROGRAMS.items() if "README.md" in pages]
    assert len(programs_of("README.md")) == len(listed)


@pytest.mark.timeout(60)
@pytest.mark.spawned
@pytest.mark.parametrize(
    "under_mpi", [False, pytest.param(True, marks=needs_mpiexec)], ids=["alone", "mpi"]
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_runs_as_printed(tmp_path: Path, name: str, under_mpi: bool) -> None:
    if (name, under_mpi) in ELSEWHERE and not os.environ.get("MPISHARD_TEST_FULL"):
        pytest.skip(ELSEWHERE[name, under_mpi])
    _, expected, ranks = PROGRAMS[name]
    launcher = [str(MPIEXEC), "-n", str(ranks)] if under_mpi else []
    script = tmp_path / "program.py"
    script.write_text((ROOT / "examples" / f"{name}.py").read_text())
    # The quick start alone uses numba if it is installed; the others save the second of its import.
    numba = {} if name == "quickstart" and not under_mpi else {"MPISHARD_NUMBA": "off"}
    ended = subprocess.run(
        [*launcher, sys.executable, str(script)],
        cwd=tmp_path, env=os.environ | numba,
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert len(re.findall(expected, ended.stdout)) == 1, ended.stdout


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_pages_print_the_example(name: str) -> None:
    example = (ROOT / "examples" / f"{name}.py").read_text().strip()
    assert [page for page in PROGRAMS[name][0] if example not in programs_of(page)] == []


def test_everything_that_readme_names_exists() -> None:
    named = re.findall(r"`(?:python )?((?:tests|scripts|docs|examples)/[\w/.]+)", README)
    named += re.findall(r"\]\(((?:docs|LICENSE|CONTRIBUTING)[\w/.]*)\)", README)
    assert len(named) > 30
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_readme_is_short() -> None:
    assert len(README.split()) <= 1500
