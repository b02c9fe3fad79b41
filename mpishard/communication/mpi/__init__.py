"""MPI processes as ranks.

Begin with `backend`: `MPICommunicationBackend` is made of the parts in the other files. `job` is
this process in one root world, `group` the communicators of one world, `headers` the exchange that
every collective begins with, and `collectives` has one generator for each. Data pass through
`node_memory` or `messages`. `gpu` brings GPU arrays to the host, `ulfm` lets ranks outlive another,
and `library` loads MPI: mpi4py is imported there alone.
Imports every other chapter.
"""
