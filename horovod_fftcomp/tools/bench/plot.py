"""The figure of a bench: what each compressor costs, its ratio and its error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from horovod_fftcomp.tools.bench.measurement import Measurement

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SMALLEST_ERROR = 1e-7  # of float32 rounding; a logarithmic axis has no 0


def write(path: Path, measurements: Sequence[Measurement], title: str) -> None:
    """Write the figure of ``measurements`` of the same tensors to ``path`` (.png, .svg, .pdf)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 1.8 + 0.5 * max(len(measurements), 5)), layout="constrained")
    figure.suptitle(title)
    costs, ratios, errors = figure.subplots(1, 3, sharey=True, width_ratios=[3, 2, 2])
    _draw_costs(costs, measurements)
    labels = [one.label for one in measurements]
    _draw_dots(ratios, labels, [one.ratio for one in measurements], ".3g")
    ratios.set_xlabel("ratio: float32 bytes / bytes as sent")
    _draw_dots(errors, labels, [one.relative_error for one in measurements], ".2g")
    errors.set_xlabel("relative error of a gradient,\nwithout error feedback")
    figure.savefig(path, dpi=130)


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
    for row, total in enumerate(draw_parts(axes, labels, widths)):
        axes.annotate(f" {total:.1f}", (total, row), va="center")
    axes.margins(x=0.14, y=0.02)
    axes.set_xlabel("cost in memcpys of the gradient (1 = one copy)")


def draw_parts(
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
