"""Reverse differentiation by the parts of HIPS autograd, with a root for each array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpishard.arrays import Array

__all__ = ["Trace"]


class Trace:
    """The run of a function of several arrays, which can be walked back once.

    autograd's own ``grad`` differentiates by one argument. Of a list of n arrays it makes n nodes
    that each copy the list, in both directions: a second per gradient for some hundred arrays.
    Here every array is an argument of its own.

    Parameters
    ----------
    function : callable
        ``function(boxes)``, a list of what stands for the arrays, returns what was computed.
    arrays : sequence of Array
        What is differentiated by.

    Attributes
    ----------
    value : object
        What the function returned.
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
        """Of each array what the function's value pulls back; None where it was not used.

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
