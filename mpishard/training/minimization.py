"""`minimize`: L-BFGS on a function whose samples the ranks share.

`minimize_arguments` checks the arguments. The function is wrapped as a black box, `Objective`, of
`objective`. The rule `LBFGS` runs on it through the sharded optimizers, and `_Minimization` decides
when to stop.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpishard import checkpoint as checkpoints
from mpishard.base import Array, NonFiniteLossError, array_namespace
from mpishard.callbacks import Run
from mpishard.communication import (
    CommunicationBackend,
    ReductionOperation,
    differences,
    init,
    same_outcome,
)
from mpishard.contracts import PathLike
from mpishard.data import Dataset, count_samples
from mpishard.models import ZeRO2Model, check_leaves
from mpishard.observe import MetricsWriter
from mpishard.optimizers import LBFGS, ZeRO2Optimizer
from mpishard.sharding import ShardingConfiguration
from mpishard.training.data import OptimizationInputData
from mpishard.training.minimize_arguments import (
    check_functions,
    check_method,
    checked_args,
    checked_bounds,
    checked_options,
    checked_theta,
)
from mpishard.training.objective import LeafSamples, Objective
from mpishard.training.result import OptimizeResult
from mpishard.training.run_state import UserState
from mpishard.training.saving import RunCheckpoints, checkpoint_to_resume

_CALLBACK = "minimize_callback"  # key of the callback's state in a checkpoint's metadata
_NO_STATE: dict[str, list[Any]] = {"names": [], "ranks": []}


def minimize(
    fun: Callable[..., object],
    theta0: object,
    args: Dataset | Sequence[Dataset] = (),
    method: str = "L-BFGS",
    *,
    backend: CommunicationBackend | None = None,
    jac: bool | Callable[..., Array] = True,
    bounds: Any = None,
    options: Mapping[str, float | None] | None = None,
    callback: Callable[..., object] | None = None,
    local_data: bool = False,
    checkpoint: PathLike | None = None,
    checkpoint_every: int | None = None,
    resume: PathLike | bool | None = None,
    metrics: PathLike | None = None,
) -> OptimizeResult:
    """Minimize a mean loss over samples, which the ranks share. Collective.

    It is called as ``scipy.optimize.minimize`` with ``jac=True``. Each rank evaluates the function
    on its share of the samples; the gradient is reduced, and each rank holds 1/N of the 2m + 3
    vectors of L-BFGS. The iterates are those of one process but for the order of sums; on all ranks
    they are the same bits. With the option ``gradient_leaves`` they are so for any number of ranks.

    Parameters
    ----------
    fun : callable
        ``fun(theta, *args)`` returns the *mean* loss over the samples it is given and its gradient,
        an array of shape (n,); both may be of JAX or PyTorch. It must not change theta. It is
        called with at least one sample.
    theta0 : array_like
        First parameters, shape (n,), floating. Rank 0's values are used.
    args : sequence of array or data set
        Arrays of equal length, the *same* on every rank. They are cut along their first dim, and
        each rank reads its share. Without any, only rank 0 evaluates the function.
    method : str
        "L-BFGS", or SciPy's name of it, "L-BFGS-B": with and without bounds. See
        `mpishard.optimizers.LBFGS` for papers and equations.
    backend : CommunicationBackend, optional
        The ranks; default ``mpishard.init()``.
    jac : True or callable
        ``jac(theta, *args)`` returns the gradient, if ``fun`` returns the loss alone.
    bounds : sequence of (low, high), optional
        One pair for each element of theta, None for no bound; or an object with ``lb`` and ``ub``,
        as ``scipy.optimize.Bounds``. Directions are projected onto the box.
    options : mapping, optional
        ``maxiter`` (15,000), ``maxfun`` (15,000), ``gtol`` (1e-5, of the largest element of the
        gradient), ``ftol`` (2.2e-9, of the fall of the loss, relative to it or to 1), ``maxls``
        (20), ``c1``, ``c2``, and ``maxcor`` (10), the number m of pairs. Not SciPy's:
        ``gradient_leaves`` (None), a power of two V. The samples are cut into V leaves, ``fun`` is
        called once for each, and worlds of 1 to 8 and of 16, 32 .. V ranks walk through the same
        bits, as with `ShardingConfiguration`.
    callback : callable, optional
        ``callback(theta)`` or ``callback(intermediate_result)`` after each iteration, on every
        rank, with the gathered theta. StopIteration on any rank ends the run on all. If it has
        ``state_dict()`` and ``load_state_dict(state)``, checkpoints save its state, and a resumed
        run restores it.
    local_data : bool
        ``args`` are this rank's own samples, any number of them, even none.
    checkpoint : path, optional
        Folder of the run's checkpoints. If it has some, the run continues from the newest one that
        verifies, at any world size.
    checkpoint_every : int, optional
        Iterations between checkpoints; default at the end only.
    resume : path or bool, optional
        As for `OptimizationInputData`.
    metrics : path, optional
        File to which rank 0 writes one JSON object per iteration: its ``step``, the ``loss`` after
        it, and the number of ``evaluations`` so far. A resumed run continues the file.

    Returns
    -------
    OptimizeResult
        The fields of SciPy's but ``hess_inv``, the same on every rank.

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit, before anything is communicated; on every rank, if the ranks
        ask for different runs.
    NonFiniteLossError
        On every rank, if the loss or its gradient is not finite at ``theta0``, or at the last trial
        of a line search. In the second case its ``result`` is the best point so far.

    Examples
    --------
    >>> import mpishard
    >>> import numpy as np
    >>> def fun(theta, x, y):
    ...     error = x @ theta - y
    ...     return np.mean(error**2), 2 * x.T @ error / len(x)
    >>> x = np.random.default_rng(0).standard_normal((100, 3))
    >>> with mpishard.init() as backend:
    ...     result = minimize(fun, np.zeros(3), (x, x @ [1.0, 2.0, 3.0]), backend=backend)
    >>> result.x.round(4).tolist(), result.success
    ([1.0, 2.0, 3.0], True)
    """
    # All arguments are checked before `init`: a mistake must not begin with starting MPI.
    theta = checked_theta(theta0)
    args = checked_args(args, local_data=local_data)
    check_method(method)
    rule, limits, leaves = checked_options(options, local_data=local_data)
    # It moves theta into the box, so that already the first evaluation is allowed.
    box = checked_bounds(bounds, theta, rule)
    check_functions(fun, jac, callback)
    if not isinstance(backend, CommunicationBackend | None):
        raise TypeError(f"backend must be a CommunicationBackend, got {backend!r}")
    # It checks these arguments and finds checkpoints. Its model and samples are placeholders.
    saving = OptimizationInputData(
        model=fun,
        x_train=np.zeros(1),
        y_train=np.zeros(1),
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
        resume=resume,
        local_data=local_data,
        metrics=metrics,
    ).checked()
    backend = init() if backend is None else backend
    backend.initialize()
    config = ShardingConfiguration(backend, gradient_leaves=leaves)
    check_leaves(config, backend.world_size)
    # The optimizer takes batches: here each consists of all of this rank's samples.
    samples = LeafSamples.of(args, backend, leaves, local_data=local_data)
    # Compared before the first evaluation: ranks with other arguments would wait for ever.
    choices = {
        **rule.fingerprint(), **limits, "parameters": theta.size, "dtype": theta.dtype.name,
        "bounds": None if box is None else zlib.crc32(np.stack(box).tobytes()),
        "data sets": len(args),
        "samples": None if local_data else count_samples(args[0]) if args else 1,
        "local_data": local_data, "gradient_leaves": leaves,
        "callback": callback is not None, "callback's state": _has_state(callback),
        "jac": jac is True, "metrics": metrics is not None,
        "checkpoint": checkpoint is not None, "checkpoint_every": checkpoint_every,
        "resume": resume is True if resume is None or isinstance(resume, bool) else "path",
    }  # fmt: skip
    if differing := differences(backend, choices):
        raise ValueError(f"every rank must minimize the same function; by rank, {differing}")
    run = _Minimization(config, rule, limits, Objective(fun, jac, theta), callback)
    with ExitStack() as stack:
        if _has_state(callback):
            # Refuses an object that several thread-ranks share, before a checkpoint changes it.
            Run([callback], run.backend).enter(stack)
        return run.go(samples, saving, box)


@dataclass
class _Minimization:
    """One minimization: its model, its optimizer, and the reasons to stop."""

    config: ShardingConfiguration
    rule: LBFGS
    limits: Mapping[str, float]
    objective: Objective
    callback: Callable[..., object] | None
    writer: MetricsWriter | None = None  # on rank 0, if there are metrics

    @property
    def backend(self) -> CommunicationBackend:
        return self.config.communication_backend

    def go(
        self,
        samples: LeafSamples,
        saving: OptimizationInputData,
        box: tuple[Array, Array] | None,
    ) -> OptimizeResult:
        """Minimize. Collective."""
        backend = self.backend
        # ZeRO-2 divides the 2m + 3 vectors, and leaves each rank the whole theta that ``fun``
        # needs.
        self.model = ZeRO2Model(self.objective, self.config)
        self.optimizer = ZeRO2Optimizer(self.rule, self.config)
        state = self.optimizer.checkpoint_view(self.model)
        # A function has no other attributes to save, so the warning about them is switched off.
        self.model.engine.has_warned_of_unsaved_attributes = True
        own = RunCheckpoints(saving, backend) if saving.checkpoint is not None else None
        kept, is_resumed = self._resume(saving, own)
        if box is not None:
            # Bounds are kept as state, so that they are cut as the parameters are.
            for piece in self.model.engine.pieces.updated:
                for name, bound in zip(("lower", "upper"), box, strict=True):
                    state.vectors[name][piece.in_shard] = bound[piece.start : piece.stop]
        self.numbers = state.numbers
        # -1: the run goes on.
        status, message = -1, ""
        if is_resumed:  # a run that had reached its end makes no further iteration
            status, message = self._reason(self.numbers.get("before"))
        if own is not None and status < 0:
            with same_outcome(backend):
                own.require_access()
        with ExitStack() as stack:
            self._enter(stack, saving.metrics)
            if own is not None:
                stack.enter_context(own.running())
            while status < 0:
                before = self.numbers.get("value")
                loss = self._iterate(samples)
                before = loss if before is None else before
                status, message = self._reason(before)
                # A last step that found no lower value is not an iteration.
                if "stuck" not in self.numbers and self._reports_and_ends():
                    # SciPy's code for it.
                    status, message = 99, "the callback raised StopIteration"
                if own is None:
                    continue
                step, is_preempted = self.optimizer.steps, own.is_preempted()
                if is_preempted or own.is_due(step, is_last=status >= 0):
                    own.save(step, self.model, self.optimizer, None, {_CALLBACK: kept.position()})
                if is_preempted:
                    own.leave(step, int(self.limits["maxiter"]))
        return self._result(status, message, self.optimizer.steps - ("stuck" in self.numbers))

    def _resume(
        self, saving: OptimizationInputData, own: RunCheckpoints | None
    ) -> tuple[UserState, bool]:
        """Return the callback's state, and whether there was a checkpoint to load. Collective."""
        callback, parts = self.callback, dict[str, Any]()
        if _has_state(callback):
            parts = {f"callback {type(callback).__name__}": callback}
        kept = UserState(parts, self.backend)
        found = checkpoint_to_resume(saving, self.backend, None if own is None else own.folder)
        if found is not None:
            saved = checkpoints.load(found, self.model, self.optimizer).get(_CALLBACK, _NO_STATE)
            with same_outcome(self.backend):  # the user's own code may fail on one rank alone
                kept.check(saved)
                kept.restore(saved, found)
        return kept, found is not None

    def _enter(self, stack: ExitStack, metrics: PathLike | None) -> None:
        """Open the metrics, which ``stack`` closes. Collective."""
        with same_outcome(self.backend):
            if metrics is not None and self.backend.rank == 0:
                # Later lines are those of a run that was killed, and come again.
                self.writer = MetricsWriter(metrics, resume_step=self.optimizer.steps)
                stack.callback(self.writer.close)

    def _iterate(self, samples: LeafSamples) -> float:
        """Make one iteration, and return the loss before it. Collective.

        Raises
        ------
        NonFiniteLossError
            With the best point so far, unless no evaluation was finite.
        """
        try:
            return self.optimizer.step_report(self.model, samples, None).loss
        except NonFiniteLossError as error:
            if "value" in self.numbers:
                error.result = self._result(2, str(error), self.optimizer.steps)
                error.add_note(
                    "The attribute result of this error has the best point, with a loss of "
                    f"{error.result.fun:.6g} after {error.result.nit} iterations"
                )
            raise

    def _reason(self, before: float | None) -> tuple[int, str]:
        """Return status and message if the run ends here, otherwise (-1, ""). Collective."""
        numbers, limits = self.numbers, self.limits
        vectors = self.optimizer.state
        base, gradient = vectors["base"], vectors["base_gradient"]
        xp = array_namespace(gradient)
        if self.rule.is_bounded:
            # A gradient that points out of the box is 0 there: nothing can be gained along it.
            gradient = base - xp.clip(base - gradient, vectors["lower"], vectors["upper"])
        # A rank may own no element at all.
        own = np.array([float(abs(gradient).max()) if gradient.size else 0.0])
        largest = float(self.backend.all_reduce(own, ReductionOperation.MAX)[0])
        value = numbers["value"]
        if largest <= limits["gtol"]:
            return 0, f"the largest element of the gradient, {largest:.3g}, is at most gtol"
        if "stuck" in numbers:
            return 2, numbers["stuck"]
        if before is not None:
            fall = before - value
            # Relative to the loss, and absolute if that is below 1, as in SciPy.
            if fall <= limits["ftol"] * max(abs(before), abs(value), 1.0):
                return 0, f"the loss fell by {fall:.3g}, which is at most ftol"
        if self.optimizer.steps >= limits["maxiter"]:
            return 1, f"maxiter, {limits['maxiter']} iterations, is reached"
        if numbers["evaluations"] >= limits["maxfun"]:
            return 1, f"maxfun, {limits['maxfun']} evaluations, is reached"
        return -1, ""

    def _reports_and_ends(self) -> bool:
        """Report an iteration; return whether the callback of any rank ends the run. Collective."""
        loss = self.numbers["value"]
        if self.writer is not None:
            evaluations = self.numbers["evaluations"]
            self.writer.write(self.optimizer.steps, loss=loss, evaluations=evaluations)
        if self.callback is None:
            return False
        theta = self.model.gather_full_parameters()
        stops = 0
        try:
            if "intermediate_result" in inspect.signature(self.callback).parameters:
                result = OptimizeResult(x=theta, fun=loss)
                self.callback(intermediate_result=result)
            else:
                self.callback(theta)
        except StopIteration:
            stops = 1
        # One rank ends the run on all ranks: otherwise they would wait for it in the next step.
        return bool(self.backend.all_reduce(np.array([stops]), ReductionOperation.MAX)[0])

    def _result(self, status: int, message: str, iterations: int) -> OptimizeResult:
        """Return the best point so far, and release the model. Collective."""
        numbers = self.numbers
        result = OptimizeResult(
            x=self.model.gather_full_parameters(),
            fun=numbers["value"],
            # The pieces of all ranks, end to end, are the whole gradient.
            jac=self.backend.all_gather(self.optimizer.state["base_gradient"]),
            nit=iterations,
            nfev=numbers["evaluations"],
            njev=numbers["evaluations"],
            success=status == 0,
            status=status,
            message=message,
        )
        # Released, so that the user can minimize the same function again.
        self.model.release()
        return result


def _has_state(callback: object) -> bool:
    return hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict")
