"""Whole chains against autograd, the models built of them, and generation."""

from __future__ import annotations

import weakref

import autograd.numpy as anp
import numpy as np
import pytest
from autograd import grad

from mpishard import run_in_threads
from mpishard.nn import GPT, MLP, MSE, CrossEntropy, Huber, Linear, Model, ReLU, Sequential
from mpishard.observe.ledger import MemoryCategory, MemoryLedger
from mpishard.pipeline import GPipeSchedule, ZeroBubbleVSchedule
from mpishard.testing.gradients import check_gradients

SIZES = {"vocabulary_size": 11, "context_length": 6, "width": 12, "heads": 3, "layers": 2}


def named(model, vector):
    return {
        e.name: vector[e.start : e.start + e.size].reshape(e.shape)
        for e in model.parameter_table.entries
    }


def layer_norm(x, p, name):
    mean = anp.mean(x, axis=-1, keepdims=True)
    x = (x - mean) / anp.sqrt(anp.mean((x - mean) ** 2, axis=-1, keepdims=True) + 1e-5)
    return x * p[f"{name}.weight"] + p[f"{name}.bias"]


def attend(qkv, heads):
    batch, length, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    split = anp.reshape(qkv, (batch, length, 3, heads, width // heads))
    q, k, v = split[:, :, 0], split[:, :, 1], split[:, :, 2]
    scores = anp.einsum("bthk,bshk->bhts", q, k) / np.sqrt(width // heads)
    scores = scores + np.where(np.tril(np.ones((length, length))), 0.0, -1e30)
    weights = anp.exp(scores - anp.max(scores, axis=-1, keepdims=True))
    weights = weights / anp.sum(weights, axis=-1, keepdims=True)
    return anp.reshape(anp.einsum("bhts,bshk->bthk", weights, v), (batch, length, width))


def gpt_logits(p, tokens, *, heads, layers, tied=False, **_):
    x = p["embedding.weight"][tokens] + p["position.weight"][: tokens.shape[1]]
    for i in range(layers):
        a, m = f"block{i}_attention", f"block{i}_mlp"
        h = anp.dot(layer_norm(x, p, f"{a}.norm"), p[f"{a}.qkv.weight"].T)
        h = anp.dot(attend(h, heads), p[f"{a}.projection.weight"].T)
        x = x + h + p[f"{a}.projection.bias"]
        h = anp.dot(layer_norm(x, p, f"{m}.norm"), p[f"{m}.expansion.weight"].T)
        h = h + p[f"{m}.expansion.bias"]
        h = 0.5 * h * (1 + anp.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
        x = x + anp.dot(h, p[f"{m}.projection.weight"].T) + p[f"{m}.projection.bias"]
    head = p["embedding.weight" if tied else "head.weight"]
    return anp.dot(layer_norm(x, p, "norm"), head.T)


def gpt_loss(p, tokens, target, **sizes):
    logits = gpt_logits(p, tokens, **sizes)
    largest = anp.max(logits, axis=-1, keepdims=True)
    log_p = logits - largest - anp.log(anp.sum(anp.exp(logits - largest), -1, keepdims=True))
    counted = target != -1
    one_hot = np.eye(logits.shape[-1])[np.where(counted, target, 0)] * counted[..., None]
    return -anp.sum(log_p * one_hot) / counted.sum()


def gpt_batch(batch=3, length=5):
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, 11, (batch, length))
    return tokens, generator.integers(-1, 11, (batch, length))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("length", [5, 6])
def test_gpt_is_its_formula(tied, length):
    model = GPT(**SIZES, dtype="float64", seed=3, tied_embeddings=tied)
    generator = np.random.default_rng(1)
    vector = model.get_parameters()
    vector = vector + 0.3 * generator.standard_normal(vector.shape)
    model.set_parameters(vector)
    tokens, target = gpt_batch(length=length)

    logits = gpt_logits(named(model, vector), tokens, **SIZES, tied=tied)
    np.testing.assert_allclose(model.predict(tokens), logits, rtol=1e-10, atol=1e-11)
    loss, gradient = model.compute_loss_and_gradients(tokens, target)
    expected = grad(lambda v: gpt_loss(named(model, v), tokens, target, **SIZES, tied=tied))(vector)
    np.testing.assert_allclose(
        loss, gpt_loss(named(model, vector), tokens, target, **SIZES, tied=tied), rtol=1e-12
    )
    np.testing.assert_allclose(gradient, expected, rtol=1e-9, atol=1e-12)


def test_a_tied_head_is_the_embedding():
    untied, tied = GPT(**SIZES), GPT(**SIZES, tied_embeddings=True)
    assert untied.parameter_count - tied.parameter_count == 11 * 12
    assert "head.weight" not in [e.name for e in tied.parameter_table.entries]
    check_gradients(GPT(**SIZES, dtype="float64", tied_embeddings=True), *gpt_batch())


def test_gpt_starts_as_gpt2_does():
    model = GPT(**{**SIZES, "width": 96, "layers": 8}, dtype="float64")
    values = named(model, model.get_parameters())
    for name, value in values.items():
        if "projection.weight" in name:
            np.testing.assert_allclose(value.std(), 0.02 / np.sqrt(2 * 8), rtol=0.05)
        elif name.endswith("norm.weight"):
            assert (value == 1).all()
        elif name.endswith("bias"):
            assert (value == 0).all()
        else:
            np.testing.assert_allclose(value.std(), 0.02, rtol=0.1)
    first, second = (values[f"block{i}_mlp.expansion.weight"] for i in (0, 1))
    assert not np.array_equal(first, second)


def test_gpt_in_float32_is_near_float64():
    tokens, target = gpt_batch()
    single, double = GPT(**SIZES), GPT(**SIZES, dtype="float64")
    loss, gradient = single.compute_loss_and_gradients(tokens, target)
    exact, exact_gradient = double.compute_loss_and_gradients(tokens, target)
    assert single.predict(tokens).dtype == gradient.dtype == np.float32
    np.testing.assert_allclose(loss, exact, rtol=1e-5)
    np.testing.assert_allclose(gradient, exact_gradient, atol=1e-5)


@pytest.mark.parametrize(
    ("activation", "loss"),
    [("relu", None), ("gelu", MSE()), ("tanh", None), ("sigmoid", None), ("silu", Huber(0.5))],
)
def test_mlp_gradients(activation, loss):
    generator = np.random.default_rng(0)
    model = MLP([5, 7, 3, 2], activation, seed=1, loss=loss)
    x, y = generator.standard_normal((9, 5)), generator.standard_normal((9, 2))
    check_gradients(model, x, y, samples=None)


def test_mlp_is_its_formula():
    generator = np.random.default_rng(0)
    x, y = generator.standard_normal((4, 5)), generator.standard_normal((4, 2))
    model = MLP([5, 7, 2], "tanh")
    vector = model.get_parameters()

    def mean_loss(v):
        p = named(model, v)
        hidden = anp.tanh(anp.dot(x, p["linear0.weight"].T) + p["linear0.bias"])
        return anp.mean((anp.dot(hidden, p["linear1.weight"].T) + p["linear1.bias"] - y) ** 2)

    loss, gradient = model.compute_loss_and_gradients(x, y)
    np.testing.assert_allclose(loss, mean_loss(vector), rtol=1e-13)
    np.testing.assert_allclose(gradient, grad(mean_loss)(vector), rtol=1e-11, atol=1e-14)


def test_mlp_classifies_with_cross_entropy():
    generator = np.random.default_rng(0)
    model = MLP([4, 6, 3], loss=CrossEntropy())
    check_gradients(model, generator.standard_normal((8, 4)), generator.integers(0, 3, 8))


@pytest.mark.parametrize("model", [MLP([5, 7, 2]), GPT(**SIZES)])
def test_no_samples_give_zero_gradients(model):
    if isinstance(model, MLP):
        x, y = np.zeros((0, 5)), np.zeros((0, 2))
    else:
        x = y = np.zeros((0, 6), dtype=int)
    loss, gradient = model.compute_loss_and_gradients(x, y)
    assert loss == 0.0
    assert not gradient.any()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_integer_features_become_the_models_dtype(dtype):
    model, x, y = MLP([2, 3, 1], dtype=dtype), np.array([[1, 2], [3, 4]]), np.ones((2, 1), int)
    assert model.as_input(x).dtype == dtype
    assert model.predict(x).dtype == dtype
    expected = model.compute_loss_and_gradients(x.astype(dtype), y.astype(dtype))
    for features in (x, x.astype(np.uint8), x.astype(np.float32), x.astype(np.float64)):
        loss, gradient = model.compute_loss_and_gradients(features, y)
        assert loss == expected[0]
        np.testing.assert_array_equal(gradient, expected[1])


def test_inputs_are_copied_only_where_their_dtype_changes():
    x, tokens = np.ones((2, 2), np.float32), np.ones((2, 6), np.uint8)
    assert MLP([2, 1], dtype="float32").as_input(x) is x
    assert GPT(**SIZES).as_input(tokens) is tokens


@pytest.fixture
def idle(monkeypatch):
    """Makes a model whose layers fail if they are run."""

    def never(*_, **__):
        raise AssertionError("the layers ran")

    def make(model_class, *arguments, **keywords):
        model = model_class(*arguments, **keywords)
        for layer in model.layers:
            monkeypatch.setattr(layer, "forward", never)
        return model

    return make


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        ([[1, 11]], ValueError, "token 11"),
        ([[1, -1]], ValueError, "token -1"),
        ([[1.0, 2.0]], TypeError, "integer tokens"),
        ([[1] * 7], ValueError, r"T <= 6, 12\), got \(7, 12\)"),
    ],
)
def test_gpt_refuses_inputs_before_it_computes(idle, x, error, message):
    model = idle(GPT, **SIZES)
    with pytest.raises(error, match=message):
        model.predict(np.array(x))
    with pytest.raises(error, match=message):
        model.compute_loss_and_gradients(np.array(x), np.ones_like(x))


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        ([[1j, 2]], TypeError, "Linear takes real numbers"),
        ([["1", "2"]], TypeError, "Linear takes real numbers"),
        ([[1.0]], ValueError, "last dim is 2"),
    ],
)
def test_mlp_refuses_inputs_before_it_computes(idle, x, error, message):
    model = idle(MLP, [2, 1])
    with pytest.raises(error, match=message):
        model.predict(np.array(x))
    with pytest.raises(error, match=message):
        model.compute_loss_and_gradients(np.array(x), np.ones((1, 1)))


def test_targets_are_refused_before_anything_is_computed(idle):
    model, tokens = idle(GPT, **SIZES), np.array([[1, 2]])
    with pytest.raises(ValueError, match="target 11"):
        model.compute_loss_and_gradients(tokens, np.array([[1, 11]]))
    with pytest.raises(ValueError, match=r"\(1, 2, 11\) and \(1, 1\)"):
        model.compute_loss_and_gradients(tokens, np.array([[1]]))
    with pytest.raises(TypeError, match="integer targets"):
        model.compute_loss_and_gradients(tokens, np.ones((1, 2)))
    model, x = idle(MLP, [2, 1]), np.ones((1, 2))
    with pytest.raises(ValueError, match=r"\(1, 1\) and \(1,\)"):
        model.compute_loss_and_gradients(x, np.ones(1))
    with pytest.raises(TypeError, match="real targets"):
        model.compute_loss_and_gradients(x, np.array([[1j]]))


def test_backward_holds_neither_prediction_nor_loss_gradient():
    refs = []

    class Last(Linear):
        def forward(self, p, x, context):
            y, saved = super().forward(p, x, context)
            refs.append(weakref.ref(y))
            return y, saved

    class First(Linear):
        def backward(self, *arguments, **keywords):
            seen.extend(ref() is None for ref in refs)
            return super().backward(*arguments, **keywords)

    class Traced(CrossEntropy):
        def backward(self, saved):
            refs.append(weakref.ref(saved))
            return saved

    seen = []
    model = Model(Sequential(First(3, 2), Last(2, 4)), Traced(), input_shape=(3,))
    model.compute_loss_and_gradients(np.ones((5, 3)), np.zeros(5, int))
    assert seen == [True, True]


def test_the_first_layer_makes_no_input_gradient(monkeypatch):
    model, asked = MLP([3, 2, 1]), []
    for layer in model.layers:
        half = layer.backward_input
        monkeypatch.setattr(
            layer, "backward_input", lambda *a, of=layer, half=half: (asked.append(of), half(*a))[1]
        )
    model.compute_loss_and_gradients(np.ones((4, 3)), np.ones((4, 1)))
    assert asked == list(reversed(model.layers[1:]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"width": 12.0}, r"integer sizes >= 1 .*'width': 12\.0"),
        ({"vocabulary_size": "11"}, "'vocabulary_size': '11'"),
        ({"layers": 2.5}, r"layers=2\.5"),
        ({"width": 10}, r"heads must divide width, got 10 = 3 \* 3 \+ 1"),
        ({"heads": 0}, "'heads': 0"),
        ({"vocabulary_size": 0}, "'vocabulary_size': 0"),
        ({"layers": -1}, "layers=-1"),
        ({"initial_std": 0}, "initial_std must be above 0 and finite, got 0"),
    ],
)
def test_gpt_refuses_sizes(arguments, message):
    with pytest.raises(ValueError, match=message):
        GPT(**{**SIZES, **arguments})


def test_gpt_scales_all_first_weights():
    usual, larger = (
        GPT(**SIZES, **options).get_parameters() for options in ({}, {"initial_std": 0.06})
    )
    np.testing.assert_allclose(larger[usual < 0.5], 3 * usual[usual < 0.5], rtol=1e-5)
    assert (larger[usual > 0.5] == 1).all()  # the scales of layer norms


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([5],), r"\[5\]"),
        (([5, 0, 2],), r"\[5, 0, 2\]"),
        (([3.0, 1],), r"all integers >= 1, got \[3\.0, 1\]"),
        ((["3", 1],), r"all integers >= 1, got \['3', 1\]"),
        (([5, 2], "selu"), r"\['gelu', 'relu', 'sigmoid', 'silu', 'tanh'\], got 'selu'"),
    ],
)
def test_mlp_refuses_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        MLP(*arguments)


def test_sizes_may_be_of_numpy():
    assert MLP(np.array([3, 2], np.int32)).parameter_count == 8
    assert GPT(**{name: np.int64(size) for name, size in SIZES.items()}).layer_count == 8


def test_generation_takes_the_likeliest_token_at_temperature_0():
    model = GPT(**SIZES, seed=2)
    sequence = model.generate([3, 1], 9, temperature=0)
    assert sequence.shape == (11,)
    assert sequence[:2].tolist() == [3, 1]
    for end in range(2, 11):
        window = sequence[max(0, end - 6) : end]
        assert sequence[end] == model.predict(window[None])[0, -1].argmax()
    np.testing.assert_array_equal(sequence, model.generate([3, 1], 9, top_k=1, seed=5))


def test_generation_draws_from_the_prediction():
    model = GPT(**{**SIZES, "vocabulary_size": 3, "layers": 0}, dtype="float64")
    model.set_parameters(model.get_parameters() * 20)
    logits = model.predict(np.array([[2]]))[0, -1] / 0.7
    expected = np.exp(logits) / np.exp(logits).sum()
    drawn = [model.generate([2], 1, temperature=0.7, seed=seed)[1] for seed in range(2000)]
    frequency = np.bincount(drawn, minlength=3) / 2000
    np.testing.assert_allclose(frequency, expected, atol=0.04)

    likeliest = set(np.argsort(-logits)[:2].tolist())
    kept = {int(model.generate([2], 1, seed=seed, top_k=2)[1]) for seed in range(100)}
    assert kept == likeliest


def test_generation_is_reproducible_by_seed():
    model = GPT(**SIZES)
    first, again, other = (model.generate([1], 20, seed=seed) for seed in (4, 4, 5))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    np.testing.assert_array_equal(model.generate(np.array([1, 2]), 0), [1, 2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 3), r"shape \(0,\)"),
        (([[1]], 3), r"shape \(1, 1\)"),
        (([1.5], 3), "float64"),
        (([1, 11], 3), r"token 11 is outside the vocabulary \[0, 11\)"),
        (([-1], 3), "token -1"),
        (([1], -3), "got -3"),
        (([1], 3, -0.5), "got -0.5"),
        (([1], 3, float("nan")), "got nan"),
        (([1], 3, 1.0, 0, 0), r"\[1, 11\], got 0"),
        (([1], 3, 1.0, 0, 12), r"\[1, 11\], got 12"),
    ],
)
def test_generation_refuses_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        GPT(**SIZES).generate(*arguments)


def test_a_model_is_shown_with_its_size_and_dtype():
    model = MLP([4, 8, 2], dtype="float32")
    assert repr(model) == "MLP(58 parameters in a chain of 3 layers, float32)"
    part = model.extract_sub_model(0, 1)
    assert repr(part) == "SubModel(40 parameters in a chain of 1 layers, float32)"


def test_parameters_of_a_layer_that_are_assigned_are_refused_with_the_way_to_keep_sizes():
    class Assigned(Linear):
        def __init__(self):
            self.parameters = {}

    with pytest.raises(AttributeError, match="cannot be assigned: keep the sizes"):
        Assigned()


def test_parameters_of_a_layer_that_are_a_method_or_plain_shapes_are_refused():
    with pytest.raises(TypeError, match=r"Method\.parameters is a method: write @property"):

        class Method(Linear):
            def parameters(self):
                return {}

    class Shapes(Linear):
        @property
        def parameters(self):
            return {"weight": (2, 2)}

    with pytest.raises(TypeError, match=r"parameters\['weight'\] must be an ms\.nn\.ParameterSpec"):
        Model(Sequential(Shapes(2, 2)), MSE(), input_shape=(2,))


def test_a_forward_pass_that_returns_the_output_alone_is_refused():
    class Alone(ReLU):
        def forward(self, p, x, context):
            return super().forward(p, x, context)[0]

    # The two rows of the batch are not taken for the output and what backward needs.
    model = Model(Sequential(Linear(3, 3), Alone()), MSE(), input_shape=(3,))
    with pytest.raises(
        TypeError, match=r"Alone\.forward must return two values, .* shape \(2, 3\)"
    ):
        model.predict(np.ones((2, 3)))


def test_layers_losses_and_schedules_are_shown_with_their_sizes():
    chain = Sequential({"first": Linear(2, 3), "relu": ReLU()})
    first = "first: Linear(weight (3, 2), bias (3,))"
    assert repr(chain) == f"Sequential({first}, relu: ReLU())"
    assert repr(MSE()) == "MSE()"
    assert repr(GPipeSchedule()) == "GPipeSchedule()"
    assert repr(ZeroBubbleVSchedule()) == "ZeroBubbleVSchedule(virtual_stages_per_rank=2)"
    table = MLP([2, 2]).parameter_table
    assert repr(table) == "ParameterTable(linear0.weight (2, 2), linear0.bias (2,))"


def test_counts_of_memory_and_traffic_are_shown():
    def main(backend):
        ledger, traffic = MemoryLedger(), backend.traffic
        before = repr(ledger), repr(traffic)
        array = ledger.allocate(MemoryCategory.PARAMETERS, 4, np.dtype("float32"))
        held = repr(ledger)
        del array
        backend.all_reduce(np.ones(2))
        return *before, held, repr(ledger), repr(traffic)

    assert run_in_threads(2, main)[0] == (
        "MemoryLedger(nothing held)",
        "Traffic(nothing sent)",
        "MemoryLedger(parameters 16 B)",
        "MemoryLedger(nothing held now; peaks: parameters 16 B)",
        "Traffic(reduce_scatter 1 x, 8 B, all_gather 1 x, 8 B)",
    )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sizes": 5}, TypeError, r"sizes must be a sequence of integers such as .*, got 5"),
        ({"sizes": [3, True]}, ValueError, r"all integers >= 1, got \[3, True\]"),
        ({"activation": []}, ValueError, r"activation must be one of .*, got \[\]"),
        ({"seed": "x"}, TypeError, "seed must be an integer, got 'x'"),
        ({"seed": float("nan")}, TypeError, "seed must be an integer, got nan"),
        ({"loss": "mse"}, TypeError, "loss must be an ILossFunction, got str"),
        ({"loss": []}, TypeError, "loss must be an ILossFunction, got list"),
        ({"dtype": "x"}, TypeError, "dtype must be float32 or float64, got 'x'"),
    ],
)
def test_the_constructor_of_an_mlp_refuses_wrong_arguments(options, error, message):
    with pytest.raises(error, match=message):
        MLP(**({"sizes": [3, 2]} | options))
