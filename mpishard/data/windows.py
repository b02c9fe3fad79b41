"""A sequence of tokens seen as samples of a language model."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpishard.arrays import Array, require_plain

__all__ = ["TokenWindows"]


class TokenWindows:
    """Every window of ``context_length`` consecutive tokens, without copying the tokens.

    Window i starts at token ``i * stride + offset``. Inputs are the windows of offset 0 and
    targets those of offset 1; both have the same length, for a window is counted where the token
    behind it exists.

    Parameters
    ----------
    tokens : array of int
        Shape (n,). A memory map stays on disk.
    context_length : int
        Tokens of a window, 1 or more.
    offset : int
        0 for inputs, 1 for the tokens that follow them.
    stride : int
        Distance between windows: 1 for training, ``context_length`` to see each token once.

    Raises
    ------
    TypeError
        Where ``tokens`` are not a NumPy array of integers.
    ValueError
        Where they are not 1-D or fewer than ``context_length + 1``, or another argument is out
        of range.

    Examples
    --------
    >>> tokens = np.arange(10, 16)
    >>> inputs, targets = TokenWindows(tokens, 3), TokenWindows(tokens, 3, offset=1)
    >>> len(inputs)
    3
    >>> inputs[np.array([2, 0])].tolist()
    [[12, 13, 14], [10, 11, 12]]
    >>> targets[np.array([2, 0])].tolist()
    [[13, 14, 15], [11, 12, 13]]
    """

    def __init__(
        self,
        tokens: Array,
        context_length: int,
        *,
        offset: int = 0,
        stride: int = 1,
    ) -> None:
        require_plain(tokens)
        if not isinstance(tokens, np.ndarray) or tokens.dtype.kind not in "iu":
            kind = tokens.dtype if isinstance(tokens, np.ndarray) else type(tokens).__qualname__
            raise TypeError(f"tokens must be a NumPy array of integers, got {kind}")
        if tokens.ndim != 1:
            raise ValueError(f"tokens must be 1-D, got shape {tokens.shape}")
        if context_length < 1:
            raise ValueError(f"context_length must be 1 or more, got {context_length}")
        if offset not in (0, 1):
            raise ValueError(f"offset must be 0 (inputs) or 1 (targets), got {offset}")
        if stride < 1:
            raise ValueError(f"stride must be 1 or more, got {stride}")
        if len(tokens) <= context_length:
            raise ValueError(
                f"{len(tokens)} tokens hold no window of context_length {context_length} and the "
                f"token behind it; at least {context_length + 1} are needed"
            )
        self.context_length = context_length
        self.offset = offset
        self.stride = stride
        last = len(tokens) - 1 + offset
        view = np.lib.stride_tricks.sliding_window_view(tokens[offset:last], context_length)
        self._windows = view[::stride]

    def __len__(self) -> int:
        return len(self._windows)

    @property
    def shape(self) -> tuple[int, int]:
        """(number of windows, context_length)."""
        return len(self), self.context_length

    def __getitem__(self, indices: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Windows as a new int64 array: shape (n, context_length) for n indices or a slice."""
        windows: np.ndarray[Any, np.dtype[np.int64]] = self._windows[indices].astype(np.int64)
        return windows

    def __repr__(self) -> str:
        return (
            f"TokenWindows({len(self)} windows of {self.context_length} tokens, "
            f"offset={self.offset}, stride={self.stride})"
        )
