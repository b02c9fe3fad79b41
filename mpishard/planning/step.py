"""Time of a training step, and where it goes: computing, messages, bubble, waiting and update.

A rank's micro-batch is timed unit by unit: its layers compute at the machine's rates, while gathers
and reductions between hosts use the network. The schedule's clock (`mpishard.pipeline`) makes the
step of these times; plain training is the schedule of one stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mpishard.contracts import ILayeredModel
from mpishard.models import DATA_POLICIES
from mpishard.pipeline import StageTimes, run_clock
from mpishard.planning.jobs import Job, UnplannableError, planned_model
from mpishard.planning.layouts import Known
from mpishard.planning.machine import Machine
from mpishard.planning.messages import Messages, Sending
from mpishard.planning.stages import LayerTimes, Stage, UnitTimes

PARTS = ("computing", "messages", "bubble", "waiting", "update")
"""Parts of a step, in the order of tables and pictures."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Planned time of one step of a job.

    Parameters
    ----------
    job : Job
        The run.
    computing : float
        Seconds in layers and loss: the mean of the pipeline's ranks, as all parts are.
    messages : float
        Seconds in which a rank does nothing but send, receive and add.
    bubble : float
        Seconds in which it waits for other stages of the pipeline.
    waiting : float
        Seconds in which ranks wait until all have come: the totals of the step, and its end.
    update : float
        Seconds of the update and of publishing its result.
    sent_bytes : int
        Bytes that all ranks of a data axis send to other hosts, for gradients and parameters.
    unknown_layers : tuple of str
        Classes of layers whose products are not known: they count as passes over their arrays.
    """

    job: Job
    computing: float
    messages: float
    bubble: float
    waiting: float
    update: float
    sent_bytes: int
    unknown_layers: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Time of a step."""
        parts: list[float] = [getattr(self, part) for part in PARTS]
        return sum(parts)

    @property
    def samples_per_second(self) -> float:
        """Samples of all ranks in a second."""
        return self.job.samples / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return {
            **self.job.as_dict(),
            "seconds": self.seconds,
            **{part: getattr(self, part) for part in PARTS},
            "samples_per_second": self.samples_per_second,
            "sent_bytes": self.sent_bytes,
            "unknown_layers": list(self.unknown_layers),
        }


def plan_step(
    model: Callable[..., Any] | object,
    job: Job,
    machine: Machine,
    known: Known | None = None,
) -> StepPlan:
    """Plan the time of a step. Nothing of the model is allocated.

    Parameters
    ----------
    model : model or callable
        A model of layers, or a factory of one.
    job : Job
        The run.
    machine : Machine
        Speeds of each host, and of the network.
    known : dict, optional
        What was found for other jobs of this model and machine; the call adds to it.

    Raises
    ------
    UnplannableError
        If the model has no layers, or does not fit the mesh.
    MachineError
        If the machine file lacks a speed that is needed.

    Examples
    --------
    >>> import mpishard as ms
    >>> from mpishard.planning import Job, Link, Machine, ProductRate, plan_step
    >>> products = (ProductRate("float32", 256, 256, 256, 1e11),)
    >>> machine = Machine("by hand", 4, products, (1e10,), Link(1e-5, 1e9), Link(5e-5, 3e9))
    >>> model = ms.nn.MLP([1024] * 9, dtype="float32")
    >>> plan = plan_step(model, Job(ranks=8, hosts=2, strategy="zero2", batch_size=512), machine)
    >>> plan.sent_bytes == 2 * 4 * model.parameter_count
    True
    """
    model = planned_model(model)
    if not isinstance(model, ILayeredModel):
        raise UnplannableError(
            f"the step of a {type(model).__name__} cannot be planned, because it has no layers "
            "whose products are known: time it with `mpishard.observe.time_chain`, or plan its "
            "memory"
        )
    return _Planner(model, job.with_options(), machine, {} if known is None else known).plan()


@dataclass(slots=True)
class _Lane:
    """The time line of one rank in a pass, and of the network."""

    now: float = 0.0
    network: float = 0.0
    computing: float = 0.0
    messages: float = 0.0

    def compute(self, seconds: float) -> None:
        self.now += seconds
        self.computing += seconds

    def stop(self, seconds: float) -> None:
        """Communicate, and compute nothing."""
        self.now += seconds
        self.messages += seconds

    def send(self, sent: Sending) -> float:
        """Start a collective between hosts; return the time of its end."""
        if not sent.seconds:
            return self.now
        self.network = max(self.now, self.network) + sent.seconds
        # While the network moves bytes the processor copies them, and computes that much less.
        self.stop(sent.busy)
        return self.network

    def wait(self, end: float) -> None:
        self.stop(max(0.0, end - self.now))


class _Planner:
    """The step of one rank of each stage, timed by a machine."""

    def __init__(self, model: ILayeredModel, job: Job, machine: Machine, known: Known) -> None:
        self._job, self._machine = job, machine
        self._mixed, self._dtype = job.precision is not None, model.dtype
        self._policy = DATA_POLICIES[job.axis_strategy]
        self._messages = Messages(job, machine, model.dtype.itemsize, known)
        self._layers = LayerTimes(model, job, machine, self._messages, known)

    def plan(self) -> StepPlan:
        job, machine = self._job, self._machine
        stages = self._layers.stages()
        at_once = self._policy.shards_gradients
        passes = [self._pass(stage, reduces=at_once) for stage in stages]
        times = StageTimes(
            forward=[f.now for f, _, _ in passes],
            backward_input=[i.now for _, i, _ in passes],
            backward_weight=[w.now for _, _, w in passes],
            communication=self._messages.boundaries(
                [stage.rank for stage in stages], [stage.output_bytes for stage in stages]
            ),
        )
        count = job.micro_batch_count
        pipeline = job.sizes[0]
        ranks = run_clock(job.used_schedule, pipeline, count, times)
        makespan = max(timed[-1].end for timed in ranks)
        work = sum(done.duration for timed in ranks for done in timed) / pipeline
        lanes = [lane for three in passes for lane in three]
        computing = count * sum(lane.computing for lane in lanes) / pipeline
        messages = count * sum(lane.messages for lane in lanes) / pipeline
        if not at_once:  # the last micro-batch reduces all
            last = [self._pass(stage, reduces=True) for stage in stages]
            more = [
                sum(b.now for b in new) - sum(b.now for b in old)
                for new, old in zip(last, passes, strict=True)
            ]
            messages += max(more)
        update, waiting = self._update(stages)
        return StepPlan(
            job,
            computing + machine.step_seconds,
            messages,
            max(0.0, makespan - work),
            waiting,
            update,
            round(self._sent_bytes(stages)),
            tuple(dict.fromkeys(name for stage in stages for name in stage.unknown)),
        )

    def _pass(self, stage: Stage, *, reduces: bool) -> tuple[_Lane, _Lane, _Lane]:
        """Return the forward, the input's and the weight's half of backward, of a micro-batch."""
        gathered = [
            self._messages.gather(u.elements) if self._policy.shards_parameters else Sending()
            for u in stage.units
        ]
        forward = _Lane()
        for unit in _prefetched(forward, list(zip(stage.units, gathered, strict=True))):
            forward.compute(unit.forward)
            forward.stop(unit.sent_forward)
        forward.compute(stage.loss)
        # Both halves run unit by unit, unless the schedule keeps them apart.
        both, ends = _Lane(), [0.0]
        if stage.recomputed:
            both.compute(stage.recomputed)
            both.stop(stage.sent_again + sum(sent.seconds for sent in gathered))
        again = [
            (unit, Sending() if unit.is_kept else sent)
            for unit, sent in zip(stage.units, gathered, strict=True)
        ]
        for unit in _prefetched(both, again[::-1]):
            both.compute(unit.input + unit.weight)
            both.stop(unit.sent_input)
            if reduces and unit.elements:
                both.compute(self._machine.unit_seconds)
                own, sent = self._messages.reduce(unit.elements)
                both.stop(own)
                ends.append(both.send(sent))
        both.wait(max(ends))
        weight_share = sum(unit.weight for unit in stage.units)
        weight = _Lane(now=weight_share, computing=weight_share)
        rest = _Lane(
            now=both.now - weight_share,
            computing=both.computing - weight_share,
            messages=both.messages,
        )
        return forward, rest, weight

    # ------------------------------------------------------------------------------------- update

    def _update(self, stages: Sequence[Stage]) -> tuple[float, float]:
        """Return the time of the update with its publishing, and that of the step's totals."""
        machine, job, group = self._machine, self._job, self._messages.data
        per_rank = [0] * job.sizes[0]
        for stage in stages:
            per_rank[stage.rank] += sum(stage.elements)
        elements = max(per_rank)
        owned = elements / group.size if self._policy.shards_state else elements
        rate = machine.pass_rate(type(job.optimizer).__name__, str(self._dtype))
        itemsize = self._dtype.itemsize
        if rate is not None:
            seconds = owned * rate.forward
        else:
            moved = 3 + 2 * len(job.optimizer.needed_state())
            seconds = machine.memory_seconds(owned * moved * itemsize, job.ranks_per_host)
        # The norm of the gradient reads the rank's share once; mixed precision writes copies.
        read = elements / group.size * itemsize + (owned * 6 if self._mixed else 0)
        seconds += machine.memory_seconds(read, job.ranks_per_host)
        if group.hosts > 1 and self._policy.shards_state and not self._policy.shards_parameters:
            published = [0.0] * job.sizes[0]
            for stage in stages:
                published[stage.rank] += sum(
                    self._messages.gather(n).seconds for n in stage.elements
                )
            seconds += max(published)
        if job.ranks == 1:
            return seconds, 0.0
        fences = 2 * machine.node.latency * (job.ranks_per_host > 1)
        if job.hosts > 1:
            fences += 2 * math.ceil(math.log2(job.hosts)) * machine.between_hosts().latency
        return seconds, fences

    def _sent_bytes(self, stages: Sequence[Stage]) -> float:
        """Return the bytes that a data axis sends between hosts in a step."""
        others = self._messages.data.hosts - 1
        policy, count = self._policy, self._job.micro_batch_count
        total = 0.0
        for stage in stages:
            for unit in stage.units:
                gradients = unit.elements * self._messages.gradient_bytes
                parameters = unit.elements * self._messages.parameter_bytes
                if not policy.shards_state:
                    total += 2 * gradients
                elif not policy.shards_parameters:
                    total += gradients * (count if policy.shards_gradients else 1) + parameters
                else:
                    total += count * (gradients + parameters * (1 if unit.is_kept else 2))
        return total * others


def _prefetched(lane: _Lane, units: Sequence[tuple[UnitTimes, Sending]]) -> Iterator[UnitTimes]:
    """Yield each unit when the collective beside it has gathered it; the next is fetched then."""
    ready = lane.send(units[0][1])
    for position, (unit, _) in enumerate(units):
        lane.wait(ready)
        if position + 1 < len(units):
            ready = lane.send(units[position + 1][1])
        yield unit
