"""Checks of the CPU kernels: they compile, write the reference's bytes, and are cached."""

from __future__ import annotations

import importlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from horovod_fftcomp.codec.backend import load_backend
from horovod_fftcomp.kernels.threads import get_local_size, get_num_threads
from horovod_fftcomp.monitor.parameter_hash import hash_bytes
from horovod_fftcomp.recipes import RECIPES, get_scheme
from horovod_fftcomp.schemes.allgather import Allgather, AnyCodec
from horovod_fftcomp.simulation import simulate
from horovod_fftcomp.tools import environment
from horovod_fftcomp.tools.check.finding import Finding, Level, told
from horovod_fftcomp.tools.gradient_files import synthetic

_NUMEL = 5000  # whole blocks and a partial one
_USUAL = ("fp16", "topk", "fft", "dither")  # all that their trainings need is compiled, too
_TOLERANCE = 1e-5  # of the peak: two float32 transforms round differently
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
        load_backend("cpu")
    except Exception as error:
        # Numba's RuntimeError "cannot cache function" comes at the import.
        remedy = _WRITABLE if "cache" in str(error) else "pip install --force-reinstall numba"
        yield Finding("kernels", Level.FAIL, told(error), remedy)
        return
    for name in RECIPES:
        scheme, difference = get_scheme(name), ""
        try:
            if isinstance(scheme, Allgather):
                difference = _difference(scheme.codec)
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


def _difference(codec: AnyCodec) -> str:
    """Return how the kernels differ from the reference; an empty string if they do not."""
    grad = synthetic(_NUMEL).steps[0]
    reference = load_backend("reference")
    expected, actual = (
        codec.encode_coeffs(
            codec.coeffs_of(grad, grad.shape, reference),
            grad.shape,
            kernels=kernels,
            keep_residual=False,
        ).payload.tobytes()
        for kernels in (reference, load_backend("cpu"))
    )
    if expected != actual:
        return "bytes differ from the reference's for the same coefficients"
    decoded = [codec.decode(codec.encode(grad, backend=b), backend=b) for b in ("reference", "cpu")]
    error = float(np.abs(decoded[0] - decoded[1]).max() / np.abs(grad).max())
    return "" if error <= _TOLERANCE else f"decoded values differ by {error:.1e} of the peak"


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
