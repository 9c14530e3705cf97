"""How kernels share out their work, and that it changes no bit."""

from __future__ import annotations

import ctypes
import multiprocessing
import platform
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from horovod_fftcomp import get_codec, get_num_threads, set_num_threads
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.kernels import threads
from horovod_fftcomp.kernels.host.ops import HOST
from horovod_fftcomp.kernels.ops import Feedback
from horovod_fftcomp.types import Tensor


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    monkeypatch.setattr(threads, "chosen_threads", None)
    threads.get_own_cores.cache_clear()
    yield
    threads.get_own_cores.cache_clear()


@pytest.mark.parametrize("count", [0, -1, 1.0, True, None, "2"])
def test_other_numbers_are_refused(count):
    with pytest.raises(ValueError, match="whole number from 1"):
        set_num_threads(count)


def test_cores_are_dealt_out_to_the_processes_of_a_machine(monkeypatch):
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: set(range(12)))
    for name in threads._LOCAL_SIZE:
        monkeypatch.delenv(name, raising=False)
    for local_size, expected in (("1", 8), ("2", 6), ("5", 2), ("100", 1)):
        monkeypatch.setenv("HOROVOD_LOCAL_SIZE", local_size)
        Engine([], 0, 1)  # a new compressor reads them anew
        assert get_num_threads() == expected
    monkeypatch.delenv("HOROVOD_LOCAL_SIZE")
    for tasks, expected in (("3", 4), ("4(x2),3", 3), ("6,2", 2)):  # as srun writes them
        monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", tasks)
        Engine([], 0, 1)
        assert get_num_threads() == expected
    set_num_threads(11)
    assert get_num_threads() == 11


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("n", [0, 1, 7, 64, 1000])
def test_ranges_cover_all_items_once(n, count):
    set_num_threads(count)
    found = threads.ranges(n, 8)
    assert [i for begin, end in found for i in range(begin, end)] == list(range(n))
    assert len(found) <= max(1, min(count, n // 8))


def test_work_that_shares_out_its_own_work_ends():
    set_num_threads(2)
    inner = [(n,) for n in range(3)]
    found = threads.each(
        lambda n: sum(threads.each(lambda m: n * m, inner)), [(n,) for n in range(9)]
    )
    assert found == [3 * n for n in range(9)]


@pytest.mark.parametrize("recipe", ["strom", "adacomp", "wangni", "hard_threshold"])
def test_many_large_tensors_of_unknown_size_are_encoded(recipe):
    set_num_threads(2)
    options = {"threshold": 2.0} if recipe == "hard_threshold" else {}
    tensors = [Tensor(str(n), (400_000,)) for n in range(5)]
    grads = list(np.random.default_rng(0).standard_normal((5, 400_000), np.float32))
    coder = HOST.coder([get_codec(recipe, **options)] * 5, tensors, 1)
    encoded = coder.encode(grads, {}, (1, 0), Feedback(), False)
    sums = coder.decode_sum(encoded.message, False).sums
    for grad, total, left in zip(grads, sums, encoded.residuals, strict=True):
        slack = 1e-6 * float(np.abs(total).max())
        np.testing.assert_allclose(total + left, grad, rtol=1e-5, atol=slack)


def test_after_an_error_nothing_runs_any_more():
    set_num_threads(2)
    started, end, ended = threading.Event(), threading.Event(), []

    def work(n):
        if n == 0:
            started.wait(100)
            end.set()
            raise ZeroDivisionError
        started.set()
        end.wait(100)
        time.sleep(0.05)
        ended.append(n)

    with pytest.raises(ZeroDivisionError):
        threads.each(work, [(0,), (1,)])
    assert ended == [1]


def test_parts_run_at_the_same_time_and_errors_come_through():
    set_num_threads(3)
    barrier = threading.Barrier(3, timeout=100)
    assert sorted(threads.each(lambda i: barrier.wait() * 0 + i, [(0,), (1,), (2,)])) == [0, 1, 2]
    with pytest.raises(ZeroDivisionError):
        threads.each(lambda i: 1 // i, [(1,), (0,)])


def _flush_denormals():
    """Let this thread flush them to zero, as TensorFlow does with its own."""
    libm, settings = ctypes.CDLL("libm.so.6"), (ctypes.c_uint32 * 16)()
    libm.fegetenv(settings)
    settings[7] |= 0x8040  # MXCSR: flush to zero, denormals are zero
    libm.fesetenv(settings)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="sets bits of x86-64")
def test_denormals_count_in_threads_of_the_pool_and_where_ieee_arithmetic_is_asked_for():
    found, tiny = [], np.full(8, 1e-41, np.float32)

    def double():
        return bool((tiny + tiny).all())

    def run():
        _flush_denormals()
        set_num_threads(3)
        found.append(threads.each(double, [()] * 3))
        with threads.ieee_arithmetic():
            found.append(threads.each(double, [()] * 3))
        found.append(double())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [[False, True, True], [True, True, True], False]


@pytest.mark.parametrize(("recipe", "options"), [
    ("topk", {"density": 0.01}), ("topk", {"density": 0.2, "bits": 5}), ("bf16", {}),
    ("fft", {"bits": 6, "block": 64}), ("dct", {"block": 128}),
])  # fmt: skip
def test_any_number_of_threads_writes_the_same_bytes(recipe, options):
    codec = get_codec(recipe, **options)
    rng = np.random.default_rng(0)
    for x in (rng.standard_normal(700_001), rng.integers(-2, 3, 700_001)):
        x, found = x.astype(np.float32), set()
        for count in (1, 2, 3, 7):
            set_num_threads(count)
            payload = codec.encode(x)
            found.add(payload.tobytes() + codec.decode_sum([payload, payload]).tobytes())
        assert len(found) == 1


def _sum_in_child(queue):
    queue.put(float(get_codec("bf16").decode(get_codec("bf16").encode(np.ones(700_000))).sum()))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own():
    set_num_threads(2)
    threads.each(lambda i: i, [(0,), (1,)])  # the parent's begin
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_sum_in_child, args=(queue,), daemon=True)
    child.start()
    assert queue.get(timeout=60) == 700_000
    child.join(20)
    assert child.exitcode == 0


KEPT = """
import time
from horovod_fftcomp.adapter.threads import Worker
class Kept:
    def __del__(self):
        print("begin", flush=True)
        time.sleep(1)
        print("end", flush=True)
Worker("worker", Kept())
time.sleep(0.3)  # it frees what it has kept
"""


def test_an_exit_waits_for_a_worker_that_frees():
    """Communicators leave the GIL in their destructors; a thread that takes it later aborts."""
    run = subprocess.run(
        [sys.executable, "-c", KEPT], check=True, capture_output=True, text=True, timeout=60
    )
    assert run.stdout.split() == ["begin", "end"]
    assert not run.stderr
