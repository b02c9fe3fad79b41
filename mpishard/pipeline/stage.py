"""What a rank of a pipeline computes, as whoever runs a schedule sees it."""

from __future__ import annotations

from abc import ABC, abstractmethod

from mpishard.arrays import Array

__all__ = ["IPipelineStage"]


class IPipelineStage(ABC):
    """One rank's stages, by virtual index; what a micro-batch leaves behind is kept in here.

    Of each stage and micro-batch `forward` is called once, then either `backward`, or
    `backward_input` and later `backward_weight`.
    """

    @abstractmethod
    def input_shape(self, virtual_stage: int, micro_batch: int) -> tuple[int, ...]:
        """Shape, with the batch dim, of what the stage before sends; gradients have it too."""

    @abstractmethod
    def output_shape(self, virtual_stage: int, micro_batch: int) -> tuple[int, ...]:
        """Shape, with the batch dim, of what `forward` gives."""

    @abstractmethod
    def forward(self, virtual_stage: int, micro_batch: int, x: Array | None) -> Array | None:
        """Compute the stage's output; ``x`` is None for the model's first stage.

        Returns
        -------
        Array or None
            What the next stage takes; None of the model's last stage.
        """

    def describe(self, virtual_stage: int) -> str:
        """A stage, as errors name it."""
        return f"virtual stage {virtual_stage}"

    @abstractmethod
    def backward(self, virtual_stage: int, micro_batch: int, dy: Array | None) -> Array | None:
        """Both halves. ``dy`` is None for the model's last stage; None comes of its first."""

    @abstractmethod
    def backward_input(
        self, virtual_stage: int, micro_batch: int, dy: Array | None
    ) -> Array | None:
        """The gradient of the input, as `backward` returns it; the other half waits."""

    @abstractmethod
    def backward_weight(self, virtual_stage: int, micro_batch: int) -> None:
        """The other half: add the gradients of the parameters."""
