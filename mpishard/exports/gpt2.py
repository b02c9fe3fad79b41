"""Files of a `GPT`'s parameters in safetensors format, under the names of PyTorch programs."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from mpishard.base import Array, Document, as_flag, check_path
from mpishard.checkpoint import LazyTensor, TensorFile
from mpishard.communication import same_outcome
from mpishard.contracts import PathLike, UserModel
from mpishard.exports.rank_zero import write_model
from mpishard.models import ShardedModelBase
from mpishard.nn import GPT
from mpishard.sharding import ParameterEntry

_LAYERS = {
    "embedding.weight": "transformer.wte.weight",
    "position.weight": "transformer.wpe.weight",
    "norm.weight": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
    "head.weight": "lm_head.weight",
}
_BLOCK = {
    "attention.norm": "ln_1", "attention.qkv": "attn.c_attn", "attention.projection": "attn.c_proj",
    "mlp.norm": "ln_2", "mlp.expansion": "mlp.c_fc", "mlp.projection": "mlp.c_proj",
}  # fmt: skip
_EMBEDDING, _HEAD = "transformer.wte.weight", "lm_head.weight"
# Attention masks that older GPT-2 programs store among the parameters.
_BUFFERS = ("attn.bias", "attn.masked_bias")


def save_gpt2(model: UserModel, path: PathLike, *, transposed: bool = False) -> None:
    """Write a `GPT` as a safetensors file that a GPT-2 of PyTorch loads.

    Names are ``transformer.wte.weight``, ``transformer.h.0.attn.c_attn.weight`` and so on, as in
    nanoGPT and in Hugging Face's ``GPT2LMHeadModel``. These models have a bias on queries, keys and
    values, which is written as zeros. They compute the same as the `GPT` if their GELU has the tanh
    form, as in GPT-2. Collective if the model is sharded: rank 0 writes, unit by unit.

    Parameters
    ----------
    model : GPT, or a sharded model of one
        Model with as many heads of keys and values as of queries.
    path : path
        File to make or replace.
    transposed : bool
        If True, the weights of blocks are written as (inputs, outputs), as ``GPT2LMHeadModel``
        needs them. If False, as (outputs, inputs), as ``torch.nn.Linear`` and nanoGPT need them.

    Raises
    ------
    TypeError
        If the model is not a `GPT`.
    ValueError
        If heads share keys and values, which GPT-2 does not support.
    OSError
        If the file cannot be written. Every rank raises it.
    """
    transposed = as_flag("transposed", transposed)

    def content(model: UserModel, values: Iterator[Array]) -> Iterator[memoryview]:
        _require_gpt(model)
        entries, dtype = model.parameter_table.entries, model.dtype
        is_tied = not any(entry.name == "head.weight" for entry in entries)
        value = np.empty(0, dtype)

        def following(entry: ParameterEntry, turns: bool) -> Iterator[Array]:
            nonlocal value
            value = next(values)
            yield value.reshape(entry.shape).T.ravel() if turns else value

        # Tensors are written in the order of the dict, which must be that of the values.
        tensors: dict[str, LazyTensor] = {}
        for entry in entries:
            name, shape = _name(entry.name), entry.shape
            turns = transposed and entry.name.startswith("block") and len(shape) == 2
            read = functools.partial(following, entry, turns)
            tensors[name] = LazyTensor(dtype, shape[::-1] if turns else shape, read)
            # GPT-2 has a bias here, and PyTorch refuses a file without it.
            if name.endswith("attn.c_attn.weight"):
                zeros = np.zeros(shape[0], dtype)
                bias = LazyTensor(dtype, zeros.shape, functools.partial(iter, [zeros]))
                tensors[name.removesuffix("weight") + "bias"] = bias
            # Programs whose head is not tied need a copy of the embedding under the head's name.
            elif is_tied and name == _EMBEDDING:
                tensors[_HEAD] = LazyTensor(dtype, shape, lambda: iter([value]))
        return TensorFile(tensors, {"format": "pt"}).parts()

    write_model(path, model, content)


def load_gpt2(model: UserModel, path: PathLike) -> None:
    """Load the parameters of a `GPT` from a safetensors file of a GPT-2 of PyTorch.

    Both layouts of `save_gpt2` are read, and names may lack ``transformer.``. Every rank reads the
    file. Collective if the model is sharded.

    Parameters
    ----------
    model : GPT, or a sharded model of one
        Model of the sizes in the file. If its head is tied to the embedding, the file's must be,
        too.
    path : path
        The file.

    Raises
    ------
    TypeError
        If the model is not a `GPT`.
    FileNotFoundError
        If there is no such file.
    ValueError
        If the file is not a complete safetensors file. If parameters are missing, unknown, of other
        shapes, or not floating-point. If queries, keys and values have a bias other than 0, for
        which a `GPT` has no parameter. If the model's head is tied and the file's is not. Every
        rank raises it, and the model has not changed.
    """
    check_path("path", path)
    is_sharded = isinstance(model, ShardedModelBase)
    plain = model.wrapped_model if is_sharded else model
    with same_outcome(model.backend) if is_sharded else nullcontext():
        _require_gpt(plain)
        vector = _vector(plain, Path(path))
    model.set_parameters(vector)


def _require_gpt(model: object) -> None:
    if not isinstance(model, GPT):
        raise TypeError(f"a GPT-2 file needs a GPT, got a {type(model).__name__}")
    for entry in model.parameter_table.entries:
        if entry.name.endswith("qkv.weight") and entry.shape[0] != 3 * entry.shape[1]:
            raise ValueError(
                f"{entry.name} has shape {entry.shape}: heads share keys and values, and those of "
                "GPT-2 do not"
            )


def _name(name: str) -> str:
    """Return GPT-2's name of a parameter.

    For ``block0_mlp.norm.bias`` it is ``transformer.h.0.ln_2.bias``.
    """
    if name in _LAYERS:
        return _LAYERS[name]
    block, _, rest = name.removeprefix("block").partition("_")
    part, _, kind = rest.rpartition(".")
    return f"transformer.h.{block}.{_BLOCK[part]}.{kind}"


def _vector(model: GPT, path: Path) -> Array:
    given = _read(path)
    # The layout of blocks is found from this matrix, which has 4 times as many outputs as inputs.
    first = given.get("transformer.h.0.mlp.c_fc.weight")
    transposed = first is not None and first.ndim == 2 and first.shape[1] > first.shape[0]
    vector = np.empty(model.parameter_count, model.dtype)
    wanted = set()
    for entry in model.parameter_table.entries:
        name, view = entry.name, entry.view(vector)
        other = _name(name)
        wanted.add(other)
        value = given.get(other)
        if value is None:
            raise ValueError(f"{path} has no {other!r}, which is the model's {name}")
        if transposed and value.ndim == 2 and name.startswith("block"):
            value = value.T
        if value.dtype.kind in "biuc":
            raise ValueError(
                f"{other!r} of {path} is {value.dtype.name}, which is not a floating-point dtype: "
                "convert a quantized file to floating-point numbers first"
            )
        if value.shape != view.shape:
            raise ValueError(
                f"{other!r} of {path} has shape {value.shape}, the model's {name} {view.shape}"
            )
        view[...] = value
    for other, value in given.items():
        is_known = other in wanted or other.endswith((*_BUFFERS, "attn.c_attn.bias"))
        if other.endswith("attn.c_attn.bias") and np.any(value):
            raise ValueError(
                f"{other!r} of {path} is not 0, and a GPT has no bias on queries, keys and values"
            )
        if other == _HEAD and not is_known:
            if not np.array_equal(value, given["transformer.wte.weight"]):
                raise ValueError(
                    f"{_HEAD!r} of {path} differs from the embedding, to which the model's head is "
                    "tied"
                )
        elif not is_known:
            raise ValueError(f"{path} has {other!r}, for which the model has no parameter")
    return vector


def _read(path: Path) -> Document:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        with safe_open(path, "np") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from error
    except AttributeError as error:  # NumPy has no name for a dtype such as float8.
        raise ValueError(f"{path} has numbers of a dtype that NumPy lacks: {error}") from error
    # Names in a file of GPT2Model, which has no head, have no prefix.
    plain = ("wte.", "wpe.", "h.", "ln_f.")
    return {f"transformer.{n}" if n.startswith(plain) else n: v for n, v in found.items()}
