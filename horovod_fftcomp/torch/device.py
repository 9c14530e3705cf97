"""Whether the kernels of ``backends.gpu`` compute the steps of a model on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from horovod_fftcomp.backends.gpu.torch_device import TorchDevice
from horovod_fftcomp.buckets import Bucket
from horovod_fftcomp.probe import trusted


def device_of(parameters: Sequence[torch.Tensor], buckets: Sequence[Bucket]) -> TorchDevice | None:
    """Return the GPU that holds all parameters, if it can compute a bucket; see ``trusted``."""
    places = {parameter.device for parameter in parameters}
    if len(places) != 1 or (place := places.pop()).type != "cuda":
        return None
    return trusted(lambda: TorchDevice(place), place, buckets)
