"""Batch normalisation over the samples of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import batch_norm

from mpishard.base import ShardingError
from mpishard.communication import CommunicationBackend
from mpishard.torch.parameters import PlacedParameter, Uncopied


class Ranks(Uncopied):
    """Ranks over whose samples a sharded module normalises.

    Parameters
    ----------
    backend : CommunicationBackend
        Ranks that compute different samples.
    subject : int
        The layer's number in collectives, so that ranks cannot mix two layers.
    """

    def __init__(self, backend: CommunicationBackend, subject: int) -> None:
        self.backend = backend
        self.subject = subject


class _SumOverRanks(torch.autograd.Function):  # type: ignore[misc]
    """Sum over ranks, whose backward pass sums the gradients over ranks, at every order."""

    @staticmethod
    def forward(context: Any, ranks: Ranks, values: torch.Tensor) -> torch.Tensor:
        context.ranks = ranks
        # The copy is overwritten by the sum.
        copied = values.detach().clone(memory_format=torch.contiguous_format)
        return torch.from_numpy(ranks.backend.all_reduce(copied.numpy(), subject=ranks.subject))

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return None, _SumOverRanks.apply(context.ranks, gradient)


class SyncBatchNorm(torch.nn.modules.batchnorm._BatchNorm):  # type: ignore[misc]
    """Batch normalisation whose statistics, in training, are those of all ranks' samples.

    Attributes
    ----------
    ranks : Ranks or None
        Ranks of the sharded module. If it is None, the module is not sharded, and statistics are
        those of the samples given.
    """

    ranks: Ranks | None = None

    def _check_input_dim(self, x: torch.Tensor) -> None:
        if x.dim() < 2:
            raise ValueError(f"batch normalisation needs 2 dims or more, got {x.dim()}")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x of shape (B, C, ...). Collective in training mode."""
        self._check_input_dim(x)
        mean, weight = self.running_mean, self.weight
        # PyTorch's function refuses parameters that precision="bfloat16" has rounded, beside
        # float32 statistics.
        is_mixed = mean is not None and weight is not None and weight.itemsize < mean.itemsize
        if not self.training and is_mixed:
            weight, bias = weight.to(mean.dtype), self.bias.to(mean.dtype)
            return batch_norm(x, mean, self.running_var, weight, bias, eps=self.eps)
        if not self.training or (self.ranks is None and not is_mixed):
            return super().forward(x)
        others = [0, *range(2, x.dim())]
        shape = [1, -1, *[1] * (x.dim() - 2)]
        # Activations of 16 bits, of autocast or precision="bfloat16", are summed in float32.
        dtype, x = x.dtype, x.float() if x.itemsize == 2 else x
        # The mean is subtracted before the squares are summed, so that large means cost no digits.
        own = torch.cat([x.sum(others), x.new_tensor([x.numel() / x.shape[1]])])
        sums = self._over_ranks(own)
        count = float(sums[-1].detach())
        centered = x - (sums[:-1] / count).view(shape)
        squares = self._over_ranks((centered * centered).sum(others))
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
        return y.to(dtype)

    def _over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        return values if self.ranks is None else _SumOverRanks.apply(self.ranks, values)


def convert_sync_batchnorm(module: torch.nn.Module) -> torch.nn.Module:
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
        If the module is sharded already.
    """
    if any(isinstance(parameter, PlacedParameter) for parameter in module.parameters()):
        raise ShardingError(
            f"this {type(module).__name__} is sharded already; call convert_sync_batchnorm() "
            "before shard(), or before TorchModel is wrapped"
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


def layers_of_own_samples(module: torch.nn.Module) -> list[str]:
    """Return the names of batch normalisation that uses a rank's own samples, in training."""
    kind = torch.nn.modules.batchnorm._BatchNorm
    return [
        name
        for name, part in module.named_modules()
        if isinstance(part, kind) and part.training and not isinstance(part, SyncBatchNorm)
    ]
