"""The part that adapters share: a model whose parameters lie in memory that a wrapper chooses."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpishard.arrays import Array, require_plain
from mpishard.checkpoint.exchange.plain import PlainModelFiles
from mpishard.communication import CommunicationBackend
from mpishard.contracts import IFullModel, ILossFunction, ModelMetadata
from mpishard.errors import StructureOnlyError
from mpishard.models.programs.placed_program import IPlaceableModel
from mpishard.sharding import ParameterEntry

__all__ = ["PlacedVectorModel"]


class PlacedVectorModel(PlainModelFiles, IPlaceableModel, IFullModel):
    """A plain model on a flat vector of its own, until a holder places its parameters elsewhere.

    A subclass sets ``_name``, ``_entries`` and ``_dtype``, and then calls `reclaim_parameters`
    with its first values.
    """

    _name: str
    _entries: tuple[ParameterEntry, ...]
    _dtype: np.dtype[Any]
    _holder: str | None = None
    _vector: Array | None = None

    @abstractmethod
    def _place(self, arrays: Sequence[Array]) -> None:
        """Compute with these arrays, of shape (size,), one per entry, from now on."""

    # ---------------------------------------------------------------------------------- structure

    @property
    def parameter_entries(self) -> Sequence[ParameterEntry]:
        return self._entries

    @property
    def parameter_count(self) -> int:
        return self._entries[-1].stop

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._dtype

    def checkpoint_parameters(self) -> Sequence[ParameterEntry]:
        return self._entries

    def get_model_metadata(self) -> ModelMetadata:
        return ModelMetadata(
            self._name,
            complexity=self.parameter_count,
            properties={"ParameterCount": self.parameter_count, "DType": self._dtype.name},
        )

    # --------------------------------------------------------------------------------- parameters

    def _flat_vector(self) -> Array:
        if self._vector is None:
            raise StructureOnlyError(
                f"the parameters of this {self._name} are held by {self._holder}; "
                "ask it: gather_full_parameters() gives all of them, unsharded() the plain model"
            )
        return self._vector

    def get_parameters(self) -> Array:
        return self._flat_vector().copy()

    def set_parameters(self, parameters: Array) -> None:
        self._flat_vector()[...] = self._checked(parameters)

    def fill_parameters(self, start: int, out: Array) -> None:
        out[...] = self._flat_vector()[start : start + out.size]

    def place_parameters(
        self, arrays: Sequence[Array], holder: str, ranks: CommunicationBackend
    ) -> None:
        self._place(arrays)
        self._vector, self._holder = None, holder

    def reclaim_parameters(self, parameters: Array) -> None:
        vector = np.ascontiguousarray(self._checked(parameters))
        self._place(self._cut(vector))
        self._vector, self._holder = vector, None

    def _cut(self, vector: Array) -> list[Array]:
        return [vector[entry.start : entry.stop] for entry in self._entries]

    def _checked(self, parameters: Array) -> Array:
        require_plain(parameters)
        if parameters.shape != (self.parameter_count,):
            raise ValueError(
                f"{self._name} has {self.parameter_count} parameters; got a vector of shape "
                f"{parameters.shape}"
            )
        return parameters.astype(self._dtype, copy=False)

    # ---------------------------------------------------------------------------------- computing

    def compute_loss_and_gradients(
        self, x: Array, y: Array, loss_function: ILossFunction | None = None
    ) -> tuple[float, Array]:
        """Mean loss, and its gradient of shape (parameter_count,)."""
        self.check_input(x)
        require_plain(y)
        full = np.zeros(self.parameter_count, self._dtype)
        parts = self._cut(full)

        def receive(index: int, gradient: Array) -> None:
            parts[index] += gradient

        total, weight, saved = self.forward_pass(x, y, loss_function or self.default_loss_function)
        # A rank without samples: the loss has no gradient, and 0 / 0 would be NaN.
        if weight == 0:
            return 0.0, full
        self.backward_pass(saved, receive)
        full /= weight
        return total / weight, full

    def compute_gradients(
        self, x: Array, y: Array, loss_function: ILossFunction | None = None
    ) -> Array:
        return self.compute_loss_and_gradients(x, y, loss_function)[1]

    def apply_gradients(self, gradients: Array, learning_rate: float) -> None:
        self._flat_vector()[...] -= learning_rate * self._checked(gradients)

    def train(self, x: Array, y: Array, learning_rate: float = 0.01) -> float:
        """One step of plain gradient descent; the loss before it."""
        loss, gradients = self.compute_loss_and_gradients(x, y)
        self.apply_gradients(gradients, learning_rate)
        return loss
