"""``horovod-fftcomp advise``: forecast the step time with each recipe and recommend one."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from horovod_fftcomp.cli import advise_plot, advise_report
from horovod_fftcomp.cli import run as run_command
from horovod_fftcomp.cli.advise_report import Findings
from horovod_fftcomp.cli.arguments import (
    COMPRESSIONS,
    RecipeChoice,
    count,
    node_range,
    output_path,
    picture_path,
    positive,
    recipe_choices,
)
from horovod_fftcomp.cli.console import Stages
from horovod_fftcomp.kernels import threads
from horovod_fftcomp.schemes import Tensor
from horovod_fftcomp.tools import environment, gradient_files
from horovod_fftcomp.tools.advise import advice
from horovod_fftcomp.tools.advise.advice import Forecast, Option
from horovod_fftcomp.tools.advise.cost_model import (
    CYCLE_S,
    Compute,
    Message,
    Network,
    fitted_network,
    given_network,
)
from horovod_fftcomp.tools.bench import plot
from horovod_fftcomp.tools.run import launcher
from horovod_fftcomp.types import Array

_RECIPES = "fp16,topk,fft,dct,auto,scalecom"
# Sends and computes almost nothing, so that the time of its step is the computation.
_ALMOST_NOTHING = RecipeChoice(
    "random_block", "random_block", {"density": 1e-5, "error_feedback": False}
)
# Shares of the time: a job of the script, the codecs of a recipe, the job that times the network.
_JOB, _CODEC, _NETWORK = 10.0, 1.0, 6.0
_MOST_PROBED_NBYTES = 64_000_000
_EXAMPLES = """\
examples:
  horovod-fftcomp advise -np 2 train.py --epochs 1
  horovod-fftcomp advise --launcher "horovodrun -H a:1,b:1" train.py
  horovod-fftcomp advise --gradients g --compute-ms 120 --gbit-per-s 1 --latency-us 50 --ranks 4
  horovod-fftcomp advise --gradients g --compute-ms 120 -np 2 --nodes 2..1024 --plot steps.png

The first two run the script twice, for --steps steps each. docs/advise.md describes the
measurements, the model of a step and its limits.

exit status: 0 after a forecast, also of no gain; 2 for wrong arguments and for what cannot be
measured; 3 if other work disturbed the measurement, so that there is no forecast.
"""
_INVALID = 3  # the exit status


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
    add(
        "--compression",
        type=recipe_choices,
        dest="recipes",
        metavar=COMPRESSIONS,
        help=f"compressions to forecast (default: {_RECIPES})",
    )
    add("--steps", type=count, default=20, metavar="N", help="steps of a run (default: 20)")
    add("--threads", type=count, metavar="N", help="CPU threads a rank (default: cores, at most 8)")
    add(
        "--cores-per-rank",
        type=count,
        metavar="N",
        help="CPU cores of each rank; with 1, encoding cannot overlap with backward",
    )
    add("--repeat", type=count, default=5, metavar="N", help="timings a median (default: 5)")
    run_command.add_metric(parser)
    add("--trainings", type=count, metavar="N", help="jobs of --metric for each (default: 1)")
    add("--nodes", type=node_range, metavar="A..B", help="also forecast for A to B ranks")
    add("--json", type=output_path, metavar="FILE", help="write all numbers to FILE")
    add("--plot", type=picture_path, metavar="FILE.png", help="draw the forecast")
    add("script", nargs="?", help="an unmodified Horovod training script")
    add("script_arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    parser.set_defaults(
        run=run, fail=parser.error, warmup_steps=0, ranks_per_node=None, record=None
    )


def _add_measured(parser: argparse.ArgumentParser) -> None:
    """Add the arguments on gradients, computation and network."""
    add = parser.add_argument
    add("--gradients", type=Path, metavar="PATH", help="recorded gradients, instead of a script")
    add("--compute-ms", type=positive, metavar="MS", help="time of a step without communication")
    add("--gbit-per-s", type=positive, metavar="X", help="bandwidth of a rank's link, if known")
    add("--latency-us", type=positive, metavar="US", help="latency of a message (default: 50)")
    add("--ranks", type=count, metavar="P", help="number of ranks, with --gbit-per-s")
    add("-np", type=count, default=2, metavar="N", help="ranks to start (default: %(default)s)")
    add("--launcher", type=shlex.split, metavar="COMMAND", help="starts jobs (default: horovodrun)")


def run(parsed: argparse.Namespace) -> None:
    """Measure, forecast, print the report and write the files."""
    _check(parsed)
    parsed.recipes = parsed.recipes or recipe_choices(_RECIPES)
    stages = Stages(_shares(parsed))
    with stages.bar:
        found = _findings(parsed, stages.begin)
    advise_report.print_report(found, parsed.nodes)
    if parsed.json:
        command = shlex.join(["horovod-fftcomp", *parsed.arguments])
        content = {"command": command, "machine": environment.describe()}
        content |= advise_report.as_json(found, parsed.nodes)
        parsed.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if advise_report.invalid(found):
        raise SystemExit(_INVALID)
    if parsed.plot:
        advise_plot.write(parsed.plot, found, parsed.nodes or range(2, 65))
    if parsed.metric:
        _train(parsed, found.advice.best or found.advice.unclear)


def _train(parsed: argparse.Namespace, best: Forecast | None) -> None:
    """Train the script to its end with none and the best compression, and compare."""
    parsed.compare = recipe_choices("none")
    if best is not None:
        option = best.option
        parsed.compare.append(RecipeChoice(option.label, option.recipe, option.options))
    parsed.repeat, parsed.steps, parsed.record, parsed.json = parsed.trainings, None, None, None
    run_command.compare(parsed)


def _check(parsed: argparse.Namespace) -> None:
    """Exit with a message if arguments are missing or contradict each other."""
    if bool(parsed.gradients) == bool(parsed.script):
        parsed.fail("give either a script or --gradients PATH")
    if parsed.script and not Path(parsed.script).is_file():
        parsed.fail(f"there is no script {parsed.script!r}")
    if parsed.gradients and parsed.compute_ms is None:
        parsed.fail("--gradients needs --compute-ms, the duration of a step without communication")
    if parsed.gbit_per_s is None and (parsed.latency_us or parsed.ranks):
        parsed.fail("--latency-us and --ranks need --gbit-per-s X: they describe a given network")
    if parsed.gbit_per_s is not None and (parsed.ranks or 0) < 2:
        parsed.fail("--gbit-per-s needs --ranks P, at least 2")
    if (parsed.metric and not parsed.script) or (parsed.trainings and not parsed.metric):
        parsed.fail("--metric needs a script to train, and --trainings needs --metric")
    if parsed.np < 2:
        parsed.fail("-np must be at least 2: one rank exchanges nothing")
    if launcher.launched_rank() is not None:
        parsed.fail("advise starts its own jobs: run it without a launcher and give -np N")
    if parsed.plot and not plot.matplotlib_is_installed():
        parsed.fail("--plot needs matplotlib: pip install matplotlib, or leave --plot out")


class _Model(NamedTuple):
    """A model to forecast: tensors, flat gradients by name, measured step times by recipe.

    ``cores``: CPU cores of the first rank of the jobs. ``spread``: that of the step times.
    """

    tensors: list[Tensor]
    grads: Mapping[str, Array]
    step_s: Mapping[str, float]
    cores: int | None = None
    spread: float = 0.0


def _shares(parsed: argparse.Namespace) -> float:
    """Return the sum of the shares of what ``_findings`` measures."""
    is_probed = parsed.gbit_per_s is None or parsed.compute_ms is None
    return 2 * _JOB * bool(parsed.script) + _CODEC * len(parsed.recipes) + _NETWORK * is_probed


def _findings(parsed: argparse.Namespace, tell: Any) -> Findings:
    ranks = parsed.ranks or parsed.np
    model = _from_script(parsed, tell) if parsed.script else _from_file(parsed)
    cores = parsed.cores_per_rank or model.cores
    cores = cores or max(1, environment.n_cores() // (1 if parsed.ranks else ranks))
    threads.set_num_threads(parsed.threads or min(8, cores))
    options = [advice.dense(model.tensors)]
    for choice in parsed.recipes:
        tell(choice.label, _CODEC)
        options.append(_option(choice, model, parsed))
    nothing = _option(_ALMOST_NOTHING, model, parsed)
    tell("the network", _NETWORK)
    network, times, varies = _network(parsed, options)
    if parsed.compute_ms is not None:
        compute = Compute(parsed.compute_ms / 1e3, cores > 1)
    else:
        where = network if parsed.gbit_per_s is None else _probed(parsed, options)[0]
        step_s = model.step_s["random_block"]
        compute = advice.compute_of(step_s, nothing, where, parsed.np, cores > 1)
        own = advice.compute_of(model.step_s["none"], options[0], where, parsed.np, cores > 1)
        options[0] = options[0]._replace(compute=own)
    found = advice.forecasts(options, compute, network, ranks, model.spread, varies)
    told = advice.advise(found)
    return Findings(compute, network, ranks, found, told, times, model.step_s, parsed.script)


def _option(choice: RecipeChoice, model: _Model, parsed: argparse.Namespace) -> Option:
    return advice.compressed(
        choice.label, choice.name, choice.options, model.tensors, model.grads, parsed.repeat
    )


def _from_file(parsed: argparse.Namespace) -> _Model:
    try:
        histories = gradient_files.read(parsed.gradients)
    except (OSError, ValueError) as error:
        parsed.fail(str(error))
    tensors = [Tensor(history.name, history.steps[0].shape) for history in histories]
    return _Model(tensors, {h.name: h.steps[-1].reshape(-1) for h in histories}, {})


def _from_script(parsed: argparse.Namespace, tell: Any) -> _Model:
    """Run the script twice: dense, and with almost no exchange while gradients are recorded."""
    with tempfile.TemporaryDirectory() as folder:
        parsed.record_every = max(1, parsed.steps // 2)
        tell("the script without compression", _JOB)
        dense = _job(parsed, RecipeChoice("none", "none", {}))
        tell("the script without exchange", _JOB)
        parsed.record = Path(folder) / "gradients"
        bare = _job(parsed, _ALMOST_NOTHING)
        # Without files, as on other hosts, gradients are synthetic.
        recorded = gradient_files.read(parsed.record) if any(parsed.record.glob("*.npz")) else []
    tensors = [Tensor(name, tuple(shape)) for name, shape in dense["tensors"]]
    step_s = {"none": dense["step_s"], "random_block": bare["step_s"]}
    grads = {h.name: h.steps[-1].reshape(-1) for h in recorded}
    spread = max(dense["step_spread"], bare["step_spread"])
    return _Model(tensors, grads, step_s, dense["cores"], spread)


def _job(parsed: argparse.Namespace, choice: RecipeChoice) -> dict[str, Any]:
    """Return the first rank's report of a job; exit with the job's output if it failed."""
    lines: list[str] = []
    ended = run_command.launch(parsed, choice, parsed.np, lines.append)
    trouble = run_command.trouble(ended, parsed.np)
    if trouble or ended.reports[0]["step_s"] is None:
        sys.stderr.write("".join(lines[-50:]))
        parsed.fail(
            f"{parsed.script} with recipe {choice.name}: {trouble or 'two steps are needed'}"
        )
    return ended.reports[0]


_Probe = tuple[Network, list[tuple[Message, float]], float]


def _network(parsed: argparse.Namespace, options: list[Option]) -> _Probe:
    """Return the network (given or measured), the measured times and their median spread."""
    if parsed.gbit_per_s is None:
        return _probed(parsed, options)
    latency_s = (parsed.latency_us or 50) / 1e6
    return given_network(parsed.gbit_per_s, latency_s, _cycle_s(parsed)), [], 0.0


def _cycle_s(parsed: argparse.Namespace) -> float:
    """Return the cycle time of Horovod in jobs that are started here, in seconds."""
    told = os.environ.get("HOROVOD_CYCLE_TIME", str(1e3 * CYCLE_S))
    try:
        cycle_ms = float(told)
    except ValueError:
        cycle_ms = math.nan
    if not 0 <= cycle_ms < math.inf:
        parsed.fail(f"HOROVOD_CYCLE_TIME must be a number of milliseconds from 0 up, got {told!r}")
    return cycle_ms / 1e3


def _planned(options: list[Option], ranks: int) -> Iterator[Message]:
    """Yield the collectives to time: small and large ones, and each option's total size."""
    sizes = {(collective, "float32"): {4} for collective in ("allreduce", "allgather")}
    for option in options:
        handed_in: Counter[tuple[str, str]] = Counter()
        for collective, nbytes, dtype in (m for part in option.parts for m in part.messages):
            if collective == "divided":
                collective, nbytes = "allgather", nbytes // ranks
            handed_in[collective, dtype] += nbytes
        for kind, nbytes in handed_in.items():
            sizes.setdefault(kind, {4}).add(min(max(4, nbytes), _MOST_PROBED_NBYTES))
    for (collective, dtype), found in sizes.items():
        for nbytes in found | {1 << 16, 1 << 20}:
            yield Message(collective, nbytes, dtype)


def _probed(parsed: argparse.Namespace, options: list[Option]) -> _Probe:
    """Return the network as timed by ``torch.network`` on the ranks, the times and their spread."""
    messages = sorted(_planned(options, parsed.np))
    command = [sys.executable, "-m", "horovod_fftcomp.torch.network", json.dumps(messages)]
    lines: list[str] = []
    start = parsed.launcher or launcher.default_launcher()
    try:
        ended = launcher.launch(start, parsed.np, command, lines.append)
    except FileNotFoundError as error:
        parsed.fail(f"{error.filename!r} was not found; install Horovod, or give --gbit-per-s X")
    if len(ended.reports) < parsed.np:
        sys.stderr.write("".join(lines[-50:]))
        parsed.fail(
            "the network could not be measured (this needs horovod.torch); give its values: "
            "--gbit-per-s X --latency-us US --ranks P"
        )
    # The slowest rank's times are those of a step.
    times = [max(found) for found in zip(*(r["times"] for r in ended.reports), strict=True)]
    measured = list(zip(messages, times, strict=True))
    spread = statistics.median(varies for r in ended.reports for varies in r["spreads"])
    return fitted_network(measured, parsed.np, _cycle_s(parsed)), measured, spread
