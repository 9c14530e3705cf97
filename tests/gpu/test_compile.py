"""Every kernel compiles for every architecture, within a device's means."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from horovod_fftcomp.kernels import cuda
from tests.gpu import nvrtc
from tests.gpu.signatures import signatures

pytestmark = pytest.mark.xdist_group("compile")  # shares what is compiled

# CUDA 12 is the last that knows sm_70.
ARCHS = [("12", "sm_70"), ("12", "sm_90"), *(("13", f"sm_{n}") for n in (75, 80, 90, 100, 120))]
BLACKWELL = ("13", "sm_100")
OFTEN = ARCHS[0]  # others take half a minute each
# Three such blocks on a processor keep enough loads under way.
REGISTERS_OF_A_PROCESSOR, MOST_THREADS = 65536, 256


@pytest.fixture(scope="module")
def compiled():
    """What NVRTC made, by version and architecture: each is compiled once."""
    found = {}

    def get(version, arch):
        library = nvrtc.library(version)
        if library is None:
            pytest.skip(f"NVRTC {version} is not installed")
        if (version, arch) not in found:
            found[version, arch] = nvrtc.compile_for(library, cuda.source(), cuda.NAMES, arch)
        return found[version, arch]

    return get


@pytest.mark.more
@pytest.mark.parametrize(
    ("version", "arch"),
    [pytest.param(*arch, marks=[] if arch == OFTEN else pytest.mark.slow) for arch in ARCHS],
)
def test_kernels_compile_without_warnings_and_spills(compiled, version, arch):
    made = compiled(version, arch)
    assert made.warnings == []
    assert ".local" not in made.ptx
    assert len(made.resources) == len(cuda.NAMES)
    for kernel in made.resources:
        assert kernel.spilled_nbytes == 0, kernel
        assert kernel.registers <= REGISTERS_OF_A_PROCESSOR / (3 * MOST_THREADS), kernel


def flushing(kernel: str) -> set[str]:
    """Return instructions of which denormal numbers become zero; none that look for infinity."""
    kernel = re.sub(r"setp\.equ\.ftz\.f32\s+%\w+, %\w+, 0f7F800000;", "", kernel)
    uses = Counter(re.findall(r"%\w+", kernel))
    found = re.findall(r"(\w+\.(?:\w+\.)*ftz\S*)\s+(%\w+)", kernel)
    return {name for name, result in found if (name, uses[result]) != ("abs.ftz.f32", 1)}


@pytest.mark.more
@pytest.mark.parametrize(
    "arch", [OFTEN, *(pytest.param(arch, marks=pytest.mark.slow) for arch in (ARCHS[1], BLACKWELL))]
)
def test_arithmetic_is_what_is_written(compiled, arch):
    ptx = compiled(*arch).ptx
    assert not re.findall(r"(?:sin|cos|ex2|lg2|rsqrt|sqrt|rcp|div)\.approx", ptx)
    kernels = ptx.split(".entry")
    # Of sums of squares, for statistics.
    assert set().union(*map(flushing, kernels)) == {"cvt.ftz.f64.f32"}
    assert "fma.rn.f32" in ptx  # in complex products, where it is written


def test_what_is_written_is_not_restrict():
    """Else a load of what another thread has written may move above the barrier between them."""
    kernels = signatures(cuda.source())
    assert {name.partition("<")[0] for name in cuda.NAMES} == {*kernels}
    for name, parameters in kernels.items():
        assert not [p.name for p in parameters if p.is_restrict and p.is_written], name


@pytest.mark.more
@pytest.mark.slow
@pytest.mark.parametrize(("version", "arch"), [("12", "sm_90"), ("13", "sm_90")])
def test_ptx_is_that_of_the_virtual_architecture(compiled, version, arch):
    """Which the emulator runs, since it takes less time to compile."""
    virtual = compiled(version, arch.replace("sm_", "compute_"))
    assert virtual.ptx == compiled(version, arch).ptx
