"""Models as flat vectors of parameters."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Self

from mpishard.arrays import Array, array_namespace

__all__ = ["IParameterSource", "IParameterizable"]


class IParameterSource(ABC):
    """Something that parameters can be read from: a flat vector, shape (parameter_count,)."""

    @property
    @abstractmethod
    def parameter_count(self) -> int:
        """Length of the flat vector, frozen parameters included."""

    @abstractmethod
    def get_parameters(self) -> Array:
        """A copy of the flat vector."""

    def get_parameter_chunks(self) -> Iterator[Array]:
        """Yield the parameters in order, part by part, so that no second whole need be held.

        End to end, raveled, the chunks are the flat vector. Each belongs to the caller. Where
        the parts are is the model's choice; unless it knows better, there is one.
        """
        yield self.get_parameters()


class IParameterizable(IParameterSource):
    """A flat vector of parameters that can be read and replaced."""

    @abstractmethod
    def set_parameters(self, parameters: Array) -> None:
        """Take the values of a flat vector, a copy.

        Raises
        ------
        TypeError
            For what is no array.
        ValueError
            Where the length is not ``parameter_count``; nothing has changed then.
        """

    def set_parameter_chunks(self, chunks: Iterable[Array]) -> None:
        """Take the values of chunks as `get_parameter_chunks` yields them.

        Raises
        ------
        TypeError
            For a chunk that is no array.
        ValueError
            Where the chunks together do not have ``parameter_count`` elements; nothing has
            changed then.
        """
        parts = [(array_namespace(chunk), chunk.reshape(-1)) for chunk in chunks]
        if not parts:
            raise ValueError(f"expected {self.parameter_count} parameters, got no chunk")
        self.set_parameters(parts[0][0].concatenate([part for _, part in parts]))

    def with_parameters(self, parameters: Array) -> Self:
        """A new model with these parameters; errors are those of `set_parameters`."""
        model = copy.deepcopy(self)
        model.set_parameters(parameters)
        return model

    @property
    def supports_parameter_initialization(self) -> bool:
        """Whether there are parameters to give first values to."""
        return self.parameter_count > 0

    def sanitize_parameters(self, parameters: Array) -> Array:
        """``parameters`` as this model would have them: as they are, unless it knows better."""
        return parameters
