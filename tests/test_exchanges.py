"""One thread encodes while another trains: same results, no error lost, no thread left behind."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from horovod_fftcomp import get_codec, get_scheme, list_compressors, simulate
from horovod_fftcomp.engine.buckets import Bucket
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.overlap import Pipeline
from horovod_fftcomp.engine.policy import always
from horovod_fftcomp.schemes import Outcome, Round, Scheme, Tensor
from horovod_fftcomp.simulation import InProcessWorld, exchange_once

TENSORS = [[Tensor("a", (40, 50)), Tensor("b", (3,))], [Tensor("c", (7, 11, 13))]]
SIZES = {"a": 2000, "b": 3, "c": 1001}


class Shifted(Scheme):
    """Two rounds: the sum of the means, then of what is left after it; residual by name."""

    rounds = ("allreduce", "allgather")

    def exchange(self, tensors, grads, state, context):
        means = np.array([0 if g is None else g.mean() for g in grads], np.float32)
        total = (yield Round("allreduce", means)).astype(np.float32)
        rest = np.concatenate([g - t for g, t in zip(grads, total, strict=True)])
        gathered = yield Round("allgather", rest)
        sums = gathered.reshape(context.world_size, -1).sum(0)
        parts = np.split(sums, np.cumsum([g.size for g in grads])[:-1])
        before = state.get("residual", {})
        kept = {
            t.name: g + before.get(t.name, np.float32(0))
            for t, g in zip(tensors, grads, strict=True)
        }
        return Outcome(parts, {"residual": kept})

    def state_format(self, tensor):
        return str(tensor.shape)


class Gated(Scheme):
    """One round; the encoding of a bucket waits for its gate, and may then raise."""

    rounds = ("allreduce",)

    def __init__(self, *, error=None, seconds=None):
        self.error, self.seconds = error, seconds
        self.gate, self.threads, self.begun = threading.Event(), [], []

    def exchange(self, tensors, grads, state, context):
        self.begun.append(tensors[0].name)
        self.threads.append(threading.current_thread())
        if self.seconds is None:
            assert self.gate.wait(20)
        else:
            time.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        total = yield Round("allreduce", np.concatenate(grads))
        return Outcome(np.split(total, np.cumsum([g.size for g in grads])[:-1]), {})


class Network:
    """An ``InProcessWorld`` that ranks in several threads may share."""

    def __init__(self, size):
        self.world, self.lock = InProcessWorld(size), threading.Lock()
        self.size, self.counts, self.outputs = size, {}, {}

    def sender(self, rank):
        calls = {}

        def send(round_, name, process_set):
            step = calls[name] = calls.get(name, 0) + 1
            name = f"{step}.{name}"
            with self.lock:
                self.world.submit(rank, name, round_)
                self.counts[name] = self.counts.get(name, 0) + 1
                if self.counts[name] == self.size:
                    self.outputs[name] = self.world.complete(name)[0]
            return Sent(self, name)

        return send


class Sent:
    def __init__(self, network, name):
        self.network, self.name = network, name

    def is_done(self):
        return self.name in self.network.outputs

    def wait(self, timeout_s):
        limit = time.monotonic() + timeout_s
        while not self.is_done():
            assert time.monotonic() < limit, self.name
            time.sleep(0.001)
        return self.network.outputs[self.name]


class Exchanges(Pipeline):
    """A pipeline that shows its engine, and keeps the sums by bucket."""

    def __init__(self, engine, send):
        self.engine, self.sums = engine, {}
        super().__init__(engine, send, "x", None, self.sums.__setitem__, timeout_s=100)


def engine_of(scheme, rank=0, size=1):
    buckets = [Bucket(tuple(group), always(scheme)) for group in TENSORS]
    return Engine(buckets, rank, size)


def alone(scheme):
    """Return the exchanges of a single rank, and what it has sent."""
    sent, send = [], Network(1).sender(0)

    def noting(round_, name, process_set):
        sent.append(tuple(map(int, name.split(".")[1:])))
        return send(round_, name, process_set)

    return Exchanges(engine_of(scheme), noting), sent


def grads_of(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(n).astype(np.float32) for name, n in SIZES.items()}


def start(pipeline, bucket, grads):
    pipeline.last_came = time.perf_counter()
    pipeline.start(bucket, {i: grads[tensor.name] for i, tensor in enumerate(TENSORS[bucket])})


def run_step(pipeline, grads, order=(0, 1)):
    for bucket in order:
        start(pipeline, bucket, grads)
        pipeline.advance()
    pipeline.finish()
    engine = pipeline.engine
    sums = [total.tobytes() for bucket in range(len(TENSORS)) for total in pipeline.sums[bucket]]
    engine.settle()
    return sums


def wait_until(condition):
    limit = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.001)


def bytes_of(state):
    return {
        (kind, name): array.tobytes()
        for kind, arrays in state["state"].items()
        for name, array in arrays.items()
    }


@pytest.mark.parametrize(
    "scheme", [*map(get_scheme, list_compressors()), Shifted()], ids=[*list_compressors(), "shift"]
)
def test_a_worker_changes_no_byte(scheme):
    inline = [engine_of(scheme, rank, 2) for rank in range(2)]
    expected = []
    for step in range(3):
        grads = [
            [[grads_of((step, rank))[t.name] for t in group] for group in TENSORS]
            for rank in range(2)
        ]
        exchange_once(inline, grads, random.Random(step))
        expected.append([a.tobytes() for bucket in range(2) for a in inline[0].sums(bucket)])
        for engine in inline:
            engine.settle()

    network = Network(2)
    engines = [engine_of(scheme, rank, 2) for rank in range(2)]

    def train(rank):
        pipeline = Exchanges(engines[rank], network.sender(rank))
        return [
            run_step(pipeline, grads_of((step, rank)), (0, 1) if rank else (1, 0))
            for step in range(3)
        ]

    with ThreadPoolExecutor(2) as ranks:
        assert list(ranks.map(train, range(2))) == [expected, expected]
    for engine, other in zip(engines, inline, strict=True):
        assert bytes_of(engine.state_dict()) == bytes_of(other.state_dict())
        assert engine.costs.sent_nbytes == other.costs.sent_nbytes
        assert engine.costs.collectives == other.costs.collectives
        assert engine.costs.relative_error == other.costs.relative_error


def test_gradients_are_taken_while_an_encoding_is_under_way():
    scheme = Gated()
    pipeline, sent = alone(scheme)
    grads = grads_of(0)
    for bucket in (0, 1):
        start(pipeline, bucket, grads)
        pipeline.advance()
    wait_until(lambda: scheme.begun)
    assert scheme.begun == ["a"]  # one after the other
    assert sent == []
    assert threading.current_thread() not in scheme.threads
    scheme.gate.set()
    wait_until(lambda: pipeline.advance() or len(sent) == 2)
    assert sent == [(0, 0), (1, 0)]
    pipeline.finish()
    assert pipeline.sums[1][0].tobytes() == grads["c"].tobytes()


def test_later_rounds_are_sent_before_the_step_is_finished():
    pipeline, sent = alone(Shifted())
    grads = grads_of(0)
    for bucket in (0, 1):
        start(pipeline, bucket, grads)
    wait_until(lambda: pipeline.advance() or len(sent) == 4)
    assert sorted(sent) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    pipeline.finish()
    assert len(sent) == 4
    np.testing.assert_allclose(pipeline.sums[1][0], grads["c"] - grads["c"].mean())


def test_zeros_are_sent_for_what_is_missing_and_empty_buckets_are_left_out():
    pipeline, sent = alone(get_scheme("topk", density=1.0, bits=32))
    grads = grads_of(0)
    pipeline.start(0, {0: grads["a"]})
    pipeline.finish()
    a, b = pipeline.sums[0]
    assert a.tobytes() == grads["a"].tobytes()
    assert not b.any()
    assert sent == [(0, 0)]


@pytest.mark.parametrize("error", [TypeError("no float16 here"), KeyError("w"), MemoryError("1")])
def test_an_error_in_the_worker_comes_out_of_finish_as_it_was(error):
    scheme = Gated(error=error, seconds=0)
    pipeline, sent = alone(scheme)
    grads = grads_of(0)
    for bucket in (0, 1):
        start(pipeline, bucket, grads)
    wait_until(lambda: len(scheme.begun) == 2)
    pipeline.advance()
    with pytest.raises(type(error)) as caught:
        pipeline.finish()
    assert caught.value is error
    assert sent == []
    with pytest.raises(ValueError, match="under way"):
        pipeline.engine.settle()
    scheme.error = None
    pipeline.abandon()
    pipeline.engine.abandon()
    assert run_step(pipeline, grads) == [grads[name].tobytes() for name in "abc"]


def test_an_error_in_a_later_round_comes_out_too():
    class Breaking(Shifted):
        def exchange(self, tensors, grads, state, context):
            yield Round("allreduce", np.ones(1, np.float32))
            raise RuntimeError("second round of " + tensors[0].name)

    pipeline, _ = alone(Breaking())
    with pytest.raises(RuntimeError, match=r"second round of [ac]"):
        run_step(pipeline, grads_of(0))


def test_abandoning_drops_what_waits_and_waits_for_what_runs():
    scheme = Gated()
    pipeline, sent = alone(scheme)
    grads = grads_of(0)
    for bucket in (0, 1):
        start(pipeline, bucket, grads)
    wait_until(lambda: scheme.begun)
    opener = threading.Timer(0.1, scheme.gate.set)
    opener.start()
    pipeline.abandon()
    assert scheme.gate.is_set()
    assert scheme.begun == ["a"]
    pipeline.engine.abandon()
    assert run_step(pipeline, grads) == [grads[name].tobytes() for name in "abc"]
    assert sent == [(0, 0), (1, 0)]
    opener.join()


def test_what_is_hidden_and_what_is_waited_for_are_measured():
    pipeline, sent = alone(Gated(seconds=0.4))
    grads = grads_of(0)
    start(pipeline, 0, grads)
    wait_until(lambda: pipeline.advance() or sent)  # as long as backward goes on
    start(pipeline, 1, grads)
    pipeline.finish()
    encode_s = pipeline.engine.costs.encode_s
    hidden_s, wait_s = pipeline.encode_hidden_s, pipeline.encode_wait_s
    assert encode_s > 0.8
    assert min(hidden_s, wait_s) > 0.3
    assert hidden_s + wait_s == pytest.approx(encode_s, rel=0.3)


def test_the_thread_ends_with_its_exchanges():
    before = set(threading.enumerate())
    pipeline, _ = alone(get_scheme("topk"))
    assert set(threading.enumerate()) <= before  # none before there is work
    run_step(pipeline, grads_of(0))
    [thread] = set(threading.enumerate()) - before
    assert thread.name.startswith("fftcomp-encode")
    del pipeline
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()


BROKEN_OFF = """
import os, sys, time
from tests.test_exchanges import Gated, alone, grads_of, start
exchanges, _ = alone(Gated(seconds=0.2))
grads = grads_of(0)
for bucket in (0, 1):
    start(exchanges, bucket, grads)
{end}
"""


@pytest.mark.parametrize(
    ("end", "code"), [("", 0), ("sys.exit(3)", 3), ("raise ValueError('broken off')", 1)]
)
def test_a_process_that_breaks_off_a_step_ends(end, code):
    process = run_script(BROKEN_OFF.format(end=end))
    assert process.returncode == code, process.stderr
    assert "broken off" in process.stderr or not end.startswith("raise")


FORK = """
import multiprocessing
from tests.test_exchanges import Gated, alone, grads_of, run_step, start
exchanges, _ = alone(Gated(seconds=0.1))
grads = grads_of(0)

def look():
    import gc
    global exchanges
    del exchanges
    gc.collect()

run_step(exchanges, grads)
for bucket in (0, 1):
    start(exchanges, bucket, grads)
child = multiprocessing.get_context("fork").Process(target=look)
child.start()
child.join(20)
assert child.exitcode == 0, child.exitcode
exchanges.finish()
assert exchanges.sums[1][0].tobytes() == grads["c"].tobytes()
print("both ended")
"""


def test_a_fork_in_the_midst_of_a_step_does_no_harm():
    process = run_script(FORK)
    assert process.stdout == "both ended\n", process.stderr


def run_script(script):
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_masked_arrays_are_refused():
    masked = np.ma.masked_greater(np.ones((1, 2, 8), np.float32), 0)
    with pytest.raises(TypeError, match=r"array\.filled\(0\)"):
        list(simulate("topk", masked, density=0.5))
    with pytest.raises(TypeError, match="masked array is not supported"):
        get_codec("topk", density=0.5).encode(masked[0, 0])
