"""The part that adapters of functions share: a loss of a tree of parameters, as a model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np

from mpishard.adapters.placed_vector import PlacedVectorModel
from mpishard.arrays import Array, require_plain
from mpishard.data import tree_of
from mpishard.errors import MissingMemberError
from mpishard.sharding import ParameterEntry

__all__ = ["ITree", "TreeModel", "described", "scalar_loss"]


class ITree(Protocol):
    """The structure of a tree of arrays; see `ParameterTree`."""

    entries: tuple[ParameterEntry, ...]
    dtype: np.dtype[Any]
    first_values: Array

    def build(self, leaves: Sequence[Any]) -> Any:
        """A tree of this structure that has ``leaves``, one per entry."""

    def values(self, vector: Array) -> Any:
        """The tree of a flat vector's values, in arrays of their own."""


class TreeModel(PlacedVectorModel):
    """A model from ``loss(parameters, x, y)``, whose parameters are a tree of arrays.

    A subclass differentiates: it has `forward_pass` and `backward_pass`.

    Parameters
    ----------
    tree : ITree
        Structure and first values.
    loss : callable
        ``loss(parameters, x, y)``, the *mean* over the samples of x, a scalar.
    predict : callable, optional
        ``predict(parameters, x)``, for `predict`, and if another loss is asked for.

    Raises
    ------
    TypeError
        If a function cannot be called.
    """

    def __init__(
        self,
        tree: ITree,
        loss: Callable[[Any, Any, Any], Any],
        predict: Callable[[Any, Any], Any] | None,
    ) -> None:
        if not callable(loss):
            raise TypeError(f"loss must be loss(parameters, x, y), got {type(loss).__name__}")
        if predict is not None and not callable(predict):
            raise TypeError(f"predict must be predict(parameters, x), got {type(predict).__name__}")
        self._loss = loss
        self._predict = predict
        self._tree = tree
        self._name = type(self).__name__
        self._entries = tree.entries
        self._dtype = tree.dtype
        self.reclaim_parameters(tree.first_values)

    # --------------------------------------------------------------------------------- parameters

    @property
    def placed_object(self) -> Any:
        return self

    @property
    def has_own_loss(self) -> bool:
        return True

    def parameters_tree(self, vector: Array | None = None) -> Any:
        """The parameters as the tree they were given in, a copy.

        Parameters
        ----------
        vector : Array, optional
            Other values, shape (parameter_count,): a gradient, or what a sharded model's
            ``gather_full_parameters`` gave.
        """
        return self._tree.values(self._flat_vector() if vector is None else self._checked(vector))

    def _place(self, arrays: Sequence[Array]) -> None:
        # What the user's functions get is read-only: other ranks may be reading the same memory.
        self._leaves = []
        for entry, array in zip(self._entries, arrays, strict=True):
            leaf = array.reshape(entry.shape)
            leaf.flags.writeable = False
            self._leaves.append(leaf)

    def with_parameters(self, parameters: Array) -> Self:
        """A new plain model of this structure that *holds* ``parameters``, without a copy.

        ``parameters`` is copied only if its dtype differs.
        """
        model = copy.copy(self)
        model.reclaim_parameters(parameters)
        return model

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.with_parameters(self.get_parameters())

    # ---------------------------------------------------------------------------------- computing

    def check_input(self, x: Any) -> None:
        require_plain(x)
        if not hasattr(x, "__len__"):
            raise TypeError(f"x must be samples with a length, got {type(x).__name__}")
        if isinstance(x, Mapping | tuple):
            raise TypeError(
                f"x must be one array of samples, got {type(x).__name__}; give several inputs as "
                "mpishard.data.Samples(x)"
            )

    @property
    def _parameters(self) -> Any:
        return self._tree.build(self._leaves)

    def predict(self, x: Array) -> Array:
        """Return ``predict(parameters, x)``.

        Raises
        ------
        MissingMemberError
            If the model was made without it.
        """
        return self._known_predict()(self._parameters, tree_of(x))

    def own_loss(self, x: Array, y: Array) -> tuple[float, float]:
        if len(x) == 0:
            return 0.0, 0.0
        mean = scalar_loss(self._loss(self._parameters, tree_of(x), tree_of(y)))
        return mean * len(x), float(len(x))

    def _known_predict(self) -> Callable[[Any, Any], Any]:
        if self._predict is None:
            raise MissingMemberError(
                f"this {self._name} was made without predict, which is needed now; pass "
                "predict=lambda parameters, x: ..."
            )
        return self._predict


def scalar_loss(value: Any) -> float:
    """Return the value of a loss, which has one element.

    Raises
    ------
    TypeError
        For anything but one float.
    """
    if np.size(value) != 1 or np.result_type(value).kind != "f":
        raise TypeError(
            f"loss(parameters, x, y) must return one float, the mean over samples; got "
            f"{described(value)}"
        )
    return float(np.reshape(value, ()))


def described(value: Any) -> str:
    """Return a value, or the shape of an array, for an error message."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype.name} of shape {value.shape}"
    return f"{value!r}"[:80] if isinstance(value, float | int) else type(value).__name__
