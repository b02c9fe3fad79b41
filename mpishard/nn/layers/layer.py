"""Interface of layers: a description of parameters and three functions, without arrays.

Shape suffixes in ``nn``: B batch, T time (position in the sequence), D width, V vocabulary,
H heads, K head size, I inputs of a layer, O outputs of a layer. ``x_BTD`` has shape (B, T, D).
"""

from __future__ import annotations

import copy
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Self

import numpy as np

from mpishard.base import Array, DType, address, array_namespace, as_count, as_flag, require_type
from mpishard.contracts import LayerCategory, Saved
from mpishard.nn.layers.cache import KeyValueCache
from mpishard.sharding import ParameterEntry

Initializer = Callable[[np.random.Generator, tuple[int, ...]], Array]
"""``initializer(generator, shape)`` returns a float64 array of that shape."""

Parameters = Mapping[str, Any]
"""A layer's parameters, name -> read-only array; of a composite, child name -> its parameters."""

Gradients = MutableMapping[str, Any]
"""A mapping like `Parameters` of writable arrays, to which a layer *adds*: ``g["weight"] += part``.

If the mapping is a `mpishard.nn.GradientTargets`, a layer may write instead of adding to zeros.
"""


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """Description of one parameter of a layer, which needs no array.

    Parameters
    ----------
    shape : tuple of int
        Shape of the parameter.
    initializer : Initializer
        Function that makes the initial value from a generator keyed by (seed, parameter name).
    tied_to : str, optional
        Full name of another parameter of the model, of the same shape, that is used in place of
        this one. The parameter table then has no entry for this one.
    trainable : bool
        False if training must not change the parameter. Its gradient is then 0, and it has no
        optimizer state.

    Raises
    ------
    TypeError
        If a size is not an integer, the initializer is not callable, ``tied_to`` is not a string,
        or ``trainable`` is not a bool. A tied parameter may have None for its initializer.
    ValueError
        If a size is below 0.
    """

    shape: tuple[int, ...]
    initializer: Initializer
    tied_to: str | None = None
    trainable: bool = True

    def __post_init__(self) -> None:
        # Sizes of NumPy's types could not be written as JSON.
        shape = tuple(as_count("a size of shape", size, least=0) for size in self.shape)
        # The class is frozen, and refuses an ordinary assignment.
        object.__setattr__(self, "shape", shape)
        # A parameter that is another one needs no initial value.
        is_needed = self.tied_to is None or self.initializer is not None
        if is_needed and not callable(self.initializer):
            raise TypeError(
                "initializer must be a function of (generator, shape), got "
                f"{type(self.initializer).__name__}"
            )
        if self.tied_to is not None:
            require_type("tied_to", self.tied_to, str)
        as_flag("trainable", self.trainable)


@dataclass(frozen=True, slots=True)
class Context:
    """Values, besides parameters and input, on which a forward pass may depend.

    Parameters
    ----------
    training : bool
        True if a backward pass may follow. If False, ``forward`` need save nothing.
    seed, step : int
        Key of all random numbers, together with a layer's name and the global sample index.
    sample_start : int
        Index of this rank's first sample in the global batch.
    path : str
        Dotted name of the layer that is running. It is kept only for layers that are random or
        contain a random layer, and if there is a cache.
    cache : KeyValueCache, optional
        Keys and values of the positions before the input's first, if sequences are read in
        several passes. Attention layers and positional embeddings use it.
    """

    training: bool = True
    seed: int = 0
    step: int = 0
    sample_start: int = 0
    path: str = ""
    cache: KeyValueCache | None = None

    def enter(self, name: str, layer: Layer) -> Context:
        """Return the context of ``layer``, a child of the running layer with the name ``name``."""
        # Most layers need no path, and a new context costs 2 us for each of them.
        if not layer.is_random and self.cache is None:
            return self
        return replace(self, path=f"{self.path}.{name}" if self.path else name)


@dataclass(frozen=True, slots=True)
class SavedActivations:
    """Memory that the forward pass of one sample leaves for its backward pass.

    Parameters
    ----------
    nbytes : int
        Bytes of saved arrays that are neither the input nor the output.
    keeps_input, keeps_output : bool
        Whether the input, and the output, is saved, too. Neighbouring layers often save the same
        array.
    is_view : bool
        Whether the output is the input, or a view of it.
    arrays : tuple of int
        Bytes of each array that ``nbytes`` adds up. Default: a single one.
    """

    nbytes: int = 0
    keeps_input: bool = False
    keeps_output: bool = False
    is_view: bool = False
    arrays: tuple[int, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.nbytes and not self.arrays:
            object.__setattr__(self, "arrays", (self.nbytes,))

    @classmethod
    def of_chain(cls, parts: Iterable[tuple[SavedActivations, int]]) -> SavedActivations:
        """Return the memory of a chain of layers: each one's, and the bytes of its output."""
        arrays, keeps_input = list[int](), False
        # The array between two layers: its bytes if it was made in the chain, and whether one of
        # the layers has saved it.
        between: int | None = None
        is_kept = False
        for part, output in parts:
            keeps_between = [part.keeps_input, part.keeps_output]
            for is_output, keeps in enumerate(keeps_between):
                if is_output and not part.is_view:
                    between, is_kept = output, False
                if not keeps:
                    continue
                if between is None:
                    keeps_input = True
                elif not is_kept:
                    arrays.append(between)
                    is_kept = True
            arrays += part.arrays
        # The last array is the chain's output, which the next layer may save, too.
        if is_kept and between is not None:
            arrays.remove(between)
        return cls(sum(arrays), keeps_input, is_kept, between is None, tuple(arrays))


class Layer(ABC):
    """Base of layers, which hold no arrays: parameters, gradients and saved values are arguments.

    Any number of threads, micro-batches and recomputations may therefore share one layer. A
    leaf layer defines `parameters`, `output_shape`, `forward`, `backward_input` and
    `backward_weight`; `backward` runs the two halves.
    """

    category: ClassVar[LayerCategory] = LayerCategory.OTHER
    """The layer's purpose, for reports and planners."""

    pending_is_saved_and_dy: ClassVar[bool] = False
    """True if ``pending`` is ``(saved, dy)``: `backward_weight` then needs no `backward_input`."""

    children: Mapping[str, Layer] = MappingProxyType({})
    """Inner layers of a composite, name -> layer, in order. It is empty for a leaf."""

    _flops_per_output: int = 1
    """Floating-point operations for each element of the output; 1 for element-wise layers."""

    computes_bfloat16: bool = False
    """True if the layer accepts bfloat16 parameters and activations.

    The layer itself decides which sums, means and exponentials it computes in float32. Its weight
    gradients are float32."""

    @property
    def parameters(self) -> Mapping[str, ParameterSpec]:
        """Parameters of this layer, name -> description, in their order in the flat vector.

        Those of inner layers are not included: see `walk_parameters`.
        """
        return {}

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        if inspect.isfunction(vars(cls).get("parameters")):
            raise TypeError(f"{cls.__name__}.parameters is a method: write @property above it")

    def __repr__(self) -> str:
        own = [f"{name} {getattr(spec, 'shape', spec)}" for name, spec in self.parameters.items()]
        inner = [f"{name}: {child!r}" for name, child in self.children.items()]
        return f"{type(self).__name__}({', '.join(own + inner)})"

    def __setattr__(self, name: str, value: object) -> None:
        if name == "parameters":
            raise AttributeError(
                f"{type(self).__name__}.parameters cannot be assigned: keep the sizes in __init__, "
                "and define it as a property that returns the ParameterSpecs of these sizes"
            )
        super().__setattr__(name, value)

    def walk_parameters(self, prefix: str = "") -> Iterator[tuple[str, ParameterSpec]]:
        """Yield (dotted name, description) of own and inner parameters, in table order."""
        # Own parameters come first, so that the table's order is that of the layers in the chain.
        for name, spec in self.parameters.items():
            if not isinstance(spec, ParameterSpec):
                raise TypeError(
                    f"{type(self).__name__}.parameters[{name!r}] must be an "
                    f"ms.nn.ParameterSpec(shape, initializer), got {type(spec).__name__}"
                )
            yield prefix + name, spec
        for name, child in self.children.items():
            yield from child.walk_parameters(f"{prefix}{name}.")

    def copy(self) -> Self:
        """Return a separate description, for a copy of the model.

        Later changes of settings in one do not affect the other. Objects such as initializers are
        shared. A composite copies its children, too.
        """
        # Shallow, because a layer has settings and no arrays.
        return copy.copy(self)

    @property
    def is_random(self) -> bool:
        """True if the output in training depends on the context's seed, step and sample.

        A composite is random if one of its children is.
        """
        return any(child.is_random for child in self.children.values())

    @property
    def takes_integers(self) -> bool:
        """True if integer inputs stay integers instead of being converted to the model's dtype.

        A composite's first child decides.
        """
        first = next(iter(self.children.values()), None)
        return first is not None and first.takes_integers

    def check_input(self, x: Array) -> None:
        """Refuse an input, with its batch dim, whose dtype or values `forward` cannot take.

        Callers ask the first layer of a model before they communicate. A rank's bad input is then
        an error on that rank and not a failure in the middle of a collective. The check makes at
        most one pass over ``x``; `output_shape` checks shapes. A composite asks its first child.

        Raises
        ------
        TypeError
            If ``x`` is not an array, or has a dtype that the layer does not take.
        ValueError
            If ``x`` has values that the layer does not take.
        """
        array_namespace(x)
        first = next(iter(self.children.values()), None)
        if first is not None:
            first.check_input(x)
        # Complex numbers and objects, which NumPy would multiply without an error.
        elif x.dtype.kind not in "biuf":
            raise TypeError(f"{type(self).__name__} takes real numbers, got an array of {x.dtype}")

    @abstractmethod
    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of one sample's output for that of its input, without the batch dim.

        Raises
        ------
        ValueError
            If the layer cannot take ``input_shape``. The message names shapes that it takes.
        """

    def estimated_flops(self, input_shape: tuple[int, ...]) -> int:
        """Estimate the number of floating-point operations of one sample's forward pass.

        A multiplication and an addition are two operations. The default is `_flops_per_output` for
        each element of the output.
        """
        return self._flops_per_output * math.prod(self.output_shape(input_shape))

    def estimated_activation_size(self, input_shape: tuple[int, ...]) -> int:
        """Return the number of elements of one sample's output and of inner layers' outputs."""
        return math.prod(self.output_shape(input_shape))

    def saved_activations(self, input_shape: tuple[int, ...], dtype: DType) -> SavedActivations:
        """Return the memory that `forward` saves for one sample of ``dtype``.

        ``mpishard plan`` asks for it. The default is an estimate: the input, and arrays of
        `estimated_activation_size`.
        """
        size = self.estimated_activation_size(input_shape)
        return SavedActivations(size * dtype.itemsize, keeps_input=True)

    @abstractmethod
    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Saved]:
        """Compute the output.

        Returns
        -------
        y : Array
            The output, which may be ``x`` itself or a view of it. ``x`` must not be changed.
        saved : object
            Values that the backward pass needs; None if ``context.training`` is False.
        """

    @abstractmethod
    def backward_input(self, p: Parameters, saved: Saved, dy: Array) -> tuple[Array | None, Saved]:
        """Compute the gradient of the input from the gradient ``dy`` of the output.

        ``dy`` belongs to this method, which may overwrite it.

        Returns
        -------
        dx : Array
            The gradient of the input; None if the input has none (token numbers).
        pending : object
            Values that `backward_weight` needs. None of its arrays may share memory with ``dx``,
            because the previous layer overwrites ``dx``.
        """

    def backward_weight(self, pending: Saved, g: Gradients) -> None:
        """Add the gradients of the layer's parameters to ``g``."""

    def backward(
        self,
        p: Parameters,
        saved: Saved,
        dy: Array,
        g: Gradients,
        *,
        needs_input_gradient: bool = True,
    ) -> Array | None:
        """Run both halves, leaf by leaf: add to ``g`` and return the input's gradient.

        If ``needs_input_gradient`` is False, as for the first layer of a model, a layer may
        leave that gradient out and return None. For a linear layer this saves one of two products.
        """
        if self.pending_is_saved_and_dy and not needs_input_gradient:
            # The order does not matter here: nothing overwrites dy, as no input gradient is made.
            self.backward_weight((saved, dy), g)
            return None
        dx, pending = self.backward_input(p, saved, dy)
        self.backward_weight(pending, g)
        return dx


class GradientTargets(MutableMapping[str, Any]):
    """Gradients to which a layer adds, in memory that has not been cleared.

    A layer that adds uses it as the mapping `Gradients`: a gradient without contents is cleared
    when the layer asks for it. A layer that can write its whole gradient at once calls `unwritten`
    instead. This saves three passes over memory: clearing, a temporary array, and an addition.

    Parameters
    ----------
    entries : mapping of str to ParameterEntry
        Dotted name inside the layer -> entry of the parameter table.
    find : callable
        ``find(entry)`` returns the 1-D array of the entry's elements.
    unwritten : set of str
        Names of the entries whose gradients have no contents yet. The targets remove names from it.
        The caller and the targets of other layers share it, because tied weights are one entry.
    """

    def __init__(
        self,
        entries: Mapping[str, ParameterEntry],
        find: Callable[[ParameterEntry], Array],
        unwritten: set[str],
    ) -> None:
        self._entries = entries
        self._find = find
        self._unwritten = unwritten

    def __getitem__(self, name: str) -> Any:
        """Return the array to which a layer adds, or the targets of the inner layer ``name``."""
        if name not in self._entries:
            return self._inner(name)
        array = self.unwritten(name)
        if array is None:
            return self._array(name)
        # Cleared only when a layer asks for it, so that layers that write at once save this pass.
        array.fill(0)
        return array

    def __setitem__(self, name: str, value: object) -> None:
        """Set the gradient of ``name`` to ``value``, as ``g[name] += part`` does at its end.

        The memory stays the same: the values of another array are copied into it.
        """
        array = self.unwritten(name)
        if array is None:
            array = self._array(name)
            # ``g[name] += part`` has added in place, and then assigns the same array: no copy.
            if type(value) is type(array) and address(value) == address(array):
                return
        array[...] = value

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"the gradient of {name!r} cannot be deleted")

    def unwritten(self, name: str) -> Array | None:
        """Return the array to *write* completely, or None if the gradient already has contents."""
        entry = self._entries[name]
        if entry.name not in self._unwritten:
            return None
        self._unwritten.remove(entry.name)
        return self._array(name)

    def clear_unwritten(self) -> None:
        """Clear every gradient that no layer has written or added to."""
        for name, entry in self._entries.items():
            if entry.name in self._unwritten:
                self._unwritten.remove(entry.name)
                self._array(name).fill(0)

    def __iter__(self) -> Iterator[str]:
        # Each inner layer once, as in a nested mapping of plain arrays.
        return iter(dict.fromkeys(name.partition(".")[0] for name in self._entries))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _array(self, name: str) -> Array:
        entry = self._entries[name]
        return self._find(entry).reshape(entry.shape)

    def _inner(self, name: str) -> GradientTargets:
        prefix = f"{name}."
        inner = {
            inner_name.removeprefix(prefix): entry
            for inner_name, entry in self._entries.items()
            if inner_name.startswith(prefix)
        }
        if not inner:
            raise KeyError(name)
        # The set is shared, so that a tied weight that one layer has written is added to by the
        # other.
        return GradientTargets(inner, self._find, self._unwritten)


def output_and_saved(result: object, layer: Layer) -> tuple[Array, Saved]:
    """Return the two values that ``layer.forward`` has returned.

    Raises
    ------
    TypeError
        If it returned something else. Two rows of an array would be taken for two values.
    """
    if type(result) is tuple and len(result) == 2:
        return result
    shape = getattr(result, "shape", None)
    given = type(result).__name__ if shape is None else f"an array of shape {shape}"
    raise TypeError(
        f"{type(layer).__name__}.forward must return two values, the output and what backward "
        f"needs, and returned {given}: write `return y, saved`"
    )


def unwritten(g: Gradients, name: str) -> Array | None:
    """Return the gradient of ``name`` to be written completely, if nothing was added to it yet.

    It is None if the gradient has contents, or if ``g`` is a plain mapping. The layer then adds to
    ``g[name]``.
    """
    # The arrays of a plain mapping have contents: zeros, or earlier gradients.
    return g.unwritten(name) if isinstance(g, GradientTargets) else None


def gradient_targets(g: Gradients, *names: str) -> list[tuple[Array, bool]]:
    """Return the gradient of each name, and True if a layer must add to it; else it writes."""
    targets = []
    for name in names:
        target = unwritten(g, name)
        targets.append((g[name], True) if target is None else (target, False))
    return targets
