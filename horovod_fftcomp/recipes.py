"""The one table of recipes: it drives the factories, the command line, the docs and the tests."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from horovod_fftcomp.codec.adaptive import AdaptiveCodec
from horovod_fftcomp.codec.adaptive_methods import AdaComp, Chooser, Strom, Wangni
from horovod_fftcomp.codec.dense import DenseCodec
from horovod_fftcomp.codec.dense_methods import (
    QSGD,
    DoReFa,
    EliasQSGD,
    Method,
    Natural,
    OneBit,
    ScaledSign,
    Sign,
    TernGrad,
)
from horovod_fftcomp.codec.quantizers import BFloat16, Float32, Quantizer, RangeFloat
from horovod_fftcomp.codec.sparse import Codec
from horovod_fftcomp.codec.sparsifiers import RandomBlock, RandomK, TopK
from horovod_fftcomp.codec.transforms import BlockDCT, BlockFFT, Identity
from horovod_fftcomp.schemes import Scheme
from horovod_fftcomp.schemes.allgather import Allgather, AnyCodec
from horovod_fftcomp.schemes.auto import Auto
from horovod_fftcomp.schemes.bucket_scope import BucketScope
from horovod_fftcomp.schemes.clt_selection import ChunkWinners, Largest
from horovod_fftcomp.schemes.common_index import CommonIndex
from horovod_fftcomp.schemes.dense import Dense
from horovod_fftcomp.schemes.dgc import Dgc
from horovod_fftcomp.schemes.gtopk import GTopK
from horovod_fftcomp.schemes.hard_threshold import HardThreshold
from horovod_fftcomp.schemes.momentum import MomentumCorrection
from horovod_fftcomp.schemes.options import check_names, checked, kinds_of
from horovod_fftcomp.schemes.powersgd import PowerSgd
from horovod_fftcomp.schemes.sketchsgd import SketchSgd
from horovod_fftcomp.schemes.sparcml import SparCml


@dataclass(frozen=True)
class Recipe:
    """A named way to exchange gradients; its options are the keywords of ``make``.

    Their annotations are what ``get_scheme`` checks; ranges are checked where an option is used.
    ``spares_first``: the first convolution of a model travels dense unless a rule names it.
    """

    make: Callable[..., Scheme]
    summary: str
    source: str
    spares_first: bool = False

    @property
    def options(self) -> dict[str, object]:
        """The options and their defaults."""
        return {p.name: p.default for p in inspect.signature(self.make).parameters.values()}

    def checked(self, options: Mapping[str, object]) -> dict[str, Any]:
        """Return known options as built-in objects; TypeError for one of another type."""
        kinds, defaults = kinds_of(self.make), self.options
        return {
            name: checked(name, value, kinds[name], defaults[name])
            for name, value in options.items()
        }


_Scope = Literal["tensor", "bucket", "model"]


def _values(bits: int) -> Quantizer:
    return Float32() if bits == 32 else RangeFloat(bits)


def _within(scope: _Scope, scheme: Allgather | CommonIndex) -> Scheme:
    """Return what applies ``scheme`` to each tensor, each bucket, or all of the model at once."""
    return scheme if scope == "tensor" else BucketScope(scheme, scope)


def _none() -> Scheme:
    return Dense("float32")


def _fp16() -> Scheme:
    return Dense("float16")


def _bf16() -> Scheme:
    return Allgather(Codec(Identity(), TopK(1.0), BFloat16()), error_feedback=False)


# The defaults send as many bytes as the papers' settings (density 0.01 in float32; 0.15 in 10 bits)
# and lose least of recorded gradients: benchmarks/README.md, defaults.py.
def _topk(
    density: float = 0.038, bits: int = 4, error_feedback: bool = True, scope: _Scope = "tensor"
) -> Scheme:
    return _within(
        scope, Allgather(Codec(Identity(), TopK(density), _values(bits)), error_feedback)
    )


def _fft(
    density: float = 0.33, bits: int = 4, block: int = 64, error_feedback: bool = True
) -> Scheme:
    return Allgather(Codec(BlockFFT(block), TopK(density), _values(bits)), error_feedback)


def _dct(
    density: float = 0.3, bits: int = 4, block: int = 64, error_feedback: bool = True
) -> Scheme:
    return Allgather(Codec(BlockDCT(block), TopK(density), _values(bits)), error_feedback)


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
) -> Scheme:
    drawn = selection(density, seed)
    scheme = CommonIndex(drawn, error_feedback, unbiased, collective=f"all{exchange}")
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


def _demo(
    density: float = 0.03, bits: int = 4, block: int = 64, decay: float = 0.999, sign: bool = False
) -> Scheme:
    codec = Codec(BlockDCT(block), TopK(density), _values(bits))
    return Allgather(codec, decay=decay, sign=sign)


def _elementwise(method: Method, seed: int = 0, **options: Any) -> Scheme:
    return Allgather(DenseCodec(method, seed), **options)


def _qsgd(
    levels: int = 7,
    bucket: int = 1024,
    norm: Literal["max", "l2"] = "max",
    packing: Literal["fixed", "elias"] = "fixed",
    error_feedback: bool = False,
    seed: int = 0,
) -> Scheme:
    method = QSGD if packing == "fixed" else EliasQSGD
    return _elementwise(method(levels, bucket, norm), seed, error_feedback=error_feedback)


# Without feedback, which would grow: what is sent differs from a value by more than the value.
def _terngrad(
    clip: float = 2.5, packing: Literal["base3", "bits"] = "base3", seed: int = 0
) -> Scheme:
    return _elementwise(TernGrad(clip, packing), seed, error_feedback=False)


def _dorefa(bits: int = 4, error_feedback: bool = False, seed: int = 0) -> Scheme:
    return _elementwise(DoReFa(bits), seed, error_feedback=error_feedback)


def _natural(error_feedback: bool = False, seed: int = 0) -> Scheme:
    return _elementwise(Natural(), seed, error_feedback=error_feedback)


def _onebit(group: Literal["tensor", "column"] = "tensor", error_feedback: bool = True) -> Scheme:
    return _elementwise(OneBit(group), error_feedback=error_feedback)


def _efsignsgd(error_feedback: bool = True) -> Scheme:
    return _elementwise(ScaledSign(), error_feedback=error_feedback)


def _signsgd() -> Scheme:
    return _elementwise(Sign(), error_feedback=False, sign="vote")


def _signum(decay: float = 0.9) -> Scheme:
    return _elementwise(Sign(), decay=decay, sign="vote", momentum=True)


def _chosen(method: Chooser, seed: int = 0, error_feedback: bool = True) -> Scheme:
    return Allgather(AdaptiveCodec(method, seed), error_feedback)


# No threshold suits every model: this one only serves to try it out.
def _strom(threshold: float = 0.001, quanta: int = 1) -> Scheme:
    return _chosen(Strom(threshold, quanta))


def _adacomp(bin: int | None = None) -> Scheme:
    return _chosen(AdaComp(bin))


def _wangni(density: float = 0.01, seed: int = 0) -> Scheme:
    return _chosen(Wangni(density), seed, error_feedback=False)


def _auto(
    ratio: float = 50.0,
    every: int = 2000,
    gbit_per_s: float | None = None,
    error_feedback: bool = True,
) -> Scheme:
    return Auto(ratio, every, gbit_per_s, error_feedback)


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


def _powersgd(rank: int = 4, error_feedback: bool = True, seed: int = 0) -> Scheme:
    return PowerSgd(rank, error_feedback, seed)


def _gtopk(density: float = 0.01, error_feedback: bool = True) -> Scheme:
    return GTopK(density, error_feedback)


def _sparcml(density: float = 0.01, error_feedback: bool = True) -> Scheme:
    return SparCml(density, error_feedback)


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


RECIPES: dict[str, Recipe] = {
    "none": Recipe(_none, "all values in float32", "Horovod's own"),
    "fp16": Recipe(_fp16, "all values in float16, saturating", "Horovod's own"),
    "bf16": Recipe(_bf16, "all values in bfloat16, summed in float32", "Kalamkar et al. 2019"),
    "topk": Recipe(_topk, "the largest values, as range floats", "Aji and Heafield 2017"),
    "fft": Recipe(
        _fft, "the largest bins of a block FFT, as range floats", "Wang et al., HPDC 2020"
    ),
    "dct": Recipe(_dct, "the largest coefficients of a block DCT, as range floats", "as fft"),
    "auto": Recipe(
        _auto, "the best of domains and bits for each tensor, tried now and then", "this package"
    ),
    "demo": Recipe(
        _demo, "the largest DCT coefficients of a momentum, which they leave", "Peng et al. 2024"
    ),
    "hard_threshold": Recipe(
        _hard_threshold, "values above a threshold that stays", "Sahu et al., NeurIPS 2021"
    ),
    "random_block": Recipe(
        partial(_drawn, RandomBlock),
        "consecutive values from a random place on, float32",
        "Vogels et al. 2019",
    ),
    "scalecom": Recipe(
        _scalecom,
        "what one rank chooses for all, in turns",
        "Chen et al., NeurIPS 2020",
        spares_first=True,
    ),
    "random_k": Recipe(partial(_drawn, RandomK), "random values, float32", "Stich et al. 2018"),
    "dgc": Recipe(
        _dgc, "the largest of accumulated velocities; no other momentum", "Lin et al., ICLR 2018"
    ),
    "powersgd": Recipe(
        _powersgd, "two factors of a low rank, float32", "Vogels et al., NeurIPS 2019"
    ),
    "gtopk": Recipe(_gtopk, "the largest of all ranks' largest, float32", "Shi et al., ICDCS 2019"),
    "sparcml": Recipe(
        _sparcml, "the largest values, float32, summed in pairs", "Renggli et al., SC 2019"
    ),
    "sketchsgd": Recipe(
        _sketchsgd,
        "values at the heavy hitters of a count sketch; no other momentum",
        "Ivkin et al., NeurIPS 2019",
    ),
    # As many elements as the values decide.
    "strom": Recipe(
        _strom, "one threshold or its negative, where values reach it", "Strom, Interspeech 2015"
    ),
    "adacomp": Recipe(
        _adacomp, "one magnitude and signs, where bins have their largest", "Chen et al., AAAI 2018"
    ),
    "wangni": Recipe(
        _wangni, "values drawn by their magnitudes, float32", "Wangni et al., NeurIPS 2018"
    ),
    # Every element, in few bits.
    "qsgd": Recipe(_qsgd, "all values, rounded at random to a few levels", "Alistarh et al. 2017"),
    "terngrad": Recipe(
        _terngrad, "all values, as one magnitude or none, at random", "Wen et al. 2017"
    ),
    "onebit": Recipe(_onebit, "all signs, and the mean of either side", "Seide et al. 2014"),
    "efsignsgd": Recipe(_efsignsgd, "all signs, and the mean magnitude", "Karimireddy et al. 2019"),
    "signsgd": Recipe(_signsgd, "all signs; the majority decides", "Bernstein et al. 2019"),
    "signum": Recipe(
        _signum, "all signs of a momentum; the majority decides", "Bernstein et al. 2018"
    ),
    "natural": Recipe(_natural, "all values, as powers of two at random", "Horvath et al. 2019"),
    "dorefa": Recipe(_dorefa, "all values, rounded at random to an even grid", "Zhou et al. 2016"),
}


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
        raise ValueError(f"unknown recipe {name!r}; choose one of {', '.join(RECIPES)}")
    return RECIPES[name]


def get_scheme(name: str, **options: object) -> Scheme:
    """Return the scheme of recipe ``name``; ``options`` are the recipe's own.

    Raises ValueError for an unknown recipe and for a value out of range, TypeError for an unknown
    option and for a value of another type. ``RECIPES`` says which recipe has which options. The
    help of the factories is made from the descriptions here; ``recipe.option`` is one that differs.

    Other Parameters
    ----------------
    density
        Share of the values or coefficients that is sent, above 0 and at most 1.
    bits
        Width of a sent value in bits: 3 to 16, or 32 for float32.
    block
        Length of a transform in elements: a power of two from 64 to 4096.
    error_feedback
        Whether what a step did not send is added to the next gradient.
    scope
        The elements among which ``density`` chooses: of a tensor, a bucket or the whole model.
    seed
        Start of the random numbers: 0 to 2**64 - 1, the same on all ranks.
    ratio
        Dense bytes over sent bytes of each tensor: 1 to 10,000.
    every
        Steps from one trial of the domains and widths to the next.
    gbit_per_s
        Speed of a rank's link in Gbit/s; what is faster dense at it is sent dense; None: nothing.
    decay
        Factor of the momentum from step to step, above 0 and at most 1.
    sign
        Whether the optimizer gets the sign of the mean instead of the mean.
    threshold
        Smallest magnitude that is sent, in units of a gradient; None: it is measured.
    strom.threshold
        Magnitude that is sent for each larger value, in units of a gradient.
    hard_threshold.density
        Share of the values for which the threshold is measured, above 0 and at most 1.
    calibrate_steps
        Steps in which the threshold is measured, where none is given.
    unbiased
        Whether sent values are divided by ``density``; for ``error_feedback=False`` only.
    exchange
        "reduce": all ranks send the same positions; "gather": each rank draws its own.
    beta
        Factor of what is new in the residual (low-pass filter), above 0 and at most 1.
    selector
        "chunk": the largest value of every chunk of 1 / density; "exact": the largest of a tensor.
    scalecom.bits
        Width of a sent value in bits: 16 for float16 or 32 for float32.
    momentum
        Factor of the momentum that is kept before compression, from 0 to below 1.
    nesterov
        Whether that momentum is Nesterov's.
    masking
        Whether the velocity of a sent element is set to 0.
    max_norm
        Largest norm of a tensor's gradient, over the root of the number of ranks; None: no limit.
    rank
        Rank of the factors: 1 to 1024.
    rows
        Rows of the sketch: 1, 3, 5, 7 or 9.
    columns
        Columns of the sketch for each element that is sent: 1 to 64.
    candidates
        Elements summed exactly for each element that is sent: 1 to 64.
    quanta
        Most thresholds that are sent of one value in a step: 1 to 32,768.
    bin
        Length of a bin in elements; None: 50 for convolutions, 500 for other tensors.
    wangni.density
        Share of the values that is sent on average, above 0 and at most 1.
    levels
        Levels of a magnitude above 0: 1 to 2047.
    bucket
        Elements that share a norm: a power of two from 64 to 4096.
    norm
        Norm that the levels divide: "max", the largest magnitude, or "l2".
    packing
        How levels are written: in words of "fixed" width or in the code of "elias".
    terngrad.packing
        "base3": 1.6 bits a value; "bits": 2 bits, which are decoded faster.
    clip
        Largest magnitude that is kept, in standard deviations of the tensor; 0: no limit.
    dorefa.bits
        Width of a sent value in bits: 1 to 12.
    group
        Elements that share two means: those of the "tensor" or of a "column".
    """
    recipe = get_recipe(name)
    check_names(name, options, recipe.options)
    return recipe.make(**recipe.checked(options))


def get_codec(name: str, **options: object) -> AnyCodec:
    """Return the codec of a recipe whose payloads are gathered.

    Raises ValueError for a recipe that sums values by allreduce and so has no payload, and as
    ``get_scheme`` does.
    """
    scheme = get_scheme(name, **options)
    if isinstance(scheme, BucketScope):
        scheme = scheme.scheme
    if isinstance(scheme, HardThreshold):
        return scheme.codec
    if not isinstance(scheme, Allgather):
        raise ValueError(
            f"recipe {name!r} exchanges values by {' and '.join(scheme.rounds)} and has no "
            "payload to encode; use get_scheme or simulate"
        )
    return scheme.codec
