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
    return torch.stack([place * angle.cos(), place * angle.sin()], dim=1), arm


mst.init()
torch.manual_seed(0)
layers = [nn.Linear(2, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 2)]
model = mst.shard(nn.Sequential(*layers), strategy="fsdp")  # line 1
optimizer = mst.optimizer(torch.optim.AdamW, model, lr=5e-3)  # line 2
points, arms = spirals(1200)
samples = torch.utils.data.TensorDataset(points, arms)
loader = mst.DataLoader(samples, batch_size=120, shuffle=True)
for _ in range(40):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        mst.clip_grad_norm_(model, 1.0)
        optimizer.step()
mst.save("runs/torch_loop", model, optimizer, step=400)
with torch.no_grad():
    right = (model(points).argmax(1) == arms).float().mean()
mst.print(f"{mst.world_size()} rank(s), fsdp: {right:.1%} of the points are right")
