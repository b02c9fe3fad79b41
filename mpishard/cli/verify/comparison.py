"""The program of the ranks of ``mpishard verify``: train sharded, compare, and name the cause."""

from __future__ import annotations

import pickle
import sys
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.table import Table

from mpishard.arrays import Array
from mpishard.bfloat16 import UNIT_ROUNDOFF
from mpishard.cli.tables import errors_table
from mpishard.cli.verify.job import (
    Problem,
    VerifyJob,
    build_problem,
    load_factory,
    relative_error,
)
from mpishard.cli.verify.reference import RULES, Reference
from mpishard.cli.wording import counted
from mpishard.communication import CommunicationBackend
from mpishard.communication.contract.matching import who
from mpishard.data import take
from mpishard.distributed import as_distributed, launch
from mpishard.models import ShardedModelBase
from mpishard.nn import Layer
from mpishard.optimizers import (
    AsyncSGDOptimizer,
    ElasticOptimizer,
    GradientCompressionOptimizer,
    LocalSGDOptimizer,
)
from mpishard.sharding import ParameterEntry, ShardingConfiguration

_FILE = "comparison-{}.pickle"
Entries = tuple[ParameterEntry, ...]
# With a period of one step, and with all elements of a gradient, nothing differs from the strategy.
_WRAPPERS = {
    "local-sgd": partial(LocalSGDOptimizer, synchronization_period=1),
    "elastic": ElasticOptimizer,
    "compression": partial(GradientCompressionOptimizer, compression_ratio=1.0, method="top-k"),
    "async": AsyncSGDOptimizer,
}
_LEAST_EXPONENT = -125  # of normal float32 numbers, whose mantissa is in [0.5, 1) as in frexp


@dataclass(frozen=True, slots=True)
class Comparison:
    """Relative errors of every rank against the reference; ``inf`` if something is not finite.

    Parameters
    ----------
    entries : sequence of ParameterEntry
        Names and shapes of the parameters.
    dtype : str
        Name of their dtype.
    built, parameters : Array
        Errors of the parameters as the factory built them, shape (ranks, parameters), and after
        each step, shape (ranks, steps, parameters).
    losses : Array
        Errors of the losses, shape (ranks, steps).
    gradients : Array
        Errors of the gradients of the rank's own samples, shape (ranks, steps compared,
        parameters).
    inputs : Array
        True if the rank got other samples, shape (ranks, steps).
    predictions : Array
        Errors of the predictions, shape (ranks,); NaN if the model predicts nothing.
    copies : Array
        Number of parameters whose bfloat16 copy is not the nearest to the owners' values, shape
        (ranks, steps); 0 without mixed precision.
    tolerance, gradient_tolerance : float
        Largest relative errors that are allowed, the second one of gradients.
    computed : {"alone", "together", "repeated"}
        The ranks that computed a batch: one; several, each a part; several, each all of it.
    """

    entries: Entries
    dtype: str
    built: Array
    parameters: Array
    losses: Array
    gradients: Array
    inputs: Array
    predictions: Array
    copies: Array
    tolerance: float
    gradient_tolerance: float
    computed: Literal["alone", "together", "repeated"]

    def write(self, folder: Path, schedule: str) -> None:
        """Write it to ``folder``, for `read`."""
        # Its fields and not itself, because the class of the writing process is in ``__main__``.
        fields = {name: getattr(self, name) for name in self.__slots__}
        (folder / _FILE.format(schedule)).write_bytes(pickle.dumps(fields))

    @classmethod
    def read(cls, folder: Path, schedule: str) -> Comparison | None:
        """Return the comparison in ``folder``; None if the ranks failed before they wrote it."""
        path = folder / _FILE.format(schedule)
        if not path.is_file():
            return None
        return cls(**pickle.loads(path.read_bytes()))  # noqa: S301 - temporary, this user's

    @property
    def is_equal(self) -> bool:
        """True if everything that was compared is within the tolerance, on every rank."""
        # Predictions are NaN if the model predicts nothing.
        errors = (self.built, self.parameters, self.losses, np.nan_to_num(self.predictions))
        if (self.gradients > self.gradient_tolerance).any():
            return False
        return not (self.inputs.any() or self.copies.any()) and all(map(self._within, errors))

    def _within(self, errors: Array) -> bool:
        return bool((errors <= self.tolerance).all())

    def table(self) -> Table:
        """Return each parameter's error, the worst first."""
        table = errors_table(("parameter", "shape"), ("error", "on rank", "above from step"))
        # Step 0 is before training.
        errors = np.concatenate([self.built[:, None], self.parameters], axis=1)
        worst = errors.max(axis=(0, 1))
        for i in np.argsort(-worst, kind="stable"):
            steps = np.flatnonzero((errors[:, :, i] > self.tolerance).any(axis=0))
            rank, first = errors[:, :, i].max(axis=1).argmax(), f"{steps[0]}" if steps.size else ""
            row = self.entries[i].name, self.entries[i].shape, f"{worst[i]:.1e}", rank, first
            table.add_row(*map(str, row), style="bold red" if steps.size else None)
        return table

    def lines(self) -> list[str]:
        """Return the other errors, their cause if there is a difference, and the verdict."""
        others = [f"losses {self.losses.max():.1e}", f"own gradients {self.gradients.max():.1e}"]
        if not np.isnan(self.predictions).any():
            others.append(f"predictions {self.predictions.max():.1e}")
        lines = [f"worst error of {', '.join(others)}"]
        if self.computed == "repeated":
            text = (
                "every rank computed all of its batch, because the model is a black box. A model "
            )
            lines.append(f"{text}of layers, an ILayeredModel (mpishard.nn), is computed in parts")
        errors = np.maximum(self.built, self.parameters.max(axis=1))
        worst, names = f"{self.tolerance:.0e} (worst {errors.max():.1e})", len(self.entries)
        if self.is_equal:
            ranks = counted(len(self.built), "rank")
            return [*lines, f"EQUAL: all {names} parameters on {ranks} are within {worst}"]
        above = int((errors > self.tolerance).any(axis=0).sum())
        return [*lines, self._reason(), f"DIFFERENT: {above} of {names} parameters exceed {worst}"]

    def _reason(self) -> str:
        """Return the first difference, and its possible causes."""
        if not self._within(self.built) or self.inputs.any():
            kind = "other data" if self._within(self.built) else "other first parameters"
            ranks = _ranks(self.inputs.any(axis=1) | (self.built > self.tolerance).any(axis=1))
            text = "factory(seed) must depend on its seed and on nothing else"
            return f"{ranks} got {kind} than a process alone: {text}"
        if self.copies.any():
            step = int(self.copies.any(axis=0).argmax())
            most, ranks = self.copies[:, step].max(), _ranks(self.copies.any(axis=1))
            text = f"step {step + 1}: on {ranks} {most} bfloat16 parameters are not the nearest to "
            return f"{text}the float32 values of their owners. The fault is mpishard's"
        # A wrong gradient makes all later parameters wrong, too: the first difference is the cause.
        wrong = (self.parameters > self.tolerance).any(axis=(0, 2))
        first_wrong = int(wrong.argmax()) if wrong.any() else len(wrong)
        off = self.gradients > self.gradient_tolerance
        first_off = int(off.any(axis=(0, 2)).argmax()) if off.any() else len(wrong) + 1
        if first_off <= first_wrong:
            name = self.entries[self.gradients[:, first_off].max(axis=0).argmax()].name
            text = f"differs from that of a process alone (worst {name})"
            if self.computed == "together":
                return (
                    f"step {first_off + 1}: the gradient of one batch that several ranks compute "
                    f"together {text}. Does a layer compute statistics of the whole "
                    "batch, or depend on its rank? If not, the fault is mpishard's"
                )
            return (
                f"step {first_off + 1}: on {_ranks(off[:, first_off].any(axis=1))} the gradient of "
                f"the rank's own samples {text}. The model depends on its rank, or "
                "on more than parameters and data: an environment variable, the process or thread, "
                "the time, np.random's global state, earlier calls"
            )
        if wrong.any():
            return (
                f"step {first_wrong + 1}: each rank's gradient of its own samples is right, and "
                "the update is not. Is the loss a mean over samples, each of which counts by "
                "itself (no sum, no statistics of the batch)? Then the fault is mpishard's"
            )
        kind = "predictions" if self._within(self.losses) else "losses"
        rows = self.predictions[:, None] if kind == "predictions" else self.losses
        ranks = _ranks((rows > self.tolerance).any(axis=1))
        return f"the parameters agree, and the {kind} of {ranks} differ"


def compare(
    backend: CommunicationBackend, job: VerifyJob, problem: Problem, reference: Reference,
    schedule: str = "",
) -> Comparison:  # fmt: skip
    """Train ``problem`` sharded and compare after each step. Collective; the same on all ranks."""
    start = problem.model.get_parameters()
    entries = problem.entries(start.size)
    model, optimizer = _wrapped(backend, job, problem, schedule)
    rows: defaultdict[str, list[Any]] = defaultdict(list)
    for step in range(job.steps):
        x, y, begin = job.read_share(problem, step, model.data_rank)
        # By checksum, because the samples of the reference are in another process.
        rows["inputs"].append(job.checksum(x, y) != reference.inputs[step, model.data_rank])
        if step < len(reference.gradients):
            expected = reference.gradients[step, model.data_rank]
            own = model.compute_gradients(x, y, problem.loss)
            if job.precision is None:  # relative to the largest element of the whole gradient
                largest = float(np.max(np.abs(expected)))
                rows["gradients"].append(_errors(entries, own, expected, largest))
            else:  # relative norms, because `rounding_bounds` knows a bound for norms alone
                error, whole = (
                    np.subtract(own, expected, dtype=np.float64),
                    np.linalg.norm(expected),
                )
                norms = [np.linalg.norm(error[e.start : e.stop]) for e in entries]
                rows["gradients"].append([relative_error(n, 0.0, float(whole)) for n in norms])
        loss = optimizer.step_report(model, x, y, sample_start=begin).loss
        known = not np.isnan(reference.losses[step])
        rows["losses"].append(relative_error(loss, reference.losses[step]) if known else 0.0)
        full = model.gather_full_parameters()
        rows["parameters"].append(_errors(entries, full, reference.parameters[step + 1]))
        rows["copies"].append(_wrong_copies(model) if job.precision else 0)
    last = take(problem.x, job.batch(job.steps - 1, len(problem.x)))
    predicted = np.nan
    if reference.predictions.size:
        predicted = relative_error(model.predict(last), reference.predictions)
    computed: Literal["alone", "together", "repeated"] = "alone"
    if model.data_size < model.world_size:
        computed = "together" if model.is_compute_partitioned else "repeated"
    tolerance = of_gradients = job.tolerance or default_tolerance(start.dtype.name)
    if job.precision and job.tolerance is None:
        of_gradients, tolerance = rounding_bounds(problem.model)
    mine = {"built": _errors(entries, start, reference.parameters[0]), "predictions": predicted}
    return Comparison(
        entries=entries,
        dtype=start.dtype.name,
        tolerance=tolerance,
        gradient_tolerance=of_gradients,
        computed=computed,
        **{n: backend.all_gather(np.array([value])) for n, value in {**mine, **rows}.items()},
    )


def _wrapped(
    backend: CommunicationBackend, job: VerifyJob, problem: Problem, schedule: str
) -> tuple[Any, Any]:
    """Return the sharded model and its optimizer. Collective."""
    config = ShardingConfiguration(
        backend,
        # Small enough for several units in a small model, too.
        minimum_parameter_group_size=min(1024, max(1, problem.model.get_parameters().size // 4)),
        precision=job.precision,
        replica_size=job.replica_size,
    )
    options = {**job.mesh.options, **({"schedule": schedule} if schedule else {})}
    if job.replica_size is not None:  # the flag gives the data axis of all replicas together
        options.pop("data_parallel_size", None)
    model = as_distributed(problem.model, config, job.strategy, **options)
    if problem.loss is not None:
        model.engine.loss = problem.loss
    rule = RULES[job.optimizer](job.learning_rate)
    if job.wrapper is None:
        return model, as_distributed(rule, config, job.strategy, **options)
    kind: Any = _WRAPPERS[job.wrapper]
    late = {"delay": job.delay} if job.wrapper == "async" else {}
    return model, kind(rule, config, strategy=job.strategy, **late)


def _wrong_copies(model: ShardedModelBase) -> int:
    """Return how many of a rank's bfloat16 parameters are not nearest to the owners'. Collective.

    On a mesh a rank has the parameters of its stages and slices.
    """
    wrong, parameters = 0, model.engine.parameters
    for unit in model.engine.program.units:
        seen = parameters.unshard(unit).astype(np.float64)
        parameters.reshard(unit)
        owned = np.empty(unit.length, np.float32)
        parameters.read(unit, owned)
        # Not by mpishard's own rounding: 8 bits of mantissa, ties to even; subnormals have fewer.
        _, exponent = np.frexp(owned.astype(np.float64))
        exponent = np.maximum(exponent, _LEAST_EXPONENT)
        scaled = np.ldexp(owned.astype(np.float64), 8 - exponent)
        wrong += int((seen != np.ldexp(np.rint(scaled), exponent - 8)).sum())
    return wrong


def rounding_bounds(model: Any) -> tuple[float, float]:
    """Return the relative errors of a gradient, and of all else, that bfloat16 explains.

    A value is rounded once in each layer forward and once backward, besides the input, the weight
    and the gradient of the output. Errors of n roundings add up to ``sqrt(n) u`` for the unit
    roundoff u if their signs are independent: Higham & Mary, "A New Approach to Probabilistic
    Rounding Error Analysis", SIAM J. Sci. Comput. 41(5), 2019, theorem 2.4. Rounding to nearest
    makes them so.

    The slope of ReLU jumps at 0. About one input in 1 / u is rounded across 0, which adds or
    removes a whole element of the gradient: ``sqrt(u)`` of its norm in each ReLU.
    """
    if hasattr(model, "layers"):
        leaves = [leaf for layer in model.layers for leaf in _leaves(layer)]
    else:  # a PyTorch module
        leaves = [m for m in model.module.modules() if next(m.children(), None) is None]
    smooth = float(np.sqrt(2 * len(leaves) + 3)) * UNIT_ROUNDOFF
    jumps = sum(type(leaf).__name__ == "ReLU" for leaf in leaves)
    return smooth + float(np.sqrt(jumps * UNIT_ROUNDOFF)), smooth


def _leaves(layer: Layer) -> list[Layer]:
    inner = [leaf for child in layer.children.values() for leaf in _leaves(child)]
    return inner or [layer]


def _errors(entries: Entries, actual: Array, expected: Array, floor: float = 1.0) -> list[float]:
    if actual.shape != expected.shape:
        return [np.inf] * len(entries)
    ranges = [slice(e.start, e.stop) for e in entries]
    return [relative_error(actual[each], expected[each], floor) for each in ranges]


def default_tolerance(dtype: str) -> float:
    """Return the largest relative error that roundings explain after a few steps."""
    return 1e-10 if dtype == "float64" else 1e-4


def _ranks(which: Array) -> str:
    return who(np.flatnonzero(which).tolist())


def main() -> None:
    """Run as one rank of the job in FOLDER, or as all of them on threads."""
    job = VerifyJob.read(Path(sys.argv[1]))
    factory = load_factory(job.target)

    def train(backend: CommunicationBackend) -> None:
        for schedule in job.mesh.schedules:
            dtype = "float32" if job.precision else job.dtype
            # A new one each time, because wrapping takes the arrays of the model.
            problem = build_problem(factory, job.seed, dtype)
            found = compare(backend, job, problem, Reference.read(job.folder), schedule)
            if backend.rank == 0:
                found.write(job.folder, schedule)

    launch(train, backend=job.backend, world_size=job.world_size)


if __name__ == "__main__":
    main()
