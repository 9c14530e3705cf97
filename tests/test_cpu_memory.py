"""Large arrays use freed memory again, within bounds."""

from __future__ import annotations

import threading
from itertools import pairwise

import numpy as np
import pytest

from horovod_fftcomp.kernels.cpu import buffer_pool
from horovod_fftcomp.kernels.host.ops import HOST

N = 1 << 20  # float32: 4 MiB


@pytest.fixture
def pool(monkeypatch):
    fresh = buffer_pool.Pool()
    monkeypatch.setattr(buffer_pool, "pool", fresh)
    return fresh


def address(array) -> int:
    return array.ctypes.data


def test_freed_memory_serves_the_next_array_of_its_size(pool):
    stays, first = buffer_pool.empty(N), buffer_pool.empty(N)
    place = address(first)
    view = first[10:]
    del first
    assert address(buffer_pool.empty(N)) != place, "a view still uses it"
    del view
    assert address(buffer_pool.empty(N)) == place
    assert address(buffer_pool.zeros(N // 2, np.complex64)) == place, "whatever the dtype"
    assert stays.size == N


def test_arrays_are_aligned_and_writable(pool):
    for n in (1, 1000, N, N + 1):
        array = buffer_pool.empty(n)
        array[:] = 1
        assert array.dtype == np.float32
        assert array.shape == (n,)
        assert n < N or address(array) % buffer_pool.ALIGNMENT == 0


def test_what_is_kept_is_bounded(pool):
    stays = [buffer_pool.empty(N)]
    for n in range(N, 3 * N, N // 7):
        stays[:] = buffer_pool.empty(n), buffer_pool.empty(N)
        held = pool.used_nbytes + pool.kept_nbytes
        assert held <= buffer_pool.SLACK * pool.most_nbytes
        assert pool.kept_nbytes == sum(size * len(b) for size, b in pool.kept.items())


def test_nothing_is_kept_when_nothing_is_in_use(pool):
    arrays = [buffer_pool.empty(N) for _ in range(3)]
    arrays.pop()
    assert pool.kept_nbytes > 4 * N
    arrays.clear()
    assert (pool.kept, pool.kept_nbytes, pool.used_nbytes, pool.most_nbytes) == ({}, 0, 0, 0)


def test_threads_get_memory_of_their_own(pool):
    errors = []

    def work(number: int) -> None:
        for _ in range(300):
            array = buffer_pool.empty(N // 4)
            array[::1024] = number
            if (array[::1024] != number).any():
                errors.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert pool.used_nbytes == 0


@pytest.mark.parametrize("kind", [np.float32, np.complex64])
@pytest.mark.parametrize("size", [3, 1 << 18])  # from the heap, from the pool
def test_arrays_in_a_row_are_joined_in_their_memory_and_no_others(kind, size):
    width, sizes = np.dtype(kind).itemsize // 4, [size, 0, 2 * size]
    ends = np.cumsum([0, *(width * n for n in sizes)])
    reals = [whole[a:b] for whole in [buffer_pool.empty(ends[-1])] for a, b in pairwise(ends)]
    parts = [array.view(kind) for array in reals]
    for number, part in enumerate(parts):
        part[:] = number + 1
    whole = HOST.rejoin(parts, sizes, kind)
    assert whole.dtype == kind
    assert whole.tolist() == [1] * size + [3] * 2 * size
    whole[0] = 7
    assert parts[0][0] == 7
    copied = HOST.join(parts, sizes, kind)
    for others in (parts[::-1], [parts[0], None, parts[2]], [part.copy() for part in parts]):
        numels = [0 if part is None else part.size for part in others]
        found = HOST.rejoin(others, numels, kind)
        assert not np.shares_memory(found, whole)
        assert sorted(found.real) == sorted(copied.real)
