"""``mpishard run``: start a script on N ranks, watch it, restart it, and report how it ended.

Begin with ``command.py``. It calls ``job.py``, which checks all that can be refused: the user's
words, the folder of logs (``logs.py``), the ranks' environment. ``launcher.py`` finds the mpiexec
that belongs to the MPI library, and reads ``--hosts``. ``restarts.py`` decides whether the job
starts again, and on which machines; ``resizing.py`` has the command ``mpishard resize``, and takes
its orders for other ranks. ``supervisor.py`` runs one start: it watches the processes and removes
what they leave in shared memory (``rank_processes.py``), and passes signals on (``notice.py``: the
order to save and end). ``job_report.py`` explains the end from what ``logs.py`` reads.
``rank_agent.py`` is the parent of each rank, and imports nothing of mpishard.

It may import the shared modules of ``mpishard.cli``. Other commands may import it.
"""
