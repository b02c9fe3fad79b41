"""The environment variables that mpishard reads, and fixed limits without a variable.

No other module of the package uses `os.environ`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path

# Fixed, because headers of messages have room for this number of sizes.
MAXIMUM_DIMS = 8
"""Largest number of dims of an array that is sent."""

MAXIMUM_TAG = 16382
"""Largest tag: just below half of MPI's guaranteed bound. The package uses the other half."""

CALL_LOG_LENGTH = 256
"""Number of collectives in a rank's call log."""

TRACE_EVENTS = 200_000
"""Default for the largest number of events in a rank's trace; further ones are only counted."""

EXIT_FAILURE = 1
"""Exit code of an MPI job in which a rank raised, or left before the others."""

EXIT_TIMEOUT = 124
"""Exit code of an MPI job in which a wait exceeded `collective_timeout` or `exit_timeout`."""

EXIT_INTERRUPT = 130
"""Exit code of a job that Ctrl-C ended."""

EXIT_TERMINATED = 143
"""Exit code of an MPI job in which a rank received SIGTERM."""

EXIT_KILLED = 137
"""Exit code of `mpishard run` if a rank was killed (SIGKILL); another signal n gives 128 + n."""

EXIT_PREEMPTED = 75
"""Exit code of a preempted job, which has saved and can be started again later.

It is EX_TEMPFAIL of sysexits.h. `mpishard run` ends with it, too, and does not restart the job.
"""

# Each holds a number of processes. PMIx has no such variable, and sets only the rank.
_LAUNCHERS = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def launcher_variable() -> str | None:
    """Return the name of the variable that a launcher has set for this process, or None.

    SLURM_NTASKS alone shows no launcher, because it is also set in the batch script.
    """
    for name in (*_LAUNCHERS, "PMIX_RANK"):
        if name in os.environ:
            return name
    return None


def _number(*names: str, variables: Mapping[str, str] = os.environ) -> int | None:
    """Return the value of the first of these variables that is a decimal number."""
    found = (variables.get(name, "") for name in names)
    return next((int(value) for value in found if value.isdecimal()), None)


def launched_world_size() -> int | None:
    """Return the number of processes that the launcher started, if it is known."""
    return _number(*_LAUNCHERS)


def launched_local_size() -> int | None:
    """Return the number of processes that the launcher started here, if it is known."""
    return _number("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")


def launched_rank(variables: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of a process among those of its launcher, if its ``variables`` have it."""
    names = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")
    return _number(*names, variables=variables)


def pmi_descriptor() -> int | None:
    """PMI_FD: the descriptor of this process's connection to Hydra, MPICH's launcher."""
    # srun's PMI-2 plugin sets PMI_FD, too, for a connection of its own.
    return None if is_slurm_step() else _number("PMI_FD")


def slurm_pmi_descriptor() -> int | None:
    """PMI_FD: the descriptor of this process's connection to srun's plugin pmi2."""
    return _number("PMI_FD") if is_slurm_step() else None


_OF_LAUNCHERS = (
    "PMI_", "PMIX_", "PRTE_", "HYDI_", "HYDRA_", "MPI_LOCAL", "OMPI_COMM_", "OMPI_WORLD_",
    "OMPI_UNIVERSE_", "OMPI_FILE_", "OMPI_NUM_", "OMPI_ARGV", "OMPI_COMMAND", "OMPI_APP_",
    "OMPI_MCA_initial_", "OMPI_MCA_num_procs", "OMPI_MCA_mpi_ft_", "SLURM_STEP_",
    "SLURM_STEPID", "SLURM_PROCID", "SLURM_LOCALID", "MPISHARD_RANK_PROCESS",
)  # fmt: skip


def outside_launcher() -> dict[str, str]:
    """Return the environment without the variables that a launcher set for this process's job.

    This process can start another job with it. If no launcher started this process, nothing is left
    out, because the user has set the variables.
    """
    if launcher_variable() is None:
        return dict(os.environ)
    # A launcher that inherits these would take itself for a rank of the outer job.
    return {k: v for k, v in os.environ.items() if not k.startswith(_OF_LAUNCHERS)}


def open_mpi_starts_for_root() -> bool:
    """Return whether OMPI_ALLOW_RUN_AS_ROOT and _CONFIRM let Open MPI's launcher run as root."""
    names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    return all(os.environ.get(name) == "1" for name in names)


def launch_identity() -> tuple[str, ...]:
    """Return the launchers' identifiers of the job and of this process in it."""
    names = (
        "PMI_RANK", "PMI_SIZE", "PMI_ID", "PMI_PORT", "PMIX_NAMESPACE", "PMIX_RANK",
        "OMPI_COMM_WORLD_RANK", "PALS_APID", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID",
    )  # fmt: skip
    # The identity is written as fields between blanks.
    return tuple(os.environ.get(name, "").replace(" ", "_") for name in names)


def is_fault_tolerant() -> bool:
    """Return whether Open MPI was started with ``--with-ft ulfm`` (OMPI_MCA_mpi_ft_enable)."""
    value = os.environ.get("OMPI_MCA_mpi_ft_enable", "")  # noqa: SIM112 - Open MPI's spelling
    return value.lower() in ("1", "true", "yes")


def write(name: str, value: str) -> None:
    """Set a variable of this process, and of the processes that it starts from now on."""
    os.environ[name] = value


def write_default(name: str, value: str) -> None:
    """Set a variable as `write` does, unless it is set already."""
    os.environ.setdefault(name, value)


def rank_process() -> str:
    """MPISHARD_RANK_PROCESS: the identity of the rank's process; empty if it is not set."""
    return os.environ.get("MPISHARD_RANK_PROCESS", "")


def is_slurm_step() -> bool:
    """Return whether srun started this process."""
    return "SLURM_STEP_NUM_TASKS" in os.environ


def is_slurm_allocation() -> bool:
    """Return whether this process runs inside an allocation of SLURM (SLURM_JOB_ID)."""
    return slurm_job() is not None


def slurm_job() -> str | None:
    """SLURM_JOB_ID: the allocation in which this process runs; None outside of one."""
    return os.environ.get("SLURM_JOB_ID") or None


def slurm_node_count() -> int | None:
    """SLURM_JOB_NUM_NODES: number of nodes of the allocation, if there is one."""
    return _number("SLURM_JOB_NUM_NODES")


def slurm_step_nodes() -> str | None:
    """SLURM_STEP_NODELIST: nodes of the step, such as ``node[2-3]``, if srun started this."""
    return os.environ.get("SLURM_STEP_NODELIST") if is_slurm_step() else None


def slurm_plugin() -> str | None:
    """SLURM_MPI_TYPE: srun's plugin by which ranks find each other, if it is set."""
    return os.environ.get("SLURM_MPI_TYPE") or None


def pmix_rank() -> int:
    """PMIX_RANK; 0 if it is not set or no number."""
    return _number("PMIX_RANK") or 0


def pmix_launcher() -> str | None:
    """Return the name of the launcher, if ranks can reach it only by PMIx; otherwise None."""
    if "PMIX_NAMESPACE" not in os.environ or {"PMI_FD", "PMI_PORT", "PMI_SIZE"} & os.environ.keys():
        return None
    # Slurm sets PMIx's variables as well, but its own name is more useful in an error.
    if is_slurm_step():
        return "srun --mpi=pmix"
    version = os.environ.get("OMPI_VERSION")
    return f"Open MPI {version}" if version else "a PMIx launcher"


def program_folders() -> list[Path]:
    """Return the folders of PATH."""
    return [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]


def cpus_per_task() -> int | None:
    """SLURM_CPUS_PER_TASK, if it is set."""
    return _number("SLURM_CPUS_PER_TASK")


def blas_thread_variables() -> dict[str, str]:
    """Return the variables with which the user set the number of BLAS threads, and their values."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return {name: os.environ[name] for name in names if name in os.environ}


def blas_threads_are_set() -> bool:
    """Return whether the user set the number of BLAS threads."""
    return bool(blas_thread_variables())


def xla_threads() -> int | None:
    """NPROC: threads of XLA, JAX's compiler, which reads it when JAX makes its first array."""
    return _number("NPROC")


def log_level() -> str | None:
    """MPISHARD_LOG: ``debug``, ``info``, ``warning`` or ``error``; None if it is not set."""
    if "MPISHARD_LOG" not in os.environ:
        return None
    return _choice("MPISHARD_LOG", "debug", "info", "warning", "error")


def is_debugging() -> bool:
    """Return whether MPISHARD_LOG is ``debug``."""
    return os.environ.get("MPISHARD_LOG", "").lower() == "debug"


def check() -> None:
    """Refuse, before anything starts, variables that would fail when they are needed.

    Raises
    ------
    ValueError
        Naming the variable, its allowed values, and its value.
    """
    # Each function raises for a wrong value; the results are not needed yet.
    shares_memory()
    log_level()
    virtual_nodes()
    collective_timeout()
    mpi_warning()
    exit_timeout()
    host_timeout()
    numba_is_allowed()
    float32_products()
    cuda_aware()
    trace_folder()


def alike() -> dict[str, str]:
    """Return the settings that must be the same on every rank of a job, with this rank's values."""
    return {
        "MPISHARD_ARENA": os.environ.get("MPISHARD_ARENA", "auto").lower(),
        "MPISHARD_CUDA_AWARE": str(int(cuda_aware())),
        "MPISHARD_PRODUCTS": float32_products(),
        # The folder may differ between machines, but either all ranks record or none does.
        "MPISHARD_TRACE": "not set" if trace_folder() is None else "set",
        "MPISHARD_VIRTUAL_NODES": str(virtual_nodes()),
    }


def collective_timeout() -> float:
    """MPISHARD_TIMEOUT: seconds that a rank waits for the others; 0 means no limit."""
    return _seconds("MPISHARD_TIMEOUT", 300.0)


def mpi_warning() -> float:
    """MPISHARD_WARN_AFTER: seconds of a wait after which an MPI rank warns; 0 means never."""
    return _seconds("MPISHARD_WARN_AFTER", 30.0)


def exit_timeout() -> float:
    """MPISHARD_EXIT_TIMEOUT: seconds that an MPI rank waits, after its work, for the others to end.

    The default is one hour, because a rank may have work of its own after the last collective; 0
    means no limit. After `mpi_warning` a rank that has finished names the ranks for which it waits.
    """
    return _seconds("MPISHARD_EXIT_TIMEOUT", 3600.0)


def host_timeout() -> float:
    """MPISHARD_HOST_TIMEOUT: seconds without a sign of life after which a host is lost."""
    seconds = _seconds("MPISHARD_HOST_TIMEOUT", 30.0)
    if not seconds:
        raise ValueError("MPISHARD_HOST_TIMEOUT must be more than 0 seconds; got 0")
    return seconds


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        # Refused below, with the same message as a negative number.
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be a number of seconds, 0 or more; got {text!r}")
    return value


def _choice(name: str, *choices: str) -> str:
    """Return the value of a variable in lower case: one of the choices, the first by default."""
    text = os.environ.get(name, choices[0]).lower()
    if text not in choices:
        *others, last = choices
        raise ValueError(f"{name} must be {', '.join(others)} or {last}; got {text!r}")
    return text


def shares_memory() -> bool:
    """MPISHARD_ARENA: ``auto``, the default, lets the ranks of a node share memory.

    ``off`` does not, so that all data travel as messages.
    """
    return _choice("MPISHARD_ARENA", "auto", "off") == "auto"


@functools.cache  # once in a process, because each update of a step calls it
def numba_is_allowed() -> bool:
    """MPISHARD_NUMBA: ``auto``, the default, compiles loops if numba is installed; ``off`` never.

    Updates, copies and roundings have the same bits in both cases. Attention, GELU and layer norms
    in float32 and bfloat16 do not, because sums and exponentials are rounded in other places.
    """
    return _choice("MPISHARD_NUMBA", "auto", "off") == "auto"


def onednn_library() -> str:
    """MPISHARD_ONEDNN: path of the oneDNN library that multiplies; ``off`` uses none.

    ``auto``, the default, looks for the extra ``bf16``, then for the system's or conda's library.
    """
    return os.environ.get("MPISHARD_ONEDNN", "auto")


def float32_products() -> str:
    """MPISHARD_PRODUCTS: the library that multiplies float32, ``numpy`` or ``onednn``.

    ``auto``, the default, is the choice that `mpishard doctor --products` keeps for this processor,
    or NumPy.
    """
    return _choice("MPISHARD_PRODUCTS", "auto", "numpy", "onednn")


def cache_folder() -> Path:
    """XDG_CACHE_HOME/mpishard, the folder of what is kept for this user; in ~/.cache without it."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    home = Path(os.environ.get("HOME", "/"))
    return (Path(given) if given else home / ".cache") / "mpishard"


def cuda_aware() -> bool:
    """MPISHARD_CUDA_AWARE: ``1`` passes pointers to GPU memory to MPI; ``0``, the default, never.

    A library that is not built for it crashes or reads wrong data, so only the user switches it on.
    """
    return _choice("MPISHARD_CUDA_AWARE", "0", "1") == "1"


_CUDA_HINTS = ("MPICH_GPU_SUPPORT_ENABLED", "OMPI_MCA_opal_cuda_support", "MV2_USE_CUDA")


def cuda_aware_hint() -> str | None:
    """Return a variable that suggests that the MPI library can read GPU memory, or None."""
    for name in _CUDA_HINTS:
        if os.environ.get(name, "").lower() in ("1", "true", "yes"):
            return f"{name}={os.environ[name]}"
    return None


def visible_gpus() -> str | None:
    """CUDA_VISIBLE_DEVICES: the GPUs that this process may use, if it is set."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def virtual_nodes() -> int:
    """MPISHARD_VIRTUAL_NODES: number of nodes that each node simulates; 1 if it is not set.

    Ranks of different simulated nodes share no memory, as if they ran on several machines.
    """
    text = os.environ.get("MPISHARD_VIRTUAL_NODES", "1")
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"MPISHARD_VIRTUAL_NODES must be an integer, 1 or more; got {text!r}")
    return int(text)


def trace_folder() -> Path | None:
    """MPISHARD_TRACE: the folder for traces of the whole run, one per rank; None without it."""
    text = os.environ.get("MPISHARD_TRACE", "")
    if not text:
        return None
    folder = Path(text).absolute()
    # A folder that does not exist yet is made by the trace's writer.
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"MPISHARD_TRACE must be a folder, and {text} is a file")
    return folder


def verification() -> tuple[Path, int] | None:
    """MPISHARD_VERIFY, ``STEPS:FOLDER`` of `mpishard verify`: folder and steps; None without it."""
    steps, _, folder = os.environ.get("MPISHARD_VERIFY", "").partition(":")
    return (Path(folder), int(steps)) if steps else None


def job_folder() -> Path | None:
    """MPISHARD_JOB_FOLDER: the folder of the ranks' ``rank-*.calls``, each a `StatusPage`, or None.

    `mpishard run` sets it, reads the files when the job has ended, and removes the folder.
    """
    text = os.environ.get("MPISHARD_JOB_FOLDER", "")
    return Path(text) if text else None


def has_other_hosts() -> bool:
    """MPISHARD_RUN: whether `mpishard run` started this process for a job on several hosts."""
    return "MPISHARD_RUN" in os.environ


def restart_count() -> int:
    """MPISHARD_RESTART: number of times that `mpishard run` has restarted this job.

    It is 0 after the first start, and if `mpishard run` did not start this process.
    """
    return _number("MPISHARD_RESTART") or 0


def most_restarts() -> int:
    """MPISHARD_MAX_RESTARTS: how many times `mpishard run` may start this job again; 0 elsewhere.

    `mpishard run` sets it to its ``--max-restarts``.
    """
    return _number("MPISHARD_MAX_RESTARTS") or 0


_REMOTE_SHELLS = ("PRTE_MCA_plm_ssh_agent", "PRTE_MCA_plm_rsh_agent", "OMPI_MCA_plm_rsh_agent")


def remote_shell(is_hydra: bool) -> str:
    """Return the program with which a launcher reaches other machines: ssh by default.

    Parameters
    ----------
    is_hydra : bool
        Whether the launcher is MPICH's, which reads HYDRA_LAUNCHER_EXEC. Open MPI's launcher reads
        PRTE_MCA_plm_ssh_agent and its older names; the first that is set counts.
    """
    # Open MPI's variable may name several programs, as `ssh : rsh`, of which the first is used.
    names = ("HYDRA_LAUNCHER_EXEC",) if is_hydra else _REMOTE_SHELLS
    chosen = next((os.environ[name] for name in names if os.environ.get(name)), "ssh")
    return chosen if is_hydra else chosen.partition(":")[0].strip()


_FORWARDED_PREFIXES = (
    "MPISHARD_", "OMP_", "OPENBLAS_", "MKL_", "BLIS_", "GOTO_", "KMP_", "NUMBA_", "PYTHON",
    "VIRTUAL_ENV", "CONDA_PREFIX", "PATH", "LD_LIBRARY_PATH", "CUDA_", "CUPY_", "NCCL_",
    "HF_", "XDG_CACHE_HOME",
)  # fmt: skip


def forwarded_variables() -> list[str]:
    """Return the variables that ranks on other machines need, for launchers that pass none on."""
    return sorted(name for name in os.environ if name.startswith(_FORWARDED_PREFIXES))


def environment() -> dict[str, str]:
    """Return all variables of this process, for a process that it starts."""
    return dict(os.environ)


def openblas_kernel_is_set() -> bool:
    """Return whether the user chose the kernels of OpenBLAS, with OPENBLAS_CORETYPE."""
    return "OPENBLAS_CORETYPE" in os.environ


def output_is_passed_on() -> bool:
    """Return whether a launcher passes this process's output on to a place that is no terminal.

    `mpishard run` says so by `terminal_columns`. Open MPI's launcher is the parent of ranks on its
    machine; srun gives a rank a terminal only if the user asked for it.
    """
    if job_folder() is not None:
        return terminal_columns() is None
    if "OMPI_COMM_WORLD_SIZE" not in os.environ or is_slurm_step():
        return False
    try:
        output = os.readlink(f"/proc/{os.getppid()}/fd/1")  # noqa: PTH115 - it may be a pipe
    except OSError:
        return True
    return not output.startswith(("/dev/pts/", "/dev/tty"))


def terminal_columns() -> int | None:
    """MPISHARD_COLUMNS: width of the terminal that shows this process's output, or None.

    `mpishard run` sets it, because the output of a rank is a pipe even if a terminal is at its end.
    """
    value = os.environ.get("MPISHARD_COLUMNS", "")
    return int(value) if value.isdecimal() else None
