"""``mpishard run``: start a script on N ranks, watch it, restart it, and report how it ended.

Begin with ``command.py``: it calls ``prepared_job.py``, which checks all that can be refused
(``program.py``, ``hosts.py``, ``log_folder.py``, ``rank_environment.py``) and asks
``launcher.py`` for the mpiexec that belongs to the MPI library. ``job.py`` is what all starts of a
job share, ``restarts.py`` decides whether there is another one, on the machines that
``lost_hosts.py`` finds alive. ``supervisor.py`` runs one start: it watches the processes
(``rank_processes.py``), passes signals on (``notice.py``: the order to save and end), removes
``leftovers.py``, and ``job_report.py`` explains the end from ``rank_logs.py``. ``rank_agent.py``
is the parent of each rank, and imports nothing of mpishard.

It may import the shared modules of ``mpishard.cli``. Other commands may import it.
"""
