"""Batch normalisation over the samples of all ranks."""

from __future__ import annotations

from typing import Any

import torch

from mpishard.communication import CommunicationBackend
from mpishard.errors import ShardingError
from mpishard.torch.parameters import SharedParameter, Uncopied


class Ranks(Uncopied):
    """Ranks over whose samples a sharded module normalises.

    Parameters
    ----------
    backend : CommunicationBackend
        Ranks that compute different samples.
    """

    def __init__(self, backend: CommunicationBackend) -> None:
        self.backend = backend


class _SumOverRanks(torch.autograd.Function):  # type: ignore[misc]
    """Sum over ranks, whose backward pass sums the gradients over ranks."""

    @staticmethod
    def forward(context: Any, backend: Any, values: Any) -> Any:
        context.backend = backend
        return torch.from_numpy(backend.all_reduce(values.detach().clone().numpy()))

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return None, torch.from_numpy(context.backend.all_reduce(gradient.contiguous().numpy()))


class SyncBatchNorm(torch.nn.modules.batchnorm._BatchNorm):  # type: ignore[misc]
    """Batch normalisation whose statistics, in training, are those of all ranks' samples.

    Attributes
    ----------
    ranks : Ranks or None
        Ranks of the sharded module. If it is None, the module is not sharded, and statistics are
        those of the samples given.
    """

    ranks: Ranks | None = None

    def _check_input_dim(self, x: Any) -> None:
        if x.dim() < 2:
            raise ValueError(f"batch normalisation needs 2 dims or more, got {x.dim()}")

    def forward(self, x: Any) -> Any:
        """Normalise x of shape (B, C, ...). Collective in training mode."""
        if not self.training or self.ranks is None:
            return super().forward(x)
        self._check_input_dim(x)
        backend = self.ranks.backend
        others = [0, *range(2, x.dim())]
        shape = [1, -1, *[1] * (x.dim() - 2)]
        # The mean is subtracted before the squares are summed, so that large means cost no digits.
        own = torch.cat([x.sum(others), x.new_tensor([x.numel() / x.shape[1]])])
        sums = _SumOverRanks.apply(backend, own)
        count = float(sums[-1].detach())
        centered = x - (sums[:-1] / count).view(shape)
        squares = _SumOverRanks.apply(backend, (centered * centered).sum(others))
        if self.track_running_stats and count:  # A step without samples is refused later.
            self.num_batches_tracked.add_(1)
            # If momentum is None, the running statistics are the mean over all batches.
            share = self.momentum
            share = 1 / float(self.num_batches_tracked) if share is None else share
            mean, variance = sums.detach()[:-1] / count, squares.detach() / max(count - 1, 1)
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
            self.running_var.lerp_(variance.to(self.running_var.dtype), share)
        y = centered * torch.rsqrt(squares / count + self.eps).view(shape)
        if self.affine:
            y = y * self.weight.view(shape) + self.bias.view(shape)
        return y


def convert_sync_batchnorm(module: Any) -> Any:
    """Convert a module's batch normalisation, so that it uses the samples of all ranks.

    It works like ``torch.nn.SyncBatchNorm.convert_sync_batchnorm``: parameters and buffers stay
    the same objects. Call it before `shard`, or before a `mpishard.adapters.TorchModel` is sharded.
    Results are then those of one process on all samples, and a forward pass in train mode is
    collective. Without it each rank normalises with its own samples, and running means are rank
    0's.

    Parameters
    ----------
    module : torch.nn.Module
        Module, which is changed in place.

    Returns
    -------
    torch.nn.Module
        ``module``, or its replacement if ``module`` itself is a batch normalisation.

    Raises
    ------
    ShardingError
        If `shard` has already sharded the module.
    """
    if any(isinstance(parameter, SharedParameter) for parameter in module.parameters()):
        raise ShardingError(
            f"this {type(module).__name__} is sharded already; call convert_sync_batchnorm() "
            "before shard()"
        )
    if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
        converted = SyncBatchNorm.__new__(SyncBatchNorm)
        converted.__dict__ = module.__dict__
        return converted
    for name, inner in module.named_children():
        converted = convert_sync_batchnorm(inner)
        if converted is not inner:
            module._modules[name] = converted
    return module
