"""Time of a training step, and where it goes: computing, messages, bubble, waiting and update.

A rank's micro-batch is timed unit by unit: its layers compute at the machine's rates, while gathers
and reductions between hosts use the network. The schedule's clock (`mpishard.pipeline`) makes the
step of these times; plain training is the schedule of one stage.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from mpishard.contracts import ILayeredModel, LayerInfo
from mpishard.models import (
    DATA_POLICIES,
    LocalLayers,
    MeshChoices,
    Policy,
    StageLayout,
    mesh_choices,
    whole_layers,
)
from mpishard.pipeline import (
    StageTimes,
    most_saved,
    run_clock,
)
from mpishard.planning.backend import PlannedBackend, PlannedMesh
from mpishard.planning.costs import LayerWork, works_of
from mpishard.planning.jobs import Job, UnplannableError, planned_model
from mpishard.planning.machine import Link, Machine
from mpishard.planning.rank_memory import check_heads, mesh_options_of

_T = TypeVar("_T")

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
    known: dict[Hashable, Any] | None = None,
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
        What was found for other jobs of this model, ranks and machine; calls add to it.

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


@dataclass(frozen=True, slots=True)
class _Group:
    """Ranks of an axis: their hosts, and the share of a host's network that they have."""

    nodes: tuple[int, ...]
    ranks_per_host: int

    @property
    def size(self) -> int:
        return len(self.nodes)

    @property
    def hosts(self) -> int:
        return len(set(self.nodes))

    @property
    def here(self) -> int:
        """Ranks of the group on one host."""
        return -(-self.size // self.hosts)

    @property
    def sharing(self) -> int:
        """Groups of a host that use its network at once."""
        return max(1, self.ranks_per_host // self.here)


class _Sending(NamedTuple):
    """A collective between hosts: its time on the network, and that of a rank's processor."""

    seconds: float = 0.0
    busy: float = 0.0


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

    def send(self, sent: _Sending) -> float:
        """Start a collective between hosts; return the time of its end."""
        if not sent.seconds:
            return self.now
        self.network = max(self.now, self.network) + sent.seconds
        # While the network moves bytes the processor copies them, and computes that much less.
        self.stop(sent.busy)
        return self.network

    def wait(self, end: float) -> None:
        self.stop(max(0.0, end - self.now))


@dataclass(slots=True)
class _UnitTimes:
    """Times of the layers of a unit for one micro-batch, and the length of its vector."""

    elements: int
    is_kept: bool
    forward: float = 0.0
    input: float = 0.0
    weight: float = 0.0
    sent_forward: float = 0.0
    sent_input: float = 0.0


@dataclass(slots=True)
class _Stage:
    """A stage of a rank: its units, and the bytes of the sample that leaves it."""

    units: list[_UnitTimes]
    output_bytes: float
    rank: int = 0  # of the pipeline
    recomputed: float = 0.0  # seconds of forward that backward repeats, without its messages
    sent_again: float = 0.0  # seconds of these messages


class _Planner:
    """The model on one rank of each stage, timed by a machine."""

    def __init__(
        self, model: ILayeredModel, job: Job, machine: Machine, known: dict[Hashable, Any]
    ) -> None:
        self._known = known
        self._model, self._job, self._machine = model, job, machine
        self._mixed = job.precision is not None
        self._precision = job.precision or str(model.dtype)
        itemsize = model.dtype.itemsize
        self._gradient_bytes = itemsize
        self._parameter_bytes = self._activation_bytes = 2 if self._mixed else itemsize
        count = job.micro_batch_count
        self._samples = -(-job.samples_of_rank // count)
        self._is_mesh = job.strategy not in DATA_POLICIES
        # The groups of the first rank, as the mesh places them; all others are like these.
        mesh, per_host = self._mesh(0), job.ranks_per_host
        self._data, self._tensor = (_Group(g.nodes, per_host) for g in (mesh.data, mesh.tensor))
        self._pipeline_hosts = mesh.pipeline.nodes
        self._schedule = job.used_schedule
        self._unknown: dict[str, None] = {}
        self._policy: Policy = DATA_POLICIES[job.axis_strategy]
        # The part of a rank's micro-batches that add to a gradient which another one has written.
        self._adding = 0.0 if self._policy.shards_gradients else 1 - 1 / count

    def plan(self) -> StepPlan:
        stages = self._once(self._kind_of_stages(), self._stages)
        job, machine = self._job, self._machine
        at_once = self._policy.shards_gradients
        passes = [self._pass(stage, reduces=at_once) for stage in stages]
        times = StageTimes(
            forward=[f.now for f, _, _ in passes],
            backward_input=[i.now for _, i, _ in passes],
            backward_weight=[w.now for _, _, w in passes],
            communication=self._boundaries(stages),
        )
        count = job.micro_batch_count
        pipeline = job.sizes[0]
        ranks = run_clock(self._schedule, pipeline, count, times)
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
            tuple(self._unknown),
        )

    # ------------------------------------------------------------------------------------- layers

    def _stages(self) -> list[_Stage]:
        """Return the global stages, each with its units on its first tensor rank."""
        model = self._model
        infos = model.get_all_layer_info()
        shape = tuple(infos[0].input_shape)
        minimum = self._job.minimum_parameter_group_size
        if not self._is_mesh:
            local = whole_layers(model, minimum)
            kept = local.reused | {local.units[-1].index}
            only, _ = self._stage(local, range(len(local.layers)), kept, shape, is_first=True)
            self._add_loss(only, infos[-1].output_shape, 1)
            return [only]
        choices = self._choices()
        job, stages = self._job, list[_Stage]()
        # Layouts of each rank, by the number of the global stage, which the schedule places.
        layouts: dict[int, tuple[int, int, StageLayout]] = {}
        firsts = [self._mesh(0).rank_of(rank, 0, 0) for rank in range(job.sizes[0])]
        for rank in range(job.sizes[0]):
            mesh = self._mesh(firsts[rank])
            placed = tuple(choices.stages_of(each) for each in range(job.sizes[0]))
            layout = self._once(
                (*self._place, rank, choices.stages, placed, job.sequence_parallel, minimum),
                functools.partial(StageLayout, model, replace(choices, mesh=mesh), minimum),
            )
            for virtual, number in enumerate(choices.stages_of(rank)):
                layouts[number] = rank, virtual, layout
        for number in sorted(layouts):
            rank, virtual, layout = layouts[number]
            kept = layout.layers.reused
            if job.micro_batch_count == len(layout.ranges) == 1 and layout.layers.units:
                kept |= {layout.layers.units[-1].index}
            layers = range(*layout.ranges[virtual])
            stage, shape = self._stage(layout.layers, layers, kept, shape, is_first=number == 0)
            stage.rank = rank
            order = self._schedule.get_schedule(rank, job.sizes[0], job.micro_batch_count)
            own = infos[slice(*choices.stages[number])]
            self._add_recomputing(stage, own, keeps_last=most_saved(order, virtual) == 1)
            stages.append(stage)
        split = job.sizes[1] if layouts[len(stages) - 1][2].splits_output else 1
        self._add_loss(stages[-1], infos[-1].output_shape, split)
        return stages

    def _mesh(self, rank: int) -> PlannedMesh:
        job = self._job
        hosts = [each // job.ranks_per_host for each in range(job.ranks)]
        return self._once(
            (*self._place, rank),
            lambda: PlannedMesh(PlannedBackend(rank, hosts), *job.sizes, order=job.order),
        )

    @property
    def _place(self) -> tuple[Hashable, ...]:
        """What decides the groups of a rank."""
        return self._job.sizes, self._job.order

    def _kind_of_stages(self) -> Hashable:
        """Return what decides the times of the stages: rarely the strategy or the schedule."""
        job, schedule = self._job, self._schedule
        own = job.checkpoint_config is not None or schedule.virtual_stages_per_rank > 1
        return (
            *self._place,
            self._is_mesh,
            self._precision,
            self._samples,
            job.micro_batch_count,
            job.checkpoint_config is None,
            schedule.name if own else None,
            self._policy.shards_gradients,
            job.sequence_parallel,
        )

    def _once(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """Return what another job's planner made for this key, or make it."""
        if key not in self._known:
            self._known[key] = make()
        found: _T = self._known[key]
        return found

    def _choices(self) -> MeshChoices:
        """Return the layers of each stage, as the run has them."""
        job = self._job
        for info in self._model.get_all_layer_info():
            check_heads(info.name, info.layer, job.sizes[1])
        try:
            choices = mesh_choices(self._model, self._mesh(0), mesh_options_of(job))
        except ValueError as error:
            raise UnplannableError(f"mesh {job.sizes}: {error}") from None
        empty = sum(stop == start for start, stop in choices.stages)
        if empty:
            raise UnplannableError(
                f"mesh {job.sizes}: the layers leave {empty} of {len(choices.stages)} stages of "
                "the pipeline empty: use fewer stages"
            )
        return choices

    def _stage(
        self,
        local: LocalLayers,
        layers: range,
        kept: frozenset[int],
        shape: tuple[int, ...],
        *,
        is_first: bool,
    ) -> tuple[_Stage, tuple[int, ...]]:
        units: dict[int, _UnitTimes] = {}
        current: _UnitTimes | None = None
        for index in layers:
            works, shape = works_of(local.layers[index].layer, shape, self._samples)
            for unit in local.units_of(index):
                if unit.index not in units:
                    units[unit.index] = _UnitTimes(unit.length, unit.index in kept)
                current = units[unit.index]
            if current is None:  # layers before the first parameters
                current = units.setdefault(-1, _UnitTimes(0, is_kept=True))
            for place, work in enumerate(works):
                # The model's first products need no gradient of the samples.
                self._add(current, work, is_first=is_first and index == place == 0)
        if not units:
            units[-1] = _UnitTimes(0, is_kept=True)
        size = self._samples * math.prod(shape) * self._activation_bytes
        return _Stage(list(units.values()), size), shape

    def _add(self, unit: _UnitTimes, work: LayerWork, *, is_first: bool) -> None:
        machine, precision = self._machine, self._precision
        rate = machine.pass_rate(work.name, precision) if work.elements else None
        if rate is not None:
            forward, backward = rate.forward * work.elements, rate.backward * work.elements
        else:  # the arrays are read and written, in backward with the gradients' ones
            if not work.is_known:
                self._unknown[work.name] = None
            ranks = self._job.ranks_per_host
            forward = machine.memory_seconds(work.arrays * self._activation_bytes, ranks)
            backward = 1.5 * forward
        call = machine.call_seconds
        unit.forward += (
            forward + call + sum(machine.product_seconds(precision, *p) for p in work.forward)
        )
        # A layer that makes no weight gradient has all its passes in the input's half.
        unit.input += backward + call
        if not is_first:
            unit.input += sum(machine.product_seconds(precision, *p) for p in work.input)
        weight = sum(machine.product_seconds(precision, *p) for p in work.weight)
        # A product's time has its writing; the sum reads what is there, too.
        added = sum(p.rows * p.columns for p in work.weight) * self._gradient_bytes
        weight += self._adding * machine.memory_seconds(added, self._job.ranks_per_host)
        unit.weight += weight
        unit.sent_forward += sum(
            self._tensor_seconds(s.passes, s.elements) for s in work.sent_forward
        )
        for sent in work.sent_backward:
            seconds = self._tensor_seconds(sent.passes, sent.elements)
            # Between hosts the weight's product is computed meanwhile; on a node ranks copy.
            hidden = weight if sent.overlaps and self._tensor.hosts > 1 else 0.0
            unit.sent_input += max(0.0, seconds - hidden)

    def _add_loss(self, stage: _Stage, shape: tuple[int, ...], split: int) -> None:
        loss = getattr(self._model, "default_loss_function", None)
        elements = self._samples * math.prod(shape) / split
        rate = self._machine.pass_rate(type(loss).__name__, str(self._model.dtype))
        if rate is not None:
            seconds = (rate.forward + rate.backward) * elements
        else:
            nbytes = 6 * self._gradient_bytes * elements
            seconds = self._machine.memory_seconds(nbytes, self._job.ranks_per_host)
        stage.units[-1].forward += seconds

    def _add_recomputing(
        self, stage: _Stage, infos: Sequence[LayerInfo], *, keeps_last: bool
    ) -> None:
        config = self._job.checkpoint_config
        if config is None or not infos:
            return
        itemsize = self._model.dtype.itemsize
        segments = config.segments(infos, itemsize, keeps_last=keeps_last)
        # The layers of a chain are mostly alike: a part of them takes that part of the time.
        again = sum(len(segment) for segment in segments) / len(infos)
        stage.recomputed = again * sum(unit.forward for unit in stage.units)
        stage.sent_again = again * sum(unit.sent_forward for unit in stage.units)

    # ----------------------------------------------------------------------------------- messages

    def _between_hosts(self, group: _Group) -> Link:
        link = self._machine.between_hosts()
        return replace(link, bytes_per_second=link.bytes_per_second / group.sharing)

    def _tensor_seconds(self, passes: int, elements: float) -> float:
        """Return the time of a collective on the tensor axis, on arrays of ``elements``."""
        group = self._tensor
        if group.size == 1:
            return 0.0
        nbytes = elements * self._activation_bytes
        seconds = 0.0
        if group.here > 1:
            moved = passes * nbytes * (group.here - 1) / group.here
            seconds += self._machine.node.seconds(moved, passes)
        if group.hosts > 1:
            seconds += self._collective(group, nbytes, passes).seconds
        return seconds

    def _collective(self, group: _Group, nbytes: float, passes: int = 1) -> _Sending:
        """Return a collective in which a host sends to each other one its part of ``nbytes``."""
        link, others = self._between_hosts(group), group.hosts - 1
        sent = passes * nbytes * others / group.hosts
        seconds = link.collective_seconds(sent, others, passes)
        return _Sending(seconds, link.processor_seconds * sent / group.here)

    def _reduce(self, elements: int) -> tuple[float, _Sending]:
        """Return the time in which a rank adds gradients of its host, and what the host sends."""
        group = self._data
        if group.size == 1 or not elements:
            return 0.0, _Sending()
        nbytes = elements * self._gradient_bytes
        own = 0.0
        if group.here > 1:
            moved = nbytes * (group.here + 1) / group.here
            own = self._machine.memory_seconds(moved, self._job.ranks_per_host)
            own += self._machine.node.latency
        if group.hosts == 1:
            return own, _Sending()
        return own, self._collective(group, nbytes, 1 if self._policy.shards_state else 2)

    def _gather(self, elements: int) -> _Sending:
        if self._data.hosts == 1 or not elements:
            return _Sending()
        return self._collective(self._data, elements * self._parameter_bytes)

    def _boundaries(self, stages: Sequence[_Stage]) -> list[float]:
        hosts = self._pipeline_hosts
        seconds = []
        for number in range(len(stages) - 1):
            is_near = hosts[stages[number].rank] == hosts[stages[number + 1].rank]
            link = self._machine.node if is_near else self._machine.between_hosts()
            sharing = 1 if is_near else self._job.ranks_per_host
            seconds.append(link.seconds(stages[number].output_bytes * sharing))
        return seconds

    def _pass(self, stage: _Stage, *, reduces: bool) -> tuple[_Lane, _Lane, _Lane]:
        """Return the forward, the input's and the weight's half of backward, of a micro-batch."""
        gathered = [
            self._gather(u.elements) if self._policy.shards_parameters else _Sending()
            for u in stage.units
        ]
        forward = _Lane()
        for unit in _prefetched(forward, list(zip(stage.units, gathered, strict=True))):
            forward.compute(unit.forward)
            forward.stop(unit.sent_forward)
        # Both halves run unit by unit, unless the schedule keeps them apart.
        both, ends = _Lane(), [0.0]
        if stage.recomputed:
            both.compute(stage.recomputed)
            both.stop(stage.sent_again + sum(sent.seconds for sent in gathered))
        again = [
            (unit, _Sending() if unit.is_kept else sent)
            for unit, sent in zip(stage.units, gathered, strict=True)
        ]
        for unit in _prefetched(both, again[::-1]):
            both.compute(unit.input + unit.weight)
            both.stop(unit.sent_input)
            if reduces and unit.elements:
                both.compute(self._machine.unit_seconds)
                own, sent = self._reduce(unit.elements)
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

    def _update(self, stages: Sequence[_Stage]) -> tuple[float, float]:
        """Return the time of the update with its publishing, and that of the step's totals."""
        machine, job, group = self._machine, self._job, self._data
        per_rank = [0] * job.sizes[0]
        for stage in stages:
            per_rank[stage.rank] += sum(_elements(stage))
        elements = max(per_rank)
        owned = elements / group.size if self._policy.shards_state else elements
        rate = machine.pass_rate(type(job.optimizer).__name__, str(self._model.dtype))
        itemsize = self._model.dtype.itemsize
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
                published[stage.rank] += sum(self._gather(n).seconds for n in _elements(stage))
            seconds += max(published)
        if job.ranks == 1:
            return seconds, 0.0
        fences = 2 * machine.node.latency * (job.ranks_per_host > 1)
        if job.hosts > 1:
            fences += 2 * math.ceil(math.log2(job.hosts)) * machine.between_hosts().latency
        return seconds, fences

    def _sent_bytes(self, stages: Sequence[_Stage]) -> float:
        """Return the bytes that a data axis sends between hosts in a step."""
        others = self._data.hosts - 1
        policy, count = self._policy, self._job.micro_batch_count
        total = 0.0
        for stage in stages:
            for unit in stage.units:
                gradients = unit.elements * self._gradient_bytes
                parameters = unit.elements * self._parameter_bytes
                if not policy.shards_state:
                    total += 2 * gradients
                elif not policy.shards_parameters:
                    total += gradients * (count if policy.shards_gradients else 1) + parameters
                else:
                    total += count * (gradients + parameters * (1 if unit.is_kept else 2))
        return total * others


def _elements(stage: _Stage) -> list[int]:
    return [unit.elements for unit in stage.units]


def _prefetched(lane: _Lane, units: Sequence[tuple[_UnitTimes, _Sending]]) -> Iterator[_UnitTimes]:
    """Yield each unit when the collective beside it has gathered it; the next is fetched then."""
    ready = lane.send(units[0][1])
    for position, (unit, _) in enumerate(units):
        lane.wait(ready)
        if position + 1 < len(units):
            ready = lane.send(units[position + 1][1])
        yield unit
