"""Which process groups carry a GPU's messages, and what ends a wait for them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("torch.distributed")

from horovod_fftcomp.schemes import Round
from horovod_fftcomp.torch_distributed import streams

GPU = torch.device("cuda", 0)


def group_of(name, **methods):
    """Return a process group with a backend of this name."""
    backend = SimpleNamespace(name=lambda: name, **methods)
    return SimpleNamespace(_get_backend=lambda place: backend)


@pytest.mark.parametrize(
    ("name", "place", "switch", "is_used"),
    [
        ("nccl", GPU, None, True),
        ("nccl", GPU, "1", True),
        ("nccl", GPU, "0", False),
        ("NCCL", GPU, None, True),
        ("gloo", GPU, None, False),
        ("mpi", GPU, None, False),
        ("nccl", torch.device("cpu"), None, False),
    ],
)
def test_groups_for_which_streams_wait_carry_messages_of_a_gpu(
    monkeypatch, name, place, switch, is_used
):
    monkeypatch.delenv("HOROVOD_FFTCOMP_NCCL", raising=False)
    if switch is not None:
        monkeypatch.setenv("HOROVOD_FFTCOMP_NCCL", switch)
    group = group_of(name)
    assert streams.streams_wait(group, place) is is_used


def test_an_abort_ends_waits_of_the_host_and_of_the_gpu(monkeypatch):
    aborted = []
    group = group_of("nccl", abort=lambda: aborted.append("group"))
    thread = SimpleNamespace(abort=lambda: aborted.append("thread"))
    monkeypatch.setattr(streams.dist, "get_process_group_ranks", lambda given: [0, 1])
    streams.StreamNetwork(thread, group, GPU).abort()
    assert aborted == ["thread", "group"]


def test_the_gpus_wait_is_told_to_the_watch(monkeypatch):
    monkeypatch.setattr(streams.dist, "get_process_group_ranks", lambda given: [0, 1])
    network = streams.StreamNetwork(None, group_of("nccl"), GPU)
    assert not network.is_under_way()
    work = SimpleNamespace(is_completed=lambda: False)
    monkeypatch.setattr(streams, "started_on", lambda on, data, *given: ([work], None, data))
    round_ = Round("allreduce", torch.zeros(3))
    network.send(round_, "a", SimpleNamespace(ranks=[0, 1]))
    assert network.is_under_way()
    work.is_completed = lambda: True
    assert not network.is_under_way()


def test_two_groups_are_never_at_work_at_a_time(monkeypatch):
    calls, made = [], []

    class Work:
        def __init__(self, number):
            self.number = number

        def wait(self):
            calls.append(("wait", self.number))

    def launch(on, data, *given):
        calls.append(("launch", len(calls)))
        return [Work(len(calls) - 1)], lambda: data, data

    monkeypatch.setattr(streams.dist, "get_process_group_ranks", lambda given: [0, 1, 2, 3])
    monkeypatch.setattr(streams.dist, "get_backend", lambda given: "nccl")
    monkeypatch.setattr(streams.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(
        streams.dist, "new_group", lambda ranks, **options: made.append(ranks) or tuple(ranks)
    )
    monkeypatch.setattr(streams, "started_on", launch)
    network = streams.StreamNetwork(None, group_of("nccl"), GPU)
    network.make_groups([(0, 1), (2, 3)])
    assert made == [[0, 1], [2, 3]]  # on all ranks, as NCCL needs it
    everyone, node = SimpleNamespace(ranks=[0, 1, 2, 3]), SimpleNamespace(ranks=[0, 1])
    round_ = Round("allreduce", torch.zeros(3))
    for group in (everyone, everyone, node, node, everyone):
        network.send(round_, "a", group)
    assert calls == [
        ("launch", 0),
        ("launch", 1),
        ("wait", 1),
        ("launch", 3),
        ("launch", 4),
        ("wait", 4),
        ("launch", 6),
    ]
