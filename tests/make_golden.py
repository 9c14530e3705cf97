"""Write the golden payloads: ``make golden``. A change of them is a change of the wire format.

Each file holds coefficients (so that no FFT library matters), the payload and what it decodes to.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from horovod_fftcomp.codec.adaptive import AdaptiveCodec
from horovod_fftcomp.codec.backend import load_backend
from horovod_fftcomp.codec.dense import DenseCodec
from horovod_fftcomp.wire.counter_rng import RngKey
from tests.contracts import CODECS, make_codec, ranked

FOLDER = Path(__file__).parent / "golden"
SHAPE = (9, 5, 13, 4)


def make(key: str) -> dict[str, np.ndarray]:
    """Return the golden arrays of one codec, by the reference backend."""
    codec, kernels = make_codec(key), load_backend("reference")
    if isinstance(codec, (DenseCodec, AdaptiveCodec)):
        coeffs = (np.arange(int(np.prod(SHAPE))) * 7919 % 613 - 306).astype(np.float32) / 8
        whole = ranked(kernels, codec, coeffs)
        encoded = codec.encode_coeffs(whole, SHAPE, kernels=kernels, rng_key=RngKey(5, "w", 3))
        return {"coeffs": coeffs, "payload": encoded.payload, "residual": encoded.residual}
    n_reals = codec.transform.n_bins(int(np.prod(SHAPE))) * codec.transform.reals_per_bin
    # Halves of small integers: exact in float32 whatever made them; many ties and both signs.
    coeffs = (np.arange(n_reals) * 7919 % 613 - 306).astype(np.float32) / 8
    if codec.transform.reals_per_bin == 2:
        coeffs = coeffs.view(np.complex64)
    encoded = codec.encode_coeffs(ranked(kernels, codec, coeffs), SHAPE, kernels=kernels)
    return {"coeffs": coeffs, "payload": encoded.payload, "residual": encoded.residual}


if __name__ == "__main__":
    for name in CODECS:
        np.savez_compressed(FOLDER / f"{name}.npz", **make(name))
        print(f"wrote {FOLDER / name}.npz")
