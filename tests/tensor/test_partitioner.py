"""The ranks' parts of a chain compute what the whole chain computes."""

import dataclasses

import numpy as np
import pytest

from mpishard import nn
from mpishard.nn.layers.initializers import parameter_generator
from mpishard.nn.layers.layer import Context, Layer, ParameterSpec
from mpishard.nn.models.gpt import GPT
from mpishard.sharding import ParameterTable
from mpishard.tensor import (
    ColumnParallelLinear,
    DimSplit,
    SplitKind,
    TensorParallelLayerPartitioner,
    VocabularyParallelEmbedding,
    check_sequence,
    partition_chain,
)
from mpishard.testing.worlds import in_worlds

TIME = 12  # a multiple of 1, 2, 3 and 4


class Scaling(Layer):
    """A user's own layer, of which no rule knows anything; random, and it looks back in time."""

    is_random = True

    @property
    def parameters(self):
        return {"factor": ParameterSpec((6,), lambda g, shape: g.standard_normal(shape))}

    def output_shape(self, input_shape):
        return input_shape

    def forward(self, p, x, context):
        noise = parameter_generator(context.seed, f"{context.path}/{context.step}").random()
        scale = p["factor"] * (1 + noise)
        y = x * scale
        y[:, 1:] += x[:, :-1]
        return y, (x, scale, 1 + noise)

    def backward_input(self, p, saved, dy):
        x, scale, factor = saved
        dx = dy * scale
        dx[:, :-1] += dy[:, 1:]
        return dx, (dy * x).reshape(-1, 6).sum(axis=0) * factor

    def backward_weight(self, pending, g):
        g["factor"][...] += pending


class Doubling(nn.Sequential):
    """A user's own composite, which does more than its children do one after the other."""

    def forward(self, p, x, context):
        y, saved = super().forward(p, x, context)
        return 2 * y, saved

    def backward_input(self, p, saved, dy):
        return super().backward_input(p, saved, 2 * dy)

    def backward(self, p, saved, dy, g, *, needs_input_gradient=True):
        return super().backward(p, saved, 2 * dy, g)


def gpt(heads=3, **options):
    sizes = {"vocabulary_size": 13, "context_length": TIME + 2, "width": 6, "layers": 2}
    return GPT(heads=heads, **sizes, **options).chain


def convolutions():
    return nn.Sequential(
        nn.Conv2D(1, 3, kernel=3),
        nn.ReLU(),
        nn.MaxPool2D(2),
        nn.Flatten(),
        nn.Linear(27, 10),
        nn.GELU(),
        nn.Linear(10, 5),
    )


def own_layers():
    return nn.Sequential(
        {
            "mix": Scaling(),
            "first": nn.Linear(6, 9),
            "tanh": nn.Tanh(),
            "drop": nn.Dropout(0.3),
            "second": nn.Linear(9, 6),
            "sub": nn.Sequential({"norm": nn.RMSNorm(6), "silu": nn.SiLU()}),
            "block": nn.Residual({"own": Scaling(), "drop": nn.Dropout(0.2)}),
            "twice": Doubling({"a": nn.Linear(6, 5), "b": nn.Linear(5, 6)}),
            "wide": nn.Linear(6, 7, bias=False),
            "soft": nn.Softmax(),
            "last": nn.Linear(7, 5),
        }
    )


def whole_attention():
    return nn.Sequential(
        {
            "attend": nn.Residual(
                {
                    "qkv": nn.Linear(8, 24),
                    "core": nn.Attention(4),
                    "drop": nn.Dropout(0.4),
                    "projection": nn.Linear(8, 8, bias=False),
                }
            ),
            "head": nn.Linear(8, 9),
        }
    )


def shared_linear():
    """Weights that other layers share, and that no rule can split alike."""
    return nn.Sequential(
        {
            "a": nn.Linear(6, 6),
            "relu": nn.ReLU(),
            "b": nn.Linear(6, 6, tied_to="a.weight"),
            "c": nn.Linear(6, 5),
        }
    )


def tied_everywhere():
    """An embedding's table as every kind of linear layer that there is."""

    def tied():
        return nn.Linear(6, 18, bias=False, tied_to="table.weight")

    return nn.Sequential(
        {
            "table": nn.Embedding(18, 6),
            "attend": nn.Residual(
                {"qkv": tied(), "core": nn.CausalAttention(3), "out": nn.Linear(6, 6)}
            ),
            "up": tied(),
            "relu": nn.ReLU(),
            "down": nn.Linear(18, 6),
            "gelu": nn.GELU(),
            "same": nn.Linear(6, 6),
            "tanh": nn.Tanh(),
            "head": tied(),
        }
    )


def gated():
    """Gated perceptrons: as the rules know them, in two other orders, too narrow, and tied."""
    return nn.Sequential(
        {
            "a": nn.Residual(
                {"up": nn.Linear(6, 14), "gate": nn.SwiGLU(), "down": nn.Linear(7, 6)}
            ),
            "up": nn.Linear(6, 18, bias=False),
            "gate": nn.SwiGLU(),
            "drop": nn.Dropout(0.3),
            "down": nn.Linear(9, 6),
            "late": nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.SwiGLU(), nn.Linear(8, 6)),
            "twice": nn.Sequential(
                nn.Linear(6, 16), nn.SwiGLU(), nn.SwiGLU(), nn.Linear(4, 6), nn.LayerNorm(6)
            ),
            "narrow": nn.Sequential(nn.Linear(6, 2), nn.SwiGLU(), nn.Linear(1, 6)),
        }
    )


def odd_attention():
    """Attention that does not stand as the rules know it."""
    return nn.Sequential(
        {
            "qkv": nn.Linear(6, 54),
            "core": nn.CausalAttention(3),
            "second": nn.Attention(2),
            "out": nn.Linear(6, 24),
            "gelu": nn.GELU(),
            "third": nn.CausalAttention(4),
            "end": nn.Linear(8, 4),
        }
    )


@dataclasses.dataclass
class Case:
    make: object
    shape: tuple
    tokens: bool = False
    is_sequence: bool = True


CASES = {
    "mlp": Case(lambda: nn.MLP([5, 7, 8, 9, 3, 1], "gelu").chain, (5,), is_sequence=False),
    "mlp of two": Case(lambda: nn.MLP([5, 7, 4]).chain, (5,), is_sequence=False),
    "mlp of few": Case(lambda: nn.MLP([5, 3, 6]).chain, (5,), is_sequence=False),
    "gpt": Case(gpt, (TIME,), tokens=True),
    "tied": Case(lambda: gpt(tied_embeddings=True), (TIME,), tokens=True),
    "dropout": Case(lambda: gpt(dropout=0.3), (TIME,), tokens=True),
    "one head": Case(lambda: gpt(heads=1, dropout=0.3), (TIME,), tokens=True),
    "six heads": Case(lambda: gpt(heads=6), (TIME,), tokens=True),
    "convolutions": Case(convolutions, (1, 8, 8), is_sequence=False),
    "own layers": Case(own_layers, (TIME, 6)),
    "whole attention": Case(whole_attention, (TIME, 8)),
    "shared": Case(shared_linear, (TIME, 6)),
    "tied everywhere": Case(tied_everywhere, (TIME,), tokens=True),
    "nested": Case(
        lambda: nn.Sequential(
            {"body": nn.Sequential(nn.Embedding(13, 6), nn.RMSNorm(6)), "head": nn.Linear(6, 7)}
        ),
        (TIME,),
        tokens=True,
    ),
    "gated": Case(gated, (TIME, 6)),
    "odd attention": Case(odd_attention, (TIME, 6)),
    "few tokens": Case(
        lambda: nn.Sequential({"embedding": nn.Embedding(2, 6), "head": nn.Linear(6, 3)}),
        (TIME,),
        tokens=True,
    ),
}


def batch_of(case):
    generator = np.random.default_rng(5)
    if case.tokens:
        return generator.integers(0, 2 if case is CASES["few tokens"] else 13, (2, *case.shape))
    return generator.standard_normal((2, *case.shape))


def values_of(chain):
    """A value for each parameter of a chain that is no first value."""
    return {
        name: np.random.default_rng(list(name.encode())).standard_normal(spec.shape)
        for name, spec in chain.walk_parameters()
        if spec.tied_to is None
    }


def vector_of(table, values):
    return np.concatenate([values[e.name].reshape(-1) for e in table.entries] or [np.empty(0)])


def run(chain, values, x, dy, halves):
    """Output, input gradient and parameter gradients by name."""
    table = ParameterTable(chain.walk_parameters())
    views = table.nested_views(vector_of(table, values))
    y, saved = chain.forward(views, x, Context(seed=7, step=3, sample_start=4))
    gradients = np.zeros(table.length)
    if halves:
        dx, pending = chain.backward_input(views, saved, dy(y))
        chain.backward_weight(pending, table.nested_views(gradients))
    else:
        # As models do it: what writes first need not find zeros.
        gradients[:] = np.nan
        targets = nn.GradientTargets(
            {name: table[name] for name, _ in chain.walk_parameters()},
            lambda entry: gradients[entry.start : entry.stop],
            {entry.name for entry in table.entries},
        )
        dx = chain.backward(views, saved, dy(y), targets)
        targets.clear_unwritten()
    parts = {e.name: gradients[e.start : e.stop].reshape(e.shape) for e in table.entries}
    return y, dx, parts


def slice_of(x, backend):
    length = x.shape[1] // backend.world_size
    return np.ascontiguousarray(x[:, backend.rank * length : (backend.rank + 1) * length])


def own_part(whole, boxes):
    return np.concatenate([whole[tuple(slice(*range_) for range_ in box)] for box in boxes])


def check_against_whole(backend, chain, x, partition, *, sequence, starts, ends, halves=False):
    """Output and every gradient of this rank's part equal the whole chain's to 1e-12."""
    values = values_of(chain)
    is_sliced = sequence and not starts and not chain.takes_integers
    r = np.random.default_rng(8)
    r = r.standard_normal((*x.shape[:1], *chain.output_shape(x.shape[1:])))
    y, dx, gradients = run(chain, values, x, lambda y: r.copy(), halves)

    def taken(array):
        if partition.splits_output:
            return DimSplit(array.shape[-1], backend.world_size).take(array, backend.rank).copy()
        return slice_of(array, backend).copy() if sequence and not ends else array.copy()

    part = nn.Sequential(partition.layers)
    own = {
        name: own_part(value, partition.boxes[name]) if name in partition.boxes else value
        for name, value in values.items()
    }
    own_x = slice_of(x, backend) if is_sliced else x.copy()
    own_y, own_dx, own_gradients = run(part, own, own_x, lambda y: taken(r), halves)
    np.testing.assert_allclose(own_y, taken(y), rtol=0, atol=1e-12)
    assert part.output_shape(own_x.shape[1:]) == own_y.shape[1:]
    if chain.takes_integers:
        assert own_dx is None
    else:
        np.testing.assert_allclose(
            own_dx, slice_of(dx, backend) if is_sliced else dx, rtol=0, atol=1e-12
        )
    assert own_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        expected = (
            own_part(gradient, partition.boxes[name]) if name in partition.boxes else gradient
        )
        np.testing.assert_allclose(own_gradients[name], expected, rtol=0, atol=1e-12, err_msg=name)
    check_cover(backend, gradients, partition.boxes)


def check_cover(backend, arrays, boxes):
    """The ranks' boxes of a parameter have each of its elements once."""
    for name in boxes:
        if name not in arrays:
            continue
        counts = np.zeros(arrays[name].shape)
        for box in boxes[name]:
            counts[tuple(slice(*range_) for range_ in box)] += 1
        assert (backend.all_reduce(counts) == 1).all(), name


@pytest.mark.parametrize("is_all", [False, True])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", CASES)
@in_worlds(2, 3, 4)
def test_split_chains_compute_what_the_whole_does(backend, name, sequence, is_all):
    """The chain is the model, or stands between other layers of it."""
    case = CASES[name]
    chain = case.make()
    if sequence and not case.is_sequence:
        with pytest.raises(ValueError, match="without sequence_parallel"):
            check_sequence(chain.children, case.shape)
        return
    model = None if is_all else {"before": nn.ReLU(), **chain.children, "behind": nn.ReLU()}
    partition = partition_chain(
        chain.children, backend, model_layers=model, sequence_parallel=sequence, split_output=is_all
    )
    assert list(partition.layers) == list(chain.children)
    assert [n for n, _ in nn.Sequential(partition.layers).walk_parameters()] == [
        n for n, _ in chain.walk_parameters()
    ]
    check_against_whole(
        backend, chain, batch_of(case), partition, sequence=sequence, starts=is_all, ends=is_all,
        halves=is_all,
    )  # fmt: skip


@in_worlds(1)
def test_one_rank_has_the_layers_themselves(backend):
    chain = gpt(tied_embeddings=True)
    for options in ({}, {"sequence_parallel": True, "split_output": True}):
        partition = partition_chain(chain.children, backend, **options)
        assert partition.layers == chain.children
        assert not partition.boxes
        assert not partition.splits_output
        assert "block0_attention.core: CausalAttention on the one rank" in partition.log


@in_worlds(2, 3)
def test_a_pipeline_stage_is_split_as_in_the_whole_model(backend):
    whole = gpt(tied_embeddings=True)
    layers = dict(whole.children)
    last = {name: layers[name] for name in ("block1_mlp", "norm", "head")}
    with pytest.raises(ValueError, match=r"head.weight is tied to embedding.weight, .* model_lay"):
        partition_chain(last, backend)
    for sequence in (False, True):
        options = {"model_layers": layers, "sequence_parallel": sequence}
        parts = partition_chain(last, backend, split_output=True, **options)
        first = partition_chain({"embedding": layers["embedding"]}, backend, **options)
        assert parts.splits_output
        assert parts.boxes["head.weight"] == first.boxes["embedding.weight"]
        assert parts.boxes["embedding.weight"] == first.boxes["embedding.weight"]
        middle = {name: layers[name] for name in ("position", "block0_attention", "block0_mlp")}
        partition = partition_chain(middle, backend, **options)
        x = np.random.default_rng(1).standard_normal((2, TIME, 6))
        check_against_whole(
            backend,
            nn.Sequential(middle),
            x,
            partition,
            sequence=sequence,
            starts=False,
            ends=False,
        )
        with pytest.raises(ValueError, match="last layer, head, and this chain ends with block0_m"):
            partition_chain(middle, backend, split_output=True, **options)


@in_worlds(2)
def test_the_log_has_each_layers_decision_and_reason(backend):
    chain = GPT(
        vocabulary_size=13, context_length=TIME, width=6, heads=3, layers=1, dropout=0.1
    ).chain
    partition = partition_chain(chain.children, backend, split_output=True)
    here = {0: (7, 4, 2, 12), 1: (6, 2, 1, 12)}[backend.rank]
    rows, width, heads, hidden = here
    light = "on every rank: it has little to compute"
    expected = f"""
embedding: Embedding of 13 x 6 split by rows, {rows} here
position: PositionalEmbedding {light}
dropout: Dropout {light}
block0_attention.norm: LayerNorm {light}
block0_attention.qkv: Linear 6 -> 18 split by rows, {3 * width} here; pairs with \
block0_attention.projection
block0_attention.core: CausalAttention of {heads} of 3 heads here
block0_attention.projection: Linear 6 -> 6 split by columns, {width} here; sums what \
block0_attention.qkv began
block0_attention.dropout: Dropout {light}
block0_mlp.norm: LayerNorm {light}
block0_mlp.expansion: Linear 6 -> 24 split by rows, {hidden} here; pairs with \
block0_mlp.projection
block0_mlp.gelu: GELU of {hidden} of 24 features here
block0_mlp.projection: Linear 24 -> 6 split by columns, {hidden} here; sums what \
block0_mlp.expansion began
block0_mlp.dropout: Dropout {light}
norm: LayerNorm {light}
head: Linear 6 -> 13 split by rows, {rows} here; its output stays split for the loss"""
    assert "\n".join(partition.log) == expected.strip()


@in_worlds(4)
def test_layers_with_too_few_outputs_stay_whole_and_the_log_has_the_numbers(backend):
    chain = nn.Sequential(
        {
            "embedding": nn.Embedding(3, 8),
            "attend": nn.Residual(
                {"qkv": nn.Linear(8, 24), "core": nn.CausalAttention(2), "out": nn.Linear(8, 8)}
            ),
            "norm": nn.LayerNorm(8),
            "choice": nn.FeatureLinear(8, 8),
            "own": Scaling(),
            "score": nn.Linear(8, 3),
        }
    )
    partition = partition_chain(chain.children, backend, split_output=True)
    log = dict(line.split(": ", 1) for line in partition.log)
    assert log["embedding"] == "Embedding on every rank: 3 rows cannot be divided among 4 ranks"
    assert (
        log["attend.core"]
        == "CausalAttention on every rank: 2 heads cannot be divided among 4 ranks"
    )
    assert log["choice"] == "FeatureLinear on every rank: no rule splits a FeatureLinear"
    assert log["own"] == "Scaling on every rank: no rule splits a Scaling"
    assert log["score"] == "Linear on every rank: 3 outputs cannot be divided among 4 ranks"
    assert log["attend.out"] == (
        "Linear 8 -> 8 split by rows, 2 here; has no partner, so its output is gathered: hardly "
        "worth it, 16 FLOPs are saved for each element sent"
    )
    assert not partition.splits_output
    wide = partition_chain({"wide": nn.Linear(1024, 1024)}, backend)
    assert "gathered: worth it, 2048 FLOPs" in wide.log[0]


@in_worlds(2)
def test_a_weight_that_a_users_layer_shares_stays_whole(backend):
    class Tied(Scaling):
        @property
        def parameters(self):
            return {"weight": ParameterSpec((5, 6), None, tied_to="embedding.weight")}

    tied = nn.Linear(6, 5, False, tied_to="embedding.weight")
    users = (
        (Tied(), "user, a Tied"),
        (nn.Sequential({"a": Tied()}), "user.a, a Tied"),
        (Doubling({"a": tied}), "user, a Doubling"),
    )
    for user, name in users:
        layers = {"embedding": nn.Embedding(5, 6), "user": user, "head": nn.Linear(6, 5, False)}
        partition = partition_chain(layers, backend)
        assert partition.log[0] == (
            f"embedding: Embedding on every rank: it shares embedding.weight with {name}, "
            "and only an Embedding and Linear layers tied to it are split alike"
        )
        assert "embedding.weight" not in partition.boxes


@in_worlds(2)
def test_a_wide_last_layer_is_left_split_and_a_narrow_one_pairs(backend):
    def last_of(outputs, **options):
        layers = {"a": nn.Linear(6, 8), "relu": nn.ReLU(), "b": nn.Linear(8, outputs)}
        return partition_chain(layers, backend, **options)

    assert last_of(9, split_output=True).splits_output
    assert isinstance(last_of(9, split_output=True).layers["b"], ColumnParallelLinear)
    assert not last_of(9).splits_output
    assert not last_of(8, split_output=True).splits_output
    inner = nn.Sequential({"head": nn.Linear(6, 9)})
    assert partition_chain({"sub": inner}, backend, split_output=True).splits_output


@in_worlds(2, 3)
def test_the_partitioner_counts_and_estimates(backend):
    partitioner = TensorParallelLayerPartitioner(backend)
    chain = GPT(vocabulary_size=48, context_length=8, width=24, heads=6, layers=2).chain
    partition = partitioner.partition(chain.children, split_output=True)
    assert partitioner.log == partition.log
    counts = {kind: count for kind, count in partitioner.counts.items() if count}
    assert counts == {
        SplitKind.COLUMN: 5,
        SplitKind.ROW: 4,
        SplitKind.VOCABULARY: 1,
        SplitKind.HEADS: 2,
        SplitKind.FEATURES: 2,
        SplitKind.WHOLE: 6,
    }
    # Per sample: what is whole is 5 norms at 7 FLOPs an element and the positions at 1.
    whole = 8 * 24 * (5 * 7 + 1)
    split_flops = 8 * 2 * (2 * (24 * 72 + 24 * 24 + 2 * 24 * 96) + 24 * 48)  # linear layers
    split_flops += 2 * (2 * 24 * 8 * 9 + 8 * 96)  # attention and GELU
    assert partitioner.split_share((8,)) == pytest.approx(split_flops / (split_flops + whole))
    ranks = backend.world_size
    assert partitioner.estimated_speedup((8,)) == pytest.approx(
        (split_flops + whole) / (split_flops / ranks + whole)
    )
    along_time = TensorParallelLayerPartitioner(backend, sequence_parallel=True)
    along_time.partition(chain.children, split_output=True)
    assert along_time.counts[SplitKind.POSITIONS] == 6
    assert along_time.split_share((8,)) == 1
    assert along_time.estimated_speedup((8,)) == pytest.approx(ranks)


@in_worlds(2)
def test_the_rank_with_most_work_bounds_the_speedup(backend):
    partitioner = TensorParallelLayerPartitioner(backend)
    partitioner.partition({"a": nn.Linear(4, 3), "b": nn.Linear(3, 4, bias=False)})
    assert partitioner.estimated_speedup((4,)) == pytest.approx(3 / 2)


@in_worlds(1, 2)
def test_invalid_partitions_are_refused(backend):
    with pytest.raises(TypeError, match="backend must be a CommunicationBackend, got NoneType"):
        partition_chain({}, None)
    with pytest.raises(TypeError, match="backend must be a CommunicationBackend, got NoneType"):
        TensorParallelLayerPartitioner(None)
    with pytest.raises(TypeError, match="a must be a Layer, got int"):
        partition_chain({"a": 3}, backend)
    assert not partition_chain({}, backend).layers
    if backend.world_size > 1:
        options = {"sequence_parallel": True, "split_output": True}
        with pytest.raises(ValueError, match="dim 1, time, which is not time for 0, a Conv2D"):
            partition_chain(convolutions().children, backend, **options)
    check_sequence(gpt().children, (TIME,))
    with pytest.raises(ValueError, match=r"linear0 takes samples of shape \(5,\): partition"):
        check_sequence(nn.MLP([5, 2]).chain.children, (5,))


@in_worlds(2)
def test_first_values_are_slices_of_those_of_the_whole(backend):
    whole = nn.Model(gpt(), None, input_shape=(TIME,), seed=3)
    partition = partition_chain(whole.chain.children, backend)
    own = nn.Model(nn.Sequential(partition.layers), None, input_shape=(TIME,), seed=3)
    names = [entry.name for entry in whole.parameter_table.entries]
    values = dict(zip(names, whole.get_parameter_chunks(), strict=True))
    for entry, chunk in zip(own.parameter_table.entries, own.get_parameter_chunks(), strict=True):
        value = values[entry.name]
        boxes = partition.boxes.get(entry.name)
        np.testing.assert_array_equal(chunk, value if boxes is None else own_part(value, boxes))
    assert isinstance(partition.layers["embedding"], VocabularyParallelEmbedding)


@pytest.mark.parametrize("sequence", [False, True])
@in_worlds(2, 3, 4)
def test_a_pass_through_a_gpt_sends_the_papers_number_of_bytes(backend, sequence, sent_by_all):
    chain, values = gpt(heads=6, dropout=0.2), values_of(gpt(heads=6))
    partition = partition_chain(
        chain.children, backend, sequence_parallel=sequence, split_output=True
    )
    own = {
        name: own_part(value, partition.boxes[name]) if name in partition.boxes else value
        for name, value in values.items()
    }
    part, x = nn.Sequential(partition.layers), np.zeros((2, TIME), np.int64)
    with sent_by_all(backend) as sent:
        run(part, own, x, np.ones_like, halves=False)
    others, blocks = backend.world_size - 1, 2
    activation = others * 2 * TIME * 6 * 8
    if not sequence:
        # Forward an all-reduce behind the embedding and each sub-layer, backward one before each
        # sub-layer and the head.
        assert sent.nbytes == 2 * activation * (2 * blocks + 1) * 2
        return
    forward = 2 * activation * (2 * blocks + 1)
    backward = 3 * activation * (2 * blocks + 1)
    norms = 2 * others * (2 * blocks + 1) * 2 * 6 * 8
    positions = others * TIME * 6 * 8
    assert sent.nbytes == forward + backward + norms + positions


@pytest.mark.parametrize("halves", [False, True])
@in_worlds(2, 3)
def test_an_output_that_may_not_be_split_is_gathered(backend, halves):
    for make, shape in ((own_layers, (TIME, 6)), (gpt, (TIME,))):
        chain = make()
        x = np.zeros((2, *shape), np.int64) if chain.takes_integers else np.ones((2, *shape))
        partition = partition_chain(chain.children, backend, sequence_parallel=True)
        assert not partition.splits_output
        check_against_whole(
            backend, chain, x, partition, sequence=True, starts=True, ends=True, halves=halves
        )
