"""Report of ``advise``: tables, text and JSON values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.text import Text

from horovod_fftcomp.cli.arguments import RecipeChoice
from horovod_fftcomp.cli.console import Table, in_ms, make_console, to_paste
from horovod_fftcomp.tools.advise import advice
from horovod_fftcomp.tools.advise.advice import Advice, Forecast, Option
from horovod_fftcomp.tools.advise.cost_model import Compute, Line, Message, Network, crossover

# Below this share of the measured step time, computation is not told apart from the exchange.
_TOO_LITTLE = 0.01
# A bandwidth is reported if bytes make up this share of the largest message's time.
_TOO_FAST = 0.2
_DISTURBED = (
    "The network alone was slower than in the script's steps, which leaves no time for "
    "computing: other work disturbed the measurement"
)


class Findings(NamedTuple):
    """Measurements, forecasts and advice.

    ``times``: measured collectives; ``step_s``: measured step times by recipe. Both may be empty.
    """

    compute: Compute
    network: Network
    ranks: int
    forecasts: list[Forecast]
    advice: Advice
    times: Sequence[tuple[Message, float]]
    step_s: Mapping[str, float]
    script: str | None


def invalid(found: Findings) -> str:
    """Return why the measurement is invalid; an empty string if it is valid."""
    if not found.step_s:
        return ""
    if found.compute.total_s < _TOO_LITTLE * min(found.step_s.values()):
        return _DISTURBED
    dense_s = found.forecasts[0].time.total_s
    if found.times and dense_s > (1 + advice.ACCURACY) * found.step_s["none"]:
        return _DISTURBED  # ``compute_of`` finds no step as short as the measured one
    return ""


def print_report(found: Findings, nodes: range | None) -> None:
    """Print measurements, forecast and advice, or why there is no forecast."""
    console = make_console()
    if why := invalid(found):
        console.print(Text("The measurement is invalid, so there is no forecast.", "bold"))
        for line in (f"{why}.", *_facts(found), "Measure again on idle machines."):
            console.print(Text(line))
        return
    console.print(_table(found))
    for line in _facts(found):
        console.print(Text(line))
    if nodes:
        console.print()
        console.print(_growth(found, nodes))
        for line in _crossovers(found):
            console.print(Text(line))
    console.print()
    console.print(Text(f"{found.advice.why}.", "bold"))
    for line in [*_to_paste(found, console.width), *_to_measure(found, console.width)]:
        # A word that is too long for a line must not be broken in what is to be pasted.
        console.print(Text(line), soft_wrap=line.startswith(" "))


def _table(found: Findings) -> Table:
    title = (
        f"Forecast of a step on {found.ranks} ranks; computing takes "
        f"{in_ms(found.compute.total_s)} ms of it"
    )
    columns = (
        "step\nms", "speed-up\n(range)", "encode\nms", "exchange\nms", "exposed\nms", "decode\nms",
        "free codec\nms", "MB\nsent", "ratio", "rel.\nerror",
    )  # fmt: skip
    table = Table("compression", columns, title)
    none = found.forecasts[0]
    for forecast in found.forecasts:
        option, time, ceiling_s, error = forecast
        low, gain, high = forecast.speed_up(none)
        table.add_row(
            option.label,
            f"{in_ms(time.total_s)} ±{100 * error:.0f} %",
            "1.00" if forecast is none else f"{gain:.2f} ({low:.2f}-{high:.2f})",
            in_ms(time.encode_s),
            in_ms(time.exchange_s),
            in_ms(time.exposed_s),
            in_ms(time.decode_s),
            in_ms(ceiling_s),
            f"{option.sent_nbytes / 1e6:.3f}",
            f"{none.option.sent_nbytes / option.sent_nbytes:.1f}",
            f"{option.relative_error:.2g}",
        )
    return table


def _facts(found: Findings) -> Iterator[str]:
    network = found.network
    how = "measured" if found.times else "given"
    lines = [("allgather", network.gather, "gathering")]
    if network.reduce != network.gather:
        lines.insert(0, ("allreduce", network.reduce, "summing"))
    for collective, line, what in lines:
        speed = _speed(found, collective, line)
        yield f"Network, {how}, {what}: {speed}, latency {1e6 * line.alpha_s:.0f} us a message."
    if "none" in found.step_s:
        yield f"The script's step without compression took {in_ms(found.step_s['none'])} ms here."
    if not found.compute.spare_core:
        yield "Each rank has one core: encoding does not overlap with the backward pass."


def _speed(found: Findings, collective: str, line: Line) -> str:
    """Return a link's bandwidth in words; see ``_TOO_FAST`` for a measured one."""
    p, kind = found.ranks, (collective, "float32")
    if same := [(m.nbytes, time_s) for m, time_s in found.times if m[::2] == kind]:
        nbytes, time_s = max(same)
        passed = nbytes * (p - 1) * (2 / p if collective == "allreduce" else 1)
        if passed * line.beta_s < _TOO_FAST * time_s:
            return f"too fast to measure with {nbytes / 1e6:.3g} MB"
    return f"{8e-9 / line.beta_s:.3g} Gbit/s"


def _growth(found: Findings, nodes: range) -> Table:
    ranks = list(advice.powers_of_two(nodes.start, nodes.stop - 1))
    title = f"Step (ms) by number of ranks, ±{100 * max(f.error for f in found.forecasts):.0f} %"
    table = Table("compression", map(str, ranks), title)
    for option, steps in growth(found, ranks):
        table.add_row(option.label, *(f"{1e3 * step_s:.0f}" for step_s in steps))
    return table


def growth(found: Findings, ranks: Sequence[int]) -> list[tuple[Option, list[float]]]:
    """Return (option, step time in seconds on each number of ranks) for each option."""
    options = [forecast.option for forecast in found.forecasts]
    columns = [
        [f.time.total_s for f in advice.forecasts(options, found.compute, found.network, p)]
        for p in ranks
    ]
    rows = zip(*columns, strict=True)
    return [(option, list(row)) for option, row in zip(options, rows, strict=True)]


def crossovers(found: Findings) -> dict[str, int | None]:
    """Return the number of ranks from which a dense allreduce is faster than each allgather."""
    dense = Message("allreduce", found.forecasts[0].option.sent_nbytes)
    return {
        option.label: crossover(found.network, Message("allgather", option.sent_nbytes), dense)
        for option in (forecast.option for forecast in found.forecasts)
        if option.kind == "allgather"
    }


def _crossovers(found: Findings) -> Iterator[str]:
    for label, ranks in crossovers(found).items():
        if ranks is None:
            yield f"{label}: its allgather is faster than a dense allreduce on any number of ranks."
        else:
            yield f"{label}: from {ranks} ranks on its allgather is slower than a dense allreduce."


def _to_paste(found: Findings, width: int) -> Iterator[str]:
    best = found.advice.best
    if best is None:
        return
    option = best.option
    arguments = "".join(f", {name}={value!r}" for name, value in option.options.items())
    yield to_paste(f"compression=Compression.{option.recipe}(model{arguments})", width)
    command = f"horovodrun -np {found.ranks} horovod-fftcomp run --compression {_setting(option)}"
    yield "or, without editing the script:"
    yield to_paste(f"{command} {found.script or 'train.py'}", width)
    yield "Compare the training loss with that of none first: rel. error is that of one step."


def _to_measure(found: Findings, width: int) -> Iterator[str]:
    if found.advice.unclear is not None:
        command = f"horovod-fftcomp run --compare none,{_setting(found.advice.unclear.option)}"
        yield "Measure it:"
        yield to_paste(f"{command} -np {found.ranks} {found.script or 'train.py'}", width)


def _setting(option: Option) -> str:
    return RecipeChoice(option.label, option.recipe, option.options).text


def as_json(found: Findings, nodes: range | None) -> dict[str, Any]:
    """Return every number as JSON values."""
    why = invalid(found)
    content: dict[str, Any] = {
        "valid": not why,
        "ranks": found.ranks,
        "compute_s": found.compute.total_s,
        "spare_core": found.compute.spare_core,
        "network": {
            name: {"alpha_s": line.alpha_s, "beta_s": line.beta_s}
            for name, line in (("reduce", found.network.reduce), ("gather", found.network.gather))
        },
        "overhead_s": found.network.overhead_s,
        "probe": [[*message, seconds] for message, seconds in found.times],
        "measured_step_s": dict(found.step_s),
    }
    if why:
        return content | {"advice": {"recipe": None, "why": f"invalid measurement: {why}"}}
    best = found.advice.best
    content |= {
        "recipes": [_row(forecast, found.forecasts[0]) for forecast in found.forecasts],
        "advice": {"recipe": best.option.label if best else None, "why": found.advice.why},
        "crossover_ranks": crossovers(found),
    }
    if nodes:
        ranks = list(advice.powers_of_two(nodes.start, nodes.stop - 1))
        steps = {option.label: row for option, row in growth(found, ranks)}
        content["nodes"] = {"ranks": ranks, "step_s": steps}
    return content


def _row(forecast: Forecast, none: Forecast) -> dict[str, Any]:
    option, time, ceiling_s, error = forecast
    return {
        "recipe": option.recipe,
        "options": dict(option.options),
        "sent_nbytes": option.sent_nbytes,
        "relative_error": option.relative_error,
        "ceiling_s": ceiling_s,
        "forecast_error": error,
        "speed_up": dict(zip(("low", "expected", "high"), forecast.speed_up(none), strict=True)),
        **time._asdict(),
    }
