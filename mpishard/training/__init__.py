"""The training loop: data, evaluation, early stopping, checkpoints and resume.

Begin with `loop.TrainingRun`, one run of `optimize`. `data` is its input and `result` its output;
`agreement` refuses mistakes before the first step, on all ranks. `evaluation` measures a model on
a data set, `saving` writes checkpoints and finds the one to resume from, and `run_state` is the
state that they hold besides model and optimizer: the best parameters, and the script's own
generators and counters. Progress, metrics, early stopping and the user's hooks are callbacks: see
`mpishard.callbacks`.

`plain` trains a plain model in a world of one. `minimization` is `minimize`, which runs L-BFGS on a
function: `objective` is that function as a model. Every sharded optimizer can run in the loop.
Rules and sharded optimizers are in a room below, and know no loop: their `optimize` imports this
room when it is called.
"""

from mpishard.training.agreement import refuse_early
from mpishard.training.data import OptimizationInputData
from mpishard.training.evaluation import DatasetResult
from mpishard.training.loop import TrainingRun
from mpishard.training.minimization import minimize
from mpishard.training.plain import train_plain
from mpishard.training.result import (
    FitDetectionResult,
    FitType,
    OptimizationResult,
    OptimizeResult,
)

__all__ = [
    "DatasetResult",
    "FitDetectionResult",
    "FitType",
    "OptimizationInputData",
    "OptimizationResult",
    "OptimizeResult",
    "minimize",
]
