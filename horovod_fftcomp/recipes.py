"""The table of recipes, from which factories, command line, docs and tests are made."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from horovod_fftcomp.codec.adaptive import AdaComp, Adaptive, Strom, Wangni
from horovod_fftcomp.codec.dense import DenseCodec
from horovod_fftcomp.codec.methods.base import Method
from horovod_fftcomp.codec.methods.dither import Dither
from horovod_fftcomp.codec.methods.dorefa import DoReFa
from horovod_fftcomp.codec.methods.natural import Natural
from horovod_fftcomp.codec.methods.onebit import OneBit
from horovod_fftcomp.codec.methods.qsgd import QSGD
from horovod_fftcomp.codec.methods.scaled_sign import ScaledSign
from horovod_fftcomp.codec.methods.sign import Sign
from horovod_fftcomp.codec.methods.terngrad import TernGrad
from horovod_fftcomp.codec.quantizers import BFloat16, Float32, Quantizer, RangeFloat
from horovod_fftcomp.codec.sparse import Codec
from horovod_fftcomp.codec.sparsifiers import RandomBlock, RandomK, TopK
from horovod_fftcomp.codec.transforms import BlockDCT, BlockFFT, Identity
from horovod_fftcomp.errors import check_share
from horovod_fftcomp.schemes import Scheme, Second
from horovod_fftcomp.schemes.allgather import Allgather, AnyCodec
from horovod_fftcomp.schemes.arc_topk import LargestRows
from horovod_fftcomp.schemes.auto import Auto
from horovod_fftcomp.schemes.bucket_scope import BucketScope
from horovod_fftcomp.schemes.clt_selection import ChunkWinners, Largest
from horovod_fftcomp.schemes.common_index import CommonIndex
from horovod_fftcomp.schemes.dense import Dense
from horovod_fftcomp.schemes.dgc import Dgc
from horovod_fftcomp.schemes.gtopk import GTopK
from horovod_fftcomp.schemes.hard_threshold import HardThreshold
from horovod_fftcomp.schemes.momentum import MomentumCorrection, WithMomentum
from horovod_fftcomp.schemes.options import check_names
from horovod_fftcomp.schemes.powersgd import PowerSgd
from horovod_fftcomp.schemes.recipe import Recipe
from horovod_fftcomp.schemes.sharded import Sharded
from horovod_fftcomp.schemes.sketchsgd import SketchSgd
from horovod_fftcomp.schemes.sparcml import SparCml

_Scope = Literal["tensor", "bucket", "model"]


def _values(bits: int) -> Quantizer:
    return Float32() if bits == 32 else RangeFloat(bits)


def _within(scope: _Scope, scheme: Allgather | CommonIndex) -> Scheme:
    """Return ``scheme``, wrapped if one k is shared by a bucket or by the whole model."""
    return scheme if scope == "tensor" else BucketScope(scheme, scope)


_Exchange = Literal["auto", "gather", "sharded"]


def _gathered(
    make: Callable[..., Any], filters: bool = False, chooses: bool = False
) -> Callable[..., Scheme]:
    """Return ``make`` with the options that recipes share which gather.

    ``filters``: whether it keeps residuals. ``chooses``: whether the second compression has a
    density and bits of its own. Exchange "auto" is decided for a bucket, see ``Scheduled.decided``,
    and a gather elsewhere.
    """

    def made(
        beta: float = 1.0,
        exchange: _Exchange = "auto",
        second_density: float | None = None,
        second_bits: int | None = None,
        **options: Any,
    ) -> Scheme:
        scheme, second = make(**options), Second(second_density, second_bits)
        if isinstance(scheme, BucketScope):
            scheme = replace(scheme, scheme=replace(scheme.scheme, beta=beta))
        elif filters:
            scheme = replace(scheme, beta=beta)
        if second_density is not None:
            check_share("second_density", second_density)
        if second_bits is not None and second_bits not in (*range(2, 17), 32):
            raise ValueError(
                f"second_bits must be a whole number from 2 to 16, or 32; got {second_bits!r}"
            )
        return Sharded(scheme, second) if exchange == "sharded" else scheme

    return _extended(make, made, slice(0 if filters else 1, 4 if chooses else 2))


SECOND = frozenset(("second_density", "second_bits"))  # options of a sharded exchange


def _extended(
    make: Callable[..., Any], made: Callable[..., Scheme], added: slice
) -> Callable[..., Scheme]:
    """Return ``made`` with the signature of ``make``, then its own parameters ``added``."""
    own = inspect.signature(make, eval_str=True)
    more = list(inspect.signature(made, eval_str=True).parameters.values())[added]
    both = [p.replace(kind=p.KEYWORD_ONLY) for p in (*own.parameters.values(), *more)]
    signature = own.replace(parameters=both)
    made.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    made.__signature__ = signature  # type: ignore[attr-defined]
    made.__wrapped__ = make  # type: ignore[attr-defined]
    return made


def _accelerated(recipe: Recipe) -> Recipe:
    """Return a recipe with error feedback, or dither, with momentum as an option too."""
    make = recipe.make
    if not {"beta", "ratio"} & set(recipe.options):
        return recipe

    def made(momentum: float = 0.0, nesterov: bool = False, **options: Any) -> Scheme:
        correction, scheme = MomentumCorrection(momentum, nesterov, False), make(**options)
        if nesterov and not momentum:
            raise ValueError("nesterov=True needs a momentum above 0, got momentum=0.0")
        return WithMomentum(scheme, correction) if momentum else scheme

    return replace(recipe, make=_extended(make, made, slice(0, 2)))


_chosen_again = partial(_gathered, chooses=True)
_both = partial(_gathered, filters=True, chooses=True)


@_gathered
def _bf16() -> Scheme:
    return Allgather(Codec(Identity(), TopK(1.0), BFloat16()), error_feedback=False)


# The defaults send as many bytes as the papers' settings (density 0.01 in float32; 0.15 in 10 bits)
# and lose least of recorded gradients: benchmarks/README.md, defaults.py.
@_both
def _topk(
    density: float = 0.038,
    bits: int = 4,
    error_feedback: bool = True,
    scope: _Scope = "tensor",
    decay: float = 1.0,
) -> Scheme:
    codec = Codec(Identity(), TopK(density), _values(bits))
    return _within(scope, Allgather(codec, error_feedback, decay))


@_both
def _fft(
    density: float = 0.33, bits: int = 4, block: int = 64, error_feedback: bool = True
) -> Scheme:
    return Allgather(Codec(BlockFFT(block), TopK(density), _values(bits)), error_feedback)


@_both
def _dct(
    density: float = 0.3, bits: int = 4, block: int = 64, error_feedback: bool = True
) -> Scheme:
    return Allgather(Codec(BlockDCT(block), TopK(density), _values(bits)), error_feedback)


@_both
def _hard_threshold(
    density: float = 0.001,
    threshold: float | None = None,
    calibrate_steps: int = 100,
    bits: int = 32,
    error_feedback: bool = True,
) -> Scheme:
    return HardThreshold(_values(bits), density, threshold, calibrate_steps, error_feedback)


def _drawn(
    selection: type[RandomBlock] | type[RandomK],
    density: float = 0.01,
    error_feedback: bool = True,
    unbiased: bool = False,
    exchange: Literal["reduce", "gather"] = "reduce",
    scope: _Scope = "tensor",
    seed: int = 0,
    beta: float = 0.1,
) -> Scheme:
    drawn = selection(density, seed)
    scheme = CommonIndex(drawn, error_feedback, unbiased, beta, collective=f"all{exchange}")
    return _within(scope, scheme)


def _scalecom(
    density: float = 0.01,
    beta: float = 0.1,
    selector: Literal["chunk", "exact"] = "chunk",
    bits: int = 32,
    error_feedback: bool = True,
    scope: _Scope = "tensor",
) -> Scheme:
    choose = ChunkWinners if selector == "chunk" else Largest
    return _within(scope, CommonIndex(choose(density), error_feedback, beta=beta, bits=bits))


def _arctopk(
    density: float = 0.02,
    block: int = 128,
    bits: int = 16,
    error_feedback: bool = True,
    scope: _Scope = "bucket",
    seed: int = 0,
    beta: float = 0.1,
) -> Scheme:
    rows = LargestRows(density, block, seed)
    return _within(scope, CommonIndex(rows, error_feedback, beta=beta, bits=bits))


@_chosen_again
def _demo(
    density: float = 0.03, bits: int = 4, block: int = 64, decay: float = 0.999, sign: bool = False
) -> Scheme:
    codec = Codec(BlockDCT(block), TopK(density), _values(bits))
    return Allgather(codec, decay=decay, sign=sign)


def _elementwise(method: Method, seed: int = 0, **options: Any) -> Scheme:
    keep = options.pop("error_feedback", method.error_feedback)
    if keep and method.unbiased and not method.contraction:
        raise ValueError(
            f"error_feedback=True makes the residuals of {method} grow, since its rounding adds "
            "more error than it removes; give error_feedback=False, or a finer grid"
        )
    return Allgather(DenseCodec(method, seed), keep, **options)


def _of_method(method: type[Method], filters: bool = False) -> Callable[..., Scheme]:
    """Return the factory of a method: options of its class, and a seed if it draws.

    With ``filters`` it may keep residuals, so that ``error_feedback`` is an option, too.
    """

    def made(error_feedback: bool = method.error_feedback, seed: int = 0, **own: Any) -> Scheme:
        return _elementwise(method(**own), seed, error_feedback=error_feedback)

    _extended(method, made, slice(0 if filters else 1, 2 if method.draws else 1))
    del made.__wrapped__  # type: ignore[attr-defined]  # the recipe's own options are these
    return _gathered(made, filters)


_qsgd = _of_method(QSGD, filters=True)
_dither = _of_method(Dither)
_terngrad = _of_method(TernGrad)
_dorefa = _of_method(DoReFa, filters=True)
_natural = _of_method(Natural, filters=True)
_onebit = _of_method(OneBit, filters=True)
_efsignsgd = _of_method(ScaledSign, filters=True)


@_gathered
def _signsgd() -> Scheme:
    return _elementwise(Sign(), sign=True)


@_gathered
def _signum(decay: float = 0.9) -> Scheme:
    return _elementwise(Sign(), error_feedback=True, decay=decay, sign=True, momentum=True)


def _adaptive(sparsifier: Adaptive, seed: int = 0, error_feedback: bool = True) -> Scheme:
    return Allgather(Codec(Identity(), sparsifier, seed=seed), error_feedback)


# No threshold suits every model: this default only lets a first trial run.
@_both
def _strom(threshold: float = 0.001, quanta: int = 1) -> Scheme:
    return _adaptive(Strom(threshold, quanta))


@_both
def _adacomp(bin: int | None = None) -> Scheme:
    return _adaptive(AdaComp(bin))


@_gathered
def _wangni(density: float = 0.01, seed: int = 0) -> Scheme:
    return _adaptive(Wangni(density), seed, error_feedback=False)


@_both
def _auto(ratio: float = 50.0, every: int = 2000, error_feedback: bool = True) -> Scheme:
    return Auto(ratio, every, error_feedback)


@_chosen_again
def _dgc(
    density: float = 0.001,
    momentum: float = 0.9,
    nesterov: bool = False,
    masking: bool = True,
    max_norm: float | None = None,
    bits: int = 32,
) -> Scheme:
    correction = MomentumCorrection(momentum, nesterov, masking, max_norm)
    return Dgc(Codec(Identity(), TopK(density), _values(bits)), correction=correction)


def _sketchsgd(
    density: float = 0.001,
    momentum: float = 0.9,
    nesterov: bool = False,
    masking: bool = True,
    rows: int = 5,
    columns: int = 10,
    candidates: int = 4,
    seed: int = 0,
) -> Scheme:
    correction = MomentumCorrection(momentum, nesterov, masking)
    return SketchSgd(density, rows, columns, candidates, seed, correction=correction)


_RECIPES = {
    "none": Recipe(partial(Dense, "float32"), "all values in float32", "Horovod's own"),
    "fp16": Recipe(partial(Dense, "float16"), "all values in float16, saturating", "Horovod's own"),
    "bf16": Recipe(_bf16, "all values in bfloat16, summed in float32", "Kalamkar et al. 2019"),
    "topk": Recipe(_topk, "the largest values, in few-bit floats", "Aji and Heafield 2017"),
    "fft": Recipe(
        _fft, "the largest coefficients of a block FFT, in few-bit floats", "Wang et al., HPDC 2020"
    ),
    "dct": Recipe(_dct, "the largest coefficients of a block DCT, in few-bit floats", "as fft"),
    "auto": Recipe(
        _auto, "largest coefficients; transform, bits and density by trial", "this package"
    ),
    "demo": Recipe(
        _demo,
        "DeMo: top DCT coefficients of the momentum, subtracted once sent",
        "Peng et al. 2024",
    ),
    "hard_threshold": Recipe(
        _hard_threshold, "all values above a fixed threshold", "Sahu et al., NeurIPS 2021"
    ),
    "random_block": Recipe(
        partial(_drawn, RandomBlock),
        "one block of consecutive values at a random offset, float32",
        "Vogels et al. 2019",
    ),
    "scalecom": Recipe(
        _scalecom,
        "CLT-k: values at common positions, selected by ranks in rotation",
        "Chen et al., NeurIPS 2020",
        spares_first=True,
    ),
    "arctopk": Recipe(_arctopk, "rows that a sketch of the sum finds largest", "Chen et al. 2025"),
    "random_k": Recipe(
        partial(_drawn, RandomK), "values at random positions, float32", "Stich et al. 2018"
    ),
    "dgc": Recipe(
        _dgc,
        "the largest accumulated velocities; optimizer without momentum",
        "Lin et al., ICLR 2018",
    ),
    "powersgd": Recipe(
        PowerSgd,
        "the two factors of a low-rank approximation, float32",
        "Vogels et al., NeurIPS 2019",
    ),
    "gtopk": Recipe(
        GTopK, "global top-k, by merging all ranks' top-k lists, float32", "Shi et al., ICDCS 2019"
    ),
    "sparcml": Recipe(
        SparCml,
        "the largest values, float32, as sparse sums merged pairwise",
        "Renggli et al., SC 2019",
    ),
    "sketchsgd": Recipe(
        _sketchsgd,
        "values of count-sketch heavy hitters; optimizer without momentum",
        "Ivkin et al., NeurIPS 2019",
    ),
    # The number of sent elements depends on the values.
    "strom": Recipe(
        _strom,
        "plus or minus the threshold, for each value that reaches it",
        "Strom, Interspeech 2015",
    ),
    "adacomp": Recipe(
        _adacomp, "AdaComp: signs of each bin's near-maxima, one scale", "Chen et al., AAAI 2018"
    ),
    "wangni": Recipe(
        _wangni,
        "values sampled in proportion to magnitude, unbiased, float32",
        "Wangni et al., NeurIPS 2018",
    ),
    # Every element is sent, in a few bits.
    "qsgd": Recipe(
        _qsgd, "all values, stochastically rounded to a few levels", "Alistarh et al. 2017"
    ),
    "dither": Recipe(
        _dither,
        "all values, rounded with a spaced dither, entropy-coded",
        "Abdi and Fekri 2019; Suresh et al., ICML 2022",
    ),
    "terngrad": Recipe(
        _terngrad, "all values, stochastically rounded to -1, 0, 1 times a scale", "Wen et al. 2017"
    ),
    "onebit": Recipe(_onebit, "1-bit SGD: all signs, one mean for each sign", "Seide et al. 2014"),
    "efsignsgd": Recipe(
        _efsignsgd, "all signs, scaled by the mean magnitude", "Karimireddy et al. 2019"
    ),
    "signsgd": Recipe(_signsgd, "all signs; majority vote over the ranks", "Bernstein et al. 2019"),
    "signum": Recipe(
        _signum, "all signs of the momentum; majority vote over the ranks", "Bernstein et al. 2018"
    ),
    "natural": Recipe(
        _natural, "all values, stochastically rounded to powers of two", "Horvath et al. 2019"
    ),
    "dorefa": Recipe(
        _dorefa, "all values, stochastically rounded to a uniform grid", "Zhou et al. 2016"
    ),
}
RECIPES = {name: _accelerated(recipe) for name, recipe in _RECIPES.items()}


def list_compressors() -> list[str]:
    """Return the names of all recipes.

    >>> import horovod_fftcomp as hfc
    >>> "fft" in hfc.list_compressors()
    True
    """
    return list(RECIPES)


def get_recipe(name: str) -> Recipe:
    """Return the recipe called ``name``; ValueError if there is none."""
    if not isinstance(name, str) or name not in RECIPES:
        raise ValueError(unknown_recipe(name))
    return RECIPES[name]


def unknown_recipe(name: object) -> str:
    """Return the message about a name that no recipe has."""
    close = difflib.get_close_matches(str(name).lower(), RECIPES, 1)
    meant = f" (did you mean {close[0]!r}?)" if close else ""
    return f"unknown recipe {name!r}{meant}; choose one of {', '.join(RECIPES)}"


def get_scheme(name: str, **options: object) -> Scheme:
    """Return the compression method ``name`` with its ``options``, an object to sum gradients with.

    Raises ValueError for an unknown recipe and for a value out of range, TypeError for an unknown
    option and for a value of the wrong type. ``RECIPES[name].options`` lists the options and
    defaults of a recipe. The help of the factories is made from the descriptions below;
    ``recipe.option`` describes an option whose meaning differs in that recipe.

    Other Parameters
    ----------------
    density
        Share of the values or coefficients that are sent (k / n), above 0 and at most 1.
    bits
        Bits per sent value: 2 to 16, or 32 for float32.
    block
        Block length of the transform in elements: a power of two from 64 to 4096.
    arctopk.block
        Elements of a row, which are sent together: a power of two from 8 to 4096.
    error_feedback
        Whether the unsent part of a gradient (the residual) is added to the next one.
    scope
        Elements that share one k: those of a "tensor", of a "bucket" or of the whole "model".
    seed
        Seed of the random numbers: 0 to 2**64 - 1, the same on all ranks.
    ratio
        Compression ratio of all tensors, dense bytes over sent bytes: 1 to 10,000.
    every
        Steps from one trial of all transforms, bit widths and densities to the next.
    decay
        Decay of the momentum per step, above 0 and at most 1.
    topk.decay
        Decay of the residual per step, above 0 and at most 1.
    sign
        Whether the optimizer gets the sign of the mean instead of the mean.
    threshold
        Smallest magnitude that is sent, in units of a gradient; None: calibrated by top-k.
    strom.threshold
        Magnitude sent for each value that reaches it, in units of a gradient.
    hard_threshold.density
        Density of the top-k that calibrates the threshold, above 0 and at most 1.
    calibrate_steps
        Steps of top-k that calibrate the threshold, if none is given.
    unbiased
        Whether sent values are divided by ``density``; needs ``error_feedback=False``.
    exchange
        "gather": all ranks get all payloads; "sharded": two rounds, in which bytes do not grow with
        the number of ranks; "auto": by bytes.
    second_density
        Density of the second compression of a sharded exchange; None: by ``density``.
    second_bits
        Bits per value in the second compression of a sharded exchange; None: as in the first.
    random_block.exchange
        "reduce": all ranks send the same positions; "gather": each rank sends its own.
    random_k.exchange
        "reduce": all ranks send the same positions; "gather": each rank sends its own.
    beta
        Weight of the new part of the residual (low-pass filter), above 0 and at most 1.
    selector
        "chunk": the largest of every 1 / density elements; "exact": the top-k of a tensor.
    scalecom.bits
        Bits per sent value: 16 for float16 or 32 for float32.
    arctopk.bits
        Bits per sent value and sum of the sketch: 16 for float16 or 32 for float32.
    momentum
        Momentum applied before compression, from 0 to below 1. The optimizer must have none; with
        ``dense_every`` it is Adam or AdamW of this package with this as its first beta.
    nesterov
        Whether the momentum is Nesterov's.
    masking
        Whether the velocity of a sent element is reset to 0.
    max_norm
        Clip each tensor's gradient to a norm of max_norm / sqrt(world size); None: no clipping.
    rank
        Rank of the approximation: 1 to 1024.
    rows
        Rows of the sketch: 1, 3, 5, 7 or 9.
    columns
        Columns of the sketch per sent element: 1 to 64.
    candidates
        Elements summed exactly per sent element: 1 to 64.
    quanta
        Largest multiple of the threshold sent for one value in a step: 1 to 32,768.
    bin
        Length of a bin in elements; None: 50 for convolutions, 500 for other tensors.
    wangni.density
        Expected share of the values that are sent, above 0 and at most 1.
    levels
        Quantization levels of a magnitude, zero not counted: 1 to 2047.
    bucket
        Elements that share a norm: a power of two from 64 to 4096.
    norm
        Norm that the levels divide evenly: "max", the largest magnitude, or "l2".
    dither.ratio
        How many times fewer bytes than float32: 16, 20, 30, 40, 60, 80, 100 or 160.
    dither.bucket
        Elements that share a scale: 128, 256, 512 or 1024.
    packing
        "base3": 1.6 bits per value; "bits": 2 bits per value, faster to decode.
    clip
        Values are clipped to this many standard deviations of the tensor; 0: no clipping.
    dorefa.bits
        Bits per sent value: 1 to 12.
    group
        Elements that share the two means: those of a "tensor" or of a "column".
    """
    recipe = get_recipe(name)
    check_names(name, options, recipe.options)
    return recipe.make(**recipe.checked(options))


def get_codec(name: str, **options: object) -> AnyCodec:
    """Return the codec of a recipe that exchanges payloads by allgather.

    Raises ValueError for a recipe that sums values by allreduce and so has no payload, and the
    errors of ``get_scheme``.
    """
    scheme = get_scheme(name, **options)
    while isinstance(scheme, (BucketScope, WithMomentum)):
        scheme = scheme.scheme
    if isinstance(scheme, HardThreshold):
        return scheme.codec
    if not isinstance(scheme, Allgather):
        raise ValueError(
            f"recipe {name!r} exchanges values by {' and '.join(scheme.rounds)} and has no "
            "payload to encode; use get_scheme or simulate"
        )
    return scheme.codec
