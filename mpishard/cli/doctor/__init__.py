"""``mpishard doctor``: examine this installation, and name commands that fix what is wrong.

Begin with ``command.py``: it lists the groups of the report in their order. Each group is one
function that yields findings, and no group needs another one's: ``host.py`` (Python, the machine,
optional packages), ``numpy_blas.py``, ``mpi.py`` (library, launcher, SLURM), ``shm.py`` (shared
memory), ``job.py`` (two ranks that communicate) and ``gpu.py``. ``finding.py`` defines a finding
and prints it. ``causes.py`` explains why a program failed that the doctor ran, and ``rank.py`` is
the program of the ranks that it starts.

It may import ``mpishard.cli.run`` and the shared modules of ``mpishard.cli``, no other command.
"""
