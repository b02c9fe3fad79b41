"""Model of a loss function in NumPy, which HIPS autograd differentiates."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpishard.adapters.parameter_tree import ParameterTree
from mpishard.adapters.placed_vector import TreeModel, described
from mpishard.base import Array, Scalar, as_loss, optional_package
from mpishard.contracts import ILossFunction, Saved
from mpishard.data import tree_of
from mpishard.nn import Context


class Trace:
    """Recorded run of a function of several arrays, which can be differentiated once.

    autograd's own ``grad`` differentiates by one argument. For a list of n arrays it makes n nodes,
    each of which copies the list forward and backward. With some hundred arrays a gradient then
    takes a second. Here each array is an argument of its own.

    Parameters
    ----------
    function : callable
        ``function(boxes)`` returns the result; ``boxes`` is a list of stand-ins for the arrays.
    arrays : sequence of Array
        Arrays with respect to which the function is differentiated.

    Attributes
    ----------
    value : object
        The function's result.
    is_connected : bool
        True if the result depends on at least one of the arrays, as far as autograd can see.
    """

    def __init__(self, function: Callable[[list[Any]], Any], arrays: Sequence[Array]) -> None:
        from autograd.core import VJPNode
        from autograd.tracer import isbox, new_box, trace_stack

        self._roots = [VJPNode.new_root() for _ in arrays]
        with trace_stack.new_trace() as number:
            boxes = [new_box(a, number, root) for a, root in zip(arrays, self._roots, strict=True)]
            end = function(boxes)
        self.is_connected = isbox(end) and end._trace == number
        self.value = end._value if self.is_connected else end
        self._end = end._node if self.is_connected else None

    def gradients(self, cotangent: Array) -> list[Array | None]:
        """Return the gradient with respect to each array, or None if the function did not use it.

        ``cotangent`` has the value's shape. It is the gradient of the final result with respect to
        the value.
        """
        from autograd.core import add_outgrads
        from autograd.util import toposort

        found: dict[int, Array] = {}
        arriving = {self._end: (cotangent, False)}
        for node in toposort(self._end):
            gradient, _ = arriving.pop(node)
            if not node.parents:
                found[id(node)] = gradient
                continue
            for parent, part in zip(node.parents, node.vjp(gradient), strict=True):
                arriving[parent] = add_outgrads(arriving.get(parent), part)
        self._end = None  # This frees the recorded values.
        return [found.get(id(root)) for root in self._roots]


# autograd numbers its traces with one counter per process. If two threads trace at the same time,
# an inner derivative may get the number of an outer one, and gradients would be wrong.
_tracing = threading.RLock()

# Words in messages of errors that are due to autograd, and not to the user's function.
_SYMPTOM = re.compile(r"ArrayBox|autograd|differentiate|VJP|array element with a sequence")


class AutogradModel(TreeModel):
    """Model from a loss function in NumPy, which HIPS autograd differentiates.

    The parameters are a tree of arrays, in the form that the function takes. End to end they are
    the flat vector. When the model is sharded they become views of memory that the ranks of a node
    share, and no step copies them. Each leaf has a name, which ``parameter_options``, checkpoints
    and reports use: ``{"layers": [{"weight": ..}]}`` has ``layers.0.weight``.

    Maclaurin, Duvenaud and Adams, "Autograd: effortless gradients in NumPy", ICML AutoML workshop,
    2015.

    Parameters
    ----------
    loss : callable
        ``loss(parameters, x, y)`` returns a scalar, the *mean* over the samples of x. It must use
        ``autograd.numpy`` in place of ``numpy``, and gets x and y as they are given.
    parameters : pytree
        Initial values: nested dicts, lists, tuples and named tuples of float32 or float64 arrays
        and Python floats, of one dtype; or one array. They are copied.
    predict : callable, optional
        ``predict(parameters, x)``, for the method `predict`, and for gradients of another loss.
    loss_is_sum : bool
        True if the loss is the *sum* over the samples. Then gradients are added over ranks, and not
        averaged, as those of one process with all samples.

    Raises
    ------
    ImportError
        If autograd is not installed.
    TypeError, ValueError
        If an argument is not as described. The message names the parameter.

    Notes
    -----
    Thread-ranks compute gradients one after the other, because autograd can record only one trace
    at a time in a process. MPI ranks are processes.

    Examples
    --------
    >>> import autograd.numpy as anp
    >>> def loss(parameters, x, y):
    ...     return anp.mean((x @ parameters["slope"] + parameters["offset"] - y) ** 2)
    >>> model = AutogradModel(loss, {"slope": np.zeros(2), "offset": 0.0})
    >>> model.train(np.eye(2), np.array([1.0, 3.0]), learning_rate=0.5)
    5.0
    >>> model.parameters_tree()
    {'slope': array([0.5, 1.5]), 'offset': 2.0}
    """

    def __init__(
        self,
        loss: Callable[[Any, Any, Any], Any],
        parameters: Any,
        predict: Callable[[Any, Any], Any] | None = None,
        *,
        loss_is_sum: bool = False,
    ) -> None:
        optional_package("autograd", "AutogradModel", "autograd")
        super().__init__(ParameterTree(parameters), loss, predict, loss_is_sum)

    # ---------------------------------------------------------------------------------- computing

    def forward_pass(
        self, x: Array, y: Array, loss: ILossFunction | None, context: Context
    ) -> tuple[Scalar, Scalar, Saved]:
        if len(x) == 0:
            return 0.0, 0.0, None
        if loss is None:
            trace = self._traced(lambda tree: self._loss(tree, tree_of(x), tree_of(y)), "loss")
            value, factor = as_loss(trace.value, self), self._factor(x)
            # The cotangent has the shape of the loss, which may be (1,).
            cotangent = np.full_like(trace.value, factor)
            return value * factor, float(len(x)), (trace, lambda: cotangent)
        predict = self._known_predict()
        trace = self._traced(lambda tree: predict(tree, tree_of(x)), "predict")
        total, weight, saved = loss.forward(trace.value, y)
        return total, weight, (trace, lambda: loss.backward(saved))

    def backward_pass(self, saved: Saved, receive: Callable[[int, Array], None]) -> None:
        trace, cotangent = saved
        given = cotangent()
        with _tracing:
            gradients = trace.gradients(given)
        # The last parameter comes first, as in the backward pass of a layered model.
        for index in reversed(range(len(self._entries))):
            gradient, entry = gradients[index], self._entries[index]
            if gradient is None:  # This pass did not use the parameter.
                continue
            if np.shape(gradient) != entry.shape:
                raise ValueError(
                    f"autograd's gradient of parameter {entry.name!r} of shape {entry.shape} has "
                    f"the shape {np.shape(gradient)}. Of a primitive of your own, defvjp must give "
                    "what has the shape of its argument"
                )
            receive(index, np.asarray(gradient, self._dtype).reshape(-1))

    def _traced(self, function: Callable[[object], object], what: str) -> Trace:
        """Record ``function(tree)``; errors of autograd are explained, and name ``what``."""
        try:
            with _tracing:
                trace = Trace(lambda leaves: function(self._tree.build(leaves)), self._leaves)
        except (TypeError, ValueError, NotImplementedError, AttributeError) as error:
            if not _SYMPTOM.search(str(error)):
                raise
            raise TypeError(
                f"autograd cannot differentiate the {what}: {error}. {_ADVICE}"
            ) from error
        if not trace.is_connected:
            raise TypeError(
                f"autograd saw no parameter in the {what}'s value, {described(trace.value)}. "
                f"{_ADVICE}"
            )
        return trace


_ADVICE = (
    "Inside it, compute with autograd.numpy (import autograd.numpy as np); assign to no element "
    "(in place of a[i] = v: np.where, np.concatenate, or np.array of a list), and convert no "
    "parameter with float(), math or an array's out="
)
