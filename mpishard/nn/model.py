"""A model that is a chain of layers and a loss, built without arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from mpishard.arrays import Array, array_namespace, copy_into
from mpishard.checkpoint.plain import PlainModelFiles
from mpishard.contracts import (
    IFullModel,
    ILayeredModel,
    ILossFunction,
    LayerInfo,
    ModelMetadata,
)
from mpishard.devices import Device
from mpishard.errors import StructureOnlyError
from mpishard.nn.composites import Sequential
from mpishard.nn.initializers import parameter_generator
from mpishard.nn.layer import Context, Layer, ParameterSpec
from mpishard.nn.losses import Loss
from mpishard.nn.targets import GradientTargets
from mpishard.sharding import ParameterEntry, ParameterTable

__all__ = ["Model"]


class Model(PlainModelFiles, IFullModel, ILayeredModel):
    """A chain of layers with a loss.

    Making one allocates nothing: parameters are made on first use, each from a generator keyed
    by (seed, parameter name). A sharded wrapper takes them unit by unit; from then on this
    object is structure only, and asking it for parameters raises `StructureOnlyError`.

    Parameters
    ----------
    chain : Sequential
        The layers. Each child is a layer that sharding never cuts.
    loss : Loss
        What training minimises.
    input_shape : tuple of int
        Shape of one sample, without the batch dim.
    seed : int
        Of the first parameters.
    dtype : str or numpy.dtype
        float32 or float64: parameters, activations, gradients.
    device : str or Device
        Where they lie: ``"cpu"``, or a GPU, ``"cuda"`` or ``"cuda:1"``, with CuPy arrays. Plain
        ``"cuda"`` is the thread's current GPU, and under a sharded wrapper GPU number
        ``local_rank % device_count``. Inputs and targets may lie on either; parameters, gradients
        and predictions that the model gives lie on its device.

    Raises
    ------
    ValueError
        For another dtype, or layers whose shapes do not fit each other.
    """

    def __init__(
        self,
        chain: Sequential,
        loss: Loss,
        *,
        input_shape: tuple[int, ...],
        seed: int = 0,
        dtype: Any = "float64",
        device: str | Device = "cpu",
    ) -> None:
        self._dtype = np.dtype(dtype)
        if self._dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
            raise ValueError(f"dtype must be float32 or float64, got {self._dtype.name}")
        self._device = Device.parse(device)
        self.chain = chain
        self.seed = seed
        self._loss = loss
        self._specs = dict(chain.walk_parameters())
        self._table = ParameterTable(self._specs.items())
        self._infos = _layer_infos(chain, self._table, input_shape)
        self._vector: Array | None = None
        self._holder: str | None = None

    # ---------------------------------------------------------------------------------- structure

    @property
    def layers(self) -> Sequence[Layer]:
        return tuple(self.chain.children.values())

    def get_layer_info(self, index: int) -> LayerInfo:
        return self._infos[index]

    @property
    def parameter_table(self) -> ParameterTable:
        return self._table

    @property
    def parameter_count(self) -> int:
        return self._table.length

    @property
    def dtype(self) -> np.dtype[Any]:
        dtype: np.dtype[Any] = self._dtype
        return dtype

    @property
    def device(self) -> Device:
        """Where parameters, activations and gradients lie."""
        return self._device

    @property
    def default_loss_function(self) -> ILossFunction:
        return self._loss

    def get_model_metadata(self) -> ModelMetadata:
        return ModelMetadata(
            type(self).__name__,
            complexity=self.parameter_count,
            properties={"ParameterCount": self.parameter_count, "DType": self._dtype.name},
        )

    # --------------------------------------------------------------------------------- parameters

    def _parameters(self) -> Array:
        """The flat vector itself, made if need be."""
        if self._holder is not None:
            raise StructureOnlyError(
                f"the parameters of this {type(self).__name__} are held by {self._holder}; ask "
                "it: gather_full_parameters() gives all of them, unsharded() the plain model"
            )
        if self._vector is None:
            vector = np.empty(self._table.length, self._dtype)
            self._initialize_range(0, vector)
            self._vector = self._device.put(vector)
        return self._vector

    def _initialize_range(self, start: int, out: Array) -> None:
        stop = start + int(out.size)
        for entry in self._table.overlapping(start, stop):
            spec: ParameterSpec = self._specs[entry.name]
            value = spec.initializer(parameter_generator(self.seed, entry.name), entry.shape)
            first, last = max(start, entry.start), min(stop, entry.stop)
            part = value.reshape(-1)[first - entry.start : last - entry.start]
            out[first - start : last - start] = part

    def fill_parameters(self, start: int, out: Array) -> None:
        if self._holder is None and self._vector is not None:
            copy_into(out, self._vector[start : start + int(out.size)])
        elif self._holder is None:
            self._initialize_range(start, out)
        else:
            self._parameters()  # raises

    def release_parameters(self, holder: str) -> None:
        self._vector = None
        self._holder = holder

    def reclaim_parameters(self, parameters: Array) -> None:
        self._vector = self._checked(parameters)
        self._holder = None

    def get_parameters(self) -> Array:
        return self._parameters().copy()

    def set_parameters(self, parameters: Array) -> None:
        if self._holder is not None:
            self._parameters()  # raises
        self._vector = self._checked(parameters).copy()

    def with_parameters(self, parameters: Array) -> Self:
        """A new plain model of this structure that *holds* ``parameters``, without a copy.

        Works on a model that is structure only, too. ``parameters`` is copied only where its
        dtype differs.
        """
        model = self.clone()
        model._holder = None
        model._vector = self._checked(parameters)
        return model

    def _checked(self, parameters: Array) -> Array:
        array_namespace(parameters)
        if parameters.shape != (self._table.length,):
            raise ValueError(
                f"{type(self).__name__} has {self._table.length} parameters; got a vector of "
                f"shape {parameters.shape}"
            )
        return self._device.put(parameters).astype(self._dtype, copy=False)

    def deep_copy(self) -> Self:
        model = self.clone()
        if self._vector is not None:
            model._vector = self._vector.copy()
        return model

    # ---------------------------------------------------------------------------------- computing

    def as_input(self, x: Array) -> Array:
        self.chain.check_input(x)
        x = self._device.put(x)
        return x if self.chain.takes_integers else x.astype(self._dtype, copy=False)

    def _prediction_shape(self, x: Array) -> tuple[int, ...]:
        return (*x.shape[:1], *self.chain.output_shape(x.shape[1:]))

    def predict(self, x: Array) -> Array:
        """Outputs, shape (B, ...), for inputs of shape (B, ...)."""
        x = self.as_input(x)
        self._prediction_shape(x)  # raises where the layers cannot take x
        views = self._table.nested_views(self._parameters())
        y, _ = self.chain.forward(views, x, Context(training=False))
        return y

    def compute_loss_and_gradients(
        self, x: Array, y: Array, loss_function: ILossFunction | None = None
    ) -> tuple[float, Array]:
        """Mean loss, and its gradient of shape (parameter_count,)."""
        loss = loss_function or self._loss
        x = self.as_input(x)
        loss.check_target(self._prediction_shape(x), y)
        vector = self._parameters()
        views = self._table.nested_views(vector)
        prediction, saved = self.chain.forward(views, x, Context())
        total, weight, loss_saved = loss.forward(prediction, self._device.put(y))
        if weight == 0:
            return 0.0, array_namespace(vector).zeros_like(vector)
        gradients = array_namespace(vector).empty_like(vector)
        targets = GradientTargets(
            {name: self._table[name] for name in self._specs},
            lambda entry: gradients[entry.start : entry.stop],
            {entry.name for entry in self._table.entries},
        )
        held = [loss.backward(loss_saved)]
        del prediction, loss_saved  # large, and of no use to the layers
        self.chain.backward(views, saved, held.pop(), targets, needs_input_gradient=False)
        targets.clear_unwritten()
        gradients /= weight
        return total / weight, gradients

    def compute_gradients(
        self, x: Array, y: Array, loss_function: ILossFunction | None = None
    ) -> Array:
        return self.compute_loss_and_gradients(x, y, loss_function)[1]

    def apply_gradients(self, gradients: Array, learning_rate: float) -> None:
        self._parameters()[...] -= learning_rate * self._checked(gradients)

    def train(self, x: Array, y: Array, learning_rate: float = 0.01) -> float:
        """One step of plain gradient descent; the loss before it."""
        loss, gradients = self.compute_loss_and_gradients(x, y)
        self.apply_gradients(gradients, learning_rate)
        return loss

    # -------------------------------------------------------------------------------------- files

    def _flat_vector(self) -> Array:
        return self._parameters()

    def checkpoint_parameters(self) -> Sequence[ParameterEntry]:
        return self._table.entries


def _layer_infos(
    chain: Sequential, table: ParameterTable, input_shape: tuple[int, ...]
) -> tuple[LayerInfo, ...]:
    infos = []
    shape = tuple(input_shape)
    position = 0
    for index, (name, layer) in enumerate(chain.children.items()):
        own = [e for e in table.entries if e.name.startswith(f"{name}.")]
        count = sum(entry.size for entry in own)
        output = layer.output_shape(shape)
        infos.append(LayerInfo(index, name, layer, position, count, shape, output))
        position += count
        shape = output
    return tuple(infos)
