"""Two lines in a PyTorch loop: ``model = mst.shard(model)``, ``mst.optimizer(AdamW, model)``.

Begin with ``sharded.py``: `shard`, and what it makes of a module, which are stores and this rank's
parts of its parameters, whose type is in ``parameters.py``. ``placed.py`` makes a module's
parameters parts of a flat vector, and sends its buffers; ``batch_norm.py`` normalises over all
ranks; `mpishard.adapters.TorchModel` uses both, too. ``backward.py`` takes gradients from autograd;
``gathering.py`` gathers parameters if ranks share no memory. ``optimizer.py`` makes an optimizer of
the parts, of PyTorch or with a rule of ours, with clipping and state dicts in PyTorch's form, and
records the steps that ``mpishard verify`` compares; ``world.py`` is this rank, ``files.py``
checkpoints. The room imports PyTorch, optimizers, and the rooms before them.
"""

from mpishard.torch.batch_norm import convert_sync_batchnorm
from mpishard.torch.data import DataLoader
from mpishard.torch.files import load, save
from mpishard.torch.optimizer import clip_grad_norm_, optimizer
from mpishard.torch.sharded import check_replicas, no_sync, shard
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
