"""The engine: the one way in which parameters change.

Begin with `engine`: `Engine.step` runs a program's forward and backward, reduces, checks, updates
and publishes. `update` has a strategy's policy, the passes since the last update and what the
ranks agree on before it, the pieces that a rule changes and the report of a step; `replicas`
updates that each rank makes alone (``auto_sync_gradients=False``); `evaluation` losses and
gradients that update nothing.
Imports `programs` and `stores`.
"""
