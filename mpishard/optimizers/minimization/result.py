"""The result of `minimize`."""

from __future__ import annotations

from typing import Any

__all__ = ["OptimizeResult"]


class OptimizeResult(dict[str, Any]):
    """The fields of ``scipy.optimize.OptimizeResult``, by key and by attribute.

    It is a class of its own because SciPy is no dependency of this package.

    Attributes
    ----------
    x : Array
        The solution, shape (n,), whole on every rank.
    fun : float
        The mean loss there.
    jac : Array
        Its gradient, shape (n,).
    nit, nfev, njev : int
        Iterations; evaluations of loss and gradient, of this run and those it went on from.
    nhev : int
        Products of the Hessian with a vector, or differences of gradients in their place.
    success : bool
        Whether a tolerance was reached.
    status : int
        0 for success, 1 if a limit was reached, 2 if no lower value was found, 99 if the callback
        raised StopIteration.
    message : str
        The reason in words.

    Examples
    --------
    >>> OptimizeResult(fun=0.5, nit=3).fun
    0.5
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the result has no {name!r}, but {', '.join(self)}") from None

    __setattr__ = dict.__setitem__
    __delattr__ = dict.__delitem__

    def __dir__(self) -> list[str]:
        return list(self)

    def __repr__(self) -> str:
        width = max(map(len, self), default=0)
        return "\n".join(f"{name:>{width}}: {value!r}" for name, value in self.items())
