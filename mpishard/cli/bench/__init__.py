"""``mpishard bench``: measure collectives and training steps on this machine, or on a cluster.

Begin with ``command.py``: it has the subcommands, starts the ranks, and shows and writes the
results. Subcommands measure in ``collectives.py`` (beside those of MPI) and ``step.py``: a
benchmark is a dataclass with ``run(backend)`` and ``table(results, world_size)``. ``machine.py``
measures the speeds from which ``mpishard plan step`` plans. With ``-n`` each
rank runs the same command again. ``benchmarks/`` of the repository measures more, with the same
classes.

It may import ``mpishard.cli.run`` and the shared modules of ``mpishard.cli``, no other command.
"""
