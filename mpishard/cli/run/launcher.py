"""The launcher of MPI ranks, and the machines of ``--hosts``.

The launcher must belong to the MPI library that mpi4py loads. The ``mpiexec`` of another MPI starts
N processes that are each in a world of one. Therefore the library is identified first, and then
each candidate on the machine by its version.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from mpishard.base import MPIUnavailableError, settings
from mpishard.cli.probe import ask, python_command

_PROBE_SECONDS = 60.0

# Runs in a process of its own, because a broken MPI library may end the process that loads it.
# MPI is not initialised. The memory map names the file of the library that was loaded.
_PROBE = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
try:
    with open("/proc/self/maps") as maps:
        files = sorted({line.split(maxsplit=5)[5].strip() for line in maps if "/libmpi" in line})
except OSError:
    files = []
answer({"version": MPI.Get_library_version(), "files": files})
"""

# Not libmpifort or libmpi_cxx, which may be mapped beside it.
_LIBRARY_FILE = re.compile(r"libmpi(ch|_abi)?\.(so|dylib)")

# RFC 1123. An underscore is usual for containers; a first "-" would begin an option.
_LABEL = r"[A-Za-z0-9_][A-Za-z0-9_-]{0,62}"
_HOST_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?")
_LONGEST_NAME = 253


@dataclass(frozen=True, slots=True)
class Host:
    """A machine that takes up to ``slots`` ranks before the next one is filled."""

    name: str
    slots: int


def is_host_name(text: str) -> bool:
    """Return whether ``text`` can be the name or address of a machine."""
    return _HOST_NAME.fullmatch(text) is not None and len(text) <= _LONGEST_NAME


def parse_hosts(text: str, world_size: int) -> list[Host]:
    """Return the machines of ``a,b:slots``; those without a number share the rest evenly.

    Raises
    ------
    ValueError
        If a name or number is wrong, or the ranks do not fit the machines.
    """
    if not text:
        return []
    entries = [entry.strip().partition(":") for entry in text.split(",")]
    if any(not name for name, _, _ in entries):
        raise ValueError(f"--hosts has an empty name: {text!r}")
    # A machine without a rank is rather a mistake than a wish.
    if len(entries) > world_size:
        raise ValueError(f"--hosts names {len(entries)} machines for {world_size} ranks")
    for name, colon, number in entries:
        if not is_host_name(name):
            raise ValueError(
                f"--hosts takes names or addresses of machines: labels of 1 to 63 letters, digits, "
                f"- and _ with dots between them, {_LONGEST_NAME} characters at most, the first "
                f"no -; got {name!r}"
            )
        if colon and not (number.isdecimal() and int(number)):
            raise ValueError(
                f"--hosts takes NAME or NAME:SLOTS, with 1 slot or more; got {name}:{number}"
            )
    given = sum(int(number) for _, _, number in entries if number)
    rest = [name for name, _, number in entries if not number]
    if given + len(rest) > world_size and rest:
        raise ValueError(
            f"--hosts {text} leaves no rank of {world_size} for {', '.join(rest)}: "
            f"the others take {given}"
        )
    if given < world_size and not rest:
        raise ValueError(f"--hosts {text} has {given} slots for {world_size} ranks")
    # Rounded up, so that no rank is left over; the last machines may get fewer.
    share = -(-(world_size - given) // len(rest)) if rest else 0
    return [Host(name, int(number) if number else share) for name, _, number in entries]


class MPIFamily(StrEnum):
    """MPI libraries whose launchers take the same options and start each other's ranks."""

    MPICH = "MPICH"
    INTEL = "Intel MPI"
    OPEN_MPI = "Open MPI"

    @classmethod
    def of(cls, text: str) -> MPIFamily | None:
        """Return the family that ``text``, the version of a library or launcher, names."""
        # MVAPICH and Cray MPICH are MPICH. Intel comes first, because its launcher is a Hydra, too.
        if "Intel(R) MPI" in text:
            return cls.INTEL
        if re.search(r"Open MPI|OpenRTE|PRRTE", text):
            return cls.OPEN_MPI
        if re.search(r"HYDRA|MPICH|MVAPICH", text, re.IGNORECASE):
            return cls.MPICH
        return None

    @property
    def launcher_names(self) -> tuple[str, ...]:
        """File names of the family's launcher, the likeliest first."""
        if self is MPIFamily.OPEN_MPI:
            return ("mpiexec", "mpirun", "mpiexec.openmpi", "orterun")
        return ("mpiexec", "mpiexec.hydra", "mpiexec.mpich", "mpirun")


@dataclass(frozen=True, slots=True)
class MPILibrary:
    """The MPI library that ``mpi4py`` loads.

    Parameters
    ----------
    version : str
        Result of ``MPI_Get_library_version``.
    file : Path, optional
        The shared object; None if the memory map does not name it.
    """

    version: str
    file: Path | None = None

    @property
    def family(self) -> MPIFamily | None:
        """Family of the launchers that can start ranks of this library."""
        return MPIFamily.of(self.version)

    def __str__(self) -> str:
        found = re.search(r"\d+(\.\d+)+\w*", self.version)
        # A version of Cray or MVAPICH is several lines long.
        name = self.family or self.version.strip().partition("\n")[0]
        return f"{name} {found.group()}" if found and self.family else name


@dataclass(frozen=True, slots=True)
class Launcher:
    """The program that starts the ranks of a job.

    Parameters
    ----------
    program : Path
        ``mpiexec`` or ``srun``.
    library : MPILibrary
        The MPI that the ranks will load.
    """

    program: Path
    library: MPILibrary

    @property
    def is_slurm(self) -> bool:
        """True if SLURM starts the ranks and knows their cores."""
        return self.program.name == "srun"

    @property
    def is_hydra(self) -> bool:
        """True for the launcher of MPICH and the libraries derived from it."""
        return not self.is_slurm and self.library.family is not MPIFamily.OPEN_MPI

    @property
    def rank_variable(self) -> str:
        """Environment variable that holds the rank of a process."""
        if self.is_slurm:
            return "SLURM_PROCID"
        return "PMI_RANK" if self.is_hydra else "OMPI_COMM_WORLD_RANK"

    def command(
        self,
        world_size: int,
        program: Sequence[str],
        *,
        hosts: Sequence[Host] = (),
        variables: Sequence[str] = (),
        survives: bool = False,
    ) -> list[str]:
        """Return the command line that runs ``program`` on ``world_size`` ranks.

        Parameters
        ----------
        world_size : int
            Number of ranks.
        program : sequence of str
            Command line of each rank.
        hosts : sequence of Host
            Machines to fill one after the other; empty for this one, or for those of the SLURM
            allocation.
        variables : sequence of str
            Environment variables that ranks on other machines must see as well.
        survives : bool
            Whether ranks are to outlive each other: only Open MPI's own launcher allows it.

        Raises
        ------
        ValueError
            If SLURM is to fill some machines more than others, or if ranks are to outlive each
            other under a launcher that ends all of them.
        """
        if survives and (self.is_slurm or self.library.family is not MPIFamily.OPEN_MPI):
            raise ValueError(
                f"--on-failure shrink needs Open MPI 5 and its mpiexec, and {self.program} starts "
                f"ranks of {self.library}, which end together; --on-failure abort is the default"
            )
        names = ",".join(host.name for host in hosts)
        are_even = len({host.slots for host in hosts}) == 1
        with_slots = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        if self.is_slurm:
            if hosts and not are_even:
                raise ValueError(
                    f"--hosts {with_slots}: inside SLURM srun distributes the ranks to the nodes; "
                    "give names alone, or an allocation of --ntasks-per-node"
                )
            options = ["-n", f"{world_size}", "--export=ALL"]
            # Without these srun lets the other ranks wait, and asks for a second Ctrl-C.
            options += ["--kill-on-bad-exit=1", "--quit-on-interrupt"]
            # Without a number srun takes as many nodes as the allocation has.
            options += [f"--nodelist={names}", f"--nodes={len(hosts)}"] if hosts else []
        elif self.library.family is MPIFamily.OPEN_MPI:
            # By default Open MPI binds a rank to one core, which its BLAS threads would share.
            options = ["--with-ft", "ulfm"] if survives else []
            options += ["-n", f"{world_size}", "--bind-to", "none"]
            # In a container the user is root, and Open MPI would refuse to start.
            if os.geteuid() == 0:
                options.append("--allow-run-as-root")
            # By default Open MPI starts no more ranks than there are cores.
            options += ["--host", with_slots] if hosts else ["--map-by", ":OVERSUBSCRIBE"]
            # Hydra and srun pass all variables on; Open MPI only those that are named.
            for name in variables:
                options += ["-x", name]
        else:
            options = ["-n", f"{world_size}"]
            if are_even:
                options += ["-hosts", names, "-ppn", f"{hosts[0].slots}"]
            elif hosts:
                options += ["-hosts", with_slots]
        return [str(self.program), *options, *program]


@dataclass(frozen=True, slots=True)
class MPIInstallation:
    """The library and launcher of MPI on this machine, or the reason why one is missing.

    Parameters
    ----------
    library : MPILibrary, optional
        The library that mpi4py loads.
    launcher : Launcher, optional
        The launcher that belongs to it.
    error : str
        The reason if one of them is missing; its first line can stand alone.
    """

    library: MPILibrary | None = None
    launcher: Launcher | None = None
    error: str = ""

    @classmethod
    def of_this_python(cls) -> MPIInstallation:
        """Find both, without loading the library into this process."""
        library = None
        try:
            library = loaded_library()
            return cls(library, find_launcher(library))
        except MPIUnavailableError as error:
            return cls(library, None, str(error))


def find_launcher(library: MPILibrary) -> Launcher:
    """Return the launcher that belongs to ``library``; ``srun`` inside a SLURM allocation.

    The folders nearest to the library come first.

    Raises
    ------
    MPIUnavailableError
        If none is found; the message names those that belong to another MPI.
    """
    # srun comes first, because it knows the nodes of the allocation and binds cores.
    srun = shutil.which("srun")
    if srun is not None and settings.is_slurm_allocation():
        return Launcher(Path(srun), library)
    family = library.family
    if family is None:
        raise MPIUnavailableError(
            f"mpi4py loads {library}, whose launcher mpishard does not know: "
            "start the script with that library's own mpiexec"
        )
    # <prefix>/lib/libmpi.so, <prefix>/lib/<platform>/libmpi.so, <prefix>/lib/release/libmpi.so
    near = [] if library.file is None else [up / "bin" for up in library.file.parents[1:4]]
    folders = [*near, Path(sys.prefix) / "bin", *settings.program_folders()]
    strangers = []
    # Each candidate once, because its version costs the start of a process.
    for program in dict.fromkeys(f / name for f in folders for name in family.launcher_names):
        if program.is_file() and os.access(program, os.X_OK):
            owner = launcher_family(program)
            if owner is family:
                return Launcher(program, library)
            strangers.append(f"{program} ({owner or 'unknown'})")
    found = f"; found only {', '.join(strangers)}" if strangers else ""
    raise MPIUnavailableError(
        f"mpi4py loads {library}, and no mpiexec that belongs to it is on PATH{found}.\n"
        "Put its bin folder on PATH, or `pip install 'mpishard[mpi]'` into a fresh environment."
    )


def loaded_library() -> MPILibrary:
    """Return the library that ``import mpi4py.MPI`` loads, without loading it in this process.

    Raises
    ------
    MPIUnavailableError
        If mpi4py is missing, or cannot load an MPI library.
    """
    answer = ask(python_command(_PROBE), _PROBE_SECONDS)
    if answer.code is None:
        raise MPIUnavailableError(
            f"loading the MPI library took more than {_PROBE_SECONDS:g} s: `{sys.executable} "
            "-c 'import mpi4py.MPI'` shows where it hangs"
        )
    if answer.code != 0:
        raise MPIUnavailableError(
            f"mpi4py cannot be used here: {answer.reason}\n"
            "`pip install 'mpishard[mpi]'` brings it together with an MPI library."
        )
    files = [Path(name) for name in answer.found["files"] if _LIBRARY_FILE.match(Path(name).name)]
    return MPILibrary(answer.found["version"], files[0] if files else None)


def launcher_family(program: Path) -> MPIFamily | None:
    """Return the family in the version of ``program``; None if it fails or is of another family."""
    try:
        answer = ask([str(program), "--version"], _PROBE_SECONDS)
    except OSError:
        return None
    return None if answer.code is None else MPIFamily.of(answer.out + answer.err)
