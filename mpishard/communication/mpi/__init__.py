"""MPI processes as ranks.

Begin with `backend`: `MPICommunicationBackend` is made of the parts in the other files. `job` is
this process in one root world, and `group` the communicators of one world. `headers` is the
exchange that begins every collective, and `collectives` has one generator for each; those of arenas
are in `arena`. Data pass through `node_memory` or `messages`. `gpu` brings GPU arrays to the host,
`ulfm` lets ranks outlive a lost one, and `library` loads MPI; only it imports mpi4py.
Imports every other chapter.
"""
