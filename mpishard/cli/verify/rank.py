"""Program of the ranks of ``mpishard verify``: train sharded, and compare with the reference."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mpishard.arrays import Array
from mpishard.cli.verify.job import VerifyJob, checksum, relative_error
from mpishard.cli.verify.reference import RULES, Reference
from mpishard.cli.verify.target import Problem, build_problem, load_factory
from mpishard.communication import CommunicationBackend
from mpishard.data import take
from mpishard.distributed import as_distributed, launch
from mpishard.pipeline import ActivationCheckpointConfig, RecomputeStrategy
from mpishard.sharding import ParameterEntry, ShardingConfiguration

__all__ = ["Comparison", "compare"]

_SEGMENT = 2  # layers: a small model has several segments, too
_FILE = "comparison-{}.npz"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Relative errors of every rank against the reference; ``inf`` if something is not finite.

    Parameters
    ----------
    names, shapes : Array
        Of the parameters, as text.
    dtype : Array
        Name of their dtype, of shape ().
    built, parameters : Array
        Built by the factory, shape (ranks, parameters); after each step, shape
        (ranks, steps, parameters).
    losses : Array
        Shape (ranks, steps).
    gradients : Array
        Of the rank's own samples alone, shape (ranks, steps compared, parameters).
    inputs : Array
        Whether the rank got other samples, shape (ranks, steps).
    predictions : Array
        Shape (ranks,); NaN if there are none.
    computed : Array
        Who computed a batch: "alone", one rank; "together", several; "repeated", each of several
        all of it. Text, of shape ().
    """

    names: Array
    shapes: Array
    dtype: Array
    built: Array
    parameters: Array
    losses: Array
    gradients: Array
    inputs: Array
    predictions: Array
    computed: Array = field(default_factory=lambda: np.array("alone"))

    def write(self, folder: Path, schedule: str) -> None:
        """Leave it for `read`."""
        np.savez(folder / _FILE.format(schedule), **asdict(self))

    @classmethod
    def read(cls, folder: Path, schedule: str) -> Comparison | None:
        """Return what was written to ``folder``; None if the ranks did not get so far."""
        path = folder / _FILE.format(schedule)
        if not path.is_file():
            return None
        with np.load(path) as found:
            return cls(**found)


def compare(
    backend: CommunicationBackend,
    job: VerifyJob,
    problem: Problem,
    reference: Reference,
    schedule: str = "",
) -> Comparison:
    """Train ``problem`` sharded and compare after each step. Collective; the same on all ranks."""
    start = problem.model.get_parameters()
    entries = problem.entries(start.size)
    # Several units, in a small model too.
    unit_size = min(1024, max(1, start.size // 4))
    config = ShardingConfiguration(backend, minimum_parameter_group_size=unit_size)
    options = _options(job, schedule)
    model = as_distributed(problem.model, config, job.strategy, **options)
    if problem.loss is not None:
        model.engine.loss = problem.loss
    rule = RULES[job.optimizer].make(job.learning_rate)
    optimizer = as_distributed(rule, config, job.strategy, **options)
    rows: dict[str, list[Any]] = {"parameters": [], "losses": [], "gradients": [], "inputs": []}
    for step in range(job.steps):
        x, y, begin = job.read_share(problem, step, model.data_rank)
        rows["inputs"].append(checksum(x, y) != reference.inputs[step, model.data_rank])
        if step < len(reference.gradients):
            expected = reference.gradients[step, model.data_rank]
            own = model.compute_gradients(x, y, problem.loss)
            # Relative to the largest element of the whole gradient.
            floor = float(np.max(np.abs(expected)))
            rows["gradients"].append(_errors(entries, own, expected, floor))
        loss = optimizer.step_report(model, x, y, sample_start=begin).loss
        known = not np.isnan(reference.losses[step])
        rows["losses"].append(relative_error(loss, reference.losses[step]) if known else 0.0)
        full = model.gather_full_parameters()
        rows["parameters"].append(_errors(entries, full, reference.parameters[step + 1]))
    last = take(problem.x, job.batch(job.steps - 1, len(problem.x)))
    predicted = np.nan
    if reference.predictions.size:
        predicted = relative_error(model.predict(last), reference.predictions)
    computed = "alone"
    if model.data_size < model.world_size:
        computed = "together" if model.is_compute_partitioned else "repeated"
    mine = {"built": _errors(entries, start, reference.parameters[0]), "predictions": predicted}
    return Comparison(
        names=np.array([e.name for e in entries]),
        shapes=np.array([str(e.shape) for e in entries]),
        dtype=np.array(start.dtype.name),
        computed=np.array(computed),
        **{n: backend.all_gather(np.array([value])) for n, value in {**mine, **rows}.items()},
    )


def _options(job: VerifyJob, schedule: str) -> dict[str, Any]:
    """Return the options of `as_distributed` for one comparison."""
    options = dict(job.mesh.options)
    if "recompute" in options:
        strategy = RecomputeStrategy(options.pop("recompute"))
        options["checkpoint_config"] = ActivationCheckpointConfig(
            enabled=True, checkpoint_every_n_layers=_SEGMENT, recompute_strategy=strategy
        )
    return options | ({"schedule": schedule} if schedule else {})


def _errors(
    entries: tuple[ParameterEntry, ...], actual: Array, expected: Array, floor: float = 1.0
) -> list[float]:
    if actual.shape != expected.shape:
        return [np.inf] * len(entries)
    ranges = [slice(e.start, e.stop) for e in entries]
    return [relative_error(actual[each], expected[each], floor) for each in ranges]


def _run(backend: CommunicationBackend, job: VerifyJob, factory: Any) -> None:
    for schedule in job.mesh.schedules:
        problem = build_problem(factory, job.seed, job.dtype)  # wrapping took the last one's arrays
        comparison = compare(backend, job, problem, Reference.read(job.folder), schedule)
        if backend.rank == 0:
            comparison.write(job.folder, schedule)


def main() -> None:
    """Be one rank of a job, or all of them as threads: ``FOLDER mpi|memory``."""
    job = VerifyJob.read(Path(sys.argv[1]))
    launch(_run, job, load_factory(job.target), backend=sys.argv[2], world_size=job.world_size)


if __name__ == "__main__":
    main()
