"""``mpishard verify``: compare sharded training of a model with training it in one process.

Begin with ``command.py``: it checks the flags, starts ``reference.py`` in a process of its own,
then ``rank.py`` on all ranks, and shows what they found (``report.py``). ``job.py`` is what all
these processes read: which training is done, on which mesh, with which samples. ``target.py``
loads the model and data of the user. The reference uses nothing of mpishard's engine, stores or
update rules.

It may import ``mpishard.cli.run`` and the shared modules of ``mpishard.cli``, no other command.
"""
