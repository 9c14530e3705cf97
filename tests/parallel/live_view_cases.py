"""What a compressor tells while it trains: lines of JSON, scalars and a warning."""

from __future__ import annotations

import json
import warnings

import horovod.torch as hvd
import pytest
import torch
from torch import nn

from horovod_fftcomp.monitor.step_log import figures
from tests.parallel.models import distributed, flat, make_model, small_buckets, train


class Scalars(list):
    """A writer as that of TensorBoard is."""

    def add_scalar(self, name, value, step):
        self.append((name, value, step))


@pytest.mark.parametrize("recipe", ["none", "topk", "scalecom"])
def test_the_first_rank_writes_what_stats_tells(recipe, tmp_path, same_everywhere):
    path, scalars = tmp_path / "live.jsonl", Scalars()
    ends, moments = [], [{}]
    for options in ({}, {"live_view": path, "scalars": scalars, "live_every": 3}):
        model = make_model()
        compression = small_buckets(model, recipe, **options)
        optimizer = distributed(model, compression)
        for step in range(3):
            train(model, optimizer, 3 if step < 2 else 1)
            moments.append(compression.stats())
        ends.append(flat(model))
    assert torch.equal(*ends)
    same_everywhere(ends[0])
    assert path.exists() == bool(scalars) == (hvd.rank() == 0)
    if hvd.rank() == 0:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        ratios, moments = compression.residual_ratios(), [{}, *moments[-3:]]
        assert lines == [
            {"step": 3 * i} | figures(moments[i - 1], moments[i], ratios) for i in (1, 2)
        ]
        assert lines[1]["ratio"] == pytest.approx(moments[2]["ratio"], rel=0.01)
        assert lines[1]["residual_tensor"] in (ratios or [None])
        assert set(scalars) == {
            (f"fftcomp/{name}", value, line["step"])
            for line in lines
            for name, value in line.items()
            if type(value) in (int, float) and name not in ("step", "steps")
        }


def test_lines_come_while_a_training_asks_for_nothing(tmp_path):
    path = tmp_path / "live.jsonl"
    model = make_model()
    optimizer = distributed(model, small_buckets(model, "fft", live_view=str(path), live_every=2))
    train(model, optimizer, 6)
    if hvd.rank() == 0:  # the sixth step is closed by the seventh
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line["step"] for line in lines] == [2, 4]


def test_whoever_becomes_the_first_rank_goes_on_with_the_lines(tmp_path):
    path = tmp_path / "live.jsonl"
    model = make_model()
    compression = small_buckets(model, "fp16", live_view=path, live_every=2)
    optimizer = distributed(model, compression)
    train(model, optimizer, 3)
    compression.engine.rank = 1 - hvd.rank()  # as if an elastic reset had changed the order
    train(model, optimizer, 2)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    expected = (2, 2) if hvd.rank() == 0 else (4, 4)
    assert [(line["step"], line["steps"]) for line in lines] == [expected]


def test_a_live_view_that_cannot_be_is_told():
    with pytest.raises(TypeError, match=r"scalars must have add_scalar.*got int"):
        small_buckets(make_model(), "topk", scalars=3)
    if hvd.rank() == 0:
        with pytest.raises(FileNotFoundError, match="'/missing'"):
            small_buckets(make_model(), "topk", live_view="/missing/live.jsonl")


def test_a_full_disk_does_not_end_a_training(same_everywhere):
    model = make_model()
    compression = small_buckets(model, "topk", live_view="/dev/full", live_every=1)
    optimizer = distributed(model, compression)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, optimizer, 4)
    texts = [str(w.message) for w in caught]
    assert sum("'/dev/full' cannot be written" in text for text in texts) == (hvd.rank() == 0)
    same_everywhere(flat(model))


def test_a_residual_that_outgrows_its_gradient_is_warned_of(tmp_path, same_everywhere):
    """The gradient fades faster than the residual is sent."""
    path = tmp_path / "live.jsonl"
    model = nn.Linear(40, 40, bias=False)
    options = {"live_view": path, "live_every": 266, "replica_check": "off"}
    compression = small_buckets(model, "topk", density=0.01, **options)
    optimizer = distributed(model, compression, lr=0.0)
    grad = torch.randn(40, 40, generator=torch.Generator().manual_seed(hvd.rank()))

    def run():
        for step in range(267):  # measured at steps 0, 53, ..., 265
            optimizer.zero_grad()
            (model.weight * grad * 0.9**step).sum().backward()
            optimizer.step()

    with pytest.warns(RuntimeWarning, match="residual of 'weight'"):
        run()
    same_everywhere(model.weight)
    if hvd.rank() == 0:
        line = json.loads(path.read_text())
        assert line["residual_tensor"] == "weight"
        ratio = compression.residual_ratios()["weight"]
        assert line["residual_ratio"] == pytest.approx(ratio)
        assert ratio > 100
