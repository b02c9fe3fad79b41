"""The engine: the one way in which parameters change.

Begin with `engine`, which has two verbs: `Engine.gradient` runs a program's forward and backward,
reduces and checks; `Engine.update` runs a rule and publishes. A step is the second after the first.
`passes` has the ways of making a gradient: summed over all ranks, or of this rank alone; `leaves`
the one whose bits do not depend on the number of ranks. `update` has a strategy's policy, the
passes since the last update and what the ranks agree on before it, the pieces that a rule changes
and the report of a step; `replicas` updates that each rank makes alone
(``auto_sync_gradients=False``); `evaluation` losses and gradients that update nothing.
Imports `programs` and `stores`.
"""
