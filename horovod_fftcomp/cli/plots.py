"""Figures of ``bench`` and of ``advise``, written as .png, .svg or .pdf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from horovod_fftcomp.cli.advise_report import Findings, growth
from horovod_fftcomp.tools.bench import Measurement

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SMALLEST_ERROR = 1e-7  # of float32 rounding; a logarithmic axis has no 0


def write_bench(path: Path, measurements: Sequence[Measurement], title: str) -> None:
    """Write what each compressor costs, its ratio and its error on the same tensors to ``path``."""
    figure = _figure(max(len(measurements), 5), title)
    costs, ratios, errors = figure.subplots(1, 3, sharey=True, width_ratios=[3, 2, 2])
    _draw_costs(costs, measurements)
    labels = [one.label for one in measurements]
    _draw_dots(ratios, labels, [one.ratio for one in measurements], ".3g")
    ratios.set_xlabel("ratio: float32 bytes / bytes as sent")
    _draw_dots(errors, labels, [one.relative_error for one in measurements], ".2g")
    errors.set_xlabel("relative error of a gradient,\nwithout error feedback")
    figure.savefig(path, dpi=130)


def write_advice(path: Path, found: Findings, ranks: Sequence[int]) -> None:
    """Write the parts of a step, and the step time on each number of ranks, to ``path``."""
    doubts = "not to be trusted" if found.doubts else ""
    title = f"Forecast: {doubts or found.advice.why}"
    figure = _figure(max(len(found.forecasts), 6), title, wrap=True)
    bars, lines = figure.subplots(1, 2)
    _draw_steps(bars, found)
    _draw_growth(lines, found, ranks)
    figure.savefig(path, dpi=130)


def _figure(n_rows: int, title: str, wrap: bool = False) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 1.8 + 0.5 * n_rows), layout="constrained")
    figure.suptitle(title, wrap=wrap)
    return figure


def _draw_costs(axes: Axes, measurements: Sequence[Measurement]) -> None:
    labels = [one.label for one in measurements]
    feedback_s = [max(0.0, (one.feedback_s or 0.0) - one.encode_s) for one in measurements]
    widths = {
        "encode": [one.encode_s / one.memcpy_s for one in measurements],
        "error feedback": [
            more_s / one.memcpy_s for more_s, one in zip(feedback_s, measurements, strict=True)
        ],
        "decode the sum of two": [one.decode_s / one.memcpy_s for one in measurements],
    }
    for row, total in enumerate(_draw_parts(axes, labels, widths)):
        axes.annotate(f" {total:.1f}", (total, row), va="center")
    axes.margins(x=0.14, y=0.02)
    axes.set_xlabel("cost in memcpys of the gradient (1 = one copy)")


def _draw_steps(axes: Axes, found: Findings) -> None:
    labels = [forecast.option.label for forecast in found.forecasts]
    times = [forecast.time for forecast in found.forecasts]
    widths = {
        "compute": [1e3 * time.compute_s for time in times],
        "encode": [1e3 * time.encode_s for time in times],
        "exposed exchange": [1e3 * time.exposed_s for time in times],
        "decode": [1e3 * time.decode_s for time in times],
    }
    ends = _draw_parts(axes, labels, widths)
    errors = [1e3 * forecast.error * forecast.time.total_s for forecast in found.forecasts]
    axes.errorbar(ends, labels, xerr=errors, fmt="none", ecolor="black", capsize=3)
    axes.set_xlabel(f"step time on {found.ranks} ranks (ms)")


def _draw_parts(
    axes: Axes, labels: Sequence[str], widths: Mapping[str, Sequence[float]]
) -> list[float]:
    """Draw a bar of coloured parts for each label, with a legend; return the lengths of the bars.

    ``widths``: for each part by name, its width in each bar.
    """
    left = [0.0] * len(labels)
    for what, part in widths.items():
        axes.barh(labels, part, left=left, label=what)
        left = [begin + width for begin, width in zip(left, part, strict=True)]
    axes.invert_yaxis()
    axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=len(widths), frameon=False)
    return left


def _draw_dots(axes: Axes, labels: Sequence[str], values: Sequence[float], form: str) -> None:
    shown = [max(value, _SMALLEST_ERROR) for value in values]
    axes.plot(shown, labels, "o", color="C3")
    for row, (at, value) in enumerate(zip(shown, values, strict=True)):
        axes.annotate(f"  {value:{form}}", (at, row), va="center")
    axes.set_xscale("log")
    axes.margins(x=0.3, y=0.02)
    axes.grid(alpha=0.3)


def _draw_growth(axes: Axes, found: Findings, ranks: Sequence[int]) -> None:
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
