"""What the kernels of a GPU cost: against a copy of memory, and against PyTorch's own functions.

    python benchmarks/gpu.py          # minutes; needs an NVIDIA GPU, PyTorch and CuPy, no Horovod

Writes results/gpu.json and results/gpu.png; README.md tells how to read them.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from rich.progress import track

import horovod_fftcomp
from horovod_fftcomp import get_codec
from horovod_fftcomp.backends.gpu.decoder import Decoder
from horovod_fftcomp.backends.gpu.encoder import Encoder
from horovod_fftcomp.backends.gpu.tables import DeviceCodec
from horovod_fftcomp.backends.gpu.torch_device import TorchDevice

RESULTS = Path(__file__).resolve().parent / "results"
RANKS = 8  # of which a sum is decoded
BLOCK = 256
# What a contract moves at least: gradient and residual in, coefficients out and in again; of
# efsignsgd gradient and residual in twice, first for the scale; of qsgd, which keeps none, once.
TRAFFIC = {"topk": 16.2, "fft": 19.0, "dct": 19.0, "efsignsgd": 20.1, "qsgd": 4.5}  # bytes each
CODECS = {
    "topk": ("topk", {"density": 0.01}),
    "fft": ("fft", {"density": 0.15, "block": BLOCK}),
    "dct": ("dct", {"density": 0.15, "block": BLOCK}),
    "efsignsgd": ("efsignsgd", {}),
    "qsgd": ("qsgd", {}),
}
SIZES = (1_000_000, 5_000_000, 25_000_000, 100_000_000, 400_000_000)


def resnet50() -> list[int]:
    """Return the sizes of ResNet-50's 161 parameter tensors."""
    sizes, before = [64 * 3 * 49, 64, 64], 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for n_out, n_in, area in ((width, before, 1), (width, width, 9), (4 * width, width, 1)):
                sizes += [n_out * n_in * area, n_out, n_out]
            if block == 0:
                sizes += [4 * width * before, 4 * width, 4 * width]
            before = 4 * width
    return [*sizes, 1000 * 2048, 1000]


def transformer() -> list[int]:
    """Return the sizes of a 124 M transformer's tensors: 12 layers of width 768."""
    layer = [768, 768, 2304 * 768, 2304, 768 * 768, 768, 768, 768, 3072 * 768, 3072]
    layer += [768 * 3072, 768]
    return [50257 * 768, 1024 * 768, *(12 * layer), 768, 768]


class Row(NamedTuple):
    """One measurement: seconds of each method, medians; ``copied``: of a copy of the gradient."""

    tensors: str
    codec: str
    numel: int
    payload_nbytes: int
    copied: float
    encode: float
    decode_sum: float
    standard: float


def seconds_of(run: Callable[[], object], repeat: int) -> float:
    """Return the median time of ``run``, on the device's clock where there is one."""
    run()
    found = []
    for _ in range(repeat):
        if torch.cuda.is_available():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            run()
            found.append(time.perf_counter() - start)
    return statistics.median(found)


def standard_topk(
    grads: Sequence[torch.Tensor], residuals: Sequence[torch.Tensor], density: float
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return Top-k with error feedback as scripts write it: indices, and values in float16."""
    sent = []
    for grad, residual in zip(grads, residuals, strict=True):
        residual += grad
        k = max(1, round(density * residual.numel()))
        chosen = torch.topk(residual.abs(), k, sorted=False).indices
        values = residual[chosen]
        residual[chosen] = 0
        sent.append((chosen.int(), values.half()))
    return sent


def standard_fft(
    grads: Sequence[torch.Tensor], residuals: Sequence[torch.Tensor], density: float
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the same of spectra of blocks; ``residuals``: complex."""
    sent = []
    for grad, residual in zip(grads, residuals, strict=True):
        padded = torch.nn.functional.pad(grad, (0, -grad.numel() % BLOCK))
        residual += torch.fft.rfft(padded.view(-1, BLOCK)).view(-1)
        k = max(1, round(density * residual.numel()))
        chosen = torch.topk(residual.abs(), k, sorted=False).indices
        values = residual[chosen]
        residual[chosen] = 0
        sent.append((chosen.int(), torch.view_as_real(values).half()))
    return sent


def standard_signs(
    grads: Sequence[torch.Tensor], residuals: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the signs times the mean magnitude, with error feedback: scale, and bytes of signs."""
    sent = []
    for grad, residual in zip(grads, residuals, strict=True):
        residual += grad
        scale = residual.abs().mean()
        negative = residual < 0
        residual -= torch.where(negative, -scale, scale)
        sent.append((scale, negative))
    return sent


def standard_qsgd(grads: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return 7 levels of the largest magnitude in each 1024 elements: scales, and bytes."""
    sent = []
    for grad in grads:
        rows = torch.nn.functional.pad(grad, (0, -grad.numel() % 1024)).view(-1, 1024)
        scales = rows.abs().amax(1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
        sent.append((scales, (rows / scales * 7 + torch.rand_like(rows)).floor().to(torch.int8)))
    return sent


def measure(
    device: Any, place: str, tensors: str, sizes: Sequence[int], name: str, repeat: int
) -> Row:
    """Measure one codec on tensors of these sizes."""
    generator = torch.Generator(place).manual_seed(0)
    grads = [torch.randn(n, generator=generator, device=place) for n in sizes]
    recipe, options = CODECS[name]
    codecs = [get_codec(recipe, **options)] * len(sizes)
    nbytes = sum(codec.payload_nbytes(n) for codec, n in zip(codecs, sizes, strict=True))
    encode, decode = seconds_of_kernels(device, recipe, codecs, grads, repeat)
    standard = seconds_of_standard(grads, name, repeat)
    whole = torch.cat(grads)  # a device copies it at once, not in many small launches
    into = torch.empty_like(whole)
    copied = seconds_of(lambda: into.copy_(whole), repeat)
    return Row(tensors, name, sum(sizes), nbytes, copied, encode, decode, standard)


def seconds_of_kernels(
    device: Any, recipe: str, codecs: list[DeviceCodec], grads: Sequence[torch.Tensor], repeat: int
) -> tuple[float, float]:
    """Return the times of an encoding, and of a sum of ``RANKS`` payloads."""
    shapes = [(grad.numel(),) for grad in grads]
    encoder = Encoder(device, codecs, shapes)
    keeps = recipe != "qsgd"  # by default it has no error feedback
    residuals, coeffs = (
        [device.zeros(f[1], f[0]) if f and keeps else None for f in encoder.coeffs_formats]
        for _ in range(2)
    )
    message = encoder.encode(grads, residuals, coeffs).message
    encode = seconds_of(lambda: encoder.encode(grads, residuals, coeffs), repeat)
    decoder = Decoder(device, codecs, shapes, encoder, RANKS)
    gathered, sums = message.repeat(RANKS), [torch.empty_like(grad) for grad in grads]
    return encode, seconds_of(lambda: decoder.decode(gathered, sums), repeat)


def seconds_of_standard(grads: Sequence[torch.Tensor], name: str, repeat: int) -> float:
    """Return the time of what scripts do with PyTorch's functions; spectra for a DCT as well."""
    if name == "qsgd":
        return seconds_of(lambda: standard_qsgd(grads), repeat)
    kept = [torch.zeros_like(grad) for grad in grads]
    if name == "efsignsgd":
        return seconds_of(lambda: standard_signs(grads, kept), repeat)
    density = CODECS[name][1]["density"]
    if name == "topk":
        return seconds_of(lambda: standard_topk(grads, kept, density), repeat)
    bins = [-(-grad.numel() // BLOCK) * (BLOCK // 2 + 1) for grad in grads]
    spectra = [torch.zeros(n, dtype=torch.complex64, device=grads[0].device) for n in bins]
    return seconds_of(lambda: standard_fft(grads, spectra, density), repeat)


def described(row: Row) -> dict[str, Any]:
    """Return a row with what follows from it: shares of the copy's bandwidth, and speed-ups."""
    bandwidth = 8 * row.numel / row.copied
    floor = 4 * row.numel + RANKS * row.payload_nbytes
    return row._asdict() | {
        "copy_gb_s": bandwidth / 1e9,
        "encode_share_of_copy": TRAFFIC[row.codec] * row.numel / row.encode / bandwidth,
        "decode_share_of_copy": floor / row.decode_sum / bandwidth,
        "times_faster_than_standard": row.standard / row.encode,
    }


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot the shares of the copy's bandwidth, and speed-ups, against the number of elements."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    fields = ("encode_share_of_copy", "decode_share_of_copy", "times_faster_than_standard")
    for axes, field in zip(figure.subplots(1, 3), fields, strict=True):
        for name in CODECS:
            single = [r for r in rows if r["codec"] == name and r["tensors"] == "one tensor"]
            sizes = [row["numel"] for row in single]
            axes.plot(sizes, [row[field] for row in single], marker="o", label=name)
            for row in rows:
                if row["codec"] == name and row["tensors"] != "one tensor":
                    axes.annotate(f"{name}, {row['tensors']}", (row["numel"], row[field]), size=6)
                    axes.plot([row["numel"]], [row[field]], "x", color="gray")
        axes.set(xscale="log", xlabel="elements", title=field.replace("_", " "))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure all, then write JSON, a plot and a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--sizes", type=int, nargs="+", default=SIZES, help="elements of one tensor")
    add("--repeat", type=int, default=21, help="runs of which the median counts (default: 21)")
    add("--out", type=Path, default=RESULTS, help="folder of the results (default: results)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no GPU is available to PyTorch: nothing to measure")
    device, place = TorchDevice(torch.device("cuda", 0)), "cuda"
    lists = [("one tensor", [n]) for n in args.sizes]
    lists += [("161 tensors of ResNet-50", resnet50()), ("124 M transformer", transformer())]
    cases = [(title, sizes, name) for title, sizes in lists for name in CODECS]
    rows, skipped = [], []
    for title, sizes, name in track(cases, "measuring"):
        needed = 4 * sum(sizes) * 8
        if needed > torch.cuda.mem_get_info()[0]:
            skipped.append(f"{name} of {sum(sizes)} elements: less than {needed / 1e9:.0f} GB free")
            continue
        rows.append(described(measure(device, place, title, sizes, name, args.repeat)))
        torch.cuda.empty_cache()
    properties = torch.cuda.get_device_properties(0)
    found = {
        "command": " ".join(["python benchmarks/gpu.py", *sys.argv[1:]]),
        "date": date.today().isoformat(),
        "device": f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB",
        "versions": {
            "horovod_fftcomp": horovod_fftcomp.__version__,
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
            **{name: version(name) for name in ("torch", "numpy")},
        },
        "ranks_decoded": RANKS,
        "skipped": skipped,
        "rows": rows,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    plot(rows, args.out / "gpu.png")
    for row in rows:
        print(
            f"{row['tensors']:26} {row['codec']:9} {row['numel']:>11,}  "
            f"copy {row['copy_gb_s']:6.0f} GB/s  encode {row['encode_share_of_copy']:5.2f}  "
            f"decode {row['decode_share_of_copy']:5.2f} of it  "
            f"{row['times_faster_than_standard']:5.1f} times faster than standard"
        )
    print(*skipped, sep="\n")


if __name__ == "__main__":
    main()
