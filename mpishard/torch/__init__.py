"""PyTorch loops on ranks, by ``model = mst.shard(model)`` and ``mst.optimizer(AdamW, model)``.

Begin with ``placed.py``: it makes a module's parameters parts of a flat vector in a store's memory,
checks the module, and hooks its gradients. ``parameters.py`` has the types of such parameters,
which ranks change together, and ``gradients.py`` that of their gradients. ``buffers.py`` sends the
other tensors, and ``batch_norm.py`` normalises over all ranks. `mpishard.adapters.TorchModel` is
made of the same.

Loops: ``sharded.py`` has `shard`, which makes stores, and this rank's parts of the parameters.
``backward.py`` takes gradients from autograd. ``gathering.py`` gathers parameters if ranks share
no memory. ``optimizer.py`` makes an optimizer of the parts, from a class of PyTorch or by
``rule_optimizer.py`` from one of our rules, and records the steps that ``mpishard verify``
compares. ``optimizer_state.py`` has state dicts in PyTorch's form, ``clipping.py`` norms.
``lone_saves.py`` finds, at the first step, checkpoints that rank 0 would write alone.
``data.py`` loads batches and knows their epochs, ``world.py`` has the rank's backend.
``files.py`` has checkpoints, and ``beside.py`` the state that they have beside arrays.
The room imports PyTorch, optimizers, and the rooms before them.
"""

from mpishard.torch.batch_norm import convert_sync_batchnorm
from mpishard.torch.clipping import clip_grad_norm_
from mpishard.torch.data import DataLoader
from mpishard.torch.files import load, save
from mpishard.torch.optimizer import optimizer
from mpishard.torch.sharded import check_replicas, no_sync, shard
from mpishard.torch.world import (
    barrier,
    init,
    mean_over_ranks,
    print,  # noqa: A004
    rank,
    world_size,
)

__all__ = [
    "DataLoader",
    "barrier",
    "check_replicas",
    "clip_grad_norm_",
    "convert_sync_batchnorm",
    "init",
    "load",
    "mean_over_ranks",
    "no_sync",
    "optimizer",
    "print",
    "rank",
    "save",
    "shard",
    "world_size",
]
