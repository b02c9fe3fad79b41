"""The members that a model inherits from the interfaces, and errors for missing ones."""

import io
from datetime import UTC

import numpy as np
import pytest

import mpishard as ms
from mpishard.contracts import (
    DynamicShapeInfo,
    IFullModel,
    ILayeredModel,
    ILossFunction,
    IShardedModel,
    LayerCategory,
    ModelMetadata,
    ShardedModel,
)
from mpishard.errors import MissingInterfaceError, MissingMemberError, MpishardError


class Least(IFullModel):
    """The members without which there is no model."""

    def __init__(self, *values: float) -> None:
        self.theta = np.array(values, float)

    def train(self, x, y):
        return 0.0

    def predict(self, x):
        return x @ self.theta

    def compute_gradients(self, x, y, loss_function=None):
        return np.ones_like(self.theta)

    @property
    def parameter_count(self):
        return self.theta.size

    def get_parameters(self):
        return self.theta.copy()

    def set_parameters(self, parameters):
        if parameters.shape != self.theta.shape:
            raise ValueError(f"got {parameters.shape}")
        self.theta[...] = parameters

    def serialize(self):
        return self.theta.tobytes()

    def deserialize(self, data):
        self.theta = np.frombuffer(data).copy()

    def save_model(self, path):
        path.write_bytes(self.serialize())

    def load_model(self, path):
        self.deserialize(path.read_bytes())


def function_model() -> ms.FunctionModel:
    return ms.FunctionModel(lambda theta, x, y: (0.0, 0 * theta), np.arange(3.0))


def test_an_interface_cannot_be_made_without_its_members():
    for interface in (IFullModel, ILayeredModel, IShardedModel, ILossFunction):
        with pytest.raises(TypeError, match="abstract"):
            interface()
    assert ShardedModel is IShardedModel
    assert ms.contracts.IFullModel is IFullModel


@pytest.mark.parametrize(
    ("ask", "interface"),
    [
        (lambda m: m.get_active_feature_indices(), "IFeatureAware"),
        (lambda m: m.set_active_feature_indices([0]), "IFeatureAware"),
        (lambda m: m.is_feature_used(0), "IFeatureAware"),
        (lambda m: m.get_feature_importance(), "IFeatureImportance"),
    ],
)
@pytest.mark.parametrize("make", [lambda: Least(1, 2), lambda: ms.nn.MLP([2, 2]), function_model])
def test_features_of_a_model_without_features(ask, interface, make):
    model = make()
    with pytest.raises(RuntimeError, match=f"{type(model).__name__} does not .* {interface}") as e:
        ask(model)
    assert not isinstance(e.value, NotImplementedError)
    assert isinstance(e.value, MissingInterfaceError)


def test_the_error_of_a_missing_member_is_of_both_kinds():
    for kind in (NotImplementedError, RuntimeError, MissingInterfaceError, MpishardError):
        assert issubclass(MissingMemberError, kind)


@pytest.mark.parametrize("make", [lambda: Least(1, 2), function_model])
def test_a_black_box_has_no_graph(make):
    model = make()
    assert model.supports_jit_compilation is False
    with pytest.raises(TypeError, match="got None"):
        model.export_computation_graph(None)
    with pytest.raises(NotImplementedError, match="does not implement IJitCompilable"):
        model.export_computation_graph([])


def test_members_that_follow_from_the_required_ones():
    model = Least(1, 2, 3)
    assert model.supports_parameter_initialization
    assert not Least().supports_parameter_initialization
    assert model.default_loss_function is None
    assert (model.get_input_shape(), model.get_output_shape()) == ([], [])
    assert model.get_dynamic_shape_info() == DynamicShapeInfo((), ())
    metadata = model.get_model_metadata()
    assert (metadata.name, metadata.model_type) == ("Least", "Least")
    vector = np.ones(3)
    assert model.sanitize_parameters(vector) is vector
    with model as entered:
        assert entered is model
    model.close()
    model.close()


def test_gradients_are_applied_downhill():
    model = Least(1, 2, 3)
    model.apply_gradients(np.array([1.0, 0.0, -1.0]), 0.5)
    assert model.theta.tolist() == [0.5, 2, 3.5]
    with pytest.raises(ValueError, match="has 3 parameters; got gradients of shape"):
        model.apply_gradients(np.ones(1), 0.5)


def test_one_chunk_unless_the_model_overrides_it():
    model = Least(1, 2, 3)
    (chunk,) = model.get_parameter_chunks()
    chunk[0] = 7
    assert model.theta[0] == 1
    model.set_parameter_chunks(iter([np.array([[4.0], [5]]), np.array([6.0])]))
    assert model.theta.tolist() == [4, 5, 6]
    for chunks, error in (
        ([], ValueError),
        ([np.ones(2)], ValueError),
        ([[1.0, 2, 3]], TypeError),
    ):
        with pytest.raises(error):
            model.set_parameter_chunks(chunks)
    assert model.theta.tolist() == [4, 5, 6]


def test_copies():
    model = Least(1, 2)
    shared, own, other = model.clone(), model.deep_copy(), model.with_parameters(np.array([8.0, 9]))
    model.set_parameters(np.zeros(2))
    assert [m.theta.tolist() for m in (shared, own, other)] == [[0, 0], [1, 2], [8, 9]]


def test_several_states_in_one_stream():
    stream = io.BytesIO()
    stream.write(b"head")
    Least(1, 2).save_state(stream)
    Least(3).save_state(stream)
    stream.write(b"tail")
    stream.seek(4)
    first, second = Least(), Least()
    first.load_state(stream)
    second.load_state(stream)
    assert (first.theta.tolist(), second.theta.tolist()) == ([1, 2], [3])
    assert stream.read() == b"tail"


@pytest.mark.parametrize("kept", [0, 7, 8, 20])
def test_a_truncated_state_changes_nothing(kept):
    stream = io.BytesIO()
    Least(1, 2).save_state(stream)
    model = Least(5)
    with pytest.raises(ValueError, match="the stream ended after"):
        model.load_state(io.BytesIO(stream.getvalue()[:kept]))
    assert model.theta.tolist() == [5]


def test_an_object_that_is_no_stream_is_refused():
    with pytest.raises(TypeError, match="binary stream, got NoneType"):
        Least().save_state(None)
    with pytest.raises(TypeError, match="binary stream, got str"):
        Least().load_state("model.bin")


def test_a_stream_may_give_less_than_was_asked():
    class Slow(io.BytesIO):
        def read(self, size=-1):
            return super().read(min(size, 3))

    stream = Slow()
    Least(1, 2).save_state(stream)
    stream.seek(0)
    model = Least()
    model.load_state(stream)
    assert model.theta.tolist() == [1, 2]


def test_metadata():
    metadata = ModelMetadata("m")
    assert metadata.training_date.tzinfo is UTC
    assert (metadata.additional_info, metadata.model_data, metadata.feature_importance) == (
        {},
        b"",
        {},
    )
    metadata.set_property("a", None)
    assert metadata.properties == {"a": None}
    assert metadata.remove_property("a") is True
    assert metadata.remove_property("a") is False
    assert ModelMetadata("n").properties == {}


def test_categories_also_have_the_spelling_of_the_hierarchy():
    assert LayerCategory.Dense is LayerCategory.DENSE
    assert [c.name for c in LayerCategory] == [c.name.upper() for c in LayerCategory]
    for category in LayerCategory:
        assert LayerCategory[category.name.title()] is category
    assert ms.ReductionOperation.Average is ms.ReductionOperation.AVERAGE
    for operation in ms.ReductionOperation:
        assert ms.ReductionOperation[operation.name.title()] is operation


def test_loss_derivative_is_the_derivative_of_the_mean():
    class Squares(ILossFunction):
        def forward(self, prediction, target, training=True):
            error = prediction - target
            return float((error**2).sum()), float(len(error)), error

        def backward(self, saved):
            return 2 * saved

    loss = Squares()
    assert loss(np.array([1.0, 3]), np.zeros(2)) == 5
    assert loss.derivative(np.array([1.0, 3]), np.zeros(2)).tolist() == [1, 3]
