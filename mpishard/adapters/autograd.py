"""A loss function in NumPy as a model: HIPS autograd differentiates it."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpishard.adapters.parameter_tree import ParameterTree
from mpishard.adapters.placed_vector import TreeModel, described, scalar_loss
from mpishard.arrays import Array
from mpishard.contracts import ILossFunction
from mpishard.data import tree_of


class Trace:
    """The run of a function of several arrays, which can be walked back once.

    autograd's own ``grad`` differentiates by one argument. Of a list of n arrays it makes n nodes
    that each copy the list, in both directions: a second per gradient for some hundred arrays.
    Here every array is an argument of its own.

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
        Whether autograd saw at least one of the arrays in it.
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
        """The gradient with respect to each array; None if the function did not use it.

        ``cotangent`` has the value's shape: the derivative of what is wanted by the value.
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
        self._end = None  # lets the tape go
        return [found.get(id(root)) for root in self._roots]


# autograd numbers its traces with one counter per process. Two threads that trace at once can give
# an inner derivative the number of an outer one, which mixes up the two: gradients would be wrong.
_tracing = threading.RLock()

_SYMPTOM = re.compile(r"ArrayBox|autograd|differentiate|VJP|array element with a sequence")


class AutogradModel(TreeModel):
    """A model from a loss function that is written in NumPy, differentiated by HIPS autograd.

    The parameters are a tree of arrays, as the function takes it. End to end they are the flat
    vector; once the model is sharded they are views of memory that the ranks of a node share, and
    no step copies them. Each leaf has a name, by which ``parameter_options``, checkpoints and
    reports know it: ``{"layers": [{"weight": ..}]}`` has ``layers.0.weight``.

    Maclaurin, Duvenaud and Adams, "Autograd: effortless gradients in NumPy", ICML AutoML workshop,
    2015.

    Parameters
    ----------
    loss : callable
        ``loss(parameters, x, y)``, the *mean* over the samples of x, a scalar. It is written with
        ``autograd.numpy`` in place of ``numpy``, and gets x and y as they are given.
    parameters : pytree
        First values: nested dicts, lists, tuples and named tuples of float32 or float64 arrays and
        Python floats, of one dtype; or one array. They are copied.
    predict : callable, optional
        ``predict(parameters, x)``, for `predict`, and if another loss is asked for.

    Raises
    ------
    ImportError
        If autograd is not installed.
    TypeError, ValueError
        For arguments that are not such, with the name of the parameter.

    Notes
    -----
    Thread-ranks take turns in computing gradients: autograd records one trace at a time. Under
    MPI each rank has its own.

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
    ) -> None:
        try:
            import autograd as _  # noqa: F401
        except ImportError as error:
            raise ImportError(
                "AutogradModel needs HIPS autograd: pip install 'mpishard[autograd]'"
            ) from error
        super().__init__(ParameterTree(parameters), loss, predict)

    # ---------------------------------------------------------------------------------- computing

    def forward_pass(
        self, x: Array, y: Array, loss: ILossFunction | None
    ) -> tuple[float, float, Any]:
        if len(x) == 0:
            return 0.0, 0.0, None
        if loss is None:
            trace = self._traced(lambda tree: self._loss(tree, tree_of(x), tree_of(y)), "loss")
            mean, samples = scalar_loss(trace.value), float(len(x))
            # A loss of shape (1,) takes a cotangent of that shape.
            return mean * samples, samples, (trace, lambda: samples * np.ones_like(trace.value))
        predict = self._known_predict()
        trace = self._traced(lambda tree: predict(tree, tree_of(x)), "predict")
        total, weight, saved = loss.forward(trace.value, y)
        return total, weight, (trace, lambda: loss.backward(saved))

    def backward_pass(self, saved: Any, receive: Callable[[int, Array], None]) -> None:
        trace, cotangent = saved
        given = cotangent()
        with _tracing:
            gradients = trace.gradients(given)
        for index in reversed(range(len(self._entries))):
            gradient, entry = gradients[index], self._entries[index]
            if gradient is None:  # not used in this pass
                continue
            if np.shape(gradient) != entry.shape:
                raise ValueError(
                    f"autograd's gradient of parameter {entry.name!r} of shape {entry.shape} has "
                    f"the shape {np.shape(gradient)}. Of a primitive of your own, defvjp must give "
                    "what has the shape of its argument"
                )
            receive(index, np.asarray(gradient, self._dtype).reshape(-1))

    def _traced(self, function: Callable[[Any], Any], what: str) -> Trace:
        """The run of ``function(tree)``."""
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
