"""Any bytes whatever: a PayloadError or a finite array of the right shape, and nothing else."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest

from horovod_fftcomp import PayloadError, wire
from tests.contracts import CODECS, make_codec, plan_of

SHAPES = [(), (5,), (40, 9), (3, 1, 171)]
PER_CODEC = 100_000 // len(CODECS)


def _mutated(good: np.ndarray, header_nbytes: int, rng: np.random.Generator) -> np.ndarray:
    """Return a copy with a few bytes changed, cut short, made longer, or all random."""
    payload = good.copy()
    kind = rng.integers(5)
    if kind == 0:  # anywhere
        payload[rng.integers(payload.size, size=rng.integers(1, 5))] = rng.integers(256)
    elif kind == 1:  # in the body alone, so that the header's checks pass
        at = rng.integers(header_nbytes, payload.size + 1, size=3)
        payload[at[at < payload.size]] ^= np.uint8(1 << rng.integers(8))
    elif kind == 2:  # a header that was forged together with its checksum
        payload[rng.integers(header_nbytes, size=rng.integers(1, 4))] = rng.integers(256)
        payload[5] = 0  # a payload that says that it is not finite decodes to NaN by right
        payload[44:48] = 0
        crc = zlib.crc32(payload[:header_nbytes].tobytes())
        payload[44:48] = np.frombuffer(struct.pack("<I", crc), np.uint8)
    elif kind == 3:
        payload = np.resize(payload, int(rng.integers(payload.size + 40)))
    else:
        payload[header_nbytes:] = rng.integers(0, 256, payload.size - header_nbytes)
    return payload


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # forged scales may overflow on the way
@pytest.mark.parametrize("key", CODECS)
def test_mutated_payloads_never_do_anything_else(key):
    codec, rng = make_codec(key), np.random.default_rng(len(key))
    goods = [codec.encode(rng.standard_normal(shape).astype(np.float32)) for shape in SHAPES]
    headers = [plan_of(codec, good).header_nbytes for good in goods]
    refused = 0
    for i in range(PER_CODEC):
        which = i % len(SHAPES)
        payload = _mutated(goods[which], headers[which], rng)
        try:
            decoded = codec.decode(payload)
        except PayloadError:
            refused += 1
            continue
        assert decoded.shape == wire.read_header(payload).shape
        assert np.isfinite(decoded.astype(np.float64)).all()
    assert 0 < refused < PER_CODEC


@pytest.mark.parametrize("key", CODECS)
def test_gathered_buffers_of_random_bytes_are_refused(key):
    rng = np.random.default_rng(1)
    for n in (1, 47, 48, 64, 500):
        with pytest.raises(PayloadError):
            list(wire.split_payloads(rng.integers(0, 256, n).astype(np.uint8)))
