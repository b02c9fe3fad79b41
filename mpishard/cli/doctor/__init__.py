"""``mpishard doctor``: examine this installation, and name commands that fix its problems.

Begin with ``command.py``: it lists the groups of the report in their order. Each group is one
function that yields findings: ``host.py`` (Python, the machine, NumPy and its libraries, shared
memory), ``mpi.py`` (library, launcher, SLURM, and known reasons why a job fails) and ``job.py``
(two ranks that communicate, GPUs, and the program of these ranks). ``hosts.py`` has the findings
about several machines, on each of which ``remote.py`` runs. A finding is a check that can end in a
command for the user: facts without one belong in the documentation. ``finding.py`` defines a
finding and prints it.

It may import ``mpishard.cli.run`` and the shared modules of ``mpishard.cli``, no other command.
"""
