"""Threads of one process as ranks.

Begin with `backend`: `InMemoryCommunicationBackend` has a rank's life cycle, waiting, collectives
and messages. `world` is the state that the ranks share: rendezvous, messages, failures. `run` has
`run_in_threads`, which calls a function on several ranks and raises the failure of any of them.
Imports `tracing`, `contract` and `failure`.
"""
