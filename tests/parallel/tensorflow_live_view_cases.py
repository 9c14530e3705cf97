"""What a compressor tells while it trains by TensorFlow: lines of JSON, scalars and a warning."""

from __future__ import annotations

import json
import warnings

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

from horovod_fftcomp.monitor.step_log import figures
from horovod_fftcomp.tensorflow import Compression
from tests.parallel.tensorflow_models import Layers, batches, small_buckets, stepper, train


def scalars_in(folder):
    """Return the scalars in the event file of a folder, by name and step."""
    [file] = folder.iterdir()
    events = [tf.compat.v1.Event.FromString(e.numpy()) for e in tf.data.TFRecordDataset(str(file))]
    return {
        (value.tag, event.step): float(tf.make_ndarray(value.tensor))
        for event in events
        for value in event.summary.value
        if value.metadata.plugin_data.plugin_name == "scalars"
    }


@pytest.mark.parametrize(
    ("recipe", "graph"), [("none", True), ("topk", True), ("scalecom", False)], ids=str
)
def test_the_first_rank_writes_what_stats_tells(recipe, graph, tmp_path, same_everywhere):
    path, folder = tmp_path / "live.jsonl", tmp_path / "events"
    writer = tf.summary.create_file_writer(str(folder))
    outcomes, moments = [], [{}]
    for options in ({}, {"live_view": path, "scalars": writer, "live_every": 3}):
        model = Layers()
        compression = small_buckets(model, recipe, **options)
        step = stepper(model, compression, graph=graph)
        for number, (x, y) in enumerate(batches(7)):
            step(x, y)
            if number in (2, 5, 6):
                moments.append(compression.stats())
        outcomes.append(np.concatenate([v.numpy().ravel() for v in model.variables]))
    np.testing.assert_array_equal(*outcomes)
    same_everywhere(outcomes[0])
    writer.close()
    scalars = scalars_in(folder)
    assert path.exists() == bool(scalars) == (hvd.rank() == 0)
    if hvd.rank() == 0:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        ratios, moments = compression.residual_ratios(), [{}, *moments[-3:]]
        assert lines == [
            {"step": 3 * i} | figures(moments[i - 1], moments[i], ratios) for i in (1, 2)
        ]
        assert scalars == {
            (f"fftcomp/{name}", line["step"]): np.float32(value)
            for line in lines
            for name, value in line.items()
            if type(value) in (int, float) and name not in ("step", "steps")
        }


def test_lines_and_scalars_come_while_a_training_asks_for_nothing(tmp_path):
    """So they are written by the operation that begins a step, in a thread of TensorFlow's."""
    path, folder = tmp_path / "live.jsonl", tmp_path / "events"
    writer = tf.summary.create_file_writer(str(folder))
    model = Layers()
    options = {"live_view": str(path), "scalars": writer, "live_every": 2}
    train(model, small_buckets(model, "fft", **options), 6)
    writer.close()
    if hvd.rank() == 0:  # the sixth step is closed by the seventh
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line["step"] for line in lines] == [2, 4]
        assert {step for _, step in scalars_in(folder)} == {2, 4}


def test_what_cannot_be_written_does_not_end_a_training(tmp_path, same_everywhere):
    writer = tf.summary.create_file_writer(str(tmp_path))
    writer.close()
    model = Layers()
    options = {"live_view": "/dev/full", "scalars": writer, "live_every": 1}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, small_buckets(model, "topk", **options), 4)
    texts = [str(w.message) for w in caught if "cannot be written" in str(w.message)]
    assert len(texts) == (2 if hvd.rank() == 0 else 0)
    same_everywhere(*model.variables)
    with pytest.raises(TypeError, match=r"scalars must have add_scalar.*tf\.summary; got int"):
        small_buckets(model, "topk", scalars=3)


def test_a_residual_that_outgrows_its_gradient_is_warned_of(tmp_path):
    """The gradient fades faster than the residual is sent."""
    path = tmp_path / "live.jsonl"
    weight = tf.Variable(tf.zeros([40, 40]), name="weight")
    options = {"density": 0.01, "live_view": path, "live_every": 266, "timeout_s": 200}
    compression = Compression.topk([("weight", weight)], **options)
    own = tf.random.stateless_normal([40, 40], [1, hvd.rank()])

    @tf.function
    def reduce(scale):
        with tf.GradientTape() as plain:
            loss = tf.reduce_sum(weight * own) * scale
        tape = hvd.DistributedGradientTape(plain, compression=compression)
        return tape.gradient(loss, [weight])[0]

    scales = [tf.constant(0.9**step, tf.float32) for step in range(267)]
    with pytest.warns(RuntimeWarning, match="residual of 'weight'"):
        list(map(reduce, scales))  # measured at steps 0, 53, ..., 265
    if hvd.rank() == 0:
        line = json.loads(path.read_text())
        assert line["residual_tensor"] == "weight"
        ratio = compression.residual_ratios()["weight"]
        assert line["residual_ratio"] == pytest.approx(ratio)
        assert ratio > 100
