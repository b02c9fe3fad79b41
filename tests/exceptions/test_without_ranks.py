"""Mistakes with plain models and optimizers, which communicate nothing."""

from __future__ import annotations

import numpy as np
import pytest

from mpishard.errors import MissingInterfaceError, MissingLossError
from mpishard.nn import MLP, Linear, Model, Sequential
from mpishard.optimizers import SGD, Adam

X, Y = np.ones((3, 5)), np.ones((3, 2))

# fmt: off
PLAIN = [
    ("1.1", "set_parameters: None", TypeError, "array, got NoneType",
     lambda m: m.set_parameters(None)),
    ("1.1", "set_parameters: length", ValueError, r"26 parameters; got a vector of shape \(3,\)",
     lambda m: m.set_parameters(np.ones(3))),
    ("1.1", "with_parameters: length", ValueError, r"26 parameters; .*\(3,\)",
     lambda m: m.with_parameters(np.ones(3))),
    ("1.1", "apply_gradients: length", ValueError, r"26 parameters; .*\(3,\)",
     lambda m: m.apply_gradients(np.ones(3), 0.1)),
    ("1.1", "set_parameter_chunks: too few", ValueError, "ended before linear0.weight|shape",
     lambda m: m.set_parameter_chunks([])),
    ("1.1", "compute_gradients: no loss", MissingLossError, "pass loss_function",
     lambda m: Model(Sequential({"linear": Linear(5, 2)}), None, input_shape=(5,))
               .compute_gradients(X, Y)),
    ("1.1", "compute_gradients: what is no loss", TypeError, "ILossFunction, got str",
     lambda m: m.compute_gradients(X, Y, "mse")),
    ("1.1", "predict: None", TypeError, "array, got NoneType", lambda m: m.predict(None)),
    ("1.1", "features", MissingInterfaceError, "MLP does not implement IFeatureAware",
     lambda m: m.get_active_feature_indices()),
    ("1.1", "feature importance", RuntimeError, "MLP does not implement IFeatureImportance",
     lambda m: m.get_feature_importance()),
    ("1.1", "export_computation_graph: None", TypeError, "must be a list, got None",
     lambda m: m.export_computation_graph(None)),
    ("1.1", "deserialize: None", TypeError, "needs bytes, got NoneType",
     lambda m: m.deserialize(None)),
    ("1.1", "deserialize: something else", ValueError, "4 bytes are not those of serialize",
     lambda m: m.deserialize(b"junk")),
    ("1.1", "deserialize: another model's", ValueError, "do not fit the model",
     lambda m: m.deserialize(MLP([2, 2]).serialize())),
    *[("1.1", f"{name}: blank", ValueError, "must not be blank",
       lambda m, name=name: getattr(m, name)(" ")) for name in ("save_model", "load_model")],
    ("1.1", "load_model: nothing there", FileNotFoundError, "there is no checkpoint",
     lambda m: m.load_model("nothing/here")),
    *[("1.1", f"{name}: layer {index}", ValueError, rf"layer {index} is outside \[0, 3\)",
       lambda m, name=name, index=index: getattr(m, name)(index))
      for name in ("get_layer_info", "validate_partition_point") for index in (-1, 3)],
    *[("1.1", f"extract_sub_model: {start, end}", ValueError, "outside the 3 layers",
       lambda m, start=start, end=end: m.extract_sub_model(start, end))
      for start, end in ((2, 2), (-1, 2), (0, 4))],
    ("1.1", "compute_weight_gradients: cached twice", ValueError, "serves once",
     lambda m: [m.compute_weight_gradients(X, Y, c)
                for c in [m.compute_activation_gradients(X, Y)[1]] * 2]),
    ("1.2", "set_model: None", TypeError, "needs a model, got None",
     lambda m: SGD().set_model(None)),
    ("1.2", "update_parameters: shapes", ValueError, r"shape \(3,\), gradients \(2,\)",
     lambda m: SGD().update_parameters(np.ones(3), np.ones(2))),
    ("1.2", "update_parameters: layers", ValueError, "they must be the same",
     lambda m: SGD().update_parameters([np.ones(3)], [np.ones(3)] * 2)),
    ("1.2", "update_parameters: integers", TypeError, "one float dtype, got int64",
     lambda m: SGD().update_parameters(np.arange(3), np.arange(3))),
    ("1.2", "apply_gradients: no model", TypeError, "needs a model last, got NoneType",
     lambda m: SGD().apply_gradients(np.ones(3), None)),
    ("1.2", "apply_gradients: length", ValueError, r"shape \(26,\), gradients \(3,\)",
     lambda m: SGD().apply_gradients(np.ones(3), m)),
    ("1.2", "reverse_update: nothing to reverse", RuntimeError, "no update to reverse",
     lambda m: SGD().reverse_update(np.ones(3), np.ones(3))),
    ("1.2", "deserialize: None", TypeError, "needs bytes, got NoneType",
     lambda m: SGD().deserialize(None)),
    ("1.2", "deserialize: another rule's", ValueError, "of SGD, not of Adam",
     lambda m: Adam().deserialize(SGD().serialize())),
    ("1.2", "from_options: None", TypeError, "OptimizationAlgorithmOptions, got NoneType",
     lambda m: SGD.from_options(None)),
    ("1.2", "optimize: None", TypeError, "got NoneType", lambda m: SGD().optimize(None)),
]
# fmt: on


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [pytest.param(*row, id=f"{section} {condition}") for section, condition, *row in PLAIN],
)
def test_mistakes_without_ranks(error, message, call):
    model = MLP([5, 3, 2])
    before = model.get_parameters()
    with pytest.raises(error, match=message):
        call(model)
    assert model.get_parameters().tobytes() == before.tobytes()
