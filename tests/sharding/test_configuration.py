"""ShardingConfiguration: defaults, presets, and what it refuses."""

import numpy as np
import pytest

import mpishard as ms
from mpishard import ShardingConfiguration
from mpishard.communication import InMemoryCommunicationBackend

FLAGS = (
    "auto_sync_gradients",
    "enable_gradient_compression",
    "cpu_offload_optimizer",
    "cpu_offload_gradients",
    "cpu_offload_parameters",
    "allow_nonfinite",
)
# auto_sync, group size, compression, offloaded optimizer, gradients, parameters
PRESETS = {
    "create_default": (True, 1024, False, False, False, False),
    "create_for_high_bandwidth": (True, 512, False, False, False, False),
    "create_for_low_bandwidth": (True, 4096, True, False, False, False),
    "create_for_zero_offload": (True, 1024, False, True, False, False),
    "create_for_zero_offload_full": (True, 1024, False, True, True, True),
}


@pytest.fixture
def backend():
    return InMemoryCommunicationBackend(0, 1, "configuration")


def choices(config):
    return (
        config.auto_sync_gradients,
        config.minimum_parameter_group_size,
        config.enable_gradient_compression,
        config.cpu_offload_optimizer,
        config.cpu_offload_gradients,
        config.cpu_offload_parameters,
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_presets(backend, preset):
    create = getattr(ShardingConfiguration, preset)
    config = create(backend)
    assert choices(config) == PRESETS[preset]
    assert config.communication_backend is backend
    assert config.learning_rate == 0.01
    assert create(backend, 0.5).learning_rate == 0.5
    with pytest.raises(TypeError, match="NoneType"):
        create(None)
    with pytest.raises(ValueError, match="above 0"):
        create(backend, 0)


def test_the_constructor_gives_the_defaults(backend):
    assert choices(ShardingConfiguration(backend)) == PRESETS["create_default"]


@pytest.mark.parametrize("name", FLAGS)
def test_flags_can_be_set_and_take_bools_only(backend, name):
    config = ShardingConfiguration(backend)
    for value in (True, False):
        setattr(config, name, value)
        assert getattr(config, name) is value
        assert getattr(ShardingConfiguration(backend, **{name: value}), name) is value
    for value in ("no", 1, None):
        with pytest.raises(TypeError, match=name):
            setattr(config, name, value)
        with pytest.raises(TypeError, match=name):
            ShardingConfiguration(backend, **{name: value})


def test_a_misspelt_choice_is_refused(backend):
    config = ShardingConfiguration(backend)
    with pytest.raises(AttributeError, match=r"no precison; did you mean precision\?"):
        config.precison = "bfloat16"
    data = ms.OptimizationInputData(x_train=[1.0], y_train=[2.0])
    with pytest.raises(AttributeError, match=r"no batch_sise; did you mean batch_size\?"):
        data.batch_sise = 4


def test_the_backend_is_read_only(backend):
    with pytest.raises(AttributeError):
        ShardingConfiguration(backend).communication_backend = backend


@pytest.mark.parametrize("leaves", [0, -2, 3, 12])
def test_leaves_are_a_power_of_two(backend, leaves):
    with pytest.raises(ValueError, match=f"power of two.*got {leaves}"):
        ShardingConfiguration(backend, gradient_leaves=leaves)


@pytest.mark.parametrize("leaves", [True, 4.0, "4"])
def test_leaves_are_an_integer(backend, leaves):
    with pytest.raises(TypeError, match="gradient_leaves must be an integer"):
        ShardingConfiguration(backend, gradient_leaves=leaves)


def test_leaves(backend):
    config = ShardingConfiguration(backend)
    assert config.gradient_leaves is None
    config.gradient_leaves = 16
    assert config.gradient_leaves == 16


def test_arrays_are_no_names(backend):
    with pytest.raises(ValueError, match=r"precision must be .* None .* got array\("):
        ShardingConfiguration(backend, precision=np.ones(2))
    with pytest.raises(TypeError, match=r"replica_size must be an integer, got array\("):
        ShardingConfiguration(backend, replica_size=np.ones(2))
