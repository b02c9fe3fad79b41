"""Complex tensors as pairs of real numbers, which the flat vector has in their place.

A store, its units and the optimizers have real numbers only. The user's parameter stays complex: it
is a view of its pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch


def real_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor, or of the pairs of a complex one."""
    return (*tensor.shape, 2) if tensor.is_complex() else tuple(tensor.shape)


def real_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's real numbers as a vector, in the same memory if it is contiguous."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.reshape(-1)


def from_real_numbers(
    numbers: torch.Tensor, shape: Sequence[int], *, is_complex: bool
) -> torch.Tensor:
    """Return the tensor of this shape that has the memory of a contiguous tensor's real numbers."""
    if is_complex:
        # PyTorch's vector instructions end the process at other addresses.
        assert numbers.data_ptr() % (2 * numbers.itemsize) == 0
        numbers = torch.view_as_complex(numbers.view(-1, 2))
    return numbers.view(shape)


def complex_aligned(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return named parameters in an order in which each complex one begins at an even place.

    If there are any, real ones of odd sizes come last. Units then have even lengths up to the last
    complex parameter, so that its place in its unit is even, too.
    """
    has_complex = any(parameter.is_complex() for parameter in parameters.values())

    def comes_last(name: str) -> bool:
        parameter = parameters[name]
        return has_complex and not parameter.is_complex() and parameter.numel() % 2 == 1

    return {name: parameters[name] for name in sorted(parameters, key=comes_last)}
