"""``Compression``, whose factories make the argument ``compression=`` of ``horovod.torch``."""

from __future__ import annotations

from horovod_fftcomp.adapter.factories import Factories
from horovod_fftcomp.torch.compressor import TorchCompressor


class Compression(metaclass=Factories):
    """Factory functions of compressors, one per recipe: ``Compression.fft(model, density=0.15)``.

    Each takes the model (or its ``named_parameters()``, or a list of parameters), and the recipe's
    options and the settings as keyword arguments, which ``help(Compression.fft)`` describes.
    """

    _make = TorchCompressor
