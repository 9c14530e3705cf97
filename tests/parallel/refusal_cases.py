"""What is refused, by name and with the mend: ranks that differ, and uses that cannot work."""

from __future__ import annotations

import copy
import pickle
import re
import time

import horovod.torch as hvd
import pytest
import torch
from torch import nn

from horovod_fftcomp import ConfigMismatchError, Recover, UnsupportedError
from horovod_fftcomp.adapter import handshake
from horovod_fftcomp.torch import Compression
from horovod_fftcomp.wire.version import __version__
from tests.parallel.models import (
    Branches,
    distributed,
    make_model,
)


def mismatch_of(rank_options):
    """Return (the error of a first step, its duration) with options that differ by rank."""
    recipe, options, model = rank_options[hvd.rank() % len(rank_options)]
    compression = getattr(Compression, recipe)(model, timeout_s=200, **options)
    optimizer = distributed(model, compression)
    hvd.barrier()
    begin = time.monotonic()
    with pytest.raises(ConfigMismatchError) as caught:
        nn.functional.cross_entropy(model(*model_input(model)), torch.zeros(4).long()).backward()
    del optimizer
    return str(caught.value), time.monotonic() - begin


def model_input(model):
    x = torch.ones(4, 40)
    return (x, range(6)) if isinstance(model, Branches) else (x,)


def wide(width=40):
    return nn.Sequential(nn.Linear(40, width), nn.Linear(width, 10))


@pytest.mark.transport
@pytest.mark.parametrize(
    ("rank_options", "message"),
    [
        (
            [("fft", {}, 0), ("fft", {"density": 0.1}, 0)],
            "differently: density is 0.33 on rank 0 but 0.1 on rank 1. Start",
        ),
        (
            [("fft", {}, 0), ("dct", {"density": 0.33}, 0)],
            "differently: recipe is fft on rank 0 but dct on rank 1. Start",
        ),
        (
            [("topk", {}, 0), ("powersgd", {}, 0)],
            "differently: recipe is topk on rank 0 but powersgd on rank 1. Start",
        ),
        ([("none", {}, 0), ("topk", {}, 0)], "recipe is none on rank 0 but topk on rank 1"),
        (
            [("topk", {"bits": 8}, 0), ("topk", {}, 0)],
            "differently: bits is 8 on rank 0 but 4 on rank 1. Start",
        ),
        ([("topk", {"min_numel": 1}, 0), ("topk", {}, 0)], "compressed tensors is 7 on rank 0"),
        ([("topk", {"bucket_nbytes": 100}, 0), ("topk", {}, 0)], "buckets is 6 on rank 0"),
        ([("topk", {}, 40), ("topk", {}, 48)], "names, shapes and dtypes of the tensors"),
    ],
)
def test_ranks_that_differ_all_stop_with_the_same_message(rank_options, message, same_everywhere):
    models = [
        (recipe, options, make_model() if width == 0 else wide(width))
        for recipe, options, width in rank_options
    ]
    text, seconds = mismatch_of(models)
    same_everywhere(text)
    assert seconds < 60

    assert re.search(message, text), text


def stop_of(model, compression):
    """Return the message with which a first step ends."""
    optimizer = distributed(model, compression)
    hvd.barrier()
    begin = time.monotonic()
    with pytest.raises(ConfigMismatchError) as caught:
        nn.functional.cross_entropy(
            model(torch.ones(4, 40).to(model.head.weight.dtype), range(6)), torch.zeros(4).long()
        ).backward()
    assert time.monotonic() - begin < 150
    del optimizer
    return str(caught.value)


@pytest.mark.parametrize("what", ["order", "dtype", "version", "schedule", "rules", "scaler"])
def test_ranks_whose_models_or_packages_differ(what, same_everywhere, monkeypatch):
    model, options, odd = make_model(), {}, hvd.rank() == 1
    parameters = list(model.named_parameters())
    if what == "order" and odd:
        parameters = parameters[::-1]
    elif what == "dtype" and odd:
        model = model.double()
        parameters = list(model.named_parameters())
    elif what == "version" and odd:
        monkeypatch.setattr(handshake, "__version__", "9.9.9")
    elif what == "schedule" and odd:
        options = {"density_schedule": {0: 0.01, 10: 0.1}}
    elif what == "rules" and odd:
        options = {"rules": [("layers.0.*", 0.5)]}
    elif what == "scaler" and odd:
        options = {"grad_scaler": torch.amp.GradScaler("cpu")}
    text = stop_of(model, Compression.topk(parameters, timeout_s=200, **options))
    same_everywhere(text)
    named = {
        "version": f"horovod_fftcomp is {__version__} on rank 0 but 9.9.9",
        "schedule": "density_sched",
        "scaler": "grad_scaler is False on rank 0",
        "order": "compress differently: order of the tensors (hash) is",
    }
    assert named.get(what, "(hash)") in text


def test_a_gradient_that_the_compressor_was_not_given():
    model = make_model()
    some = [(n, p) for n, p in model.named_parameters() if not n.startswith("layers.5")]
    optimizer = distributed(model, Compression.fft(some, timeout_s=200))
    with pytest.raises(
        UnsupportedError, match=r"none of the 12 parameters given to this compressor"
    ):
        nn.functional.cross_entropy(model(torch.ones(4, 40), [5]), torch.zeros(4).long()).backward()
    del optimizer


def test_adasum_is_refused():
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression=Compression.topk(model, timeout_s=200),
        op=hvd.Adasum,
    )
    with pytest.raises(UnsupportedError, match=r"Adasum.*op=hvd.Average"):
        nn.functional.cross_entropy(
            model(torch.ones(4, 40), range(6)), torch.zeros(4).long()
        ).backward()
    del optimizer


def test_two_optimizers_of_one_compressor_are_refused():
    generator, critic = nn.Linear(40, 40), nn.Linear(40, 40)
    named = [(f"g.{n}", p) for n, p in generator.named_parameters()]
    named += [(f"c.{n}", p) for n, p in critic.named_parameters()]
    compression = Compression.topk(named, timeout_s=200)
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(m.parameters(), lr=0.1),
            named_parameters=[(n, p) for n, p in named if n.startswith(prefix)],
            compression=compression,
        )
        for m, prefix in ((generator, "g."), (critic, "c."))
    ]
    critic(torch.ones(4, 40)).sum().backward()
    generator(torch.ones(4, 40)).sum().backward()
    optimizers[0].step()
    with pytest.raises(UnsupportedError, match="serves two optimizers"):
        generator(torch.ones(4, 40)).sum().backward()
    optimizers[1].step()


def test_a_gradient_that_comes_twice_in_one_step():
    model = make_model()
    compression = Compression.topk(model, timeout_s=200)
    parameter = model.layers[0].weight
    parameter.grad = torch.ones_like(parameter)
    compression.compress(parameter.grad)
    with pytest.raises(UnsupportedError, match=r"'layers.0.weight' came twice"):
        compression.compress(parameter.grad)


def test_models_without_parameters_and_unknown_recipes():
    with pytest.raises(ValueError, match=r"model has no trainable parameters"):
        Compression.fft(nn.ReLU())
    with pytest.raises(AttributeError, match=r"'ftt' .*did you mean 'fft'"):
        Compression.ftt(make_model())
    with pytest.raises(ValueError, match="density must lie"):
        Compression.fft(make_model(), density=2)
    a, b = nn.Linear(40, 40), nn.Linear(40, 40)
    with pytest.raises(ValueError, match="twice: bias, weight"):
        Compression.fft([*a.named_parameters(), *b.named_parameters()])
    with pytest.raises(TypeError, match="is a dict, not a parameter"):
        Compression.fft(torch.optim.SGD(a.parameters(), lr=1).param_groups)
    with pytest.raises(UnsupportedError, match="complex64"):
        Compression.fft([nn.Parameter(torch.ones(40, 40, dtype=torch.complex64))])
    with pytest.raises(ValueError, match="recipe 'fp16' has no density"):
        Compression.fp16(make_model(), recover=Recover())
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module.*, got a int"):
        Compression.fft(3)
    with pytest.raises(TypeError, match=r"process_set must be a hvd.ProcessSet or None, got 0"):
        Compression.fft(make_model(), process_set=0)
    with pytest.raises(TypeError, match=r"no option warmup_step \(did you mean warmup_steps\?\)"):
        Compression.fft(make_model(), warmup_step=5)
    with pytest.raises(TypeError, match="rules must be a list, got"):
        Compression.fft(make_model(), rules=iter([("*", 0.5)]))
    with pytest.raises(ValueError, match="bits must be"):
        Compression.fft(make_model(), bits=40)
    assert {"fft", "topk"} <= set(dir(Compression))


@pytest.mark.parametrize("given", [Compression, Compression.topk])
def test_a_factory_is_no_compressor(given):
    model = make_model()
    optimizer = distributed(model, given)
    with pytest.raises(UnsupportedError, match=r"give compression=Compression\..*\(model\)"):
        model(torch.ones(4, 40), range(6)).sum().backward()
    del optimizer


@pytest.mark.parametrize("copied", [pickle.dumps, copy.deepcopy])
def test_a_compressor_is_not_pickled(copied):
    with pytest.raises(TypeError, match=r"cannot be pickled .* save its state_dict.*TorchState"):
        copied(Compression.fft(make_model()))


def test_a_compressor_shows_what_is_in_force():
    compression = Compression.fft(make_model(), bits=8, min_numel=1)
    shown = "Compression.fft(density=0.33, bits=8, block=64, error_feedback=True): density 0.33 now"
    assert repr(compression) == f"{shown}, 1 buckets, 7 of 14 tensors dense"
    compression.set_density(0.1)
    assert "fft(density=0.1, bits=8, " in repr(compression)
    scheduled = Compression.topk(make_model(), density_schedule={0: 0.5, 9: 0.1}, warmup_steps=3)
    assert (
        "=Steps(densities=((0, 0.5), (9, 0.1))), warmup_steps=3): density 1 now" in f"{scheduled}"
    )
    assert "Compression.none(): 0 buckets" in repr(Compression.none(make_model()))
