"""A row of costs cut into runs, of which the dearest is as cheap as can be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["balanced_cuts"]


def balanced_cuts(
    costs: Sequence[float], num_runs: int, allowed: Sequence[int] | None = None
) -> list[int]:
    """Where to cut ``costs`` so that the largest sum of a run is as small as can be.

    By dynamic programming: the best cut of the first n costs into k runs is one of the best cuts
    of fewer costs into k - 1 runs, and a last run. Of equally good last cuts the earliest is
    taken, so that of equal stages the last are the longer ones.

    Parameters
    ----------
    costs : sequence of float
        0 or more each; at least one.
    num_runs : int
        How many runs; with fewer costs or allowed cuts, as many runs as there can be.
    allowed : sequence of int, optional
        Before which costs a cut may be, in order; default: before any but the first.

    Returns
    -------
    list of int
        Before which costs the cuts are, increasing. No run is empty.
    """
    places = np.arange(1, len(costs)) if allowed is None else np.asarray(allowed, np.int64)
    num_cuts = min(num_runs - 1, len(places))
    # Nodes: the beginning, the places of cuts, the end. sums[j] is the cost of all before it.
    nodes = np.concatenate([[0], places, [len(costs)]])
    sums = np.concatenate([[0.0], np.cumsum(costs)])[nodes]
    runs = np.where(
        np.arange(len(nodes))[:, None] < np.arange(len(nodes)), sums - sums[:, None], np.inf
    )
    best = runs[0]  # of one run up to each node
    choices = []
    for _ in range(num_cuts):
        dearest = np.maximum(best[:, None], runs)
        choices.append(dearest.argmin(axis=0))
        best = dearest.min(axis=0)
    cuts: list[int] = []
    node = len(nodes) - 1
    for choice in reversed(choices):
        node = int(choice[node])
        cuts.append(int(nodes[node]))
    return cuts[::-1]
