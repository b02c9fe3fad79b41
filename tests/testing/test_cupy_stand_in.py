"""The stand-in refuses what CuPy refuses. With ``--gpu`` CuPy is asked whether it does."""

import threading

import numpy as np
import pytest
from cupy_stand_in import installed
from cupy_stand_in.counts import Counts, counting
from cupy_stand_in.kernels import compiler

needs_compiler = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")


def test_arrays_do_not_become_numpys_unasked(gpu):
    a = gpu.arange(3)
    for convert in (np.asarray, np.array, np.ascontiguousarray, lambda x: np.empty(3).fill(x)):
        with pytest.raises((TypeError, ValueError)):
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
        lambda cp, d, h: cp.sum(h),
        lambda cp, d, h: cp.zeros_like(h) and cp.add(h, 1),
    ],
)
def test_hosts_and_devices_do_not_mix(mix, gpu):
    with pytest.raises((TypeError, ValueError, AttributeError)):
        mix(gpu, gpu.ones(3), np.ones(3))


def test_numpys_functions_hand_over(gpu):
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


def test_flags_cannot_be_set(gpu):
    a = gpu.ones((2, 3))
    assert a.flags.c_contiguous
    assert not a.T.flags.c_contiguous
    assert (a.T + a.T).flags.c_contiguous
    with pytest.raises(AttributeError):
        a.flags.writeable = False
    assert not hasattr(a.flags, "writeable")


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


def test_running_sums_cancel(gpu):
    values = gpu.asarray(np.array([1e8, 1.0], np.float32))
    sums = gpu.add.reduceat(values, gpu.asarray([0, 1]))
    assert sums.get()[1] == 0


def test_what_the_stand_in_refuses_though_one_release_of_cupy_may_not():
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
            with pytest.raises(ValueError, match="different from the current device"):
                there + 1
            assert there.copy().data.device_id == 1
        with pytest.raises(RuntimeError, match="invalid device"):
            cp.cuda.Device(2).use()


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


def test_of_threads_that_begin_at_once_none_is_overlooked():
    with installed() as cp:
        a, own = cp.zeros(4), cp.cuda.get_current_stream()
        own.synchronize()

        class Slow:
            """A stream of which one asks how far it is while another thread begins to write."""

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


def test_it_leaves_no_trace():
    import sys

    before = sys.modules.get("cupy")
    with installed() as cp:
        assert sys.modules["cupy"] is cp
    assert sys.modules.get("cupy") is before


def test_memory_that_a_peer_still_reads_is_not_let_go():
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
def test_a_barrier_that_some_threads_never_reach_is_found():
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
