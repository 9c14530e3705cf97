"""Adapter for ``torch.distributed``: ``compress(model)`` compresses gradients under DDP and FSDP2.

>>> from horovod_fftcomp.torch_distributed import compress  # under torchrun
>>> model = DistributedDataParallel(model)  # doctest: +SKIP
>>> compression = compress(model, "topk", density=0.01)  # doctest: +SKIP
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from horovod_fftcomp.adapter.factories import configured, with_options
from horovod_fftcomp.adapter.torch_tensors.optimizers import Adam, AdamW
from horovod_fftcomp.adapter.torch_tensors.simulated_ranks import SimulatedLearners
from horovod_fftcomp.engine.recipe_text import parse_recipe
from horovod_fftcomp.errors import UnsupportedError
from horovod_fftcomp.torch_distributed.compressor import DDPCompressor, DistributedCompressor
from horovod_fftcomp.torch_distributed.local_steps import LocalSteps

__all__ = [
    "Adam",
    "AdamW",
    "DDPCompressor",
    "DistributedCompressor",
    "LocalSteps",
    "SimulatedLearners",
    "compress",
]


@with_options
def compress(
    model: torch.nn.Module,
    recipe: str = "dither",
    *,
    replicate: Any = None,
    **options: Any,
) -> DistributedCompressor:
    """Compress the gradients of ``model``; call it on every rank.

    ``model``: a ``DistributedDataParallel`` that has had no backward pass, or a model under
    ``fully_shard`` with ``replicate``: the 1-d device mesh, or the process group, of the ranks that
    hold the same shards. ``recipe``: a recipe's name, also with options: "fft:density=0.1".
    ``options``: those of the recipe, and the settings of ``horovod_fftcomp.torch`` except
    ``process_set``; they win over those in ``recipe``. ``help(compress)`` describes them. They must
    be equal on all ranks, else the first backward pass raises ConfigMismatchError on all of them;
    under ``fully_shard`` on those that hold the same shards. Registers a communication hook, of
    which a model has one at most.
    """
    choice = parse_recipe(recipe)
    policy, settings = configured(choice.name, {**choice.options, **options}, ["process_set"])
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    if any(isinstance(module, FullyShardedDataParallel) for module in modules):
        raise UnsupportedError(
            "FSDP1 takes no hook between replicas; use FSDP2, fully_shard(model, "
            "mesh=mesh['shard']), and compress(model, recipe, replicate=mesh['replicate'])"
        )
    if replicate is not None and modules:
        from horovod_fftcomp.torch_distributed.hsdp import HSDPCompressor  # needs PyTorch 2.6

        return HSDPCompressor(model, replicate, policy=policy, settings=settings)
    if isinstance(getattr(model, "_orig_mod", None), DistributedDataParallel):
        raise TypeError(
            "model is compiled; compress the model inside first: compress(ddp, ...), then "
            "torch.compile(ddp)"
        )
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            "model must be a torch.nn.parallel.DistributedDataParallel, got a "
            f"{type(model).__name__}; wrap the model first: compress(DDP(model)). Under "
            "fully_shard(model, mesh=mesh['shard']) give replicate=mesh['replicate']"
        )
    compressor = DDPCompressor(model, policy=policy, settings=settings)
    try:
        model.register_comm_hook(*compressor.hook_pair())
    except RuntimeError as error:
        raise UnsupportedError(
            "the model cannot have a communication hook, of which DDP takes one, or has one: call "
            "compress() once and register_comm_hook() not at all, or wrap the model anew: "
            "compress(DDP(model))"
        ) from error
    return compressor
