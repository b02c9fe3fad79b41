"""Windows that move over the rows and columns of an image."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mpishard.arrays import Array
from mpishard.nn.sizes import is_size

__all__ = ["Windows", "size_pair"]

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Windows:
    """Where the windows of a convolution or pooling lie; pairs are (rows, columns).

    Parameters
    ----------
    kernel, stride, padding : tuple of int
        Size of a window, distance of neighbours, and how many rows and columns of zeros
        surround the image on each side.
    """

    kernel: Pair
    stride: Pair
    padding: Pair = (0, 0)

    def counts(self, height: int, width: int) -> Pair:
        """How many windows fit along each dim: floor((size + 2 padding - kernel) / stride) + 1.

        Raises
        ------
        ValueError
            Where none does.
        """
        rows, columns = (
            (size + 2 * padding - kernel) // stride + 1
            for size, kernel, stride, padding in zip(
                (height, width), self.kernel, self.stride, self.padding, strict=True
            )
        )
        if rows < 1 or columns < 1:
            raise ValueError(
                f"a kernel of {self.kernel} does not fit images of {(height, width)} with "
                f"padding {self.padding}"
            )
        return rows, columns

    def views(self, image: Array, counts: Pair) -> Iterator[Array]:
        """For each position in a window, row by row, the elements that all windows have there.

        ``image`` has shape (..., height, width), padding included; each view has shape
        (..., *counts).
        """
        (rows, columns), (down, right) = counts, self.stride
        for i in range(self.kernel[0]):
            for j in range(self.kernel[1]):
                yield image[
                    ...,
                    i : i + down * (rows - 1) + 1 : down,
                    j : j + right * (columns - 1) + 1 : right,
                ]


def size_pair(owner: str, name: str, value: Any, least: int = 1) -> Pair:
    """``value``, an integer or a pair of them, as a pair (rows, columns).

    Raises
    ------
    ValueError
        For something else, or an integer below ``least``.
    """
    pair = tuple(value) if isinstance(value, tuple | list) else (value, value)
    if len(pair) != 2 or not all(is_size(size, least) for size in pair):
        raise ValueError(
            f"{owner} needs {name} as an integer >= {least} or a pair (rows, columns) of them, "
            f"got {value!r}"
        )
    return int(pair[0]), int(pair[1])
