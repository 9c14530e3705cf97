"""Figure of ``advise``: parts of a step, and step time by number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from horovod_fftcomp.cli.advise_report import Findings, growth
from horovod_fftcomp.tools.advise import advice
from horovod_fftcomp.tools.bench.plot import draw_parts

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def write(path: Path, found: Findings, nodes: range) -> None:
    """Write the figure to ``path`` (.png, .svg, .pdf)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 1.8 + 0.5 * max(len(found.forecasts), 6)), layout="constrained")
    doubts = "not to be trusted" if found.doubts else ""
    figure.suptitle(f"Forecast: {doubts or found.advice.why}", wrap=True)
    bars, lines = figure.subplots(1, 2)
    _draw_parts(bars, found)
    _draw_growth(lines, found, list(advice.powers_of_two(nodes.start, nodes.stop - 1)))
    figure.savefig(path, dpi=130)


def _draw_parts(axes: Axes, found: Findings) -> None:
    labels = [forecast.option.label for forecast in found.forecasts]
    times = [forecast.time for forecast in found.forecasts]
    widths = {
        "compute": [1e3 * time.compute_s for time in times],
        "encode": [1e3 * time.encode_s for time in times],
        "exposed exchange": [1e3 * time.exposed_s for time in times],
        "decode": [1e3 * time.decode_s for time in times],
    }
    ends = draw_parts(axes, labels, widths)
    errors = [1e3 * forecast.error * forecast.time.total_s for forecast in found.forecasts]
    axes.errorbar(ends, labels, xerr=errors, fmt="none", ecolor="black", capsize=3)
    axes.set_xlabel(f"step time on {found.ranks} ranks (ms)")


def _draw_growth(axes: Axes, found: Findings, ranks: list[int]) -> None:
    from matplotlib.ticker import LogLocator

    rows = growth(found, ranks)
    for option, steps in rows:
        style = "--" if option.kind == "allgather" else "-"
        axes.plot(ranks, [1e3 * step_s for step_s in steps], style, marker=".", label=option.label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, map(str, ranks))
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    are_gathered = {option.kind == "allgather" for option, _ in rows}
    title = "dashed: allgather" if len(are_gathered) > 1 else None
    axes.legend(title=title, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    axes.set_xlabel("ranks")
    axes.set_ylabel("step time (ms)")
