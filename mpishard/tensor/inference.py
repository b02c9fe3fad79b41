"""Tensor-parallel predictions on the threads of one process."""

from __future__ import annotations

from collections.abc import Callable

from mpishard.base import Array
from mpishard.communication import CommunicationBackend, run_in_threads


class TensorParallelInference:
    """Predictions of a tensor-parallel model without MPI."""

    @staticmethod
    def forward_in_process(
        world_size: int,
        input: Array,  # noqa: A002 - the mirrored name
        build_rank: Callable[[CommunicationBackend], Callable[[Array], Array]],
    ) -> Array:
        """Predict with ``world_size`` thread-ranks, each with its part of the model.

        Parameters
        ----------
        world_size : int
            Number of ranks, 1 or more.
        input : Array
            Input of every rank's model.
        build_rank : callable
            ``build_rank(backend)`` makes a rank's part on the rank's own thread. It returns the
            function that maps input to output, such as the ``predict`` of a `mpishard.nn.Model`.

        Returns
        -------
        Array
            The output of rank 0.

        Raises
        ------
        ValueError
            If ``world_size`` is below 1.
        RuntimeError
            If a rank fails. The message names the rank, and its error is the cause.

        Examples
        --------
        >>> import numpy as np
        >>> from mpishard.nn import Model, Sequential
        >>> from mpishard.tensor import TensorParallelInference, TensorParallelTransformerBlock
        >>> def build_rank(backend):
        ...     block = TensorParallelTransformerBlock(backend, 8, 2, 16, causal=True)
        ...     return Model(Sequential({"block": block}), None, input_shape=(5, 8)).predict
        >>> x = np.random.default_rng(0).standard_normal((3, 5, 8))
        >>> alone, split = (
        ...     TensorParallelInference.forward_in_process(n, x, build_rank) for n in (1, 2)
        ... )
        >>> bool(np.allclose(alone, split, rtol=0, atol=1e-12))
        True
        """
        failed: dict[int, BaseException] = {}

        def forward(backend: CommunicationBackend) -> Array:
            try:
                return build_rank(backend)(input)
            except BaseException as error:
                # Each rank has a key of its own, so that the threads need no lock.
                failed[backend.rank] = error
                raise

        try:
            return run_in_threads(world_size, forward)[0]
        except Exception as error:
            # Other ranks raise a PeerError because of this rank. `run_in_threads` raises the first
            # failure, and only its rank is named.
            ranks = [rank for rank, own in failed.items() if own is error]
            if not ranks:
                raise
            raise RuntimeError(
                f"rank {ranks[0]} of {world_size} failed: {type(error).__name__}: {error}"
            ) from error
