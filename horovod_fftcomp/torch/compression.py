"""``Compression``: what a user of ``horovod.torch`` passes as ``compression=``."""

from __future__ import annotations

from horovod_fftcomp.adapter.factories import Factories
from horovod_fftcomp.torch.compressor import TorchCompressor


class Compression(metaclass=Factories):
    """One factory for each recipe: ``Compression.fft(model, density=0.15)`` and so on.

    Each takes the model (or its ``named_parameters()``, or a list of parameters), and by keyword
    the recipe's options and the settings; ``help(Compression.fft)`` describes them.
    """

    _make = TorchCompressor
