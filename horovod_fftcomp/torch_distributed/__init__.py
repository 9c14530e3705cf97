"""Adapter for ``torch.distributed``: ``compress(model)`` compresses the gradients of a DDP model.

>>> from horovod_fftcomp.torch_distributed import compress  # under torchrun
>>> model = DistributedDataParallel(model)  # doctest: +SKIP
>>> compression = compress(model, "topk", density=0.01)  # doctest: +SKIP
"""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from horovod_fftcomp.adapter.factories import configured
from horovod_fftcomp.engine.recipe_text import parse_recipe
from horovod_fftcomp.torch_distributed.compressor import DDPCompressor
from horovod_fftcomp.torch_distributed.local_steps import LocalSteps

__all__ = ["DDPCompressor", "LocalSteps", "compress"]


def compress(model: DistributedDataParallel, recipe: str = "fft", **options: Any) -> DDPCompressor:
    """Compress the gradients of ``model`` from its next step on; call it on every rank.

    ``model``: a ``DistributedDataParallel`` that has had no backward pass. ``recipe``: a recipe's
    name, also with options: "fft:density=0.1". ``options``: those of the recipe, and the settings
    of ``horovod_fftcomp.torch`` except ``process_set``; they win over those in ``recipe``. They
    must be equal on all ranks, else the first backward pass raises ConfigMismatchError on all of
    them. Registers a communication hook; a model has one at most.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            "model must be a torch.nn.parallel.DistributedDataParallel, got a "
            f"{type(model).__name__}; wrap the model first: compress(DDP(model))"
        )
    choice = parse_recipe(recipe)
    options = {**choice.options, **options}
    policy, settings = configured(choice.name, options, without=["process_set"])
    compressor = DDPCompressor(model, policy=policy, settings=settings)
    model.register_comm_hook(*compressor.hook_pair())
    return compressor
