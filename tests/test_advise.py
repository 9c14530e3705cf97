"""``horovod-fftcomp advise``: what it counts, forecasts, recommends and refuses."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from horovod_fftcomp import get_scheme
from horovod_fftcomp.cli import advise as advise_command
from horovod_fftcomp.cli import main
from horovod_fftcomp.cli.advise_report import Findings, print_report
from horovod_fftcomp.cli.console import Stages
from horovod_fftcomp.kernels import threads
from horovod_fftcomp.schemes import Tensor, shards
from horovod_fftcomp.tools import gradient_files
from horovod_fftcomp.tools.advise import advice
from horovod_fftcomp.tools.advise.advice import Forecast, Option
from horovod_fftcomp.tools.advise.cost_model import (
    Compute,
    Line,
    Message,
    Network,
    StepTime,
    Transfer,
)
from horovod_fftcomp.tools.advise.cost_model import step_time as forecast_step

ROOT = Path(__file__).resolve().parent.parent
TENSORS = [
    Tensor("first", (100, 200)), Tensor("bias", (200,)), Tensor("second", (200, 30)),
    Tensor("norm", (30,)),
]  # fmt: skip
DENSE_NBYTES = 4 * (20_000 + 200 + 6000 + 30)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "gradients.npz"
    rng = np.random.default_rng(0)
    np.savez(path, **{f"{step}/{t.name}": rng.standard_normal(t.shape).astype(np.float32)
                      for step in (0, 50) for t in TENSORS})  # fmt: skip
    return path


@pytest.fixture
def advise(tmp_path, capsys, monkeypatch, file, no_launcher):
    """Return a function that runs the command and returns (what it printed, its JSON)."""
    monkeypatch.setattr(threads, "_num_threads", None)
    monkeypatch.setenv("COLUMNS", "150")
    path = tmp_path / "advice.json"

    def run(*arguments: object) -> tuple[str, dict]:
        fixed = ["advise", "--gradients", file, "--repeat", 1, "--json", path]
        main([str(argument) for argument in [*fixed, *arguments]])
        printed = capsys.readouterr()
        assert printed.err == ""  # progress is for terminals
        return printed.out, json.loads(path.read_text())

    return run


SLOW = ("--gbit-per-s", 0.001, "--latency-us", 20, "--ranks", 4, "--compute-ms", 5)
FAST = ("--gbit-per-s", 1e6, "--latency-us", 0.1, "--ranks", 4, "--compute-ms", 500)


def test_a_slow_network_is_told_to_compress_and_what_to_paste(advise, monkeypatch):
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "1")
    printed, found = advise(*SLOW, "--compression", "fp16,topk:density=0.01")
    rows = {row["recipe"]: row for row in found["recipes"]}
    assert list(rows) == ["none", "fp16", "topk"]
    assert rows["none"]["sent_nbytes"] == DENSE_NBYTES
    seconds = 2 * 3 / 4 * DENSE_NBYTES * 8e-6  # at 1 Mbit/s, all of it after the computation
    assert rows["none"]["exchange_s"] == pytest.approx(seconds, rel=0.01)
    assert found["advice"]["recipe"] == "topk(density=0.01)"
    assert "compression=Compression.topk(model, density=0.01)" in printed
    assert "horovodrun -np 4 horovod-fftcomp run --compression topk:density=0.01" in printed
    assert rows["topk"]["ceiling_s"] <= rows["topk"]["total_s"]
    assert 0.5 < rows["topk"]["relative_error"] < 1
    assert 1e-5 < rows["fp16"]["relative_error"] < 1e-3


def test_a_fast_network_is_told_that_nothing_is_gained_and_why(advise):
    printed, found = advise(*FAST)
    assert found["advice"]["recipe"] is None
    assert "no gain expected: the dense exchange takes" in printed
    assert "hide behind the backward pass" in printed
    assert "Compression." not in printed


def test_more_ranks_and_the_crossover(advise, tmp_path):
    pytest.importorskip("matplotlib")
    picture, gathered = tmp_path / "steps.png", "topk(exchange=gather)"
    printed, found = advise(
        *SLOW,
        "--nodes",
        "2..1000",
        "--plot",
        picture,
        "--compression",
        "topk:exchange=gather,scalecom",
    )
    assert found["nodes"]["ranks"] == [2, 4, 8, 16, 32, 64, 128, 256, 512, 1000]
    steps = found["nodes"]["step_s"]
    assert set(steps) == {"none", gathered, "scalecom"}
    assert steps[gathered][-1] > 100 * steps[gathered][0]  # what is gathered grows with the ranks
    assert steps["scalecom"][-1] < steps[gathered][-1] / 10
    [crossover] = found["crossover_ranks"].items()
    topk = next(row for row in found["recipes"] if row["recipe"] == "topk")
    ratio = DENSE_NBYTES / topk["sent_nbytes"]
    assert crossover[0] == gathered
    assert 2 * ratio < crossover[1] < 2.2 * ratio + 2
    assert f"{gathered}: from {crossover[1]} ranks on its allgather is slower" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_exchange_auto_is_forecast_to_shard_on_many_ranks(advise):
    network = (*SLOW, "--gbit-per-s", 0.0001)  # beside which no interruption of a codec counts
    compared = ("--compression", "fft,fft:exchange=gather")
    printed, found = advise(*network, "--nodes", "2..1000", *compared)
    shards, gathers = (found["nodes"]["step_s"][name] for name in ("fft", "fft(exchange=gather)"))
    assert shards[0] == pytest.approx(gathers[0], rel=0.1)  # two ranks gather
    assert 50 * shards[-1] < gathers[-1]
    assert list(found["crossover_ranks"]) == ["fft(exchange=gather)"]
    assert "fft: from" not in printed


def test_bad_arguments_are_told(capsys, file, tmp_path, no_launcher):
    given = ("--gradients", file, "--compute-ms", 5)
    empty = tmp_path / "empty.npz"
    np.savez(empty)
    for arguments, message in (
        ((), "either a script or --gradients"),
        (("gone.py",), "no script 'gone.py'"),
        ((*given, "train.py"), "either a script or --gradients"),
        (("--gradients", file), "needs --compute-ms"),
        ((*given, "--latency-us", 5), "need --gbit-per-s"),
        ((*given, "--gbit-per-s", 1), "needs --ranks"),
        ((*given, "--gbit-per-s", 0), "above 0, got 0"),
        ((*given, "--gbit-per-s", 1, "--ranks", 1), "at least 2"),
        ((*given, "-np", 1), "one rank exchanges nothing"),
        ((*given, "--nodes", "8..2"), "not a range of ranks"),
        ((*given, "--compression", "fftt"), "unknown recipe 'fftt'"),
        (("--gradients", empty, "--compute-ms", 5), "holds no array"),
        ((*given, "--launcher", "/no/launcher"), "'/no/launcher' was not found"),
        ((*given, "--launcher", "false"), "network could not be measured"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(["advise", "--repeat", "1", "--compression", "topk", *map(str, arguments)])
        assert caught.value.code == 2
        assert message in " ".join(capsys.readouterr().err.split())


def test_horovods_cycle_is_the_environments(advise, capsys, monkeypatch):
    step_s = {}
    for cycle_ms in ("0", "1", "50"):
        monkeypatch.setenv("HOROVOD_CYCLE_TIME", cycle_ms)
        _, found = advise(*SLOW, "--compression", "topk")
        step_s[cycle_ms] = found["recipes"][0]["exchange_s"]  # none's
    assert step_s["1"] - step_s["0"] > 0.99e-3
    assert step_s["50"] - step_s["0"] > 49e-3
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "often")
    with pytest.raises(SystemExit):
        advise(*SLOW)
    assert "HOROVOD_CYCLE_TIME must be a number of milliseconds" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("train.py",),
        (*SLOW[:6], "train.py"),
        ("--gradients", "gradients.npz", *SLOW),
    ],
)
def test_the_stages_of_the_progress_are_those_measured(
    arguments, monkeypatch, file, tmp_path, no_launcher
):
    shares = []

    class Noted(Stages):
        def __init__(self, total):
            super().__init__(total)
            shares.append(total)

        def begin(self, what, share):
            super().begin(what, share)
            shares.append(share)

    def probed(*_):
        shares.append("probed")
        return Network(Line(1e-4, 1e-9), Line(1e-4, 1e-9)), [], 0.0

    def job(*_):
        shares.append("job")
        return {"tensors": TENSORS, "step_s": 1.0, "step_spread": 0.0, "cores": 1}

    monkeypatch.setattr(advise_command, "Stages", Noted)
    monkeypatch.setattr(advise_command, "_job", job)
    monkeypatch.setattr(advise_command, "_probed", probed)
    monkeypatch.setattr(advise_command.advise_report, "invalid", lambda _: "")
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    main(["advise", "--repeat", "1", "--compression", "fp16,topk", *map(str, arguments)])
    assert shares.count("job") == (2 if "train.py" in arguments else 0)
    total, *measured = [share for share in shares if not isinstance(share, str)]
    is_probed = "probed" in shares  # the last stage; a given network takes no time
    assert is_probed or "--gbit-per-s" in arguments
    assert sum(measured if is_probed else measured[:-1]) == total


def test_every_option_is_explained(capsys):
    with pytest.raises(SystemExit):
        main(["advise", "--help"])
    options = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}
    assert len(options) > 5
    page = (ROOT / "docs" / "advise.md").read_text()
    assert options <= set(re.findall(r"--[a-z][a-z-]+", page))


@pytest.mark.parallel
@pytest.mark.torch
def test_a_script_and_the_network_are_measured(capsys, monkeypatch, tmp_path):
    pytest.importorskip("horovod")
    monkeypatch.setattr(threads, "_num_threads", None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(ROOT)
    path = tmp_path / "advice.json"
    launcher = f"{sys.executable} -m tests.launch --gloo"
    for _ in range(5):  # on a busy machine a measurement may be refused
        with contextlib.suppress(SystemExit):
            main(["advise", "--compression", "topk", "--steps", "8", "--launcher", launcher,
                  "--json", str(path), "tests/scripts/torch_digits.py", "--epochs",
                  "1000"])  # fmt: skip
        found = json.loads(path.read_text())
        if found["valid"]:
            break
    if not found["valid"]:
        assert "recipes" not in found
        pytest.skip("other work on this machine disturbed all five measurements")
    none, topk = found["recipes"]
    n_parameters = 64 * 256 + 256 + 256 * 256 + 256 + 256 * 10 + 10
    assert none["sent_nbytes"] == 4 * n_parameters
    assert topk["sent_nbytes"] < none["sent_nbytes"] / 20
    # Nothing where the network was slower, on a busy machine, when it was measured alone.
    assert found["compute_s"] < found["measured_step_s"]["random_block"]
    assert 0 <= found["network"]["gather"]["beta_s"] < 1e-6
    assert 4 * n_parameters in [nbytes for _, nbytes, *_ in found["probe"]]
    assert 0 < topk["relative_error"] < 1
    assert "The script's step without compression took" in capsys.readouterr().out


# What a recipe sends.


@pytest.mark.parametrize("recipe", ["fp16", "topk", "fft", "scalecom", "random_block"])
def test_the_bytes_are_those_of_the_scheme(recipe):
    option = advice.compressed(recipe, recipe, {}, TENSORS, {}, 1)
    scheme, small = get_scheme(recipe), 4 * (200 + 30)
    inside = [t for t in TENSORS if len(t.shape) > 1]
    sent = sum(scheme.sent_nbytes(tensor) for tensor in inside)
    meeting_and_probes = 4 * (1 + len(inside))
    # Offsets of a bucket take whole words, of which a tensor fills what it needs.
    rounded = 4 * len(inside) if recipe == "scalecom" else 0
    assert abs(option.sent_nbytes - (sent + small + meeting_and_probes)) <= rounded
    assert option.kind == ("alltoall" if recipe in ("topk", "fft") else "allreduce")
    if recipe == "topk":
        option = advice.compressed(recipe, recipe, {"exchange": "gather"}, TENSORS, {}, 1)
        assert option.kind == "allgather"
    [bucket] = option.parts[2:]
    kinds = [message.collective for message in bucket.messages]
    assert tuple("allgather" if kind == "divided" else kind for kind in kinds) == scheme.rounds
    assert ("divided" in kinds) == (recipe == "scalecom")
    assert bucket.encode_s > 0
    assert bucket.ready == 1.0


def test_auto_is_forecast_with_what_it_has_chosen():
    """The quieter of two tensors gets fewer bytes, and both together no more."""
    rng, sizes = np.random.default_rng(0), {"quiet": 0.01, "loud": 1.0}
    tensors = [Tensor(name, (2000, 1000)) for name in sizes]  # a bucket each
    grads = {n: (s * rng.standard_t(3, 2_000_000)).astype(np.float32) for n, s in sizes.items()}
    option = advice.compressed("auto", "auto", {"exchange": "gather"}, tensors, grads, 1)
    quiet, loud = (part.messages[-1].nbytes for part in option.parts[2:])
    assert quiet < loud < 1.0001 * 4 * 4_000_000 / 50 - quiet
    kept = get_scheme("auto").codec((2_000_000,))
    alike = [np.square(g - kept.decode(kept.encode(g))).sum() for g in grads.values()]
    whole = sum(np.square(grad).sum() for grad in grads.values())
    assert option.relative_error < 0.98 * (sum(alike) / whole) ** 0.5


def test_dense_gradients_come_last_layer_first():
    option = advice.dense(TENSORS)
    assert [part.ready for part in option.parts] == [1.0, 0.5, 0.5, 0.0]
    assert option.sent_nbytes == DENSE_NBYTES


@pytest.mark.parametrize("recipe", ["topk", "scalecom"])
def test_a_sum_is_decoded_once_however_many_ranks_there_are(recipe):
    tensor = Tensor("w", (1000, 500))
    grads = {"w": gradient_files.synthetic(500_000).steps[0]}
    part = advice.compressed(recipe, recipe, {}, [tensor], grads, 3).parts[2]
    assert part.decode_s + part.decode_each_s > 0
    if recipe == "scalecom":
        assert part.decode_each_s == 0


@pytest.mark.parametrize("exchange", ["sharded", "gather"])
def test_ranks_divide_the_second_encoding_of_a_sharded_exchange(exchange, monkeypatch):
    run, fold, folds = advice._run, shards.fold, []

    def timed(*given):
        ranks = given[4]
        return run(*given)._replace(encode_s=0.001 + 0.012 / ranks, decode_s=0.002 + 0.001 * ranks)

    monkeypatch.setattr(advice, "_run", timed)
    monkeypatch.setattr(shards, "fold", lambda *given: folds.append(given) or fold(*given))
    grads = {"w": gradient_files.synthetic(50_000).steps[0]}
    options = {"exchange": exchange}
    part = advice.compressed("topk", "topk", options, [Tensor("w", (100, 500))], grads, 1).parts[2]
    found = part.encode_s, part.divided_s, part.decode_s, part.decode_each_s
    if exchange == "sharded":
        assert found == pytest.approx((0.001, 0.012, 0.004, 0.0))
        assert len(folds) == 1  # of the first exchange alone: no step moves a second residual
    else:
        assert found == pytest.approx((0.005, 0.0, 0.002, 0.001))


# The advice.


def forecast(label, total_s, exposed_s=0.0, exchange_s=0.0, error=0.0, off_by=0.0):
    time = StepTime(total_s, 0.1, 0.01, exposed_s, 0.02, exchange_s)
    return Forecast(Option(label, label, {}, [], 1, error), time, total_s, off_by)


def test_the_fastest_is_advised_if_it_is_worth_it():
    none = forecast("none", 0.2, exposed_s=0.1, exchange_s=0.15)
    found = advice.advise([none, forecast("a", 0.18), forecast("b", 0.15)])
    assert found.best.option.label == "b"
    assert "b is expected to make a step 1.33 times as fast" in found.why
    found = advice.advise([none, forecast("a", 0.195), forecast("b", 0.25)])
    assert found.best is None
    assert "takes 150.0 ms, of which 50.0 ms hide" in found.why
    assert "at most 100.0 of 200.0 ms" in found.why
    assert "; a, the fastest recipe, takes 30.0 ms" in found.why
    assert advice.advise([none]).best is None


def test_a_gain_within_the_accuracy_of_the_forecast_is_no_clear_one():
    none, close = forecast("a", 1.2, off_by=0.2), forecast("b", 1.0, off_by=0.2)
    fast = forecast("c", 0.9, off_by=0.2)
    found = advice.advise([none, close])
    assert (found.best, found.unclear) == (None, close)
    assert found.why == (
        "no clear gain: b, the fastest recipe, is forecast to make a step 1.20 times as fast "
        "(0.96 to 1.44)"
    )
    found = advice.advise([none, close, fast])
    assert (found.best, found.unclear) == (fast, None)
    assert found.why.endswith("1.33 times as fast (1.07 to 1.60)")
    found = advice.advise([none, close, fast._replace(error=0.3)])
    assert found.best is None


def test_a_gain_is_compared_with_16_bit_gradients():
    none, half, best = forecast("none", 0.2), forecast("fp16", 0.18), forecast("b", 0.1)
    why = advice.advise([none, half, best]).why
    assert why.endswith("2.00 times as fast (2.00 to 2.00), 1.80 times as fast as fp16 does")
    assert "as fp16" not in advice.advise([none, half]).why


def test_a_forecast_is_as_uncertain_as_what_it_was_made_of():
    network = Network(Line(1e-4, 1e-9), Line(1e-4, 1e-9))
    parts = [Transfer(1.0, (Message("allreduce", 10_000_000),), 0.01, 0.01)]
    option = Option("x", "x", {}, parts, 10_000_000, 0.0, spread=0.5)
    [usual] = advice.forecasts([option], Compute(0.1), network, 2)
    assert usual.error == advice.ACCURACY == 0.2
    [wide] = advice.forecasts([option], Compute(0.1), network, 2, 0.8, 0.3)
    time = wide.time
    varies_s = 0.8 * time.compute_s + 0.3 * time.exposed_s + 0.5 * (time.encode_s + time.decode_s)
    assert wide.error == pytest.approx(varies_s / time.total_s)
    assert wide.error > 0.6
    assert wide.speed_up(wide) == pytest.approx((1 - wide.error, 1, 1 + wide.error))


def test_the_stated_accuracy_is_that_of_the_benchmark():
    results = json.loads((ROOT / "benchmarks" / "results" / "forecast.json").read_text())
    steps, speed_ups = [], []
    for none, *others in (result["rows"] for result in results):
        steps += [row["error"] for row in (none, *others)]
        speed_ups += [(1 + none["error"]) / (1 + row["error"]) - 1 for row in others]
    (near, n), (near_too, m) = (
        (sum(abs(error) <= advice.ACCURACY for error in errors), len(errors))
        for errors in (steps, speed_ups)
    )
    page = " ".join((ROOT / "docs" / "advise.md").read_text().split())
    assert f"{near} of {n} were within 20 %, and {near_too} of their {m} speed-ups" in page


@pytest.mark.parametrize(("b_s", "best"), [(0.1, "b"), (0.104, "b"), (0.107, "a")])
def test_of_recipes_that_take_as_long_the_one_that_loses_least_is_advised(b_s, best):
    a, b = forecast("a", 0.1, error=0.9), forecast("b", b_s, error=0.5)
    assert advice.advise([forecast("none", 0.2), a, b]).best.option.label == best


def test_one_that_loses_less_but_saves_too_little_takes_no_place():
    a, b = forecast("a", 0.094, error=0.9), forecast("b", 0.098, error=0.1)
    assert advice.advise([forecast("none", 0.1), a, b]).best.option.label == "a"


def test_an_option_may_have_a_computation_of_its_own():
    network = Network(Line(1e-4, 1e-9), Line(1e-4, 1e-9))
    option = Option("x", "x", {}, [Transfer(1.0, (Message("allreduce", 4000),))], 4000, 0.0)
    others = option._replace(compute=Compute(0.01))
    usual, own = advice.forecasts([option, others], Compute(0.08), network, 2)
    assert usual.time.total_s - own.time.total_s == pytest.approx(0.07)


@pytest.mark.parametrize("spare_core", [False, True])
def test_the_computation_that_explains_a_measured_step(spare_core):
    network = Network(Line(1e-4, 1e-9), Line(1e-4, 1e-9))
    parts = [Transfer(s, (Message("allreduce", 4000),), 0.002, 0.001) for s in (0.3, 1.0)]
    option = Option("x", "x", {}, parts, 8000, 0.0)
    truth = Compute(0.08, spare_core)
    step_s = forecast_step(truth, parts, network, 4).total_s
    found = advice.compute_of(step_s, option, network, 4, spare_core)
    assert found.total_s == pytest.approx(truth.total_s)
    assert found.spare_core == spare_core


def test_a_network_slower_alone_than_in_the_steps_is_told(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")  # workers of pytest-xdist have 80
    network = Network(Line(1e-2, 1e-9), Line(1e-2, 1e-9))
    options = [advice.dense(TENSORS)]
    for step_s, told in ((0.005, True), (0.5, False)):
        compute = advice.compute_of(step_s, options[0], network, 4, True)
        found = advice.forecasts(options, compute, network, 4)
        steps = {"none": step_s, "random_block": step_s}
        findings = Findings(compute, network, 4, found, advice.advise(found), [], steps, None)
        print_report(findings, None)
        printed = capsys.readouterr().out
        assert ("The network alone was slower than in the script's" in printed) == told
        assert ("The measurement is invalid" in printed) == told
        assert ("speed-up" in printed) != told


def disturbed(script_s=0.01, none_s=0.01):
    """Return findings of a network that took longer alone than in the script's steps."""
    network = Network(Line(1e-2, 1e-9), Line(1e-2, 1e-9))
    option = advice.dense(TENSORS)
    own = advice.compute_of(none_s, option, network, 4, True)
    compute = advice.compute_of(script_s, option, network, 4, True)
    found = advice.forecasts([option._replace(compute=own)], compute, network, 4)
    times = [(Message("allreduce", DENSE_NBYTES), 0.07)]
    best = advice.Advice(found[0], "none is expected to make a step 2.05 times as fast")
    steps = {"none": none_s, "random_block": script_s}
    return Findings(compute, network, 4, found, best, times, steps, "train.py")


@pytest.mark.parametrize("steps", [{}, {"script_s": 0.5}])
def test_an_invalid_measurement_is_refused(capsys, monkeypatch, tmp_path, file, steps):
    monkeypatch.setattr(advise_command, "_findings", lambda *_: disturbed(**steps))
    path, picture = tmp_path / "advice.json", tmp_path / "steps.png"
    with pytest.raises(SystemExit) as caught:
        main(["advise", "--gradients", str(file), "--compute-ms", "5", "--json", str(path),
              "--plot", str(picture)])  # fmt: skip
    assert caught.value.code == 3
    printed = capsys.readouterr().out
    assert "Measure again" in printed
    assert "times as fast" not in printed
    assert "Compression." not in printed
    assert "computing takes" not in printed
    found = json.loads(path.read_text())
    assert found["valid"] is False
    assert found["advice"]["recipe"] is None
    assert "slower" in found["advice"]["why"]
    assert "recipes" not in found
    assert not picture.exists()


def test_a_gain_that_is_not_clear_is_to_be_measured(advise):
    arguments = [*SLOW, "--compression", "fp16"]
    arguments[arguments.index("--compute-ms") + 1] = 4000
    printed, found = advise(*arguments)
    assert found["valid"]
    assert found["advice"]["recipe"] is None
    assert "no clear gain: fp16" in printed
    assert "horovod-fftcomp run --compare none,fp16 -np 4 train.py" in printed
    assert "Compression." not in printed
    [_, fp16] = found["recipes"]
    assert fp16["speed_up"]["low"] < 1 < 1.05 < fp16["speed_up"]["expected"]
    assert "±20 %" in printed


def test_a_bandwidth_that_noise_would_decide_is_not_told(capsys):
    option, compute = advice.dense(TENSORS), Compute(0.1)
    for beta_s, mentioned in ((0.0, False), (8e-9 / 882, False), (8e-9 / 0.05, True)):
        line = Line(1e-3, beta_s)
        network = Network(line, Line(2e-3, 0.0))
        kinds = ("allreduce", "allgather")
        times = [(m, network.seconds(m, 4)) for m in (Message(k, 10**6) for k in kinds)]
        found = advice.forecasts([option], compute, network, 4)
        findings = Findings(compute, network, 4, found, advice.advise(found), times, {}, None)
        print_report(findings, None)
        printed = capsys.readouterr().out
        assert ("summing: 0.05 Gbit/s" in printed) == mentioned
        assert ("summing: too fast to measure with 1 MB" in printed) != mentioned
        assert "gathering: too fast to measure with 1 MB" in printed


def test_numbers_of_ranks_are_doubled_up_to_the_last():
    assert list(advice.powers_of_two(2, 2)) == [2]
    assert list(advice.powers_of_two(2, 8)) == [2, 4, 8]
    assert list(advice.powers_of_two(3, 20)) == [3, 6, 12, 20]


def test_a_metric_is_found_by_training_with_none_and_with_the_best(monkeypatch, tmp_path, capsys):
    script, network, compute = (
        tmp_path / "t.py",
        Network(Line(0, 1e-6), Line(0, 1e-6)),
        Compute(0.1),
    )
    script.write_text("")
    options = [advice.dense(TENSORS), advice.compressed("fp16", "fp16", {}, TENSORS, {}, 1)]
    found = advice.forecasts(options, compute, network, 4)
    best = advice.Advice(found[1], "fp16 is the best")
    findings = Findings(compute, network, 4, found, best, [], {}, str(script))
    monkeypatch.setattr(advise_command, "_findings", lambda *_: findings)
    trained = []
    monkeypatch.setattr(advise_command.run_command, "compare", trained.append)
    main(["advise", "--metric", r"acc (\S+)", "--trainings", "3", str(script), "--epochs", "2"])
    [parsed] = trained
    assert [choice.text for choice in parsed.compare] == ["none", "fp16"]
    assert (parsed.repeat, parsed.steps, parsed.record, parsed.json) == (3, None, None, None)
    assert (parsed.metric.pattern, parsed.script_arguments) == (r"acc (\S+)", ["--epochs", "2"])
    with pytest.raises(SystemExit):
        main(["advise", "--trainings", "3", str(script)])
    assert "--trainings needs --metric" in capsys.readouterr().err
