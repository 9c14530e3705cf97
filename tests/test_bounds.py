"""No kernel touches memory beside its arrays: by checked indices, and by pages that kill."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

# Codelets take addresses, which no index check sees. So every array of the kernels ends, but for at
# most 63 bytes of alignment, where a page begins that the process must not touch.
GUARDED = """
import ctypes, mmap
import numpy as np
import horovod_fftcomp as hfc
from horovod_fftcomp.kernels import threads
from horovod_fftcomp.kernels.cpu import buffer_pool

libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
PAGE = mmap.PAGESIZE

class Guarded(buffer_pool.Pool):
    def take(self, size):
        used = -(-(size - buffer_pool.ALIGNMENT) // buffer_pool.ALIGNMENT) * buffer_pool.ALIGNMENT
        room = -(-used // PAGE) * PAGE
        # One page more, since the block seems to be larger than what the array may use.
        whole = np.frombuffer(mmap.mmap(-1, int(room + 2 * PAGE)), np.uint8)
        guard = int(whole.ctypes.data + room)
        assert libc.mprotect(guard, PAGE, 0) == 0
        block = whole[room - used : room - used + size]
        assert block.ctypes.data % buffer_pool.ALIGNMENT == 0
        return block

    def give(self, block):
        pass

buffer_pool.pool, buffer_pool.LEAST_NBYTES = Guarded(), 0

def guarded(values):
    array = buffer_pool.empty(values.size, values.dtype)
    array[:] = values
    return array

array = buffer_pool.empty(1000)
array[999] = 1
if TOUCH:
    ctypes.c_float.from_address(array.ctypes.data + 4 * 1024).value = 1.0

recipes = [
    ("topk", {"density": d, "bits": b}) for d in (0.005, 0.3, 1.0) for b in (3, 7, 8, 15, 16, 32)
] + [
    (name, {"density": d, "bits": 4, "block": block})
    for name in ("fft", "dct") for d in (0.05, 0.4) for block in (64, 256, 4096)
] + [("bf16", {}), ("fp16", {}), ("none", {})]
for n_threads in (1, 3):
    threads.set_num_threads(n_threads)
    for recipe, options in recipes:
        for n in (1, 63, 1000, 4097, 70_003):
            rng = np.random.default_rng(n)
            grads = [[guarded(rng.standard_normal(n).astype(np.float32))] * 2 for _ in range(2)]
            for result in hfc.simulate(recipe, [np.stack(pair) for pair in grads], **options):
                assert np.isfinite(result.average).all()
            if hasattr(hfc.get_scheme(recipe), "codec"):
                codec = hfc.get_codec(recipe, **options)
                payload = codec.encode(grads[0][0])
                codec.decode_sum([guarded(payload), guarded(payload)])
print("in bounds")
"""


@pytest.mark.slow
def test_no_kernel_touches_what_lies_behind_its_arrays():
    run = subprocess.run(
        [sys.executable, "-c", GUARDED.replace("TOUCH", "False")],
        cwd=HERE.parent,
        capture_output=True,
        text=True,
    )
    assert run.stdout == "in bounds\n", (run.returncode, run.stderr[-2000:])


def test_the_guard_kills():
    command = [sys.executable, "-c", GUARDED.replace("TOUCH", "True")]
    run = subprocess.run(command, cwd=HERE.parent, capture_output=True)
    assert run.returncode == -11


@pytest.mark.slow
def test_no_index_of_a_kernel_is_out_of_bounds(tmp_path):
    environment = os.environ | {
        "NUMBA_BOUNDSCHECK": "1",
        "NUMBA_CACHE_DIR": str(tmp_path),  # the cache does not tell checked code from unchecked
    }
    files = ["test_contracts.py", "test_selection.py", "test_wire.py", "test_golden.py"]
    chosen = "not large and not 5-d and not reference-"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", chosen]
    run = subprocess.run(
        [*command, *(str(HERE / file) for file in files)],
        env=environment,
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    assert " passed" in run.stdout
