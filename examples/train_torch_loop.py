"""A PyTorch loop of one's own, sharded by two lines.

A network learns which of two spirals a point lies on:

    python examples/train_torch_loop.py                      # one process
    mpishard run -n 2 examples/train_torch_loop.py           # two ranks; the same result
    mpishard run -n 2 examples/train_torch_loop.py --strategy ddp
"""

import argparse
import math

import mpishard.torch as mst
import torch  # noqa: TID253
from torch import nn  # noqa: TID253


def spirals(samples: int) -> torch.utils.data.TensorDataset:
    """Points on two spirals, and which of them each lies on."""
    place = torch.linspace(0.1, 1, samples)
    arm = torch.arange(samples) % 2
    angle = 3 * math.pi * place + math.pi * arm
    points = place[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
    return torch.utils.data.TensorDataset(points, arm)


def main(arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    mst.init()
    model = nn.Sequential(
        nn.Linear(2, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 2)
    )
    model = mst.shard(model, strategy=arguments.strategy)
    optimizer = mst.optimizer(torch.optim.AdamW, model, lr=5e-3)
    for _ in range(arguments.epochs):
        for points, arms in mst.DataLoader(spirals(1200), batch_size=120, shuffle=True):
            loss = nn.functional.cross_entropy(model(points), arms)
            optimizer.zero_grad()
            loss.backward()
            mst.clip_grad_norm_(model, 1.0)
            optimizer.step()
    mst.save("runs/torch_loop", model, optimizer, step=10 * arguments.epochs)
    with torch.no_grad():
        points, arms = spirals(1200).tensors
        right = (model(points).argmax(1) == arms).float().mean()
    mst.print(
        f"{mst.world_size()} rank(s), {arguments.strategy}: {right:.1%} of the points are right"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", choices=["ddp", "zero1", "zero2", "fsdp"], default="fsdp")
    parser.add_argument("--epochs", type=int, default=30)
    main(parser.parse_args())
