"""The wire format does not drift: bytes written today equal the committed ones."""

from __future__ import annotations

import json

import numpy as np
import pytest

from horovod_fftcomp.codec.transforms import Identity
from horovod_fftcomp.kernels.cpu.bucket import BucketCodec
from horovod_fftcomp.tools.check import kernels
from horovod_fftcomp.wire.counter_rng import RngKey
from tests.backends import BACKENDS, given, load_backend
from tests.contracts import CODECS, make_codec, ranked
from tests.loops import each
from tests.make_golden import FOLDER, SHAPE, make
from tests.make_recipe import payloads


@each("backend", BACKENDS)
@each("key", CODECS)
def test_payloads_equal_the_golden_ones(key, backend):
    path = FOLDER / f"{key}.npz"
    assert path.exists(), f"there is no {path}; run: make recipe"
    with np.load(path) as golden:
        coeffs, payload, residual = golden["coeffs"], golden["payload"], golden["residual"]
    assert coeffs.tobytes() == make(key)["coeffs"].tobytes()
    own = load_backend(backend)
    whole = ranked(own, make_codec(key), coeffs)
    options = {"kernels": own, "rng_key": RngKey(5, "w", 3)}
    encoded = make_codec(key).encode_coeffs(whole, SHAPE, **options)
    assert encoded.payload.tobytes() == payload.tobytes()
    assert encoded.residual.tobytes() == residual.tobytes()
    decoded = make_codec(key).decode(payload, **given(backend))
    kept = make_codec(key).transform.inverse(coeffs - residual, decoded.size, own)
    np.testing.assert_allclose(decoded.ravel(), kept, rtol=1e-6, atol=1e-4)


@each("key", [key for key in CODECS if make_codec(key).has_fixed_size])
def test_buckets_write_the_golden_payloads(key):
    codec = make_codec(key)
    if codec.transform == Identity():  # else the file has coefficients
        with np.load(FOLDER / f"{key}.npz") as golden:
            coeffs, payload, residual = golden["coeffs"], golden["payload"], golden["residual"]
        table, rng_key = BucketCodec([codec], [SHAPE]), RngKey(5, "w", 3)
        message, number = np.zeros(table.message_nbytes, np.uint8), codec.key_at(rng_key)
        keys = np.array([number if codec.draws else 0], np.uint64)
        encoded = table.encode([coeffs], [None], message, keys)
        assert message[: payload.size].tobytes() == payload.tobytes()
        assert encoded.residuals[0].tobytes() == residual.tobytes()


def test_no_golden_file_is_left_over():
    left = {path.stem for path in FOLDER.glob("*.npz")} - set(CODECS)
    assert not left, "of no codec of tests/contracts.py; to remove them run: make recipe"


def test_the_payloads_that_check_expects_are_those_of_the_reference():
    expected, found = json.loads(kernels.PAYLOADS.read_text("utf-8")), json.loads(payloads())
    assert expected.keys() == found.keys(), "run: make recipe"
    for name, one in found.items():
        assert expected[name].pop("error") == pytest.approx(one.pop("error"), abs=1e-7), name
        assert expected[name] == one, f"{name}; run: make recipe"
