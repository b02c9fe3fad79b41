"""The contract of all backends, and the parts that they share.

Begin with `backend`: `CommunicationBackend` has every collective. `transport` is the interface
that each way to reach other ranks adds to it. `call` checks and encodes one rank's call,
`matching` compares those of all ranks, and `work` is a collective under way. `reduction` is the
one order of sums, `arena` the memory that a node's ranks share, `records` the facts about a rank,
`status` the flight recorder that keeps them, and `backoff` the way in which a rank waits.
Imports `tracing`, and no other chapter.
"""
