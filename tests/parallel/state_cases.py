"""State that outlives a process: checkpoints, elastic jobs, other numbers of ranks."""

from __future__ import annotations

import warnings

import horovod.torch as hvd
import pytest
import torch
from horovod.torch import elastic

from horovod_fftcomp.adapter.torch_tensors import arrays
from horovod_fftcomp.engine import checkpoint
from horovod_fftcomp.torch import LocalSteps
from tests.parallel.models import (
    ScriptedScaler,
    batches,
    compressed_names,
    distributed,
    flat,
    loss_of,
    make_model,
    small_buckets,
    synchronized_step,
    train,
)


@pytest.mark.sampled
@pytest.mark.parametrize("recipe", ["topk", "fft"])
def test_saved_at_50_and_run_to_100_equals_100_straight(recipe, tmp_path, same_everywhere):
    straight = make_model()
    train(straight, distributed(straight, small_buckets(straight, recipe)), 100)
    data = list(batches(100))
    path = tmp_path / f"rank{hvd.rank()}.pt"
    for begin in (0, 50):
        model = make_model()
        compression = small_buckets(model, recipe)
        optimizer = distributed(model, compression)
        if begin:
            saved = torch.load(path, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            compression.load_state_dict(saved["compression"])
        for step in range(begin, begin + 50):
            optimizer.zero_grad()
            loss_of(model, *data[step], step).backward()
            optimizer.step()
        saved = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "compression": compression.state_dict(),
        }
        torch.save(saved, path)
    assert torch.equal(flat(model), flat(straight))
    same_everywhere(flat(model))


@pytest.mark.transport
def test_gathered_state_resumes_too_and_fits_one_rank():
    model = make_model()
    compression = small_buckets(model, "fft")
    train(model, distributed(model, compression), 5)
    gathered = compression.gathered_state_dict()
    other = small_buckets(make_model(), "fft")
    other.load_state_dict(gathered)
    names = compressed_names(compression)
    for name in names:
        assert torch.equal(other.residual(name), compression.residual(name))
        total = hvd.allreduce(compression.residual(name), op=hvd.Sum, name=f"sum.{name}")
        alone = checkpoint.part_of(arrays.to_numpy(gathered), 0, 1)
        engine = compression.engine
        bucket, tensor = engine.tensor(name)
        merged = engine.scheme(bucket).residual(alone["state"], tensor)
        torch.testing.assert_close(torch.from_numpy(merged), total, rtol=1e-6, atol=1e-6)


def test_state_of_another_rank_is_refused():
    model = make_model()
    compression = small_buckets(model, "topk")
    saved = compression.state_dict()
    saved["rank"] = (hvd.rank() + 1) % hvd.size()
    with pytest.raises(ValueError, match="gathered_state_dict"):
        compression.load_state_dict(saved)


def test_the_optimizers_own_state_is_unchanged():
    keys = {}
    for name in ("stock", "compressed"):
        model = make_model()
        compression = hvd.Compression.none if name == "stock" else small_buckets(model, "fft")
        optimizer = distributed(model, compression)
        train(model, optimizer, 2)
        state = optimizer.state_dict()
        keys[name] = (state["param_groups"], sorted(state["state"]), sorted(state))
    assert keys["stock"] == keys["compressed"]


@pytest.mark.transport
def test_elastic_state_commits_and_restores_each_ranks_residual(same_everywhere):
    model = make_model()
    compression = small_buckets(model, "topk")
    optimizer = distributed(model, compression)
    train(model, optimizer, 4)
    state = elastic.TorchState(model=model, optimizer=optimizer, compression=compression, batch=0)
    committed = compression.residual("layers.0.weight").clone()
    weights = flat(model)
    train(model, optimizer, 3)
    assert not torch.equal(compression.residual("layers.0.weight"), committed)
    state.restore()
    assert torch.equal(compression.residual("layers.0.weight"), committed)
    assert torch.equal(flat(model), weights)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state.sync()
    assert torch.equal(compression.residual("layers.0.weight"), committed)
    assert len(set(hvd.allgather_object(committed.sum().item()))) == hvd.size()
    train(model, optimizer, 3)
    state.save()
    same_everywhere(flat(model))


def test_a_lost_hosts_residual_is_reported_and_the_survivors_unchanged(same_everywhere):
    model = make_model()
    compression = small_buckets(model, "topk")
    train(model, distributed(model, compression), 4)
    kept = compression.residual("layers.0.weight").clone()
    state = elastic.TorchState(compression=compression)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        elastic.TorchState(compression=small_buckets(make_model(), "topk")).sync()
    # As if these two had been ranks 0 and 2 of three, and the host of rank 1 had gone.
    compression.engine.rank, compression.engine.world_size = 2 * hvd.rank(), 3
    with pytest.warns(RuntimeWarning, match=r"former ranks \[1\] are lost"):
        state.sync()
    assert compression.engine.rank == hvd.rank()
    assert torch.equal(compression.residual("layers.0.weight"), kept)
    # And now as if rank 1 were a new one, without state.
    again = small_buckets(make_model(), "topk")
    if hvd.rank() == 0:
        again.load_state_dict(compression.state_dict())
    with pytest.warns(RuntimeWarning, match=r"former ranks \[1\] are lost"):
        assert again.rejoin() == [1]
    assert again.state_dict()["step"] == 4
    assert torch.equal(again.residual("layers.0.weight"), kept) == (hvd.rank() == 0)
    assert again.rejoin() == []
    model = make_model()
    same_everywhere(str(again.state_dict()["step"]))


def test_a_rank_less_without_sync_is_noticed(same_everywhere):
    """Horovod skips ``sync`` after an elastic reset that only removed hosts."""
    model = make_model()
    compression = small_buckets(model, "fp16")
    optimizer = distributed(model, compression)
    train(model, optimizer, 1)
    compression.engine.world_size = 3
    x, y = next(batches(1))
    optimizer.zero_grad()
    with pytest.warns(RuntimeWarning, match=r"former ranks \[2\] are lost"):
        loss_of(model, x, y).backward()
    optimizer.synchronize()
    assert compression.engine.world_size == 2
    same_everywhere(model.layers[0].weight.grad)
    other = make_model()
    other.load_state_dict(model.state_dict())
    loss_of(other, x, y).backward()
    for name in ("head.bias", "layers.0.weight"):
        own = other.get_parameter(name).grad
        average = hvd.allreduce(own, name=f"average.{name}")
        torch.testing.assert_close(model.get_parameter(name).grad, average, rtol=1e-2, atol=1e-5)


def test_elastic_restore_after_ranks_have_gone():
    model = make_model()
    compression = small_buckets(model, "topk")
    train(model, distributed(model, compression), 3)
    compression.engine.world_size, compression.engine.rank = 3, 2 * hvd.rank()
    state = elastic.TorchState(compression=compression)
    compression.engine.world_size, compression.engine.rank = 2, hvd.rank()
    committed = compression.residual("layers.0.weight")
    state.restore()
    assert torch.equal(compression.residual("layers.0.weight"), committed)
    assert committed.any()


def test_a_scaled_state_loads_without_a_scaler():
    model = make_model()
    scaler = ScriptedScaler([1024.0])
    compression = small_buckets(model, "topk", grad_scaler=scaler)
    train(model, distributed(model, compression), 3)
    unscaled = make_model()
    plain = small_buckets(unscaled, "topk")
    plain.load_state_dict(compression.state_dict())
    before = compression.residual("layers.0.weight")
    optimizer = distributed(unscaled, plain, lr=0.0)
    optimizer.zero_grad()
    (loss_of(unscaled, *next(batches(1))) * 0.0).backward()
    optimizer.step()
    after = plain.residual("layers.0.weight")
    assert after.abs().max() <= before.abs().max() / 1024
    assert after.any()


def test_a_load_that_fails_changes_nothing():
    compression = small_buckets(make_model(), "topk", density=0.01)
    saved = {**compression.state_dict(), "density": 0.3, "world_size": 7}
    with pytest.raises(ValueError, match="of 7"):
        compression.load_state_dict(saved)
    with pytest.raises(ValueError, match="version is 99"):
        compression.load_state_dict({"version": 99})
    assert compression.stats()["density"] == 0.01


def test_state_is_asked_for_between_steps():
    model = make_model()
    compression = small_buckets(model, "topk")
    optimizer = distributed(model, compression)
    x, y = next(batches(1))
    loss_of(model, x, y).backward()
    with pytest.raises(ValueError, match="a step is under way"):
        compression.state_dict()
    synchronized_step(optimizer)
    assert compression.state_dict()["step"] == 1


def passes(model, optimizer, seed, loss=lambda out: out.square().sum()):
    """Run a backward pass of this rank's data of a seed, and exchange its gradients."""
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * seed + hvd.rank()))
    loss(model(x, range(6))).backward()
    optimizer.synchronize()


def step_of(optimizer):
    with optimizer.skip_synchronize():
        optimizer.step()
    optimizer.zero_grad()


@pytest.mark.sampled
@pytest.mark.transport
@pytest.mark.parametrize("recipe", ["topk", "fft", "scalecom", "powersgd", "efsignsgd", "dgc"])
def test_a_discarded_pass_leaves_no_trace(recipe, same_everywhere):
    made = []
    for discards in (False, True):
        model = make_model()
        compression = small_buckets(model, recipe)
        optimizer = distributed(model, compression)
        for step in range(4):
            if discards:
                passes(model, optimizer, 50 + step)
                optimizer.zero_grad()
                compression.discard()
            passes(model, optimizer, step)
            step_of(optimizer)
        stats = compression.stats()
        made.append((model, compression, [stats[k] for k in ("steps", "sent_nbytes", "ratio")]))
    (plain, expected, counts), (model, compression, found) = made
    assert counts == found
    assert torch.equal(flat(plain), flat(model))
    for name in ("layers.0.weight", "layers.5.weight"):
        assert torch.equal(expected.residual(name), compression.residual(name))
    same_everywhere(flat(model))


@pytest.mark.parametrize("discards", [False, True])
def test_averages_that_are_thrown_away_are_told_once(discards):
    model = make_model()
    compression = small_buckets(model, "topk", density=0.05)
    optimizer = distributed(model, compression)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(5):
            passes(model, optimizer, 50 + step)
            optimizer.zero_grad()
            if discards:
                compression.discard()
            passes(model, optimizer, step)
            step_of(optimizer)
    told = [w for w in caught if "zeroed before an optimizer used them" in str(w.message)]
    assert len(told) == (0 if discards else 1)


def test_a_first_layer_may_be_frozen_before_the_step(same_everywhere):
    model = make_model()
    compression = small_buckets(model, "topk")
    optimizer = distributed(model, compression)
    for step in range(3):
        loss_of(model, *next(batches(1)), step).backward()
        model.requires_grad_(False)
        optimizer.step()
        model.requires_grad_(True)
        optimizer.zero_grad()
    same_everywhere(flat(model))


def test_local_steps_are_no_gradients_that_are_thrown_away():
    model = make_model()
    local = LocalSteps(model, small_buckets(model, "topk"), 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for step, batch in enumerate(batches(6)):
        optimizer.zero_grad()
        loss_of(model, *batch, step).backward()
        optimizer.step()
        local.after_step()


def test_discard_is_refused_where_there_is_nothing_to_discard():
    model = make_model()
    compression = small_buckets(model, "topk")
    optimizer = distributed(model, compression)
    with pytest.raises(ValueError, match="no exchange to discard"):
        compression.discard()
    loss_of(model, *next(batches(1))).backward()
    with pytest.raises(ValueError, match="a step is under way"):
        compression.discard()
    optimizer.synchronize()
    step_of(optimizer)
    with pytest.raises(ValueError, match="an optimizer has taken a step"):
        compression.discard()
