"""What every way to run a recipe has to hand to collectives, byte by byte, and keep as residual.

The tests of each framework compare with this, so all of them send and keep the same.
"""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest

from horovod_fftcomp import list_compressors
from horovod_fftcomp.engine.buckets import Bucket
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.policy import make_policy
from horovod_fftcomp.schemes import Round, Tensor
from horovod_fftcomp.simulation import exchange_once
from tests.contracts import ADAPTIVE_RECIPES, ELEMENT_RECIPES

SHAPE = (60, 100)
STEPS = 5
RECIPES = ("fp16", "bf16", "topk", "fft", "dct", "auto", "scalecom", "random_k", "hard_threshold",
           *ADAPTIVE_RECIPES, "qsgd", "onebit", "signum")  # fmt: skip

# Recipes that the parallel tests run side by side in one training, with their options; all others
# they run one by one.
TOGETHER: dict[str, dict[str, object]] = {
    "dgc": {"density": 0.01},
    "powersgd": {"rank": 2},
    "arctopk": {"density": 0.05},
    "gtopk": {"density": 0.01},
    "sparcml": {"density": 0.01},
    "sketchsgd": {"density": 0.01},
    **{name: {} for name in (*ADAPTIVE_RECIPES, *ELEMENT_RECIPES)},
    "strom": {"threshold": 50.0},
    "wangni": {"density": 0.05},
}
STEPS_TOGETHER, COMPARED = 50, 4  # the first are compared with a simulation


def inside_nbytes(recipe, sent, n_nodes):
    """Return what a rank hands to the other of its node for 8192 elements.

    Half of the gradient, and the sums of the other half or, of sparse payloads, what all nodes have
    sent of it. ``sent``: bytes that go to other nodes in each step.
    """
    few = [
        n_nodes * nbytes if recipe == "topk" and 0 < nbytes < 1024 else 16_384 for nbytes in sent
    ]
    return sum(few) + 16_384 * len(few)


EACH = [name for name in list_compressors() if name not in TOGETHER]
# One of each list of rounds: what else a recipe does no transport changes.
OF_EACH_ROUND = ("none", "fp16", "topk", "scalecom", "gtopk", "powersgd")
# Defaults whose sums are of float16: an allreduce rounds them in its own order.
SUMS_OF_FLOAT16 = ("fp16", "arctopk")
RULES = [(name, {"recipe": name, **options}) for name, options in TOGETHER.items()]


def over_gloo_too(recipes, *values):
    """Return parameters, each with ``values``: all run over MPI, few of the recipes over Gloo."""
    return [
        pytest.param(
            recipe, *values, marks=[pytest.mark.transport] if recipe in OF_EACH_ROUND else []
        )
        for recipe in recipes
    ]


def gradients(ranks: int) -> np.ndarray:
    """Return float32 ``[STEPS, ranks, *SHAPE]``."""
    return np.random.default_rng(0).normal(size=(STEPS, ranks, *SHAPE)).astype(np.float32)


class Spy:
    """Notes what the engines of one rank hand to collectives, from now on."""

    def __init__(self, monkeypatch, rank: int) -> None:
        self.seen: list[str] = []
        plain = Engine.resume

        def resume(engine, bucket, data):
            made = plain(engine, bucket, data)
            if isinstance(made, Round) and engine.rank == rank:
                digest = hashlib.sha256(np.ascontiguousarray(made.data)).hexdigest()
                self.seen.append(f"{made.collective} {made.data.dtype} {digest}")
            return made

        monkeypatch.setattr(Engine, "resume", resume)


def check(recipe: str, spy: Spy, ranks: int, rank: int, residual: np.ndarray) -> None:
    """Assert that ``spy`` has seen, and ``rank`` keeps, what a simulation sends and keeps."""
    found, spy.seen = spy.seen, []
    bucket = Bucket((Tensor("gradient", SHAPE),), make_policy(recipe))
    engines = [Engine([bucket], number, ranks) for number in range(ranks)]
    for step in gradients(ranks):
        exchange_once(engines, [[[grad.reshape(-1)]] for grad in step], random.Random(0))
        for engine in engines:
            engine.settle()
    assert len(found) >= STEPS
    assert found == spy.seen
    np.testing.assert_array_equal(residual, engines[rank].residual("gradient"))


def simulated_together(gradients: np.ndarray) -> list[np.ndarray]:
    """Return the means, ``[recipes, elements]``, of each of the first steps of ``TOGETHER``.

    ``gradients``: float32 ``[steps, ranks, recipes, elements]``; each tensor has the name of its
    recipe.
    """
    buckets = [
        Bucket((Tensor(name, SHAPE),), make_policy(name, **options))
        for name, options in TOGETHER.items()
    ]
    engines = [Engine(buckets, rank, gradients.shape[1]) for rank in range(gradients.shape[1])]
    means = []
    for step in gradients[:COMPARED]:
        exchange_once(engines, [[[grad] for grad in own] for own in step], random.Random(0))
        sums = [engines[0].sums(number)[0] for number in range(len(buckets))]
        means.append(np.stack(sums) / np.float32(len(engines)))
        for engine in engines:
            engine.settle()
    return means


def check_together(found: list[np.ndarray], gradients: np.ndarray) -> None:
    """Assert that the first means are those of a simulation; allreduce adds in its own order."""
    for step, expected in zip(found[:COMPARED], simulated_together(gradients), strict=True):
        for name, mean, simulated in zip(TOGETHER, step, expected, strict=True):
            tolerance = 2e-3 if name in SUMS_OF_FLOAT16 else 2e-5
            scale = np.abs(simulated).max()
            np.testing.assert_allclose(
                mean, simulated, atol=tolerance * scale, rtol=0, err_msg=name
            )
