"""Kernels of the stand-in: the text for CUDA, compiled for the host by the system's C++ compiler.

`RawKernel` takes the text that CuPy would take. Its signature says what is done to each argument:
``const T*`` is read, ``T*`` is read and written, anything else is a number of that type. All is
checked before the launch: number and types of the arguments, the device of the arrays, races with
other threads' streams. Products and sums are not contracted to fused multiply-adds, and so the bits
are the host's.

A block's threads run one after the other. In a text with ``__syncthreads()``, ``__syncwarp()`` or a
shuffle each of them is a coroutine, which runs until its next barrier. ``__shared__`` arrays
exist; of dynamic shared memory, atomics, and of other functions of CUDA there are none but those
in `HEADER`. A barrier that some threads of a block never reach raises an AssertionError.

Machine code is kept in a folder of the user's temporary files, by a checksum of its text.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cupy_stand_in.array import ndarray, use
from cupy_stand_in.counts import count

__all__ = ["RawKernel", "compiler"]

_OPTIONS = ["-O1", "-U_FORTIFY_SOURCE", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off", "-w"]
_NUMBERS = {
    "float": np.float32, "double": np.float64, "int": np.int32, "unsigned": np.uint32,
    "unsigned int": np.uint32, "long long": np.int64, "unsigned long long": np.uint64,
    "bool": np.bool_,
}  # fmt: skip
_POINTERS = _NUMBERS | {"unsigned short": np.uint16, "unsigned char": np.uint8, "char": np.int8}

HEADER = r"""
#include <math.h>
#include <setjmp.h>
#include <string.h>
#include <ucontext.h>
#include <stdlib.h>
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define __shared__ static thread_local
#define INFINITY_OF(T) ((T)INFINITY)
struct dim3 { unsigned x, y, z; };
static thread_local dim3 blockIdx, threadIdx, blockDim, gridDim;
static const int warpSize = 32;
static inline int __float_as_int(float x) { int y; memcpy(&y, &x, 4); return y; }
static inline float __int_as_float(int x) { float y; memcpy(&y, &x, 4); return y; }
static inline unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
static inline float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned __int128)a * b >> 64; }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline double rsqrt(double x) { return 1.0 / sqrt(x); }
template <class V> static inline V min(V a, V b) { return a < b ? a : b; }
template <class V> static inline V max(V a, V b) { return a < b ? b : a; }

// Coroutines: one for each thread of a block. Each runs until its next barrier. A context makes
// its stack, and later jumps change to it: they are much faster, as they call no kernel.
enum { STARTS, RUNS, AT_BLOCK, AT_WARP, ENDED };
static thread_local int fiber_count, fiber_now, *fiber_state, *fiber_shuffles;
static thread_local ucontext_t *fiber_contexts;
static thread_local jmp_buf fiber_home, *fiber_jumps;
static thread_local unsigned long long *fiber_words;
static void fiber_wait(int where) {
    int me = fiber_now;
    fiber_state[me] = where;
    if (!_setjmp(fiber_jumps[me])) _longjmp(fiber_home, 1);
}
static inline void __syncthreads() { fiber_wait(AT_BLOCK); }
static inline void __syncwarp(unsigned = 0) { fiber_wait(AT_WARP); }
template <class V> static V fiber_shuffle(V value, int lane) {
    int me = fiber_now, from = me / 32 * 32 + lane;
    // Two places in turn: who is late still finds the words of this shuffle during the next one.
    unsigned long long* words = fiber_words + fiber_shuffles[me]++ % 2 * fiber_count;
    words[me] = 0;
    memcpy(&words[me], &value, sizeof(V));
    fiber_wait(AT_WARP);
    V found = value;
    if (lane >= 0 && lane < 32 && from < fiber_count) memcpy(&found, &words[from], sizeof(V));
    return found;
}
template <class V> static V __shfl_sync(unsigned, V v, int lane, int = 32) {
    return fiber_shuffle(v, lane); }
template <class V> static V __shfl_down_sync(unsigned, V v, int by, int = 32) {
    return fiber_shuffle(v, fiber_now % 32 + by); }
template <class V> static V __shfl_up_sync(unsigned, V v, int by, int = 32) {
    return fiber_shuffle(v, fiber_now % 32 - by); }
template <class V> static V __shfl_xor_sync(unsigned, V v, int mask, int = 32) {
    return fiber_shuffle(v, fiber_now % 32 ^ mask); }
"""

_LOOPS = r"""
static thread_local void** call_arguments;
static void call_kernel() { void** a = call_arguments; NAME(ARGUMENTS); }
static void place(int thread) {
    threadIdx.x = thread % blockDim.x;
    threadIdx.y = thread / blockDim.x % blockDim.y;
    threadIdx.z = thread / blockDim.x / blockDim.y;
}
static void fiber_main() {
    for (;;) { call_kernel(); fiber_wait(ENDED); }  // then it runs for the next block
}
static int run_fibers() {
    const size_t stack = 64 * 1024;
    static thread_local char* stacks; static thread_local int room, started;
    if (room < fiber_count) {
        free(stacks); free(fiber_contexts); free(fiber_jumps);
        free(fiber_state); free(fiber_shuffles); free(fiber_words);
        room = fiber_count; started = 0;
        stacks = (char*)malloc(stack * room);
        fiber_contexts = (ucontext_t*)malloc(sizeof(ucontext_t) * room);
        fiber_jumps = (jmp_buf*)malloc(sizeof(jmp_buf) * room);
        fiber_state = (int*)malloc(sizeof(int) * room);
        fiber_shuffles = (int*)malloc(sizeof(int) * room);
        fiber_words = (unsigned long long*)malloc(8 * 2 * room);
    }
    for (int i = 0; i < fiber_count; i++) { fiber_state[i] = RUNS; fiber_shuffles[i] = 0; }
    for (int i = started; i < fiber_count; i++) {
        getcontext(&fiber_contexts[i]);
        fiber_contexts[i].uc_stack.ss_sp = stacks + stack * i;
        fiber_contexts[i].uc_stack.ss_size = stack;
        fiber_contexts[i].uc_link = 0;
        makecontext(&fiber_contexts[i], fiber_main, 0);
        fiber_state[i] = STARTS;
    }
    if (started < fiber_count) started = fiber_count;
    for (;;) {
        int ran = 0, ended = 0, at_block = 0;
        for (int i = 0; i < fiber_count; i++) {
            if (fiber_state[i] == STARTS || fiber_state[i] == RUNS) {
                ran = 1; fiber_now = i; place(i);
                if (!_setjmp(fiber_home)) {
                    if (fiber_state[i] == STARTS) setcontext(&fiber_contexts[i]);
                    _longjmp(fiber_jumps[i], 1);
                }
            }
            ended += fiber_state[i] == ENDED;
            at_block += fiber_state[i] == AT_BLOCK;
        }
        if (ended == fiber_count) return 0;
        if (at_block && at_block == fiber_count) {  // a thread that has ended never arrives
            for (int i = 0; i < fiber_count; i++) fiber_state[i] = RUNS;
            continue;
        }
        for (int first = 0; first < fiber_count; first += 32) {
            int last = first + 32 < fiber_count ? first + 32 : fiber_count, waits = 0, alive = 0;
            for (int i = first; i < last; i++) {
                waits += fiber_state[i] == AT_WARP; alive += fiber_state[i] != ENDED;
            }
            if (waits && waits == alive) {
                ran = 1;
                for (int i = first; i < last; i++)
                    if (fiber_state[i] == AT_WARP) fiber_state[i] = RUNS;
            }
        }
        if (!ran) { room = 0; return 1; }
    }
}
extern "C" int run_on_host(const unsigned* grid, const unsigned* block, void** arguments) {
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    call_arguments = arguments;
    fiber_count = block[0] * block[1] * block[2];
    for (unsigned z = 0; z < grid[2]; z++)
        for (unsigned y = 0; y < grid[1]; y++)
            for (unsigned x = 0; x < grid[0]; x++) {
                blockIdx = {x, y, z};
                if (HAS_BARRIERS) { if (run_fibers()) return 1; continue; }
                for (int i = 0; i < fiber_count; i++) { place(i); call_kernel(); }
            }
    return 0;
}
"""


class _Parameter(NamedTuple):
    kind: str  # its C++ type, without const and the star
    name: str
    is_array: bool
    is_read_only: bool


@functools.cache
def compiler() -> str | None:
    """The C++ compiler of this machine, or None."""
    return shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")


class RawKernel:
    """``cupy.RawKernel``."""

    def __init__(
        self, code: str, name: str, options: tuple[str, ...] = (), backend: str = "nvrtc"
    ) -> None:
        if not isinstance(options, tuple):
            raise TypeError(f"Expected tuple, got {type(options)}")
        assert backend == "nvrtc"
        self.name = name
        self._code = code
        self._parameters = _signature(code, name)

    def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int = 0) -> None:
        assert shared_mem == 0, "there is no dynamic shared memory here"
        sizes = [(ctypes.c_uint * 3)(*(*dims, 1, 1)[:3]) for dims in (grid, block)]
        threads = int(np.prod(list(sizes[1])))
        assert 1 <= threads <= 1024, f"a block has 1 to 1024 threads, got {threads}"
        assert all(1 <= n <= (2**31 - 1 if i == 0 else 65535) for i, n in enumerate(sizes[0]))
        if len(args) != len(self._parameters):
            raise AssertionError(
                f"{self.name} has {len(self._parameters)} parameters and was given {len(args)} "
                "arguments: CUDA would read what lies behind them"
            )
        pointers, kept = (ctypes.c_void_p * max(1, len(args)))(), []
        for place, (parameter, value) in enumerate(zip(self._parameters, args, strict=True)):
            held = self._checked(parameter, value)
            kept.append(held)
            pointers[place] = ctypes.addressof(held)
        count("launches")
        if _library(self._code, self.name, tuple(self._parameters))(*sizes, pointers):
            raise AssertionError(f"{self.name}: some threads of a block never reach a barrier")

    def _checked(self, parameter: _Parameter, value: Any) -> Any:
        where = f"{self.name}, parameter {parameter.name}"
        if parameter.is_array:
            if type(value) is np.uint64 and value == 0:
                return ctypes.c_void_p(None)
            assert isinstance(value, ndarray), f"{where} is a pointer, got {type(value)}"
            expected = _POINTERS[parameter.kind]
            assert value.dtype == expected, f"{where} is {parameter.kind}*, got {value.dtype}"
            assert value.flags.c_contiguous, f"{where}: the array is not C-contiguous"
            use(value, writes=not parameter.is_read_only)
            return ctypes.c_void_p(value.data.ptr)
        if type(value) is int:
            value = np.int64(value)
        elif type(value) is float:
            value = np.float64(value)
        assert isinstance(value, np.generic), f"{where} is a number, got {type(value)}"
        expected = _NUMBERS[parameter.kind]
        assert value.dtype == expected, f"{where} is {parameter.kind}, got {value.dtype}"
        return ctypes.create_string_buffer(value.tobytes(), value.itemsize)


def _signature(code: str, name: str) -> list[_Parameter]:
    names = {alias: kind for kind, alias in re.findall(r"typedef ([\w ]+?) (\w+);", code)}
    found = re.search(
        rf'extern "C" __global__ void\s+(?:__launch_bounds__\(\w+\)\s+)?{name}\(([^)]*)\)', code
    )
    if found is None:
        raise AssertionError(f"the text has no kernel {name}")
    parameters = []
    for text in filter(None, (part.strip() for part in found[1].split(","))):
        form = re.fullmatch(
            r"(const )?([\w ]+?) ?(\* ?(?:__restrict__)?)? ?(\w+)", " ".join(text.split())
        )
        assert form is not None, f"{name}: cannot read the parameter {text!r}"
        kind = names.get(form[2], form[2])
        parameters.append(_Parameter(kind, form[4], bool(form[3]), bool(form[1])))
    return parameters


@functools.cache
def _library(code: str, name: str, parameters: tuple[_Parameter, ...]) -> Any:
    """The kernel's loops over blocks and threads, in machine code."""
    arguments = ", ".join(
        f"*({parameter.kind}{'*' * parameter.is_array}*)a[{place}]"
        for place, parameter in enumerate(parameters)
    )
    has_barriers = re.search(r"__sync(threads|warp)|__shfl_", code) is not None
    loops = _LOOPS.replace("NAME", name).replace("ARGUMENTS", arguments)
    text = HEADER + code + loops.replace("HAS_BARRIERS", str(int(has_barriers)))
    program = compiler()
    assert program is not None, "the fixtures skip tests where there is no compiler"
    digest = hashlib.sha256(repr((text, program, _OPTIONS)).encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir()) / f"mpishard-test-kernels-{os.getuid()}"
    folder.mkdir(exist_ok=True, mode=0o700)
    library = folder / f"{name}-{digest}.so"
    if not library.exists():  # many processes may come here: the last one's file stays
        with tempfile.TemporaryDirectory(dir=folder) as private:
            source, made = Path(private) / "kernel.cpp", Path(private) / "kernel.so"
            source.write_text(text)
            done = subprocess.run(
                [program, *_OPTIONS, str(source), "-o", str(made)],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert done.returncode == 0, f"{name} does not compile:\n{done.stderr}"
            made.replace(library)
    function = ctypes.CDLL(str(library)).run_on_host
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    function.restype = ctypes.c_int
    return function
