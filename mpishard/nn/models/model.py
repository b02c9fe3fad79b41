"""Model of a chain of layers and a loss, built without arrays."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np

from mpishard.base import (
    Array,
    Device,
    Document,
    DType,
    Metadata,
    MissingLossError,
    StructureOnlyError,
    array_namespace,
    as_integer,
    require_type,
    to_host,
)
from mpishard.base.mirrored import LayeredModelMembers
from mpishard.checkpoint import PlainModelFiles
from mpishard.contracts import (
    DynamicShapeInfo,
    ILayeredModel,
    ILossFunction,
    LayerInfo,
    ModelMetadata,
)
from mpishard.data import map_arrays
from mpishard.nn.checks import deferred_checks
from mpishard.nn.graph.tracing import ComputationNode, input_of, trace_chain
from mpishard.nn.layers.composites import Sequential, dynamic_shapes, layer_infos
from mpishard.nn.layers.initializers import parameter_generator
from mpishard.nn.layers.layer import Context, Layer, ParameterSpec
from mpishard.nn.layers.linear import FeatureLinear
from mpishard.nn.models.parts import ParameterVector, TrainingPass, VectorPart
from mpishard.sharding import ParameterEntry, ParameterTable

_ACTIVE = "active_features"


class Model(PlainModelFiles, LayeredModelMembers, ILayeredModel):
    """Chain of layers with a loss.

    The constructor allocates no arrays. Parameters are made on first use, each from a generator
    keyed by (seed, parameter name). A sharded wrapper takes them unit by unit. From then on this
    object is structure only, and raises `StructureOnlyError` if it is asked for parameters.

    Parameters
    ----------
    chain : Sequential
        The layers. Sharding never cuts one of its children.
    loss : ILossFunction or None
        Loss that training minimises. If it is None, callers must pass a loss for gradients.
    input_shape : tuple of int
        Shape of one sample, without the batch dim.
    seed : int
        Seed of the initial parameters.
    dtype : str or numpy.dtype
        Dtype of parameters, activations and gradients: float32 or float64.
    device : str or Device
        Device of these arrays: ``"cpu"``, or a GPU, ``"cuda"`` or ``"cuda:1"``. Plain
        ``"cuda"`` is the thread's current GPU, and under a sharded wrapper GPU number
        ``local_rank % device_count``. Inputs and targets may be on the host or a GPU; parameters,
        gradients and predictions that the model returns are on its device.

    Raises
    ------
    TypeError
        For a chain that is no `Sequential`, a loss that is none, a shape that is no tuple, a seed
        that is no integer, or what is no dtype.
    ValueError
        If the dtype or device is another one, or the layers' shapes do not fit each other.
    DeviceUnavailableError
        If the device is a GPU, and CuPy is not installed or finds none.
    """

    def __init__(
        self,
        chain: Sequential,
        loss: ILossFunction | None,
        *,
        input_shape: tuple[int, ...],
        seed: int = 0,
        dtype: Any = "float64",
        device: str | Device = "cpu",
    ) -> None:
        require_type("chain", chain, Sequential)
        if loss is not None:
            require_type("loss", loss, ILossFunction)
        require_type("input_shape", input_shape, tuple, list)
        seed = as_integer("seed", seed)
        try:
            self._dtype = np.dtype(dtype)
        except TypeError as error:
            raise TypeError(f"dtype must be float32 or float64, got {dtype!r}: {error}") from None
        # Layers compute in bfloat16 only under a wrapper, which keeps float32 parameters.
        if self._dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
            raise ValueError(f"dtype must be float32 or float64, got {self._dtype.name}")
        self._device = Device.parse(device)
        # A model on the host also takes inputs on a GPU.
        self._put = self._device.put if self._device.is_gpu else to_host
        self.chain = chain
        # Asked once: `as_input` runs in each step.
        self._takes_integers = chain.takes_integers
        self._features = dict(_feature_layers(chain))
        self.seed = seed
        self._loss = loss
        # No array is made here: a sharded wrapper must never hold the whole model on one rank.
        self._specs = dict(chain.walk_parameters())
        self._table = ParameterTable(self._specs.items())
        self._infos = layer_infos(chain, self._table, input_shape, self._dtype.itemsize)
        self._vector = ParameterVector(
            self._table.length, self._dtype, self._initialize_range, device=self._device
        )
        self._holder: str | None = None

    def __repr__(self) -> str:
        # A chain has more layers than `GPT(layers=)`: a block has two, and the ends have more.
        size = f"{self.parameter_count} parameters in a chain of {self.layer_count} layers"
        return f"{type(self).__name__}({size}, {self._dtype.name})"

    # ---------------------------------------------------------------------------------- structure

    @property
    def layers(self) -> Sequence[Layer]:
        return tuple(self.chain.children.values())

    def get_layer_info(self, index: int) -> LayerInfo:
        if not 0 <= index < len(self._infos):
            raise ValueError(
                f"layer {index} is outside [0, {len(self._infos)}), the layers of this "
                f"{type(self).__name__}"
            )
        return self._infos[index]

    def extract_sub_model(self, start: int, end: int) -> Model:
        """Return a `SubModel` of ``layers[start:end]``, which shares their parameters."""
        return SubModel(self, start, end)

    def get_input_shape(self) -> list[int]:
        return list(self._infos[0].input_shape)

    def get_output_shape(self) -> list[int]:
        return list(self._infos[-1].output_shape)

    def get_dynamic_shape_info(self) -> DynamicShapeInfo:
        """Return the dims that may have other sizes, such as a `GPT`'s length of a sequence."""
        return dynamic_shapes(self.chain, self._infos[0].input_shape)

    @property
    def parameter_table(self) -> ParameterTable:
        return self._table

    @property
    def parameter_count(self) -> int:
        return self._table.length

    @property
    def dtype(self) -> DType:
        dtype: DType = self._dtype
        return dtype

    @property
    def device(self) -> Device:
        """The device of parameters, activations and gradients."""
        return self._device

    @property
    def default_loss_function(self) -> ILossFunction | None:
        return self._loss

    def get_model_metadata(self) -> ModelMetadata:
        kind = type(self).__name__
        return ModelMetadata(
            kind,
            model_type=kind,
            feature_count=math.prod(self._infos[0].input_shape),
            complexity=self.parameter_count,
            description=(
                f"{kind}: {self.layer_count} layers, {self.parameter_count} parameters in "
                f"{self._dtype.name}"
            ),
            properties={"ParameterCount": self.parameter_count, "DType": self._dtype.name},
            additional_info={
                "Layers": [info.name for info in self._infos],
                "InputShape": self.get_input_shape(),
                "OutputShape": self.get_output_shape(),
                "Loss": None if self._loss is None else type(self._loss).__name__,
                "Seed": self.seed,
            },
        )

    # --------------------------------------------------------------------------------- parameters

    @property
    def has_parameters(self) -> bool:
        """True if this object holds an array of parameters, which are made on first use."""
        return self._vector.values is not None

    def _require_parameters(self) -> None:
        """Refuse a call that needs the parameters, if a wrapper holds them."""
        if self._holder is not None:
            raise StructureOnlyError(
                f"the parameters of this {type(self).__name__} are held by {self._holder}; ask "
                "it: gather_full_parameters() gives all of them, unsharded() the plain model"
            )

    def _parameters(self) -> Array:
        """Return the flat vector itself, and make it if necessary."""
        self._require_parameters()
        return self._vector.get()

    def _initialize_range(self, start: int, out: Array) -> None:
        stop = start + int(out.size)
        for entry in self._table.overlapping(start, stop):
            spec: ParameterSpec = self._specs[entry.name]
            # The whole parameter is drawn, also for a part of it, because its values are one
            # stream.
            generator = parameter_generator(self.seed, entry.name)
            value = np.asarray(spec.initializer(generator, entry.shape))
            if value.shape != entry.shape:
                raise ValueError(
                    f"the initializer of {entry.name} must return an array of shape {entry.shape}, "
                    f"got shape {value.shape}"
                )
            first, last = max(start, entry.start), min(stop, entry.stop)
            part = value.reshape(-1)[first - entry.start : last - entry.start]
            out[first - start : last - start] = part

    def fill_parameters(self, start: int, out: Array) -> None:
        self._require_parameters()
        self._vector.fill(start, out)

    def release_parameters(self, holder: str) -> None:
        # The holder has the values now. A second copy here would double the memory.
        self._vector = self._vector.holding(None)
        self._holder = holder

    def reclaim_parameters(self, parameters: Array) -> None:
        # A new object, because shallow copies share the old one and keep their values.
        self._vector = self._vector.holding(self._checked(parameters))
        self._holder = None

    def get_parameters(self) -> Array:
        return self._parameters().copy()

    def get_parameter_chunks(self) -> Iterator[Array]:
        """Yield a copy of each parameter, in its shape and in the order of the table.

        If the flat vector was not made yet, only one parameter exists at a time.
        """
        for entry in self._table.entries:
            chunk = np.empty(entry.size, self._dtype)
            self.fill_parameters(entry.start, chunk)
            yield self._device.put(chunk.reshape(entry.shape))

    def set_parameters(self, parameters: Array) -> None:
        self._require_parameters()
        # In the shared object: shallow copies and sub-models see the new values.
        self._vector.replace(self._checked(parameters).copy())

    def set_parameter_chunks(self, chunks: Iterable[Array]) -> None:
        """Set the parameters from one array for each, in the order of the table.

        The chunks are copied to a new vector, which replaces the model's when all have fitted.

        Raises
        ------
        TypeError
            If a chunk is not an array.
        ValueError
            If the number of chunks or a chunk's size does not fit. Nothing has changed then.
        """
        self._require_parameters()
        # A second vector, so that the model is unchanged if a later chunk does not fit.
        vector = np.empty(self._table.length, self._dtype)
        given = iter(chunks)
        for entry in self._table.entries:
            chunk = next(given, None)
            if chunk is None:
                raise ValueError(f"the chunks ended before {entry.name} of shape {entry.shape}")
            array_namespace(chunk)
            if chunk.size != entry.size:
                raise ValueError(
                    f"{entry.name} of shape {entry.shape} got a chunk of shape {chunk.shape}"
                )
            vector[entry.start : entry.stop] = to_host(chunk).reshape(-1)
        if next(given, None) is not None:
            raise ValueError(f"more chunks than the {len(self._table.entries)} parameters")
        self._vector.replace(self._device.put(vector))

    def with_parameters(self, parameters: Array) -> Self:
        """Return a new plain model of this structure that uses ``parameters`` without a copy.

        The array is copied only if its dtype or device differs. This model may be structure only.
        """
        model = self.clone()
        model.reclaim_parameters(parameters)
        return model

    def _checked(self, parameters: Array) -> Array:
        array_namespace(parameters)
        if parameters.shape != (self._table.length,):
            raise ValueError(
                f"{type(self).__name__} has {self._table.length} parameters; got a vector of "
                f"shape {parameters.shape}"
            )
        return self._device.put(parameters).astype(self._dtype, copy=False)

    def clone(self) -> Self:
        """Return a copy that shares the parameters' array, and has layers of its own."""
        model = copy.copy(self)
        # Layers have settings, such as the active features, which may differ between the copies.
        model.chain = self.chain.copy()
        model._features = dict(_feature_layers(model.chain))
        own = model.chain.children
        model._infos = tuple(replace(info, layer=own[info.name]) for info in self._infos)
        return model

    def deep_copy(self) -> Self:
        """Return a copy with parameters of its own; that of a structure-only model has none."""
        model = self.clone()
        if self._holder is None:
            model._vector = self._vector.copy()
        return model

    def close(self) -> None:
        """Release the parameters. Shallow copies, and a wrapper that has taken them, keep them."""
        if self._holder is None:
            self.release_parameters("nobody: the model was closed")

    # -------------------------------------------------------------------------------------- files

    def _flat_vector(self) -> Array:
        return self._parameters()

    def checkpoint_parameters(self) -> Sequence[ParameterEntry]:
        return self._table.entries

    def choices(self) -> Document:
        """Return the active features, by full name, of each layer with inactive features."""
        active = {
            name: list(layer.active)
            for name, layer in self._features.items()
            if len(layer.active) < layer.inputs
        }
        return {_ACTIVE: active} if active else {}

    def check_choices(self, choices: Metadata) -> None:
        for name, indices in choices.get(_ACTIVE, {}).items():
            if name not in self._features:
                raise ValueError(
                    f"the saved {name!r} uses only the input features {indices}, but in "
                    f"this {type(self).__name__} it cannot leave features out: it must be a "
                    "FeatureLinear, as in the linear models"
                )
            self._features[name].checked(indices)

    def take_choices(self, choices: Metadata) -> None:
        active = choices.get(_ACTIVE, {})
        for name, layer in self._features.items():
            layer.active = active.get(name, range(layer.inputs))

    # ---------------------------------------------------------------------------------- computing

    def check_input(self, x: Array) -> None:
        self.chain.check_input(x)

    def as_input(self, x: Array) -> Array:
        self.check_input(x)
        x = self._put(x)
        return x if self._takes_integers else x.astype(self._dtype, copy=False)

    def _prediction_shape(self, x: Array) -> tuple[int, ...]:
        return (*x.shape[:1], *self.chain.output_shape(x.shape[1:]))

    def predict(self, x: Array) -> Array:
        """Return outputs of shape (B, ...) for inputs of shape (B, ...)."""
        x = self.as_input(x)
        self._prediction_shape(x)  # This raises a ValueError if the layers cannot take x.
        views = self._table.nested_views(self._parameters())
        y, _ = self.chain.forward(views, x, Context(training=False))
        return y

    def compute_loss_and_gradients(
        self,
        x: Array,
        y: Array,
        loss_function: ILossFunction | None = None,
        *,
        step: int = 0,
        sample_start: int = 0,
    ) -> tuple[float, Array]:
        """Return the mean loss, and its gradient of shape (parameter_count,).

        Random layers use ``step``, ``sample_start`` (index of the first sample in the global batch)
        and the model's seed. The caller passes the step, because a plain model does not count them.
        """
        run = self._run(x, y, loss_function, step, sample_start)
        gradients = run.gradients()
        return run.mean_loss, gradients

    def _run(
        self,
        x: Array,
        y: Array,
        loss_function: ILossFunction | None = None,
        step: int = 0,
        sample_start: int = 0,
    ) -> TrainingPass:
        """Run the forward pass of layers and loss, after the checks of inputs and targets."""
        loss = loss_function or self._loss
        if loss is None:
            raise MissingLossError(
                f"this {type(self).__name__} has no default loss; pass loss_function"
            )
        require_type("loss_function", loss, ILossFunction)
        # Input and targets on a GPU are checked by one copy to the host.
        with deferred_checks():
            x = self.as_input(x)
            loss.check_target(self._prediction_shape(x), y)
        y = map_arrays(self._put, y)
        context = Context(seed=self.seed, step=step, sample_start=sample_start)
        return TrainingPass(self.chain, self._table, self._parameters(), loss, x, y, context)

    def compute_gradients(
        self, x: Array, y: Array, loss_function: ILossFunction | None = None
    ) -> Array:
        return self.compute_loss_and_gradients(x, y, loss_function)[1]

    def apply_gradients(self, gradients: Array, learning_rate: float) -> None:
        # In place, because copies and sub-models share the vector.
        self._parameters()[...] -= learning_rate * self._checked(gradients)

    def train(self, x: Array, y: Array, learning_rate: float = 0.01) -> float:
        """Make one step of plain gradient descent, and return the loss before it."""
        loss, gradients = self.compute_loss_and_gradients(x, y)
        self.apply_gradients(gradients, learning_rate)
        return loss

    # -------------------------------------------------------------------------------------- graph

    @property
    def supports_jit_compilation(self) -> bool:
        """True, because `export_computation_graph` works for every chain of layers."""
        return True

    def export_computation_graph(self, input_nodes: list[ComputationNode]) -> ComputationNode:
        """Return the graph of `predict`, with a copy of the present parameters.

        Parameters are nodes of op "constant" with the names of the parameter table. A layer that
        is not one of `mpishard.nn` is a node of op "layer", which runs it.
        """
        shape = self._infos[0].input_shape
        x = input_of(input_nodes, shape, self.get_dynamic_shape_info())
        return trace_chain(self.chain, self._table, to_host(self.get_parameters()), x, shape)


def _feature_layers(layer: Layer, name: str = "") -> Iterator[tuple[str, FeatureLinear]]:
    """Yield (dotted name, layer) of each layer that can leave features out."""
    if isinstance(layer, FeatureLinear):
        yield name, layer
    for child_name, child in layer.children.items():
        yield from _feature_layers(child, f"{name}.{child_name}" if name else child_name)


class SubModel(Model):
    """Model of the layers ``layers[start:end]`` of another model, which shares their parameters.

    Its flat vector is a range of the model's, in the same memory: training of either changes both.
    Names and initial values are the model's. The constructor allocates no arrays, and
    ``fill_parameters`` makes only this range, so that a pipeline stage needs no memory for the
    other stages. After a wrapper has taken its parameters, the model keeps its values.

    It has the model's loss if it ends with the model's last layer, and no loss otherwise.

    Parameters
    ----------
    model : Model
        Model that has the layers.
    start, end : int
        First layer, and one past the last.

    Raises
    ------
    ValueError
        If the range is empty or exceeds the layers, or a parameter is tied to one of a layer
        outside of it.
    """

    def __init__(self, model: Model, start: int, end: int) -> None:
        if not 0 <= start < end <= model.layer_count:
            raise ValueError(
                f"layers [{start}, {end}) are empty or reach outside the {model.layer_count} "
                f"layers of the {type(model).__name__}"
            )
        infos = model.get_all_layer_info()
        own = dict(list(model.chain.children.items())[start:end])
        for name, spec in Sequential(own).walk_parameters():
            # A tied weight would need the other layer's gradient, which this model does not
            # compute.
            if spec.tied_to is not None and spec.tied_to.partition(".")[0] not in own:
                raise ValueError(
                    f"layers [{start}, {end}) cannot stand alone: {name} is {spec.tied_to}, of a "
                    "layer outside of them; take both layers, or untie them"
                )
        loss: ILossFunction | None = model.default_loss_function if end == len(infos) else None
        super().__init__(
            Sequential(own),
            loss,
            input_shape=infos[start].input_shape,
            seed=model.seed,
            dtype=model.dtype,
            device=model.device,
        )
        offset = infos[start].parameter_offset
        self._vector = VectorPart(model._vector, offset, self.parameter_count)
        self._holder = model._holder
