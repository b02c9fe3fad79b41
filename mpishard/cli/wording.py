"""Numbers as the commands say them: counts, bytes, times."""

from __future__ import annotations

import re

__all__ = ["bytes_text", "counted", "milliseconds", "parse_bytes"]


def milliseconds(seconds: float) -> str:
    """A time as text, with as many digits as can be believed."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.{2 if seconds < 0.1 else 1}f} ms"


def counted(number: int, noun: str) -> str:
    """``1 layer``, ``2 layers``, ``3 batches``."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"


def bytes_text(nbytes: int | None) -> str:
    """A number of bytes as text: exact below 1 KiB, then in KiB, MiB or GiB."""
    if nbytes is None:
        return ""
    amount, units = float(nbytes), iter(("B", "KiB", "MiB", "GiB"))
    unit = next(units)
    while amount >= 1024 and unit != "GiB":
        amount, unit = amount / 1024, next(units)
    return f"{amount:.4g} {unit}"


def parse_bytes(text: str) -> int:
    """The number of bytes that ``8B``, ``64KiB``, ``1.5MiB`` or ``2GiB`` says.

    Raises
    ------
    ValueError
        For any other text, and for less than 1 byte.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB)?", text.strip())
    number = 0.0
    if found is not None:
        number = float(found[1]) * 1024 ** ("B", "KiB", "MiB", "GiB").index(found[2] or "B")
    if number < 1:
        raise ValueError(f"a size is a number with B, KiB, MiB or GiB, as 64KiB; got {text!r}")
    return int(number)
