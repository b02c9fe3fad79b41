"""A PyTorch module as a model: its parameters and gradients are views of mpishard's memory."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from mpishard.adapters.placed_vector import PlacedVectorModel
from mpishard.arrays import Array, require_plain
from mpishard.bfloat16 import is_bfloat16
from mpishard.communication.contract.status import look_behind
from mpishard.communication.init import blas_threads
from mpishard.contracts import ILossFunction
from mpishard.data import Samples
from mpishard.errors import ShardingError
from mpishard.sharding import ParameterEntry

__all__ = [
    "TorchLoss", "TorchModel", "bytes_of", "check_module", "copy_range", "flat_gradient",
    "parameter_table", "prepare_torch", "take_bytes", "tensor_of",
]  # fmt: skip


def parameter_table(
    module: Any, *, with_frozen: bool
) -> tuple[list[tuple[Any, str]], list[ParameterEntry]]:
    """Return the submodule and name of each parameter that a flat vector holds, and its entry.

    The trained ones, and frozen ones of their dtype if asked for; shared ones once.
    """
    dtype = next(p.dtype for p in module.parameters() if p.requires_grad and p.numel())
    places, entries, seen, start = [], [], set(), 0
    for prefix, inner in module.named_modules():
        for name, parameter in inner._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            is_held = parameter.requires_grad or with_frozen
            if not is_held or parameter.dtype != dtype or not parameter.numel():
                continue
            full_name, shape = f"{prefix}.{name}" if prefix else name, tuple(parameter.shape)
            entries.append(ParameterEntry(full_name, shape, start, parameter.requires_grad))
            places.append((inner, name))
            start += parameter.numel()
    return places, entries


def check_module(module: Any) -> None:
    """Refuse, before anything is changed, a module that cannot be placed."""
    import torch

    everything = [*module.named_parameters(), *module.named_buffers()]
    odd = [n for n, t in everything if isinstance(t, torch.nn.parameter.UninitializedTensorMixin)]
    if odd:
        raise TypeError(f"{_some(odd)} have no shape yet; call the module once on a sample first")
    odd = [n for n, t in everything if type(t.data) is not torch.Tensor or t.is_sparse]
    if odd:
        raise TypeError(
            f"{_some(odd)} are no plain strided tensors; give mpishard the module as it was "
            "before another library (FSDP, quantisation) took it over"
        )
    odd = [f"{name} on {t.device}" for name, t in everything if t.device.type != "cpu"]
    if odd:
        raise ValueError(
            f"mpishard computes with PyTorch on the CPU, and {_some(odd)}; use module.cpu(), or "
            "for tensors on meta module.to_empty(device='cpu') and reset_parameters()"
        )
    trainable = [(n, p) for n, p in module.named_parameters() if p.requires_grad and p.numel()]
    if not trainable:
        raise ValueError(f"{type(module).__name__} has no parameter that requires a gradient")
    dtypes: dict[str, list[str]] = {}
    for name, parameter in trainable:
        dtypes.setdefault(str(parameter.dtype).removeprefix("torch."), []).append(name)
    if len(dtypes) > 1 or not dtypes.keys() <= {"float32", "float64"}:
        found = ", ".join(f"{_some(names)} are {dtype}" for dtype, names in dtypes.items())
        raise ValueError(
            f"all parameters must be float32, or all float64; {found}; use module.float() or "
            "module.double()"
        )


def _refuse_batch_norm(module: Any) -> None:
    import torch

    odd = [
        name
        for name, part in module.named_modules()
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm) and part.training
    ]
    if odd:
        raise ValueError(
            f"batch normalisation ({_some(odd)}) would use the statistics of each rank's own "
            "samples, and results would depend on the number of ranks; use GroupNorm or "
            "LayerNorm, or call eval() on those modules to keep their statistics"
        )


def _some(names: Sequence[str]) -> str:
    rest = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]!r}{rest}"


_log = logging.getLogger("mpishard")


def prepare_torch() -> None:
    """Give PyTorch this rank's share of the cores, and let reports name the user's lines.

    The share is that of the rank's BLAS, if `mpishard.init` has set one. Idempotent.
    """
    import torch

    # Autograd and optimizers call our hooks.
    look_behind(str(Path(torch.__file__).parent))
    threads = blas_threads()
    if threads is not None and torch.get_num_threads() > threads:
        torch.set_num_threads(threads)
        _log.info("%d PyTorch threads for each rank; torch.set_num_threads changes it", threads)


def copy_range(
    entries: Sequence[ParameterEntry], parameters: Sequence[Any], start: int, out: Array
) -> None:
    """Write the range of the flat vector that begins at ``start`` into ``out``."""
    stop = start + out.size
    for entry, parameter in zip(entries, parameters, strict=True):
        first, last = max(start, entry.start), min(stop, entry.stop)
        if first < last:
            values = parameter.detach().reshape(-1).numpy()
            out[first - start : last - start] = values[first - entry.start : last - entry.start]


def bytes_of(tensor: Any) -> Array:
    """Return the bytes of a tensor, in logical order: of a contiguous one, its memory."""
    import torch

    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def take_bytes(tensor: Any, raw: Array) -> None:
    """Give a tensor the bytes that `bytes_of` returned on another rank."""
    import torch

    if not np.array_equal(bytes_of(tensor), raw):  # else it may be a view, or read-only
        with torch.no_grad():
            tensor.copy_(torch.from_numpy(raw.copy()).view(tensor.dtype).view(tensor.shape))


def tensor_of(array: Array) -> Any:
    """Return a tensor on the memory of an array, which may be of bfloat16."""
    import torch

    if not is_bfloat16(array):
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def flat_gradient(gradient: Any) -> Array:
    """Return a gradient as a dense vector; one of bfloat16 in float32."""
    gradient = gradient.to_dense() if gradient.is_sparse else gradient
    gradient = gradient.float() if gradient.itemsize == 2 else gradient
    return gradient.detach().reshape(-1).numpy()


class TorchModel(PlacedVectorModel):
    """A ``torch.nn.Module`` on the CPU, trained by mpishard's optimizers.

    The parameters that require gradients, in the order of ``module.named_parameters()``, are the
    flat vector. The module's parameters become views of it, and, once the model is sharded, views
    of memory that the ranks of a node share: no step copies a parameter. Autograd's gradients are
    reduced unit by unit while backward goes on.

    Frozen parameters and buffers stay the module's own. When the model is sharded every rank gets
    rank 0's; no checkpoint holds them. Training uses each submodule's own mode, train or eval;
    `predict` and evaluation use eval mode. Random layers (dropout) draw from torch's generator,
    which each rank should seed differently. Hooks on the module, checkpointed segments and tied
    parameters work; ``.grad`` of the parameters is None after each pass.

    Parameters
    ----------
    module : torch.nn.Module
        Returns one tensor of as many samples as it is given: one array; of `mpishard.data.Samples`
        those of a dict as keyword arguments, those of a tuple as arguments. Each rank makes its
        own.
    loss : callable or ILossFunction
        ``loss(output, y)``, a scalar tensor: the *mean* over samples, as of
        ``torch.nn.functional.mse_loss``. Or a loss of `mpishard.nn`, which may weigh its targets.

    Raises
    ------
    ImportError
        If PyTorch is not installed.
    TypeError
        For other arguments, or a parameter that is no plain strided tensor.
    ValueError
        For parameters of several dtypes, of none but float32 or float64, on another device than
        the CPU; for batch normalisation that trains, whose statistics would be those of each
        rank's own samples. Nothing has changed then.
    """

    def __init__(self, module: Any, loss: Callable[[Any, Any], Any] | ILossFunction) -> None:
        try:
            import torch
        except ImportError as error:
            raise ImportError("TorchModel needs PyTorch: pip install 'mpishard[torch]'") from error
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
        if not isinstance(loss, ILossFunction) and not callable(loss):
            raise TypeError("loss must be loss(output, y), or a loss of mpishard.nn")
        check_module(module)
        _refuse_batch_norm(module)
        self._module = module
        self._loss = loss if isinstance(loss, ILossFunction) else TorchLoss(loss)
        self._index_parameters()
        self._name = type(module).__name__
        self._dtype = np.dtype(str(self._parameters[0].dtype).removeprefix("torch."))
        vector = np.empty(self.parameter_count, self._dtype)
        self.fill_parameters(0, vector)
        self.reclaim_parameters(vector)

    def _index_parameters(self) -> None:
        places, entries = parameter_table(self._module, with_frozen=False)
        self._parameters = [module._parameters[name] for module, name in places]
        self._entries = tuple(entries)
        frozen = [p for p in self._module.parameters() if not p.requires_grad]
        self._constants = [*frozen, *self._module.buffers()]

    # ---------------------------------------------------------------------------------- structure

    @property
    def module(self) -> Any:
        """The PyTorch module, which may be called at any time."""
        return self._module

    @property
    def placed_object(self) -> Any:
        return self._module

    @property
    def default_loss_function(self) -> ILossFunction:
        return self._loss

    # --------------------------------------------------------------------------------- parameters

    def with_parameters(self, parameters: Array) -> Self:
        """A new plain model of this structure that *holds* ``parameters``, without a copy.

        ``parameters`` is copied only if its dtype differs.
        """
        import torch

        parameters = self._checked(parameters)
        model = copy.copy(self)
        # With new parameters in its memo, deepcopy copies what is no parameter.
        memo = {
            id(old): torch.nn.Parameter(torch.from_numpy(values).view(old.shape))
            for old, values in zip(self._parameters, self._cut(parameters), strict=True)
        }
        model._module = copy.deepcopy(self._module, memo)
        model._index_parameters()
        model.reclaim_parameters(parameters)
        return model

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.with_parameters(self.get_parameters())

    def fill_parameters(self, start: int, out: Array) -> None:
        if self._holder is not None:
            self._flat_vector()  # raises
        copy_range(self._entries, self._parameters, start, out)

    def obstacle_to_bfloat16(self) -> str | None:
        frozen = [(n, p) for n, p in self._module.named_parameters() if not p.requires_grad]
        other = [n for n, p in frozen if p.is_floating_point() and p.itemsize != 2]
        if not other:
            return None
        return (
            f"has frozen parameters in another dtype ({_some(other)}), beside which PyTorch does "
            "not compute in bfloat16: give them .data in torch.bfloat16, or leave precision=None"
        )

    def place_parameters(self, arrays: Sequence[Array], holder: str) -> None:
        super().place_parameters(arrays, holder)
        prepare_torch()

    def _place(self, arrays: Sequence[Array]) -> None:
        for parameter, array in zip(self._parameters, arrays, strict=True):
            parameter.data = tensor_of(array).view(parameter.shape)

    def constants(self) -> Iterator[Array]:
        return map(bytes_of, self._constants)

    def set_constant(self, index: int, raw: Array) -> None:
        take_bytes(self._constants[index], raw)

    # ---------------------------------------------------------------------------------- computing

    def check_input(self, x: Any) -> None:
        _check_array("x", x)

    def predict(self, x: Array) -> Array:
        """Outputs in eval mode, shape (B, ...), for inputs of shape (B, ...)."""
        import torch

        _check_array("x", x)
        modes = [(module, module.training) for module in self._module.modules()]
        self._module.eval()
        try:
            with torch.no_grad():
                return self._run(x)[1]
        finally:
            for module, mode in modes:
                module.training = mode

    def _run(self, x: Array) -> tuple[Any, Array]:
        """The module's output; as an array, on the same memory unless it is bfloat16."""
        import torch

        dtype = self._parameters[0].dtype  # bfloat16, if a sharded wrapper has placed such

        def given(array: Array) -> Any:
            tensor = _tensor(array, self._dtype)
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        tree = x.map(given) if isinstance(x, Samples) else [given(x)]
        try:
            output = self._module(**tree) if isinstance(tree, dict) else self._module(*tree)
        except RuntimeError as error:
            if dtype == torch.bfloat16 and (wide := self._wide_buffers()):
                error.add_note(
                    f'precision="bfloat16" rounds parameters, and no buffers: {_some(wide)} may '
                    "have to be given in torch.bfloat16 before the module is wrapped"
                )
            raise
        if not isinstance(output, torch.Tensor):
            raise TypeError(
                f"{type(self._module).__name__} must return one tensor, got "
                f"{type(output).__name__}; give TorchModel a module whose forward picks one"
            )
        return output, output.detach().to(getattr(torch, self._dtype.name)).numpy()

    def _wide_buffers(self) -> list[str]:
        buffers = self._module.named_buffers()
        return [n for n, b in buffers if b.is_floating_point() and b.itemsize != 2]

    def forward_pass(
        self, x: Array, y: Array, loss: ILossFunction | None
    ) -> tuple[float, float, Any]:
        import torch

        assert loss is not None
        versions = [constant._version for constant in self._constants]
        with torch.enable_grad():
            output, prediction = self._run(x)
        if versions != [constant._version for constant in self._constants]:
            raise ShardingError(
                f"{type(self._module).__name__} changes its buffers in training: each rank's would "
                "differ, and no checkpoint holds them. Put the submodule that does it in eval "
                "mode, or replace it"
            )
        total, weight, saved = loss.forward(prediction, y)
        return total, weight, (output, loss, saved)

    def backward_pass(self, kept: Any, receive: Callable[[int, Array], None]) -> None:
        import torch

        output, loss, saved = kept
        if not output.requires_grad:  # no parameter was used
            return
        handles = []
        try:
            for index, parameter in enumerate(self._parameters):
                parameter.grad = None
                hook = functools.partial(_hand_over, receive, index)
                handles.append(parameter.register_post_accumulate_grad_hook(hook))
            output.backward(torch.from_numpy(loss.backward(saved)).to(output.dtype))
        finally:
            for handle, parameter in zip(handles, self._parameters, strict=False):
                handle.remove()
                parameter.grad = None


class TorchLoss(ILossFunction):
    """A loss written in PyTorch, ``function(output, target)``: a scalar, the mean over samples."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        self._function = function

    def forward(
        self, prediction: Array, target: Array, training: bool = True
    ) -> tuple[float, float, Any]:
        import torch

        samples = len(prediction)
        if samples == 0:
            return 0.0, 0.0, (None, None, np.zeros_like(prediction))
        output = torch.from_numpy(prediction)
        with torch.set_grad_enabled(training):
            output.requires_grad_(training)
            convert = functools.partial(_tensor, dtype=prediction.dtype)
            given = target.map(convert) if isinstance(target, Samples) else convert(target)
            mean = self._function(output, given)
        if not isinstance(mean, torch.Tensor) or mean.numel() != 1:
            shape = f"a tensor of shape {tuple(mean.shape)}" if hasattr(mean, "shape") else mean
            raise TypeError(
                f"loss(output, y) must return a scalar tensor, the mean over samples; got {shape}"
            )
        return float(mean.detach()) * samples, float(samples), (output, mean * samples, None)

    def backward(self, saved: Any) -> Array:
        import torch

        output, total, zeros = saved
        if output is None:
            return zeros
        (gradient,) = torch.autograd.grad(total, output)
        return gradient.numpy()


def _hand_over(receive: Callable[[int, Array], None], index: int, parameter: Any) -> None:
    """Hook: autograd's gradient of a parameter goes where gradients are gathered."""
    gradient, parameter.grad = parameter.grad, None
    receive(index, flat_gradient(gradient))


def _tensor(array: Array, dtype: np.dtype[Any]) -> Any:
    """``array`` as a tensor on the same memory: floats in ``dtype``, integers as int64."""
    import torch

    if array.dtype.kind == "f":
        array = array.astype(dtype, copy=False)
    elif array.dtype.kind in "iu":
        array = array.astype(np.int64, copy=False)
    array = np.ascontiguousarray(array)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _check_array(name: str, array: Any) -> None:
    if isinstance(array, Samples):
        for leaf in array.leaves():
            _check_array(name, leaf)
        return
    require_plain(array)
    if not isinstance(array, np.ndarray) or array.ndim == 0 or array.dtype.kind not in "fiub":
        shown = getattr(array, "dtype", type(array).__name__)
        raise TypeError(
            f"{name} must be a NumPy array of samples: floats, integers or bools; got {shown}; "
            "mpishard.data.Samples holds several"
        )
