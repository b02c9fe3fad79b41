"""Checks of the arguments of `minimize`. They communicate nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpishard.base import Array, array_namespace, as_amount, as_array, as_count, nearest
from mpishard.data import Dataset, check_dataset
from mpishard.optimizers import LBFGS
from mpishard.sharding import refuse_with_leaves

_DEFAULTS = {"maxiter": 15_000, "maxfun": 15_000, "gtol": 1e-5, "ftol": 2.2204460492503131e-09}
# SciPy's name -> the rule's
_RULE_OPTIONS = {"maxls": "max_line_search", "c1": "c1", "c2": "c2", "maxcor": "memory"}


def checked_theta(given: Any) -> Array:
    """Return the first parameters as a new vector."""
    given = as_array(given)
    theta = given.copy() if hasattr(given, "dtype") else np.array(given)
    # SciPy takes a list of integers, too.
    if theta.dtype.kind in "iub":
        theta = theta.astype(np.float64)
    if theta.ndim != 1 or theta.size == 0 or theta.dtype.name not in ("float32", "float64"):
        raise ValueError(
            "theta0 must be a non-empty 1-D vector of float64 or float32, got "
            f"{theta.dtype.name} of shape {theta.shape}"
        )
    return theta


def checked_args(args: Dataset | Sequence[Dataset], *, local_data: bool) -> tuple[Dataset, ...]:
    """Return the data sets, which have as many samples each."""
    if not isinstance(args, tuple | list):
        args = (args,)  # as SciPy does
    lengths = [check_dataset(a, f"args[{i}]", allow_empty=local_data) for i, a in enumerate(args)]
    if len(set(lengths)) > 1:
        raise ValueError(
            f"args must be arrays with as many samples each, got {lengths}; give other "
            "arguments by functools.partial"
        )
    if local_data and not args:
        raise ValueError("local_data=True needs args: this rank's samples")
    return tuple(args)


def check_method(method: object) -> None:
    """Refuse any other method than L-BFGS."""
    if not isinstance(method, str | None):
        raise TypeError(
            f'method must be "L-BFGS", got {type(method).__name__}; give all data as one tuple, '
            "minimize(fun, theta0, (x, y))"
        )
    if str(method).lower() not in ("l-bfgs", "l-bfgs-b"):
        raise ValueError(
            f"method must be L-BFGS (or L-BFGS-B), got {method!r}; any other optimizer can run on "
            "all ranks with the loss_and_gradients of a sharded mpishard.FunctionModel"
        )


def checked_options(
    options: Mapping[str, Any] | None, *, local_data: bool
) -> tuple[LBFGS, dict[str, float], int | None]:
    """Return the rule, the limits, and the number of gradient leaves."""
    limits: dict[str, float] = dict(_DEFAULTS)
    settings = {}
    leaves = None
    for name, value in (options or {}).items():
        if name in _RULE_OPTIONS:
            settings[_RULE_OPTIONS[name]] = value
        elif name == "gradient_leaves":
            leaves = value
        elif name not in limits:
            known = [*limits, *_RULE_OPTIONS, "gradient_leaves"]
            raise ValueError(
                f"minimize has no option {name!r}; known are {', '.join(known)}"
                + nearest(name, known)
            )
        elif name.startswith("max"):
            limits[name] = as_count(name, value)
        else:
            limits[name] = as_amount(name, value)
    rule = LBFGS(**settings)
    if leaves is not None and local_data:
        refuse_with_leaves(
            leaves, "local_data=True", "give every rank the same args, or leave out one of the two"
        )
    return rule, limits, leaves


def checked_bounds(bounds: Any, theta: Array, rule: LBFGS) -> tuple[Array, Array] | None:
    """Return lower and upper bounds, and move theta into the box."""
    if bounds is None:
        return None
    if hasattr(bounds, "lb"):
        pair = bounds.lb, bounds.ub
    else:
        rows = list(bounds)
        if len(rows) != theta.size or any(len(row) != 2 for row in rows):
            raise ValueError(f"bounds must be {theta.size} pairs (low, high), got {len(rows)}")
        pair = (
            [-np.inf if low is None else low for low, _ in rows],
            [np.inf if high is None else high for _, high in rows],
        )
    lower, upper = (np.broadcast_to(np.asarray(b, theta.dtype), theta.shape) for b in pair)
    # Not "lower > upper", which is False for NaN.
    wrong = np.flatnonzero(~(lower <= upper))
    if wrong.size:
        k = int(wrong[0])
        raise ValueError(f"bounds[{k}] must be low <= high, got ({lower[k]}, {upper[k]})")
    xp = array_namespace(theta)
    lower, upper = xp.asarray(lower), xp.asarray(upper)
    xp.clip(theta, lower, upper, out=theta)
    rule.is_bounded = True
    return lower, upper


def check_functions(fun: object, jac: object, callback: object) -> None:
    """Refuse anything but functions, and a ``jac`` other than True."""
    for name, function in (("fun", fun), ("callback", callback)):
        if not callable(function) and not (name != "fun" and function is None):
            raise TypeError(f"{name} must be a function, got {function!r}")
    if jac is not True and not callable(jac):
        raise ValueError(
            f"jac must be True, if fun returns (loss, gradient), or a function, got {jac!r}; an "
            "adapter, such as mpishard.adapters.AutogradModel, differentiates a loss"
        )
