"""The adapter for ``horovod.torch``: pass ``Compression.fft(model)`` as ``compression=``."""

from horovod_fftcomp.torch import elastic
from horovod_fftcomp.torch.compression import Compression

__all__ = ["Compression"]

elastic.register()
