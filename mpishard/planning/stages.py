"""Times of layers: the stages of a pipeline on their ranks, each with its units.

Plain training is one stage. Times are those of one micro-batch, and of the first tensor rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mpishard.contracts import ILayeredModel
from mpishard.models import DATA_POLICIES, LocalLayers, StageLayout, whole_layers
from mpishard.pipeline import most_saved
from mpishard.planning.costs import LayerWork, Sent, works_of
from mpishard.planning.jobs import Job, UnplannableError
from mpishard.planning.layouts import (
    Known,
    arrangement_of,
    choices_of,
    division_of,
    layout_of,
    mesh_of,
    once,
)
from mpishard.planning.machine import Machine
from mpishard.planning.messages import Messages


@dataclass(slots=True)
class UnitTimes:
    """Times of the layers of a unit for one micro-batch, and the length of its vector."""

    elements: int
    is_kept: bool
    forward: float = 0.0
    input: float = 0.0
    weight: float = 0.0
    sent_forward: float = 0.0
    sent_input: float = 0.0


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a rank: its units, and the bytes of the sample that leaves it.

    Parameters
    ----------
    units : sequence of UnitTimes
        Its units, in order.
    output_bytes : float
        Bytes of its output.
    unknown : tuple of str
        Classes of its layers whose products are not known.
    rank, virtual : int
        The rank of the pipeline that has it, and its number among that rank's stages.
    layers : (int, int)
        The layers of the model in it, half open.
    loss : float
        Seconds of the loss; 0 if another stage has it.
    recomputed : float
        Seconds of forward that backward repeats, without its messages.
    sent_again : float
        Seconds of these messages.
    """

    units: Sequence[UnitTimes]
    output_bytes: float
    unknown: tuple[str, ...]
    rank: int = 0
    virtual: int = 0
    layers: tuple[int, int] = (0, 0)
    loss: float = 0.0
    recomputed: float = 0.0
    sent_again: float = 0.0

    @property
    def elements(self) -> list[int]:
        """Length of each unit."""
        return [unit.elements for unit in self.units]


class LayerTimes:
    """Times of the layers of a model on the ranks of a job."""

    def __init__(
        self, model: ILayeredModel, job: Job, machine: Machine, messages: Messages, known: Known
    ) -> None:
        self._model, self._job, self._machine = model, job, machine
        self._messages, self._known = messages, known
        self._is_mesh = job.strategy not in DATA_POLICIES
        self._precision = job.precision or str(model.dtype)
        self._gradient_bytes = model.dtype.itemsize
        self._activation_bytes = 2 if job.precision is not None else model.dtype.itemsize
        count = job.micro_batch_count
        self._samples = -(-job.samples_of_rank // count)
        # The part of a rank's micro-batches that add to a gradient which another one has written.
        shards = DATA_POLICIES[job.axis_strategy].shards_gradients
        self._adding = 0.0 if shards else 1 - 1 / count
        self._unknown: dict[str, None] = {}

    def stages(self) -> list[Stage]:
        """Return the global stages, in the order of the layers.

        Raises
        ------
        UnplannableError
            If the layers cannot be divided over the mesh.
        """
        job = self._job
        # All that decides the times: rarely the strategy, the schedule, or recomputation.
        key = (
            "times",
            division_of(job) if self._is_mesh else arrangement_of(job),
            job.minimum_parameter_group_size,
            job.precision,
            self._samples,
            job.micro_batch_count == 1,
            self._adding,
        )
        make = self._on_a_mesh if self._is_mesh else self._on_each_rank
        stages = once(self._known, key, make)
        return stages if job.checkpoint_config is None else self._with_recomputation(stages)

    def _on_each_rank(self) -> list[Stage]:
        """Return the whole model as a stage."""
        model = self._model
        infos = model.get_all_layer_info()
        local = whole_layers(model, self._job.minimum_parameter_group_size)
        kept = local.reused | {local.units[-1].index}
        shape = tuple(infos[0].input_shape)
        only, _ = self._stage(local, range(len(local.layers)), kept, shape, is_first=True)
        return [replace(only, loss=self._loss_seconds(infos[-1].output_shape, 1))]

    def _on_a_mesh(self) -> list[Stage]:
        """Return the stages of a pipeline, each on its first tensor rank."""
        model, job, known = self._model, self._job, self._known
        infos = model.get_all_layer_info()
        mesh = mesh_of(job, 0, known)
        # Layouts of each rank, by the number of the global stage, which the schedule places.
        layouts: dict[int, tuple[int, int, StageLayout]] = {}
        for rank in range(job.sizes[0]):
            choices = choices_of(model, job, mesh.rank_of(rank, 0, 0), known)
            empty = sum(stop == start for start, stop in choices.stages)
            if empty:
                raise UnplannableError(
                    f"mesh {job.sizes}: the layers leave {empty} of {len(choices.stages)} stages "
                    "of the pipeline empty: use fewer stages"
                )
            layout = layout_of(model, job, choices, known)
            for virtual, number in enumerate(choices.stages_of(rank)):
                layouts[number] = rank, virtual, layout
        stages = list[Stage]()
        shape = tuple(infos[0].input_shape)
        for number in sorted(layouts):
            rank, virtual, layout = layouts[number]
            kept = layout.layers.reused
            if job.micro_batch_count == len(layout.ranges) == 1 and layout.layers.units:
                kept |= {layout.layers.units[-1].index}
            layers = range(*layout.ranges[virtual])
            stage, shape = self._stage(layout.layers, layers, kept, shape, is_first=number == 0)
            own = choices.stages[number]
            stages.append(replace(stage, rank=rank, virtual=virtual, layers=own))
        split = job.sizes[1] if layouts[len(stages) - 1][2].splits_output else 1
        stages[-1] = replace(stages[-1], loss=self._loss_seconds(infos[-1].output_shape, split))
        return stages

    def _stage(
        self,
        local: LocalLayers,
        layers: range,
        kept: frozenset[int],
        shape: tuple[int, ...],
        *,
        is_first: bool,
    ) -> tuple[Stage, tuple[int, ...]]:
        """Return a stage, and the shape of a sample of its output."""
        self._unknown = {}
        units: dict[int, UnitTimes] = {}
        current: UnitTimes | None = None
        for index in layers:
            works, shape = works_of(local.layers[index].layer, shape, self._samples)
            for unit in local.units_of(index):
                if unit.index not in units:
                    units[unit.index] = UnitTimes(unit.length, unit.index in kept)
                current = units[unit.index]
            if current is None:  # layers before the first parameters
                current = units.setdefault(-1, UnitTimes(0, is_kept=True))
            for place, work in enumerate(works):
                # The model's first products need no gradient of the samples.
                self._add(current, work, is_first=is_first and index == place == 0)
        if not units:
            units[-1] = UnitTimes(0, is_kept=True)
        size = self._samples * math.prod(shape) * self._activation_bytes
        return Stage(list(units.values()), size, tuple(self._unknown)), shape

    def _add(self, unit: UnitTimes, work: LayerWork, *, is_first: bool) -> None:
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
        unit.sent_forward += sum(self._tensor_seconds(s) for s in work.sent_forward)
        for sent in work.sent_backward:
            seconds = self._tensor_seconds(sent)
            # Between hosts the weight's product is computed meanwhile; on a node ranks copy.
            hidden = weight if sent.overlaps and self._messages.tensor.hosts > 1 else 0.0
            unit.sent_input += max(0.0, seconds - hidden)

    def _loss_seconds(self, shape: tuple[int, ...], split: int) -> float:
        loss = getattr(self._model, "default_loss_function", None)
        elements = self._samples * math.prod(shape) / split
        rate = self._machine.pass_rate(type(loss).__name__, str(self._model.dtype))
        if rate is not None:
            return (rate.forward + rate.backward) * elements
        nbytes = 6 * self._gradient_bytes * elements
        return self._machine.memory_seconds(nbytes, self._job.ranks_per_host)

    def _tensor_seconds(self, sent: Sent) -> float:
        return self._messages.tensor_seconds(sent.passes, sent.elements * self._activation_bytes)

    def _with_recomputation(self, stages: Sequence[Stage]) -> list[Stage]:
        """Return the stages, with the times in which backward computes segments again."""
        job = self._job
        assert job.checkpoint_config is not None
        key = ("saved", job.schedule, job.sizes[0], job.micro_batch_count)
        saved = once(self._known, key, lambda: _most_saved(job, stages))
        infos, itemsize = self._model.get_all_layer_info(), self._model.dtype.itemsize
        found = []
        for stage, most in zip(stages, saved, strict=True):
            own = infos[slice(*stage.layers)]
            segments = job.checkpoint_config.segments(own, itemsize, keeps_last=most == 1)
            # The layers of a chain are mostly alike: a part of them takes that part of the time.
            again = sum(len(segment) for segment in segments) / len(own)
            recomputed = again * sum(unit.forward for unit in stage.units)
            sent_again = again * sum(unit.sent_forward for unit in stage.units)
            found.append(replace(stage, recomputed=recomputed, sent_again=sent_again))
        return found


def _most_saved(job: Job, stages: Sequence[Stage]) -> list[int]:
    """Return the most micro-batches whose activations each stage holds at once."""
    size, count = job.sizes[0], job.micro_batch_count
    orders = [job.used_schedule.get_schedule(rank, size, count) for rank in range(size)]
    return [most_saved(orders[stage.rank], stage.virtual) for stage in stages]
