"""``Compression``: what a user of ``horovod.tensorflow`` passes as ``compression=``."""

from __future__ import annotations

from horovod_fftcomp.adapter.factories import Factories
from horovod_fftcomp.tensorflow.compressor import TensorFlowCompressor


class Compression(metaclass=Factories):
    """One factory for each recipe: ``Compression.fft(model, density=0.15)`` and so on.

    Each takes the model (or variables, or (name, variable) pairs; without, what is exchanged
    first), and by keyword the recipe's options and the settings; ``help(Compression.fft)``
    describes them.
    """

    _make = TensorFlowCompressor
