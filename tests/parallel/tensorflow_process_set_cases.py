"""Compression inside process sets, in TensorFlow; on three ranks, two of which train together."""

from __future__ import annotations

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

from horovod_fftcomp import get_scheme
from tests import payloads
from tests.parallel.sets import sets_of_job
from tests.parallel.tensorflow_models import Layers, batches, small_buckets, stepper, train


@pytest.fixture(scope="module")
def sets():
    return sets_of_job()


@pytest.mark.parametrize(
    "recipe",
    payloads.over_gloo_too(["none", "fp16", "bf16", "topk", "fft", "random_k", "scalecom"]),
)
def test_members_agree_and_the_others_are_left_alone(recipe, sets):
    model = Layers()
    compression = small_buckets(model, recipe, process_set=sets["pair"])
    train(model, compression, 10, process_set=sets["pair"])
    flat = np.concatenate([v.numpy().ravel() for v in model.variables])
    everyone = hvd.allgather_object(flat)
    assert np.array_equal(everyone[0], everyone[2])
    assert not np.array_equal(everyone[0], everyone[1])
    if hvd.rank() == 1:
        assert not compression.stats()["steps"]
    elif recipe != "none":
        assert compression.stats()["collectives"] == 10 * 2 * len(get_scheme(recipe).rounds)


@pytest.mark.transport
def test_a_compressor_on_another_set_than_its_tape(sets):
    """It would wait for ranks that never come; all members get the same message instead."""
    model = Layers()
    wrong = hvd.global_process_set if hvd.rank() == 2 else sets["pair"]
    compression = small_buckets(model, "topk", process_set=wrong)
    step = stepper(model, compression, process_set=sets["pair"])
    x, y = next(iter(batches(1)))
    if hvd.rank() == 1:
        step(x, y)
    else:
        with pytest.raises(tf.errors.UnknownError, match="process set is"):
            step(x, y)
    hvd.allgather_object("a rank that ended here would shut Horovod down")


def test_every_recipe_on_three_ranks(same_everywhere):
    plain = [(recipe, {}) for recipe in ("topk", "fft", "scalecom", "hard_threshold", "auto")]
    sharded = [(recipe, {"exchange": "sharded"}) for recipe in ("topk", "fft", "qsgd", "auto")]
    for recipe, options in plain + sharded:
        model = Layers()
        train(model, small_buckets(model, recipe, **options), 6)
        same_everywhere(*(tf.convert_to_tensor(v) for v in model.variables))
