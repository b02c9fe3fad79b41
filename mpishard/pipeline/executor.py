"""Execution of a schedule on one rank: the stages' operations and the messages between them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque

import numpy as np
from numpy.typing import DTypeLike

from mpishard.base import Array, array_namespace, as_count, settings
from mpishard.communication import CommunicationBackend, Transfer
from mpishard.observe import span
from mpishard.pipeline.clock import check_schedule
from mpishard.pipeline.operations import (
    BACKWARD_WEIGHT,
    Flow,
    IPipelineSchedule,
    PipelinePlan,
    PlannedOperation,
    forward_orders,
)


class IPipelineStage(ABC):
    """The stages of one rank, with the activations that they save for each micro-batch.

    A stage is named by its virtual index: its number among the rank's stages.
    For each stage and micro-batch `forward` is called once, then either `backward`, or
    `backward_input` and later `backward_weight`.
    """

    @abstractmethod
    def input_shape(self, virtual_stage: int, micro_batch: int) -> tuple[int, ...]:
        """Return the shape, with the batch dim, of the stage's input, and of its gradient."""

    @abstractmethod
    def output_shape(self, virtual_stage: int, micro_batch: int) -> tuple[int, ...]:
        """Return the shape, with the batch dim, of the output of `forward`."""

    @abstractmethod
    def forward(self, virtual_stage: int, micro_batch: int, x: Array | None) -> Array | None:
        """Compute the stage's output; ``x`` is None for the model's first stage.

        Returns
        -------
        Array or None
            Input of the next stage; None from the model's last stage.
        """

    def describe(self, virtual_stage: int) -> str:
        """Return the stage's name for errors."""
        return f"virtual stage {virtual_stage}"

    @abstractmethod
    def backward(self, virtual_stage: int, micro_batch: int, dy: Array | None) -> Array | None:
        """Compute both halves.

        ``dy`` is None in the model's last stage, and the result is None in its first.
        """

    @abstractmethod
    def backward_input(
        self, virtual_stage: int, micro_batch: int, dy: Array | None
    ) -> Array | None:
        """Return the gradient of the input, as `backward` does. `backward_weight` follows later."""

    @abstractmethod
    def backward_weight(self, virtual_stage: int, micro_batch: int) -> None:
        """Add the gradients of the parameters: the half that `backward_input` has left out."""


class PipelineExecutor:
    """Runs a rank's operations in the schedule's order, and moves arrays between stages.

    A stage's output is sent to the rank of the next stage as soon as it is computed, and a gradient
    to that of the stage before, while the rank continues to compute. The receive for an operation
    is posted at least one operation earlier. So transfers overlap computation, and a rank holds at
    most one message besides those in use. A stage on the same rank gets the array itself.
    Micro-batches without rows travel like others.

    With T global stages on more than one rank, M micro-batches and no two neighbours on one rank,
    a run sends 2 (T - 1) M messages in all, and forward alone (T - 1) M.

    Nothing is sent before `check_schedule` has accepted the schedule. An exception on one rank
    reaches the others through the backend, and posted receives are then cancelled. The next run
    receives no message of a failed one, because tags differ from run to run.

    Parameters
    ----------
    backend : CommunicationBackend
        The ranks of one pipeline, as `ProcessMesh.pipeline`. Its messages belong to executors
        while they run; all ranks make and run them in the same order.
    schedule : IPipelineSchedule
        Order of each rank's operations.
    micro_batches : int
        M, the number of micro-batches of a run.
    dtype : dtype
        Dtype of activations and gradients.

    Raises
    ------
    ValueError
        For fewer than one micro-batch, or more stages than there are tags.
    """

    def __init__(
        self,
        backend: CommunicationBackend,
        schedule: IPipelineSchedule,
        micro_batches: int,
        dtype: DTypeLike,
    ) -> None:
        self._micro_batches = as_count("micro_batches", micro_batches)
        stages = backend.world_size * schedule.virtual_stages_per_rank
        # Two tags for each stage, one for each direction; runs take turns among the sets that fit.
        self._generations = (settings.MAXIMUM_TAG + 1) // (2 * stages)
        if not self._generations:
            raise ValueError(
                f"{backend.world_size} ranks x {schedule.virtual_stages_per_rank} virtual stages "
                f"= {stages} stages need {2 * stages} tags, and there are "
                f"{settings.MAXIMUM_TAG + 1}"
            )
        self._backend = backend
        self._schedule = schedule
        self._dtype = np.dtype(dtype)
        # By whether it is for training. Made at the first run: checking a schedule takes time,
        # which prediction does not need.
        self._plans: dict[bool, PipelinePlan] = {}

    def run(self, stage: IPipelineStage) -> None:
        """Run every operation of this rank. Collective over the pipeline.

        Raises
        ------
        ValueError
            As `check_schedule`, before anything is sent; for an output of another shape or dtype
            than the stage announced, or an input of another shape.
        PeerError
            If another rank failed or left.
        """
        self._execute(stage, is_training=True)

    def run_forward(self, stage: IPipelineStage) -> None:
        """Run forward alone, every micro-batch through all stages. Collective over the pipeline.

        Micro-batches come to each stage by rising index.

        Raises
        ------
        ValueError, PeerError
            As `run`.
        """
        self._execute(stage, is_training=False)

    def _execute(self, stage: IPipelineStage, *, is_training: bool) -> None:
        plan = self._plans.get(is_training)
        if plan is None:
            schedule, ranks, count = self._schedule, self._backend.world_size, self._micro_batches
            if is_training:
                check_schedule(schedule, ranks, count)
                # Orders of all ranks, because a receive depends on the order in which its sender
                # sends.
                orders = [schedule.get_schedule(rank, ranks, count) for rank in range(ranks)]
            else:  # needs no check: the order is made here
                orders = forward_orders(schedule, ranks, count)
            plan = self._plans[is_training] = PipelinePlan(schedule, self._backend.rank, orders)
        # Tags differ from run to run, so that no message of a failed run is taken for a new one.
        # All ranks count rounds alike, also after a run that failed.
        generation = self._backend.begin_round() % self._generations
        first_tag = generation * 2 * len(plan.rank_of)
        run = _ScheduleRun(stage, plan, self._backend, first_tag, self._dtype)
        try:
            run.execute()
        # Also for KeyboardInterrupt: an open receive would outlive the arrays of this run.
        except BaseException:
            run.cancel_receives()
            raise


class _ScheduleRun:
    """One run of a schedule on one rank, with its messages under way."""

    def __init__(
        self,
        stage: IPipelineStage,
        plan: PipelinePlan,
        backend: CommunicationBackend,
        first_tag: int,
        dtype: np.dtype[np.generic],
    ) -> None:
        self._stage = stage
        self._plan = plan
        self._backend = backend
        self._first_tag = first_tag
        self._dtype = dtype
        # The flows to receive, in the order in which the steps take them.
        self._awaited = deque(
            step.takes
            for step in plan.steps
            if step.takes is not None and plan.sender(step.takes) != backend.rank
        )
        # Per link, the micro-batches whose receives are not posted yet, in sending order.
        self._not_posted = {link: deque(order) for link, order in plan.arrivals.items()}
        self._receiving: dict[Flow, Transfer] = {}
        self._local: dict[Flow, Array] = {}
        # Sends under way own their arrays; dropping one would free memory that MPI still reads.
        self._sending: list[Transfer] = []
        self._global_stage = {virtual: stage for stage, virtual in plan.virtual_of.items()}

    def execute(self) -> None:
        """Run all steps; return when all sent messages have been received."""
        for step in self._plan.steps:
            given = self._receive_input(step)
            operation = step.operation
            stage = self._global_stage[operation.virtual_stage_index]
            with span(operation.type, micro_batch=operation.micro_batch_index, stage=stage):
                # Each method of a stage has the name of an operation.
                compute = getattr(self._stage, operation.type)
                inputs = () if operation.type is BACKWARD_WEIGHT else (given,)
                key = operation.virtual_stage_index, operation.micro_batch_index
                result: Array | None = compute(*key, *inputs)
                del inputs
            # Freed before the result travels, so that a rank holds one activation less at its peak.
            del given
            if step.gives is not None:
                self._pass_on(step.gives, result, operation.virtual_stage_index)
            del result
        # The next step may overwrite arrays only after they are received.
        while self._sending:
            self._sending.pop().wait()

    def cancel_receives(self) -> None:
        """Cancel the receives that are posted."""
        # A receive that stays posted could take a message of the next run.
        for transfer in self._receiving.values():
            transfer.cancel()

    # ---------------------------------------------------------------------------------- messages

    def _tag(self, flow: Flow) -> int:
        """Return the tag of one direction into a stage: its messages arrive in sending order."""
        return self._first_tag + 2 * flow.stage + flow.is_gradient

    def _shape(self, flow: Flow, virtual_stage: int) -> tuple[int, ...]:
        shape = self._stage.output_shape if flow.is_gradient else self._stage.input_shape
        return shape(virtual_stage, flow.micro_batch)

    def _receive_input(self, step: PlannedOperation) -> Array | None:
        """Return the step's input; before waiting, post the receive for the next step."""
        flow = step.takes
        if self._awaited and flow == self._awaited[0]:
            # Only in the first step: later receives were posted in the step before.
            self._post_receives(self._awaited.popleft())
        if self._awaited:
            # One step ahead and no more: each posted receive holds memory for its message.
            self._post_receives(self._awaited[0])
        # MPI moves large messages only inside calls. Without this one they would wait for the next
        # wait().
        self._backend.progress()
        # Arrays of sends that are done are freed.
        self._sending = [transfer for transfer in self._sending if not transfer.done]
        if flow is None:
            return None
        # The stage before is on this rank, and has left the array itself.
        if flow not in self._receiving:
            return self._local.pop(flow)
        array: Array = self._receiving[flow].wait()
        del self._receiving[flow]
        expected = self._shape(flow, step.operation.virtual_stage_index)
        # The sender has its own batch. Ranks with batches of other sizes would otherwise mix up
        # samples.
        if array.shape != expected:
            raise ValueError(
                f"the {flow} came from rank {self._plan.sender(flow)} with shape {array.shape}; "
                f"this rank expects {expected}. Are all ranks given the same batch?"
            )
        return array

    def _post_receives(self, flow: Flow) -> None:
        """Post the receive of a flow, and of the flows that its sender sends before it."""
        # Messages with one tag arrive in the order of their sends, so receives have that order.
        order = self._not_posted[flow.is_gradient, flow.stage]
        while flow not in self._receiving:
            expected = flow._replace(micro_batch=order.popleft())
            count = math.prod(self._shape(expected, self._plan.virtual_of[flow.stage]))
            self._receiving[expected] = self._backend.receive_async(
                self._plan.sender(flow), count, self._tag(flow), dtype=self._dtype
            )

    def _pass_on(self, flow: Flow, array: Array | None, virtual_stage: int) -> None:
        """Pass a result on, if its shape and dtype are those that the stage announced."""
        shape = self._stage.input_shape if flow.is_gradient else self._stage.output_shape
        expected = shape(virtual_stage, flow.micro_batch)
        if array is None or array.shape != expected or array.dtype != self._dtype:
            got = "None" if array is None else f"{array.dtype.name}{list(array.shape)}"
            raise ValueError(
                f"{self._stage.describe(virtual_stage)} of rank {self._backend.rank} gave {got} as "
                f"the {flow}; it announced {self._dtype.name}{list(expected)}"
            )
        taken_by = self._plan.rank_of[flow.stage]
        if taken_by == self._backend.rank:
            # A V-shaped schedule has neighbouring stages on one rank: nothing travels.
            self._local[flow] = array
            return
        # A stage may return a view, and a message needs contiguous memory.
        message = array_namespace(array).ascontiguousarray(array)
        self._sending.append(self._backend.send_async(message, taken_by, self._tag(flow)))
