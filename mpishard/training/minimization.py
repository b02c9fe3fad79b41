"""`minimize`: L-BFGS on a function whose samples the ranks share.

The function is wrapped as a black box, `Objective`. The rule `LBFGS` runs on it through the sharded
optimizers, and `_Minimization` decides when to stop.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from mpishard import checkpoint as checkpoints
from mpishard.base import (
    Array,
    LeafLayout,
    NonFiniteLossError,
    array_namespace,
    as_amount,
    as_array,
    as_count,
    nearest,
)
from mpishard.callbacks import Run
from mpishard.communication import (
    CommunicationBackend,
    ReductionOperation,
    differences,
    init,
    same_outcome,
)
from mpishard.contracts import PathLike
from mpishard.data import Dataset, check_dataset, count_samples, take
from mpishard.models import ZeRO2Model, check_leaves
from mpishard.observe import MetricsWriter
from mpishard.optimizers import LBFGS, ZeRO2Optimizer
from mpishard.sharding import ShardingConfiguration, refuse_with_leaves
from mpishard.training.data import OptimizationInputData
from mpishard.training.run_state import UserState
from mpishard.training.saving import RunCheckpoints, checkpoint_to_resume

_CALLBACK = "minimize_callback"  # key of the callback's state in a checkpoint's metadata
_NO_STATE: dict[str, list[Any]] = {"names": [], "ranks": []}
_DEFAULTS = {"maxiter": 15_000, "maxfun": 15_000, "gtol": 1e-5, "ftol": 2.2204460492503131e-09}
# SciPy's name -> the rule's
_RULE_OPTIONS = {"maxls": "max_line_search", "c1": "c1", "c2": "c2", "maxcor": "memory"}


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
    theta = _checked_theta(theta0)
    args = _checked_args(args, local_data=local_data)
    if str(method).lower() not in ("l-bfgs", "l-bfgs-b"):
        raise ValueError(
            f"method must be L-BFGS (or L-BFGS-B), got {method!r}; any other optimizer can run on "
            "all ranks with the loss_and_gradients of a sharded mpishard.FunctionModel"
        )
    rule, limits, leaves = _checked_options(options)
    if leaves is not None and local_data:
        refuse_with_leaves(
            leaves, "local_data=True", "give every rank the same args, or leave out one of the two"
        )
    # It moves theta into the box, so that already the first evaluation is allowed.
    box = _checked_bounds(bounds, theta, rule)
    function = _checked_functions(fun, jac, callback)
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
    named = [
        getattr(given, "__name__", type(given).__name__) for given in (fun, jac) if callable(given)
    ]
    objective = Objective(function, theta, " or ".join(named))
    run = _Minimization(config, rule, limits, objective, callback)
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


def _checked_theta(given: Any) -> Array:
    given = as_array(given)
    theta = given.copy() if hasattr(given, "dtype") else np.array(given)
    # SciPy takes a list of integers, too.
    if theta.dtype.kind in "iub":
        theta = theta.astype(np.float64)
    if theta.ndim != 1 or theta.size == 0 or theta.dtype.name not in ("float32", "float64"):
        raise ValueError(
            "theta0 must be a non-empty 1-D vector of float64 or float32, got "
            f"{theta.dtype.name} of shape {theta.shape}"
        )
    return theta


def _checked_args(args: Dataset | Sequence[Dataset], *, local_data: bool) -> tuple[Dataset, ...]:
    if not isinstance(args, tuple | list):
        args = (args,)  # as SciPy does
    lengths = [check_dataset(a, f"args[{i}]", allow_empty=local_data) for i, a in enumerate(args)]
    if len(set(lengths)) > 1:
        raise ValueError(
            f"args must be arrays with as many samples each, got {lengths}; give other "
            "arguments by functools.partial"
        )
    if local_data and not args:
        raise ValueError("local_data=True needs args: this rank's samples")
    return tuple(args)


def _checked_options(
    options: Mapping[str, Any] | None,
) -> tuple[LBFGS, dict[str, float], int | None]:
    limits: dict[str, float] = dict(_DEFAULTS)
    settings = {}
    leaves = None
    for name, value in (options or {}).items():
        if name in _RULE_OPTIONS:
            settings[_RULE_OPTIONS[name]] = value
        elif name == "gradient_leaves":
            leaves = value
        elif name not in limits:
            known = [*limits, *_RULE_OPTIONS, "gradient_leaves"]
            raise ValueError(
                f"minimize has no option {name!r}; known are {', '.join(known)}"
                + nearest(name, known)
            )
        elif name.startswith("max"):
            limits[name] = as_count(name, value)
        else:
            limits[name] = as_amount(name, value)
    return LBFGS(**settings), limits, leaves


def _checked_bounds(bounds: Any, theta: Array, rule: LBFGS) -> tuple[Array, Array] | None:
    """Return lower and upper bounds, and move theta into the box."""
    if bounds is None:
        return None
    if hasattr(bounds, "lb"):
        pair = bounds.lb, bounds.ub
    else:
        rows = list(bounds)
        if len(rows) != theta.size or any(len(row) != 2 for row in rows):
            raise ValueError(f"bounds must be {theta.size} pairs (low, high), got {len(rows)}")
        pair = (
            [-np.inf if low is None else low for low, _ in rows],
            [np.inf if high is None else high for _, high in rows],
        )
    lower, upper = (np.broadcast_to(np.asarray(b, theta.dtype), theta.shape) for b in pair)
    # Not "lower > upper", which is False for NaN.
    wrong = np.flatnonzero(~(lower <= upper))
    if wrong.size:
        k = int(wrong[0])
        raise ValueError(f"bounds[{k}] must be low <= high, got ({lower[k]}, {upper[k]})")
    xp = array_namespace(theta)
    lower, upper = xp.asarray(lower), xp.asarray(upper)
    xp.clip(theta, lower, upper, out=theta)
    rule.is_bounded = True
    return lower, upper


def _checked_functions(fun: Any, jac: Any, callback: object) -> Callable[..., object]:
    for name, function in (("fun", fun), ("callback", callback)):
        if not callable(function) and not (name != "fun" and function is None):
            raise TypeError(f"{name} must be a function, got {function!r}")
    if jac is True:
        return fun  # type: ignore[no-any-return]
    if not callable(jac):
        raise ValueError(  # noqa: TRY004 - as SciPy's jac=False
            f"jac must be True, if fun returns (loss, gradient), or a function, got {jac!r}; an "
            "adapter, such as mpishard.adapters.AutogradModel, differentiates a loss"
        )

    def both(theta: Array, *args: Array) -> tuple[object, object]:
        return fun(theta, *args), jac(theta, *args)

    return both


class LeafSamples:
    """The part of the data that one rank evaluates, in leaves; one without ``gradient_leaves``.

    Parameters
    ----------
    leaves : sequence of (sequence of object, int)
        The arguments of the function besides theta for each leaf, cut along the first dim, and the
        leaf's number of samples. A function without data counts as one sample, on rank 0.
    """

    def __init__(self, leaves: Sequence[tuple[Sequence[object], int]]) -> None:
        self.leaves = leaves

    def __len__(self) -> int:
        return sum(count for _, count in self.leaves)

    def __getitem__(self, part: slice) -> LeafSamples:
        """Return the leaf whose samples are ``part``, without a copy."""
        # The engine asks for one leaf after the other, by its samples.
        ends = accumulate(count for _, count in self.leaves)
        for (arrays, count), end in zip(self.leaves, ends, strict=True):
            if (end - count, end) == (part.start, part.stop):
                return LeafSamples([(arrays, count)])
        raise ValueError(f"no leaf is {part}")

    @classmethod
    def of(
        cls,
        args: Sequence[Dataset],
        backend: CommunicationBackend,
        leaves: int | None,
        *,
        local_data: bool,
    ) -> LeafSamples:
        """Return this rank's samples: its part of data that all ranks have, or its own data."""
        if local_data:
            return cls([(tuple(args), count_samples(args[0]))])
        size = backend.world_size
        layout = LeafLayout(count_samples(args[0]) if args else 1, leaves or size, size)
        found = []
        for part in layout.slices(backend.rank):
            rows = np.arange(part.start, part.stop)
            # Arrays in memory are cut without a copy; of files each rank reads its part.
            arrays = [a[part] if isinstance(a, np.ndarray) else take(a, rows) for a in args]
            found.append((tuple(arrays), len(rows)))
        return cls(found)


class Objective:
    """``fun(theta, *samples)`` with the members of a black box.

    Parameters
    ----------
    function : callable
        ``function(theta, *arrays)`` returns mean loss and gradient.
    theta : Array
        First parameters, shape (n,).
    described_as : str
        Name of the user's functions in messages.
    """

    def __init__(
        self,
        function: Callable[..., object],
        theta: Array,
        described_as: str,
    ) -> None:
        self.described_as = described_as
        self._function = function
        self._theta = theta

    def get_parameters(self) -> Array:
        return self._theta

    def set_parameters(self, parameters: Array) -> None:
        # The engine passes a copy that it does not change.
        self._theta = parameters

    def compute_loss_and_gradients(self, x: LeafSamples, y: None) -> tuple[float, Array]:
        """Return the mean loss of the samples, of one leaf, and its gradient, shape (n,)."""
        ((arrays, _),) = x.leaves
        found = self._function(self._theta, *arrays)
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise TypeError(
                f"{self.described_as} must return (loss, gradient), got a {type(found).__name__}"
            )
        # SciPy takes a list of numbers, too. The engine converts arrays of other libraries.
        loss, gradient = found
        return loss, np.asarray(gradient) if isinstance(gradient, list | tuple) else gradient


class OptimizeResult(dict[str, Any]):
    """The fields of ``scipy.optimize.OptimizeResult``, by key and by attribute.

    It is a class of its own because SciPy is no dependency of this package.

    Attributes
    ----------
    x : Array
        The solution, shape (n,), whole on every rank.
    fun : float
        The mean loss there.
    jac : Array
        Its gradient, shape (n,).
    nit, nfev, njev : int
        Iterations; evaluations of loss and gradient, of this run and those it went on from.
    success : bool
        Whether a tolerance was reached.
    status : int
        0 for success, 1 if a limit was reached, 2 if no lower value was found, 99 if the callback
        raised StopIteration.
    message : str
        The reason in words.

    Examples
    --------
    >>> OptimizeResult(fun=0.5, nit=3).fun
    0.5
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the result has no {name!r}, but {', '.join(self)}") from None

    __setattr__ = dict.__setitem__
    __delattr__ = dict.__delitem__

    def __dir__(self) -> list[str]:
        return list(self)

    def __repr__(self) -> str:
        width = max(map(len, self), default=0)
        return "\n".join(f"{name:>{width}}: {value!r}" for name, value in self.items())
