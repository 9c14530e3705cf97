"""What a Hadamard rotation before ``qsgd`` gains, on recorded gradients of real models.

    python benchmarks/record_gradients.py    # three minutes
    python benchmarks/rotation.py            # a minute

Writes results/rotation.json; README.md tells how to read it. Source of the rotation: Jia et al.,
NeurIPS 2024 (SDP4Bit).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
from datetime import date
from importlib.metadata import version
from pathlib import Path

import numpy as np
from rich.progress import track
from scipy.linalg import hadamard

import horovod_fftcomp
from horovod_fftcomp import get_codec

OUT = Path(__file__).resolve().parent / "results" / "rotation.json"
LEVELS, BUCKETS = (1, 3, 7), (64, 256, 1024)
LEAST, MOST = 16_384, 262_144  # elements of a tensor, of whose more the first ones are taken


def error_of(gradient: np.ndarray, levels: int, bucket: int, is_rotated: bool) -> float:
    """Return norm of the error over norm of a gradient, whose length is a multiple of ``bucket``.

    The rotation of each bucket: random signs, then the Hadamard matrix over sqrt(bucket).
    """
    codec = get_codec("qsgd", levels=levels, bucket=bucket)
    if is_rotated:
        signs = np.sign(np.random.default_rng(0).standard_normal(bucket))
        matrix = hadamard(bucket) / np.sqrt(bucket)
        gradient = ((gradient.reshape(-1, bucket) * signs) @ matrix).astype(np.float32).reshape(-1)
    error = gradient - codec.decode(codec.encode(gradient))  # a rotation keeps norms
    return float(np.linalg.norm(error) / np.linalg.norm(gradient))


def gradients_of(paths: list[Path]) -> list[np.ndarray]:
    """Return the gradients of the first step of each recording, of tensors that are not small."""
    found = []
    for path in paths:
        with np.load(path) as arrays:
            first = arrays.files[0].split("/", 1)[0]
            names = [key for key in arrays.files if key.startswith(f"{first}/")]
            flat = [arrays[key].reshape(-1)[:MOST] for key in names]
            found += [one[: one.size // 1024 * 1024] for one in flat if one.size >= LEAST]
    return found


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recordings", type=Path, default=Path("out"), help="folder of the .npz")
    gradients = gradients_of(sorted(parser.parse_args().recordings.glob("*.npz")))
    rows = []
    for levels, bucket in track(list(itertools.product(LEVELS, BUCKETS)), "rounding"):
        plain, rotated = (
            float(np.median([error_of(g, levels, bucket, turned) for g in gradients]))
            for turned in (False, True)
        )
        nbytes = get_codec("qsgd", levels=levels, bucket=bucket).payload_nbytes(1 << 20)
        rows.append([levels, bucket, round(nbytes / (1 << 17), 3), plain, rotated])
    content = {
        "command": "python benchmarks/rotation.py",
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}, {platform.system()}",
        "versions": {
            "horovod_fftcomp": horovod_fftcomp.__version__,
            **{name: version(name) for name in ("numpy", "scipy")},
        },
        "gradients": len(gradients),
        "columns": ["levels", "bucket", "bits for each element", "median error", "rotated"],
        "rows": rows,
    }
    OUT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {OUT}")


if __name__ == "__main__":
    main()
