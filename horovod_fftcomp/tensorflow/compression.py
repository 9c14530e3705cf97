"""``Compression``, whose factories make the argument ``compression=`` of Horovod."""

from __future__ import annotations

from horovod_fftcomp.adapter.factories import Factories
from horovod_fftcomp.tensorflow.compressor import TensorFlowCompressor


class Compression(metaclass=Factories):
    """Factory functions of compressors, one per recipe: ``Compression.fft(model, density=0.15)``.

    Each takes the model (or variables, or (name, variable) pairs; without it, the variables of the
    first exchange are used), and the recipe's options and the settings as keyword arguments, which
    ``help(Compression.fft)`` describes.
    """

    _make = TensorFlowCompressor
