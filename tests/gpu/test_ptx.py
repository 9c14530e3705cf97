"""The kernels as NVRTC compiles them, run by the emulator: the compiler may change what they do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from horovod_fftcomp.kernels import cuda
from horovod_fftcomp.kernels.cuda.encoder import Encoder
from tests.gpu import build, nvrtc, ptx
from tests.gpu.emulator import Emulator
from tests.gpu.ptx_cases import codec_and_grad

ROOT = Path(__file__).parents[2]
OFTEN = "13:sm_90"
TARGETS = ("12:sm_80", "12:sm_90", "13:sm_80", OFTEN, "13:sm_100")
SUITE = ("test_kernels", "test_engine", "test_engine_state", "test_emulator")
# Of each way of choosing elements and of writing positions, the entropy code, and a transform.
QUICK = {
    "test_payloads_and_residuals_are_the_cpus": (
        "topk", "topk-bitmap", "threshold", "adacomp", "wangni", "qsgd", "dither-20", "onebit",
    ),
    "test_from_given_coefficients_on_every_byte_is_the_cpus": ("fft-2-bits",),
    "test_sums_are_the_cpus": (
        "topk", "topk-bitmap", "fft-2-bits", "qsgd-l2", "dither-20", "onebit-column",
    ),
}  # fmt: skip


def run_python(target: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module as a process of its own, which wrong kernels may end."""
    if nvrtc.library(target.partition(":")[0]) is None:
        pytest.skip(f"NVRTC of {target} is not installed")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def run_tests(target: str, *tests: str) -> str:
    """Return the report of tests that run the PTX; they pass."""
    ran = run_python(target, "pytest", "--quiet", "--ptx", target, *tests)
    assert ran.returncode == 0, ran.stdout[-10_000:] + ran.stderr[-2000:]
    return ran.stdout


@pytest.mark.more
def test_contracts_hold_for_what_the_compiler_makes():
    file = "tests/gpu/test_kernels.py"
    run_tests(OFTEN, *(f"{file}::{test}[{key}]" for test, keys in QUICK.items() for key in keys))


@pytest.mark.more
@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_all_tests_of_the_emulator_pass_with_what_the_compiler_makes(target):
    report = run_tests(target, *(f"tests/gpu/{name}.py" for name in SUITE))
    assert f"{len(cuda.NAMES)} of {len(cuda.NAMES)} kernels" in report, report[-5000:]


@pytest.mark.more
@pytest.mark.slow
@pytest.mark.parametrize("target", ["13:sm_80", "13:sm_90"])
def test_restrict_on_what_other_threads_write_makes_a_wrong_selection(target):
    """Version 0.2.0 had it: a load moved above a barrier, of what another thread had to write."""
    right = run_python(target, "tests.gpu.ptx_cases", target, "0").stdout.split()
    assert right == 3 * right[:1], right
    codec, grad = codec_and_grad()
    device = Emulator()  # of the source
    encoder = Encoder(device, [codec], [grad.shape])
    made = encoder.encode([device.upload(grad)], [None], [None], False, None)
    assert right[0] == made.message[: codec.plan(grad.shape).payload_nbytes].tobytes().hex()
    wrong = run_python(target, "tests.gpu.ptx_cases", target, "1")
    assert wrong.returncode < 0 or len({*wrong.stdout.split()}) > 1, wrong.stderr


def run_kernel(monkeypatch, body: str, n: int = 32, shared_nbytes: int = 64) -> list[int]:
    """Return what a kernel of one warp, with this body, writes to ``n`` words."""
    if nvrtc.library("13") is None:
        pytest.skip("NVRTC 13 is not installed")
    monkeypatch.setattr(build, "target", build.Target("13", "sm_90"))
    device = Emulator()
    words = device.zeros(n, np.uint32)
    source = f"__global__ void run(unsigned* words, unsigned i) {{ {body} }}"
    device.functions(source, ["run"])["run"](1, 32, [words, np.uint32(1)], shared_nbytes)
    return words.tolist()


NAN = "__int_as_float(0x7fc00000)"
CONSTRAINTS = {"unsigned": "r", "float": "f", "double": "d"}
# Instruction, type and values of its operands, result; by NVIDIA's "PTX ISA".
ANSWERS = [
    ("prmt.b32", "unsigned", (0x03828180, 0x07868584, 0xB840), 0x00FF8480),
    ("bfi.b32", "unsigned", (0x3C, 0xFFFFFFFF, 4, 4), 0xFFFFFFCF),
    ("bfi.b32", "unsigned", (0xFF, 0, 28, 8), 0xF0000000),
    ("bfi.b32", "unsigned", (0xFF, 7, 3, 0), 7),
    ("shf.l.wrap.b32", "unsigned", (0x80000001, 2, 33), 5),
    ("shl.b32", "unsigned", (1, 32), 0),
    ("shr.s32", "unsigned", (0x80000000, 40), 0xFFFFFFFF),
    ("mul.hi.u32", "unsigned", (0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFE),
    ("popc.b32", "unsigned", (0xF0F,), 8),
    ("neg.ftz.f32", "unsigned", (1,), 0x80000000),
    ("abs.ftz.f32", "unsigned", (0x80000001,), 0),
    ("cvt.rzi.u32.f32", "float", ("-1.5f",), 0),
    ("cvt.rzi.u32.f32", "float", ("2.9f",), 2),
    ("cvt.rzi.u32.f32", "float", ("5e9f",), 0xFFFFFFFF),
    ("cvt.rzi.u32.f32", "float", (NAN,), 0),
    ("cvt.rzi.u32.f64", "double", (NAN,), 0x80000000),
]


def test_instructions_do_what_nvidia_says(monkeypatch):
    statements = []
    for number, (instruction, type_, values, _) in enumerate(ANSWERS):
        places = ", ".join(f"%{i + 1}" for i in range(len(values)))
        operands = ", ".join(f'"{CONSTRAINTS[type_]}"({type_}({value}))' for value in values)
        statements.append(
            f'asm("{instruction} %0, {places};" : "=r"(words[{number}]) : {operands});'
        )
    found = run_kernel(monkeypatch, "\n".join(statements))
    assert found[: len(ANSWERS)] == [expected for *_, expected in ANSWERS]


def test_shuffles_read_the_lanes_that_nvidia_says(monkeypatch):
    shuffles = {
        "__shfl_up_sync(~0u, lane, 3)": lambda lane: lane - 3 if lane >= 3 else lane,
        "__shfl_down_sync(~0u, lane, 3, 8)": lambda lane: lane + 3 if lane % 8 < 5 else lane,
        "__shfl_xor_sync(~0u, lane, 5)": lambda lane: lane ^ 5,
        "__shfl_sync(~0u, lane, 9, 16)": lambda lane: lane // 16 * 16 + 9,
        "__ballot_sync(~0u, lane % 4 == 1)": lambda lane: 0x22222222,
    }
    statements = [f"words[{32 * i} + lane] = {text};" for i, text in enumerate(shuffles)]
    found = run_kernel(monkeypatch, "unsigned lane = threadIdx.x;" + " ".join(statements), 160)
    assert found == [lane(i) for lane in shuffles.values() for i in range(32)]


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ('asm("brev.b32 %0, %0;" : "+r"(*words));', ptx.PtxError, "brev_b32"),
        ("*reinterpret_cast<float2*>(words + i) = {1, 2};", RuntimeError, "misaligned address"),
        (
            "extern __shared__ __align__(16) unsigned memory[]; memory[15 + i] = 0;",
            RuntimeError,
            "beyond the end of shared memory",
        ),
        ("if (threadIdx.x % 2) __syncwarp(0x55555555);", RuntimeError, "lane is not in its mask"),
    ],
)
def test_what_is_wrong_is_told(monkeypatch, body, error, message):
    with pytest.raises(error, match=message):
        run_kernel(monkeypatch, body)


def test_ptx_outside_of_kernels_is_refused():
    with pytest.raises(ptx.PtxError, match="outside of kernels"):
        ptx.to_cpp(".version 8.0\n.func (.param .b32 a) f() { ret; }\n", [])
