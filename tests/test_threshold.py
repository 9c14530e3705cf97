"""Hard threshold: what it leaves, how its threshold is found, and what varies with the values."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_fftcomp import formula_threshold, get_codec, get_scheme, simulate, wire
from horovod_fftcomp.codec.sparsifiers import Threshold
from horovod_fftcomp.engine.buckets import Bucket
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.policy import always
from horovod_fftcomp.schemes import Tensor
from tests.backends import given


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("threshold", [0.1, 1.0, 3.7])
def test_every_residual_stays_below_the_threshold(threshold):
    for step in simulate("hard_threshold", normal(40, 3, 2000), threshold=threshold):
        assert np.abs(step.residual).max() < threshold


@pytest.mark.parametrize("threshold", [0.5, 2.0])
def test_every_step_is_that_of_the_formulas(threshold):
    gradients = normal(20, 3, 1000)
    residual = np.zeros((3, 1000))
    for grads, step in zip(
        gradients, simulate("hard_threshold", gradients, threshold=threshold), strict=True
    ):
        due = residual + grads
        sent = np.where(np.abs(due) >= threshold, due, 0)
        residual = due - sent
        np.testing.assert_allclose(step.average, sent.mean(0), atol=2e-6)
        np.testing.assert_allclose(step.residual, residual, atol=2e-6)


def test_a_value_equal_to_the_threshold_is_sent():
    below = np.nextafter(np.float32(0.1), np.float32(0))
    x = np.array([0.1, below, -0.1, -below, 0] * 20, np.float32)
    decoded = get_codec("hard_threshold", threshold=0.1).decode(
        get_codec("hard_threshold", threshold=0.1).encode(x)
    )
    assert decoded.tolist() == np.where(np.abs(x) == np.float32(0.1), x, np.float32(0)).tolist()


@pytest.mark.parametrize(
    ("n_large", "layout"),
    [(0, 1), (1, 3), (30, 3), (3000, 2), (9600, 2), (9700, 0), (10_000, 0)],
)
def test_the_layout_follows_from_how_many_are_sent(n_large, layout):
    """Nothing but a header for none; the tensor itself where positions would cost more."""
    x = np.zeros(10_000, np.float32)
    x[np.random.default_rng(0).permutation(10_000)[:n_large]] = 1.0
    codec = get_codec("hard_threshold", threshold=0.5)
    payload = codec.encode(x)
    header = wire.read_header(payload)
    assert header.layout == layout
    if n_large == 0:
        assert payload.size == 48
    assert payload.size <= 48 + 4 * 10_000
    assert codec.decode(payload).tobytes() == x.tobytes()


def test_two_values_of_which_one_is_sent_travel_as_they_are():
    """A position and a code would take more bytes, whatever the code's bits."""
    x = np.array([2.0, 0.25], np.float32)
    for bits in (3, 6, 16, 32):
        codec = get_codec("hard_threshold", threshold=1.0, bits=bits)
        assert codec.decode(codec.encode(x)).tobytes() == x.tobytes()


def test_payloads_of_all_layouts_add_up():
    codec, rng = get_codec("hard_threshold", threshold=0.5), np.random.default_rng(1)
    xs = [(rng.random(5000) < share).astype(np.float32) for share in (0, 0.001, 0.3, 0.99, 1)]
    payloads = [codec.encode(x) for x in xs]
    assert len({wire.read_header(payload).layout for payload in payloads}) == 4
    for backend in ("reference", "cpu"):
        assert codec.decode_sum(payloads, **given(backend)).tobytes() == sum(xs).tobytes()


def test_a_step_may_send_nothing_at_all():
    gradients = np.full((3, 2, 500), 0.4, np.float32)
    quiet, loud, _ = simulate("hard_threshold", gradients, threshold=0.8)
    assert quiet.sent_bytes == [48, 48]
    assert not quiet.average.any()
    assert (loud.average == np.float32(0.8)).all()
    assert not loud.residual.any()


def test_calibration_is_topk_and_ends_in_a_threshold_that_stays():
    gradients, steps = normal(60, 3, 4000), 20
    options = {"density": 0.02, "calibrate_steps": steps}
    ours = list(simulate("hard_threshold", gradients, **options))
    topk = list(simulate("topk", gradients, density=0.02, bits=32))
    for one, other in zip(ours[:steps], topk[:steps], strict=True):
        assert one.average.tobytes() == other.average.tobytes()
    levels = [
        np.mean([np.sort(np.abs(due))[-80] for due in before.residual + grads])
        for before, grads in zip(topk[9 : steps - 1], gradients[10:steps], strict=True)
    ]
    threshold = np.mean(levels)
    for step in ours[steps:]:
        assert np.abs(step.residual).max() < threshold * (1 + 1e-5)
    sizes = {step.sent_bytes[0] for step in ours[steps:]}
    assert len(sizes) > 10


def test_a_calibrated_run_sends_about_as_much_as_its_density():
    gradients = (np.random.default_rng(0).standard_normal((1, 20_000)) for _ in range(400))
    options = {"density": 0.01, "calibrate_steps": 200}
    sent = [step.sent_bytes[0] for step in simulate("hard_threshold", gradients, **options)]
    expected = get_scheme("hard_threshold", **options).sent_nbytes(Tensor("g", (20_000,)))
    assert sent[0] == expected
    assert 0.5 * expected < np.mean(sent[200:]) < 2 * expected


def test_tensors_without_gradient_do_not_count_as_calibration():
    tensors = (Tensor("a", (300,)), Tensor("b", (300,)))
    scheme = get_scheme("hard_threshold", density=0.1, calibrate_steps=2)
    engine = Engine([Bucket(tensors, always(scheme))], 0, 1)
    for number in range(4):
        grads = [normal(300, seed=number), None if number == 0 else np.zeros(300, np.float32)]
        engine.resume(0, engine.resume(0, grads).data)
        engine.settle()
    levels = engine.state_dict()["state"]["levels"]
    assert (levels["a"] > 0).all()
    assert np.isnan(levels["b"]).all()


@pytest.mark.parametrize("given", [True, False])
def test_a_loss_scale_changes_the_threshold_with_the_gradients(given):
    options = {"threshold": 1.5} if given else {"density": 0.05, "calibrate_steps": 3}
    tensor, scheme = Tensor("w", (1000,)), get_scheme("hard_threshold", **options)
    plain = Engine([Bucket((tensor,), always(scheme))], 0, 1)
    scaled = Engine([Bucket((tensor,), always(scheme))], 0, 1)
    for number in range(8):
        scale = 2.0 ** (number % 3)
        scaled.follow_loss_scale(scale)
        grad = normal(1000, seed=number)
        plain.resume(0, plain.resume(0, [grad]).data)
        scaled.resume(0, scaled.resume(0, [grad * np.float32(scale)]).data)
        assert scaled.sums(0)[0].tobytes() == (plain.sums(0)[0] * np.float32(scale)).tobytes()
        plain.settle()
        scaled.settle()
    assert scaled.costs.sent_nbytes == plain.costs.sent_nbytes
    assert scaled.costs.total_error == pytest.approx(plain.costs.total_error, rel=1e-5)


def test_the_total_error_is_the_sum_of_what_every_step_left():
    gradients = normal(60, 1, 700)
    tensor, scheme = Tensor("w", (700,)), get_scheme("hard_threshold", threshold=1.0)
    engine = Engine([Bucket((tensor,), always(scheme))], 0, 1)
    expected = 0.0
    for grad, step in zip(
        gradients[:, 0], simulate("hard_threshold", gradients, threshold=1.0), strict=True
    ):
        engine.resume(0, engine.resume(0, [grad]).data)
        engine.settle()
        expected += float((step.residual.astype(np.float64) ** 2).sum())
    assert engine.costs.total_error == pytest.approx(expected, rel=1e-4)
    topk = Engine([Bucket((tensor,), always(get_scheme("topk", density=0.1)))], 0, 1)
    for grad in gradients[:, 0]:
        topk.resume(0, topk.resume(0, [grad]).data)
        topk.settle()
    assert topk.costs.total_error > 0


def test_new_ranks_know_the_threshold_of_the_others():
    scheme = get_scheme("hard_threshold", density=0.1, calibrate_steps=2)
    bucket = Bucket((Tensor("w", (300,)),), always(scheme))
    engine = Engine([bucket], 0, 1)
    for number in range(3):
        engine.resume(0, engine.resume(0, [normal(300, seed=number)]).data)
        engine.settle()
    gathered = {"version": 1, "world_size": 1, "ranks": [engine.state_dict()]}
    old, new = Engine([bucket], 0, 2), Engine([bucket], 1, 2)
    old.load_state_dict(gathered)
    new.load_state_dict(gathered)
    levels = [e.state_dict()["state"]["levels"]["w"].tobytes() for e in (engine, old, new)]
    assert len(set(levels)) == 1
    assert old.residual("w").any()
    assert not new.residual("w").any()


def test_the_formula_is_that_of_the_published_runs():
    assert formula_threshold(11_173_962, 0.001) == pytest.approx(4.73e-3, rel=1e-3)
    assert formula_threshold(6_166_250, 0.001) == pytest.approx(6.37e-3, rel=1e-3)


@pytest.mark.parametrize("bad", [0, -1.0, np.nan, np.inf, "1", True, 1e-40, 1e39])
def test_thresholds_that_cannot_be_are_refused(bad):
    of_type = not isinstance(bad, str | bool)
    with pytest.raises(ValueError if of_type else TypeError, match=r"threshold must be a .*number"):
        get_scheme("hard_threshold", threshold=bad)
    with pytest.raises(ValueError, match="threshold"):
        Threshold(bad)


def test_other_arguments_are_told_by_name():
    with pytest.raises(ValueError, match="calibrate_steps"):
        get_scheme("hard_threshold", calibrate_steps=0)
    with pytest.raises(ValueError, match="threshold="):
        get_codec("hard_threshold")
    with pytest.raises(ValueError, match="depends on the values"):
        get_codec("hard_threshold", threshold=1.0).payload_nbytes(1000)
