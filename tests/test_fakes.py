"""The Horovod within one process does what Horovod does, or fails where Horovod would hang."""

from __future__ import annotations

import threading
import warnings

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("horovod")
pytestmark = pytest.mark.torch

import horovod.torch as hvd  # noqa: E402
import torch  # noqa: E402

from horovod_fftcomp import ConfigMismatchError, UnsupportedError  # noqa: E402
from horovod_fftcomp.schemes import allgather  # noqa: E402
from horovod_fftcomp.torch import Compression  # noqa: E402
from tests import fakes, rank_threads  # noqa: E402
from tests.parallel.models import distributed, make_model, small_buckets, train  # noqa: E402


def mine(*values):
    return torch.tensor(values, dtype=torch.float32) + hvd.rank()


def test_operations_are_matched_by_name_and_scaled_as_horovod_does():
    def work(rank):
        order = ("a", "b") if rank else ("b", "a")
        handles = {name: hvd.allreduce_async(mine(1.0) * len(name), name=name) for name in order}
        assert hvd.synchronize(handles["a"]).item() == 2.0  # the mean of 1, 2, 3
        assert hvd.synchronize(handles["b"]).item() == 2.0
        in_place = mine(1.0)
        factors = {"prescale_factor": 2.0, "postscale_factor": 0.5}
        hvd.synchronize(hvd.allreduce_async_(in_place, name="c", op=hvd.Sum, **factors))
        assert in_place.item() == 6.0
        summed = hvd.grouped_allreduce([mine(0.0), mine(1.0, 2.0)], name="d", op=hvd.Sum)
        assert [tensor.tolist() for tensor in summed] == [[3.0], [6.0, 9.0]]
        assert hvd.allreduce(torch.tensor([rank]), op=hvd.Sum, name="e").tolist() == [3]
        assert hvd.allreduce(mine(0.0), op=hvd.Max, name="f").item() == 2.0

    fakes.run(3, work)


def test_gathers_broadcasts_and_alltoalls():
    def work(rank):
        gathered = hvd.allgather(torch.full((rank, 2), rank), name="rows")
        assert gathered.tolist() == [[1, 1], [2, 2], [2, 2]]
        assert hvd.broadcast(mine(5.0), root_rank=2, name="b").item() == 7.0
        assert hvd.broadcast_object({"rank": rank}, 1) == {"rank": 1}
        assert hvd.allgather_object(rank) == [0, 1, 2]
        sent = torch.arange(3) + 10 * rank
        assert hvd.alltoall(sent, name="all").tolist() == [rank, 10 + rank, 20 + rank]
        received, counts = hvd.alltoall(torch.full((3,), rank), splits=[0, 1, 2], name="some")
        assert received.tolist() == [0] * rank + [1] * rank + [2] * rank
        assert counts.tolist() == [rank] * 3
        model = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(model.weight, rank)
        hvd.broadcast_parameters(model.state_dict(), root_rank=1)
        assert model.weight.unique().tolist() == [1.0]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank), momentum=0.9)
        hvd.broadcast_optimizer_state(optimizer, root_rank=2)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.3)

    fakes.run(3, work)


def test_process_sets_have_names_and_members_of_their_own():
    def work(rank):
        pair, rest = hvd.add_process_set([0, 2]), hvd.add_process_set([1])
        own = rest if rank == 1 else pair
        assert (own.size(), own.rank()) == ((1, 0) if rank == 1 else (2, rank // 2))
        total = hvd.allreduce(mine(1.0), name="x", op=hvd.Sum, process_set=own)
        assert total.item() == (2.0 if rank == 1 else 4.0)
        root = hvd.broadcast(mine(0.0), root_rank=own.ranks[-1], name="y", process_set=own)
        assert root.item() == (1.0 if rank == 1 else 2.0)
        other = pair if rank == 1 else rest
        with pytest.raises(fakes.HorovodInternalError, match="not in process set"):
            hvd.allreduce(mine(1.0), name="z", process_set=other)
        with pytest.raises(ValueError, match="duplicate"):
            hvd.add_process_set([0, 2])

    fakes.run(3, work)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (lambda rank: torch.zeros(2 + rank), "tensor shapes"),
        (lambda rank: torch.zeros(2, dtype=(torch.float32, torch.float64)[rank]), "data types"),
    ],
    ids=["shapes", "dtypes"],
)
def test_what_differs_between_ranks_fails_on_all_of_them(own, message):
    failed = []

    def work(rank):
        with pytest.raises(fakes.HorovodInternalError, match=f"Mismatched allreduce {message}"):
            hvd.allreduce(own(rank), name="x")
        failed.append(rank)

    fakes.run(2, work)
    assert sorted(failed) == [0, 1]


def test_a_name_that_is_under_way_is_refused():
    def work(rank):
        handle = hvd.allreduce_async(mine(1.0), name="x")
        if rank == 0:
            with pytest.raises(fakes.HorovodInternalError, match="same name as another tensor"):
                hvd.allreduce_async(mine(1.0), name="x")
        hvd.synchronize(handle)

    fakes.run(2, work)


@pytest.mark.parametrize("polls", [False, True])
def test_an_operation_that_a_rank_never_begins_fails_and_is_named(polls):
    def work(rank):
        handle = hvd.allreduce_async(mine(1.0), name="both" if rank == 2 else "some")
        while polls and not hvd.poll(handle):
            pass
        hvd.synchronize(handle)

    with pytest.raises(fakes.WouldHangError) as caught:
        fakes.run(3, work, patience_s=0.2)
    word = "looks" if polls else "waits"
    for part in (f"rank 1 {word} for allreduce 'some'", f"rank 2 {word} for allreduce 'both'"):
        assert part in str(caught.value)


def test_a_rank_that_has_ended_is_not_waited_for():
    def work(rank):
        if rank == 0:
            hvd.allgather(mine(1.0), name="x")

    with pytest.raises(fakes.WouldHangError, match="rank 1 has ended"):
        fakes.run(2, work)


def test_an_assertion_of_one_rank_is_told_with_it_and_frees_the_others():
    freed = []

    def work(rank):
        hvd.barrier()
        try:
            if rank == 1:
                assert hvd.rank() == 7, "wrong"
            hvd.barrier()
        finally:
            freed.append(rank)

    with pytest.raises(AssertionError, match="wrong") as caught:
        fakes.run(3, work)
    assert caught.value.__notes__ == ["raised on rank 1 of 3"]
    assert sorted(freed) == [0, 1, 2]
    assert any(entry.name == "work" for entry in caught.traceback)


def test_a_rank_that_has_joined_sums_zeros_and_gathers_nothing():
    def work(rank):
        if rank == 1:
            assert hvd.join() == 0
            return
        assert hvd.allreduce(mine(4.0), name="x").item() == 2.0
        with pytest.raises(fakes.HorovodInternalError, match="not supported with Join"):
            hvd.allgather(mine(4.0), name="y")
        assert hvd.join() == 0

    fakes.run(2, work)


def test_after_a_shutdown_all_operations_fail():
    def work(rank):
        if rank == 1:
            hvd.shutdown()
            return
        with pytest.raises(fakes.HorovodInternalError, match="has been shut down"):
            hvd.allreduce(mine(1.0), name="x")

    fakes.run(2, work)


def test_what_a_process_has_once_each_rank_has_for_itself():
    before, filters = torch.get_rng_state(), warnings.filters

    def work(rank):
        torch.manual_seed(0)
        hvd.barrier()
        drawn = torch.randn(3)
        assert len(set(hvd.allgather_object(str(drawn)))) == 1
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            hvd.barrier()
            warnings.warn(f"of rank {rank}", stacklevel=1)
            hvd.barrier()
        assert [str(warning.message) for warning in caught] == [f"of rank {rank}"]
        names = [small_buckets(make_model(), "topk").connection.name for _ in range(2)]
        assert names == ["fftcomp.0", "fftcomp.1"]

    fakes.run(3, work)
    assert torch.equal(before, torch.get_rng_state())
    assert warnings.filters is filters


def test_what_one_rank_patches_is_seen_by_it_and_its_threads_alone():
    plain = allgather.gather

    def work(rank):
        patch = pytest.MonkeyPatch()
        patch.setattr(allgather, "gather", lambda: rank)
        if rank == 1:
            patch.setattr(rank_threads, "_PATIENCE_S", 7.0)
        hvd.barrier()
        found = []
        thread = threading.Thread(target=lambda: found.append((allgather.gather(), hvd.rank())))
        thread.start()
        thread.join()
        assert found == [(rank, rank)]
        assert rank_threads._PATIENCE_S == (7.0 if rank == 1 else 30.0)
        patch.undo()
        hvd.barrier()
        assert rank_threads._PATIENCE_S == 30.0

    with pytest.raises(TypeError, match="missing"):
        fakes.run(2, lambda rank: allgather.gather())
    fakes.run(2, work)
    assert allgather.gather is plain


def test_hooks_run_in_the_thread_that_calls_backward():
    def work(rank):
        threads, weight = [], torch.nn.Parameter(torch.ones(3))
        weight.register_post_accumulate_grad_hook(
            lambda _: threads.append(threading.current_thread())
        )
        weight.sum().backward()
        assert threads == [threading.current_thread()]

    fakes.run(2, work)


def test_ranks_take_turns_in_the_same_order_each_time():
    def turns():
        order = []

        def work(rank):
            for step in range(3):
                order.append(rank)
                hvd.allreduce(mine(1.0), name=f"{step}")

        fakes.run(3, work)
        return order

    assert turns() == turns()


# Under a launcher the next two end their processes: test_parallel.py.


def test_a_rank_that_joins_ends_the_others_with_a_message():
    def work(rank):
        model = make_model()
        optimizer = distributed(model, small_buckets(model, "topk"))
        if rank == 1:
            train(model, optimizer, 2)
            hvd.join()
            return
        with pytest.raises(UnsupportedError, match=r"a rank has called hvd\.join\(\), after which"):
            train(model, optimizer, 3)
        hvd.shutdown()

    with pytest.raises(fakes.HorovodInternalError, match="shut down"):
        fakes.run(2, work)


def test_a_rank_that_never_compresses_ends_the_wait_with_a_message():
    def work(rank):
        model = make_model()
        optimizer = distributed(model, Compression.topk(model, timeout_s=2))
        if rank == 0:
            message = r"handshake.1' got no answer from all ranks in 2 s: a rank has died, runs"
            with pytest.raises(ConfigMismatchError, match=message):
                train(model, optimizer, 1)

    fakes.run(2, work)


def test_a_dense_training_is_that_of_the_mean_gradient():
    found = []

    def work(rank):
        weight = torch.nn.Parameter(torch.zeros(4))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0), named_parameters=[("weight", weight)]
        )
        (weight * torch.arange(4.0) * (1 + rank)).sum().backward()
        optimizer.step()
        found.append(weight.detach().numpy())

    fakes.run(3, work)
    for weight in found:
        np.testing.assert_array_equal(weight, -2.0 * np.arange(4))


def test_the_summary_has_a_row_for_each_tensor():
    found = []

    def work(rank):
        model = make_model()
        rules = [("layers.1.*", {"recipe": "fp16"})]
        compression = Compression.parse("topk:density=0.1", model, rules=rules)
        before = compression.summary()
        train(model, distributed(model, compression), 2)
        error, ratio = compression.stats()["relative_error"], compression.residual_ratios()
        found.append((before, compression.summary(), error, ratio["layers.0.weight"]))

    fakes.run(2, work)
    before, after, error, residual = found[0]
    rows = [line.split() for line in after.splitlines()]
    assert rows[0] == "tensor recipe exchange density bytes ratio error residual".split()
    shown = {row[0]: row[1:] for row in rows[1:-2]}
    assert list(shown) == [name for name, _ in make_model().named_parameters()]
    *how, nbytes, ratio, own_error, own_residual = shown["layers.0.weight"]
    assert (*how, own_residual) == ("topk", "allgather", "0.1", f"{residual:.3g}")
    assert float(ratio) == pytest.approx(6400 / int(nbytes), abs=0.05)
    assert 6400 / int(nbytes) > 20
    assert 0.3 * error < float(own_error) < 2 * error
    assert shown["layers.0.bias"] == ["dense", "allreduce", "-", "160", "1.0", "-", "-"]
    assert shown["layers.1.weight"][:5] == ["fp16", "allreduce", "-", "3,200", "2.0"]
    assert before.splitlines()[1].split() == [
        "layers.0.weight",
        "topk",
        "allgather",
        "0.1",
        nbytes,
        ratio,
        "-",
        "-",
    ]
    assert len({len(line) for line in after.splitlines()}) == 1


def test_the_summary_tells_of_the_warm_up_until_it_is_over():
    found = []

    def work(rank):
        model = make_model()
        compression = Compression.topk(model, density=0.1, warmup_steps=2)
        optimizer, lines = distributed(model, compression), []
        for _ in range(4):
            train(model, optimizer, 1)
            lines.append(compression.summary().splitlines()[-1])
        found.append(lines)

    fakes.run(2, work)
    told = "warm-up: the first 2 steps are dense (warmup_steps=2)"
    assert [line == told for line in found[0]] == [True, True, False, False]


def test_the_ratio_is_that_of_the_steps_after_the_warm_up():
    """In it that of its last step."""
    found = []

    def work(rank):
        model = make_model()
        compression = Compression.topk(model, density=0.1, warmup_steps=3)
        optimizer, own = distributed(model, compression), []
        for _ in range(7):
            train(model, optimizer, 1)
            stats = compression.stats()
            own.append([stats[f"{n}_nbytes"] for n in ("dense", "sent")])
            own[-1] += [stats["ratio"], stats["ratio_with_warmup"]]
        found.append(own)

    fakes.run(2, work)
    for step, (dense, sent, ratio, of_all) in enumerate(found[0], 1):
        assert of_all == dense / sent
        if step <= 3:
            assert 0.9 < ratio <= 1
        else:
            assert of_all < ratio
            dense_3, sent_3, *_ = found[0][2]
            assert ratio == (dense - dense_3) / (sent - sent_3) > 3


def test_the_summary_ends_with_what_is_compressed_and_all():
    found = []

    def work(rank):
        model = make_model()
        compression = Compression.auto(model, ratio=10)
        train(model, distributed(model, compression), 1)
        found.append((compression.summary().splitlines(), compression.stats()["ratio"]))

    fakes.run(2, work)
    lines, whole = found[0]
    rows = [line.split() for line in lines[1:-2]]
    assert [line[:23].rstrip() for line in lines[-2:]] == ["of what is compressed", "in all"]
    what, of_all = (line.split() for line in lines[-2:])
    sent = {row[0]: int(row[-4].replace(",", "")) for row in rows if row[1] == "auto"}
    numels = {name: parameter.numel() for name, parameter in make_model().named_parameters()}
    assert 0 < len(sent) < len(rows)
    assert int(what[-4].replace(",", "")) == sum(sent.values())
    assert float(what[-3]) == pytest.approx(
        4 * sum(map(numels.get, sent)) / sum(sent.values()), 0.01
    )
    assert float(of_all[-3]) == pytest.approx(whole, 0.01)
    assert float(of_all[-3]) < float(what[-3])


def test_one_rank_is_told_that_nothing_was_sent():
    found = {}
    for n in (1, 2):
        fakes.run(n, lambda rank, n=n: found.update({n: Compression.topk(make_model()).summary()}))
    told = "nothing was sent: there is one rank"
    assert [told in found[n] for n in (1, 2)] == [True, False]


def in_summary(compression):
    """Return the rows of the summary, and the sum of their bytes."""
    rows = [line.split() for line in compression.summary().splitlines()[1:-2]]
    return rows, sum(int(row[-4].replace(",", "")) for row in rows)


@pytest.mark.parametrize("options", [{"scope": "bucket"}, {"exchange": "sharded"}, {}])
def test_the_summary_has_the_bytes_of_the_statistics(options):
    rows_of, found = [], []

    def work(rank):
        model = make_model()
        compression = Compression.topk(model, density=0.1, **options)
        train(model, distributed(model, compression), 1)
        rows, sent = in_summary(compression)
        rows_of.append(rows)
        found.append((sent, compression.stats()["sent_nbytes"], rows[0][-2:]))

    fakes.run(2, work)
    sent, whole, errors = zip(*found, strict=True)
    assert abs(sum(sent) - sum(whole)) <= 64 * len(found)  # rounding, padding
    if "exchange" in options:
        assert {row[2] for row in rows_of[0] if row[1] == "topk"} == {"sharded"}
    if "scope" in options:
        assert errors[0] == ["-", "-"]


@pytest.mark.parametrize("option", [{"second_density": 0.3}, {"second_bits": 8}])
@pytest.mark.parametrize("exchange", ["auto", "gather", "sharded"])
def test_options_of_a_second_round_that_there_is_not_are_told(option, exchange):
    found = []

    def work(rank):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Compression.topk(make_model(), exchange=exchange, **option)
        found.append([str(warning.message) for warning in caught])

    fakes.run(2, work)
    [name] = option
    told = [text for text in found[0] if text.startswith(f"{name} has no effect, since no")]
    assert len(told) == (exchange != "sharded")


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"dense_every": 20}])
@pytest.mark.parametrize("exchange", ["gather", "sharded"])
def test_the_ratio_of_auto_is_that_of_its_present_choices(exchange, options):
    found = []

    def work(rank):
        model = make_model()
        compression = Compression.auto(model, ratio=20, every=50, exchange=exchange, **options)
        optimizer = distributed(model, compression)
        train(model, optimizer, 8)  # after the trials, which send errors too
        before = compression.stats()["sent_nbytes"]
        train(model, optimizer, 1)
        stats, (_, sent) = compression.stats(), in_summary(compression)
        numel = sum(parameter.numel() for parameter in model.parameters())
        found.append((stats["ratio"], 4 * numel / sent, stats["sent_nbytes"] - before, sent))

    fakes.run(2, work)
    ratios, expected, grown, sent = zip(*found, strict=True)
    assert ratios == expected
    assert min(ratios) > 5
    assert abs(sum(grown) - sum(sent)) <= 64 * len(found)  # rounding, padding
