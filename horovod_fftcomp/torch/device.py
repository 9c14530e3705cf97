"""Whether the kernels of ``backends.gpu`` compute the steps of a model on a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from horovod_fftcomp.backends.gpu.torch_device import TorchDevice
from horovod_fftcomp.buckets import Bucket
from horovod_fftcomp.schemes.dense import Dense
from horovod_fftcomp.schemes.probe import probe


def device_of(parameters: Sequence[torch.Tensor], buckets: Sequence[Bucket]) -> TorchDevice | None:
    """Return the GPU that holds all parameters, if it can compute a bucket and its kernels run.

    Otherwise gradients on a GPU are compressed on the host: by the same rules, but slower. A
    warning tells if that is because of the kernels.
    """
    schemes = []
    for bucket in buckets:
        scheme = bucket.policy.at(bucket.policy.warmup_steps)
        if not isinstance(scheme, Dense) and scheme.runs_on_device(bucket.tensors):
            schemes.append(scheme)
    places = {parameter.device for parameter in parameters}
    if not schemes or len(places) != 1 or (place := places.pop()).type != "cuda":
        return None
    device = TorchDevice(place)
    try:
        probe(device, dict.fromkeys(schemes))
    except Exception as error:  # whatever an import, a compiler or a driver may raise
        warnings.warn(
            f"gradients on {place} are compressed on the host, since the GPU's own kernels do not "
            f"run: {error!r}. They need CuPy for its CUDA: pip install 'horovod_fftcomp[gpu]'",
            RuntimeWarning,
            stacklevel=5,
        )
        return None
    return device
