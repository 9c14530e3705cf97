"""On a GPU: the CPU's bytes, without a wait. Run by ``make test-gpu``."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys

import numpy as np
import pytest

from horovod_fftcomp.backends import load_backend
from horovod_fftcomp.backends.gpu.encoder import Encoder
from horovod_fftcomp.backends.gpu.probe import probe
from horovod_fftcomp.world import exchange_once
from tests.contracts import make_codec
from tests.gpu import test_engine as steps
from tests.gpu.emulator import Emulator
from tests.gpu.test_kernels import FIXED, GRADS, PLAIN, a_residual

pytestmark = pytest.mark.gpu
CPU = load_backend("cpu")


@pytest.fixture(scope="module", params=["torch", "cupy"])
def device(request):
    """A GPU as PyTorch or CuPy own its memory; the test is skipped where there is none."""
    if not pytest.importorskip("cupy").cuda.is_available():
        pytest.skip("no GPU is available")
    if request.param == "cupy":
        from horovod_fftcomp.backends.gpu.cupy_device import CupyDevice

        return CupyDevice()
    torch = pytest.importorskip("torch")
    from horovod_fftcomp.backends.gpu.torch_device import TorchDevice

    return TorchDevice(torch.device("cuda", 0))


@pytest.fixture
def on_torch(device):
    """PyTorch, for tests of its streams, errors and trainings."""
    torch = pytest.importorskip("torch")
    if type(device).__name__ != "TorchDevice":
        pytest.skip("of PyTorch")
    return torch


def encoded(device, codec, grads, residuals):
    """Return (message, what is left of each tensor) as NumPy arrays."""
    encoder = Encoder(device, [codec] * len(grads), [grad.shape for grad in grads])
    coeffs = [None if f is None else device.empty(f[1], f[0]) for f in encoder.coeffs_formats]
    old = [None if r is None else device.upload(r) for r in residuals]
    made = encoder.encode([device.upload(grad) for grad in grads], old, coeffs)
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
        expected = codec.encode_coeffs(coeffs, grads[i].shape, kernels=CPU)
        found = message[offsets[i] : offsets[i] + expected.payload.size]
        assert found.tobytes() == expected.payload.tobytes(), name
        if expected.residual is not None:
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


def test_a_device_passes_its_probe(device):
    probe(device)


@pytest.mark.parametrize(("recipe", "tolerance"), [("topk", 0), ("fft", 2e-6), ("dct", 2e-6)])
def test_steps_are_the_cpus(device, recipe, tolerance):
    cpu, gpu = steps.make_engines(None, recipe), steps.make_engines(device, recipe)
    rng = np.random.default_rng(0)
    for step in range(4):
        grads = steps.random_grads(rng)
        if step == 2:
            grads[1][0][1][5] = np.nan
        expected = run_step(cpu, grads)
        for ours, theirs in zip(run_step(gpu, grads), expected, strict=True):
            atol = tolerance * np.nan_to_num(np.abs(theirs)).max()
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)
    gpu[0].read_device()
    assert gpu[0].costs.skipped_steps == 1


def run_step(engines, grads):
    """Return the sums of a step as NumPy arrays, the same on all ranks."""
    exchange_once(engines, grads, random.Random(0))
    sums = [[engine._on_host(t) for b in (0, 1) for t in engine.sums(b)] for engine in engines]
    for others in sums[1:]:
        for ours, theirs in zip(sums[0], others, strict=True):
            assert ours.tobytes() == theirs.tobytes()
    for engine in engines:
        engine.settle()
    return sums[0]


def on_gpu(torch, grads):
    """Return the gradients of all ranks as CUDA tensors."""
    return [
        [[torch.from_numpy(grad).cuda() for grad in bucket] for bucket in of_rank]
        for of_rank in grads
    ]


def test_fixed_sizes_never_wait(device, on_torch):
    engines = steps.make_engines(device, "fft")
    grads = on_gpu(on_torch, steps.random_grads(np.random.default_rng(1)))
    pairs = list(zip(engines, grads, strict=True))
    run_step(engines, grads)  # compiles
    on_torch.cuda.synchronize()
    on_torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            for bucket in (0, 1):
                messages = [e.start(bucket, g[bucket]).data for e, g in pairs]
                gathered = on_torch.cat(messages)
                for engine in engines:
                    engine.advance(bucket, gathered)
            for engine in engines:
                engine.settle()
    finally:
        on_torch.cuda.set_sync_debug_mode("default")


def test_another_stream_computes_the_same(device, on_torch):
    grads = on_gpu(on_torch, steps.random_grads(np.random.default_rng(2)))
    expected = run_step(steps.make_engines(device, "topk"), grads)
    on_torch.cuda.synchronize()
    with on_torch.cuda.stream(on_torch.cuda.Stream()):
        found = run_step(steps.make_engines(device, "topk"), grads)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.tobytes() == theirs.tobytes()


def test_a_model_on_the_gpu_learns(device, on_torch):
    torch = on_torch
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
        exchange_once(engines, [[[g, empty[0]], [empty[1]]] for g in halves], random.Random(0))
        model[0].weight.grad.copy_(engines[0].sums(0)[0].view(100, 90) / 2)
        for engine in engines:
            engine.settle()
        optimizer.step()
        losses.append(loss.item())
    assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:5])


def test_more_than_2_to_the_31_elements(device, on_torch):
    n = (1 << 31) + 4321
    free, _ = on_torch.cuda.mem_get_info()
    if free < 6 * 4 * n:
        pytest.skip(f"{free / 1e9:.0f} GB of device memory are free, {24 * n / 1e9:.0f} are needed")
    codec = make_codec("topk")
    grad = on_torch.zeros(n, device="cuda")
    where = [0, 77, (1 << 31) - 1, 1 << 31, n - 1]
    grad[where] = on_torch.tensor([1.0, -2.0, 3.0, -4.0, 5.0], device="cuda")
    encoder = Encoder(device, [codec], [(n,)])
    message = encoder.encode([grad], [None], [None]).message
    payload = device.fetch(message)()[: codec.payload_nbytes((n,))]
    left = codec.decode(payload)
    assert left[where].tolist() == [1.0, -2.0, 3.0, -4.0, 5.0]
    assert np.count_nonzero(left) == 5


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_nvidias_sanitizer_finds_nothing(device, on_torch, tool):
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("compute-sanitizer is not installed")
    script = (
        "import torch; from horovod_fftcomp.backends.gpu.torch_device import TorchDevice;"
        "from horovod_fftcomp.backends.gpu.probe import probe;"
        "probe(TorchDevice(torch.device('cuda', 0)))"
    )
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "3", sys.executable, "-c"]
    ran = subprocess.run([*command, script], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-5000:]
