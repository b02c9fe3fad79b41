"""A chain of layers, computed unit by unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from mpishard.base import (
    HOST,
    Array,
    Data,
    MissingLossError,
    Scalar,
    require_plain,
    rounded,
    to_host,
    widened,
)
from mpishard.checkpoint import PlainModelFiles
from mpishard.communication import CommunicationBackend
from mpishard.contracts import ILayeredModel, ILossFunction, Saved, UserModel
from mpishard.data import Samples, map_arrays
from mpishard.models.programs.chain import LayerChain, LocalLayer, LocalLayers
from mpishard.models.programs.program import Batch, Program, Replica, unread_loss
from mpishard.models.stores.gradient_store import GradientStore
from mpishard.models.stores.parameter_store import ParameterStore
from mpishard.models.stores.vector import ModelVector
from mpishard.nn import Context, KeyValueCache, Layer, deferred_checks
from mpishard.sharding import Placement, ShardingConfiguration, build_units


def whole_layers(model: ILayeredModel, minimum_unit_size: int) -> LocalLayers:
    """Return all layers of a model, for a rank whose own flat vector is the model's."""
    infos = model.get_all_layer_info()
    table = model.parameter_table
    return LocalLayers(
        layers=[
            LocalLayer(info.name, layer, table.layer_entries(info.name), layer.is_random)
            for info, layer in zip(infos, model.layers, strict=True)
        ],
        entries=table.entries,
        units=build_units([info.parameter_count for info in infos], minimum_unit_size),
        dtype=model.dtype,
    )


class LayeredProgram(Program):
    """A chain of layers. A unit is gathered for its first layer, and released after its last.

    The last unit, and any unit that a layer outside it uses too, is kept from its first use in
    forward to its last in backward.

    Parameters
    ----------
    model : ILayeredModel
        Structure, initial parameters and loss.
    config : ShardingConfiguration
        All ranks, the size of units, and whether layers compute in bfloat16. If so, and on the
        host, the units of the store are bfloat16, too; inputs are rounded, and the loss is computed
        in float32.
    """

    _model: ILayeredModel

    def __init__(self, model: ILayeredModel, config: ShardingConfiguration) -> None:
        self.replica = Replica(config.communication_backend)
        self._minimum_unit_size = config.minimum_parameter_group_size
        self._input_shape = model.get_all_layer_info()[0].input_shape
        self._output_shapes: dict[tuple[int, ...], tuple[int, ...]] = {}  # by a sample's shape
        self.dtype = model.dtype
        self.device = getattr(model, "device", HOST)
        # Targets go where the loss is computed, once, and not in each micro-batch.
        self._put = self.device.put if self.device.is_gpu else to_host
        # A GPU rounds the operands of products alone; the host computes whole layers in bfloat16.
        self._mixed = config.precision is not None and not self.device.is_gpu
        self._products = config.precision if self.device.is_gpu else None
        self.is_random = any(layer.is_random for layer in model.layers)
        self.seed = int(getattr(model, "seed", 0))
        self._use(model)
        entries = self.vector.placement.entries
        # Last, because the units without a trained parameter are known only now.
        self.freeze(frozenset(e.name for e in entries if not e.trainable))

    def _use(self, model: object) -> None:
        super()._use(model)
        self._lay_out()

    def _lay_out(self) -> None:
        """Lay out this rank's part: `units`, `kept`, `entries` and the chains."""
        local = whole_layers(self._model, self._minimum_unit_size)
        self.units, self.entries = local.units, tuple(local.entries)
        self.vector = ModelVector(Placement.whole(self.entries))
        # Backward begins with the last unit, and a unit that is reused would be gathered again:
        # neither is released after forward.
        self.kept = local.reused | {local.units[-1].index}
        self.chains = [LayerChain(local, 0, len(local.layers), self.kept, precision=self._products)]

    def freeze(self, names: frozenset[str]) -> None:
        super().freeze(names)
        for chain in self.chains:
            chain.freeze(names, self.frozen_units)

    def structure(self) -> dict[str, object]:
        choices = self._model.choices() if isinstance(self._model, PlainModelFiles) else {}
        layers = {"number of layers": len(self._model.layers)}
        return {**layers, **super().structure(), **settings_of(self._model), **choices}

    def distribute_constants(self, backend: CommunicationBackend) -> None:
        if self.is_random:
            # Random layers draw by seed and sample, so that one seed makes the same masks at any
            # world size.
            self.seed = int(backend.broadcast(np.array([self.seed]))[0])

    def check(self, x: Data) -> Array:
        self._output_shape(x)
        return self._model.as_input(x)

    def check_pair(self, x: Data, y: Data, loss: ILossFunction | None) -> tuple[Array, Array]:
        shape = self._output_shape(x)
        require_plain(y)
        if loss is None:
            raise MissingLossError(
                f"{type(self._model).__name__} has no default loss; pass loss_function"
            )
        if not isinstance(loss, ILossFunction):
            raise TypeError(f"loss_function must be an ILossFunction, got {type(loss).__name__}")
        if y is None:
            raise TypeError(f"{type(loss).__name__} needs targets, and y (y_train) is None")
        # Refused here, because a loss would fail inside a pass, when other ranks wait for this one.
        if not isinstance(y, Samples) and getattr(y, "shape", None) is None:
            raise TypeError(f"targets must be an array, got {type(y).__name__}")
        with deferred_checks():
            inputs = self._model.as_input(x)
            if len(y) != len(x):
                raise ValueError(f"x has {len(x)} samples and y has {len(y)}")
            loss.check_target((len(x), *shape), y)
        return inputs, map_arrays(self._put, y)

    def _output_shape(self, x: Data) -> tuple[int, ...]:
        """Return the shape of a sample's output. Layers refuse inputs of wrong shapes."""
        require_plain(x)
        shape = getattr(x, "shape", None)
        if shape is None or len(shape) != 1 + len(self._input_shape):
            dims = ", ".join(map(str, self._input_shape))
            expected = f"expected an array of shape (samples, {dims}), got "
            if shape is None:
                raise TypeError(expected + type(x).__name__)
            raise ValueError(f"{expected}shape {tuple(shape)}")
        sample = tuple(shape[1:])
        # Samples mostly have one shape, so that layers compute that of the output only once.
        if sample not in self._output_shapes:
            output = sample
            for layer in self._model.layers:
                output = layer.output_shape(output)
            self._output_shapes[sample] = output
        return self._output_shapes[sample]

    def fill(self, start: int, out: Array) -> None:
        self._model.fill_parameters(start, out)

    def take_over(self, parameters: ParameterStore, holder: str) -> str | None:
        self._model.release_parameters(holder)
        return None

    def give_back(self, gather: Callable[[], Array]) -> None:
        self._model.reclaim_parameters(gather())

    def _copied_model(self) -> UserModel:
        # A deep copy, because choices of layers, such as the features in use, must not be shared.
        if hasattr(self._model, "deep_copy"):
            return self._model.deep_copy()
        return super()._copied_model()

    def predict(self, parameters: ParameterStore, x: Array) -> Array:
        return self.leaving(self._outputs(parameters, x, None))

    def predict_next(self, parameters: ParameterStore, x: Array, cache: KeyValueCache) -> Array:
        return self.leaving(self._outputs(parameters, x, cache)[:, -1])

    def _outputs(self, parameters: ParameterStore, x: Array, cache: KeyValueCache | None) -> Array:
        (chain,) = self.chains
        context = Context(training=False, cache=cache)
        y, _ = chain.forward(parameters, self.entering(x), context)
        # No backward follows, which would release the units that forward keeps.
        chain.release_kept(parameters)
        return y

    def entering(self, values: Array) -> Array:
        """Return inputs, or gradients of outputs, as layers take them; token numbers as is."""
        return rounded(values) if self._mixed and values.dtype.kind == "f" else values

    def leaving(self, values: Array) -> Array:
        """Return outputs as the user takes them."""
        return widened(values) if self._mixed else values

    def leaving_for(self, loss: ILossFunction, values: Array) -> Array:
        """Return outputs as ``loss`` takes them."""
        return values if loss.computes_bfloat16 else self.leaving(values)

    def forward(self, parameters: ParameterStore, batch: Batch) -> tuple[Scalar, Scalar, Saved]:
        assert batch.loss is not None
        (chain,) = self.chains
        x = self.entering(batch.x)
        prediction, activations = chain.forward(parameters, x, batch.context)
        prediction = self.leaving_for(batch.loss, prediction)
        total, weight, of_loss = batch.loss.forward(prediction, batch.y)
        if type(total) is not float:
            total = unread_loss(total, batch.loss)
        return total, weight, [activations, batch.loss, of_loss]

    def backward(self, parameters: ParameterStore, gradients: GradientStore, saved: Saved) -> None:
        activations, loss, of_loss = saved
        # The caller's list must not keep activations that each layer's backward frees.
        saved.clear()
        dy = self.entering(loss.backward(of_loss))
        # Freed before the first layer's backward: it may be as large as the logits.
        del of_loss
        (chain,) = self.chains
        chain.backward(
            parameters, gradients, activations, dy, gradients.reduce, needs_input_gradient=False
        )


def settings_of(model: ILayeredModel) -> dict[str, str]:
    """Return the classes and settings of a model's layers and loss, by name, as texts.

    Ranks compare them, because shapes do not show a rate, a number of heads or a loss. Of classes
    outside `mpishard.nn` only the names count: an attribute of theirs may belong to one rank.
    """
    parts: dict[str, object] = {f"layer {k}": layer for k, layer in enumerate(model.layers)}
    parts["loss"] = getattr(model, "default_loss_function", None)
    return {key: text for name, part in parts.items() for key, text in _settings(name, part)}


def _settings(name: str, part: object) -> Iterator[tuple[str, str]]:
    yield name, type(part).__name__
    # An attribute whose name begins with "_" may be a cache, and differ in equal layers.
    if type(part).__module__.startswith("mpishard.nn."):
        for key, value in vars(part).items():
            if not (key.startswith("_") or isinstance(value, Layer | Mapping)):
                yield f"{name}.{key}", str(value)
    for child, layer in getattr(part, "children", {}).items():
        yield from _settings(f"{name}.{child}", layer)
