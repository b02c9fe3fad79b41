"""Two lines in a PyTorch loop: ``model = mst.shard(model)``, ``mst.optimizer(AdamW, model)``.

Begin with ``module.py``: `shard`. ``placed.py`` makes a module's parameters parts of a flat
vector, ``buffers.py`` and ``batch_norm.py`` are about its other tensors;
`mpishard.adapters.TorchModel` uses these three, too. ``sharded.py`` has the stores of one module
and this rank's parts of its parameters, whose type is in ``parameters.py``; ``backward.py`` takes
gradients from autograd; ``gathering.py`` gathers parameters if ranks share no memory.
``optimizer.py`` makes an optimizer of the parts, of PyTorch or with a rule of ours
(``rule_optimizer.py``), with state dicts in PyTorch's form, and records the steps that ``mpishard
verify`` compares; ``world.py`` is this rank, ``files.py`` checkpoints. The room imports PyTorch,
optimizers, and the rooms before them.
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
