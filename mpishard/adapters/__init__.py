"""Models that are not ours, as models of ours."""

from mpishard.adapters.autograd import AutogradModel
from mpishard.adapters.function_model import FunctionModel
from mpishard.adapters.torch import TorchLoss, TorchModel

__all__ = ["AutogradModel", "FunctionModel", "TorchLoss", "TorchModel"]
