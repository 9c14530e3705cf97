"""The emulator finds what is wrong with a kernel: else its silence would mean nothing."""

from __future__ import annotations

import re

import numpy as np
import pytest

from horovod_fftcomp.kernels import cuda
from tests.gpu.emulator import BACKWARD, FORWARD, SHUFFLED, Emulator

HEAD = re.search(r"#ifdef __CUDACC__.*?#endif\n", cuda.source(), re.S)[0]  # SHARED_MEMORY
REVERSE = (
    HEAD
    + """
__global__ void reverse(unsigned* values, unsigned n) {
    SHARED_MEMORY(memory);
    unsigned* kept = reinterpret_cast<unsigned*>(memory);
    kept[threadIdx.x] = values[threadIdx.x];
    %s
    values[threadIdx.x] = kept[n - 1 - threadIdx.x];
}
"""
)
WARP = (
    HEAD
    + """
__global__ void warp(unsigned* values, unsigned n) {
    %s
}
"""
)


def launch(source: str, name: str, schedule: int = FORWARD, threads: int = 64, shared: int = 256):
    device = Emulator(schedule, 9)
    values = device.upload(np.arange(threads, dtype=np.uint32))
    kernel = device.functions(source, [name])[name]
    kernel(1, threads, [values, np.uint32(threads)], shared)
    return values


@pytest.mark.parametrize("schedule", [FORWARD, BACKWARD, SHUFFLED])
def test_a_correct_kernel_runs_in_every_schedule(schedule):
    values = launch(REVERSE % "__syncthreads();", "reverse", schedule)
    assert values.tolist() == list(range(63, -1, -1))


def test_a_missing_barrier_gives_another_result_in_some_schedule():
    results = [launch(REVERSE % "", "reverse", schedule).tolist()
               for schedule in (FORWARD, BACKWARD, SHUFFLED)]  # fmt: skip
    assert any(found != list(range(63, -1, -1)) for found in results)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("if (threadIdx.x < 40) __syncthreads();", "24 of 64 threads never come to a barrier"),
        (
            "if (threadIdx.x < 32) __syncthreads(); else __syncthreads();",
            "threads wait at different barriers",
        ),
        ("if (threadIdx.x) __syncwarp();", "wait for a warp operation"),
        (
            "if (threadIdx.x % 2) __syncwarp(); else __syncwarp();",
            "lanes of a warp meet at different calls",
        ),
        ("__ballot_sync(1u << threadIdx.x % 2, 1);", "is not in its mask"),
        ("__ballot_sync(threadIdx.x % 2 ? ~0u : ~1u, 1);", "not in its mask"),
        ("values[0] = __shfl_sync(0xffu, n, 9);", "lane"),
    ],
)
def test_what_never_ends_on_a_device_is_told(body, message):
    with pytest.raises(RuntimeError, match=message):
        launch(WARP % body, "warp")


@pytest.mark.parametrize(
    ("threads", "shared", "message"),
    [(1056, 0, "more than 1024 threads"), (64, 49153, "more than 48 KiB"), (0, 0, "size zero")],
)
def test_launches_that_a_device_refuses_are_refused(threads, shared, message):
    with pytest.raises(RuntimeError, match=message):
        launch(WARP % "", "warp", threads=threads, shared=shared)


def test_arguments_of_another_size_are_refused():
    device = Emulator()
    kernel = device.functions(WARP % "", ["warp"])["warp"]
    with pytest.raises(AssertionError, match="takes arguments of"):
        kernel(1, 32, [np.zeros(1, np.uint32), np.uint64(1)], 0)


def test_shared_memory_begins_as_nan():
    body = """
    SHARED_MEMORY(memory);
    values[threadIdx.x] = reinterpret_cast<unsigned*>(memory)[threadIdx.x];
    """
    assert launch(WARP % body, "warp").tolist() == [0xFFFFFFFF] * 64


def test_arrays_that_must_not_overlap_are_told():
    body = "__global__ void copy(const unsigned* __restrict__ from, unsigned* to) { *to = *from; }"
    device = Emulator()
    kernel, words = device.functions(body, ["copy"])["copy"], device.zeros(4, np.uint32)
    kernel(1, 1, [words[:2], words[2:]], 0)
    with pytest.raises(AssertionError, match="copy: from, which is __restrict__, overlaps to"):
        kernel(1, 1, [words[:3], words[2:]], 0)
