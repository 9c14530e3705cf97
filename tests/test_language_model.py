"""The runs of ``benchmarks/language_model.py``: their resumption, optimizers and text."""

from __future__ import annotations

import importlib
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("horovod")
import horovod_fftcomp  # noqa: E402

pytestmark = pytest.mark.torch
BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def training(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("language_model_training")
    monkeypatch.setitem(module.SIZES, "tiny", module.Size(48, 1, 6))
    monkeypatch.setattr(module, "EVALUATE_EVERY", 2)
    monkeypatch.setattr(module, "EVALUATED_BATCHES", 1)
    monkeypatch.setattr(module, "BATCH", 2)
    before = torch.get_num_threads(), horovod_fftcomp.get_num_threads()
    module.set_threads(1)
    yield module
    torch.set_num_threads(before[0])
    horovod_fftcomp.set_num_threads(before[1])


@pytest.fixture
def library(tmp_path):
    """Return a folder of text, of which one file is left out."""
    folder = tmp_path / "library"
    (folder / "test").mkdir(parents=True)
    (folder / "words.py").write_text("all work and no play makes a dull text\n" * 200)
    (folder / "test" / "more.py").write_text("left out")
    return folder


@pytest.mark.parametrize(
    ("recipe", "optimizer"),
    [
        ("topk after 2 dense steps", "adamw"),
        ("qsgd", "adamw-unclipped-10"),
        ("dct(density=0.1) with momentum first of falling density", "adamw-unclipped"),
    ],
)
def test_interrupted_run_equals_an_uninterrupted_one(
    training, library, tmp_path, recipe, optimizer
):
    text = training.read_text(library, any_text=True)
    run = training.Run("tiny", 2, 6, recipe, optimizer, 0.01, 0)
    *_, whole = training.train(run, text, tmp_path)
    (tmp_path / f"{run.name}.pt").unlink()
    cut = training.train(run, text, tmp_path)
    assert [next(cut).step for _ in range(3)] == [1, 2, 3]  # saved at 2
    del cut
    going_on = training.train(run, text, tmp_path)
    resumed = next(going_on)
    assert resumed.step == 3
    *_, resumed = going_on
    results = [each.found(text) | {"seconds": 0} for each in (whole, resumed)]
    assert results[0] == results[1]
    for before, after in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(before, after)


def test_ratio_counts_steps_after_the_warm_up(training, library, tmp_path):
    text = training.read_text(library, any_text=True)
    found = {}
    for recipe in ("none", "topk", "topk after 3 dense steps"):
        run = training.Run("tiny", 2, 6, recipe, "adamw", 0.01, 0)
        *_, last = training.train(run, text, tmp_path)
        found[recipe] = last.found(text)
    none, without, with_warm_up = found.values()
    assert none["ratio"] == 1
    assert none["sent_nbytes"] == 4 * none["parameters"]
    assert without["ratio"] > 20
    assert with_warm_up["ratio"] == pytest.approx(without["ratio"], rel=0.05)
    dense, compressed = none["sent_nbytes"], without["sent_nbytes"]
    assert with_warm_up["sent_nbytes"] == pytest.approx((dense + compressed) / 2, rel=0.01)


def test_ratio_leaves_out_sums_that_are_handed_on(training, library, tmp_path):
    text = training.read_text(library, any_text=True)
    found = []
    for exchange in ("gather", "sharded"):
        run = training.Run("tiny", 2, 6, f"qsgd(exchange={exchange})", "adamw", 0.01, 0)
        *_, last = training.train(run, text, tmp_path)
        found.append(last.found(text))
    gathered, sharded = found
    assert sharded["ratio"] == pytest.approx(gathered["ratio"], rel=0.01)
    assert sharded["sent_nbytes"] > 1.3 * gathered["sent_nbytes"]


def test_finished_runs_are_not_repeated(training, library, tmp_path, monkeypatch, capsys):
    benchmark = importlib.import_module("language_model")
    arguments = ["--recipe", "none", "--size", "tiny", "--learners", "2", "--seed", "0", "1"]
    arguments += ["--lr", "0.01", "--any-text", "--library", str(library)]
    arguments += ["--out", str(tmp_path / "results"), "--scratch", str(tmp_path / "scratch")]
    benchmark.main(arguments)
    assert "run 2 of 2" in capsys.readouterr().out
    text = training.read_text(library, any_text=True)
    paths = sorted((tmp_path / "results" / text.sha256[:8]).iterdir())
    results = [json.loads(path.read_text()) for path in paths]
    assert [result["seed"] for result in results] == [0, 1]
    assert results[0]["evaluated_at"] == [2, 4, 6]
    assert not [*(tmp_path / "scratch").rglob("*.pt")]
    before = [path.stat().st_mtime_ns for path in paths]
    benchmark.main(arguments)
    assert "run" not in capsys.readouterr().out
    assert [path.stat().st_mtime_ns for path in paths] == before


def test_a_run_that_another_process_makes_is_left_to_it(training, library, tmp_path, capsys):
    benchmark = importlib.import_module("language_model")
    text = training.read_text(library, any_text=True)
    arguments = ["--recipe", "none", "--size", "tiny", "--learners", "2", "--seed", "0"]
    arguments += ["--lr", "0.01", "--any-text", "--library", str(library)]
    arguments += ["--out", str(tmp_path), "--scratch", str(tmp_path)]
    [run] = benchmark.runs_of(benchmark.parse_args(arguments))
    folder = tmp_path / text.sha256[:8]
    folder.mkdir()
    with benchmark.only_here(run, folder) as is_free:
        assert is_free
        benchmark.main(arguments)
        assert capsys.readouterr().out == ""
    benchmark.main(arguments)
    assert (folder / f"{run.name}.json").exists()


def test_a_run_on_a_gpu_is_not_saved(training, library, tmp_path, monkeypatch):
    class OnGPU(training.Training):
        def __init__(self, run, device):
            assert device == "cuda"
            super().__init__(run)

    monkeypatch.setattr(training, "Training", OnGPU)
    text = training.read_text(library, any_text=True)
    run = training.Run("tiny", 2, 6, "topk", "adamw", 0.01, 0)
    path = tmp_path / f"{run.name}.pt"
    path.write_text("of a run on a CPU")
    *_, last = training.train(run, text, tmp_path, "cuda")
    assert last.step == 6
    assert path.read_text() == "of a run on a CPU"


def test_learners_on_a_gpu_compute_there(training, monkeypatch):
    kernels = importlib.import_module("language_model_device")
    emulator = importlib.import_module("tests.gpu.torch_emulator").TorchEmulator()
    monkeypatch.setattr(kernels, "kernels_on", lambda place: emulator)
    monkeypatch.setattr(training.GPT, "to", lambda model, device: model)
    made = training.Training(training.Run("tiny", 2, 6, "topk", "adamw", 0.01, 0), "cuda:0")
    assert isinstance(made.learners, kernels.LearnersOnDevice)
    assert made.learners.engines[0].device is emulator


def test_outside_of_a_clone_there_is_no_commit(training, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "HERE", tmp_path)
    assert training.commit() == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert training.commit() == ""


def test_rows_of_every_set_can_be_made(training):
    benchmark = importlib.import_module("language_model")
    for rows in benchmark.SETS.values():
        for row in rows:
            assert row.optimizer in training.OPTIMIZERS
            name, options = training.options_of(row.recipe, 200)
            training.make_policy(name, **options)


def test_a_recipe_that_never_compresses_is_refused(training):
    with pytest.raises(ValueError, match="--steps"):
        training.options_of("topk after 6 dense steps", 6)


def test_other_text_is_refused_with_the_way_on(training, library):
    with pytest.raises(ValueError, match="--any-text") as error:
        training.read_text(library)
    text = training.read_text(library, any_text=True)
    assert text.sha256 in str(error.value)
    assert training.SHA256 in str(error.value)
    assert len(text.train) + len(text.valid) == (library / "words.py").stat().st_size


def steps_of(optimizer, weights, grads):
    for grad in grads:
        weights.grad = grad.clone()
        optimizer.step()
    return weights.detach().clone()


def make_grads():
    generator = torch.Generator().manual_seed(0)
    return [scale * torch.randn(20, generator=generator) for scale in (9, 1, 0.1, 1, 0.3)]


def test_unclipped_adamw_without_clipping_is_adamw(training):
    given = {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.2}
    first, second = torch.nn.Parameter(torch.ones(20)), torch.nn.Parameter(torch.ones(20))
    unclipped = training.UnclippedAdamW([first], max_norm=math.inf, **given)
    expected = steps_of(torch.optim.AdamW([second], **given), second, make_grads())
    torch.testing.assert_close(steps_of(unclipped, first, make_grads()), expected)


def test_unclipped_adamw_clips_the_first_moment_alone(training):
    weights = torch.nn.Parameter(torch.zeros(4))
    optimizer = training.UnclippedAdamW([weights], lr=1.0, weight_decay=0.0, max_norm=1.0)
    moved = steps_of(optimizer, weights, [torch.tensor([10.0, -10.0, 10.0, 10.0])])
    # norm 20: the gradient is clipped to a twentieth, its root mean square is not
    torch.testing.assert_close(moved, torch.tensor([-1.0, 1.0, -1.0, -1.0]) / 20)


def test_late_second_moments_change_on_schedule(training):
    weights = torch.nn.Parameter(torch.zeros(20))
    schedule = {"every": 3, "dense_steps": 1, "late_beta": 0.5}
    optimizer = training.UnclippedAdamW([weights], lr=0.1, betas=(0.9, 0.75), **schedule)
    squares = []
    for grad in make_grads():
        steps_of(optimizer, weights, [grad])
        squares.append(optimizer.state[weights]["exp_avg_sq"].clone())
    first, _, third, *_ = make_grads()
    torch.testing.assert_close(squares[0], 0.25 * first**2)
    assert torch.equal(squares[1], squares[0])
    torch.testing.assert_close(squares[2], 0.5 * squares[0] + 0.5 * third**2)
    assert torch.equal(squares[4], squares[2])
    assert optimizer.param_groups[0]["weight"] == pytest.approx(0.625)


def make_record(training, recipe, lr, seed, loss, **changes):
    """Return a result of ten evaluations in which the loss falls by a line to ``loss``."""
    record = training.Run("0.4M", 4, 100, recipe, "adamw", lr, seed)._asdict()
    at = list(range(10, 101, 10))
    record |= {"parameters": 1000, "text_sha256": training.SHA256, "evaluated_at": at}
    record |= {"validation_losses": [loss + (100 - step) / 100 for step in at], "ratio": 1.0}
    record |= {"validation_loss": loss, "usual_nbytes": 4000, "sent_nbytes_between": 10 * [4000]}
    return record | changes


@pytest.fixture
def report(training, monkeypatch):
    module = importlib.import_module("language_model_report")
    monkeypatch.setattr(module, "TENSORS", [module.Tensor("layer", (64, 64))])
    monkeypatch.setattr("horovod_fftcomp.engine.policy.WARMUP_STEPS", 100)  # as outside of tests
    return module


@pytest.fixture
def records(training):
    """Return results of ``none``, of ``topk``, whose first ten steps are dense, and of ``fft``."""
    given = [("none", 0.1, 0, 2.0), ("none", 0.1, 1, 2.2), ("none", 0.2, 0, 1.0)]
    found = [make_record(training, *run) for run in given]
    sent = {"usual_nbytes": 400, "sent_nbytes_between": [4000] + 9 * [400], "ratio": 10.0}
    found += [make_record(training, "topk", 0.2, 0, 2.1, **sent)]
    return [*found, make_record(training, "fft", 0.1, 2, 3.0, **sent)]


def test_report_compares_rows_at_their_best_rate_on_common_seeds(report, records, tmp_path):
    folder = tmp_path / "found"
    folder.mkdir()
    for number, record in enumerate(records):
        (folder / f"{number}.json").write_text(json.dumps(record))
    report.write(folder)
    page = (tmp_path / "found.md").read_text()
    # 0.2 has a lower loss, but one seed alone
    assert "| `none` | adamw | 1.0 | **2.100 ± 0.100 (2)** | 1.000 |  |  |" in page
    assert "| `topk` | adamw | 10.0 |  | **2.100** | +5.0 % | +5.0 % |" in page
    assert "| `fft` | adamw | 10.0 | **3.000** |  |  |  |" in page  # no seed of both
    assert (tmp_path / "found_0.4M-4x100.png").stat().st_size > 10_000


def test_losses_that_advise_knows_are_those_of_the_committed_results(report):
    folder = BENCHMARKS / "results" / "language_model"
    committed = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    path = BENCHMARKS.parent / "horovod_fftcomp" / "tools" / "advise" / "losses.json"
    assert path.read_text() == report.losses_file(report.sections(committed))


def test_losses_are_over_none_with_the_same_optimizer_and_of_the_worst(report, records, training):
    """Rows without a seed of none, or with other dense steps than by default, are left out."""
    rows = [
        ("topk after 100 dense steps", 0.1, 0, 2.1, "adamw"),
        ("topk after 100 dense steps", 0.2, 0, 1.5, "sgd"),
        ("topk after 10 dense steps", 0.1, 0, 9.0, "adamw"),
        ("topk after 100 dense steps, every 10th step by qsgd", 0.1, 0, 9.0, "adamw"),
        ("topk", 0.1, 0, 9.0, "adamw"),
        ("none", 0.2, 0, 1.2, "sgd"),
        ("qsgd", 0.1, 0, 1.8, "adamw"),
        ("qsgd(levels=3)", 0.1, 7, 1.8, "adamw"),
        ("qsgd(gone=3)", 0.1, 0, 1.8, "adamw"),
    ]
    more = [make_record(training, *row[:4], optimizer=row[4]) for row in rows]
    assert report.losses(report.sections([*records, *more])) == {"topk": 0.25, "qsgd": -0.1}


def test_report_forecasts_the_time_to_a_loss(report, records, tmp_path):
    [section] = report.sections(records)
    path = tmp_path / "codecs.json"
    report.timed_codecs(path, ["topk", "fft"])
    stored = json.loads(path.read_text())
    for part in itertools.chain(*stored["recipes"].values()):  # whatever else the machine does
        part |= {name: 1e-6 for name in part if name in ("encode_s", "decode_s", "decode_each_s")}
    path.write_text(json.dumps(stored))
    options = report.timed_codecs(path, ["topk", "fft"])
    none, _, topk = (
        np.diff(report.times_of(row, section, options, 0.1), prepend=0) for row in section.rows
    )
    np.testing.assert_allclose(none, none[0])
    assert topk[0] == pytest.approx(none[0])  # dense
    np.testing.assert_allclose(topk[1:], topk[1])
    assert topk[1] < topk[0]
    # the mean of none is 2.1 + 0.2 after 80 steps, and so is topk's; fft does not get there
    _, *rows = report.race_rows(section, options)
    assert [row[0] for row in rows] == ["`topk`", "`none`"]
    assert [row[2] for row in rows] == ["80", "80"]
