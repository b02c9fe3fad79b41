"""Models of other libraries, and functions, as models that can be sharded.

Begin with ``function_model.py``: one function that returns loss and gradient. ``autograd.py``
differentiates a NumPy function and ``jax.py`` one in JAX, ``torch.py`` holds a PyTorch module, by
the parts of `mpishard.torch`; all three compute on memory that mpishard chooses
(``placed_vector.py``, with what the first two share). ``parameter_tree.py`` turns nested dicts and
lists of arrays into a flat vector. ``optax.py`` makes update rules of optax transformations. This
room imports contracts, sharding, checkpoint, models, optimizers and torch.
"""

from mpishard.adapters.autograd import AutogradModel
from mpishard.adapters.function_model import FunctionModel
from mpishard.adapters.jax import JaxModel
from mpishard.adapters.optax import OptaxRule
from mpishard.adapters.torch import TorchLoss, TorchModel

__all__ = ["AutogradModel", "FunctionModel", "JaxModel", "OptaxRule", "TorchLoss", "TorchModel"]
