"""Targets of losses, and the weights of samples and classes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from mpishard.base import Array, array_namespace, as_amount, is_device_array
from mpishard.data import Samples
from mpishard.nn.checks import refuse_if_any


def parts_of(target: Any) -> tuple[Array, Array | None]:
    """Return the targets and the weights of ``Samples((targets, weights))``.

    The targets may be any array of N samples. The weights then have shape (N, 1, ...), with as many
    dims, or the targets' shape. They are None if ``target`` is an array, whose samples weigh 1.
    """
    if not isinstance(target, Samples):
        return target, None
    targets, weights = target.tree
    # Dims of 1 let NumPy spread a sample's weight over its targets.
    is_of_samples = weights.ndim == 1
    return targets, weights.reshape(-1, *(1,) * (targets.ndim - 1)) if is_of_samples else weights


def checked_targets(owner: str, target: Any) -> Array:
    """Return the targets; refuse what is neither an array nor targets and their weights.

    Raises
    ------
    TypeError
        For another object, in the name of ``owner``, and for weights that are not real numbers.
    ValueError
        If a weight is negative or not finite, or the weights have another shape than (N,) or that
        of the targets.
    """
    if not isinstance(target, Samples):
        array_namespace(target)
        only: Array = target
        return only
    # Only in a pair is it known which array has the weights.
    if not isinstance(target.tree, list | tuple) or len(target.tree) != 2:
        raise TypeError(
            f"{owner} takes an array of targets, or mpishard.data.Samples((targets, weights)); got "
            f"{target}"
        )
    targets, weights = target.tree
    array_namespace(targets)
    array_namespace(weights)
    if weights.shape not in (targets.shape[:1], targets.shape):
        raise ValueError(
            f"weights must have shape {targets.shape[:1]}, or that of the targets, "
            f"{targets.shape}; got {weights.shape}"
        )
    if weights.dtype.kind not in "fiub":
        raise TypeError(f"weights must be real numbers, got an array of {weights.dtype}")
    # NaN fails both comparisons.
    fits = (weights >= 0) & (weights < math.inf)

    def refuse() -> None:
        raise ValueError(f"weights must be 0 or more and finite, got {weights[~fits][0]}")

    if is_device_array(weights):
        refuse_if_any((~fits).sum(dtype="float64"), refuse)
    elif not fits.all():
        refuse()
    checked: Array = targets
    return checked


def as_class_weight(value: object) -> tuple[float, ...] | None:
    """Return the weights of classes as floats.

    Raises
    ------
    TypeError
        If they are not a sequence of numbers, or None.
    ValueError
        If one is negative or not finite, or all are 0.
    """
    if value is None:
        return None
    # A dict of class -> weight would be read as its keys.
    if not isinstance(value, Iterable) or isinstance(value, str | dict):
        raise TypeError(f"class_weight must be a sequence with a weight per class, got {value!r}")
    weights = tuple(as_amount("a weight of class_weight", weight) for weight in value)
    if not any(weights):
        raise ValueError(f"class_weight needs a weight above 0, got {weights}")
    return weights
