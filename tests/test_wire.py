"""The bytes themselves: header, sizes, bit order, positions; what is refused and why."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_fftcomp import PayloadError, get_codec, wire
from horovod_fftcomp.codec.quantizers import Float32, RangeFloat, float_of
from horovod_fftcomp.types import Body
from horovod_fftcomp.wire.positions import Layout
from tests.backends import BACKENDS, load_backend
from tests.loops import each

bitmap_of = load_backend("reference").bitmap_of


def test_fnv1a_vectors():
    assert wire.fnv1a("a") == 0xAF63DC4C8601EC8C
    assert wire.fnv1a("layer1.weight") == 0x08A959477E9B90A5


@pytest.mark.parametrize("backend", BACKENDS)
def test_bit_order(backend):
    kernels = load_backend(backend)
    assert kernels.pack_bitmap(bitmap_of([0, 3, 9], 17), 17).tobytes().hex() == "090200"
    # 5 and 6 lie in block 1, 17 in block 4: counts 0 2 0 0 1 in unary, ones first, 0 ends a block.
    packed = kernels.pack_offsets(bitmap_of([5, 6, 17], 20), 20, 3, 2)
    assert packed.tolist() == [0b01000110, (1) | (2 << 2) | (1 << 4)]
    reference = load_backend("reference")
    codes = np.array([1, 2, 3], np.uint32)
    assert reference.pack_bits(codes, 3).tobytes() == bytes([0b11010001, 0b0])


@each("bits", [*range(2, 17), 32])
def test_backends_pack_any_width_alike(bits):
    """From values to bits and back, of reals and of complex numbers."""
    x = np.random.default_rng(bits).standard_normal(2002).astype(np.float32)
    quantizer = Float32() if bits == 32 else RangeFloat(bits)
    for values in (x, x.view(np.complex64)):
        made, totals = [], []
        for name in BACKENDS:
            coeffs = load_backend(name).topk_threshold(values.copy(), 600, 1)
            scale, is_complex = float_of(coeffs.peak), values is not x
            coding = quantizer.coding(scale)
            if bits < 32:
                grid = quantizer.grid(coeffs.key, coeffs.peak, is_complex)
                coding = quantizer.coding(scale, grid)
            part = Body(*load_backend(name).select_quantize_pack(coeffs, 1, coding, True), coding)
            made.append(part.bitmap.tobytes() + part.packed.tobytes() + coeffs.array.tobytes())
            for backend in BACKENDS:
                sums = load_backend(backend).sum_values([part], np.empty_like(values))
                totals.append(sums.tobytes())
                np.testing.assert_allclose(sums + coeffs.array, values, rtol=1e-6, atol=1e-7)
        assert made[0] == made[1]
        assert len(set(totals)) == 1


@given(st.sets(st.integers(0, 999), max_size=1000), st.integers(1, 16))
def test_positions_survive_every_layout(chosen, low_bits):
    k, n = len(chosen), 1000
    bitmap = bitmap_of(sorted(chosen), n)
    packed = {}
    for name in BACKENDS:
        kernels = load_backend(name)
        layouts = [
            (kernels.pack_bitmap(bitmap, n), kernels.unpack_bitmap, ()),
            (kernels.pack_offsets(bitmap, n, k, low_bits), kernels.unpack_offsets, (low_bits,)),
        ]
        for sent, unpack, options in layouts:
            assert unpack(sent.copy(), n, k, *options).tolist() == bitmap.tolist()
        packed[name] = b"".join(sent.tobytes() for sent, _, _ in layouts)
    assert packed["reference"] == packed["cpu"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_positions_that_cannot_be_are_refused(backend):
    kernels = load_backend(backend)
    with pytest.raises(ValueError, match="not have 2 bits set below 8"):
        kernels.unpack_bitmap(np.array([0b111], np.uint8), 8, 2)
    with pytest.raises(ValueError, match="not have 1 bits set below 5"):
        kernels.unpack_bitmap(np.array([0b100000], np.uint8), 5, 1)  # beyond n
    falling = kernels.pack_offsets(bitmap_of([1, 2], 16), 16, 2, 4)
    falling[-1] = 1 << 4 | 2  # offsets 2, 1 in one block
    with pytest.raises(ValueError, match="ascend"):
        kernels.unpack_offsets(falling, 16, 2, 4)
    beyond = kernels.pack_offsets(bitmap_of([12], 13), 13, 1, 4)
    beyond[-1] = 13
    with pytest.raises(ValueError, match="ascend"):
        kernels.unpack_offsets(beyond, 13, 1, 4)


@pytest.mark.parametrize(
    ("n", "k", "layout"),
    [(1000, 1000, Layout.ALL), (1000, 400, Layout.BITMAP), (1000, 15, Layout.OFFSETS),
     (10**5, 15_000, Layout.OFFSETS), (10**6, 10, Layout.OFFSETS), (0, 0, Layout.ALL)],
)  # fmt: skip
def test_the_cheapest_layout_is_chosen(n, k, layout):
    assert wire.make_plan((4 * n + 1,), n, k, 8).layout == layout


@each("n", [1_000_000, 25_000_000])
@each("density", np.geomspace(0.001, 0.25, 40).tolist())
def test_positions_stay_close_to_their_entropy(density, n):
    plan = get_codec("topk", density=density).plan((n,))
    bits = -(density * np.log2(density) + (1 - density) * np.log2(1 - density)) * n
    assert plan.positions.nbytes * 8 <= (1.12 if density < 0.1 else 1.24) * bits


@pytest.mark.parametrize(
    ("recipe", "options", "ratio"),
    [("fft", {"density": 0.15, "bits": 10}, 15.5), ("dct", {"density": 0.15, "bits": 10}, 14.0),
     ("topk", {"density": 0.01, "bits": 32}, 75), ("topk", {"density": 0.01, "bits": 8}, 180),
     ("bf16", {}, 1.99)],
)  # fmt: skip
def test_ratio_on_the_wire_of_a_million_elements(recipe, options, ratio):
    codec = get_codec(recipe, **options)
    x = np.random.default_rng(0).standard_normal(1_000_000).astype(np.float32)
    assert 4 * x.size / codec.encode(x).nbytes >= ratio


def test_header_carries_any_shape():
    codec = get_codec("topk", density=0.5)
    for shape in [(), (0,), (1, 1, 1), (127, 2), (128, 2), (3, 0, 5), (1,) * 64, (2, 70000)]:
        x = np.ones(shape, np.float32)
        header = wire.read_header(codec.encode(x))
        assert header.shape == shape
        assert header.payload_nbytes == codec.payload_nbytes(shape)
    with pytest.raises(ValueError, match="at most 64"):
        wire.make_plan((1,) * 65, 1, 1, 32)


def _damaged(offset: int, value: bytes) -> np.ndarray:
    """Return a payload with other header bytes and a checksum that fits them."""
    import struct
    import zlib

    payload = get_codec("topk", density=0.5).encode(np.ones((40, 50), np.float32))
    header = bytearray(payload[:48].tobytes())
    header[offset : offset + len(value)] = value
    header[40:44] = bytes(4)
    struct.pack_into("<I", header, 40, zlib.crc32(header))
    payload[: len(header)] = np.frombuffer(header, np.uint8)
    return payload


@pytest.mark.parametrize(
    ("offset", "value", "field"),
    [(0, b"XYZ", "magic"), (3, b"\x02", "version"), (4, b"\x09", "dtype"), (5, b"\x80", "flags"),
     (6, b"\x03", "k"), (7, b"\x09", "layout"), (7, b"\x01", "layout"),
     (8, b"\x00" * 8, "fingerprint"), (16, b"\xff" * 8, "k"),
     (16, b"\x01", "k"), (24, b"\xff" * 8, "payload length"), (24, b"\x01\x00", "payload length"),
     (32, b"\x00\x00\xc0\x7f", "scale"), (32, b"\x00\x00\x80\xbf", "scale"),
     (6, b"\x41", "ndim"), (44, b"\x29", "k"), (44, b"\xff" * 16, "shape")],
)  # fmt: skip
def test_each_field_of_the_header_is_checked(offset, value, field):
    with pytest.raises(PayloadError, match=rf"header field '{field}'"):
        get_codec("topk", density=0.5).decode(_damaged(offset, value))


def test_the_checksum_guards_the_header():
    payload = get_codec("topk").encode(np.ones(3000, np.float32))
    payload[32] ^= 1
    with pytest.raises(PayloadError, match="checksum"):
        get_codec("topk").decode(payload)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 3e38])
def test_codes_beyond_a_false_scale_are_refused_or_finite(scale):
    codec = get_codec("topk", density=0.5, bits=8)
    payload = codec.encode(np.random.default_rng(0).standard_normal(4000).astype(np.float32))
    plan = codec.plan((4000,))
    wire.write_header(payload, plan, codec.fingerprint, "float32", scale, True)
    if scale == 0.0:
        with pytest.raises(PayloadError, match="body"):
            codec.decode(payload)
    else:
        assert np.isfinite(codec.decode(payload)).all()


def test_other_options_make_other_fingerprints():
    x = np.ones(5000, np.float32)
    payload = get_codec("fft", density=0.15).encode(x)
    with pytest.raises(PayloadError, match=r"'fingerprint'.*same recipe and options"):
        get_codec("fft", density=0.1).decode(payload)
    with pytest.raises(PayloadError, match="fingerprint"):
        get_codec("dct", density=0.15).decode(payload)


def test_payloads_of_other_shapes_do_not_add():
    codec = get_codec("topk")
    payloads = [codec.encode(np.ones(shape, np.float32)) for shape in [(50, 40), (40, 50)]]
    with pytest.raises(PayloadError, match=r"payload 1: header field 'shape' is \(40, 50\)"):
        codec.decode_sum(payloads)


def test_what_is_not_a_payload_is_refused():
    codec = get_codec("topk")
    for wrong in (b"abc", np.zeros(100, np.float32), np.zeros((10, 10), np.uint8), None):
        with pytest.raises(TypeError, match="uint8"):
            codec.decode(wrong)
    with pytest.raises(ValueError, match="empty"):
        codec.decode_sum([])


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64", "uint8", "U3"])
def test_other_dtypes_are_refused_by_name(dtype):
    with pytest.raises(TypeError, match=r"tensor 'w' has dtype .*float64"):
        get_codec("topk").encode(np.zeros(10, dtype), name="w")


def test_what_is_not_an_array_is_refused():
    for wrong in ([1.0, 2.0], 3.0, None):
        with pytest.raises(TypeError, match="NumPy array"):
            get_codec("topk").encode(wrong)


def test_split_walks_a_gathered_buffer():
    codec = get_codec("topk", density=0.1)
    payloads = [codec.encode(np.full(n, n, np.float32)) for n in (1, 5000, 0, 77)]
    padded = [np.pad(p, (0, wire.align(p.nbytes) - p.nbytes)) for p in payloads]
    found = [payload for _, payload in wire.split_payloads(np.concatenate(padded))]
    assert [p.tobytes() for p in found] == [p.tobytes() for p in payloads]
    with pytest.raises(PayloadError, match="payload length"):
        list(wire.split_payloads(np.concatenate(padded)[:-16]))
