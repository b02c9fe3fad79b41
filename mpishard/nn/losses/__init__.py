"""Losses: weighted sums, so that averages over ranks and micro-batches come out right.

Begin with ``regression.py``: the interface `Loss`, and MSE, MAE and Huber. ``cross_entropy.py``
has the losses of classifiers. This chapter may import the layers.
"""
