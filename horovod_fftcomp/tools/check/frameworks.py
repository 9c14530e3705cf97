"""Checks of PyTorch and Horovod, each in a process of its own.

The import of a framework that was built for other libraries may end the process.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from horovod_fftcomp.tools.check import Finding, Level
from horovod_fftcomp.tools.run.launcher import is_torchrun, launched_rank

TIMEOUT_S = 120  # a first import from a network's file system
_MARK = "fftcomp-found "  # imports may print lines of their own

ASK_TORCH = f"""
import json, torch
found = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print({_MARK!r} + json.dumps(found if torch.cuda.is_available() else []))
"""
ASK_HOROVOD = f"""
import json, horovod.torch as hvd
built = dict(MPI=hvd.mpi_built(), Gloo=hvd.gloo_built(), NCCL=bool(hvd.nccl_built()))
print({_MARK!r} + json.dumps(built))
"""
INITIALIZE = f"""
import horovod.torch as hvd
hvd.init()
print({_MARK!r} + str(hvd.size()))
"""
_REBUILD = (
    "rebuild Horovod for the installed PyTorch: HOROVOD_WITH_PYTORCH=1 pip install "
    "--no-cache-dir --force-reinstall --no-deps horovod==0.28.1, or make install in a clone"
)


def findings() -> Iterator[Finding]:
    """Yield the GPUs that PyTorch sees and the backends of Horovod, if both are installed."""
    if importlib.util.find_spec("torch") is None:
        return
    yield _gpus()
    if importlib.util.find_spec("horovod") is not None and not is_torchrun():
        yield (built := _horovod())
        if built.level is Level.OK and launched_rank() is None:
            yield _one_process()


def _gpus() -> Finding:
    names, error = _ask(ASK_TORCH)
    if error:
        remedy = "reinstall PyTorch: pip install --force-reinstall torch"
        return Finding("torch runs", Level.FAIL, error, remedy)
    if not names:
        return Finding("GPU", Level.ABSENT, "none; gradients are compressed on the CPU")
    return Finding("GPU", Level.OK, ", ".join(names))


def _horovod() -> Finding:
    backends, error = _ask(ASK_HOROVOD)
    if error:
        return Finding("horovod.torch", Level.FAIL, error, _REBUILD)
    built = [name for name, there in backends.items() if there]
    missing = [name for name, there in backends.items() if not there]
    found = f"built with {', '.join(built) or 'nothing'}; without {', '.join(missing) or 'nothing'}"
    if {"MPI", "Gloo"} & set(built):
        return Finding("horovod.torch", Level.OK, found)
    return Finding("horovod.torch", Level.FAIL, found, f"HOROVOD_WITH_GLOO=1; {_REBUILD}")


def _one_process() -> Finding:
    """Return whether ``hvd.init()`` works without a launcher, where MPI may end the process."""
    topic = "one process"
    _, error = _ask(INITIALIZE, "hvd.init()")
    if not error:
        return Finding(topic, Level.OK, "hvd.init() works without a launcher")
    remedy = "start scripts by horovodrun -np 1"
    if list(Path(sys.prefix, "lib").glob("libmpi.so*")):
        remedy = f"export OPAL_PREFIX={sys.prefix}, or make install in a clone; else {remedy}"
    found = f"hvd.init() does not work without a launcher: {error}"
    return Finding(topic, Level.WARNING, found, remedy)


def _ask(script: str, what: str = "the import") -> tuple[Any, str]:
    """Return (the JSON value that a process with ``script`` prints, an error or "").

    ``what``: its name in an error.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return None, f"{what} did not end in {TIMEOUT_S} s"
    for line in done.stdout.splitlines():
        if line.startswith(_MARK) and done.returncode == 0:
            return json.loads(line.removeprefix(_MARK)), ""
    last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
    if done.returncode < 0:
        return None, f"{what} ends in {signal.Signals(-done.returncode).name}: {last}"
    return None, last
