"""Checks of the CPU kernels: they compile, write the reference's bytes, and are cached."""

from __future__ import annotations

import importlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from horovod_fftcomp.codec.backend import cpu_kernels
from horovod_fftcomp.kernels.threads import get_local_size, get_num_threads
from horovod_fftcomp.monitor.parameter_hash import hash_bytes
from horovod_fftcomp.recipes import RECIPES, get_scheme
from horovod_fftcomp.schemes.allgather import Allgather
from horovod_fftcomp.simulation import simulate
from horovod_fftcomp.tools import environment
from horovod_fftcomp.tools.check import Finding, Level, told
from horovod_fftcomp.tools.gradient_files import synthetic
from horovod_fftcomp.types import Kernels
from horovod_fftcomp.wire.counter_rng import random_words

_NUMEL = 5000  # whole blocks and a partial one
_USUAL = ("fp16", "topk", "fft", "dither")  # all that their trainings need is compiled, too
_TOLERANCE = 1e-5  # of relative errors: two float32 transforms round differently
PAYLOADS = Path(__file__).parent / "payloads.json"  # written by ``make recipe``
_WRITABLE = "export NUMBA_CACHE_DIR=FOLDER, a folder that you can write to"


def findings() -> Iterator[Finding]:
    """Yield the processor, whether the kernels work on it, and where they are cached."""
    yield _cores()
    begin = time.perf_counter()
    bad = list(_bad_kernels())
    yield from bad
    if not bad:
        seconds = time.perf_counter() - begin
        found = f"compile, and write the reference's bytes for all recipes ({seconds:.1f} s)"
        yield Finding("kernels", Level.OK, found)
        yield _cache()


def _cores() -> Finding:
    cores, threads, processes = environment.n_cores(), get_num_threads(), get_local_size()
    found = (
        f"{cores} of {environment.cpu_model()}; "
        f"{processes} {'process' if processes == 1 else 'processes'} here, {threads} "
        f"{'thread' if threads == 1 else 'threads'} each"
    )
    if threads <= cores and processes * threads <= (os.cpu_count() or 1):
        return Finding("CPU cores", Level.OK, found)
    remedy = "start fewer processes on this machine; these compete for cores"
    return Finding("CPU cores", Level.WARNING, found, remedy)


def _bad_kernels() -> Iterator[Finding]:
    try:
        cpu_kernels()
    except Exception as error:
        # Numba's RuntimeError "cannot cache function" comes at the import.
        remedy = _WRITABLE if "cache" in str(error) else "pip install --force-reinstall numba"
        yield Finding("kernels", Level.FAIL, told(error), remedy)
        return
    for name in RECIPES:
        try:
            difference = _difference(name) if isinstance(get_scheme(name), Allgather) else ""
            if name in _USUAL:
                _train(name)
        except Exception as error:
            difference = told(error)
        if difference:
            remedy = "install tested versions of numpy and numba; if that fails, report it"
            yield Finding(f"kernels: {name}", Level.FAIL, difference, remedy)


def _train(recipe: str) -> None:
    """Exchange gradients as two steps of a training: of small tensors, and with residuals."""
    grads = np.reshape(synthetic(_NUMEL, 4).steps, (2, 2, _NUMEL))
    for step in simulate(recipe, grads):
        hash_bytes(step.average)  # as the replica check does


def _difference(name: str) -> str:
    """Return how a payload differs from what the reference writes; "" if it does not."""
    expected, actual = json.loads(PAYLOADS.read_text("utf-8"))[name], payload_of(name)
    if actual["hash"] != expected.get("hash", actual["hash"]):
        return "the payload's bytes differ from the reference's"
    error = abs(actual["error"] - expected["error"])
    return f"the relative error differs by {error:.1e}" if error > _TOLERANCE else ""


def payload_of(name: str, **kernels: Kernels) -> dict[str, Any]:
    """Return the hash of a recipe's payload of some values, and the relative error of decoding.

    ``kernels``: as for ``encode`` of codecs.
    """
    words = random_words(1, _NUMEL) >> np.uint32(8)  # exact in float32, as is all that follows
    grad = (words.astype(np.float32) * np.float32(2.0**-23) - np.float32(1)) ** 3
    codec: Any = getattr(get_scheme(name), "codec")  # noqa: B009
    payload = codec.encode(grad, **kernels)
    lost = np.linalg.norm(codec.decode(payload, **kernels).astype(np.float64) - grad)
    error = float(lost / np.linalg.norm(grad.astype(np.float64)))
    return {"hash": f"{hash_bytes(payload):016x}", "error": error}


def _cache() -> Finding:
    """Return whether later processes will find the compiled kernels."""
    compiled = vars(importlib.import_module("horovod_fftcomp.kernels.cpu.sparse")).values()
    paths = (getattr(getattr(each, "stats", None), "cache_path", None) for each in compiled)
    folder = next(filter(None, paths), None)  # of all kernels
    if folder is None:
        return Finding("kernel cache", Level.OK, "none")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return Finding("kernel cache", Level.WARNING, told(error), _WRITABLE)
    wanted = os.environ.get("NUMBA_CACHE_DIR")
    if wanted and not Path(folder).is_relative_to(wanted):
        found = f"{folder}, since NUMBA_CACHE_DIR={wanted} cannot be written"
        return Finding("kernel cache", Level.WARNING, found, _WRITABLE)
    return Finding("kernel cache", Level.OK, folder)
