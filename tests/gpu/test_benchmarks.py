"""The benchmarks of a GPU run on an emulated one; what they say then is not looked at."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from horovod_fftcomp import RECIPES
from tests.contracts import HOST_ONLY

FOLDER = Path(__file__).parents[2] / "benchmarks"
KEYS = ("ID", "Process ID", "Kernel Name", "Block Size")
# Launches between the marks: of one codec and phase after the other.
KERNELS = (
    "at::cuda::(anonymous namespace)::spin_kernel(long)",
    "void mark<(unsigned int)1>(const Tensor *, const unsigned int *)",
    "void narrow<1u>(const Tensor *)",
    "void mark<(unsigned int)1>(const Tensor *, const unsigned int *)",
    "void at::cuda::<unnamed>::spin_kernel(long)",
    "void forward<(int)64, (bool)false>(const Tensor *)",
)


@pytest.fixture
def script(monkeypatch):
    """Return a function that imports one of the scripts."""
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


@pytest.mark.more
def test_codecs_and_steps_are_measured(script, monkeypatch):
    from tests.gpu.torch_emulator import TorchEmulator

    gpu = script("gpu")
    monkeypatch.setattr(gpu, "STEPS_NUMEL", 9000)
    lists = [("one tensor", [9000]), ("two tensors", [3000, 500])]
    found = gpu.measured(TorchEmulator(), "cpu", lists, repeat=2)
    assert found["skipped"] == []
    assert [row["codec"] for row in found["rows"]] == [*gpu.CODECS] * 2
    assert all(row["payload_nbytes"] > 0 and row["encode"] > 0 for row in found["rows"])
    of_gpu = {*RECIPES} - {"none", "auto"} - HOST_ONLY
    assert {row["recipe"] for row in found["steps"]} == of_gpu
    assert len(found["steps"]) == 2 * len(of_gpu)
    for row in found["steps"]:
        assert 0 < row["sent_nbytes"] <= 4 * row["numel"] + 200, row
        assert row["step"] > 0
        if row["recipe"] == "powersgd":  # of matrices
            assert row["sent_nbytes"] < 2 * row["numel"]
    gpu.report(found)


def test_what_the_profiler_says_is_sorted_by_calls(script, tmp_path):
    profile = script("gpu_profile")
    metrics = (profile.READ, profile.WRITTEN, profile.TAKEN)
    table = ["==PROF== a line of its own", ",".join(f'"{key}"' for key in (*KEYS, *metrics))]
    table.append('"","","","","byte","byte","ns"')
    for i, kernel in enumerate(KERNELS * len(profile.CODECS)):
        table.append(f'"{i}","7","{kernel}","(256, 1, 1)","1,000,000","500,000","2,000"')
    facts = {"copied": 8e-6, "payload_nbytes": dict.fromkeys(profile.CODECS, 20_000)}
    rows = profile.rows_of(facts, "\n".join(table), 1_000_000)
    assert len(rows) == 5 * len(profile.CODECS)
    twice, once, both, decoding, everything = rows[:5]
    assert (twice["kernel"], twice["launches"]) == ("mark<1>", 2)
    assert (once["kernel"], once["launches"]) == ("narrow<1u>", 1)
    assert (both["kernel"], both["launches"], both["needed_nbytes"]) == ("all", 3, 16.2e6)
    assert (both["read_nbytes"], both["written_nbytes"]) == (3_000_000, 1_500_000)
    assert both["seconds"] == pytest.approx(6e-6)
    assert both["share_of_copy"] == pytest.approx(4.5e6 / 6e-6 / 1e12)
    assert (decoding["phase"], decoding["kernel"]) == ("decode_sum", "forward<64, false>")
    assert everything["needed_nbytes"] == 4e6 + profile.RANKS * 20_000
    profile.report(rows, 1_000_000)
    profile.plot(rows, tmp_path / "gpu_profile.png")
    assert (tmp_path / "gpu_profile.png").stat().st_size > 1000
