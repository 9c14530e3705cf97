"""``horovod-fftcomp advise``: forecast the step time with each recipe and recommend one."""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from horovod_fftcomp.cli import advise_report, plots
from horovod_fftcomp.cli.advise_jobs import Jobs
from horovod_fftcomp.cli.advise_report import Findings
from horovod_fftcomp.cli.arguments import (
    COMPRESSIONS,
    RecipeChoice,
    count,
    node_range,
    numel,
    output_path,
    picture_path,
    positive,
    recipe_choices,
)
from horovod_fftcomp.cli.console import Stages, write_json
from horovod_fftcomp.engine.policy import make_policy
from horovod_fftcomp.errors import UnsupportedError, listed
from horovod_fftcomp.kernels import threads
from horovod_fftcomp.schemes import Tensor
from horovod_fftcomp.tools import environment, gradient_files
from horovod_fftcomp.tools.advise import advice, doubts, load
from horovod_fftcomp.tools.advise.advice import Measured, Option
from horovod_fftcomp.tools.advise.cost_model import (
    CYCLE_S,
    INSIDE_GBIT_PER_S,
    Compute,
    Message,
    Network,
    fitted_network,
    given_network,
)
from horovod_fftcomp.tools.advise.doubts import Steps
from horovod_fftcomp.tools.run import launcher
from horovod_fftcomp.types import Array

_RECIPES = "fp16,dither,topk,fft,dct,auto,scalecom"
# Sends and computes almost nothing, so that the time of its step is the computation.
_ALMOST_NOTHING = RecipeChoice(
    "random_block", "random_block", {"density": 1e-5, "error_feedback": False}
)
# Without a script or gradients: matrices of 1024 x 1024, by default a quarter of the larger model
# of docs/choosing.md, which has 25 M parameters and takes 80 ms.
_ROW, _PARAMETERS, _COMPUTE_MS = 1024, 6 << 20, 20.0
_NO_NETWORK = given_network(math.inf, 0.0, 0.0)
# Shares of the time: a job of the script, the codecs of a recipe, the job that times the network.
_JOB, _CODEC, _NETWORK = 10.0, 1.0, 6.0
_EXAMPLES = """\
examples:
  horovod-fftcomp advise -np 2 train.py --epochs 1
  torchrun --nproc-per-node 2 -m horovod_fftcomp advise train.py --epochs 1
  horovod-fftcomp advise --launcher "srun --mpi=pmix" -np 4 train.py
  horovod-fftcomp advise --gbit-per-s 1 --latency-us 50 --ranks 4 --parameters 100M
  horovod-fftcomp advise --gbit-per-s 25 --ranks 64 --ranks-per-node 8
  horovod-fftcomp advise --gradients g --compute-ms 120 -np 2 --nodes 2..1024

With a script it runs twice, for --steps steps each. docs/advise.md describes the measurements, the
model of a step and its limits.

exit status: 0 after a forecast, also of no gain; 2 for wrong arguments and for what cannot be
measured; 3 if measurements contradict each other or other processes disturbed them, so that
nothing is recommended.
"""
_REFUSED = 3  # the exit status


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command and its arguments."""
    parser = commands.add_parser(
        "advise",
        help="forecast the step time with each recipe and recommend one",
        description="Measure the model, the network and the codecs (or use given values),\n"
        "forecast the step time with each recipe, and recommend a recipe or none.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    _add_measured(parser)
    told = f"compressions to forecast (default: {_RECIPES})"
    add("--compression", type=recipe_choices, dest="recipes", metavar=COMPRESSIONS, help=told)
    add("--steps", type=count, default=20, metavar="N", help="steps of a run (default: 20)")
    add("--threads", type=count, metavar="N", help="CPU threads a rank (default: cores, at most 8)")
    add("--cores-per-rank", type=count, metavar="N", help="CPU cores of a rank (default: as here)")
    add("--repeat", type=count, default=5, metavar="N", help="timings a median (default: 5)")
    add("--nodes", type=node_range, metavar="A..B", help="also forecast for A to B ranks")
    add("--json", type=output_path, metavar="FILE", help="write all numbers to FILE")
    add("--plot", type=picture_path, metavar="FILE.png", help="draw the forecast")
    add("script", nargs="?", help="an unmodified training script of Horovod or DDP")
    add("script_arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    parser.set_defaults(
        run=run, fail=parser.error, warmup_steps=0, ranks_per_node=None, record=None
    )


def _add_measured(parser: argparse.ArgumentParser) -> None:
    """Add the arguments on gradients, computation and network."""
    add = parser.add_argument
    add("--gradients", type=Path, metavar="PATH", help="recorded gradients, instead of a script")
    add("--parameters", type=numel, metavar="N", help="of a usual model, as 100M (default: 6M)")
    add("--compute-ms", type=positive, metavar="MS", help="time of a step without communication")
    add("--gbit-per-s", type=positive, metavar="X", help="bandwidth of a node's link, if known")
    add("--latency-us", type=positive, metavar="US", help="latency of a message (default: 50)")
    add("--ranks", type=count, metavar="P", help="number of ranks, with --gbit-per-s")
    told = "ranks of a node: forecast compressions with ranks_per_node=N"
    add("--ranks-per-node", type=count, metavar="N", dest="node_size", help=told)
    told = "bandwidth of a rank's link inside its node (default: 2400, NVLink, or measured)"
    add("--node-gbit-per-s", type=positive, metavar="X", help=told)
    add("-np", type=count, metavar="N", help="ranks to start (default: 2, or the launcher's)")
    told = "starts jobs: torchrun, srun, or what takes -np N (default: horovodrun, else torchrun)"
    add("--launcher", type=shlex.split, metavar="COMMAND", help=told)


def run(parsed: argparse.Namespace) -> None:
    """Measure, forecast, print the report and write the files."""
    _check(parsed)
    jobs = Jobs(parsed)
    parsed.recipes = _recipes(parsed, parsed.ranks or jobs.size)
    share = load.share_of_others(load.look()[None])  # other ranks sleep meanwhile, too
    if jobs.rank == 0:
        for doubt in doubts.of_load(share):
            print(f"advise: {doubt}; else it will recommend nothing", file=sys.stderr, flush=True)
    stages = Stages(_shares(parsed))
    with stages.bar if jobs.rank == 0 else contextlib.nullcontext():
        found = findings_of(parsed, jobs, stages.begin)
        stages.begin("nothing more", 0.0)
    if found is None:
        return
    advise_report.print_report(found, parsed.nodes)
    if parsed.json:
        command = shlex.join(["horovod-fftcomp", *parsed.arguments])
        content = {"command": command, "machine": environment.describe()}
        content |= advise_report.as_json(found, parsed.nodes)
        write_json(parsed.json, content)
    if parsed.plot:
        usual = [found.node_size * number for number in node_range("2..64")]
        plots.write_advice(parsed.plot, found, parsed.nodes or usual)
    if found.doubts:
        why = f"nothing is recommended: {'; '.join(found.doubts)}"
        launcher.tell_torchrun("horovod-fftcomp advise", _REFUSED, why)
        raise SystemExit(_REFUSED)


def _check(parsed: argparse.Namespace) -> None:
    """Exit with a message if arguments are missing or contradict each other."""
    if parsed.gradients and parsed.script:
        parsed.fail("give either a script or --gradients PATH")
    if not (parsed.gradients or parsed.script or parsed.gbit_per_s):
        parsed.fail("give a script, --gradients PATH, or --gbit-per-s X for a usual model")
    if parsed.parameters and (parsed.gradients or parsed.script):
        parsed.fail("--parameters is the size of a usual model, without a script or --gradients")
    parsed.parameters = parsed.parameters or _PARAMETERS
    if parsed.script and not Path(parsed.script).is_file():
        parsed.fail(f"there is no script {parsed.script!r}")
    if parsed.gradients and parsed.compute_ms is None:
        parsed.fail("--gradients needs --compute-ms, the duration of a step without communication")
    if parsed.gbit_per_s is None and (parsed.latency_us or parsed.ranks):
        parsed.fail("--latency-us and --ranks need --gbit-per-s X: they describe a given network")
    if parsed.gbit_per_s is not None and (parsed.ranks or 0) < 2:
        parsed.fail("--gbit-per-s needs --ranks P, at least 2")
    if parsed.node_gbit_per_s is not None and parsed.gbit_per_s is None:
        parsed.fail("--node-gbit-per-s needs --gbit-per-s X: it belongs to a given network")


def _recipes(parsed: argparse.Namespace, ranks: int) -> list[RecipeChoice]:
    """Return the compressions to forecast; exit unless their nodes are of one size."""
    recipes = parsed.recipes or recipe_choices(_RECIPES)
    if parsed.node_size is not None:
        given = {"ranks_per_node": parsed.node_size}
        recipes = [choice._replace(options={**given, **choice.options}) for choice in recipes]
        for choice in recipes:
            try:
                make_policy(choice.name, **choice.options)
            except UnsupportedError as error:
                parsed.fail(f"{choice.label}: {error}")
    told = {choice.options.get("ranks_per_node", 1) for choice in recipes}
    sizes = (told | {parsed.node_size or 1}) - {1}
    if "auto" in sizes:
        parsed.fail("ranks_per_node=auto is not forecast: give the number")
    if len(sizes) > 1:
        parsed.fail(f"all nodes must have the same ranks, got {listed(sorted(sizes))}")
    parsed.node_size = size = sizes.pop() if sizes else 1
    if size == 1 and parsed.node_gbit_per_s is not None:
        parsed.fail("--node-gbit-per-s needs nodes: give --ranks-per-node N")
    for number in (ranks, *(parsed.nodes or ())):
        if size > 1 and (number % size or number == size):
            parsed.fail(f"{number} ranks are not several nodes of {size}: give {2 * size}, say")
    return recipes


class _Model(NamedTuple):
    """A model to forecast: tensors, flat gradients by name, measured steps by recipe.

    ``cores``: CPU cores of the first rank of the jobs, below 1 if ranks share one.
    """

    tensors: list[Tensor]
    grads: Mapping[str, Array]
    steps: Mapping[str, Steps]
    cores: float | None = None


class _Probed(NamedTuple):
    """Two measurements of a network, or twice the given one; a share of the cores, see ``load``.

    ``times``: means of what was measured; ``spread``: the median of its spreads.
    """

    networks: list[Network]
    load: float
    times: list[tuple[Message, float]]
    spread: float = 0.0


def _shares(parsed: argparse.Namespace) -> float:
    """Return the sum of the shares of what ``findings_of`` measures."""
    codecs = 2 * _CODEC * len(parsed.recipes)
    return 2 * _JOB * bool(parsed.script) + codecs + _NETWORK * (parsed.gbit_per_s is None)


def findings_of(parsed: argparse.Namespace, jobs: Jobs, tell: Any) -> Findings | None:
    """Return what was found; None on other ranks than the first, which take part in its jobs."""
    model = _model(parsed, jobs, tell)
    probed = _probed(parsed, jobs, model, tell)
    if jobs.rank:
        return None
    ranks = parsed.ranks or jobs.size
    cores = parsed.cores_per_rank or model.cores
    cores = cores or max(1, environment.n_cores() // (1 if parsed.ranks else ranks))
    threads.set_num_threads(parsed.threads or min(8, max(1, int(cores))))
    measured = [*_measured(parsed, jobs, model, probed, cores, tell)]
    forecasts = advice.mean_forecasts(measured, ranks)
    best, start = advice.advise(forecasts), (jobs.start(ranks), jobs.is_ddp, parsed.script)
    timed = probed.times, model.steps, probed.load
    found = Findings(measured, ranks, parsed.node_size, forecasts, best, *timed, *start)
    return found._replace(doubts=[*_doubts(found)])


def _measured(
    parsed: argparse.Namespace, jobs: Jobs, model: _Model, probed: _Probed, cores: float, tell: Any
) -> Iterator[Measured]:
    """Time the codecs once for each measurement of the network."""
    repeat = (parsed.repeat + 1) // 2  # half, as it is measured twice
    rank = Compute(0.0, spare_core=cores >= 2, sharing=max(1.0, 1 / cores))

    def timed(choice: RecipeChoice) -> Option:
        return advice.compressed(choice, model.tensors, model.grads, repeat, jobs.is_ddp)

    step_spread = max((steps.spread for steps in model.steps.values()), default=0.0)
    computed = functools.partial(advice.compute_of, ranks=jobs.size, rank=rank)
    nothing = timed(_ALMOST_NOTHING)
    for network in probed.networks:
        none = advice.dense(model.tensors, jobs.is_ddp)
        if parsed.compute_ms is not None or not model.steps:
            compute_ms = parsed.compute_ms or _COMPUTE_MS * parsed.parameters / _PARAMETERS
            compute = replace(rank, total_s=compute_ms / 1e3)
        elif probed.times:
            compute = computed(model.steps["random_block"].step_s, nothing, network)
            none = none._replace(compute=computed(model.steps["none"].step_s, none, network))
        else:  # of a network that is not that of the jobs
            compute = computed(model.steps["random_block"].step_s, nothing, _NO_NETWORK)
        options = [none]
        for choice in parsed.recipes:
            tell(choice.label, _CODEC)
            options.append(timed(choice))
        yield Measured(options, compute, network, step_spread, probed.spread)


def _doubts(found: Findings) -> Iterator[str]:
    yield from doubts.of_load(found.load)
    if found.steps:
        yield from doubts.of_steps(found.steps, min(m.compute.total_s for m in found.measured))
    if found.steps and found.times:
        yield from doubts.of_dense(found.forecasts[0], found.steps["none"])
    twice = (advice.mean_forecasts([once], found.ranks) for once in found.measured)
    yield from doubts.of_forecasts(*twice)


def _model(parsed: argparse.Namespace, jobs: Jobs, tell: Any) -> _Model:
    if parsed.script:
        return _from_script(parsed, jobs, tell)
    if parsed.gradients and jobs.rank == 0:
        return _from_file(parsed)
    rows = range(0, max(1, parsed.parameters // _ROW), _ROW)
    shapes = [(min(_ROW, rows.stop - first), _ROW) for first in rows]
    return _Model([Tensor(f"layer{n}", shape) for n, shape in enumerate(shapes)], {}, {})


def _from_file(parsed: argparse.Namespace) -> _Model:
    try:
        histories = gradient_files.read(parsed.gradients)
    except (OSError, ValueError) as error:
        parsed.fail(str(error))
    tensors = [Tensor(history.name, history.steps[0].shape) for history in histories]
    return _Model(tensors, {h.name: h.steps[-1].reshape(-1) for h in histories}, {})


def _from_script(parsed: argparse.Namespace, jobs: Jobs, tell: Any) -> _Model:
    """Run the script twice: dense, and with almost no exchange while gradients are recorded."""
    with tempfile.TemporaryDirectory() as folder:
        parsed.record_every = max(1, parsed.steps // 2)
        tell("the script without compression", _JOB)
        dense = jobs.run_script(RecipeChoice("none", "none", {}))
        tell("the script without exchange", _JOB)
        parsed.record = Path(folder) / "gradients"
        bare = jobs.run_script(_ALMOST_NOTHING)
        # Without files, as on other hosts, gradients are synthetic.
        recorded = gradient_files.read(parsed.record) if any(parsed.record.glob("*.npz")) else []
    tensors = [Tensor(name, tuple(shape)) for name, shape in dense.get("tensors", ())]
    steps = {
        name: Steps(report["step_s"], report["step_spread"], report["blocks_s"])
        for name, report in (("none", dense), ("random_block", bare))
    }
    grads = {h.name: h.steps[-1].reshape(-1) for h in recorded}
    return _Model(tensors, grads, steps, dense["cores"])


def _probed(parsed: argparse.Namespace, jobs: Jobs, model: _Model, tell: Any) -> _Probed:
    """Return the network: given, or timed by ``advise_probe`` on the ranks, and their load."""
    if parsed.gbit_per_s is not None:
        latency_s = (parsed.latency_us or 50) / 1e6
        inside = parsed.node_gbit_per_s or INSIDE_GBIT_PER_S, parsed.node_size
        network = given_network(parsed.gbit_per_s, latency_s, _cycle_s(parsed, jobs), *inside)
        return _Probed([network] * 2, load.share_of_others(load.look()[None]), [])
    tell("the network", _NETWORK)
    dtypes = ["float32", *["float16"] * any(choice.name == "fp16" for choice in parsed.recipes)]
    nbytes = sum(4 * math.prod(tensor.shape) for tensor in model.tensors)
    found = jobs.probe(nbytes, dtypes, parsed.node_size)
    messages = [Message(*message) for message in found["messages"]]
    sizes = jobs.size, _cycle_s(parsed, jobs), parsed.node_size
    networks = [
        fitted_network([*zip(messages, times, strict=True)], *sizes) for times in found["times"]
    ]
    means = [statistics.fmean(pair) for pair in zip(*found["times"], strict=True)]
    times = [*zip(messages, means, strict=True)]
    return _Probed(networks, found["load"], times, statistics.median(found["spreads"]))


def _cycle_s(parsed: argparse.Namespace, jobs: Jobs) -> float:
    """Return the cycle time of Horovod in the jobs, in seconds; 0 without Horovod."""
    if jobs.is_ddp:
        return 0.0
    told = os.environ.get("HOROVOD_CYCLE_TIME", str(1e3 * CYCLE_S))
    try:
        cycle_ms = float(told)
    except ValueError:
        cycle_ms = math.nan
    if not 0 <= cycle_ms < math.inf:
        parsed.fail(f"HOROVOD_CYCLE_TIME must be a number of milliseconds from 0 up, got {told!r}")
    return cycle_ms / 1e3
