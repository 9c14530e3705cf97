"""Choice of the device that computes a model's steps: its GPU or the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from horovod_fftcomp.engine.buckets import Bucket
from horovod_fftcomp.engine.device_selftest import trusted
from horovod_fftcomp.kernels.cuda.torch_device import TorchDevice


def device_of(parameters: Sequence[torch.Tensor], buckets: Sequence[Bucket]) -> TorchDevice | None:
    """Return the GPU that holds all parameters, or None if the CPU computes; see ``trusted``."""
    places = {parameter.device for parameter in parameters}
    if len(places) != 1 or (place := places.pop()).type != "cuda":
        return None
    return trusted(lambda: TorchDevice(place), place, buckets)
