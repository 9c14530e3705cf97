"""The one table of cases, and the checks that every recipe passes on every backend."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest

from horovod_fftcomp import Codec, PayloadError, get_codec, get_scheme, list_compressors, wire
from horovod_fftcomp.codec.adaptive import Adaptive
from horovod_fftcomp.codec.dense import DenseCodec
from horovod_fftcomp.codec.methods.base import Method
from horovod_fftcomp.codec.methods.dither import Dither
from horovod_fftcomp.codec.methods.dorefa import DoReFa
from horovod_fftcomp.codec.methods.natural import Natural
from horovod_fftcomp.codec.methods.qsgd import QSGD
from horovod_fftcomp.codec.methods.sign import Sign
from horovod_fftcomp.codec.quantizers import BFLOAT16, RANGE, Float32, float_of, pattern_of
from horovod_fftcomp.codec.sparsifiers import Threshold
from horovod_fftcomp.codec.transforms import Identity
from horovod_fftcomp.kernels.cpu.bucket import BucketCodec
from horovod_fftcomp.recipes import RECIPES
from horovod_fftcomp.schemes.allgather import Allgather
from horovod_fftcomp.schemes.common_index import CommonIndex
from horovod_fftcomp.types import Body, Coding, Coefficients
from horovod_fftcomp.wire.coded_levels import STEPS_OF_GRIDS
from horovod_fftcomp.wire.counter_rng import RngKey
from horovod_fftcomp.wire.header import Plan
from horovod_fftcomp.wire.positions import Layout
from tests.backends import BACKENDS, given, load_backend


def stage_of(codec: Codec | DenseCodec) -> object:
    """Return what a codec selects or encodes elements by."""
    return codec.method if isinstance(codec, DenseCodec) else codec.sparsifier


def is_adaptive(codec: Codec | DenseCodec) -> bool:
    """Return whether the values decide how many elements ``codec`` sends."""
    return isinstance(stage_of(codec), Adaptive)


ELEMENT_RECIPES = [
    name
    for name in list_compressors()
    if isinstance(scheme := get_scheme(name), Allgather) and isinstance(scheme.codec, DenseCodec)
]
GATHER_RECIPES = [name for name in list_compressors() if isinstance(get_scheme(name), Allgather)]
ADAPTIVE_RECIPES = [name for name in GATHER_RECIPES if is_adaptive(get_scheme(name).codec)]
SHARED_RECIPES = [name for name in list_compressors() if isinstance(get_scheme(name), CommonIndex)]
DRAWN_RECIPES = [name for name in SHARED_RECIPES if "unbiased" in RECIPES[name].options]

# Recipes without CUDA kernels: with a GPU, too, the host computes them.
HOST_ONLY = frozenset({"arctopk", "gtopk", "sketchsgd"}) | {
    name for name in GATHER_RECIPES if getattr(stage_of(get_scheme(name).codec), "cuda", "") is None
}

# Schemes that ops compute: recipe, options, and how far a GPU's sums may lie from the CPU's, as a
# share of the largest.
STEPS: list[tuple[str, dict, float]] = [
    ("topk", {"density": 0.05}, 0),
    ("topk", {"density": 0.05, "error_feedback": False}, 0),
    ("topk", {"density": 0.05, "warmup_steps": 2}, 0),
    ("none", {}, 0),
    ("fp16", {}, 0),
    ("scalecom", {"density": 0.05, "selector": "exact"}, 0),
    ("scalecom", {"density": 0.05}, 0),
    ("scalecom", {"density": 1.0, "beta": 1.0}, 0),
    ("arctopk", {"density": 0.1, "block": 32, "bits": 32, "scope": "tensor"}, 0),
    ("arctopk", {"density": 0.3, "block": 8, "bits": 16}, 0),
    ("arctopk", {"density": 0.05, "bits": 32, "error_feedback": False}, 0),
    ("random_k", {"density": 0.05}, 0),
    ("random_k", {"density": 0.3, "exchange": "gather"}, 0),
    ("random_block", {"density": 0.05, "unbiased": True, "error_feedback": False}, 0),
    ("hard_threshold", {"threshold": 1.5}, 0),
    ("hard_threshold", {"threshold": 6.0}, 0),
    ("hard_threshold", {"threshold": 1e-3, "bits": 6}, 0),  # above it is nearly all
    ("hard_threshold", {"threshold": 1.5, "error_feedback": False}, 0),
    ("hard_threshold", {"threshold": 1e-3, "bits": 32}, 0),  # as it is, with those below
    ("hard_threshold", {"density": 0.05, "calibrate_steps": 2}, 0),
    *((name, {}, 0) for name in ELEMENT_RECIPES if name not in HOST_ONLY),
    ("onebit", {"group": "column"}, 0),
    ("onebit", {"error_feedback": False}, 0),
    ("qsgd", {"levels": 5, "bucket": 64, "norm": "l2", "error_feedback": True}, 0),
    ("dither", {"ratio": 20, "bucket": 128}, 0),
    ("dither", {"ratio": 60, "bucket": 512, "exchange": "sharded"}, 0),
    ("dither", {"momentum": 0.9, "warmup_steps": 1, "dense_every": 2, "dense_by": "dither"}, 0),
    ("terngrad", {"packing": "bits", "clip": 0}, 0),
    ("dgc", {"density": 0.05}, 0),
    ("dgc", {"density": 0.05, "nesterov": True, "masking": False, "bits": 8}, 0),
    ("dgc", {"density": 1.0}, 0),
    ("dgc", {"density": 0.05, "max_norm": 140.0}, 0),  # of some tensors
    ("dgc", {"density": 0.05, "warmup_steps": 5, "max_norm": 1.0}, 0),
    ("sketchsgd", {"warmup_steps": 4, "nesterov": True}, 0),
    *((name, {}, 0) for name in ADAPTIVE_RECIPES),
    ("strom", {"threshold": 2.0}, 0),
    ("strom", {"threshold": 0.01, "quanta": 7}, 0),  # nearly all reach it
    ("adacomp", {"bin": 3}, 0),
    ("wangni", {"density": 0.9}, 0),
    ("gtopk", {}, 0),
    ("gtopk", {"density": 0.4, "error_feedback": False}, 0),
    ("sketchsgd", {}, 0),
    ("sketchsgd", {"density": 0.05}, 0),  # all travels as it is
    ("sketchsgd", {"density": 0.002, "rows": 3, "nesterov": True, "masking": False}, 0),
    ("sparcml", {"density": 0.05}, 0),
    ("topk", {"density": 0.05, "scope": "bucket"}, 0),
    ("topk", {"density": 0.05, "decay": 0.9}, 0),
    ("scalecom", {"density": 0.05, "scope": "bucket"}, 0),
    ("dorefa", {"bits": 1}, 0),
    ("dorefa", {"bits": 12}, 0),
    ("signum", {"decay": 0.7}, 0),
    ("powersgd", {}, 0),
    ("powersgd", {"rank": 1}, 0),
    ("powersgd", {"rank": 12, "error_feedback": False}, 0),
    ("demo", {}, 2e-6),
    ("fft", {}, 2e-6),
    ("dct", {}, 2e-6),
    # Not of transforms: sums of coefficients are often equal, and which of them a top-k sends
    # depends on the last bits.
    *(
        (name, {"exchange": "sharded"}, 0)
        for name in ("topk", "dgc", *ADAPTIVE_RECIPES, *ELEMENT_RECIPES)
        if name not in HOST_ONLY
    ),
    ("onebit", {"exchange": "sharded", "group": "column"}, 0),
    ("hard_threshold", {"exchange": "sharded", "density": 0.05, "calibrate_steps": 2}, 0),
    *((name, {"beta": 0.3}, 0) for name in ("topk", "onebit", "gtopk", "sparcml", "powersgd")),
    ("topk", {"beta": 0.3, "scope": "bucket", "decay": 0.9}, 0),
    ("fft", {"beta": 0.3}, 2e-6),
    ("strom", {"threshold": 2.0, "beta": 0.3}, 0),
    ("hard_threshold", {"threshold": 1.5, "beta": 0.3}, 0),
    ("hard_threshold", {"density": 0.05, "calibrate_steps": 2, "beta": 0.3}, 0),
    ("topk", {"exchange": "sharded", "beta": 0.3}, 0),
]

# Codecs beyond the recipes' defaults: every layout of positions and the ends of every option.
CODECS = {
    **{
        name: (name, {}) for name in GATHER_RECIPES if name not in ("demo", "signum")
    },  # others' codecs
    "topk-bitmap": ("topk", {"density": 0.4, "bits": 5}),
    "topk-all": ("topk", {"density": 1.0, "bits": 8}),
    "topk-sparse": ("topk", {"density": 0.0005, "bits": 32}),
    "topk-2-bits": ("topk", {"density": 0.05, "bits": 2}),
    "fft-2-bits": ("fft", {"density": 0.2, "bits": 2, "block": 64}),
    "fft-3-bits": ("fft", {"density": 0.02, "bits": 3, "block": 64}),
    "fft-10-bits": ("fft", {"density": 0.15, "bits": 10, "block": 256}),
    "fft-float32": ("fft", {"density": 0.3, "bits": 32, "block": 4096}),
    "dct-16-bits": ("dct", {"density": 0.25, "bits": 16, "block": 128}),
    "threshold": ("hard_threshold", {"threshold": 2.0}),
    "threshold-6-bits": ("hard_threshold", {"threshold": 0.3, "bits": 6}),
    "strom-1": ("strom", {"threshold": 1.0}),
    "strom-quanta": ("strom", {"threshold": 0.3, "quanta": 5}),
    "adacomp-7": ("adacomp", {"bin": 7}),
    "wangni-many": ("wangni", {"density": 0.9}),
    "qsgd-l2": ("qsgd", {"levels": 3, "bucket": 64, "norm": "l2"}),
    "qsgd-127": ("qsgd", {"levels": 127, "bucket": 4096}),
    "qsgd-many": ("qsgd", {"levels": 1000, "bucket": 128}),
    "dither-30": ("dither", {"ratio": 30}),
    "dither-160": ("dither", {"ratio": 160}),
    "dither-20": ("dither", {"ratio": 20, "bucket": 128}),
    "dither-100": ("dither", {"ratio": 100}),
    "dither-16": ("dither", {"ratio": 16, "bucket": 1024}),
    "terngrad-bits": ("terngrad", {"clip": 0, "packing": "bits"}),
    "onebit-column": ("onebit", {"group": "column"}),
    "dorefa-1": ("dorefa", {"bits": 1}),
    "dorefa-12": ("dorefa", {"bits": 12}),
}


def _normal(shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(len(shape) + sum(shape)).standard_normal(shape).astype(dtype)


def _few_values() -> np.ndarray:
    return np.random.default_rng(1).integers(-2, 3, 5000).astype(np.float32)


def _heavy_tailed() -> np.ndarray:
    return np.random.default_rng(2).standard_t(1.5, 4097).astype(np.float32)


def _bfloat16() -> np.ndarray:
    import ml_dtypes

    return _normal((37, 41)).astype(ml_dtypes.bfloat16)


CASES: dict[str, Callable[[], np.ndarray]] = {
    "0-d": lambda: np.float32(2.5).reshape(()),
    "empty": lambda: np.zeros((0,), np.float32),
    "empty-2d": lambda: np.zeros((3, 0), np.float32),
    "one": lambda: np.array([-3.0], np.float32),
    "two": lambda: np.array([1.0, -2.0], np.float32),
    "seven": lambda: _normal((7,)),
    "block-1": lambda: _normal((255,)),
    "block": lambda: _normal((256,)),
    "block+1": lambda: _normal((257,)),
    "prime": lambda: _normal((4099,)),
    "odd-matrix": lambda: _normal((33, 31)),
    "conv": lambda: _normal((8, 16, 3, 3)),
    "5-d": lambda: _normal((2, 3, 5, 7, 11)),
    "large": lambda: _normal((200, 513)),
    "transposed": lambda: _normal((40, 60)).T,
    "strided": lambda: _normal((3000,))[::3],
    "reversed": lambda: _normal((1500,))[::-1],
    "channels-last": lambda: _normal((4, 9, 9, 16)).transpose(0, 3, 1, 2),
    "broadcast": lambda: np.broadcast_to(np.float32(1.5), (50, 20)),
    "read-only": lambda: np.frombuffer(_normal((5000,)).tobytes(), np.float32),
    "unaligned": lambda: np.frombuffer(b"x" + _normal((5000,)).tobytes(), np.float32, offset=1),
    "float16": lambda: _normal((50, 50), "float16"),
    "float16-max": lambda: np.full((1500,), 65504, "float16"),
    "float64": lambda: _normal((50, 50), "float64"),
    "bfloat16": _bfloat16,
    "zeros": lambda: np.zeros((2000,), np.float32),
    "minus-zeros": lambda: np.full((2000,), -0.0, np.float32),
    "constant": lambda: np.full((2000,), 0.125, np.float32),
    "few-values": _few_values,
    "one-spike": lambda: np.eye(1, 3000, 1234, dtype=np.float32)[0],
    "denormal": lambda: np.full((2000,), 1e-41, np.float32),
    "smallest-normal": lambda: _normal((2000,)) * np.float32(1e-37),
    "tiny": lambda: _normal((2000,)) * np.float32(1e-25),
    "large-values": lambda: _normal((2000,)) * np.float32(1e20),
    "huge": lambda: np.random.default_rng(3).uniform(-1e38, 1e38, 2000).astype(np.float32),
    "huge-constant": lambda: np.full((2000,), 1e38, np.float32),
    "heavy-tailed": _heavy_tailed,
}


def case_of(name: str) -> np.ndarray:
    """Return the array of a case; skips that of bfloat16 where it has no dtype."""
    if name == "bfloat16":
        pytest.importorskip("ml_dtypes")
    return CASES[name]()


def make_codec(key: str) -> Codec:
    recipe, options = CODECS[key]
    return get_codec(recipe, **options)


def copied(coeffs: Coefficients) -> Coefficients:
    return coeffs._replace(array=coeffs.array.copy())


def ranked(kernels: ModuleType, codec: Codec, array: np.ndarray) -> Coefficients:
    """Return a copy of coefficients with what ``kernels`` say of them."""
    if isinstance(codec, DenseCodec) or is_adaptive(codec):
        return kernels.add_residual(array, None, 0)
    if isinstance(codec.sparsifier, Threshold):
        key = int(np.float32(codec.sparsifier.value).view(np.uint32)) - 1
        return kernels.topk_threshold(array.copy(), 0, 1)._replace(key=key, ties=0)
    k = codec.sparsifier.count(array.size)
    k = 0 if k == array.size else k
    return kernels.topk_threshold(array.copy(), k, codec.transform.bins_per_block)


def positions_chosen(
    kernels: ModuleType, array: np.ndarray, k: int, bins_per_block: int = 1
) -> list[int]:
    """Return the positions of the ``k`` largest coefficients, as ``kernels`` choose them."""
    coeffs = kernels.topk_threshold(array, k, bins_per_block)
    bitmap, _ = kernels.select_quantize_pack(coeffs, bins_per_block, Float32().coding(1.0), False)
    return load_backend("reference").positions_of(bitmap).tolist()


def quantize(kernels: ModuleType, values: np.ndarray, coding: Coding) -> np.ndarray:
    """Return the code of every value, as ``kernels`` write them."""
    everything = Coefficients(values, kernels.max_abs_bits(values), 0, values.size)
    bitmap, packed = kernels.select_quantize_pack(everything, 1, coding, False)
    assert load_backend("reference").positions_of(bitmap).size == values.size
    return load_backend("reference").unpack_bits(packed, values.size, coding.bits)


def dequantize(kernels: ModuleType, codes: np.ndarray, coding: Coding) -> np.ndarray:
    """Return the value of every code, as ``kernels`` read them."""
    reference = load_backend("reference")
    everywhere = reference.bitmap_of(np.arange(codes.size), codes.size)
    part = Body(everywhere, reference.pack_bits(codes, coding.bits), coding)
    return kernels.sum_values([part], np.empty(codes.size, np.float32))


def plan_of(codec: Codec, payload: np.ndarray) -> Plan:
    """Return the plan of a payload, whose k may depend on what it is of."""
    return codec.checked_plan(payload, wire.read_header(payload))


def tolerance_of(x: np.ndarray) -> float:
    """Return what a transform's float32 rounding may move an element by."""
    peak = float(np.abs(x.astype(np.float64)).max(initial=0))
    return 1e-5 * peak + 1e-36


def overflows(codec: Codec, x: np.ndarray) -> bool:
    """Return whether ``x`` is refused as NaN is, since what is sent of it would be Inf."""
    of_dither = isinstance(codec, DenseCodec) and isinstance(codec.method, Dither)
    return of_dither and not is_raw_of(codec, x.shape) and float(np.abs(x).max(initial=0)) > 1e37


def is_raw_of(codec: Codec, shape: tuple[int, ...]) -> bool:
    """Return whether tensors of ``shape`` are sent as float32."""
    return codec.plan(shape).layout is Layout.RAW


def check_round_trip(codec: Codec, x: np.ndarray, backend: str) -> None:
    """Shape, dtype, predicted size, determinism, an untouched input, an error in bounds."""
    before = x.tobytes()
    payload = codec.encode(x, step=3, name="w", **given(backend))
    assert x.tobytes() == before
    assert payload.dtype == np.uint8
    assert payload.ndim == 1
    plan = plan_of(codec, payload)
    assert payload.nbytes == plan.payload_nbytes
    if codec.has_fixed_size:
        assert payload.nbytes == codec.payload_nbytes(x.shape)
    assert payload.nbytes <= 4 * x.size + plan.header_nbytes
    assert codec.encode(x, step=3, name="w", **given(backend)).tobytes() == payload.tobytes()
    decoded = codec.decode(payload, **given(backend))
    assert decoded.shape == x.shape
    assert decoded.dtype == x.dtype
    assert np.isfinite(decoded.astype(np.float64)).all() != overflows(codec, x)
    if overflows(codec, x):
        assert np.isnan(decoded).all()
    elif isinstance(codec, DenseCodec):
        check_element_error(codec, plan, x, decoded)
    elif is_adaptive(codec):
        check_choice(codec, x, payload, backend)
    elif isinstance(codec.sparsifier, Threshold):
        check_threshold(codec, x, decoded)
    else:
        check_error(codec, plan, x, decoded)


def check_threshold(codec: Codec, x: np.ndarray, decoded: np.ndarray) -> None:
    """What is not sent lies below the threshold; what is sent has the quantizer's error."""
    wanted, arrived = x.astype(np.float64), decoded.astype(np.float64)
    error = np.abs(wanted - arrived)
    peak, least = float(np.abs(wanted).max(initial=0)), codec.sparsifier.value
    relative, flushed = 1e-6, 0.0
    if codec.quantizer.bits == 6:
        octaves = max(0, pattern_of(peak) - pattern_of(least)) / 2**23
        fits = octaves <= 31.5 / 4
        relative, flushed = (octaves / 63 + 1e-6, 0.0) if fits else (0.112, 0.0059 * peak)
    relative += 1e-2 if x.dtype.name in ("float16", "bfloat16") else 0
    assert (error <= np.maximum(relative * np.abs(wanted), max(least, flushed))).all()
    assert (arrived[np.abs(wanted) < least] == 0).all() or x.size * 4 <= 64


def check_choice(codec: Codec, x: np.ndarray, payload: np.ndarray, backend: str) -> None:
    """What is sent and what is left make up the tensor, and no more is sent than k says."""
    kernels = load_backend(backend)
    with np.errstate(over="ignore"):
        flat = np.ascontiguousarray(x, np.float32).reshape(-1)
    encoded = codec.encode_coeffs(
        codec.coeffs_of(flat, x.shape, kernels),
        x.shape,
        x.dtype.name,
        kernels=kernels,
        rng_key=RngKey(3, "w", 0),
    )
    assert encoded.payload.tobytes() == payload.tobytes()
    sent = codec.decode_sum([payload], **given(backend)).ravel().astype(np.float64)
    assert np.count_nonzero(sent) <= wire.read_header(payload).k
    rounding = 1e-6 * np.abs(sent).max(initial=0) + 1e-44
    np.testing.assert_allclose(sent + encoded.residual, flat, rtol=1e-6, atol=rounding)


@functools.singledispatch
def decoded_range(method: Method, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the least and the largest number that each of the ``values``, float64, may become.

    Unless a method is registered below: none beyond the largest magnitude.
    """
    peak = np.full(values.size, np.abs(values).max(initial=0))
    return -peak, peak


@decoded_range.register
def _(method: DoReFa, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the values and, to either side, a step of the grid."""
    peak = np.abs(values).max(initial=0)
    step = 2 * peak / ((1 << method.bits) - 1)
    return np.maximum(-peak, values - step), np.minimum(peak, values + step)


@decoded_range.register
def _(method: Natural, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return numbers between 0 and twice each value."""
    return np.minimum(0, 2 * values), np.maximum(0, 2 * values)


def in_rows(values: np.ndarray, length: int) -> np.ndarray:
    """Return ``values`` in rows of this length, with zeros at the end."""
    return np.append(values, np.zeros(-values.size % length)).reshape(-1, length)


@decoded_range.register
def _(method: QSGD, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the values and, to either side, a step of their bucket."""
    rows = in_rows(values, method.bucket)
    norms = np.linalg.norm(rows, 2 if method.norm == "l2" else np.inf, axis=1)
    steps = np.repeat(norms, method.bucket)[: values.size] / method.levels
    return values - steps, values + steps


@decoded_range.register
def _(method: Dither, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the values and, to either side, half a step of the coarsest grid.

    A scale is at most 2^(1/8) times the largest magnitude.
    """
    maxima = in_rows(np.abs(values), method.bucket).max(1)
    steps = 2 ** (1 / 8) / 2 * float(STEPS_OF_GRIDS[0]) * maxima
    steps = np.repeat(steps, method.bucket)[: values.size]
    return values - steps, values + steps


@decoded_range.register
def _(method: Sign, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the signs of the float32 values, or zeros if all are 0."""
    narrow = values.astype(np.float32)
    least, largest = np.where(narrow <= 0, -1.0, 1.0), np.where(narrow < 0, -1.0, 1.0)
    return least * values.any(), largest * values.any()


def check_element_error(codec: DenseCodec, plan: Plan, x: np.ndarray, decoded: np.ndarray) -> None:
    """Every element becomes a number of the range that the method states for it."""
    wanted, arrived = x.astype(np.float64).ravel(), decoded.astype(np.float64).ravel()
    peak = np.abs(wanted).max(initial=0)
    rounding = (1e-2 if x.dtype.name in ("float16", "bfloat16") else 1e-5) * peak + 1e-37
    if plan.layout is Layout.RAW:
        assert (np.abs(wanted - arrived) <= rounding).all()
        return
    least, largest = decoded_range(codec.method, wanted)
    exact = least == largest
    assert (arrived[exact] == least[exact]).all()
    assert (arrived >= least - rounding).all()
    assert (arrived <= largest + rounding).all()


def check_error(codec: Codec, plan: Plan, x: np.ndarray, decoded: np.ndarray) -> None:
    """The contraction: keeping the k best of n leaves at most 1 - k/n of the energy.

    Quantization adds its own relative error to what is kept; for values below the smallest
    coded magnitude that is all of it, so the bound grows by both.
    """
    scale = max(float(np.abs(x.astype(np.float64)).max(initial=0)), 1e-300)
    wanted = x.astype(np.float64) / scale
    error = wanted - decoded.astype(np.float64) / scale
    kept = 1.0 if plan.layout is Layout.RAW else plan.k / max(plan.n_bins, 1)
    step, lost, n = 1e-6, 0.0, max(x.size, 1)
    if scale < 1e-35:  # nothing below 2^-126 has a code
        lost = n
    elif plan.layout is not Layout.RAW:
        flat = np.ascontiguousarray(x, np.float32).reshape(-1)
        coeffs = codec.coeffs_of(flat, x.shape, load_backend("reference"))
        coding = codec.coding(float_of(coeffs.peak), codec.grid(plan, coeffs.key, coeffs.peak))
        step = {RANGE: coding.step / 2.0**24, BFLOAT16: 2.0**-8}.get(coding.kind, step)
        if coding.zero:
            least = float_of(coding.base) / scale
            parts = least * (1 + 1j) if codec.transform.reals_per_bin == 2 else least
            smallest = np.full(coeffs.array.size, parts, coeffs.array.dtype)
            lost = codec.transform.energy(smallest)
    loosest = 1e-5 + (1e-2 if x.dtype.name in ("float16", "bfloat16") else 0)
    bound = (1 - kept + step**2) * (wanted**2).sum() + lost + n * loosest**2
    assert (error**2).sum() <= bound * (1 + 1e-4) + 1e-9


def check_decode_sum(codec: Codec, xs: list[np.ndarray], backend: str) -> None:
    """``decode_sum`` equals the sum of what each payload decodes to."""
    payloads = [codec.encode(x, **given(backend)) for x in xs]
    total = codec.decode_sum(payloads, **given(backend))
    assert total.dtype == np.float32
    assert total.shape == xs[0].shape
    parts = sum(codec.decode_sum([p], **given(backend)).astype(np.float64) for p in payloads)
    slack = sum(tolerance_of(x) for x in xs) * 10
    np.testing.assert_allclose(total, parts, rtol=1e-5, atol=slack)
    assert codec.decode_sum(payloads, **given(backend)).tobytes() == total.tobytes()


def check_bucket(codec: Codec, x: np.ndarray, transformed: ModuleType) -> None:
    """A bucket's compiled calls write the bytes and the residual of the reference.

    ``transformed``: the kernels that transform gradients; two round differently.
    """
    flat, key = np.ascontiguousarray(x, np.float32).reshape(-1), RngKey(3, "w", 1)
    table = BucketCodec([codec], [x.shape])
    message = np.zeros(table.message_nbytes, np.uint8)
    keys = np.array([codec.key_at(key) if codec.draws else 0], np.uint64)
    (kept,) = table.encode([flat], [None], message, keys).residuals
    coeffs, reference = codec.coeffs_of(flat, x.shape, transformed), load_backend("reference")
    expected = codec.encode_coeffs(coeffs, x.shape, kernels=reference, rng_key=key)
    assert message[table.slices[0]].tobytes() == expected.payload.tobytes()
    assert (kept is None) == (expected.residual is None)
    if kept is not None:
        assert kept.tobytes() == expected.residual.tobytes()
    gathered = np.concatenate([message, message])
    (total,) = table.sum(gathered, 2).totals
    if total is not None or not overflows(codec, x):
        wanted = codec.decode_sum([expected.payload] * 2, transformed)
        assert total.tobytes() == wanted.tobytes()


def check_same_bytes(codec: Codec, x: np.ndarray) -> None:
    """From equal coefficients every backend writes the bytes and the residual of the reference."""
    shape = x.shape
    flat = np.ascontiguousarray(x, np.float32).reshape(-1)
    reference = load_backend("reference")
    coeffs, key = codec.coeffs_of(flat, shape, reference), RngKey(3, "w", 1)
    expected = codec.encode_coeffs(copied(coeffs), shape, kernels=reference, rng_key=key)
    for name in BACKENDS:
        kernels = load_backend(name)
        own = ranked(kernels, codec, coeffs.array)
        actual = codec.encode_coeffs(own, shape, kernels=kernels, rng_key=key)
        assert actual.payload.tobytes() == expected.payload.tobytes(), name
        is_raw = plan_of(codec, expected.payload).layout is Layout.RAW
        if is_raw and not is_adaptive(codec):
            assert actual.residual is None
        elif not overflows(codec, x):
            assert actual.residual.tobytes() == expected.residual.tobytes(), name
    if codec.has_fixed_size:
        check_bucket(codec, x, reference if codec.transform == Identity() else load_backend("cpu"))


def check_rejects_damage(codec: Codec, x: np.ndarray, seed: int) -> None:
    """Cut, flipped and random bytes raise PayloadError or decode to some array; nothing worse."""
    rng = np.random.default_rng(seed)
    good = codec.encode(x)
    for cut in {0, 1, 31, 47, 48, 63, 64, good.nbytes - 1, int(rng.integers(good.nbytes))}:
        if cut < good.nbytes:
            assert_rejected(codec, good[:cut])
    assert_rejected(codec, np.concatenate([good, good[:1]]))
    header_nbytes = plan_of(codec, good).header_nbytes
    for at in rng.integers(header_nbytes, size=20):
        damaged = good.copy()
        damaged[at] ^= 1 << rng.integers(8)
        assert_rejected(codec, damaged)
    for _ in range(20):
        damaged = good.copy()
        damaged[header_nbytes:] = rng.integers(0, 256, good.nbytes - header_nbytes)
        try:
            decoded = codec.decode(damaged)
        except PayloadError:
            continue
        assert decoded.shape == x.shape


def assert_rejected(codec: Codec, payload: np.ndarray) -> None:
    with pytest.raises(PayloadError, match=r"header|body"):
        codec.decode(payload)
