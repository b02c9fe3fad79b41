"""The contract of all backends, and the parts that they share.

Begin with `backend`: `CommunicationBackend` has every collective. `call` checks and encodes one
rank's call, and `matching` compares those of all ranks. `work` is a collective under way, and the
interface that each transport adds to the backend. `reduction` is the one order of sums, and `arena`
the memory that a node's ranks share. `status` is the flight recorder with the facts about each
rank, and `backoff` the way in which a rank waits.
Imports `tracing`, and no other chapter.
"""
