"""Stock Horovod drives the TensorFlow adapter; started by ``tests/test_parallel.py``."""

from __future__ import annotations

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

from horovod_fftcomp import UnsupportedError, get_scheme, simulate
from horovod_fftcomp.tensorflow import Compression
from tests import payloads
from tests.parallel import told_of_nan
from tests.parallel.tensorflow_models import (
    EXACT,
    Layers,
    batches,
    small_buckets,
    stepper,
    train,
)


@pytest.mark.parametrize("recipe", payloads.over_gloo_too(payloads.EACH))
def test_ranks_are_bit_identical_after_50_steps(recipe, same_everywhere):
    model = Layers()
    compression = small_buckets(model, recipe)
    losses = train(model, compression, 50)
    same_everywhere(*model.variables)
    assert np.mean(losses[-5:]) < 0.98 * np.mean(losses[:5])
    stats = compression.stats()
    assert stats["steps"] == 50
    assert stats["skipped_steps"] == 0
    if recipe != "none":
        rounds = [
            b.policy.at(step).rounds for b in compression.engine.buckets for step in range(50)
        ]
        assert stats["collectives"] == sum(map(len, rounds))
        assert len(rounds) == 50 * 2
        assert stats["ratio"] > (1.5 if recipe in ("fp16", "bf16") else 4)


@pytest.mark.parametrize("recipe", ["topk", "scalecom"])
def test_eager_steps_equal_those_of_a_graph(recipe, same_everywhere):
    outcomes = []
    for graph in (False, True):
        model = Layers()
        train(model, small_buckets(model, recipe), 6, graph=graph)
        outcomes.append(np.concatenate([v.numpy().ravel() for v in model.variables]))
    same_everywhere(*outcomes)
    np.testing.assert_allclose(*outcomes, rtol=1e-4, atol=1e-5)


def reduced(compression, model, **options):
    """Return the first step's gradients, as they arrive at the tape's user."""
    x, y = next(iter(batches(1)))
    return [tf.convert_to_tensor(g) for g in stepper(model, compression, **options)(x, y)[1]]


@pytest.mark.parametrize(
    "options",
    [
        {"op": hvd.Average},
        {"op": hvd.Sum},
        {"gradient_predivide_factor": 3.0},
        {"groups": 3},
        {"graph": False},
    ],
    ids=str,
)
def test_lossless_compression_equals_horovods_own_reduction(options, same_everywhere):
    dense = reduced(hvd.Compression.none, Layers(), **options)
    model = Layers()
    compressed = reduced(small_buckets(model, "topk", **EXACT), model, **options)
    for expected, actual in zip(dense, compressed, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-7)
    same_everywhere(*compressed)


def test_groups_of_variables(same_everywhere):
    model = Layers()
    groups = [model.variables[4:2:-1], model.variables[:3]]
    dense = reduced(hvd.Compression.none, model, groups=groups)
    model = Layers()
    groups = [model.variables[4:2:-1], model.variables[:3]]
    compressed = reduced(small_buckets(model, "topk", **EXACT), model, groups=groups)
    for expected, actual in zip(dense, compressed, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-7)
    same_everywhere(*compressed)


@pytest.mark.sampled
@told_of_nan
@pytest.mark.transport
@pytest.mark.parametrize(
    ("recipe", "graph", "where"),
    [
        ("none", True, "everywhere"),
        *((recipe, True, "dense") for recipe in ("fp16", "topk", "scalecom")),
        *((recipe, False, "everywhere") for recipe in ("fft", "auto", "topk")),
    ],
)
def test_a_bad_gradient_on_one_rank_is_a_step_that_never_was(recipe, graph, where, same_everywhere):
    model = Layers()
    poison = tf.Variable(1.0, trainable=False)
    compression = small_buckets(model, recipe)
    step = stepper(model, compression, 0.0, graph, poison=poison if where == "everywhere" else None)
    data = list(batches(3))
    step(*data[0])
    before = compression.state_dict()
    x, y = data[1]
    if where == "dense":  # a bias that no other gradient depends on: the head's
        model.variables[-1].assign(tf.zeros(10) + (np.inf if hvd.rank() == 1 else 0.0))
        x = x * 0.0
    poison.assign(np.nan if hvd.rank() == 1 else 1.0)
    _, grads = step(x, y)
    assert not all(np.isfinite(tf.convert_to_tensor(g)).all() for g in grads)
    poison.assign(1.0)
    model.variables[-1].assign(tf.zeros(10))
    after = compression.state_dict()
    assert compression.stats()["skipped_steps"] == (0 if recipe == "none" else 1)
    for kind, arrays in before["state"].items():
        for name, array in arrays.items():
            np.testing.assert_array_equal(after["state"][kind][name], array)
    _, grads = step(*data[2])
    same_everywhere(*(tf.convert_to_tensor(g) for g in grads))
    assert all(np.isfinite(tf.convert_to_tensor(g)).all() for g in grads)


@told_of_nan
@pytest.mark.parametrize("kind", ["vector", "rows"])
def test_a_bad_gradient_that_horovod_exchanges_makes_the_whole_step_bad(kind):
    weight, other = tf.Variable(tf.zeros([60, 60])), tf.Variable(tf.zeros([50]))
    if kind == "rows":
        other = tf.Variable(tf.zeros([50, 40]))
    compression = Compression.topk([("weight", weight), ("other", other)], timeout_s=200)

    @tf.function
    def reduce(own, factor):
        with tf.GradientTape() as plain:
            part = tf.gather(other, [1, 2]) if kind == "rows" else other
            loss = tf.reduce_sum(weight * own) + tf.reduce_sum(part * factor)
        tape = hvd.DistributedGradientTape(plain, compression=compression)
        return tape.gradient(loss, [weight, other])

    own = tf.random.stateless_normal([60, 60], [hvd.rank(), 1])
    reduce(own, 1.0)
    before = compression.residual("weight")
    grads = reduce(own, np.float32(np.nan if hvd.rank() == 1 else 1.0))
    assert compression.stats()["skipped_steps"] == 1
    np.testing.assert_array_equal(compression.residual("weight"), before)
    assert not np.isfinite(grads[0]).all()
    reduce(own, 1.0)
    assert compression.stats()["skipped_steps"] == 1
    assert not np.array_equal(compression.residual("weight"), before)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_gradients_of_other_dtypes(dtype, same_everywhere):
    weight = tf.Variable(tf.cast(tf.random.stateless_normal([60, 60], [1, 2]), dtype))
    compression = Compression.topk([weight], timeout_s=200, **EXACT)

    @tf.function
    def grads():
        with tf.GradientTape() as plain:
            loss = tf.reduce_sum(weight * weight) * (1 + hvd.rank())
        return hvd.DistributedGradientTape(plain, compression=compression).gradient(loss, [weight])

    [grad] = grads()
    assert grad.dtype == dtype
    np.testing.assert_allclose(
        tf.cast(grad, tf.float32), 3 * tf.cast(weight, tf.float32), rtol=1e-2, atol=1e-3
    )
    same_everywhere(tf.cast(grad, tf.float32))


@told_of_nan
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_half_precision_overflow_is_a_step_that_never_was(op):
    weight = tf.Variable(tf.zeros([60, 60], tf.float16))
    compression = Compression.topk([("weight", weight)], timeout_s=200, density=0.5, bits=32)

    @tf.function
    def reduce(own):
        with tf.GradientTape() as plain:
            loss = tf.reduce_sum(weight * own)
        tape = hvd.DistributedGradientTape(plain, compression=compression, op=op)
        return tape.gradient(loss, [weight])[0]

    values = np.random.default_rng(hvd.rank()).normal(size=(60, 60)).astype(np.float16)
    reduce(tf.constant(values))
    before = compression.residual("weight")
    values[3, 3] = 60_000
    assert np.isfinite(reduce(tf.constant(values))).all() == (op == hvd.Average)
    assert compression.stats()["skipped_steps"] == (op == hvd.Sum)
    assert np.array_equal(compression.residual("weight"), before) == (op == hvd.Sum)


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_sparse_gradients_travel_dense_or_gathered(sparse_as_dense, graph, same_everywhere):
    table = tf.Variable(tf.random.stateless_normal([100, 20], [1, 2]))
    weight = tf.Variable(tf.random.stateless_normal([20, 60], [3, 4]))
    pairs = [("table", table), ("weight", weight)]
    compression = Compression.topk(pairs, timeout_s=200, **EXACT)

    def step():
        with tf.GradientTape() as plain:
            rows = tf.gather(table, tf.constant([1, 5, 5]) + hvd.rank())
            loss = tf.reduce_sum(tf.square(rows @ weight))
        tape = hvd.DistributedGradientTape(
            plain, compression=compression, sparse_as_dense=sparse_as_dense
        )
        return tape.gradient(loss, [table, weight]), plain.gradient

    run = tf.function(lambda: step()[0]) if graph else lambda: step()[0]
    for _ in range(2):
        grads = run()
    assert isinstance(grads[0], tf.IndexedSlices) != sparse_as_dense
    dense = [tf.convert_to_tensor(g) for g in grads]
    same_everywhere(*dense)
    with tf.GradientTape() as tape:
        rows = [tf.gather(table, tf.constant([1, 5, 5]) + rank) for rank in range(2)]
        mean = tf.add_n([tf.reduce_sum(tf.square(each @ weight)) for each in rows]) / 2
    for expected, actual in zip(tape.gradient(mean, [table, weight]), dense, strict=True):
        np.testing.assert_allclose(actual, tf.convert_to_tensor(expected), rtol=1e-4, atol=1e-4)


def test_a_variable_without_gradient_keeps_its_residual(same_everywhere):
    model = Layers()
    compression = small_buckets(model, "topk")
    train(model, compression, 2)
    kept = compression.residual("layers.2.weight")
    others = [v for i, v in enumerate(model.variables) if i != 4]

    @tf.function
    def step(x, y):
        with tf.GradientTape() as plain:
            loss = model.loss(x, y)
        tape = hvd.DistributedGradientTape(plain, compression=compression)
        return tape.gradient(loss, others)

    same_everywhere(*step(*next(iter(batches(1)))))
    np.testing.assert_array_equal(compression.residual("layers.2.weight"), kept)
    assert not np.array_equal(compression.residual("layers.1.weight"), kept)


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
def test_two_models_and_compressors_in_one_process(graph, same_everywhere):
    models = [Layers(seed) for seed in (0, 1)]
    compressions = [small_buckets(model, "topk") for model in models]
    steps = [stepper(m, c, graph=graph) for m, c in zip(models, compressions, strict=True)]
    for x, y in batches(5):
        for step in steps:
            step(x, y)
    alone = Layers(1)
    train(alone, small_buckets(alone, "topk"), 5, graph=graph)
    for model in models:
        same_everywhere(*model.variables)
    for expected, actual in zip(alone.variables, models[1].variables, strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
def test_a_compressor_of_another_model_is_refused(graph):
    compression = small_buckets(Layers(), "topk")
    with pytest.raises(UnsupportedError, match="one model"):
        train(Layers(), compression, 1, graph=graph)


def test_eager_twins_of_one_compressor_are_refused():
    """Horovod reuses the trace of the first one for the second."""
    twins = [Layers(0), Layers(1)]
    compression = small_buckets(twins[0], "topk")
    train(twins[0], compression, 2, graph=False)
    with pytest.raises(tf.errors.UnknownError, match=r"another variable than 'layers\.0\.weight'"):
        train(twins[1], compression, 1, graph=False)
    with pytest.raises(UnsupportedError, match="interrupted by UnsupportedError"):
        compression.state_dict()


def test_other_shapes_of_batches_retrace_and_go_on(same_everywhere):
    model = Layers()
    compression = small_buckets(model, "fft")
    step = stepper(model, compression)
    for number, (x, y) in enumerate(batches(9)):
        # Ranks see the short batch in different steps, so one traces while another runs.
        n = 7 if number % 3 == hvd.rank() else 32
        step(x[:n], y[:n])
    assert step.experimental_get_tracing_count() == 2
    same_everywhere(*model.variables)
    assert compression.stats()["steps"] == 9


def test_several_steps_in_one_function(same_everywhere):
    outcomes = []
    for loops in (True, False):
        model = Layers()
        compression = small_buckets(model, "topk")
        step = stepper(model, compression)
        xs, ys = zip(*batches(8), strict=True)
        xs, ys = tf.stack(xs), tf.stack(ys)

        @tf.function
        def steps(xs, ys, step=step.python_function):
            for i in tf.range(4):
                step(xs[i], ys[i])
            step(xs[4], ys[4])
            step(xs[5], ys[5])

        if loops:
            steps(xs, ys)
        else:
            for i in range(6):
                step(xs[i], ys[i])
        assert compression.stats()["steps"] == 6
        outcomes.append(np.concatenate([v.numpy().ravel() for v in model.variables]))
    same_everywhere(*outcomes)
    np.testing.assert_allclose(*outcomes, rtol=1e-4, atol=1e-5)


def test_nothing_in_the_graph_is_stateful_or_chained():
    model = Layers()
    compression = small_buckets(model, "topk", warmup_steps=2)
    step = stepper(model, compression)
    x, y = next(iter(batches(1)))
    graph = step.get_concrete_function(x, y).graph
    operations = graph.get_operations()
    calls = [o for o in operations if "PyFunc" in o.type]
    assert len(calls) == 3 + 2 * 2  # arrive, begin, end; encode and decode of two buckets
    assert {o.type for o in calls} == {"PyFuncStateless"}
    branches = [o for o in operations if o.type in ("If", "Case", "StatelessIf", "StatelessCase")]
    assert len(branches) == 10 + 2 + 2  # of handshake and replica check, which are seldom
    assert {o.type for o in branches} == {"StatelessIf", "StatelessCase"}
    for branch in branches:
        assert not set(branch.control_inputs) & set(branches)


def test_without_compression_a_step_calls_python_once_and_seldom_meets(monkeypatch):
    model = Layers()
    compression = Compression.none(model.pairs, timeout_s=200)
    step = stepper(model, compression)
    x, y = next(iter(batches(1)))
    operations = step.get_concrete_function(x, y).graph.get_operations()
    assert [o.type for o in operations if "PyFunc" in o.type] == ["PyFuncStateless"]
    met = []
    begin = compression.driver.replicas.begin
    monkeypatch.setattr(
        compression.driver.replicas, "begin", lambda number: (met.append(number), begin(number))
    )
    for x, y in batches(25):
        step(x, y)
    assert met == [10, 20]
    assert compression.stats()["steps"] == 25


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        *((recipe, {}) for recipe in sorted({*payloads.EACH, *payloads.RECIPES} - {"none"})),
        *payloads.over_gloo_too(["topk", "fft", "strom", "signum"], {"exchange": "sharded"}),
        ("qsgd", {"exchange": "sharded", "warmup_steps": 2}),
    ],
    ids=str,
)
def test_what_is_sent_kept_and_reduced_is_that_of_a_simulation(
    recipe, options, same_everywhere, monkeypatch
):
    """To the rounding of a mean where payloads are gathered; allreduce adds in its own order."""
    spy = payloads.Spy(monkeypatch, hvd.rank())
    weight = tf.Variable(tf.zeros(payloads.SHAPE))
    compression = getattr(Compression, recipe)([("gradient", weight)], timeout_s=200, **options)

    @tf.function
    def reduce(own):
        with tf.GradientTape() as plain:
            loss = tf.reduce_sum(weight * own)
        tape = hvd.DistributedGradientTape(plain, compression=compression)
        return tape.gradient(loss, [weight])[0]

    gradients = payloads.gradients(hvd.size())
    found = [reduce(tf.constant(grad)).numpy().ravel() for grad in gradients[:, hvd.rank()]]
    same_everywhere(*found)
    if recipe in payloads.RECIPES and not options:
        payloads.check(recipe, spy, hvd.size(), hvd.rank(), compression.residual("gradient"))
    gradients = gradients.reshape(*gradients.shape[:2], -1)
    gathers = "allgather" in get_scheme(recipe).rounds
    for actual, expected in zip(found, simulate(recipe, gradients, **options), strict=True):
        scale = np.abs(expected.average).max()
        tolerance = 2e-3 if recipe == "fp16" else 1e-6
        within = {"rtol": 2e-7} if gathers else {"rtol": 0, "atol": tolerance * scale}
        np.testing.assert_allclose(actual, expected.average, **within)


@pytest.mark.parametrize(
    ("recipe", "options"), [("signsgd", {}), ("signum", {}), ("demo", {"sign": True})]
)
def test_signs_arrive_of_vectors_and_scalars(recipe, options, same_everywhere):
    shapes = {"w": (30, 40), "bias": (40,), "one": (1,), "scale": ()}
    weights = [tf.Variable(tf.zeros(shape)) for shape in shapes.values()]
    pairs = list(zip(shapes, weights, strict=True))
    compression = getattr(Compression, recipe)(pairs, timeout_s=200, **options)

    @tf.function
    def reduce(own):
        with tf.GradientTape() as plain:
            losses = [tf.reduce_sum(w * g) for w, g in zip(weights, own, strict=True)]
            loss = tf.add_n(losses)
        tape = hvd.DistributedGradientTape(plain, compression=compression)
        return tape.gradient(loss, weights)

    rng = np.random.default_rng(0)  # of all ranks: no tie is there
    own = [tf.constant(0.01 * rng.standard_normal(s), tf.float32) for s in shapes.values()]
    found = [total.numpy() for total in reduce(own)]
    same_everywhere(*found)
    for total, shape in zip(found, shapes.values(), strict=True):
        assert total.shape == shape
        assert set(np.unique(total)) <= {-1, 0, 1}
        assert total.any()


@pytest.mark.more
@pytest.mark.transport
def test_recipes_side_by_side_are_those_of_a_simulation(same_everywhere):
    weights = [tf.Variable(tf.zeros(payloads.SHAPE)) for _ in payloads.TOGETHER]
    pairs = list(zip(payloads.TOGETHER, weights, strict=True))
    compression = Compression.topk(pairs, rules=payloads.RULES, timeout_s=200)

    @tf.function
    def reduce(own):
        with tf.GradientTape() as plain:
            loss = tf.add_n([tf.reduce_sum(w * g) for w, g in zip(weights, own, strict=True)])
        tape = hvd.DistributedGradientTape(plain, compression=compression)
        return tape.gradient(loss, weights)

    shape = (len(weights), *payloads.SHAPE)
    own = np.stack(
        [
            np.random.default_rng([i, hvd.rank()]).normal(size=shape)
            for i in range(payloads.STEPS_TOGETHER)
        ]
    ).astype(np.float32)
    found = [np.stack([g.numpy().ravel() for g in reduce(list(grads))]) for grads in own]
    same_everywhere(*found)
    own = own.reshape(len(own), len(weights), -1)
    payloads.check_together(found, hvd.allgather(own[None], name="own").numpy().swapaxes(0, 1))
    assert compression.stats()["skipped_steps"] == 0


def test_data_that_end_inside_a_function_begin_no_step(same_everywhere):
    model = Layers()
    compression = small_buckets(model, "topk")
    step = stepper(model, compression).python_function
    xs, ys = zip(*batches(6), strict=True)
    dataset = tf.data.Dataset.from_tensor_slices((tf.stack(xs), tf.stack(ys)))

    @tf.function
    def next_step(iterator):
        return step(*next(iterator))[0]

    for _ in range(2):
        iterator = iter(dataset)
        for _ in range(6):
            next_step(iterator)
        with pytest.raises(tf.errors.OutOfRangeError):
            next_step(iterator)
    assert compression.stats()["steps"] == 12
    same_everywhere(*model.variables)


def test_a_loss_scale_that_would_be_a_constant_is_refused():
    model = Layers()
    compression = small_buckets(model, "topk", grad_scaler=lambda: 8.0)
    assert "without" not in repr(compression)
    options = "density=0.038, bits=4, error_feedback=True, scope='tensor', decay=1.0"
    shown = f"topk({options}): without variables yet"
    assert repr(Compression.topk(timeout_s=200)) == f"Compression.{shown}"
    with pytest.raises(TypeError, match=r"gave the number 8\.0"):
        train(model, compression, 1)
