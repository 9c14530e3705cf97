"""The wire format does not drift: bytes written today equal the committed ones."""

from __future__ import annotations

import numpy as np

from horovod_fftcomp.codec.backend import BACKENDS, load_backend
from horovod_fftcomp.wire.counter_rng import RngKey
from tests.contracts import CODECS, make_codec, ranked
from tests.loops import each
from tests.make_golden import FOLDER, SHAPE, make


@each("backend", BACKENDS)
@each("key", CODECS)
def test_payloads_equal_the_golden_ones(key, backend):
    path = FOLDER / f"{key}.npz"
    assert path.exists(), f"there is no {path}; run: make recipe"
    with np.load(path) as golden:
        coeffs, payload, residual = golden["coeffs"], golden["payload"], golden["residual"]
    assert coeffs.tobytes() == make(key)["coeffs"].tobytes()
    kernels = load_backend(backend)
    whole = ranked(kernels, make_codec(key), coeffs)
    encoded = make_codec(key).encode_coeffs(
        whole, SHAPE, kernels=kernels, rng_key=RngKey(5, "w", 3)
    )
    assert encoded.payload.tobytes() == payload.tobytes()
    assert encoded.residual.tobytes() == residual.tobytes()
    decoded = make_codec(key).decode(payload, backend=backend)
    kept = make_codec(key).transform.inverse(coeffs - residual, decoded.size, kernels)
    np.testing.assert_allclose(decoded.ravel(), kept, rtol=1e-6, atol=1e-4)


def test_no_golden_file_is_left_over():
    left = {path.stem for path in FOLDER.glob("*.npz")} - set(CODECS)
    assert not left, "of no codec of tests/contracts.py; to remove them run: make recipe"
