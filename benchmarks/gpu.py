"""What the kernels of a GPU cost: against a copy of memory, and against PyTorch's own functions.

    python benchmarks/gpu.py          # minutes; needs an NVIDIA GPU, PyTorch and CuPy, no Horovod

Writes results/gpu.json and results/gpu.png; README.md tells how to read them. What a profiler
counts of each kernel: gpu_profile.py.
"""

from __future__ import annotations

import argparse
import json
import math
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # of a clone that is not installed

import horovod_fftcomp
from horovod_fftcomp import RECIPES, get_codec, get_scheme
from horovod_fftcomp.engine.buckets import Bucket
from horovod_fftcomp.engine.drive import drive, exchange_of
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.policy import make_policy
from horovod_fftcomp.kernels.cuda.decoder import Decoder
from horovod_fftcomp.kernels.cuda.encoder import Encoder
from horovod_fftcomp.kernels.cuda.torch_device import TorchDevice
from horovod_fftcomp.schemes import Round, Tensor

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
THRESHOLD = {"threshold": 2.5}  # about 1 % of what is drawn here
STEP_OPTIONS = {"hard_threshold": THRESHOLD, "strom": THRESHOLD}
BUSY_CYCLES = 2_000_000  # about a millisecond
WARM_UP = 3  # steps that are not counted: they compile, and begin residuals
STEPS_NUMEL = 25_000_000  # of the one tensor whose steps are measured
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
    """Return the median time of ``run``, on the device's clock where there is one.

    The device is busy when ``run`` begins, as in a training, so that it does not wait for launches.
    """
    run()
    found = []
    for _ in range(repeat):
        if torch.cuda.is_available():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(BUSY_CYCLES)
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


def random_grads(sizes: Sequence[int], place: str) -> list[torch.Tensor]:
    """Return standard normal tensors of these sizes."""
    generator = torch.Generator(place).manual_seed(0)
    return [torch.randn(n, generator=generator, device=place) for n in sizes]


def seconds_of_copy(grads: Sequence[torch.Tensor], repeat: int) -> float:
    """Return the time of a copy of as many elements, at once, not in many small launches."""
    whole = torch.cat(list(grads))
    into = torch.empty_like(whole)
    return seconds_of(lambda: into.copy_(whole), repeat)


def measure(
    device: Any, place: str, tensors: str, sizes: Sequence[int], name: str, repeat: int
) -> Row:
    """Measure one codec on tensors of these sizes."""
    grads = random_grads(sizes, place)
    encode, decode, nbytes = calls_of(device, name, grads)
    seconds = [seconds_of(call, repeat) for call in (encode, decode)]
    standard = seconds_of_standard(grads, name, repeat)
    copied = seconds_of_copy(grads, repeat)
    return Row(tensors, name, sum(sizes), nbytes, copied, *seconds, standard)


def calls_of(
    device: Any, name: str, grads: Sequence[torch.Tensor]
) -> tuple[Callable[[], object], Callable[[], object], int]:
    """Return what encodes, what sums ``RANKS`` payloads, and how long a message is."""
    recipe, options = CODECS[name]
    codecs = [get_codec(recipe, **options)] * len(grads)
    shapes = [(grad.numel(),) for grad in grads]
    encoder = Encoder(device, codecs, shapes)
    keeps = recipe != "qsgd"  # by default it has no error feedback
    residuals, coeffs = (
        [device.zeros(f[1], f[0]) if f and keeps else None for f in encoder.coeffs_formats]
        for _ in range(2)
    )
    message = encoder.encode(grads, residuals, coeffs).message
    decoder = Decoder(device, codecs, shapes, encoder, RANKS)
    gathered, sums = message.repeat(RANKS), [torch.empty_like(grad) for grad in grads]
    nbytes = sum(codec.payload_nbytes(shape) for codec, shape in zip(codecs, shapes, strict=True))
    return (
        lambda: encoder.encode(grads, residuals, coeffs),
        lambda: decoder.decode(gathered, sums),
        nbytes,
    )


class Answers:
    """What a network of ``RANKS`` ranks that all send the same would bring."""

    def __init__(self) -> None:
        self._sent: Any = None  # by this rank, when it was the one that broadcasts

    def to(self, round_: Round) -> Any:
        """Return the output of a round."""
        if round_.collective == "broadcast":
            if round_.root == 0:
                self._sent = round_.data
            return self._sent
        if round_.collective == "allreduce":
            return round_.data * RANKS
        return round_.data.repeat(RANKS)


def shape_of(numel: int) -> tuple[int, ...]:
    """Return a shape of so many elements: a matrix, of which low ranks are taken, or a vector."""
    rows = next(rows for rows in range(math.isqrt(numel), 0, -1) if numel % rows == 0)
    return (rows, numel // rows) if rows >= 16 else (numel,)


def step_of(
    device: Any, grads: Sequence[torch.Tensor], recipe: str
) -> tuple[Engine, Callable[[], None]]:
    """Return an engine, and what computes a step of one rank of ``RANKS`` by it; it is warm."""
    answers = Answers()
    policy = make_policy(recipe, warmup_steps=0, **STEP_OPTIONS.get(recipe, {}))
    tensors = tuple(Tensor(str(i), shape_of(grad.numel())) for i, grad in enumerate(grads))
    engine = Engine([Bucket(tensors, policy)], 0, RANKS, device)

    def step() -> None:
        drive(exchange_of(engine, 0, grads), answers.to)
        engine.settle()

    for _ in range(WARM_UP):
        step()
    return engine, step


def measure_step(
    device: Any, place: str, tensors: str, sizes: Sequence[int], recipe: str, repeat: int
) -> dict[str, Any]:
    """Measure all that one rank computes in a step of one bucket, by a recipe with kernels."""
    grads = random_grads(sizes, place)
    engine, step = step_of(device, grads, recipe)
    sent = engine.costs.sent_nbytes
    taken = seconds_of(step, repeat)
    sent = (engine.costs.sent_nbytes - sent) // (repeat + 1)
    copied = seconds_of_copy(grads, repeat)
    found = {"tensors": tensors, "recipe": recipe, "numel": sum(sizes), "sent_nbytes": sent}
    return found | {"copied": copied, "step": taken, "copies": taken / copied}


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


def measured(
    device: Any, place: str, lists: Sequence[tuple[str, list[int]]], repeat: int
) -> dict[str, list[Any]]:
    """Return the rows of codecs on all lists of tensors, of steps on some, and what was skipped."""
    rows, steps, skipped = [], [], []
    cases: list[tuple[str, list[int], str, bool]] = [
        (title, sizes, name, True) for title, sizes in lists for name in CODECS
    ]
    # What auto's trials cost, on the host, is benchmarks/auto_choice.py's.
    names = [name for name in RECIPES if name not in ("none", "auto")]
    one = (Tensor("w", (64, 64)),)
    recipes = [name for name in names if get_scheme(name).runs_on_device(one)]
    of_steps = [(t, n) for t, n in lists if t != "one tensor" or sum(n) == STEPS_NUMEL]
    cases += [(title, sizes, name, False) for title, sizes in of_steps for name in recipes]
    for title, sizes, name, is_codec in track(cases, "measuring"):
        needed = 4 * sum(sizes) * 8
        if place == "cuda" and needed > torch.cuda.mem_get_info()[0]:
            skipped.append(f"{name} of {sum(sizes)} elements: less than {needed / 1e9:.0f} GB free")
        elif is_codec:
            rows.append(described(measure(device, place, title, sizes, name, repeat)))
        else:
            steps.append(measure_step(device, place, title, sizes, name, repeat))
        torch.cuda.empty_cache()
    return {"rows": rows, "steps": steps, "skipped": skipped}


def described_machine() -> dict[str, Any]:
    """Return what the results stand for: date, GPU, versions."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": date.today().isoformat(),
        "device": f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB",
        "versions": {
            "horovod_fftcomp": horovod_fftcomp.__version__,
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
            **{name: version(name) for name in ("torch", "numpy")},
        },
        "ranks_decoded": RANKS,
    }


def report(found: dict[str, Any]) -> None:
    """Print the tables."""
    for row in found["rows"]:
        print(
            f"{row['tensors']:26} {row['codec']:9} {row['numel']:>11,}  "
            f"copy {row['copy_gb_s']:6.0f} GB/s  encode {row['encode_share_of_copy']:5.2f}  "
            f"decode {row['decode_share_of_copy']:5.2f} of it  "
            f"{row['times_faster_than_standard']:5.1f} times faster than standard"
        )
    for row in found["steps"]:
        print(
            f"{row['tensors']:26} {row['recipe']:14} {row['numel']:>11,}  step "
            f"{1e3 * row['step']:8.3f} ms = {row['copies']:6.1f} copies of the gradient  "
            f"{row['sent_nbytes']:>11,} bytes sent"
        )
    print(*found["skipped"], sep="\n")


def main() -> None:
    """Measure all, then write JSON, a plot and tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--sizes", type=int, nargs="+", default=SIZES, help="elements of one tensor")
    add("--repeat", type=int, default=21, help="runs of which the median counts (default: 21)")
    add("--out", type=Path, default=RESULTS, help="folder of the results (default: results)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no GPU is available to PyTorch: nothing to measure")
    lists = [("one tensor", [n]) for n in args.sizes]
    lists += [("161 tensors of ResNet-50", resnet50()), ("124 M transformer", transformer())]
    device = TorchDevice(torch.device("cuda", 0))
    found = described_machine() | measured(device, "cuda", lists, args.repeat)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    plot(found["rows"], args.out / "gpu.png")
    report(found)


if __name__ == "__main__":
    main()
