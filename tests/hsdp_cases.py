"""FSDP2 with compression between replicas; ``test_torch_distributed.py`` starts it on 4 ranks."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import re
import weakref
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_module
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from horovod_fftcomp import ConfigMismatchError, UnsupportedError
from horovod_fftcomp.torch_distributed import compress, compressor, rounds
from tests.ddp_cases import (  # noqa: F401
    RECIPES,
    Checkpointed,
    Network3,
    _process_group,
    gathered,
    train,
)
from tests.gpu.torch_emulator import TorchEmulator
from tests.test_torch_distributed import same


@pytest.fixture(scope="session")
def mesh(_process_group):  # noqa: F811
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def sharded(mesh, model=None, **options):
    model = Network3() if model is None else model
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def local(model):
    return [parameter.to_local().detach() for parameter in model.parameters()]


def gradients(model):
    return [parameter.grad.to_local() for parameter in model.parameters()]


def assert_replicas_are_equal(mesh, model):
    flat = torch.cat([tensor.reshape(-1) for tensor in local(model)]).contiguous()
    other = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(other, flat, group=mesh["replicate"].get_group())
    assert torch.equal(*other)


def test_none_gives_the_gradients_of_native_hsdp(mesh):
    native, own = sharded(mesh), sharded(mesh["shard"])
    compression = compress(own, "none", replicate=mesh["replicate"])
    for model in (native, own):
        train(model, range(5))
    for one, other in zip(local(native), local(own), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    for one, other in zip(gradients(native), gradients(own), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    assert compression.stats()["steps"] == 5
    assert_replicas_are_equal(mesh, own)


@pytest.mark.parametrize(("recipe", "options"), RECIPES, ids=str)
def test_the_loss_falls_and_replicas_stay_equal(recipe, options, mesh):
    model = sharded(mesh["shard"])
    compression = compress(model, recipe, replicate=mesh["replicate"].get_group(), **options)
    losses = train(model, range(40))
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])
    assert_replicas_are_equal(mesh, model)
    stats = compression.stats()
    assert stats["steps"] == 40
    assert stats["dense_nbytes"] == 40 * 4 * sum(tensor.numel() for tensor in local(model))
    assert recipe == "none" or stats["ratio"] > 1.8


def test_all_coefficients_give_the_gradients_of_ddp(mesh):
    model, ddp = sharded(mesh["shard"]), DistributedDataParallel(Network3())
    compress(model, "topk", replicate=mesh["replicate"], density=1.0, bits=32)
    for each in (model, ddp):
        train(each, range(3), lr=0.0)
    for mine, its in zip(model.parameters(), ddp.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), its.grad, rtol=1e-5, atol=1e-7)


def test_sent_bytes_are_those_between_replicas(mesh, monkeypatch):
    sent = []
    send = rounds.Network.send

    def counted(self, round_, name, group):
        sent.append((name, round_.data.nbytes))
        return send(self, round_, name, group)

    monkeypatch.setattr(rounds.Network, "send", counted)
    totals = {}
    for recipe in ("none", "topk"):
        model = sharded(mesh["shard"])
        compression = compress(model, recipe, replicate=mesh["replicate"], replica_check="off")
        train(model, range(1))
        sent.clear()
        before = compression.stats()["sent_nbytes"]
        train(model, range(1, 4))
        counts = [n for name, n in sent if not re.search(r"\.step|\.finite", name)]
        totals[recipe] = sum(counts)
        assert compression.stats()["sent_nbytes"] - before == totals[recipe]
        others = [n for name, n in sent if re.search(r"\.step|\.finite", name)]
        asks = [] if recipe == "none" else [0]  # sizes alone, if something is compressed
        assert others == [*asks, 1] * 3  # a byte to end a step
    assert totals["none"] == 3 * (4 * sum(t.numel() for t in local(model)) + 1)
    assert totals["topk"] < totals["none"] / 10


@pytest.mark.parametrize("recipe", ["topk", "powersgd"])
def test_a_saved_state_continues_exactly(recipe, mesh):
    whole = sharded(mesh["shard"])
    compress(whole, recipe, replicate=mesh["replicate"])
    train(whole, range(8), lr=0.0)
    model = sharded(mesh["shard"])
    compression = compress(model, recipe, replicate=mesh["replicate"])
    train(model, range(4), lr=0.0)
    file = io.BytesIO()
    torch.save(compression.state_dict(), file)
    file.seek(0)
    again = sharded(mesh["shard"])
    resumed = compress(again, recipe, replicate=mesh["replicate"])
    saved = torch.load(file, weights_only=True)
    resumed.load_state_dict(saved)
    assert same(resumed.state_dict(), saved)
    assert resumed.residual("first.weight").shape == (24, 48)
    assert resumed.residual("first.weight").abs().sum() > 0
    train(again, range(4, 8), lr=0.0)
    assert all(map(torch.equal, gradients(whole), gradients(again)))
    together = compression.gathered_state_dict()
    assert len(together["ranks"]) == 2
    resumed.load_state_dict(together)


def test_states_of_shards_and_of_whole_tensors_do_not_mix(mesh):
    model, ddp = sharded(mesh["shard"]), DistributedDataParallel(Network3())
    shards = compress(model, "topk", replicate=mesh["replicate"])
    whole = compress(ddp, "topk")
    number = mesh["shard"].get_local_rank()
    mine, its = f"shard {number} of 2", f"shard {1 - number} of 2"
    with pytest.raises(ValueError, match=rf"is of whole tensors \(DDP.* is of {mine}"):
        shards.load_state_dict(whole.state_dict())
    with pytest.raises(ValueError, match=rf"is of {mine}.* is of whole tensors \(DDP"):
        whole.load_state_dict(shards.gathered_state_dict())
    with pytest.raises(ValueError, match=f"is of {its}, but this compressor is of {mine}"):
        shards.load_state_dict({**shards.state_dict(), "shard": its})


@pytest.fixture(params=["cpu", "gpu"])
def place(request, monkeypatch):
    """Where steps are computed; the GPU is an emulated one."""
    if request.param == "gpu":
        monkeypatch.setattr(compressor, "device_of", lambda parameters, buckets: TorchEmulator())
    return request.param


@pytest.mark.parametrize("recipe", ["topk", "scalecom"])
def test_a_gpu_computes_what_a_cpu_does(recipe, mesh, monkeypatch):
    models = []
    for device in (None, TorchEmulator()):
        monkeypatch.setattr(compressor, "device_of", lambda *given, device=device: device)
        models.append(model := sharded(mesh["shard"]))
        compression = compress(model, recipe, replicate=mesh["replicate"])
        train(model, range(5))
        assert compression.engine.computes_on_device(0) == (device is not None)
    for one, other in zip(*map(local, models), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("tensor", ["last.bias", "spare.weight"])  # dense, compressed
def test_nan_on_one_rank_reaches_its_replicas_and_changes_no_residual_on_any_rank(
    tensor, mesh, place
):
    class WithFactor(Network3):
        def forward(self, x, factor=0.0):
            return super().forward(x) + factor * self.get_parameter(tensor).reshape(-1)[0]

    model = sharded(mesh["shard"], WithFactor())
    compression = compress(model, "topk", replicate=mesh["replicate"])
    train(model, range(2), lr=0.0)
    before = compression.state_dict()["state"]
    model.zero_grad()
    has_first = mesh["shard"].get_local_rank() == 0
    warned = pytest.warns(RuntimeWarning, match=re.escape(f"'{tensor}'"))
    # Of a dense tensor nobody knows where it comes from, nor of what a GPU has compressed.
    told = {"last.bias": [0], "spare.weight": [0, 2] if place == "cpu" else []}[tensor]
    with warned if dist.get_rank() in told else contextlib.nullcontext():
        model(torch.ones(2, 48), np.nan if dist.get_rank() == 3 else 1.0).sum().backward()
    assert bool(model.get_parameter(tensor).grad.to_local().isnan().any()) == has_first
    assert not model.first.weight.grad.to_local().isnan().any()
    assert same(compression.state_dict()["state"], before)
    assert compression.stats()["skipped_steps"] == 1
    train(model, range(2), lr=0.0)
    assert not same(compression.state_dict()["state"], before)


def test_gradients_are_accumulated_without_exchanges(mesh):
    model = sharded(mesh["shard"])
    compression = compress(model, "topk", replicate=mesh["replicate"], density=1.0, bits=32)
    ddp = DistributedDataParallel(Network3())
    x = torch.randn(8, 48, generator=torch.Generator().manual_seed(dist.get_rank()))
    model.set_requires_gradient_sync(False)
    model(x).sum().backward()
    assert compression.stats()["steps"] == 0
    model.set_requires_gradient_sync(True)
    model(2 * x).sum().backward()
    assert compression.stats()["steps"] == 1
    with ddp.no_sync():
        ddp(x).sum().backward()
    ddp(2 * x).sum().backward()
    for mine, its in zip(model.parameters(), ddp.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), its.grad, rtol=1e-5, atol=1e-5)


def test_a_module_that_runs_twice_is_exchanged_once(mesh):
    class Twice(Network3):
        def forward(self, x):
            return self.last(self.first(torch.relu(self.first(x))))

    def unused_dropped(model):
        del model.second, model.spare
        return model

    own = unused_dropped(Twice())
    its = copy.deepcopy(own)
    for layer in (own.first, own):
        fully_shard(layer, mesh=mesh["shard"])
    compression = compress(own, "topk", replicate=mesh["replicate"], density=1.0, bits=32)
    ddp = DistributedDataParallel(its)
    for model in (own, ddp):
        train(model, range(2), lr=0.0)
    assert compression.stats()["steps"] == 2
    for one, other in zip(own.parameters(), ddp.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad, rtol=1e-5, atol=1e-7)


def test_layers_without_a_common_root_are_exchanged_in_one_step(mesh):
    model = Network3()
    for layer in model.children():
        fully_shard(layer, mesh=mesh["shard"])
    compression = compress(model, "topk", replicate=mesh["replicate"])
    train(model, range(3))
    assert compression.stats()["steps"] == 3
    assert_replicas_are_equal(mesh, model)


def test_a_parameter_that_no_rank_uses_keeps_its_residual(mesh):
    model = sharded(mesh["shard"])
    compression = compress(model, "topk", replicate=mesh["replicate"], density=0.05)
    train(model, range(2))
    before = compression.residual("spare.weight")
    assert before.abs().sum() > 0
    train(model, range(2), uses_spare=False)
    assert torch.equal(compression.residual("spare.weight"), before)


def test_replicas_that_use_other_parameters_raise_the_same_error(mesh):
    model = sharded(mesh["shard"])
    compress(model, "topk", replicate=mesh["replicate"])
    uses = mesh["replicate"].get_local_rank() == 0
    with pytest.raises(UnsupportedError, match=r"'spare\.weight'.*_unused_params\(True\)"):
        train(model, range(1), uses_spare=uses)
    model = sharded(mesh["shard"])
    model.set_reduce_scatter_unused_params(True)
    compress(model, "topk", replicate=mesh["replicate"])
    train(model, range(2), uses_spare=uses)
    assert_replicas_are_equal(mesh, model)


def test_parameters_that_are_not_sharded_are_named(mesh):
    model = Network3()
    fully_shard(model.first, mesh=mesh["shard"])
    with pytest.warns(RuntimeWarning, match=r"does not shard 'second\.weight'.* nobody sums"):
        compress(model, "topk", replicate=mesh["replicate"])


def test_one_rank_alone_writes_records_and_the_live_view(mesh, tmp_path):
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)  # one folder for all ranks
    options = {"record": f"{folder[0]}/steps", "record_every": 1, "live_every": 1}
    model = sharded(mesh["shard"])
    compression = compress(
        model, "topk", replicate=mesh["replicate"], live_view=f"{folder[0]}/live", **options
    )
    train(model, range(3))
    assert compression.stats()["steps"] == 3
    dist.barrier()
    with open(f"{folder[0]}/live", encoding="utf-8") as lines:
        assert len(lines.readlines()) == 3


def test_replicas_of_other_shards_are_refused(mesh):
    groups = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2])]
    number = 0 if dist.get_rank() in (0, 3) else 1
    model = sharded(mesh["shard"])
    compress(model, "topk", replicate=groups[number])
    with pytest.raises(ConfigMismatchError, match=f"shard is shard {number} of 2 on rank 0"):
        train(model, range(1))


def test_a_second_compressor_of_a_model_is_refused(mesh):
    model = sharded(mesh["shard"])
    compress(model, "topk", replicate=mesh["replicate"])
    with pytest.raises(ValueError, match="called with this model"):
        compress(model, "topk", replicate=mesh["replicate"])


def test_ranks_that_differ_raise_an_error(mesh):
    model = sharded(mesh["shard"])
    density = 0.1 if mesh["replicate"].get_local_rank() == 0 else 0.2
    compress(model, "topk", replicate=mesh["replicate"], density=density)
    with pytest.raises(ConfigMismatchError, match=r"density is 0\.1 on rank 0 but 0\.2 on rank 1"):
        train(model, range(1))


def test_replicas_that_differ_are_reported_and_mended(mesh):
    model = sharded(mesh["shard"])
    options = {"replicate": mesh["replicate"], "replica_check": "broadcast"}
    compress(model, "topk", **options)
    train(model, range(1))
    if mesh["replicate"].get_local_rank() == 1:
        with torch.no_grad():
            model.first.weight.to_local().add_(1.0)
    with pytest.warns(RuntimeWarning, match=r"first\.weight"):
        train(model, range(100), lr=0.0)
    assert_replicas_are_equal(mesh, model)


def test_an_error_in_the_backward_pass_is_reported(mesh):
    def fail(grad):
        raise RuntimeError("of this test")

    model = sharded(mesh["shard"])
    compression = compress(model, "topk", replicate=mesh["replicate"])
    start = compression.state_dict()
    handle = model.first.register_forward_hook(
        lambda layer, x, out: out.register_hook(fail) and None
    )
    with pytest.raises(RuntimeError, match="of this test"):
        train(model, range(1))
    handle.remove()
    model.reset_iter_state()
    with pytest.raises(UnsupportedError, match="backward pass"):
        train(model, range(1))
    model.reset_iter_state()
    compression.load_state_dict(start)
    train(model, range(2))
    assert compression.stats()["steps"] == 2


def test_a_backward_pass_within_another_is_refused(mesh):
    model = sharded(mesh["shard"], Checkpointed(partial(checkpoint, use_reentrant=True)))
    compression = compress(model, "topk", replicate=mesh["replicate"])
    with pytest.raises(UnsupportedError, match=r"call checkpoint\(use_reentrant=False\)"):
        train(model, range(1))
    model.reset_iter_state()
    with pytest.raises(UnsupportedError, match=r"interrupted by checkpoint\(use_reentrant=True\)"):
        train(model, range(1))
    assert compression.stats()["steps"] == 0


def test_checkpoints_that_are_not_reentrant_change_nothing(mesh):
    calls = partial(checkpoint, use_reentrant=False), nn.Module.__call__
    models = [sharded(mesh["shard"], Checkpointed(call)) for call in calls]
    for model in models:
        compress(model, "topk", replicate=mesh["replicate"])
        train(model, range(3))
    for one, other in zip(*map(local, models), strict=True):
        assert torch.equal(one, other)


def test_parameters_that_are_not_known_are_refused(mesh):
    model = sharded(mesh["shard"])
    model.spare.weight.requires_grad_(False)
    compress(model, "topk", replicate=mesh["replicate"])
    train(model, range(1))
    model.spare.weight.requires_grad_(True)
    with pytest.raises(UnsupportedError, match=r"'spare\.weight' was frozen"):
        train(model, range(1))


REPLICATE_SHARD = r"mesh=mesh\['shard'\].*replicate=mesh\['replicate'\]"


def test_other_models_are_refused_with_the_mend(mesh):
    given = {"replicate": mesh["replicate"]}
    with pytest.raises(
        UnsupportedError, match=r"'first\.weight' is replicated.*" + REPLICATE_SHARD
    ):
        compress(sharded(mesh), "topk", **given)
    with pytest.raises(UnsupportedError, match="replicated"):
        compress(replicate_module(Network3(), mesh=mesh["replicate"]), "topk", **given)
    with pytest.raises(TypeError, match=REPLICATE_SHARD):
        compress(sharded(mesh["shard"]), "topk")
    for model in (Network3(), DistributedDataParallel(Network3())):
        with pytest.raises(TypeError, match="whose parameters are sharded.*" + REPLICATE_SHARD):
            compress(model, "topk", **given)
    hybrid = FullyShardedDataParallel(
        Network3(), device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_id=torch.device("cpu"),
    )  # fmt: skip
    for options in (given, {}):
        with pytest.raises(UnsupportedError, match="FSDP1 .*" + REPLICATE_SHARD):
            compress(hybrid, "topk", **options)
    two_meshes = Network3()
    fully_shard(two_meshes.first, mesh=mesh["replicate"])
    fully_shard(two_meshes, mesh=mesh["shard"])
    with pytest.raises(UnsupportedError, match="one mesh for all parameters"):
        compress(two_meshes, "topk", **given)


def test_wrong_groups_of_replicas_are_refused(mesh):
    model = sharded(mesh["shard"])
    with pytest.raises(ValueError, match="mesh of 2 dimensions.*" + REPLICATE_SHARD):
        compress(model, "topk", replicate=mesh)
    with pytest.raises(TypeError, match="got a str"):
        compress(model, "topk", replicate="replicate")
    with pytest.raises(ValueError, match="only this rank may be in both"):
        compress(model, "topk", replicate=mesh["shard"])


def test_shards_over_the_columns_are_exchanged(mesh):
    def placement(parameter):
        return Shard(1) if parameter.ndim > 1 else Shard(0)

    model = sharded(mesh["shard"], shard_placement_fn=placement)
    ddp = DistributedDataParallel(Network3())
    compression = compress(model, "topk", replicate=mesh["replicate"], density=1.0, bits=32)
    for each in (model, ddp):
        train(each, range(2), lr=0.0)
    assert compression.residual("first.weight").shape == (48, 24)
    for mine, its in zip(model.parameters(), ddp.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), its.grad, rtol=1e-5, atol=1e-7)


def test_threads_end_with_the_model(mesh):
    model = sharded(mesh["shard"])
    compression = compress(model, "topk", replicate=mesh["replicate"])
    train(model, range(1))
    kept = weakref.ref(compression)
    del compression
    gc.collect()
    assert kept() is not None
    del model
    gc.collect()
    assert kept() is None
