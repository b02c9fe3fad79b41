"""The stand-in refuses the calls that CuPy refuses. ``--gpu`` runs the same tests on CuPy."""

import threading
from contextlib import nullcontext

import numpy as np
import pytest
from cupy_stand_in import installed
from cupy_stand_in.counts import Counts, counting
from cupy_stand_in.cuda import current
from cupy_stand_in.kernels import compiler

needs_compiler = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")


def test_device_arrays_are_not_converted_silently(gpu):
    a = gpu.arange(3)
    for convert in (np.asarray, np.array, np.ascontiguousarray, lambda x: np.empty(3).fill(x)):
        # NumPy first warns that __array__ has no argument ``copy``, and warnings are errors here.
        with pytest.raises((TypeError, ValueError, DeprecationWarning)):
            convert(a)
    with pytest.raises(TypeError):
        np.zeros(3)[:] = a
    assert type(a.get()) is np.ndarray


@pytest.mark.parametrize(
    "mix",
    [
        lambda cp, d, h: d + h,
        lambda cp, d, h: h + d,
        lambda cp, d, h: cp.add(d, h),
        lambda cp, d, h: np.add(d, h),
        lambda cp, d, h: d.__iadd__(h),
        lambda cp, d, h: np.add(h, h, out=d),
        lambda cp, d, h: cp.concatenate([d, h]),
        lambda cp, d, h: cp.dot(d, h),
        lambda cp, d, h: d @ h,
        lambda cp, d, h: d.__setitem__(slice(1, 3), h[1:]),
        lambda cp, d, h: d.fill(h),
        lambda cp, d, h: d.set(h.astype("float32")),
        lambda cp, d, h: d.set(h[:2]),
        lambda cp, d, h: d.get(out=np.empty(3, "float32")),
        lambda cp, d, h: cp.zeros_like(h) and cp.add(h, 1),
    ],
)
def test_host_and_device_arrays_do_not_mix(mix, gpu):
    with pytest.raises((TypeError, ValueError, AttributeError)):
        mix(gpu, gpu.ones(3), np.ones(3))


def test_numpy_functions_dispatch_to_the_stand_in(gpu):
    a = gpu.arange(4.0)
    for result in (np.multiply(a, 2), np.sqrt(a), np.concatenate([a, a]), np.sum(a), 2 - a, -a):
        assert type(result) is gpu.ndarray
    b = gpu.empty(4)
    assert np.add(a, a, out=b) is b
    assert b.get().tolist() == [0, 2, 4, 6]
    assert type(np.empty_like(a)) is gpu.ndarray


def test_reductions_stay_on_the_device(gpu):
    total = gpu.arange(4.0).sum()
    assert type(total) is gpu.ndarray
    assert total.shape == ()
    assert float(total) == 6
    assert bool(total > 5)
    with pytest.raises(ValueError, match="truth value"):
        bool(gpu.ones(2))


def test_reductions_of_host_arrays_return_numpy_arrays(gpu):
    assert type(gpu.sum(np.ones(3))) is np.float64


def test_no_array_is_read_only(gpu):
    a = gpu.ones((2, 3))
    assert a.flags.c_contiguous
    assert not a.T.flags.c_contiguous
    assert (a.T + a.T).flags.c_contiguous
    a.flags.writeable = False  # ignored
    assert not hasattr(a.flags, "writeable")
    a += 1
    assert a.get().tolist() == [[2, 2, 2]] * 2


def test_views_know_their_memory(gpu):
    a = gpu.zeros(6)
    view = a[2:].reshape(2, 2)
    view += 1
    assert a.get().tolist() == [0, 0, 1, 1, 1, 1]
    assert view.base is a
    assert view.data.ptr == a.data.ptr + 16
    assert gpu.may_share_memory(a, view)
    assert gpu.arange(6)[gpu.asarray([4, 0])].get().tolist() == [4, 0]
    assert gpu.arange(3).take(gpu.asarray([1, 3])).get().tolist() == [1, 0]  # wraps


def test_functions_replace_tiny_float32_numbers_by_0_and_copies_do_not(gpu):
    tiny = gpu.asarray(np.array([1e-39, -1e-39], np.float32))
    assert (tiny * 2.0).get().tolist() == [0, 0]
    assert (tiny + tiny).get().tolist() == [0, 0]
    assert (gpu.asarray(np.array([1e-30], np.float32)) * 1e-10).get().tolist() == [0]
    assert (tiny.copy().get() != 0).all()
    assert (gpu.asarray(np.array([1e-310])) * 2.0).get() == 2e-310  # float64


def test_running_sums_have_rounding_errors(gpu):
    values = gpu.asarray(np.array([1e8, 1.0], np.float32))
    sums = gpu.add.reduceat(values, gpu.asarray([0, 1]))
    assert sums.get()[1] == 0


def test_arguments_that_only_some_releases_of_cupy_refuse():
    with installed(device_count=2) as cp:
        with pytest.raises(TypeError, match="releases of CuPy differ"):
            cp.ones(2, "float32") * np.float64(2)
        with pytest.raises(ValueError, match="Unsupported dtype"):
            cp.empty(2, "O")
        with pytest.raises(TypeError, match="not on the device"):
            cp.ones(2)[[0, 1]]
        with pytest.raises(AttributeError):
            cp.linalg.norm(cp.ones(2))
        there = cp.ones(2)
        with cp.cuda.Device(1):
            for use in (lambda: there + 1, lambda: there.fill(0), lambda: cp.add(1, 1, out=there)):
                with pytest.raises(ValueError, match="different from the current device"):
                    use()
            assert there.copy().data.device_id == 1
        with pytest.raises(AssertionError, match="set twice"):
            there[cp.asarray([0, 0])] += cp.ones(2)
        with pytest.raises(RuntimeError, match="invalid device"):
            cp.cuda.Device(2).use()


@pytest.mark.parametrize(
    ("shape", "is_copied"),
    [((2,), True), ((3, 2), True), ((1,), False), ((1, 4), False), ((0,), False), ((), True)],
)
def test_an_item_of_another_device_is_copied_only_if_no_kernel_is_needed(shape, is_copied):
    """CuPy strips leading dims of length 1, of the source alone, and then compares strides."""
    with installed(device_count=2) as cp:
        target = cp.zeros((7, *shape))[5] if shape else cp.zeros(())
        with cp.cuda.Device(1):
            source = cp.ones(shape)
        with nullcontext() if is_copied else pytest.raises(ValueError, match="different from"):
            target[...] = source
            assert (target.get() == 1).all()


def test_products_into_an_array_are_of_its_dtype_and_contiguous(gpu):
    a = gpu.ones((2, 2))
    with pytest.raises(ValueError, match="dtype"):
        gpu.dot(a, a, out=gpu.empty((2, 2), "float32"))
    with pytest.raises(ValueError, match="C-contiguous"):
        a.dot(a, out=gpu.empty((2, 2)).T)
    with pytest.raises(TypeError):
        a.dot(np.ones((2, 2)))


def test_a_cast_keeps_the_order_of_dims(gpu):
    turned = gpu.ones((2, 3)).T
    for cast in (turned.astype("float32"), turned.astype(turned.dtype), gpu.array(turned)):
        assert cast.flags.f_contiguous
        assert not cast.flags.c_contiguous
    assert turned.astype("float32", order="C").flags.c_contiguous
    assert turned.copy().flags.c_contiguous
    assert turned.astype(turned.dtype, copy=False) is turned


def test_pinned_memory_is_rounded_by_the_pool_only(gpu):
    cuda = gpu.cuda
    for memory, nbytes in (
        (cuda.alloc_pinned_memory(8000), 8192),
        (cuda.alloc_pinned_memory(1), 512),
        (cuda.PinnedMemoryPointer(cuda.PinnedMemory(8000), 0), 8000),
    ):
        assert np.frombuffer(memory, np.uint8).size == nbytes


@pytest.mark.parametrize("waits", [False, True])
def test_pinned_memory_may_change_when_the_copy_was_waited_for(waits):
    with installed() as cp:
        source = np.frombuffer(cp.cuda.alloc_pinned_memory(512), np.float64)
        target, stream = cp.empty(64), cp.cuda.get_current_stream()
        target.set(source)
        if waits:
            stream.synchronize()
        source[3] = 1
        if waits:
            target.get()
        else:
            with pytest.raises(AssertionError, match="pinned memory was changed"):
                target.get()
        pageable = np.zeros(64)
        target.set(pageable)  # is buffered
        pageable[0] = 1
        stream.synchronize()


def test_addresses_are_given_only_to_a_library_for_cuda_and_when_the_stream_is_idle(monkeypatch):
    with installed(device_count=2) as cp:
        array, stream = cp.zeros(4), cp.cuda.get_current_stream()
        stream.synchronize()
        for export in (
            lambda a: a.__cuda_array_interface__["data"][0],
            lambda a: np.from_dlpack(_Host(a)).ctypes.data,
        ):
            monkeypatch.setenv("MPISHARD_CUDA_AWARE", "0")
            with pytest.raises(AssertionError, match="not said to be built"):
                export(array)
            monkeypatch.setenv("MPISHARD_CUDA_AWARE", "1")
            assert export(array) == array.data.ptr
            assert export(array) == array.data.ptr  # and this is no work of the stream
            array + 1
            recycled = cp.empty(4)  # may have the memory of the sum
            for each in (array, recycled):
                with pytest.raises(AssertionError, match="not synchronized its stream"):
                    export(each)
            with cp.cuda.Device(1):
                stream.synchronize()  # of another device
            with pytest.raises(AssertionError, match="not synchronized its stream"):
                export(recycled)
            stream.synchronize()
            assert export(recycled) == recycled.data.ptr


class _Host:
    """An array as mpi4py treats it: it asks for the address without a wait."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options | {"stream": -1})

    def __dlpack_device__(self):
        return 1, 0


def test_last_bits_depend_on_sizes_and_alignment_on_request():
    """cuBLAS and CUB sum in an order of their own; elementwise functions have none."""
    values = np.random.default_rng(0).standard_normal(64)
    with installed() as cp:

        def bits(start, stop):
            memory = cp.zeros(256)
            memory[start:stop].set(values[: stop - start])
            rows = memory[start:stop].reshape(-1, 8)
            sums = rows.sum(axis=1), cp.einsum("ij,ij->i", rows, rows), rows @ cp.ones((8, 1))
            return [part[0].tobytes() for part in (*sums, rows * rows)]

        for varies, first, second in (
            ({"sizes"}, (0, 8), (0, 16)),
            ({"alignment"}, (0, 8), (1, 9)),
        ):
            assert bits(*first) == bits(*second)
            cp.cuda.varies = varies
            alike = [one == other for one, other in zip(bits(*first), bits(*second), strict=True)]
            assert alike == [False, False, False, True]
            cp.cuda.varies = set()


def test_work_is_counted():
    with installed(device_count=2) as cp:
        a, b = cp.zeros(4), cp.zeros(4)
        with cp.cuda.Device(1):
            there = cp.zeros(4)
        with counting() as counts:
            a += b * 2
            a[1:3]
            a[...] = b
            a[:1] = b[:1]
            a[...] = there
            a.set(np.ones(4))
            float(a[0])
            cp.cuda.get_current_stream().synchronize()
        assert counts == Counts(launches=3, copies=3, reads=1, waits=1)
        assert counts.operations == 7


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("first", ["write", "read"])
def test_races_between_threads_are_found(waits, first):
    with installed() as cp:
        a, outcomes = cp.zeros(4), []
        cp.cuda.get_current_stream().synchronize()

        def other():
            if first == "write":
                a[:2] = 1
            else:
                a[:2] + 1
            if waits:
                cp.cuda.get_current_stream().synchronize()

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        a[2:] += 1  # other bytes
        try:
            a[1:2] = 5
        except AssertionError as error:
            outcomes.append(str(error))
        a._memory._work.clear()  # else the end of the array is a race, too
        assert bool(outcomes) == (not waits)
        assert waits or ("written" if first == "write" else "read") in outcomes[0]


def test_races_of_threads_that_begin_at_once_are_found():
    with installed() as cp:
        a, own = cp.zeros(4), current.stream
        own.synchronize()

        class Slow:
            """A stream whose state is read while another thread begins to write."""

            thread = None

            @property
            def syncs(self):
                if threading.current_thread() is threading.main_thread():
                    thread.start()
                    thread.join(0.2)  # it has begun, or waits for its turn
                return 1

        thread = threading.Thread(target=lambda: a.__setitem__(slice(0, 1), 1))
        a._memory._work = {(Slow(), 0, 0, 0, False)}
        a[2:] = 1
        thread.join()
        streams = {entry[0] for entry in a._memory._work}
        a._memory._work.clear()
        assert own in streams
        assert len(streams) == 2


def test_the_stand_in_is_removed_after_a_test():
    import sys

    before = sys.modules.get("cupy")
    with installed() as cp:
        assert sys.modules["cupy"] is cp
    assert sys.modules.get("cupy") is before


def test_freed_memory_that_a_peer_still_reads_is_a_race():
    with installed() as cp:
        a = cp.zeros(4)
        cp.cuda.get_current_stream().synchronize()
        thread = threading.Thread(target=a.copy)
        thread.start()
        thread.join()
        with pytest.raises(AssertionError, match="memory is free"):
            a._memory.__del__()
        a._memory._work.clear()


SUMS = """
extern "C" __global__ void sums(const float* x, float* y, int count)
{
    __shared__ float warps[4];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float value = i < count ? x[i] : 0.0f;
    for (int by = 16; by; by /= 2) value += __shfl_down_sync(0xffffffffu, value, by);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
    __syncthreads();
    if (threadIdx.x == 0) y[blockIdx.x] = warps[0] + warps[1] + warps[2] + warps[3];
}
"""


def test_a_kernel_has_shared_memory_barriers_and_shuffles(gpu):
    kernel = gpu.RawKernel(SUMS, "sums", options=("--fmad=false",))
    x, y = gpu.asarray(np.arange(300, dtype=np.float32)), gpu.zeros(3, "float32")
    kernel((3,), (128,), (x, y, np.int32(300)))
    assert y.get().tolist() == [sum(range(128)), sum(range(128, 256)), sum(range(256, 300))]


def test_a_kernel_refuses_arguments_that_its_signature_does_not_fit():
    with installed(device_count=2) as cp:
        kernel = cp.RawKernel(SUMS, "sums")
        x, y, count = cp.zeros(128, "float32"), cp.zeros(1, "float32"), np.int32(128)
        for wrong, message in (
            ((x, y), "3 parameters and was given 2"),
            ((x, y, 128), "count is int, got int64"),
            ((x, cp.zeros(1), count), "y is float\\*, got float64"),
            ((x, 1.0, count), "y is a pointer"),
            ((cp.zeros((128, 2), "float32")[:, 0], y, count), "x: the array is not C-contiguous"),
        ):
            with pytest.raises(AssertionError, match=message):
                kernel((1,), (128,), wrong)
        with cp.cuda.Device(1), pytest.raises(ValueError, match="different from the current"):
            kernel((1,), (128,), (x, y, count))
        with pytest.raises(AssertionError, match="no kernel other"):
            cp.RawKernel(SUMS, "other")


@needs_compiler
def test_a_barrier_that_some_threads_do_not_reach_is_an_error():
    text = """
extern "C" __global__ void stuck(float* x)
{
    if (threadIdx.x < 40) __syncthreads();
    x[threadIdx.x] = 1;
}
"""
    with installed() as cp, pytest.raises(AssertionError, match="never reach a barrier"):
        cp.RawKernel(text, "stuck")((1,), (64,), (cp.zeros(64, "float32"),))


@needs_compiler
@pytest.mark.parametrize("writes", [False, True])
def test_a_kernel_that_reads_what_another_thread_writes_is_a_race(writes):
    text = f"""
extern "C" __global__ void touch({"" if writes else "const "}float* x, float* y)
{{
    y[0] = x[0];
}}
"""
    with installed() as cp:
        x, y = cp.zeros(1, "float32"), cp.zeros(1, "float32")
        cp.cuda.get_current_stream().synchronize()
        # Two threads may read one array at the same time, and only a write is refused.
        thread = threading.Thread(target=x.sum)
        thread.start()
        thread.join()
        if writes:
            with pytest.raises(AssertionError, match="may still be read"):
                cp.RawKernel(text, "touch")((1,), (1,), (x, y))
        else:
            cp.RawKernel(text, "touch")((1,), (1,), (x, y))
        x._memory._work.clear()


def test_launches_copies_reads_and_waits_are_counted():
    with installed() as cp:
        x, y = cp.zeros(4), cp.zeros(4)
        with counting() as counts:
            x += y
            x[...] = y
            x[...] = 3
            x.set(np.ones(4))
            x.get()
            float(x.sum())
            cp.cuda.get_current_stream().synchronize()
        y += 1
    assert counts == Counts(launches=3, copies=2, reads=2, waits=1)
    assert counts.operations == 7
