"""Optimizers whose state is on several ranks, one for each strategy.

Begin with `base.ShardedOptimizerBase`, which has every member, and `state.ModelState`, the rule's
state for one model, the update of a step, and the step that evaluates a batch several times.
`strategies` is the table of the optimizers, one for each strategy, and the one whose number of
ranks may change. `state_bytes` has what a checkpoint has of the state, in memory or as bytes.

This chapter imports from `rules` and `loop`.
"""
