"""A PyTorch loop, sharded by two lines: a network learns which of two spirals a point lies on.

mpishard run -n 2 examples/train_torch_loop.py    # two ranks; the same result as of one
"""

import math

import mpishard.torch as mst
import torch  # noqa: TID253
from torch import nn  # noqa: TID253


def spirals(samples):
    place, arm = torch.linspace(0.1, 1, samples), torch.arange(samples) % 2
    angle = math.pi * (3 * place + arm)
    points = place[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
    return torch.utils.data.TensorDataset(points, arm)


def main():
    mst.init()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 2)
    )
    model = mst.shard(model, strategy="fsdp")  # line 1
    optimizer = mst.optimizer(torch.optim.AdamW, model, lr=5e-3)  # line 2
    data = mst.DataLoader(spirals(1200), batch_size=120, shuffle=True)
    for _ in range(40):
        for points, arms in data:
            loss = nn.functional.cross_entropy(model(points), arms)
            optimizer.zero_grad()
            loss.backward()
            mst.clip_grad_norm_(model, 1.0)
            optimizer.step()
    mst.save("runs/torch_loop", model, optimizer, step=400)
    with torch.no_grad():
        points, arms = spirals(1200).tensors
        right = (model(points).argmax(1) == arms).float().mean()
    mst.print(f"{mst.world_size()} rank(s), fsdp: {right:.1%} of the points are right")


if __name__ == "__main__":
    main()
