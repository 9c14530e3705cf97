"""Contract of the ops: those of the host compute what the plain ones of ``reference_ops`` do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from horovod_fftcomp.engine.buckets import Bucket
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.policy import make_policy
from horovod_fftcomp.kernels.host.coder import HostCoder
from horovod_fftcomp.kernels.ops import Feedback
from horovod_fftcomp.schemes import MEASURE_EVERY, Round, Tensor
from horovod_fftcomp.simulation import InProcessWorld
from tests.contracts import CODECS, STEPS, make_codec
from tests.loops import each
from tests.reference_ops import ReferenceCoder, use_reference
from tests.test_bucket_codec import SHAPES, VALUES, values_of

TENSORS = (Tensor("a", (70, 31)), Tensor("b", (900,)), Tensor("c", (3, 4, 5)), Tensor("d", (0,)))
CASES = [(recipe, options) for recipe, options, _ in STEPS] + [
    ("bf16", {}),
    ("auto", {"ratio": 10, "every": 6}),
    ("fft", {"density": 0.15, "bits": 10, "block": 256}),
    ("demo", {"sign": True, "decay": 0.9}),
    *((name, {"exchange": "sharded"}) for name in ("fft", "dct", "demo", "bf16")),
    ("auto", {"ratio": 10, "every": 6, "exchange": "sharded"}),
    ("auto", {"ratio": 10, "every": 6, "beta": 0.3}),
    ("random_k", {"density": 0.3, "exchange": "gather", "beta": 0.3}),
    ("scalecom", {"density": 0.05, "bits": 16}),
    ("scalecom", {"density": 0.05, "bits": 16, "selector": "exact", "scope": "model"}),
    ("random_block", {"exchange": "gather", "scope": "bucket"}),
    ("signum", {"ranks_per_node": 1}),
    ("topk", {"density": 0.05, "ranks_per_node": 2}),
    ("scalecom", {"density": 0.05, "ranks_per_node": 2}),
    ("powersgd", {"rank": 2, "ranks_per_node": 2}),
]
N_RANKS, N_STEPS = 3, 6


def grads_of(tensors: Sequence[Tensor], step: int, rank: int) -> list[np.ndarray | None]:
    rng = np.random.default_rng([step, rank])
    grads = [rng.standard_t(3, int(np.prod(t.shape))).astype(np.float32) for t in tensors]
    if step == 2 and rank == 1:
        grads[0][5] = np.nan
    if step == 3:
        grads[1] = None
    if step == 4:
        grads[0] = np.zeros_like(grads[0])
    return grads


def account_of(recipe: str, options: dict, tensors: tuple[Tensor, ...] = TENSORS) -> list:
    """Return all that steps of several ranks send, sum and keep, by name, arrays as bytes."""
    bucket = Bucket(tensors, make_policy(recipe, **options))
    n_ranks = 2 * options["ranks_per_node"] if "ranks_per_node" in options else N_RANKS
    engines = [Engine([bucket], rank, n_ranks) for rank in range(n_ranks)]
    for engine in engines:
        engine.step = MEASURE_EVERY - 1 if options.get("warmup_steps") is None else 0
    found: list = []
    for step in range(N_STEPS):
        world = InProcessWorld(n_ranks)
        made = [e.resume(0, grads_of(tensors, step, rank)) for rank, e in enumerate(engines)]
        while isinstance(made[0], Round):
            for rank, round_ in enumerate(made):
                found.append((f"message of step {step}", round_.data.tobytes()))
                world.submit(rank, "round", round_)
            made = [e.resume(0, x) for e, x in zip(engines, world.complete("round"), strict=True)]
        for engine, outcome in zip(engines, made, strict=True):
            found.append((f"flags of step {step}", outcome.flags))
            found += [(f"sum of step {step}", total.tobytes()) for total in outcome.sums]
            engine.settle()
            state = engine.state_dict()["state"]
            found += [
                (f"{kind} of {name} after step {step}", array.tobytes())
                for kind, arrays in sorted(state.items())
                for name, array in sorted(arrays.items())
            ]
            costs = engine.costs
            found.append(("errors", (costs.relative_error, costs.total_error)))
            found.append(("steps", (costs.skipped_steps, costs.similarity)))
    return found


def assert_same_account(found: list, wanted: list) -> None:
    for ours, plain in zip(found, wanted, strict=True):
        is_error = ours[0] == "errors"  # sums of squares, added in another order
        assert pytest.approx(plain[1], rel=1e-4) == ours[1] if is_error else ours == plain, ours[0]


@pytest.mark.sampled
@pytest.mark.parametrize(("recipe", "options"), CASES)
def test_steps_are_those_of_the_reference(recipe, options, monkeypatch):
    host = account_of(recipe, options)
    use_reference(monkeypatch)
    assert_same_account(host, account_of(recipe, options))


def bytes_of(arrays):
    return [None if array is None else (array.dtype, array.tobytes()) for array in arrays]


@pytest.mark.sampled
@pytest.mark.parametrize("key", CODECS)
@each("keep", [True, False])
def test_coders_are_those_of_the_reference(key, keep, monkeypatch):
    use_reference(monkeypatch)
    codecs = [make_codec(key)] * len(SHAPES)
    tensors = [Tensor(str(number), shape) for number, shape in enumerate(SHAPES)]
    host, plain = HostCoder(codecs, tensors, 2), ReferenceCoder(codecs, tensors, 2)
    state, rng = {}, np.random.default_rng(3)
    finite = [kind for kind in VALUES if kind not in ("nan", "inf")]
    for step, kinds in enumerate((VALUES, VALUES, VALUES, finite, finite)):
        messages = []
        for rank in range(2):
            grads = [
                values_of(kinds[(2 * step + rank + n) % len(kinds)], int(np.prod(shape)), rng)
                for n, shape in enumerate(SHAPES)
            ]
            inputs = (grads, state, (step, rank), Feedback(keep), False)
            found = host.encode(*inputs)
            with np.errstate(over="ignore"):
                wanted = plain.encode(*inputs)
            assert found.message.tobytes() == wanted.message.tobytes()
            assert bytes_of(found.residuals) == bytes_of(wanted.residuals)
            messages.append(found.message)
        pairs = zip(tensors, found.residuals, strict=True)
        state = {"residual": {t.name: kept for t, kept in pairs if kept is not None}}
        gathered = np.concatenate(messages)
        with np.errstate(over="ignore", invalid="ignore"):
            found, wanted = (coder.decode_sum(gathered, False) for coder in (host, plain))
        assert bytes_of(found.sums) == bytes_of(wanted.sums)
        assert found.flags == wanted.flags


@pytest.mark.usefixtures("n_threads")
@pytest.mark.parametrize(
    "recipe", [("scalecom", {"density": 0.14}), ("random_k", {"density": 0.2}), ("powersgd", {})]
)
def test_large_buckets_are_those_of_the_reference(recipe, monkeypatch):
    sizes = [(7, 10_003), (0,), (3,), (4095,), (1,), (50_000,), (0,), (64,)]
    tensors = tuple(Tensor(str(number), shape) for number, shape in enumerate(sizes))
    host = account_of(*recipe, tensors)
    use_reference(monkeypatch)
    assert_same_account(host, account_of(*recipe, tensors))
