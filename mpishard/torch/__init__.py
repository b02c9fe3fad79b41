"""Two lines in a PyTorch loop: ``model = mst.shard(model)``, ``mst.optimizer(AdamW, model)``.

Begin with ``module.py``: `shard` places a module's parameters in memory that ranks share, takes
gradients from autograd and reduces them. ``gathering.py`` gathers them if ranks
share no memory. ``optimizer.py`` makes an optimizer of this rank's parts, of PyTorch or with a rule
of ours (``rule_optimizer.py``), ``state.py`` its state in PyTorch's form; ``parameters.py`` has the
type of the module's parameters, ``bfloat16.py`` rounds what modules compute with, ``buffers.py``
holds the tensors that are not divided, ``world.py`` this rank, ``files.py`` checkpoints,
``verification.py`` what ``mpishard verify`` reads. The room imports PyTorch, adapters, and the
rooms before them.
"""

from mpishard.torch.batch_norm import convert_sync_batchnorm
from mpishard.torch.clipping import clip_grad_norm_
from mpishard.torch.data import DataLoader
from mpishard.torch.files import load, save
from mpishard.torch.module import check_replicas, no_sync, shard
from mpishard.torch.optimizer import optimizer
from mpishard.torch.world import barrier, init, print, rank, world_size  # noqa: A004

__all__ = [
    "DataLoader",
    "barrier",
    "check_replicas",
    "clip_grad_norm_",
    "convert_sync_batchnorm",
    "init",
    "load",
    "no_sync",
    "optimizer",
    "print",
    "rank",
    "save",
    "shard",
    "world_size",
]
