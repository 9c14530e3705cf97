"""The part of ``horovod-fftcomp check`` that runs on all ranks of a job, for any launcher."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from horovod_fftcomp.adapter import handshake
from horovod_fftcomp.adapter.torch_tensors.compressor import TensorCompressor
from horovod_fftcomp.engine.overlap import Pending
from horovod_fftcomp.errors import ConfigMismatchError, list_ranks
from horovod_fftcomp.schemes import Round
from horovod_fftcomp.types import Array

_OTHERS = "look at the other ranks' output: one has ended, hangs, or cannot be reached"
CONNECT_REMEDY = f"{_OTHERS}; check the hosts and network interfaces given to the launcher"
_STEPS = 3  # the second sends the residual of the first, the third that of the second
_GATHERED_NBYTES = (1 << 20, 16 << 20)  # payloads of a layer and of a large model
_MAX_RECEIVED_NBYTES = 256 << 20  # with many ranks, less is gathered from each

# The fields of a ``Finding``: topic, level as text, what was found, remedy.
_Found: TypeAlias = tuple[str, str, str, str]


class Job(NamedTuple):
    """Ranks of a job, and what the adapter of their launcher does for the check.

    ``local_size``: number of ranks on this machine. ``send`` starts a round of all ranks under a
    name. ``prepare(layer, optimizer, **settings)`` makes them exchange gradients with recipe fft;
    it returns the module to call, the optimizer and the compressor. ``end`` disconnects this rank.
    """

    rank: int
    size: int
    local_size: int
    transport: str
    send: Callable[[Round, str], Pending]
    prepare: Callable[..., tuple[torch.nn.Module, torch.optim.Optimizer, TensorCompressor]]
    end: Callable[[], None]
    timeout_s: float

    def exchange(self, round_: Round, name: str) -> Array:
        """Return the output of a collective; ConfigMismatchError if a rank does not answer."""
        return self.send(round_, f"fftcomp.check.{name}").wait(self.timeout_s)

    def finish(self) -> None:
        """Wait until all ranks have printed: launchers end all ranks when the first one fails."""
        self.exchange(Round("allgather", np.zeros(1, np.uint8)), "finish")
        self.end()


def findings(
    job: Job,
    compared: Mapping[str, tuple[Mapping[str, object], str, str]],
    expect: Callable[[str, str], None],
    failed: Callable[[], bool],
    speed: Callable[[str, int, int, float], str],
) -> Iterator[_Found]:
    """Yield the findings of this rank; call ``job.finish`` afterwards.

    ``compared``: facts that should be equal on all ranks by their topic, with level and remedy if
    they are not. ``expect(next, remedy)`` is called before each check with its name and the remedy
    if it hangs; ``failed`` returns, before the last check, whether this rank has failed.
    ``speed(collective, nbytes, ranks, seconds)`` returns a measured bandwidth in words.
    """
    found = f"{job.size} ranks over {job.transport}, {job.local_size} on this machine"
    if job.size == 1:
        yield "job", "warning", found, "start two ranks; on one nothing is compressed"
        return
    yield "job", "OK", found, ""
    for topic, (facts, level, remedy) in compared.items():
        expect(f"the {topic} of all ranks", _OTHERS)
        try:
            handshake.compare(job.exchange(Round("allgather", handshake.pack(facts)), topic))
            yield topic, "OK", "the same on all ranks", ""
        except ConfigMismatchError as error:
            yield topic, level, str(error), remedy
    expect("a compressed training step", _OTHERS)
    yield _compressed_step(job)
    expect("allreduces of one number", _OTHERS)
    seconds = _median_s(job, "allreduce", np.ones(1, np.float32), 20)
    yield "latency", "OK", f"{1e3 * seconds:.2f} ms for an allreduce of one number", ""
    for nbytes in _GATHERED_NBYTES:
        nbytes = min(nbytes, _MAX_RECEIVED_NBYTES // job.size)
        expect(f"allgathers of {nbytes} bytes", f"{_OTHERS}; or raise --timeout")
        seconds = _median_s(job, "allgather", np.zeros(nbytes, np.uint8), 5)
        yield "bandwidth", "OK", speed("allgather", nbytes, job.size, seconds), ""
    expect("the outcome of all ranks", _OTHERS)
    yield _outcome(job, failed())


def _compressed_step(job: Job) -> _Found:
    """Train a layer; compare it between ranks bit by bit, and with the dense average."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(256, 64, bias=False)
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(job.rank))
    (own,) = torch.autograd.grad(layer(x).square().sum(), layer.weight)
    total = job.exchange(Round("allreduce", own.contiguous().numpy()), "dense")
    dense = torch.from_numpy(total) / job.size
    plain = torch.optim.SGD(layer.parameters(), lr=0.01)
    module, optimizer, compressor = job.prepare(
        layer, plain, timeout_s=job.timeout_s, replica_check="off", warmup_steps=0
    )
    digest, error = hashlib.sha256(), 0.0
    for step in range(_STEPS):
        optimizer.zero_grad()
        module(x).square().sum().backward()
        optimizer.step()
        grad = layer.weight.grad
        assert grad is not None
        if step == 0:  # later steps also send residuals
            error = float((grad - dense).norm() / dense.norm())
        digest.update(grad.numpy().tobytes() + layer.weight.detach().numpy().tobytes())
    own_digest = np.frombuffer(digest.digest(), np.uint8).copy()
    digests = job.exchange(Round("allgather", own_digest), "digests").reshape(job.size, -1)
    topic, n_different = "compressed step", len(set(map(bytes, digests)))
    if n_different > 1:
        found = f"{n_different} different results on {job.size} ranks"
        remedy = "install the same versions of numpy and numba on machines of one kind"
        return topic, "FAIL", found, remedy
    if not error < 1:
        found = f"the same on all ranks, but its relative error is {error:.2g}"
        return topic, "FAIL", found, "report this machine"
    ratio = compressor.stats()["ratio"]
    if job.size > 1 and ratio < 2:
        return topic, "FAIL", f"ratio {ratio:.1f}: nothing was compressed", "report this machine"
    return topic, "OK", f"recipe fft: the same bits on all ranks, ratio {ratio:.1f}", ""


def _outcome(job: Job, failed: bool) -> _Found:
    flags = job.exchange(Round("allgather", np.array([failed], np.uint8)), "outcome")
    ranks = np.flatnonzero(flags).tolist()
    if ranks:
        return "all ranks", "FAIL", f"{list_ranks(ranks)} failed", "see what it printed"
    return "all ranks", "OK", "none has failed", ""


def _median_s(job: Job, collective: str, data: Array, repeat: int) -> float:
    exchange = partial(job.exchange, Round(collective, data), str(data.nbytes))
    return statistics.median(timed(exchange, repeat + 1)[1:])  # the first makes connections


def timed(collective: Callable[[], object], repeat: int) -> list[float]:
    """Call ``collective`` so many times; return how long each call took, in seconds."""
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        collective()
        times.append(time.perf_counter() - begin)
    return times
