"""Models of other libraries, and functions, as models that can be sharded.

Begin with ``function_model.py``: a function that returns loss and gradient. ``autograd.py``
differentiates a function in NumPy, and ``jax.py`` one in JAX. ``torch.py`` trains a PyTorch module,
with parts of `mpishard.torch`. All three compute in memory that mpishard chooses:
``placed_vector.py`` has their common bases. ``parameter_tree.py`` converts nested dicts and lists
of arrays to a flat vector. ``optax.py`` makes update rules of optax transformations. This room
imports contracts, sharding, checkpoint, models, optimizers and torch.
"""

from mpishard.adapters.autograd import AutogradModel
from mpishard.adapters.function_model import FunctionModel
from mpishard.adapters.jax import JaxModel
from mpishard.adapters.optax import OptaxRule
from mpishard.adapters.torch import TorchLoss, TorchModel

__all__ = ["AutogradModel", "FunctionModel", "JaxModel", "OptaxRule", "TorchLoss", "TorchModel"]
