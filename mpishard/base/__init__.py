"""The ground floor: what every other room uses, and what knows no other room.

Begin with ``errors.py``, the tree of exceptions, and ``arrays.py``, one path for NumPy and CuPy.
``settings.py`` has every environment variable; ``arguments.py`` checks users' arguments;
``layout.py`` deals ranges to ranks; ``logs.py`` writes for all ranks. ``devices.py`` and
``kernels.py`` know GPUs, ``blas.py``, ``compilation.py``, ``bfloat16.py`` and ``onednn.py`` how a
processor multiplies.

Other rooms import names from here. A module is loaded when one of its names is first asked for, so
that a command line does not wait for NumPy.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass  # names

_MODULES = (
    "errors", "arguments", "layout", "logs", "arrays", "devices", "kernels", "compilation",
    "bfloat16", "onednn", "blas",
)  # fmt: skip
"""The modules whose names are offered, in the order in which they are searched."""


def __getattr__(name: str) -> object:
    """Import a module, or a name of one, on first use."""
    if importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")
    for module in _MODULES:
        found = vars(importlib.import_module(f"{__name__}.{module}"))
        if name in found:
            globals()[name] = found[name]
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
