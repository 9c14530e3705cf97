"""Ranks that start together share one cache of compiled kernels, and none spoils it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from horovod_fftcomp.backends.cpu import jit, values

# Numba's cache numbers a function's variants; ranks that compile different ones at once could mix
# them up. So each function that Python calls has one, whatever an array's origin.
SCRIPT = """
import hashlib, sys
import numpy as np
from numba.core.registry import CPUDispatcher
import horovod_fftcomp as hfc
from horovod_fftcomp import threads
from horovod_fftcomp.schemes.gather import Gather

digest = hashlib.sha256()
for n_threads in (1, 2):
    threads.set_num_threads(n_threads)
    for recipe in hfc.list_compressors():
        for n in (5000, 300_000):
            grads = np.random.default_rng(n).standard_normal((2, 2, n)).astype(np.float32)
            if isinstance(hfc.get_scheme(recipe), Gather):
                codec = hfc.get_codec(recipe)
                payload = codec.encode(grads[0, 0])
                from_file = np.frombuffer(payload.tobytes(), np.uint8)
                digest.update(payload.tobytes() + codec.decode(from_file).tobytes())
            for result in hfc.simulate(recipe, grads):
                digest.update(result.average.tobytes())
variants = {
    f"{name}.{key}": len(function.signatures)
    for name, module in list(sys.modules.items())
    if name.startswith("horovod_fftcomp")
    for key, function in vars(module).items()
    if isinstance(function, CPUDispatcher) and type(function._cache).__name__ != "NullCache"
}
print(digest.hexdigest(), sorted(name for name, count in variants.items() if count > 1))
"""


def test_a_change_of_any_source_compiles_all_kernels_anew(tmp_path):
    """Numba itself looks at the file of the outermost function alone."""
    files = (tmp_path / "a.py", tmp_path / "b.py")
    digests = set()
    for texts in ("11", "21", "12", "22"):
        for file, text in zip(files, texts, strict=True):
            file.write_text(text)
        digests.add(jit.digest_of(files))
    assert len(digests) == 4
    assert {"codelets.py", "codes.py", "quantizers.py"} <= {path.name for path in jit._SOURCES}
    assert values._take.py_func.__qualname__ == f"_take.{jit._DIGEST}"


@pytest.mark.slow
def test_processes_that_compile_at_the_same_time_agree(tmp_path):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", SCRIPT]
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    printed = [process.communicate(timeout=300)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    later = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert len({*printed, later.stdout}) == 1
    assert later.stdout.split(" ", 1)[1].strip() == "[]", "kernels with several variants"
