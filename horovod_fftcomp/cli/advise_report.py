"""Report of ``advise``: tables, text and JSON values."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from horovod_fftcomp.cli.arguments import RecipeChoice
from horovod_fftcomp.cli.console import Table, in_ms, make_console, to_paste
from horovod_fftcomp.schemes import received
from horovod_fftcomp.tools.advise import advice
from horovod_fftcomp.tools.advise.advice import Advice, Forecast, Measured, Option
from horovod_fftcomp.tools.advise.cost_model import Line, Message, speed
from horovod_fftcomp.tools.advise.doubts import Steps

# A bandwidth is reported if bytes make up this share of the largest message's time.
_TOO_FAST = 0.2
_REFUSED = "Nothing is recommended, since the measurements are not to be trusted"


class Findings(NamedTuple):
    """Measurements, forecasts and advice.

    ``node_size``: ranks of a node, 1 if no recipe has ``ranks_per_node``. ``times``: measured
    collectives; ``steps``: measured steps of the script by recipe. Both may be empty. ``load``:
    share of the cores that other processes used. ``doubts``: why nothing is to be recommended.
    ``start``: what starts ``horovod-fftcomp`` on ``ranks`` ranks.
    """

    measured: Sequence[Measured]
    ranks: int
    node_size: int
    forecasts: list[Forecast]
    advice: Advice
    times: Sequence[tuple[Message, float]]
    steps: Mapping[str, Steps]
    load: float
    start: str
    is_ddp: bool
    script: str | None
    doubts: Sequence[str] = ()


def print_report(found: Findings, nodes: Sequence[int] | None) -> None:
    """Print measurements, forecast and advice, or why nothing is recommended."""
    console = make_console()
    console.print(_table(found))
    for line in _facts(found):
        console.print(line)
    if found.doubts:
        console.print(f"\n{_REFUSED}.", style="bold")
        for doubt in found.doubts:
            console.print(f"{doubt[0].upper()}{doubt[1:]}.")
        return
    if nodes:
        console.print()
        console.print(_growth(found, nodes))
    console.print()
    console.print(f"{found.advice.why}.", style="bold")
    for line in [*_to_paste(found, console.width), *_to_measure(found, console.width)]:
        # A word that is too long for a line must not be broken in what is to be pasted.
        console.print(line, soft_wrap=line.startswith(" "))


def _table(found: Findings) -> Table:
    """Return the forecasts, or only what was measured if there are doubts."""
    nodes = f" in nodes of {found.node_size}" * (found.node_size > 1)
    title = (
        f"Forecast of a step on {found.ranks} ranks{nodes}; computing takes "
        f"{in_ms(found.forecasts[-1].time.compute_s)} ms of it"
    )
    none = found.forecasts[0]
    if found.doubts:
        title = "Measured"
    forecast_of = (
        "step\nms", "speed-up\n(range)", "encode\nms", "exchange\nms", "exposed\nms",
    )  # fmt: skip
    measures = ("decode\nms", "MB\nsent", "ratio", "rel.\nerror", "loss")
    table = Table("compression", (*forecast_of * (not found.doubts), *measures), title)
    for forecast in found.forecasts:
        option, time, error = forecast
        low, gain, high = forecast.speed_up(none)
        cells = (
            f"{in_ms(time.total_s)} ±{100 * error:.0f} %",
            "1.00" if forecast is none else f"{gain:.2f} ({low:.2f}-{high:.2f})",
            in_ms(time.encode_s),
            in_ms(time.exchange_s),
            in_ms(time.exposed_s),
        )
        table.add_row(
            option.label,
            *cells * (not found.doubts),
            in_ms(time.decode_s),
            f"{option.sent_nbytes / 1e6:.3f}",
            f"{none.option.sent_nbytes / option.sent_nbytes:.1f}",
            f"{option.relative_error:.2g}",
            _loss(forecast, none),
        )
    return table


def _loss(forecast: Forecast, none: Forecast) -> str:
    """Return the change of the committed loss in words."""
    loss = forecast.option.loss
    if forecast is none:
        return ""
    return "not measured" if loss is None else f"{100 * loss:+.1f} %"


def _facts(found: Findings) -> Iterator[str]:
    network, steps = found.measured[0].network, found.steps
    how = "measured" if found.times else "given"
    lines = [("allgather", network.gather, "gathering")]
    if network.reduce != network.gather:
        lines.insert(0, ("allreduce", network.reduce, "summing"))
    if network.inside and found.node_size > 1:
        lines.append(("inside", network.inside, "inside a node"))
    for collective, line, what in lines:
        speed = _speed(found, collective, line)
        yield f"Network, {how}, {what}: {speed}, latency {1e6 * line.alpha_s:.0f} us a message."
    if steps:
        yield (
            f"The script's step without compression took {steps['none']} here, and almost without "
            f"exchange {steps['random_block']}."
        )
    yield f"Other processes used {100 * found.load:.0f} % of the cores."
    compute = found.measured[0].compute
    if not compute.spare_core:
        who = f"{compute.sharing:.2g} ranks share a core"
        who = who if compute.sharing > 1 else "Each rank has one core"
        yield f"{who}: encoding does not overlap with the backward pass."
    if any(forecast.option.loss is not None for forecast in found.forecasts):
        yield "Loss: of small language models, over training without compression (docs/advise.md)."


def _speed(found: Findings, collective: str, line: Line) -> str:
    """Return the bandwidth in words: of the largest message, if measured; see ``_TOO_FAST``."""
    kind = collective, "float32"
    same = [(m.nbytes, time_s) for m, time_s in found.times if m[::2] == kind]
    if not same or collective == "inside":
        return f"{8e-9 / line.beta_s:.3g} Gbit/s" if line.beta_s else "too fast to measure"
    nbytes, time_s = max(same)
    if received(collective, nbytes, found.ranks) * line.beta_s < _TOO_FAST * time_s:
        return f"too fast to measure with {nbytes / 1e6:.3g} MB"
    return speed(collective, nbytes, found.ranks, time_s)


def _growth(found: Findings, nodes: Sequence[int]) -> Table:
    title = f"Step (ms) by number of ranks, ±{100 * max(f.error for f in found.forecasts):.0f} %"
    table = Table("compression", map(str, nodes), title)
    for option, steps in growth(found, nodes):
        table.add_row(option.label, *(f"{1e3 * step_s:.0f}" for step_s in steps))
    return table


def growth(found: Findings, ranks: Sequence[int]) -> list[tuple[Option, list[float]]]:
    """Return (option, step time in seconds on each number of ranks) for each option."""
    columns = [[f.time.total_s for f in advice.mean_forecasts(found.measured, p)] for p in ranks]
    rows = zip(*columns, strict=True)
    return [(f.option, list(row)) for f, row in zip(found.forecasts, rows, strict=True)]


def _to_paste(found: Findings, width: int) -> Iterator[str]:
    best = found.advice.best
    if best is None:
        return
    option = best.option
    arguments = "".join(f", {name}={value!r}" for name, value in option.options.items())
    line = f"compression=Compression.{option.recipe}(model{arguments})"
    if found.is_ddp:
        line = f'compress(ddp, "{option.recipe}"{arguments})'
    yield to_paste(line, width)
    if not found.is_ddp and option.options.get("ranks_per_node", 1) > 1:
        yield "with HOROVOD_DYNAMIC_PROCESS_SETS=1 in the environment of all ranks;"
    yield "or, without editing the script:"
    command = f"{found.start} run --compression {_setting(option)} {found.script or 'train.py'}"
    yield to_paste(command, width)
    yield "Compare the training loss with that of none first: rel. error is that of one step."


def _to_measure(found: Findings, width: int) -> Iterator[str]:
    if found.advice.unclear is not None:
        command = f"horovod-fftcomp run --compare none,{_setting(found.advice.unclear.option)}"
        yield "Measure it:"
        yield to_paste(f"{command} -np {found.ranks} {found.script or 'train.py'}", width)


def _setting(option: Option) -> str:
    return shlex.quote(RecipeChoice(option.label, option.recipe, option.options).text)


def as_json(found: Findings, nodes: Sequence[int] | None) -> dict[str, Any]:
    """Return every number as JSON values."""
    measured, best = found.measured[0], None if found.doubts else found.advice.best
    network = measured.network
    content: dict[str, Any] = {
        "valid": not found.doubts,
        "doubts": list(found.doubts),
        "ranks": found.ranks,
        "load": found.load,
        "compute_s": measured.compute.total_s,
        "spare_core": measured.compute.spare_core,
        "network": {
            name: {"alpha_s": line.alpha_s, "beta_s": line.beta_s}
            for name in ("reduce", "gather", "inside")
            if (line := getattr(network, name)) and (name != "inside" or found.node_size > 1)
        },
        "overhead_s": network.overhead_s,
        "probe": [[*message, seconds] for message, seconds in found.times],
        "measured_step_s": {name: steps.step_s for name, steps in found.steps.items()},
        "recipes": [_row(forecast, found.forecasts[0]) for forecast in found.forecasts],
        "advice": {
            "recipe": best.option.label if best else None,
            "why": "; ".join(found.doubts) or found.advice.why,
        },
    }
    if nodes:
        steps = {option.label: row for option, row in growth(found, nodes)}
        content["nodes"] = {"ranks": nodes, "step_s": steps}
    return content


def _row(forecast: Forecast, none: Forecast) -> dict[str, Any]:
    option, time, error = forecast
    return {
        "recipe": option.recipe,
        "options": dict(option.options),
        "sent_nbytes": option.sent_nbytes,
        "relative_error": option.relative_error,
        "loss": option.loss,
        "forecast_error": error,
        "speed_up": dict(zip(("low", "expected", "high"), forecast.speed_up(none), strict=True)),
        **time._asdict(),
    }
