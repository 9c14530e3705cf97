"""Densities by the multiplications that each weight takes, counted in a real model."""

from __future__ import annotations

import doctest

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("horovod")
flops = pytest.importorskip("horovod_fftcomp.torch.flops")
pytestmark = pytest.mark.torch
nn = torch.nn


def convolutions():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 8, 3, padding=1, stride=2),
        nn.Conv2d(8, 8, 3, padding=1, stride=2, groups=4), nn.Dropout(), nn.Flatten(),
        nn.Linear(32, 10, bias=False),
    )  # fmt: skip


def test_the_example_is_true():
    found = doctest.DocTestFinder().find(flops.rules_by_flops, globs=vars(flops))
    results = [doctest.DocTestRunner().run(example) for example in found]
    assert [result.failed for result in results] == [0]
    assert results[0].attempted == 3


@pytest.mark.parametrize(
    ("batch", "rates"), [(1, (400, 400, 400)), (9, (50, 400, 400)), (32, (25, 50, 400)),
                         (200, (25, 25, 25))]
)  # fmt: skip
def test_rates_are_those_of_positions_times_samples(batch, rates):
    rules = flops.rules_by_flops(convolutions(), torch.zeros(batch, 1, 8, 8))
    assert rules[0] == ("0.weight", "dense")
    assert rules[1:] == [
        (name, 1 / rate)
        for name, rate in zip(("2.weight", "3.weight", "6.weight"), rates, strict=True)
    ]


def test_a_sequence_multiplies_a_weight_once_for_each_token():
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 16))
    rules = flops.rules_by_flops(model, torch.zeros(4, 40, dtype=torch.long))
    assert rules == [("1.weight", 1 / 50)]


def test_uses_of_a_shared_weight_add_up():
    layer = nn.Linear(16, 16)
    assert flops.rules_by_flops(nn.Sequential(layer), torch.zeros(100, 16))[0][1] == 1 / 400
    assert flops.rules_by_flops(nn.Sequential(layer, layer), torch.zeros(100, 16))[0][1] == 1 / 25


def test_the_model_is_left_as_it_was():
    model = convolutions()
    model[1].eval()
    before = [tensor.clone() for tensor in model.state_dict().values()]
    state = torch.get_rng_state()
    flops.rules_by_flops(model, torch.ones(3, 1, 8, 8))
    assert [module.training for module in model] == [True, False, True, True, True, True, True]
    assert all(map(torch.equal, before, model.state_dict().values()))
    assert torch.equal(state, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model)


def test_own_rates_are_taken_and_have_to_reach_down_to_zero():
    model, x = convolutions(), torch.zeros(32, 1, 8, 8)
    rules = flops.rules_by_flops(model, x, rates=[(0, 1000), (500, 10)])
    assert [action for _, action in rules] == ["dense", 1 / 10, 1 / 1000, 1 / 1000]
    with pytest.raises(ValueError, match=r"end it with \(0, rate\)"):
        flops.rules_by_flops(model, x, rates=[(200, 10)])


def test_the_rules_are_legal_for_a_compressor():
    from horovod_fftcomp.engine.buckets import make_buckets
    from horovod_fftcomp.engine.policy import check_rules, make_policy
    from horovod_fftcomp.schemes import Tensor

    model = convolutions()
    policy = make_policy("scalecom")
    rules = check_rules(flops.rules_by_flops(model, torch.zeros(32, 1, 8, 8)), policy)
    tensors = [Tensor(name, tuple(p.shape)) for name, p in model.named_parameters()]
    densities = {
        tensor.name: bucket.policy.density(0)
        for bucket in make_buckets(tensors, policy, rules)
        for tensor in bucket.tensors
    }
    assert densities == {"2.weight": 1 / 25, "3.weight": 1 / 50, "6.weight": 1 / 400}
