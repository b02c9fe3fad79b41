"""``mpishard bench``: measure collectives, training steps and checkpoints on this machine.

Begin with ``command.py``: it has the subcommands, starts the ranks, and shows and writes the
results. Subcommands measure in ``collectives.py`` (beside MPI and PyTorch's gloo), ``step.py``
(steps, and the cost of checks), ``speedup.py`` and ``checkpoint.py``: a benchmark is a dataclass
with ``run(backend)`` and ``table(results, world_size)``. ``step.py`` also has the models, batches
and steps that others train. With ``-n`` each rank runs the same command again.

It may import ``mpishard.cli.run`` and the shared modules of ``mpishard.cli``, no other command.
"""
