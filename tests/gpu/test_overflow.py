"""Kernels that choose wrongly write nothing outside their arrays, and no rank takes the payload."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from horovod_fftcomp import PayloadError, UnsupportedError, get_scheme
from horovod_fftcomp.engine.device_selftest import probe
from horovod_fftcomp.kernels.cuda.guarded import GuardedDevice
from tests.gpu.emulator import Emulator
from tests.gpu.overflow import ChoosesAll, selecting
from tests.gpu.steps import make_engines, random_grads, run_step


def test_wrong_selection_writes_nothing_outside_its_arrays():
    command = [sys.executable, "-m", "tests.gpu.overflow"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert [line.rsplit(" ")[-1] for line in ran.stdout.splitlines()] == selecting()


@pytest.mark.parametrize("recipe", ["topk", "fft", "dct", "dgc", "sparcml"])
def test_wrong_selection_ends_the_step_as_a_corrupt_payload(recipe):
    rng, options = np.random.default_rng(4), {"warmup_steps": 0} if recipe == "dgc" else {}
    engines = [
        make_engines(device, recipe, **options)[rank]
        for rank, device in enumerate((Emulator(), ChoosesAll()))
    ]
    assert np.isnan(run_step(engines, random_grads(rng))[0]).all()
    for engine in engines:
        with pytest.raises(PayloadError, match="payloads were corrupt"):
            engine.read_device()
        for tensor in ("a", "b", "c"):  # as before the step
            assert not np.any(engine.residual(tensor))


class Overwrites(Emulator):
    """Writes a word behind a kernel's output, or before it."""

    def __init__(self, kernel, argument, nbytes):
        super().__init__()
        self.kernel, self.argument, self.nbytes = kernel, argument, nbytes

    def functions(self, source, names):
        found = super().functions(source, names)
        if self.kernel not in found:
            return found

        def launch(grid, threads, arguments, shared_nbytes):
            found[self.kernel](grid, threads, arguments, shared_nbytes)
            array = arguments[self.argument]
            end = array.nbytes if self.nbytes > 0 else 0
            word = self.borrow(array.ctypes.data + end + self.nbytes - 4, 1, np.uint32, array)
            word[0] = 1

        return found | {self.kernel: launch}


@pytest.mark.parametrize("nbytes", [4, 4096, -4, -4096])
def test_self_test_finds_writes_outside_of_arrays(nbytes):
    with pytest.raises(UnsupportedError, match="written outside an array"):
        probe(Overwrites("narrow<1, 1>", 3, nbytes), [get_scheme("topk")])


def test_guarded_arrays_are_those_of_their_device():
    device = GuardedDevice(Emulator(), 256)
    ours = device.joined([device.upload(np.arange(3, dtype=np.float32)), device.zeros(2)])
    assert ours.tolist() == [0, 1, 2, 0, 0]
    assert device.address(ours) % 256 == 0
    assert device.check() is None
    device.borrow(device.address(ours) + ours.nbytes, 1, np.uint8, ours)[0] = 0
    assert "1 bytes were written outside an array of 20 bytes, the first 0" in device.check()
