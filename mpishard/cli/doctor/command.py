"""The command ``mpishard doctor``: groups of findings, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from mpishard.base import settings
from mpishard.cli.doctor import host
from mpishard.cli.doctor.finding import Finding, Verdict, as_json, examined, show_findings
from mpishard.cli.doctor.hosts import examine_hosts, names_of
from mpishard.cli.doctor.job import examine_gpus, examine_job
from mpishard.cli.doctor.mpi import examine_mpi, examine_slurm
from mpishard.cli.run.launcher import MPIInstallation
from mpishard.cli.wording import refusing


def doctor(
    json_wanted: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of lines.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure nothing, and start no ranks.")
    ] = False,
    hosts: Annotated[
        str,
        typer.Option(
            help="Examine these machines instead, and the networks between them.",
            metavar="HOST,...|@FILE",
        ),
    ] = "",
    products: Annotated[
        str,
        typer.Option(
            help="Only keep which library multiplies float32 on this processor.",
            metavar="numpy|onednn",
        ),
    ] = "",
) -> None:
    """Examine this environment, and name commands that fix it.

    Looks at Python, cores and memory, NumPy and its libraries, MPI and its launcher, shared
    memory, GPUs and SLURM; measures matrix products; and starts two ranks that communicate. If
    there is SLURM, it also starts two ranks on two nodes, if they are free. It changes nothing.
    Each line is about something that you can change.

    --products writes the choice to ~/.cache/mpishard/products.json, which all later jobs obey. The
    two libraries round differently, so that no job measures and chooses by itself.

    --hosts logs in to each machine with ssh, compares versions, clocks and addresses, tries a port
    in each direction, and measures a job of one rank on each.

    --json prints {"schema": 2, "problems": N, "notes": N, "findings": [...]}. Each finding has a
    name (group.fact), a verdict (ok, note or problem), a value for programs, a text for people,
    and fix: a command that solves it, or null.

    Exit codes: 0, no problem; 1, a problem was found.
    """
    if (settings.launched_rank() or 0) > 0 and settings.launched_world_size() != 1:
        return  # under a launcher only the first rank reports
    with refusing("doctor"):
        if hosts and products:
            raise ValueError("--products is for this machine; run it on each host")
        names = names_of(hosts) if hosts else []
        kept = host.keep_products(products) if products else None
    wanted = _findings_of_hosts(names, quick) if names else _findings(quick)
    if kept is not None:
        wanted = iter([kept])
    if json_wanted:
        findings = list(wanted)
        typer.echo(as_json(findings))
    else:
        # Each line appears when it is found: measurements and the job take seconds.
        findings = show_findings(wanted)
    if any(finding.verdict is Verdict.PROBLEM for finding in findings):
        raise typer.Exit(1)


def _findings_of_hosts(names: Sequence[str], quick: bool) -> Iterator[Finding]:
    mpi = MPIInstallation.of_this_python()
    yield from examined("mpi", examine_mpi(mpi))
    yield from examined("hosts", examine_hosts(names, mpi, quick))


def _findings(quick: bool) -> Iterator[Finding]:
    # In the order of dependence: a job of ranks needs MPI, which needs a working Python.
    yield from examined("host", host.examine_host())
    yield from examined("numpy", host.examine_numpy(quick))
    yield from examined("numpy", host.examine_float32(quick))
    yield from examined("numpy", host.examine_bfloat16(quick))
    yield from examined("numpy", host.examine_numba())
    # Once for all groups, because each search starts programs.
    mpi = MPIInstallation.of_this_python()
    yield from examined("mpi", examine_mpi(mpi))
    yield from examined("memory", host.examine_shared_memory())
    if not quick:
        yield from examined("job", examine_job(mpi))
    yield from examined("gpu", examine_gpus(mpi, quick))
    yield from examined("slurm", examine_slurm(mpi, quick))
