"""``mpishard doctor``: examine this installation, and name commands that fix what is wrong.

Begin with ``command.py``: it lists the groups of the report in their order. Each group is one
function that yields findings, and no group needs another one's: ``host.py`` (Python, the machine,
optional packages), ``numpy_blas.py``, ``mpi.py`` (library, launcher, SLURM), ``shm.py`` (shared
memory), ``job.py`` (two ranks that communicate) and ``gpu.py``. ``finding.py`` defines a finding
and prints it. ``probe.py`` runs other programs with a time limit, ``causes.py`` explains why such
a program failed, and ``rank.py`` is the program of the ranks that are started.

It may import ``mpishard.cli.run`` and the shared modules of ``mpishard.cli``, no other command.
"""
