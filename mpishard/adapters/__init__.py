"""Models that are not ours, as models of ours."""

from mpishard.adapters.function_model import FunctionModel
from mpishard.adapters.torch import TorchLoss, TorchModel

__all__ = ["FunctionModel", "TorchLoss", "TorchModel"]
