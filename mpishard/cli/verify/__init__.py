"""``mpishard verify``: compare sharded training of a model with training it in one process.

Begin with ``command.py``: it checks the flags, trains alone and on ranks, and shows the result, a
`Comparison` (``comparison.py``). A factory's model is trained by ``reference.py`` in a process of
its own, and by ``ranks.py`` on all ranks, which compare themselves with it. Both read
``problem.py`` (the factory: model, data, optimizer, options) and ``job.py`` (the mesh, the samples
of each step). The reference uses no engine, store or update rule of mpishard: ``textbook.py`` has
the rules once more. A script with a loop of PyTorch is run on one rank and on several, and the
steps that ``mpishard.torch`` records there are compared.

It may import ``mpishard.cli.run`` and the shared modules of ``mpishard.cli``, no other command.
"""
