"""Ranks that start together share one cache of compiled kernels, and none spoils it."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numba
import numpy as np
import pytest
from numba.core import caching

from horovod_fftcomp.kernels.cpu import inlining, jit, sparse

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = """
import hashlib
import numpy as np
import horovod_fftcomp as hfc
from horovod_fftcomp.kernels import threads
from horovod_fftcomp.schemes.allgather import Allgather

digest = hashlib.sha256()
for n_threads in (1, 2):
    threads.set_num_threads(n_threads)
    for recipe in ("topk", "fft", "hard_threshold", "qsgd", "powersgd", "sketchsgd"):
        for n in (5000, 300_000):
            grads = np.random.default_rng(n).standard_normal((2, 2, n)).astype(np.float32)
            if isinstance(hfc.get_scheme(recipe), Allgather):
                codec = hfc.get_codec(recipe)
                payload = codec.encode(grads[0, 0])
                from_file = np.frombuffer(payload.tobytes(), np.uint8)
                digest.update(payload.tobytes() + codec.decode(from_file).tobytes())
            for result in hfc.simulate(recipe, grads):
                digest.update(result.average.tobytes())
print(digest.hexdigest())
"""


def test_without_numbas_compiler_the_error_names_the_mend():
    ran = subprocess.run(
        [sys.executable, "-c", "from horovod_fftcomp.kernels import cpu"],
        env=os.environ | {"NUMBA_DISABLE_JIT": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 1
    assert "UnsupportedError: NUMBA_DISABLE_JIT is set" in ran.stderr


def test_a_change_of_any_source_compiles_all_kernels_anew(tmp_path):
    """Numba itself looks at the file of the outermost function alone."""
    files = (tmp_path / "a.py", tmp_path / "b.py")
    digests = set()
    for texts in ("11", "21", "12", "22"):
        for file, text in zip(files, texts, strict=True):
            file.write_text(text)
        digests.add(jit.digest_of(files))
    assert len(digests) == 4
    assert {"vector_values.py", "value_codes.py", "quantizers.py"} <= {
        path.name for path in jit._SOURCES
    }
    assert sparse.take_groups.py_func.__qualname__ == f"take_groups.{jit._DIGEST}"


def _double(x):
    return 2 * x


@pytest.mark.parametrize(
    "missing",
    [(caching.IndexDataCacheFile, "_data_name"), (caching.CacheImpl, "locator")],
    ids=["file", "locator"],
)
def test_without_numbas_private_cache_kernels_compile_and_one_warning_says_so(monkeypatch, missing):
    """As with a version of Numba that keeps compiled functions in another way."""
    jit.warn_of_no_cache.cache_clear()
    monkeypatch.delattr(*missing)
    with pytest.warns(RuntimeWarning, match=f"not kept on disk.*{missing[1]}") as warned:
        compiled = [jit.kernel(types.FunctionType(_double.__code__, {}, "f")) for _ in range(2)]
    assert len(warned) == 1
    assert [function(21) for function in compiled] == [42, 42]
    assert not any(function.stats.cache_path for function in compiled)


def test_functions_of_kernels_also_compile_as_numba_does_it(monkeypatch):
    """As with a version of Numba whose libraries of code are others."""
    values = np.linspace(-3, 2, 1000, dtype=np.float32)
    patterns = values.view(np.int32)
    found = []
    for is_as_expected in (True, False):
        monkeypatch.setattr(inlining, "IS_AS_EXPECTED", is_as_expected)
        code = sparse.peak_bits.py_func.__code__
        peak = inlining.inlined(types.FunctionType(code, vars(sparse), "peak"))
        found.append(numba.njit(lambda x, peak=peak: peak(x[1:]))(patterns))
        if is_as_expected:
            with pytest.raises(TypeError):
                peak(patterns)
    assert found == [np.abs(values[1:]).max().view(np.int32)] * 2


@pytest.mark.slow
def test_processes_that_compile_at_the_same_time_agree(tmp_path):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", SCRIPT]

    def run(_: int) -> str:
        options = {"env": environment, "stdout": subprocess.PIPE, "text": True}
        return subprocess.run(command, check=True, timeout=900, **options).stdout

    with ThreadPoolExecutor(2) as threads:
        printed = [*threads.map(run, range(2)), run(2)]
    assert len(set(printed)) == 1


TRAINING = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from horovod_fftcomp.torch_distributed import compress
dist.init_process_group("gloo")
for recipe in ("dither", "topk", "fft", "fp16"):
    layers = torch.nn.Linear(64, 64), torch.nn.Linear(64, 512), torch.nn.Linear(512, 1024)
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    compression, optimizer = compress(model, recipe), torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(110):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parallel
def test_check_compiles_all_that_usual_trainings_need(tmp_path, no_launcher):
    """In the image of a container, say; of small tensors and of large ones."""
    pytest.importorskip("torch")
    path, cache = tmp_path / "train.py", tmp_path / "cache"
    path.write_text(TRAINING)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    compiled = []
    for command in (["-m", "horovod_fftcomp", "check"], [*torchrun, str(path)]):
        done = subprocess.run(
            [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        compiled.append({path.name for path in cache.rglob("*.nbc")})
    assert len(compiled[0]) > 20
    assert compiled[0] == compiled[1]


ORTHONORMAL = """
import numpy as np
from horovod_fftcomp.kernels.cpu import lowrank
columns = np.arange(1, 13, dtype=np.float64).reshape(3, 4) ** 0.5
lowrank.orthonormalize({columns})
print(sum(lowrank.orthonormalize.stats.cache_hits.values()))
"""


@pytest.mark.slow
def test_ranks_that_compile_different_variants_at_once_do_not_mix_them_up(tmp_path):
    """Numba would call both files 1; then a rank reads a matrix by rows that lies by columns."""
    written = []
    for n, columns in enumerate(("columns", "np.asfortranarray(columns)")):
        environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / str(n))}
        command = [sys.executable, "-c", ORTHONORMAL.format(columns=columns)]
        for hits in ("0", "1"):  # a later process finds what the first has compiled
            ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
            assert (ended.returncode, ended.stdout.strip()) == (0, hits)
        written.append({path.name for path in (tmp_path / str(n)).rglob("*orthonormalize*")})
    assert all(written)
    assert not written[0] & written[1]


def test_compiling_is_told_once_and_by_the_first_rank_of_a_machine(tmp_path):
    script = (
        "import numpy as np, time\n"
        "from horovod_fftcomp.kernels.cpu import jit\n"
        "jit.PATIENCE_S = 0.01\n"
        "from horovod_fftcomp.kernels import cpu\n"
        "cpu.max_abs_bits(np.ones(9, np.float32)), cpu.count_above(np.ones(9, np.float32), 5)\n"
    )
    told = {}
    for rank in ("1", "0", "0, compiled"):
        environment = {"NUMBA_CACHE_DIR": str(tmp_path / rank[0]), "LOCAL_RANK": rank[0]}
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        told[rank] = done.stderr.count("compiling CPU kernels")
    assert told == {"1": 0, "0": 1, "0, compiled": 0}


def test_functions_of_others_compile_as_before():
    made: dict[str, object] = {}
    exec("def double(x): return 2 * x", made)
    assert made["double"].__module__ is None
    assert numba.njit(made["double"])(21) == 42
