"""Activation checkpointing: the same bits, less memory, and the number of its messages."""

import tracemalloc

import numpy as np
import pytest

import mpishard as ms
from mpishard import run_in_threads
from mpishard.models import HybridShardedModel
from mpishard.models.programs.chain import LayerChain
from mpishard.observe.ledger import MemoryCategory
from mpishard.pipeline import ActivationCheckpointConfig as Config
from mpishard.pipeline import RecomputeStrategy
from mpishard.sharding import ShardingConfiguration
from mpishard.testing.worlds import in_worlds

SELECTIVE = RecomputeStrategy.SELECTIVE


def data(kind):
    generator = np.random.default_rng(0)
    if kind == "gpt":
        return generator.integers(0, 17, (10, 8)), generator.integers(0, 17, (10, 8))
    return generator.standard_normal((10, 6)), generator.standard_normal((10, 3))


def plain(kind):
    if kind == "gpt":
        return ms.nn.GPT(
            vocabulary_size=17,
            context_length=8,
            width=12,
            heads=3,
            layers=3,
            seed=1,
            dtype="float64",
            dropout=0.3,
            tied_embeddings=True,
        )
    return ms.nn.MLP([6] * 9 + [3], seed=2, dtype="float64", activation="tanh")


def trained(backend, kind, config, sizes, **choices):
    """Parameters and losses after two steps."""
    configuration = ShardingConfiguration(backend, 0.1, minimum_parameter_group_size=1)
    model = HybridShardedModel(
        plain(kind), configuration, *sizes, checkpoint_config=config, **choices
    )
    x, y = data(kind)
    losses = [model.train(x, y) for _ in range(2)]
    return model.gather_full_parameters().tobytes(), losses


CONFIGS = {
    "pairs": Config(True, 2),
    "root": Config(True, "sqrt"),
    "not the first": Config(True, 3, checkpoint_first_layer=False),
    "one kept": Config(True, 1, max_activations_in_memory=1),
    "selective": Config(True, recompute_strategy=SELECTIVE),
}
MESHES = {
    "replicas": ((1, 1, -1), {"data_parallel_strategy": "fsdp"}),
    "gpipe": ((-1, 1, 1), {"micro_batch_count": 4}),
    "1f1b": ((-1, 1, 1), {"micro_batch_count": 3, "schedule": "1F1B"}),
    "zb-v": ((-1, 1, 1), {"micro_batch_count": 4, "schedule": "ZB-V"}),  # a split backward
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("kind", ["mlp", "gpt"])
@in_worlds(1, 2)
def test_the_bits_are_those_of_kept_activations(backend, kind, mesh):
    sizes, choices = MESHES[mesh]
    whole = tuple(backend.world_size if size == -1 else size for size in sizes)
    expected = trained(backend, kind, None, whole, **choices)
    assert np.isfinite(expected[1]).all()
    for name, config in CONFIGS.items():
        assert trained(backend, kind, config, whole, **choices) == expected, name


def test_the_bits_are_those_of_kept_activations_in_tensor_slices():
    def body(backend):
        choices = {"micro_batch_count": 2, "schedule": "1F1B"}
        sizes = (2, 3, 1)
        expected = trained(backend, "gpt", None, sizes, **choices)
        return all(
            trained(backend, "gpt", CONFIGS[name], sizes, **choices) == expected
            for name in ("pairs", "selective")
        )

    assert all(run_in_threads(6, body))


@pytest.fixture
def computed(monkeypatch):
    """The layers that were computed forward, in order."""
    layers = []
    forward = LayerChain._forward

    def _forward(chain, plan, *arguments, **options):
        layers.extend(index for visit in plan for index in visit.group.layers)
        return forward(chain, plan, *arguments, **options)

    monkeypatch.setattr(LayerChain, "_forward", _forward)
    return layers


def test_only_segments_without_activations_are_computed_again(computed):
    """17 layers in segments of 5: 0-4, 5-9, 10-14, 15-16."""
    config = Config(True, 5)
    first = [*range(17)]
    again = [10, 11, 12, 13, 14, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4]

    def layers(**choices):
        computed.clear()
        backend = ms.InMemoryCommunicationBackend(0, 1, "computed again")
        with backend:
            model = HybridShardedModel(
                plain("mlp"), ShardingConfiguration(backend), 1, 1, 1, **choices
            )
            model.train(*data("mlp"))
            done = [*computed]
            model.predict(data("mlp")[0])
            assert computed[len(done) :] == first * choices.get("micro_batch_count", 1)
        return done

    assert layers(checkpoint_config=Config(False, 5)) == first
    assert layers(checkpoint_config=Config(True, 5, RecomputeStrategy.NONE)) == first
    # Backward begins with the last segment, which is still there ..
    assert layers(checkpoint_config=config) == first + again
    # .. unless other micro-batches come between.
    all_again = [15, 16, *again]
    assert layers(checkpoint_config=config, micro_batch_count=2) == 2 * first + 2 * all_again
    assert layers(checkpoint_config=config, micro_batch_count=2, schedule="1F1B") == 2 * (
        first + again
    )


def test_layers_below_the_first_that_is_trained_are_not_computed_again(computed):
    """Of a segment that it lies in, those before it are: its input comes from them."""
    ends = {}
    for name, config in (("kept", None), ("forgotten", Config(True, 5))):
        with ms.InMemoryCommunicationBackend(0, 1, "frozen layers") as backend:
            model = HybridShardedModel(
                plain("mlp"),
                ShardingConfiguration(backend, 0.1),
                1,
                1,
                1,
                checkpoint_config=config,
            )
            names = [entry.name for entry in model.parameter_entries]
            model.engine.freeze(frozenset(names[:8]))  # of layers 0, 2, 4 and 6
            computed.clear()
            ends[name] = model.train(*data("mlp")), model.gather_full_parameters().tobytes()
    assert ends["forgotten"] == ends["kept"]
    assert computed == [*range(17), 10, 11, 12, 13, 14, 5, 6, 7, 8, 9]


def peak_activations(model_of, x, y, config):
    """Bytes that a step allocates at most beside what is there before it."""
    with ms.InMemoryCommunicationBackend(0, 1, "peak activations") as backend:
        model = HybridShardedModel(
            model_of(), ShardingConfiguration(backend), 1, 1, 1, checkpoint_config=config
        )
        model.train(x, y)  # what is allocated once
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            model.train(x, y)
            return tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()


def test_memory_grows_with_the_root_of_the_depth():
    """Chen et al. 2016, section 4.1: L/n inputs and one segment of n layers."""
    samples, width = 1000, 8
    array = samples * width * 8
    x = np.ones((samples, width))
    peaks = {}
    for hidden in (12, 48):
        for name, config in (("kept", None), ("root", Config(True, "sqrt"))):
            peaks[hidden, name] = peak_activations(
                lambda hidden=hidden: ms.nn.MLP([width] * (hidden + 1), dtype="float64", seed=0),
                x,
                x,
                config,
            )
        layers = 2 * hidden - 1
        root = int(np.ceil(np.sqrt(layers)))
        assert peaks[hidden, "kept"] > hidden * array, "less is kept than backward needs"
        # What is in work beside it: an output, its gradient, the next one's.
        assert peaks[hidden, "root"] < (np.ceil(layers / root) + root + 3) * array
    # Four times the depth: twice the memory.
    assert peaks[48, "root"] < 2.2 * peaks[12, "root"]


def test_memory_of_a_gpt_falls():
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, 32, (8, 32))

    def gpt():
        return ms.nn.GPT(
            vocabulary_size=32, context_length=32, width=32, heads=4, layers=12, dtype="float32"
        )

    configs = {
        "kept": None,
        "blocks": Config(True, 1),
        "root": Config(True, "sqrt"),
        "selective": Config(True, recompute_strategy=SELECTIVE),
    }
    peaks = {n: peak_activations(gpt, tokens, tokens, c) for n, c in configs.items()}
    stream = 8 * 32 * 32 * 4  # bytes of what goes from layer to layer
    layers = 28
    # A block keeps about 13 times what goes in; forgotten it keeps that alone.
    assert peaks["kept"] > 12 * 8 * stream
    assert peaks["blocks"] < (layers + 1 + 24) * stream
    assert peaks["root"] < 0.4 * peaks["kept"]
    assert peaks["selective"] < 0.65 * peaks["kept"]


@in_worlds(2, 3)
def test_units_are_gathered_once_more(backend, monkeypatch):
    """Eight linear layers with a ReLU between; a segment's last unit stays for its backward."""
    monkeypatch.setenv("MPISHARD_ARENA", "off")
    x = np.ones((12, 6))

    def gathers(config, linears_in_unit=1):
        size = 42 * linears_in_unit
        model = HybridShardedModel(
            ms.nn.MLP([6] * 9, dtype="float64", seed=0),
            ShardingConfiguration(backend, minimum_parameter_group_size=size),
            1,
            1,
            -1,
            data_parallel_strategy="fsdp",
            checkpoint_config=config,
        )
        assert {unit.length for unit in model.units} == {size}
        backend.traffic.reset()
        model.train(x, x)
        assert model.memory.peak(MemoryCategory.GATHERED) <= 3 * 8 * size, "a third passing unit"
        sent = np.array([backend.traffic.bytes_sent["all_gather"]])
        # Beside the units: three numbers that all ranks agree on.
        nbytes = int(backend.all_reduce(sent)[0]) - 3 * 8 * (backend.world_size - 1)
        count, rest = divmod(nbytes, (backend.world_size - 1) * 8 * size)
        assert rest >= 0
        assert rest < 8 * 8 * (backend.world_size - 1)
        return count

    assert gathers(None) == 8 + 7  # the last unit is kept
    # Layers 0-3, 4-7, 8-11 are computed again: two units each, of which the second stays.
    assert gathers(Config(True, 4)) == 8 + 1 + 3 * (2 + 1)
    # 0-2, 3-5, 6-8, 9-11: two units, one, two, one.
    assert gathers(Config(True, 3)) == 8 + 1 + (2 + 1) + 1 + (2 + 1) + 1
    # Of units a b c d the segments have a, b, bc, c: b is gathered for 6-8 and again for their
    # backward, and is then still there for 3-5; as c is for 6-8.
    assert gathers(None, 2) == 4 + 3
    assert gathers(Config(True, 3), 2) == 4 + 1 + 2 + 0 + 1
    # While c waits, a and b are gathered one after the other, and not ahead.
    assert gathers(Config(True, 9), 2) == 4 + 1 + 2 + 2


def test_segments():
    layers = ms.nn.MLP([4] * 6, dtype="float32").get_all_layer_info()  # 9 layers
    gpt = ms.nn.GPT(vocabulary_size=8, context_length=4, width=32, heads=2, layers=2)
    blocks = gpt.get_all_layer_info()

    def of(*arguments, infos=layers, keeps_last=True, **choices):
        config = Config(True, *arguments, **choices)
        return [[*s] for s in config.segments(infos, 4, keeps_last=keeps_last)]

    assert of(3) == [[0, 1, 2], [3, 4, 5]]
    assert of(3, keeps_last=False) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert of("sqrt") == of(3)
    assert of(4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert of(4, checkpoint_first_layer=False) == [[1, 2, 3, 4]]
    assert of(4, infos=layers[2:], checkpoint_first_layer=False) == [[2, 3, 4, 5]]
    assert of(9) == of(100) == of() == []
    assert of(infos=[], keeps_last=False) == []
    assert of(1, max_activations_in_memory=2, keeps_last=False) == [[0, 1, 2, 3, 4], [5, 6, 7, 8]]
    assert of(7, max_activations_in_memory=2) == [[0, 1, 2, 3, 4, 5, 6]]
    # A leaf frees nothing: its input must be kept instead.
    assert of(recompute_strategy=SELECTIVE) == []
    assert [info.name for info in blocks[2:6:2]] == ["block0_attention", "block1_attention"]
    assert of(infos=blocks, recompute_strategy=SELECTIVE) == [[2], [4]]
    limited = of(infos=blocks, recompute_strategy=SELECTIVE, max_activations_in_memory=1)
    assert len(limited) == 3


def test_strategies_of_a_configuration():
    none, full = RecomputeStrategy.NONE, RecomputeStrategy.FULL
    assert Config().strategy is none
    assert Config(recompute_strategy=full).strategy is none
    assert Config(True).strategy is full
    assert Config(True, recompute_strategy=none).strategy is none
    assert Config(True, recompute_strategy="selective").strategy is RecomputeStrategy.Selective
    assert RecomputeStrategy.Full is full


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"checkpoint_every_n_layers": 0}, ValueError, "must be 1 or more, or 'sqrt'; got 0"),
        ({"checkpoint_every_n_layers": "log"}, TypeError, "must be an integer, got 'log'"),
        ({"max_activations_in_memory": -1}, ValueError, r"must be 0 \(no limit\) or more, got -1"),
        ({"max_activations_in_memory": 1.5}, TypeError, "must be an integer, got 1.5"),
        ({"recompute_strategy": "some"}, ValueError, "there are selective, full, none"),
        ({"enabled": 1}, TypeError, "enabled must be True or False, got 1"),
        ({"checkpoint_first_layer": None}, TypeError, "must be True or False, got None"),
    ],
)
def test_invalid_configurations_are_refused(arguments, kind, words):
    with pytest.raises(kind, match=words):
        Config(**arguments)


def test_models_without_recomputation_are_refused():
    black_box = ms.FunctionModel(lambda theta, x, y: (0.0, theta * 0), np.ones(4))
    with ms.InMemoryCommunicationBackend(0, 1, "cannot be computed again") as backend:
        configuration = ShardingConfiguration(backend)
        with pytest.raises(ValueError, match=r"checkpoint_config .*ILayeredModel"):
            HybridShardedModel(black_box, configuration, checkpoint_config=Config(True))
        with pytest.raises(TypeError, match="must be an ActivationCheckpointConfig, got True"):
            HybridShardedModel(plain("mlp"), configuration, checkpoint_config=True)
