"""Functions on arrays that depend on the array module and on the machine."""

from __future__ import annotations

import mmap
import platform
import resource
import threading
from pathlib import Path

import numpy as np
import pytest

from mpishard.base import arrays
from mpishard.base.devices import Device


@pytest.fixture
def caches(tmp_path):
    """A directory as Linux describes a core's caches in: L1 data, L1 instructions, L2, L3."""
    for index, (level, size) in enumerate([(1, "32K"), (1, "32K"), (2, "1024K"), (3, "32768K")]):
        cache = tmp_path / f"index{index}"
        cache.mkdir()
        (cache / "level").write_text(f"{level}\n")
        (cache / "size").write_text(f"{size}\n")
    return tmp_path


def test_the_second_level_cache_is_found(caches):
    assert arrays._l2_bytes(caches) == 1024 * 1024


def test_a_default_is_used_if_the_machine_does_not_list_its_caches(tmp_path, caches):
    assert arrays._l2_bytes(tmp_path / "missing") is None
    (caches / "index2" / "size").write_text("unknown")
    assert arrays._l2_bytes(caches) is None


def test_is_own_is_true_for_memory_that_numpy_allocated(tmp_path):
    own = np.zeros(12)
    for array in (own, own[2:], own.reshape(3, 4)[1:], own.view(np.uint8)[8:]):
        assert arrays.is_own(array)
    path = tmp_path / "mapped"
    own.tofile(path)
    mapped = np.memmap(path, np.float64, "r+")
    brought = np.frombuffer(bytearray(96))
    anonymous = np.frombuffer(mmap.mmap(-1, 96))
    for array in (mapped, mapped.view(np.ndarray)[2:], brought, brought.reshape(3, 4), anonymous):
        assert not arrays.is_own(array)


def test_an_array_of_jax_or_pytorch_is_read_in_its_own_memory():
    torch = pytest.importorskip("torch")
    jax = pytest.importorskip("jax")
    tensor = torch.arange(4.0, requires_grad=True)
    for given, address in (
        (tensor, tensor.data_ptr()),
        (own := jax.numpy.arange(4.0), own.unsafe_buffer_pointer()),
    ):
        found = arrays.as_array(given)
        assert (type(found), found.tolist()) == (np.ndarray, [0, 1, 2, 3])
        assert arrays.address(found) == address
    pair = torch.ones(2, 2)
    for odd, reason in (
        (tensor.to_sparse(), r"to_dense\(\)"),
        (tensor.bfloat16(), "BFloat16"),
        (tensor.to("meta"), "meta"),
        (torch.view_as_complex(pair).conj().imag, "resolve_neg"),  # which DLPack would export as 1
    ):
        with pytest.raises(
            TypeError, match=rf"a torch\.Tensor cannot be read as .*{reason}.*dense"
        ):
            arrays.as_array(odd)
    half = jax.numpy.ones(2, "bfloat16")
    assert (arrays.as_array(half).dtype.name, arrays.as_array(half).sum()) == ("bfloat16", 2)


class Exported:
    """An array of a library that knows DLPack alone."""

    def __init__(self, array):
        self.__dlpack__ = array.__dlpack__
        self.__dlpack_device__ = array.__dlpack_device__


def test_an_array_that_only_exports_dlpack_is_read_in_its_own_memory(gpu):
    for own in (np.arange(3.0), gpu.arange(3.0)):
        found = arrays.as_array(Exported(own))
        assert type(found) is type(own)
        assert arrays.to_host(found).tolist() == [0, 1, 2]
        assert arrays.address(found) == arrays.address(own)
        assert arrays.as_array(own) is own
    for other in (None, [1.0], 2.0, "text"):
        assert arrays.as_array(other) is other


def two_gpus(gpu):
    if gpu.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")


@pytest.mark.parametrize("shape", [(0,), (1,), (1, 4), (4, 1), (2, 3), ()])
def test_an_array_of_another_gpu_is_copied_whatever_its_shape(shape, gpu):
    two_gpus(gpu)
    with gpu.cuda.Device(1):
        source = gpu.ones(shape)
    target = gpu.zeros(shape)
    arrays.copy_into(target, source)
    assert (target.get() == 1).all()


def test_the_gpu_of_an_array_is_waited_for(gpu):
    two_gpus(gpu)
    with gpu.cuda.Device(1):
        array = gpu.zeros(4)
    arrays.synchronize(array)
    assert gpu.cuda.runtime.getDevice() == 0
    errors = []

    def change():
        try:
            with gpu.cuda.Device(1):
                array[...] = 1
                gpu.cuda.get_current_stream().synchronize()
        except AssertionError as error:  # of the stand-in: a race
            errors.append(error)

    thread = threading.Thread(target=change)
    thread.start()
    thread.join()
    assert not errors
    assert array.get().tolist() == [1] * 4


def test_a_chunk_is_as_many_bytes_for_every_dtype():
    single, double = np.zeros(3, np.float32), np.zeros(3, np.float64)
    assert arrays.chunk_length(single) == 2 * arrays.chunk_length(double) > 1


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_freed_memory_is_used_again_without_the_kernel():
    def pages() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        step = [np.ones(2**18) for _ in range(48)]  # 96 MiB, as a step's activations
        del step
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    arrays.reuse_freed_memory()
    pages()
    assert pages() < 1000  # of 24576


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_freed_memory_between_arrays_that_live_on_returns_to_the_kernel():
    def resident() -> int:
        words = Path("/proc/self/statm").read_text(encoding="ascii").split()
        return int(words[1]) * resource.getpagesize()

    arrays.reuse_freed_memory()
    parameters = [np.ones(2**18) for _ in range(48)]  # 96 MiB
    del parameters[::2]
    before = resident()
    arrays.return_freed_memory()
    assert before - resident() > 40 * 2**20


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_squares_are_added_in_blocks_of_1024(device, dtype):
    """The bits of a block are its own: wherever it lies, and whatever stands behind it."""
    if device == "cuda":
        cuda = Device.parse(device).namespace.cuda
        cuda.varies = {"sizes", "alignment"}  # in the stand-in
    values = np.random.default_rng(0).standard_normal(3 * 1024 + 7).astype(dtype)
    memory = Device.parse(device).put(np.zeros(4 * 1024, dtype))
    whole = arrays.to_host(arrays.block_squares(Device.parse(device).put(values)))
    assert (whole.shape, whole.dtype) == ((4,), np.float64)
    squares = values.astype(np.float64) ** 2
    exact = [part.sum() for part in np.split(squares, [1024, 2048, 3072])]
    np.testing.assert_allclose(whole, exact, rtol=1e-6 if dtype is np.float32 else 1e-14)
    for shift in (1, 3, 64):
        for count in (1, 2, 3):
            part = memory[shift : shift + 1024 * count]
            arrays.copy_into(part, values[: 1024 * count])
            assert arrays.to_host(arrays.block_squares(part)).tolist() == whole[:count].tolist()
    assert arrays.block_squares(memory[:0]).shape == (0,)
    huge = Device.parse(device).put(np.full(3, np.finfo(dtype).max))
    assert arrays.to_host(arrays.block_squares(huge)).tolist() == [np.inf]
