"""Reductions and operators of the stand-in's array, set on the class when this is imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cupy_stand_in.array import call, ndarray

__all__: list[str] = []


def _reduction(name: str) -> Callable[..., Any]:
    function = getattr(np, name)

    def reduce(self: ndarray, axis: Any = None, **kwargs: Any) -> Any:
        unknown = kwargs.keys() - {"dtype", "out", "keepdims"}
        if unknown:
            raise TypeError(f"ndarray.{name} takes no {sorted(unknown)}")
        return call(function, self, axis=axis, **kwargs)

    return reduce


def _binary(ufunc: Any) -> tuple[Callable[..., Any], ...]:
    def forward(self: ndarray, other: Any) -> Any:
        return call(ufunc, self, other)

    def backward(self: ndarray, other: Any) -> Any:
        return call(ufunc, other, self)

    def in_place(self: ndarray, other: Any) -> Any:
        return call(ufunc, self, other, out=self)

    return forward, backward, in_place


for _name in (
    "sum",
    "prod",
    "max",
    "min",
    "mean",
    "var",
    "any",
    "all",
    "argmax",
    "argmin",
    "cumsum",
):
    setattr(ndarray, _name, _reduction(_name))
for _name, _ufunc in {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "truediv": np.true_divide,
    "floordiv": np.floor_divide,
    "mod": np.remainder,
    "pow": np.power,
    "matmul": np.matmul,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "lshift": np.left_shift,
    "rshift": np.right_shift,
}.items():
    for _prefix, _method in zip(("", "r", "i"), _binary(_ufunc), strict=True):
        setattr(ndarray, f"__{_prefix}{_name}__", _method)
for _name in ("less", "less_equal", "equal", "not_equal", "greater", "greater_equal"):
    _short = {"less": "lt", "less_equal": "le", "equal": "eq", "not_equal": "ne"}.get(
        _name, "gt" if _name == "greater" else "ge"
    )
    setattr(ndarray, f"__{_short}__", _binary(getattr(np, _name))[0])
