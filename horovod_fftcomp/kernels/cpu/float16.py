"""CPU kernels of float16: conversion to and from float32, without special instructions."""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod_fftcomp.kernels import threads
from horovod_fftcomp.kernels.cpu import vector_values
from horovod_fftcomp.kernels.cpu.buffer_pool import empty
from horovod_fftcomp.kernels.cpu.jit import kernel
from horovod_fftcomp.types import Array

_STEP = 64
_LEAST_STEPS = 1 << 9  # per thread, at least


def to_float16(values: Array, limit: float) -> Array:
    """Return finite float32 ``values`` as float16, clipped to +-``limit``."""
    return _converted(values, np.float16, _to_float16, np.array([limit], np.float32))


def from_float16(values: Array) -> Array:
    """Return float16 ``values`` as float32."""
    return _converted(values, np.float32, _from_float16)


def _converted(values: Array, dtype: type, convert: Any, *options: Array) -> Array:
    out = empty(values.size, dtype)
    source = values if values.dtype == np.float32 else values.view(np.uint16)
    target = out if dtype is np.float32 else out.view(np.uint16)
    done = values.size // _STEP * _STEP

    def work(begin: int, end: int) -> None:
        here = slice(begin * _STEP, end * _STEP)
        convert(source[here], target[here], *options)

    threads.each(work, threads.ranges(values.size // _STEP, _LEAST_STEPS))
    if done < values.size:
        last = np.zeros(_STEP, source.dtype), np.empty(_STEP, target.dtype)
        last[0][: values.size - done] = source[done:]
        convert(*last, *options)
        target[done:] = last[1][: values.size - done]
    return out


@kernel
def _to_float16(source, target, limit):
    src, dst = np.int64(source.ctypes.data), np.int64(target.ctypes.data)
    for i in range(0, source.size, 64):
        vector_values.to_float16(src + 4 * i, dst + 2 * i, np.int64(limit.ctypes.data))


@kernel
def _from_float16(source, target):
    src, dst = np.int64(source.ctypes.data), np.int64(target.ctypes.data)
    for i in range(0, source.size, 64):
        vector_values.from_float16(src + 2 * i, dst + 4 * i)
