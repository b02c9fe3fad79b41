"""The function that `minimize` minimizes, and the samples on which a rank evaluates it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from mpishard.base import Array, LeafLayout
from mpishard.communication import CommunicationBackend
from mpishard.data import Dataset, count_samples, take


class LeafSamples:
    """The part of the data that one rank evaluates, in leaves; one without ``gradient_leaves``.

    Parameters
    ----------
    leaves : sequence of (sequence of object, int)
        The arguments of the function besides theta for each leaf, cut along the first dim, and the
        leaf's number of samples. A function without data counts as one sample, on rank 0.
    """

    def __init__(self, leaves: Sequence[tuple[Sequence[object], int]]) -> None:
        self.leaves = leaves

    def __len__(self) -> int:
        return sum(count for _, count in self.leaves)

    def __getitem__(self, part: slice) -> LeafSamples:
        """Return the leaf whose samples are ``part``, without a copy."""
        # The engine asks for one leaf after the other, by its samples.
        ends = accumulate(count for _, count in self.leaves)
        for (arrays, count), end in zip(self.leaves, ends, strict=True):
            if (end - count, end) == (part.start, part.stop):
                return LeafSamples([(arrays, count)])
        raise ValueError(f"no leaf is {part}")

    @classmethod
    def of(
        cls,
        args: Sequence[Dataset],
        backend: CommunicationBackend,
        leaves: int | None,
        *,
        local_data: bool,
    ) -> LeafSamples:
        """Return this rank's samples: its part of data that all ranks have, or its own data."""
        if local_data:
            return cls([(tuple(args), count_samples(args[0]))])
        size = backend.world_size
        layout = LeafLayout(count_samples(args[0]) if args else 1, leaves or size, size)
        found = []
        for part in layout.slices(backend.rank):
            rows = np.arange(part.start, part.stop)
            # Arrays in memory are cut without a copy; of files each rank reads its part.
            arrays = [a[part] if isinstance(a, np.ndarray) else take(a, rows) for a in args]
            found.append((tuple(arrays), len(rows)))
        return cls(found)


class Objective:
    """``fun(theta, *samples)`` with the members of a black box.

    Parameters
    ----------
    fun : callable
        ``fun(theta, *arrays)`` returns mean loss and gradient, or the loss alone if ``jac`` is a
        function.
    jac : True or callable
        ``jac(theta, *arrays)`` returns the gradient.
    theta : Array
        First parameters, shape (n,).

    Attributes
    ----------
    described_as : str
        Name of the user's functions in messages.
    """

    def __init__(
        self, fun: Callable[..., object], jac: bool | Callable[..., Array], theta: Array
    ) -> None:
        self.described_as = " or ".join(
            getattr(given, "__name__", type(given).__name__)
            for given in (fun, jac)
            if callable(given)
        )
        self._fun = fun
        self._jac = jac
        self._theta = theta

    def get_parameters(self) -> Array:
        return self._theta

    def set_parameters(self, parameters: Array) -> None:
        # The engine passes a copy that it does not change.
        self._theta = parameters

    def compute_loss_and_gradients(self, x: LeafSamples, y: None) -> tuple[float, Array]:
        """Return the mean loss of the samples, of one leaf, and its gradient, shape (n,)."""
        ((arrays, _),) = x.leaves
        found = self._fun(self._theta, *arrays)
        if callable(self._jac):
            found = found, self._jac(self._theta, *arrays)
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise TypeError(
                f"{self.described_as} must return (loss, gradient), got a {type(found).__name__}"
            )
        # SciPy takes a list of numbers, too. The engine converts arrays of other libraries.
        loss, gradient = found
        return loss, np.asarray(gradient) if isinstance(gradient, list | tuple) else gradient
