"""The windows of images as the columns of matrices, a few samples at a time.

Shape suffixes: B samples of one chunk, C channels, H rows and W columns of the image, P rows and Q
columns of windows, S = P Q, K = C * (rows of the kernel) * (columns of the kernel).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from mpishard.arrays import Array, array_namespace, chunk_length
from mpishard.nn.windows import Pair, Windows

__all__ = ["WindowColumns"]

# The columns of a chunk may take so many times what a chunk of an element-wise pass takes: they
# are written once and read by a matrix product, which brings its own blocks into the cache.
_CHUNKS_AT_A_TIME = 4


class WindowColumns:
    """Scratch memory of one pass over a batch, used again for each chunk of it.

    Parameters
    ----------
    windows : Windows
        Kernel, stride and padding.
    images : Array
        Of shape (batch, C, H, W): what is cut into windows, or its gradient. Only its shape,
        dtype and device matter.
    counts : (int, int)
        Numbers P and Q of windows along each dim.
    """

    def __init__(self, windows: Windows, images: Array, counts: Pair) -> None:
        xp = array_namespace(images)
        batch, channels, height, width = images.shape
        self._windows = windows
        self._counts = counts
        self._channels = channels
        self._batch = batch
        self._size = channels * math.prod(windows.kernel) * math.prod(counts)
        limit = _CHUNKS_AT_A_TIME * chunk_length(images)
        self._samples = max(1, min(batch, limit // self._size))
        self._scratch = xp.empty(min(batch, self._samples) * self._size, dtype=images.dtype)
        down, right = windows.padding
        self._inner = (..., slice(down, down + height), slice(right, right + width))
        self._frame: Array | None = None
        if down or right:
            framed = (self._samples, channels, height + 2 * down, width + 2 * right)
            self._frame = xp.zeros(framed, dtype=images.dtype)

    def chunks(self) -> Iterator[slice]:
        """Slices of the batch that each fit the scratch memory; the last may reach beyond it."""
        for start in range(0, self._batch, self._samples):
            yield slice(start, start + self._samples)

    def empty(self, samples: int) -> Array:
        """Columns of shape (B, K, S) to be written."""
        return self._scratch[: samples * self._size].reshape(samples, -1, math.prod(self._counts))

    def by_sample(self, images_BCHW: Array) -> Array:
        """The columns of each sample, shape (B, K, S)."""
        columns = self.empty(images_BCHW.shape[0])
        self._gather(images_BCHW, columns.reshape(-1, self._channels, *self._rest()))
        return columns

    def by_row(self, images_BCHW: Array) -> Array:
        """The columns of all samples side by side, shape (K, B S)."""
        samples = images_BCHW.shape[0]
        (positions, *counts), flat = self._rest(), self._scratch[: samples * self._size]
        columns = flat.reshape(self._channels, positions, samples, *counts)
        self._gather(images_BCHW, columns.transpose(2, 0, 1, 3, 4))
        return flat.reshape(self._channels * positions, -1)

    def scatter(self, columns_BKS: Array, images_BCHW: Array) -> None:
        """Write into each pixel the sum of what columns hold for it: the transpose of gathering."""
        samples = images_BCHW.shape[0]
        columns = columns_BKS.reshape(samples, self._channels, *self._rest())
        framed = images_BCHW if self._frame is None else self._frame[:samples]
        framed.fill(0)
        for position, view in enumerate(self._windows.views(framed, self._counts)):
            view[...] += columns[:, :, position]
        if self._frame is not None:
            images_BCHW[...] = framed[self._inner]

    def _gather(self, images_BCHW: Array, columns: Array) -> None:
        """Fill ``columns``, a view of shape (B, C, positions, P, Q)."""
        framed = images_BCHW
        if self._frame is not None:
            framed = self._frame[: images_BCHW.shape[0]]
            framed[self._inner] = images_BCHW
        for position, view in enumerate(self._windows.views(framed, self._counts)):
            columns[:, :, position] = view

    def _rest(self) -> tuple[int, int, int]:
        """Positions in a window, P and Q."""
        return (math.prod(self._windows.kernel), *self._counts)
