"""The training loop: data, evaluation, early stopping, checkpoints and resume.

Begin with `loop.TrainingRun`, one run of `optimize`. `data` is its input and `result` its output;
`agreement` refuses mistakes before the first step, on all ranks. `evaluation` measures a model on
a data set, `saving` writes checkpoints and finds the one to resume from, and `run_state` is the
state that they hold besides model and optimizer: the best parameters, and the script's own
generators and counters. Progress, metrics, early stopping and the user's hooks are callbacks: see
`mpishard.callbacks`.

Every sharded optimizer can run in the loop; this chapter imports from no other one.
"""
