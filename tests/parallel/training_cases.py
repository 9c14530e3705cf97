"""What real training does to a compressor: AMP, checkpoints, schedules, rules, frozen layers."""

from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from torch import nn

from horovod_fftcomp import ConfigMismatchError, get_scheme, schedules
from horovod_fftcomp.engine.recipe_text import parse_recipe
from horovod_fftcomp.monitor.density_recovery import Recover
from horovod_fftcomp.torch import AdamW, Compression
from tests.parallel import told_of_nan
from tests.parallel.models import (
    ScriptedScaler,
    batches,
    distributed,
    flat,
    loss_of,
    make_model,
    small_buckets,
    synchronized_step,
    train,
)

COMPRESSED = ["fp16", "bf16", "topk", "fft", "dct", "random_block"]


@pytest.mark.sampled
@pytest.mark.parametrize("recipe", ["topk", "fft", "dct"])
def test_scripted_loss_scales_do_not_change_the_training(recipe, same_everywhere):
    final = {}
    for scales in ([1.0], [1024.0, 1024.0, 512.0, 2048.0, 65536.0, 0.25]):
        scaler = ScriptedScaler(scales)
        model = make_model()
        optimizer = distributed(model, small_buckets(model, recipe, grad_scaler=scaler), lr=0.02)
        for step, (x, y) in enumerate(batches(40)):
            scaler.step = step
            optimizer.zero_grad()
            (loss_of(model, x, y, step) * scaler.get_scale()).backward()
            optimizer.synchronize()
            for parameter in model.parameters():
                parameter.grad /= scaler.get_scale()
            with optimizer.skip_synchronize():
                optimizer.step()
        same_everywhere(flat(model))
        final[len(scales)] = flat(model)
    assert (final[1] - final[6]).abs().max() <= 1e-6


@pytest.mark.transport
@pytest.mark.parametrize("recipe", COMPRESSED)
def test_grad_scaler_skips_bad_steps_on_all_ranks(recipe, same_everywhere):
    model = make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=4)
    compression = small_buckets(model, recipe, grad_scaler=scaler)
    optimizer = distributed(model, compression, lr=0.02)
    bad_steps = {3: float("nan"), 7: float("inf"), 8: -float("inf")}
    for step, (x, y) in enumerate(batches(14)):
        optimizer.zero_grad()
        before = flat(model)
        loss = loss_of(model, x, y, step)
        hook = None
        if step in bad_steps and hvd.rank() == step % 2:
            value = bad_steps[step]
            hook = model.layers[step % 6].weight.register_hook(lambda g, v=value: g * 0 + v)
        scaler.scale(loss).backward()
        if hook is not None:
            hook.remove()
        optimizer.synchronize()
        scale = scaler.get_scale()
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        same_everywhere(flat(model), str(scaler.get_scale()))
        assert torch.equal(flat(model), before) == (step in bad_steps)
        assert (scaler.get_scale() < scale) == (step in bad_steps)
    compression.residual("layers.0.weight")
    assert compression.stats()["skipped_steps"] == len(bad_steps)
    assert torch.isfinite(flat(model)).all()


@told_of_nan
def test_half_precision_overflow_is_a_step_that_never_was():
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False).to(torch.float16)
    compression = Compression.topk(model, density=0.5, timeout_s=200)
    optimizer = distributed(model, compression, op=hvd.Sum)
    model.weight.grad = None
    (model(torch.full((1, 64), 60000.0, dtype=torch.float16)).float().sum()).backward()
    optimizer.synchronize()
    assert torch.isinf(model.weight.grad).any()
    assert not compression.residual("weight").any()
    assert compression.stats()["skipped_steps"] == 1


def test_warm_up_and_schedule(same_everywhere):
    model = make_model()
    schedule = schedules.Linear(0.5, 0.05, 5)
    compression = small_buckets(model, "fft", warmup_steps=3, density_schedule=schedule)
    optimizer = distributed(model, compression)
    sent = []
    for step, (x, y) in enumerate(batches(10)):
        before = compression.stats()["sent_nbytes"]
        optimizer.zero_grad()
        loss_of(model, x, y, step).backward()
        optimizer.step()
        sent.append(compression.stats()["sent_nbytes"] - before)
    same_everywhere(flat(model))
    assert sent[0] == sent[1] == sent[2] > sent[3] > sent[5] > sent[7]
    assert sent[8] == sent[9]


def test_density_changes_on_all_ranks_together(same_everywhere):
    model = make_model()
    compression = small_buckets(model, "topk", density=0.01)
    optimizer = distributed(model, compression)
    train(model, optimizer, 3)
    compression.set_density(0.3)
    train(model, optimizer, 3)
    assert compression.stats()["density"] == 0.3
    same_everywhere(flat(model))
    with pytest.raises(ConfigMismatchError, match=r"density is 0.1 on rank 0 but 0.2 on rank 1"):
        compression.set_density(0.1 + 0.1 * hvd.rank())
    assert compression.stats()["density"] == 0.3
    with pytest.raises(ValueError, match="density must lie"):
        compression.set_density(3)
    train(model, optimizer, 2)
    same_everywhere(flat(model))
    resumed = small_buckets(make_model(), "topk", density=0.01)
    early = resumed.state_dict()
    resumed.load_state_dict(compression.state_dict())
    assert resumed.stats()["density"] == 0.3
    resumed.load_state_dict(early)
    assert resumed.stats()["density"] == 0.01


def test_a_changed_density_leaves_ruled_tensors_alone(same_everywhere):
    model = make_model()
    compression = small_buckets(model, "topk", rules=[("layers.1.*", 0.5)])
    optimizer = distributed(model, compression)
    compression.set_density(0.5)
    train(model, optimizer, 1)
    compression.set_density(0.2)
    train(model, optimizer, 1)
    rows = (line.split() for line in compression.summary().splitlines())
    densities = {name: density for name, _, _, density, *_ in rows}
    assert densities["layers.1.weight"] == "0.5"
    assert densities["layers.2.weight"] == "0.2"
    same_everywhere(flat(model))


def test_misspelt_rules_are_told():
    with pytest.warns(UserWarning, match=r"no parameter's name matches 'layer.0.\*'"):
        small_buckets(make_model(), "topk", rules=[("layer.0.*", "dense")])


def test_ranks_whose_loss_scales_differ(same_everywhere):
    model = make_model()
    scaler = ScriptedScaler([256.0 * (1 + hvd.rank())])
    optimizer = distributed(model, small_buckets(model, "topk", grad_scaler=scaler))
    with pytest.raises(ConfigMismatchError, match=r"loss scale is 256.0 on rank 0 but 512.0"):
        loss_of(model, *next(batches(1))).backward()
    del optimizer


def test_reports_of_a_worse_metric_raise_the_density(same_everywhere):
    model = make_model()
    compression = small_buckets(model, "topk", density=0.01, recover=Recover(factor=4, patience=2))
    optimizer = distributed(model, compression)
    # The first rank's reports decide, whatever the others say.
    for first, other in [(1.0, 9.0), (1.5, 0.1), (1.4, 0.1), (2.0, 0.1)]:
        train(model, optimizer, 1)
        compression.report(first if hvd.rank() == 0 else other)
    assert compression.stats()["density"] == pytest.approx(0.04)
    train(model, optimizer, 2)
    same_everywhere(flat(model))
    with pytest.raises(ValueError, match="recover="):
        small_buckets(make_model(), "topk").report(1.0)


def test_rules_by_name(same_everywhere):
    model = make_model()
    rules = [
        ("layers.0.*", "dense"),
        ("layers.1.weight", 0.5),
        (lambda tensor: tensor.name == "layers.2.weight", {"recipe": "fft", "bits": 6}),
    ]
    compression = small_buckets(model, "topk", rules=rules)
    train(model, distributed(model, compression), 10)
    same_everywhere(flat(model))
    used = {t.name: b.policy.at(0) for b in compression.engine.buckets for t in b.tensors}
    assert "layers.0.weight" not in used
    assert used["layers.1.weight"] == get_scheme("topk", density=0.5)
    assert used["layers.2.weight"] == get_scheme("fft", bits=6)
    assert used["layers.3.weight"] == get_scheme("topk")


def test_a_step_in_which_a_layer_is_frozen(same_everywhere):
    model = make_model()
    compression = small_buckets(model, "topk")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )
    train(model, optimizer, 3)
    frozen = model.layers[4].weight
    frozen.requires_grad_(False)
    weights, residual = frozen.detach().clone(), compression.residual("layers.4.weight")
    train(model, optimizer, 3)
    assert torch.equal(frozen, weights)
    assert torch.equal(compression.residual("layers.4.weight"), residual)
    frozen.requires_grad_(True)
    train(model, optimizer, 3)
    assert not torch.equal(frozen, weights)
    same_everywhere(flat(model))


def test_embeddings_of_one_shape_made_dense_by_horovod(same_everywhere):
    """Horovod hands over copies of sparse gradients; only their values tell whose they are."""

    class Twins(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Embedding(50, 40, sparse=True)
            self.b = nn.Embedding(50, 40, sparse=True)

        def forward(self, i, flip):
            parts = [self.a(i).square(), self.b(i + 1).abs()]
            return sum(reversed(parts) if flip else parts)

    torch.manual_seed(0)
    model = Twins()
    compression = Compression.topk(model, density=1.0, bits=32, timeout_s=200)
    optimizer = distributed(model, compression, lr=0.1, sparse_as_dense=True)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.arange(8) + step, flip=(hvd.rank() + step) % 2 == 1).sum().backward()
        optimizer.step()
    same_everywhere(flat(model))
    torch.manual_seed(0)
    alone = Twins()  # the ranks' data is the same, so one rank alone must do the same
    plain = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        plain.zero_grad()
        alone(torch.arange(8) + step, flip=False).sum().backward()
        plain.step()
    torch.testing.assert_close(flat(model), flat(alone))


def test_part_of_a_model(same_everywhere):
    model = make_model()
    for parameter in model.layers[0].parameters():
        parameter.requires_grad_(False)
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([p for _, p in trained], lr=0.05),
        named_parameters=trained,
        compression=Compression.topk(trained, timeout_s=200),
    )
    train(model, optimizer, 5)
    same_everywhere(flat(model))


@pytest.mark.parametrize("too_early", [True, False])
def test_clipping_before_synchronize_is_told_once(too_early):
    model = make_model()
    optimizer = distributed(model, small_buckets(model, "topk"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step, (x, y) in enumerate(batches(3)):
            optimizer.zero_grad()
            loss_of(model, x, y, step).backward()
            if too_early:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            synchronized_step(optimizer)
    told = [w for w in caught if "between backward() and synchronize()" in str(w.message)]
    assert len(told) == too_early


def test_clipping_between_synchronize_and_step(same_everywhere):
    model = make_model()
    optimizer = distributed(model, small_buckets(model, "fft"))
    for step, (x, y) in enumerate(batches(10)):
        optimizer.zero_grad()
        loss_of(model, x, y, step).backward()
        optimizer.synchronize()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()
        same_everywhere(norm.reshape(1))
    same_everywhere(flat(model))


@pytest.mark.sampled
@pytest.mark.transport
@pytest.mark.parametrize("recipe", ["none", "topk"])
@pytest.mark.parametrize("action", ["warn", "broadcast"])
def test_a_flipped_bit_in_one_rank_is_reported_by_name(action, recipe, same_everywhere):
    model = make_model()
    optimizer = distributed(model, small_buckets(model, recipe, replica_check=action))
    train(model, optimizer, 3)
    weight = model.layers[2].weight
    if hvd.rank() == 1:
        weight.data.view(-1).view(torch.int32)[7] ^= 1
    with pytest.warns(RuntimeWarning, match=r"layers\.2\.weight") as caught:
        train(model, optimizer, 100)
    texts = [str(w.message) for w in caught]
    assert any("on rank 1" in text for text in texts)
    weights = hvd.allgather(weight.detach().reshape(1, -1), name="weights")
    assert torch.equal(weights[0], weights[1]) == (action == "broadcast")
    if action == "broadcast":
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(model, optimizer, 100)
        same_everywhere(flat(model))


def folder_of_first_rank(tmp_path):
    return Path(hvd.broadcast_object(str(tmp_path), 0))


def test_the_first_ranks_gradients_are_recorded(tmp_path, same_everywhere):
    path = folder_of_first_rank(tmp_path) / "grads"
    model = make_model()
    compression = small_buckets(model, "topk", density=0.2, record=path, record_every=3)
    optimizer = distributed(model, compression)
    own = {}
    for step, (x, y) in enumerate(batches(8)):
        if step == 4:
            model.layers[2].weight.requires_grad_(False)
        optimizer.zero_grad()
        loss_of(model, x, y, step).backward()
        for name, parameter in model.named_parameters():
            if name.startswith("layers") and parameter.dim() > 1 and parameter.requires_grad:
                own[f"{step}/{name}"] = parameter.grad.clone().numpy()
        optimizer.step()
        for parameter in model.parameters():  # as some scripts do before the next backward
            parameter.grad.zero_()
    same_everywhere(flat(model))
    if hvd.rank() == 0:
        compression.recorder.flush()
        assert {file.name for file in path.iterdir()} == {"0.npz", "3.npz", "6.npz"}
        recorded = {
            f"{file.stem}/{name}": grad
            for file in path.iterdir()
            for name, grad in np.load(file).items()
        }
        assert set(recorded) == {key for key in own if key.split("/")[0] in ("0", "3", "6")}
        assert "6/layers.2.weight" not in recorded
        for key in recorded:
            assert recorded[key].tobytes() == own[key].tobytes()
    else:
        assert compression.recorder is None


def test_a_recording_changes_nothing_and_is_refused_where_one_is(tmp_path, same_everywhere):
    path = folder_of_first_rank(tmp_path) / "grads"
    ends = []
    for options in ({}, {"record": str(path), "record_every": 1}):
        model = make_model()
        train(model, distributed(model, small_buckets(model, "fft", **options)), 5)
        ends.append(flat(model))
    assert torch.equal(*ends)
    same_everywhere(ends[0])
    if hvd.rank() == 0:
        with pytest.raises(FileExistsError, match="exists and is not overwritten"):
            small_buckets(make_model(), "fft", record=path)
    with pytest.raises(ValueError, match="record_every must"):
        small_buckets(make_model(), "fft", record_every=0)
    with pytest.raises(TypeError, match="record_every must"):
        small_buckets(make_model(), "fft", record_every=True)
    with pytest.raises(TypeError, match="record must be a path"):
        small_buckets(make_model(), "fft", record=3)


def test_relative_error_and_ratios_are_told():
    model = make_model()
    compression = small_buckets(model, "topk", density=0.1)
    train(model, distributed(model, compression), 2)
    assert 0 < compression.stats()["relative_error"] < 1
    ratios = compression.residual_ratios()
    assert set(ratios) == {f"layers.{i}.weight" for i in range(6)}
    assert all(np.isfinite(list(ratios.values())))


ONE = torch.tensor([1])


def late_bloomer(frozen):
    """Return (model, compression, optimizer) of a model whose first layer is frozen or left out."""
    model = make_model()
    kept = [p for n, p in model.named_parameters() if not n.startswith("layers.0")]
    if frozen:
        model.layers[0].requires_grad_(False)
    compression = small_buckets(model, "topk")
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters() if frozen else kept, lr=0.05),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    return model, compression, optimizer


@pytest.mark.transport
@pytest.mark.parametrize("frozen", [True, False], ids=["unfrozen later", "added to the optimizer"])
def test_a_parameter_that_trains_unexchanged_is_named_at_its_first_step_and_checked(frozen):
    model, _, optimizer = late_bloomer(frozen)
    train(model, optimizer, 2)
    if frozen:
        model.layers[0].requires_grad_(True)
    else:
        optimizer.add_param_group({"params": list(model.layers[0].parameters())})
    with pytest.warns(RuntimeWarning, match="parameters alone") as caught:
        train(model, optimizer, 1)
    [text] = {str(warning.message) for warning in caught}
    assert "'layers.0.weight', 'layers.0.bias'" in text
    assert "without compression Horovod would not reduce them either" in text
    with pytest.warns(RuntimeWarning, match="same parameters") as more:
        train(model, optimizer, 110)
    named = " ".join(str(warning.message) for warning in more)
    assert "'layers.0.weight' on rank 1" in named
    assert "each rank trains" not in named  # once


def test_a_frozen_layer_that_differs_between_ranks_is_named():
    model = make_model()
    model.layers[0].requires_grad_(False)
    if hvd.rank() == 1:
        model.layers[0].weight.data.add_(1.0)
    optimizer = distributed(model, small_buckets(model, "topk"))
    with pytest.warns(RuntimeWarning, match=r"'layers\.0\.weight' on rank 1"):
        train(model, optimizer, 101)


@pytest.mark.parametrize(
    ("recipe", "make", "given"),
    [
        ("dither:ratio=80", AdamW, r"AdamW divides by roots .* 'dither' rounds coarsely"),
        ("dgc", lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9), r"SGD has .*momentum=0\.9"),
        ("sketchsgd", lambda p: torch.optim.Adam(p), r"Adam has .*betas=\(0\.9"),
        ("signum", lambda p: torch.optim.AdamW(p, lr=1e-4), r"AdamW has .*betas=\(0\.9"),
        ("demo", lambda p: torch.optim.Adam(p), r"'demo' keeps a momentum of its own \(0\.999\)"),
        ("topk", lambda p: torch.optim.AdamW(p), r"AdamW divides by roots .* 'topk' sends late"),
    ],
)
def test_an_optimizer_that_does_not_fit_the_recipe_is_named(recipe, make, given):
    model, choice = make_model(), parse_recipe(recipe)
    optimizer = hvd.DistributedOptimizer(
        make(model.parameters()),
        named_parameters=model.named_parameters(),
        compression=small_buckets(model, choice.name, **choice.options),
    )
    with pytest.warns(RuntimeWarning, match=given):
        train(model, optimizer, 1)


@pytest.mark.parametrize("recipe", ["dgc", "topk"])
def test_one_momentum_is_no_reason_to_warn(recipe):
    model = make_model()
    of_matrices = {"params": [p for p in model.parameters() if p.numel() >= 1024]}
    others = {"params": [p for p in model.parameters() if p.numel() < 1024], "momentum": 0.9}
    momentum = 0.9 if recipe == "topk" else 0.0
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([of_matrices, others], lr=0.01, momentum=momentum),
        named_parameters=model.named_parameters(),
        compression=small_buckets(model, recipe),
    )
    train(model, optimizer, 1)


@pytest.mark.transport
@pytest.mark.parametrize("recipe", ["topk", "fft", "qsgd", "random_k", "scalecom", "powersgd"])
def test_the_first_nan_is_told_once_with_its_tensor_and_rank(recipe):
    model = make_model()
    optimizer = distributed(model, small_buckets(model, recipe))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, optimizer, 1)
        if hvd.rank() == 1:
            model.layers[3].weight.register_hook(lambda grad: grad.index_fill(0, ONE, math.nan))
        for x, y in batches(2):
            optimizer.zero_grad()
            loss_of(model, x, y, 0).backward()
            optimizer.synchronize()
    told = [str(warning.message) for warning in caught]
    assert len(told) == 1
    assert "layers.3.weight" in told[0]
    origin = "gradients of some rank" if hvd.rank() == 0 else "rank 1 has NaN or Inf in the grad"
    assert origin in told[0]


def test_nan_in_a_dense_tensor_is_told_by_the_first_rank():
    model = make_model()
    optimizer = distributed(model, small_buckets(model, "topk"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if hvd.rank() == 1:
            model.head.bias.register_hook(lambda grad: grad * math.nan)
        for x, y in batches(2):
            optimizer.zero_grad()
            loss_of(model, x, y, 0).backward()
            optimizer.synchronize()
    told = [str(warning.message) for warning in caught]
    assert len(told) == (hvd.rank() == 0)
    assert all("the sums of 'head.bias' over the ranks have NaN or Inf" in text for text in told)


def test_a_scaler_deals_with_nan_without_a_warning():
    model = make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = distributed(model, small_buckets(model, "topk", grad_scaler=scaler))
    for x, y in batches(2):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x, y, 0) * float("inf")).backward()
        optimizer.synchronize()


def test_a_compiled_models_state_fits_the_plain_model_and_the_other_way_round():
    plain, compiled = make_model(), torch.compile(make_model(), backend="eager")
    states = []
    for model in (plain, compiled):
        compression = small_buckets(model, "topk")
        train(plain if model is plain else compiled._orig_mod, distributed(model, compression), 3)
        states.append(compression.state_dict())
    assert set(states[0]["state"]["residual"]) == set(states[1]["state"]["residual"])
    older = dict(states[1])  # as saved before names were made plain
    older["formats"] = {f"_orig_mod.{n}": f for n, f in older["formats"].items()}
    older["state"] = {
        kind: {f"_orig_mod.{n}": array for n, array in arrays.items()}
        for kind, arrays in older["state"].items()
    }
    for model, state in ((plain, states[1]), (compiled, states[0]), (plain, older)):
        small_buckets(model, "topk").load_state_dict(state)


@pytest.mark.transport
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_adamw_of_compressed_gradients_resumes_exactly(momentum, same_everywhere):
    states, ends = [], []
    for parts in ([range(10)], [range(4), range(4, 10)]):
        for part in parts:
            model = make_model()
            options = dict(density=0.1, warmup_steps=2, dense_every=3, dense_by="qsgd")
            compression = small_buckets(model, "topk", momentum=momentum, **options)
            optimizer = hvd.DistributedOptimizer(
                AdamW(model.parameters(), 0.01, max_norm=0.5),
                named_parameters=model.named_parameters(),
                compression=compression,
            )
            if part.start:
                for each, state in zip((model, optimizer, compression), states, strict=True):
                    each.load_state_dict(state)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            train(model, optimizer, part.stop, skip=part.start)
            states = [copy.deepcopy(e.state_dict()) for e in (model, optimizer, compression)]
        weight = model.layers[0].weight
        taken = optimizer.state[weight]["step"] - 10  # broadcasting a new state takes a step
        assert optimizer.state[weight]["refreshed"] - taken == 8
        ends.append(flat(model))
    same_everywhere(*ends)
    assert torch.equal(*ends)
