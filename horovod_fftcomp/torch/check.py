"""The part of ``horovod-fftcomp check`` that runs on all ranks of a job."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Iterator

import horovod.torch as hvd
import numpy as np
import torch

from horovod_fftcomp.adapter import handshake
from horovod_fftcomp.errors import ConfigMismatchError
from horovod_fftcomp.schemes import Round
from horovod_fftcomp.tools import environment
from horovod_fftcomp.tools.check.finding import Finding, Level
from horovod_fftcomp.torch.compression import Compression
from horovod_fftcomp.torch.network import timed
from horovod_fftcomp.torch.rounds import PendingRound

_OTHERS = "look at the other ranks' output: one has ended, hangs, or cannot be reached"
_STEPS = 3  # the second sends the residual of the first, the third that of the second
_GATHERED_NBYTES = (1 << 20, 16 << 20)  # payloads of a layer and of a large model
_MAX_RECEIVED_NBYTES = 256 << 20  # with many ranks, less is gathered from each


def findings(
    expect: Callable[[str, str], None], failed: Callable[[], bool], timeout_s: float
) -> Iterator[Finding]:
    """Initialize Horovod and yield the findings of this rank; call ``finish`` afterwards.

    ``expect(next, remedy)`` is called before each check with its name and the remedy if it hangs;
    ``failed`` returns, before the last check, whether this rank has failed. Raises
    ConfigMismatchError if a collective is not answered within ``timeout_s`` seconds.
    """
    expect("hvd.init()", f"{_OTHERS}; check the hosts and network interfaces given to the launcher")
    hvd.init()
    controller = "MPI" if hvd.mpi_enabled() else "Gloo"
    found = f"{hvd.size()} ranks over {controller}, {hvd.local_size()} on this machine"
    if hvd.size() == 1:
        remedy = "horovodrun -np 2 horovod-fftcomp check; on one rank nothing is compressed"
        yield Finding("job", Level.WARNING, found, remedy)
    else:
        yield Finding("job", Level.OK, found)
        expect("the versions of all ranks", _OTHERS)
        yield from _versions(timeout_s)
        expect("a compressed training step", _OTHERS)
        yield _exchange(timeout_s)
        expect("allreduces of one number", _OTHERS)
        yield _latency()
        for nbytes in _GATHERED_NBYTES:
            nbytes = min(nbytes, _MAX_RECEIVED_NBYTES // hvd.size())
            expect(f"allgathers of {nbytes} bytes", f"{_OTHERS}; or raise --timeout")
            yield _bandwidth(nbytes)
        expect("the outcome of all ranks", _OTHERS)
        yield _outcome(failed(), timeout_s)


def finish(timeout_s: float) -> None:
    """Wait until all ranks have printed: launchers end all ranks when the first one fails."""
    _gather(np.zeros(1, np.uint8), "finish", timeout_s)
    hvd.shutdown()


def _gather(data: np.ndarray, name: str, timeout_s: float) -> np.ndarray:
    round_ = Round("allgather", data)
    return PendingRound(round_, f"fftcomp.check.{name}", hvd.global_process_set).wait(timeout_s)


def _versions(timeout_s: float) -> Iterator[Finding]:
    """Compare versions and processors, which may make ranks compute different bits."""
    install = "install the same versions on all machines"
    replace = "use machines of one kind, or keep replica_check on: inverse transforms may differ"
    for topic, facts, level, remedy in (
        ("versions", environment.versions(), Level.FAIL, install),
        ("processors", {"CPU": environment.cpu_model()}, Level.WARNING, replace),
    ):
        try:
            handshake.compare(_gather(handshake.pack(facts), topic, timeout_s))
            yield Finding(topic, Level.OK, "the same on all ranks")
        except ConfigMismatchError as error:
            yield Finding(topic, level, str(error), remedy)


def _exchange(timeout_s: float) -> Finding:
    """Train a layer through Horovod; compare it between ranks bit by bit, and with dense."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(256, 64, bias=False)
    compression = Compression.fft(layer, timeout_s=timeout_s, replica_check="off")
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(layer.parameters(), lr=0.01),
        named_parameters=layer.named_parameters(),
        compression=compression,
    )
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(hvd.rank()))
    digest = hashlib.sha256()
    error = 0.0
    for step in range(_STEPS):
        optimizer.zero_grad()
        loss = layer(x).square().sum()
        (own,) = torch.autograd.grad(loss, layer.weight, retain_graph=True)
        loss.backward()
        optimizer.step()
        grad = layer.weight.grad
        assert grad is not None
        if step == 0:  # later steps also send residuals
            dense = hvd.allreduce(own, name="fftcomp.check.dense", op=hvd.Average)
            error = float((grad - dense).norm() / dense.norm())
        digest.update(grad.numpy().tobytes() + layer.weight.detach().numpy().tobytes())
    digests = _gather(np.frombuffer(digest.digest(), np.uint8).copy(), "digests", timeout_s)
    topic, n_different = "compressed step", len(set(map(bytes, digests.reshape(-1, 32))))
    if n_different > 1:
        found = f"{n_different} different results on {hvd.size()} ranks"
        remedy = "install the same versions of numpy and numba on machines of one kind"
        return Finding(topic, Level.FAIL, found, remedy)
    if not error < 1:
        found = f"the same on all ranks, but its relative error is {error:.2g}"
        return Finding(topic, Level.FAIL, found, "report this machine")
    ratio = compression.stats()["ratio"]
    return Finding(topic, Level.OK, f"recipe fft: the same bits on all ranks, ratio {ratio:.1f}")


def _latency() -> Finding:
    one = torch.ones(1)
    seconds = _median_s(lambda: hvd.allreduce(one, name="fftcomp.check.latency"), repeat=20)
    return Finding("latency", Level.OK, f"{1e3 * seconds:.2f} ms for an allreduce of one number")


def _bandwidth(nbytes: int) -> Finding:
    data = torch.zeros(nbytes, dtype=torch.uint8)
    seconds = _median_s(lambda: hvd.allgather(data, name=f"fftcomp.check.{nbytes}"), repeat=5)
    received = (hvd.size() - 1) * nbytes / seconds
    found = (
        f"{8e-9 * received:.2f} Gbit/s received by a rank: {1e3 * seconds:.1f} ms for an "
        f"allgather of {nbytes / (1 << 20):.3g} MiB from each"
    )
    return Finding("bandwidth", Level.OK, found)


def _outcome(failed: bool, timeout_s: float) -> Finding:
    flags = _gather(np.array([failed], np.uint8), "outcome", timeout_s)
    ranks = np.flatnonzero(flags).tolist()
    if ranks:
        shown = ", ".join(map(str, ranks[:8])) + (" and more" if len(ranks) > 8 else "")
        return Finding("all ranks", Level.FAIL, f"rank {shown} failed", "see what it printed")
    return Finding("all ranks", Level.OK, "none has failed")


def _median_s(collective: Callable[[], object], repeat: int) -> float:
    collective()  # connections and buffers are made at the first use
    return statistics.median(timed(collective, repeat))
