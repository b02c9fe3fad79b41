"""The program of the ranks of ``mpishard verify``: train a factory's model sharded, and compare."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpishard.base import UNIT_ROUNDOFF, Array
from mpishard.cli.factories import load_factory
from mpishard.cli.verify.comparison import Comparison, default_tolerance, relative_error
from mpishard.cli.verify.job import VerifyJob
from mpishard.cli.verify.problem import RETURNS, Problem, build_problem
from mpishard.cli.verify.reference import Reference
from mpishard.communication import CommunicationBackend
from mpishard.contracts import UserModel
from mpishard.data import take
from mpishard.distributed import as_distributed, launch
from mpishard.models import ShardedModelBase
from mpishard.nn import Layer
from mpishard.optimizers import ShardedOptimizerBase
from mpishard.sharding import ParameterEntry, ShardingConfiguration

# Causes come before their effects: of the first step that differs, the first kind is explained.
_CAUSES = {
    "start": "{ranks} got other first parameters than a process alone: factory(seed) must depend "
    "on its seed and on nothing else",
    "data": "{ranks} got other data than a process alone: factory(seed) must depend on its seed "
    "and on nothing else",
    "copies": "step {step}: on {ranks} {most:g} bfloat16 parameters are not the nearest to the "
    "float32 values of their owners. The fault is mpishard's",
    "own gradients": "step {step}: on {ranks} the gradient of the rank's own samples differs from "
    "that of a process alone (worst {name}). The model depends on its rank, or on more than "
    "parameters and data: an environment variable, the process or thread, the time, np.random's "
    "global state, earlier calls",
    "parameters": "step {step}: each rank's gradient of its own samples is right, and the update "
    "is not. Is the loss a mean over samples, each of which counts by itself (no sum, no "
    "statistics of the batch)? Then the fault is mpishard's",
    "losses": "the parameters agree, and the losses of {ranks} differ",
    "predictions": "the parameters agree, and the predictions of {ranks} differ",
}
_TOGETHER = (
    "step {step}: the gradient of one batch that several ranks compute together differs from that "
    "of a process alone (worst {name}). Does a layer compute statistics of the whole batch, or "
    "depend on its rank? If not, the fault is mpishard's"
)
_SUM = (
    "step {step}: the loss is a sum over samples, because the gradient of a batch is the sum of "
    "those of its parts: make the model with loss_is_sum=True, or give a model of your own an "
    "attribute of this name"
)
_REPEATED = (
    "every rank computed all of its batch, because the model is a black box. A model of layers, an "
    "ILayeredModel (mpishard.nn), is computed in parts"
)
_LEAST_EXPONENT = -125  # of normal float32 numbers, whose mantissa is in [0.5, 1) as in frexp


def compare(
    backend: CommunicationBackend, job: VerifyJob, problem: Problem, reference: Reference
) -> Comparison:
    """Train ``problem`` sharded and compare after each step. Collective; the same on all ranks."""
    start = problem.model.get_parameters()
    entries = problem.entries(start.size)
    model, optimizer = _wrapped(backend, job, problem)
    # Norms under mixed precision, because `rounding_bounds` knows a bound for norms alone.
    size = _norm if job.precision else _largest
    columns = {"parameters": len(entries), "own gradients": len(entries)}
    # Without "start", which explains wrong parameters of step 0 and has no errors of its own.
    mine = {kind: np.zeros((job.steps + 1, columns.get(kind, 1))) for kind in [*_CAUSES][1:]}
    mine["parameters"][0] = _errors(entries, start, reference.parameters[0])
    for step in range(job.steps):
        x, y, begin = job.read_share(problem, step, model.data_rank)
        # By checksum, because the samples of the reference are in another process.
        mine["data"][step + 1] = job.checksum(x, y) != reference.inputs[step, model.data_rank]
        if step < len(reference.gradients):
            expected = reference.gradients[step, model.data_rank]
            own = model.compute_gradients(x, y, problem.loss)
            if own.shape != expected.shape:  # The factory has built another model here.
                mine["own gradients"][step + 1] = np.inf
            else:
                error = reference.trained * np.subtract(own, expected, dtype=np.float64)
                whole = size(reference.trained * expected)
                sizes = [size(error[entry.start : entry.stop]) for entry in entries]
                mine["own gradients"][step + 1] = [relative_error(s, 0.0, whole) for s in sizes]
        loss = optimizer.step_report(model, x, y, sample_start=begin).loss
        # A black box may return no loss.
        if not np.isnan(reference.losses[step]):
            mine["losses"][step + 1] = relative_error(loss, reference.losses[step])
        full = model.gather_full_parameters()
        mine["parameters"][step + 1] = _errors(entries, full, reference.parameters[step + 1])
        # What ranks compute with must be the rounded values of what they own.
        if job.precision:
            mine["copies"][step + 1] = _wrong_copies(model)
    if reference.predictions.size:
        last = take(problem.x, job.batch(job.steps - 1, len(problem.x)))
        mine["predictions"][-1] = relative_error(model.predict(last), reference.predictions)
    else:
        del mine["predictions"]
    is_shared = model.data_size < model.world_size
    is_divided = is_shared and model.is_compute_partitioned
    tolerance = of_gradients = job.tolerance or default_tolerance(start.dtype.name)
    if job.precision and job.tolerance is None:
        of_gradients, tolerance = rounding_bounds(problem.model)
    limits = {"data": 0.0, "copies": 0.0, "own gradients": of_gradients}
    causes = _CAUSES | {"own gradients": _TOGETHER} if is_divided else _CAUSES
    if reference.adds_up and not model.engine.sums_loss:
        causes = causes | {"parameters": _SUM}
    return Comparison(
        labels=[(entry.name, str(entry.shape)) for entry in entries],
        errors={kind: backend.all_gather(errors[None]) for kind, errors in mine.items()},
        limits=dict.fromkeys(mine, tolerance) | limits,
        columns={"error": "parameters"},
        causes=causes,
        dtype=job.precision or start.dtype.name,
        note=_REPEATED if is_shared and not is_divided else "",
    )


def _wrapped(
    backend: CommunicationBackend, job: VerifyJob, problem: Problem
) -> tuple[Any, ShardedOptimizerBase]:
    """Return the sharded model and its optimizer. Collective."""
    config = ShardingConfiguration(
        backend,
        # Small enough for several units in a small model, too.
        minimum_parameter_group_size=min(1024, max(1, problem.model.get_parameters().size // 4)),
        precision=job.precision,
    )
    options = job.options(problem)
    model = as_distributed(problem.model, config, job.strategy, **options)
    if problem.loss is not None:
        model.engine.loss = problem.loss
    return model, as_distributed(problem.optimizer, config, job.strategy, **options)


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


def rounding_bounds(model: UserModel) -> tuple[float, float]:
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


def _norm(values: Array) -> float:
    return float(np.linalg.norm(values))


def _largest(values: Array) -> float:
    return float(np.abs(values).max(initial=0))


def _errors(entries: Sequence[ParameterEntry], actual: Array, expected: Array) -> list[float]:
    if actual.shape != expected.shape:
        # A model of another size cannot be cut into these parameters.
        return [np.inf] * len(entries)
    ranges = [slice(e.start, e.stop) for e in entries]
    return [relative_error(actual[each], expected[each]) for each in ranges]


def main() -> None:
    """Run as one rank of the job in FOLDER, or as all of them on threads."""
    job: VerifyJob = VerifyJob.read(Path(sys.argv[1]))
    factory = load_factory(job.target, RETURNS)

    def train(backend: CommunicationBackend) -> None:
        # In each rank, because thread-ranks must not share a model.
        problem = build_problem(factory, job.seed, "float32" if job.precision else None)
        found = compare(backend, job, problem, Reference.read(job.folder))
        # The comparison has the errors of all ranks, and is the same on each.
        if backend.rank == 0:
            job.write(found, "comparison")

    launch(train, backend=job.backend, world_size=job.world_size)


if __name__ == "__main__":
    main()
