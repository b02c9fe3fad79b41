"""Models in the formats of other programs.

Begin with ``rank_zero.py``, which writes a plain or sharded model to a file: rank 0 writes it, and
all ranks succeed or all raise. ``onnx.py`` writes the computation graph of a model of `mpishard.nn`
as ONNX. ``gpt2.py`` writes and reads the parameters of a `GPT` under the names that PyTorch
programs use. This room imports nn, models and checkpoint. onnx is imported when it is needed.
"""

from mpishard.exports.gpt2 import load_gpt2, save_gpt2
from mpishard.exports.onnx import export_onnx

__all__ = ["export_onnx", "load_gpt2", "save_gpt2"]
