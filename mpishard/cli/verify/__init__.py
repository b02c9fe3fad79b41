"""``mpishard verify``: compare sharded training of a model with training it in one process.

Begin with ``command.py``: it checks the flags, starts ``reference.py`` in a process of its own,
then ``comparison.py`` on all ranks, and shows the result. All these processes read ``job.py``: the
user's model and data, the mesh, the samples of each step. The reference uses no engine, store or
update rule of mpishard, except the trial steps of a line search. ``script.py`` runs a script with a
loop of PyTorch on one rank and on several, and compares the steps that ``mpishard.torch`` records.

It may import ``mpishard.cli.run`` and the shared modules of ``mpishard.cli``, no other command.
"""
