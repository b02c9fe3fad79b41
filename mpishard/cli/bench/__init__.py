"""``mpishard bench``: measure collectives, training steps and checkpoints on this machine.

Begin with ``command.py``: it has the subcommands, starts the ranks, and shows and writes the
results. Each subcommand measures in a file of its own, as a dataclass with ``run(backend)`` and a
function that makes a table: ``collectives.py`` (with ``peers.py``, PyTorch's gloo), ``step.py``,
``speedup.py``, ``checks.py``, ``checkpoint.py``. ``workload.py`` has the models, batches and steps
that they train, ``report.py`` writes JSON. With ``-n`` each rank runs the same command
again (``rank.py``).

It may import ``mpishard.cli.run`` and the shared modules of ``mpishard.cli``, no other command.
"""
