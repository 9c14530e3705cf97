"""The table: every recipe can be made, and every wrong argument is told by name."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import random

import numpy as np
import pytest

from horovod_fftcomp import Codec, get_codec, get_scheme, list_compressors
from horovod_fftcomp.codec import adaptive, methods, quantizers, sparsifiers, transforms
from horovod_fftcomp.codec.dense import DenseCodec
from horovod_fftcomp.codec.sparsifiers import Threshold
from horovod_fftcomp.engine.buckets import Bucket, is_compressed, make_buckets
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.policy import make_policy
from horovod_fftcomp.recipes import RECIPES
from horovod_fftcomp.schemes import Tensor, arc_topk, clt_selection
from horovod_fftcomp.schemes.allgather import Allgather
from horovod_fftcomp.schemes.auto import Auto
from horovod_fftcomp.schemes.bucket_scope import BucketScope
from horovod_fftcomp.schemes.common_index import CommonIndex
from horovod_fftcomp.schemes.dense import Dense
from horovod_fftcomp.schemes.dgc import Dgc
from horovod_fftcomp.schemes.gtopk import GTopK
from horovod_fftcomp.schemes.hard_threshold import HardThreshold
from horovod_fftcomp.schemes.momentum import MomentumCorrection
from horovod_fftcomp.schemes.powersgd import PowerSgd
from horovod_fftcomp.schemes.sketchsgd import SketchSgd
from horovod_fftcomp.schemes.sparcml import SparCml
from horovod_fftcomp.simulation import exchange_once

METHODS = (importlib.import_module(f"{methods.__name__}.{module.name}")
           for module in pkgutil.iter_modules(methods.__path__))  # fmt: skip
STAGES = (transforms, sparsifiers, quantizers, clt_selection, arc_topk, adaptive, *METHODS)


@pytest.mark.parametrize("name", list_compressors())
def test_every_recipe_is_complete(name):
    recipe = RECIPES[name]
    scheme = get_scheme(name)
    assert scheme == get_scheme(name, **recipe.options)
    assert hash(scheme) == hash(get_scheme(name))
    assert scheme.rounds
    assert 0 < len(recipe.summary) <= 64  # the stubs quote it on one line
    assert recipe.source


@pytest.mark.parametrize("name", list_compressors())
def test_repr_rebuilds_the_scheme(name):
    names = {cls.__name__: cls for module in STAGES
             for cls in vars(module).values() if dataclasses.is_dataclass(cls)}  # fmt: skip
    names |= {
        cls.__name__: cls
        for cls in (
            Auto,
            Codec,
            Dense,
            DenseCodec,
            Allgather,
            BucketScope,
            HardThreshold,
            CommonIndex,
        )
    }
    names |= {
        cls.__name__: cls for cls in (Dgc, GTopK, MomentumCorrection, PowerSgd, SketchSgd, SparCml)
    }
    scheme = get_scheme(name)
    assert eval(repr(scheme), names) == scheme


def test_every_stage_is_in_some_recipe():
    used = set()
    for name in list_compressors():
        coded = {"levels": 2, "coded": True}
        for options in ({}, {"bits": 32}, {"selector": "exact"}, coded):
            if name == "dorefa" and options:
                continue  # bits of its own
            if set(options) <= set(RECIPES[name].options):
                scheme = get_scheme(name, **options)
                if isinstance(scheme, BucketScope):
                    scheme = scheme.scheme
                if isinstance(scheme, Allgather) and not isinstance(scheme.codec, Codec):
                    used.add(type(scheme.codec.method))
                elif isinstance(scheme, Allgather):
                    codec = scheme.codec
                    used |= {type(codec.transform), type(codec.sparsifier), type(codec.quantizer)}
                    used.discard(type(None))  # of adaptive sparsifiers
                elif isinstance(scheme, HardThreshold):
                    used.add(Threshold)
                elif isinstance(scheme, CommonIndex):
                    used.add(type(scheme.selection))
    stages = {
        cls
        for module in STAGES
        for cls in vars(module).values()
        if dataclasses.is_dataclass(cls) and cls.__module__ == module.__name__
        if not cls.__name__.startswith("_")
    }
    assert used == stages


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("fft", {"density": 0}, ValueError, r"density must lie in \(0, 1\], got 0.0; 0.01 keeps"),
        ("fft", {"density": 2}, ValueError, r"density must lie in \(0, 1\], got 2"),
        ("topk", {"bits": 1}, ValueError, "bits must be a whole number from 2 to 16.*got 1"),
        ("dct", {"bits": 40}, ValueError, "bits must be a whole number from 2 to 16.*got 40"),
        ("fft", {"block": 100}, ValueError, "block must be one of 64"),
        ("fft", {"bits": 8.0}, TypeError, "bits must be a whole number, got 8.0"),
        ("fft", {"bits": 32.0}, TypeError, "bits must be a whole number, got 32.0"),
        ("fft", {"block": 256.0}, TypeError, "block must be a whole number, got 256.0"),
        ("ftt", {}, ValueError, r"'ftt' \(did you mean 'fft'\?\); choose one of none"),
        ("topk", {"sigma": 0.85}, TypeError, "'topk' has no option sigma; it has: density, bits"),
        ("none", {"bits": 8}, TypeError, "'none' has no option bits; it has: none"),
        ("topk", {"density": "0.1"}, TypeError, "density must be a number, got '0.1'"),
        ("qsgd", {"levels": 0}, ValueError, "levels must be a whole number from 1 .* got 0"),
        ("qsgd", {"bucket": 100}, ValueError, "bucket must be one of 64, .*; got 100"),
        ("qsgd", {"norm": "l1"}, ValueError, "norm must be one of max, l2; got 'l1'"),
        ("qsgd", {"packing": "elias"}, TypeError, "'qsgd' has no option packing; it has: levels"),
        ("qsgd", {"seed": -1}, ValueError, "seed must be a whole number"),
        ("terngrad", {"clip": -1}, ValueError, r"clip must be 0 \(never\) or more, got -1"),
        ("terngrad", {"packing": "ternary"}, ValueError, "packing must be one of base3, bits"),
        ("arctopk", {"block": 100}, ValueError, "block must be a power of two from 8 to 4096, got"),
        ("onebit", {"group": "row"}, ValueError, "group must be one of tensor, column"),
        ("strom", {"threshold": 0}, ValueError, "threshold must be a number from .*, got 0"),
        ("strom", {"quanta": 0}, ValueError, "quanta must be a whole number from 1 .* got 0"),
        ("adacomp", {"bin": 0}, ValueError, "bin must be a whole number from 1 up or None, got"),
        ("adacomp", {"bin": 0.5}, TypeError, "bin must be a whole number or None, got 0.5"),
        ("wangni", {"density": 2}, ValueError, r"density must lie in \(0, 1\], got 2"),
        ("wangni", {"seed": -1}, ValueError, "seed must be a whole number"),
        ("dorefa", {"bits": 0}, ValueError, "bits must be a whole number from 1 to 12, got 0"),
        ("topk", {"scope": "layer"}, ValueError, "scope must be one of tensor, bucket, model; got"),
        (
            "random_k",
            {"exchange": "sum"},
            ValueError,
            "exchange must be one of reduce, gather; got",
        ),
    ],
)
def test_wrong_arguments_are_told_by_name(name, options, error, message):
    with pytest.raises(error, match=message):
        get_scheme(name, **options)


@pytest.mark.parametrize("name", ["none", "fp16", "random_k"])
def test_recipes_without_payloads_have_no_codec(name):
    with pytest.raises(ValueError, match=f"'{name}' exchanges values by allreduce"):
        get_codec(name)


@pytest.mark.parametrize(
    "stages",
    [
        (transforms.Identity(), sparsifiers.TopK(0.1)),
        (transforms.Identity(), adaptive.AdaComp(), quantizers.Float32()),
        (transforms.BlockFFT(), adaptive.AdaComp()),
    ],
)
def test_a_codec_refuses_stages_that_do_not_fit(stages):
    with pytest.raises(ValueError, match="an adaptive sparsifier takes"):
        Codec(*stages)


def test_equal_options_make_equal_fingerprints():
    for density in (1, 1.0, np.float64(1), np.float32(1)):
        assert (
            get_codec("topk", density=density).fingerprint
            == get_codec("topk", density=1.0).fingerprint
        )


def test_small_tensors_and_vectors_stay_dense():
    assert not is_compressed(Tensor("bias", (10**6,)))
    assert not is_compressed(Tensor("scalar", ()))
    assert not is_compressed(Tensor("small", (31, 33)))
    assert is_compressed(Tensor("matrix", (32, 32)))
    assert is_compressed(Tensor("small", (31, 33)), min_numel=1)


SIGNS = [("signsgd", {}), ("signum", {}), ("demo", {"sign": True})]


@pytest.mark.parametrize(("recipe", "options"), SIGNS)
def test_signs_are_sent_of_every_tensor_in_every_step(recipe, options):
    """A mean gradient would be far smaller than their steps of 1."""
    tensors = [Tensor("w", (40, 50)), Tensor("bias", (50,)), Tensor("b", (3,)), Tensor("s", ())]
    policy = make_policy(recipe, **options)
    buckets = make_buckets(tensors, policy, world_size=2)
    assert sorted(t for one in buckets for t in one.tensors) == sorted(tensors)
    ruled = make_buckets(tensors, policy, [("b*", "dense")], world_size=2)
    assert [t.name for one in ruled for t in one.tensors] == ["w", "s"]
    engines = [Engine([Bucket(tuple(tensors), policy)], rank, 2) for rank in range(2)]
    rng = np.random.default_rng(0)
    for _ in range(2):
        grads = [
            [0.005 * rng.standard_normal(int(np.prod(t.shape))).astype(np.float32) for t in tensors]
            for _ in engines
        ]
        for *_, scalar in grads:
            scalar[:] = abs(scalar)  # no tie
        exchange_once(engines, [[own] for own in grads], random.Random(0))
        for total in engines[0].sums(0):
            assert set(np.unique(total)) <= {-2.0, 0.0, 2.0}
            assert total.any()
        for engine in engines:
            engine.settle()
    refusal = f"{recipe!r} sends signs, so there are no dense steps"
    with pytest.raises(ValueError, match=refusal):
        make_policy(recipe, warmup_steps=3, **options)
    others = make_policy("topk", warmup_steps=3)
    own = {"recipe": recipe, **options}
    with pytest.raises(ValueError, match=refusal + ".*in a rule that names it"):
        make_buckets(tensors, others, [("w", own)])
    [one] = make_buckets(tensors, others, [("w", {**own, "warmup_steps": 0})])
    assert one.policy.at(0).traits.sends_signs
    plain = make_policy("demo", warmup_steps=3)  # the momentum itself
    assert [t.name for b in make_buckets(tensors, plain) for t in b.tensors] == ["w"]


@pytest.mark.parametrize(("recipe", "options"), SIGNS)
def test_a_gpu_keeps_the_tensors_beside_one_that_only_the_host_can_exchange(recipe, options):
    tensors = [Tensor("w", (40, 50)), Tensor("bias", (1,)), Tensor("s", ()), Tensor("b", (50,))]
    buckets = make_buckets(tensors, make_policy(recipe, **options), world_size=2)
    there = [t.name for b in buckets if b.policy.at(0).runs_on_device(b.tensors) for t in b.tensors]
    assert {"w", "b"} <= set(there)


@pytest.mark.parametrize(("recipe", "options"), SIGNS)
def test_signs_of_empty_and_of_frozen_tensors_are_empty_and_zero(recipe, options):
    tensors = (Tensor("w", (40, 50)), Tensor("none", (0,)), Tensor("frozen", (7,)))
    policy = make_policy(recipe, **options)
    engines = [Engine([Bucket(tensors, policy)], rank, 2) for rank in range(2)]
    grads = [np.ones(2000, np.float32), np.empty(0, np.float32), None]
    exchange_once(engines, [[grads], [grads]], random.Random(0))
    some, empty, frozen = engines[1].sums(0)
    assert some.any()
    assert empty.size == 0
    assert frozen.tolist() == [0] * 7


def test_a_state_of_signum_from_before_vectors_were_compressed_loads():
    tensors = [Tensor("w", (40, 50)), Tensor("bias", (50,))]
    policy = make_policy("signum")
    old = Engine([Bucket(tuple(tensors[:1]), policy)], 0, 1)
    exchange_once([old], [[[np.ones(2000, np.float32)]]], random.Random(0))
    old.settle()
    new = Engine(make_buckets(tensors, policy), 0, 1)
    new.load_state_dict(old.state_dict())
    assert new.residual("w").any()
    assert not new.residual("bias").any()
    grads = {t.name: np.ones(t.shape, np.float32).reshape(-1) for t in tensors}
    of_buckets = [[grads[t.name] for t in bucket.tensors] for bucket in new.buckets]
    exchange_once([new], [of_buckets], random.Random(0))
    assert (new.sums(0)[-1] == 1).all()


def test_buckets_hold_whole_tensors_in_order():
    tensors = [Tensor(f"t{i}", (n, 10)) for i, n in enumerate([10, 20, 500, 5, 5, 40])]
    buckets = make_buckets(tensors, make_policy("topk"), min_numel=1, capacity_nbytes=4 * 400)
    assert [[t.name for t in bucket.tensors] for bucket in buckets] == [
        ["t0", "t1"], ["t2"], ["t3", "t4"], ["t5"]]  # fmt: skip
    assert make_buckets([], make_policy("topk")) == []
    assert make_buckets(tensors, make_policy("none"), min_numel=1) == []


def test_a_scope_of_the_model_is_one_bucket():
    tensors = [Tensor(f"layers.{i}", (500, 600)) for i in range(100)]
    for scope, n_buckets in (("tensor", 9), ("bucket", 9), ("model", 1)):
        buckets = make_buckets(tensors, make_policy("topk", scope=scope))
        assert len(buckets) == n_buckets
        assert [t for bucket in buckets for t in bucket.tensors] == tensors
    ruled = make_buckets(tensors, make_policy("topk", scope="model"), rules=[("*.1?", 0.5)])
    assert [len(bucket.tensors) for bucket in ruled] == [90, 10]


def test_scalecom_spares_the_first_convolution():
    tensors = [
        Tensor("embedding", (100, 64)), Tensor("first", (64, 3, 7, 7)),
        Tensor("second", (64, 64, 3, 3)), Tensor("head", (10, 640)),
    ]  # fmt: skip

    def compressed(recipe, rules=()):
        buckets = make_buckets(tensors, make_policy(recipe), rules)
        return [t.name for bucket in buckets for t in bucket.tensors]

    assert compressed("scalecom") == ["embedding", "second", "head"]
    assert compressed("topk") == ["embedding", "first", "second", "head"]
    assert "first" in compressed("scalecom", rules=[("first", 0.1)])


def test_no_bucket_is_a_large_share_of_the_model():
    """The last one that backward completes is encoded when nothing is left to hide it behind."""
    for n_layers, n_buckets in ((1, 1), (3, 2), (16, 8), (100, 9), (1000, 50)):
        tensors = [Tensor(f"layers.{i}", (500, 600)) for i in range(n_layers)]  # 1.2 MB each
        buckets = make_buckets(tensors, make_policy("topk"))
        assert len(buckets) == n_buckets, n_layers
        assert [t for bucket in buckets for t in bucket.tensors] == tensors
    small = [Tensor(f"layers.{i}", (100, 100)) for i in range(100)]  # 4 MB in all
    assert len(make_buckets(small, make_policy("topk"))) == 2
