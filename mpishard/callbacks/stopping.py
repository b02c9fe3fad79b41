"""Early stopping: the best evaluation so far, and the decision to stop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from mpishard.base import as_amount, as_count
from mpishard.callbacks.run import Record, Run


@dataclass
class EarlyStopping:
    """The best of the evaluations so far, and whether to go on.

    The best evaluation is the one with the lowest score. Early stopping requires more: an
    evaluation counts as an improvement if its score lies at least ``tolerance`` below that of the
    last improvement. Training stops after ``patience`` evaluations in a row without improvement
    (after Prechelt, "Early Stopping - But When?", in "Neural Networks: Tricks of the Trade", 1998,
    which compares several such criteria). A score of NaN is never the best and never an
    improvement.

    `optimize` makes one from its ``patience`` and ``tolerance``, and then also returns the best
    parameters.

    Parameters
    ----------
    patience : int or None
        Number of evaluations without improvement after which training stops; None: never.
    tolerance : float
        Smallest improvement that counts, in units of the score.

    Raises
    ------
    TypeError, ValueError
        If patience is no integer of 1 or more, or tolerance is no finite number of 0 or more.

    Examples
    --------
    >>> stopping = EarlyStopping(patience=2, tolerance=0.1)
    >>> for step, score in enumerate([1.0, 0.95, 0.92]):
    ...     stopping.observe(step, score)
    >>> stopping.is_exhausted, stopping.best_step
    (True, 2)
    """

    patience: int | None = None
    tolerance: float = 0.0
    best_score: float = math.inf
    best_step: int | None = None
    reference: float = math.inf
    waited: int = 0

    def __post_init__(self) -> None:
        if self.patience is not None:
            as_count("patience", self.patience)
        as_amount("tolerance", self.tolerance)

    def observe(self, step: int, score: float) -> None:
        """Record an evaluation after ``step`` updates."""
        # Both tests, because an equal score would pass the second one with a tolerance of 0.
        if score < self.reference and self.reference - score >= self.tolerance:
            self.reference = score
            self.waited = 0
        else:
            self.waited += 1
        # An improvement smaller than the tolerance does not count, but is the best so far.
        if score < self.best_score:
            self.best_score, self.best_step = score, step

    def on_start(self, run: Run, record: Record) -> None:
        """Forget the evaluations of an earlier run, unless this run resumes it."""
        # The state of a resumed run comes from its checkpoint.
        if record.step == 0:
            self.best_score = self.reference = math.inf
            self.best_step, self.waited = None, 0

    def on_evaluate(self, run: Run, record: Record) -> None:
        """Record the score, and stop the run if the patience is exhausted."""
        if record.score is not None:
            self.observe(record.step, record.score)
        if self.is_exhausted:
            run.stop(f"{self.waited} evaluations without improvement")

    @property
    def is_exhausted(self) -> bool:
        """Whether the patience is exhausted."""
        return self.patience is not None and self.waited >= self.patience

    def state_dict(self) -> dict[str, float | None]:
        """Return the state that a checkpoint saves as JSON."""
        # Without the settings: a resumed run may be given more patience.
        return {k: v for k, v in asdict(self).items() if k not in {"patience", "tolerance"}}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        """Go on from a saved `state_dict`."""
        for name in self.state_dict():
            setattr(self, name, state[name])
