"""Checks of users' arguments, which return the checked value or raise with the given value."""

from __future__ import annotations

import functools
import importlib
import math
import os
import types
from collections.abc import Iterable, Mapping
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, SupportsFloat, TypeAlias

Document: TypeAlias = dict[str, Any]
"""Named values that JSON can hold: what checkpoints, records and reports say of a run."""

Metadata: TypeAlias = Mapping[str, Any]
"""A `Document` that is only read, such as the metadata of a checkpoint."""

_RESERVED = "__metadata__"  # reserved by safetensors for the entries of a header itself


def as_number(name: str, value: object) -> float:
    """Return ``value``, a real number or an array of no dims, as a float.

    Raises
    ------
    TypeError
        If it is not a number; a bool is refused, too. The message names the argument.
    """
    number = _without_dims(value)
    if isinstance(number, bool) or not isinstance(number, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    return float(number)


def as_positive(name: str, value: Any) -> float:
    """Return ``value`` as a float that is above 0 and finite.

    Raises
    ------
    TypeError
        As `as_number`.
    ValueError
        If it is another number. The message names the argument.
    """
    # NaN fails every comparison, and so it is refused, too.
    if not 0 < as_number(name, value) < float("inf"):
        raise ValueError(f"{name} must be above 0 and finite, got {value}")
    return float(value)


def as_integer(name: str, value: object) -> int:
    """Return ``value`` as an int.

    Raises
    ------
    TypeError
        If it is not an integer; a bool is refused, too. The message names the argument.
    """
    # NumPy's integers are Integral as well. A bool is, too, and would count as 0 or 1.
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    return int(value)


def as_count(name: str, value: Any, least: int = 1) -> int:
    """Return ``value`` as an int of at least ``least``.

    Raises
    ------
    TypeError
        As `as_integer`.
    ValueError
        If it is smaller. The message names the argument.
    """
    if as_integer(name, value) < least:
        raise ValueError(f"{name} must be {least} or more, got {value}")
    # NumPy's integers overflow in products of sizes, and Python's do not.
    return int(value)


def as_index(name: str, value: Any, bound: int) -> int:
    """Return ``value`` as an int in ``[0, bound)``.

    Raises
    ------
    TypeError
        As `as_integer`.
    ValueError
        If it is outside. The message names the argument and the range.
    """
    if not 0 <= as_integer(name, value) < bound:
        raise ValueError(f"{name} {value} is outside [0, {bound})")
    return int(value)


def as_amount(name: str, value: Any) -> float:
    """Return ``value`` as a finite float of at least 0.

    Raises
    ------
    TypeError
        As `as_number`.
    ValueError
        If it is another number. The message names the argument.
    """
    if not 0 <= as_number(name, value) < math.inf:
        raise ValueError(f"{name} must be 0 or more and finite, got {value}")
    return float(value)


def as_loss(value: Any, owner: object, kind: str = "mean") -> float:
    """Return ``value``, a loss that a function of ``owner`` has returned, as a float.

    An array of one element is accepted, also of JAX or PyTorch. ``kind`` is "mean" or "sum", over
    the samples.

    Raises
    ------
    ValueError
        For an array of several elements. The message names the owner.
    TypeError
        For any other object that is not a real number. The message names the owner.
    """
    # By attributes, because JAX and PyTorch need not be installed.
    if math.prod(getattr(value, "shape", ())) != 1:
        raise ValueError(
            f"the loss of {name_of(owner)} must be one number, the {kind} over the samples; "
            f"got an array of shape {value.shape}"
        )
    number = value.item() if hasattr(value, "item") else value
    if not isinstance(number, SupportsFloat):
        raise TypeError(
            f"the loss of {name_of(owner)} must be one real number, the {kind} over the samples; "
            f"got {number!r}"
        )
    return float(number)


def name_of(owner: object) -> str:
    """Return the name of a user's object for messages: ``described_as``, or its class name."""
    return getattr(owner, "described_as", None) or type(owner).__name__


def as_flag(name: str, value: object) -> bool:
    """Return ``value`` as a bool. Strings and numbers are refused: "False" would count as True.

    Raises
    ------
    TypeError
        If it is neither True nor False. The message names the argument.
    """
    flag = _without_dims(value)
    if not isinstance(flag, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return flag


def _without_dims(value: Any) -> object:
    """Return the element of an array of no dims, such as the sum of an array, as a scalar."""
    return value.item() if getattr(value, "shape", None) == () else value


def require_type(name: str, value: object, *kinds: type) -> None:
    """Refuse a value that is of none of these types.

    Raises
    ------
    TypeError
        The message names the argument, the types, and the type of the value.
    """
    if not isinstance(value, kinds):
        known = " or ".join(kind.__name__ for kind in kinds)
        article = "an" if known[0] in "AEIOU" else "a"
        got = type(value).__name__
        # A frequent mistake is to pass SGD for SGD().
        if isinstance(value, type):
            got = f"the class {value.__name__}"
        raise TypeError(f"{name} must be {article} {known}, got {got}")


def nearest(given: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown name, with the nearest known name if any."""
    import difflib  # imported here, because only errors need it

    found = difflib.get_close_matches(given, list(known), 1)
    return f"; did you mean {found[0]}?" if found else ""


def require_attribute(owner: object, name: str, known: Iterable[str]) -> None:
    """Refuse to set an attribute that nothing reads: neither private nor one of ``known``.

    Raises
    ------
    AttributeError
        The message names the nearest known name.
    """
    if not name.startswith("_") and name not in known:
        raise AttributeError(f"{type(owner).__name__} has no {name}{nearest(name, known)}")


_ADAPTERS = {
    "torch.nn": "a PyTorch module: mpishard.torch.shard(module) shards it in a PyTorch loop; "
    "without one wrap it in mpishard.adapters.TorchModel(module, loss) first",
    "torch.optim": "a PyTorch optimizer: use a rule of mpishard.optimizers, such as AdamW(1e-3), "
    "or in a PyTorch loop mpishard.torch.optimizer(torch.optim.AdamW, model)",
    "scipy.optimize": "a function of SciPy: give its loss and gradient to mpishard.FunctionModel("
    "fun, theta), and use a rule of mpishard.optimizers, such as AdamW(1e-3)",
    "optax": "an optax transformation: wrap it in mpishard.adapters.OptaxRule(transformation)",
    "flax": "a Flax module: wrap its loss in mpishard.adapters.JaxModel(loss, parameters) first",
    "equinox": "an Equinox module: wrap its loss in mpishard.adapters.JaxModel(loss, parameters), "
    "with equinox.partition(module, equinox.is_inexact_array)[0] as parameters",
}
"""Package -> the kind of its objects, and the adapter or rule to use in their place."""


def adapter_hint(value: object) -> str:
    """Return the end of an error about an object of another library, with the adapter for it.

    The library is recognised by the modules of the object's classes, and is not imported.
    """
    # A user's module is a subclass in the user's package, so that its base classes count, too.
    kinds = [value] if isinstance(value, type) or callable(value) else []
    for kind in [*type(value).__mro__, *kinds]:
        # With the dot, "flax" does not match a package whose name only begins with it.
        module = f"{getattr(kind, '__module__', '')}."
        for package, hint in _ADAPTERS.items():
            if module.startswith(f"{package}."):
                return f"; this is {hint}"
    if isinstance(value, types.FunctionType | functools.partial):
        return "; this is a function: wrap it in mpishard.FunctionModel(fun, theta) first"
    return ""


def optional_package(name: str, user: str, extra: str) -> Any:
    """Import and return a package that an extra of mpishard brings.

    Raises
    ------
    ImportError
        The message names ``user``, which needs the package, and the extra.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{user} needs {name}: pip install 'mpishard[{extra}]'") from error


_KINDS = {"float": as_number, "int": as_integer, "bool": as_flag}


def take_plain_fields(record: Any) -> None:
    """Convert the number and flag fields of a frozen dataclass to Python's types, as JSON needs.

    Raises
    ------
    TypeError
        If a value is not of its field's type: float, int or bool. The message names the field.
    """
    for field in fields(record):
        # This package defers annotations, so that a field's type is its text.
        if field.type in _KINDS:
            value = _KINDS[field.type](field.name, getattr(record, field.name))
            # A frozen dataclass refuses an ordinary assignment, in its own methods, too.
            object.__setattr__(record, field.name, value)


def check_name(name: str, kind: str) -> None:
    """Refuse a name under which a safetensors file cannot hold a tensor.

    ``kind`` is "parameter" or "tensor", for the error.

    Raises
    ------
    ValueError
        For the name that the format reserves, and for a name that cannot be written as UTF-8.
    """
    if name == _RESERVED:
        raise ValueError(
            f"{kind} name {name!r} is reserved by the safetensors format; choose another name"
        )
    if not name.isascii():
        try:
            # Only lone surrogates fail, which come from names that were decoded from bytes.
            name.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{kind} name {name!r} cannot be written as UTF-8 ({error.reason}); choose "
                "another name"
            ) from None


def check_path(name: str, path: object) -> None:
    """Refuse a value that cannot be a path in the file system.

    Raises
    ------
    TypeError
        For an object that is neither a string nor a path.
    ValueError
        For a blank string, for a NUL character, which no file system takes, and for characters
        that cannot be encoded as file names: the locale chooses that encoding. Also for a string
        that begins with "~": shells replace that by the home directory, and Python does not.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{name} must be a string or a path, got {path!r}")
    if not str(path).strip():
        raise ValueError(f"{name} must not be blank, got {str(path)!r}")
    # Python would raise "embedded null byte", which names no argument.
    if "\0" in str(path):
        raise ValueError(f"{name} must not have a NUL character in it, got {str(path)!r}")
    if str(path).startswith("~"):
        raise ValueError(
            f"{name} {str(path)!r} would be a directory of the name {str(path).split('/')[0]!r} "
            f"here: give os.path.expanduser({str(path)!r}) for the home directory, or ./ before it"
        )
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} {str(path)!a} cannot be encoded as a file name in {error.encoding}, the "
            "encoding of this process; set PYTHONUTF8=1, or a locale with UTF-8"
        ) from None


def is_size(value: object, least: int = 1) -> bool:
    """Return whether ``value`` is an integer, but no bool, of at least ``least``."""
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= least


def check_divides(name: str, number: int, of: str, whole: int) -> None:
    """Refuse a number that does not divide another one.

    Raises
    ------
    ValueError
        The message has both names, the quotient and the remainder.
    """
    if whole % number:
        raise ValueError(
            f"{name} must divide {of}, got {whole} = {whole // number} * {number} + "
            f"{whole % number}"
        )


def check_sizes(owner: str, **sizes: object) -> None:
    """Refuse sizes, given by name, that are not integers of 1 or more.

    Raises
    ------
    ValueError
        The message names ``owner`` and all of its sizes.
    """
    if not all(is_size(size) for size in sizes.values()):
        got = ", ".join(f"{name}={size!r}" for name, size in sizes.items())
        raise ValueError(f"{owner} needs integer sizes >= 1, got {got}")
