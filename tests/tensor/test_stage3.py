"""A linear layer sharded as in ZeRO stage 3 equals the whole layer on the data of all ranks."""

import numpy as np
import pytest

from mpishard import nn
from mpishard.nn.layers.layer import GradientTargets
from mpishard.sharding import LocalParameter, ParameterEntry, ParameterTable, Placement
from mpishard.tensor import Stage3ShardedLinear
from mpishard.testing.worlds import in_worlds

INPUTS, OUTPUTS = 5, 7


def batches(world_size, leading):
    """Different data of each rank, and of one none."""
    generator = np.random.default_rng(2)
    sizes = [(rank + 3) * (rank != 1) for rank in range(world_size)]
    return [
        tuple(generator.standard_normal((size, *leading, n)) for n in (INPUTS, OUTPUTS))
        for size in sizes
    ]


def parameters():
    generator = np.random.default_rng(4)
    return {
        "weight": generator.standard_normal((OUTPUTS, INPUTS)),
        "bias": generator.standard_normal(OUTPUTS),
    }


def targets_of(layer, fill, names):
    table = ParameterTable(layer.walk_parameters())
    flat = np.full(table.length, fill)
    return flat, GradientTargets(
        {entry.name: entry for entry in table.entries},
        lambda entry: flat[entry.start : entry.stop],
        set(names),
    )


def whole_results(world_size, leading, activation):
    """Output and input gradient by rank, and the parameters' gradients, in one process."""
    p, whole = parameters(), nn.Linear(INPUTS, OUTPUTS)
    g = {name: np.zeros_like(value) for name, value in p.items()}
    results = []
    for x, r in batches(world_size, leading):
        y, saved = whole.forward(p, x, nn.Context())
        dy = r.copy()
        if activation is not None:
            y, activation_saved = activation.forward({}, y, nn.Context())
            dy, _ = activation.backward_input({}, activation_saved, dy)
        results.append((y, whole.backward(p, saved, dy, g)))
    return results, g


@pytest.mark.parametrize("activation", [None, nn.ReLU()])
@pytest.mark.parametrize("leading", [(), (4,)])
@in_worlds(1, 2, 3, 4)
def test_each_rank_has_its_own_data(backend, leading, activation):
    p = parameters()
    layer = Stage3ShardedLinear(backend, INPUTS, OUTPUTS, activation)
    results, gradients = whole_results(backend.world_size, leading, activation)
    (y, dx), (x, r) = results[backend.rank], batches(backend.world_size, leading)[backend.rank]
    pieces = np.array_split(p["weight"].reshape(-1), backend.world_size)
    own = {"weight": pieces[backend.rank].copy(), "bias": p["bias"]}
    piece = np.array_split(gradients["weight"].reshape(-1), backend.world_size)[backend.rank]
    expected = np.concatenate([piece, gradients["bias"]])
    assert layer.shard_length == piece.size

    quiet, nothing = layer.forward(own, x, nn.Context(training=False))
    assert nothing is None
    for way in ("both", "halves", "without dx", "added"):
        found_y, saved = layer.forward(own, x, nn.Context())
        np.testing.assert_allclose(found_y, y, rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(found_y, quiet)
        names = () if way == "added" else ("weight", "bias")
        flat, g = targets_of(layer, 1.0 if way == "added" else np.nan, names)
        found_dx = None
        if way == "halves":
            found_dx, pending = layer.backward_input(own, saved, r.copy())
            kept = found_dx.copy()
            found_dx[...] = np.nan
            layer.backward_weight(pending, g)
            found_dx = kept
        else:
            needed = way != "without dx"
            found_dx = layer.backward(own, saved, r.copy(), g, needs_input_gradient=needed)
            assert (found_dx is not None) == needed
        if found_dx is not None:
            np.testing.assert_allclose(found_dx, dx, rtol=1e-12, atol=1e-12)
        added = 1.0 if way == "added" else 0.0
        np.testing.assert_allclose(flat - added, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("inputs", "outputs"), [(5, 7), (2, 3), (1, 1), (4, 8), (9, 1)])
@in_worlds(1, 2, 3, 4)
def test_boxes_are_the_piece(backend, inputs, outputs):
    """Of a piece that begins and ends in the middle of a row, inside one, or has nothing."""
    layer = Stage3ShardedLinear(backend, inputs, outputs)
    whole = nn.Linear(inputs, outputs)
    of_model = ParameterTable(whole.walk_parameters()).entries
    own = ParameterTable(layer.walk_parameters()).entries
    placement = Placement(of_model, [LocalParameter(e, layer.boxes(e.name)) for e in own])
    flat = np.arange(float(of_model[-1].stop))
    held = np.empty(placement.own_length)
    placement.take(flat, 0, held)
    weights = np.array_split(flat[: inputs * outputs], backend.world_size)[backend.rank]
    np.testing.assert_array_equal(held, np.concatenate([weights, flat[inputs * outputs :]]))
    assert layer.is_split("weight") == (backend.world_size > 1)
    assert not layer.is_split("bias")
    assert isinstance(own[0], ParameterEntry)


@in_worlds(1, 2, 3, 4)
def test_first_values(backend):
    layer, p = Stage3ShardedLinear(backend, INPUTS, OUTPUTS), parameters()
    whole = nn.Linear(INPUTS, OUTPUTS).parameters["weight"]
    values = whole.initializer(np.random.default_rng(0), whole.shape)
    for full in (values, p["weight"]):
        spec = layer.parameters["weight"]
        found = spec.initializer(np.random.default_rng(0), spec.shape)
        pieces = np.array_split(full.reshape(-1), backend.world_size)
        np.testing.assert_array_equal(found, pieces[backend.rank])
        layer.set_from_full_weights(p["weight"], p["bias"])
    bias = layer.parameters["bias"]
    np.testing.assert_array_equal(bias.initializer(np.random.default_rng(0), (7,)), p["bias"])


@in_worlds(1, 2, 3, 4)
def test_bytes(backend, sent_by_all):
    layer = Stage3ShardedLinear(backend, INPUTS, OUTPUTS)
    others, weight, bias = backend.world_size - 1, INPUTS * OUTPUTS * 8, OUTPUTS * 8
    own = {"weight": np.ones(layer.shard_length), "bias": np.ones(OUTPUTS)}
    for needed in (True, False):
        g = {name: np.zeros_like(value) for name, value in own.items()}
        with sent_by_all(backend) as forward:
            y, saved = layer.forward(own, np.ones((2 * backend.rank, INPUTS)), nn.Context())
        assert forward.nbytes == others * weight
        with sent_by_all(backend) as backward:
            layer.backward(own, saved, y, g, needs_input_gradient=needed)
        assert backward.nbytes == others * ((2 if needed else 1) * weight + 2 * bias)


@pytest.mark.parametrize("number", [1, 2])
@in_worlds(2)
def test_a_missing_reduction_is_detected(backend, number, forgetting):
    """Of the weight's gradient, or of the bias's."""
    layer, p = Stage3ShardedLinear(backend, INPUTS, OUTPUTS), parameters()
    _, gradients = whole_results(2, (), None)
    x, r = batches(2, ())[backend.rank]
    pieces = np.array_split(p["weight"].reshape(-1), 2)
    own = {"weight": pieces[backend.rank].copy(), "bias": p["bias"]}
    g = {name: np.zeros_like(value) for name, value in own.items()}
    _, saved = layer.forward(own, x, nn.Context())
    with forgetting(backend, number):
        layer.backward(own, saved, r.copy(), g)
    expected = {
        "weight": np.array_split(gradients["weight"].reshape(-1), 2)[backend.rank],
        "bias": gradients["bias"],
    }
    wrong = [name for name in g if not np.allclose(g[name], expected[name])]
    found = backend.all_gather(np.array([len(wrong)]))  # rank 1 has no samples, rank 0 all
    assert found.tolist() == [0, 1]


@in_worlds(2)
def test_refusals(backend):
    with pytest.raises(TypeError, match="NoneType"):
        Stage3ShardedLinear(None, 2, 3)
    with pytest.raises(ValueError, match="input_size=0"):
        Stage3ShardedLinear(backend, 0, 3)
    with pytest.raises(ValueError, match="last dim is 2"):
        Stage3ShardedLinear(backend, 2, 3).output_shape((3,))
    with pytest.raises(ValueError, match=r"has shape \(3, 2\), got \(2, 3\)"):
        Stage3ShardedLinear(backend, 2, 3).set_from_full_weights(np.ones((2, 3)))
