"""The interface of layers: a description of parameters and three functions, and no arrays.

Shape suffixes in ``nn``: B batch, T time (position in the sequence), D width, V vocabulary,
H heads, K head size, I inputs of a layer, O outputs of a layer. ``x_BTD`` has shape (B, T, D).
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, Self

import numpy as np

from mpishard.arrays import Array, address, array_namespace
from mpishard.contracts import LayerCategory
from mpishard.nn.layers.cache import KeyValueCache
from mpishard.sharding import ParameterEntry

Initializer = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray[Any, Any]]
"""``initializer(generator, shape) -> float64 array of that shape``."""

Parameters = Mapping[str, Any]
"""A layer's parameters: name -> read-only array; for a composite, child name -> its parameters."""

Gradients = MutableMapping[str, Any]
"""As `Parameters`, with writable arrays, to which a layer *adds*: ``g["weight"] += part``.

If it is a `mpishard.nn.GradientTargets`, a layer may write instead of adding to zeros.
"""


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter of a layer, before it exists.

    Parameters
    ----------
    shape : tuple of int
        Its shape.
    initializer : Initializer
        Makes its first value from a generator that is keyed by (seed, parameter name).
    tied_to : str, optional
        Full name of another parameter of the model that this one *is*. It then adds nothing to
        the parameter table, and its shape must be the other's.
    trainable : bool
        Whether training changes it. Where not, its gradient is 0 and it has no optimizer state.
    """

    shape: tuple[int, ...]
    initializer: Initializer
    tied_to: str | None = None
    trainable: bool = True


@dataclass(frozen=True, slots=True)
class Context:
    """The values besides parameters and input on which a forward pass may depend.

    Parameters
    ----------
    training : bool
        Whether a backward pass may follow. Where False, ``forward`` need save nothing.
    seed, step : int
        With a layer's name and the global sample index, the key of any randomness.
    sample_start : int
        Index in the global batch of this rank's first sample.
    path : str
        Dotted name of the layer that is running, if it or a layer inside it `is_random`, or
        if there is a cache.
    cache : KeyValueCache, optional
        Keys and values of the positions before the input's first, if sequences are read bit by
        bit: see `KeyValueCache`. Layers for which positions differ, or see each other, go by it.
    """

    training: bool = True
    seed: int = 0
    step: int = 0
    sample_start: int = 0
    path: str = ""
    cache: KeyValueCache | None = None

    def enter(self, name: str, layer: Layer) -> Context:
        """The context for ``layer``, which is called ``name`` in the one that runs."""
        # Most layers need no name, and a new context costs two microseconds for each of them.
        if not layer.is_random and self.cache is None:
            return self
        return replace(self, path=f"{self.path}.{name}" if self.path else name)


class Layer(ABC):
    """A layer holds no arrays: parameters, gradients and saved values all belong to the call.

    Any number of threads, micro-batches and recomputations may therefore share one layer. A
    leaf layer gives `parameters`, `forward`, `backward_input` and `backward_weight`; `backward`
    runs the two halves.
    """

    category: ClassVar[LayerCategory] = LayerCategory.OTHER
    """The layer's purpose, for reports and planners."""

    pending_is_saved_and_dy: ClassVar[bool] = False
    """True if `backward_weight` takes ``(saved, dy)``: it can then run without `backward_input`."""

    children: Mapping[str, Layer] = MappingProxyType({})
    """Inner layers of a composite, name -> layer, in order; empty for a leaf."""

    computes_bfloat16: bool = False
    """True if the layer computes with bfloat16 parameters and activations, which is its own work:
    what it adds, averages or exponentiates in float32. Its weight gradients are float32."""

    @property
    def parameters(self) -> Mapping[str, ParameterSpec]:
        """Own parameters, name -> description, in the order they take in the flat vector."""
        return {}

    def walk_parameters(self, prefix: str = "") -> Iterator[tuple[str, ParameterSpec]]:
        """Yield (dotted name, description) of own and inner parameters, in table order."""
        for name, spec in self.parameters.items():
            yield prefix + name, spec
        for name, child in self.children.items():
            yield from child.walk_parameters(f"{prefix}{name}.")

    def copy(self) -> Self:
        """A separate description, for a copy of the model.

        Later choices in one leave the other as it is. Objects such as initializers are shared. A
        composite copies its children, too.
        """
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

        Callers ask the first layer of a model before they communicate, so that a rank's bad
        input is an error on that rank and no failure in the middle of a collective. One pass over
        ``x`` at most; shapes are `output_shape`'s business. A composite asks its first child.

        Raises
        ------
        TypeError
            For an argument that is no array, and for a dtype that the layer does not take.
        ValueError
            For values that the layer does not take.
        """
        array_namespace(x)
        first = next(iter(self.children.values()), None)
        if first is not None:
            first.check_input(x)
        elif x.dtype.kind not in "biuf":
            raise TypeError(f"{type(self).__name__} takes real numbers, got an array of {x.dtype}")

    @abstractmethod
    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of one sample's output for one sample's input, without the batch dim.

        Raises
        ------
        ValueError
            If the layer cannot take ``input_shape``; the message names shapes that it takes.
        """

    def estimated_flops(self, input_shape: tuple[int, ...]) -> int:
        """Floating-point operations of one sample's forward pass, about.

        A multiplication and an addition are two. Unless a layer knows better, it is taken for
        element-wise: one for each element of the output.
        """
        return math.prod(self.output_shape(input_shape))

    def estimated_activation_size(self, input_shape: tuple[int, ...]) -> int:
        """Elements of one sample's output, and of the outputs of inner layers."""
        return math.prod(self.output_shape(input_shape))

    @abstractmethod
    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Any]:
        """Compute the output.

        Returns
        -------
        y : Array
            The output. May be a view of, or ``x`` itself; ``x`` must not be changed.
        saved : object
            Values that the backward pass needs; None if ``context.training`` is False.
        """

    @abstractmethod
    def backward_input(self, p: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        """Gradient with respect to the input, from the gradient ``dy`` of the output.

        ``dy`` belongs to the callee, which may overwrite it.

        Returns
        -------
        dx : Array
            The gradient of the input; None if the input has none (token numbers).
        pending : object
            What `backward_weight` needs. No array in it may be one that ``dx`` shares memory
            with, for ``dx`` goes on to be overwritten.
        """

    def backward_weight(self, pending: Any, g: Gradients) -> None:
        """Add the gradients of the layer's parameters into ``g``."""

    def backward(
        self, p: Parameters, saved: Any, dy: Array, g: Gradients, *,
        needs_input_gradient: bool = True,
    ) -> Array:  # fmt: skip
        """Both halves, leaf by leaf: add into ``g`` and return the input's gradient.

        If ``needs_input_gradient`` is False, as for the first layer of a model, a layer may
        leave that gradient out and return None. For a linear layer this saves one of two products.
        """
        if self.pending_is_saved_and_dy and not needs_input_gradient:
            self.backward_weight((saved, dy), g)
            return None
        dx, pending = self.backward_input(p, saved, dy)
        self.backward_weight(pending, g)
        return dx


class GradientTargets(MutableMapping[str, Any]):
    """The gradients that a layer adds into, in memory that nobody has cleared.

    A layer that adds sees the mapping that `Layer.backward_weight` describes: a gradient without
    contents is cleared when the layer asks for it. A layer that can write its whole gradient at
    once asks `unwritten` instead. This saves three passes over memory: clearing, a temporary
    array, and an addition.

    Parameters
    ----------
    entries : mapping of str to ParameterEntry
        Dotted name inside the layer -> entry of the parameter table.
    find : callable
        ``find(entry)`` is the 1-D array of the entry's elements.
    unwritten : set of str
        Names of the entries whose gradients have no contents yet. The set is kept up to date. The
        caller and the targets of other layers share it, because tied weights are one entry.
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
        """The array to add into, or the targets of the inner layer ``name``."""
        if name not in self._entries:
            return self._inner(name)
        array = self.unwritten(name)
        if array is None:
            return self._array(name)
        array.fill(0)
        return array

    def __setitem__(self, name: str, value: Any) -> None:
        """Make ``value`` the gradient of ``name``, as ``g[name] += part`` does.

        The memory stays the same: values of another array are copied into it.
        """
        array = self.unwritten(name)
        if array is None:
            array = self._array(name)
            # ``g[name] += part`` has added in place, and assigns the array that it was given.
            if type(value) is type(array) and address(value) == address(array):
                return
        array[...] = value

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"the gradient of {name!r} cannot be deleted")

    def unwritten(self, name: str) -> Array | None:
        """The array to *write*, whole and at once; None if the gradient already has contents."""
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
        return GradientTargets(inner, self._find, self._unwritten)


def unwritten(g: Gradients, name: str) -> Array | None:
    """The gradient of ``name``, to be written whole, if nothing was added to it yet.

    None if it has contents, or if ``g`` is a plain mapping: then the layer adds into ``g[name]``.
    """
    # Layers may also be given plain dicts, whose arrays hold zeros or earlier gradients.
    return g.unwritten(name) if isinstance(g, GradientTargets) else None
