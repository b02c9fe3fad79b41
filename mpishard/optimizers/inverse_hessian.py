"""The inverse Hessian that L-BFGS leaves behind, over history vectors that stay sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from mpishard.arrays import Array, array_namespace
from mpishard.communication import CommunicationBackend
from mpishard.errors import NotInitializedError
from mpishard.layout import ShardLayout

_LARGEST = 1 << 30  # bytes of the matrix that `todense` makes


class InverseHessian:
    """The approximate inverse Hessian of L-BFGS, as ``scipy.optimize.LbfgsInvHessProduct``.

    Each rank holds its part of the pairs of steps s and changes y of the gradient. The matrix is
    SciPy's of the same pairs: the updates of Nocedal and Wright, "Numerical Optimization", 2006,
    equation 7.16, on the identity. It includes the last iteration's pair, which the result of
    ``scipy.optimize.minimize`` leaves out. A product is the two loops of algorithm 7.4: one small
    all-reduce for each vector s and y, and one all-gather of the result. **Its calls are
    collective**: every rank makes them, with the same argument, while the backend of `minimize`
    lives. It holds the 2m n / N numbers of the history for as long as it lives.
    ``scipy.sparse.linalg.aslinearoperator`` takes it; `pickle` and `copy.deepcopy` do not, because
    each rank has only its part.

    Parameters
    ----------
    backend : CommunicationBackend
        The ranks.
    steps, changes : sequence of Array
        This rank's part of each s and y, the oldest first; ``ShardLayout(n, ranks)`` cuts.
    length : int
        Number n of unknowns.

    Attributes
    ----------
    shape : (int, int)
        (n, n).
    dtype : numpy.dtype
        float64, in which products are computed.
    n_corrs : int
        Number of pairs.

    Examples
    --------
    >>> import mpishard
    >>> import numpy as np
    >>> def bowl(theta):
    ...     return theta @ theta, 2 * theta
    >>> with mpishard.init() as backend:
    ...     result = mpishard.minimize(bowl, np.array([3.0]), backend=backend)
    ...     result.hess_inv @ np.array([2.0])
    array([1.])
    """

    ndim = 2

    def __init__(
        self,
        backend: CommunicationBackend,
        steps: Sequence[Array],
        changes: Sequence[Array],
        length: int,
    ) -> None:
        self.shape = length, length
        self.dtype = np.dtype(np.float64)
        self.n_corrs = len(steps)
        self.steps = steps
        self.changes = changes
        self._backend = backend
        self._part = ShardLayout(length, backend.world_size).slice(backend.rank)
        own = np.array([float(_wide(s) @ _wide(y)) for s, y in zip(steps, changes, strict=True)])
        self._curvatures = backend.all_reduce(own)

    def matvec(self, x: Any) -> Array:
        """Return the product with a vector of shape (n,) or (n, 1), in its shape. Collective."""
        n = self.shape[0]
        x = _array(x)
        if x.shape not in ((n,), (n, 1)):
            raise ValueError(f"matvec takes a vector of shape ({n},) or ({n}, 1), got {x.shape}")
        return self._product(x.reshape(n, 1)).reshape(x.shape)

    rmatvec = matvec  # the matrix is symmetric

    def matmat(self, x: Any) -> Array:
        """Return the product with k columns, shape (n, k). Collective."""
        x = _array(x)
        if x.ndim != 2 or x.shape[0] != self.shape[0]:
            raise ValueError(f"matmat takes columns of shape ({self.shape[0]}, k), got {x.shape}")
        return self._product(x)

    rmatmat = matmat

    def dot(self, x: Any) -> Array:
        """Return the product with a vector or with columns; also written ``@``. Collective."""
        x = _array(x)
        return self.matmat(x) if x.ndim == 2 else self.matvec(x)

    __matmul__ = dot

    def todense(self) -> Array:
        """Return the matrix, shape (n, n), on every rank. Collective.

        Raises
        ------
        ValueError
            For a matrix of more than 1 GiB, on every rank, before anything is communicated.
        """
        n = self.shape[0]
        if n * n * self.dtype.itemsize > _LARGEST:
            raise ValueError(
                f"todense makes a matrix of {n:,} x {n:,} numbers, {n * n * 8 / 2**30:,.1f} GiB on "
                "every rank, and at most 1 GiB is allowed: multiply by vectors, hess_inv @ x"
            )
        return self._product(np.eye(n))

    def _product(self, x: Array) -> Array:
        backend = self._backend
        if not backend.is_initialized:
            raise NotInitializedError(
                f"{backend.describe()} has ended, over which hess_inv communicates: multiply "
                "before, or keep hess_inv.todense()"
            )
        pairs = list(zip(self.steps, self.changes, 1 / self._curvatures, strict=True))
        xp = array_namespace(self.steps[0] if pairs else x)
        found = xp.array(x[self._part], dtype=self.dtype)  # a copy, which the loops change
        alphas = []
        # Float32 vectors are widened one at a time.
        for step, change, rho in reversed(pairs):
            alphas.append(rho * backend.all_reduce(_wide(step) @ found))
            found -= _wide(change)[:, None] * alphas[-1]
        for step, change, rho in pairs:
            beta = rho * backend.all_reduce(_wide(change) @ found)
            found += _wide(step)[:, None] * (alphas.pop() - beta)
        return backend.all_gather(found)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"hess_inv communicates over {self._backend.describe()}, and cannot be pickled or "
            "copied: keep result.hess_inv.todense(), which is collective, or del result.hess_inv "
            "before the result is pickled"
        )

    def __repr__(self) -> str:
        n = self.shape[0]
        return f"<{n}x{n} InverseHessian of {self.n_corrs} pairs on {self._backend.describe()}>"


def _array(x: Any) -> Array:
    return x if hasattr(x, "dtype") else np.array(x)


def _wide(vector: Array) -> Array:
    return vector.astype(np.float64, copy=False)
