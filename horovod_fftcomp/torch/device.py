"""Whether the kernels of ``backends.gpu`` compute the steps of a model on a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from horovod_fftcomp.backends.gpu import Device
from horovod_fftcomp.backends.gpu.probe import probe
from horovod_fftcomp.backends.gpu.torch_device import TorchDevice


def device_of(parameters: Sequence[torch.Tensor]) -> Device | None:
    """Return the GPU that holds all parameters, if its kernels run; None with a warning if not.

    Without it gradients on a GPU are compressed on the host: the same sums, but slower.
    """
    places = {parameter.device for parameter in parameters}
    if len(places) != 1 or (place := places.pop()).type != "cuda" or torch.version.hip:
        return None
    device = TorchDevice(place)
    try:
        probe(device)
    except Exception as error:  # whatever an import, a compiler or a driver may raise
        warnings.warn(
            f"gradients on {place} are compressed on the host, since the GPU's own kernels do not "
            f"run: {error}. They need CuPy for its CUDA: pip install 'horovod_fftcomp[gpu]'",
            RuntimeWarning,
            stacklevel=5,
        )
        return None
    return device
