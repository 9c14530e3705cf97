"""DDP whose steps a GPU computes; ``test_torch_distributed.py`` starts this on each rank.

All ranks share the GPU; without one it is an emulated one.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from horovod_fftcomp import ConfigMismatchError, UnsupportedError
from horovod_fftcomp.adapter.torch_tensors.replicas import OptimizedParameters
from horovod_fftcomp.torch_distributed import LocalSteps, compress, compressor, rounds, streams
from tests.contracts import HOST_ONLY
from tests.ddp_cases import (  # noqa: F401
    Network3,
    _process_group,
    flat,
    same_everywhere,
    uses,
    wrapped,
)
from tests.gpu import torch_emulator

# Cases compare averages with those of a CPU, and take no steps with them.
pytestmark = pytest.mark.filterwarnings("ignore:the averaged gradients:RuntimeWarning")
HAS_GPU = torch.cuda.is_available()


on_gpu = functools.partial(torch_emulator.on_gpu, HAS_GPU, globals(), compressor)


_place = "cpu"


@pytest.fixture(autouse=True, params=["host", "streams"])
def network(request, monkeypatch):
    """Let the host carry out rounds, or Gloo as if a GPU's streams waited for its collectives."""
    if request.param == "streams":
        if HAS_GPU:
            pytest.skip("the ranks share a GPU, which NCCL refuses")
        monkeypatch.setattr(compressor, "streams_wait", lambda group, place: True)
    return request.param


def prepared(recipe, model=None, **options):
    kept = {k: options.pop(k) for k in ("find_unused_parameters", "static_graph") if k in options}
    model = (Network3() if model is None else model).to(_place)
    ddp = wrapped(model, bucket_cap_mb=0.01, **kept)
    return ddp, compress(ddp, recipe, bucket_nbytes=12_000, **options)


def averages(ddp, steps, spare=lambda step: True, times=1.0):
    """Return the averages of steps whose gradients are the same on a CPU and on a GPU."""
    found = []
    for step in steps:
        rng = np.random.default_rng(10 * step + dist.get_rank())
        ddp.zero_grad()
        loss = 0.0
        output = ddp(torch.zeros(1, 48, device=_place), uses_spare=spare(step)).sum()
        for parameter in ddp.module.parameters():
            values = torch.from_numpy(rng.standard_normal(parameter.shape, np.float32)) * times
            loss = loss + (parameter * values.to(parameter)).sum()
        if not spare(step):
            loss = output  # only what the forward pass has used
        (loss + 0.0 * output).backward()
        found.append([p.grad.cpu().clone() for p in ddp.parameters() if p.grad is not None])
    return found


def assert_same(ours, theirs):
    for step, expected in zip(ours, theirs, strict=True):
        for found, wanted in zip(step, expected, strict=True):
            assert torch.equal(found, wanted)


def state_of(compression):
    states = compression.state_dict()["state"]
    return {(kind, name): a.cpu() for kind, arrays in states.items() for name, a in arrays.items()}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("topk", {}),
        ("scalecom", {}),
        ("fp16", {}),
        ("qsgd", {}),
        ("natural", {}),
        ("hard_threshold", {"calibrate_steps": 2}),  # payloads of unequal sizes
        ("topk", {"exchange": "sharded"}),
        ("topk", {"ranks_per_node": 2}),
        ("topk", {"find_unused_parameters": True}),
        ("topk", {"static_graph": True}),
        ("topk", {"momentum": 0.9}),
        ("gtopk", {}),  # of the host
        ("none", {}),
    ],
    ids=str,
)
def test_averages_and_state_are_the_cpus(recipe, options):
    ddp, theirs = prepared(recipe, **options)
    expected = averages(ddp, range(6))
    with on_gpu():
        ddp, ours = prepared(recipe, **options)
        found = averages(ddp, range(6))
    same_everywhere(*(p.grad.cpu() for p in ddp.parameters()))
    assert_same(found, expected)
    assert ours.stats()["sent_nbytes"] == theirs.stats()["sent_nbytes"]
    one, other = state_of(ours), state_of(theirs)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    if recipe != "none":
        assert ours.engine.computes_on_device(0) != (recipe in HOST_ONLY)


@pytest.mark.parametrize("recipe", ["fft", "powersgd"])
def test_averages_are_near_the_cpus(recipe):
    """Of a transform and of products of matrices; see docs/gpu.md."""
    ddp, theirs = prepared(recipe)
    expected = [*averages(ddp, range(1))[0], *state_of(theirs).values()]
    with on_gpu():
        ddp, ours = prepared(recipe)
        found = [*averages(ddp, range(1))[0], *state_of(ours).values()]
    same_everywhere(*(p.grad.cpu() for p in ddp.parameters()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-2 * float(other.abs().max()))


def test_a_parameter_that_no_rank_uses_keeps_its_residual():
    def residuals():
        ddp, compression = prepared("topk", find_unused_parameters=True)
        averages(ddp, range(4), spare=lambda step: uses(step, dist.get_rank()))
        return [compression.residual(f"{layer}.weight") for layer in ("first", "spare")]

    expected = residuals()
    with on_gpu():
        found = residuals()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_averages_of_half_precision_are_the_cpus(dtype):
    ddp, _ = prepared("topk", Network3().to(dtype))
    with torch.autocast(_place, dtype):
        expected = averages(ddp, range(3))
    with on_gpu():
        ddp, compression = prepared("topk", Network3().to(dtype))
        with torch.autocast(_place, dtype):
            found = averages(ddp, range(3))
    assert_same(found, expected)
    assert found[0][0].dtype is dtype
    assert compression.stats()["skipped_steps"] == 0


@pytest.mark.filterwarnings("ignore:.*NaN or Inf")
def test_an_average_that_overflows_drops_the_step_as_on_the_cpu():
    """Residuals in float32 add up to more than float16 holds."""

    def trained():
        ddp, compression = prepared("topk", Network3().half())
        with torch.autocast(_place, torch.float16):
            found = averages(ddp, [0] * 12, times=1.5e4)
        return found, compression.stats()["skipped_steps"], compression.residual("first.weight")

    expected, skipped, residual = trained()
    with on_gpu():
        found, also_skipped, its_residual = trained()
    assert_same(found, expected)
    assert also_skipped == skipped > 0
    assert torch.equal(its_residual, residual)


@pytest.mark.filterwarnings("ignore:.*NaN or Inf")
def test_a_step_with_nan_leaves_no_trace():
    with on_gpu():
        ddp, compression = prepared("topk")
        averages(ddp, range(3))
        before = state_of(compression)
        averages(ddp, range(1), times=float("nan") if dist.get_rank() == 1 else 1.0)
    assert all(p.grad.isnan().any() for p in ddp.parameters())
    after = state_of(compression)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert compression.stats()["skipped_steps"] == 1


def test_a_state_saved_on_the_gpu_goes_on_on_the_cpu_and_back():
    ddp, _ = prepared("topk")
    expected = averages(ddp, range(9))
    with on_gpu():
        ddp, compression = prepared("topk")
        averages(ddp, range(3))
    ddp, between = prepared("topk")
    between.load_state_dict(compression.state_dict())
    assert_same(averages(ddp, range(3, 6)), expected[3:6])
    with on_gpu():
        ddp, again = prepared("topk")
        again.load_state_dict(between.state_dict())
        assert_same(averages(ddp, range(6, 9)), expected[6:])


def test_a_rank_whose_gpu_computes_nothing_is_told_by_all():
    with on_gpu() if dist.get_rank() == 0 else contextlib.nullcontext():
        ddp, _ = prepared("topk")
        with pytest.raises(ConfigMismatchError, match="steps computed on"):
            averages(ddp, range(1))


def test_a_flipped_bit_is_found_where_it_is(monkeypatch):
    with on_gpu():
        ddp, _ = prepared("topk")
        averages(ddp, range(3))
        if dist.get_rank() == 1:
            ddp.module.second.weight.data.view(-1).view(torch.int32)[7] ^= 1
        # Nothing may bring parameters to the host.
        monkeypatch.setattr(OptimizedParameters, "read", lambda *number: pytest.fail("copied"))
        with pytest.warns(RuntimeWarning, match=r"second\.weight' on rank 1"):
            averages(ddp, range(100))


def test_local_steps_are_the_cpus():
    def trained():
        ddp, compression = prepared("topk")
        local = LocalSteps(ddp, compression, period=2)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        for step in range(6):
            averages(ddp, [step])
            optimizer.step()
            local.after_step()
        return flat(ddp).cpu()

    expected = trained()
    with on_gpu():
        found = trained()
    assert torch.equal(found, expected)
    same_everywhere(found)


@pytest.mark.parametrize("recipe", ["topk", "powersgd"])
def test_another_stream_computes_the_same(recipe):
    if not HAS_GPU:
        pytest.skip("the emulator has no streams")
    with on_gpu():
        ddp, _ = prepared(recipe)
        expected = averages(ddp, range(6))
        with torch.cuda.stream(torch.cuda.Stream()):
            ddp, _ = prepared(recipe)
            torch.cuda._sleep(100_000_000)
            found = averages(ddp, range(6))
    assert_same(found, expected)


@pytest.mark.parametrize(
    ("recipe", "options", "n_sizes"),
    [
        ("topk", {}, 0),
        ("topk", {"exchange": "sharded"}, 0),
        ("topk", {"find_unused_parameters": True}, 0),
        ("adacomp", {}, 1),
    ],
    ids=str,
)
def test_all_ranks_launch_the_same_and_wait_for_unknown_sizes_alone(
    network, monkeypatch, recipe, options, n_sizes
):
    if network != "streams":
        pytest.skip("of collectives that streams wait for")
    launched, sizes, on_host = [], [], []

    def noted(owner, name, into, what):
        inner = getattr(owner, name)

        def note(self, *given):
            if threading.current_thread() is threading.main_thread():
                into.append(what(*given))
            return inner(self, *given)

        monkeypatch.setattr(owner, name, note)

    noted(
        streams.StreamNetwork,
        "send",
        launched,
        lambda made, name, group: (
            made.collective,
            name,
            group.ranks,
            made.receives,
            len(made.data),
        ),
    )
    noted(rounds.Network, "send", on_host, lambda made, name, group: name.split(".")[2])
    noted(rounds.Network, "sizes", sizes, lambda *given: given)
    with on_gpu():
        ddp, compression = prepared(recipe, replica_check="off", **options)
        averages(ddp, range(2))
        for each in (launched, on_host, sizes):
            each.clear()  # of the handshake
        averages(ddp, range(2, 6))
    n_buckets = len(compression.engine.buckets)
    everywhere = [None] * dist.get_world_size()
    # Of sharded exchanges ranks get and send shards of their own sizes.
    is_flat = "exchange" not in options
    dist.all_gather_object(everywhere, [e[: 5 if is_flat and e[3] else 3] for e in launched])
    assert all(each == everywhere[0] for each in everywhere)
    assert len(launched) >= 4 * n_buckets > 4
    kinds = {"step", "used"} if "find_unused_parameters" in options else {"step"}
    assert set(on_host) == kinds
    assert on_host.count("step") == 4
    assert len(sizes) == 4 * n_buckets * n_sizes


def test_buckets_of_the_host_and_sizes_keep_one_order(network, monkeypatch):
    """Both ask all ranks over Gloo, which matches what they ask by its order."""
    rules = [("spare*", {"recipe": "gtopk"})]
    sizes, rank = rounds.RankGroup.sizes, dist.get_rank()

    def slow(self, *given):
        found = sizes(self, *given)
        if rank == 1 and threading.current_thread() is not threading.main_thread():
            time.sleep(0.02)
        return found

    monkeypatch.setattr(rounds.RankGroup, "sizes", slow)
    with on_gpu():
        ddp, compression = prepared("topk", exchange="sharded", rules=rules, timeout_s=20)
        averages(ddp, range(8))
        assert compression.stats()["steps"] == 8
    same_everywhere(*(p.grad.cpu() for p in ddp.parameters()))


def test_an_error_in_a_step_is_raised_as_it_is(monkeypatch):
    with on_gpu():
        ddp, compression = prepared("topk", timeout_s=20)
        averages(ddp, range(2))

        def fail(scale):
            raise ConfigMismatchError("the cause")

        monkeypatch.setattr(compression.engine, "follow_loss_scale", fail)
        with pytest.raises(ConfigMismatchError, match="the cause"):
            averages(ddp, range(1))


def test_a_model_on_several_devices_is_refused():
    model = Network3()
    model.spare.to("meta")
    ddp = wrapped(Network3())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compressor, "exchanged", lambda ddp: compressor.Parameters(model))
        with pytest.raises(UnsupportedError, match="parameters on cpu and meta"):
            compress(ddp, "topk")
