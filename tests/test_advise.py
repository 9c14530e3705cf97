"""``horovod-fftcomp advise``: what it counts, forecasts, recommends and refuses."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from horovod_fftcomp import get_scheme
from horovod_fftcomp.cli import advise as advise_command
from horovod_fftcomp.cli import main
from horovod_fftcomp.cli.advise_jobs import Jobs
from horovod_fftcomp.cli.advise_report import Findings, print_report
from horovod_fftcomp.cli.arguments import RecipeChoice, node_range
from horovod_fftcomp.cli.console import Stages
from horovod_fftcomp.kernels import threads
from horovod_fftcomp.schemes import Tensor, shards
from horovod_fftcomp.tools import gradient_files
from horovod_fftcomp.tools.advise import advice, doubts
from horovod_fftcomp.tools.advise import load as load_of_others
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
from horovod_fftcomp.tools.run import launcher

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


IDLE = np.array([1, 10**9, 0, 0])  # what a rank sees of a core that nobody uses


@pytest.fixture
def quiet(monkeypatch):
    """Let no other process use the cores, and codecs take 1 ms for a bucket."""
    measure = advice.timed_run

    def timed(*given):
        part, _ = measure(*given)
        times = {"encode_s": 1e-3, "decode_s": 1e-3, "decode_each_s": 0.0, "divided_s": 0.0}
        return replace(part, **times), 0.0

    monkeypatch.setattr(advice, "timed_run", timed)
    monkeypatch.setattr(load_of_others, "look", lambda: IDLE)


@pytest.fixture
def advise(tmp_path, capsys, monkeypatch, file, no_launcher, quiet):
    """Return a function that runs the command and returns (what it printed, its JSON)."""
    monkeypatch.setattr(threads, "chosen_threads", None)
    monkeypatch.setenv("COLUMNS", "150")
    path = tmp_path / "advice.json"

    def run(*arguments: object) -> tuple[str, dict]:
        fixed = ["advise", "--gradients", file, "--repeat", 1, "--json", path]
        main([str(argument) for argument in [*fixed, *arguments]])
        printed = capsys.readouterr()
        assert printed.err == ""  # progress is for terminals
        return printed.out, json.loads(path.read_text())

    return run


def plant(monkeypatch, *, none=0.4, bare=0.1, times=(1.0, 1.0), load=0.0, halves=None):
    """Let jobs report these measurements; return the list of what is then asked of them.

    ``none``, ``bare``: seconds a step; ``halves``: of both; ``times``: factors on those of the
    network in its two measurements, by which 1 MB is summed or gathered in a second.
    """
    asked = []

    def script(jobs, choice):
        asked.append("script")
        step_s = {"none": none, "random_block": bare}[choice.name]
        report = {"tensors": TENSORS, "step_s": step_s, "step_spread": 0.02, "cores": 2}
        return report | {"blocks_s": [step_s * part for part in halves or (1, 1)]}

    def probe(jobs, nbytes, dtypes, node_size):
        asked.append("probe")
        assert nbytes == DENSE_NBYTES
        kinds = ("allreduce", "allgather", *["inside"] * (node_size > 1))
        messages = [
            [kind, n, dtype] for kind in kinds for n in (4, nbytes, 10**6)
            for dtype in (dtypes if kind == "allreduce" else ["float32"])
        ]  # fmt: skip
        seconds = [[factor * 1e-6 * m[1] + 1e-3 for m in messages] for factor in times]
        spreads = [0.02] * len(messages)
        return {"messages": messages, "times": seconds, "spreads": spreads, "load": load}

    monkeypatch.setattr(Jobs, "run_script", script)
    monkeypatch.setattr(Jobs, "probe", probe)
    return asked


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
    assert 0.5 < rows["topk"]["relative_error"] < 1
    assert 1e-5 < rows["fp16"]["relative_error"] < 1e-3


def test_a_fast_network_is_told_that_nothing_is_gained_and_why(advise):
    printed, found = advise(*FAST)
    assert found["advice"]["recipe"] is None
    assert "no gain expected: the dense exchange takes" in printed
    assert "hide behind the backward pass" in printed
    assert "Compression." not in printed


def test_more_ranks(advise, tmp_path):
    pytest.importorskip("matplotlib")
    gathered, picture = "topk(exchange=gather)", tmp_path / "steps.png"
    ranks = ("--nodes", "2..1000", "--plot", picture)
    _, found = advise(*SLOW, *ranks, "--compression", "topk:exchange=gather,scalecom")
    assert found["nodes"]["ranks"] == [2, 4, 8, 16, 32, 64, 128, 256, 512, 1000]
    steps = found["nodes"]["step_s"]
    assert set(steps) == {"none", gathered, "scalecom"}
    assert steps[gathered][-1] > 100 * steps[gathered][0]  # what is gathered grows with the ranks
    assert steps["scalecom"][-1] < steps[gathered][-1] / 10
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_steps_that_compress_are_forecast_of_a_recipe_with_dense_ones(advise):
    """The 73rd step is the one that is timed."""
    text = "topk(warmup_steps=100, dense_every=73, dense_by=qsgd(levels=4))"
    printed, found = advise(*SLOW, "--compression", f"topk,{text}")
    _, plain, dense = found["recipes"]
    assert plain["sent_nbytes"] == dense["sent_nbytes"] < DENSE_NBYTES / 20
    assert plain["relative_error"] == dense["relative_error"]
    settings = {"warmup_steps": 100, "dense_every": 73, "dense_by": "qsgd(levels=4)"}
    assert dense["options"] == settings
    assert "topk(warmup_steps=100," in printed


def test_exchange_auto_is_forecast_to_shard_on_many_ranks(advise):
    network = (*SLOW, "--gbit-per-s", 0.0001)  # beside which no interruption of a codec counts
    compared = ("--compression", "fft,fft:exchange=gather")
    _, found = advise(*network, "--nodes", "2..1000", *compared)
    shards, gathers = (found["nodes"]["step_s"][name] for name in ("fft", "fft(exchange=gather)"))
    assert shards[0] == pytest.approx(gathers[0], rel=0.1)  # two ranks gather
    assert 50 * shards[-1] < gathers[-1]


def test_bad_arguments_are_told(capsys, file, tmp_path, no_launcher):
    given = ("--gradients", file, "--compute-ms", 5)
    link = ("--gbit-per-s", 1, "--ranks", 2)
    empty = tmp_path / "empty.npz"
    np.savez(empty)
    for arguments, message in (
        ((), "give a script, --gradients PATH, or --gbit-per-s X"),
        (("gone.py",), "no script 'gone.py'"),
        ((*given, "train.py"), "either a script or --gradients"),
        ((*given, "--parameters", "1M"), "--parameters is the size of a usual model, without"),
        (("--gradients", file), "needs --compute-ms"),
        ((*given, "--latency-us", 5), "need --gbit-per-s"),
        ((*given, "--gbit-per-s", 1), "needs --ranks"),
        ((*given, "--gbit-per-s", 0), "above 0, got 0"),
        ((*given, "--gbit-per-s", 1, "--ranks", 1), "at least 2"),
        ((*given, "-np", 1), "one rank exchanges nothing"),
        ((*given, *link, "--node-gbit-per-s", 9), "--node-gbit-per-s needs nodes"),
        ((*given, "--nodes", "8..2"), "not a range of ranks"),
        ((*given, "--compression", "fftt"), "unknown recipe 'fftt'"),
        (("--gradients", empty, "--compute-ms", 5), "holds no array"),
        ((*given, "--compression", "topk:ranks_per_node=auto"), "auto is not forecast"),
        (
            (*given, "--compression", "topk:ranks_per_node=2,fft:ranks_per_node=4"),
            "the same ranks, got 2",
        ),
        ((*given, "--ranks-per-node", 3), "2 ranks are not several nodes of 3: give 6, say"),
        ((*given, "--ranks-per-node", 2), "2 ranks are not several nodes of 2"),
        ((*given, "-np", 4, "--ranks-per-node", 2, "--nodes", "4..9"), "9 ranks are not several"),
        ((*given, "--ranks-per-node", 2, "--compression", "topk:ranks_per_node=4"), "got 2"),
        ((*given, "--ranks-per-node", 2, "--compression", "signum"), "signum: ranks_per_node does"),
        ((*given, "--node-gbit-per-s", 9), "--node-gbit-per-s needs --gbit-per-s"),
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


def test_a_given_network_is_enough(capsys, monkeypatch, no_launcher, quiet):
    """Of a usual model, on no rank."""
    monkeypatch.setattr(launcher, "launch", None)
    monkeypatch.setenv("COLUMNS", "200")
    given = ["--gbit-per-s", "0.0001", "--latency-us", "20", "--ranks", "8"]
    main(["advise", "--compression", "topk", "--repeat", "1", *given])
    printed = capsys.readouterr().out
    assert "Forecast of a step on 8 ranks; computing takes 20.0 ms of it" in printed
    assert "topk is expected to make a step" in printed


def test_nodes_are_forecast_beside_single_ranks(advise, monkeypatch):
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "0")
    network = ["--gbit-per-s", 0.01, "--ranks", 8, "--compute-ms", 5, "--node-gbit-per-s", 8]
    network += ["--latency-us", 10]
    both = ["--compression", "topk,topk:ranks_per_node=4"]
    printed, found = advise(*network, *both)
    assert "Forecast of a step on 8 ranks in nodes of 4;" in printed
    assert "Network, given, inside a node: 8 Gbit/s" in printed
    none, flat, nodes = found["recipes"]
    dense = 4 * (200 + 30) + 3 * 4  # of each rank, and three probes
    assert nodes["sent_nbytes"] - dense == (flat["sent_nbytes"] - dense) / 4
    assert nodes["exchange_s"] < flat["exchange_s"] / 2 < none["exchange_s"] / 2
    assert nodes["loss"] == flat["loss"]
    assert found["network"]["inside"] == {"alpha_s": 5e-6, "beta_s": 1e-9}
    printed, given = advise(*network, "--ranks-per-node", 4, "--compression", "topk")
    assert "compression=Compression.topk(model, ranks_per_node=4)" in printed
    assert "HOROVOD_DYNAMIC_PROCESS_SETS=1" in printed
    assert given["recipes"][1]["options"] == {"ranks_per_node": 4}


def test_the_ranks_time_the_inside_of_their_nodes(advise, monkeypatch):
    plant(monkeypatch)
    nodes = "--compute-ms", 9, "--ranks-per-node", 2, "-np", 4
    printed, found = advise(*nodes, "--compression", "topk")
    assert found["network"]["inside"]["beta_s"] > 0
    assert "Network, measured, inside a node" in printed


@pytest.mark.torch
@pytest.mark.parametrize("rank", range(4))
def test_an_exchange_inside_a_node_sends_other_nodes_nothing(rank):
    from horovod_fftcomp.cli import advise_probe

    job = argparse.Namespace(rank=rank, size=4)
    round_ = advise_probe.round_of(job, Message("inside", 1001), 2)
    assert round_.collective == "alltoall"
    assert round_.splits == ((501, 501, 0, 0), (0, 0, 501, 501))[rank // 2]
    assert round_.data.nbytes == 1002
    assert advise_probe.round_of(job, Message("allgather", 8), 2).data.nbytes == 8
    assert advise_probe.round_of(job, Message("allreduce", 8, "float16"), 2).data.shape == (4,)


@pytest.mark.parametrize(
    ("given", "sizes", "compute_ms"),
    [
        ((), [1024] * 6, 20), (("--parameters", "2.5M"), [1024, 1024, 393], 7.9),
        (("--parameters", "100"), [1], 0), (("--parameters", "1M", "--compute-ms", "9"), [976], 9),
    ],
)  # fmt: skip
def test_a_usual_model_has_the_parameters_that_are_given(
    given, sizes, compute_ms, capsys, monkeypatch, no_launcher, quiet
):
    """Of equal layers one is timed."""
    timed, known = [], advice.measured_transfer
    monkeypatch.setattr(
        advice, "measured_transfer", lambda *how: timed.append(how[0]) or known(*how)
    )
    monkeypatch.setenv("COLUMNS", "200")
    network = ["--gbit-per-s", "1", "--ranks", "2", "--repeat", "1"]
    main(["advise", "--compression", "topk", *network, *given])
    printed = capsys.readouterr().out
    assert f"computing takes {compute_ms:.1f} ms of it" in printed
    [none] = re.findall(r"^none .* ([\d.]+) +1.0 +0 *$", printed, re.M)
    assert float(none) == pytest.approx(4e-6 * 1024 * sum(sizes), abs=1e-3)
    shapes = [bucket.tensors[0].shape for bucket in timed]
    assert shapes == [(rows, 1024) for rows in dict.fromkeys(sizes)] * 3  # topk twice


def test_the_network_decides(advise):
    recipes = ("--compression", "fp16,dither")
    for gbit_per_s, best in (("0.001", "dither"), ("1000", None)):
        network = ("--gbit-per-s", gbit_per_s, "--latency-us", 20, "--ranks", 4)
        _, found = advise(*network, "--compute-ms", 100, *recipes)
        assert found["advice"]["recipe"] == best


@pytest.mark.parametrize(
    ("launcher_given", "has_horovod", "line", "start"),
    [
        (None, True, "compression=Compression.topk(model)", "horovodrun -np 4 horovod-fftcomp"),
        (None, False, 'compress(ddp, "topk")', "torchrun --nproc-per-node 4 -m horovod_fftcomp"),
        ("torchrun --standalone", True, 'compress(ddp, "topk")',
         "torchrun --standalone --nproc-per-node 4 -m horovod_fftcomp"),
        ("srun --mpi=pmix", True, "compression=Compression.topk(model)",
         "srun --mpi=pmix -n 4 horovod-fftcomp"),
        ("srun", False, 'compress(ddp, "topk")', "srun -n 4 horovod-fftcomp"),
        ("mpirun -H a:1,b:1", True, "compression=Compression.topk(model)",
         "mpirun -H a:1,b:1 -np 4 horovod-fftcomp"),
    ],
)  # fmt: skip
def test_the_answer_is_written_for_the_launcher(
    launcher_given, has_horovod, line, start, advise, monkeypatch
):
    found = {"horovod": has_horovod, "torch": True}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found[name] or None)
    more = ["--launcher", launcher_given] if launcher_given else []
    printed, _ = advise(*SLOW, *more, "--compression", "topk")
    assert line in printed
    assert f"{start} run --compression topk train.py" in printed


OF_TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "1", "RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
}  # fmt: skip
OF_MPI = {
    "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "0",
}  # fmt: skip
OF_SLURM = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0"}
OF_GLOO = {
    "HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
}  # fmt: skip


@pytest.fixture
def launched(monkeypatch, no_launcher):
    """Return a function that makes jobs in a process with these variables; it notes the starts."""
    pytest.importorskip("torch")
    meeting = importlib.import_module("horovod_fftcomp.torch_distributed.meeting")
    monkeypatch.setattr(meeting.MeetingPlaces, "__init__", lambda _: None)
    monkeypatch.setattr(meeting.MeetingPlaces, "next", lambda _: ["MASTER_PORT=1"])

    def make(variables, **arguments):
        for name in ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        started, left = [], []

        def launch(start, n_ranks, command, line):
            left.append(launcher.launched_rank())
            started.append(launcher.starts(start, n_ranks))
            report = {"rank": 0, "step_s": 1.0, "steps": 9, "digest": ""}
            return launcher.Ended(0, [report] * n_ranks)

        monkeypatch.setattr(launcher, "launch", launch)
        given = {"np": None, "launcher": None, "script": "train.py", "script_arguments": []}
        given |= dict.fromkeys(("steps", "warmup_steps", "ranks_per_node", "record"))
        parsed = argparse.Namespace(**given | arguments, record_every=None, fail=raising)
        jobs = Jobs(parsed)
        jobs.run_script(RecipeChoice("none", "none", {}))
        jobs.probe(4, ["float32"], 1)
        return jobs, started, left

    return make


def raising(message):
    raise ValueError(message)


@pytest.mark.torch
def test_ranks_of_torchrun_start_one_rank_of_each_job(launched):
    jobs, started, left = launched(OF_TORCHRUN | {"RANK": "3"})
    assert (jobs.rank, jobs.size, jobs.is_ddp) == (3, 4, True)
    assert started == [["env", "MASTER_PORT=1"]] * 2
    assert left == [3, 3]
    assert jobs.start(4) == "torchrun --nnodes 2 --nproc-per-node 2 -m horovod_fftcomp"
    with pytest.raises(ValueError, match="leave them out"):
        launched(OF_TORCHRUN, np=2)


@pytest.mark.torch
def test_ranks_of_horovods_gloo_start_one_rank_of_each_job(launched):
    pytest.importorskip("horovod")
    jobs, started, left = launched(OF_GLOO)
    assert (jobs.rank, jobs.size, jobs.is_ddp) == (0, 2, False)
    assert started == [["env"]] * 2
    assert left == [0, 0]
    assert jobs.start(2) == "horovodrun -np 2 horovod-fftcomp"


@pytest.mark.torch
def test_the_first_rank_of_mpi_starts_all_ranks_without_its_own(launched):
    pytest.importorskip("horovod")
    jobs, started, left = launched(OF_MPI)
    assert (jobs.rank, jobs.size, jobs.is_ddp) == (0, 2, False)
    assert [Path(start[0]).name for start in started] == ["horovodrun"] * 2
    assert {tuple(start[1:]) for start in started} == {("-np", "2")}
    assert left == [None, None]
    with pytest.raises(SystemExit) as caught:
        launched(OF_MPI | {"OMPI_COMM_WORLD_RANK": "1"})
    assert caught.value.code == 0
    with pytest.raises(ValueError, match="run it by itself: horovod-fftcomp advise -np 2"):
        launched(OF_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"})


@pytest.mark.torch
def test_the_first_rank_of_slurm_starts_further_steps(launched):
    jobs, started, left = launched(OF_SLURM)
    assert started == [["srun", "--overlap", "-n", "2"]] * 2
    assert left == [None, None]
    assert jobs.start(2) == "srun --overlap -n 2 horovod-fftcomp"
    with pytest.raises(SystemExit):
        launched(OF_SLURM | {"SLURM_PROCID": "1"})


@pytest.mark.torch
def test_a_batch_script_of_slurm_is_no_rank(launched):
    jobs, started, _ = launched({"SLURM_PROCID": "0"}, launcher=["srun", "--mpi=pmix"], np=4)
    assert (jobs.rank, jobs.size) == (0, 4)
    assert started == [["srun", "--mpi=pmix", "-n", "4"]] * 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("train.py",),
        (*SLOW[:6], "train.py"),
        ("--gradients", "gradients.npz", *SLOW),
    ],
)
def test_the_stages_of_the_progress_are_those_measured(
    arguments, monkeypatch, file, tmp_path, no_launcher, quiet
):
    shares = []

    class Noted(Stages):
        def __init__(self, total):
            super().__init__(total)
            shares.append(total)

        def begin(self, what, share):
            super().begin(what, share)
            shares.append(share)

    monkeypatch.setattr(advise_command, "Stages", Noted)
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    jobs = plant(monkeypatch)
    main(["advise", "--repeat", "1", "--compression", "fp16,topk", *map(str, arguments)])
    assert jobs.count("script") == (2 if "train.py" in arguments else 0)
    assert jobs.count("probe") == ("--gbit-per-s" not in arguments)
    total, *measured = shares
    assert sum(measured) == total


def test_every_option_is_explained(capsys):
    with pytest.raises(SystemExit):
        main(["advise", "--help"])
    options = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}
    assert len(options) > 5
    page = (ROOT / "docs" / "advise.md").read_text()
    assert options <= set(re.findall(r"--[a-z][a-z-]+", page))


def check_measured(found):
    """Check what was measured of ``torch_digits.py`` on two ranks, whatever else was running."""
    none, topk = found["recipes"]
    n_parameters = 64 * 256 + 256 + 256 * 256 + 256 + 256 * 10 + 10
    assert none["sent_nbytes"] == 4 * n_parameters
    assert topk["sent_nbytes"] < none["sent_nbytes"] / 20
    assert found["ranks"] == 2
    assert found["compute_s"] < found["measured_step_s"]["random_block"]
    assert 0 <= found["network"]["gather"]["beta_s"] < 1e-6
    assert ["allreduce", 4 * n_parameters, "float32"] in [each[:3] for each in found["probe"]]
    assert {each[2] for each in found["probe"]} == {"float32"}
    assert 0 < topk["relative_error"] < 1
    assert 0 <= found["load"] <= 1.1
    assert found["valid"] == (not found["doubts"])


@pytest.mark.parallel
@pytest.mark.torch
def test_a_script_and_the_network_are_measured(capsys, monkeypatch, tmp_path):
    pytest.importorskip("horovod")
    monkeypatch.setattr(threads, "chosen_threads", None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(ROOT)
    path = tmp_path / "advice.json"
    launcher = f"{sys.executable} -m tests.launch --gloo"
    with contextlib.suppress(SystemExit):  # on a busy machine nothing is recommended
        main(["advise", "--compression", "topk", "--steps", "8", "--launcher", launcher,
              "--json", str(path), "tests/scripts/torch_digits.py", "--epochs",
              "1000"])  # fmt: skip
    check_measured(json.loads(path.read_text()))
    assert "The script's step without compression took" in capsys.readouterr().out


@pytest.mark.parallel
@pytest.mark.torch
@pytest.mark.parametrize("transport", ["--gloo", "--mpi"])
def test_the_ranks_of_horovodrun_measure_together(transport, monkeypatch, tmp_path, no_launcher):
    pytest.importorskip("horovod")
    path = tmp_path / "advice.json"
    script = ["tests/scripts/torch_digits.py", "--epochs", "1000"]
    options = ["--steps", "6", "--repeat", "1", "--json", str(path)]
    command = ["advise", "--compression", "topk", *options, *script]
    run = subprocess.run(
        [sys.executable, "-m", "tests.launch", transport, "-np", "2",
         sys.executable, "-m", "horovod_fftcomp", *command],
        cwd=ROOT, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert path.exists(), run.stdout[-4000:] + run.stderr[-4000:]
    check_measured(json.loads(path.read_text()))
    assert run.stdout.count("The script's step without compression took") == 1


def test_gradients_come_by_the_buckets_of_ddp():
    """The last MB comes first, then 25 MB and what is left; without DDP one by one."""
    tensors = [Tensor(f"{n}", (1024, 512)) for n in range(20)]  # 2 MB each
    at = [part.ready for part in advice.dense(tensors, is_ddp=True).parts]
    assert at == [1.0] * 6 + [14 / 20] * 13 + [1 / 20]
    assert [part.ready for part in advice.dense(tensors).parts] == [
        n / 20 for n in range(20, 0, -1)
    ]
    option = advice.compressed(RecipeChoice("fp16", "fp16", {}), tensors, {}, 1, is_ddp=True)
    assert {part.ready for part in option.parts[2:]} <= {1 / 20, 14 / 20, 1.0}


# What a recipe sends.


@pytest.mark.parametrize("recipe", ["fp16", "topk", "fft", "scalecom", "random_block"])
def test_the_bytes_are_those_of_the_scheme(recipe):
    option = advice.compressed(RecipeChoice(recipe, recipe, {}), TENSORS, {}, 1)
    scheme, small = get_scheme(recipe), 4 * (200 + 30)
    inside = [t for t in TENSORS if len(t.shape) > 1]
    sent = sum(scheme.sent_nbytes(tensor) for tensor in inside)
    meeting_and_probes = 4 * (1 + len(inside))
    # Offsets of a bucket take whole words, of which a tensor fills what it needs.
    rounded = 4 * len(inside) if recipe == "scalecom" else 0
    assert abs(option.sent_nbytes - (sent + small + meeting_and_probes)) <= rounded
    assert option.kind == ("alltoall" if recipe in ("topk", "fft") else "allreduce")
    if recipe == "topk":
        option = advice.compressed(
            RecipeChoice(recipe, recipe, {"exchange": "gather"}), TENSORS, {}, 1
        )
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
    option = advice.compressed(
        RecipeChoice("auto", "auto", {"exchange": "gather"}), tensors, grads, 1
    )
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
    part = advice.compressed(RecipeChoice(recipe, recipe, {}), [tensor], grads, 3).parts[2]
    assert part.decode_s + part.decode_each_s > 0
    if recipe == "scalecom":
        assert part.decode_each_s == 0


@pytest.mark.parametrize("exchange", ["sharded", "gather"])
def test_ranks_divide_the_second_encoding_of_a_sharded_exchange(exchange, monkeypatch):
    run, fold, folds = advice.run_once, shards.fold, []

    def timed(*given):
        ranks = given[4]
        return run(*given)._replace(encode_s=0.001 + 0.012 / ranks, decode_s=0.002 + 0.001 * ranks)

    monkeypatch.setattr(advice, "run_once", timed)
    monkeypatch.setattr(shards, "fold", lambda *given: folds.append(given) or fold(*given))
    grads = {"w": gradient_files.synthetic(50_000).steps[0]}
    options = {"exchange": exchange}
    part = advice.compressed(
        RecipeChoice("topk", "topk", options), [Tensor("w", (100, 500))], grads, 1
    ).parts[2]
    found = part.encode_s, part.divided_s, part.decode_s, part.decode_each_s
    if exchange == "sharded":
        assert found == pytest.approx((0.001, 0.012, 0.004, 0.0))
        assert len(folds) == 1  # of the first exchange alone: no step moves a second residual
    else:
        assert found == pytest.approx((0.005, 0.0, 0.002, 0.001))


# The advice.


def forecast(label, total_s, exposed_s=0.0, exchange_s=0.0, error=0.0, off_by=0.0, loss=None):
    time = StepTime(total_s, 0.1, 0.01, exposed_s, 0.02, exchange_s)
    return Forecast(Option(label, label, {}, [], 1, error, loss=loss), time, off_by)


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


def best_of(*others, none_s=0.4):
    return advice.advise([forecast("none", none_s, off_by=0.2), *others]).best.option.label


@pytest.mark.parametrize(("b_s", "best"), [(0.1, "b"), (0.149, "b"), (0.151, "a")])
def test_of_recipes_whose_ranges_overlap_the_one_of_the_least_loss_is_advised(b_s, best):
    """0.1 s and 20 % more are 0.12 s, as are 0.15 s and 20 % less."""
    a = forecast("a", 0.1, error=0.1, off_by=0.2, loss=0.02)
    assert best_of(a, forecast("b", b_s, error=0.5, off_by=0.2, loss=-0.01)) == best


def test_of_equal_losses_the_least_error_decides():
    a = forecast("a", 0.1, error=0.7, off_by=0.2, loss=0.02)
    assert best_of(a, forecast("b", 0.11, error=0.5, off_by=0.2, loss=0.02)) == "b"
    unknown = forecast("c", 0.1, error=0.7, off_by=0.2)
    assert best_of(unknown, forecast("d", 0.11, error=0.5, off_by=0.2)) == "d"


def test_a_loss_that_was_not_measured_is_between_good_and_bad_ones():
    unknown = forecast("a", 0.1, error=0.1, off_by=0.2)
    assert best_of(unknown, forecast("b", 0.12, error=0.8, off_by=0.2, loss=0.04)) == "b"
    assert best_of(unknown, forecast("b", 0.08, error=0.05, off_by=0.2, loss=0.06)) == "a"


@pytest.mark.parametrize(("error", "loss"), [(0.95, None), (0.3, 0.1)])
@pytest.mark.parametrize(("better_s", "best"), [(0.104, "better"), (0.107, "poor")])
def test_a_poor_recipe_is_not_advised_for_a_few_per_cent_of_time(error, loss, better_s, best):
    """Not even where no ranges overlap."""
    poor = forecast("poor", 0.1, error=error, off_by=0.0, loss=loss)
    better = forecast("better", better_s, error=0.2, off_by=0.0)
    assert best_of(poor, better) == best
    assert best_of(poor, forecast("as poor", better_s, error=0.91)) == "poor"


def test_the_error_of_a_step_counts_where_no_loss_was_measured():
    trained = forecast("trained", 0.1, error=0.95, off_by=0.0, loss=-0.01)
    assert best_of(trained, forecast("other", 0.104, error=0.2, off_by=0.0)) == "trained"


def test_one_that_trains_better_but_saves_too_little_takes_no_place():
    a, b = forecast("a", 0.094, error=0.9), forecast("b", 0.098, error=0.1, loss=-0.1)
    assert advice.advise([forecast("none", 0.1), a, b]).best.option.label == "a"


@pytest.mark.parametrize(
    ("recipe", "options", "loss"),
    [
        ("dither", {}, advice.LOSSES["dither(ratio=20)"]),
        ("dither", {"ratio": 40}, advice.LOSSES["dither(ratio=40)"]),
        ("fft", {}, advice.LOSSES["fft"]),
        ("fft", {"error_feedback": True, "density": 0.33}, advice.LOSSES["fft"]),
        ("fft", {"density": 0.1}, None),
        ("topk", {}, None),
        ("fp16", {}, advice.LOSSES["fp16"]),
        ("natural", {}, None),
    ],
)
def test_a_committed_loss_is_of_the_recipe_with_these_options(recipe, options, loss):
    assert advice.committed_loss(recipe, options) == loss


@pytest.mark.torch
def test_the_recipe_by_default_of_compress_is_among_those_that_are_looked_at(advise):
    from horovod_fftcomp.torch_distributed import compress

    default = inspect.signature(compress).parameters["recipe"].default
    printed, found = advise(*SLOW)
    rows = {row["recipe"]: row for row in found["recipes"]}
    assert rows[default]["loss"] == advice.committed_loss(default, {}) is not None
    assert rows["topk"]["loss"] is None
    assert "not measured" in printed


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
    truth = Compute(0.08, spare_core, sharing=1.5)
    step_s = forecast_step(truth, parts, network, 4).total_s
    found = advice.compute_of(step_s, option, network, 4, replace(truth, total_s=1.0))
    assert found.total_s == pytest.approx(truth.total_s)
    assert replace(found, total_s=truth.total_s) == truth


REFUSED = {
    "nothing": ({}, ""),
    "almost no exchange is slower": (
        {"none": 0.2, "bare": 0.21},
        "A step that sends almost nothing took 210.0 ms (±2 %), longer than one that sends "
        "everything, 200.0 ms (±2 %): measure again on idle machines",
    ),
    "it is not, by their intervals": ({"none": 0.2, "bare": 0.205}, ""),
    "load": (
        {"load": 0.26},
        "Other processes used 26 % of the cores before the measurement, more than 25 %: end them",
    ),
    "little load": ({"load": 0.24}, ""),
    "steps": (
        {"halves": (0.85, 1.15)},
        "A step without compression took 340.0 ms in the first half of the steps and 460.0 ms in "
        "the second, which differ by more than 20 %: measure again",
    ),
    "little in steps": ({"halves": (0.95, 1.1)}, ""),
    "network": (
        {"times": (1.0, 3.0)},
        "Network and codec were measured twice, by which fp16 takes",
    ),
    "little in the network": ({"times": (1.0, 1.1)}, ""),
    "disturbed": (
        {"none": 0.001, "bare": 0.001},
        "The network alone was slower than in the script's steps, which leaves no time for",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("planted", "told"), REFUSED.values(), ids=REFUSED)
def test_measurements_that_contradict_each_other_are_refused(
    planted, told, monkeypatch, tmp_path, capsys, no_launcher, quiet
):
    monkeypatch.setenv("COLUMNS", "1000")
    torchruns = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(torchruns))
    plant(monkeypatch, **planted)
    path, script = tmp_path / "advice.json", tmp_path / "train.py"
    script.touch()
    arguments = ["advise", "--compression", "fp16,topk", "--repeat", "1", "--json", path, script]
    with contextlib.ExitStack() as stack:
        if told:
            caught = stack.enter_context(pytest.raises(SystemExit))
        main([*map(str, arguments)])
    printed, found = capsys.readouterr().out, json.loads(path.read_text())
    assert "topk" in printed
    assert "MB" in printed  # what was measured is shown
    assert "Other processes used" in printed
    assert found["valid"] == (not told)
    assert ("Nothing is recommended" in printed) == bool(told)
    assert ("speed-up" in printed) != bool(told)
    gains = not told and planted.get("none") != 0.2
    assert ("Compression." in printed) == gains
    assert (found["advice"]["recipe"] is not None) == gains
    if told:
        assert caught.value.code == 3
        assert told in printed
        assert len(found["doubts"]) >= 1
        assert told[1:] in found["advice"]["why"]
        assert told[1:] in json.loads(torchruns.read_text())["message"]["message"]
    assert torchruns.exists() == bool(told)


def test_a_codec_whose_two_measurements_differ_is_refused():
    once, again = ([forecast("none", 0.2), forecast("a", s, off_by=0.2)] for s in (0.1, 0.125))
    [told] = doubts.of_forecasts(once, again)
    assert "by which a takes 100.0 ms a step and 125.0 ms, which differ by more than 20 %" in told
    assert not [*doubts.of_forecasts(once, [again[0], forecast("a", 0.12)])]
    wide = [again[0], again[1]._replace(error=0.3)]
    assert not [*doubts.of_forecasts(once, wide)]


def test_other_processes_are_told_from_ranks():
    """Two machines of 2 cores: on one three ranks compute, on the other one rank and others."""
    second = 10**9
    ours = [[1, 2 * second, 1.5 * second, second // 2]] * 3
    theirs = [[2, 2 * second, 1.5 * second, second // 2]]
    looks = np.array([*ours, *theirs], np.int64)
    assert load_of_others.share_of_others(looks[:3]) == 0
    assert load_of_others.share_of_others(looks) == pytest.approx(0.5)


@pytest.mark.parametrize(("rank", "busy", "told"), [(0, 9, 1), (0, 1, 0), (1, 9, 0)])
def test_load_is_told_before_anything_is_measured(rank, busy, told, monkeypatch, capsys):
    """By the first rank, so that one need not wait to learn that nothing is recommended."""
    errors, looked = [], []
    jobs = argparse.Namespace(rank=rank)
    monkeypatch.setattr(advise_command, "Jobs", lambda _: jobs)
    monkeypatch.setattr(
        advise_command, "findings_of", lambda *_: errors.append(capsys.readouterr())
    )
    look = np.array([1, 10**9, busy * 10**8, 0])
    monkeypatch.setattr(load_of_others, "look", lambda: looked.append(rank) or look)
    main(["advise", "--gbit-per-s", "1", "--ranks", "2"])
    [printed] = errors
    assert looked == [rank]  # other ranks sleep as well, so that they are no load
    assert printed.out == ""
    assert printed.err.count("\n") == told
    assert printed.err.startswith("advise: other processes used 90 % of the cores before") == told
    assert printed.err.endswith("; else it will recommend nothing\n") == told


def test_a_busy_process_is_seen(monkeypatch):
    monkeypatch.setattr(load_of_others, "LOOK_S", 0.5)
    spin = "import time; end = time.time() + 60\nwhile time.time() < end: pass"
    core = {min(os.sched_getaffinity(0))}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: core)
    with subprocess.Popen(["taskset", "-c", str(*core), sys.executable, "-c", spin]) as other:
        try:
            time.sleep(0.5)  # for it to begin
            [_, there, busy, own] = load_of_others.look()
        finally:
            other.kill()
    assert 0.8 * there < busy < 1.1 * there
    assert own < 0.2 * there


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
        network = Network(line, Line(2e-3, 0.0), inside=Line(1e-6, 0.0), node_size=2)
        kinds = ("allreduce", "allgather")
        times = [(m, network.seconds(m, 4)) for m in (Message(k, 10**6) for k in kinds)]
        measured = [advice.Measured([option], compute, network)]
        found = advice.mean_forecasts(measured, 4)
        best = advice.advise(found)
        findings = Findings(measured, 4, 2, found, best, times, {}, 0.0, "", False, None)
        print_report(findings, None)
        printed = capsys.readouterr().out
        printed = " ".join(printed.split())
        told = "summing: 0.0486 Gbit/s received by a rank (247 ms for an allreduce of 1 MB)"
        assert (told in printed) == mentioned
        assert ("summing: too fast to measure with 1 MB" in printed) != mentioned
        assert "gathering: too fast to measure with 1 MB" in printed
        assert "inside a node: too fast to measure, latency 1 us" in printed


def test_two_measurements_count_with_their_mean():
    line = Line(1e-4, 1e-9)
    parts = [Transfer(1.0, (Message("allreduce", 4000),), 0.01, 0.01)]
    option = Option("x", "x", {}, parts, 4000, 0.0)
    several = [
        advice.Measured([option], Compute(compute_s), Network(line, line), step_spread=spread)
        for compute_s, spread in ((0.1, 0.0), (0.3, 0.9))
    ]
    singly = [advice.mean_forecasts([one], 2)[0] for one in several]
    [both] = advice.mean_forecasts(several, 2)
    for mean, *times in zip(both.time, *(one.time for one in singly), strict=True):
        assert mean == pytest.approx(sum(times) / 2)
    assert both.error == singly[1].error > singly[0].error == 0.2


def test_numbers_of_ranks_are_doubled_up_to_the_last():
    assert node_range("2..2") == [2]
    assert node_range("2..8") == [2, 4, 8]
    assert node_range("3..20") == [3, 6, 12, 20]
