"""What a PyTorch module must be for `TorchModel` to hold its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["check_module", "trainable_parameters"]


def trainable_parameters(module: Any) -> list[tuple[str, Any]]:
    """Name and parameter, each once, of those that training changes."""
    return [(n, p) for n, p in module.named_parameters() if p.requires_grad and p.numel()]


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
            f"{_some(odd)} are no plain strided tensors; give TorchModel the module as it was "
            "before another library (FSDP, quantisation) took it over"
        )
    odd = [f"{name} on {t.device}" for name, t in everything if t.device.type != "cpu"]
    if odd:
        raise ValueError(f"TorchModel computes on the CPU, and {_some(odd)}; use module.cpu()")
    trainable = trainable_parameters(module)
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
