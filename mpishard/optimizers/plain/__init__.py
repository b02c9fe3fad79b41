"""Rules without ranks: updates of whole vectors and plain models, in this process.

`training.PlainTraining` is the holder that `Optimizer` delegates its own `optimize`, `step` and
`update_parameters` to. `own_run.OwnRun` is the rule's state for one flat vector, and its bytes.
This chapter imports from all others.
"""
