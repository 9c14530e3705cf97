"""DDP with compressed gradients; ``test_torch_distributed.py`` starts this on every rank."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import itertools
import json
import math
import os
import re
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from horovod_fftcomp import ConfigMismatchError, Recover, UnsupportedError, get_scheme, simulate
from horovod_fftcomp.engine.buckets import MIN_NUMEL
from horovod_fftcomp.schemes import Round
from horovod_fftcomp.torch_distributed import AdamW, LocalSteps, compress, steps, streams
from horovod_fftcomp.torch_distributed.gradients import Arrival
from horovod_fftcomp.torch_distributed.rounds import Network, RankGroup
from tests import payloads
from tests.parallel import told_of_nan

RECIPES = [
    ("topk", {"density": 0.1}),
    ("fft", {}),
    ("qsgd", {}),
    ("scalecom", {"density": 0.1}),
    ("powersgd", {}),
    ("hard_threshold", {"threshold": 0.01}),  # payloads of unequal sizes
    ("fft", {"exchange": "sharded"}),
    ("none", {}),
]
# Two nodes, or two ranks of one.
NODES = [
    (recipe, {"ranks_per_node": 2, **options})
    for recipe, options in (
        ("topk", {}),
        ("fft", {}),
        ("qsgd", {}),
        ("scalecom", {}),
        ("hard_threshold", {"threshold": 0.01}),
        ("fft", {"exchange": "sharded"}),
    )
]


@pytest.fixture(scope="session", autouse=True)
def _process_group():
    rank, size = int(os.environ["FFTCOMP_TEST_RANK"]), int(os.environ["FFTCOMP_TEST_RANKS"])
    torch.set_num_threads(1)
    store = f"file://{os.environ['FFTCOMP_TEST_STORE']}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    yield
    dist.destroy_process_group()


def gathered(value):
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, value)
    return everywhere


def same_everywhere(*tensors):
    values = gathered([tensor.numpy().tobytes() for tensor in tensors])
    assert all(value == values[0] for value in values)


class Network3(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.last, self.spare = nn.Linear(width, 4), nn.Linear(width, width)

    def forward(self, x, uses_spare=True):
        hidden = self.second(torch.relu(self.first(x)))
        return self.last(torch.relu(self.spare(hidden) if uses_spare else hidden))


class Checkpointed(Network3):
    def __init__(self, checkpoint):
        super().__init__()
        self.checkpoint = checkpoint

    def forward(self, x):
        return self.last(self.checkpoint(self.second, torch.relu(self.first(x))))


def wrapped(model=None, bucket_cap_mb=25.0, **options):
    return DistributedDataParallel(
        Network3() if model is None else model, bucket_cap_mb=bucket_cap_mb, **options
    )


def train(ddp, steps, lr=0.005, **forward):
    """Train on data of each rank's own; return the losses. ``steps``: a range of numbers."""
    optimizer = torch.optim.Adam(ddp.parameters(), lr)
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randn(32, 48, generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(x, **forward), x[:, :4].argmax(1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def same_gradients(one, other, recipe):
    """Assert equal gradients; on three ranks those by allreduce to rounding.

    The order in which Gloo adds three values depends on their place in a bucket.
    """
    allreduced = "allreduce" in get_scheme(recipe).rounds
    for mine, its in zip(one.parameters(), other.parameters(), strict=True):
        if dist.get_world_size() > 2 and (mine.numel() < MIN_NUMEL or allreduced):
            torch.testing.assert_close(mine.grad, its.grad)
        else:
            assert torch.equal(mine.grad, its.grad)


def flat(model):
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def test_horovod_is_not_imported():
    assert "horovod" not in sys.modules


def test_rounds_are_those_of_their_process_group():
    rank, size = dist.get_rank(), dist.get_world_size()
    network, group = Network(), RankGroup(range(size), "test", 30.0)

    def output(collective, data, **options):
        return network.send(Round(collective, data, **options), collective, group).wait(30.0)

    for length, inside in itertools.product((rank, 3), (False, True)):  # unequal, one empty; equal
        got = output("allgather", np.full(length, rank, np.uint8), inside=inside)
        assert got.tolist() == [r for r in range(size) for _ in range(r if length == rank else 3)]
    assert output("allgather", np.empty(0, np.uint8)).size == 0
    for dtype in (np.float32, np.float16):
        data = np.full(5, rank + 1, dtype)
        got = output("allreduce", data)
        assert got.dtype == dtype
        assert got.tolist() == [size * (size + 1) / 2] * 5
        assert data.tolist() == [rank + 1] * 5
    assert output("broadcast", np.full(2, rank, np.float32), root=1).tolist() == [1, 1]
    for factor in (0, 1):
        splits = tuple(factor * ((rank + to) % 3) for to in range(size))
        got = output("alltoall", np.full(sum(splits), rank, np.uint8), splits=splits)
        assert got.tolist() == [r for r in range(size) for _ in range(factor * ((r + rank) % 3))]
    assert group.n_started == 3  # of known sizes
    group.n_started += rank  # as after a step that ranks have left at different places
    with pytest.raises(ConfigMismatchError, match="allgather after 3 rounds on rank 0"):
        output("allgather", np.zeros(1, np.uint8))
    group.n_started = 0
    sent = network.send(Round("allgather", np.zeros(1, np.uint8)), f"of rank {rank}", group)
    with pytest.raises(ConfigMismatchError, match="of rank 0 on rank 0"):
        sent.wait(30.0)


def test_rounds_for_which_streams_wait_have_the_same_outputs(monkeypatch):
    """By the process group of the job, which here is Gloo's, in the place of NCCL's."""
    monkeypatch.setattr(streams, "is_on_host", lambda data: False)
    rank, size = dist.get_rank(), dist.get_world_size()
    thread, group = Network(), RankGroup(range(size), "streams", 30.0)
    network = streams.StreamNetwork(thread, dist.group.WORLD, torch.device("cpu"))
    network.limit_s = lambda: 30.0
    rng = np.random.default_rng(rank)
    same = {"data": rng.integers(0, 255, 5, np.uint8), "receives": (5,) * size}
    own, sizes = rng.integers(0, 255, 2 * rank, np.uint8), tuple(range(0, 2 * size, 2))
    splits = tuple((rank + to) % 3 for to in range(size))  # as many from each as to it
    shares = {"data": rng.integers(0, 255, sum(splits), np.uint8), "splits": splits}
    for collective, options in (
        ("allgather", same),
        ("allgather", same | {"receives": ()}),
        ("allgather", {"data": own}),
        ("allgather", {"data": own, "receives": sizes}),
        ("allgather", {"data": own, "inside": True}),
        ("allgather", {"data": own, "inside": True, "receives": sizes}),
        ("allgather", {"data": np.empty(0, np.uint8)}),
        ("allreduce", {"data": rng.standard_normal(9).astype(np.float32)}),
        ("broadcast", {"data": rng.standard_normal(9).astype(np.float32), "root": 1}),
        ("alltoall", shares),
        ("alltoall", shares | {"receives": splits}),
        ("alltoall", {"data": np.empty(0, np.uint8), "splits": (0,) * size}),
    ):
        expected = thread.send(Round(collective, **options), collective, group).wait(30.0)
        data = torch.from_numpy(options.pop("data").copy())
        got = network.send(Round(collective, data, **options), collective, group).wait(30.0)
        assert got.numpy().tobytes() == expected.tobytes(), (collective, options)


@pytest.mark.parametrize(("recipe", "options"), [*RECIPES, NODES[0]], ids=str)
def test_the_loss_falls_and_ranks_stay_equal(recipe, options):
    skip_unequal(options)
    ddp = wrapped(bucket_cap_mb=0.01)
    compression = compress(ddp, recipe, **options)
    losses = train(ddp, range(40))
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])
    same_everywhere(flat(ddp))
    stats = compression.stats()
    assert stats["steps"] == 40
    assert stats["dense_nbytes"] == 40 * 4 * flat(ddp).numel()
    assert recipe == "none" or stats["ratio"] > 2


def skip_unequal(options):
    if dist.get_world_size() % options.get("ranks_per_node", 1):
        pytest.skip("nodes would be unequal")


class OneTensor(nn.Module):
    """Layer whose tensor has the name that a simulation gives its own: draws depend on it.

    Two ranks of a node divide it as they divide the simulation's vector.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gradient = nn.Parameter(torch.randn(64, 128))

    def forward(self, x):
        return x @ self.gradient.T


@pytest.mark.parametrize(
    ("recipe", "options"),
    [*(each for each in RECIPES if each[0] not in ("none", "powersgd")), *NODES],
    ids=str,
)
def test_averages_are_those_of_a_simulation(recipe, options):
    """To the last bit on two ranks; on more to the rounding of the mean, and of an allreduce.

    Two nodes of two are two ranks to an allreduce.
    """
    skip_unequal(options)
    model = OneTensor()
    ddp = wrapped(model)
    compression = compress(ddp, recipe, **options)
    own, averages = [], []
    model.gradient.register_hook(lambda grad: own.append(grad.clone().reshape(-1)))
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        ddp.zero_grad()
        ddp(torch.randn(8, 128, generator=generator)).square().sum().backward()
        averages.append(model.gradient.grad.reshape(-1).clone())
        compression.note_used()
    same_everywhere(*averages)
    gradients = np.stack(gathered(torch.stack(own).numpy()), axis=1)
    steps = list(simulate(recipe, gradients, **options))
    if "ranks_per_node" in options:
        residual = compression.residual("gradient").numpy().reshape(-1)
        assert residual.tobytes() == steps[-1].residual[dist.get_rank()].tobytes()
        stats = compression.stats()
        sent = [step.sent_bytes[dist.get_rank()] for step in steps]
        assert stats["sent_nbytes"] == sum(sent)
        inside_nbytes = payloads.inside_nbytes(recipe, sent, dist.get_world_size() // 2)
        assert stats["inside_nbytes"] == inside_nbytes
    for found, expected in zip(averages, steps, strict=True):
        if dist.get_world_size() == 2 or "ranks_per_node" in options:
            np.testing.assert_array_equal(found, expected.average)
        gathers = "allreduce" not in get_scheme(recipe).rounds
        rounding = 0.0 if gathers else 1e-6 * np.abs(expected.average).max()
        np.testing.assert_allclose(found, expected.average, rtol=2e-7, atol=rounding)


@pytest.mark.parametrize("n_local", [1, 2, 4])
def test_auto_ranks_per_node_are_those_of_a_host_as_torchrun_tells_them(n_local, monkeypatch):
    rank, size = dist.get_rank(), dist.get_world_size()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(n_local))
    monkeypatch.setenv("LOCAL_RANK", str(rank % n_local))
    ddp = wrapped()
    compression = compress(ddp, "topk", ranks_per_node="auto")
    train(ddp, range(2))
    same_everywhere(flat(ddp))
    found = compression.policy.facts()["ranks_per_node"]
    assert found == (n_local if n_local < size and size % n_local == 0 else 1)
    assert (compression.stats()["inside_nbytes"] > 0) == (found > 1)


def test_ranks_per_node_and_states_of_other_nodes():
    """A gathered state of two nodes goes on without nodes, and back, and no residual is lost."""
    if dist.get_world_size() % 2:
        pytest.skip("nodes would be unequal")
    before, states = None, []
    for nodes in (2, 1, 2, 2):
        ddp = wrapped()
        compression = compress(ddp, "topk", ranks_per_node=nodes, density=0.02)
        if states:
            compression.load_state_dict(states[-1])
            norm = sum(gathered(compression.residual("second.weight")))
            torch.testing.assert_close(norm, before, rtol=0, atol=1e-5)
        train(ddp, range(3), lr=0.0)
        before = sum(gathered(compression.residual("second.weight")))
        states.append(compression.gathered_state_dict())


@pytest.mark.parametrize("recipe", ["topk", "powersgd"])
def test_a_saved_state_continues_exactly_with_other_buckets_of_ddp(recipe):
    whole = wrapped()
    compress(whole, recipe)
    train(whole, range(8), lr=0.0)
    ddp = wrapped()
    compression = compress(ddp, recipe)
    train(ddp, range(4), lr=0.0)
    file = io.BytesIO()
    torch.save(compression.state_dict(), file)
    file.seek(0)
    again = wrapped(bucket_cap_mb=0.01)
    resumed = compress(again, recipe)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    train(again, range(4, 8), lr=0.0)
    same_gradients(whole, again, recipe)
    assert resumed.residual("first.weight").abs().sum() > 0


def test_averages_do_not_depend_on_the_buckets_of_ddp():
    models = [wrapped(bucket_cap_mb=bucket_cap_mb) for bucket_cap_mb in (25.0, 0.01)]
    for ddp in models:
        compress(ddp, "topk", density=0.05)
        train(ddp, range(3), lr=0.0)
    same_gradients(*models, "topk")


def test_ranks_that_differ_raise_the_same_error():
    ddp = wrapped()
    compress(ddp, "topk", density=0.1 if dist.get_rank() == 0 else 0.2)
    with pytest.raises(ConfigMismatchError, match=r"density is 0\.1 on rank 0") as raised:
        train(ddp, range(1))
    assert len(set(gathered(str(raised.value)))) == 1


def test_ranks_per_node_and_a_rank_with_another_recipe():
    ddp = wrapped()
    if not dist.get_world_size() % 2:
        compress(ddp, "topk" if dist.get_rank() != 1 else "fft", ranks_per_node=2)
        with pytest.raises(ConfigMismatchError, match="but fft on rank 1; density is"):
            train(ddp, range(1))


def test_a_rank_that_alone_loads_a_state_raises_an_error_on_all():
    ddp = wrapped()
    compression = compress(ddp, "topk")
    before = compression.state_dict()
    train(ddp, range(1))
    if dist.get_rank() == 1:
        compression.load_state_dict(before)
    with pytest.raises(ConfigMismatchError, match="step is 1 on rank"):
        train(ddp, range(1))


@pytest.mark.parametrize(
    "mode", ["", "gradient_as_bucket_view", "find_unused_parameters", "static_graph"]
)
def test_all_coefficients_give_the_gradients_of_ddp(mode):
    options = {mode: True} if mode else {}
    models = [wrapped(bucket_cap_mb=0.01, **options) for _ in range(2)]
    compress(models[0], "topk", density=1.0, bits=32)
    for ddp in models:
        train(ddp, range(3), uses_spare=mode != "find_unused_parameters")
    np.testing.assert_allclose(flat(models[0]), flat(models[1]), rtol=1e-5, atol=1e-7)
    same_everywhere(flat(models[0]))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_of_activations_change_nothing(use_reentrant):
    calls = functools.partial(checkpoint, use_reentrant=use_reentrant), nn.Module.__call__
    models = [wrapped(Checkpointed(call), static_graph=True) for call in calls]
    for ddp in models:
        compress(ddp, "topk", min_numel=1)
        train(ddp, range(3))
    assert torch.equal(*map(flat, models))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", ["", "gradient_as_bucket_view", "find_unused_parameters", "static_graph"]
)
def test_many_steps_of_twenty_buckets_end(mode):
    """With payloads of equal and of unequal sizes, sums, and two rounds."""
    steps = int(os.environ.get("FFTCOMP_TEST_STEPS", "60"))  # 1000 take minutes
    layers = nn.Sequential(*(nn.Linear(48, 48, bias=False) for _ in range(20)))
    nbytes = 48 * 48 * 4
    ddp = wrapped(layers, bucket_cap_mb=nbytes / 2**20, **{mode: True} if mode else {})
    recipes = ["topk", "powersgd", "hard_threshold", "scalecom"]
    rules = [(f"{n}.*", {"recipe": recipes[n % 4]}) for n in range(20)]
    compression = compress(ddp, "topk", rules=rules, bucket_nbytes=nbytes, timeout_s=60.0)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        ddp(torch.randn(4, 48, generator=generator)).square().mean().backward()
        optimizer.step()
    told = ddp._get_ddp_logging_data()  # which parameters are unused keeps DDP from rebuilding
    buckets = told.get("rebuilt_bucket_sizes") or told["bucket_sizes"]
    assert len(buckets.split(",")) == 20
    assert compression.stats()["steps"] == steps
    same_everywhere(flat(ddp))


def test_accumulated_gradients_are_exchanged_once():
    ddp = wrapped()
    compression = compress(ddp, "topk", density=1.0, bits=32)
    x = torch.randn(8, 48, generator=torch.Generator().manual_seed(dist.get_rank()))
    with ddp.no_sync():
        ddp(x).sum().backward()
    ddp(x).sum().backward()
    assert compression.stats()["steps"] == 1
    same_everywhere(*(parameter.grad for parameter in ddp.parameters()))


@pytest.mark.parametrize(
    "rules", [(), [("0.second.*", {"recipe": "topk", "density": 1.0, "bits": 32})]]
)
@pytest.mark.parametrize(("as_view", "copied"), [(False, False), (True, False), (False, True)])
def test_large_dense_buckets_are_summed_in_place(rules, as_view, copied, monkeypatch):
    monkeypatch.setattr(steps, "DENSE_NBYTES", 1)
    if copied:  # as from a GPU
        monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)
    found, is_whole = [], Arrival.is_whole
    monkeypatch.setattr(
        Arrival, "is_whole", lambda *given: found.append(is_whole(*given)) or found[-1]
    )
    models = []
    for hooked in (False, True):
        model = nn.Sequential(
            Network3(), nn.Unflatten(1, (4, 1, 1)), nn.Conv2d(4, 8, 3, padding=1), nn.Flatten()
        )
        model[2].to(memory_format=torch.channels_last)
        models.append(wrapped(model, bucket_cap_mb=0.01, gradient_as_bucket_view=as_view))
        if hooked:
            compression = compress(models[1], "none", rules=rules)
        train(models[-1], range(3))
    assert True in found
    assert compression.stats()["steps"] == 3
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=1e-8)
    same_everywhere(flat(models[1]))


def test_a_nan_in_a_large_dense_bucket_reaches_all_ranks(monkeypatch):
    monkeypatch.setattr(steps, "DENSE_NBYTES", 1)
    ddp = wrapped()
    compress(ddp, "none")
    train(ddp, range(1))
    x = torch.full((2, 48), math.nan if dist.get_rank() else 1.0)
    ddp(x).sum().backward()
    assert ddp.module.first.weight.grad.isnan().all()
    assert ddp.module.last.bias.grad.isfinite().all()


def test_gradients_of_channels_last_weights_keep_their_places():
    grads = []
    for options in (None, {"density": 1.0, "bits": 32}):
        torch.manual_seed(0)
        model = nn.Conv2d(8, 16, 3, bias=False).to(memory_format=torch.channels_last)
        ddp = wrapped(model)
        if options is not None:
            compression = compress(ddp, "topk", rules=[("*", options)])
        x = torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
        ddp(x).square().sum().backward()
        grads.append(model.weight.grad)
    assert "0 of 1 tensors dense" in repr(compression)
    assert grads[1].stride() == grads[0].stride()
    torch.testing.assert_close(grads[1], grads[0])


def uses(step, rank):
    """Tell whether a rank uses the spare layer: all ranks, none, one of them."""
    return (True, False, rank == 1, False)[step % 4]


@pytest.mark.parametrize(
    ("recipe", "options"),
    [("topk", {}), ("fft", {}), ("powersgd", {}), ("scalecom", {"beta": 1.0})],  # without a filter
)
def test_nothing_is_lost_of_parameters_that_no_rank_uses(recipe, options):
    ddp = wrapped(find_unused_parameters=True, bucket_cap_mb=0.01)
    compression = compress(ddp, recipe, **options)
    weights = {name: w for name, w in ddp.module.named_parameters() if "weight" in name}
    own: dict[str, list] = {name: [torch.zeros_like(weight)] for name, weight in weights.items()}
    averages = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for name, weight in weights.items():
        weight.register_hook(lambda grad, name=name: own[name].append(grad.clone()))
    for step in range(8):
        train(ddp, [step], lr=0.0, uses_spare=uses(step, dist.get_rank()))
        for name, weight in weights.items():
            if weight.grad is not None:
                averages[name] += weight.grad
    for name in ("first.weight", "second.weight", "spare.weight"):
        owed = torch.stack(gathered(compression.residual(name))).mean(0)
        assert owed.abs().sum() > 0
        expected = torch.stack(gathered(torch.stack(own[name]).sum(0))).mean(0)
        torch.testing.assert_close(averages[name] + owed, expected, rtol=1e-4, atol=1e-5)


def test_a_parameter_that_no_rank_uses_keeps_its_residual():
    ddp = wrapped(find_unused_parameters=True)
    compression = compress(ddp, "topk", density=0.05)
    train(ddp, range(2))
    before = compression.residual("spare.weight")
    assert before.abs().sum() > 0
    train(ddp, range(2), uses_spare=False)
    assert torch.equal(compression.residual("spare.weight"), before)


def test_nan_on_one_rank_reaches_all_and_changes_no_residual():
    ddp = wrapped()
    compression = compress(ddp, "topk")
    train(ddp, range(2), lr=0.0)
    before = compression.residual("first.weight")
    ddp.zero_grad()
    x = torch.full((2, 48), np.nan if dist.get_rank() == 1 else 1.0)
    if dist.get_rank() < 2:
        with pytest.warns(RuntimeWarning, match="NaN or Inf"):
            ddp(x).sum().backward()
    else:
        ddp(x).sum().backward()
    assert ddp.module.first.weight.grad.isnan().any()
    assert torch.equal(compression.residual("first.weight"), before)
    assert compression.stats()["skipped_steps"] == 1


def test_the_density_changes_on_all_ranks_together():
    ddp = wrapped()
    compression = compress(ddp, "topk", density=0.1)
    train(ddp, range(1))
    compression.set_density(0.01)
    train(ddp, range(1))
    assert compression.stats()["density"] == 0.01
    with pytest.raises(ConfigMismatchError, match="density is"):
        compression.set_density(0.1 * (1 + dist.get_rank()))


def test_the_density_grows_when_the_first_ranks_metric_gets_worse():
    ddp = wrapped()
    compression = compress(ddp, "topk", density=0.01, recover=Recover(factor=4))
    train(ddp, range(1))
    for metric in (2.0, 1.0, 3.0):
        compression.report(metric if dist.get_rank() == 0 else 0.0)
    train(ddp, range(1, 3))
    assert compression.stats()["density"] == 0.04
    same_everywhere(flat(ddp))


def test_a_loss_scale_that_halves_changes_no_step():
    def trained(scale, is_known=True):
        ddp, scaler = wrapped(), torch.amp.GradScaler("cpu", init_scale=scale)
        compress(ddp, "topk", grad_scaler=scaler if is_known else None)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        for step in range(8):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            optimizer.zero_grad()
            loss = ddp(torch.randn(8, 48, generator=generator)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update(scale / 2 if step == 3 and scale > 1 else scaler.get_scale())
        return flat(ddp)

    plain, start = trained(1.0), flat(Network3())
    assert torch.equal(trained(1024.0), plain)
    unknown = trained(1024.0, is_known=False)
    assert (unknown - plain).norm() > 0.02 * (plain - start).norm()


@pytest.mark.parametrize("action", ["warn", "broadcast"])
def test_a_rank_whose_parameter_differs_is_named(action):
    ddp = wrapped()
    compress(ddp, "topk", replica_check=action)
    train(ddp, range(1))
    if dist.get_rank() == 1:
        with torch.no_grad():
            ddp.module.second.weight[3, 4] += 1
    with pytest.warns(RuntimeWarning, match=r"'second\.weight'.*rank 1"):
        train(ddp, range(100), lr=0.0)
    equal = len(set(gathered(flat(ddp).numpy().tobytes()))) == 1
    assert equal == (action == "broadcast")


def test_the_first_rank_writes_gradients_and_statistics(tmp_path):
    folder = Path(gathered(str(tmp_path))[0])
    ddp, own = wrapped(), []
    record, live_view = folder / "gradients", folder / "live.jsonl"
    every = {"record_every": 2, "live_every": 2}
    compression = compress(ddp, "topk", record=record, live_view=live_view, **every)
    ddp.module.first.weight.register_hook(lambda grad: own.append(grad.clone().numpy()))
    train(ddp, range(3))
    if dist.get_rank() == 0:
        compression.recorder.flush()
        for step in (0, 2):
            with np.load(record / f"{step}.npz") as file:
                recorded = dict(file)
            assert set(recorded) == {"first.weight", "second.weight", "spare.weight"}
            np.testing.assert_array_equal(recorded["first.weight"], own[step])
        assert not (record / "1.npz").exists()
        [line] = [json.loads(text) for text in live_view.read_text().splitlines()]
        assert (line["step"], line["steps"]) == (2, 2)
        assert line["ratio"] > 2


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.factor * x


@pytest.mark.parametrize(
    ("recipe", "options"), [("signsgd", {}), ("signum", {}), ("demo", {"sign": True})]
)
def test_signs_arrive_of_norms_biases_and_scalars(recipe, options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Linear(8, 1), Scale())
    ddp = wrapped(model)
    compress(ddp, recipe, **options)
    generator = torch.Generator().manual_seed(0)  # of all ranks: no tie is there
    x, y = torch.randn(32, 20, generator=generator), torch.randn(32, 1, generator=generator)
    (ddp(x) - y).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert set(parameter.grad.unique().tolist()) <= {-1, 0, 1}, name
        if name != "0.bias":  # a norm follows, so its gradient is 0 up to rounding
            assert parameter.grad.any(), name


@pytest.mark.parametrize("recipe", ["dgc", "sketchsgd", "signum", "demo"])
def test_an_optimizers_momentum_beside_a_recipes_is_named_once(recipe):
    ddp = wrapped()
    compress(ddp, recipe)
    torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9).step()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    with pytest.warns(RuntimeWarning, match=rf"'{recipe}' .* SGD has one too \(momentum=0\.9\)"):
        optimizer.step()
    optimizer.step()


@pytest.mark.parametrize(
    ("recipe", "options", "make", "warns"),
    [
        ("fft", {}, torch.optim.AdamW, True),
        ("fft", {"error_feedback": False}, torch.optim.RMSprop, True),
        ("fft", {"warmup_steps": 2}, AdamW, False),
        ("fft", {}, torch.optim.SGD, False),
        ("fft", {}, lambda p, lr: torch.optim.Muon([q for q in p if q.dim() == 2], lr), False),
        ("qsgd", {}, torch.optim.AdamW, False),
        ("qsgd", {"levels": 1}, torch.optim.AdamW, True),
        ("dither", {"ratio": 60}, AdamW, False),
        ("dither", {"ratio": 80}, AdamW, True),
        ("bf16", {}, torch.optim.Adam, False),
    ],
)
def test_second_moments_beside_a_biased_recipe_are_named_once(recipe, options, make, warns):
    ddp = wrapped()
    compress(ddp, recipe, **options)
    optimizer = make(ddp.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
        optimizer.step()
    told = f"{make.__name__} divides by roots of squared gradients"
    assert [told in str(warning.message) for warning in caught] == [True] * warns


@pytest.mark.parametrize(
    "make", [lambda p: torch.optim.SGD(p, lr=0.1), lambda p: AdamW(p, betas=(0.0, 0.99))]
)
def test_first_moments_are_for_this_packages_adam_alone(make):
    ddp = wrapped()
    compress(ddp, "dither", momentum=0.9, dense_every=3, warmup_steps=1)
    optimizer = make(ddp.parameters())
    passes_of(ddp, 0)
    optimizer.step()
    passes_of(ddp, 1)
    with pytest.raises(UnsupportedError, match="first moments"):
        optimizer.step()


def recipe_of(compression):
    rows = (line.split() for line in compression.summary().splitlines()[1:-2])
    [recipe] = {recipe for _, recipe, *_ in rows} - {"dense"}
    return recipe


def test_default_recipe_needs_no_state():
    compression = compress(wrapped())
    assert recipe_of(compression) == "dither"
    assert repr(compression).startswith("Compression.dither")


def compressed(recipe="topk", model=None, gradient_as_bucket_view=False, **options):
    """Return a model under DDP, and its compressor."""
    ddp = wrapped(model, gradient_as_bucket_view=gradient_as_bucket_view)
    return ddp, compress(ddp, recipe, timeout_s=30, **options)


def passes_of(ddp, seed, scale=1.0):
    """Run this rank's forward and backward pass of a seed."""
    torch.manual_seed(100 * seed + dist.get_rank())
    (scale * ddp(torch.randn(8, 48)).square().sum()).backward()


@pytest.mark.parametrize(
    ("recipe", "options"),
    [("topk", {"density": 0.05}), ("fft", {}), ("scalecom", {"density": 0.1}), ("powersgd", {}),
     ("efsignsgd", {}), ("dgc", {}), ("topk", {"exchange": "sharded"})],
)  # fmt: skip
def test_a_discarded_pass_leaves_no_trace(recipe, options):
    plain, plain_compression = compressed(recipe, **options)
    ddp, compression = compressed(recipe, **options)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.0) for each in (plain, ddp)]
    for step in range(4):
        passes_of(ddp, 50 + step)
        ddp.zero_grad()
        compression.discard()
        for each, optimizer in zip((plain, ddp), optimizers, strict=True):
            each.zero_grad()
            passes_of(each, step)
            optimizer.step()
        for one, other in zip(plain.parameters(), ddp.parameters(), strict=True):
            if dist.get_world_size() == 2:
                assert torch.equal(one.grad, other.grad)
            else:  # DDP sums its first buckets, others than the later ones, in another order
                torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=1e-8)
    for tensor in compression.tensors():
        with contextlib.suppress(ValueError):  # sent dense
            expected = plain_compression.residual(tensor.name)
            assert torch.equal(compression.residual(tensor.name), expected)
    counted = ("steps", "sent_nbytes", "dense_nbytes", "ratio", "collectives")
    stats = [each.stats() for each in (plain_compression, compression)]
    assert [stats[0][key] for key in counted] == [stats[1][key] for key in counted]


def test_a_step_by_a_closure_uses_its_averages():
    ddp, compression = compressed(density=0.05)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    optimizer.step(lambda: passes_of(ddp, 0))
    with pytest.raises(ValueError, match="an optimizer has taken a step"):
        compression.discard()


def test_a_discriminator_learns_from_its_own_loss_alone():
    """Sums of what it got and of what is held back are those of the gradients that were meant."""
    torch.manual_seed(1)
    generator, _ = compressed(model=nn.Linear(8, 48), density=0.05)
    critic, compression = compressed(density=0.05)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.0)
    meant, got = torch.zeros(48, 48), torch.zeros(48, 48)
    for step in range(5):
        made = generator(torch.randn(8, 8, generator=torch.Generator().manual_seed(step)))
        critic(made).square().sum().backward()  # the generator's loss, through the critic
        generator.zero_grad()
        critic.zero_grad()
        compression.discard()
        copied = copy.deepcopy(critic.module)
        copied(made.detach()).abs().sum().backward()
        meant += torch.stack(gathered(copied.first.weight.grad)).mean(0)
        critic(made.detach()).abs().sum().backward()
        got += critic.module.first.weight.grad
        optimizer.step()
        optimizer.zero_grad()
    held = torch.stack(gathered(compression.residual("first.weight"))).mean(0)
    assert (got + held - meant).norm() <= 1e-5 * meant.norm()


def warned_of_zeroed(loop):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop()
    return [str(w.message) for w in caught if "zeroed before an optimizer used" in str(w.message)]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("as_view", [True, False])
def test_averages_that_are_thrown_away_are_told_once(set_to_none, as_view):
    ddp, _ = compressed(density=0.05, gradient_as_bucket_view=as_view)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)

    def loop():
        for step in range(6):
            passes_of(ddp, 50 + step)
            ddp.zero_grad(set_to_none)
            passes_of(ddp, step)
            optimizer.step()
            optimizer.zero_grad(set_to_none)

    [told] = warned_of_zeroed(loop)
    assert re.search(r"of '(first|second|last|spare)\.(weight|bias)' for one", told)
    assert "discard()" in told


def test_a_zero_average_does_not_end_the_looks():
    ddp, _ = compressed("hard_threshold", nn.Linear(48, 48, bias=False), threshold=1e6)

    def loop():
        for step in range(12):
            passes_of(ddp, step)
            ddp.zero_grad()
        for step in range(4):  # some values are above the threshold
            passes_of(ddp, step, 3e5)
            ddp.zero_grad()

    assert len(warned_of_zeroed(loop)) == 1


def by_hand(ddp):
    """Step as optimizers do that no version counts."""
    for parameter in ddp.parameters():
        parameter.data.add_(parameter.grad, alpha=-0.01)


@pytest.mark.parametrize(
    "kind", ["no_sync", "discard", "plain", "by hand", "scaler", "twice, then a step", "nothing"]
)
def test_averages_that_are_used_are_not_told(kind):
    if kind == "nothing":  # is sent, so averages are zeros
        ddp, compression = compressed(
            "hard_threshold", nn.Linear(48, 48, bias=False), threshold=1e6
        )
    else:
        ddp, compression = compressed(density=0.05)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-30)

    def loop():
        for step in range(6):
            if kind == "no_sync":
                with ddp.no_sync():
                    passes_of(ddp, 50 + step)
            elif kind == "discard":
                passes_of(ddp, 50 + step)
                ddp.zero_grad()
                compression.discard()
            elif kind in ("twice, then a step", "nothing"):
                passes_of(ddp, 50 + step)
            passes_of(ddp, step, math.inf if kind == "scaler" and step % 2 else 1.0)
            if kind == "by hand":
                by_hand(ddp)
            elif not (kind == "scaler" and step % 2):
                optimizer.step()
            ddp.zero_grad()

    assert warned_of_zeroed(loop) == []


def saved_and_loaded(ddp):
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, saved_and_loaded, torch.optim.swa_utils.AveragedModel]
)
def test_a_copy_of_the_model_has_no_compressor_and_says_so_once_if_it_is_trained(copied):
    ddp, compression = compressed(density=0.05)
    passes_of(ddp, 0)
    made = copied(ddp)
    with torch.no_grad():
        made(torch.randn(8, 48))
    made.eval()(torch.randn(8, 48))
    assert torch.equal(flat(made), flat(ddp))
    made.train()
    with pytest.warns(RuntimeWarning, match="copies have no compressor"):
        passes_of(made, 1)
    passes_of(made, 2)
    plain = wrapped()
    passes_of(plain, 1)
    passes_of(plain, 2)
    for one, other in zip(plain.parameters(), made.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    passes_of(ddp, 3)  # accumulates, compressed
    assert compression.stats()["steps"] == 2


def test_a_copy_can_be_compressed_again():
    ddp, _ = compressed(density=0.05)
    made = copy.deepcopy(ddp)
    compression = compress(made, "topk", density=0.05, timeout_s=30)
    passes_of(made, 0)
    assert compression.stats()["steps"] == 1


def test_join_is_refused():
    ddp = wrapped()
    compress(ddp, "topk")
    with pytest.raises(UnsupportedError, match="batches"), ddp.join():
        train(ddp, range(1))


def test_sparse_gradients_are_refused():
    ddp = wrapped(nn.Embedding(50, 32, sparse=True))
    compress(ddp, "topk")
    with pytest.raises(UnsupportedError, match="sparse=False"):
        ddp(torch.tensor([1, 2])).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_averages_have_the_type_of_the_gradients(dtype):
    torch.manual_seed(0)
    ddp = wrapped(nn.Linear(64, 64, dtype=dtype))
    compress(ddp, "topk", density=1.0, bits=32)
    ddp(torch.full((2, 64), 1.0 + dist.get_rank(), dtype=dtype)).sum().backward()
    size = dist.get_world_size()
    expected = torch.full((64, 64), (size + 1.0), dtype=dtype)
    torch.testing.assert_close(ddp.module.weight.grad, expected)
    same_everywhere(ddp.module.weight.grad.double(), ddp.module.bias.grad.double())


class Slopes(nn.Module):
    """Weights whose gradients are given to ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrix, self.bias = nn.Parameter(torch.randn(60, 100)), nn.Parameter(torch.randn(60))

    def forward(self, slopes):
        return sum((w * s).sum() for w, s in zip(self.parameters(), slopes, strict=True))


def sharpness_aware(ddp, optimizer, step):
    """Take a step of SAM, whose perturbation is that of each rank's own gradients."""
    weights = list(ddp.parameters())
    with ddp.no_sync():
        passes_of(ddp, step)
    before = [weight.detach().clone() for weight in weights]
    with torch.no_grad():
        for weight in weights:
            weight.add_(0.01 * weight.grad.sign())
    optimizer.zero_grad()
    passes_of(ddp, step)
    for weight, old in zip(weights, before, strict=True):
        weight.data.copy_(old)
    optimizer.step()
    optimizer.zero_grad()


def accumulated(ddp, optimizer, n_steps):
    for step in range(n_steps):
        with ddp.no_sync():
            passes_of(ddp, step)
        passes_of(ddp, step)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.filterwarnings("error")
def test_weights_may_differ_while_a_pass_is_perturbed():
    ddp, compression = compressed("topk", nn.Linear(48, 4), density=0.05)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(20):
        sharpness_aware(ddp, optimizer, step)
    assert compression.stats()["steps"] == 20
    with torch.no_grad():
        ddp.module.bias[0] += dist.get_rank()
    with pytest.warns(RuntimeWarning, match=r"(?s)'bias' on rank.*replica_check=.off. ends"):
        accumulated(ddp, optimizer, 110)


@pytest.mark.parametrize("recipe", ["topk", "none"])
def test_a_check_is_not_left_out_because_an_optimizer_or_a_forward_pass_changes_weights(recipe):
    """As for a discriminator through which the generator's pass goes, and an encoder of means."""
    model = nn.Linear(48, 4)
    model.mean = nn.Parameter(torch.zeros(48), requires_grad=False)
    model.register_forward_hook(lambda *given: [model.mean.mul_(0.9)].clear())
    ddp, _ = compressed(recipe, model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    with torch.no_grad():
        model.bias[0] += dist.get_rank()

    def rounds():
        for step in range(110):
            passes_of(ddp, step)
            with ddp.no_sync():
                ddp(torch.randn(8, 48))
            optimizer.step()
            optimizer.zero_grad()

    with pytest.warns(RuntimeWarning, match="'bias' on rank"):
        rounds()


def test_a_layer_that_two_models_have_is_exchanged_by_one():
    inner = nn.Linear(48, 48)
    ddp, _ = compressed("topk", inner, density=0.05)
    inner.requires_grad_(False)
    outer, _ = compressed("topk", nn.Sequential(nn.Linear(48, 48), inner), density=0.05)
    inner.requires_grad_(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        passes_of(ddp, 0)
        passes_of(outer, 1)


def test_a_layer_that_is_unfrozen_after_ddp_was_made_is_told_at_its_first_step():
    model = Network3()
    model.last.requires_grad_(False)
    ddp, _ = compressed("topk", model, density=0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    passes_of(ddp, 0)
    optimizer.step()
    model.last.requires_grad_(True)
    with pytest.warns(RuntimeWarning, match="parameters alone") as caught:
        passes_of(ddp, 1)
    passes_of(ddp, 2)  # a second warning would be an error
    [text] = {str(warning.message) for warning in caught}
    assert "'last.weight', 'last.bias'" in text
    assert "when DistributedDataParallel was made; without compression DDP would" in text


class LocalTraining:
    """Model that each rank trains alone for 3 steps, with gradients of its own."""

    def __init__(self, outer, recipe="topk", **settings):
        self.ddp = wrapped(Slopes())
        self.compression = compress(self.ddp, recipe, **settings)
        self.local = LocalSteps(self.ddp, self.compression, 3, outer)
        self.optimizer = torch.optim.Adam(self.ddp.parameters(), lr=0.1)
        self.own = self.weights()  # before the exchange

    def weights(self):
        return [weight.detach().clone() for weight in self.ddp.parameters()]

    def train(self, steps):
        """Train; ``steps``: a range of numbers."""
        for step in steps:
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            self.optimizer.zero_grad()
            self.ddp([torch.randn(w.shape, generator=generator) for w in self.own]).backward()
            self.optimizer.step()
            self.own = self.weights()
            if self.local.after_step():
                same_everywhere(flat(self.ddp))

    def exchange(self, times):
        for _ in range(times):
            self.local.synchronize()

    def parts(self):
        """Return what a checkpoint has to hold."""
        return self.ddp, self.optimizer, self.compression, self.local


ADD = functools.partial(torch.optim.SGD, lr=1.0)
NESTEROV = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


@pytest.mark.parametrize("recipe", ["topk", "powersgd", "none"])
@pytest.mark.parametrize(("outer", "lr", "momentum"), [(ADD, 1.0, 0.0), (NESTEROV, 0.7, 0.9)])
def test_local_steps_are_those_of_a_loop_over_averaged_changes(outer, lr, momentum, recipe):
    """In the loop DDP averages the changes, as gradients of a second model."""
    training, averager = LocalTraining(outer, recipe), wrapped(Slopes())
    averaging = compress(averager, recipe)
    last, velocity = training.weights(), [0.0, 0.0]
    for period in range(4):
        training.train(range(3 * period, 3 * period + 3))
        averager.zero_grad()
        averager([old - own for old, own in zip(last, training.own, strict=True)]).backward()
        exact = dist.get_world_size() == 2 and not momentum
        for number, (averaged, weight) in enumerate(
            zip(averager.parameters(), training.weights(), strict=True)
        ):
            velocity[number] = momentum * velocity[number] + averaged.grad
            step = lr * (averaged.grad + momentum * velocity[number])
            tolerance = 0.0 if exact else 1e-5
            torch.testing.assert_close(weight, last[number] - step, rtol=0, atol=tolerance)
        last = training.weights()
        if recipe != "none":
            residuals = [each.residual("matrix") for each in (training.compression, averaging)]
            assert torch.equal(*residuals)
            assert residuals[0].any()
        averaging.note_used()


@pytest.mark.parametrize("n", [4, 6])  # in a period; between two
def test_local_steps_continue_exactly_from_a_checkpoint(n):
    whole, begun, resumed = (LocalTraining(NESTEROV) for _ in range(3))
    whole.train(range(11))
    begun.train(range(n))
    file = io.BytesIO()
    torch.save([part.state_dict() for part in begun.parts()], file)
    file.seek(0)
    for part, saved in zip(resumed.parts(), torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(saved)
    resumed.train(range(n, 11))
    assert torch.equal(flat(resumed.ddp), flat(whole.ddp))


def test_decay_of_changes_is_no_second_momentum():
    """A recipe with decay as in SparseLoCo, beside the ranks' own optimizer with momentum."""
    ddp = wrapped()
    local = LocalSteps(ddp, compress(ddp, "topk", decay=0.9), 2)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    for step in range(4):  # a warning would be an error here
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        ddp(torch.randn(4, 48, generator=generator)).square().mean().backward()
        optimizer.step()
        local.after_step()
    same_everywhere(flat(ddp))


@told_of_nan
def test_a_change_with_nan_leaves_weights_and_outer_momentum_as_they_were():
    training = LocalTraining(NESTEROV)
    training.train(range(3))
    before = flat(training.ddp), training.local.outer.state[training.local.last[0]]
    momentum = before[1]["momentum_buffer"].clone()
    if dist.get_rank() == 1:
        training.ddp.module.bias.data[7] = float("nan")
    training.local.synchronize()
    assert torch.equal(flat(training.ddp), before[0])
    assert torch.equal(before[1]["momentum_buffer"], momentum)
    training.train(range(3, 6))


def collected(training):
    """Let nothing be left of a training, but for the reference of the caller; return None."""
    training.__dict__.clear()
    gc.collect()


def take(optimizer, n_steps):
    for _ in range(n_steps):
        optimizer.step()


def test_local_steps_that_are_not_told_of_or_end_in_a_period_say_so():
    gc.collect()  # those of other tests
    training = LocalTraining(ADD)
    with pytest.warns(RuntimeWarning, match="taken 20 steps"):
        take(training.optimizer, 25)
    training.train(range(4))
    with pytest.warns(RuntimeWarning, match="within a period, 1 after"):
        training = collected(training)
    training = LocalTraining(ADD)
    training.train(range(4))
    training.local.state_dict()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training = collected(training)
    assert not caught


def test_weights_that_the_replica_check_replaces_stay_replaced():
    training = LocalTraining(ADD, replica_check="broadcast")
    training.train(range(3))
    if dist.get_rank() == 1:
        for bias in (training.local.last[1], training.ddp.module.bias.data):
            bias[3] += 1.0
    with pytest.warns(RuntimeWarning, match="replaced by the first rank's"):
        training.exchange(100)
    same_everywhere(flat(training.ddp))
    training.train(range(3, 6))


def test_what_local_steps_cannot_do_is_refused():
    ddp = wrapped()
    compression = compress(ddp, "topk")
    for given in ((ddp.module, compression), (ddp, None)):
        with pytest.raises(TypeError, match="DistributedDataParallel"):
            LocalSteps(*given, 3)
    static = wrapped(static_graph=True)
    with pytest.raises(UnsupportedError, match="static_graph"):
        LocalSteps(static, compress(static, "topk"), 3)
    with pytest.raises(TypeError, match="outer must make the optimizer"):
        LocalSteps(ddp, compression, 3, outer=ADD(ddp.parameters()))
    with pytest.raises(ValueError, match="other parameters"):
        LocalSteps(wrapped(Slopes()), compression, 3)
    with pytest.raises(UnsupportedError, match="differences of weights"):
        LocalSteps(ddp, compress(wrapped(), "signsgd"), 3)
    with pytest.raises(UnsupportedError, match=r"Leave momentum out.* or dgc with momentum=0\.0"):
        LocalSteps(ddp, compress(wrapped(), "dgc"), 3)
    LocalSteps(wrapped(), compress(wrapped(), "dgc", momentum=0.0), 3)
    trained = wrapped()
    exchanging = compress(trained, "topk")
    train(trained, range(1))
    with pytest.raises(ValueError, match="has residuals of gradients"):
        LocalSteps(trained, exchanging, 3)
    local = LocalSteps(ddp, compression, 3)
    with pytest.raises(ValueError, match="other parameters"):
        local.load_state_dict(LocalTraining(ADD).local.state_dict())
    ddp.require_backward_grad_sync = True
    with pytest.raises(UnsupportedError, match=r"leave model\.require_backward_grad_sync"):
        train(ddp, range(1))


def test_local_steps_show_themselves_and_their_ratio():
    training = LocalTraining(ADD)
    assert math.isnan(training.local.ratio)
    assert repr(training.local).startswith("LocalSteps(period=3): 0 steps since the last exchange")
    training.train(range(4))
    assert training.local.steps == 1
    ratio = 3 * training.compression.stats()["ratio"]
    assert training.local.ratio == ratio
    told = (
        f"LocalSteps(period=3): {ratio:.1f} times fewer bytes, 1 steps since the last exchange, by "
    )
    assert repr(training.local) == told + repr(training.compression)
    training.exchange(100)


@pytest.mark.parametrize("how", ["compressed", "hook", "built in"])
def test_a_second_hook_is_refused_with_the_mend(how):
    ddp = wrapped()
    if how == "compressed":
        compression = compress(ddp, "topk")
    elif how == "hook":
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    else:
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    with pytest.raises(
        UnsupportedError, match=r"call compress\(\) once .* compress\(DDP\(model\)\)"
    ):
        compress(ddp, "topk")
    train(ddp, range(2))
    if how == "compressed":
        assert compression.stats()["steps"] == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile itself
def test_a_compiled_model_is_refused_with_the_mend():
    with pytest.raises(TypeError, match=r"compress the model inside first: compress\(ddp"):
        compress(torch.compile(wrapped()), "topk")


def test_a_model_without_ddp_is_refused():
    with pytest.raises(TypeError, match=r"compress\(DDP\(model\)\)"):
        compress(Network3(), "topk")
    with pytest.raises(TypeError, match="process_set"):
        compress(wrapped(), "topk", process_set=None)
    with pytest.raises(ValueError, match="unknown recipe"):
        compress(wrapped(), "topq")


def test_threads_end_with_the_model():
    before = threading.enumerate()
    ddp = wrapped()
    train_it = compress(ddp, "topk")
    train(ddp, range(1))
    names = ("fftcomp-network", "fftcomp-steps")
    started = [thread for thread in threading.enumerate() if thread not in before]
    started = [thread for thread in started if thread.name in names]
    assert len(started) == 2
    del ddp, train_it
    limit = time.monotonic() + 60.0
    while any(thread.is_alive() for thread in started):  # a thread holds its task until it is back
        assert time.monotonic() < limit
        gc.collect()
        time.sleep(0.05)


def adam_steps(ddp, optimizer, steps, scaler=None, bad_step=-1):
    """Train by an optimizer of this package; one rank's gradient of ``bad_step`` is Inf."""
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        for micro_step in range(2):  # accumulated, exchanged once
            x = torch.randn(16, 48, generator=generator)
            with contextlib.nullcontext() if micro_step else ddp.no_sync():
                loss = nn.functional.cross_entropy(ddp(x), x[:, :4].argmax(1))
                if step == bad_step and dist.get_rank() == 1:
                    loss = loss * math.inf
                (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()


SHARED = dict(density=0.1, warmup_steps=2, dense_every=3, dense_by="qsgd")


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_adamw_of_compressed_gradients_resumes_exactly(momentum):
    states, ends = [], []
    for parts in ([range(12)], [range(5), range(5, 12)]):
        for part in parts:
            ddp = wrapped()
            compression = compress(ddp, "topk", momentum=momentum, **SHARED)
            optimizer = AdamW(ddp.parameters(), 0.01, max_norm=0.5)
            if part.start:
                for each, state in zip((ddp, optimizer, compression), states, strict=True):
                    each.load_state_dict(state)
            adam_steps(ddp, optimizer, part)
            states = [copy.deepcopy(e.state_dict()) for e in (ddp, optimizer, compression)]
        assert optimizer.state[ddp.module.first.weight]["refreshed"] == 11
        assert optimizer.state[ddp.module.first.bias]["refreshed"] == 12
        ends.append(flat(ddp))
        same_everywhere(flat(ddp))
    # On three ranks the order of dense sums depends on DDP's buckets, which a first step lays out.
    assert dist.get_world_size() > 2 or torch.equal(*ends)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_loss_scalers_bad_step_changes_no_moment(momentum):
    ddp = wrapped()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    compress(ddp, "topk", grad_scaler=scaler, momentum=momentum, **SHARED)
    optimizer = AdamW(ddp.parameters(), 0.01, max_norm=0.5)
    weight = ddp.module.first.weight
    adam_steps(ddp, optimizer, range(4), scaler)
    before = copy.deepcopy([flat(ddp), optimizer.state_dict()["state"]])
    adam_steps(ddp, optimizer, range(4, 5), scaler, bad_step=4)  # would be a dense step
    after = flat(ddp), optimizer.state_dict()["state"]
    assert torch.equal(before[0], after[0])
    assert all(torch.equal(before[1][0][k], after[1][0][k]) for k in ("exp_avg", "exp_avg_sq"))
    adam_steps(ddp, optimizer, range(5, 9), scaler)
    assert optimizer.state[weight]["step"] == 8
    assert torch.isfinite(flat(ddp)).all()
    same_everywhere(flat(ddp), optimizer.state[weight]["exp_avg_sq"])
