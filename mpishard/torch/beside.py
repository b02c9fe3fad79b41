"""State that a checkpoint has beside arrays: that of a module, and plain values as text."""

from __future__ import annotations

import base64
import io
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpishard.base import Document, Metadata
from mpishard.torch.buffers import write
from mpishard.torch.placed import PlacedModule

# Only keys of objects that represent a NumPy scalar or array, as a tensor, and a path, as a string.
_NUMPY, _PATH = "$numpy", "$path"
_READ_TYPES = {type(None), bool, int, float, complex, str, bytes}
_SHOWN = 60  # Maximum number of characters of a value in a message.


# ---------------------------------------------------------------------------------- plain values


def to_text(values: Mapping[str, object]) -> str:
    """Return tensors and plain values as text for a checkpoint's metadata.

    Values are plain if PyTorch reads them without running code from the file. NumPy's scalars and
    numeric arrays, and paths, may be among them.

    Raises
    ------
    TypeError
        If `from_text` could not read a value. The message names it.
    """
    return base64.b64encode(_dumped({k: _plain(v, k) for k, v in values.items()})).decode()


def from_text(text: str) -> Document:
    """Return the values of `to_text`, in their types.

    Raises
    ------
    ValueError
        If the text cannot be read.
    """
    try:
        values: Document = _restored(_loaded(base64.b64decode(text)))
    except Exception as error:
        raise ValueError(f"PyTorch cannot read its values ({type(error).__name__})") from error
    return values


def beside_in(text: str) -> Document:
    """Return the values in a checkpoint's text, also in the form of earlier releases.

    These had the states of an optimizer by parameter. The first had the tensors of a module as
    "buffers", and other names for parts of an optimizer.

    Raises
    ------
    ValueError
        If the text cannot be read.
    """
    values = from_text(text)
    if "buffers" in values:
        values["model"] = {"state_dict": values.pop("buffers"), "versions": {}}
        if "optimizer" in values:
            parts = values["optimizer"]
            values["optimizer"] = {"param_groups": parts["groups"], "state": parts["rest"]}
    parts = values.get("optimizer", {"state": []})
    if isinstance(parts["state"], dict):  # by parameter
        parts["state"] = [
            {"names": [name], "values": {key: [value] for key, value in state.items()}}
            for name, state in parts["state"].items()
        ]
    return values


def _dumped(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _loaded(raw: bytes) -> Any:
    # A checkpoint may come from somebody else, and must not run code when it is read.
    return torch.load(io.BytesIO(raw), weights_only=True)


def _plain(value: Any, place: str) -> Any:
    """Return a copy of a value in types that `_loaded` reads."""
    # Exact types: an object of a subclass may have state that would be lost.
    kind = type(value)
    if kind in _READ_TYPES:
        return value
    if kind is np.str_:
        return str(value)
    if kind is np.ndarray or isinstance(value, np.generic):
        try:
            return {_NUMPY: torch.from_numpy(np.array(value, order="C"))}
        except (TypeError, ValueError):  # PyTorch has no such dtype.
            raise _refusal(value, place) from None
    if isinstance(value, Path):
        return {_PATH: str(value)}
    if kind in (torch.Tensor, torch.nn.Parameter):
        return value.detach().clone()
    if kind in (dict, OrderedDict, Counter):
        inner = {_key(k, place): _plain(v, f"{place}[{k!r}]") for k, v in value.items()}
        return kind(inner)
    if kind in (list, tuple):
        return kind(_plain(item, f"{place}[{index}]") for index, item in enumerate(value))
    return _key(value, place)


def _key(value: object, place: str) -> Any:
    """Return a plain value for one that a set or the keys of a dict may hold."""
    if type(value) is set:
        return {_key(item, place) for item in value}
    plain = value.item() if isinstance(value, np.generic) else value
    # Most keys are names, and a try takes a millisecond.
    if type(plain) in _READ_TYPES:
        return plain
    # PyTorch has no list of the types that it reads, so that it has to try.
    try:
        _loaded(_dumped(plain))
    except Exception as error:
        raise _refusal(value, place) from error
    return plain


def _refusal(value: object, place: str) -> TypeError:
    shown = repr(value)
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]} ..."
    return TypeError(
        f"{place} is a {type(value).__name__}: {shown}. No load could read it, and nothing was "
        "saved; let the state hold numbers, strings, tensors, arrays or paths, in lists and dicts"
    )


def _restored(value: Any) -> Any:
    kind = type(value)
    if kind in (dict, OrderedDict):
        if value.keys() == {_NUMPY}:
            return value[_NUMPY].numpy()[()]  # An array without dims becomes a scalar.
        if value.keys() == {_PATH}:
            return Path(value[_PATH])
        return kind({key: _restored(item) for key, item in value.items()})
    if kind in (list, tuple):
        # Most are names of parameters, which need no call.
        return kind([item if type(item) in _READ_TYPES else _restored(item) for item in value])
    return value


# -------------------------------------------------------------------------------- state of modules


def saved_state(placed: PlacedModule) -> Document:
    """Return all that the ``state_dict()`` of a module has beside the parameters in the vector.

    These are buffers, parameters outside of the vector, extra state, and the values of modules that
    save in a way of their own.

    Returns
    -------
    dict
        The values by name, and the versions of the modules; empty if there are no values.

    Raises
    ------
    TypeError
        If no module would load one of the values. The message names it.
    """
    tensors, others, versions = _divided(placed)
    for name in others:
        _require_reader(placed.module, name)
    values = {**tensors, **others}
    return {"state_dict": values, "versions": versions} if values else {}


def check_state(placed: PlacedModule, saved: Metadata) -> None:
    """Refuse values that this module does not have.

    Raises
    ------
    ValueError
        If the module has no value of the same name or, for buffers, the same shape. The message
        names one.
    """
    tensors, others, _ = _divided(placed)
    for name, value in saved.get("state_dict", {}).items():
        if name in others:
            continue
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else "none"
        here = tuple(tensors[name].shape) if name in tensors else "none"
        if here == "none" or here != shape:
            raise ValueError(
                f"the checkpoint has {name!r} of shape {shape}, and this module has {here}"
            )


def take_state(placed: PlacedModule, saved: Metadata) -> None:
    """Give the values of `saved_state` to the module, which may have more.

    Raises
    ------
    ValueError
        If the module's ``load_state_dict()`` raises, or does not read a value.
    """
    tensors, others, _ = _divided(placed)
    values = saved.get("state_dict", {})
    # Tensors alone are written in place, without a call of the user's code.
    if values.keys().isdisjoint(others):
        for name, value in values.items():
            write(tensors[name], value)
        return
    state = OrderedDict(values)
    # PyTorch passes these versions to each module, which converts older state by them.
    state._metadata = OrderedDict(saved["versions"])  # type: ignore[attr-defined]
    with errors_of_loading(placed.module):
        result = placed.module.load_state_dict(state, strict=False)
        if result.unexpected_keys:
            raise KeyError(result.unexpected_keys[0])


@contextmanager
def errors_of_loading(loaded: object) -> Iterator[None]:
    """Convert errors of a user's ``load_state_dict()`` to a ValueError that names the class."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"{type(loaded).__name__}.load_state_dict() raised {type(error).__name__}: {error}"
        ) from error


@contextmanager
def module_unchanged(placed: PlacedModule) -> Iterator[None]:
    """Undo, after the ``with`` statement, changes of attributes and tensors beside the vector."""
    module = placed.module
    in_vector = {id(parameter) for parameter in placed.parameters}
    # Attributes get the same objects back, and tensors their values, as user code may refer to
    # them.
    modules = [(m, dict(vars(m)), dict(m._buffers.items())) for m in module.modules()]
    tensors = [*module.buffers(), *(p for p in module.parameters() if id(p) not in in_vector)]
    copies = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        for inner, attributes, buffers in modules:
            vars(inner).clear()
            vars(inner).update(attributes)
            for name, buffer in buffers.items():
                if inner._buffers[name] is not buffer:
                    inner._buffers[name] = buffer
        with torch.no_grad():
            for tensor, values in zip(tensors, copies, strict=True):
                if not torch.equal(tensor, values):
                    tensor.resize_(values.shape).copy_(values)


def _divided(placed: PlacedModule) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return a state dict without the vector's parameters: tensors, other values, and versions.

    The tensors are buffers and parameters themselves.
    """
    module = placed.module
    state = module.state_dict(keep_vars=True)
    in_vector = {id(parameter) for parameter in placed.parameters}
    names_in_vector: set[str] = set()
    plain: set[int] = set()
    # One walk, because a module may have many thousands of parts.
    for prefix, part in module.named_modules(remove_duplicate=False):
        plain.update(map(id, part._buffers.values()), map(id, part._parameters.values()))
        names_in_vector |= {
            f"{prefix}.{name}" if prefix else name
            for name, parameter in part._parameters.items()
            if id(parameter) in in_vector
        }
    plain.discard(id(None))  # A module may have no bias, and a get_extra_state() that returns None.
    tensors: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in state.items():
        if id(value) not in in_vector and name not in names_in_vector:
            (tensors if id(value) in plain else others)[name] = value
    return tensors, others, dict(getattr(state, "_metadata", {}))


def _require_reader(module: torch.nn.Module, name: str) -> None:
    """Refuse a value of a ``state_dict()`` that no submodule reads from one."""
    path, (*prefix, last) = [module], name.split(".")
    for part in prefix:
        if part not in path[-1]._modules:
            break
        path.append(path[-1]._modules[part])
    inner, plain = path[-1], torch.nn.Module
    reads = (
        (len(path) == len(prefix) + 1 and (last in inner._buffers or last in inner._parameters))
        or type(module).load_state_dict is not plain.load_state_dict
        or any(
            type(m)._load_from_state_dict is not plain._load_from_state_dict
            or m._load_state_dict_pre_hooks
            for m in path
        )
    )
    needed = "_load_from_state_dict"
    if last == "_extra_state" and type(inner).get_extra_state is not plain.get_extra_state:
        reads = type(inner).set_extra_state is not plain.set_extra_state
        needed = "set_extra_state"
    if not reads:
        raise TypeError(
            f"{type(inner).__name__} saves {name!r} in its state_dict(), and has no {needed}() to "
            "read it: no load could restore it, and nothing was saved"
        )
