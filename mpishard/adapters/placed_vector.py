"""Bases of adapters: models whose parameters are in memory that a wrapper chooses."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from mpishard.adapters.parameter_tree import ParameterTree
from mpishard.base import (
    Array,
    DType,
    MissingMemberError,
    StructureOnlyError,
    array_namespace,
    as_loss,
    copy_into,
    require_plain,
)
from mpishard.base.mirrored import PlainModelMembers
from mpishard.checkpoint import PlainModelFiles
from mpishard.contracts import ILossFunction, ModelMetadata
from mpishard.data import tree_of
from mpishard.models import IPlaceableModel, ParameterStore
from mpishard.nn import Context
from mpishard.sharding import ParameterEntry


class FlatVectorModel(PlainModelFiles, PlainModelMembers):
    """Plain model of the flat vector that `_flat_vector` returns."""

    _entries: tuple[ParameterEntry, ...]

    @property
    def parameter_count(self) -> int:
        return self._entries[-1].stop

    def checkpoint_parameters(self) -> Sequence[ParameterEntry]:
        return self._entries

    def get_parameters(self) -> Array:
        return self._flat_vector().copy()

    def set_parameters(self, parameters: Array) -> None:
        copy_into(self._flat_vector(), self._checked(parameters))

    def _checked(self, vector: Array) -> Array:
        require_plain(vector)
        if not hasattr(vector, "shape"):
            array_namespace(vector)  # which refuses it
        if vector.shape != (self.parameter_count,):
            raise ValueError(
                f"this {type(self).__name__} has {self.parameter_count} parameters; got a vector "
                f"of shape {vector.shape}"
            )
        return vector

    @abstractmethod
    def compute_loss_and_gradients(self, x: Array, y: Array) -> tuple[float, Array]:
        """Return the mean loss over the samples, and its gradient of shape (parameter_count,)."""

    def apply_gradients(self, gradients: Array, learning_rate: float) -> None:
        self._flat_vector()[...] -= learning_rate * self._checked(gradients)

    def train(self, x: Array, y: Array, learning_rate: float = 0.01) -> float:
        """Make one step of plain gradient descent, and return the loss before it."""
        loss, gradients = self.compute_loss_and_gradients(x, y)
        self.apply_gradients(gradients, learning_rate)
        return loss


class PlacedVectorModel(FlatVectorModel, IPlaceableModel):
    """Plain model with a flat vector of its own, until a holder places its parameters elsewhere.

    A subclass sets ``_name``, ``_entries`` and ``_dtype``, and then calls `reclaim_parameters`
    with its initial values.
    """

    _name: str
    _dtype: DType
    _holder: str | None = None
    _vector: Array | None = None

    @abstractmethod
    def _place(self, arrays: Sequence[Array]) -> None:
        """Compute from now on with these arrays, one of shape (size,) per entry."""

    # ---------------------------------------------------------------------------------- structure

    @property
    def parameter_entries(self) -> Sequence[ParameterEntry]:
        return self._entries

    @property
    def dtype(self) -> DType:
        return self._dtype

    @property
    def default_loss_function(self) -> ILossFunction | None:
        return None

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

    def fill_parameters(self, start: int, out: Array) -> None:
        out[...] = self._flat_vector()[start : start + out.size]

    def place_parameters(self, arrays: Sequence[Array], holder: str, store: ParameterStore) -> None:
        self._place(arrays)
        self._vector, self._holder = None, holder

    def reclaim_parameters(self, parameters: Array) -> None:
        # Leaves are views in the parameters' shapes, which a strided vector does not allow.
        vector = np.ascontiguousarray(self._checked(parameters))
        self._place(self._cut(vector))
        self._vector, self._holder = vector, None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # copy.deepcopy would copy each leaf, and the copies would not be views of one vector.
        return self.with_parameters(self.get_parameters())

    def _cut(self, vector: Array) -> list[Array]:
        return [vector[entry.start : entry.stop] for entry in self._entries]

    def _checked(self, vector: Array) -> Array:
        return super()._checked(vector).astype(self._dtype, copy=False)

    # ---------------------------------------------------------------------------------- computing

    def compute_loss_and_gradients(
        self, x: Array, y: Array, loss_function: ILossFunction | None = None
    ) -> tuple[float, Array]:
        """Return the mean loss, or the sum, and its gradient of shape (parameter_count,)."""
        self.check_input(x)
        require_plain(y)
        # Zeros, because a pass gives no gradient of parameters that it did not use.
        full = np.zeros(self.parameter_count, self._dtype)
        parts = self._cut(full)

        def receive(index: int, gradient: Array) -> None:
            parts[index] += gradient

        loss = loss_function or self.default_loss_function
        total, weight, saved = self.forward_pass(x, y, loss, Context())
        # Without samples the loss has no gradient, and 0 / 0 would be NaN.
        if weight == 0:
            return 0.0, full
        self.backward_pass(saved, receive)
        divisor = 1.0 if self._sums(loss_function) else weight
        full /= divisor
        return float(total / divisor), full

    def compute_gradients(
        self, x: Array, y: Array, loss_function: ILossFunction | None = None
    ) -> Array:
        return self.compute_loss_and_gradients(x, y, loss_function)[1]

    def _sums(self, loss: ILossFunction | None) -> bool:
        """Return True if ``loss``, by default the model's own, is a sum over samples."""
        loss = loss or self.default_loss_function
        return self.loss_is_sum if loss is None else loss.is_sum


class TreeModel(PlacedVectorModel):
    """Model from ``loss(parameters, x, y)``, whose parameters are a tree of arrays.

    A subclass differentiates the loss: it defines `forward_pass` and `backward_pass`.

    Parameters
    ----------
    tree : ParameterTree
        Structure and initial values.
    loss : callable
        ``loss(parameters, x, y)`` returns a scalar, the *mean* over the samples of x.
    predict : callable, optional
        ``predict(parameters, x)``, for the method `predict`, and for gradients of another loss.
    loss_is_sum : bool
        True if the loss is the sum over the samples of x.

    Raises
    ------
    TypeError
        If an argument for a function is not callable.
    """

    def __init__(
        self,
        tree: ParameterTree,
        loss: Callable[..., Any],
        predict: Callable[..., Any] | None,
        loss_is_sum: bool,
    ) -> None:
        if not callable(loss):
            raise TypeError(f"loss must be loss(parameters, x, y), got {type(loss).__name__}")
        if predict is not None and not callable(predict):
            raise TypeError(f"predict must be predict(parameters, x), got {type(predict).__name__}")
        self._loss = loss
        self._predict = predict
        self._loss_is_sum = loss_is_sum
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

    @property
    def loss_is_sum(self) -> bool:
        return self._loss_is_sum

    def parameters_tree(self, vector: Array | None = None) -> Any:
        """Return a copy of the parameters in their tree.

        Parameters
        ----------
        vector : Array, optional
            Other values of shape (parameter_count,), such as a gradient or the result of a sharded
            model's ``gather_full_parameters``.
        """
        return self._tree.values(self._flat_vector() if vector is None else self._checked(vector))

    def _place(self, arrays: Sequence[Array]) -> None:
        # The user's functions get read-only arrays, because other ranks may read the same memory.
        self._leaves = []
        for entry, array in zip(self._entries, arrays, strict=True):
            leaf = array.reshape(entry.shape)
            leaf.flags.writeable = False
            self._leaves.append(leaf)

    def with_parameters(self, parameters: Array) -> Self:
        """Return a new plain model of this structure that uses ``parameters`` without a copy.

        The array is copied only if its dtype differs, or if it is not C-contiguous.
        """
        model = copy.copy(self)
        model.reclaim_parameters(parameters)
        return model

    # ---------------------------------------------------------------------------------- computing

    def check_input(self, x: object) -> None:
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

    @property
    def _given(self) -> tuple[Any, ...]:
        """First arguments of the user's functions, before the samples."""
        return (self._parameters,)

    def predict(self, x: Array) -> Array:
        """Return ``predict(parameters, x)``.

        Raises
        ------
        MissingMemberError
            If the model was made without ``predict``.
        """
        prediction: Array = self._known_predict()(*self._given, tree_of(x))
        return prediction

    def own_loss(self, x: Array, y: Array) -> tuple[float, float]:
        if len(x) == 0:
            return 0.0, 0.0
        # The sum over samples is returned, because ranks may have different numbers of samples.
        value = as_loss(self._loss(*self._given, tree_of(x), tree_of(y)), self)
        return value * self._factor(x), float(len(x))

    def _factor(self, x: Array) -> int:
        """Return the number that makes a sum over samples of the loss of ``x``."""
        return 1 if self._loss_is_sum else len(x)

    def _known_predict(self) -> Callable[..., Any]:
        if self._predict is None:
            raise MissingMemberError(
                f"this {self._name} was made without predict, which is needed now; pass "
                "predict=lambda parameters, x: ..."
            )
        return self._predict


def described(value: object) -> str:
    """Return a value, or the shape of an array, for an error message."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype.name} of shape {value.shape}"
    return f"{value!r}"[:80] if isinstance(value, float | int) else type(value).__name__
