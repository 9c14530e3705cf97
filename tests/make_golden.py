"""Golden payloads and specifications, which ``make recipe`` writes.

A change of them is a change of the wire format or of the saved state. A payload's file holds
coefficients (so that no FFT library matters), the payload and the residual.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from horovod_fftcomp.codec.dense import DenseCodec
from horovod_fftcomp.engine.policy import make_policy
from horovod_fftcomp.recipes import RECIPES, get_scheme
from horovod_fftcomp.schemes import Tensor
from horovod_fftcomp.wire.counter_rng import RngKey
from tests.backends import load_backend
from tests.contracts import CODECS, is_adaptive, make_codec, ranked

FOLDER = Path(__file__).parent / "golden"
SPECS = FOLDER / "specs.txt"
SHAPE = (9, 5, 13, 4)


def make(key: str) -> dict[str, np.ndarray]:
    """Return the golden arrays of one codec, by the reference backend."""
    codec, kernels = make_codec(key), load_backend("reference")
    if isinstance(codec, DenseCodec) or is_adaptive(codec):
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


def specifications() -> list[str]:
    """Return a line for the specification of each recipe, its state and each codec."""
    tensor, between_nodes = (
        Tensor("w", (8, 6)),
        make_policy("topk", ranks_per_node=2, scope="model"),
    )
    return [
        *(f"{name}: {get_scheme(name).spec()}" for name in RECIPES),
        *(f"state of {name}: {get_scheme(name).state_format(tensor)}" for name in RECIPES),
        f"between nodes: {between_nodes.after_warmup.spec()}",
        *(f"codec {key}: {make_codec(key).spec()}" for key in CODECS),
    ]
