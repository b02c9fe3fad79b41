"""Models that are not ours, as models of ours."""

from mpishard.adapters.function_model import FunctionModel

__all__ = ["FunctionModel"]
