"""``mpishard run``: start a script on N ranks, watch it, restart it, and report how it ended.

Begin with ``command.py``. It calls ``job.py``, which checks the user's words, the folder of logs
(``logs.py``) and the ranks' environment. ``launcher.py`` finds the mpiexec that belongs to the MPI
library, and parses ``--hosts``. ``restarts.py`` decides whether the job starts again, and on which
machines; ``resizing.py`` has the command ``mpishard resize``, and answers its requests.
``supervisor.py`` runs one start: it watches the processes (``rank_processes.py``), forwards signals
(``notice.py`` keeps the one that says "save and end"), and removes the files that the ranks leave
in shared memory (``shared_memory.py``). ``job_report.py`` explains the end from the ranks' logs.
``rank_agent.py`` is the parent of each rank. On other hosts ``host_agent.py`` reports what the rank
agents note, to ``hosts.py``. Both programs import nothing of mpishard.

It may import the shared modules of ``mpishard.cli``. Other commands may import it.
"""
