"""Writes torch_reference.json: what PyTorch's optimizers and schedules do in 20 steps.

Run by hand, where PyTorch is installed: ``python tests/optimizers/make_reference.py``. The tests
that compare with the file need no PyTorch: the problem stands there, too.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

STEPS = 20
LENGTH = 6
FILE = Path(__file__).with_name("torch_reference.json")

RULES = {
    "SGD": ("SGD", {"lr": 0.03}),
    "SGD, momentum": ("SGD", {"lr": 0.03, "momentum": 0.9}),
    "SGD, decay": ("SGD", {"lr": 0.03, "momentum": 0.9, "weight_decay": 0.1}),
    "SGD, Nesterov": (
        "SGD", {"lr": 0.03, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    "Adagrad": ("Adagrad", {"lr": 0.1, "eps": 1e-10}),
    "Adagrad, decay": ("Adagrad", {"lr": 0.1, "eps": 1e-3, "weight_decay": 0.1}),
    "RMSprop": ("RMSprop", {"lr": 0.01, "alpha": 0.9, "eps": 1e-8}),
    "RMSprop, momentum": (
        "RMSprop", {"lr": 0.01, "alpha": 0.8, "eps": 1e-3, "momentum": 0.7, "weight_decay": 0.1},
    ),
    "RMSprop, centered": (
        "RMSprop", {"lr": 0.01, "alpha": 0.9, "eps": 1e-8, "centered": True, "weight_decay": 0.1},
    ),
    "RMSprop, all": (
        "RMSprop", {"lr": 0.01, "alpha": 0.9, "eps": 1e-8, "centered": True, "momentum": 0.7},
    ),
    "Adam": ("Adam", {"lr": 0.01}),
    "Adam, decay": ("Adam", {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}),
    "AdamW": ("AdamW", {"lr": 0.01, "weight_decay": 0.0}),
    "AdamW, decay": ("AdamW", {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.2}),
}  # fmt: skip

ONE_CYCLES = {
    "cosine": {"max_lr": 0.1, "total_steps": 25},
    "linear, three phases": {
        "max_lr": 0.3, "total_steps": 25, "pct_start": 0.4, "anneal_strategy": "linear",
        "div_factor": 10.0, "final_div_factor": 100.0, "three_phase": True,
    },
    "cosine, three phases": {
        "max_lr": 0.3, "total_steps": 24, "pct_start": 0.45, "three_phase": True,
    },
}  # fmt: skip


def problem() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where to begin, shape (LENGTH,), curvatures, and noise of shape (STEPS, LENGTH).

    The gradient of a step is ``curvatures * theta + noise[step]``, of sizes from 1e-4 to 1.
    """
    place = np.arange(LENGTH)
    noise = np.sin(1.7 * np.arange(1, STEPS + 1)[:, None] + place) * 10.0 ** -(place % 4)
    return np.linspace(-1, 1.5, LENGTH), 0.5**place, noise


def main() -> None:
    """Run PyTorch and write the file."""
    import torch

    start, curvatures, noise = (torch.tensor(values) for values in problem())
    found = {
        "torch": torch.__version__,
        "start": start.tolist(),
        "curvatures": curvatures.tolist(),
        "noise": noise.tolist(),
        "rules": {},
        "one_cycle": {},
    }
    for label, (name, settings) in RULES.items():
        theta = start.clone().requires_grad_()
        optimizer = getattr(torch.optim, name)([theta], **settings)
        for step in range(STEPS):
            theta.grad = curvatures * theta.detach() + noise[step]
            optimizer.step()
        found["rules"][label] = {"rule": name, "settings": settings, "theta": theta.tolist()}
    for label, settings in ONE_CYCLES.items():
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, **settings, cycle_momentum=False)
        rates = []
        for _ in range(settings["total_steps"]):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if len(rates) < settings["total_steps"]:
                schedule.step()
        found["one_cycle"][label] = {"settings": settings, "rates": rates}
    FILE.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
