"""Gradients and parameters of a script's first steps, which ``mpishard verify`` compares."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpishard import settings

__all__ = ["record"]


def record(kind: str, made: Any) -> None:
    """Write this rank's parts of a step's "gradients" or "parameters" if verify asks for them.

    Raises
    ------
    SystemExit
        After the last step to compare: the ranks end there together.
    """
    verification = settings.verification()
    if verification is None:
        return
    folder, steps = verification
    parts = made._mpishard_parts.values()
    owners = list(dict.fromkeys(part.owner for part in parts))
    rank = owners[0].backend.rank
    step = 1 + sum(1 for _ in folder.glob(f"{kind}-*-{rank}.npz"))
    arrays: dict[str, Any] = {}
    for part in parts:
        tensor = part.tensor if kind == "parameters" else part.tensor.grad
        own = part.in_parameter
        key = f"{owners.index(part.owner)}/{part.entry.name}/{own.start}/{own.stop}"
        arrays[key] = np.empty(0) if tensor is None else tensor.detach().numpy().reshape(-1)
    np.savez(folder / f"{kind}-{step}-{rank}.npz", **arrays)
    if kind == "parameters" and step == steps:
        raise SystemExit(0)
