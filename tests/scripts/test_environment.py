"""scripts/environment.sh: conditions to make, remake, extend or keep `.venv`."""

import shutil

import pytest

MADE = "-m venv"
INSTALLED = "pip --disable-pip-version-check install"


def test_makes_and_installs_once(machine):
    machine.add_python()
    first = machine.prepare("mpi", "plot")
    assert first.returncode == 0, first.stderr
    assert first.stdout.strip() == f"{machine.venv}/bin/python"
    assert len(machine.calls(MADE)) == 1
    assert machine.calls(INSTALLED)[0].endswith("--editable .[mpi,plot]")
    second = machine.prepare("mpi", "plot")
    assert second.returncode == 0
    assert second.stderr == ""
    assert machine.calls(MADE) == machine.calls("install") == []


def test_takes_the_newest_python_that_runs(machine):
    machine.add_python("python3.14", "#!/bin/sh\necho 'not installed' >&2\nexit 127\n")
    machine.add_python("python3.12")
    machine.add_python("python3.11")
    assert machine.prepare("mpi").returncode == 0
    assert machine.calls(MADE)[0].startswith("python3.12 ")


def test_refuses_without_python(machine):
    ended = machine.prepare("mpi")
    assert ended.returncode == 1
    assert "apt-get install python3 python3-venv" in ended.stderr
    assert not machine.venv.exists()


def test_refuses_without_venv(machine):
    machine.add_python()
    ended = machine.prepare("mpi", ENSUREPIP="1")
    assert ended.returncode == 1
    assert "apt-get install python3.11-venv" in ended.stderr
    assert not machine.venv.exists()


def test_refuses_without_mpi_until_it_is_there(machine):
    machine.add_python()
    ended = machine.prepare("mpi", NO_MPI="1")
    assert ended.returncode == 1
    assert "cannot load MPI" in ended.stderr
    assert "apt-get install openmpi-bin" in ended.stderr
    assert machine.prepare("mpi").returncode == 0


@pytest.mark.parametrize("state", ["empty", "begun", "no python", "killed pip", "lost MPI"])
def test_remakes_an_incomplete_environment(machine, state):
    machine.add_python()
    machine.venv.mkdir()
    if state == "begun":
        machine.add_python(f"{machine.venv}/bin/python")
        (machine.venv / "mpishard.begun").touch()
    elif state == "no python":
        machine.prepare("mpi")
        (machine.venv / "bin/python").unlink()
    elif state == "killed pip":
        assert machine.prepare("mpi", PIP="1").returncode == 1
    elif state == "lost MPI":
        machine.prepare("mpi")
        assert machine.prepare("mpi", NO_MPI="1").returncode == 1
    (machine.venv / "leftover").touch()
    assert machine.prepare("mpi").returncode == 0
    assert len(machine.calls(MADE)) == len(machine.calls(INSTALLED)) == 1
    assert not (machine.venv / "leftover").exists()


def test_keeps_an_environment_that_somebody_else_made(machine):
    machine.add_python()
    machine.add_python(f"{machine.venv}/bin/python")
    (machine.venv / "theirs").touch()
    assert machine.prepare("mpi").returncode == 0
    assert machine.calls(MADE) == []
    assert len(machine.calls(INSTALLED)) == 1
    assert (machine.venv / "theirs").exists()


def test_more_extras_are_added(machine):
    machine.add_python()
    machine.prepare("mpi", "plot")
    machine.prepare("mpi", "test")
    assert machine.calls(MADE) == []
    assert machine.calls(INSTALLED)[0].endswith(".[mpi,plot,test]")
    machine.prepare("plot")
    assert machine.calls(INSTALLED) == []


def test_new_dependencies_are_installed_and_new_lint_rules_are_not(machine):
    machine.add_python()
    machine.prepare("mpi")
    with (machine.repository / "pyproject.toml").open("a") as file:
        file.write("line-length = 90\n")
    machine.prepare("mpi")
    assert machine.calls(INSTALLED) == []
    (machine.repository / "setup.cfg").write_text("[metadata]\nname = other\n")
    machine.prepare("mpi")
    assert machine.calls(MADE) == []
    assert len(machine.calls(INSTALLED)) == 1


def test_a_moved_repository_makes_its_own(machine):
    machine.add_python()
    machine.prepare("mpi")
    shutil.move(machine.repository, machine.folder / "elsewhere")
    machine.repository = machine.folder / "elsewhere"
    assert machine.prepare("mpi").returncode == 0
    assert len(machine.calls(MADE)) == 1


def test_open_mpi_gets_an_environment_over_the_other(machine):
    machine.add_python()
    assert machine.prepare("mpi").returncode == 0
    first = machine.prepare_openmpi()
    assert first.returncode == 0, first.stderr
    overlay = machine.repository / ".venv-openmpi"
    assert first.stdout.strip() == f"{overlay}/bin/python"
    (installed,) = machine.calls("install --quiet openmpi mpi4py")
    assert str(overlay) in installed
    (link,) = overlay.glob("lib/*.pth")
    assert str(machine.venv) in link.read_text()
    second = machine.prepare_openmpi()
    assert second.returncode == 0
    assert machine.calls(MADE) == machine.calls("install") == []
