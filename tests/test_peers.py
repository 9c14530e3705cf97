"""The compressors written in PyTorch that ``benchmarks/peers.py`` compares recipes with."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from horovod_fftcomp.recipes import RECIPES

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("torch_peers")


@pytest.mark.more
def test_peers_stand_beside_with_their_bytes(tmp_path):
    path = tmp_path / "bench.json"
    arguments = ["-n", "4000", "--repeat", "1", "--compression", "topk(density=0.1,bits=32)"]
    arguments += ["--json", str(path)]
    printed = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "peers.py", *arguments],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    result = json.loads(path.read_text())
    assert result["command"].startswith("python benchmarks/peers.py -n 4000 ")
    [ours] = result["tensors"][0]["recipes"]
    topk, qsgd, half = result["tensors"][0]["peers"]
    assert [row["sent_nbytes"] for row in (topk, qsgd, half)] == [8 * 400, 4004, 8000]
    assert topk["relative_error"] == pytest.approx(ours["relative_error"], rel=1e-5)
    feedback = "feedback_relative_error"
    assert topk[feedback] == pytest.approx(ours[feedback], rel=1e-5)
    assert qsgd["feedback_s"] is half["feedback_s"] is None
    assert "topk(density=0.1, bits=32) over torch.topk 0.1: encodes" in " ".join(printed.split())


def test_peers_sum_two_ranks(peers):
    rng = np.random.default_rng(0)
    grad, other = rng.standard_normal((2, 3000)).astype(np.float32)
    options = {name: RECIPES[name].options for name in peers.PEERS}
    sessions = peers.make_sessions(0.05, (50, 60), other, 1, options)
    assert len(sessions) == 3 + len(peers.PEERS)
    *sessions, low_rank = sessions
    found = low_rank.decode(low_rank.collect(low_rank.encode(grad, feedback=False))).numpy()
    left = np.linalg.svd(found)[0][:, :4]  # the sum is the projection of both to four columns
    np.testing.assert_allclose(found, left @ left.T @ (grad + other).reshape(50, 60), atol=1e-4)
    for session in sessions:
        before = grad.tobytes()
        total = session.decode(session.collect(session.encode(grad, feedback=False))).numpy()
        assert grad.tobytes() == before
        assert total.dtype == np.float32
        # Some draw anew, by up to one level of each rank.
        largest = np.abs(grad).max() + np.abs(other).max()
        levels = {
            "torch QSGD int8": (np.linalg.norm(grad) + np.linalg.norm(other)) / 127,
            "torch QSGD 7 levels": largest / 7,
            "torch TernGrad int8": 2.5 * (grad.std() + other.std()),
        }
        slack = 1.01 * levels.get(session.label, 2e-3)
        expected = session.alone(grad) + session.alone(other)
        assert np.abs(total - expected).max() <= 2 * slack
        if session.has_feedback:
            session.advance(grad)
            np.testing.assert_array_equal(session.residual(), grad - session.alone(grad))
    assert torch.is_tensor(session.decode(session.collect(session.encode(grad, False))))


def test_qsgd_is_unbiased(peers):
    grad = np.random.default_rng(0).standard_normal(500).astype(np.float32)
    session = peers.TorchQSGD(500, grad, seed=0)
    n = 2000
    mean = sum(session.alone(grad).astype(np.float64) for _ in range(n)) / n
    # A level is rounded up or down by chance: variance at most 1/4 of its square.
    bound = 5 * 0.5 * np.linalg.norm(grad) / 127 / math.sqrt(n)
    assert np.abs(mean - grad).max() < bound
