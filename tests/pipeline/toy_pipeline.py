"""A pipeline of matrix products whose gradients are known, and simple schedules."""

import time

import numpy as np

from mpishard.base.layout import ShardLayout
from mpishard.pipeline import (
    GPipeSchedule,
    Interleaved1F1BSchedule,
    IPipelineSchedule,
    IPipelineStage,
    LoopedBFSSchedule,
    OneForwardOneBackwardSchedule,
    PipelineOperation,
    PipelineOperationType,
    ZeroBubbleH2Schedule,
    ZeroBubbleVSchedule,
)

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = PipelineOperationType


class ToySchedule(IPipelineSchedule):
    """F of micro-batch m in global stage g comes at time 2m + g; B runs back from the last.

    A linear order of all operations that respects what needs what: no rank waits in vain,
    whatever the placement.
    """

    def __init__(self, virtual=1, turns=False, splits=False):
        self.virtual, self.turns, self.splits = virtual, turns, splits

    @property
    def name(self):
        return f"toy, {self.virtual} stages{', V' * self.turns}{', split' * self.splits}"

    @property
    def virtual_stages_per_rank(self):
        return self.virtual

    def estimate_bubble_fraction(self, num_stages, num_micro_batches):
        return 0.0

    def global_stage(self, stage_id, virtual_stage_index, num_stages):
        if self.turns and virtual_stage_index % 2:
            return (virtual_stage_index + 1) * num_stages - 1 - stage_id
        return super().global_stage(stage_id, virtual_stage_index, num_stages)

    def get_schedule(self, stage_id, num_stages, num_micro_batches):
        last = num_stages * self.virtual - 1
        timed = []
        for m in range(num_micro_batches):
            for v in range(self.virtual):
                g = self.global_stage(stage_id, v, num_stages)
                back = 2 * m + last + 1 + last - g
                timed.append((2 * m + g, m, FORWARD, v))
                if self.splits:
                    timed.append((back, m, BACKWARD_INPUT, v))
                    timed.append((back + 2, m, BACKWARD_WEIGHT, v))
                else:
                    timed.append((back, m, BACKWARD, v))
        return [
            PipelineOperation(kind, m, virtual_stage_index=v) for _, m, kind, v in sorted(timed)
        ]


SCHEDULES = {
    "GPipe": GPipeSchedule(),
    "1F1B": OneForwardOneBackwardSchedule(),
    "interleaved": Interleaved1F1BSchedule(2),
    "looped BFS": LoopedBFSSchedule(3),
    "ZB-H2": ZeroBubbleH2Schedule(),
    "ZB-V": ZeroBubbleVSchedule(),
    "toy": ToySchedule(virtual=2),
    "toy, three stages in a zigzag": ToySchedule(virtual=3, turns=True),
    "toy, split": ToySchedule(virtual=2, turns=True, splits=True),
}


class ToyModel:
    """y = x A_0 A_1 .. A_(T-1), each A_g of another shape; the loss is the sum of y * c."""

    def __init__(self, stages, samples, micro_batches, seed=0):
        generator = np.random.default_rng(seed)
        self.widths = [2 + (3 * g) % 5 for g in range(stages + 1)]
        self.matrices = [
            generator.standard_normal((self.widths[g], self.widths[g + 1])) for g in range(stages)
        ]
        self.x = generator.standard_normal((samples, self.widths[0]))
        self.c = generator.standard_normal((samples, self.widths[-1]))
        self.rows = ShardLayout(samples, micro_batches)
        self.micro_batches = micro_batches

    def outputs(self):
        """Of each micro-batch, computed as the stages do."""
        results = []
        for m in range(self.micro_batches):
            y = self.x[self.rows.slice(m)]
            for matrix in self.matrices:
                y = y @ matrix
            results.append(y)
        return results

    def gradients(self):
        """Of each matrix and micro-batch."""
        results = [[None] * self.micro_batches for _ in self.matrices]
        for m in range(self.micro_batches):
            inputs = [self.x[self.rows.slice(m)]]
            for matrix in self.matrices:
                inputs.append(inputs[-1] @ matrix)
            dy = self.c[self.rows.slice(m)]
            for g in reversed(range(len(self.matrices))):
                results[g][m] = inputs[g].T @ dy
                dy = dy @ self.matrices[g].T
        return results


class ToyStages(IPipelineStage):
    """One rank's stages of a `ToyModel`; at any time it may doze."""

    def __init__(self, model, schedule, rank, ranks, *, training=True, seed=None):
        self.model = model
        virtual = range(schedule.virtual_stages_per_rank)
        self.stages = [schedule.global_stage(rank, v, ranks) for v in virtual]
        self.training = training
        self.doze = None if seed is None else np.random.default_rng([seed, rank])
        self.saved, self.pending = {}, {}
        self.gradients, self.outputs, self.log = {}, [], []
        self.most_saved = 0

    def _shape(self, boundary, micro_batch):
        return (self.model.rows.size(micro_batch), self.model.widths[boundary])

    def input_shape(self, virtual_stage, micro_batch):
        return self._shape(self.stages[virtual_stage], micro_batch)

    def output_shape(self, virtual_stage, micro_batch):
        return self._shape(self.stages[virtual_stage] + 1, micro_batch)

    def _begin(self, kind, virtual_stage, micro_batch):
        self.log.append((kind, self.stages[virtual_stage], micro_batch))
        if self.doze is not None and self.doze.random() < 0.4:
            time.sleep(self.doze.random() * 1e-3)
        return self.stages[virtual_stage], (virtual_stage, micro_batch)

    def forward(self, virtual_stage, micro_batch, x):
        g, key = self._begin(FORWARD, virtual_stage, micro_batch)
        assert (x is None) == (g == 0)
        if x is None:
            x = self.model.x[self.model.rows.slice(micro_batch)]
        y = x @ self.model.matrices[g]
        if self.training:
            self.saved[key] = x
            self.most_saved = max(self.most_saved, len(self.saved) + len(self.pending))
        if g < len(self.model.matrices) - 1:
            return y
        self.outputs.append(y)
        return None

    def backward(self, virtual_stage, micro_batch, dy):
        dx = self.backward_input(virtual_stage, micro_batch, dy)
        self.backward_weight(virtual_stage, micro_batch)
        return dx

    def backward_input(self, virtual_stage, micro_batch, dy):
        g, key = self._begin(BACKWARD_INPUT, virtual_stage, micro_batch)
        assert (dy is None) == (g == len(self.model.matrices) - 1)
        if dy is None:
            dy = self.model.c[self.model.rows.slice(micro_batch)]
        self.pending[key] = self.saved.pop(key), dy
        return dy @ self.model.matrices[g].T if g > 0 else None

    def backward_weight(self, virtual_stage, micro_batch):
        g, key = self._begin(BACKWARD_WEIGHT, virtual_stage, micro_batch)
        x, dy = self.pending.pop(key)
        assert (g, micro_batch) not in self.gradients
        self.gradients[g, micro_batch] = x.T @ dy
