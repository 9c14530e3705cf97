"""Every recipe, every backend, every case of the table in ``contracts``."""

from __future__ import annotations

import numpy as np

from tests import contracts
from tests.backends import BACKENDS, given
from tests.loops import each


@each("case", contracts.CASES)
@each("key", contracts.CODECS)
def test_round_trip_keeps_shape_dtype_size_and_bound(key, case):
    for backend in BACKENDS:
        contracts.check_round_trip(contracts.make_codec(key), contracts.case_of(case), backend)


@each("case", contracts.CASES)
@each("key", contracts.CODECS)
def test_every_backend_writes_the_reference_bytes(key, case):
    contracts.check_same_bytes(contracts.make_codec(key), contracts.case_of(case))


@each("case", ["0-d", "empty", "two", "prime", "conv", "float64", "zeros"])
@each("key", contracts.CODECS)
def test_decode_sum_is_the_sum_of_decodes(key, case):
    x = contracts.case_of(case)
    others = [np.asarray(x * factor, x.dtype) for factor in (1.0, -0.5, 3.0)]
    for backend in BACKENDS:
        contracts.check_decode_sum(contracts.make_codec(key), others, backend)


@each("case", ["0-d", "seven", "prime", "conv", "zeros"])
@each("key", contracts.CODECS)
def test_damaged_payloads_are_rejected(key, case):
    contracts.check_rejects_damage(
        contracts.make_codec(key), contracts.case_of(case), seed=len(key)
    )


@each("bad", [np.nan, np.inf, -np.inf])
@each("key", contracts.CODECS)
@each("n", [1, 3000])
def test_non_finite_input_decodes_to_nan_everywhere(key, n, bad):
    codec = contracts.make_codec(key)
    good = np.linspace(-1, 1, n).astype(np.float32)
    broken = good.copy()
    broken[n // 2] = bad
    for backend in BACKENDS:
        payload = codec.encode(broken, **given(backend))
        if codec.has_fixed_size:
            assert payload.nbytes == codec.payload_nbytes(n)
        assert np.isnan(codec.decode(payload, **given(backend))).all()
        both = [codec.encode(good, **given(backend)), payload]
        assert np.isnan(codec.decode_sum(both, **given(backend))).all()


@each("key", contracts.CODECS)
def test_payloads_do_not_depend_on_memory_layout(key):
    codec = contracts.make_codec(key)
    x = contracts.CASES["channels-last"]()
    assert not x.flags.c_contiguous
    assert codec.encode(x).tobytes() == codec.encode(np.ascontiguousarray(x)).tobytes()


@each("key", contracts.CODECS)
def test_payloads_may_lie_anywhere_in_memory(key):
    codec = contracts.make_codec(key)
    payload = codec.encode(contracts.CASES["prime"]())
    shifted = np.zeros(payload.nbytes + 3, np.uint8)[3:]
    shifted[:] = payload
    assert codec.decode(shifted).tobytes() == codec.decode(payload).tobytes()


@each("key", contracts.CODECS)
def test_nothing_grows_beyond_float32_and_a_header(key):
    codec = contracts.make_codec(key)
    for n in [*range(0, 70), 255, 256, 1000, 1023, 1024, 4097, 50_000]:
        for shape in ((n,), (n, 1)):
            for k in (None,) if codec.has_fixed_size else {0, min(n, 1), n // 50, n // 2, n}:
                assert codec.plan(shape, k).payload_nbytes <= 4 * n + 64, (shape, k)
