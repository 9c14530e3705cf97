"""On a GPU: the CPU's bytes, without a wait. Run by ``make test-gpu``.

What PyTorch's own features are not needed for runs in the emulator too, so that these tests are
tested themselves.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from horovod_fftcomp import RECIPES, get_codec, get_scheme
from horovod_fftcomp.engine.buckets import Bucket
from horovod_fftcomp.engine.device_selftest import probe
from horovod_fftcomp.engine.drive import drive_all, exchange_of
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.policy import make_policy
from horovod_fftcomp.kernels import cuda
from horovod_fftcomp.kernels.cuda.encoder import Encoder
from horovod_fftcomp.schemes import Tensor
from tests.backends import load_backend
from tests.contracts import ADAPTIVE_RECIPES, ELEMENT_RECIPES, HOST_ONLY, make_codec
from tests.gpu import steps
from tests.gpu.emulator import Emulator
from tests.gpu.test_kernels import FIXED, GRADS, PLAIN, a_residual, keys_of, meant, place_of

pytestmark = pytest.mark.sampled

CPU = load_backend("cpu")
TOOLS = ("memcheck", "racecheck", "synccheck")  # of compute-sanitizer; run last
TOOL_S = 240


@pytest.fixture(
    scope="module",
    params=[*(pytest.param(name, marks=pytest.mark.gpu) for name in ("torch", "cupy")), "emulated"],
)
def device(request):
    """A GPU as PyTorch or CuPy own its memory; the test is skipped where there is none."""
    if request.param == "emulated":
        pytest.importorskip("torch")
        from tests.gpu.torch_emulator import TorchEmulator

        return TorchEmulator()
    if not pytest.importorskip("cupy").cuda.is_available():
        pytest.skip("no GPU is available")
    if request.param == "cupy":
        from horovod_fftcomp.kernels.cuda.cupy_device import CupyDevice

        return compiled(CupyDevice())
    return torch_device()


def compiled(device):
    """Return a device; all kernels are compiled in one module, not in one for each case."""
    device.functions(cuda.source(), cuda.NAMES)
    return device


def torch_device():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU is available")
    from horovod_fftcomp.kernels.cuda.torch_device import TorchDevice

    return compiled(TorchDevice(torch.device("cuda", 0)))


@pytest.fixture
def on_torch():
    """A GPU of PyTorch, and PyTorch, for tests of its streams, errors and trainings."""
    pytest.importorskip("cupy")
    return torch_device(), pytest.importorskip("torch")


def encoded(device, codec, grads, residuals):
    """Return (message, what is left of each tensor) as NumPy arrays."""
    encoder = Encoder(device, [codec] * len(grads), [grad.shape for grad in grads])
    coeffs = [None if f is None else device.empty(f[1], f[0]) for f in encoder.coeffs_formats]
    old = [None if r is None else device.upload(r) for r in residuals]
    placed, keys = [device.upload(grad) for grad in grads], keys_of(codec, len(grads))
    made = encoder.encode(placed, old, coeffs, keys=keys)
    message = device.fetch(made.message)()[: encoder.message_nbytes]
    left = [None if array is None else device.fetch(array)() for array in coeffs]
    return message, left, encoder.offsets


@pytest.mark.parametrize("key", PLAIN)
def test_payloads_and_residuals_are_the_cpus(device, key):
    codec, grads = make_codec(key), list(GRADS.values())
    residuals = [a_residual(codec, grad) if i % 2 else None for i, grad in enumerate(grads)]
    message, left, offsets = encoded(device, codec, grads, residuals)
    for i, name in enumerate(GRADS):
        coeffs = codec.coeffs_of(grads[i], grads[i].shape, CPU, residuals[i])
        options = {"kernels": CPU, "rng_key": place_of(i)}
        expected = codec.encode_coeffs(coeffs, grads[i].shape, **options)
        found = message[offsets[i] : offsets[i] + expected.payload.size]
        assert meant(codec, found) == meant(codec, expected.payload), name
        if expected.residual is not None and expected.residual.size:
            assert left[i].tobytes() == expected.residual.tobytes(), name


@pytest.mark.parametrize("key", FIXED)
def test_all_bytes_are_the_emulators(device, key):
    codec = make_codec(key)
    grads = [grad for grad in GRADS.values() if grad.size and np.isfinite(grad).all()]
    none = [None] * len(grads)
    on_gpu, emulated = (encoded(d, codec, grads, none) for d in (device, Emulator()))
    assert on_gpu[0].tobytes() == emulated[0].tobytes()
    for ours, theirs in zip(on_gpu[1], emulated[1], strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours.tobytes() == theirs.tobytes()


@pytest.mark.more  # ``make test`` has the probes of single recipes
def test_a_device_passes_its_probe(device):
    probe(device, [get_scheme(recipe) for recipe in RECIPES if recipe not in HOST_ONLY])


@pytest.mark.parametrize(
    ("recipe", "tolerance"),
    [
        *((n, 0) for n in (*ELEMENT_RECIPES, *ADAPTIVE_RECIPES) if n not in HOST_ONLY),
        *(("topk", 0), ("hard_threshold", 0), ("dgc", 0), ("fp16", 0)),
        ("fft", 2e-6),
        ("powersgd", 1e-4),  # products add in any order
    ],
)
def test_steps_are_the_cpus(device, recipe, tolerance):
    options = {"threshold": 1.5} if recipe in ("hard_threshold", "strom") else {}
    if recipe == "dgc":
        options = {"density": 0.05, "max_norm": 60.0, "warmup_steps": 1}
    cpu, gpu = (steps.make_engines(on, recipe, **options) for on in (None, device))
    rng = np.random.default_rng(0)
    for step in range(4):
        grads = steps.random_grads(rng)
        if step == 2:
            grads[1][0][1][5] = np.nan
        expected = steps.run_step(cpu, grads)
        for ours, theirs in zip(run_step(device, gpu, grads), expected, strict=True):
            atol = tolerance * np.nan_to_num(np.abs(theirs)).max()
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)
    gpu[0].read_device()
    assert gpu[0].costs.skipped_steps == 1
    assert gpu[0].costs.total_error == pytest.approx(cpu[0].costs.total_error, rel=1e-4)


@pytest.mark.parametrize("recipe", ["topk", "fft"])
def test_a_frozen_tensors_loaded_residual_stays_under_a_filter(device, recipe):
    rng = np.random.default_rng(6)
    gpu = steps.make_engines(device, recipe, beta=0.5)
    run_step(device, gpu, steps.random_grads(rng))
    for engine in gpu:
        engine.load_state_dict(engine.state_dict())
    before = [engine.residual("a") for engine in gpu]
    grads = steps.random_grads(rng)
    for of_rank in grads:
        of_rank[0][0] = None
    run_step(device, gpu, grads)
    for engine, kept in zip(gpu, before, strict=True):
        np.testing.assert_array_equal(engine.residual("a"), kept)


def run_step(device, engines, grads):
    """Return the sums of a step as NumPy arrays, the same on all ranks."""
    for bucket in (0, 1):
        exchange(device, engines, [of_rank[bucket] for of_rank in grads], bucket)
    sums = [[device.fetch(t)() for b in (0, 1) for t in engine.sums(b)] for engine in engines]
    for others in sums[1:]:
        for ours, theirs in zip(sums[0], others, strict=True):
            assert ours.tobytes() == theirs.tobytes()
    for engine in engines:
        engine.settle()
    return sums[0]


def exchange(device, engines, grads, bucket):
    """Gather or sum what the ranks send for a bucket, through the host."""

    def network(rounds):
        messages = [device.fetch(round_.data)() for round_ in rounds.values()]
        gathers = rounds[0].collective == "allgather"
        output = np.concatenate(messages) if gathers else messages[0] + messages[1]
        return {rank: device.upload(output) for rank in rounds}

    pairs = zip(engines, grads, strict=True)
    drive_all({e.rank: exchange_of(e, bucket, own) for e, own in pairs}, network)


def on_gpu(torch, grads):
    """Return the gradients of all ranks as CUDA tensors."""
    return [
        [[torch.from_numpy(grad).cuda() for grad in bucket] for bucket in of_rank]
        for of_rank in grads
    ]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_fixed_sizes_never_wait(on_torch):
    device, torch = on_torch
    engines = steps.make_engines(device, "fft")
    grads = on_gpu(torch, steps.random_grads(np.random.default_rng(1)))
    pairs = list(zip(engines, grads, strict=True))
    run_step(device, engines, grads)  # compiles
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(5):
            for bucket in (0, 1):
                messages = [e.resume(bucket, g[bucket]).data for e, g in pairs]
                gathered = torch.cat(messages)
                for engine in engines:
                    engine.resume(bucket, gathered)
            for engine in engines:
                engine.settle()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_another_stream_computes_the_same(on_torch):
    device, torch = on_torch
    grads = on_gpu(torch, steps.random_grads(np.random.default_rng(2)))
    expected = run_step(device, steps.make_engines(device, "topk"), grads)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        found = run_step(device, steps.make_engines(device, "topk"), grads)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.gpu
def test_a_model_on_the_gpu_learns(on_torch):
    device, torch = on_torch
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(90, 100), torch.nn.Tanh(), torch.nn.Linear(100, 1))
    model.cuda()
    x = torch.randn(256, 90, device="cuda")
    y = x[:, :1] * x[:, 1:2]
    engines = steps.make_engines(device, "fft")
    optimizer, losses = torch.optim.Adam(model.parameters(), 3e-3), []
    for _ in range(60):
        halves = []
        for half in (slice(0, 128), slice(128, 256)):
            optimizer.zero_grad()
            loss = (model(x[half]) - y[half]).square().mean()
            loss.backward()
            halves.append(model[0].weight.grad.reshape(-1).clone())
        empty = [torch.zeros(n, device="cuda") for n in (3000, 3500)]
        [mean, *_] = run_step(device, engines, [[[g, empty[0]], [empty[1]]] for g in halves])
        model[0].weight.grad.copy_(torch.from_numpy(mean).view(100, 90) / 2)
        optimizer.step()
        losses.append(loss.item())
    assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:5])


@pytest.mark.gpu
@pytest.mark.xdist_group("little memory")
def test_without_memory_a_step_ends_and_leaves_the_state_whole(on_torch):
    device, torch = on_torch
    n = 30_000_000
    bucket = Bucket((Tensor("a", (n,)),), make_policy("topk", density=0.01))
    expected, engine = (Engine([bucket], 0, 1, device) for _ in range(2))
    first, broken_off, last = (torch.randn(n, device="cuda") for _ in range(3))

    def step(engine, grad):
        engine.resume(0, engine.resume(0, [grad]).data)
        total = device.fetch(engine.sums(0)[0])()
        engine.settle()
        return total

    step(expected, first)
    step(engine, first)
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved() + (1 << 24)  # not enough for a residual
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.mem_get_info()[1])
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError, match="out of memory"):
            step(engine, broken_off)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    engine.abandon()
    assert step(engine, last).tobytes() == step(expected, last).tobytes()


@pytest.mark.gpu
@pytest.mark.xdist_group("much memory")
def test_more_than_2_to_the_31_elements(on_torch):
    device, torch = on_torch
    n = (1 << 31) + 4321
    free, _ = torch.cuda.mem_get_info()
    if free < 6 * 4 * n:
        pytest.skip(f"{free / 1e9:.0f} GB of device memory are free, {24 * n / 1e9:.0f} are needed")
    codec = get_codec("topk", density=0.001, bits=32)
    grad = torch.zeros(n, device="cuda")
    where = [0, 77, (1 << 31) - 1, 1 << 31, n - 1]
    grad[where] = torch.tensor([1.0, -2.0, 3.0, -4.0, 5.0], device="cuda")
    encoder = Encoder(device, [codec], [(n,)])
    message = encoder.encode([grad], [None], [None]).message
    payload = device.fetch(message)()[: codec.payload_nbytes((n,))]
    left = codec.decode(payload)
    assert left[where].tolist() == [1.0, -2.0, 3.0, -4.0, 5.0]
    assert np.count_nonzero(left) == 5


@pytest.mark.gpu
@pytest.mark.parametrize("tool", [pytest.param(t, marks=pytest.mark.xdist_group(t)) for t in TOOLS])
def test_nvidias_sanitizer_finds_nothing(on_torch, tool):
    """Allocations of its own for each tensor: beyond one begins what memcheck reports."""
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("compute-sanitizer is not installed")
    script = (
        "import torch; from horovod_fftcomp.kernels.cuda.torch_device import TorchDevice;"
        "from horovod_fftcomp.kernels import cuda;"
        "from horovod_fftcomp.engine.device_selftest import probe;"
        "from horovod_fftcomp import RECIPES, get_scheme;"
        "from tests.contracts import HOST_ONLY;"
        "schemes = [get_scheme(recipe) for recipe in RECIPES if recipe not in HOST_ONLY];"
        "device = TorchDevice(torch.device('cuda', 0));"
        "device.functions(cuda.source(), cuda.NAMES); probe(device, schemes)"
    )
    # A runtime that is newer than the driver asks it for what it has not: no error of kernels.
    command = ["compute-sanitizer", "--tool", tool, "--report-api-errors", "no"]
    command += ["--error-exitcode", "3", sys.executable, "-c", script]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    ran = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=TOOL_S
    )
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-5000:]
